"""Stragglers: where a backward is late, the rank's own worker answers its buckets with zeros, and
the gradients follow later.

    in time     x = g + p      o ← o − p    the gradient, and part of what this rank owes, |p| ≤ |g|
    late        x = 0          o ← o + g    once backward reaches the bucket
    then, as in every step: the mean over all ranks of x, with its residuals

So a late rank still averages and sends back its part of every bucket, and all ranks decode the same
bytes and divide by the number of ranks. Nothing is lost: the sum of all gradients is the number of
ranks times the sum of all means, plus all residuals, plus all o.

A bucket is answered once a peer has sent its own ``wait`` seconds ago. Of one step, the first late
bucket and the last wait so long, others not at all. So a rank that is behind gains ``wait`` seconds
on the others in every step.

Note: one step at most. Nothing of a step is answered before backward has passed all buckets of the
step before, and residuals change when backward reaches the first bucket. So a state saved between
two steps is that of these steps on every rank, means of one step at most lie in memory, and a
training thread that never comes back is missed by its peers one step later.
"""

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commpress.collectives.buckets import Span
from commpress.collectives.exchange import Exchange
from commpress.collectives.frame import ALL_TO_ALL, Frame, same
from commpress.errors import CommunicationError, InvalidArgument
from commpress.work import started

if TYPE_CHECKING:
    from commpress.integrations.ddp.hook import Backward, CompressedState

log = logging.getLogger("commpress")

AUTO = "auto"
SHARE = 0.25  # of a step, that "auto" waits
LEAST = 0.01  # seconds that it waits
SLOWER = 1.5  # it waits at least so many times as long as this rank usually needs
STEPS, FEW = 20, 5  # steps that "auto" looks at, and without which it answers nothing
IN_A_ROW = 8  # late steps, after which the others wait
LOOK = (0.002, 0.02)  # seconds between two looks at what has come, at least and at most
OWED, OWING = "owed", "owing"  # in a state: gradients side by side, names and sizes of these


class Expected(NamedTuple):
    """A bucket of the last backward, which the next one should bring again."""

    tensors: tuple[int, ...]  # key of its exchange
    numel: int
    dtype: torch.dtype
    device: torch.device


class Answered(NamedTuple):
    """A bucket that was answered and that backward has not reached."""

    number: int
    backward: "Backward"
    mean: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    came: float  # when a peer's message was first seen


@dataclass
class Paid:
    """Debts of this rank after a round, by the parameter that it paid for."""

    owed: dict[str, torch.Tensor]
    left: Mapping[str, torch.Tensor | None]

    def commit(self) -> None:
        for name, left in self.left.items():
            if left is None:
                del self.owed[name]
            else:
                self.owed[name] = left

    def discard(self) -> None:
        """Owe it still."""


