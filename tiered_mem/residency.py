"""Residency of blocks in memory: loading, flushing and making room, never beyond a tier's budget.

Methods here need the store's lock (``Catalog.changed``), which is never held while bytes move.
"""

import threading
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from time import perf_counter
from typing import Literal

from commpress.errors import Damaged, OverBudget
from commpress.tiered_mem.arena import Arena, Slot, padded
from commpress.tiered_mem.blocks import Block, Pending
from commpress.tiered_mem.disk import Batch, References, Wear
from commpress.tiered_mem.manifest import Chunk, Extent
from commpress.tiered_mem.schedule import Schedule
from commpress.timeline import Timeline
from commpress.units import show_bytes


@dataclass
class Crossing:
    """Bytes copied between host memory and the model's device, over PCIe; for a model on the
    processor the bytes that a device would need."""

    up: int = 0  # to the model
    down: int = 0  # from the model


@dataclass(eq=False)
class Residency:
    changed: threading.Condition
    references: References
    host: Arena
    device: Arena | None
    _: KW_ONLY
    chunk_bytes: int
    wear: Wear
    schedule: Schedule
    timeline: Timeline | None = None  # set by ``watch``

    def __post_init__(self) -> None:
        self.disk = self.references.disk
        arenas = filter(None, (self.host, self.device))
        # oldest use first
        self.resident: dict[Arena, dict[Block, None]] = {arena: {} for arena in arenas}
        self._waiting: set[object] = set()
        self.read_seconds, self.read_bytes, self.written_bytes = 0.0, 0, 0
        self.crossing = Crossing()

    # ---------------------------------------------------------------- room in memory

    def room(
        self, arena: Arena, nbytes: int, who: object, *, before: int | None = None
    ) -> Slot | None:
        """Return a slot, after evicting other blocks, for which ``who`` waits. May release the
        lock. Raise ``OverBudget`` if nothing can be evicted.

        ``before`` marks a prefetch, with the accesses until its use: return None instead of waiting
        for users, or if all others are used sooner.
        """
        if padded(nbytes) > arena.capacity:
            raise OverBudget(
                f"{show_bytes(nbytes)} do not fit into {self._tier(arena)} memory of "
                f"{show_bytes(arena.capacity)}: raise its budget, or divide the tensor"
            )
        leaving, tried = dict[Block, None](), set[Block]()
        while (slot := arena.take(nbytes)) is None:
            for block in list(leaving):
                if not block.leaving or block.slot is None:
                    del leaving[block]
                if block.failure and block not in tried:
                    tried.add(block)
                    raise block.failure
            if sum(block.slot.length for block in leaving if block.slot) < padded(nbytes) and (
                victim := self._victim(arena, before)
            ):
                self.expel(victim, who)
                if victim.slot is not None:
                    leaving[victim] = None
                continue
            if not any(block.moving for block in self.resident[arena]) and not leaving:
                if before is not None:
                    return None
                self._refuse_if_stuck(arena, nbytes, who)
            self._waiting.add(who)
            self.changed.wait(1.0)
            self._waiting.discard(who)
        return slot

    def _victim(self, arena: Arena, before: int | None) -> Block | None:
        able = (
            b for b in self.resident[arena] if not (b.used or b.moving or b.pinned or b.leaving)
        )  # oldest use first
        if not self.schedule.planned:
            return self._oldest(able, needed=before is None)
        victim = max(able, key=lambda b: self.schedule.next_use(b.number), default=None)
        if victim and before is not None and self.schedule.next_use(victim.number) <= before:
            return None
        return victim

    def _oldest(self, able: Iterable[Block], *, needed: bool) -> Block | None:
        """Return the first block not asked for in advance; without one, if ``needed``, the first.

        What was asked for in advance is passed over until as many bytes as the tier has have left
        instead, so that it does not stay if nobody uses it.
        """
        passed: list[Block] = []
        for block in able:
            if not block.prefetched:
                for each in passed:
                    each.prefetched = max(each.prefetched - block.size, 0)
                return block
            passed.append(block)
        return passed[0] if needed and passed else None

    def _refuse_if_stuck(self, arena: Arena, nbytes: int, who: object) -> None:
        """Raise ``OverBudget`` if all borrowers of a full tier wait for room themselves, because
        then none will ever return a tensor."""
        holders = {
            held for b in self.resident[arena] for use in b.uses.values() for held in use.holders()
        }
        if not holders - self._waiting - {who}:
            held = [
                name for block in self.resident[arena] for name, use in block.uses.items() if use
            ]
            pinned = sum(b.slot.length for b in self.resident[arena] if b.pinned and b.slot)
            raise OverBudget(
                f"no room for {show_bytes(nbytes)} in {self._tier(arena)} memory of "
                f"{show_bytes(arena.capacity)}: borrowed are "
                f"{', '.join(map(repr, held[:5])) or 'no tensors'}{' and more' * (len(held) > 5)}, "
                f"pinned {show_bytes(pinned)}. Borrow fewer at once, or raise the budget"
            )

    def expel(self, block: Block, who: object) -> None:
        """Remove an unused block from its tier: at once if it is clean, else after writing or
        copying it."""
        if block.dirty and block.arena is self.device:
            self._move(block, self.host, who)
        elif block.dirty:
            block.leaving = True
            self.flush(block, who)
        else:
            self.forget(block)

    def forget(self, block: Block) -> None:
        """Free the memory; the bytes on disk, if any, remain."""
        if block.arena is not None and block.slot is not None:
            block.settle()
            del self.resident[block.arena][block]
            block.arena.give(block.slot)
        block.arena = block.slot = None
        block.leaving, block.prefetched = False, 0
        block.capacity = 0
        self.changed.notify_all()

    def settle_in(self, block: Block, arena: Arena, slot: Slot) -> None:
        block.arena, block.slot = arena, slot
        self.resident[arena][block] = None

    def touch(self, block: Block) -> None:
        """Make a block the most recently used."""
        assert block.arena is not None
        resident = self.resident[block.arena]
        del resident[block]
        resident[block] = None

    def tier(self, block: Block) -> Literal["device", "host", "disk"]:
        return "disk" if block.arena is None else self._tier(block.arena)

    def _tier(self, arena: Arena) -> Literal["device", "host"]:
        return "host" if arena is self.host else "device"

    # ---------------------------------------------------------------- moves

    def bring(self, block: Block, arena: Arena, who: object, *, before: int | None = None) -> bool:
        """Begin to bring an unmoving block into a tier. May release the lock, so check the block
        again afterwards."""
        if block.damage:
            raise block.damage
        if block.slot is not None:
            self._move(block, arena, who)
            return True
        borrows = block.borrows
        slot = self.room(self.host, block.size, who, before=before)
        if slot is None:
            return False
        late = block.slot is not None or block.moving or not block.entries
        if late or block.borrows != borrows:  # another thread was faster
            self.host.give(slot)
            self.changed.notify_all()
            return True
        self._load(block, slot)
        return True

    def seconds_to_read(self, size: int) -> float:
        """Estimate the seconds of a read from the rate so far."""
        return size * self.read_seconds / self.read_bytes if self.read_bytes else 0.0

    def _load(self, block: Block, slot: Slot) -> None:
        block.moving = Pending()
        self.settle_in(block, self.host, slot)
        view = self.host.view(slot, 0, slot.length)
        self.disk.read(block.chunks, view, partial(self._loaded, block, perf_counter()))

    def _loaded(self, block: Block, begin: float, batch: Batch) -> None:
        error = batch.error
        with self.changed:
            moving, block.moving = block.moving, None
            assert moving
            if error is not None:
                if isinstance(error, Damaged):
                    error = block.damage = damaged(block, error)
                self.forget(block)
                moving.fail(error)
            else:
                self.read_seconds += perf_counter() - begin
                self.read_bytes += block.size
                if self.timeline is not None:
                    self.timeline.flight("disk: read", begin, what={"bytes": block.size})
                moving.finish(None)
            self.changed.notify_all()

    def flush(self, block: Block, who: object) -> None:
        """Begin to write a dirty block without writers and moves to new places on disk.

        A block on the device is copied to a slot in host memory first, without the lock.
        """
        assert block.slot is not None
        assert not block.moving
        assert not block.written
        block.failure = None
        sizes = [
            min(self.chunk_bytes, block.size - at) for at in range(0, block.size, self.chunk_bytes)
        ]
        extents: list[Extent] = []
        block.moving, block.flushing = Pending(), True
        try:
            self.wear.allow(sum(map(padded, sizes)))
            extents = self.disk.allocate_all(sizes)
            staged = None if block.arena is self.host else self._copy(block, self.host, who)
        except BaseException as error:
            self.disk.free(extents)
            moving, block.moving, block.flushing, block.leaving = block.moving, None, False, False
            moving.fail(error)
            self.changed.notify_all()
            raise
        slot = staged or block.slot
        view = self.host.view(slot, 0, slot.length)
        self.disk.write(
            extents,
            sizes,
            view,
            partial(self._flushed, block, perf_counter(), staged, sizes, extents),
        )

    def _copy(self, block: Block, arena: Arena, who: object) -> Slot:
        """Copy the bytes of a block without writers into another tier. Releases the lock."""
        slot = self.room(arena, block.size, who)
        assert slot is not None
        assert block.arena is not None
        assert block.slot is not None
        self.changed.release()
        try:
            block.settle()
            arena.flat(slot)[: block.size].copy_(block.arena.flat(block.slot)[: block.size])
            if arena is self.host:
                self.crossing.down += block.size
            else:
                self.crossing.up += block.size
        finally:
            self.changed.acquire()
        return slot

    def _flushed(
        self,
        block: Block,
        begin: float,
        staged: Slot | None,
        sizes: list[int],
        extents: list[Extent],
        batch: Batch,
    ) -> None:
        error = batch.error
        with self.changed:
            moving, block.moving, block.flushing = block.moving, None, False
            assert moving
            if staged is not None:
                self.host.give(staged)
            if error is not None:
                # the disk refused some of these places: none is used again in this run
                self.references.lost.update(extents)
                block.failure, block.leaving = error, False
                moving.fail(error)
            else:
                self.wear.count(sum(e.length for e in extents))
                old = block.chunks
                block.chunks = tuple(
                    Chunk(extent, nbytes, checksum, self.references.generation + 1)
                    for extent, nbytes, checksum in zip(
                        extents, sizes, batch.checksums, strict=True
                    )
                )
                block.dirty = False
                self.references.release(chunk.extent for chunk in old)
                if block.leaving and not block.used and not block.pinned:
                    self.forget(block)
                block.leaving = False
                self.written_bytes += block.size
                if self.timeline is not None:
                    self.timeline.flight("disk: write", begin, what={"bytes": block.size})
                moving.finish(None)
            self.changed.notify_all()

    def _move(self, block: Block, arena: Arena, who: object) -> None:
        """Copy an unused, unmoving block between host and device, in the calling thread, without
        the lock."""
        assert block.slot is not None
        assert block.arena is not None
        assert not block.moving
        moving: Pending[None] = Pending()
        block.moving = moving
        try:
            slot = self._copy(block, arena, who)
            del self.resident[block.arena][block]
            block.arena.give(block.slot)
            self.settle_in(block, arena, slot)
            block.capacity = 0
            moving.finish(None)
        except BaseException as error:
            moving.fail(error)
            raise
        finally:
            block.moving, block.leaving = None, False
            self.changed.notify_all()


def damaged(block: Block, error: Damaged) -> Damaged:
    names = tuple(block.entries)
    listed = ", ".join(map(repr, names[:5])) + " and more" * (len(names) > 5)
    return Damaged(
        f"{listed} cannot be read: {error}", names=names, file=error.file, offset=error.offset
    )
