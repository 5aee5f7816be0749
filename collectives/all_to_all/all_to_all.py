"""All-to-all: block r of a rank's input becomes that rank's block on rank r. Flat or by way of
nodes, exact or compressed.

Blocks are runs of rows along the first dimension; their lengths (splits) may differ, be zero, and
change with every call.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Required, TypedDict, Unpack

import torch

from commpress.codecs.codec import Codec
from commpress.codecs.registry import codec_named
from commpress.collectives.all_to_all.codecs_taken import check_codec as check_codec
from commpress.collectives.all_to_all.executor import Executor
from commpress.collectives.all_to_all.routes import (
    Lengths,
    Nodes,
    Told,
    by_nodes,
    flat,
    forwarded,
    telling,
)
from commpress.collectives.buckets import FLOATS
from commpress.collectives.frame import FLAT, LONGEST, Frame
from commpress.collectives.transports.staged import Scratch
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, Mismatch
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import COLUMN, Piece, Pieces, cut
from commpress.work import Steps

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Way:
    """Way that blocks travel, the same on every rank: flat, or by way of ``nodes`` (the ranks of
    each node), with one message from a node to each rank of another. The bits are the same."""

    nodes: Sequence[Sequence[int]] | None = None
    scratch: Scratch = field(default_factory=Scratch, repr=False)

    def carry(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        lengths: Lengths,
        what: Frame,
        transport: Transport,
        *,
        even: bool,
    ) -> Steps[None]:
        """Bytes. ``even``: every block of every rank has the same length, so nobody needs to be
        told."""
        executor = Executor(what, transport, self.scratch)
        if self._members is None:
            yield from executor.run(flat(lengths), out, inp)
            return
        nodes = Nodes.of(self._members, transport.size)
        mine = forwarded(lengths, nodes)
        told = yield from _told(executor, nodes, mine, inp.device, even=even)
        yield from executor.run(by_nodes(lengths, nodes, told), out, inp)

    def label(self, text: str) -> int:
        """Digest of what ranks must agree on and no other field of the header says."""
        return zlib.crc32(text.encode(), self._own_label)

    @cached_property
    def _members(self) -> tuple[tuple[int, ...], ...] | None:
        return None if self.nodes is None else tuple(map(tuple, self.nodes))

    @cached_property
    def _own_label(self) -> int:
        return zlib.crc32(f"{self._members}|".encode())


def _told(
    executor: Executor, nodes: Nodes, mine: Told, device: torch.device, *, even: bool
) -> Steps[Told]:
    """Lengths, for each mate, of the blocks that this rank forwards for it. Inside the node, so
    it is quick."""
    me = executor.transport.rank
    mates = nodes.members[nodes.home[me]]
    count = len(mine[mates.index(me)])
    if even:
        length = max(map(max, filter(None, mine)), default=0)
        return ((length,) * count,) * len(mates)
    tell = (
        torch.tensor([n for lengths in mine for n in lengths], dtype=torch.int64)
        .view(torch.uint8)
        .to(device)
    )
    inbox = torch.zeros(8 * count * len(mates), dtype=torch.uint8, device=device)
    yield from executor.run(telling(mates, me, tuple(map(len, mine)), count), inbox, tell)
    found = inbox.cpu().view(torch.int64).view(len(mates), count).tolist()
    for m, lengths in zip(mates, found, strict=True):
        if min(lengths, default=0) < 0 or sum(lengths) > LONGEST:
            raise Mismatch(
                f"rank {m} told rank {me} of lengths that cannot be: {lengths}", ranks=(m,)
            )
    return tuple(map(tuple, found))


class AllToAllCall(TypedDict, total=False):
    """Arguments of ``all_to_all``."""

    transport: Required[Transport]
    out_splits: Sequence[int] | None
    in_splits: Sequence[int] | None
    way: Way | None
    sequence: int


def all_to_all(out: torch.Tensor, inp: torch.Tensor, **call: Unpack[AllToAllCall]) -> Steps[None]:
    """Like torch's ``all_to_all_single``: ``in_splits[r]`` rows of ``inp`` go to rank r,
    ``out_splits[r]`` come from it.

    Any dtype. Without splits the rows are dealt out evenly. ``sequence`` tells operations under way
    at once apart.
    """
    transport, way = call["transport"], call.get("way") or Way()
    out_splits, in_splits = call.get("out_splits"), call.get("in_splits")
    outs, ins = splits_of(out, inp, out_splits, in_splits, transport)
    kind = str(inp.dtype).removeprefix("torch.")
    what = Frame(
        FLAT, transport.size, kind, 0, call.get("sequence", 0), way.label(f"{tuple(inp.shape[1:])}")
    )
    row = inp.element_size() * _width(inp)
    lengths = Lengths(transport.rank, tuple(n * row for n in ins), tuple(n * row for n in outs))
    yield from way.carry(
        _bytes(out),
        _bytes(inp),
        lengths,
        what,
        transport,
        even=out_splits is None and in_splits is None,
    )


def compressed_all_to_all(
    out: torch.Tensor,
    inp: torch.Tensor,
    *,
    codec: str | Codec,
    transport: Transport,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
    way: Way | None = None,
    sequence: int = 0,
) -> Steps[None]:
    """``all_to_all`` of float32, bfloat16 or float16, each block encoded by its sender and decoded
    by its receiver.

    A rank's block for itself is encoded too: what a row becomes does not depend on where it goes.
    There is no error feedback, because the rows of the next call are others. A NaN or infinity
    makes the codec's block around it NaN, no more; the casts are torch's own, so fp16 overflows to
    infinity. ``none``, and a cast to the dtype the rows have, are exact.
    """
    codec, way = codec_named(codec), way or Way()
    for name, tensor in (("inp", inp), ("out", out)):
        if tensor.dtype not in FLOATS:
            raise InvalidArgument(
                f"{name} has dtype {tensor.dtype}, expected float32, bfloat16 or float16"
            )
    check_codec(codec)
    how: AllToAllCall = {
        "transport": transport,
        "out_splits": out_splits,
        "in_splits": in_splits,
        "way": way,
        "sequence": sequence,
    }
    scratch, held = way.scratch, list[torch.Tensor]()
    if codec.lossless or CASTS.get(codec.spec) == inp.dtype:
        yield from all_to_all(out, inp, **how)
        return
    if codec.spec in CASTS:
        sent, received = (_like(scratch, t, CASTS[codec.spec], held) for t in (inp, out))
        yield from all_to_all(received, sent.copy_(inp), **how)
        out.copy_(received)
        scratch.give(*held)
        return
    outs, ins = splits_of(out, inp, out_splits, in_splits, transport)
    width, device = _width(inp), inp.device
    pieces, answers = (_pieces(codec, [n * width for n in splits]) for splits in (ins, outs))
    held += [scratch.take(pieces.row_bytes, device), scratch.take(answers.row_bytes, device)]
    outbox, inbox = held
    if pieces.numel:
        floats = (
            inp
            if inp.dtype == torch.float32
            else _like(scratch, inp, torch.float32, held).copy_(inp)
        )
        flag = torch.zeros(1, dtype=torch.uint8, device=device)
        arithmetic(device, pieces).encode(floats.view(-1), outbox[None], flag, pieces)
    what = Frame(
        FLAT,
        transport.size,
        codec.spec,
        0,
        sequence,
        way.label(f"{tuple(inp.shape[1:])}{inp.dtype}"),
    )
    even = out_splits is None and in_splits is None
    lengths = Lengths(transport.rank, _lengths(pieces, ins), _lengths(answers, outs))
    yield from way.carry(
        _encoded(inbox, answers), _encoded(outbox, pieces), lengths, what, transport, even=even
    )
    if answers.numel:
        floats = out if out.dtype == torch.float32 else _like(scratch, out, torch.float32, held)
        arithmetic(device, answers).decode(inbox[None], floats.view(-1), answers)
        if floats is not out:
            out.copy_(floats)
    scratch.give(*held)


def _pieces(codec: Codec, numels: Sequence[int]) -> Pieces:
    """One row that holds one piece for every rank with anything to send; so one kernel call encodes
    them all."""
    ends = zip(accumulate(numels), numels, strict=True)
    return cut(
        [Piece(end - n, n, codec.kind, codec.block, feedback=False) for end, n in ends if n], 1
    )


def _encoded(row: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """The blocks of a row, which lie side by side."""
    return row[int(pieces.table[0, COLUMN]) :] if pieces.numel else row[:0]


def _lengths(pieces: Pieces, splits: Sequence[int]) -> tuple[int, ...]:
    """Bytes of each rank's block."""
    edges = pairwise([*pieces.table[:, COLUMN].tolist(), pieces.row_bytes])
    lengths = (end - start for start, end in edges)
    return tuple(next(lengths) if n else 0 for n in splits)


