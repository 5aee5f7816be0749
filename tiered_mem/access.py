"""Access to tensors: bring them to the requested tier, keep them there while they are borrowed, and
evict them to disk otherwise."""

import asyncio
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Literal

import torch

from commpress.errors import InvalidArgument, StorageError
from commpress.tiered_mem.arena import Arena
from commpress.tiered_mem.blocks import Block, Catalog, Pending, Use, caller
from commpress.tiered_mem.manifest import DTYPES
from commpress.tiered_mem.residency import Residency
from commpress.work import started

Tier = Literal["host", "device"]


@dataclass
class AccessCounters:
    """Counters of borrows: ``hits`` found their tensor in memory, ``misses`` waited for it;
    ``prefetched`` blocks were read in advance."""

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    stall_seconds: float = 0.0


class Background:
    """Threads of a store, and whether the store is open."""

    def __init__(self) -> None:
        self.closed = False
        self._pid = os.getpid()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle, self._lock = threading.Semaphore(0), threading.Lock()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="store-ahead")

    def check(self) -> None:
        if self.closed:
            raise StorageError("the store is closed: open it again")
        if os.getpid() != self._pid:
            raise StorageError(
                "the store was opened by the parent process: open it in this process instead"
            )

    def spawn(self, call: Callable[[], None]) -> None:
        """Run a call in a free or a new thread, because such calls may wait for each other."""
        with self._lock:
            self.check()
            self._calls.put(call)
            if not self._idle.acquire(blocking=False):
                self._threads.append(started("store", self._serve))

    def in_order(self, call: Callable[[], None]) -> None:
        """Run a call after all earlier ones, so that reads in advance begin in the order of
        need."""
        self._ahead.submit(call)

    def end(self) -> None:
        """Wait for running calls and end the threads. Set ``closed`` and notify waiting threads
        before."""
        with self._lock:
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads:
            thread.join()
        self._ahead.shutdown(cancel_futures=True)

    def _serve(self) -> None:
        while call := self._calls.get():
            call()
            del call
            self._idle.release()


