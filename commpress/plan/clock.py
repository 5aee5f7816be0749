"""Simulated time: events in order, signals, lines that carry bytes one after another, cores that
ranks share.

A process is a generator that yields the signal it waits for; ``Clock.follow`` drives it.
"""

import heapq
from collections.abc import Callable, Generator
from itertools import count

Process = Generator["Signal", None, None]


class Signal:
    """Something that happens once."""

    def __init__(self) -> None:
        self.done = False
        self._then: list[Callable[[], None]] = []

    def fire(self) -> None:
        if not self.done:
            self.done = True
            for call in self._then:
                call()
            self._then.clear()

    def then(self, call: Callable[[], None]) -> None:
        if self.done:
            call()
        else:
            self._then.append(call)


class Clock:
    """Seconds since the start; equal times in the order in which they were asked for, so a run
    repeats exactly."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._order), call))

    def after(self, seconds: float) -> Signal:
        signal = Signal()
        self.at(self.now + seconds, signal.fire)
        return signal

    def follow(self, process: Process) -> Signal:
        """Start a process now; the signal says that it has ended."""
        ended = Signal()

        def resume() -> None:
            for signal in process:
                if not signal.done:
                    signal.then(resume)
                    return
            ended.fire()

        self.at(self.now, resume)
        return ended

    def run(self) -> float:
        """Until nothing is left to happen; returns the time of the last event."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
        return self.now


class TokenBucket:
    """Carries bytes at one rate, first come first served; after a rest, ``burst`` of them at once
    (a token bucket)."""

    def __init__(self, clock: Clock, bytes_per_second: float, burst: float = 0.0) -> None:
        self.clock, self.rate, self.free, self.carried = clock, bytes_per_second, 0.0, 0.0
        self.ahead = burst / bytes_per_second

    def carry(self, nbytes: float) -> float:
        """The time at which the last of so many bytes has passed."""
        self.carried += nbytes
        self.free = max(self.clock.now, self.free) + nbytes / self.rate
        return max(self.clock.now, self.free - self.ahead)


class Cores:
    """Processor cores, shared fairly: with more threads than cores all go slower alike."""

    def __init__(self, clock: Clock, cores: float) -> None:
        self.clock, self.cores = clock, cores
        self._running: list[list[float]] = []  # [seconds left of each thread, threads]
        self._ends: list[Signal] = []
        self._since, self._version = 0.0, 0

    def work(self, seconds: float, threads: float = 1.0) -> Signal:
        """``threads`` threads of so many seconds each; the signal says that they have ended."""
        signal = Signal()
        if seconds <= 0:
            signal.fire()
            return signal
        self._pass()
        self._running.append([seconds, threads])
        self._ends.append(signal)
        self._next()
        return signal

    @property
    def taken(self) -> bool:
        """True if who wakes up now finds no core idle."""
        return sum(threads for _, threads in self._running) >= self.cores

    def _speed(self) -> float:
        return min(1.0, self.cores / sum(threads for _, threads in self._running))

    def _pass(self) -> None:
        if self._running:
            passed = (self.clock.now - self._since) * self._speed()
            for one in self._running:
                one[0] -= passed
        self._since = self.clock.now

    def _next(self) -> None:
        self._version += 1
        if self._running:
            version = self._version
            left = max(min(one[0] for one in self._running), 0.0)
            self.clock.at(self.clock.now + left / self._speed(), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._pass()
        least = min(one[0] for one in self._running) + 1e-12
        ended = [i for i, one in enumerate(self._running) if one[0] <= least]
        signals = [self._ends[i] for i in ended]
        for i in reversed(ended):
            del self._running[i], self._ends[i]
        self._next()
        for signal in signals:
            signal.fire()
