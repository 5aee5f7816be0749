"""Lending tensors: they come to the tier that is asked for, and stay while somebody has them."""

import asyncio
from time import perf_counter
from types import TracebackType
from typing import Literal

import torch

from commpress.errors import InvalidArgument
from commpress.tiered_mem.background import Background
from commpress.tiered_mem.blocks import Block, Use
from commpress.tiered_mem.catalog import Catalog
from commpress.tiered_mem.figures import Counters
from commpress.tiered_mem.manifest import DTYPES
from commpress.tiered_mem.memory import Arena
from commpress.tiered_mem.pending import Pending, caller
from commpress.tiered_mem.residency import Residency
from commpress.tiered_mem.transit import Transit

Tier = Literal["host", "device"]


class Lending:
    """One writer or many readers of a tensor at a time."""

    def __init__(
        self, catalog: Catalog, residency: Residency, transit: Transit, background: Background, counters: Counters
    ) -> None:
        self._catalog, self._residency, self._transit = catalog, residency, transit
        self._background, self._counters = background, counters

    def borrow(self, name: str, on: Tier = "host", *, write: bool = True) -> "Borrow":
        return Borrow(self, self._background, name, on, write)

    def acquire(self, name: str, on: Tier, *, write: bool, who: object, pin: bool = False) -> torch.Tensor:
        self._background.check()
        arena = self._residency.host if on == "host" else self._residency.device
        if arena is None or on not in ("host", "device"):
            raise InvalidArgument(
                f"on is {on!r}, expected 'host'{', or open the store with device=' * (on == 'device')}"
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
            block.leaving = block.prefetched = False
            self._residency.touch(block)
            self._residency.schedule.access(block.number, block.size)
            self._transit.read_ahead()
            if on == "host":
                block.settle()
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
                use.readers -= type(use.readers)([who])
            if not use:
                del block.uses[name]
            if device and block.arena is device and device.bytes.is_cuda:
                block.event = torch.cuda.Event()
                block.event.record(torch.cuda.current_stream(device.bytes.device))
            self._catalog.changed.notify_all()

    def _ready(self, name: str, arena: Arena, write: bool, who: object) -> tuple[Block, bool]:
        """Wait until the tensor lies in ``arena`` and may be used; whether it had to come from elsewhere."""
        changed, missed = self._catalog.changed, False
        while True:
            block = self._catalog.block(name)
            use = block.uses.setdefault(name, Use())
            if use.writer is not None or (write and use.readers):
                if who in use.holders():
                    raise InvalidArgument(f"{name!r} is borrowed here already: leave that context first")
            elif write and (block.frozen or block.flushing or self._catalog.barred(who)):
                pass
            elif block.arena is arena and (not block.moving or block.flushing):
                return block, missed
            elif block.slot is not None and block.arena is not arena and block.used:
                if who in {h for u in block.uses.values() for h in u.holders()}:
                    raise InvalidArgument(f"{name!r} lies beside a tensor that is borrowed here on the other tier")
            elif not block.moving:
                missed = missed or block.slot is None
                self._residency.bring(block, arena, who)
                continue
            elif not block.flushing:
                missed = True
                self._await(block.moving)
                continue
            changed.wait()
            self._background.check()

    def _await(self, moving: Pending[None]) -> None:
        """Wait for a move with the lock given up; raise its error."""
        while not moving.done():
            self._catalog.changed.wait()
        moving.wait()

    def _count(self, missed: bool, seconds: float) -> None:
        if missed:
            self._counters.misses += 1
            self._counters.stall_seconds += seconds
            self._residency.schedule.stalled += seconds
            if self._residency.timeline is not None:
                now = perf_counter()
                self._residency.timeline.span("stall: waiting for the disk", now - seconds, now)
        else:
            self._counters.hits += 1


class Borrow:
    """What ``TieredStore.borrow`` returns: a context, also for ``async with``."""

    def __init__(self, lending: Lending, background: Background, name: str, on: Tier, write: bool) -> None:
        self._lending, self._background = lending, background
        self._name, self._on, self._write = name, on, write
        self._tensor: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        return self._begin(caller())

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    async def __aenter__(self) -> torch.Tensor:
        pending, who = Pending[torch.Tensor](), caller()
        self._background.spawn(lambda: pending.run(lambda: self._begin(who)))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            pending.future.add_done_callback(lambda future: None if future.exception() else self._end())
            raise

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _begin(self, who: object) -> torch.Tensor:
        self._who = who
        self._tensor = self._lending.acquire(self._name, self._on, write=self._write, who=who)
        return self._tensor

    def _end(self) -> None:
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._lending.release(self._name, write=self._write, who=self._who)
