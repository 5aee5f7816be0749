"""Progress of operations over MPI in the background: MPI moves data only while it is called.

An operation is a generator that yields the requests it waits for. A thread that waits for one tests
all; the background thread tests them otherwise, so that futures are set and a backward pass
overlaps with its reductions.
"""

import os
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from commpress.collectives.transports.mpi import EAGER, NAP, ending, mpi
from commpress.work import started

Steps = Generator[list[Any], None, None]  # requests of MPI
_ZERO = timedelta(0)


class MpiProgress:
    """Running operations of one process in one group."""

    def __init__(self) -> None:
        self.mpi = mpi()
        ending.expect()
        self._lock = threading.Lock()  # held during calls of MPI
        self._idle = threading.Condition()
        self._pending: list[MpiWork] = []
        self._kept: list[MpiWork] = []  # aborted, with buffers that MPI may still access
        self._waiting = 0  # threads that test requests while they wait
        self._thread: threading.Thread | None = None
        self._over = ""

    def start(
        self, name: str, steps: Steps, tensors: Sequence[torch.Tensor], seconds: float
    ) -> "MpiWork":
        work = MpiWork(self, name, steps, tensors, time.monotonic() + seconds)
        with self._lock:
            if self._over:
                raise RuntimeError(f"{name} over MPI: {self._over}")
            if not work.advance():
                self._pending.append(work)
        if work.settled:
            work.set_future()
        elif not self._waiting:
            self._watch()
        return work

    def ask(self) -> bool:
        """Test all requests once; return whether any operation has ended."""
        with self._lock:
            ended = [work for work in self._pending if work.advance()]
            if ended:
                self._pending = [work for work in self._pending if not work.settled]
        for work in ended:  # without the lock: a future's callback may call the group
            work.set_future()
        return bool(ended)

    def drive(self, work: "MpiWork", until: float) -> None:
        with self._idle:
            self._waiting += 1
        try:
            start = time.monotonic()
            while not work.settled and (now := time.monotonic()) < until:
                if self.ask():
                    start = now
                elif now - start < EAGER:
                    os.sched_yield()
                else:
                    time.sleep(NAP)
        finally:
            with self._idle:
                self._waiting -= 1
            if self._pending:
                self._watch()

    def _watch(self) -> None:
        with self._idle:
            if self._thread is None:
                self._thread = started("commpress-mpi", self._loop)
            self._idle.notify()

    def _loop(self) -> None:
        while not self._over:
            with self._idle:
                if not self._over and (self._waiting or not self._pending):
                    self._idle.wait()
            time.sleep(NAP)
            if not self._waiting:
                self.ask()

    def give_up(self, why: str) -> None:
        """End running operations with an error, and let the end of this process end the job unless
        a group continues."""
        ending.abort(self._kept)
        self._end(why)

    def close(self) -> None:
        self._end("the group was destroyed")

    def _end(self, why: str) -> None:
        with self._lock:
            self._over = self._over or why
            lost, self._pending = self._pending, []
            self._kept += lost
            for work in lost:
                work.fail(RuntimeError(f"{work.name} over MPI was aborted: {why}"))
        for work in lost:
            work.set_future()
        with self._idle:
            self._idle.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    @property
    def left(self) -> bool:
        """True while MPI may still access buffers of aborted operations."""
        return bool(self._kept)


@dataclass(eq=False)
class MpiWork:
    """The part of torch's ``Work`` that ``GroupWork`` needs."""

    progress: MpiProgress
    name: str
    steps: Steps | None
    tensors: Sequence[torch.Tensor]
    deadline: float
    settled: bool = False
    source: int = -1
    error: Exception | None = None
    _requests: list[Any] = field(default_factory=list)
    _future: torch.futures.Future[Any] | None = None
    _setting: threading.Lock = field(default_factory=threading.Lock)
    _set: bool = False

    def advance(self) -> bool:
        """Continue as far as possible without waiting; return whether it has ended. Needs the lock
        of ``MpiProgress``."""
        try:
            while not self._requests or self.progress.mpi.Request.Testall(self._requests):
                # tensors made in inference mode can be written only in it
                with torch.inference_mode():
                    self._requests = next(self.steps)  # type: ignore[arg-type]
        except StopIteration:
            self.steps, self.settled = None, True
        except Exception as error:  # for the thread that waits, not the one that tests
            self.fail(error)
        return self.settled

    def fail(self, error: Exception) -> None:
        self.error, self.settled = error, True

    def set_future(self) -> None:
        """Set the future once, if it was requested."""
        with self._setting:
            future, done = self._future, self._set
            self._set = done or future is not None
        if future is None or done:
            return
        if self.error is None:
            future.set_result(self.result())
        else:
            future.set_exception(self.error)

    def wait(self, timeout: timedelta = _ZERO) -> bool:
        if not self.settled:
            limit = time.monotonic() + timeout.total_seconds() if timeout > _ZERO else self.deadline
            self.progress.drive(self, min(limit, self.deadline))
        if self.error is not None:
            raise self.error
        if not self.settled and time.monotonic() < self.deadline:
            raise RuntimeError("Operation timed out!")  # Gloo's error for a wait that was too short
        if not self.settled:
            raise RuntimeError(
                f"{self.name} over MPI reached its timeout: a peer timed out or died"
            )
        return True

    def is_completed(self) -> bool:
        if not self.settled:
            self.progress.ask()
        return self.settled

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return list(self.tensors)

    def get_future(self) -> torch.futures.Future[Any]:
        with self._setting:
            if self._future is None:
                self._future = torch.futures.Future()
            future = self._future
        if self.settled:
            self.set_future()
        return future

    def _source_rank(self) -> int:
        return self.source
