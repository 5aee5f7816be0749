"""Arithmetic of the optimizers on flat buffers, in torch operations for any device; ``cpu.adam`` is
the fast CPU path.

Everything is element-wise. ``segments`` maps parameters x and gradients g to ranges of the flat
float32 buffers (m momentum, v variance, u accumulated steps, a anchor), so that gradients need not
be copied together.

The divisor is always s = max(√(k·v), low) + ε. Gradients are clipped to ``reach``·s; the number of
elements beyond ``reach``·(√(k·v) + ε), without the floor, is returned for each segment. k, low, ε
and reach are a row of ``divisors``, float32[segments, 4]; ``optim.tensor_states`` explains them.
NaN and infinity are kept, for later checks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Segments:
    """Contiguous float32 tensors with their places in the flat buffers; a gradient of None is
    zero."""

    x: Sequence[torch.Tensor]
    g: Sequence[torch.Tensor | None]
    places: Sequence[tuple[int, int]]  # first element, elements
    # the same segments with other gradients: saves computing the rest of ``table`` again
    before: "Segments | None" = None

    def having(self, gradients: Sequence[torch.Tensor | None]) -> "Segments":
        return Segments(self.x, gradients, self.places, self)

    @cached_property
    def table(self) -> np.ndarray:
        """Table int64[segments, 4]: address of x, address of g or 0, first element, elements."""
        gradients = [0 if g is None else g.data_ptr() for g in self.g]
        if self.before is not None:
            table = self.before.table.copy()
            table[:, 1] = gradients
            return table
        lines = [
            (x.data_ptr(), g, first, numel)
            for x, g, (first, numel) in zip(self.x, gradients, self.places, strict=True)
        ]
        return np.array(lines, np.int64).reshape(-1, 4)

    @cached_property
    def numel(self) -> int:
        return sum(numel for _, numel in self.places)

    def runs(self, *buffers: torch.Tensor) -> Any:
        for x, g, (first, numel) in zip(self.x, self.g, self.places, strict=True):
            yield (
                x.view(-1),
                None if g is None else g.view(-1),
                *(b[first : first + numel] if b.numel() else None for b in buffers),
            )


def divisor(v: torch.Tensor, line: Sequence[float]) -> torch.Tensor:
    """Return s of one segment."""
    k, low, eps, _ = line
    return (v * k).sqrt_().clamp_(min=low).add_(eps)


def scaled(segments: Segments, out: torch.Tensor, *, gain: float) -> None:
    """Set out := gain·g."""
    for _, g, out_ in segments.runs(out):
        out_.zero_() if g is None else torch.mul(g, gain, out=out_)


def _within_reach(
    g: torch.Tensor | None, v: torch.Tensor, line: Sequence[float], s: torch.Tensor, gain: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gain·g clipped to ``reach``·s, and the number of elements beyond ``reach`` times their
    own √(k·v) + ε."""
    if g is None:
        return torch.zeros_like(s), torch.zeros((), dtype=torch.int64, device=s.device)
    k, _, eps, reach = line
    g, most = g * gain, reach * s
    beyond = (g.abs() > reach * ((v * k).sqrt_() + eps)).sum()
    return torch.where(g.isfinite(), torch.minimum(torch.maximum(g, -most), most), g), beyond


def apply_mean(
    segments: Segments,
    p: torch.Tensor,
    v: torch.Tensor,
    m: torch.Tensor,
    a: torch.Tensor,
    divisors: np.ndarray,
    *,
    step: float,
    decay: float,
    momentum_scale: float,
    most: float,
) -> None:
    """Set x := decay·a − step·p, where an empty a is x; and m := momentum_scale·p·s, at most
    ``most``·√(k·v) where √(k·v) is below the floor."""
    for line, (x, _, p_, v_, m_, a_) in zip(
        divisors.tolist(), segments.runs(p, v, m, a), strict=True
    ):
        torch.mul(x if a_ is None else a_, decay, out=x).sub_(p_, alpha=step)
        m_.copy_(momentum(p_ * momentum_scale, v_, line, most))


