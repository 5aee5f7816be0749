"""Exchanges: the messages, residuals and sequence numbers with which tensors of a flat buffer cross
a channel. Rounds: the exchanges of one backward, optimizer step or outer step, committed or
discarded together.

``Exchanges`` cuts each set of tensors once and keeps the result. Rows and matrices (PowerSGD) of
one buffer travel side by side; with a topology in two levels, one after the other. Residuals belong
to tensors, however tensors are grouped. ``reduce_scatter.Scatter`` is the exchange for state
divided among the ranks.

Headers agree whether the numbers of a message were finite on every rank of a channel. A ``Round``
joins these verdicts: if one exchange was not finite, the new residuals of all are discarded, on
every rank alike; with a ``Consensus``, also on ranks outside the channel that must stay equal.
Futures are set after that, so that nobody sees half a step.

Note: no overlap is lost. DDP waits for all futures of a backward at its end anyway.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from commpress.codecs import Codec, Policy, policy_of
from commpress.collectives.agreement import Consensus
from commpress.collectives.allreduce import (
    Call,
    Outcome,
    Settled,
    Workspace,
    check_buffer,
    reduce_bucket,
    settle,
)
from commpress.collectives.buckets import MESSAGE, Message, Span, messages
from commpress.collectives.channel import Channel
from commpress.collectives.levels import Levels
from commpress.collectives.powersgd import (
    Bases,
    MatrixPlan,
    RowsOnly,
    add_error,
    check_bases,
    factor_message,
    load_bases,
    matrices_of,
    plan_matrices,
    reduce_matrices,
)
from commpress.collectives.two_level import (
    Feedbacks,
    Route,
    reduce_route,
    reduce_routes,
    route,
    routes,
)
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback, Key, Residual, ResidualStore
from commpress.kernels.pieces import NUMEL, SOURCE
from commpress.work import Steps, future_on, overlapped

# gradients become zeros, or NaN, or zeros and an error after backward
ON_NONFINITE = ("skip", "propagate", "raise")
Tensors = tuple[list[Span], Sequence[Sequence[int]]]  # where each lies in the buffer, and its shape


class Exchange(ABC):
    """One buffer's way to its mean over all ranks. ``steps`` replaces the tensors in it and tells
    what that left behind."""

    spans: list[Span]
    messages: list[Message]  # for counters and headers
    sequences: int  # sequence numbers that one call takes
    waits: int | None  # how often the steps wait, if known beforehand
    plans: Sequence[MatrixPlan]  # of tensors that travel as matrices

    @abstractmethod
    def steps(
        self,
        channel: Channel,
        buffer: torch.Tensor,
        call: Call,
    ) -> Steps[list[Outcome]]:
        """Average the tensors in ``buffer`` (float32) in place; the caller commits or discards the
        outcomes.

        The key of ``call``, the same on every rank, seeds random draws. Its ``asks`` travels only
        without two levels.
        """

    def forget(self, workspace: Workspace) -> None:
        """Release the spare buffers of this exchange, which will not run again."""
        for message in self.messages:
            workspace.forget(message)


class FlatExchange(Exchange):
    """Exchange of a buffer as one flat range, ``MESSAGE`` elements per sequence number."""

    plans: Sequence[MatrixPlan] = ()

    def __init__(self, spans: list[Span], named: list[Message]) -> None:
        self.spans, self.messages = spans, named
        self.first, self.numel = (
            (spans[0].source, sum(span.numel for span in spans)) if named else (0, 0)
        )
        self.waits = self.sequences = -(-self.numel // MESSAGE)

    def steps(
        self,
        channel: Channel,
        buffer: torch.Tensor,
        call: Call,
        shares: Sequence[float] = (),
    ) -> Steps[list[Outcome]]:
        """``shares``: weights of the ranks in the mean, equal by default; a rank with share 0 is
        ignored."""
        check_buffer(buffer)
        if not self.messages:
            return []
        x = buffer[self.first :][: self.numel]
        return (yield from self.mean(channel, x, shares or [1.0] * channel.size, call))

    @abstractmethod
    def mean(
        self,
        channel: Channel,
        x: torch.Tensor,
        shares: Sequence[float],
        call: Call,
    ) -> Steps[list[Outcome]]:
        """Replace all elements of ``x`` by their mean."""


@dataclass(eq=False)
class Reduce(Exchange):
    """The mean in one level: rows and matrices side by side."""

    spans: list[Span]
    rows: list[Message]
    plans: Sequence[MatrixPlan]
    feedbacks: list[ErrorFeedback | None]

    def __post_init__(self) -> None:
        self.messages = [*self.rows, *(plan.message for plan in self.plans)]
        self.sequences = len(self.rows) + sum(plan.MESSAGES for plan in self.plans)
        self.waits = None if self.plans else 2 * len(self.rows)

    def steps(
        self,
        channel: Channel,
        buffer: torch.Tensor,
        call: Call,
    ) -> Steps[list[Outcome]]:
        count = len(self.rows)
        rows = reduce_bucket(buffer, self.feedbacks[:count], self.rows, call)
        if not self.plans:
            return (yield from rows)
        jobs: list[Steps[Any]] = []
        call = call.after(count)
        for plan, feedback in zip(self.plans, self.feedbacks[count:], strict=True):
            if feedback is not None:
                feedback.join(plan.message.pieces, channel.rank)
            jobs.append(reduce_matrices(buffer, feedback, plan, call))
            call = call.after(plan.MESSAGES)
        jobs.append(rows)
        *others, first = yield from overlapped(jobs, limit=2)
        return [*first, *others]

    def compensated(self, buffer: torch.Tensor, gain: float) -> torch.Tensor:
        """Return c = g·x + e, the encoder's next input; for measurements only."""
        c = buffer * gain
        for message, feedback in zip(self.messages, self.feedbacks, strict=True):
            if feedback is not None:
                feedback.settle(message.pieces)
                for start, numel, kept in message.pieces.residual_runs:
                    c[start : start + numel] += feedback.sent[kept : kept + numel]
        return c


