"""One rank's connection to its peers: a transport, buffers, sequence numbers, a worker, a clock and
counters."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from commpress.collectives.agreement import gathered
from commpress.collectives.allreduce import Call, Workspace, exchange
from commpress.collectives.buckets import Message
from commpress.collectives.frame import ALL_TO_ALL, HEADER, NOT_FINITE, Frame, Rows
from commpress.collectives.transports.factory import enroll, own_transport, ranks_of
from commpress.collectives.transports.loopback import Loopback
from commpress.collectives.transports.transport import InFront, Transport
from commpress.logs import tell_on_first, warn_on_first
from commpress.totals import Totals
from commpress.work import JobFuture, Steps, Work, Worker, run

if TYPE_CHECKING:
    from commpress.collectives.levels import Levels

T = TypeVar("T")

AT_ONCE = 4  # submitted algorithms that run concurrently if messages are matched by tag


class Numbers:
    """Sequence numbers of a transport, each given out once."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, count: int) -> int:
        """Take ``count`` numbers and return the first."""
        self._taken += count
        return self._taken - count

    def restart(self) -> None:
        """Start again from 0, for a new transport."""
        self._taken = 0


class Counted(InFront):
    """Counts bytes that leave this rank, headers included, own row not, and seconds spent waiting
    for peers and the network."""

    def __init__(self, inner: Transport) -> None:
        self.stand_for(inner)
        self.sent_bytes, self.seconds = 0, 0.0

    def stand_for(self, inner: Transport) -> None:
        super().stand_for(inner)
        self.counted = inner

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self.sent_bytes += (self.size - 1) * inp.shape[1]
        return _TimedWork(self, self.inner.all_to_all(out, inp, tag))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self.sent_bytes += (self.size - 1) * inp.shape[1]
        return _TimedWork(self, self.inner.all_gather(out, inp, tag))

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        self.sent_bytes += sum(
            HEADER + payload.numel() for rank, payload in inp.payloads.items() if rank != self.rank
        )
        return _TimedWork(self, self.inner.exchange(out, inp, wanted, tag))


@dataclass
class _TimedWork:
    transport: Counted
    work: Work

    def wait(self) -> None:
        start = perf_counter()
        try:
            self.work.wait()
        finally:
            self.transport.seconds += perf_counter() - start


