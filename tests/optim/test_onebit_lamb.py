"""1-bit LAMB against LAMB written out in float64, and against its invariants."""

import numpy as np
import pytest
import torch

from commpress.errors import InvalidArgument
from commpress.kernels import lamb
from commpress.kernels.cpu import lamb as cpu_lamb
from commpress.optim import OneBitLamb
from commpress.optim.flat import Flat
from optim_twin import SHAPES, Replicas, equal, flat, mean, noise, start

BETA1, BETA2, LR, DECAY, EPS = 0.9, 0.99, 1e-2, 0.1, 1e-6


def replicas(size=3, shapes=SHAPES, **options):
    options = {
        "lr": LR,
        "betas": (BETA1, BETA2),
        "eps": EPS,
        "weight_decay": DECAY,
        "exact_steps": 5,
        "min_numel": 0,
        "spiky_codec": None,
        "variance_floor": 0.0,
    } | options
    return Replicas(lambda p, t: OneBitLamb(p, transport=t, **options), size, shapes)


class Lamb:
    """LAMB and its compressed phase with exact means, one layer at a time, in float64."""

    def __init__(self):
        self.x = [p.double().numpy() for p in start()]
        self.m, self.v = [0 * x for x in self.x], [0 * x for x in self.x]
        self.c, self.f, self.fresh, self.course = (
            [0.0] * len(self.x),
            [1.0] * len(self.x),
            None,
            None,
        )

    def step(self, gradients, *, frozen, live=False):
        if frozen and self.fresh is None:
            self.fresh = [v.copy() for v in self.v]
            self.course = [m / (np.sqrt(v) + EPS) for m, v in zip(self.m, self.v, strict=True)]
        for i, g in enumerate(g.double().numpy() for g in gradients):
            self.m[i] = BETA1 * self.m[i] + (1 - BETA1) * g
            if not frozen:
                self.v[i] = BETA2 * self.v[i] + (1 - BETA2) * g * g
            direction = self.m[i] / (np.sqrt(self.v[i]) + EPS)
            w = direction + DECAY * self.x[i]
            if not frozen:
                c = float(np.clip(np.linalg.norm(self.x[i]) / np.linalg.norm(w), 0.01, 10.0))
                self.c[i] = c if self.c[i] == 0 else 0.9 * self.c[i] + 0.1 * c
                self.x[i] = self.x[i] - LR * c * w
            elif live:
                self.course[i] = 0.9 * self.course[i] + 0.1 * direction
                rate = np.linalg.norm(self.x[i]) / np.linalg.norm(
                    self.course[i] + DECAY * self.x[i]
                )
                self.x[i] = self.x[i] - LR * np.clip(rate, 0.01, 10.0) * w
            else:
                self.fresh[i] = BETA2 * self.fresh[i] + (1 - BETA2) * g * g
                f = ((np.sqrt(self.v[i]) + EPS) / (np.sqrt(self.fresh[i]) + EPS)).max()
                share = min(1.0, np.linalg.norm(direction) / np.linalg.norm(w))
                f = np.clip(f * share + 1 - share, 0.5, 4.0)
                self.f[i] = float(np.clip(np.clip(f, 0.9 * self.f[i], 1.1 * self.f[i]), 0.5, 4.0))
                self.x[i] = self.x[i] - LR * self.c[i] * self.f[i] * w


def test_with_an_exact_codec_live_rates_are_lambs_rule_under_a_frozen_variance():
    group, twin = replicas(codec="none"), Lamb()
    for step in range(15):
        gradients = noise(3, step)
        group.step(gradients)
        twin.step(mean(gradients), frozen=step >= 5, live=True)
    o = group.optimizers[0]
    np.testing.assert_allclose(
        flat(o.flat.views(o.course)),
        np.concatenate([a.ravel() for a in twin.course]),
        rtol=1e-3,
        atol=1e-4,
    )
    np.testing.assert_allclose(
        flat(group.parameters[0]), np.concatenate([x.ravel() for x in twin.x]), rtol=1e-3, atol=1e-4
    )


def test_with_an_exact_codec_the_reconstructed_gradient_is_the_mean_gradient():
    """So the fresh variance is the true β2-average that began with the frozen one, and so are the
    layer rates."""
    group, twin = replicas(codec="none", rates="frozen"), Lamb()
    for step in range(15):
        gradients = noise(3, step)
        group.step(gradients)
        twin.step(mean(gradients), frozen=step >= 5)
    o = group.optimizers[0]
    np.testing.assert_allclose(
        flat(o.flat.views(o.fresh)), np.concatenate([v.ravel() for v in twin.fresh]), rtol=1e-3
    )
    np.testing.assert_allclose(o.factor.numpy(), twin.f, rtol=1e-3)
    np.testing.assert_allclose(
        flat(group.parameters[0]), np.concatenate([x.ravel() for x in twin.x]), rtol=1e-3, atol=1e-4
    )


