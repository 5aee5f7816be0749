"""Waiting, and nothing else: algorithms are generators that yield the ``Work`` they need finished before going on.

``run`` drives one to its end. ``overlapped`` interleaves several, in the same order on every rank. ``Worker`` is the
one thread per state that drives a training step's collectives in the background and answers with futures.
"""

import queue
import threading
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
    """

    def __init__(self, name: str, *, limit: int, device: torch.device | None = None) -> None:
        self._jobs: queue.SimpleQueue[tuple[Steps[Any], torch.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._limit = limit
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

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
        self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        with torch.cuda.stream(self._stream):  # no effect without a stream
            self._serve()

    def _serve(self) -> None:
        running, closing = _Running(), False
        while not closing or running.waiting:
            while not closing and len(running.waiting) < self._limit:
                try:
                    job = self._jobs.get(block=not running.waiting)
                except queue.Empty:
                    break
                if job is None:
                    closing = True
                else:
                    self._step(running, job[1], partial(running.advance, job[1], job[0]))
            if running.waiting:
                future, steps, work = running.waiting.popleft()

                def resume(future: Any = future, steps: Steps[Any] = steps, work: Work = work) -> Any:
                    work.wait()
                    return running.advance(future, steps)

                self._step(running, future, resume)

    def _step(self, running: _Running, future: Any, step: Callable[[], tuple[Any, Any] | None]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            if finished := step():
                future.set_result(finished[1])
        except Exception as error:
            self._failure = error
            future.set_exception(error)
            while running.waiting:
                running.waiting.popleft()[0].set_exception(error)
