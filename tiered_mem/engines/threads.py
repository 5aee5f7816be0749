"""Threads that call preadv and pwritev, which let other threads run: the simplest engine, and as fast as any.

A transfer moves in pieces, each hashed just before it is written or just after it is read, while the processor's cache
has it: memory is passed over once, not twice.
"""

import queue
import threading
from collections.abc import Iterable

from commpress.tiered_mem.engines.engine import Transfer
from commpress.tiered_mem.layer import FileLayer

PIECE = 2 << 20


class ThreadEngine:
    name = "threads"

    def __init__(self, layer: FileLayer, depth: int = 4) -> None:
        self.depth, self._layer = depth, layer
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name=f"io-{i}", daemon=True) for i in range(depth)]
        for thread in self._threads:
            thread.start()

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
            try:
                move = self._write if transfer.write else self._read
                while not move(transfer, transfer.moved + PIECE):
                    pass
            except Exception as error:
                transfer.done(transfer, error)
            else:
                transfer.done(transfer, None)
            del transfer

    def _write(self, transfer: Transfer, end: int) -> bool:
        transfer.take(end)
        piece = transfer.view[transfer.moved : end]
        return transfer.advance(self._layer.write(transfer.fd, piece, transfer.offset + transfer.moved))

    def _read(self, transfer: Transfer, end: int) -> bool:
        piece = transfer.view[transfer.moved : end]
        over = transfer.advance(self._layer.read(transfer.fd, piece, transfer.offset + transfer.moved))
        transfer.take(transfer.moved)
        return over
