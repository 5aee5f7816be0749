"""1-bit Adam against torch's Adam, against hand calculation and against its own invariants, on
simulated ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.errors import InvalidArgument
from commpress.optim import OneBitAdam, OneBitLamb
from commpress.optim.replicated import ReplicatedOptimizer
from commpress.schedules import Facts, WhenStable
from optim_twin import (
    SHAPES,
    Replicas,
    boundless,
    equal,
    fill,
    flat,
    mean,
    noise,
    start,
    state_of,
    telescoped,
)

BETA1, BETA2, LR = 0.9, 0.99, 1e-2


def replicas(size=3, shapes=SHAPES, *, cls=OneBitAdam, dtype=torch.float32, **options):
    options = {
        "lr": LR,
        "betas": (BETA1, BETA2),
        "exact_steps": 5,
        "min_numel": 0,
        "spiky_codec": None,
    } | options
    return Replicas(lambda p, t: cls(p, transport=t, **options), size, shapes, dtype=dtype)


# ---------------------------------------------------------------- warm-up: Adam


def test_without_bias_correction_it_is_adam_without_it():
    group = replicas(exact_steps=100, bias_correction=False)
    x, m, v = flat(start()), 0.0, 0.0
    for step in range(10):
        gradients = noise(3, step)
        group.step(gradients)
        g = flat(mean(gradients))
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        x = x - LR * m / (np.sqrt(v) + 1e-8)
    np.testing.assert_allclose(flat(group.parameters[0]), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}])
def test_on_one_rank_it_is_adam_in_every_bit_and_never_freezes(options):
    group = replicas(1, **options, weight_decay=0.1)
    twin = [torch.nn.Parameter(p) for p in start()]
    adam = torch.optim.AdamW(twin, lr=LR, betas=(BETA1, BETA2), weight_decay=0.1, fused=True)
    for step in range(12):
        gradients = noise(1, step)
        group.step(gradients)
        for p, g in zip(twin, gradients[0], strict=True):
            p.grad = g.clone()
        if options:
            torch.nn.utils.clip_grad_norm_(twin, 0.5)
        adam.step()
        for a, b in zip(group.parameters[0], twin, strict=True):
            if options:  # the norm is summed in another order
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(a, b)
    assert not group.optimizers[0].frozen


# ---------------------------------------------------------------- after the freeze


@boundless
@pytest.mark.parametrize("correct", [True, False])
def test_with_an_exact_codec_it_is_momentum_under_a_frozen_variance(correct):
    group = replicas(codec="none", weight_decay=0.1, bias_correction=correct, variance_floor=0.0)
    for step in range(5):
        group.step(noise(3, step))
    x, v = flat(group.parameters[0]), flat(group.optimizers[0]._variances)
    v = v / (1 - BETA2**5) if correct else v
    m = group.momentum()
    for step in range(5, 15):
        gradients = noise(3, step)
        group.step(gradients)
        m = BETA1 * m + (1 - BETA1) * flat(mean(gradients))
        rate = LR / (1 - BETA1 ** (step + 1)) if correct else LR
        x = (1 - LR * 0.1) * x - rate * m / (np.sqrt(v) + 1e-8)
        np.testing.assert_allclose(group.momentum(), m, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(flat(group.parameters[0]), x, rtol=1e-5, atol=1e-6)


@boundless
@settings(max_examples=10, deadline=None)
@given(
    size=st.integers(2, 5),
    codec=st.sampled_from(["sign", "sign-l1", "int4", "ternary"]),
    shapes=st.lists(st.tuples(st.integers(32, 400)), min_size=1, max_size=3),
    cls=st.sampled_from([OneBitAdam, OneBitLamb]),
)
def test_the_trajectory_telescopes(size, codec, shapes, cls):
    """d_t = β1·d_{t−1} + R_{t−1} − R_t, so (1 − β1)·Σ d_t + β1·d_T = −R_T, in every coordinate."""
    group = replicas(size, shapes, cls=cls, codec=codec, exact_steps=3, variance_floor=0.0)
    for step in range(3):
        group.step(noise(size, step, shapes))
    *_, total = telescoped(group, range(3, 23), BETA1)
    np.testing.assert_allclose(total, -group.owed(), atol=2e-5)
    assert np.abs(group.owed()).max() > 1e-3, "nothing was compressed"


def test_constant_magnitudes_are_exact():
    """g_i = k_i·p with one sign pattern p: after t steps from zero m = (1 − β1ᵗ)·mean(k)·p, and
    nothing is owed."""
    group = replicas(2, ((512,),), codec="sign")
    for o in group.optimizers:
        o.variance.fill_(1.0)
        o.steps_done = o.frozen_at = 1
        o.tensors.freeze([0], 1)
    pattern = torch.where(start(((512,),))[0] >= 0, 1.0, -1.0)
    for step in range(10):
        group.step([[k * pattern] for k in (1.0, 3.0)])
        expected = (1 - BETA1 ** (step + 1)) * 2.0 * pattern
        torch.testing.assert_close(
            group.optimizers[0].state[group.parameters[0][0]]["exp_avg"], expected
        )
    assert np.abs(group.owed()).max() < 1e-5


# ---------------------------------------------------------------- who travels how


def test_spiky_tensors_travel_finer():
    """An embedding most of whose rows are rarely touched, beside a dense layer."""
    group = replicas(2, ((100, 16), (40, 40)), spiky_codec="int8")
    for step in range(6):
        gradients = noise(2, step, group.shapes)
        for mine in gradients:
            mine[0][torch.arange(100) % 10 != step % 2] *= 1e-3
        group.step(gradients)
    first = group.optimizers[0]
    assert first.tensors.frozen.tolist() == [False, True]
    assert [first.tensors.choose(name, 1600).number for name in first.flat.names[:1]] == ["int8"]
    assert first.tensors.choose("#00001", 1600).spec.startswith("sign")


# ---------------------------------------------------------------- schedule


def test_the_variance_freezes_by_itself_once_it_is_stable():
    group = replicas(2, exact_steps="auto", betas=(BETA1, 0.95))
    for step in range(200):
        scale = max(10.0 - 0.2 * step, 1.0)  # gradients shrink until step 45
        group.step([[scale * g for g in mine] for mine in noise(2, step)])
    assert 64 <= group.optimizers[0].frozen_at < 200
    assert len({o.frozen_at for o in group.optimizers}) == 1


def test_a_rising_learning_rate_is_not_stable():
    rule, facts = WhenStable(), Facts()
    for step in range(128):
        facts.see(step, 1e-3 * (step + 1))
        facts.norms.append((step + 1, 1.0))
    assert not rule.freezes(128, facts)
    facts.see(128, 1e-3)
    facts.norms.append((136, 1.0))
    assert rule.freezes(136, facts)


# ---------------------------------------------------------------- groups and arguments


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "lr is -1"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9, 0.5)}, "betas is .*square of the first"),
        ({"exact_steps": 0}, "exact_steps is 0"),
        ({"codec": "sing"}, "did you mean 'sign'"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite"),
        ({"variance_floor": -1.0}, "variance_floor"),
    ],
)
def test_bad_arguments_are_named(options, match):
    with pytest.raises(InvalidArgument, match=match):
        replicas(2, **options)


def test_bytes_are_those_of_one_bit_each_way():
    shapes = ((1 << 16,),)
    group = replicas(4, shapes, exact_steps=2, check_every=0)
    for step in range(4):
        group.step(noise(4, step, shapes))
    o = group.optimizers[0]
    assert o.channel.inner.operations == ["all_to_all", "all_gather"] * 4
    assert o.counters.exact_bytes == pytest.approx(2 * 8 * 3 / 4 * (1 << 16), rel=0.01)
    assert o.counters.compressed_bytes == pytest.approx(2 * 2 / 8 * 3 / 4 * (1 << 16), rel=0.05)
    assert group.owed().any()


# ---------------------------------------------------------------- gradients as they come


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_float32_weights_behind_them(dtype):
    group, full = replicas(3, dtype=dtype, exact_steps=100), replicas(3, exact_steps=100)
    for p, w in zip(full.parameters, group.optimizers, strict=True):
        fill(p, w.flat.weights)
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