class Channel:
    """Communicates for one object: numbers messages, sends, waits and counts; every rank makes the
    same calls in the same order.

    Buffers belong to the worker while anything is submitted, else to the caller.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        name: str = "commpress",
        at_once: int = AT_ONCE,
        workspace: Workspace | None = None,
        numbers: "Numbers | None" = None,
    ) -> None:
        self.transport = Counted(transport)
        self.rank, self.size = transport.rank, transport.size
        self.workspace = Workspace() if workspace is None else workspace
        self.at_once = 1 if transport.ordered else at_once
        self.levels: Levels | None = None
        # the process group of these ranks, or the transport if one was given
        self.group: Any = transport
        self.members: tuple[int, ...] = ()  # global ranks, if known
        self.name, self._numbers = name, Numbers() if numbers is None else numbers
        self._worker: Worker | None = None
        self._timeout: timedelta | None = None
        self._device: torch.device | None = None
        self._usual_at_once = at_once
        self._beside: list[weakref.ref[Channel]] = []
        self._queued_at: Channel | None = None  # whose worker runs what is submitted here

    @classmethod
    def among(
        cls,
        process_group: Any = None,
        *,
        timeout: timedelta | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> "Channel":
        """Open a channel with its own transport among the ranks of ``process_group``, collective; a
        single rank without torch.distributed. ``device``: of the tensors, if known."""
        transport = own_transport(process_group, timeout=timeout, device=device)
        channel = cls(transport or Loopback(1).transport(0), **options)
        channel.group, channel.members = process_group, ranks_of(process_group)
        channel._timeout, channel._device = timeout, device
        enroll(channel, process_group)
        return channel

    def beside(self, name: str, transport: Transport | None = None) -> "Channel":
        """Open another channel over the same transport, or over ``transport`` between some of its
        ranks.

        Both take their numbers from one sequence. The new channel has its own buffers, worker and
        counters, so both may run at once.
        """
        workspace = Workspace(checksum=self.workspace.checksum)
        other = Channel(
            transport or self.inner,
            name=name,
            at_once=self.at_once,
            workspace=workspace,
            numbers=self._numbers,
        )
        if transport is None:
            self._beside.append(weakref.ref(other))
        return other

    @property
    def inner(self) -> Transport:
        """The transport itself, without clock and counters."""
        return self.transport.inner

    def shares_ranks(self, other: "Channel") -> bool:
        """True if both channels have the same group, or several global ranks in common."""
        return other.group is self.group or len(set(other.members) & set(self.members)) > 1

    # ------------------------------------------------------------ numbers

    def take(self, count: int = 1) -> int:
        """Take ``count`` sequence numbers and return the first."""
        return self._numbers.take(count)

    def call(self, count: int, key: int = 0, gain: float = 1.0, *, asks: bool = False) -> Call:
        """Take ``count`` sequence numbers; return the arguments of an exchange that uses them."""
        return Call(self.transport, self.workspace, self.take(count), key, gain, asks=asks)

    def gathered(self, values: Sequence[float]) -> Steps[np.ndarray]:
        """Gather ``values`` of every rank as float64[ranks, len(values)]."""
        return gathered(values, transport=self.transport, sequence=self.take())

    # ------------------------------------------------------------ work

    def run(self, steps: Steps[T]) -> T:
        """Run an algorithm on this thread and return its result. No submitted algorithm may be
        running."""
        return run(steps)

    def submit(
        self, steps: Steps[T], *tensors: torch.Tensor, waits: int | None = None
    ) -> JobFuture[T]:
        """Start an algorithm in the background, in the order of submission. ``tensors``, ``waits``:
        see ``Worker.submit``."""
        if self._queued_at is not None:
            return self._queued_at.submit(steps, *tensors, waits=waits)
        if self._worker is None:
            self._worker = Worker(self.name, limit=self.at_once)
        return self._worker.submit(steps, *tensors, waits=waits)

    def queue_at(self, other: "Channel") -> None:
        """Submit to the worker of ``other`` from now on: algorithms of both run one by one, in the
        order of submission, as is necessary where transports are ``ordered``."""
        self._queued_at = None if other is self else other

    def close(self) -> None:
        """Finish submitted algorithms, then end the worker; a later ``submit`` starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    # ------------------------------------------------------------ other ranks

    def stop(self, reason: str) -> None:
        """End running algorithms, here and at the peers, with an error that gives ``reason``."""
        self.inner.abandon(reason)
        for channel in self._same_transport():
            channel.close()

    def reform(self, transport: Transport | None = None) -> None:
        """Continue among the present ranks of the group, over ``transport`` or a new one, with
        numbers from 0; collective.

        Counters continue. Levels do not: the owner divides again (``levels.divide``).
        """
        transport = (
            transport
            or own_transport(self.group, timeout=self._timeout, device=self._device)
            or Loopback(1).transport(0)
        )
        for channel in self._same_transport():
            channel.close()
            channel.transport.stand_for(transport)
            channel.rank, channel.size = transport.rank, transport.size
            channel.at_once = 1 if transport.ordered else channel._usual_at_once
            channel.levels = None
        self._numbers.restart()
        self.members = ranks_of(self.group) if self.members else ()

    def _same_transport(self) -> "list[Channel]":
        """This channel and those made by ``beside``."""
        return [self, *(channel for each in self._beside if (channel := each()) is not None)]

    # ------------------------------------------------------------ counted

    @property
    def sent_bytes(self) -> int:
        """Bytes that have left this rank, headers included."""
        return self.transport.sent_bytes + (0 if self.levels is None else self.levels.sent_bytes)

    @property
    def between_bytes(self) -> int:
        """Bytes of ``sent_bytes`` that left the node, with two levels."""
        return 0 if self.levels is None else self.levels.between_bytes

    @property
    def waited(self) -> float:
        """Seconds spent waiting for peers and the network."""
        return self.transport.seconds + (0.0 if self.levels is None else self.levels.waited)


def any_rank(
    flag: bool,
    channel: Channel,
    sequence: int,
    device: torch.device,
    *,
    what: str = "any",
    numel: int = 0,
    label: int = 0,
) -> Steps[bool]:
    """Return True on every rank if ``flag`` is set on any rank; sends a header to every rank.

    Ranks that pass another ``what``, ``numel`` or ``label`` are named in an error.
    """
    transport = channel.transport
    outbox, inbox = (
        torch.zeros(transport.size, HEADER + 8, dtype=torch.uint8, device=device) for _ in range(2)
    )
    frame = Frame(ALL_TO_ALL, transport.size, what, numel, sequence, label)
    mark = torch.full((1,), int(flag), dtype=torch.uint8, device=device)
    flags = yield from exchange(inbox, outbox, frame, mark, transport, channel.workspace)
    return bool(flags & NOT_FINITE)


