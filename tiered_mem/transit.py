"""Tensors on their way between disk and memory in the background: prefetch, evict, flush, and reading ahead by plan."""

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from commpress.errors import InvalidArgument
from commpress.tiered_mem.background import Background
from commpress.tiered_mem.blocks import Block
from commpress.tiered_mem.catalog import Catalog
from commpress.tiered_mem.figures import Counters
from commpress.tiered_mem.pending import Pending, caller
from commpress.tiered_mem.residency import Residency


class Transit:
    def __init__(self, catalog: Catalog, residency: Residency, background: Background, counters: Counters) -> None:
        self._catalog, self._residency, self._background, self._counters = catalog, residency, background, counters

    def prefetch(self, names: str | Iterable[str]) -> Pending[int]:
        self._background.check()
        with self._catalog.changed:
            blocks = self._catalog.blocks_of(names)
        pending: Pending[int] = Pending()
        self._background.in_order(lambda: self._fetch(blocks, pending, 0))
        return pending

    def evict(self, names: str | Iterable[str]) -> Pending[None]:
        self._background.check()
        with self._catalog.changed:
            blocks = self._catalog.blocks_of(names)
            for block in blocks:
                if block.used:
                    held = next(name for name, use in block.uses.items() if use)
                    raise InvalidArgument(f"{held!r} is borrowed and cannot be evicted: leave its context first")
        return self._write_back(blocks, leave=True)

    def flush(self, names: Iterable[str] | None) -> Pending[None]:
        self._background.check()
        with self._catalog.changed:
            blocks = list(self._catalog.blocks.values()) if names is None else self._catalog.blocks_of(names)
        return self._write_back(blocks, leave=False)

    def read_ahead(self) -> None:
        """Begin the reads that are due by the plan of the step. Called with the lock held."""
        for number, turns in self._residency.schedule.ahead():
            block = self._catalog.blocks.get(number)
            if block and not block.slot and not block.moving:
                self._background.in_order(partial(self._fetch, [block], Pending[int](), turns))

    def _fetch(self, blocks: list[Block], pending: Pending[int], before: int) -> None:
        """Begin all reads and go on: ``pending`` is finished by the last of them."""
        r, begun = self._residency, list[Pending[None]]()
        try:
            with self._catalog.changed:
                for block in blocks:
                    if block.slot or block.moving or block.damage or not block.entries or self._background.closed:
                        continue
                    if not r.bring(block, r.host, caller(), before=before):
                        break
                    if block.moving:
                        block.prefetched = True
                        self._counters.prefetched += 1
                        begun.append(block.moving)
        except BaseException as error:
            pending.fail(error)
            return
        left = [len(begun)]

        def over(future: Future[None] | None) -> None:  # with the store's lock held, or nothing begun
            left[0] -= future is not None
            if future and (error := future.exception()):
                pending.fail(error)
            elif not left[0]:
                pending.finish(len(begun))

        for moving in begun:
            moving.future.add_done_callback(over)
        if not begun:
            over(None)

    def _write_back(self, blocks: list[Block], *, leave: bool) -> Pending[None]:
        """Write what is newer in memory; with ``leave``, give the memory back."""
        pending: Pending[None] = Pending()
        self._background.spawn(lambda: pending.run(lambda: self._write_all(blocks, leave)))
        return pending

    def _write_all(self, blocks: list[Block], leave: bool) -> None:
        """Begin all writes, then wait for them."""
        r = self._residency
        with self._catalog.changed:
            for block in blocks:
                block.failure = None
                if leave and block.slot and not (block.used or block.moving or block.pinned):
                    r.expel(block, caller())
                elif not leave and block.dirty and not (block.written or block.moving):
                    r.flush(block, caller())
            for block in reversed(blocks):  # who waits for the last is woken once, and the disk's threads are left alone
                while block.entries and (block.dirty or (leave and block.slot)) and not block.failure:
                    if block.moving:
                        self._moved(block.moving)
                    elif (
                        (block.used if leave else block.written) or (leave and block.pinned) or self._background.closed
                    ):
                        break  # somebody took it again, or it is to stay
                    elif leave:
                        r.expel(block, caller())
                    else:
                        r.flush(block, caller())
                if block.failure:
                    raise block.failure

    def _moved(self, moving: Pending[None]) -> None:
        """Wait for a move, however it ends, with the store's lock let go of."""
        self._catalog.changed.release()
        try:
            moving.future.exception()
        finally:
            self._catalog.changed.acquire()
