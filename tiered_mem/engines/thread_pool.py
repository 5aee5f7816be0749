"""Threads that call preadv and pwritev, which release the interpreter's lock: the simplest engine,
and as fast as any."""

import queue
from collections.abc import Iterable

from commpress.tiered_mem.engines.transfer import Transfer
from commpress.tiered_mem.layer import FileLayer
from commpress.work import started


class ThreadEngine:
    name = "threads"

    def __init__(self, layer: FileLayer, depth: int = 4) -> None:
        self.depth, self._layer = depth, layer
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._threads = [started(f"io-{i}", self._serve) for i in range(depth)]

    def register(self, memory: memoryview) -> None:
        pass

    def submit(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._queue.put(transfer)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while transfer := self._queue.get():
            failure: Exception | None = None
            try:
                self._move(transfer)
            except Exception as error:
                failure = error
            transfer.end(failure)
            del transfer

    def _move(self, transfer: Transfer) -> None:
        if transfer.write:
            transfer.hash()
        call = self._layer.write if transfer.write else self._layer.read
        while not transfer.advance(
            call(transfer.fd, transfer.rest, transfer.offset + transfer.moved)
        ):
            pass
