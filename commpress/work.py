"""Run algorithms that wait: generators that yield the ``Work`` they need finished before they
continue.

``run`` drives one to its end. ``overlapped`` interleaves several, in the same order on every rank.
``Worker`` is a thread that drives a training step's collectives in the background and returns
futures.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any, Generic, Protocol, TypeVar

import torch

from commpress.errors import InvalidArgument

T = TypeVar("T")


class Work(Protocol):
    """The only part of ``torch.distributed.Work`` that commpress needs."""

    def wait(self) -> object: ...


Steps = Generator[Work, None, T]


class Done:
    """Work that has finished."""

    def wait(self) -> None:
        return None


def run(steps: Steps[T]) -> T:
    """Drive one algorithm to its end and return its result."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as stop:
        return stop.value


def overlapped(jobs: Iterable[Steps[T]], *, limit: int) -> Steps[list[T]]:
    """Run ``jobs`` interleaved, at most ``limit`` at a time, and return their results in order.

    Every rank starts and resumes the jobs in the same order, whatever the timing: the oldest wait
    is always next.
    """
    assert limit > 0
    results: dict[int, T] = {}
    waiting: deque[tuple[int, Steps[T], Work]] = deque()
    pending = deque(enumerate(jobs))

    def advance(i: int, steps: Steps[T]) -> None:
        try:
            waiting.append((i, steps, next(steps)))
        except StopIteration as stop:
            results[i] = stop.value

    while pending or waiting:
        while pending and len(waiting) < limit:
            advance(*pending.popleft())
        if waiting:
            i, steps, work = waiting.popleft()
            yield work
            advance(i, steps)
    return [results[i] for i in range(len(results))]


def started(name: str, call: Callable[[], object]) -> threading.Thread:
    """Start a thread that makes this call, and that the end of the process does not wait for."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    return thread


def future_on(device: torch.device) -> torch.futures.Future[Any]:
    """Make a future for tensors on ``device``; streams that wait for it wait for the stream that
    sets it."""
    return (
        torch.futures.Future() if device.type == "cpu" else torch.futures.Future(devices=[device])
    )


class SideStream:
    """A stream of its own for a worker on one GPU, ordered after the caller's queue so far and
    before those who wait for the result."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait for the caller's stream, and keep the memory of ``tensors`` from reuse until this
        stream has finished with it."""
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                "a CUDA graph is being captured, and it cannot contain an exchange: leave the "
                "exchange out of the capture"
            )
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def enter(self) -> None:
        """Make this stream and its device current for this thread."""
        torch.cuda.set_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """Record and return an event after everything queued so far."""
        return self._stream.record_event()


def stream_of(device: torch.device) -> "torch.cuda.Stream | None":
    """Return this thread's current stream on ``device``, None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Handed(Generic[T]):
    """An object that one thread passes to another, with an event of the giver's stream.

    A worker returns a buffer that its side stream has yet to write, without a wait of the host. The
    receiver's stream waits instead.
    """

    def __init__(self, what: T, device: torch.device) -> None:
        self.what, self._device, self._stream = what, device, stream_of(device)
        self._event = None if self._stream is None else self._stream.record_event()

    def reclaim(self) -> T:
        """Return the object for use on the host, which waits for the giver's stream."""
        if self._event is not None:
            self._event.synchronize()
        return self.what

    def take(self) -> T:
        """Return the object for use on this thread's stream, which waits for the giver's."""
        stream = stream_of(self._device)
        if stream is not None and self._event is not None and stream != self._stream:
            stream.wait_event(self._event)
            if isinstance(self.what, torch.Tensor):
                self.what.record_stream(stream)
        return self.what


class JobFuture(torch.futures.Future[T]):
    """The result of a job. If it ran on a GPU, ``wait`` makes the caller's stream wait, not the
    host.

    torch's own futures with devices find the tensors in a result by pickling it, which fails for
    results with locks.
    """

    stream: SideStream | None = None
    event: torch.cuda.Event | None = None

    def wait(self) -> T:
        result = super().wait()
        if self.stream is not None and self.event is not None:
            caller = torch.cuda.current_stream(self.stream.device)
            caller.wait_event(self.event)
            for tensor in _tensors_of(result):
                if tensor.device == self.stream.device:
                    tensor.record_stream(caller)
        return result


