"""History of a run that faults have disturbed, as its ranks have written it: pace, participation,
pauses, what was lost."""

import json
from collections import defaultdict
from collections.abc import Sequence
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


class EventFile:
    """A file that a process appends JSON lines to; ``new`` returns those that are whole and were
    not returned before."""

    def __init__(self, path: Path, victim: int, life: int) -> None:
        self.path, self.victim, self.life = path, victim, life
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]


class History:
    """Everything that the processes of a run have said."""

    def __init__(self) -> None:
        self.files: list[EventFile] = []
        self.commits: list[Commit] = []
        self.others: list[dict[str, Any]] = []  # events of other kinds, with "victim" and "life"

    def follow(self, path: Path, victim: int, life: int) -> None:
        self.files.append(EventFile(path, victim, life))

    def read(self) -> list[Commit]:
        """Take in what was written meanwhile; the new commits."""
        new = []
        for file in self.files:
            for event in file.new():
                if event["kind"] != "commit":
                    self.others.append({**event, "victim": file.victim, "life": file.life})
                    continue
                new.append(commit_of(event, file.victim, file.life))
        self.commits += new
        return new


def commit_of(event: dict[str, Any], victim: int, life: int) -> Commit:
    """With a position, where the step of all ranks begins, its samples are those of ``size`` ranks
    that read alike."""
    samples, whole = event.get("samples"), event.get("position") is not None
    if samples is not None and whole:
        samples = (event["position"], event["position"] + event["size"] * (samples[1] - samples[0]))
    return Commit(
        victim,
        life,
        event["clock"],
        event["step"],
        event.get("epoch", 0),
        event.get("hash"),
        None if samples is None else (samples[0], samples[1]),
        whole,
    )


@dataclass(frozen=True)
class Hit:
    """A fault that was done: to whom, from when to when (clock); ``back`` is when the victim had
    committed a step again."""

    kind: str
    victim: int
    begin: float
    end: float
    back: float | None = None
    restarted: float | None = None


class Verdict:
    """Figures of a history; faults were made from ``begin`` to ``end`` (clock), and before
    ``begin`` nothing was disturbed."""

    def __init__(
        self, history: History, hits: Sequence[Hit], ranks: int, begin: float, end: float
    ) -> None:
        self.ranks, self.hits, self.begin, self.end = ranks, list(hits), begin, end
        self.commits = sorted(history.commits, key=lambda commit: commit.clock)
        self.others = history.others

    @cached_property
    def first(self) -> dict[int, float]:
        """Step → when the first rank had committed it."""
        found: dict[int, float] = {}
        for commit in self.commits:
            found.setdefault(commit.step, commit.clock)
        return found

    @cached_property
    def usual(self) -> float:
        """Seconds from a step to the next while nothing is disturbed: the mean, or the median of
        all without such a time."""
        # the first steps warm up
        calm = sorted(clock for clock in self.first.values() if clock <= self.begin)[3:]
        if len(calm) > 10:
            return (calm[-1] - calm[0]) / (len(calm) - 1)
        clocks = sorted(self.first.values())
        return median(b - a for a, b in pairwise(clocks)) if len(clocks) > 1 else float("nan")

    @property
    def disturbed_steps(self) -> int:
        return sum(self.begin < clock <= self.end for clock in self.first.values())

    @property
    def goodput(self) -> float:
        """Committed steps per second while faults were made, as a share of those without."""
        return (
            self.disturbed_steps / (self.end - self.begin) * self.usual
            if self.end > self.begin
            else float("nan")
        )

    @property
    def participation(self) -> float:
        """Ranks that committed a step, as a share of all ranks, mean over the steps while faults
        were made."""
        took_part: dict[int, set[int]] = defaultdict(set)
        for commit in self.commits:
            if self.begin < self.first[commit.step] <= self.end:
                took_part[commit.step].add(commit.victim)
        return (
            sum(map(len, took_part.values())) / (self.ranks * len(took_part))
            if took_part
            else float("nan")
        )

    @cached_property
    def pauses(self) -> list[Pause]:
        """One for each step after which somebody who was not harmed himself waited because of a
        fault or another group."""
        by_process: dict[tuple[int, int], list[Commit]] = defaultdict(list)
        for commit in self.commits:
            by_process[commit.victim, commit.life].append(commit)
        longest: dict[int, Pause] = {}
        for (victim, _), commits in by_process.items():
            for before, after in pairwise(commits):
                if not self._disturbed(victim, before, after):
                    continue
                if before.clock > self.end:
                    continue
                pause = Pause(
                    before.step, before.clock, max(after.clock - before.clock - self.usual, 0.0)
                )
                known = longest.get(before.step)
                if known is None or known.seconds < pause.seconds:
                    longest[before.step] = pause
        return sorted(longest.values(), key=lambda pause: pause.step)

    def _disturbed(self, victim: int, before: Commit, after: Commit) -> bool:
        own = any(
            hit.victim == victim
            and hit.begin <= after.clock
            and before.clock <= (hit.back or hit.end)
            for hit in self.hits
        )
        others = any(
            before.clock <= hit.begin <= after.clock for hit in self.hits if hit.victim != victim
        )
        return not own and (others or before.epoch != after.epoch)

    @property
    def repeated(self) -> list[int]:
        """Steps that a process has committed although it had already committed them, or later
        ones."""
        last: dict[tuple[int, int], int] = {}
        found = []
        for commit in self.commits:
            process = (commit.victim, commit.life)
            if commit.step <= last.get(process, -1):
                found.append(commit.step)
            last[process] = max(commit.step, last.get(process, -1))
        return sorted(set(found))

    @property
    def skipped(self) -> list[int]:
        """Steps below the last that nobody has committed."""
        steps = self.first.keys()
        return [
            step
            for step in range(min(steps, default=0), max(steps, default=0))
            if step not in steps
        ]

    @property
    def hashed_steps(self) -> int:
        return len({commit.step for commit in self.commits if commit.hash is not None})

    @property
    def unequal(self) -> list[int]:
        """Steps after which two ranks had different weights."""
        hashes: dict[int, set[str]] = defaultdict(set)
        for commit in self.commits:
            if commit.hash is not None:
                hashes[commit.step].add(commit.hash)
        return sorted(step for step, seen in hashes.items() if len(seen) > 1)

    @property
    def samples_lost(self) -> int | None:
        """Samples before the last that no committed step has used; None if the ranks do not say."""
        return self._samples()[0]

    @property
    def samples_twice(self) -> int | None:
        """Samples that committed steps have used more than once."""
        return self._samples()[1]

    def _samples(self) -> tuple[int | None, int | None]:
        used = [c for c in self.commits if c.samples is not None and c.samples[0] < c.samples[1]]
        # who came later may say the size of a later group
        first = {c.step: c for c in reversed(used)}
        ranges = sorted(
            {
                (*c.samples, c.step)
                for c in used
                if c.samples and (not c.whole or c is first[c.step])
            }
        )
        if not ranges:
            return None, None
        lost = twice = 0
        reached = ranges[0][0]
        for begin, end, _ in ranges:
            lost += max(begin - reached, 0)
            twice += max(min(reached, end) - begin, 0)
            reached = max(reached, end)
        return lost, twice

    @property
    def healing(self) -> list[float]:
        """Seconds from the new start of a process that was gone to the first step that it
        committed."""
        return [
            hit.back - hit.restarted
            for hit in self.hits
            if hit.back is not None and hit.restarted is not None
        ]
