"""History of a run that faults have disturbed, as its ranks have written it: pace, participation,
pauses, what was lost."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Commit:
    """A step that one process has committed."""

    victim: int
    life: int
    clock: float  # of time.monotonic()
    step: int
    epoch: int
    hash: str | None
    # from, to, in the order of the data; of all ranks, or of this one
    samples: tuple[int, int] | None
    whole: bool = False  # the samples are those of all ranks


@dataclass(frozen=True)
class Pause:
    """Seconds beyond the usual from a step to the next, of the survivor who waited longest; a fault
    lies between."""

    step: int
    clock: float
    seconds: float


@dataclass
class Hit:
    """A fault that was done: to whom, from when to when (clock); ``back`` is when the victim had
    committed a step again."""

    kind: str
    victim: int
    begin: float
    end: float
    back: float | None = None
    restarted: float | None = None


class History:
    """Everything that the processes of a run have committed."""

    def __init__(self) -> None:
        self.files: list[tuple[Path, int, int]] = []  # of JSON lines, with the victim and its life
        self.taken: dict[Path, int] = {}  # bytes
        self.commits: list[Commit] = []

    def follow(self, path: Path, victim: int, life: int) -> None:
        self.files.append((path, victim, life))

    def read(self) -> list[Commit]:
        """Take in the lines that were written meanwhile; the new commits."""
        new = []
        for path, victim, life in self.files:
            if not path.exists():
                continue
            with open(path, "rb") as file:
                file.seek(self.taken.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self.taken[path] = self.taken.get(path, 0) + len(whole) + len(end)
            events = map(json.loads, whole.splitlines())
            new += [commit_of(each, victim, life) for each in events if each["kind"] == "commit"]
        self.commits += new
        return new

    @property
    def last(self) -> int:
        return max((commit.step for commit in self.commits), default=0)


def commit_of(event: dict[str, Any], victim: int, life: int) -> Commit:
    """A commit of an event. With a position, where the step of all ranks begins, its samples are
    those of ``size`` ranks that read alike."""
    first, end = event.get("samples") or (0, 0)
    if whole := first < end and event.get("position") is not None:
        first, end = event["position"], event["position"] + event["size"] * (end - first)
    samples = (first, end) if first < end else None
    epoch, seen = event.get("epoch", 0), event.get("hash")
    return Commit(victim, life, event["clock"], event["step"], epoch, seen, samples, whole)


class Verdict:
    """Figures of a history; faults were made from ``begin`` to ``end`` (clock), and before
    ``begin`` nothing was disturbed."""

    def __init__(
        self, history: History, hits: Sequence[Hit], ranks: int, begin: float, end: float
    ) -> None:
        self.ranks, self.hits, self.begin, self.end = ranks, hits, begin, end
        self.commits = sorted(history.commits, key=lambda commit: commit.clock)

    @cached_property
    def first(self) -> dict[int, float]:
        """Step → when the first rank had committed it."""
        return {commit.step: commit.clock for commit in reversed(self.commits)}

    @cached_property
    def usual(self) -> float:
        """Seconds from a step to the next while nothing is disturbed: the mean, or the median of
        all without such a time."""
        clocks = sorted(self.first.values())
        calm = [clock for clock in clocks if clock <= self.begin][3:]  # the first steps warm up
        if len(calm) > 10:
            return (calm[-1] - calm[0]) / (len(calm) - 1)
        return median([b - a for a, b in pairwise(clocks)] or [float("nan")])

    @cached_property
    def disturbed(self) -> set[int]:
        """Steps that were committed while faults were made."""
        return {step for step, clock in self.first.items() if self.begin < clock <= self.end}

    @property
    def goodput(self) -> float:
        """Committed steps per second while faults were made, as a share of those without."""
        seconds = self.end - self.begin
        return len(self.disturbed) / seconds * self.usual if seconds > 0 else float("nan")

    @property
    def participation(self) -> float:
        """Ranks that committed a step, as a share of all ranks, mean over the steps while faults
        were made."""
        took_part = {(c.step, c.victim) for c in self.commits if c.step in self.disturbed}
        steps = len(self.disturbed)
        return len(took_part) / (self.ranks * steps) if steps else float("nan")

    @cached_property
    def pauses(self) -> list[Pause]:
        """One for each step after which somebody who was not harmed himself waited because of a
        fault or another group."""
        longest: dict[int, Pause] = {}
        for commits in self._processes().values():
            for before, after in pairwise(commits):
                if before.clock > self.end or not self._waited(before, after):
                    continue
                seconds = max(after.clock - before.clock - self.usual, 0.0)
                known = longest.get(before.step)
                if known is None or known.seconds < seconds:
                    longest[before.step] = Pause(before.step, before.clock, seconds)
        return [longest[step] for step in sorted(longest)]

    def _waited(self, before: Commit, after: Commit) -> bool:
        mine = [hit for hit in self.hits if hit.victim == before.victim]
        if any(h.begin <= after.clock and before.clock <= (h.back or h.end) for h in mine):
            return False
        others = any(before.clock <= hit.begin <= after.clock for hit in self.hits)
        return others or before.epoch != after.epoch

    def _processes(self) -> dict[tuple[int, int], list[Commit]]:
        found: dict[tuple[int, int], list[Commit]] = defaultdict(list)
        for commit in self.commits:
            found[commit.victim, commit.life].append(commit)
        return found

    @property
    def repeated(self) -> list[int]:
        """Steps that a process has committed although it had already committed them, or later
        ones."""
        found = set()
        for commits in self._processes().values():
            last = -1
            for commit in commits:
                if commit.step <= last:
                    found.add(commit.step)
                last = max(commit.step, last)
        return sorted(found)

    @property
    def skipped(self) -> list[int]:
        """Steps below the last that nobody has committed."""
        steps = self.first.keys()
        return sorted(set(range(min(steps, default=0), max(steps, default=0))) - steps)

    @cached_property
    def hashes(self) -> dict[int, set[str]]:
        """Step → hashes of the weights after it."""
        found: dict[int, set[str]] = defaultdict(set)
        for commit in self.commits:
            if commit.hash is not None:
                found[commit.step].add(commit.hash)
        return found

    @property
    def hashed_steps(self) -> int:
        return len(self.hashes)

    @property
    def unequal(self) -> list[int]:
        """Steps after which two ranks had different weights."""
        return sorted(step for step, seen in self.hashes.items() if len(seen) > 1)

    @property
    def samples_lost(self) -> int | None:
        """Samples before the last that no committed step has used; None if the ranks do not say."""
        apart = list(self._apart())
        return sum(max(gap, 0) for gap in apart) if apart else None

    @property
    def samples_twice(self) -> int | None:
        """Samples that committed steps have used more than once."""
        apart = list(self._apart())
        return -sum(min(gap, 0) for gap in apart) if apart else None

    def _apart(self) -> Iterator[int]:
        """Samples between a step's and those before it: negative where these are used again."""
        used = [commit for commit in self.commits if commit.samples]
        # who came later may say the size of a later group
        first = {commit.step: commit for commit in reversed(used)}
        ranges = {(*(c.samples or ()), c.step) for c in used if not c.whole or c is first[c.step]}
        reached = None
        for begin, end, _ in sorted(ranges):
            gap = begin - (begin if reached is None else reached)
            yield max(gap, begin - end)
            reached = max(end, end if reached is None else reached)

    @property
    def healing(self) -> list[float]:
        """Seconds from the new start of a process that was gone to the first step that it
        committed."""
        return [hit.back - hit.restarted for hit in self.hits if hit.back and hit.restarted]