@dataclass(eq=False)
class ReduceInLevels(Exchange):
    """The mean in two levels: sums inside a node, rows between nodes, each slice with its own
    residuals.

    Factors of matrices travel the same way; their residual is each rank's own, as in one level.
    """

    spans: list[Span]
    routes: list[Route]
    feedbacks: Sequence[Feedbacks]
    matrices: Sequence[tuple[MatrixPlan, ErrorFeedback | None]]
    waits: None = None

    def __post_init__(self) -> None:
        self.plans = [plan for plan, _ in self.matrices]
        self.messages = [way.message for way in self.routes]
        self.messages += [plan.message for plan in self.plans]
        self.sequences = len(self.routes) + sum(plan.MESSAGES for plan in self.plans)
        self._factors: dict[Message, Route] = {}

    def steps(
        self,
        channel: Channel,
        buffer: torch.Tensor,
        call: Call,
    ) -> Steps[list[Outcome]]:
        assert channel.levels is not None
        hierarchy = channel.levels.hierarchy
        inside = call._replace(transport=hierarchy.inside, asks=False)
        outcomes = yield from reduce_routes(buffer, self.feedbacks, self.routes, hierarchy, inside)
        call = inside._replace(transport=channel.transport).after(len(self.routes))

        def mean(
            codec: Codec,
            factor: torch.Tensor,
            message: Message,
            number: int,
            error: torch.Tensor | None,
        ) -> Steps[bool]:
            if message not in self._factors:
                lines = zip(message.keys, message.pieces.table, strict=True)
                spans = [Span(key[0], int(line[SOURCE]), int(line[NUMEL])) for key, line in lines]
                whole = factor_message(spans, codec, hierarchy.rows)
                self._factors[message] = route(
                    replace(whole, codec=message.codec, label=message.label), hierarchy
                )
            way, plain = self._factors[message], inside._replace(sequence=number, gain=1.0)
            feedbacks = {} if error is None else way.zeros(factor.device)
            done = yield from reduce_route(factor, feedbacks, way, hierarchy, plain)
            if error is not None:
                for outcome, at in zip(done, way.between, strict=False):
                    add_error(
                        outcome,
                        message,
                        error,
                        hierarchy.between[at].rank,
                        divisor=hierarchy.divisor,
                        scale=hierarchy.scale,
                    )
            return all(outcome.finite for outcome in done)

        for plan, feedback in self.matrices:
            factors = partial(mean, plan.factors)
            outcomes.append((yield from reduce_matrices(buffer, feedback, plan, call, factors)))
            call = call.after(plan.MESSAGES)
        return outcomes

    def forget(self, workspace: Workspace) -> None:
        for way in (*self.routes, *self._factors.values()):
            for message in way.between.values():
                workspace.forget(message)
        for plan in self.plans:
            workspace.forget(plan.message)


