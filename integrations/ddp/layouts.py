"""How DDP's buckets are cut into messages: found once for each bucket, known by its parameters, and kept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commpress.codecs import Policy, policy_of
from commpress.collectives.allreduce import Workspace
from commpress.collectives.buckets import Message, Span, messages
from commpress.collectives.levels import LevelLayout, Levels
from commpress.collectives.low_rank import Bases, Plan, RowsOnly, matrices_of, plan_matrices
from commpress.collectives.sketch import Quanta, SketchPlan, plan_sketches
from commpress.errors import InvalidArgument, StateMismatch
from commpress.feedback import ErrorFeedback, ResidualStore

Apart = Plan | SketchPlan  # tensors that are not cut into rows


class Layout:
    """How one bucket is cut into messages, and how these travel between and inside nodes."""

    def __init__(
        self, rows: list[Message], plans: Sequence[Apart], feedbacks: list[ErrorFeedback | None], spans: list[Span]
    ) -> None:
        self.rows, self.plans, self.spans = rows, plans, spans
        self.messages = [*rows, *(plan.message for plan in plans)]
        self.feedbacks = feedbacks  # of messages
        self.sequences = len(rows) + sum(plan.MESSAGES for plan in plans)
        self.levels: LevelLayout | None = None
        self.scratch: torch.Tensor | None = None  # float32 copy of a bucket of another dtype

    def compensated(self, buffer: torch.Tensor, gain: float, *, owed: bool) -> torch.Tensor:
        """c = g·x + e of the whole bucket: what the encoder is about to see, or with EF21 g·x. Measuring only."""
        c = buffer * gain
        if not owed:
            return c
        for message, feedback in zip(self.messages, self.feedbacks, strict=True):
            if feedback is not None:
                feedback.settle(message.pieces)
                for start, numel, kept in message.pieces.kept_runs:
                    c[start : start + numel] += feedback.sent[kept : kept + numel]
        return c


@dataclass
class Layouts:
    """All layouts of one state. A parameter without a name gets a number, in the order in which DDP first brings it."""

    policy: Policy
    residuals: ResidualStore
    workspace: Workspace
    size: int
    bases: Bases
    quanta: Quanta
    levels: Levels | None
    feedback: bool
    seed: int
    names: dict[int, str]  # by id of the parameter
    numels: dict[str, int]  # of the parameters known beforehand
    _exact: Policy = field(default_factory=lambda: policy_of("none"))
    brought: dict[str, int] = field(default_factory=dict)  # name → elements, in the order in which DDP first brought them
    expected: list[str] = field(default_factory=list)  # names of the parameters that come, of a state that was saved
    _known: dict[tuple[object, ...], Layout] = field(default_factory=dict)

    def of(self, bucket: dist.GradBucket, buffer: torch.Tensor, *, exact: bool) -> Layout:
        parameters = bucket.parameters()
        key = (exact, *map(id, parameters))
        if key not in self._known:
            spans = self._spans(parameters, bucket.gradients(), buffer.numel())
            self._forget(exact, parameters)
            shapes = [parameter.shape for parameter in parameters]
            self._known[key] = self._plan(spans, shapes, self._exact if exact else self.policy, buffer.device)
        return self._known[key]

    def use(self, policy: Policy) -> None:
        """``policy`` from the next bucket on; residuals stay with their parameters."""
        if policy != self.policy:
            self.policy = policy
            for key in [key for key in self._known if not key[0]]:
                self._drop(self._known.pop(key))

    def pay(self, parameter: torch.Tensor, out: torch.Tensor, rank: int) -> None:
        """Add what is owed of ``parameter`` to its gradient on this rank, so that an exact mean carries all of it."""
        name = self.names.get(id(parameter))
        if name is not None and self.levels is not None:
            self.levels.pay(self.residuals, name, out)
        elif name is not None:
            self.residuals.pay(name, out, rank, self.size)

    def compressed(self) -> dict[str, int]:
        """Name and length of every parameter that is not left exact, as far as known; the same on every rank."""
        known = {span.name: span.numel for layout in self._known.values() for span in layout.spans} | self.numels
        return {name: known[name] for name in sorted(known) if not self.policy.choose(name, known[name]).lossless}

    def _spans(self, parameters: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor], numel: int) -> list[Span]:
        spans, at = [], 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = self._name(parameter)
            spans.append(Span(name, at, gradient.numel()))
            at += gradient.numel()
        if at != numel:
            raise InvalidArgument(f"a bucket of {numel} elements has gradients of {at}: unknown layout")
        return spans

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self.names:
            name = self.expected.pop(0) if self.expected else f"#{len(self.names):05d}"
            if self.numels.get(name, parameter.numel()) != parameter.numel():
                raise StateMismatch(
                    f"DDP brings {parameter.numel()} elements where the saved state expects {name!r} with {self.numels[name]}: "
                    "call state.reconnect(named_parameters=ddp.module.named_parameters()) before the first backward"
                )
            self.names[id(parameter)] = name
        self.brought.setdefault(self.names[id(parameter)], parameter.numel())
        return self.names[id(parameter)]

    def _plan(self, spans: list[Span], shapes: list[torch.Size], policy: Policy, device: torch.device) -> Layout:
        """Codecs of whole tensors take theirs out; the rest goes in rows."""
        matrices, plans = matrices_of(spans, shapes, policy), list[Apart]()
        if matrices:
            plans.append(plan_matrices(matrices, self.size, self.bases, device=device, seed=self.seed))
        plans += plan_sketches(spans, policy, self.size, self.quanta)
        if plans and (self.levels is not None or self.residuals.ef21):
            what = "a topology" if self.levels is not None else "error_feedback='ef21'"
            raise InvalidArgument(f"{what} is given, but {plans[0].message.codec!r} knows none: leave one of them out")
        if self.levels is not None:
            levels = self.levels.layout(spans, RowsOnly(policy), self.residuals, device, feedback=self.feedback)
            layout = Layout([route.message for route in levels.routes], (), [], spans)
            layout.levels = levels
            return layout
        taken = {name for plan in plans for name in plan.names}
        rows = messages([s for s in spans if s.name not in taken], RowsOnly(policy), self.size, feedback=self.feedback)
        feedbacks = [self.residuals.attach(m.keys, m.pieces, device) for m in rows]
        for plan in plans:
            keys, pieces = plan.message.keys, plan.message.pieces
            feedbacks.append(self.residuals.attach(keys, pieces, device) if self.feedback else None)
        return Layout(rows, plans, feedbacks, spans)

    def _forget(self, exact: bool, parameters: Sequence[torch.Tensor]) -> None:
        """Drop layouts whose parameters come in other buckets from now on: their residuals move away."""
        now = set(map(id, parameters))
        for key in [key for key in self._known if key[0] == exact and not now.isdisjoint(key[1:])]:
            self._drop(self._known.pop(key))

    def _drop(self, layout: Layout) -> None:
        for message in layout.messages if layout.levels is None else layout.levels.slices():
            self.workspace.forget(message)
