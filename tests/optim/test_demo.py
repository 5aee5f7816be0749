"""DeMo against its published equations in float64, its bytes, and what keeps ranks equal."""

import copy

import numpy as np
import pytest
import torch

from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.errors import InvalidArgument, Mismatch, NonFiniteGradient, StateMismatch
from commpress.kernels.cosine import ChunkedCosine
from commpress.optim.decoupled_momentum import DeMo
from ranks import nonsense

SHAPES = [(16, 24), (20,), (9, 5, 2), (13, 7)]
LR, DECAY, TOPK, CHUNK, WEIGHT_DECAY = 0.01, 0.9, 4, 8, 0.1


def drawn(seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def gradients_of(size, step):
    return [drawn(1000 * (step + 1) + r) for r in range(size)]


class Ranks:
    def __init__(self, size, *, dtype=torch.float32, **options):
        self.parameters = [[torch.nn.Parameter(p.to(dtype)) for p in drawn(0)] for _ in range(size)]
        self.recorded = [Recorded(transport) for transport in Loopback(size).transports()]
        options = {
            "lr": LR,
            "decay": DECAY,
            "topk": TOPK,
            "chunk": CHUNK,
            "weight_decay": WEIGHT_DECAY,
        } | options
        self.demo = [
            DeMo(p, transport=t, **options)
            for p, t in zip(self.parameters, self.recorded, strict=True)
        ]

    def step(self, gradients):
        for mine, given in zip(self.parameters, gradients, strict=True):
            for p, g in zip(mine, given, strict=True):
                p.grad = g.to(p.dtype)
        return simulate([demo.steps() for demo in self.demo])

    def agree(self):
        return all(
            torch.equal(p, q)
            for mine in self.parameters
            for p, q in zip(mine, self.parameters[0], strict=True)
        )

    def momenta(self, rank):
        return [self.demo[rank].state[p]["delta"] for p in self.parameters[rank]]


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
    def __init__(self, size):
        self.x = [p.double().numpy() for p in drawn(0)]
        self.delta = [[np.zeros(p.shape) for p in self.x] for _ in range(size)]

    def step(self, gradients):
        size = len(self.delta)
        for i, x in enumerate(self.x):
            matrix = (x.shape[0], -1) if x.ndim > 1 else (1, -1)
            said = [
                self.say(r, i, gradients[r][i].double().numpy().reshape(matrix), matrix)
                for r in range(size)
            ]
            total, moved = np.zeros_like(x.reshape(matrix)), None
            for place in said[0]:
                values = np.stack([one[place] for one in said])
                sent = np.stack([one[place] != 0 for one in said]).sum(0)
                mean = values.sum(0) / np.maximum(sent, 1)
                add(total, place, mean)
            moved = np.sign(total).reshape(x.shape)
            self.x[i] = x * (1 - LR * WEIGHT_DECAY) - LR * moved

    def say(self, rank, i, gradient, matrix):
        """Coefficients that a rank sends, chunk by chunk; they leave its momentum."""
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


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_it_is_what_the_equations_say(size):
    ranks, twin = Ranks(size), Twin(size)
    for step in range(4):
        ranks.step(gradients_of(size, step))
        twin.step(gradients_of(size, step))
        assert ranks.agree()
        for p, x in zip(ranks.parameters[0], twin.x, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), x, atol=1e-5)
        for rank in range(size):
            for mine, theirs in zip(ranks.momenta(rank), twin.delta[rank], strict=True):
                np.testing.assert_allclose(mine.numpy(), theirs, atol=1e-6)


