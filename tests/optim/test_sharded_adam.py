"""The sharded optimizers against torch's Adam, against its equations and against its memory."""

import numpy as np
import pytest
import torch

from commpress.collectives.transports.loopback import simulate
from commpress.optim import ShardedOneBitAdam, ShardedZeroOneAdam
from optim_twin import SHAPES, Replicas, equal, fill, flat, noise, start

BETA1, BETA2, LR, DECAY = 0.9, 0.99, 1e-2, 0.1


def replicas(size=3, shapes=SHAPES, *, dtype=torch.float32, **options):
    options = {
        "lr": LR,
        "betas": (BETA1, BETA2),
        "weight_decay": DECAY,
        "exact_steps": 4,
        "min_numel": 0,
        "variance_floor": 0.0,
    } | options
    return Replicas(
        lambda p, t: ShardedOneBitAdam(p, transport=t, **options), size, shapes, dtype=dtype
    )


def together(group, name):
    """A sharded buffer of all ranks, side by side as the parameters are."""
    whole = [torch.zeros(shape) for shape in group.shapes]
    for o in group.optimizers:
        for part in o.parts:
            part.of_whole(whole[part.parameter]).copy_(part.of(getattr(o, name)))
    return flat(whole)


def steady(size, step, shapes=SHAPES):
    """Gradients of which no element is far below the others: no variance is floored, and nothing is
    cut."""
    return [
        [
            c.sign() * (1 + c.abs()) + 0.3 * g
            for c, g in zip(start(shapes, 1000 + step), mine, strict=True)
        ]
        for mine in noise(size, step, shapes)
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_momentum_telescopes_and_parameters_follow_the_master_weights(size):
    """With the exact momentum m*: d_t = β1·d_{t−1} − (R_t − R_{t−1}), so (1 − β1)·Σ d + β1·d_T =
    −R_T; and x is w but for a gap that the next step sends."""
    group = replicas(size)
    for step in range(4):
        group.step(steady(size, step))
    exact, total = together(group, "momentum"), 0.0
    gaps = []
    for step in range(4, 34):
        gradients = steady(size, step)
        group.step(gradients)
        exact = BETA1 * exact + (1 - BETA1) * np.mean([flat(g) for g in gradients], axis=0)
        total = total + together(group, "momentum") - exact
        gaps.append(np.abs(flat(group.parameters[0]) - together(group, "master")).mean())
        assert group.agree()
    left = (1 - BETA1) * total + BETA1 * (together(group, "momentum") - exact)
    np.testing.assert_allclose(left, -group.owed() * group.divisor(), atol=1e-4)
    assert 0 < np.mean(gaps[-10:]) < 3 * np.mean(gaps[5:15]), "the gap must not grow"


def test_state_is_divided_among_the_ranks():
    shapes = ((256, 256),)
    for size in (2, 4):
        o = replicas(size, shapes).optimizers[0]
        for buffer in (o.master, o.momentum, o.variance):
            assert buffer.numel() == 256 * 256 // size


# ---------------------------------------------------------------- options of both sharded ones

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
        fill(mine[1:-1], theirs)
    for step in range(12):
        gradients = noise(size, step)
        group.step([[torch.zeros(0, 5), *mine, torch.zeros(0)] for mine in gradients])
        plain.step(gradients)
    assert equal(group.parameters[0][1:-1], plain.parameters[0])


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_exact_rounds_may_travel_in_fewer_bits(codec):
    group, full = (replicas(2, exact_steps=100, exact_codec=c) for c in (codec, "none"))
    for step in range(30):
        group.step(noise(2, step))
        full.step(noise(2, step))
    assert group.agree()
    assert group.optimizers[0].counters.exact_bytes < 0.6 * full.optimizers[0].counters.exact_bytes
    moved = np.linalg.norm(flat(full.parameters[0]) - flat(start()))
    assert np.linalg.norm(flat(group.parameters[0]) - flat(full.parameters[0])) < 0.1 * moved


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_follows_its_master_weights(kind, dtype):
    group = Replicas(KINDS[kind], 3, dtype=dtype)
    for step in range(20):
        group.step(noise(3, step))
    assert group.agree()
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
    assert group.agree()


def test_what_waits_is_taken_in_at_the_end():
    group = Replicas(lambda p, t: KINDS["zero-one"](p, t, codec="none", sync=Spans(4), lr=1e-3), 2)
    while group.optimizers[0].windows.held != 2:
        group.step(noise(2, group.optimizers[0].steps_done))
    before = flat(group.parameters[0])
    with torch.no_grad():
        simulate([o.synchronizing() for o in group.optimizers])
    assert group.optimizers[0].windows.held == 0
    assert group.agree()
    moves = np.abs(flat(group.parameters[0]) - before)
    assert 1e-4 < moves.mean() < 4e-3


class Spans:
    def __init__(self, span):
        self.span = span

    def interval(self, step, lr, facts):
        return self.span


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


def test_all_ranks_judge_the_variance_of_all():
    group = replicas(3, exact_steps=100)
    for step in range(3):
        group.step(noise(3, step))
    with torch.no_grad():
        sums = simulate([o.variance_sum() for o in group.optimizers])
    whole = together(group, "variance").sum() / (1 - BETA2**3)
    assert sums == pytest.approx([whole] * 3, rel=1e-5)
