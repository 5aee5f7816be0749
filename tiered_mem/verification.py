"""Reading back every chunk of the current state, to know what is damaged before somebody needs it."""

from commpress.errors import Damaged
from commpress.tiered_mem.batch import Batch
from commpress.tiered_mem.catalog import Catalog
from commpress.tiered_mem.manifest import Chunk
from commpress.tiered_mem.memory import Slot
from commpress.tiered_mem.pending import Pending, caller
from commpress.tiered_mem.residency import Residency, damaged


def verify(catalog: Catalog, residency: Residency) -> list[Damaged]:
    """What is damaged, by tensor; what is rewritten meanwhile is left out. Changes nothing."""
    r, found = residency, list[Damaged]()
    with catalog.changed:
        state = [(block, block.chunks) for block in catalog.blocks.values()]
        largest = max((chunk.extent.length for _, chunks in state for chunk in chunks), default=0)
        scratch = r.room(r.host, largest, caller())
        assert scratch is not None
    try:
        for block, chunks in state:
            read = (_read_back(chunk, scratch, r) for chunk in chunks)
            error = block.damage or next(filter(None, read), None)
            with catalog.changed:
                if error is None or block.chunks != chunks:
                    continue
                if not isinstance(error, Damaged):
                    raise error
                if block.entries:
                    found.append(block.damage or damaged(block, error))
    finally:
        with catalog.changed:
            r.host.give(scratch)
            catalog.changed.notify_all()
    return found


def _read_back(chunk: Chunk, scratch: Slot, residency: Residency) -> BaseException | None:
    pending: Pending[Batch] = Pending()
    residency.disk.read([chunk], residency.host.view(scratch, 0, chunk.extent.length), pending.finish)
    return pending.wait().error