@dataclass
class Counters(Totals):
    """Totals of one rank since the state was made. Bytes are those that this rank sent, including
    headers."""

    steps: int = 0
    skipped_steps: int = 0
    skipped_buckets: int = 0
    plain_steps: int = 0  # steps by torch's own all-reduce
    # with wait=: steps, and buckets of them, for which this rank's backward was late
    late_steps: int = 0
    late_buckets: int = 0
    messages: int = 0
    # bytes of a float32 ring all-reduce of the same buckets: 8·(P−1)/P per element
    logical_bytes: int = 0
    wire_bytes: int = 0
    # part of wire_bytes that left the node; counted with a topology
    between_bytes: int = 0
    compressed_elements: int = 0
    exact_elements: int = 0
    # part of exact_elements that torch's all-reduce averaged, because no codec takes their dtype or
    # layout (float64, complex, sparse)
    plain_elements: int = 0
    encode_seconds: float = 0.0
    # waiting for peers and the network, partly overlapped with backward
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0
    # ranks that died and lost their residuals; ranks that handed these over are not counted
    lost_ranks: int = 0
    choice: str = ""  # choice of codec="auto" or of a plan, with its reason
    # parameter → ‖c − Q(c)‖ / ‖c‖, last measured
    errors: dict[str, float] = field(default_factory=dict)

    def bucket(self, numel: int, messages: Sequence[Message], ranks: int) -> None:
        self.messages += len(messages)
        self.logical_bytes += 8 * (ranks - 1) * numel // ranks
        for message in messages:
            self.exact_elements += message.exact
            self.compressed_elements += message.pieces.numel - message.exact

    def elements(self, plan: Iterable[Any], ranks: int = 1) -> None:
        """Count the elements of the received rows of a reduce-scatter or an all-gather."""
        for each in plan:
            numel, exact = each.received(ranks)
            self.compressed_elements += numel - exact
            self.exact_elements += exact

    def channels(self, channels: Iterable["Channel"]) -> None:
        """Take the totals of channels and their workspaces."""
        every = list(channels)
        self.wire_bytes = sum(channel.sent_bytes for channel in every)
        self.wire_seconds = sum(channel.waited for channel in every)
        self.encode_seconds = sum(channel.workspace.encode_seconds for channel in every)
        self.decode_seconds = sum(channel.workspace.decode_seconds for channel in every)

    def step(self, finite: bool, channel: "Channel", beside: int = 0) -> None:
        """``beside``: bytes that did not cross the channel."""
        self.steps += 1
        self.skipped_steps += not finite
        self.channels([channel])
        self.wire_bytes += beside
        self.between_bytes = channel.between_bytes

    @classmethod
    def together(cls, every: Sequence["Counters"]) -> "Counters":
        """Combine the counters of several states that took the same steps: bytes, messages and
        seconds add up."""
        total = cls()
        for counters in every:
            for name, value in vars(counters).items():
                mine = getattr(total, name)
                alike = name in ("steps", "skipped_steps", "plain_steps")
                setattr(
                    total,
                    name,
                    max(mine, value)
                    if alike
                    else mine | value
                    if name == "errors"
                    else mine + value,
                )
        return total

    @property
    def ratio(self) -> float:
        """Factor by which bytes are fewer than float32's."""
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def say(self, rank: int, *, wanted: bool) -> None:
        """Log a summary after the first step that may be compressed, or warn if ``wanted`` and
        nothing was compressed."""
        if wanted and self.compressed_elements == 0:
            warn_on_first(
                rank,
                "nothing was compressed: every tensor has fewer than min_numel elements, matches "
                "exclude, or has a dtype that codecs do not take",
            )
        else:
            tell_on_first(rank, "up to the first compressed step: %s", self.summary())

    def summary(self) -> str:
        elements = self.compressed_elements + self.exact_elements
        plain = 100 * self.plain_elements / elements if elements else 0.0
        share = 100 * self.compressed_elements / elements if elements else 0.0
        crossed = (
            f"{self.between_bytes / max(self.steps, 1) / 1e6:.3f} of them between nodes, "
            if self.between_bytes
            else ""
        )
        return (
            f"{self.wire_bytes / max(self.steps, 1) / 1e6:.3f} MB sent per step instead of "
            f"{self.logical_bytes / max(self.steps, 1) / 1e6:.3f} ({self.ratio:.1f} times "
            f"fewer), {crossed}"
            f"{share:.1f} % of elements compressed"
            + (
                f", {plain:.1f} % (float64, complex or sparse) averaged by torch"
                if self.plain_elements
                else ""
            )
            + (f"; late in {self.late_steps} of {self.steps} steps" if self.late_steps else "")
            + (f"; chosen: {self.choice}" if self.choice else "")
        )
