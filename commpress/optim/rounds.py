"""Rounds of local updates: the steps after which fragments leave, evenly spread; the pace that
determines a round's length; the header that begins each exchange; the warm-up before the first
round; and counters.

fragment f of F leaves after step ⌈H·(f + 1)/F⌉ of a round of H steps, or after that share of a
round's seconds, which begin on all ranks when the last one has sent its change
every="auto"            H = F·h, and each fragment is under way for the h steps that its exchange
                        needs
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, isfinite, nan
from time import monotonic

import numpy as np
import torch

from commpress.collectives.agreement import gathered
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.errors import InvalidArgument, Mismatch
from commpress.logs import warn_on_first
from commpress.optim.fragments import Fragment
from commpress.optim.layout import Columns, local
from commpress.schedules import QSR, UNKNOWN, Every, Facts, Hidden, Pace, Seconds, Sync
from commpress.work import Steps

NUMBERS = 10  # of a header, in float64
UNTIMED = 1  # first exchange among these ranks: connections are made, kernels compiled


class RoundSchedule:
    """Schedule of the next fragment to leave. ``next`` is its number; a round ends when the last
    has left.

    A fragment arrives before the next one leaves, so no round has fewer than fragments · overlap
    steps. A fixed length, or the ``base`` of QSR, below that raises an error; other schedules are
    raised to it. ``overlap`` is that of the round; ``Hidden`` chooses it, other schedules keep the
    given one.
    """

    def __init__(self, every: Sync | Seconds, fragments: int, *, overlap: int) -> None:
        self.every, self.fragments, self.overlap = every, fragments, overlap
        self.shortest = fragments * max(overlap, 1)
        least = (
            every.steps
            if isinstance(every, Every)
            else every.base
            if isinstance(every, QSR)
            else self.shortest
        )
        if least < self.shortest:
            raise InvalidArgument(
                f"every is {least} with overlap={overlap} and fragments={fragments}, expected at "
                f"least fragments · overlap = {self.shortest} steps: a fragment arrives before the "
                "next one leaves"
            )
        self.next = self.start = self.length = 0
        self.clock = monotonic()  # when a round in seconds has begun

    def begin(self, step: int, rate: float, facts: Facts, *, alone: bool = False) -> None:
        """Begin a round after ``step`` steps. ``rate``: the inner learning rate; ``alone``: there
        are no other ranks."""
        self.next, self.start, self.length, self.clock = 0, step, 0, monotonic()
        if isinstance(self.every, Hidden):
            each = self.every.long if alone else self.every.interval(step, rate, facts)
            self.length, self.overlap = each * self.fragments, 0 if alone else each
        elif not isinstance(self.every, Seconds):
            self.length = max(self.every.interval(step, rate, facts), self.shortest)

    @property
    def long(self) -> bool:
        """True in a round of every="auto" that is long enough for an outer momentum."""
        return isinstance(self.every, Hidden) and self.length > self.every.long * self.fragments

    def due(self, step: int) -> bool:
        """True if the next fragment is to leave after ``step`` steps."""
        return step > self.start and self._elapsed(step - self.start) >= self.turn

    def due_soon(self, step: int) -> bool:
        """True if the next fragment is likely to leave after one more step."""
        done = step - self.start
        if not isinstance(self.every, Seconds):
            return done + 1 >= self.turn
        return self._elapsed(done) * (1 + 1 / max(done, 1)) >= self.turn

    def _elapsed(self, done: int) -> float:
        return monotonic() - self.clock if isinstance(self.every, Seconds) else done

    @property
    def turn(self) -> float:
        """Return the steps, or seconds, of the round after which the next fragment leaves."""
        share = (self.next + 1) / self.fragments
        return (
            self.every.seconds * share
            if isinstance(self.every, Seconds)
            else ceil(self.length * share)
        )

    def leave(self) -> bool:
        """Record that the next fragment has left; return True if it was the round's last: then call
        ``begin``."""
        self.next += 1
        return self.next == self.fragments

    def state(self) -> list[int]:
        return [self.next, self.start, self.length, self.overlap]

    def load(self, state: list[int]) -> None:
        """Continue from a saved state. The clock of a round in seconds starts again."""
        self.next, self.start, self.length = (int(each) for each in state[:3])
        if isinstance(self.every, Hidden):
            self.overlap = int(state[3])
        self.clock = monotonic()


class PaceMeter:
    """Measures the pace of one rank. Seconds per step are averaged since the last ``tell``, because
    a device may lag in single steps."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start again among other ranks, whose exchanges take a different time."""
        self._resumed: float | None = None  # when this rank began to compute
        self._steps, self._computing = 0, 0.0
        self._exchange = self._standing = self._waited = 0.0
        self._untimed = UNTIMED

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Exclude the time inside the context, between two steps, from computing."""
        start, self._waited = monotonic(), 0.0
        if self._resumed is not None:
            self._steps += 1
            self._computing += start - self._resumed
        yield
        self._resumed = monotonic()
        self._standing += self._resumed - start - self._waited

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context, such as saving a checkpoint, from all
        measurements."""
        start = monotonic()
        yield
        if self._resumed is not None:
            self._resumed += monotonic() - start

    def waited(self, seconds: float) -> None:
        """Record seconds between two steps that were spent waiting for an exchange."""
        self._waited += seconds

    def exchanged(self, seconds: float) -> None:
        """Record the seconds of an exchange since all ranks had arrived."""
        if self._untimed:
            self._untimed -= 1
        else:
            self._exchange = seconds

    def tell(self) -> Pace:
        """Return the pace since the last call."""
        pace = Pace(self._computing / max(self._steps, 1), self._exchange, self._standing)
        self._steps, self._computing, self._exchange, self._standing = 0, 0.0, 0.0, 0.0
        return pace

    def state(self) -> list[float]:
        return [self._steps, self._computing, self._exchange, self._standing, self._untimed]

    def load(self, state: Sequence[float]) -> None:
        self.begin_anew()
        self._steps, self._untimed = int(state[0]), int(state[4])
        self._computing, self._exchange, self._standing = map(float, state[1:4])


