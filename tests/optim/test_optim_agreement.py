"""Agreement of an optimizer's ranks: skipped steps, one clip factor, missing gradients, replicas,
loss scales."""

import numpy as np
import pytest
import torch

from commpress.errors import Mismatch
from commpress.optim.replicated import ReplicatedOptimizer
from optim_twin import (
    SHAPES,
    boundless,
    check_a_bad_gradient_raises,
    equal,
    flat,
    mean,
    noise,
    state_of,
)
from test_onebit_adam import BETA1, replicas


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("warm", [0, 8])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all_and_changes_nothing(bad, warm):
    group, other = replicas(3), replicas(3)
    for step in range(warm):
        group.step(noise(3, step))
        other.step(noise(3, step))
    before = state_of(group)
    gradients = noise(3, 99)
    gradients[1][0][3, 7] = bad
    assert group.step(gradients) == [False] * 3
    assert equal(state_of(group), before)
    for step in range(warm, warm + 3):
        assert group.step(noise(3, step)) == [True] * 3
        other.step(noise(3, step))
    assert equal(state_of(group), state_of(other)), "the skipped step left a trace"
    assert [o.counters.skipped_steps for o in group.optimizers] == [1] * 3


def test_on_request_a_bad_gradient_raises():
    check_a_bad_gradient_raises(replicas(2, on_nonfinite="raise"))


@boundless
def test_one_clip_factor_for_all_ranks():
    """Ranks whose gradients differ in size share one factor, and the momentum is that of the
    clipped gradients."""
    group, free = (
        replicas(3, codec="none", variance_floor=0.0, **clip)
        for clip in ({"max_grad_norm": 1.0}, {})
    )
    for step in range(10):
        gradients = noise(3, step)
        gradients[2] = [10 * g for g in gradients[2]]
        before = group.momentum()
        group.step(gradients)
        free.step(gradients)
        if step == 4:
            ratio = group.optimizers[0].facts.norm_ratio
    m, g = group.momentum(), flat(mean(gradients))
    pushed = (m - BETA1 * before) / (1 - BETA1)
    factor = pushed @ g / (g @ g)
    np.testing.assert_allclose(pushed, factor * g, atol=1e-5)
    norms = np.mean([np.sum(flat(mine) ** 2) for mine in gradients]) ** 0.5
    assert factor == pytest.approx(1 / (ratio * norms), rel=1e-3)
    assert 0.5 < np.linalg.norm(pushed) < 2.0, (
        "after the freeze the threshold means what it meant before"
    )
    assert group.agree()


def test_missing_gradients_are_zeros_and_stop_nobody():
    group, other = replicas(3), replicas(3)
    for step in range(9):
        gradients = noise(3, step)
        gradients[1][0] = None
        group.step(gradients)
        gradients[1][0] = torch.zeros(SHAPES[0])
        other.step(gradients)
    assert equal(state_of(group), state_of(other))


def test_sparse_gradients_count_as_what_they_hold():
    group, other = replicas(2), replicas(2)
    for step in range(8):
        gradients = noise(2, step)
        other.step(gradients)
        for mine in gradients:
            mine[0] = mine[0].to_sparse()
        group.step(gradients)
    assert equal(state_of(group), state_of(other))


def test_replicas_that_differ_are_named():
    group = replicas(3, check_every=4)
    for step in range(4):
        group.step(noise(3, step))
    with torch.no_grad():
        group.parameters[2][1][0] += 1e-3
    with pytest.raises(Mismatch, match=r"after 4 steps the parameters of ranks \[2\] differ"):
        group.step(noise(3, 4))


def test_a_loss_scale_is_taken_off_before_anything_is_kept():
    group, other = replicas(2), replicas(2)
    for step in range(9):
        gradients = noise(2, step)
        other.step(gradients)
        for rank, o in enumerate(group.optimizers):
            # each rank has a scale of its own
            o.grad_scale = torch.tensor(2.0 ** (8 + step + rank))
        group.step(
            [[g * 2.0 ** (8 + step + rank) for g in mine] for rank, mine in enumerate(gradients)]
        )
    assert equal(state_of(group), state_of(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_float32_weights_behind_them(dtype):
    group, full = replicas(3, dtype=dtype, exact_steps=100), replicas(3, exact_steps=100)
    for p, w in zip(full.parameters, group.optimizers, strict=True):
        for mine, theirs in zip(p, w.flat.weights, strict=True):
            mine.data.copy_(theirs)
    for step in range(9):
        gradients = [[g.to(dtype).float() for g in mine] for mine in noise(3, step)]
        group.step(gradients)
        full.step(gradients)
    for weight, p, low in zip(
        group.optimizers[0].flat.weights, full.parameters[0], group.parameters[0], strict=True
    ):
        assert torch.equal(weight, p)
        assert torch.equal(low, p.to(dtype))
    assert group.optimizers[0].momentum.dtype == torch.float32


def test_a_subclass_that_says_too_little_is_refused_by_name():
    with pytest.raises(TypeError, match="apply, prepare, round"):
        ReplicatedOptimizer([torch.nn.Parameter(torch.zeros(3))], {})
