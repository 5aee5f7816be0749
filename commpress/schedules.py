"""Schedules: when to freeze the variance, when to update it, when to synchronize. They are pure
functions of the step and of recorded facts.

Steps count from 0. The facts are in ``Facts``, equal on all ranks and part of a checkpoint: a
resumed run decides as the uninterrupted one would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from commpress.errors import InvalidArgument, StateMismatch, check_counts, check_entries

PACES = 3  # last exchanges that decide the length of a round
SPREAD = 100  # steps over which the square of the ranks' spread is averaged
# the largest mean: no step of Adam, of at most 7.3 learning rates, becomes longer than 20
WIDEST = 6.0
CODECS = ("int4", "powersgd-8+fp8")  # of hidden rounds, from fine to coarse
MOST = 2  # steps of a round, beyond which a coarser codec is tried
WORTH = 1.2  # an exchange in the finer codec takes longer by this factor, or the coarser one goes


class Pace(NamedTuple):
    """Seconds of one exchange of local updates and of the steps around it, each the largest of all
    ranks."""

    step: float  # of computing one step, without exchanges
    exchange: float  # from the arrival of the last rank until the mean is complete
    # during which training stops to begin and to end an exchange, without waiting for it
    standing: float

    @property
    def known(self) -> bool:
        return self.step > 0 and self.exchange > 0


UNKNOWN = Pace(0.0, 0.0, 0.0)


@dataclass
class Facts:
    """Facts of a run so far on which schedules depend."""

    peak_lr: float = 0.0  # the largest learning rate so far
    peak_step: int = 0  # when it was first reached
    # ‖mean gradient‖ / √(mean over ranks of ‖gradient‖²) in exact steps; 0: not known
    norm_ratio: float = 0.0
    # (steps done, sum of the bias-corrected variance)
    norms: list[tuple[int, float]] = field(default_factory=list)
    # of the last exchanges of local updates, for the slowest rank
    paces: list[Pace] = field(default_factory=list)
    codec: "Rung" = field(default_factory=lambda: Rung())
    # mean square of the ranks' spread in local updates, 0 at the beginning
    spread: float = 0.0

    def see(self, step: int, lr: float) -> None:
        if lr > self.peak_lr * (1 + 1e-9):
            self.peak_lr, self.peak_step = lr, step

    def keep(self, pace: Pace) -> None:
        """Record the pace of an exchange, and keep those of the two before it."""
        if self.codec.untimed:
            self.codec.untimed -= 1
        else:
            self.paces = [*self.paces, pace][-PACES:]
            self.codec.timed = min(self.codec.timed + 1, PACES)

    def scatter(self, square: float, ranks: int, steps: float) -> None:
        """Record the square of the ranks' spread after a round of ``steps`` steps.

        Independent changes of P ranks give P − 1. More, as where changes cancel, is left out.
        """
        square = min(square, ranks - 1, WIDEST)
        self.spread += (square - self.spread) * min(steps / SPREAD, 1.0)

    @property
    def gain(self) -> float:
        """Return the root mean square of the ranks' changes, relative to their mean change."""
        return sqrt(1 + self.spread)

    def as_dict(self) -> dict[str, Any]:
        numbers = {
            "peak_lr": self.peak_lr,
            "peak_step": self.peak_step,
            "norm_ratio": self.norm_ratio,
            "norms": [list(pair) for pair in self.norms],
            "paces": [list(pace) for pace in self.paces],
        }
        if self.codec.number or self.codec.untimed or self.codec.last < len(CODECS) - 1:
            numbers["codec"] = self.codec.as_list()
        if self.spread:
            numbers["spread"] = self.spread
        return numbers

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Facts":
        entries = ("peak_lr", "peak_step", "norm_ratio", "norms")
        check_entries(state, entries, "what a schedule has recorded")
        norms = [(int(step), float(norm)) for step, norm in state["norms"]]
        numbers = float(state["peak_lr"]), int(state["peak_step"]), float(state["norm_ratio"])
        paces = [Pace(*map(float, pace)) for pace in state.get("paces", [])]
        codec = Rung.of(state["codec"]) if "codec" in state else Rung(timed=len(paces))
        return cls(*numbers, norms, paces, codec, float(state.get("spread", 0.0)))


# ---------------------------------------------------------------- when the variance freezes


class Freeze(Protocol):
    def probes(self, step: int) -> bool:
        """Return whether the variance's mean is recorded after ``step`` steps."""

    def freezes(self, step: int, facts: Facts) -> bool:
        """Return whether the variance is frozen from now on, after ``step`` steps."""


@dataclass(frozen=True)
class AfterSteps:
    """Freeze after exactly ``steps`` exact steps."""

    steps: int

    def __post_init__(self) -> None:
        check_counts(exact_steps=self.steps)
        if not self.steps:
            raise InvalidArgument(
                "exact_steps is 0, expected at least 1: without one exact step there is no variance"
            )

    def probes(self, step: int) -> bool:
        return False

    def freezes(self, step: int, facts: Facts) -> bool:
        return step >= self.steps