def slowest(paces: Sequence[Pace]) -> Pace | None:
    """Return the largest of each number; None if no rank has measured."""
    pace = Pace(*(max(column) for column in zip(*paces, strict=True)))
    return pace if pace.known else None


@dataclass(frozen=True)
class ExchangeHeader:
    """Report of one rank: its exchange, its starting point, and the weight of its change."""

    number: int  # of the exchange
    fragment: int
    # 64 bits that must be equal on all ranks: the hash of Θ, or of names and shapes
    origin: tuple[float, float]
    weight: float  # weight of its change; 0 if it has not trained or is not finite
    square: float  # ‖Δᵢ‖²
    ended: bool  # it has no more data
    pace: Pace = UNKNOWN  # pace since its last header

    @property
    def finite(self) -> bool:
        return isfinite(self.square)

    def left_out(self) -> "ExchangeHeader":
        """Return this header with weight 0, for a change that is not finite on a shard peer."""
        return replace(self, weight=0.0, square=nan)

    def gathered(self, channel: Channel, sequence: int) -> Steps[list["ExchangeHeader"]]:
        """Gather the headers of all ranks, in rank order."""
        row = [
            self.number,
            self.fragment,
            *self.origin,
            self.weight,
            self.square,
            self.ended,
            *self.pace,
        ]
        rows = yield from gathered(
            [float(each) for each in row], transport=channel.transport, sequence=sequence
        )
        return [
            ExchangeHeader(
                int(number), int(fragment), (high, low), weight, square, bool(ended), Pace(*pace)
            )
            for number, fragment, high, low, weight, square, ended, *pace in rows.tolist()
        ]


def check_same(headers: Sequence[ExchangeHeader], *, shared: bool) -> None:
    """Raise ``Mismatch`` if ranks are at another exchange than rank 0 or have another starting
    point.

    ``shared``: all ranks start from the same weights.
    """
    number, fragment = headers[0].number, headers[0].fragment
    places = [(each.number, each.fragment, each.origin) for each in headers]
    different = tuple(rank for rank, place in enumerate(places) if place != places[0])
    if different and shared:
        raise Mismatch(
            f"the shared weights of ranks {list(different)} differ from those of rank 0 at "
            f"exchange {number} (fragment {fragment}). Start every rank from the same weights, "
            "load checkpoints of one step, and give all ranks the same inner parameters.",
            ranks=different,
        )
    if different:
        raise Mismatch(
            f"ranks {list(different)} are not where rank 0 is: exchange {number}, fragment "
            f"{fragment}. Load checkpoints of one step, and give all ranks the same inner "
            "parameters.",
            ranks=different,
        )


