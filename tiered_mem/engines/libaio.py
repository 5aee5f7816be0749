"""The kernel's older asynchronous interface through the ``libaio`` package. It is fast only on
files opened past the page cache; on many file systems ``submit`` does the whole transfer, so one
thread only submits."""

import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from os import strerror

from commpress.errors import MissingPackage
from commpress.tiered_mem.engines.transfer import Transfer
from commpress.work import started

# threads for checksums and callbacks, besides the submitter and the reaper, which waits for the
# kernel
FINISHERS = 2


class LibaioEngine:
    """Pass a transfer to a finisher if it is a write, then the submitter, the kernel, the reaper,
    and a finisher again.

    At most ``depth`` transfers are in the kernel: ``_slots`` counts free places there.
    """

    name = "libaio"

    def __init__(self, depth: int = 4) -> None:
        try:
            import libaio
        except ImportError as error:
            raise MissingPackage(
                "the engine 'libaio' needs the package: pip install 'commpress[nvme]'"
            ) from error
        except OSError as error:  # the shared library
            raise MissingPackage(
                f"the package libaio does not find its shared library ({error}): apt-get install "
                "libaio1 (libaio1t64 on newer systems), dnf install libaio, or use the engine "
                "'threads' or 'io_uring', which need no package"
            ) from error
        self.depth = depth
        self._libaio, self._context = libaio, libaio.AIOContext(depth + 1)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._slots = threading.Semaphore(depth)
        self._stopped = False
        self._finishers = [started(f"io-finish-{i}", self._finish) for i in range(FINISHERS)]
        self._submitter = started("io-submit", self._submit_all)
        self._reaper = started("io-reap", self._reap)

    def register(self, memory: memoryview) -> None:
        """Do nothing: registered memory has no advantage here."""
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
        for _ in range(self.depth):  # wait until the kernel has no transfer
            self._slots.acquire()
        self._stopped = True
        self._reaper.join()
        for _ in self._finishers:
            self._jobs.put(None)
        for thread in self._finishers:
            thread.join()
        self._context.close()

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
            self._enqueue(transfer)
            del transfer

    def _enqueue(self, transfer: Transfer) -> None:
        """Pass the rest of a transfer to the kernel."""
        try:
            io = self._libaio
            mode = io.AIOBLOCK_MODE_WRITE if transfer.write else io.AIOBLOCK_MODE_READ
            block = io.AIOBlock(
                mode, transfer.fd, [transfer.rest], transfer.offset + transfer.moved
            )
            block.transfer = transfer
            if self._context.submit([block]) != 1:
                raise OSError(
                    11, "the kernel's queue of asynchronous transfers is full: raise fs.aio-max-nr"
                )
        except Exception as error:
            self._over(transfer, error)

    def _reap(self) -> None:
        while True:
            events = self._context.getEvents(min_nr=1, timeout=0.2)
            if not events and self._stopped:
                return
            for block, result, _ in events:
                self._ended(block.transfer, result)
                del block
            del events

    def _ended(self, transfer: Transfer, result: int) -> None:
        try:
            if result < 0:
                raise OSError(-result, strerror(-result))
            if transfer.advance(result):
                self._over(transfer, None)
            else:
                self._enqueue(transfer)  # a short transfer keeps its slot
        except OSError as error:
            self._over(transfer, error)

    def _over(self, transfer: Transfer, error: Exception | None) -> None:
        self._slots.release()
        self._jobs.put(partial(transfer.end, error))
