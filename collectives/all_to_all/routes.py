"""The ways that blocks of bytes take from every rank to every rank, as plans: flat, or by way of
nodes.

Block r of ``inp`` goes to rank r and block r of ``out`` comes from it; both sides know its length,
and the blocks of each buffer lie one behind the other. A route only permutes: every route delivers
the same bytes.

    flat       one message from every rank to every rank
    by_nodes   inside a node, to the member that speaks for the node with the destination; then one
               message from the node to each destination, with the blocks of all members

Between two nodes of g and h ranks the first sends g·h messages, the second h: of the same bytes in
sum.

A plan says for one rank which bytes it copies, sends and receives. It depends on lengths only, so
the plans of the last lengths are kept: with small blocks, working out who speaks for whom takes
longer than sending.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from commpress.collectives.frame import BETWEEN, FLAT, INSIDE, LENGTHS
from commpress.errors import InvalidArgument

INP, OUT, HELD = range(3)  # the buffers of an operation: what goes, what comes, scratch
_ALIGNED = 64  # bytes: where parts of the scratch begin
_KEPT = 16  # plans; one holds about 1 KiB a rank


@dataclass(frozen=True)
class Nodes:
    """Nodes and the ranks that share each; every rank is in one of them. Nodes may differ in
    size."""

    members: tuple[tuple[int, ...], ...]

    @classmethod
    @lru_cache(_KEPT)
    def of(cls, nodes: tuple[tuple[int, ...], ...], size: int) -> "Nodes":
        members = tuple(tuple(sorted(node)) for node in nodes if node)
        if sorted(rank for node in members for rank in node) != list(range(size)):
            raise InvalidArgument(
                f"nodes is {[list(node) for node in nodes]}, expected every rank from 0 to "
                f"{size - 1} in exactly one node, such as [[0, 1], [2, 3]]"
            )
        return cls(members)

    def among(self, sources: Sequence[int | None]) -> "Nodes":
        """The nodes of those who are left, of whom each was rank ``sources`` here."""
        now = {old: new for new, old in enumerate(sources) if old is not None}
        return Nodes.of(
            tuple(tuple(now[r] for r in node if r in now) for node in self.members), len(sources)
        )

    @cached_property
    def home(self) -> dict[int, int]:
        """The node of each rank."""
        return {rank: i for i, node in enumerate(self.members) for rank in node}

    def speaker(self, node: int, rank: int) -> int:
        """The member of ``node`` that speaks with ``rank`` for all members; a rank of the node
        speaks for itself.

        The members take turns, in the order of the other node's members: with nodes of equal size,
        equals meet.
        """
        if self.home[rank] == node:
            return rank
        members = self.members[node]
        return members[self.members[self.home[rank]].index(rank) % len(members)]

    def abroad(self, node: int) -> list[int]:
        """The other nodes."""
        return [i for i in range(len(self.members)) if i != node]


class ByteRange(NamedTuple):
    """Bytes ``start`` to ``stop`` of one of the three buffers."""

    buffer: int
    start: int
    stop: int


class FrameContent(NamedTuple):
    """Content of a message, as its frame says it."""

    numel: int  # bytes
    back: int  # bytes that go the other way
    divided: bytes  # the length of each block in it


Copy = tuple[ByteRange, ByteRange]  # to, from


class Stage(NamedTuple):
    """One exchange: a message to each rank in ``sent``, one from each in ``received``. ``said`` and
    ``due``: their frames."""

    operation: int
    parity: int  # 0 or 1, of the tag: hops of one operation with other peers may meet on the way
    before: tuple[Copy, ...]
    sent: dict[int, ByteRange]
    received: dict[int, ByteRange]
    after: tuple[Copy, ...]
    said: dict[int, FrameContent]
    due: dict[int, FrameContent]


class RoutePlan(NamedTuple):
    hops: tuple[Stage, ...]
    held: int  # bytes of scratch


class Lengths(NamedTuple):
    """Of the blocks of one rank: bytes to and from every rank."""

    rank: int
    inp: tuple[int, ...]
    out: tuple[int, ...]


# for each member of the own node, the lengths of what is to be forwarded for it
Told = tuple[tuple[int, ...], ...]


class _Draft:
    """A plan in the making."""

    def __init__(self) -> None:
        self.hops: list[Stage] = []
        self.held = 0

    def room(self, lengths: Sequence[int]) -> list[ByteRange]:
        """A part of the scratch for blocks of these lengths, side by side."""
        spans = spread(HELD, lengths, self.held)
        self.held += -(-sum(lengths) // _ALIGNED) * _ALIGNED
        return spans

    def lent(self, mates: Sequence[int], told: Told, me: int) -> dict[int, list[ByteRange]]:
        """Room for the blocks that this rank forwards for each mate; its own lie in the tensors."""
        return {m: self.room(lengths) for m, lengths in zip(mates, told, strict=True) if m != me}

    def hop(
        self,
        operation: int,
        parity: int,
        sent: Mapping[int, Sequence[ByteRange]],
        received: Mapping[int, Sequence[ByteRange]],
        after: Iterable[Copy] = (),
    ) -> None:
        """The blocks of a message travel side by side: from and to scratch, where they lie
        apart."""
        outgoing, gathered = self._joined(sent)
        incoming, parts = self._joined(received)
        said = {
            r: FrameContent(_sum(blocks), _sum(received.get(r, ())), _divided(blocks))
            for r, blocks in sent.items()
        }
        due = {
            r: FrameContent(_sum(blocks), _sum(sent.get(r, ())), _divided(blocks))
            for r, blocks in received.items()
        }
        scattered = [(part, stage) for stage, part in parts]
        self.hops.append(
            Stage(
                operation,
                parity,
                tuple(gathered),
                outgoing,
                incoming,
                (*scattered, *_without_empty(after)),
                said,
                due,
            )
        )

    def plan(self) -> RoutePlan:
        return RoutePlan(tuple(self.hops), self.held)

    def _joined(
        self, messages: Mapping[int, Sequence[ByteRange]]
    ) -> tuple[dict[int, ByteRange], list[Copy]]:
        """Each message as one span, and the copies between its part of the scratch and its
        blocks."""
        whole: dict[int, ByteRange] = {}
        copies: list[Copy] = []
        for rank, blocks in messages.items():
            apart = _merged(blocks)
            if len(apart) == 1:
                whole[rank] = apart[0]
                continue
            stages = self.room([_length(part) for part in apart])
            copies += zip(stages, apart, strict=True)
            whole[rank] = (
                ByteRange(HELD, stages[0].start, stages[-1].stop)
                if stages
                else ByteRange(HELD, 0, 0)
            )
        return whole, copies


def spread(buffer: int, lengths: Sequence[int], start: int = 0) -> list[ByteRange]:
    ends = accumulate(lengths, initial=start)
    return [
        ByteRange(buffer, end, end + length) for end, length in zip(ends, lengths, strict=False)
    ]


def _length(span: ByteRange) -> int:
    return span.stop - span.start


def _sum(spans: Sequence[ByteRange]) -> int:
    return sum(map(_length, spans))


def _divided(spans: Sequence[ByteRange]) -> bytes:
    return struct.pack(f"<{len(spans)}q", *map(_length, spans))


def _without_empty(copies: Iterable[Copy]) -> list[Copy]:
    return [copy for copy in copies if _length(copy[0])]


def _merged(spans: Sequence[ByteRange]) -> list[ByteRange]:
    """Without empty ones, and neighbours as one."""
    merged: list[ByteRange] = []
    for span in spans:
        if not _length(span):
            continue
        if merged and merged[-1].buffer == span.buffer and merged[-1].stop == span.start:
            span = ByteRange(span.buffer, merged.pop().start, span.stop)
        merged.append(span)
    return merged


# ---------------------------------------------------------------- routes


@lru_cache(_KEPT)
def flat(lengths: Lengths) -> RoutePlan:
    every = tuple(range(len(lengths.inp)))
    return direct(lengths, every, every, FLAT, 0)


@lru_cache(_KEPT)
def direct(
    lengths: Lengths, to: tuple[int, ...], come_from: tuple[int, ...], operation: int, parity: int
) -> RoutePlan:
    """One hop to these ranks, from those; who is in neither gets no header either."""
    me, inp, out = lengths.rank, spread(INP, lengths.inp), spread(OUT, lengths.out)
    draft = _Draft()
    draft.hop(
        operation,
        parity,
        {r: [inp[r]] for r in to if r != me},
        {r: [out[r]] for r in come_from if r != me},
        [(out[me], inp[me])],
    )
    return draft.plan()


@lru_cache(_KEPT)
def to_everybody(lengths: Lengths) -> RoutePlan:
    """All of ``inp`` to every rank: an all-gather of blocks of any length. ``lengths.inp`` is that
    one length for each."""
    me, out = lengths.rank, spread(OUT, lengths.out)
    own = ByteRange(INP, 0, lengths.inp[me])
    others = [r for r in range(len(out)) if r != me]
    draft = _Draft()
    draft.hop(FLAT, 0, {r: [own] for r in others}, {r: [out[r]] for r in others}, [(out[me], own)])
    return draft.plan()


@lru_cache(_KEPT)
def by_nodes(lengths: Lengths, nodes: Nodes, told: Told) -> RoutePlan:
    me, inp, out = lengths.rank, spread(INP, lengths.inp), spread(OUT, lengths.out)
    home = nodes.home[me]
    mates = nodes.members[home]
    spoken = _spoken_for(nodes, home)
    draft = _Draft()
    blocks = draft.lent(mates, told, me) | {me: [inp[d] for d in spoken[me]]}
    at = spoken[me].index(me)
    draft.hop(
        INSIDE,
        1,
        {m: [inp[d] for d in spoken[m]] for m in mates if m != me},
        {m: blocks[m] for m in mates if m != me},
        [(out[m], blocks[m][at]) for m in mates],
    )
    abroad = {d: [blocks[m][i] for m in mates] for i, d in enumerate(spoken[me]) if d not in mates}
    theirs = {nodes.speaker(i, me): [out[r] for r in nodes.members[i]] for i in nodes.abroad(home)}
    draft.hop(BETWEEN, 0, abroad, theirs)
    return draft.plan()


@lru_cache(_KEPT)
def forwarded(lengths: Lengths, nodes: Nodes) -> Told:
    """Lengths, for each mate, of those own blocks that it forwards."""
    home = nodes.home[lengths.rank]
    spoken = _spoken_for(nodes, home)
    return tuple(tuple(lengths.inp[r] for r in spoken[m]) for m in nodes.members[home])


@lru_cache(_KEPT)
def telling(mates: tuple[int, ...], me: int, mine: tuple[int, ...], count: int) -> RoutePlan:
    """Numbers of 8 bytes: ``mine[i]`` of them go to mate i, ``count`` come from each, in the order
    of the mates."""
    draft = _Draft()
    inp, out = spread(INP, [8 * n for n in mine]), spread(OUT, [8 * count] * len(mates))
    others = [(i, m) for i, m in enumerate(mates) if m != me]
    own = [(out[i], inp[i]) for i, m in enumerate(mates) if m == me]
    draft.hop(LENGTHS, 0, {m: [inp[i]] for i, m in others}, {m: [out[i]] for i, m in others}, own)
    return draft.plan()


def _spoken_for(nodes: Nodes, home: int) -> dict[int, list[int]]:
    """The destinations with which each member of a node speaks: itself among them, its mates
    not."""
    return {
        m: [d for d in sorted(nodes.home) if nodes.speaker(home, d) == m]
        for m in nodes.members[home]
    }