@dataclass(frozen=True)
class WhenStable:
    """Freeze when the mean of the variance has changed by at most 1 − ``threshold`` over the last
    ``window`` steps.

    The published rule compares with the variance 1 / (1 − β2) steps ago. Here the window is also
    never longer than half of the steps done, so that a short run does not stay exact to its end,
    and a rising learning rate does not count as stable.
    """

    threshold: float = 0.96
    window: int = 1000
    earliest: int = 64
    every: int = 8

    def probes(self, step: int) -> bool:
        return step % self.every == 0

    def freezes(self, step: int, facts: Facts) -> bool:
        if step < self.earliest or facts.peak_step >= step - 1 > 0:
            return False
        now = [norm for at, norm in facts.norms if at == step]
        span = min(self.window, step // 2)
        before = [norm for at, norm in facts.norms if at <= step - span]
        if not now or not before or min(now[0], before[-1]) <= 0:
            return False
        return self.threshold <= now[0] / before[-1] <= 1 / self.threshold


# ---------------------------------------------------------------- when the variance is updated


class Updates(Protocol):
    def count(self, step: int) -> int:
        """Return the number of updates scheduled before ``step``."""


@dataclass(frozen=True)
class DoublingUpdates:
    """Update the variance ``per_interval`` times at each interval 1, 2, 4, …: in every step at
    first, then ever more rarely.

    With κ = ``per_interval`` there are κ·J updates before step κ·(2^J − 1).
    """

    per_interval: int = 16

    def __post_init__(self) -> None:
        check_counts(1, variance_updates=self.per_interval)

    def count(self, step: int) -> int:
        octave = (step // self.per_interval + 1).bit_length() - 1
        inside = step - self.per_interval * (2**octave - 1)
        return self.per_interval * octave + -(-inside >> octave)


# --------------------------------------------------------------- how far apart synchronisations are


class Sync(Protocol):
    def interval(self, step: int, lr: float, facts: Facts) -> int:
        """Return the steps from one synchronization to the next, for a window that begins at
        ``step`` with learning rate ``lr``."""


@dataclass(frozen=True)
class DoublingIntervals:
    """Synchronize in each of the first ``start`` steps, then every 2, 4, … steps, doubling every
    ``period`` steps up to ``longest``."""

    start: int
    period: int
    longest: int = 16

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        if step < self.start:
            return 1
        return min(2 ** ((step - self.start) // self.period + 1), self.longest)


@dataclass(frozen=True)
class FollowRate:
    """Synchronize every 2 steps once the learning rate has passed its peak, and half as often each
    time it has halved since."""

    longest: int = 16

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        if step <= facts.peak_step + 1 or lr >= facts.peak_lr:
            return 1
        if lr <= 0:
            return self.longest
        halvings = max(int(facts.peak_lr / lr).bit_length() - 1, 0)
        return min(2 ** (halvings + 1), self.longest)


@dataclass(frozen=True)
class InverseRate:
    """Synchronize every max(``shortest``, ⌊(α / lr)ⁿ⌋) steps, at most ``longest``, and in every
    step while the rate rises. α defaults to the peak of the rate."""

    alpha: float | None = None
    shortest: int = 1
    longest: int = 16
    power: ClassVar[int]  # n

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        if step <= facts.peak_step + 1:
            return 1
        if lr <= 0:
            return self.longest
        alpha = facts.peak_lr if self.alpha is None else self.alpha
        return min(max(self.shortest, int((alpha / lr) ** self.power + 1e-9)), self.longest)


class Quadratic(InverseRate):
    """QSR: the interval is 4 when the rate has halved. It suits ranks that update parameters inside
    a window."""

    power = 2


class Linear(InverseRate):
    """Let the rates of a window's steps add up to at most α, unless the rate rises. It suits
    parameters that change only at the end of a window: they then move as far as in one step at the
    peak."""

    power = 1


@dataclass(frozen=True)
class Every:
    """Always use the same number of steps."""

    steps: int

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidArgument(
                f"every is {self.steps!r}, expected 'auto', a number of at least 1, QSR(...) or "
                "Seconds(...)"
            )

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        return self.steps


@dataclass(frozen=True)
class QSR:
    """The quadratic rule: rounds of max(``base``, ⌊(α / lr)²⌋) steps, where lr is the peak rate
    until the rate has passed it.

    ``total``: steps of the whole run; no round extends beyond them. ``longest``: most steps of a
    round.
    """

    alpha: float
    base: int = 4
    longest: int = 10_000
    total: int | None = None

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise InvalidArgument(
                f"alpha is {self.alpha!r}, expected a number above 0, such as the peak of the "
                "learning rate"
            )
        if not 1 <= self.base <= self.longest:
            raise InvalidArgument(
                f"base is {self.base!r}, expected at least 1 and at most longest={self.longest}"
            )

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        rising = step <= facts.peak_step + 1
        rate = max(facts.peak_lr, lr) if rising else lr
        length = (
            self.longest
            if rate <= 0
            else min(max(self.base, int((self.alpha / rate) ** 2 + 1e-9)), self.longest)
        )
        return length if self.total is None else max(min(length, self.total - step), 1)


@dataclass(frozen=True)
class Hidden:
    """Use the fewest steps that overlap an exchange fully: every="auto" of local updates.

    The median of the last three exchanges counts, or the faster of two, so that a single slow one
    changes nothing. A round has one step before the first exchange has been measured.
    """

    room: float = 1.1  # seconds of the steps relative to those of the exchange behind them
    standing: float = 0.1  # most that beginning and ending exchanges may add to computing
    long: int = 20  # steps beyond which means of weights are rare and an outer momentum helps
    longest: int = 1000
    early: int = 150  # first steps of a run, in which half to all of what is trained counts

    def kept(self, step: int) -> float:
        """Return the share that is kept of what is trained during an exchange that leaves after
        ``step`` steps.

        Early weights stand less: it grows from half to all.
        """
        return min(0.5 + 0.5 * step / self.early, 1.0)

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        if not facts.paces:
            return 1
        needed = sorted(self.needed(pace) for pace in facts.paces)
        return needed[(len(needed) - 1) // 2]

    def needed(self, pace: Pace) -> int:
        """Return the steps that overlap one exchange of this pace."""
        steps = max(self.room * pace.exchange, pace.standing / self.standing) / pace.step
        return max(min(ceil(steps), self.longest), 1)


@dataclass
class Rung:
    """Codec of ``CODECS`` that hidden rounds use, and what is known of finer ones."""

    number: int = 0
    last: int = len(CODECS) - 1  # the coarsest that is faster than the one before it
    untimed: int = 0  # exchanges to come whose pace is of another codec, or of its first use
    timed: int = 0  # last paces that are of this codec, up to ``PACES``
    left: float = 0.0  # seconds of an exchange in the finer codec that was left; 0: compared
    # seconds of an exchange in each finer codec, relative to the next one
    ratios: list[float] = field(default_factory=list)

    def follow(self, paces: Sequence[Pace], rounds: Hidden) -> None:
        """Change the codec if the last paces ask for it.

        A coarser one is taken where rounds would need more than ``MOST`` steps, a finer one where
        its exchange would hide behind one. Rounds of many steps learn less than a coarser codec
        loses.
        """
        if min(len(paces), self.timed) < PACES:
            return
        pace = sorted(paces, key=rounds.needed)[len(paces) // 2]
        if self.left:
            ratio, self.left = self.left / pace.exchange, 0.0
            self.ratios.append(ratio)
            if ratio < WORTH:
                self.last = self.number - 1
                self._go(self.last)
                return
        if self.number < self.last and rounds.needed(pace) > MOST:
            self.left = pace.exchange
            self._go(self.number + 1)
        elif self.number and (
            rounds.needed(pace._replace(exchange=self.ratios[-1] * pace.exchange)) == 1
        ):
            self._go(self.number - 1)

    def _go(self, number: int) -> None:
        if number < self.number:
            self.ratios.pop()
        self.number, self.untimed, self.timed = number, 2, 0

    def as_list(self) -> list[float]:
        return [self.number, self.last, self.untimed, self.timed, self.left, *self.ratios]

    @classmethod
    def of(cls, state: Sequence[float]) -> "Rung":
        number, last, untimed, timed = (min(max(int(each), 0), 8) for each in state[:4])
        left, *ratios = (float(each) for each in state[4:])
        if not len(ratios) + (left > 0) == number <= last < len(CODECS):
            raise StateMismatch(
                f"the state has codec {list(state)} of rounds, expected the number of one of "
                f"{CODECS}, and what is known of finer ones: load the state of this run"
            )
        return cls(number, last, untimed, timed, left, ratios)


@dataclass(frozen=True)
class Seconds:
    """A duration of each round, in which each rank takes as many steps as it can."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise InvalidArgument(f"seconds is {self.seconds!r}, expected a number above 0")


def sync_of(every: "int | Sync | Seconds | Literal['auto']") -> "Sync | Seconds":
    if every == "auto":
        return Hidden()
    return every if isinstance(every, Seconds) or hasattr(every, "interval") else Every(every)


def sync_named(sync: "str | int | Sync") -> Sync:
    names: dict[str, Sync] = {
        "every": Every(1),
        "rate": FollowRate(),
        "qsr": Quadratic(),
        "linear": Linear(),
    }
    if isinstance(sync, int) and not isinstance(sync, bool) and sync >= 1:
        return Every(sync)
    if hasattr(sync, "interval"):
        return sync
    if sync not in names:
        raise InvalidArgument(
            f"sync is {sync!r}, expected one of {', '.join(map(repr, names))}, a number of steps "
            "of at least 1, or a schedule"
        )
    return names[sync]


def pruned(norms: Sequence[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """Return the records that later decisions need: the last one older than the window, and all
    after it."""
    if not norms:
        return []
    horizon = norms[-1][0] - window
    old = [pair for pair in norms if pair[0] <= horizon]
    return [*old[-1:], *(pair for pair in norms if pair[0] > horizon)]
