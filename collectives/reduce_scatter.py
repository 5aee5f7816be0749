"""The compressed reduce-scatter, and the all-gather of quantised shards: a sharded model's two
collectives.

A flat buffer has one row per rank, and a row has a part of every parameter, one after the other.

    c = g·x + e  y = Q(c)  e ← c − y  row r of y to rank r, which averages in float32   (all-to-all)
    y = Q(w)                          the own row to everybody                          (all-gather)

There is one quantisation each way, however many ranks there are. The owner decodes its own row as
well: after an all-gather every rank holds the same bits. With ``bases`` a rank is sent several rows
at once, the first of two hops: inside the node to the rank at the owner's local rank, then between
nodes to the owner.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from commpress.codecs import Codec, Policy
from commpress.collectives.allreduce import (
    ALONGSIDE,
    Call,
    Outcome,
    Workspace,
    encode_and_send,
    exchange,
    noise,
)
from commpress.collectives.buckets import MESSAGE, PIECE, Message, Span, describe
from commpress.collectives.channel import Channel
from commpress.collectives.frame import ALL_GATHER, ASKS, HEADER, NOT_FINITE, Frame
from commpress.errors import StateMismatch
from commpress.feedback import ErrorFeedback, Key, Residual, ResidualStore
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import (
    COLUMN,
    KIND,
    NUMEL,
    RESIDUAL,
    SHARD,
    SOURCE,
    Piece,
    Pieces,
    cut,
    width_of,
)
from commpress.kernels.reference import CASTS
from commpress.kernels.registered import known
from commpress.work import Steps, overlapped


class Part(NamedTuple):
    """One parameter in a row."""

    name: str
    at: int  # first element in a row
    width: int  # elements in a row, the same in every row
    numel: int  # of the whole parameter: the last rows may hold fewer than ``width``, or none
    # first element in a buffer of whole parameters; None: the buffer is made of rows
    source: int | None = None


@dataclass(frozen=True, eq=False)
class Deal:
    """Pieces of a flat buffer that travel together, one message to or from each rank."""

    # pieces of all ranks' messages side by side, with room for headers, for a single kernel call
    every: Message
    own: Pieces  # pieces of this rank's message, in a buffer of its rows only
    ranks: int
    # ranks send different elements, which are not added: ``own`` has the pieces of all that comes
    moved: bool = False

    @property
    def size(self) -> int:
        """Bytes of a message."""
        return self.every.pieces.row_bytes // self.ranks

    def received(self, ranks: int) -> tuple[int, int]:
        """Return the number of elements of all rows, and of those that no codec compresses."""
        table = self.every.pieces.table
        return self.every.pieces.numel, int(table[np.isin(table[:, KIND], CASTS), NUMEL].sum())


def deals(
    parts: Sequence[Part],
    policy: Policy,
    *,
    rank: int,
    ranks: int,
    stride: int = 0,
    bases: Sequence[Sequence[int]] = (),
    feedback: bool = True,
) -> list[Deal]:
    """Cut a buffer of rows of ``stride`` elements (0: as many as the parts have) into messages of
    about ``MESSAGE`` elements.

    ``bases``: the rows that each rank receives, one after the other; by default its own. The key of
    a piece is its parameter's name and its first element in that parameter.
    """
    bases = bases or [(r,) for r in range(ranks)]
    return _deals(
        parts, policy, rank, stride, bases, {row: row for rows in bases for row in rows}, feedback
    )


def second_hop(
    parts: Sequence[Part],
    policy: Policy,
    rows: Sequence[int],
    *,
    rank: int,
    stride: int = 0,
    feedback: bool = True,
) -> list[Deal]:
    """Cut the second hop, which sends ``rows``, gathered by the first hop, to their owners: rank i
    owns rows[i]."""
    return _deals(
        parts,
        policy,
        rank,
        stride,
        [(row,) for row in rows],
        {row: i for i, row in enumerate(rows)},
        feedback,
    )


def _deals(
    parts: Sequence[Part],
    policy: Policy,
    rank: int,
    stride: int,
    bases: Sequence[Sequence[int]],
    lies: Mapping[int, int],
    feedback: bool,
) -> list[Deal]:
    stride = stride or max((part.at + part.width for part in parts), default=0)
    rows = sum(map(len, bases))
    groups: list[list[tuple[Part, int, int, Codec]]] = [[]]
    held = 0
    for part in parts:
        codec = policy.choose(part.name, part.numel)
        for offset in range(0, part.width, PIECE):
            count = min(PIECE, part.width - offset)
            others = groups[-1] and known(groups[-1][-1][-1].kind) != known(codec.kind)
            if others or (groups[-1] and (held + count) * rows > MESSAGE):
                groups.append([])
                held = 0
            groups[-1].append((part, offset, count, codec))
            held += count
    return [_deal(group, rank, stride, bases, lies, feedback) for group in groups if group]


class Line(NamedTuple):
    """One piece of a message, and where it arrives."""

    key: tuple[str, int]
    piece: Piece
    width: int
    place: int


def _deal(
    group: Sequence[tuple[Part, int, int, Codec]],
    rank: int,
    stride: int,
    bases: Sequence[Sequence[int]],
    lies: Mapping[int, int],
    feedback: bool,
) -> Deal:
    def dealt_to(destination: int) -> Iterator[Line]:
        for place, row in enumerate(bases[destination]):
            for part, offset, count, codec in group:
                first = row * part.width + offset
                numel = min(max(part.numel - first, 0), count)
                source = (
                    lies[row] * stride + part.at + offset
                    if part.source is None
                    else part.source + first
                )
                yield line_of(
                    part.name,
                    first,
                    (source, numel, codec),
                    width=count,
                    place=place * stride + part.at + offset,
                    feedback=feedback,
                )

    rows = [list(dealt_to(destination)) for destination in range(len(bases))]
    return deal_of(rows, rank, len(bases[rank]) * stride, [codec for *_, codec in group])


def line_of(
    name: str,
    first: int,
    values: tuple[int, int, Codec],
    *,
    width: int,
    place: int,
    feedback: bool,
) -> Line:
    """Describe the elements of parameter ``name`` from ``first`` on. ``values``: where they lie in
    the buffer, how many there are, and their codec."""
    source, numel, codec = values
    mark = zlib.crc32(f"{name}@{first}".encode())
    keep = feedback and codec.feedback and not codec.lossless and numel > 0
    piece = Piece(source, numel, codec.kind, codec.block, mark, keep)
    return Line((name, first), piece, -(-width // 8) * 8, place)


def deal_of(
    rows: Sequence[Sequence[Line]], rank: int, length: int, codecs: Sequence[Codec]
) -> Deal:
    """Make the message whose row r, to or from rank r, has the pieces rows[r]; all rows are as long
    as the longest. ``length``: elements of the buffer of this rank's row."""
    size = longest_row(rows)
    own = pieces_of(rows[rank])
    table = own.table.copy()
    # the row is contiguous, without padding between its parts
    for column in (SOURCE, RESIDUAL, SHARD):
        table[:, column] = [line.place for line in rows[rank]]
    own = replace(own, table=table, residual_numel=length, shard=length, row_bytes=size)

    lines = [line for row in rows for line in row]
    every = side_by_side(rows, size)
    label = zlib.crc32(
        "\n".join(f"{line.key[0]}@{line.key[1]}+{line.piece.numel}" for line in lines).encode()
    )
    message = Message(tuple(line.key for line in lines), every, describe(codecs), label, every)
    return Deal(message, own, len(rows))


