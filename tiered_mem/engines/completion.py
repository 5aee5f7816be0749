"""What engines of the kernel's own queues share: two threads for checksums and callbacks, beside the submitting one."""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from os import strerror

from commpress.tiered_mem.engines.engine import Transfer

FINISHERS = 2


class QueueEngine(ABC):
    """A transfer passes a finisher if it is written, the submitter, the kernel, the reaper, and again a finisher.

    At most ``depth`` transfers are in the kernel: ``_slots`` counts free places there.
    """

    name: str

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._slots = threading.Semaphore(depth)
        self._finishers = [self._thread(self._finish, f"io-finish-{i}") for i in range(FINISHERS)]
        self._submitter = self._thread(self._submit_all, "io-submit")
        self._reaper = self._thread(self._reap, "io-reap")

    def start(self) -> None:
        for thread in [*self._finishers, self._submitter, self._reaper]:
            thread.start()

    def register(self, memory: memoryview) -> None:
        """Nothing to gain here."""
        return

    def submit(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            if transfer.write and transfer.hashed:
                self._jobs.put(partial(self._prepare, transfer))
            else:
                self._ready.put(transfer)

    def close(self) -> None:
        self._ready.put(None)
        self._submitter.join()
        for _ in range(self.depth):  # nothing is left in the kernel
            self._slots.acquire()
        self._stop()
        self._reaper.join()
        for _ in self._finishers:
            self._jobs.put(None)
        for thread in self._finishers:
            thread.join()

    @abstractmethod
    def _enqueue(self, transfer: Transfer) -> None:
        """Hand a transfer's rest to the kernel."""

    @abstractmethod
    def _completed(self) -> list[tuple[Transfer, int]] | None:
        """Wait for transfers that ended, each with a count or minus an error number; None after ``_stop``."""

    @abstractmethod
    def _stop(self) -> None:
        """Have ``_completed`` return None."""

    @staticmethod
    def _thread(target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)

    def _prepare(self, transfer: Transfer) -> None:
        transfer.hash()
        self._ready.put(transfer)

    def _finish(self) -> None:
        while job := self._jobs.get():
            job()
            del job

    def _submit_all(self) -> None:
        while transfer := self._ready.get():
            self._slots.acquire()
            self._hand_over(transfer)
            del transfer

    def _hand_over(self, transfer: Transfer) -> None:
        try:
            self._enqueue(transfer)
        except Exception as error:
            self._over(transfer, error)

    def _reap(self) -> None:
        while (completed := self._completed()) is not None:
            for transfer, result in completed:
                self._ended(transfer, result)
            del completed

    def _ended(self, transfer: Transfer, result: int) -> None:
        try:
            if result < 0:
                raise OSError(-result, strerror(-result))
            if transfer.advance(result):
                self._over(transfer, None)
            else:
                self._hand_over(transfer)  # a short one keeps its place
        except OSError as error:
            self._over(transfer, error)

    def _over(self, transfer: Transfer, error: Exception | None) -> None:
        self._slots.release()
        self._jobs.put(partial(self._conclude, transfer, error))

    def _conclude(self, transfer: Transfer, error: Exception | None) -> None:
        if error is None and not transfer.write:
            transfer.hash()
        transfer.done(transfer, error)
