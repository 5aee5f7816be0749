"""Packs of small tensors, and blocks of large ones: allocation for new tensors, and release of old
ones."""

from dataclasses import KW_ONLY, dataclass, replace

import torch

from commpress.errors import InvalidArgument
from commpress.tiered_mem.access import Access
from commpress.tiered_mem.blocks import Block, Catalog, Use, caller, entry_of
from commpress.tiered_mem.manifest import DTYPES, Entry
from commpress.tiered_mem.residency import Residency

NEW = "\0new"  # marks a tensor that is being put; no tensor's name may contain it


@dataclass(eq=False)
class Packs:
    """Room for tensors, in their own blocks or in the pack that is being filled.

    Methods take the store's lock themselves; those that begin with ``_`` need it.
    """

    _catalog: Catalog
    _residency: Residency
    _access: Access
    _: KW_ONLY
    below: int  # bytes: smaller tensors are packed
    nbytes: int  # of a pack
    _pack: Block | None = None  # being filled

    def put(self, name: str, tensor: torch.Tensor) -> None:
        entry = entry_of(name, tensor)
        with self._catalog.changed:
            known = self._catalog.names.get(name)
            same = (
                known is not None
                and not known.damage
                and known.entries[name].like(entry)
                and self._at_hand(known)
            )
        if same:
            with self._access.borrow(name) as place:
                place.copy_(tensor.detach())
        else:
            self._put_anew(entry, tensor)

    def delete(self, name: str) -> None:
        with self._catalog.changed:
            self._catalog.block(name)
            self._drop_when_free(name)

    def repack(self) -> None:
        """Move tensors out of packs that are mostly holes, if holes exceed a fortieth of all
        bytes."""
        with self._catalog.changed:
            blocks = self._catalog.blocks.values()
            holes = {b: b.size - b.live for b in blocks if len(b.entries) and b is not self._pack}
            total = sum(b.live for b in blocks)
            worst = [b for b in holes if holes[b] > b.size // 8 and b.size <= self.nbytes]
            if sum(holes[b] for b in worst) * 40 <= total:
                return
            names = [name for b in worst if not b.damage for name in b.entries]
        for name in names:
            with self._access.borrow(name, write=False):
                pass
            self._rewrite(name)

    def _at_hand(self, block: Block) -> bool:
        """Return whether to overwrite a block in place: it is in memory, or contains other tensors.
        A block that is overwritten as a whole need not be read."""
        return (
            (block.slot is not None and not block.leaving)
            or block.size < self.below
            or len(block.entries) > 1
        )

    def _put_anew(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Put a tensor in a new place, without reading the one that it replaces. Must be called
        without the lock."""
        with self._catalog.changed:
            self._catalog.admit_writer()
            block, entry = self._place(entry)
        try:
            assert block.slot is not None
            view = self._residency.host.tensor(
                block.slot, entry.start, entry.nbytes, tensor.dtype, entry.shape
            )
            view.copy_(tensor.detach())
            with self._catalog.changed:
                self._install(block, entry)
        finally:
            with self._catalog.changed:
                self._end_placing(block, entry)

    def _place(self, entry: Entry) -> tuple[Block, Entry]:
        """Allocate room for a new tensor in a pack or its own block, marked as being written."""
        r, small = self._residency, entry.nbytes < self.below
        while True:
            pack = self._pack
            if small and pack and pack.capacity and pack.slot:
                start = _aligned(pack.size, entry)
                if start + entry.nbytes <= pack.capacity:
                    if pack.frozen or pack.moving:
                        self._catalog.changed.wait()
                        continue
                    pack.size, block = start + entry.nbytes, pack
                    break
            capacity = self.nbytes if small else 0
            slot = r.room(r.host, capacity or entry.nbytes, caller())
            assert slot is not None
            block, start = self._catalog.new_block(), 0
            block.size, block.capacity = entry.nbytes, capacity
            r.settle_in(block, r.host, slot)
            if small:
                self._pack = block
            break
        block.uses[entry.name + NEW] = Use(writer=caller())
        block.dirty = True
        return block, replace(entry, start=start)

    def _install(self, block: Block, entry: Entry) -> None:
        """Make this the tensor of its name. If it replaces a whole block, it takes over that
        block's number, for the schedule."""
        dropped = self._drop_when_free(entry.name)
        if (
            dropped
            and dropped.number not in self._catalog.blocks
            and dropped.size == block.size
            and not block.entries
        ):
            self._catalog.renumber(block, dropped.number)
            self._residency.schedule.access(block.number, block.size)
            self._access.read_ahead()
        block.entries[entry.name], self._catalog.names[entry.name] = entry, block

    def _end_placing(self, block: Block, entry: Entry) -> None:
        del block.uses[entry.name + NEW]
        self._discard_if_empty(block)
        self._catalog.changed.notify_all()

    def _drop_when_free(self, name: str) -> Block | None:
        """Remove a tensor, if it exists, as soon as it is unused and no commit needs it; return its
        former block."""
        c = self._catalog
        while block := c.names.get(name):
            use = block.uses.get(name)
            if use and caller() in use.holders():
                raise InvalidArgument(f"{name!r} is borrowed here: leave its context first")
            if use or block.frozen or block.moving or c.barred(caller()):
                c.changed.wait()
                continue
            del block.entries[name], c.names[name]
            block.uses.pop(name, None)
            self._discard_if_empty(block)
            c.changed.notify_all()
            return block
        return None

    def _discard_if_empty(self, block: Block) -> None:
        if block.entries or block.uses:
            return
        self._residency.references.release(chunk.extent for chunk in block.chunks)
        block.chunks, block.dirty = (), False
        self._residency.forget(block)
        del self._catalog.blocks[block.number]
        self._pack = None if self._pack is block else self._pack

    def _rewrite(self, name: str) -> None:
        """Move a small tensor to the pack that is being filled, unless it is in use."""
        r = self._residency
        with self._catalog.changed:
            if (old := self._catalog.names.get(name)) is None:
                return
            self._catalog.admit_writer()
            block, entry = self._place(old.entries[name])
            if self._catalog.names.get(name) is old and old.idle and old.arena is r.host:
                assert old.slot is not None
                assert block.slot is not None
                r.host.view(block.slot, entry.start, entry.nbytes)[:] = r.host.view(
                    old.slot, old.entries[name].start, entry.nbytes
                )
                self._install(block, entry)
            self._end_placing(block, entry)


def _aligned(start: int, entry: Entry) -> int:
    """Return the first offset from ``start`` on at which a tensor may begin in a pack; tiny ones
    are packed tightly."""
    unit = 64 if entry.nbytes >= 4096 else DTYPES[entry.dtype].itemsize
    return -(-start // unit) * unit
