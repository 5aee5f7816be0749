"""Decide which experts' tensors are in memory, which are evicted for others, and which are read in
advance. This module moves no data.

A step is a sequence of phases: forward of a layer, backward of a layer, the update. In a phase each
expert has a turn. The gates determine the turns of this forward, and those of its backward in the
opposite order; the last step predicts which phases follow, with which experts. The order of turns
in a forward and in the update is free, so experts in memory come first.

Note: Belady. The block that is needed last is evicted, which is optimal for blocks of one size if
the future is known. A read in advance replaces the block that would be evicted for it at its turn,
and begins when that block has had its last turn: so no more bytes are read than without reading in
advance. Among blocks without a known next turn the least frequently used is evicted.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

# number of an expert, and kind of tensor: weights, gradient or a moment
Block = tuple[int, str]
Kind = Literal["forward", "backward", "update"]
NEVER = math.inf
# turns for which blocks are read in advance even if a gradient's deletion would make room later, so
# that disks are never idle
AHEAD = 2
AGED = 0.9  # decay of a frequency per step


@dataclass(frozen=True)
class Phase:
    """Turns of some experts of one layer. ``sure``: they will come in this order; else they are a
    prediction from the last step."""

    kind: Kind
    layer: int
    experts: tuple[int, ...]
    sure: bool = True

    @property
    def place(self) -> tuple[Kind, int]:
        return self.kind, self.layer


@dataclass(frozen=True)
class Moves:
    """Blocks to evict, after writing those that are newer in memory; then blocks with room, to read
    if they are stored."""

    leave: tuple[Block, ...] = ()
    enter: tuple[Block, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leave or self.enter)


@dataclass
class StepTrace:
    """Phases of the step so far and of the step before it, from which later phases are
    predicted."""

    last: list[Phase] = field(default_factory=list)
    done: list[Phase] = field(default_factory=list)
    open: list[Phase] = field(default_factory=list)  # forwards before their backward

    def note(self, phase: Phase, *, differentiable: bool) -> None:
        """Record a phase. A forward without gradients is not part of a step."""
        if not phase.experts or (phase.kind == "forward" and not differentiable):
            return
        self.done.append(phase)
        if phase.kind == "forward":
            self.open.append(phase)
        elif phase.kind == "backward":
            for i in reversed(range(len(self.open))):
                if self.open[i].layer == phase.layer:
                    del self.open[i]
                    break

    def over(self) -> None:
        self.last, self.done, self.open = self.done, [], []

    def coming(self) -> list[Phase]:
        """Return the rest of this step, and the next step."""
        backward = [Phase("backward", p.layer, p.experts[::-1]) for p in reversed(self.open)]
        places = [p.place for p in self.done]
        rest = (
            self.last[len(places) :]
            if [p.place for p in self.last[: len(places)]] == places
            else []
        )
        if not rest:
            rest = [*backward, Phase("update", -1, (), sure=False)] if backward else []
        found, known, certain = list[Phase](), list(backward), True
        for phase in rest:
            own = (
                next((p for p in known if p.layer == phase.layer), None)
                if phase.kind == "backward"
                else None
            )
            if own is not None:
                known.remove(own)
                found.append(replace(own, sure=certain))
                continue
            certain = False
            if phase.kind == "update":
                trained = [
                    e for p in (*self.done, *found) if p.kind == "backward" for e in p.experts
                ]
                phase = replace(phase, experts=tuple(dict.fromkeys(trained)))
            found.append(replace(phase, sure=False))
        if "update" in {p.kind for p in (*self.done[-1:], *found[-1:])}:
            found += [replace(p, sure=False) for p in (self.last if rest else self.done)]
        return found


class TierPlan:
    """Contents of memory according to the plan, of at most ``capacity`` bytes.

    - ``needs(kind, expert)``: return the blocks that a turn needs together.
    - ``ends(kind, expert)``: return the blocks that are deleted after a turn.
    - ``size(block)``: return the bytes of a block.
    """

    def __init__(
        self,
        capacity: int,
        needs: Callable[[Kind, int], Iterable[Block]],
        ends: Callable[[Kind, int], Iterable[Block]],
        size: Callable[[Block], int],
    ) -> None:
        self.capacity, self._needs, self._ends, self._size = capacity, needs, ends, size
        self.resident: dict[Block, int] = {}  # blocks in memory → bytes
        self.stored: set[Block] = set()  # blocks that exist, in memory or on disk
        self.used = 0
        self.frequency: defaultdict[int, float] = defaultdict(float)
        self.trace = StepTrace()
        self._turns: list[tuple[Kind, int]] = []  # sure turns to come
        self._needed: list[tuple[Block, ...]] = []  # blocks needed by each of them
        self._freed: list[int] = []  # bytes freed by all turns before each of them
        self._at = -1  # current or last turn
        self._over = 0  # number of ended turns
        self._ready = 0  # first turn to come with a block that is not in memory
        self._busy: tuple[Block, ...] = ()
        self._uses: dict[Block, list[int]] = {}

    # ------------------------------------------------------------ phases

    def phase(
        self, kind: Kind, layer: int, experts: Sequence[int], *, differentiable: bool = True
    ) -> list[int]:
        """Begin a phase and return the order of its turns, which is given for a backward; others
        begin with the experts that have most bytes in memory."""
        order = list(experts)
        if kind != "backward":
            order.sort(
                key=lambda e: -sum(self.resident.get(block, 0) for block in self._needs(kind, e))
            )
        if kind == "forward":
            for expert in order:
                self.frequency[expert] += 1
        phase = Phase(kind, layer, tuple(order))
        self.trace.note(phase, differentiable=differentiable)
        self._look_ahead([phase, *self.trace.coming()])
        return order

    def over(self) -> None:
        """End the step."""
        self.trace.over()
        for expert in self.frequency:
            self.frequency[expert] *= AGED

    def _look_ahead(self, phases: list[Phase]) -> None:
        self._turns, self._needed, self._freed, self._uses = [], [], [0], {}
        self._at, self._over, self._ready, when, sure = -1, 0, 0, 0, True
        for phase in phases:
            sure = sure and phase.sure
            for expert in phase.experts:
                needed = tuple(self._needs(phase.kind, expert))
                for block in needed:
                    self._uses.setdefault(block, []).append(when)
                if sure:
                    self._turns.append((phase.kind, expert))
                    self._needed.append(needed)
                    self._freed.append(
                        self._freed[-1] + sum(map(self._size, self._ends(phase.kind, expert)))
                    )
                    when += 1
            if not phase.sure:
                when += 1

    # ------------------------------------------------------------ turns

    def begin(self, kind: Kind, expert: int) -> Moves:
        """Begin a turn: return the blocks to evict and to read before it."""
        with suppress(ValueError):  # an unexpected turn
            self._at = self._turns.index((kind, expert), max(self._at, 0))
        self._busy = tuple(self._needs(kind, expert))
        leave, enter = list[Block](), list[Block]()
        for block in self._busy:
            if block not in self.resident:
                while self.used + self._size(block) > self.capacity and (
                    victim := self._farthest(self._at, self._busy)
                ):
                    leave.append(self._forget(victim))
                self._take(block)
                enter.append(block)
        return Moves(tuple(leave), tuple(enter))

    def end(self, kind: Kind, expert: int) -> None:
        """End a turn: blocks that it has made are stored, those that it has used up are deleted."""
        self.stored.update(self._busy)
        for block in self._ends(kind, expert):
            self.drop(block)
        self._busy, self._over = (), self._at + 1

    def ahead(self) -> Moves:
        """Return reads for later turns that can begin now, and evictions for them."""
        leave, enter = list[Block](), list[Block]()
        turn = max(self._ready, self._at + 1)
        while turn < len(self._turns):
            needed = self._needed[turn]
            for block in needed:
                if block in self.resident:
                    continue
                while self.used + self._size(block) > self.capacity:
                    victim = self._farthest(turn, needed)
                    freed = self._freed[turn] - self._freed[self._over]
                    if (
                        victim is None
                        or victim in self._busy
                        or self._next(victim, self._at) <= turn
                        or (
                            turn > self._at + AHEAD
                            and self.used + self._size(block) - freed <= self.capacity
                        )
                    ):
                        self._ready = turn
                        return Moves(tuple(leave), tuple(enter))
                    leave.append(self._forget(victim))
                self._take(block)
                enter.append(block)
            turn += 1
        self._ready = turn
        return Moves(tuple(leave), tuple(enter))

    def add(self, block: Block, *, resident: bool) -> None:
        """Record a block found in the store, in memory or on disk."""
        self.stored.add(block)
        if resident and block not in self.resident:
            self._take(block)

    def drop(self, block: Block) -> None:
        """Record that a block was deleted."""
        self.stored.discard(block)
        if block in self.resident:
            self._forget(block)

    def _take(self, block: Block) -> None:
        self.resident[block] = self._size(block)
        self.used += self.resident[block]

    def _forget(self, block: Block) -> Block:
        self.used -= self.resident.pop(block)
        self._ready = int(min(self._ready, self._next(block, self._at)))
        return block

    def _farthest(self, at: int, kept: Sequence[Block]) -> Block | None:
        """Return the block with the latest next turn after ``at``, and among those the least
        frequently used one."""
        able = (block for block in self.resident if block not in kept)
        return max(
            able, key=lambda block: (self._next(block, at), -self.frequency[block[0]]), default=None
        )

    def _next(self, block: Block, after: int) -> float:
        uses = self._uses.get(block, ())
        i = bisect_right(uses, after)
        return uses[i] if i < len(uses) else NEVER
