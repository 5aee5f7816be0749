"""Layers of LAMB that are sharded over ranks: rates from norms of whole layers, which ranks
exchange.

The arithmetic is that of whole layers (``lamb``), in torch operations; ``squares`` has ‖x‖² and
‖w‖² of each layer in turn, and None stands for those of this rank's part.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from commpress.kernels.adam import Segments, momentum

if TYPE_CHECKING:
    from commpress.kernels.lamb import LayerRule


def exact_squares(
    segments: Segments, m: torch.Tensor, v: torch.Tensor, rule: "LayerRule"
) -> list[float]:
    """Return ‖x‖² and ‖w‖² of every layer as ``exact`` will compute them; nothing changes."""
    (beta1, beta2), squares = rule.betas, []
    for x, g, m_, v_ in segments.runs(m, v):
        g = torch.zeros_like(m_) if g is None else g
        root = (v_ * beta2).addcmul_(g, g, value=1 - beta2).sqrt_().add_(rule.eps)
        w = (m_ * beta1).add_(g, alpha=1 - beta1).div_(root).add_(x, alpha=rule.decay)
        squares += [_square(x), _square(w)]
    return squares


def live_squares(
    segments: Segments, p: torch.Tensor, course: torch.Tensor, rule: "LayerRule"
) -> list[float]:
    """Return ‖x‖² and ‖course + λx‖² of every layer as ``live`` will compute them; nothing
    changes."""
    slow, squares = rule.coefficient_beta, []
    for x, _, p_, course_ in segments.runs(p, course):
        w = (course_ * slow).add_(p_, alpha=1 - slow).add_(x, alpha=rule.decay)
        squares += [_square(x), _square(w)]
    return squares


def _square(x: torch.Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _norms(
    x: torch.Tensor, w: torch.Tensor, squares: np.ndarray | None, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norms of a layer: its own, or those of the whole layer of which it is a shard."""
    if squares is None:
        return torch.linalg.vector_norm(x), torch.linalg.vector_norm(w)
    of_x, of_w = torch.tensor(
        np.sqrt(squares[2 * layer : 2 * layer + 2]), dtype=torch.float32, device=x.device
    ).unbind()
    return of_x, of_w


def exact(
    segments: Segments,
    m: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    coefficient: torch.Tensor,
    rule: "LayerRule",
    squares: np.ndarray | None = None,
) -> None:
    """Update m and v as in Adam; w := m/(√v + ε) + λx; c := clip(‖x‖/‖w‖), with its average in
    ``coefficient``; x := x − γ·c·w."""
    beta1, beta2 = rule.betas
    for layer, (x, g, m_, v_, w_) in enumerate(segments.runs(m, v, w)):
        g = torch.zeros_like(m_) if g is None else g
        m_.mul_(beta1).add_(g, alpha=1 - beta1)
        v_.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.div(m_, v_.sqrt().add_(rule.eps), out=w_).add_(x, alpha=rule.decay)
        of_x, of_w = _norms(x, w_, squares, layer)
        rate = torch.where(
            (of_x > 0) & (of_w > 0), (of_x / of_w).clamp(*rule.coefficients), torch.ones_like(of_w)
        )
        before = coefficient[layer]
        before.copy_(
            torch.where(before == 0, rate, torch.lerp(rate, before, rule.coefficient_beta))
        )
        x.sub_(w_.mul_(rate), alpha=rule.lr)


def live(
    segments: Segments,
    p: torch.Tensor,
    v: torch.Tensor,
    m: torch.Tensor,
    course: torch.Tensor,
    divisors: np.ndarray,
    rule: "LayerRule",
    squares: np.ndarray | None = None,
    *,
    most: float,
) -> None:
    """Set m from p as in ``adam.apply_mean``; course := its average with p; x := x − γ·c·(p + λx)
    with c := clip(‖x‖ / ‖course + λx‖)."""
    slow = rule.coefficient_beta
    for layer, (line, (x, _, p_, v_, m_, course_)) in enumerate(
        zip(divisors.tolist(), segments.runs(p, v, m, course), strict=True)
    ):
        m_.copy_(momentum(p_, v_, line, most))
        course_.mul_(slow).add_(p_, alpha=1 - slow)
        of_x, of_w = _norms(x, course_ + rule.decay * x, squares, layer)
        rate = torch.where(
            (of_x > 0) & (of_w > 0), (of_x / of_w).clamp(*rule.coefficients), torch.ones_like(of_w)
        )
        x.sub_((p_ + rule.decay * x).mul_(rate), alpha=rule.lr)
