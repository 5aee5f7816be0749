"""The compressed all-reduce: two collectives, error-compensated on both sides, the same bits on
every rank.

    c = g·x + e        y = Q(c)      e ← c − y       rows of y to their owners          (all-to-all)
    z = mean(y) + s    o = Q(z)      s ← z − o       the owner's row to everybody       (all-gather)

Each rank owns one row of every piece. Nothing is committed before every rank has seen every header:
a header says whether its sender's numbers were finite, so all ranks decide alike without another
collective.
"""

import threading
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from commpress.codecs.codec import Codec
from commpress.codecs.family import EXACT
from commpress.codecs.registry import codec_named
from commpress.collectives.buckets import Message, one_message
from commpress.collectives.frame import (
    ALL_GATHER,
    ALL_TO_ALL,
    ASKS,
    HEADER,
    NOT_FINITE,
    Frame,
    LateHeaders,
    on_device,
    stamp,
    verify,
)
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import own_row
from commpress.timeline import Timeline
from commpress.work import Handed, Steps, overlapped

WIRE = {ALL_TO_ALL: "wire: all-to-all", ALL_GATHER: "wire: all-gather"}
# messages of one bucket under way at once: one on the wire while another is encoded or decoded
ALONGSIDE = 2


@dataclass
class Workspace:
    """Buffers that outlive a call: a fresh allocation costs ten times a copy.

    Rows and residuals are for one thread at a time. Any thread may ``borrow`` and ``give_back`` a
    buffer of an exact length, or ``lend`` and ``take_back`` the beginning of a longer one (with
    ``pooled`` rows too). The stream of its last user may still write a returned buffer: the stream
    of its next user waits for that (``Handed``).
    """

    checksum: bool = False  # verify payloads although the transport (NCCL) does not by itself
    encode_seconds: float = 0.0  # in kernels before a row leaves
    decode_seconds: float = 0.0  # in kernels after the last row came
    timeline: Timeline | None = None  # records kernels
    # lend rows from flat buffers too: many lengths then share a few buffers of the greatest length
    pooled: bool = False
    _free: dict[tuple[object, ...], list[Handed[Any]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # by identity
    _proposed: dict[int, tuple[Message, ErrorFeedback, ErrorFeedback]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of what is lent
    _idle: dict[tuple[torch.dtype, torch.device], list[Handed[torch.Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _lent: dict[int, torch.Tensor] = field(default_factory=dict)  # by address
    _longest: dict[torch.dtype, int] = field(default_factory=lambda: defaultdict(int))

    def encoded(self, start: float) -> None:
        """Count the time since ``start`` as encoding."""
        end = perf_counter()
        self.encode_seconds += end - start
        if self.timeline is not None:
            self.timeline.span("encode", start, end)

    def decoded(self, start: float) -> None:
        end = perf_counter()
        self.decode_seconds += end - start
        if self.timeline is not None:
            self.timeline.span("decode", start, end)

    def rows(self, size: int, rows: int, device: torch.device) -> torch.Tensor:
        if self.pooled:
            return self.lend(rows * size, torch.uint8, device).view(rows, size)
        free = self._free[rows, size, device]
        if free:
            return free.pop().take()
        return self.new_rows(size, rows, device)

    def new_rows(self, size: int, rows: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(rows, size, dtype=torch.uint8, device=device)

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat buffer for use until ``give_back``, which another thread may call."""
        try:
            return self._free[numel, dtype, device].pop().take()
        except IndexError:
            return torch.zeros(numel, dtype=dtype, device=device)

    def give_back(self, *buffers: torch.Tensor) -> None:
        for buffer in buffers:
            back = Handed(buffer, buffer.device)
            self._free[buffer.numel(), buffer.dtype, buffer.device].append(back)

    def residual(
        self, message: Message, device: torch.device, like: ErrorFeedback | None = None
    ) -> ErrorFeedback:
        """Return a residual; messages of equal layout, such as those of equal blocks, reuse spare
        ones."""
        layout = message.pieces.residual_layout, device, like.layout if like else ""
        try:  # another thread may settle what was proposed
            return self._free[layout].pop().take()
        except IndexError:
            return (
                ErrorFeedback.zeros(message.pieces, device)
                if like is None
                else like.like(message.pieces)
            )

    def propose(
        self, message: Message, feedback: ErrorFeedback | None, device: torch.device
    ) -> ErrorFeedback:
        """Return a ``residual`` that is to replace ``feedback``; remember it until it is given
        back."""
        proposed = self.residual(message, device, feedback)
        if feedback is not None:
            self._proposed[id(proposed)] = message, feedback, proposed
        return proposed

    @property
    def proposed(self) -> int:
        """Number of messages whose residuals are neither committed nor discarded."""
        return len(self._proposed)

    def settle(self, *, taken: bool) -> None:
        """Commit or discard all proposed residuals that are still open because their exchange
        failed."""
        for message, feedback, proposed in list(self._proposed.values()):
            if taken:
                feedback.take(proposed)
            self.give_residual(message, proposed)

    def clear(self) -> None:
        """Release all spare buffers, since messages are cut for another number of ranks from now
        on."""
        self._free.clear()

    def give_rows(self, *lent: torch.Tensor) -> None:
        if self.pooled:
            return self.take_back(*lent)
        for rows in lent:
            back = Handed(rows, rows.device)
            self._free[rows.shape[0], rows.shape[1], rows.device].append(back)

    def give_residual(self, message: Message, residual: ErrorFeedback) -> None:
        self._proposed.pop(id(residual), None)
        back = Handed(residual, residual.device)
        self._free[message.pieces.residual_layout, residual.device, residual.layout].append(back)

    def forget(self, message: Message) -> None:
        """Release the spare buffers of a message that will not come again."""
        sizes = {HEADER + message.pieces.row_bytes, HEADER + message.mean.row_bytes}
        self.forget_rows(sizes)
        for key in [key for key in self._free if key[0] == message.pieces.residual_layout]:
            del self._free[key]

    def forget_rows(self, sizes: Container[int]) -> None:
        """Release spare rows of ``sizes`` bytes."""
        for key in [key for key in self._free if key[1] in sizes]:
            del self._free[key]

    def lend(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the beginning of a flat buffer, uninitialized."""
        with self._lock:
            self._longest[dtype] = max(self._longest[dtype], numel)
            idle = self._idle[dtype, device]
            flat = idle.pop().take() if idle else None
            if flat is None or flat.numel() < numel:
                flat = torch.zeros(self._longest[dtype], dtype=dtype, device=device)
            self._lent[flat.data_ptr()] = flat
            return flat[:numel]

    def take_back(self, *buffers: torch.Tensor) -> None:
        with self._lock:
            for buffer in buffers:
                flat = self._lent.pop(buffer.data_ptr())
                self._idle[flat.dtype, flat.device].append(Handed(flat, flat.device))

    @property
    def lent_bytes(self) -> int:
        """Bytes of all flat buffers, lent and spare."""
        with self._lock:
            idle = [each.what for every in self._idle.values() for each in every]
            return sum(flat.nbytes for flat in (*idle, *self._lent.values()))


@dataclass
class Outcome:
    """Outcome of one message. The feedback does not change until ``commit``."""

    message: Message
    finite: bool
    feedback: ErrorFeedback | None
    proposed: ErrorFeedback | None
    workspace: Workspace
    # some rank asks all others for a vote after this step
    asks: bool = field(default=False, kw_only=True)

    def commit(self) -> None:
        if self.feedback is not None and self.proposed is not None:
            self.feedback.take(self.proposed)
            self.workspace.give_residual(self.message, self.proposed)

    def discard(self) -> None:
        if self.proposed is not None:
            self.workspace.give_residual(self.message, self.proposed)


def average(flat: torch.Tensor, call: "Call", *, name: str) -> Steps[None]:
    """Replace ``flat`` (float32) by its mean over the ranks, exactly."""
    message = one_message(flat.numel(), EXACT, call.transport.size, name=name)
    yield from reduce_message(flat, None, message, call)


class Settled(Protocol):
    """Result of an exchange that the end of its round keeps or drops."""

    def commit(self) -> None: ...
    def discard(self) -> None: ...


def settle(outcomes: Iterable[Settled], *, taken: bool) -> None:
    """Commit or discard all outcomes."""
    for outcome in outcomes:
        if taken:
            outcome.commit()
        else:
            outcome.discard()


def compressed_allreduce(
    buffer: torch.Tensor,
    feedback: ErrorFeedback | None = None,
    *,
    codec: str | Codec,
    transport: Transport,
    sequence: int = 0,
) -> Steps[bool]:
    """Replace ``buffer`` (float32, contiguous) by the mean over all ranks, compressed in both
    directions.

    Returns whether all ranks were finite; if not, buffer and feedback are unchanged. For a training
    loop use the hooks.
    """
    check_buffer(buffer)
    message = one_message(
        buffer.numel(), codec_named(codec), transport.size, feedback=feedback is not None
    )
    call = Call(transport, Workspace(), sequence, sequence)
    outcome = yield from reduce_message(buffer, feedback, message, call)
    if outcome.finite:
        outcome.commit()
    return outcome.finite


class Call(NamedTuple):
    """Arguments of the exchange of one message."""

    transport: Transport
    workspace: Workspace
    sequence: int = 0
    key: int = 0  # seeds stochastic codecs; rank and direction are mixed in
    # multiplies the input and divides the result: with 1 / loss scale, residuals are in unscaled
    # units
    gain: float = 1.0
    scale: float = 1.0  # multiplies the input alone, for sums in place of means
    divisor: float = 0.0  # of the sum over the ranks; 0: their number
    # travels in the headers: the outcome's ``asks`` is true if any rank asked
    asks: bool = False

    def after(self, count: int) -> "Call":
        """Return the call that is ``count`` sequence numbers later."""
        return self._replace(sequence=self.sequence + count)


def reduce_bucket(
    buffer: torch.Tensor,
    feedbacks: Sequence[ErrorFeedback | None],
    messages: Sequence[Message],
    call: Call,
) -> Steps[list[Outcome]]:
    """Average all messages of one bucket, pipelined, numbered from ``call`` on."""
    return overlapped(
        (
            reduce_message(buffer, feedback, message, call.after(i))
            for i, (message, feedback) in enumerate(zip(messages, feedbacks, strict=True))
        ),
        limit=ALONGSIDE,
    )


def reduce_message(
    buffer: torch.Tensor, feedback: ErrorFeedback | None, message: Message, call: Call
) -> Steps[Outcome]:
    """Average one message: encode, exchange, average, encode, gather, decode."""
    rows, outcome = yield from average_rows(buffer, feedback, message, call)
    workspace, mean, start = call.workspace, message.mean, perf_counter()
    if outcome.finite:
        kernels = arithmetic(buffer.device, mean)
        kernels.decode(rows[:, HEADER:], buffer, mean, gain=1.0 / call.gain)
    workspace.decoded(start)
    workspace.give_rows(rows)
    return outcome


def average_rows(
    buffer: torch.Tensor, feedback: ErrorFeedback | None, message: Message, call: Call
) -> Steps[tuple[torch.Tensor, Outcome]]:
    """Average one message as ``reduce_message`` does, but return the rows of the average still
    encoded. Give the rows back to the workspace."""
    transport, workspace, divisor = call.transport, call.workspace, call.divisor
    rank, ranks, device = transport.rank, transport.size, buffer.device
    pieces, back = message.pieces, HEADER + message.mean.row_bytes
    kernels = arithmetic(device, pieces)
    outbox = workspace.rows(HEADER + pieces.row_bytes, ranks, device)
    inbox = workspace.rows(HEADER + pieces.row_bytes, ranks, device)
    reply, every = workspace.rows(back, 1, device), outbox
    if message.mean is not pieces:
        every = workspace.rows(back, ranks, device)
    late = LateHeaders(transport) if reads_late(device, transport, workspace) else None
    flags, old, new = yield from encode_and_send(
        buffer, outbox[:, HEADER:], outbox, inbox, feedback, message, call, late
    )

    start = perf_counter()
    if late is None:
        marks = torch.tensor([flags & NOT_FINITE, flags & ASKS], dtype=torch.uint8, device=device)
    else:
        marks = late.flags(inbox)
    flag = marks[:1]
    seed, row = noise(call.key, rank, 1), reply[:, HEADER:]
    owed = {} if old is None or new is None else old.serving(new)
    if message.mean is pieces:
        kernels.serve(inbox[:, HEADER:], row, flag, pieces, rank, divisor=divisor, key=seed, **owed)
    else:
        scratch = workspace.rows(4 * pieces.shard, 1, device)
        mean = scratch.view(torch.float32).view(-1)
        factor = ranks / divisor if divisor else 1.0
        kernels.decode_mean(inbox[:, HEADER:], mean, pieces, rank)
        own = own_row(message.mean, rank)
        kernels.encode(mean, row, flag, own, gain=factor, key=seed, **owed)
        workspace.give_rows(scratch)
    workspace.encoded(start)
    frame = Frame(ALL_GATHER, ranks, message.codec, pieces.numel, call.sequence, message.label)
    flags = yield from exchange(every, reply, frame, marks, transport, workspace, late=late)
    if late is not None:
        flags = late.read()
    workspace.give_rows(inbox, reply, *(() if every is outbox else (outbox,)))
    finite, asks = not flags & NOT_FINITE, bool(flags & ASKS)
    return every, Outcome(message, finite, old, new, workspace, asks=asks)


def encode_and_send(
    buffer: torch.Tensor,
    codes: torch.Tensor,
    outbox: torch.Tensor,
    inbox: torch.Tensor,
    feedback: ErrorFeedback | None,
    message: Message,
    call: Call,
    late: LateHeaders | None = None,
) -> Steps[tuple[int, ErrorFeedback | None, ErrorFeedback | None]]:
    """Encode ``buffer`` plus its residual into ``codes``, a view of ``outbox``, and send each rank
    a row.

    Returns the flags that any rank has set (see ``exchange``), and the residuals before and after,
    if the message has any.
    """
    transport, workspace, key, rank = call.transport, call.workspace, call.key, call.transport.rank
    pieces, device = message.pieces, buffer.device
    old = feedback if pieces.residual_numel else None
    new = workspace.propose(message, old, device) if old is not None else None
    flag = torch.zeros(1, dtype=torch.uint8, device=device)
    start, gain, seed = perf_counter(), call.gain * call.scale, noise(key, rank, 0)
    encode = partial(arithmetic(device, pieces).encode, buffer, codes, flag, pieces)
    if old is None or new is None:
        encode(gain=gain, key=seed)
    else:
        with old.encoding(new, workspace, key=noise(key, rank, 2)) as owed:
            encode(gain=gain, key=seed, **owed)
    workspace.encoded(start)
    frame = Frame(
        ALL_TO_ALL, transport.size, message.codec, pieces.numel, call.sequence, message.label
    )
    mark = flag | ASKS if call.asks else flag
    flags = yield from exchange(inbox, outbox, frame, mark, transport, workspace, late=late)
    return flags, old, new


def exchange(
    out: torch.Tensor,
    inp: torch.Tensor,
    frame: Frame,
    flag: torch.Tensor,
    transport: Transport,
    workspace: Workspace,
    *,
    late: LateHeaders | None = None,
) -> Steps[int]:
    """Run one collective of rows of one length: stamp a header on ``inp``, verify those of ``out``.

    Returns the flags that any rank has set. With ``late``, rows are verified and flags known only
    when ``late`` is read.
    """
    frame = frame._replace(checked=transport.checks or workspace.checksum)
    packed = frame.pack()
    stamp(inp, packed, flag)
    call, moves = transport.all_gather, on_device(transport)
    if frame.operation == ALL_TO_ALL:
        call = transport.all_to_all
        if moves is not None and moves.takes(inp):
            moves.announce(packed, inp.shape[1])
    start = perf_counter() if workspace.timeline is not None else 0.0
    yield call(out, inp, 2 * frame.sequence + (frame.operation == ALL_GATHER))
    if workspace.timeline is not None and start:
        what = {"bytes": inp.numel(), "message": frame.label, "sequence": frame.sequence}
        workspace.timeline.flight(WIRE[frame.operation], start, what=what)
    if late is None:
        return verify(out, frame, packed, transport)
    late.see(out, frame, packed)
    return 0


def reads_late(device: torch.device, transport: Transport, workspace: Workspace) -> bool:
    """True if headers are read late to spare the host a wait: on a GPU without checksums."""
    return device.type == "cuda" and not (transport.checks or workspace.checksum)


def noise(key: int, rank: int, direction: int) -> int:
    """Return a 32-bit seed that differs between steps, ranks and directions (multiplicative
    hashing)."""
    return (key * 0x9E3779B1 + rank * 0x85EBCA6B + direction * 0xC2B2AE35) & 0xFFFFFFFF


def check_buffer(buffer: torch.Tensor) -> None:
    if buffer.dtype != torch.float32:
        raise InvalidArgument(
            f"buffer has dtype {buffer.dtype}, expected torch.float32: convert it with .float()"
        )
    if not buffer.is_contiguous():
        raise InvalidArgument(
            f"buffer of shape {tuple(buffer.shape)} and strides {buffer.stride()} is not "
            "contiguous: pass .contiguous()"
        )
    if buffer.dim() != 1:
        raise InvalidArgument(
            f"buffer has shape {tuple(buffer.shape)}, expected one dimension: pass .view(-1)"
        )
