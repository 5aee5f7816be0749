"""Tokens on their way to the ranks of their experts and back: once to a node, then inside it; sums
come back the same way.

Out: a token that experts of a node want crosses to that node once, to the member that
``Nodes.speaker`` names, which deals it out to its mates. Back: every rank gives one row per token
it got, the sum over its experts; a node adds the rows of its ranks, in the order of ranks, and
sends one; the token's own rank adds nodes in their order:

    y[t] = Σ_nodes ( Σ_ranks of the node  row[rank, t] )          each sum from the left, in float32

What travels is rounded as the codec rounds it: a rank's row, and the sum of another node.

A row on the way is a *packet*: one token in the codec's bytes, with scales of its own, and behind
them numbers that are never compressed (its gates, or their gradients). Routes are found out once
and serve dispatch, combine and both their gradients.
"""

import zlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.nn import functional

from commpress.codecs.codec import Codec
from commpress.codecs.family import EXACT
from commpress.collectives.all_to_all.all_to_all import CASTS
from commpress.collectives.all_to_all.executor import Executor
from commpress.collectives.all_to_all.routes import Lengths, Nodes, direct, to_everybody
from commpress.collectives.buckets import FLOATS
from commpress.collectives.frame import BETWEEN, FLAT, HEADER, INSIDE, LENGTHS, LONGEST, Frame
from commpress.collectives.transports.staged import Scratch
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, Mismatch
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import Piece, Pieces, aligned, cut
from commpress.work import Steps

T = TypeVar("T")

NUMBERS = 2  # sequence numbers that ``route_tokens`` takes; every other operation takes one