def pieces_of(lines: Sequence[Line]) -> Pieces:
    return cut([line.piece for line in lines], 1, widths=[line.width for line in lines])


def longest_row(rows: Sequence[Sequence[Line]]) -> int:
    """Return the bytes of the longest row, without a header."""
    return max(pieces_of(row).row_bytes for row in rows)


def side_by_side(rows: Sequence[Sequence[Line]], size: int) -> Pieces:
    """Lay out rows of ``size`` bytes, one to or from each rank, with room for headers."""
    every = pieces_of([line for row in rows for line in row])
    table = every.table.copy()
    columns = [pieces_of(row).table[:, COLUMN] for row in rows]
    table[:, COLUMN] = np.concatenate(
        [each + HEADER + r * (HEADER + size) for r, each in enumerate(columns)]
    )
    return replace(every, table=table, shard=0, row_bytes=len(rows) * (HEADER + size))


# ---------------------------------------------------------------- all messages of one buffer


def reduce_rows(
    buffer: torch.Tensor,
    out: torch.Tensor,
    feedbacks: Sequence[ErrorFeedback | None],
    plan: Sequence[Deal],
    call: Call,
) -> Steps[list[Outcome]]:
    """Write the call's gain · the mean of this rank's part of ``buffer`` to ``out``, pipelined.

    ``out`` is float32; ``buffer`` has any dtype that the kernels support.

    Uses one sequence number per deal. Residuals are in units of gain · x.
    """
    return overlapped(
        (
            _reduce(buffer, out, feedback, deal, call.after(i))
            for i, (deal, feedback) in enumerate(zip(plan, feedbacks, strict=True))
        ),
        limit=ALONGSIDE,
    )


