"""The hierarchical all-reduce: float32 sums inside a node, compressed messages between nodes.

    S = sum over the node's ranks of x  each rank its slices, float32    (all-to-all inside)
    y = Q(scale·S + e)                  z = Σ y / divisor + s  o = Q(z)  (``average_rows`` between)
    o to the node's other ranks         encoded, the same bits for all   (all-gather inside)

A message is divided into ``slices``, one per rank of the largest node, and each slice into one row
per node. In a node every rank owns the same number of slices, rounded up, and reduces each with the
owners of that slice in the other nodes. So in a smaller node a rank owns several slices, or its
last ranks none; no node sends more than another.

Note: the divisor. Nodes send sums, because nodes of different size must not weigh the same,
multiplied by the power of two next to 1 / (ranks per node), which costs no rounding and brings them
to the size of averages. With the codec ``none`` the mean is thus (sum of all) / P with one rounding
of the quotient, as in the flat all-reduce.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import TypeVar

import torch

from commpress.codecs import Policy
from commpress.collectives.allreduce import (
    Call,
    Outcome,
    Workspace,
    average_rows,
    exchange,
)
from commpress.collectives.buckets import Message, Span, messages
from commpress.collectives.frame import ALL_GATHER, ALL_TO_ALL, HEADER, NOT_FINITE, Frame
from commpress.collectives.topology import Topology
from commpress.collectives.transports.transport import Transport, part_of
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import (
    BLOCK,
    HASH,
    KIND,
    NUMEL,
    RESIDUAL,
    SHARD,
    SOURCE,
    WIDTH,
    Piece,
    Pieces,
    cut,
)
from commpress.kernels.reference import FP32
from commpress.work import Steps, Work, overlapped

T = TypeVar("T")

# elements of a piece and of a message: one is summed inside nodes while another is between nodes
PIECE = 1 << 21
EXCHANGES = 2  # exchanges between nodes per message in rows
ALONGSIDE = 3  # concurrent messages: to their owners, between nodes, on the way back

Feedbacks = Mapping[int, ErrorFeedback | None]  # of one message, by slice
# replaces a slice by its mean; called like ``reduce_message``


@dataclass(frozen=True)
class Hierarchy:
    """One rank's transports inside its node and between nodes."""

    topology: Topology
    inside: Transport  # among the ranks of its node
    between: Mapping[int, Transport]  # by slice: among its owners, one in each node

    @property
    def slices(self) -> int:
        return self.topology.widest

    @property
    def rows(self) -> int:
        """Rows of a message."""
        return self.slices * len(self.topology.nodes)

    @property
    def share(self) -> int:
        """Slices that a rank of this node owns; its last ranks may own fewer."""
        return share(self.slices, self.inside.size)

    @property
    def scale(self) -> float:
        return 2.0 ** -round(math.log2(self.topology.size / len(self.topology.nodes)))

    @property
    def divisor(self) -> float:
        return self.topology.size * self.scale


