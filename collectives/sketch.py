"""The sparse all-reduce by a summable sketch: what ranks keep of their gradients is added in cells, and told apart at the end.

    c = x + e        y = top-k(c)        e ← c − y
    cells ← mean of the sketches of y    bits ← or of the bitmaps of y       (two messages, side by side)
    x := y's mean, peeled from the cells

The sum of sparse vectors is as dense as their union, which nobody knows beforehand; a sketch has a fixed size, whatever the
union. If the union turns out too large for the cells, all ranks see it in the same bits, and send the kept elements densely.

Note: fixed point. A value is what is left of a cell after others were taken out of it, so rounding would grow along the chain
of those others. Cells therefore hold whole multiples of a quantum that all ranks know from the last mean, so few that float32
adds them exactly; what rounding and clipping to them leaves out joins the residual. The first call is dense.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from commpress.codecs.family import EXACT
from commpress.codecs.sparse import TopKCodec
from commpress.collectives.allreduce import Outcome, Workspace, check_buffer, exchange, reduce_message
from commpress.collectives.buckets import Message, one_message
from commpress.collectives.frame import ALL_GATHER, ALL_TO_ALL, HEADER, Frame
from commpress.collectives.transport import Transport
from commpress.errors import InvalidArgument
from commpress.kernels import cpu, cpu_sketch
from commpress.work import Steps, overlapped

MESSAGES = 3  # sequence numbers of one call: bitmap, cells, and the dense exchange that may follow


@dataclass
class Sketch:
    """For one buffer on one rank: sizes, residual and scratch."""

    codec: TopKCodec
    sparse: Message  # one row: which elements are kept
    cells: Message
    dense: Message
    residual: torch.Tensor
    workspace: Workspace
    quantum: float = 0.0  # a power of two; 0: nobody knows yet
    fallbacks: int = 0  # calls whose union did not fit the cells

    @classmethod
    def zeros(cls, numel: int, *, density: float, transport: Transport, cells: float = 1.5) -> "Sketch":
        """``density``: share of the elements that a rank keeps; ``cells``: per element that all ranks together keep."""
        if not cells >= 1.25:
            raise InvalidArgument(
                f"cells is {cells!r}, expected at least 1.25 per kept element: with fewer they cannot be told apart"
            )
        codec, ranks = TopKCodec(density), transport.size
        kept = numel * (1 - (1 - density) ** ranks)  # if ranks keep different elements
        count = 3 * math.ceil((cells * kept + 48) / 3)
        return cls(
            codec, one_message(numel, codec, 1), one_message(count, EXACT, ranks, name="cells", feedback=False),
            one_message(numel, EXACT, ranks, name="dense", feedback=False), torch.zeros(numel), Workspace(),
        )  # fmt: skip


_EXACT = 1 << 22  # whole numbers up to here survive float32's mean and back, whatever the number of ranks
_LOAD = 16  # elements of one rank that one cell may hold at most, in all likelihood


def _bits(ranks: int) -> int:
    """Of a value in quanta, so that a cell's sum stays below ``_EXACT``."""
    return int(math.log2(_EXACT / (_LOAD * ranks)))


def sketch_allreduce(buffer: torch.Tensor, sketch: Sketch, *, transport: Transport, sequence: int = 0) -> Steps[bool]:
    """Replace ``buffer`` by the mean of what the ranks kept of it; the rest stays in ``sketch.residual``.

    Returns whether all ranks were finite; if not, buffer and residual are unchanged. Uses ``MESSAGES`` sequence numbers.
    """
    check_buffer(buffer)
    if buffer.device.type != "cpu":
        raise InvalidArgument(f"buffer is on {buffer.device}: the sketch has CPU kernels only, use another codec there")
    numel, workspace, flag = buffer.numel(), sketch.workspace, torch.zeros(1, dtype=torch.uint8)
    row = workspace.wires(sketch.sparse, 1, buffer.device)
    kept, left = torch.zeros(numel), torch.zeros(numel)
    cpu.encode(buffer, row[:, HEADER:], flag, sketch.sparse.pieces, residual=sketch.residual, new_residual=left)
    cpu.decode(row[:, HEADER:], kept, sketch.sparse.pieces)
    workspace.give_wires(row)
    bad = bool(flag.item())
    if sketch.quantum:
        left += kept
        kept.div_(sketch.quantum).round_().clamp_(-(1 << _bits(transport.size)), 1 << _bits(transport.size))
        left -= kept * sketch.quantum
    options: dict[str, Any] = {"transport": transport, "workspace": workspace}
    mean = None
    if sketch.quantum:
        width = math.ceil(math.ceil(numel / 8) / transport.size)
        table, bitmap = torch.zeros(sketch.cells.pieces.numel), torch.zeros(transport.size * width, dtype=torch.uint8)
        if not bad:
            cpu_sketch.add(kept, table, bitmap, seed=sequence)
        else:
            table.fill_(float("nan"))  # so that every rank hears of it
        jobs: list[Steps[object]] = [
            _either(bitmap, numel, width, transport, workspace, sequence),
            reduce_message(table, None, message=sketch.cells, sequence=sequence + 1, **options),
        ]
        outcome = (yield from overlapped(jobs, limit=2))[1]
        assert isinstance(outcome, Outcome)
        if not outcome.finite:
            return False
        whole = (table.double() * transport.size).round_()
        told = torch.empty(numel, dtype=torch.float64)
        if float(whole.abs().max()) <= _EXACT and cpu_sketch.peel(whole, bitmap, told, seed=sequence) == 0:
            mean = (told * (sketch.quantum / transport.size)).float()
        else:
            sketch.fallbacks += 1
    if mean is None:
        mean = kept * sketch.quantum if sketch.quantum else kept
        if bad:
            mean.fill_(float("nan"))
        outcome = yield from reduce_message(mean, None, message=sketch.dense, sequence=sequence + 2, **options)
        if not outcome.finite:
            return False
    peak = float(mean.abs().max())
    if peak > 0:
        sketch.quantum = 2.0 ** (math.ceil(math.log2(peak)) + 2 - _bits(transport.size))
    buffer.copy_(mean)
    sketch.residual = left
    return True


def _either(
    bitmap: torch.Tensor, numel: int, width: int, transport: Transport, workspace: Workspace, sequence: int
) -> Steps[None]:
    """bitmap := the union of all ranks' bitmaps, by way of the owners of its parts."""
    ranks, flag = transport.size, torch.zeros(1, dtype=torch.uint8)
    outbox, inbox = (workspace.rows(HEADER + width, ranks, bitmap.device) for _ in range(2))
    reply = workspace.rows(HEADER + width, 1, bitmap.device)
    outbox[:, HEADER:] = bitmap.view(ranks, width)

    def frame(operation: int) -> Frame:
        return Frame(operation, ranks, "bitmap", numel, sequence)

    yield from exchange(transport.all_to_all, inbox, outbox, frame(ALL_TO_ALL), flag, transport, workspace)
    reply[0, HEADER:] = 0
    for rank in range(ranks):
        reply[0, HEADER:] |= inbox[rank, HEADER:]
    yield from exchange(transport.all_gather, outbox, reply, frame(ALL_GATHER), flag, transport, workspace)
    bitmap.copy_(outbox[:, HEADER:].reshape(-1))
    workspace.give_wires(outbox, inbox, reply)