def gather_rows(
    row: torch.Tensor,
    out: torch.Tensor,
    plan: Sequence[Deal],
    call: Call,
    *,
    base: torch.Tensor | None = None,
    add: bool = False,
    kept: list[torch.Tensor] | None = None,
) -> Steps[list[bool]]:
    """Gather and decode the rows of all ranks into ``out``, the same bits everywhere; return
    whether each message was finite.

    With ``base``, row − base is encoded, and ``out`` receives the decoded differences; ``add`` adds
    them to it. Tensors have any dtype that the kernels support; with ``base``, all but ``out`` are
    float32. Received rows are appended to ``kept``, one tensor per message, for ``decode_rows``;
    they then belong to the caller.
    """
    if kept is not None:
        kept[:] = [call.workspace.rows(deal.size, deal.ranks, row.device) for deal in plan]
    return overlapped(
        (
            _gather(row, out, deal, call.after(i), base, add, kept[i] if kept else None)
            for i, deal in enumerate(plan)
        ),
        limit=ALONGSIDE,
    )


def decode_rows(
    kept: Sequence[torch.Tensor], out: torch.Tensor, *, plan: Sequence[Deal], workspace: Workspace
) -> None:
    """Decode rows that ``gather_rows`` kept into ``out`` again."""
    start = perf_counter()
    for deal, rows in zip(plan, kept, strict=True):
        arithmetic(out.device, deal.every.pieces).decode(rows.view(1, -1), out, deal.every.pieces)
    workspace.decoded(start)


# ---------------------------------------------------------------- one message


def _reduce(
    buffer: torch.Tensor,
    out: torch.Tensor,
    feedback: ErrorFeedback | None,
    deal: Deal,
    call: Call,
) -> Steps[Outcome]:
    device, ranks, workspace = buffer.device, deal.ranks, call.workspace
    outbox, inbox = (
        workspace.rows(deal.size, ranks, device),
        workspace.rows(deal.size, ranks, device),
    )
    flags, old, new = yield from encode_and_send(
        buffer, outbox.view(1, -1), outbox, inbox, feedback, deal.every, call
    )

    start = perf_counter()
    kernels = arithmetic(device, deal.every.pieces)
    if deal.moved:
        kernels.decode(inbox.view(1, -1), out, deal.own)
    else:
        kernels.decode_mean(inbox[:, HEADER:], out, deal.own, 0)
    workspace.decoded(start)
    workspace.give_rows(outbox, inbox)
    return Outcome(deal.every, not flags & NOT_FINITE, old, new, workspace, asks=bool(flags & ASKS))


def _gather(
    row: torch.Tensor,
    out: torch.Tensor,
    deal: Deal,
    call: Call,
    base: torch.Tensor | None,
    add: bool,
    kept: torch.Tensor | None,
) -> Steps[bool]:
    transport, workspace, device, ranks = call.transport, call.workspace, row.device, deal.ranks
    seed = noise(call.key, transport.rank, 0)
    kernels = arithmetic(device, deal.every.pieces)
    encoded = workspace.rows(deal.size, 1, device)
    every = workspace.rows(deal.size, ranks, device) if kept is None else kept
    flag = torch.zeros(1, dtype=torch.uint8, device=device)

    start = perf_counter()
    if base is None:
        kernels.encode(row, encoded[:, HEADER:], flag, deal.own, key=seed)
    else:
        kernels.encode(base, encoded[:, HEADER:], flag, deal.own, gain=-1.0, key=seed, residual=row)
    workspace.encoded(start)
    frame = Frame(
        ALL_GATHER,
        ranks,
        deal.every.codec,
        deal.every.pieces.numel,
        call.sequence,
        deal.every.label,
    )
    flags = yield from exchange(every, encoded, frame, flag, transport, workspace)

    start = perf_counter()
    options = {"add": True} if add else {}
    kernels.decode(every.view(1, -1), out, deal.every.pieces, **options)
    workspace.decoded(start)
    workspace.give_rows(encoded, *(() if kept is not None else (every,)))
    return not flags & NOT_FINITE


