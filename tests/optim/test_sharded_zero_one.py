"""The sharded 0/1 Adam against torch's Adam, against its equations in float64 and against its
invariants."""

import numpy as np
import pytest
import torch

from commpress.optim import ShardedZeroOneAdam, ZeroOneAdam
from optim_twin import SHAPES, Replicas, flat, mean, noise, start
from test_sharded_adam import steady, together
from test_zero_one_adam import Early, Fixed, sends_in_every_fourth_step

BETA1, BETA2, LR, DECAY = 0.9, 0.99, 1e-2, 0.1


def replicas(size=3, shapes=SHAPES, *, dtype=torch.float32, **options):
    options = {
        "lr": LR,
        "betas": (BETA1, BETA2),
        "weight_decay": DECAY,
        "variance_updates": Early(4),
        "sync": Fixed(4),
        "min_numel": 0,
        "variance_floor": 0.0,
    } | options
    return Replicas(
        lambda p, t: ShardedZeroOneAdam(p, transport=t, **options), size, shapes, dtype=dtype
    )


@pytest.mark.parametrize("window", [1, 2, 5])
def test_with_an_exact_codec_a_window_is_what_the_equations_say(window):
    """Every gradient at the parameters of the window's begin; exact steps at 0, 1, 3 and after the
    windows of 7 and 15; rates that change inside the window."""
    group = replicas(2, codec="none", sync=Fixed(window), variance_updates=1)
    rates = [LR * (1 + 0.1 * s) for s in range(60)]
    x, m, v, updates, updated_at, step = flat(start()), 0.0, 0.0, 0, -1, 0
    while step < 20:
        exact = any((s + 1) & s == 0 for s in range(updated_at + 1, step + 1))
        if exact:
            v, updates, updated_at = (
                BETA2 * v + (1 - BETA2) * flat(mean(steady(2, step))) ** 2,
                updates + 1,
                step,
            )
            root = np.sqrt(v / (1 - BETA2**updates)) + 1e-8
        u, kept, total = 0.0, 1.0, 0.0
        for _ in range(window if step >= 4 and not exact else 1):
            rate, keep = rates[step] / (1 - BETA1 ** (step + 1)), 1 - rates[step] * DECAY
            m = BETA1 * m + (1 - BETA1) * flat(mean(steady(2, step)))
            u, kept, total = keep * u + rate * m, keep * kept, keep * total + rate
            for o in group.optimizers:
                o.param_groups[0]["lr"] = rates[step]
            group.step(steady(2, step))
            step += 1
        x, m = kept * x - u / root, u / total
        np.testing.assert_allclose(flat(group.parameters[0]), x, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(together(group, "momentum"), m, rtol=2e-4, atol=2e-5)
        assert group.agree()
    assert group.optimizers[0].counters.exact_rounds == updates == 5


def test_an_exact_step_after_windows_divides_by_the_variance_that_it_has_just_seen():
    """Elements below the floor too, where gradients have grown tenfold since ranks last heard of
    the variance."""
    floor = 0.5
    group = replicas(2, sync="every", variance_updates=1, variance_floor=floor, weight_decay=0.0)
    for step in range(8):
        before = together(group, "master")
        group.step([[10 * g if step == 7 else g for g in mine] for mine in noise(2, step)])
    v, m, after = (
        together(group, "variance") / (1 - BETA2**4),
        together(group, "momentum"),
        together(group, "master"),
    )
    first, lifted = 0, 0
    for p in group.parameters[0]:
        at = slice(first, first + p.numel())
        first += p.numel()
        low = np.sqrt(floor * v[at].mean())
        lifted += (np.sqrt(v[at]) < low).sum()
        step = LR / (1 - BETA1**8) * m[at] / (np.maximum(np.sqrt(v[at]), low) + 1e-8)
        np.testing.assert_allclose(after[at], before[at] - step, rtol=1e-5, atol=1e-6)
    assert lifted > 100
    assert group.agree()


def test_a_constant_rate_is_said_to_allow_no_local_step_with_the_cure_of_windows_that_stand_still(
    caplog,
):
    group = replicas(2, sync="linear", check_every=0)
    for step in range(6):
        group.step(noise(2, step))
    assert "NO STEP IS LOCAL" in caplog.text
    assert "Let the rate fall, with sync='linear'" in caplog.text
    assert "Pass sync=4" not in caplog.text


def widest(cls, curvature, **options):
    """Largest |x| in the first 20 and the last 180 of 200 steps on curvature·x²/2, with s = 1 and a
    rate that falls to 0."""
    options = {
        "lr": LR,
        "betas": (BETA1, BETA2),
        "variance_updates": Early(4),
        "codec": "none",
        "min_numel": 0,
    } | options
    group = Replicas(lambda p, t: cls(p, transport=t, **options), 2, ((4,),))
    for step in range(4):
        group.step([[torch.full((4,), (-1.0) ** step)]] * 2)
    center, far = flat(group.parameters[0]), []
    for step in range(200):
        for o in group.optimizers:
            o.param_groups[0]["lr"] = LR * (1 - step / 200)
        group.step(
            [
                [curvature * (x.detach() - torch.tensor(center, dtype=torch.float32))]
                for (x,) in group.parameters
            ]
        )
        far.append(np.abs(flat(group.parameters[0]) - center).max())
    return max(far[:20]), max(far[20:])


def test_a_window_takes_no_step_that_is_longer_than_momentum_can_bear():
    """On a parabola with a frozen variance, where steps at the peak bear a curvature of 2·(1 +
    β1)/((1 − β1)·γ) = 38/γ. Parameters that stand still bear 4/γ if windows grow as they may where
    ranks move, and 18/γ with the default."""
    first, later = widest(ShardedZeroOneAdam, 8 / LR)
    assert later < first
    first, later = widest(ShardedZeroOneAdam, 8 / LR, sync="qsr")
    assert later > 100 * first
    first, later = widest(ZeroOneAdam, 8 / LR, sync="qsr")
    assert later < first


def test_a_long_step_at_the_end_of_a_window_is_warned_of(caplog):
    """Once; windows of the default never are."""
    group, falling = replicas(2, sync=4, check_every=0), replicas(2, sync="linear", check_every=0)
    for step in range(16):
        caplog.clear()
        group.step(noise(2, step))
        assert ("window of 4 steps, and at its end go up to 4.0 times as far" in caplog.text) == (
            step == 4
        )
    for step in range(24):
        for o in falling.optimizers:
            o.param_groups[0]["lr"] = LR * 0.9**step
        falling.step(noise(2, step))
    assert falling.optimizers[0].counters.local_steps > 8
    assert "stand still" not in caplog.text


def test_steps_between_synchronisations_send_nothing():
    sends_in_every_fourth_step(replicas(3))
