"""What LAMB computes, layer by layer, in torch operations for any device; ``cpu_lamb`` is the fast CPU path.

Every segment is a layer: x its parameters, g its gradient, p = m·r as in ``adam``. ``coefficient`` and ``factor`` have one
number per layer. w is room for as many floats as m, which may be the buffer that the gradient or the earlier p lies in.
"""

from dataclasses import dataclass
from typing import Any

import torch

from commpress.kernels import arithmetic
from commpress.kernels.adam import Segments
from commpress.kernels.pieces import Pieces


@dataclass(frozen=True)
class LayerRule:
    """The numbers of one parameter group; ``docs/optimizers.md`` and ``OneBitLamb`` say what they mean."""

    betas: tuple[float, float]
    eps: float
    lr: float
    decay: float
    coefficients: tuple[float, float]
    coefficient_beta: float
    factors: tuple[float, float]
    factor_change: float


def lamb_arithmetic(device: torch.device) -> Any:
    """The module that computes on ``device``: this one or ``cpu_lamb``, same names and arguments."""
    if device.type == "cpu":
        from commpress.kernels import cpu_lamb

        return cpu_lamb
    import commpress.kernels.lamb as torch_path

    return torch_path


def exact(
    segments: Segments, m: torch.Tensor, v: torch.Tensor, w: torch.Tensor, coefficient: torch.Tensor, rule: LayerRule
) -> None:
    """m and v as Adam; w := m/(√v + ε) + λx; c := clip(‖x‖/‖w‖), its average into ``coefficient``; x := x − γ·c·w."""
    beta1, beta2 = rule.betas
    for layer, (x, g, m_, v_, w_) in enumerate(segments.runs(m, v, w)):
        g = torch.zeros_like(m_) if g is None else g
        m_.mul_(beta1).add_(g, alpha=1 - beta1)
        v_.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.div(m_, v_.sqrt().add_(rule.eps), out=w_).add_(x, alpha=rule.decay)
        of_x, of_w = torch.linalg.vector_norm(x), torch.linalg.vector_norm(w_)
        rate = torch.where((of_x > 0) & (of_w > 0), (of_x / of_w).clamp(*rule.coefficients), torch.ones_like(of_w))
        before = coefficient[layer]
        before.copy_(torch.where(before == 0, rate, torch.lerp(rate, before, rule.coefficient_beta)))
        x.sub_(w_.mul_(rate), alpha=rule.lr)


def decode(rows: torch.Tensor, pieces: Pieces, p: torch.Tensor) -> None:
    """p := what the rows of a message say, or all but what ``live`` and ``frozen`` decode themselves: see ``runs``."""
    arithmetic(p.device).decode(rows, p, pieces)


def live(
    segments: Segments, runs: None, p: torch.Tensor, course: torch.Tensor, rule: LayerRule, *, stored: bool = True
) -> None:
    """course := its average with p; x := x − γ·c·(p + λx), where c := clip(‖x‖ / ‖course + λx‖). Signs that were left undecoded
    need not be ``stored`` in p."""
    slow = rule.coefficient_beta
    for x, _, p_, course_ in segments.runs(p, course):
        course_.mul_(slow).add_(p_, alpha=1 - slow)
        of_x, of_w = torch.linalg.vector_norm(x), torch.linalg.vector_norm(course_ + rule.decay * x)
        rate = torch.where((of_x > 0) & (of_w > 0), (of_x / of_w).clamp(*rule.coefficients), torch.ones_like(of_w))
        x.sub_((p_ + rule.decay * x).mul_(rate), alpha=rule.lr)


def frozen(
    segments: Segments, runs: None, before: None, p: torch.Tensor, w: torch.Tensor, r: torch.Tensor, fresh: torch.Tensor,
    floor: torch.Tensor, coefficient: torch.Tensor, factor: torch.Tensor, rule: LayerRule, *, stored: bool = True,
) -> None:  # fmt: skip
    """``w`` comes with the p before, which with p gives the mean gradient and so the fresh variance, and is not needed
    after; f from r and the fresh variance, none taken as less than the layer's ``floor``; x := x − γ·c̄·f·(p + λx)."""
    beta1, beta2 = rule.betas
    for layer, (x, _, p_, w_, r_, fresh_) in enumerate(segments.runs(p, w, r, fresh)):
        if p_.numel() == 0:
            continue
        g = (p_ - beta1 * w_).div_(1 - beta1).div_(r_)
        fresh_.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.add(p_, x, alpha=rule.decay, out=w_)
        f = 1 / (torch.maximum(fresh_, floor[layer]).sqrt_().add_(rule.eps) * r_).amin()
        if rule.decay:
            of_direction, of_w = torch.linalg.vector_norm(p_), torch.linalg.vector_norm(w_)
            share = (of_direction / of_w).nan_to_num(1.0).clamp(max=1.0)
            f = f * share + 1 - share
        last, change = factor[layer], rule.factor_change
        f = f.clamp(*rule.factors).clamp(last * (1 - change), last * (1 + change)).clamp(*rule.factors)
        last.copy_(f)
        x.sub_(w_.mul_(coefficient[layer] * f), alpha=rule.lr)
