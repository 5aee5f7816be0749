"""DeMo against its published equations in float64, its bytes, and what keeps ranks equal."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gallery import alike, flat, gallery

pytestmark = pytest.mark.slow
SHAPES = [(16, 24), (20,), (9, 5, 2), (13, 7)]
LR, DECAY, TOPK, CHUNK, WEIGHT_DECAY = 0.01, 0.9, 4, 8, 0.1
OPTIONS = {"lr": LR, "decay": DECAY, "topk": TOPK, "chunk": CHUNK, "weight_decay": WEIGHT_DECAY}


def drawn(seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def gradients(rank, step):
    return drawn(1000 * (step + 1) + rank)


def cosine(size):
    n = np.arange(size)
    basis = np.cos(np.pi * (2 * n[None] + 1) * n[:, None] / (2 * size)) * np.sqrt(2 / size)
    basis[0] /= np.sqrt(2)
    return basis


def chunks_of(length):
    """First element and length of each chunk, padding included: as few as can be, of equal
    length."""
    count = -(-length // CHUNK)
    size = -(-length // count)
    return [(i * size, size) for i in range(count)]


class Twin:
    """All ranks in one process, matrix by matrix."""

    def __init__(self, size):
        self.x = [p.double().numpy() for p in drawn(0)]
        self.delta = [[np.zeros(p.shape) for p in self.x] for _ in range(size)]

    def step(self, step):
        for i, x in enumerate(self.x):
            matrix = (x.shape[0], -1) if x.ndim > 1 else (1, -1)
            said = [self.say(r, i, step, matrix) for r in range(len(self.delta))]
            total = np.zeros_like(x.reshape(matrix))
            for place in said[0]:
                values = np.stack([one[place] for one in said])
                sent = np.stack([one[place] != 0 for one in said]).sum(0)
                add(total, place, values.sum(0) / np.maximum(sent, 1))
            self.x[i] = x * (1 - LR * WEIGHT_DECAY) - LR * np.sign(total).reshape(x.shape)

    def say(self, rank, i, step, matrix):
        """Coefficients that a rank sends, chunk by chunk; they leave its momentum."""
        gradient = gradients(rank, step)[i].double().numpy().reshape(matrix)
        delta = DECAY * self.delta[rank][i].reshape(matrix) + LR * gradient
        rows, columns = delta.shape
        said, left = {}, delta.copy()
        for top, tall in chunks_of(rows):
            for first, wide in chunks_of(columns):
                padded = np.zeros((tall, wide))
                part = delta[top : top + tall, first : first + wide]
                padded[: part.shape[0], : part.shape[1]] = part
                c = cosine(tall) @ padded @ cosine(wide).T
                threshold = np.sort(np.abs(c).ravel())[-min(TOPK, c.size)]
                said[top, first] = np.where(np.abs(c) >= threshold, c, 0)
                add(left, (top, first), -said[top, first])
        self.delta[rank][i] = left.reshape(self.x[i].shape)
        return said


def add(matrix, place, coefficients):
    tall, wide = coefficients.shape
    x = cosine(tall).T @ coefficients @ cosine(wide)
    part = matrix[place[0] : place[0] + tall, place[1] : place[1] + wide]
    part += x[: part.shape[0], : part.shape[1]]


def made():
    parameters = [torch.nn.Parameter(p) for p in drawn(0)]
    return parameters, gallery("demo_optimizer").DeMo(parameters, **OPTIONS)


def step(parameters, optimizer, number, bad=None):
    for p, g in zip(parameters, gradients(dist.get_rank(), number), strict=True):
        p.grad = g
    if bad is not None and dist.get_rank() == 1:
        parameters[0].grad[3, 3] = bad
    optimizer.step()


def stepped():
    parameters, optimizer = made()
    found = []
    for number in range(4):
        step(parameters, optimizer, number)
        found.append(
            [
                ([p.detach().clone() for p in parameters], alike(flat_of(parameters))),
                [optimizer.state[p]["delta"].clone() for p in parameters],
            ]
        )
    return found


def refused():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    said = []
    for values in (shards, torch.ones(3, dtype=torch.bfloat16)):
        with pytest.raises(TypeError) as error:
            gallery("demo_optimizer").DeMo([torch.nn.Parameter(values)])
        said.append(str(error.value))
    return said


def test_what_it_cannot_step_is_refused_with_the_cure(pool):
    for shards, narrow in pool.run(refused, size=2):
        assert "is DTensor, torch.float32 on cpu" in shards
        assert "compress_fsdp" in shards
        assert "is Tensor, torch.bfloat16" in narrow


def flat_of(parameters):
    return torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("size", [1, 3])
def test_it_is_what_the_equations_say(pool, size):
    twin, every = Twin(size), pool.run(stepped, size=size)
    for number in range(4):
        twin.step(number)
        for rank, found in enumerate(every):
            (weights, same), momenta = found[number]
            assert same
            for p, x in zip(weights, twin.x, strict=True):
                np.testing.assert_allclose(p.numpy(), x, atol=1e-5)
            for mine, due in zip(momenta, twin.delta[rank], strict=True):
                np.testing.assert_allclose(mine.numpy(), due, atol=1e-6)


def spoilt_and_resumed(bad):
    """Weights of a run with a bad step, of one without, and of one that was resumed."""
    runs = {name: made() for name in ("spoilt", "whole", "resumed")}
    for number in range(2):
        step(*runs["spoilt"], number)
        step(*runs["whole"], number)
    step(*runs["spoilt"], 9, bad)
    (parameters, whole), (others, resumed) = runs["whole"], runs["resumed"]
    for p, other in zip(parameters, others, strict=True):
        other.data.copy_(p)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for number in range(2, 4):
        for run in runs.values():
            step(*run, number)
    return [flat_of(parameters) for parameters, _ in runs.values()], runs["spoilt"][1].skipped


def test_a_rank_that_is_not_finite_makes_all_skip_and_a_resumed_run_goes_on(pool):
    found = pool.run(spoilt_and_resumed, torch.inf, size=2)
    for (spoilt, whole, resumed), skipped in found:
        assert skipped == 1
        assert torch.equal(spoilt, whole)
        assert torch.equal(resumed, whole)


def bits(shape):
    p = torch.nn.Parameter(torch.ones(shape))
    p.grad = torch.randn(shape)
    optimizer = gallery("demo_optimizer").DeMo([p])
    optimizer.step()
    return 8 * optimizer.sent_bytes / p.numel()


def test_a_matrix_takes_six_bytes_for_each_of_32_coefficients_of_4096(pool):
    assert pool.run(bits, (256, 512), size=2) == [0.375] * 2


def trained(demo):
    losses, model, sent = gallery("demo_optimizer").train(300, demo=demo)
    return losses, alike(flat(model)), sent


def test_it_learns_as_adamw_does_with_a_fortieth_of_its_bits(pool):
    exact, sparse = (pool.run(trained, demo, size=2) for demo in (False, True))
    for losses, same, sent in sparse:
        assert same
        assert sent < 32 / 40
        assert losses[-1] < 2 * exact[0][0][-1] + 0.01 * losses[0]