def test_layer_factors_stay_in_their_bounds_and_move_slowly():
    group = replicas(rates="frozen")
    before = torch.ones(len(SHAPES))
    for step in range(30):
        group.step([[g * (1 + step) for g in mine] for mine in noise(3, step)])
        factor = group.optimizers[0].factor.clone()
        assert ((factor >= 0.5) & (factor <= 4.0)).all()
        assert ((factor / before - 1).abs() <= 0.1 + 1e-6).all()
        before = factor
        assert group.agree()
    assert (factor != 1).any()


def test_a_power_of_two_in_front_of_a_layer_changes_nothing():
    """No scale unites the layers, for a layer 64 times as large sends the same bits."""
    one, two = replicas(eps=0.0), replicas(eps=0.0)
    for step in range(12):
        gradients = noise(3, step)
        one.step(gradients)
        two.step([[64 * mine[0], *mine[1:]] for mine in gradients])
    m, n = one.optimizers[0], two.optimizers[0]
    assert torch.equal(64 * 64 * m._variances[0], n._variances[0])
    assert torch.equal(64 * m._momenta[0], n._momenta[0])
    assert equal(one.parameters[0], two.parameters[0])


@pytest.mark.parametrize("rates", ["live", "frozen"])
def test_layers_of_zeros_and_empty_ones_do_no_harm(rates):
    shapes = ((40, 50), (0,), (30,))
    group = replicas(2, shapes, rates=rates)
    for step in range(10):
        gradients = noise(2, step, shapes)
        for mine in gradients:
            mine[2].zero_()
        group.step(gradients)
    assert all(torch.isfinite(p).all() for p in group.parameters[0])
    assert group.agree()


def test_the_fused_kernels_are_the_torch_operations(compiled):
    shapes = ((40, 50), (0,), (2048,), (3000,))
    rule = lamb.LayerRule((BETA1, BETA2), EPS, LR, DECAY, (0.01, 10.0), 0.9, (0.5, 4.0), 0.1)
    divisors = np.full((4, 4), (0.7, 0.05, EPS, 20.0), np.float32)
    results = []
    for arithmetic in (lamb, cpu_lamb):
        flat = Flat([torch.nn.Parameter(p) for p in start(shapes)], [str(i) for i in range(4)])
        m, v, w, fresh, course, p = (flat.new() for _ in range(6))
        coefficient, factor = torch.zeros(4), torch.ones(4)
        for step in range(3):
            given = dict(enumerate(start(shapes, 10 + step)))
            arithmetic.exact(
                flat.segments(range(4), given | {3: torch.zeros(3000)}), m, v, w, coefficient, rule
            )
        v[:500] *= 1e-4  # below the floor
        fresh.copy_(v)
        for step in range(3):
            layers = flat.placed(range(4))
            p.copy_(torch.cat(start(((flat.numel,),), 20 + step)))
            arithmetic.live(layers, p, v, m, course, divisors, rule, most=2.0)
            arithmetic.frozen(layers, p, v, m, fresh, divisors, coefficient, factor, rule, most=2.0)
        results.append(
            [
                *flat.weights,
                *flat.views(m),
                *flat.views(fresh),
                *flat.views(course),
                coefficient,
                factor,
            ]
        )
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    bound = 2.0 * (0.7 * flat.view(v, 0).view(-1)[:500]).sqrt()
    torch.testing.assert_close(
        flat.view(m, 0).view(-1)[:500].abs().minimum(bound), flat.view(m, 0).view(-1)[:500].abs()
    )


def test_bad_arguments_are_named():
    with pytest.raises(InvalidArgument, match="coefficients"):
        replicas(coefficients=(2.0, 1.0))
    with pytest.raises(InvalidArgument, match="rates"):
        replicas(rates="quick")
    with pytest.raises(InvalidArgument, match="factor_change"):
        replicas(factor_change=1.5)
    with pytest.raises(InvalidArgument, match="bias_correction is True"):
        replicas(bias_correction=True)
    with pytest.raises(InvalidArgument, match="OneBitLamb got seed=3, which it does not take"):
        replicas(seed=3)
