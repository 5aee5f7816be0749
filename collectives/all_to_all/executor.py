"""Walks a plan of an all-to-all: copies, sends, receives, and checks what came."""

import ctypes
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from commpress.collectives.all_to_all.routes import ByteRange, Copy, FrameContent, RoutePlan, Stage
from commpress.collectives.frame import Frame, Rows, pack_rows, stamp_rows, verify_rows
from commpress.collectives.transports.staged import Scratch
from commpress.collectives.transports.transport import Transport
from commpress.work import Steps

_SMALL = 64 << 10  # bytes: below, a call of torch takes longer than the copy

# uint8[n], contiguous: what goes, what comes, scratch
Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Executor:
    """Runs the stages of one operation on one rank. ``what`` describes it; lengths and step are
    filled in."""

    what: Frame
    transport: Transport
    scratch: Scratch

    def run(self, plan: RoutePlan, out: torch.Tensor, inp: torch.Tensor) -> Steps[None]:
        held = self.scratch.take(plan.held, inp.device)
        for hop in plan.hops:
            yield from self._take(hop, (inp, out, held))
        self.scratch.give(held)

    def _take(self, hop: Stage, buffers: Buffers) -> Steps[None]:
        _copy(hop.before, buffers)
        outgoing = {r: _part(buffers, span) for r, span in hop.sent.items()}
        incoming = {r: _part(buffers, span) for r, span in hop.received.items()}
        size = self.transport.size
        frames: dict[FrameContent, Frame] = {}  # one for all messages that are alike
        wanted = self._frames(hop.due, hop.operation, frames)
        expected = pack_rows(wanted, size)
        same = hop.said == hop.due
        headers = (
            expected.clone()
            if same
            else pack_rows(self._frames(hop.said, hop.operation, frames), size)
        )
        if self.transport.checks:
            stamp_rows(headers, outgoing)
        answers = torch.zeros_like(headers)
        tag = 2 * self.what.sequence + hop.parity
        yield self.transport.exchange(
            Rows(answers, incoming), Rows(headers, outgoing), expected, tag
        )
        verify_rows(answers, incoming, wanted, expected, self.transport)
        _copy(hop.after, buffers)

    def _frames(
        self, shares: Mapping[int, FrameContent], operation: int, made: dict[FrameContent, Frame]
    ) -> dict[int, Frame]:
        """The label tells how the blocks of a message divide its bytes."""
        for share in set(shares.values()) - made.keys():
            divided = zlib.crc32(share.divided, self.what.label)
            made[share] = self.what._replace(
                operation=operation,
                numel=share.numel,
                label=divided,
                back=share.back,
                checked=self.transport.checks,
            )
        return {r: made[share] for r, share in shares.items()}


def _part(buffers: Buffers, span: ByteRange) -> torch.Tensor:
    return buffers[span.buffer][span.start : span.stop]


def _copy(copies: Iterable[Copy], buffers: Buffers) -> None:
    starts = [b.data_ptr() for b in buffers] if buffers[0].device.type == "cpu" else None
    for to, source in copies:
        count = to.stop - to.start
        if starts and count < _SMALL:
            ctypes.memmove(
                starts[to.buffer] + to.start, starts[source.buffer] + source.start, count
            )
        else:
            _part(buffers, to).copy_(_part(buffers, source))