class Placement:
    """Placement of experts: the rank of each, and its number among those of its rank."""

    def __init__(self, owner: Sequence[int], size: int) -> None:
        self.owner = np.array([*owner, -1], np.int64)  # -1: what no expert wants, at -1
        if not len(owner) or self.owner[:-1].min() < 0 or self.owner.max() >= size:
            raise InvalidArgument(
                f"placement is {list(owner)!r}, expected for each expert the rank that has it, 0 "
                f"to {size - 1}"
            )
        self.size, self.experts = size, len(owner)
        self.local = np.full(self.experts + 1, -1, np.int64)
        for rank in range(size):
            mine = self.on(rank)
            self.local[mine] = np.arange(len(mine))

    @classmethod
    def even(cls, experts: int, size: int) -> "Placement":
        """Neighbouring experts side by side; ranks have the same number, or one more."""
        return cls([e * size // experts for e in range(experts)], size)

    def among(self, sources: Sequence[int | None]) -> "Placement":
        """The same experts among those who are left, each of whom was rank ``sources`` here; those
        of others are masked."""
        now = {old: new for new, old in enumerate(sources) if old is not None}
        found = copy(self)
        found.owner = np.array([now.get(old, -1) for old in self.owner.tolist()], np.int64)
        found.size = len(sources)
        return found

    @property
    def masked(self) -> np.ndarray:
        """bool[experts + 1]: those that no rank has any more; the last is none."""
        return np.append(self.owner[:-1] < 0, False)

    def on(self, rank: int) -> np.ndarray:
        """The experts of a rank, ascending."""
        return np.flatnonzero(self.owner[:-1] == rank)


class Bags(NamedTuple):
    """Sums of rows: which rows each adds, from the left."""

    indices: torch.Tensor  # int64
    offsets: torch.Tensor  # int64[sums]: where each begins

    @classmethod
    def of(cls, sums: np.ndarray, count: int, rows: np.ndarray | None = None) -> "Bags":
        """``sums[i]``: to which sum row i goes (or ``rows[i]``), the first to come first."""
        order = np.argsort(sums, kind="stable")
        offsets = (
            np.concatenate([[0], np.bincount(sums, minlength=count).cumsum()[:-1]])
            if count
            else np.zeros(0, np.int64)
        )
        picked = order if rows is None else rows[order]
        return cls(
            *(torch.from_numpy(np.ascontiguousarray(a, np.int64)) for a in (picked, offsets))
        )

    def to(self, device: torch.device) -> "Bags":
        return Bags(self.indices.to(device), self.offsets.to(device))

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """One row for each sum, zeros where it adds nothing; in float32, or float64 as the rows
        are."""
        if not len(self.offsets) or not len(self.indices) or not rows.shape[1]:
            return rows.new_zeros(len(self.offsets), rows.shape[1], dtype=wide(rows.dtype))
        return functional.embedding_bag(
            self.indices, rows.to(wide(rows.dtype)), self.offsets, mode="sum"
        )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are formed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------- packets


@dataclass(frozen=True)
class PacketForm:
    """Form of packets: a token of ``width`` numbers of ``dtype`` in a codec, then ``extra`` numbers
    of float32."""

    codec: Codec
    width: int
    dtype: torch.dtype
    extra: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS and not (self.codec.lossless and self.dtype == torch.float64):
            raise InvalidArgument(
                f"tokens are {self.dtype}, expected float32, bfloat16 or float16 (or float64 with "
                "codec 'none')"
            )

    @cached_property
    def stored(self) -> torch.dtype | None:
        """The type that travels; None where kernels encode."""
        return self.dtype if self.codec.lossless else CASTS.get(self.codec.spec)

    @cached_property
    def token_bytes(self) -> int:
        size = (
            self.codec.row_bytes(-(-self.width // 8) * 8)
            if self.stored is None
            else self.width * self.stored.itemsize
        )
        return -(-size // 8) * 8

    @cached_property
    def row_bytes(self) -> int:
        return aligned(self.token_bytes + 4 * self.extra)

    def pack(
        self, tokens: torch.Tensor, extra: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """``out`` uint8[n, row_bytes] := tokens [n, width] and what goes with them."""
        if self.extra:
            assert extra is not None
            self.extras(out).copy_(extra)
        if self.stored is not None:
            self._plain(out).copy_(tokens)
        elif len(tokens):
            floats = tokens.to(torch.float32)
            if self.width % 8:
                floats = functional.pad(floats, (0, -self.width % 8))
            pieces = self._pieces(len(tokens))
            flag = torch.zeros(1, dtype=torch.uint8, device=out.device)
            arithmetic(out.device, pieces).encode(
                floats.contiguous().view(-1), out[:, : self.token_bytes], flag, pieces
            )
        return out

    def tokens(
        self, packets: torch.Tensor, scratch: Scratch, held: list[torch.Tensor]
    ) -> torch.Tensor:
        """[n, width] of what came: a view where nothing was encoded, else float32 in ``scratch``,
        in ``held`` to give back."""
        if self.stored is not None:
            return self._plain(packets)
        width = -(-self.width // 8) * 8
        held.append(scratch.take(4 * len(packets) * width, packets.device))
        floats = held[-1].view(torch.float32).view(len(packets), width)
        if len(packets):
            pieces = self._pieces(len(packets))
            arithmetic(packets.device, pieces).decode(
                packets[:, : self.token_bytes], floats.view(-1), pieces
            )
        return floats[:, : self.width]

    def extras(self, packets: torch.Tensor) -> torch.Tensor:
        return packets[:, self.token_bytes : self.token_bytes + 4 * self.extra].view(torch.float32)

    def _plain(self, packets: torch.Tensor) -> torch.Tensor:
        assert self.stored is not None
        return packets[:, : self.width * self.stored.itemsize].view(self.stored)

    def _pieces(self, count: int) -> Pieces:
        """One row for each token: no scale is shared."""
        numel = count * -(-self.width // 8) * 8
        return cut([Piece(0, numel, self.codec.kind, self.codec.block, feedback=False)], count)


# ---------------------------------------------------------------- hops


class TokenHop(NamedTuple):
    """One exchange of packets: which rows of a pool go, and how many to and from every rank."""

    operation: int
    parity: int
    pick: torch.Tensor  # int64: the row of the pool behind each row that goes, by destination
    sent: tuple[int, ...]  # rows
    received: tuple[int, ...]
    targets: tuple[int, ...]
    origins: tuple[int, ...]

    def to(self, device: torch.device) -> "TokenHop":
        return self._replace(pick=self.pick.to(device))

    @property
    def back(self) -> "TokenHop":
        return self._replace(
            sent=self.received, received=self.sent, targets=self.origins, origins=self.targets
        )


@dataclass
class Carrier:
    """Carries packets for one rank, and counts their bytes by whether they leave the node."""

    transport: Transport
    nodes: Nodes
    scratch: Scratch = field(default_factory=Scratch)
    label: int = 0  # digest of options on which ranks must agree
    inside_bytes: int = 0  # sent, headers included
    between_bytes: int = 0

    def rows(self, count: int, row: int, device: torch.device) -> torch.Tensor:
        """uint8[count, row] to be given back to ``scratch``."""
        return self.scratch.take(count * row, device).view(count, row)

    def carry(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        hop: TokenHop,
        kind: str,
        what: str,
        sequence: int,
    ) -> Steps[None]:
        """uint8[n, row] each; ``kind`` and ``what`` name them to peers that expect something
        else."""
        row, rank = inp.shape[1], self.transport.rank
        lengths = Lengths(
            rank, tuple(n * row for n in hop.sent), tuple(n * row for n in hop.received)
        )
        for r in hop.targets:
            if r != rank and self.nodes.home[r] == self.nodes.home[rank]:
                self.inside_bytes += HEADER + lengths.inp[r]
            elif r != rank:
                self.between_bytes += HEADER + lengths.inp[r]
        frame = Frame(
            FLAT, self.transport.size, kind, 0, sequence, zlib.crc32(what.encode(), self.label)
        )
        plan = direct(lengths, hop.targets, hop.origins, hop.operation, hop.parity)
        yield from Executor(frame, self.transport, self.scratch).run(
            plan, out.reshape(-1), inp.reshape(-1)
        )


@dataclass(frozen=True, eq=False)
class TokenRoutes:
    """Routes of one rank's tokens, and of those it forwards and receives; for any number of
    dispatches and combines.

    A pool is this rank's tokens and then those that it forwards for other nodes.
    """

    count: int  # tokens of this rank
    relayed: int  # tokens of other nodes that this rank deals out to its mates
    between: TokenHop | None  # None: all in one hop
    inside: TokenHop
    partials: Bags  # of what comes back inside, for the pool
    # of sums of the own node for each token, then those of other nodes; None: nothing crosses
    totals: Bags | None
    crossing: int  # pairs of a token and another node that wants it
    # place among what arrives of each received row by (source, token); None: it lies so
    order: torch.Tensor | None
    sources: np.ndarray  # of received rows, in that order: the rank each comes from
    # int64[received, k]: the experts that the token goes to, on whatever rank; -1: none
    experts: np.ndarray
    said: np.ndarray  # int64[ranks, n]: what ranks said of themselves

    @property
    def received(self) -> int:
        return len(self.sources)

    def spread(
        self, pool: torch.Tensor, form: PacketForm, carrier: Carrier, sequence: int
    ) -> Steps[torch.Tensor]:
        """Packets that arrive here, in ``carrier.scratch``; ``pool`` has this rank's in front and
        room for those forwarded."""
        what = f"out {form.width} {form.dtype} {form.extra}"
        if self.between is not None:
            outbox = _picked(pool, self.between.pick, carrier)
            yield from carrier.carry(
                pool[self.count :], outbox, self.between, form.codec.spec, what, sequence
            )
            carrier.scratch.give(outbox)
        outbox = _picked(pool, self.inside.pick, carrier)
        inbox = carrier.rows(self.received, form.row_bytes, pool.device)
        yield from carrier.carry(inbox, outbox, self.inside, form.codec.spec, what, sequence)
        carrier.scratch.give(outbox)
        return inbox

    def collect(
        self, packets: torch.Tensor, form: PacketForm, carrier: Carrier, sequence: int
    ) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
        """The sum of each token's packets, one from each rank that got it, and of what goes
        with them."""
        what = f"back {form.width} {form.dtype} {form.extra}"
        inbox = carrier.rows(len(self.inside.pick), form.row_bytes, packets.device)
        yield from carrier.carry(inbox, packets, self.inside.back, form.codec.spec, what, sequence)
        held = [inbox]
        sums = (
            self.partials.sum(form.tokens(inbox, carrier.scratch, held)),
            self.partials.sum(form.extras(inbox).contiguous()),
        )
        carrier.scratch.give(*held)
        if self.between is None:
            return sums
        own, rest = [s[: self.count] for s in sums], [s[self.count :] for s in sums]
        outbox = form.pack(
            rest[0], rest[1], carrier.rows(len(rest[0]), form.row_bytes, packets.device)
        )
        inbox = carrier.rows(self.crossing, form.row_bytes, packets.device)
        yield from carrier.carry(inbox, outbox, self.between.back, form.codec.spec, what, sequence)
        carrier.scratch.give(outbox)
        if self.totals is None:
            found = own
        else:
            held = []
            others = form.tokens(inbox, carrier.scratch, held).to(own[0].dtype), form.extras(inbox)
            found = [self.totals.sum(torch.cat(parts)) for parts in zip(own, others, strict=True)]
            carrier.scratch.give(*held)
        carrier.scratch.give(inbox)
        return found[0], found[1]

    def to(self, device: torch.device) -> "TokenRoutes":
        """Indices where the tokens are."""
        if self.inside.pick.device == device:
            return self
        return moved(self, device, "between", "inside", "partials", "totals", "order")


def moved(what: T, device: torch.device, *fields: str) -> T:
    """Return a dataclass with these fields, where they are not None, on a device."""
    found = {name: getattr(what, name) for name in fields}
    there = {name: each.to(device) for name, each in found.items() if each is not None}
    return replace(what, **there)  # type: ignore[type-var]


def _picked(pool: torch.Tensor, pick: torch.Tensor, carrier: Carrier) -> torch.Tensor:
    out = carrier.rows(len(pick), pool.shape[1], pool.device)
    torch.index_select(pool, 0, pick, out=out)
    return out


# ---------------------------------------------------------------- tokens that several ranks have


@dataclass(frozen=True)
class TokenShare:
    """Share of one rank among ``size`` that have the same ``count`` tokens, as under tensor
    parallelism: neighbours, as many as the others' or one more. Each works on its share, then all
    have all."""

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
        yield from Executor(frame, carrier.transport, carrier.scratch).run(
            plan, inbox.reshape(-1), outbox.reshape(-1)
        )
        found = (
            form.tokens(inbox, carrier.scratch, []).clone(memory_format=torch.contiguous_format),
            form.extras(inbox).clone(),
        )
        carrier.scratch.give(outbox, inbox)
        return found


# ---------------------------------------------------------------- finding the routes


def route_tokens(
    wanted: np.ndarray,
    placement: Placement,
    carrier: Carrier,
    *,
    sequence: int,
    said: Sequence[int] = (),
    note: str = "",
) -> Steps[TokenRoutes]:
    """The routes of tokens that want the experts ``wanted`` (int64[tokens, k], -1 for none);
    collective.

    Before anything else every rank tells every other how many tokens come, with a header that says
    all options; then the lists of experts travel the way that tokens will, and ranks look whether
    they have them. ``said``: numbers that all are told beside; ``note``: what all must have alike.
    """
    transport, nodes = carrier.transport, carrier.nodes
    me, size, (count, k) = transport.rank, transport.size, wanted.shape
    home, mine = np.array([nodes.home[r] for r in range(size)] + [-1]), nodes.home[me]
    ranks = placement.owner[wanted]
    by_node = _marked(home[ranks], len(nodes.members))
    abroad = sorted(nodes.abroad(mine), key=lambda node: nodes.speaker(node, me))
    at, crossing = np.nonzero(by_node[:, abroad].T)
    crossing_to = np.array(abroad, np.int64)[at]
    two = len(nodes.members) > 1
    everybody = tuple(range(size))

    if two:
        relays = np.array(
            [nodes.speaker(node, me) if node != mine else -1 for node in range(len(nodes.members))]
        )
        pick, sent = crossing, np.bincount(relays[crossing_to], minlength=size)
        targets = tuple(sorted(int(relays[node]) for node in abroad))
        origins = tuple(r for r in everybody if home[r] != mine and nodes.speaker(mine, r) == me)
    else:
        by_rank = _marked(ranks, size)
        _, pick = np.nonzero(by_rank.T)
        sent, targets, origins = by_rank.sum(0), everybody, everybody
    numbers = np.concatenate([sent[:, None], np.tile(np.array([said], np.int64), (size, 1))], 1)
    told = yield from _told(numbers, everybody, carrier, f"top {k}{note}", 0, sequence)
    received = _plausible(told[:, 0], origins, carrier)
    first = _hop(BETWEEN if two else FLAT, 0, pick, sent, received, targets, origins)
    own = np.concatenate([np.full((count, 1), me), np.arange(count)[:, None], wanted], 1).astype(
        np.int32
    )
    came = yield from _listed(own, first, carrier, sequence + 1)
    if two:
        between, relayed, mates = first, len(came), nodes.members[mine]
        _check_came(
            came,
            np.repeat(origins, received[list(origins)]),
            placement,
            nodes,
            home,
            me,
            inside=False,
        )
        pool = np.concatenate([own, came])
        by_mate = _marked(placement.owner[pool[:, 2:]], size)[:, list(mates)]
        _, pick = np.nonzero(by_mate.T)
        sent = np.zeros(size, np.int64)
        sent[list(mates)] = by_mate.sum(0)
        told_inside = yield from _told(sent[:, None], mates, carrier, f"top {k}", 1, sequence)
        received = _plausible(told_inside[:, 0], mates, carrier)
        inside = _hop(INSIDE, 1, pick, sent, received, mates, mates)
        came = yield from _listed(pool, inside, carrier, sequence + 1)
        senders = np.repeat(mates, received[list(mates)])
        partials = Bags.of(pick, count + relayed)
    else:
        between, relayed, inside = None, 0, first
        senders = np.repeat(everybody, received)
        partials = Bags.of(pick, count)
    _check_came(came, senders, placement, nodes, home, me, inside=True)
    order = np.lexsort((came[:, 1], came[:, 0]))
    came = came[order]
    return TokenRoutes(
        count,
        relayed,
        between,
        inside,
        partials,
        _totals(by_node[:, mine], mine, crossing, crossing_to),
        len(crossing),
        None if (np.diff(order) == 1).all() else torch.from_numpy(order),
        came[:, 0].astype(np.int64),
        came[:, 2:].astype(np.int64),
        told[:, 1:],
    )


def _marked(where: np.ndarray, count: int) -> np.ndarray:
    """bool[tokens, count]: the places among ``where``; -1 is none."""
    marks = np.zeros((len(where), count + 1), bool)
    marks[np.arange(len(where))[:, None], where] = True
    return marks[:, :count]


def _totals(
    own: np.ndarray, mine: int, crossing: np.ndarray, crossing_to: np.ndarray
) -> Bags | None:
    """Nodes in their order: the own one's sum where it has experts of the token, and those of
    others."""
    if not len(crossing):
        return None
    count, here = len(own), np.flatnonzero(own)
    tokens, nodes = (
        np.concatenate([here, crossing]),
        np.concatenate([np.full(len(here), mine), crossing_to]),
    )
    by_node = np.argsort(nodes, kind="stable")
    rows = np.concatenate([here, count + np.arange(len(crossing))])
    return Bags.of(tokens[by_node], count, rows[by_node])


def _hop(
    operation: int,
    parity: int,
    pick: np.ndarray,
    sent: np.ndarray,
    received: np.ndarray,
    targets: tuple[int, ...],
    origins: tuple[int, ...],
) -> TokenHop:
    picked = torch.from_numpy(np.ascontiguousarray(pick, np.int64))
    return TokenHop(
        operation, parity, picked, tuple(sent.tolist()), tuple(received.tolist()), targets, origins
    )


def _told(
    numbers: np.ndarray,
    peers: Sequence[int],
    carrier: Carrier,
    what: str,
    parity: int,
    sequence: int,
) -> Steps[np.ndarray]:
    """int64[ranks, n] that these peers tell this rank, when it tells each of them its line of
    ``numbers``."""
    lines = tuple(int(r in peers) for r in range(len(numbers)))
    hop = TokenHop(
        LENGTHS, parity, torch.arange(len(peers)), lines, lines, tuple(peers), tuple(peers)
    )
    given = torch.from_numpy(numbers[list(peers)].astype(np.int64).view(np.uint8))
    inbox = torch.zeros_like(given)
    yield from carrier.carry(inbox, given, hop, "counts", what, sequence)
    told = np.zeros_like(numbers, np.int64)
    told[list(peers)] = inbox.numpy().view(np.int64)
    return told


def _plausible(rows: np.ndarray, origins: Sequence[int], carrier: Carrier) -> np.ndarray:
    wrong = [
        r for r, n in enumerate(rows.tolist()) if not 0 <= n <= (LONGEST if r in origins else 0)
    ]
    if wrong:
        raise Mismatch(
            f"rank {carrier.transport.rank} was told of {rows[wrong].tolist()} tokens from ranks "
            f"{wrong}, which cannot be. Every rank must have the same topology and experts.",
            ranks=tuple(wrong),
        )
    return rows


def _listed(pool: np.ndarray, hop: TokenHop, carrier: Carrier, sequence: int) -> Steps[np.ndarray]:
    """int32[received, 2 + k]: source, token and experts of what this hop brings."""
    given = torch.from_numpy(pool[hop.pick.numpy()].view(np.uint8))
    inbox = torch.empty(sum(hop.received), given.shape[1], dtype=torch.uint8)
    yield from carrier.carry(inbox, given, hop, "experts", f"top {pool.shape[1] - 2}", sequence)
    return inbox.numpy().view(np.int32)


def _check_came(
    came: np.ndarray,
    senders: np.ndarray,
    placement: Placement,
    nodes: Nodes,
    home: np.ndarray,
    me: int,
    *,
    inside: bool,
) -> None:
    """Each token is for an expert of this rank (or node), and comes from its rank or from the one
    that forwards for it."""
    sources, wanted = came[:, 0], came[:, 2:]
    known = (
        ((wanted >= -1) & (wanted < placement.experts)).all(1)
        & (sources >= 0)
        & (sources < placement.size)
    )
    there = placement.owner[np.where(known[:, None], wanted, -1)]
    meant = (there == me).any(1) if inside else (home[there] == home[me]).any(1)
    forward = np.array(
        [r if home[r] == home[me] else nodes.speaker(home[me], r) for r in range(placement.size)]
    )
    honest = (sources == senders) | (inside & (forward[np.where(known, sources, 0)] == senders))
    wrong = np.flatnonzero(~(known & meant & honest))
    if len(wrong):
        first = wrong[0]
        raise Mismatch(
            f"rank {senders[first]} sent rank {me} token {came[first, 1]} of rank {sources[first]} "
            f"for experts {wanted[first].tolist()}, none of which are here, or which are not its "
            f"to forward ({len(wrong)} such tokens). Every rank must have the same topology, "
            "placement and number of experts.",
            ranks=tuple(sorted({int(r) for r in senders[wrong]})),
        )
