"""The ways that blocks of bytes take from every rank to every rank: flat, or by way of nodes.

``inp[r]`` goes to rank r and ``out[r]`` comes from it; both sides know its length. A route only permutes: every route
delivers the same bytes.

    flat            one message from every rank to every rank
    inside_first    inside a node, to the member that speaks for the node with the destination; then one message from the
                    node to each destination, with the blocks of all members
    between_first   one message from each rank to a node, with the blocks for all members; then inside that node

Between two nodes of g and h ranks the first sends g·h messages, the second h, the third g: of the same bytes in sum.
"""

import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from commpress.collectives.frame import BETWEEN, FLAT, INSIDE, LENGTHS, Frame, checksums, pack_rows, verify_rows
from commpress.collectives.rows import Rows
from commpress.collectives.transport import Transport
from commpress.errors import InvalidArgument
from commpress.work import Steps

Blocks = Sequence[torch.Tensor]  # uint8[n], contiguous; in the arguments of a route one for each rank


@dataclass(frozen=True)
class Nodes:
    """Which ranks share a node; every rank is in one of them. Nodes may differ in size."""

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]], size: int) -> "Nodes":
        members = tuple(tuple(sorted(node)) for node in nodes if node)
        if sorted(rank for node in members for rank in node) != list(range(size)):
            raise InvalidArgument(
                f"nodes is {[list(node) for node in nodes]}, expected every rank from 0 to {size - 1} in exactly one node, "
                "such as [[0, 1], [2, 3]]"
            )
        return cls(members)

    @cached_property
    def home(self) -> dict[int, int]:
        """The node of each rank."""
        return {rank: i for i, node in enumerate(self.members) for rank in node}

    @cached_property
    def label(self) -> int:
        return zlib.crc32(repr(self.members).encode())

    def speaker(self, node: int, rank: int) -> int:
        """The member of ``node`` that speaks with ``rank`` for all members; a rank of the node speaks for itself.

        The members take turns, in the order of the other node's members: with nodes of equal size, equals meet.
        """
        if self.home[rank] == node:
            return rank
        members = self.members[node]
        return members[self.members[self.home[rank]].index(rank) % len(members)]


