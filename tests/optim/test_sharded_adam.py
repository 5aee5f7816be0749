"""The sharded optimizer against torch's Adam, against its equations and against its memory."""

import numpy as np
import pytest
import torch

from commpress.optim import ShardedOneBitAdam
from optim_twin import SHAPES, Replicas, beside_adam, flat, mean, noise, owed, reload, start

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


def divisors(group):
    """s, as whoever sends divides by it."""
    o = group.optimizers[0]
    return flat([o.tensors.divisor(i) for i in range(len(SHAPES))])


def agree(group):
    return all(
        torch.equal(a, b)
        for mine in group.parameters[1:]
        for a, b in zip(group.parameters[0], mine, strict=True)
    )


def carried_over(group, other, folder):
    """Saved and loaded: what the ranks own together is the same."""
    reload(group, other, folder)
    for name in ("master", "momentum", "variance"):
        np.testing.assert_array_equal(together(other, name), together(group, name))


def test_exact_steps_are_adams():
    group = replicas(exact_steps=100)
    twin = beside_adam(group, 10, lr=LR, betas=(BETA1, BETA2), weight_decay=DECAY)
    np.testing.assert_allclose(flat(group.parameters[0]), flat(twin), rtol=1e-6, atol=1e-7)
    assert agree(group)


def test_with_an_exact_codec_it_is_momentum_under_a_frozen_variance():
    group = replicas(codec="none")
    for step in range(4):
        group.step(steady(3, step))
    x, m, v = (
        flat(group.parameters[0]),
        together(group, "momentum"),
        together(group, "variance") / (1 - BETA2**4),
    )
    for step in range(4, 12):
        gradients = steady(3, step)
        group.step(gradients)
        m = BETA1 * m + (1 - BETA1) * flat(mean(gradients))
        x = (1 - LR * DECAY) * x - LR / (1 - BETA1 ** (step + 1)) * m / (np.sqrt(v) + 1e-8)
    np.testing.assert_allclose(flat(group.parameters[0]), x, rtol=1e-5, atol=1e-6)


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
        assert agree(group)
    left = (1 - BETA1) * total + BETA1 * (together(group, "momentum") - exact)
    np.testing.assert_allclose(left, -owed(group.optimizers) * divisors(group), atol=1e-4)
    assert 0 < np.mean(gaps[-10:]) < 3 * np.mean(gaps[5:15]), "the gap must not grow"


def test_state_is_divided_among_the_ranks():
    shapes = ((256, 256),)
    for size in (2, 4):
        o = replicas(size, shapes).optimizers[0]
        for buffer in (o.master, o.momentum, o.variance):
            assert buffer.numel() == 256 * 256 // size


def test_bytes_are_those_of_one_bit_each_way():
    shapes = ((1 << 16,),)
    group = replicas(4, shapes, exact_steps=8)
    for step in range(10):
        group.step(noise(4, step, shapes))
    assert group.optimizers[0].counters.compressed_bytes == pytest.approx(
        2 * 2 / 8 * 3 / 4 * (1 << 16), rel=0.05
    )
    assert group.optimizers[0].counters.exact_bytes == pytest.approx(
        (8 * 2 * 4 + 2) * 3 / 4 * (1 << 16), rel=0.01
    )


def test_a_bad_gradient_skips_the_step_on_all_ranks():
    group, other = replicas(3), replicas(3)
    for step in range(12):
        if step in (2, 7):
            bad = noise(3, step)
            bad[1][0][3, 7] = float("nan")
            assert group.step(bad) == [False] * 3
        assert group.step(noise(3, step)) == [True] * 3
        other.step(noise(3, step))
    assert torch.equal(group.parameters[0][0], other.parameters[0][0])
    assert torch.equal(group.optimizers[1].momentum, other.optimizers[1].momentum)


def test_low_precision_parameters_have_float32_masters():
    group = replicas(2, dtype=torch.bfloat16)
    for step in range(12):
        group.step(noise(2, step))
    assert agree(group)
    gap = np.abs(flat(group.parameters[0]) - together(group, "master"))
    assert gap.mean() < 0.05


@pytest.mark.parametrize("at", [3, 4, 9])
@pytest.mark.parametrize("size", [3, 2])
def test_resuming(at, size, tmp_path):
    """Bit for bit on as many ranks; on others nothing owed is lost."""
    group, other = replicas(3), replicas(size)
    for step in range(at):
        group.step(noise(3, step))
    carried_over(group, other, tmp_path)
    for step in range(at, at + 5):
        other.step(noise(size, step))
        group.step(noise(3, step))
    assert agree(other)
    if size == 3:
        assert torch.equal(group.parameters[0][0], other.parameters[0][0])
        assert torch.equal(group.optimizers[2].master, other.optimizers[2].master)
