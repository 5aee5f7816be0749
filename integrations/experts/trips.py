"""Trips of tokens under autograd, to their experts or back; the gradient of either is the other.

The start and the end of a trip are nodes of autograd's graph. Backward runs them in the opposite
order, so that it starts a trip where forward has ended it. So if forward overlaps chunks with the
experts' computation, backward does, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from commpress.collectives.all_to_all.tokens import NUMBERS
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.integrations.experts.expert_exchange import ExpertExchange, ExpertPlan

# rows by expert, int64 rows of each → rows
Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(eq=False, kw_only=True)
class Trip:
    """One trip ``out`` to experts, or back; ``steps`` makes the steps of forward or backward.

    ``sequence`` numbers its forward, the next number its backward, which may run at another time on
    each rank.
    """

    exchange: "ExpertExchange"
    plan: "ExpertPlan | None" = None
    sequence: int
    out: bool
    count: int | None = None  # rows at the experts; None: all received ones
    _under_way: Callable[[], Any] = tuple

    def steps(self, rows: torch.Tensor, gates: torch.Tensor | None, *, forward: bool) -> Steps[Any]:
        """Make the steps that send rows, with gates or their gradients."""
        exchange, plan, number = self.exchange, self.plan, self.sequence + (not forward)
        assert plan is not None
        if self.out == forward:
            codec = exchange.codec if forward else exchange.gradient_codec
            count = plan.rows.count if self.count is None else self.count
            return exchange.out_steps(plan, rows, gates, count, codec, number)
        codec = exchange.combine_codec if not self.out else exchange.combine_gradient_codec
        return exchange.back_steps(plan, rows, gates, codec, number)

    def start(self, steps: Steps[Any], *tensors: torch.Tensor | None) -> None:
        """Run the steps: now, or for chunks in the background."""
        found = self.exchange.finish(steps, *tensors)
        self._under_way = lambda: found

    def end(self) -> Any:
        """Wait for the started steps, and return their result without keeping it."""
        wait, self._under_way = self._under_way, tuple
        return wait()

    def of(self, rows: torch.Tensor, gates: torch.Tensor | None = None) -> Any:
        """Make the whole trip; return the rows on the other side, with gates if there are any."""
        return _End.apply(_Start.apply(rows, gates, self), self)


@dataclass(eq=False, kw_only=True)
class ChunkTrip(Trip):
    """A trip in the background. The trip out first computes the plan of its chunk."""

    routing: Any = None  # steps

    def steps(self, rows: torch.Tensor, gates: torch.Tensor | None, *, forward: bool) -> Steps[Any]:
        if self.plan is None:
            self.plan = (yield from self.routing).handle.to(rows.device)
        return (yield from super().steps(rows, gates, forward=forward))

    def start(self, steps: Steps[Any], *tensors: torch.Tensor | None) -> None:
        used = [tensor for tensor in tensors if tensor is not None]
        self._under_way = self.exchange.channel.submit(steps, *used).wait


def in_chunks(
    exchange: "ExpertExchange",
    tokens: torch.Tensor,
    topk_idx: torch.Tensor,
    gates: torch.Tensor,
    experts: Experts,
    count: int,
) -> torch.Tensor:
    """Return Σ gates · experts for each token: start all ``count`` chunks, apply the experts to
    each that arrives and start it back, then wait for all."""
    bounds = [len(tokens) * i // count for i in range(count + 1)]
    trips, tickets = [], []
    for i, part in enumerate(slice(*part) for part in pairwise(bounds)):
        # taken now, in the same order on every rank, whenever they are used
        first = exchange.channel.take(NUMBERS + 4)
        routing = exchange.routing_steps(
            topk_idx[part],
            layout="expert_major",
            note=f" {i} of {count}",
            sequence=first,
        )
        first += NUMBERS
        out = ChunkTrip(exchange=exchange, sequence=first, out=True, routing=routing)
        trips.append((out, ChunkTrip(exchange=exchange, sequence=first + 2, out=False)))
        tickets.append(_Start.apply(tokens[part], gates[part], out))
    for i, (out, back) in enumerate(trips):
        rows, weights = _End.apply(tickets[i], out)
        back.plan = out.plan
        assert out.plan is not None
        made = weights[:, None] * experts(rows, torch.from_numpy(out.plan.rows.heights))
        tickets[i] = _Start.apply(made.to(rows.dtype), None, back)
    ends = zip(tickets, trips, strict=True)
    return torch.cat([_End.apply(ticket, back)[0] for ticket, (_, back) in ends])


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, gates: torch.Tensor | None, trip: Trip
    ) -> torch.Tensor:
        ctx.trip, ctx.gates = trip, None if gates is None else gates.dtype
        trip.start(trip.steps(rows, gates, forward=True), rows, gates)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        rows, gates = ctx.trip.end()
        return rows, None if ctx.gates is None else gates.to(ctx.gates), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ticket: torch.Tensor, trip: Trip
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, gates = trip.end()
        ctx.trip, ctx.gates = trip, trip.out and gates is not None
        return rows, gates if ctx.gates else None

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows, gates = gradients[0], gradients[1] if ctx.gates else None
        ctx.trip.start(ctx.trip.steps(rows, gates, forward=False), rows, gates)
        return rows.new_zeros(()), None
