"""The sparse all-reduce by a summable sketch: what ranks keep of their gradients is added in cells,
and told apart at the end.

    c = g·x + e        y = top-k(c)        e ← c − y
    cells ← mean of the sketches of y      bits ← or of the bitmaps of y  (two messages, side by side)
    x := y's mean / g, peeled from the cells

The sum of sparse vectors is as dense as their union, which nobody knows beforehand; a sketch has a
fixed size, whatever the union. If the union turns out too large for the cells, all ranks see it in
the same bits, and send the kept elements densely.

Note: fixed point. A value is what is left of a cell after others were taken out of it, so rounding
would grow along the chain of those others. Cells therefore hold whole multiples of a quantum, so
few that float32 adds them exactly; what rounding to them leaves out joins the residual. Each
parameter has its own quantum, from its last mean, which all ranks know; where one has none yet, or
a rank's values have outgrown it, the exchange is dense. Values are never cut off: a mean that was
cut off would give a smaller quantum, which would cut off more, until nothing is left.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, ClassVar, Unpack

import numpy as np
import torch

from commpress.codecs.family import EXACT
from commpress.codecs.policy import Policy, policy_of
from commpress.codecs.whole_tensors import SketchCodec
from commpress.collectives import two_level
from commpress.collectives.allreduce import (
    Outcome,
    ScaledCall,
    Workspace,
    check_buffer,
    exchange,
    reduce_message,
)
from commpress.collectives.buckets import PIECE, Message, Span, messages, one_message
from commpress.collectives.ef21 import as_changes
from commpress.collectives.frame import ALL_GATHER, ALL_TO_ALL, HEADER, Frame
from commpress.collectives.transports.transport import Transport
from commpress.collectives.two_level import Feedbacks, Hierarchy, LevelsCall, Route
from commpress.errors import InvalidArgument, StateMismatch
from commpress.feedback import ErrorFeedback
from commpress.kernels.cpu import cells as cpu_cells
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.pieces import BLOCK, HASH, KIND, NUMEL, SOURCE, Piece, Pieces, cut
from commpress.work import Steps, overlapped

Peaks = dict[str, float]  # parameter → the largest magnitude in its mean
Quanta = dict[str, float]  # parameter → a power of two, the same on every rank
# whole numbers up to here survive float32's mean and back, whatever the number of ranks
_EXACT = 1 << 22
_ADDED = 1 << 24  # float32 adds whole numbers exactly up to here
_LOAD = 16  # elements of one rank that one cell may hold at most, in all likelihood
_TOO_MUCH = float(1 << 30)  # in a cell: its rank has values that cells cannot carry
_LEAST = 2.0**-120  # of quanta, so that float32 can divide by them


@dataclass(eq=False)
class SketchPlan:
    """Plan for tensors that share a codec and a table of cells: those of one bucket, or of one
    slice of it."""

    # sequence numbers of one call: bitmap, cells, and the dense exchange that may follow
    MESSAGES: ClassVar[int] = 3

    names: tuple[str, ...]  # of the parameter to which each piece belongs
    starts: np.ndarray  # of each piece, where all lie side by side; one more at the end
    message: Message  # names and places of residuals; nothing is sent in its layout
    sparse: Pieces  # one row: what this rank keeps, found in the bucket
    compact: Pieces  # the same row, all pieces side by side
    cells: Message
    dense: Message
    quanta: Quanta  # of the whole model

    def sent_bytes(self, ranks: int) -> int:
        """By one rank to its peers in one call that need not go densely, headers included."""
        bitmap = math.ceil(math.ceil(self.sparse.numel / 8) / ranks)
        return 2 * (ranks - 1) * (HEADER + bitmap + HEADER + self.cells.pieces.row_bytes)

    def factors(self) -> np.ndarray | None:
        """The quantum of each piece, None if some has none."""
        known = [self.quanta.get(name, 0.0) for name in self.names]
        return np.array(known) if all(known) else None


@dataclass
class SketchOutcome(Outcome):
    peaks: Peaks = field(default_factory=dict)  # of the mean
    known: Quanta = field(default_factory=dict)  # of the whole model, until now
    quanta: Quanta = field(default_factory=dict)  # what they are after this call

    def commit(self) -> None:
        super().commit()
        self.known.update(self.quanta)


def plan_sketches(
    spans: Sequence[Span], policy: Policy, ranks: int, quanta: Quanta
) -> list[SketchPlan]:
    """One for each sketch codec among ``spans``; the tensors of other codecs are left out."""
    return [
        _plan(codec, message, ranks, quanta)
        for codec, message in _by_codec(spans, policy, ranks, piece=PIECE)
    ]


def _by_codec(
    spans: Sequence[Span], policy: Policy, rows: int, *, piece: int
) -> list[tuple[SketchCodec, Message]]:
    """The tensors of each sketch codec as one message, cut into pieces for their residuals."""
    chosen: dict[SketchCodec, list[Span]] = {}
    for span in spans:
        codec = policy.choose(span.name, span.numel)
        if isinstance(codec, SketchCodec) and span.numel:
            chosen.setdefault(codec, []).append(span)
    found = []
    for codec, of in chosen.items():
        numel = sum(span.numel for span in of)
        (message,) = messages(of, policy_of(codec.kept), rows, piece=piece, message=numel)
        found.append((codec, message))
    return found


def _plan(codec: SketchCodec, message: Message, ranks: int, quanta: Quanta) -> SketchPlan:
    """Of the elements of ``message``, some of whose pieces may have none."""
    every = [
        (name, line)
        for (name, _), line in zip(message.keys, message.pieces.table, strict=True)
        if line[NUMEL]
    ]
    numel, names = message.pieces.numel, tuple(name for name, _ in every)
    columns = [line[[SOURCE, NUMEL, KIND, BLOCK, HASH]].tolist() for _, line in every]
    lines = [
        Piece(source, length, kind, block, mark) for source, length, kind, block, mark in columns
    ]
    starts = np.cumsum([0, *(piece.numel for piece in lines)])
    side_by_side = [
        piece._replace(source=int(at)) for piece, at in zip(lines, starts, strict=False)
    ]

    def exact(numel: int, name: str) -> Message:
        return replace(
            one_message(numel, EXACT, ranks, name=f"{name}\n{message.label}", feedback=False),
            codec=codec.spec,
        )

    return SketchPlan(
        names,
        starts,
        message,
        cut(lines, 1),
        cut(side_by_side, 1),
        exact(codec.table(numel, ranks), "cells"),
        exact(numel, "dense"),
        quanta,
    )


def reduce_sketch(
    buffer: torch.Tensor,
    feedback: ErrorFeedback | None,
    *,
    plan: SketchPlan,
    **call: Unpack[ScaledCall],
) -> Steps[SketchOutcome]:
    """Replace the plan's tensors in ``buffer`` by the mean of what the ranks kept; ``commit`` or
    ``discard`` the outcome.

    Uses ``MESSAGES`` sequence numbers. ``key`` must be the same on every rank. ``scale``,
    ``divisor`` and ``asks``: see ``reduce_message``.
    """
    check_buffer(buffer)
    if buffer.device.type != "cpu":
        raise InvalidArgument(
            f"buffer is on {buffer.device}: the sketch has CPU kernels only, use 'topk-64' there"
        )
    transport, workspace, gain = call["transport"], call["workspace"], call.get("gain", 1.0)
    sequence, divisor, asks = call["sequence"], call.get("divisor", 0.0), call.get("asks", False)
    start, factors = perf_counter(), plan.factors()
    proposed = workspace.propose(plan.message, feedback, buffer.device)
    kept, bad = keep(buffer, feedback, proposed, plan, workspace, gain * call.get("scale", 1.0))
    mean, finite, asked = None, True, False
    if factors is not None:
        cpu_cells.to_quanta(kept, proposed.sent, plan.starts, factors)
        workspace.encoded(start)
        told, cells = yield from _told(
            kept, bad, plan, transport, workspace, sequence, call.get("key", 0), asks
        )
        finite, asked = cells.finite, cells.asks
        if told.numel():
            mean = torch.empty(told.numel())
            cpu_cells.scaled(told, plan.starts, factors, mean)
            mean.div_(divisor or transport.size)  # rounds as the dense exchange does
    if mean is None and finite:
        workspace.dense_sketches += 1
        mean = kept
        if factors is not None:
            cpu_cells.scaled(kept, plan.starts, factors, mean)
        if bad:
            mean.fill_(float("nan"))
        dense = yield from reduce_message(
            mean,
            None,
            message=plan.dense,
            transport=transport,
            workspace=workspace,
            sequence=sequence + 2,
            divisor=divisor,
            asks=asks,
        )
        finite, asked = dense.finite, dense.asks
    peaks: Peaks = {}
    if finite and mean is not None:
        start = perf_counter()
        peaks = peaks_of(mean, plan)
        for source, numel, at in plan.message.pieces.residual_runs:
            torch.div(mean[at : at + numel], gain, out=buffer[source : source + numel])
        workspace.decoded(start)
    if feedback is None:
        workspace.give_residual(plan.message, proposed)
    return SketchOutcome(
        plan.message,
        finite,
        feedback,
        proposed if feedback is not None else None,
        workspace,
        peaks,
        plan.quanta,
        next_quanta(peaks, transport.size),
        asks=asked,
    )


def keep(
    buffer: torch.Tensor,
    old: ErrorFeedback | None,
    new: ErrorFeedback,
    plan: SketchPlan,
    workspace: Workspace,
    gain: float,
) -> tuple[torch.Tensor, bool]:
    """Elements that this rank keeps, all tensors side by side, the rest in ``new``; and whether
    something was not finite."""
    flag, row = (
        torch.zeros(1, dtype=torch.uint8),
        workspace.rows(plan.sparse.row_bytes, 1, buffer.device),
    )
    cpu.encode(
        buffer, row, flag, plan.sparse, gain=gain, residual=old and old.sent, new_residual=new.sent
    )
    kept = torch.empty(plan.sparse.numel)
    cpu.decode(row, kept, plan.compact)
    workspace.give_rows(row)
    return kept, bool(flag.item())


def _told(
    kept: torch.Tensor,
    bad: bool,
    plan: SketchPlan,
    transport: Transport,
    workspace: Workspace,
    sequence: int,
    key: int,
    asks: bool,
) -> Steps[tuple[torch.Tensor, Outcome]]:
    """The sum over the ranks of ``kept``, in quanta, empty if it cannot be told apart; and the
    outcome of its cells."""
    numel, ranks = kept.numel(), transport.size
    width = math.ceil(math.ceil(numel / 8) / ranks)
    table, bitmap = (
        torch.zeros(plan.cells.pieces.numel),
        torch.zeros(ranks * width, dtype=torch.uint8),
    )
    seed = key & 0xFFFFFFFF
    if bad:
        table.fill_(float("nan"))  # so that every rank hears of it
    else:
        cpu_cells.add(kept, table, bitmap, seed=seed)
        if float(kept.abs().max()) > _ADDED / _LOAD or float(table.abs().max()) > _ADDED / ranks:
            table.zero_()[0] = _TOO_MUCH
    jobs: list[Steps[object]] = [
        _either(bitmap, numel, width, transport, workspace, sequence),
        reduce_message(
            table,
            None,
            message=plan.cells,
            transport=transport,
            workspace=workspace,
            sequence=sequence + 1,
            asks=asks,
        ),
    ]
    outcome = (yield from overlapped(jobs, limit=2))[1]
    assert isinstance(outcome, Outcome)
    told = torch.empty(numel, dtype=torch.float64)
    if not outcome.finite:
        return told[:0], outcome
    whole = (table.double() * ranks).round_()
    fits = (
        float(whole.abs().max()) <= _EXACT and cpu_cells.peel(whole, bitmap, told, seed=seed) == 0
    )
    return told if fits else told[:0], outcome


def most(ranks: int) -> int:
    """Quanta that a value of the size of the mean may have, so that a cell's sum stays below
    ``_EXACT``."""
    return 1 << int(math.log2(_EXACT / (_LOAD * ranks)))


def peaks_of(mean: torch.Tensor, plan: SketchPlan) -> Peaks:
    peaks: Peaks = {}
    for name, peak in zip(plan.names, cpu_cells.peaks(mean, plan.starts).tolist(), strict=True):
        peaks[name] = max(peak, peaks.get(name, 0.0))
    return peaks


def next_quanta(peaks: Peaks, ranks: int) -> Quanta:
    """So fine that the cells can just carry a mean four times as large as the largest of this
    call."""
    return {
        name: max(4 * 2.0 ** math.ceil(math.log2(peak)) / most(ranks), _LEAST)
        for name, peak in peaks.items()
        if peak > 0
    }


def check_quanta(loaded: Any) -> None:
    for name, value in loaded.items():
        if not (isinstance(name, str) and isinstance(value, float) and 0 < value < math.inf):
            raise StateMismatch(
                f"the state has {value!r} as quantum of {name!r}, expected a number above 0: it "
                "is damaged"
            )


def load_quanta(quanta: Quanta, loaded: Any) -> None:
    check_quanta(loaded)
    quanta.clear()  # what one rank knows all know
    quanta.update(loaded)


def _either(
    bitmap: torch.Tensor,
    numel: int,
    width: int,
    transport: Transport,
    workspace: Workspace,
    sequence: int,
) -> Steps[None]:
    """bitmap := the union of all ranks' bitmaps, by way of the owners of its parts."""
    ranks, flag = transport.size, torch.zeros(1, dtype=torch.uint8)
    outbox, inbox = (workspace.rows(HEADER + width, ranks, bitmap.device) for _ in range(2))
    reply = workspace.rows(HEADER + width, 1, bitmap.device)
    outbox[:, HEADER:] = bitmap.view(ranks, width)

    def frame(operation: int) -> Frame:
        return Frame(operation, ranks, "bitmap", numel, sequence)

    yield from exchange(
        transport.all_to_all, inbox, outbox, frame(ALL_TO_ALL), flag, transport, workspace
    )
    reply[0, HEADER:] = 0
    for rank in range(ranks):
        reply[0, HEADER:] |= inbox[rank, HEADER:]
    yield from exchange(
        transport.all_gather, outbox, reply, frame(ALL_GATHER), flag, transport, workspace
    )
    bitmap.copy_(outbox[:, HEADER:].reshape(-1))
    workspace.give_rows(outbox, inbox, reply)