class Exchanges:
    """All exchanges of one object, with their residuals.

    ``feedback``: keep compression errors as residuals and send them later. ``levels``: those of the
    channel, if it has a topology. ``residuals``: a store shared with other objects. ``any_rank``:
    a policy or a state may bring matrices of other ranks.
    """

    def __init__(
        self,
        policy: Policy,
        size: int,
        workspace: Workspace,
        *,
        levels: Levels | None = None,
        feedback: bool = True,
        residuals: ResidualStore | None = None,
        any_rank: bool = False,
    ) -> None:
        self.any_rank = any_rank
        self.policy, self.size, self.workspace, self.levels = policy, size, workspace, levels
        self.feedback = feedback
        self.residuals = ResidualStore() if residuals is None else residuals
        self.bases: Bases = {}  # of low-rank codecs
        self._exact = policy_of("none")
        self._known: dict[tuple[bool, tuple[object, ...]], Exchange] = {}

    def of(
        self,
        tensors: tuple[object, ...],
        where: Callable[[], Tensors],
        device: torch.device,
        *,
        exact: bool = False,
    ) -> Exchange:
        """Return the exchange of these tensors; ``where`` describes them when it is first needed.

        ``tensors`` are the key. A tensor that was in another exchange leaves it and takes its
        residuals along. ``exact``: compress nothing, whatever the policy says.
        """
        key = exact, tensors
        if key not in self._known:
            where_they_lie = where()
            for known in [
                known
                for known in self._known
                if known[0] == exact and not set(tensors).isdisjoint(known[1])
            ]:
                self._known.pop(known).forget(self.workspace)
            self._known[key] = self._cut(
                *where_they_lie, self._exact if exact else self.policy, device
            )
        return self._known[key]

    def known(self, tensors: tuple[object, ...], *, exact: bool = False) -> Exchange | None:
        """Return the exchange of these tensors, if ``of`` has made it."""
        return self._known.get((exact, tensors))

    def forget(self, tensors: tuple[object, ...]) -> None:
        """Release the exchange of these tensors and its buffers; its residuals stay in
        ``residuals``."""
        for key in [key for key in self._known if key[1] == tensors]:
            self._known.pop(key).forget(self.workspace)

    def use(self, policy: Policy) -> None:
        """Cut by ``policy`` from the next call on; residuals stay with their tensors."""
        if policy != self.policy:
            self.policy = policy
            self.recut()

    def recut(self) -> None:
        """Cut again, because the policy has changed, from the next call on."""
        for key in [key for key in self._known if not key[0]]:
            self._known.pop(key).forget(self.workspace)

    def reform(self, size: int) -> None:
        """Cut everything again for ``size`` ranks, after the residuals were handed over."""
        self.size, self.levels = size, None
        for exchange in self._known.values():
            exchange.forget(self.workspace)
        self._known.clear()

    def pay(self, name: str, out: torch.Tensor, rank: int) -> None:
        """Move the residual of a tensor into ``out``, its gradient on this rank, so that an exact
        mean carries all of it."""
        if self.levels is not None and name not in self.bases:
            self.levels.pay(self.residuals, name, out)
        else:
            self.residuals.pay(name, out, rank, self.size)

    def _cut(
        self,
        spans: list[Span],
        shapes: Sequence[Sequence[int]],
        policy: Policy,
        device: torch.device,
    ) -> Exchange:
        """Send tensors with whole-tensor codecs as matrices and the rest in rows."""
        attach, size, bases = self.residuals.attach, self.size, self.bases
        plans = [
            plan_matrices(
                found, size, bases, device=device, factors=factors, any_rank=self.any_rank
            )
            for factors, found in matrices_of(spans, shapes, policy)
        ]

        def kept(message: Message) -> ErrorFeedback | None:
            return attach(message.keys, message.pieces, device) if self.feedback else None

        taken = {name for plan in plans for name in plan.names}
        rest = [span for span in spans if span.name not in taken]
        if self.levels is not None:
            hierarchy = self.levels.hierarchy
            ways = routes(rest, RowsOnly(policy), hierarchy, feedback=self.feedback)
            slices = [
                {i: attach(m.keys, m.pieces, device) for i, m in way.between.items()}
                for way in ways
            ]
            in_ranks = [(plan, kept(plan.message)) for plan in plans]
            return ReduceInLevels(spans, ways, slices, in_ranks)
        rows = messages(rest, RowsOnly(policy), self.size, feedback=self.feedback)
        feedbacks = [attach(m.keys, m.pieces, device) for m in rows] + [
            kept(plan.message) for plan in plans
        ]
        return Reduce(spans, rows, plans, feedbacks)

    # ------------------------------------------------------------ checkpoints

    def choices(self) -> dict[str, Any]:
        """Return what codecs have learnt besides residuals: bases of matrices."""
        return {"bases": {name: basis.clone() for name, basis in self.bases.items()}}

    def check_choices(self, state: dict[str, Any]) -> None:
        """Raise ``StateMismatch`` unless ``load_choices`` accepts ``state``."""
        check_bases(self.bases, state.get("bases", {}), any_rank=self.any_rank)

    def load(self, residuals: Mapping[Key, Residual]) -> None:
        """Load residuals of these tensors."""
        self.residuals.load(residuals)

    def load_choices(self, state: dict[str, Any]) -> None:
        """Load ``choices``; bases that are not in ``state`` start anew."""
        saved = state.get("bases", {})
        load_bases(self.bases, saved, any_rank=self.any_rank)
        if since := self.bases.keys() - saved.keys():
            for name in since:
                del self.bases[name]
            self.recut()