# ---------------------------------------------------------------- who divides state


class Scatter:
    """Tensors of a flat buffer divided among the ranks: means go to their owners, and owners'
    values to everybody.

    Rank r owns ``width`` elements of each tensor, beginning at r·width. This rank's elements lie
    side by side in a row of ``numel`` elements, at the places in ``parts``. Ownership does not
    depend on codecs.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        policy: Policy,
        channel: Channel,
        device: torch.device,
        *,
        feedback: bool = True,
    ) -> None:
        self.policy, self.channel, self.device, self.feedback = policy, channel, device, feedback
        self.residuals = ResidualStore()
        self.parts: list[Part] = []
        self.numel = 0
        self.plan: list[Deal] = []
        self.extend(spans)

    def extend(self, spans: Sequence[Span]) -> None:
        """Divide these tensors too, after the others, which keep their places and residuals."""
        for span in spans:
            width = width_of(span.numel, self.channel.size)
            self.parts.append(Part(span.name, self.numel, width, span.numel, span.source))
            self.numel += width
        self.recut()

    def recut(self) -> None:
        """Cut again, because the policy has changed; residuals stay with their tensors."""
        for deal in self.plan:
            self.channel.workspace.forget(deal.every)
        self.plan = self.dealt()
        self._feedbacks = [
            self.residuals.attach(deal.every.keys, deal.every.pieces, self.device)
            for deal in self.plan
        ]

    def dealt(self) -> list[Deal]:
        """Cut the tensors into messages."""
        rank, ranks = self.channel.rank, self.channel.size
        return deals(self.parts, self.policy, rank=rank, ranks=ranks, feedback=self.feedback)

    def reduce(
        self, buffer: torch.Tensor, row: torch.Tensor, *, key: int, asks: bool = False
    ) -> Steps[list[Outcome]]:
        """Write this rank's part of the mean of ``buffer`` to ``row``; the caller commits or
        discards the outcomes."""
        return reduce_rows(
            buffer,
            row,
            self._feedbacks,
            self.plan,
            self.channel.call(len(self.plan), key, asks=asks),
        )

    def gather(self, row: torch.Tensor, buffer: torch.Tensor, *, key: int) -> Steps[list[bool]]:
        """Gather the rows of all ranks, as the codec encodes them, into ``buffer``; return whether
        each message was finite."""
        # other noise than in ``reduce``
        call = self.channel.call(len(self.plan), ~key)
        return gather_rows(row, buffer, self.plan, call)

    def choices(self) -> dict[str, Any]:
        """Return nothing: codecs of rows learn nothing besides residuals."""
        return {}

    def check_choices(self, state: dict[str, Any]) -> None:
        """Accept any state."""

    def load_choices(self, state: dict[str, Any]) -> None:
        """Load nothing."""

    def check(self, residuals: Mapping[Key, Residual]) -> None:
        """Raise ``StateMismatch`` unless ``residuals`` belong to these tensors."""
        numels = {part.name: part.numel for part in self.parts}
        for (name, offset), (sent, *_) in residuals.items():
            if offset + sent.numel() > numels.get(name, 0):
                raise StateMismatch(
                    f"the state has {sent.numel()} residuals of {name!r} from element {offset} on, "
                    f"of which this model has {numels.get(name, 0)}: load the state of this model, "
                    "saved with the same named_parameters"
                )

    def load(self, residuals: Mapping[Key, Residual]) -> None:
        """Load residuals of these tensors, cut for any number of ranks: all, or none if one does
        not fit."""
        self.check(residuals)
        numels = {part.name: part.numel for part in self.parts}
        whole = {name: torch.zeros(numels[name], device=self.device) for name, _ in residuals}
        for (name, offset), (sent, *_) in residuals.items():
            whole[name][offset : offset + sent.numel()] = sent
        cut: dict[Key, Residual] = {}
        for deal in self.plan:
            for (name, first), line in zip(
                deal.every.keys, deal.every.pieces.table.tolist(), strict=True
            ):
                if name in whole and line[NUMEL]:
                    cut[name, first] = (
                        whole[name][first : first + line[NUMEL]].clone(),
                        torch.zeros(0, device=self.device),
                    )
        self.residuals.load(cut)
