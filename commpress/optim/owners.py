"""Rows of all parameters to the ranks that own them, and back: what the optimizers with divided state send.

Each rank owns one row of every piece (``kernels.pieces``), the row that it averages. Row buffers hold the own rows of all
pieces side by side.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from commpress.codecs.policy import Policy
from commpress.collectives.allreduce import Outcome, Workspace, any_flag, exchange, noise
from commpress.collectives.buckets import Message, Share, Span, messages, share
from commpress.collectives.frame import ALL_GATHER, ALL_TO_ALL, ASKS, FLAGS, HEADER, Frame
from commpress.collectives.transports.transport import Transport
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.kernels import arithmetic
from commpress.kernels.pieces import BLOCK, HASH, KIND, NUMEL, SHARD, WIDTH, Piece, Pieces, cut
from commpress.optim.flat import Flat
from commpress.work import Steps


class Owned(NamedTuple):
    """What this rank owns of a piece: ``numel`` elements of a parameter from ``begin`` on, in row buffers from ``at`` on."""

    parameter: int
    begin: int
    numel: int
    at: int


@dataclass
class _Row:
    """One message and where this rank's row of it lies."""

    message: Message
    pieces: Pieces  # the row alone, as a message of one row
    feedback: ErrorFeedback | None
    first: int
    numel: int

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.first : self.first + self.numel]


class Owners:
    """One way of sending all parameters. Who owns what is the same whatever the codecs are."""

    def __init__(
        self, flat: Flat, policy: Policy, transport: Transport, workspace: Workspace, *, feedback: bool = True
    ) -> None:
        self.flat, self.policy, self.transport, self.workspace, self.feedback = flat, policy, transport, workspace, feedback
        self.residuals = ResidualStore()
        self.shares: dict[str, Share] = {}
        self.lay_out()

    def lay_out(self) -> None:
        """The policy says something else: residuals stay with their parameters."""
        spans = [Span(name, *place) for name, place in zip(self.flat.names, self.flat.places, strict=True)]
        self.rows: list[_Row] = []
        first = 0
        for message in messages(spans, self.policy, self.transport.size, feedback=self.feedback):
            lines = message.pieces.table.tolist()
            own = [Piece(t[SHARD], t[WIDTH], t[KIND], t[BLOCK], t[HASH], False) for t in lines]
            feedback = self.residuals.attach(message.keys, message.pieces, self.flat.device)
            self.rows.append(_Row(message, cut(own, 1), feedback, first, message.pieces.shard))
            first += message.pieces.shard
        self.numel = first
        size = self.transport.size
        self.shares.update({s.name: share(s.numel, self.policy.choose(s.name, s.numel), size) for s in spans})

    def owned(self) -> Iterator[Owned]:
        names = {name: i for i, name in enumerate(self.flat.names)}
        for row in self.rows:
            for (name, offset), t in zip(row.message.keys, row.message.pieces.table.tolist(), strict=True):
                begin = min(self.transport.rank * t[WIDTH], t[NUMEL])
                numel = min(t[WIDTH], t[NUMEL] - begin)
                if numel > 0:
                    yield Owned(names[name], offset + begin, numel, row.first + t[SHARD])

    def gather_means(
        self, work: torch.Tensor, mean: torch.Tensor, *, key: int, sequence: int, asks: bool
    ) -> Steps[tuple[list[Outcome], bool]]:
        """``mean`` := the own rows of the mean of ``work``. Nothing is committed yet; and whether some rank asks."""
        outcomes, asked = [], False
        for number, row in enumerate(self.rows):
            message, pieces, device = row.message, row.message.pieces, self.flat.device
            kernels, size = arithmetic(device), self.transport.size
            outbox, inbox = (self.workspace.wires(message, size, device) for _ in range(2))
            flag = torch.zeros(1, dtype=torch.uint8, device=device)
            old = row.feedback
            new = self.workspace.residual(message, device) if old is not None else None
            kernels.encode(
                work, outbox[:, HEADER:], flag, pieces, key=noise(key, self.transport.rank, 0), residual=old and old.sent,
                residual_scale=old and old.sent_scale, new_residual=new and new.sent, new_scale=new and new.sent_scale,
            )  # fmt: skip
            frame = Frame(ALL_TO_ALL, size, message.codec, pieces.numel, sequence + number, message.label)
            flag = flag | ASKS if asks else flag
            yield from exchange(self.transport.all_to_all, inbox, outbox, frame, flag, self.transport, self.workspace)
            kernels.decode_mean(inbox[:, HEADER:], row.of(mean), pieces, self.transport.rank)
            asked |= bool((inbox[:, FLAGS] & ASKS).any())
            outcomes.append(Outcome(message, not bool(any_flag(inbox)), old, new, self.workspace))
            self.workspace.give_wires(outbox, inbox)
        return outcomes, asked

    def spread(self, values: torch.Tensor, work: torch.Tensor, *, key: int, sequence: int) -> Steps[None]:
        """``work`` := all ranks' rows of ``values``."""
        for number, row in enumerate(self.rows):
            message, device = row.message, self.flat.device
            kernels, size = arithmetic(device), self.transport.size
            reply, every = self.workspace.wires(message, 1, device), self.workspace.wires(message, size, device)
            flag = torch.zeros(1, dtype=torch.uint8, device=device)
            kernels.encode(row.of(values), reply[:, HEADER:], flag, row.pieces, key=noise(key, self.transport.rank, 1))
            frame = Frame(ALL_GATHER, size, message.codec, message.pieces.numel, sequence + number, message.label)
            yield from exchange(self.transport.all_gather, every, reply, frame, flag, self.transport, self.workspace)
            kernels.decode(every[:, HEADER:], work, message.pieces)
            self.workspace.give_wires(reply, every)

    def scale(self, name: str, factor: torch.Tensor) -> None:
        """What is owed of a parameter is from now on in other units: multiplied by ``factor``, element by element."""
        for (whose, offset), sent, _ in self.residuals.places():
            if whose == name:
                sent.mul_(factor.view(-1)[offset : offset + sent.numel()])
