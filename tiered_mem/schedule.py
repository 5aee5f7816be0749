"""Record the accesses of one training step, to know what to read in advance and what to evict in
the next ones.

Training steps repeat. The recorded trace is treated as a circle: the block with the farthest next
use is evicted (Belady's rule, which is optimal for blocks of one size), and a read begins early
enough for its bytes to arrive. A step that departs from the trace is recorded again, and until its
end the least recently used block is evicted.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

NEVER = math.inf
EARLY = 1.5  # factor by which reads begin earlier than necessary


def next_uses(trace: Sequence[int]) -> dict[int, list[int]]:
    """Map each key to the positions at which it is used."""
    uses: dict[int, list[int]] = {}
    for i, key in enumerate(trace):
        uses.setdefault(key, []).append(i)
    return uses


def farthest(trace: Sequence[int], rounds: int = 1) -> "Callable[[Sequence[int], int], int]":
    """Return Belady's rule for ``rounds`` repetitions of a trace: a function from (resident, oldest
    use first; position) to the key to evict."""
    uses, length = next_uses(trace), len(trace)

    def choose(resident: Sequence[int], position: int) -> int:
        return max(
            resident, key=lambda key: distance(uses, length, key, position, circle=rounds > 1)
        )

    return choose


def distance(
    uses: Mapping[int, Sequence[int]], length: int, key: int, position: int, *, circle: bool = True
) -> float:
    """Return the accesses from ``position`` (which is over) to the next use of ``key``."""
    at = uses.get(key)
    if not at:
        return NEVER
    i = bisect_right(at, position)
    if i < len(at):
        return at[i] - position
    return at[0] + length - position if circle else NEVER


def least_recent(resident: Sequence[int], position: int) -> int:
    return resident[0]


def misses(
    trace: Sequence[int],
    sizes: Mapping[int, int],
    capacity: int,
    choose: Callable[[Sequence[int], int], int],
    rounds: int = 1,
) -> int:
    """Count the accesses that do not find their block in memory, in ``rounds`` repetitions from
    empty memory."""
    resident: dict[int, None] = {}
    used = count = 0
    for _ in range(rounds):
        for position, key in enumerate(trace):
            if key in resident:
                del resident[key]
            else:
                count += 1
                used += sizes[key]
                while used > capacity and resident:
                    victim = choose(list(resident), position)
                    del resident[victim]
                    used -= sizes[victim]
            resident[key] = None
    return count


def starts(times: Sequence[float], reads: Sequence[float]) -> list[int]:
    """Return, for each access, the position at which its read should begin, one read at a time.

    ``times``: times of the accesses within a step; ``reads``: seconds of each read. It is planned
    backwards: a read ends before its access and before the next read must begin. Negative positions
    are in the step before.
    """
    if not times:
        return []
    begin, latest = [0] * len(times), times[-1]
    step = max(times[-1] - times[0], 1e-9) * (len(times) + 1) / len(times)
    for i in reversed(range(len(times))):
        latest = min(latest, times[i]) - EARLY * reads[i]
        steps, place = divmod(latest - times[0], step)
        begin[i] = int(steps) * len(times) + bisect_right(times, times[0] + place) - 1
        begin[i] = min(begin[i], i - 1)
    return begin


@dataclass
class Schedule:
    """A schedule of accesses, guarded by the store's lock. Keys are block numbers."""

    capacity: int
    trace: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    position: int = -1  # of the last access in the trace
    planned: bool = False  # the trace is complete, and the step follows it
    active: bool = False  # inside a step
    departures: int = 0  # steps that departed from the trace
    stalled: float = 0.0  # seconds of waiting in this step, not part of its times
    _uses: dict[int, list[int]] = field(default_factory=dict)
    _new: list[tuple[int, float]] = field(default_factory=list)
    # (begin, access), in order of begin
    _order: list[tuple[int, int]] = field(default_factory=list)
    _at: int = 0
    _began: float = 0.0

    def begin(self) -> None:
        self.active, self.position, self._new, self._at, self.stalled = True, -1, [], 0, 0.0
        self._began = perf_counter()

    def access(self, key: int, size: int) -> None:
        if not self.active:
            return
        self.sizes[key] = size
        self._new.append((key, perf_counter() - self._began - self.stalled))
        if self.planned:
            self.position += 1
            if self.position >= len(self.trace) or self.trace[self.position] != key:
                self.planned = False
                self.departures += 1

    def end(self, read_seconds: Callable[[int], float]) -> None:
        """End the step. ``read_seconds(size)``: seconds of a read, as measured so far."""
        self.active = False
        if self.planned and self.position == len(self.trace) - 1:
            return
        if self.planned:
            self.departures += 1
        self.trace = [key for key, _ in self._new]
        self.times = [time for _, time in self._new]
        self._uses = next_uses(self.trace)
        self.sizes = {key: self.sizes[key] for key in self._uses}
        begin = starts(self.times, [read_seconds(self.sizes[key]) for key in self.trace])
        self._order = sorted((b, i) for i, b in enumerate(begin))
        self.planned = bool(self.trace) and self._better_than_lru()
        self.position, self._at = len(self.trace) - 1, 0

    def next_use(self, key: int) -> float:
        """Return the accesses from now to the next use of a block; infinite if the trace does not
        have it."""
        return distance(self._uses, len(self.trace), key, self.position)

    def ahead(self) -> list[tuple[int, int]]:
        """Return (key, accesses from now) of the reads that should begin now, each once a step."""
        if not self.planned or not self.active:
            return []
        due = []
        while self._at < len(self._order) and self._order[self._at][0] <= self.position:
            access = self._order[self._at][1]
            if access > self.position:
                due.append((self.trace[access], access - self.position))
            self._at += 1
        return due

    def _better_than_lru(self) -> bool:
        """Return whether Belady's rule has no more misses than evicting the least recently used
        block, which may be better for blocks of unequal size."""
        planned = misses(
            self.trace, self.sizes, self.capacity, farthest(self.trace, rounds=2), rounds=3
        )
        return planned <= misses(self.trace, self.sizes, self.capacity, least_recent, rounds=3)
