"""Disk of a store held to a rate: transfers end when a disk of so many bytes per second would have
ended them."""

import heapq
import threading
from collections.abc import Iterable, Iterator
from time import monotonic

from commpress.tiered_mem import TieredStore
from commpress.tiered_mem.engines import DiskEngine, Transfer
from commpress.work import started


class SlowerDisk:
    """Engine that runs the transfers of another, one after the other in time: each begins when the
    one before has ended, and lasts its bytes divided by ``rate``, or longer if the other engine
    takes longer."""

    def __init__(self, engine: DiskEngine, rate: float) -> None:
        self.inner, self.rate = engine, rate
        self.name, self.depth, self.register = engine.name, engine.depth, engine.register
        self._free = 0.0  # when the disk has ended what was submitted
        self._ends: list[tuple[float, int, Transfer, BaseException | None]] = []
        self._count, self._changed, self._closed = 0, threading.Condition(), False
        self._thread = started("slower-disk", self._conclude)

    def submit(self, transfers: Iterable[Transfer]) -> None:
        self.inner.submit(self._taken(transfers))

    def _taken(self, transfers: Iterable[Transfer]) -> Iterator[Transfer]:
        for transfer in transfers:
            with self._changed:
                self._free = max(self._free, monotonic()) + len(transfer.view) / self.rate
                self._wrap(transfer, self._free)
            yield transfer

    def _wrap(self, transfer: Transfer, end: float) -> None:
        done = transfer.done

        def later(ended: Transfer, error: BaseException | None) -> None:
            ended.done = done
            with self._changed:
                self._count += 1  # transfers themselves have no order
                heapq.heappush(self._ends, (end, self._count, ended, error))
                self._changed.notify()

        transfer.done = later

    def _conclude(self) -> None:
        while True:
            with self._changed:
                while not self._ends or (left := self._ends[0][0] - monotonic()) > 0:
                    if self._closed and not self._ends:
                        return
                    self._changed.wait(left if self._ends else None)
                _, _, transfer, error = heapq.heappop(self._ends)
            transfer.done(transfer, error)

    def close(self) -> None:
        self.inner.close()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()


def hold(store: TieredStore, gigabytes: float) -> None:
    """Hold the disk of a ``store`` that is at rest to so many GB/s, reads and writes together."""
    disk = store._residency.disk
    disk.engine = SlowerDisk(disk.engine, gigabytes * 1e9)
