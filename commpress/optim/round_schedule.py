"""Schedule of a round of local updates: the steps after which its fragments leave, one after the
other, evenly spread.

fragment f of F leaves after step ⌈H·(f + 1)/F⌉ of a round of H steps, or after that share of a
round's seconds
every="auto"            H = F·h, and each fragment is under way for the h steps that its exchange
                        needs
"""

from math import ceil
from time import monotonic

from commpress.errors import InvalidArgument
from commpress.schedules import QSR, Every, Facts, Hidden, Seconds, Sync


class RoundSchedule:
    """Says when the next fragment leaves. ``next`` is its number; a round ends when the last has
    left.

    A fragment arrives before the next one leaves, so no round has fewer than fragments · overlap
    steps. A fixed length, or the ``base`` of QSR, below that is refused; other schedules are held
    to it. ``overlap`` is that of the round; ``Hidden`` chooses it, others keep that which was
    given.
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
        self._clock = monotonic()

    def begin(self, step: int, rate: float, facts: Facts, *, alone: bool = False) -> None:
        """A round begins after so many steps. ``rate``: the inner learning rate; ``alone``: there
        are no other ranks."""
        self.next, self.start, self.length, self._clock = 0, step, 0, monotonic()
        if isinstance(self.every, Hidden):
            each = self.every.long if alone else self.every.interval(step, rate, facts)
            self.length, self.overlap = each * self.fragments, 0 if alone else each
        elif not isinstance(self.every, Seconds):
            self.length = max(self.every.interval(step, rate, facts), self.shortest)

    @property
    def long(self) -> bool:
        """True in a round of every="auto" that is so long that the shared weights move with
        momentum."""
        return isinstance(self.every, Hidden) and self.length > self.every.long * self.fragments

    def due(self, step: int) -> bool:
        """True if the next fragment is to leave after so many steps."""
        return step > self.start and self._elapsed(step - self.start) >= self._turn

    def due_soon(self, step: int) -> bool:
        """True if it is likely to leave after one step more."""
        done = step - self.start
        if not isinstance(self.every, Seconds):
            return done + 1 >= self._turn
        return self._elapsed(done) * (1 + 1 / max(done, 1)) >= self._turn

    def _elapsed(self, done: int) -> float:
        return monotonic() - self._clock if isinstance(self.every, Seconds) else done

    @property
    def _turn(self) -> float:
        """Steps, or seconds, of the round after which the next fragment leaves."""
        share = (self.next + 1) / self.fragments
        return (
            self.every.seconds * share
            if isinstance(self.every, Seconds)
            else ceil(self.length * share)
        )

    def leave(self) -> bool:
        """The next fragment has left; True if it was the round's last: then ``begin``."""
        self.next += 1
        return self.next == self.fragments

    def state(self) -> list[int]:
        return [self.next, self.start, self.length, self.overlap]

    def load(self, state: list[int]) -> None:
        """Go on from a saved state. The time of a round in seconds begins anew."""
        self.next, self.start, self.length = (int(each) for each in state[:3])
        if isinstance(self.every, Hidden):
            self.overlap = int(state[3])
        self._clock = monotonic()