def _like(
    scratch: Scratch, tensor: torch.Tensor, dtype: torch.dtype, held: list[torch.Tensor]
) -> torch.Tensor:
    """Scratch of the shape of ``tensor``."""
    held.append(scratch.take(dtype.itemsize * tensor.numel(), tensor.device))
    return held[-1].view(dtype).view(tensor.shape)


def _width(tensor: torch.Tensor) -> int:
    return prod(tensor.shape[1:])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def splits_of(
    out: torch.Tensor,
    inp: torch.Tensor,
    out_splits: Sequence[int] | None,
    in_splits: Sequence[int] | None,
    transport: Transport,
) -> tuple[list[int], list[int]]:
    """Rows from and to each rank, checked against the tensors."""
    found = []
    for name, tensor, splits in (("out", out, out_splits), ("inp", inp, in_splits)):
        if tensor.dim() < 1 or not tensor.is_contiguous():
            raise InvalidArgument(
                f"{name} of shape {tuple(tensor.shape)} is not contiguous rows: pass .contiguous()"
            )
        if splits is None:
            if tensor.shape[0] % transport.size:
                raise InvalidArgument(
                    f"{name} has {len(tensor)} rows, which {transport.size} ranks cannot share "
                    "evenly: pass splits"
                )
            splits = [tensor.shape[0] // transport.size] * transport.size
        splits = [int(n) for n in splits]
        if len(splits) != transport.size or min(splits) < 0 or sum(splits) != tensor.shape[0]:
            raise InvalidArgument(
                f"splits of {name} are {splits}, expected {transport.size} lengths that add up to "
                f"its {len(tensor)} rows"
            )
        found.append(splits)
    outs, ins = found
    if out.shape[1:] != inp.shape[1:] or out.dtype != inp.dtype or out.device != inp.device:
        raise InvalidArgument(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device} and inp {inp.dtype} "
            f"{tuple(inp.shape)} on {inp.device}: expected the same dtype, device and shape behind "
            "the first dimension"
        )
    if outs[transport.rank] != ins[transport.rank]:
        raise InvalidArgument(
            f"rank {transport.rank} sends itself {ins[transport.rank]} rows and expects "
            f"{outs[transport.rank]}: its own entries of in_splits and out_splits must be equal"
        )
    return outs, ins
