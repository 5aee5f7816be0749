"""Shared warm-up of local updates: synchronous steps with exactly averaged gradients.

Note: parameters and inner optimizers are equal on every rank until the warm-up ends, and the shared
weights start from there.
"""

import numpy as np
import torch

from commpress.collectives.agreement import gathered
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.errors import Mismatch
from commpress.logs import warn_on_first
from commpress.optim.fragments import Fragment
from commpress.optim.layout import Columns, local
from commpress.work import Steps


class SharedWarmup:
    """Averages gradients of the first ``steps`` steps, a fragment at a time, in the fragment's
    ``work``."""

    def __init__(
        self,
        steps: int,
        fragments: list[Fragment],
        exact: Exchanges,
        channel: Channel,
        control: Channel,
        columns: Columns | None = None,
    ) -> None:
        self.steps, self.fragments, self.channel, self._control = steps, fragments, channel, control
        self._columns = columns
        self.averaged = -1  # the last step with averaged gradients
        self.finite = True  # whether some rank's gradients were finite in that step
        self.dropped = 0  # steps in which some rank's gradients were not finite
        self._parameters = {
            each.name: each.parameter for fragment in fragments for each in fragment.locals
        }
        self._exact = exact
        self._checked = False  # whether ranks were found to begin with equal weights

    def average(self, step: int) -> Steps[None]:
        """Replace gradients by their mean over the ranks with finite ones; once per step, nothing
        after the warm-up.

        A missing gradient on some ranks counts as 0 there; one missing on all stays missing. If no
        rank is finite, all get infinity, as a loss scaler expects.
        """
        if step >= self.steps or self.averaged == step:
            return
        every = list(self._parameters.values())
        present = [float(p.grad is not None) for p in every]
        finite = all(bool(torch.isfinite(local(p.grad)).all()) for p in every if p.grad is not None)
        if self._columns is not None:
            finite = yield from self._columns.agreed(finite)
        head = [float(step), float(finite), *self._digests(), *present]
        heads = yield from gathered(
            head, transport=self._control.transport, sequence=self._control.take()
        )
        same = len(head) - len(present)
        # without the column of whether a rank's gradients are finite
        agreed = np.delete(heads[:, :same], 1, axis=1)
        different = tuple(r for r in range(len(heads)) if (agreed[r] != agreed[0]).any())
        if different:
            raise Mismatch(
                f"the weights of ranks {list(different)} differ from those of rank 0 in warm-up "
                f"step {step}, or the step does. Start every rank from the same weights and load "
                "checkpoints of one step.",
                ranks=different,
            )
        self._checked = True
        count = float(heads[:, 1].sum())
        self.finite = count > 0
        if count < len(heads):
            self.dropped += 1
            wild = [r for r in range(len(heads)) if not heads[r, 1]]
            warn_on_first(
                self._control.rank, "gradients of ranks %s are not finite: they are left out", wild
            )
        wanted = {
            name
            for name, any_ in zip(self._parameters, heads[:, same:].sum(axis=0), strict=True)
            if any_
        }
        for fragment in self.fragments:
            yield from self._average(
                fragment, wanted, finite=finite, share=len(heads) / count if count else 0.0
            )
        self.averaged = step

    def begin_anew(self) -> None:
        """Compare weights again in the next step, among other ranks."""
        self.averaged, self._checked = -1, False

    def _digests(self) -> list[float]:
        if self._checked:
            return []
        return [half for f in self.fragments for half in f.halves()]

    def _average(
        self, fragment: Fragment, wanted: set[str], *, finite: bool, share: float
    ) -> Steps[None]:
        grads = [self._parameters[s.name].grad for s in fragment.spans]
        work = fragment.work
        for out, grad in zip(fragment.views(work), grads, strict=True):
            if grad is None or not finite:
                out.zero_()
            else:
                out.copy_(local(grad))
        yield from fragment.average(self._exact, self.channel)
        if share != 1:
            work.mul_(share) if share else work.fill_(float("inf"))
        for span, out in zip(fragment.spans, fragment.views(work), strict=True):
            p = self._parameters[span.name]
            if span.name in wanted:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                local(p.grad).copy_(out)
