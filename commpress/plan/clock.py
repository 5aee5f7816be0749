"""Simulated time: events in order, signals, lines that carry bytes one after another, cores that
ranks share.

A process is a generator that yields the signal it waits for; ``Clock.follow`` drives it.
"""

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass
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
        self.clock, self.rate, self.free = clock, bytes_per_second, 0.0
        self.ahead = burst / bytes_per_second

    def carry(self, nbytes: float) -> float:
        """The time at which the last of so many bytes has passed."""
        self.free = max(self.clock.now, self.free) + nbytes / self.rate
        return max(self.clock.now, self.free - self.ahead)


class Cores:
    """Processor cores, shared fairly: with more threads than cores all go slower alike."""

    def __init__(self, clock: Clock, cores: float) -> None:
        self.clock, self.cores = clock, cores
        self._running: list[_Threads] = []
        self._since, self._version = 0.0, 0

    def work(self, seconds: float, threads: float = 1.0) -> Signal:
        """``threads`` threads of so many seconds each; the signal says that they have ended."""
        signal = Signal()
        if seconds <= 0:
            signal.fire()
            return signal
        self._pass()
        self._running.append(_Threads(seconds, threads, signal))
        self._next()
        return signal

    @property
    def taken(self) -> bool:
        """True if who wakes up now finds no core idle."""
        return self._threads() >= self.cores

    def _threads(self) -> float:
        return sum(one.threads for one in self._running)

    def _speed(self) -> float:
        return min(1.0, self.cores / self._threads())

    def _pass(self) -> None:
        """Take what has passed since the last call off everybody's seconds."""
        if self._running:
            passed = (self.clock.now - self._since) * self._speed()
            for one in self._running:
                one.left -= passed
        self._since = self.clock.now

    def _next(self) -> None:
        """Come back when the first of those that run now is done."""
        self._version += 1
        if self._running:
            version, left = self._version, max(min(one.left for one in self._running), 0.0)
            self.clock.at(self.clock.now + left / self._speed(), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:  # others have come or gone meanwhile
            return
        self._pass()
        least = min(one.left for one in self._running) + 1e-12
        ended = [one for one in self._running if one.left <= least]
        self._running = [one for one in self._running if one.left > least]
        self._next()
        for one in ended:
            one.ended.fire()


@dataclass(eq=False)
class _Threads:
    left: float  # seconds of each
    threads: float
    ended: Signal
