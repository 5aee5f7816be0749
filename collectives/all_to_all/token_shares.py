"""Shares of tokens that several ranks have alike, as under tensor parallelism: each works on its
share, then all have all."""

import zlib
from dataclasses import dataclass

import torch

from commpress.codecs.family import EXACT
from commpress.collectives.all_to_all.executor import Executor
from commpress.collectives.all_to_all.routes import Lengths, to_everybody
from commpress.collectives.all_to_all.tokens import Carrier, PacketForm
from commpress.collectives.frame import FLAT, Frame
from commpress.work import Steps


@dataclass(frozen=True)
class TokenShare:
    """Share of one rank among ``size`` that have the same ``count`` tokens: neighbours, as many as
    the others' or one more."""

    count: int
    rank: int
    size: int
    label: int = 0  # digest of what all must have alike

    def bounds(self, rank: int) -> tuple[int, int]:
        return self.count * rank // self.size, self.count * (rank + 1) // self.size

    @property
    def own(self) -> slice:
        return slice(*self.bounds(self.rank))

    def gather(
        self, tokens: torch.Tensor, extra: torch.Tensor, carrier: Carrier, sequence: int
    ) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
        """All ranks' tokens and what goes with them, when each gives those of its share; exact."""
        form = PacketForm(EXACT, tokens.shape[1], tokens.dtype, extra.shape[1])
        outbox = form.pack(tokens, extra, carrier.rows(len(tokens), form.row_bytes, tokens.device))
        inbox = carrier.rows(self.count, form.row_bytes, tokens.device)
        bounds = [self.bounds(r) for r in range(self.size)]
        received = tuple((stop - start) * form.row_bytes for start, stop in bounds)
        what = f"shares {form.width} {form.dtype} {form.extra}"
        frame = Frame(FLAT, self.size, "none", 0, sequence, zlib.crc32(what.encode(), self.label))
        plan = to_everybody(Lengths(self.rank, (outbox.numel(),) * self.size, received))
        yield from Executor(frame, carrier.transport, carrier.scratch, carrier.checksum).run(
            plan, inbox.reshape(-1), outbox.reshape(-1)
        )
        found = (
            form.tokens(inbox, carrier.scratch, []).clone(memory_format=torch.contiguous_format),
            form.extras(inbox).clone(),
        )
        carrier.scratch.give(outbox, inbox)
        return found