@pytest.mark.parametrize(
    "shape", [(1, 1), (64, 64), (65, 130), (50257 // 100, 3), (7,), (3, 2, 5), ()]
)
def test_the_transform_is_orthonormal(shape):
    x, transform = torch.randn(shape, dtype=torch.float64), ChunkedCosine.of(shape, 64)
    coefficients = transform.forward(x)
    assert coefficients.shape[1] <= 64 * 64
    torch.testing.assert_close(coefficients.square().sum(), x.square().sum())
    torch.testing.assert_close(transform.backward(coefficients).reshape(shape), x)


@pytest.mark.parametrize(
    "options", [{"bits": 2}, {"topk": 64}, {"topk": 1}, {"dtype": torch.bfloat16}], ids=str
)
def test_what_is_not_sent_stays_in_the_momentum(options):
    """One rank: β·δ + γ·g is what is left and what was sent together; and 64 ranks stay equal."""
    ranks = Ranks(1, **options)
    before = [delta.double().clone() for delta in ranks.momenta(0)]
    ranks.step(gradients_of(1, 0))
    for old, new, g, p in zip(
        before, ranks.momenta(0), gradients_of(1, 0)[0], ranks.parameters[0], strict=True
    ):
        whole = DECAY * old + LR * g.to(p.dtype).double()
        sent = whole - new.double()
        assert new.double().norm() <= whole.norm() * 1.0001
        assert sent.norm() > 0
    many = Ranks(64 if options == {"bits": 2} else 3, **options)
    for step in range(2):
        many.step(gradients_of(len(many.demo), step))
        assert many.agree()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_rank_that_is_not_finite_skips_the_step_on_all(bad):
    ranks, twin = Ranks(3), Ranks(3)
    for step in range(3):
        gradients = gradients_of(3, step)
        if step == 1:
            gradients[2][0][3, 3] = bad
            assert ranks.step(gradients) == [False] * 3
            continue
        assert ranks.step(gradients) == [True] * 3
        twin.step(gradients)
    assert ranks.agree()
    assert all(
        torch.equal(p, q) for p, q in zip(ranks.parameters[1], twin.parameters[1], strict=True)
    )
    assert [demo.counters.skipped_steps for demo in ranks.demo] == [1] * 3
    alone = Ranks(1, on_nonfinite="raise")
    for p in alone.parameters[0]:
        p.grad = torch.full_like(p, bad)
    with pytest.raises(NonFiniteGradient):
        alone.demo[0].step()


def test_scales_of_grad_scalers_may_differ_and_an_overflow_on_one_rank_skips_the_step_on_all():
    ranks, twin = Ranks(2), Ranks(2)
    for step in range(3):
        gradients = gradients_of(2, step)
        # as GradScaler.step tells its optimizer
        for demo, scale in zip(ranks.demo, (4.0, 1024.0), strict=True):
            demo.grad_scale, demo.found_inf = (
                torch.tensor(scale),
                torch.tensor(float(step == 1 and scale == 4.0)),
            )
        scaled = [
            [scale * g for g in given]
            for scale, given in zip((4.0, 1024.0), gradients, strict=True)
        ]
        assert ranks.step(scaled) == [step != 1] * 2
        if step != 1:
            twin.step(gradients)
    assert all(
        torch.equal(p, q) for p, q in zip(ranks.parameters[1], twin.parameters[0], strict=True)
    )


def test_ranks_that_start_from_different_weights_are_named():
    ranks = Ranks(3)
    with torch.no_grad():
        ranks.parameters[1][0][0, 0] += 1
    with pytest.raises(Mismatch, match=r"ranks \[1\] differ"):
        ranks.step(gradients_of(3, 0))


def test_gradients_that_somebody_averaged_are_warned_of(caplog):
    Ranks(2).step(gradients_of(2, 0))
    assert "somebody averaged them" not in caplog.text
    Ranks(2).step([drawn(1)] * 2)
    assert "somebody averaged them" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_in_every_bit(dtype):
    one, two = Ranks(3, dtype=dtype), Ranks(3, dtype=dtype)
    for step in range(4):
        one.step(gradients_of(3, step))
        if step == 1:
            states = [copy.deepcopy(demo.state_dict()) for demo in one.demo]
            weights = [p.detach().clone() for p in one.parameters[0]]
    for mine, demo, state in zip(two.parameters, two.demo, states, strict=True):
        for p, w in zip(mine, weights, strict=True):
            p.data.copy_(w)
        demo.load_state_dict(state)
    for step in range(2, 4):
        two.step(gradients_of(3, step))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters[0], two.parameters[0], strict=True))
    for rank in range(3):
        assert all(
            torch.equal(a, b) for a, b in zip(one.momenta(rank), two.momenta(rank), strict=True)
        )
    with pytest.raises(StateMismatch, match="rank 1 of 3"):
        two.demo[0].load_state_dict(states[1])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_on_another_number_of_ranks_the_mean_of_the_momenta_goes_on(size):
    ranks = Ranks(3)
    for step in range(3):
        ranks.step(gradients_of(3, step))
    states = copy.deepcopy(simulate([demo.elastic_steps() for demo in ranks.demo]))
    mean = [
        torch.stack(each).mean(0)
        for each in zip(*(ranks.momenta(r) for r in range(3)), strict=True)
    ]
    other = Ranks(size)
    for r, (mine, demo) in enumerate(zip(other.parameters, other.demo, strict=True)):
        for p, w in zip(mine, ranks.parameters[0], strict=True):
            p.data.copy_(w.detach())
        demo.load_state_dict(copy.deepcopy(states[r % 3]))
        for delta, due in zip(other.momenta(r), mean, strict=True):
            torch.testing.assert_close(delta, due)
    other.step(gradients_of(size, 3))
    assert other.agree()
    assert {demo.steps_done for demo in other.demo} == {4}


@pytest.mark.parametrize(("bits", "most"), [(None, 0.34), (2, 0.14)])
def test_bytes_on_the_wire(bits, most):
    """32 float32 of 4096, or 32 values of 2 bits, and places of 9 bits; 96 bits each as
    published."""
    recorded, demos = [Recorded(t) for t in Loopback(3).transports()], []
    for transport in recorded:
        p = torch.nn.Parameter(torch.ones(256, 512))
        p.grad = torch.randn(256, 512)
        demos.append(DeMo([p], bits=bits, transport=transport, check_every=0))
    simulate([demo.steps() for demo in demos])
    for transport, demo in zip(recorded, demos, strict=True):
        assert 0.1 < 8 * transport.sent_bytes / (2 * 256 * 512) < most
        assert demo.counters.compressed_bytes == transport.sent_bytes


@nonsense(
    {"lr": -1.0},
    {"weight_decay": -1.0},
    {"decay": 1.0},
    {"topk": 0},
    {"topk": 65},
    {"chunk": 1},
    {"chunk": 8.0},
    {"bits": 9},
    {"check_every": -1},
    {"on_nonfinite": "propagate"},
)
def test_what_makes_no_sense_is_refused(options, size):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Ranks(size, **options)