def momentum(p: torch.Tensor, v: torch.Tensor, line: Sequence[float], most: float) -> torch.Tensor:
    """Return p·s, limited to ``most``·√(k·v) where √(k·v) is below the floor."""
    root, whole = (v * line[0]).sqrt_(), p * divisor(v, line)
    bound = root * most
    return torch.where(root < line[1], torch.minimum(torch.maximum(whole, -bound), bound), whole)


def accumulate(
    segments: Segments,
    m: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    divisors: np.ndarray,
    *,
    beta: float,
    gain: float,
    lr: float = 1.0,
    decay: float = 1.0,
) -> torch.Tensor:
    """Set out := (decay·u + lr·(β·m + (1 − β)·gain·g))/s, where an empty u is zero."""
    counts = []
    for line, (_, g, m_, u_, v_, out_) in zip(
        divisors.tolist(), segments.runs(m, u, v, out), strict=True
    ):
        s = divisor(v_, line)
        g, beyond = _within_reach(g, v_, line, s, gain)
        counts.append(beyond)
        torch.mul(m_, lr * beta, out=out_).add_(g, alpha=lr * (1 - beta))
        if u_ is not None:
            out_.add_(u_, alpha=decay)
        out_.div_(s)
    return _counted(counts)


def local_step(
    segments: Segments,
    m: torch.Tensor,
    u: torch.Tensor,
    a: torch.Tensor,
    v: torch.Tensor,
    divisors: np.ndarray,
    *,
    beta: float,
    gain: float,
    lr: float,
    decay: float,
    anchor_decay: float,
    begins: bool,
) -> tuple[bool, torch.Tensor]:
    """Take a local step: m := β·m + (1 − β)·gain·g, u := decay·u + lr·m, x := anchor_decay·a − u/s.

    If a window ``begins``, u starts from zero and a := x. m does not change where g is not finite;
    return whether all of g was finite, and the counts of elements beyond reach.
    """
    finite, counts = [], []
    for line, (x, g, m_, u_, a_, v_) in zip(
        divisors.tolist(), segments.runs(m, u, a, v), strict=True
    ):
        if begins:
            a_.copy_(x)
            u_.zero_()
        s, good = divisor(v_, line), None if g is None else g.isfinite()
        g, beyond = _within_reach(g, v_, line, s, gain)
        counts.append(beyond)
        if good is None:
            m_.mul_(beta)
        else:
            finite.append(good.all())
            m_.copy_(torch.where(good, (m_ * beta).add_(g, alpha=1 - beta), m_))
        u_.mul_(decay).add_(m_, alpha=lr)
        torch.mul(a_, anchor_decay, out=x).addcdiv_(u_, s, value=-1)
    return not finite or bool(torch.stack(finite).all()), _counted(counts)


def _counted(counts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64)


def update_variance(
    segments: Segments, m: torch.Tensor, v: torch.Tensor, *, beta: float, weight: float, unit: float
) -> None:
    """Set m := β·m + (1 − β)·g; v := (1 − weight)·v + weight·unit·g², but v := unit·g² where v was
    zero."""
    for _, g, m_, v_ in segments.runs(m, v):
        if g is None:
            m_.mul_(beta)
            v_.mul_(1 - weight)
            continue
        m_.mul_(beta).add_(g, alpha=1 - beta)
        squares = g * g * unit
        v_.copy_(torch.where(v_ == 0, squares, torch.lerp(v_, squares, weight)))


def apply_step(
    segments: Segments,
    m: torch.Tensor,
    v: torch.Tensor,
    divisors: np.ndarray,
    *,
    step: float,
    decay: float,
) -> None:
    """Set x := decay·x − step·m/s."""
    for line, (x, _, m_, v_) in zip(divisors.tolist(), segments.runs(m, v), strict=True):
        x.mul_(decay).addcdiv_(m_, divisor(v_, line), value=-step)


def square_sum(segments: Segments) -> float:
    """Return Σ g², which is not finite if and only if some g is not."""
    total = 0.0
    for _, g in segments.runs():
        if g is not None:
            total += float(g.double().square().sum())
    return total
