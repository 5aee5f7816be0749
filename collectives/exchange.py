"""How the tensors of one flat buffer cross a channel: in which messages, with which residuals, and how many numbers they take.

``Exchanges`` cuts each set of tensors once and keeps the result. Rows, matrices (PowerSGD) and sketches of one buffer travel
side by side; with a topology all of it travels in two levels. Residuals belong to tensors, whatever they travel with.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch

from commpress.codecs import Policy, policy_of
from commpress.collectives.allreduce import Outcome, Workspace, reduce_bucket
from commpress.collectives.buckets import Message, Span, messages
from commpress.collectives.channel import Channel
from commpress.collectives.ef21 import reduce_changes
from commpress.collectives.hierarchical import reduce_routes
from commpress.collectives.levels import LevelLayout, Levels
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
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.work import Steps, overlapped

Whole = Plan | SketchPlan  # tensors that are not cut into rows
Tensors = tuple[list[Span], Sequence[Sequence[int]]]  # where each lies in the buffer, and its shape


class Exchange(Protocol):
    """How some tensors cross a channel, and what they leave behind."""

    spans: list[Span]
    messages: list[Message]
    sequences: int  # numbers that one call takes
    waits: int | None  # how often the steps wait, where that is known beforehand

    def steps(
        self, channel: Channel, buffer: torch.Tensor, *, sequence: int, key: int, gain: float = 1.0
    ) -> Steps[list[Outcome]]:
        """Replace the tensors in ``buffer`` (float32) by their means; commit or discard the outcomes.

        ``key`` seeds what is drawn, the same on every rank. Residuals are of gain · x.
        """

    def forget(self, workspace: Workspace) -> None:
        """Let go of the buffers that lie ready for it: it does not come again."""


class Reduce:
    """The mean over all ranks in one level: rows, matrices and sketches side by side."""

    def __init__(
        self,
        spans: list[Span],
        rows: list[Message],
        whole: Sequence[Whole],
        feedbacks: list[ErrorFeedback | None],
        *,
        estimates: bool,
    ) -> None:
        self.spans, self.rows, self.whole, self.estimates = spans, rows, whole, estimates
        self.messages = [*rows, *(plan.message for plan in whole)]
        self.feedbacks = feedbacks  # of messages
        self.sequences = len(rows) + sum(plan.MESSAGES for plan in whole)
        self.waits = None if whole else 2 * len(rows)

    def steps(
        self, channel: Channel, buffer: torch.Tensor, *, sequence: int, key: int, gain: float = 1.0
    ) -> Steps[list[Outcome]]:
        options: dict[str, Any] = {"transport": channel.transport, "workspace": channel.workspace, "key": key, "gain": gain}
        count, reduce = len(self.rows), reduce_changes if self.estimates else None
        rows = reduce_bucket(
            buffer, self.feedbacks[:count], messages=self.rows, sequence=sequence, reduce=reduce, **options
        )
        if not self.whole:
            return (yield from rows)
        jobs: list[Steps[Any]] = []
        sequence += count
        for plan, feedback in zip(self.whole, self.feedbacks[count:], strict=True):
            one: Any = reduce_matrices if isinstance(plan, Plan) else reduce_sketch
            jobs.append(one(buffer, feedback, plan=plan, sequence=sequence, **options))
            sequence += plan.MESSAGES
        jobs.append(rows)
        *others, first = yield from overlapped(jobs, limit=2)
        return [*first, *others]

    def compensated(self, buffer: torch.Tensor, gain: float) -> torch.Tensor:
        """c = g·x + e of the whole buffer: what the encoder is about to see; of estimates g·x. Measuring only."""
        c = buffer * gain
        if self.estimates:
            return c
        for message, feedback in zip(self.messages, self.feedbacks, strict=True):
            if feedback is not None:
                feedback.settle(message.pieces)
                for start, numel, kept in message.pieces.kept_runs:
                    c[start : start + numel] += feedback.sent[kept : kept + numel]
        return c

    def forget(self, workspace: Workspace) -> None:
        for message in self.messages:
            workspace.forget(message)


class ReduceInLevels:
    """The mean over all ranks in two levels: exact inside a node, compressed between nodes."""

    def __init__(self, spans: list[Span], layout: LevelLayout, levels: Levels) -> None:
        self.spans, self.layout, self.levels = spans, layout, levels
        self.messages = [route.message for route in layout.routes]
        self.sequences = len(self.messages)
        self.waits: int | None = None

    def steps(
        self, channel: Channel, buffer: torch.Tensor, *, sequence: int, key: int, gain: float = 1.0
    ) -> Steps[list[Outcome]]:
        return reduce_routes(
            buffer, self.layout.feedbacks, plan=self.layout.routes, hierarchy=self.levels.hierarchy,
            workspace=channel.workspace, sequence=sequence, key=key, gain=gain,
        )  # fmt: skip

    def forget(self, workspace: Workspace) -> None:
        for message in self.layout.slices():
            workspace.forget(message)


class Exchanges:
    """All exchanges of one object that averages tensors, and what they leave behind.

    ``feedback``: True keeps what compression leaves out and sends it later, "ef21" keeps estimates instead, False neither.
    """

    def __init__(
        self,
        policy: Policy,
        size: int,
        workspace: Workspace,
        *,
        feedback: bool | Literal["ef21"] = True,
        levels: Levels | None = None,
        seed: int = 0,
    ) -> None:
        self.policy, self.size, self.workspace, self.levels, self.seed = policy, size, workspace, levels, seed
        self.feedback, self.estimates = bool(feedback), feedback == "ef21"
        self.residuals = ResidualStore(ef21=self.estimates)
        self.bases: Bases = {}  # of low-rank codecs
        self.quanta: Quanta = {}  # of sketches
        self._exact = policy_of("none")
        self._known: dict[tuple[bool, tuple[object, ...]], Exchange] = {}

    def of(
        self, tensors: tuple[object, ...], where: Callable[[], Tensors], device: torch.device, *, exact: bool = False
    ) -> Exchange:
        """The exchange of these tensors, which ``where`` describes when they first come together.

        ``tensors`` are what they are known by. Those that came with others before leave these: their residuals move along.
        """
        key = exact, tensors
        if key not in self._known:
            spans, shapes = where()
            now = set(tensors)
            self._drop(lambda known: known[0] == exact and not now.isdisjoint(known[1]))
            self._known[key] = self._cut(spans, shapes, self._exact if exact else self.policy, device)
        return self._known[key]

    def use(self, policy: Policy) -> None:
        """``policy`` from the next call on; residuals stay with their tensors."""
        if policy != self.policy:
            self.policy = policy
            self._drop(lambda known: not known[0])

    def pay(self, name: str, out: torch.Tensor, rank: int) -> None:
        """Add what is owed of a tensor to ``out``, so that an exact mean over the ranks carries all of it; owe nothing more."""
        if self.levels is not None:
            self.levels.pay(self.residuals, name, out)
        else:
            self.residuals.pay(name, out, rank, self.size)

    def numels(self) -> dict[str, int]:
        """Name and length of every tensor that has come."""
        return {span.name: span.numel for exchange in self._known.values() for span in exchange.spans}

    def _drop(self, which: Callable[[tuple[bool, tuple[object, ...]]], bool]) -> None:
        for key in [known for known in self._known if which(known)]:
            self._known.pop(key).forget(self.workspace)

    def _cut(self, spans: list[Span], shapes: Sequence[Sequence[int]], policy: Policy, device: torch.device) -> Exchange:
        """Codecs of whole tensors take theirs out; the rest goes in rows."""
        size, whole = self.size, list[Whole]()
        if matrices := matrices_of(spans, shapes, policy):
            whole.append(plan_matrices(matrices, size, self.bases, device=device, seed=self.seed))
        whole += plan_sketches(spans, policy, size, self.quanta)
        attach = partial(self.residuals.attach, device=device)
        if self.levels is not None:
            refuse_whole(whole, "a topology")
            layout = self.levels.layout(spans, RowsOnly(policy), self.residuals, device, feedback=self.feedback)
            return ReduceInLevels(spans, layout, self.levels)
        if self.estimates:
            refuse_whole(whole, "error_feedback='ef21'")
        taken = {name for plan in whole for name in plan.names}
        rows = messages([s for s in spans if s.name not in taken], RowsOnly(policy), size, feedback=self.feedback)
        feedbacks = [attach(m.keys, m.pieces) for m in rows]
        feedbacks += [attach(p.message.keys, p.message.pieces) if self.feedback else None for p in whole]
        return Reduce(spans, rows, whole, feedbacks, estimates=self.estimates)

    # ------------------------------------------------------------ checkpoints

    def choices(self) -> dict[str, Any]:
        """What codecs have learnt besides residuals: bases of matrices, quanta of sketches."""
        return {"bases": {name: basis.clone() for name, basis in self.bases.items()}, "quanta": dict(self.quanta)}

    def load_choices(self, state: dict[str, Any]) -> None:
        load_bases(self.bases, state.get("bases", {}))
        load_quanta(self.quanta, state.get("quanta", {}))


def refuse_whole(plans: Sequence[Whole], what: str) -> None:
    if plans:
        raise InvalidArgument(f"{what} is given, but {plans[0].message.codec!r} knows none: leave one of them out")


