"""Decide which experts' tensors are in memory, which leave for others, and what is read ahead.
Nothing is moved here.

A step is a row of phases: forward of a layer, backward of a layer, the update. In a phase experts
have their turns one after the other. What is known: from the gates on, the turns of this forward;
with it those of its backward, which come in the opposite order; and from the last step, which
phases follow and with whom. The order of turns in a forward and in the update is free, so experts
that are in memory go first.

Note: Belady. Whoever is needed last leaves, which no rule can beat for blocks of one size if the
future is known. A read ahead takes the place of the block that would leave for it at its turn, and
begins when that block has had its own last turn: never a byte more is read than without reading
ahead. Of those whose next turn nobody knows the least frequently used leaves.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

# the number of an expert, and what of it: its weights, their gradient, a moment
Block = tuple[int, str]
Kind = Literal["forward", "backward", "update"]
NEVER = math.inf
# turns to come that are read for although a gradient that goes would make place: disks are never
# without work
AHEAD = 2
AGED = 0.9  # how much of a frequency is left a step later


@dataclass(frozen=True)
class Phase:
    """Turns of some experts of one layer. ``sure``: they will come, in this order; else it is what
    the last step did."""

    kind: Kind
    layer: int
    experts: tuple[int, ...]
    sure: bool = True

    @property
    def place(self) -> tuple[Kind, int]:
        return self.kind, self.layer


@dataclass(frozen=True)
class Moves:
    """Blocks to write, where they are newer in memory, and to let go of; then those that have room:
    to read what is stored."""

    leave: tuple[Block, ...] = ()
    enter: tuple[Block, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leave or self.enter)


@dataclass
class StepTrace:
    """Phases of the step so far, and of the one before it: what they say about those to come."""

    last: list[Phase] = field(default_factory=list)
    done: list[Phase] = field(default_factory=list)
    open: list[Phase] = field(default_factory=list)  # forwards whose backward is to come

    def note(self, phase: Phase, *, differentiable: bool) -> None:
        """A forward without gradients is no part of a step."""
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
        """The rest of this step, and the next step."""
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
    """Contents of memory, by the plan: ``capacity`` bytes at most.

    - ``needs(kind, expert)``: the blocks that a turn needs together; ``ends(kind, expert)``: those
      that are no more after it.
    - ``size(block)``: bytes.
    """

    def __init__(
        self,
        capacity: int,
        needs: Callable[[Kind, int], Iterable[Block]],
        ends: Callable[[Kind, int], Iterable[Block]],
        size: Callable[[Block], int],
    ) -> None:
        self.capacity, self._needs, self._ends, self._size = capacity, needs, ends, size
        self.resident: dict[Block, int] = {}  # their sizes
        self.stored: set[Block] = set()  # those that are somewhere, in memory or on disk
        self.used = 0
        self.frequency: defaultdict[int, float] = defaultdict(float)
        self.trace = StepTrace()
        self._turns: list[tuple[Kind, int]] = []  # those to come that are sure
        self._needed: list[tuple[Block, ...]] = []  # by each of them
        self._freed: list[int] = []  # bytes by all before each of them, in the end
        self._at = -1  # the turn that is on, or was last
        self._over = 0  # turns that are over
        self._ready = 0  # the first turn to come of which something is not in memory
        self._busy: tuple[Block, ...] = ()
        self._uses: dict[Block, list[int]] = {}

    # ------------------------------------------------------------ phases

    def phase(
        self, kind: Kind, layer: int, experts: Sequence[int], *, differentiable: bool = True
    ) -> list[int]:
        """Begin one: the order of its turns. That of a backward is given; others begin with whom
        memory has most of."""
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
        """The step has ended."""
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
        """Before a turn: who must have left, and what must be read."""
        with suppress(ValueError):  # nobody has said so
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
        """After a turn: what it has made is stored, what it has used up is no more."""
        self.stored.update(self._busy)
        for block in self._ends(kind, expert):
            self.drop(block)
        self._busy, self._over = (), self._at + 1

    def ahead(self) -> Moves:
        """Reads for turns to come that can begin now, and who leaves for them."""
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
        """It is found in the store, in memory or on disk."""
        self.stored.add(block)
        if resident and block not in self.resident:
            self._take(block)

    def drop(self, block: Block) -> None:
        """It is no more."""
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
        """The block whose next turn after ``at`` is the last; of those, the least frequently
        used."""
        able = (block for block in self.resident if block not in kept)
        return max(
            able, key=lambda block: (self._next(block, at), -self.frequency[block[0]]), default=None
        )

    def _next(self, block: Block, after: int) -> float:
        uses = self._uses.get(block, ())
        i = bisect_right(uses, after)
        return uses[i] if i < len(uses) else NEVER