def _tensors_of(result: object) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for each in result:
            yield from _tensors_of(each)


class Worker:
    """A thread that runs submitted algorithms, in order of submission, at most ``limit`` at once.

    ``limit > 1`` resumes jobs in an order that depends on timing: use it only if messages are
    matched by tag. After an exception every running or later job gets the same exception, because
    the ranks are no longer in step. The thread has no reference to this object: it ends after
    ``close`` or when the object is collected.
    """

    def __init__(self, name: str, *, limit: int) -> None:
        self._streams: dict[torch.device, SideStream] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_Loop(self._jobs, limit).run, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False

    def submit(
        self, steps: Steps[T], *tensors: torch.Tensor, waits: int | None = None
    ) -> JobFuture[T]:
        """Run ``steps`` in the thread and return a future of their result.

        ``tensors``: tensors of the caller that the steps read or write. If some are on a GPU, the
        steps run on a side stream there, after everything that the caller's stream has queued.
        ``waits``: number of times that the steps wait, if it is known and equal on every rank. It
        tells when a job has sent everything, so that others may overtake it.
        """
        if self._closed:
            raise RuntimeError("the worker is closed and runs no more jobs: make a new one")
        future: JobFuture[Any] = JobFuture()
        on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        if on_gpu:
            device = on_gpu[0].device
            if device not in self._streams:
                self._streams[device] = SideStream(device)
            future.stream = self._streams[device]
            future.stream.follow(on_gpu)
        self._jobs.put(_Job(steps, future, waits))
        return future

    def close(self) -> None:
        """Let the jobs under way finish, then end the thread."""
        self._closed = True
        self._end()
        self._thread.join()


@dataclass(eq=False)
class _Job:
    steps: Steps[Any]
    future: JobFuture[Any]
    left: int | None  # remaining waits, including the present one
    work: Work = field(default_factory=Done)

    def advance(self) -> bool:
        """Wait, and continue to the next wait; return whether the job has finished."""
        stream = self.future.stream
        if stream is not None:
            stream.enter()
        self.work.wait()
        try:
            self.work = next(self.steps)
        except StopIteration as stop:
            if stream is not None:
                self.future.event = stream.mark()
            self.future.set_result(stop.value)
            return True
        return False


class _Loop:
    """Loop of a ``Worker``'s thread. Between jobs it keeps no reference to finished ones.

    Invariant: no rank waits for a job while an older one on this rank has still to send. Jobs
    arrive at different times on different ranks: otherwise one rank could wait for a message of job
    A that its peer sends only after one of job B, while B is not yet submitted here.
    """

    def __init__(self, jobs: "queue.SimpleQueue[_Job | None]", limit: int) -> None:
        self._jobs, self._limit = jobs, limit
        self._waiting: list[_Job] = []
        self._failure: Exception | None = None

    def run(self) -> None:
        torch.set_grad_enabled(False)
        closing = False
        while not closing or self._waiting:
            closing = self._admit(closing)
            if self._waiting:
                self._resume(self._next())

    def _admit(self, closing: bool) -> bool:
        """Start jobs while there is room; return whether the worker is being closed."""
        while not closing and len(self._waiting) < self._limit:
            try:
                job = self._jobs.get(block=not self._waiting)
            except queue.Empty:
                break
            if job is None:
                return True
            if job.left is not None:
                job.left += 1  # the start counts as a wait
            self._waiting.append(job)
            self._resume(job)
            del job
        return closing

    def _next(self) -> _Job:
        """Return the oldest job that will send after its wait, or the oldest of all if none
        will."""
        return next((job for job in self._waiting if job.left != 1), self._waiting[0])

    def _resume(self, job: _Job) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            if job.left is not None:
                job.left -= 1
            if job.advance():
                self._waiting.remove(job)
            elif job.left == 0:
                raise RuntimeError("a job waits more often than the waits= of its submission")
        except Exception as error:
            # this thread keeps the error, but not the local variables of the job
            clear_frames(error.__traceback__)
            self._failure = error
            failed, self._waiting = self._waiting, []
            for each in failed:
                each.future.set_exception(error)