class SharedWarmup:
    """Synchronous first ``steps`` steps: averages gradients exactly, a fragment at a time, in the
    fragment's ``work``.

    Parameters and inner optimizers are equal on every rank until it ends, and the shared weights
    start from there.
    """

    def __init__(
        self,
        steps: int,
        fragments: list[Fragment],
        exact: Exchanges,
        channel: Channel,
        control: Channel,
        columns: Columns | None = None,
    ) -> None:
        self.steps, self.fragments, self.channel, self._control = steps, fragments, channel, control
        self._columns = columns
        self.averaged = -1  # the last step with averaged gradients
        self.finite = True  # whether some rank's gradients were finite in that step
        self.dropped = 0  # steps in which some rank's gradients were not finite
        self._parameters = {
            each.name: each.parameter for fragment in fragments for each in fragment.locals
        }
        self._exact = exact
        self._checked = False  # whether ranks were found to begin with equal weights

    def average(self, step: int) -> Steps[None]:
        """Replace gradients by their mean over the ranks with finite ones; once per step, nothing
        after the warm-up.

        A missing gradient on some ranks counts as 0 there; one missing on all stays missing. If no
        rank is finite, all get infinity, as a loss scaler expects.
        """
        if step >= self.steps or self.averaged == step:
            return
        every = list(self._parameters.values())
        present = [float(p.grad is not None) for p in every]
        finite = all(bool(torch.isfinite(local(p.grad)).all()) for p in every if p.grad is not None)
        if self._columns is not None:
            finite = yield from self._columns.agreed(finite)
        head = [float(step), float(finite), *self._digests(), *present]
        heads = yield from gathered(
            head, transport=self._control.transport, sequence=self._control.take()
        )
        same = len(head) - len(present)
        # without the column of whether a rank's gradients are finite
        agreed = np.delete(heads[:, :same], 1, axis=1)
        different = tuple(r for r in range(len(heads)) if (agreed[r] != agreed[0]).any())
        if different:
            raise Mismatch(
                f"the weights of ranks {list(different)} differ from those of rank 0 in warm-up "
                f"step {step}, or the step does. Start every rank from the same weights and load "
                "checkpoints of one step.",
                ranks=different,
            )
        self._checked = True
        count = float(heads[:, 1].sum())
        self.finite = count > 0
        if count < len(heads):
            self.dropped += 1
            wild = [r for r in range(len(heads)) if not heads[r, 1]]
            warn_on_first(
                self._control.rank, "gradients of ranks %s are not finite: they are left out", wild
            )
        wanted = {
            name
            for name, any_ in zip(self._parameters, heads[:, same:].sum(axis=0), strict=True)
            if any_
        }
        for fragment in self.fragments:
            yield from self._average(
                fragment, wanted, finite=finite, share=len(heads) / count if count else 0.0
            )
        self.averaged = step

    def begin_anew(self) -> None:
        """Compare weights again in the next step, among other ranks."""
        self.averaged, self._checked = -1, False

    def _digests(self) -> list[float]:
        if self._checked:
            return []
        return [half for f in self.fragments for half in f.halves()]

    def _average(
        self, fragment: Fragment, wanted: set[str], *, finite: bool, share: float
    ) -> Steps[None]:
        grads = [self._parameters[s.name].grad for s in fragment.spans]
        work = fragment.work
        for out, grad in zip(fragment.views(work), grads, strict=True):
            if grad is None or not finite:
                out.zero_()
            else:
                out.copy_(local(grad))
        yield from fragment.average(self._exact, self.channel)
        if share != 1:
            work.mul_(share) if share else work.fill_(float("inf"))
        for span, out in zip(fragment.spans, fragment.views(work), strict=True):
            p = self._parameters[span.name]
            if span.name in wanted:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                local(p.grad).copy_(out)


@dataclass
class LocalCounters:
    """Totals of one rank. Bytes are those it sent, headers included.

    An exchange is empty if no rank had trained since the last one, as at the end of ``drain``:
    headers only. ``spread`` is None with a codec coarser than int4: its errors would be taken for
    spread.
    """

    steps: int = 0
    rounds: int = 0  # of all fragments; empty ones do not count
    exchanges: int = 0  # of one fragment each
    sent_bytes: int = 0  # total: warm-up, exchanges, and means for checkpoints or the end
    change_bytes: int = 0  # part of them sent in exchanges that were not empty
    changed: int = 0  # parameters exchanged: those of a fragment in each exchange
    waited: float = 0.0  # seconds in which training stood still for an exchange
    # exchanges, or steps of the warm-up, in which some rank was not finite and was left out
    dropped: int = 0
    # states of inner optimizers, a parameter's each, that were not finite and started anew
    restarts: int = 0
    # root mean square over the ranks of ‖Δᵢ − Δ̄‖, relative to ‖Δ̄‖, of the last exchange of moves
    spread: float | None = None
    gain: float = 1.0  # factor of the learning rates in the last step
    # ranks that died with their residuals and their training since the last exchange
    lost_ranks: int = 0
    every: int = 0  # steps of the round under way; 0: it ends after so many seconds
    overlap: int = 0  # steps of the round that are computed during an exchange
    participants: int = 0  # ranks with a weight above zero in it
    codec: str = ""  # of codec="auto", as chosen for the round

    @property
    def bits(self) -> float:
        """Bits sent per parameter and round, without warm-up and empty exchanges: float32 has 32.
        0.0 before the first exchange."""
        return 8 * self.change_bytes / self.changed if self.changed else 0.0

    def _length(self) -> str:
        if not self.every:
            return ""
        return f", now of {self.every} steps" + (
            (f", {self.overlap} of them beside an exchange" if self.overlap else "")
            + (f" in {self.codec}" if self.codec else "")
        )

    def summary(self, *, spread_of: str) -> str:
        """``spread_of``: what the ranks' spread is relative to."""
        spread = (
            "" if self.spread is None else f"last spread {self.spread:.2g} of {spread_of} over "
        )
        gain = f", steps {self.gain:.2f} times as long" if self.gain != 1 else ""
        restarts = f", {self.restarts} inner states started anew" if self.restarts else ""
        crossed = (
            f"{self.sent_bytes / 1e6:.1f} MB sent ({self.bits:.2f} bits per parameter and round)"
        )
        return (
            f"{self.steps} steps, {self.rounds} rounds{self._length()}, {crossed}, waited "
            f"{self.waited:.1f} s, {spread}"
            f"{self.participants} ranks, {self.dropped} exchanges with a change left out"
            f"{restarts}{gain}"
        )