# ---------------------------------------------------------------- rounds


def check_on_nonfinite(value: object, *, propagates: bool = True) -> None:
    """Check the option. ``propagates``: allow "propagate", which needs gradients to pass on."""
    if value not in ON_NONFINITE or (value == "propagate" and not propagates):
        expected = "'skip', 'propagate' or 'raise'" if propagates else "'skip' or 'raise'"
        raise InvalidArgument(f"on_nonfinite is {value!r}, expected {expected}")


class Settlements:
    """Counts the rounds of one object that all ranks have committed or discarded: ranks that
    differ by one have seen different ends of the last."""

    def __init__(self) -> None:
        self.settled, self.taken = 0, True

    def settle(self, *, taken: bool) -> None:
        """Count a round that all ranks have committed (``taken``) or discarded."""
        self.settled, self.taken = self.settled + 1, taken


class Round:
    """Exchanges that are committed or discarded together. Call ``begin`` and ``end`` for each: the
    last to end closes the round.

    The submitting thread calls ``begin``, the thread that runs the steps ``end``.
    ``counts``: count the round there when it closes.
    """

    def __init__(
        self,
        number: int = 0,
        *,
        consensus: Consensus | None = None,
        counts: Settlements | None = None,
    ) -> None:
        self.number, self.consensus, self._counts = number, consensus, counts
        self.finite = True
        self.error: Exception | None = None  # to be raised by the thread that began the round
        self.buffers: list[torch.Tensor] = []  # means that have arrived
        self._outcomes: list[Settled] = []
        self._futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._open, self._complete, self._abandoned, self._failed = 0, False, False, False
        self._lock = threading.Lock()

    def begin(
        self, buffer: torch.Tensor, *, last: bool = False
    ) -> torch.futures.Future[torch.Tensor]:
        """Add an exchange; its future is set to ``buffer`` when the round has closed. ``last``: no
        more begin."""
        future = future_on(buffer.device)
        with self._lock:
            self._open += 1
            self._complete |= last
            self._futures.append((future, buffer))
        return future

    def hold(self) -> None:
        """Keep the round open until one more ``end``, with no buffer."""
        with self._lock:
            self._open += 1

    def end(
        self, buffer: torch.Tensor | None, finite: bool, outcomes: Iterable[Settled]
    ) -> Steps[bool]:
        """End an exchange whose means are in ``buffer``, or not finite; return True if this closes
        the round: then call ``deliver``."""
        with self._lock:
            self._open -= 1
            self.finite &= finite
            self._outcomes += outcomes
            if buffer is not None:
                self.buffers.append(buffer)
            if self._abandoned:
                self._settle(taken=False)
            if self._failed or self._open or not self._complete:
                return False
        if self.consensus is not None:
            self.finite = yield from self.consensus.agreed(self.finite)
        self._settle(taken=self.finite)
        if self._counts is not None:
            self._counts.settle(taken=self.finite)
        return True

    def close(self) -> None:
        """Declare that no more exchanges begin, if the last one was not known: the round closes
        when all have ended."""
        with self._lock:
            self._complete = True
            if not self._open:
                self._settle(taken=self.finite)

    def deliver(self) -> None:
        """Set the futures."""
        for future, buffer in self._futures:
            future.set_result(buffer)
        self._futures.clear()

    def fail(self, error: Exception) -> None:
        """Give up the round: set futures to their buffers as they are, and keep ``error`` for the
        thread that began the round.

        Proposed residuals stay in the workspace: other ranks may have finished the round
        (``handover``).
        """
        with self._lock:
            self.error, self._failed = self.error or error, True
        self.deliver()

    def abandon(self) -> None:
        """Discard a round whose last exchange will never begin, such as that of a backward that was
        aborted."""
        with self._lock:
            self._abandoned = True
            self._settle(taken=False)

    def _settle(self, *, taken: bool) -> None:
        settle(self._outcomes, taken=taken)
        self._outcomes.clear()
