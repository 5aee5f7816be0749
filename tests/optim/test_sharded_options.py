"""Options that the sharded optimizers have in common with the whole ones: groups, clipping, codecs,
warm-up, frozen tensors."""

import numpy as np
import pytest
import torch

from commpress.collectives.transports.loopback import simulate
from commpress.optim import ShardedOneBitAdam, ShardedZeroOneAdam
from optim_twin import SHAPES, Replicas, check_a_bad_gradient_raises, flat, mean, noise, start
from test_sharded_adam import agree, replicas, together

KINDS = {
    "onebit": lambda p, t, **options: ShardedOneBitAdam(
        p, transport=t, **{"exact_steps": 4, "min_numel": 0} | options
    ),
    "zero-one": lambda p, t, **options: ShardedZeroOneAdam(
        p, transport=t, **{"variance_updates": 2, "sync": "every", "min_numel": 0} | options
    ),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_group_and_an_empty_parameter_change_nothing(kind, size):
    shapes = ((0, 5), *SHAPES, (0,))

    def grouped(p, t):
        return KINDS[kind]([{"params": p[:1]}, {"params": []}, {"params": p[1:]}], t)

    group, plain = Replicas(grouped, size, shapes), Replicas(KINDS[kind], size, SHAPES)
    for mine, theirs in zip(group.parameters, plain.parameters, strict=True):
        for p, q in zip(mine[1:-1], theirs, strict=True):
            p.data.copy_(q)
    for step in range(12):
        gradients = noise(size, step)
        group.step([[torch.zeros(0, 5), *mine, torch.zeros(0)] for mine in gradients])
        plain.step(gradients)
    assert torch.equal(
        torch.tensor(flat(group.parameters[0])), torch.tensor(flat(plain.parameters[0]))
    )


def test_exact_steps_clip_as_torch_does():
    group, twin = (
        replicas(exact_steps=100, max_grad_norm=0.5),
        [torch.nn.Parameter(p) for p in start()],
    )
    adam = torch.optim.AdamW(twin, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(5):
        gradients = noise(3, step)
        assert group.step(gradients) == [True] * 3
        for p, g in zip(twin, mean(gradients), strict=True):
            p.grad = g
        torch.nn.utils.clip_grad_norm_(twin, 0.5)
        adam.step()
    np.testing.assert_allclose(flat(group.parameters[0]), flat(twin), rtol=1e-5, atol=1e-6)


def test_compressed_steps_clip_by_one_factor():
    group = replicas(codec="none", max_grad_norm=1.0)
    free = replicas(codec="none")
    for step in range(8):
        gradients = noise(3, step)
        gradients[2] = [10 * g for g in gradients[2]]
        before = together(group, "momentum")
        group.step(gradients)
        free.step(gradients)
    ratio = group.optimizers[0].facts.norm_ratio
    norms = np.mean([np.sum(flat(mine) ** 2) for mine in gradients]) ** 0.5
    pushed, g = (together(group, "momentum") - 0.9 * before) / 0.1, flat(mean(gradients))
    assert pushed @ g / (g @ g) == pytest.approx(1 / (ratio * norms), rel=1e-2)
    assert agree(group)


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_exact_rounds_may_travel_in_fewer_bits(codec):
    group, full = (replicas(2, exact_steps=100, exact_codec=c) for c in (codec, "none"))
    for step in range(30):
        group.step(noise(2, step))
        full.step(noise(2, step))
    assert agree(group)
    assert group.optimizers[0].counters.exact_bytes < 0.6 * full.optimizers[0].counters.exact_bytes
    moved = np.linalg.norm(flat(full.parameters[0]) - flat(start()))
    assert np.linalg.norm(flat(group.parameters[0]) - flat(full.parameters[0])) < 0.1 * moved


def test_the_warm_up_ends_by_itself():
    group = replicas(2, exact_steps="auto")
    for o in group.optimizers:
        o.param_groups[0]["lr"] = 1e-3
    for step in range(90):
        group.step(noise(2, step % 7))
    frozen_at = {o.frozen_at for o in group.optimizers}
    assert len(frozen_at) == 1
    assert frozen_at.pop() in range(64, 90)
    assert group.optimizers[0].counters.compressed_rounds > 0


def test_spiky_tensors_travel_in_eight_bits():
    group = Replicas(KINDS["onebit"], 2, ((64, 64), (64, 64)))
    for step in range(6):
        gradients = noise(2, step, ((64, 64), (64, 64)))
        for mine in gradients:
            mine[1][4:] *= 1e-3
        group.step(gradients)
    states = group.optimizers[0].tensors
    assert [states.choose(name, 4096).spec.split("/")[0] for name in states.flat.names] == [
        "sign",
        "fp8",
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_follows_its_master_weights(kind, dtype):
    group = Replicas(KINDS[kind], 3, dtype=dtype)
    for step in range(20):
        group.step(noise(3, step))
    assert agree(group)
    assert group.parameters[0][0].dtype == dtype
    gap = np.abs(flat(group.parameters[0]) - together(group, "master"))
    assert gap.mean() < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_tensor_moves_as_under_adam(kind):
    """No gradient for 30 steps, then as large as those of the others."""
    group = Replicas(lambda p, t: KINDS[kind](p, t, lr=1e-3), 2)
    for step in range(60):
        gradients = noise(2, step)
        if step < 30:
            for mine in gradients:
                mine[0] = None
        before = [p.detach().clone() for p in group.parameters[0]]
        group.step(gradients)
        moves = [
            float((p - q).abs().max()) for p, q in zip(group.parameters[0], before, strict=True)
        ]
        assert max(moves) < 20e-3, step
    assert bool((group.parameters[0][0] != start()[0]).all())
    assert agree(group)


def test_gradients_far_beyond_a_frozen_variance_wake_the_tensor_on_all_ranks():
    group = Replicas(lambda p, t: KINDS["onebit"](p, t, lr=1e-3, exact_steps=20), 3)
    for step in range(40):
        gradients = noise(3, step)
        if step >= 25:
            gradients[1][0] *= 1e3
        group.step(gradients)
        if step == 24:
            assert [bool(o.tensors.frozen[0]) for o in group.optimizers] == [True] * 3
    assert [bool(o.tensors.frozen[0]) for o in group.optimizers] == [False] * 3
    assert [o.counters.woken_tensors for o in group.optimizers] == [1] * 3
    assert agree(group)


def test_on_request_a_bad_gradient_raises():
    check_a_bad_gradient_raises(replicas(2, on_nonfinite="raise"))


def test_what_waits_is_taken_in_at_the_end():
    group = Replicas(lambda p, t: KINDS["zero-one"](p, t, codec="none", sync=Spans(4), lr=1e-3), 2)
    while group.optimizers[0].windows.held != 2:
        group.step(noise(2, group.optimizers[0].steps_done))
    before = flat(group.parameters[0])
    with torch.no_grad():
        simulate([o.synchronizing() for o in group.optimizers])
    assert group.optimizers[0].windows.held == 0
    assert agree(group)
    moves = np.abs(flat(group.parameters[0]) - before)
    assert 1e-4 < moves.mean() < 4e-3


class Spans:
    def __init__(self, span):
        self.span = span

    def interval(self, step, lr, facts):
        return self.span