class Scratch:
    """Bytes that outlive a call: a fresh allocation costs ten times a copy."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, numel: int, device: torch.device) -> torch.Tensor:
        """uint8[numel], aligned to 64 bytes or so, its content whatever was there before."""
        with self._lock:
            free = self._free.setdefault(device, [])
            for i, buffer in enumerate(free):
                if buffer.numel() >= numel:
                    return free.pop(i)[:numel]
        length = 1 << max(numel - 1, 4095).bit_length()
        if device.type == "cpu":  # NumPy asks for huge pages, torch does not
            return torch.from_numpy(np.empty(length, np.uint8))[:numel]
        return torch.empty(length, dtype=torch.uint8, device=device)[:numel]

    def give(self, *buffers: torch.Tensor) -> None:
        """Back, once nothing reads or writes them; a buffer of an operation that failed is never given."""
        for buffer in buffers:
            whole = buffer.as_strided((buffer.untyped_storage().nbytes(),), (1,), 0)
            with self._lock:
                free = self._free.setdefault(buffer.device, [])
                free.append(whole)
                free.sort(key=torch.Tensor.numel)


@dataclass(frozen=True)
class Passage:
    """What all steps of one operation on one rank share. ``what`` describes it; lengths and step are filled in."""

    what: Frame
    transport: Transport
    scratch: Scratch
    device: torch.device
    checksum: bool = False

    def swap(self, out: Mapping[int, Blocks], inp: Mapping[int, Blocks], operation: int, tag: int) -> Steps[None]:
        """One message to each rank of ``inp`` with its blocks side by side, one from each rank of ``out``."""
        held: list[torch.Tensor] = []
        outgoing = {r: self._joined(blocks, held, fill=True) for r, blocks in inp.items()}
        incoming = {r: self._joined(blocks, held, fill=False) for r, blocks in out.items()}

        made: dict[tuple[int, ...], Frame] = {}  # one for all messages that are alike

        def frames(messages: Mapping[int, Blocks], others: Mapping[int, torch.Tensor]) -> dict[int, Frame]:
            found = {}
            for r, blocks in messages.items():
                key = (others[r].numel() if r in others else 0, *[b.numel() for b in blocks])
                frame = made.get(key)
                found[r] = made[key] = frame or self._frame(operation, key[1:], key[0])
            return found

        size, wanted, said = self.transport.size, frames(out, outgoing), frames(inp, incoming)
        expected = pack_rows(wanted, size)
        headers = (expected.clone() if said == wanted else pack_rows(said, size)).to(self.device)
        if self.checksum:
            checksums(headers, outgoing)
        answers = torch.zeros_like(headers)
        yield self.transport.exchange(Rows(answers, incoming), Rows(headers, outgoing), expected.to(self.device), tag)
        verify_rows(answers, incoming, wanted, expected, self.transport.rank)
        for r, blocks in out.items():
            _spread(incoming[r], blocks)
        self.scratch.give(*held)

    def _frame(self, operation: int, lengths: Sequence[int], back: int) -> Frame:
        """The label tells how the blocks of a message divide its bytes."""
        label = zlib.crc32(struct.pack(f"<{len(lengths)}q", *lengths), self.what.label)
        return replace(self.what, operation=operation, numel=sum(lengths), label=label, back=back)

    def _joined(self, blocks: Blocks, held: list[torch.Tensor], *, fill: bool) -> torch.Tensor:
        """The blocks as one tensor: themselves where they lie side by side in memory, else scratch."""
        blocks = [b for b in blocks if b.numel()]
        if len(blocks) == 1:
            return blocks[0]
        if not blocks:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        length, at = sum(b.numel() for b in blocks), blocks[0].data_ptr()
        first = blocks[0]
        for b in blocks:
            if b.data_ptr() != at or b.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                break
            at += b.numel()
        else:
            return first.as_strided((length,), (1,))
        joined = self.scratch.take(length, self.device)
        held.append(joined)
        if fill:
            torch.cat(blocks, out=joined)
        return joined


def _spread(message: torch.Tensor, blocks: Blocks) -> None:
    """Copy the parts of a message into its blocks, unless it was received in place."""
    if len(blocks) == 1 and blocks[0] is message:
        return
    at = 0
    for block in blocks:
        part = message[at : at + block.numel()]
        if part.data_ptr() != block.data_ptr():
            block.copy_(part)
        at += block.numel()


# ---------------------------------------------------------------- routes


def flat(out: Blocks, inp: Blocks, passage: Passage) -> Steps[None]:
    tag = 2 * passage.what.sequence
    yield from passage.swap({r: [b] for r, b in enumerate(out)}, {r: [b] for r, b in enumerate(inp)}, FLAT, tag)


def inside_first(out: Blocks, inp: Blocks, passage: Passage, nodes: Nodes, *, even: bool) -> Steps[None]:
    """``even``: every block of every rank has the same length, so nobody needs to be told."""
    me, tag = passage.transport.rank, 2 * passage.what.sequence
    home = nodes.home[me]
    mates = nodes.members[home]
    spoken = {m: [d for d in range(len(inp)) if nodes.speaker(home, d) == m] for m in mates}  # m is among its own
    mine = {m: [inp[d] for d in spoken[m]] for m in mates}
    lengths = yield from _told(passage, mine, len(spoken[me]), even)
    held = {m: passage.scratch.take(sum(lengths[m]), passage.device) for m in mates if m != me}
    blocks = {m: held[m].split(lengths[m]) for m in held} | {me: mine[me]}
    yield from passage.swap({m: blocks[m] for m in held}, {m: mine[m] for m in held}, INSIDE, tag + 1)

    for m in mates:
        out[m].copy_(blocks[m][spoken[me].index(me)])
    abroad = {d: [blocks[m][i] for m in mates] for i, d in enumerate(spoken[me]) if d not in mates}
    others = [i for i in range(len(nodes.members)) if i != home]
    yield from passage.swap(
        {nodes.speaker(i, me): [out[r] for r in nodes.members[i]] for i in others}, abroad, BETWEEN, tag
    )
    passage.scratch.give(*held.values())


def between_first(out: Blocks, inp: Blocks, passage: Passage, nodes: Nodes, *, even: bool) -> Steps[None]:
    me, tag = passage.transport.rank, 2 * passage.what.sequence
    home = nodes.home[me]
    mates = nodes.members[home]
    abroad = [r for r in range(len(inp)) if nodes.home[r] != home]
    landed = {m: [s for s in abroad if nodes.speaker(home, s) == m] for m in mates}
    mine = {m: [out[s] for s in landed[m]] for m in mates}
    lengths = yield from _told(passage, mine, len(landed[me]), even)
    held = {m: passage.scratch.take(sum(lengths[m]), passage.device) for m in mates if m != me}
    blocks = {m: held[m].split(lengths[m]) for m in held} | {me: mine[me]}  # what landed here, for each mate
    others = [i for i in range(len(nodes.members)) if i != home]
    yield from passage.swap(
        {s: [blocks[m][i] for m in mates] for i, s in enumerate(landed[me])},
        {nodes.speaker(i, me): [inp[r] for r in nodes.members[i]] for i in others}, BETWEEN, tag,
    )  # fmt: skip

    out[me].copy_(inp[me])
    yield from passage.swap(
        {m: [out[m], *mine[m]] for m in held}, {m: [inp[m], *blocks[m]] for m in held}, INSIDE, tag + 1
    )
    passage.scratch.give(*held.values())


def _told(passage: Passage, mine: Mapping[int, Blocks], count: int, even: bool) -> Steps[dict[int, list[int]]]:
    """For each mate, the lengths of its ``count`` blocks that this rank is to forward. Inside the node, so it is quick."""
    me = passage.transport.rank
    if even:
        return {m: [mine[me][0].numel() if mine[me] else 0] * count for m in mine}
    tell = {m: torch.tensor([b.numel() for b in blocks], dtype=torch.int64) for m, blocks in mine.items()}
    told = {m: torch.zeros(count, dtype=torch.int64) for m in mine if m != me}

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8).to(passage.device)

    inbox = {m: as_bytes(t) for m, t in told.items()}
    outbox = {m: [as_bytes(t)] for m, t in tell.items() if m != me}
    yield from passage.swap({m: [t] for m, t in inbox.items()}, outbox, LENGTHS, 2 * passage.what.sequence)
    lengths = {m: t.cpu().view(torch.int64).tolist() for m, t in inbox.items()}
    for m, found in lengths.items():
        assert min(found, default=0) >= 0, f"rank {m} told of a negative length"
    return lengths | {me: tell[me].tolist()}