def share(slices: int, ranks: int) -> int:
    return -(-slices // ranks)


def owners(topology: Topology, index: int) -> list[int]:
    """Return the owner of slice ``index`` in each node."""
    return [node[index // share(topology.widest, len(node))] for node in topology.nodes]


def hierarchy_of(topology: Topology, transport: Transport) -> Hierarchy:
    """Divide ``transport`` along the nodes; collective, in the same order on every rank."""
    if topology.size != transport.size:
        raise InvalidArgument(
            f"topology {str(topology)!r} has {topology.size} ranks, the transport has "
            f"{transport.size}: name them all"
        )
    nodes = [part_of(transport, node) for node in topology.nodes]
    slices = [part_of(transport, owners(topology, index)) for index in range(topology.widest)]
    (inside,) = filter(None, nodes)
    return Hierarchy(
        topology, inside, {index: owned for index, owned in enumerate(slices) if owned}
    )


# ---------------------------------------------------------------- one message


@dataclass(frozen=True, eq=False)
class Route:
    """Route of one message on one rank."""

    message: Message  # all its rows
    inside: Pieces  # the same pieces in float32, one row per rank of the node
    between: Mapping[int, Message]  # this rank's slices, one row per node

    def zeros(self, device: torch.device | str = "cpu") -> Feedbacks:
        return {
            index: ErrorFeedback.zeros(m.pieces, device) if m.pieces.residual_numel else None
            for index, m in self.between.items()
        }


def routes(
    spans: Sequence[Span], policy: Policy, hierarchy: Hierarchy, *, feedback: bool = True
) -> list[Route]:
    """Cut ``spans`` into messages and say how each travels."""
    cut_up = messages(spans, policy, hierarchy.rows, feedback=feedback, piece=PIECE, message=PIECE)
    return [route(message, hierarchy) for message in cut_up]


def route(message: Message, hierarchy: Hierarchy) -> Route:
    table, nodes, owned = message.pieces.table, len(hierarchy.topology.nodes), hierarchy.share
    inside = cut(
        [Piece(int(line[SOURCE]), int(line[NUMEL]), FP32, 0, 0, False) for line in table],
        hierarchy.inside.size,
        widths=[owned * nodes * int(line[WIDTH]) for line in table],
    )
    between = {}
    for index in hierarchy.between:
        keys, pieces = [], []
        for (name, offset), line, sum_ in zip(message.keys, table, inside.table, strict=True):
            slice_ = nodes * int(line[WIDTH])
            start, first = index * slice_, (index % owned) * slice_
            numel = min(max(int(line[NUMEL]) - start, 0), slice_)
            mark = int(line[HASH]) ^ (index * 0x9E3779B1 & 0xFFFFFFFF)
            keep = bool(line[RESIDUAL] >= 0) and numel > 0
            pieces.append(
                Piece(
                    int(sum_[SHARD]) + first, numel, int(line[KIND]), int(line[BLOCK]), mark, keep
                )
            )
            keys.append((name, offset + start))
        label = zlib.crc32(index.to_bytes(4, "little"), message.label)
        cut_up = cut(pieces, nodes, widths=[int(line[WIDTH]) for line in table])
        between[index] = Message(
            tuple(keys), cut_up, message.codec, label, _back(message, cut_up, pieces, nodes)
        )
    return Route(message, inside, between)


def _back(message: Message, there: Pieces, pieces: Sequence[Piece], nodes: int) -> Pieces:
    if message.mean is message.pieces:
        return there
    lines = zip(pieces, message.mean.table, strict=True)
    back = [piece._replace(kind=int(line[KIND]), block=int(line[BLOCK])) for piece, line in lines]
    return cut(back, nodes, widths=[int(line[WIDTH]) for line in message.mean.table])


# ---------------------------------------------------------------- the algorithm


def reduce_routes(
    buffer: torch.Tensor,
    feedbacks: Sequence[Feedbacks],
    plan: Sequence[Route],
    hierarchy: Hierarchy,
    call: Call,
) -> Steps[list[Outcome]]:
    """Average all messages of one bucket, pipelined, numbered from ``call`` on, whose transport is
    that inside the node. Returns one outcome per slice."""
    jobs = (
        reduce_route(buffer, feedback, route, hierarchy, call.after(i))
        for i, (route, feedback) in enumerate(zip(plan, feedbacks, strict=True))
    )
    every = yield from overlapped(jobs, limit=ALONGSIDE)
    return [outcome for outcomes in every for outcome in outcomes]


def reduce_route(
    buffer: torch.Tensor,
    feedbacks: Feedbacks,
    route: Route,
    hierarchy: Hierarchy,
    call: Call,
) -> Steps[list[Outcome]]:
    """Average one message: sum inside, average own slices between nodes, gather inside, decode."""
    inside, workspace, sequence, *_ = call
    message = route.message
    flag = torch.zeros(1, dtype=torch.uint8, device=buffer.device)
    sums = yield from _sum_inside(buffer, flag, route, inside, workspace, sequence)
    total = _floats(sums[0])
    jobs = []
    for index, part in route.between.items():
        _mark(total, part, flag)
        between = call._replace(
            transport=hierarchy.between[index],
            sequence=sequence * hierarchy.slices + index,
            scale=hierarchy.scale,
            divisor=hierarchy.divisor,
        )
        # begins when all are marked
        jobs.append(average_rows(total, feedbacks.get(index), part, between))
    averaged = yield from _abreast(jobs)
    workspace.give_rows(sums)
    outcomes, back = [outcome for _, outcome in averaged], message.mean
    size = HEADER + back.row_bytes
    reply, lent = _side_by_side(
        [rows for rows, _ in averaged], size, hierarchy, workspace, buffer.device
    )
    outcomes = outcomes or [Outcome(message, True, None, None, workspace)]
    flag.fill_(not all(outcome.finite for outcome in outcomes) or bool(flag))
    every = workspace.rows(reply.shape[1], inside.size, buffer.device)
    frame = Frame(
        ALL_GATHER, inside.size, message.codec, message.pieces.numel, sequence, message.label
    )
    flags = yield from exchange(every, reply, frame, flag, inside, workspace)
    workspace.give_rows(*lent)

    start, finite = perf_counter(), not flags & NOT_FINITE
    if finite:
        rows = every.view(-1, HEADER + back.row_bytes)[: back.rows]
        arithmetic(buffer.device, back).decode(rows[:, HEADER:], buffer, back, gain=1.0 / call.gain)
    workspace.decoded(start)
    workspace.give_rows(every)
    for outcome in outcomes:
        outcome.finite = finite
    return outcomes


def _sum_inside(
    buffer: torch.Tensor,
    flag: torch.Tensor,
    route: Route,
    inside: Transport,
    workspace: Workspace,
    sequence: int,
) -> Steps[torch.Tensor]:
    """Return rows whose first is the sum of this rank's slices, in the order of local ranks."""
    size = HEADER + route.inside.row_bytes
    outbox, inbox = (workspace.rows(size, inside.size, buffer.device) for _ in range(2))
    start = perf_counter()
    arithmetic(buffer.device, route.inside).encode(buffer, outbox[:, HEADER:], flag, route.inside)
    workspace.encoded(start)
    frame = Frame(
        ALL_TO_ALL,
        inside.size,
        route.message.codec,
        route.message.pieces.numel,
        sequence,
        route.message.label,
    )
    flags = yield from exchange(inbox, outbox, frame, flag, inside, workspace)
    workspace.give_rows(outbox)
    start = perf_counter()
    flag.fill_(flags & NOT_FINITE)
    total = _floats(inbox[0])
    for row in inbox[1:]:
        total += _floats(row)
    workspace.encoded(start)
    return inbox


def _side_by_side(
    own: list[torch.Tensor],
    size: int,
    hierarchy: Hierarchy,
    workspace: Workspace,
    device: torch.device,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Join the encoded rows of the own slices to one row, with a valid header only at the start;
    also return the buffers to give back."""
    if len(own) == hierarchy.share == 1:
        return own[0].view(1, -1), own
    reply = workspace.rows(hierarchy.share * len(hierarchy.topology.nodes) * size, 1, device)
    for i, rows in enumerate(own):
        reply[0, i * rows.numel() : (i + 1) * rows.numel()] = rows.view(-1)
    workspace.give_rows(*own)
    return reply, [reply]


def _abreast(jobs: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Run the exchanges of all jobs side by side, with as many waits as the longest job, or two
    without jobs.

    Note: the same waits on every rank. A wait blocks the thread, and with it what other messages
    would send next. If every rank goes through the same phases of the same messages in the same
    order, each has sent what others wait for before it waits. So a rank with several slices must
    not wait more often than one with a single slice, and buckets run one by one.
    """
    results: dict[int, T] = {}
    for turn in count():
        works = []
        for i, job in enumerate(jobs):
            if i not in results:
                try:
                    works.append(next(job))
                except StopIteration as stop:
                    results[i] = stop.value
        if not works and turn >= EXCHANGES:
            break
        yield _All(works)
    return [results[i] for i in range(len(jobs))]


@dataclass
class _All:
    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _floats(row: torch.Tensor) -> torch.Tensor:
    return row[HEADER:].view(torch.float32)


def _mark(total: torch.Tensor, part: Message, flag: torch.Tensor) -> None:
    """Make the sum non-finite if a rank of this node was, even in elements of other owners, so that
    all nodes notice."""
    for line in part.pieces.table:
        if line[NUMEL] > 0:
            total[line[SOURCE] : line[SOURCE] + 1].masked_fill_(flag.bool(), math.nan)
            return