class Stragglers:
    """Answers in place of a late training thread of one state, and what that owes since.

    ``wait``: seconds, or "auto".
    """

    def __init__(self, wait: float | str, state: "CompressedState") -> None:
        self.wait, self._state = wait, state
        # held by who submits a bucket: the training thread or the watching one
        self.lock = threading.RLock()
        self.owed: dict[str, torch.Tensor] = {}  # float32, flat, by name of the parameter
        self._spoilt = False  # a late gradient held NaN or infinity: say so in the next bucket
        self._answered: deque[Answered] = deque()
        self._known: list[Expected] = []  # of a whole backward
        self._passed: list[Expected] = []  # of the running one
        self._submitted = 0  # buckets of the running step
        self._late = False  # some of these were answered
        self._missed = 0  # buckets of the running backward that were answered
        self._in_a_row = 0  # late steps
        self._came: dict[int, float] = {}  # when a tag was first seen
        self._ended = 0.0
        self._seconds: deque[float] = deque(maxlen=STEPS)  # of steps
        self._behind: deque[float] = deque(maxlen=STEPS)  # seconds after the first peer
        self._failure: Exception | None = None
        if state.channel.size > 1:
            end = threading.Event()
            weakref.finalize(self, end.set)
            me = weakref.ref(self)
            started("commpress-stragglers", lambda: _watch(me, end))

    # ------------------------------------------------------------ the training thread

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket, or take the mean that was answered for it."""
        if self._failure is not None:
            raise self._failure
        buffer, state = bucket.buffer(), self._state
        if buffer.device.type != "cpu" or not state.compressible(bucket):
            raise InvalidArgument(
                f"wait is {self.wait!r}, but a bucket of {buffer.dtype} on {buffer.device} cannot "
                "be answered: it needs dense gradients of float32, bfloat16 or float16 on the CPU; "
                "leave wait out"
            )
        with self.lock:
            if not bucket.index():
                self._passed, self._missed = [], 0
                if not self._answered:
                    self._submitted, self._late = 0, False
            now = monotonic()
            if self._answered:
                answered = self._answered.popleft()
                came, future = answered.came, self._meet(answered, bucket)
            else:
                came = self._came.get(2 * state.channel.take(0), now)
                future = state.submit(bucket)
                self._submit(last=bucket.is_last())
            numel = buffer.numel()
            self._passed.append(
                Expected(tuple(map(id, bucket.parameters())), numel, buffer.dtype, buffer.device)
            )
            if bucket.is_last():
                self._known = self._passed
                self._behind.append(now - came)
                if self._ended:
                    self._seconds.append(now - self._ended)
                self._ended = now
                self._count()
            return future

    def _meet(
        self, answered: Answered, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Owe the gradients of a bucket that was answered; the future takes its mean."""
        if answered.number != bucket.index():
            raise CommunicationError(
                f"a backward ended early, while bucket {answered.number} was answered for this "
                "rank (wait=): the ranks are no longer in step; start again from a checkpoint"
            )
        buffer, state, mean = bucket.buffer(), self._state, answered.mean
        self._missed += 1
        if not bucket.index():
            state.release(answered.backward)
        if bool(torch.isfinite(buffer).all()):
            for span in state.names.tensors(bucket)[0]:
                part = buffer[span.source :][: span.numel].float()
                owed = self.owed.get(span.name)
                self.owed[span.name] = part.clone() if owed is None else owed.add_(part)
        else:
            self._spoilt = True

        def take(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            buffer.copy_(done.value())
            state.channel.workspace.give_back(mean)
            return buffer

        if bucket.is_last():
            answered.backward.raise_errors()
        return answered.future.then(take)

    def _count(self) -> None:
        """Count the buckets of a backward for which it was late."""
        counters, missed = self._state.counters, self._missed
        self._in_a_row = self._in_a_row + 1 if missed else 0
        counters.late_buckets += missed
        counters.late_steps += bool(missed)
        if missed and (counters.late_steps <= 3 or counters.late_steps % 100 == 0):
            log.warning(
                "rank %d was late for %d of the %d buckets of a step: their gradients follow later "
                "(%d late steps so far)",
                self._state.channel.rank,
                missed,
                len(self._known),
                counters.late_steps,
            )

    # ------------------------------------------------------------ what is owed

    def pay(self, spans: Sequence[Span], buffer: torch.Tensor) -> Paid:
        """Add what is owed to the gradients in ``buffer``, of each at most its own norm, so that
        several late gradients do not arrive as one large one. Owed until the outcome is committed.
        """
        if self._spoilt:
            buffer[:1], self._spoilt = math.nan, False
        left: dict[str, torch.Tensor | None] = {}
        for span in spans:
            if (owed := self.owed.get(span.name)) is None:
                continue
            part = buffer[span.source :][: span.numel]
            most, norm = float(part.norm()), float(owed.norm())
            left[span.name] = None
            if norm > most:
                paid = owed * max(most / norm, 1 / IN_A_ROW)
                owed, left[span.name] = paid, owed - paid
            part += owed
        return Paid(self.owed, left)

    def waiting(self, numels: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return what is owed of every parameter, side by side."""
        every = (self.owed.get(name, torch.zeros(numel)) for name, numel in numels.items())
        return {OWED: torch.cat([torch.zeros(0), *every])}

    def check_load(self) -> None:
        """Raise ``InvalidArgument`` if a step that this rank has not begun was answered for it."""
        if self._answered:
            raise InvalidArgument(
                f"a state is loaded before step {self._state.steps_done + 1}, which other ranks "
                "have taken and which was answered for this rank (wait=): load it on every rank "
                "after the same number of steps"
            )

    def restart(self, state: Mapping[str, Any]) -> None:
        """Owe what a loaded state says, and answer nothing until a whole backward has passed."""
        with self.lock:
            self._known = []
            names, numels = zip(*state.get(OWING) or [("", 0)], strict=True)
            parts = state.get(OWED, torch.zeros(0)).split(numels)
            self.owed = {
                name: part.clone()
                for name, part in zip(names, parts, strict=True)
                if bool(part.any())
            }

    # ------------------------------------------------------------ the watching thread

    def look(self) -> float:
        """Answer the buckets that are due; return the seconds until the next look."""
        with self.lock:
            try:
                inner: Any = self._state.channel.inner
                now, early = monotonic(), inner.early()
                for tag in early:
                    self._came.setdefault(tag, now)
                while (due := self._due(early, now)) is not None:
                    self._answer(*due)
                first = 2 * self._state.channel.take(0)
                self._came = {tag: at for tag, at in self._came.items() if tag >= first}
            except Exception as error:  # for the training thread
                self._failure = error
            patience = self.patience() or LOOK[1]
            left = min(((at + patience - now) for at in self._came.values()), default=patience)
            return min(max(LOOK[0], min(patience / 16, left)), LOOK[1])

    def _due(self, early: Mapping[int, bytes], now: float) -> tuple[Exchange, float] | None:
        """Return the exchange of the next bucket, and since when a peer waits, if it is to be
        answered."""
        state, index, patience = self._state, self._submitted, self.patience()
        tag = 2 * state.channel.take(0)
        if (
            patience is None
            or tag not in early
            or index >= len(self._known)
            or self._in_a_row >= IN_A_ROW
            or (not index and (self._answered or state.under_way))  # with the step before
        ):
            return None
        if self._late and index + 1 < len(self._known):
            patience = 0.0
        exchange = state.prepared(self._known[index].tensors)
        if now - self._came[tag] < patience or exchange is None:
            return None
        message, transport = exchange.messages[0], state.channel.transport
        frame = Frame(
            ALL_TO_ALL,
            transport.size,
            message.codec,
            message.pieces.numel,
            tag // 2,
            message.label,
            checked=transport.checks,
        )
        # anything else is for the training thread, which would name a difference
        return (exchange, self._came[tag]) if same(frame.bytes(), early[tag]) else None

    def _answer(self, exchange: Exchange, came: float) -> None:
        index = self._submitted
        _, numel, dtype, device = self._known[index]
        mean = self._state.channel.workspace.borrow(numel, dtype, device).zero_()
        last = index + 1 == len(self._known)
        backward, future = self._state.answer(mean, exchange, last=last)
        self._answered.append(Answered(index, backward, mean, future, came))
        self._late = True
        self._submit(last=last)

    def _submit(self, *, last: bool) -> None:
        self._submitted = 0 if last else self._submitted + 1
        self._late &= not last

    def patience(self) -> float | None:
        """Return the seconds that peers wait for this rank; None: as long as it takes."""
        if not isinstance(self.wait, str):
            return self.wait
        if len(self._seconds) < FEW:
            return None
        return max(LEAST, SHARE * median(self._seconds), SLOWER * median(self._behind))


def _watch(stragglers: "weakref.ref[Stragglers]", end: threading.Event) -> None:
    torch.set_grad_enabled(False)
    pause = LOOK[1]
    while not end.wait(pause):
        here = stragglers()
        if here is None or here._failure is not None:
            return
        pause = here.look()
        del here


def check_wait(wait: object, refused: Mapping[str, bool]) -> None:
    """Raise ``InvalidArgument`` unless ``wait`` is None, "auto" or seconds; if given, also for what
    is true in ``refused``, which names it and the cure."""
    if wait is None:
        return
    number = isinstance(wait, int | float) and not isinstance(wait, bool)
    if wait != AUTO and not (number and 0 < wait < math.inf):  # type: ignore[operator]
        raise InvalidArgument(
            f"wait is {wait!r}, expected seconds above zero, 'auto', or None, which waits for "
            "every rank"
        )
    for what, given in refused.items():
        if given:
            raise InvalidArgument(f"wait is {wait!r}, but {what}: or leave wait out")


def check_model(wait: object, ddp: DistributedDataParallel) -> None:
    """Raise ``InvalidArgument`` if DDP itself waits for the slowest rank in every step."""
    buffers = ddp.broadcast_buffers and any(True for _ in ddp.module.buffers())
    check_wait(
        wait,
        {
            "DDP with find_unused_parameters=True waits for every rank at the end of a backward: "
            "wrap the model without it": ddp.find_unused_parameters,
            "DDP sends the model's buffers in every forward, for which it waits: wrap the model "
            "with broadcast_buffers=False": buffers,
        },
    )
