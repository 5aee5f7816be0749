"""What the optimizers compute on flat buffers, in torch operations for any device; ``cpu_adam`` is the fast CPU path.

Everything is element by element. ``segments`` says which parameter x and gradient g belong to which run of the flat
float32 buffers (m momentum, r reciprocal of √v + ε, p = m·r, u accumulated steps, a anchor), so that gradients need not be
copied together.

Note: what a synchronisation of 0/1 Adam leaves as momentum is d, of which momentum is share·d/r. Whoever reads it next reads r
as well, so with a ``share`` m is such a d, and nobody has to write what it stands for. ``said`` are ``runs`` of messages that
say d.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from commpress.kernels import arithmetic
from commpress.kernels.pieces import Pieces


@dataclass(frozen=True, eq=False)
class Segments:
    """Contiguous float32 tensors and where they lie in the flat buffers; a gradient of None is zero."""

    x: Sequence[torch.Tensor]
    g: Sequence[torch.Tensor | None]
    places: Sequence[tuple[int, int]]  # first element, elements
    before: "Segments | None" = None  # the same with other gradients: all but these need not be asked for again

    def having(self, gradients: Sequence[torch.Tensor | None]) -> "Segments":
        return Segments(self.x, gradients, self.places, self)

    @cached_property
    def table(self) -> np.ndarray:
        """int64[segments, 4]: address of x, address of g or 0, first element, elements."""
        gradients = [0 if g is None else g.data_ptr() for g in self.g]
        if self.before is not None:
            table = self.before.table.copy()
            table[:, 1] = gradients
            return table
        lines = [
            (x.data_ptr(), g, first, numel) for x, g, (first, numel) in zip(self.x, gradients, self.places, strict=True)
        ]
        return np.array(lines, np.int64).reshape(-1, 4)

    @cached_property
    def numel(self) -> int:
        return sum(numel for _, numel in self.places)

    def runs(self, *buffers: torch.Tensor) -> Any:
        for x, g, (first, numel) in zip(self.x, self.g, self.places, strict=True):
            yield x.view(-1), None if g is None else g.view(-1), *(
                b[first : first + numel] if b.numel() else None for b in buffers
            )


def adam_arithmetic(device: torch.device) -> Any:
    """The module that computes on ``device``: this one or ``cpu_adam``, same names and arguments."""
    if device.type == "cpu":
        from commpress.kernels import cpu_adam

        return cpu_adam
    import commpress.kernels.adam as torch_path

    return torch_path


def blend(segments: Segments, m: torch.Tensor, out: torch.Tensor, *, beta: float, gain: float) -> None:
    """out := β·m + (1 − β)·gain·g."""
    for _, g, m_, out_ in segments.runs(m, out):
        torch.mul(m_, beta, out=out_)
        if g is not None:
            out_.add_(g, alpha=(1 - beta) * gain)


def runs(segments: Segments, messages: Sequence[Pieces]) -> None:
    """How the means of the segments lie in messages, for those who decode them while they use them. Here nobody does."""


def aim(
    segments: Segments, p: torch.Tensor, r: torch.Tensor, out: torch.Tensor, *, beta: float, gain: float, said: Any = None
) -> None:
    """out := β·p + (1 − β)·gain·g·r; ``said``: ``runs`` of messages that say p as well."""
    for _, g, p_, r_, out_ in segments.runs(p, r, out):
        torch.mul(p_, beta, out=out_)
        if g is not None:
            out_.addcmul_(g, r_, value=(1 - beta) * gain)


def descend(segments: Segments, p: torch.Tensor, a: torch.Tensor, *, step: float, keep: float) -> None:
    """x := keep·a − step·p, where an empty a is x."""
    for x, _, p_, a_ in segments.runs(p, a):
        torch.mul(x.view(-1) if a_ is None else a_, keep, out=x.view(-1)).sub_(p_, alpha=step)


def land(
    rows: torch.Tensor, pieces: Pieces, segments: Segments, p: torch.Tensor, a: torch.Tensor, *, steps: np.ndarray,
    keeps: np.ndarray, stored: bool = True,
) -> None:  # fmt: skip
    """p := what the rows of a message say, and ``descend`` with it. The segments are the pieces in their order, with a step
    and a keep for each. Signs need not be ``stored``: p may be left as it is there."""
    arithmetic(p.device).decode(rows, p, pieces)
    for (x, _, p_, a_), step, keep in zip(segments.runs(p, a), steps.tolist(), keeps.tolist(), strict=True):
        torch.mul(x if a_ is None else a_, keep, out=x).sub_(p_, alpha=step)


def _momentum(m: torch.Tensor, r: torch.Tensor, share: float | None) -> torch.Tensor:
    return m if share is None else (m * share).div_(r)


def accumulate(
    segments: Segments, m: torch.Tensor, u: torch.Tensor, r: torch.Tensor, out: torch.Tensor, *, beta: float, gain: float,
    lr: float, keep: float, share: float | None = None, said: Any = None,
) -> None:  # fmt: skip
    """out := (keep·u + lr·(β·m + (1 − β)·gain·g))·r, where an empty u is zero and an empty r one."""
    for _, g, m_, u_, r_, out_ in segments.runs(m, u, r, out):
        torch.mul(_momentum(m_, r_, share), beta, out=out_)
        if g is not None:
            out_.add_(g, alpha=(1 - beta) * gain)
        out_.mul_(lr)
        if u_ is not None:
            out_.add_(u_, alpha=keep)
        if r_ is not None:
            out_.mul_(r_)


def wander(
    segments: Segments, m: torch.Tensor, u: torch.Tensor, a: torch.Tensor, r: torch.Tensor, *, beta: float, gain: float,
    lr: float, keep: float, kept: float, begins: bool, share: float | None = None, said: Any = None,
) -> bool:  # fmt: skip
    """A local step: m := β·m + (1 − β)·gain·g, u := keep·u + lr·m, x := kept·a − u·r.

    Where a window ``begins``, what u and a held does not count: u is zero and a := x. Where g is not finite, m stays as it
    is; returns whether all of g was finite.
    """
    finite = []
    for x, g, m_, u_, a_, r_ in segments.runs(m, u, a, r):
        if begins:
            a_.copy_(x.view(-1))
            u_.zero_()
        if share is not None:
            m_.copy_(_momentum(m_, r_, share))
        if g is None:
            m_.mul_(beta)
        else:
            good = g.isfinite()
            finite.append(good.all())
            m_.copy_(torch.where(good, (m_ * beta).add_(g, alpha=(1 - beta) * gain), m_))
        u_.mul_(keep).add_(m_, alpha=lr)
        torch.mul(a_, kept, out=x).addcmul_(u_, r_, value=-1)
    return not finite or bool(torch.stack(finite).all())


def square_sum(segments: Segments) -> float:
    """Σ g², not finite if and only if some g is not."""
    total = 0.0
    for _, g in segments.runs():
        if g is not None:
            total += float(g.double().square().sum())
    return total