@dataclass(eq=False)
class Access:
    """Borrowing, with one writer or many readers of a tensor at a time, and moves in the
    background."""

    _catalog: Catalog
    _residency: Residency
    background: Background = field(default_factory=Background)
    counters: AccessCounters = field(default_factory=AccessCounters)

    # ---------------------------------------------------------------- borrowing

    def borrow(self, name: str, on: Tier = "host", *, write: bool = True) -> "Borrow":
        return Borrow(self, name, on, write)

    def acquire(
        self, name: str, on: Tier, *, write: bool, who: object, pin: bool = False
    ) -> torch.Tensor:
        self.background.check()
        arena = self._residency.host if on == "host" else self._residency.device
        if arena is None or on not in ("host", "device"):
            raise InvalidArgument(
                f"on is {on!r}, expected "
                f"'host'{', or open the store with device=' * (on == 'device')}"
            )
        begin = perf_counter()
        with self._catalog.changed:
            block, missed = self._ready(name, arena, write, who)
            self._count(missed, perf_counter() - begin)
            use = block.uses[name]
            if write:
                use.writer, block.dirty = who, True
            else:
                use.readers[who] += 1
            block.pinned = block.pinned or pin
            block.leaving, block.prefetched = False, 0
            block.borrows += 1
            self._residency.touch(block)
            self._residency.schedule.access(block.number, block.size)
            self.read_ahead()
            if on == "device":
                block.follow(arena.bytes.device)
            elif write:
                block.settle()  # a device may read host memory beside others that do
            entry, slot = block.entries[name], block.slot
            assert slot is not None
            return arena.tensor(slot, entry.start, entry.nbytes, DTYPES[entry.dtype], entry.shape)

    def release(self, name: str, *, write: bool, who: object) -> None:
        device = self._residency.device
        with self._catalog.changed:
            block = self._catalog.names[name]
            use = block.uses[name]
            if write:
                use.writer = None
            else:
                use.readers -= Counter([who])
            if not use:
                del block.uses[name]
            if device and block.arena is device:
                block.mark(device.bytes.device)
            self._catalog.changed.notify_all()

    def used_on(self, name: str, device: torch.device) -> None:
        with self._catalog.changed:
            self._catalog.block(name).mark(device)

    def _ready(self, name: str, arena: Arena, write: bool, who: object) -> tuple[Block, bool]:
        """Wait until the tensor is in ``arena`` and may be used; return its block, and whether it
        had to be moved there."""
        changed, missed = self._catalog.changed, False
        while True:
            block = self._catalog.block(name)
            use = block.uses.setdefault(name, Use())
            if use.writer is not None or (write and use.readers):
                if who in use.holders():
                    raise InvalidArgument(
                        f"{name!r} is borrowed by this thread already: leave that context first"
                    )
            elif write and (block.frozen or block.flushing or self._catalog.barred(who)):
                pass
            elif block.arena is arena and (not block.moving or block.flushing):
                return block, missed
            elif block.slot is not None and block.arena is not arena and block.used:
                if who in {h for u in block.uses.values() for h in u.holders()}:
                    raise InvalidArgument(
                        f"{name!r} shares a pack borrowed here on the other tier: leave that first"
                    )
            elif not block.moving:
                missed = missed or block.slot is None
                self._residency.bring(block, arena, who)
                continue
            elif not block.flushing:
                missed = True
                if error := self._moved(block.moving):
                    raise error
                continue
            changed.wait()
            self.background.check()

    def _count(self, missed: bool, seconds: float) -> None:
        if missed:
            self.counters.misses += 1
            self.counters.stall_seconds += seconds
            self._residency.schedule.stalled += seconds
            if self._residency.timeline is not None:
                now = perf_counter()
                self._residency.timeline.span("stall: waiting for the disk", now - seconds, now)
        else:
            self.counters.hits += 1

    # ---------------------------------------------------------------- moving in the background

    def held(self) -> str | None:
        who = caller()
        with self._catalog.changed:
            return next(
                (
                    name
                    for block in self._catalog.blocks.values()
                    for name, use in block.uses.items()
                    if who in use.holders()
                ),
                None,
            )

    def prefetch(self, names: str | Iterable[str]) -> Pending[int]:
        self.background.check()
        with self._catalog.changed:
            wanted = {block: block.borrows for block in self._catalog.blocks_of(names)}
        pending: Pending[int] = Pending()
        self.background.in_order(lambda: self._fetch(wanted, pending, 0))
        return pending

    def evict(self, names: str | Iterable[str]) -> Pending[None]:
        self.background.check()
        who, names = caller(), [names] if isinstance(names, str) else list(names)
        with self._catalog.changed:
            blocks = self._catalog.blocks_of(names)
            for name in names:
                use = self._catalog.block(name).uses.get(name)
                if use and who in use.holders():
                    raise InvalidArgument(
                        f"{name!r} is borrowed and cannot be evicted: leave its context first"
                    )
            blocks = [block for block in blocks if not block.used]
        return self._write_back(blocks, leave=True)

    def flush(self, names: Iterable[str] | None) -> Pending[None]:
        self.background.check()
        with self._catalog.changed:
            blocks = (
                list(self._catalog.blocks.values())
                if names is None
                else self._catalog.blocks_of(names)
            )
        return self._write_back(blocks, leave=False)

    def read_ahead(self) -> None:
        """Begin the reads that are due by the plan of the step. Needs the lock."""
        for number, accesses in self._residency.schedule.ahead():
            block = self._catalog.blocks.get(number)
            if block and not block.slot and not block.moving:
                wanted = {block: block.borrows}
                self.background.in_order(partial(self._fetch, wanted, Pending[int](), accesses))

    def _fetch(self, wanted: dict[Block, int], pending: Pending[int], before: int) -> None:
        """Begin all reads without waiting; the last one finishes ``pending``. ``wanted``: blocks
        with their borrows when they were asked for; those used since need no read in advance."""
        r, begun, left = self._residency, list[Pending[None]](), 0

        def over(future: Future[None]) -> None:  # with the store's lock held
            nonlocal left
            left -= 1
            if error := future.exception():
                pending.fail(error)
            elif not left:
                pending.finish(len(begun))

        with self._catalog.changed:
            try:
                for block, borrows in wanted.items():
                    stays = block.damage or self.background.closed
                    if stays or not block.entries or block.borrows != borrows:
                        continue
                    if block.slot or block.moving:
                        block.prefetched = r.host.capacity
                        continue
                    if not r.bring(block, r.host, caller(), before=before):
                        break
                    if block.moving:
                        block.prefetched = r.host.capacity
                        self.counters.prefetched += 1
                        begun.append(block.moving)
            except BaseException as error:
                pending.fail(error)
                return
            left = len(begun)
            for moving in begun:
                moving.future.add_done_callback(over)
            if not begun:
                pending.finish(0)

    def _write_back(self, blocks: list[Block], *, leave: bool) -> Pending[None]:
        """Write blocks that are newer in memory; with ``leave``, free their memory."""
        pending: Pending[None] = Pending()
        self.background.spawn(lambda: pending.run(lambda: self._write_all(blocks, leave)))
        return pending

    def _write_all(self, blocks: list[Block], leave: bool) -> None:
        """Begin all writes, then wait for them."""
        with self._catalog.changed:
            for block in blocks:
                block.failure = None
                if not block.moving and (block.dirty or (leave and block.slot)):
                    self._begin_write(block, leave)
            # waiting for the last one first wakes this thread once and does not disturb the disk's
            for block in reversed(blocks):
                while (
                    block.entries and (block.dirty or (leave and block.slot)) and not block.failure
                ):
                    if block.moving:
                        self._moved(block.moving)
                    elif self.background.closed or not self._begin_write(block, leave):
                        break
                if block.failure:
                    raise block.failure

    def _begin_write(self, block: Block, leave: bool) -> bool:
        """Begin to write a block, unless it is in use again or pinned."""
        if leave and not (block.used or block.pinned):
            self._residency.expel(block, caller())
        elif not leave and not block.written:
            self._residency.flush(block, caller())
        else:
            return False
        return True

    def _moved(self, moving: Pending[None]) -> BaseException | None:
        """Wait for a move, without the store's lock, and return its error."""
        self._catalog.changed.release()
        try:
            return moving.future.exception()
        finally:
            self._catalog.changed.acquire()


@dataclass(eq=False)
class Borrow:
    """Context manager that yields a tensor of the store, also for ``async with``."""

    _access: Access
    _name: str
    _on: Tier
    _write: bool
    _tensor: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        return self._begin(caller())

    def __exit__(self, *_: object) -> None:
        self._end()

    async def __aenter__(self) -> torch.Tensor:
        pending, who = Pending[torch.Tensor](), caller()
        self._access.background.spawn(lambda: pending.run(lambda: self._begin(who)))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            pending.future.add_done_callback(
                lambda future: None if future.exception() else self._end()
            )
            raise

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def _begin(self, who: object) -> torch.Tensor:
        self._who = who
        self._tensor = self._access.acquire(self._name, self._on, write=self._write, who=who)
        return self._tensor

    def _end(self) -> None:
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._access.release(self._name, write=self._write, who=self._who)
