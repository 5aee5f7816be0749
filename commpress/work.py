"""Waiting, and nothing else: algorithms are generators that yield the ``Work`` they need finished before going on.

``run`` drives one to its end. ``overlapped`` interleaves several, in the same order on every rank. ``Worker`` is the
one thread per state that drives a training step's collectives in the background and answers with futures.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Work(Protocol):
    """The part of ``torch.distributed.Work`` that we rely on."""

    def wait(self) -> object: ...


Steps = Generator[Work, None, T]
Jobs = queue.SimpleQueue[tuple[Steps[Any], torch.futures.Future[Any]] | None]


class Done:
    """Work that is finished already."""

    def wait(self) -> None:
        return None


def run(steps: Steps[T]) -> T:
    """Drive one algorithm to its end and return its result."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as stop:
        return stop.value


class _Running:
    """Algorithms under way, oldest wait first: the order of starts and resumptions does not depend on timing."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Any, Steps[Any], Work]] = deque()

    def advance(self, key: Any, steps: Steps[Any]) -> tuple[Any, Any] | None:
        """Go on to the next wait; returns (key, result) if there is none."""
        try:
            self.waiting.append((key, steps, next(steps)))
        except StopIteration as stop:
            return key, stop.value
        return None


def overlapped(jobs: Iterable[Steps[T]], *, limit: int) -> Steps[list[T]]:
    """Run ``jobs`` interleaved, at most ``limit`` at a time, and return their results in order.

    Every rank starts and resumes the jobs in the same order, whatever the timing: the oldest wait is always next.
    """
    assert limit > 0
    running, results, pending = _Running(), {}, deque(enumerate(jobs))
    while pending or running.waiting:
        while pending and len(running.waiting) < limit:
            if finished := running.advance(*pending.popleft()):
                results[finished[0]] = finished[1]
        if running.waiting:
            key, steps, work = running.waiting.popleft()
            yield work
            if finished := running.advance(key, steps):
                results[finished[0]] = finished[1]
    return [results[i] for i in range(len(results))]


class Worker:
    """One thread that runs submitted algorithms, started in order of submission, at most ``limit`` under way at once.

    ``limit > 1`` may resume jobs in an order that depends on timing: use it only where messages are matched by tag.
    After an exception every job under way or submitted later gets the same exception: the ranks are out of step.
    The thread knows nothing of this object: when nobody holds it any more, the thread ends as after ``close``.
    """

    def __init__(self, name: str, *, limit: int, device: torch.device | None = None) -> None:
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._jobs: Jobs = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_Loop(self._jobs, limit, self._stream).run, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False

    def submit(self, steps: Steps[T]) -> torch.futures.Future[T]:
        """On CUDA the steps run on the worker's side stream, after what the caller's stream has queued so far."""
        if self._closed:
            raise RuntimeError("the worker is closed, nobody would run this job: make a new one")
        if self._stream is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
        else:
            future = torch.futures.Future(devices=[self._stream.device])
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._jobs.put((steps, future))
        return future

    def close(self) -> None:
        """Let the jobs under way finish, then end the thread."""
        self._closed = True
        self._end()
        self._thread.join()


class _Loop:
    """What the thread of a ``Worker`` does. Between jobs it keeps nothing of those it ran."""

    def __init__(self, jobs: Jobs, limit: int, stream: torch.cuda.Stream | None) -> None:
        self._jobs, self._limit, self._stream = jobs, limit, stream
        self._running = _Running()
        self._failure: BaseException | None = None

    def run(self) -> None:
        torch.set_grad_enabled(False)
        with torch.cuda.stream(self._stream):  # no effect without a stream
            closing = False
            while not closing or self._running.waiting:
                closing = self._admit(closing)
                if self._running.waiting:
                    self._resume(*self._running.waiting.popleft())

    def _admit(self, closing: bool) -> bool:
        """Start jobs while there is room; whether the last one has come."""
        while not closing and len(self._running.waiting) < self._limit:
            try:
                job = self._jobs.get(block=not self._running.waiting)
            except queue.Empty:
                break
            if job is None:
                return True
            self._step(job[1], partial(self._running.advance, job[1], job[0]))
            del job
        return closing

    def _resume(self, future: Any, steps: Steps[Any], work: Work) -> None:
        def resume() -> tuple[Any, Any] | None:
            work.wait()
            return self._running.advance(future, steps)

        self._step(future, resume)

    def _step(self, future: Any, step: Callable[[], tuple[Any, Any] | None]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            if finished := step():
                future.set_result(finished[1])
        except Exception as error:
            self._failure = error
            future.set_exception(error)
            while self._running.waiting:
                self._running.waiting.popleft()[0].set_exception(error)
