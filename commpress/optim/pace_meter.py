"""Meter of a rank's pace: seconds of its steps and exchanges, as the header of its next exchange tells them to the others."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import monotonic

from commpress.schedules import Pace

STEPS = 9  # whose median counts: an evaluation between two of them does not
UNTIMED = 1  # first exchange among these ranks: connections are made, kernels compiled


class PaceMeter:
    """Measures one rank. ``pace`` is what was seen since the last ``tell``; zeros where nothing was."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Other ranks: their exchanges take another time."""
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._resumed: float | None = None  # when this rank began to compute
        self._exchange = self._standing = self._waited = 0.0
        self._untimed = UNTIMED

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """A step has been computed; what is done here is not computing."""
        start, self._waited = monotonic(), 0.0
        if self._resumed is not None:
            self._steps.append(start - self._resumed)
        yield
        self._resumed = monotonic()
        self._standing += self._resumed - start - self._waited

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
        pace = Pace(median(self._steps) if self._steps else 0.0, self._exchange, self._standing)
        self._exchange = self._standing = 0.0
        return pace


def slowest(paces: Sequence[Pace]) -> Pace | None:
    """Largest of each number; None where nobody has measured."""
    pace = Pace(*(max(column) for column in zip(*paces, strict=True)))
    return pace if pace.known else None
