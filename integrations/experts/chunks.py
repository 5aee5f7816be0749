"""Chunks of tokens, some under way while experts work on another; in backward too.

Forward: all chunks start out; each that arrives goes through the experts and starts back; then all
are awaited. Every start and every wait is a node of autograd's graph, so that backward, which takes
nodes in the opposite order, does the same mirrored.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from commpress.collectives.all_to_all.tokens import NUMBERS
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.integrations.experts.expert_exchange import ExpertExchange

# rows by expert, int64 rows of each → rows
Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TokenChunk:
    """One chunk's way there and back: the numbers of its messages, its plan, and what of it is
    under way."""

    def __init__(self, exchange: "ExpertExchange", topk_idx: torch.Tensor, note: str) -> None:
        self.exchange, self.topk_idx, self.note = exchange, topk_idx, note
        # now: in the same order on every rank, whenever they are used
        self.numbers = exchange.channel.take(NUMBERS + 4)
        self.plan: Any = None
        self.gated = False
        self.there: Any = None  # futures
        self.back: Any = None

    def start(self, steps: Steps[Any], *tensors: torch.Tensor) -> Any:
        return self.exchange.channel.submit(steps, *tensors)

    def out(self, tokens: torch.Tensor, gates: torch.Tensor) -> Steps[Any]:
        """Route and dispatch."""
        steps = self.exchange.routing_steps(
            self.topk_idx, layout="expert_major", note=self.note, sequence=self.numbers
        )
        routing = yield from steps
        self.plan = routing.handle.to(tokens.device)
        number = self.numbers + NUMBERS
        codec, count = self.exchange.codec, self.plan.rows.count
        return (yield from self.exchange.out_steps(self.plan, tokens, gates, count, codec, number))


def in_chunks(
    exchange: "ExpertExchange",
    tokens: torch.Tensor,
    topk_idx: torch.Tensor,
    gates: torch.Tensor,
    experts: Experts,
    count: int,
) -> torch.Tensor:
    """Σ gates · experts for each token, with ``count`` chunks."""
    bounds = [len(tokens) * i // count for i in range(count + 1)]
    parts = [slice(*part) for part in pairwise(bounds)]
    chunks = [
        TokenChunk(exchange, topk_idx[part], f" {i} of {count}") for i, part in enumerate(parts)
    ]
    tickets = [
        _Start.apply(tokens[p], gates[p], chunk) for p, chunk in zip(parts, chunks, strict=True)
    ]
    for i, chunk in enumerate(chunks):
        rows, weights = _Arrive.apply(tickets[i], chunk)
        made = weights[:, None] * experts(rows, torch.from_numpy(chunk.plan.rows.heights))
        tickets[i] = _Return.apply(made.to(rows.dtype), chunk)
    return torch.cat(
        [_Back.apply(ticket, chunk) for ticket, chunk in zip(tickets, chunks, strict=True)]
    )


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, gates: torch.Tensor, chunk: TokenChunk
    ) -> torch.Tensor:
        ctx.chunk, ctx.dtype = chunk, gates.dtype
        chunk.there = chunk.start(chunk.out(tokens, gates), tokens, gates)
        return tokens.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        tokens, gates = ctx.chunk.there.wait()
        return tokens, gates.to(ctx.dtype), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ticket: torch.Tensor, chunk: TokenChunk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.chunk = chunk
        rows, gates = chunk.there.wait()
        return rows, gates

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        chunk, (rows, gates) = ctx.chunk, gradients
        codec, number = chunk.exchange.combine_gradient_codec, chunk.numbers + NUMBERS + 1
        chunk.there = chunk.start(
            chunk.exchange.back_steps(chunk.plan, rows, gates, codec, number), rows, gates
        )
        return rows.new_zeros(()), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, chunk: TokenChunk) -> torch.Tensor:
        ctx.chunk = chunk
        codec, number = chunk.exchange.combine_codec, chunk.numbers + NUMBERS + 2
        chunk.back = chunk.start(
            chunk.exchange.back_steps(chunk.plan, rows, None, codec, number), rows
        )
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.chunk.back.wait()[0], None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, chunk: TokenChunk) -> torch.Tensor:
        ctx.chunk = chunk
        found: torch.Tensor = chunk.back.wait()[0]
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        chunk, number = ctx.chunk, ctx.chunk.numbers + NUMBERS + 3
        codec, count = chunk.exchange.gradient_codec, chunk.plan.rows.count
        steps = chunk.exchange.out_steps(chunk.plan, gradients[0], None, count, codec, number)
        chunk.back = chunk.start(steps, gradients[0])
        return gradients[0].new_zeros(()), None