# ---------------------------------------------------------------- two levels


@dataclass(eq=False)
class SketchRoute:
    """Route of sketched tensors through two levels: each slice of a node's sum is sketched by its
    owner."""

    # sequence numbers of one call, between nodes; inside one less
    MESSAGES: ClassVar[int] = SketchPlan.MESSAGES

    route: Route
    slices: Mapping[Message, SketchPlan]  # the own ones that have elements
    names: tuple[str, ...]
    quanta: Quanta


def route_sketches(
    spans: Sequence[Span], policy: Policy, hierarchy: Hierarchy, quanta: Quanta
) -> list[SketchRoute]:
    """As ``plan_sketches``."""
    nodes, found = len(hierarchy.topology.nodes), []
    for codec, message in _by_codec(spans, policy, hierarchy.rows, piece=two_level.PIECE):
        way = two_level.route(message, hierarchy)
        slices = {
            part: _plan(codec, part, nodes, quanta)
            for part in way.between.values()
            if part.pieces.numel
        }
        found.append(
            SketchRoute(way, slices, tuple(dict.fromkeys(name for name, _ in message.keys)), quanta)
        )
    return found


def reduce_sketch_route(
    buffer: torch.Tensor,
    feedbacks: Feedbacks,
    *,
    plan: SketchRoute,
    sequence: int,
    changes: bool = False,
    **call: Unpack[LevelsCall],
) -> Steps[list[Outcome]]:
    """As ``reduce_sketch``, where each node is a worker that has the sum of its ranks. ``changes``:
    see ``reduce_routes``."""
    hierarchy, workspace = call["hierarchy"], call["workspace"]

    def of_slice(
        total: torch.Tensor,
        feedback: ErrorFeedback | None,
        *,
        message: Message,
        gain: float,
        scale: float,
        **own: Any,
    ) -> Steps[Outcome]:
        if message not in plan.slices:
            return Outcome(message, True, None, None, workspace)
        if feedback is not None:
            feedback.join(message.pieces, own["transport"].rank, hierarchy.divisor)
        steps: Steps[Outcome] = reduce_sketch(
            total, feedback, plan=plan.slices[message], gain=gain, scale=scale, **own
        )
        if changes:
            steps = as_changes(
                steps, total, feedback, workspace, pieces=message.pieces, gain=gain, scale=scale
            )
        return (yield from steps)

    outcomes = yield from two_level.reduce_route(
        buffer,
        feedbacks,
        route=plan.route,
        sequence=sequence,
        mean=of_slice,
        numbers=SketchPlan.MESSAGES,
        **call,
    )
    if not outcomes[0].finite:
        return outcomes
    own = [outcome for outcome in outcomes if isinstance(outcome, SketchOutcome)]
    for outcome in own:
        outcome.quanta = {}  # of a slice only
    peaks = yield from _peaks_of_all(own, plan, hierarchy.inside, workspace, sequence + 1)
    quanta = next_quanta(peaks, len(hierarchy.topology.nodes))
    whole = SketchOutcome(
        plan.route.message, True, None, None, workspace, peaks, plan.quanta, quanta
    )
    return [*outcomes, whole]


def _peaks_of_all(
    own: Sequence[SketchOutcome],
    plan: SketchRoute,
    inside: Transport,
    workspace: Workspace,
    sequence: int,
) -> Steps[Peaks]:
    """Of all slices: the ranks of a node own them together."""
    count = len(plan.names)
    size = HEADER + 8 * math.ceil(count / 2)
    mine, every = (workspace.rows(size, rows, torch.device("cpu")) for rows in (1, inside.size))
    largest = [
        max((outcome.peaks.get(name, 0.0) for outcome in own), default=0.0) for name in plan.names
    ]
    mine[0, HEADER:].view(torch.float32)[:count] = torch.tensor(largest)
    frame = Frame(ALL_GATHER, inside.size, "peaks", count, sequence, plan.route.message.label)
    flag = torch.zeros(1, dtype=torch.uint8)
    yield from exchange(inside.all_gather, every, mine, frame, flag, inside, workspace)
    found = (
        torch.stack([row[HEADER:].view(torch.float32)[:count] for row in every]).amax(0).tolist()
    )
    workspace.give_rows(mine, every)
    return dict(zip(plan.names, found, strict=True))
