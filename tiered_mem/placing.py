"""New tensors find room, in a block of their own or in the pack that is being filled; old ones give it back."""

import torch

from commpress.errors import InvalidArgument
from commpress.tiered_mem.blocks import Block, Use, aligned
from commpress.tiered_mem.catalog import Catalog
from commpress.tiered_mem.claims import Claims
from commpress.tiered_mem.lending import Lending
from commpress.tiered_mem.manifest import Entry
from commpress.tiered_mem.options import Options
from commpress.tiered_mem.pending import caller
from commpress.tiered_mem.residency import Residency

NEW = "\0new"  # marks a tensor that is being put; as a name of its own it would be refused


class Placing:
    """Methods take the store's lock themselves; those that begin with ``_`` are called with it held."""

    def __init__(
        self, catalog: Catalog, residency: Residency, claims: Claims, lending: Lending, options: Options
    ) -> None:
        self._catalog, self._residency, self._claims, self._lending = catalog, residency, claims, lending
        self._options = options
        self._pack: Block | None = None  # being filled

    def put(self, entry: Entry, tensor: torch.Tensor) -> None:
        """A new tensor, in place of the one that has its name."""
        with self._catalog.changed:
            self._catalog.admit_writer()
            block, entry = self._place(entry)
        try:
            assert block.slot is not None
            view = self._residency.host.tensor(block.slot, entry.start, entry.nbytes, tensor.dtype, entry.shape)
            view.copy_(tensor.detach())
            with self._catalog.changed:
                self._install(block, entry)
        finally:
            with self._catalog.changed:
                self._end_placing(block, entry)

    def delete(self, name: str) -> None:
        with self._catalog.changed:
            self._catalog.block(name)
            self._drop_when_free(name)

    def repack(self) -> None:
        """Move tensors out of packs that are mostly holes, when the holes are more than a fortieth of all."""
        with self._catalog.changed:
            blocks = self._catalog.blocks.values()
            holes = {b: b.size - b.live for b in blocks if len(b.entries) and b is not self._pack}
            total = sum(b.live for b in blocks)
            worst = [b for b in holes if holes[b] > b.size // 8 and b.size <= self._options.pack_bytes]
            if sum(holes[b] for b in worst) * 40 <= total:
                return
            names = [name for b in worst if not b.damage for name in b.entries]
        for name in names:
            with self._lending.borrow(name, write=False):
                pass
            self._rewrite(name)

    def _place(self, entry: Entry) -> tuple[Block, Entry]:
        """Room for a new tensor in a pack or a block of its own, held as being written."""
        r, options = self._residency, self._options
        small = entry.nbytes < options.pack_below
        while True:
            pack = self._pack
            if small and pack and pack.capacity and pack.slot:
                start = aligned(pack.size, entry)
                if start + entry.nbytes <= pack.capacity:
                    if pack.frozen or pack.moving:
                        self._catalog.changed.wait()
                        continue
                    pack.size, block = start + entry.nbytes, pack
                    break
            slot = r.room(r.host, options.pack_bytes if small else entry.nbytes, caller())
            assert slot is not None
            block, start = self._catalog.new_block(), 0
            block.capacity = options.pack_bytes if small else 0
            block.size = entry.nbytes
            r.settle_in(block, r.host, slot)
            if small:
                self._pack = block
            break
        block.uses[entry.name + NEW] = Use(writer=caller())
        block.dirty = True
        return block, Entry(entry.name, start, entry.nbytes, entry.dtype, entry.shape)

    def _install(self, block: Block, entry: Entry) -> None:
        """From now on this is the tensor of that name."""
        self._drop_when_free(entry.name)
        block.entries[entry.name], self._catalog.names[entry.name] = entry, block

    def _end_placing(self, block: Block, entry: Entry) -> None:
        del block.uses[entry.name + NEW]
        self._discard_if_empty(block)
        self._catalog.changed.notify_all()

    def _drop_when_free(self, name: str) -> None:
        """Remove a tensor, if it is there, as soon as nobody uses it and no commit needs it."""
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
            return

    def _discard_if_empty(self, block: Block) -> None:
        if block.entries or block.uses:
            return
        self._claims.release(chunk.extent for chunk in block.chunks)
        block.chunks, block.dirty = (), False
        self._residency.forget(block)
        del self._catalog.blocks[block.number]
        self._pack = None if self._pack is block else self._pack

    def _rewrite(self, name: str) -> None:
        """Move a small tensor to the pack that is being filled, unless somebody is busy with it."""
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
