"""Meter of a rank's pace: seconds of its steps and exchanges, as the header of its next exchange
tells them to the others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from commpress.schedules import Pace

UNTIMED = 1  # first exchange among these ranks: connections are made, kernels compiled


class PaceMeter:
    """Measures one rank. A step's seconds are their mean since the last ``tell``: a device may be
    behind in single ones."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Other ranks: their exchanges take another time."""
        self._resumed: float | None = None  # when this rank began to compute
        self._steps, self._computing = 0, 0.0
        self._exchange = self._standing = self._waited = 0.0
        self._untimed = UNTIMED

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """A step has been computed; what is done here is not computing."""
        start, self._waited = monotonic(), 0.0
        if self._resumed is not None:
            self._steps += 1
            self._computing += start - self._resumed
        yield
        self._resumed = monotonic()
        self._standing += self._resumed - start - self._waited

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is no computing, and is not counted: a checkpoint is saved."""
        start = monotonic()
        yield
        if self._resumed is not None:
            self._resumed += monotonic() - start

    def waited(self, seconds: float) -> None:
        """So much of the time between two steps was spent on waiting for an exchange."""
        self._waited += seconds

    def exchanged(self, seconds: float) -> None:
        """An exchange took so long from when all ranks had come."""
        if self._untimed:
            self._untimed -= 1
        else:
            self._exchange = seconds

    def tell(self) -> Pace:
        """Pace since the last call."""
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
    """Largest of each number; None where nobody has measured."""
    pace = Pace(*(max(column) for column in zip(*paces, strict=True)))
    return pace if pace.known else None
