"""Arithmetic of LAMB, layer by layer, in torch operations for any device; ``cpu.lamb`` is the fast
CPU path.

Every segment is a layer: x its parameters, g its gradient, p = m/s with the ``divisors`` of
``adam``. ``coefficient`` and ``factor`` have one number per layer. w is scratch memory of the
length of m, which may be the gradient's buffer.
"""

from dataclasses import dataclass

import numpy as np
import torch

from commpress.kernels import layer_shards
from commpress.kernels.adam import Segments, divisor, momentum


@dataclass(frozen=True)
class LayerRule:
    """Numbers of one parameter group; ``docs/optimizers.md`` and ``OneBitLamb`` explain them."""

    betas: tuple[float, float]
    eps: float
    lr: float
    decay: float
    coefficients: tuple[float, float]
    coefficient_beta: float
    factors: tuple[float, float]
    factor_change: float


def exact(
    segments: Segments,
    m: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    coefficient: torch.Tensor,
    rule: LayerRule,
) -> None:
    """Update m and v as in Adam; w := m/(√v + ε) + λx; c := clip(‖x‖/‖w‖), with its average in
    ``coefficient``; x := x − γ·c·w."""
    layer_shards.exact(segments, m, v, w, coefficient, rule)


def live(
    segments: Segments,
    p: torch.Tensor,
    v: torch.Tensor,
    m: torch.Tensor,
    course: torch.Tensor,
    divisors: np.ndarray,
    rule: LayerRule,
    *,
    most: float,
) -> None:
    """Set m from p as in ``adam.apply_mean``; course := its average with p; x := x − γ·c·(p + λx)
    with c := clip(‖x‖ / ‖course + λx‖)."""
    layer_shards.live(segments, p, v, m, course, divisors, rule, most=most)


def frozen(
    segments: Segments,
    p: torch.Tensor,
    v: torch.Tensor,
    m: torch.Tensor,
    fresh: torch.Tensor,
    divisors: np.ndarray,
    coefficient: torch.Tensor,
    factor: torch.Tensor,
    rule: LayerRule,
    *,
    most: float,
) -> None:
    """Set m from p; compute the mean gradient from the old and new m, and from it the fresh
    variance; f from both variances, each at least the floor; x := x − γ·c̄·f·(p + λx)."""
    beta1, beta2 = rule.betas
    for layer, (line, (x, _, p_, v_, m_, fresh_)) in enumerate(
        zip(divisors.tolist(), segments.runs(p, v, m, fresh), strict=True)
    ):
        if p_.numel() == 0:
            continue
        s = divisor(v_, line)
        g = (p_ * s).sub_(m_, alpha=beta1).div_(1 - beta1)
        m_.copy_(momentum(p_, v_, line, most))
        fresh_.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        w = torch.add(p_, x, alpha=rule.decay)
        f = 1 / (divisor(fresh_, line) / s).amin()
        if rule.decay:
            of_direction, of_w = torch.linalg.vector_norm(p_), torch.linalg.vector_norm(w)
            share = (of_direction / of_w).nan_to_num(1.0).clamp(max=1.0)
            f = f * share + 1 - share
        last, change = factor[layer], rule.factor_change
        f = (
            f.clamp(*rule.factors)
            .clamp(last * (1 - change), last * (1 + change))
            .clamp(*rule.factors)
        )
        last.copy_(f)
        x.sub_(w.mul_(coefficient[layer] * f), alpha=rule.lr)
