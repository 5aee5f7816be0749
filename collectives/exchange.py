"""How the tensors of one flat buffer cross a channel: in which messages, with which residuals, and how many numbers they take.

``Exchanges`` cuts each set of tensors once and keeps the result. Rows, matrices (PowerSGD) and sketches of one buffer travel
side by side. Residuals belong to tensors, whatever they travel with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commpress.codecs import Policy
from commpress.collectives.allreduce import Outcome, Workspace, reduce_bucket
from commpress.collectives.buckets import Message, Span, messages
from commpress.collectives.channel import Channel
from commpress.collectives.low_rank import (
    Bases,
    Plan,
    RowsOnly,
    load_bases,
    matrices_of,
    plan_matrices,
    reduce_matrices,
)
from commpress.collectives.sketch import Quanta, SketchPlan, load_quanta, plan_sketches, reduce_sketch
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.work import Steps, overlapped

Whole = Plan | SketchPlan  # tensors that are not cut into rows
Tensors = tuple[list[Span], Sequence[Sequence[int]]]  # where each lies in the buffer, and its shape


class Reduce:
    """The mean over all ranks of some tensors in a flat buffer: rows, matrices and sketches side by side."""

    def __init__(self, rows: list[Message], whole: Sequence[Whole], feedbacks: list[ErrorFeedback | None]) -> None:
        self.rows, self.whole, self.feedbacks = rows, whole, feedbacks
        self.messages = [*rows, *(plan.message for plan in whole)]
        self.sequences = len(rows) + sum(plan.MESSAGES for plan in whole)  # numbers that one call takes
        self.waits = None if whole else 2 * len(rows)  # how often the steps wait, where that is known beforehand

    def steps(self, channel: Channel, buffer: torch.Tensor, *, sequence: int, key: int) -> Steps[list[Outcome]]:
        """Replace the tensors in ``buffer`` (float32) by their means; commit or discard the outcomes.

        ``key`` seeds what is drawn, the same on every rank.
        """
        options: dict[str, Any] = {"transport": channel.transport, "workspace": channel.workspace, "key": key}
        count = len(self.rows)
        rows = reduce_bucket(buffer, self.feedbacks[:count], messages=self.rows, sequence=sequence, **options)
        if not self.whole:
            return (yield from rows)
        jobs: list[Steps[Any]] = []
        sequence += count
        for plan, feedback in zip(self.whole, self.feedbacks[count:], strict=True):
            reduce: Any = reduce_matrices if isinstance(plan, Plan) else reduce_sketch
            jobs.append(reduce(buffer, feedback, plan=plan, sequence=sequence, **options))
            sequence += plan.MESSAGES
        jobs.append(rows)
        *others, first = yield from overlapped(jobs, limit=2)
        return [*first, *others]

    def forget(self, workspace: Workspace) -> None:
        """Let go of the buffers that lie ready for it: it does not come again."""
        for message in self.messages:
            workspace.forget(message)


class Exchanges:
    """All reductions of one object, and what they leave behind. ``feedback``: what compression leaves out is sent later."""

    def __init__(
        self, policy: Policy, size: int, workspace: Workspace, *, feedback: bool = True, seed: int = 0
    ) -> None:
        self.policy, self.size, self.workspace, self.feedback, self.seed = policy, size, workspace, feedback, seed
        self.residuals = ResidualStore()
        self.bases: Bases = {}  # of low-rank codecs
        self.quanta: Quanta = {}  # of sketches
        self._known: dict[tuple[object, ...], Reduce] = {}

    def of(self, tensors: tuple[object, ...], where: Callable[[], Tensors], device: torch.device) -> Reduce:
        """The reduction of these tensors, which ``where`` describes when they first come together.

        ``tensors`` are what they are known by. Those that came with others before leave these: their residuals move along.
        """
        if tensors not in self._known:
            for known in [known for known in self._known if not set(tensors).isdisjoint(known)]:
                self._known.pop(known).forget(self.workspace)
            self._known[tensors] = self._cut(*where(), device)
        return self._known[tensors]

    def _cut(self, spans: list[Span], shapes: Sequence[Sequence[int]], device: torch.device) -> Reduce:
        """Codecs of whole tensors take theirs out; the rest goes in rows."""
        whole: list[Whole] = []
        if matrices := matrices_of(spans, shapes, self.policy):
            whole.append(plan_matrices(matrices, self.size, self.bases, device=device, seed=self.seed))
        whole += plan_sketches(spans, self.policy, self.size, self.quanta)
        taken = {name for plan in whole for name in plan.names}
        others = [span for span in spans if span.name not in taken]
        rows = messages(others, RowsOnly(self.policy), self.size, feedback=self.feedback)
        feedbacks = [self.residuals.attach(m.keys, m.pieces, device) for m in rows]
        for plan in whole:
            keys, pieces = plan.message.keys, plan.message.pieces
            feedbacks.append(self.residuals.attach(keys, pieces, device) if self.feedback else None)
        return Reduce(rows, whole, feedbacks)

    # ------------------------------------------------------------ checkpoints

    def choices(self) -> dict[str, Any]:
        """What codecs have learnt besides residuals: bases of matrices, quanta of sketches."""
        return {"bases": {name: basis.clone() for name, basis in self.bases.items()}, "quanta": dict(self.quanta)}

    def load_choices(self, state: dict[str, Any]) -> None:
        load_bases(self.bases, state.get("bases", {}))
        load_quanta(self.quanta, state.get("quanta", {}))
