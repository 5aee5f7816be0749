"""A snapshot copied out of a store that is in use, as a store of its own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from commpress.errors import InvalidArgument
from commpress.tiered_mem import engines
from commpress.tiered_mem.batch import Batch
from commpress.tiered_mem.catalog import Catalog
from commpress.tiered_mem.claims import Claims
from commpress.tiered_mem.files import Disk
from commpress.tiered_mem.folders import Folders
from commpress.tiered_mem.manifest import Chunk, Manifest, Row
from commpress.tiered_mem.memory import Slot
from commpress.tiered_mem.names import MANIFEST, snapshot_name
from commpress.tiered_mem.options import Paths, paths_of
from commpress.tiered_mem.pending import Pending, caller
from commpress.tiered_mem.residency import Residency
from commpress.tiered_mem.snapshots import read_manifest, typed, write_manifest

AT_ONCE = 4  # chunks in memory


def copy_snapshot(
    name: str, directory: Paths, catalog: Catalog, claims: Claims, residency: Residency, segment_bytes: int
) -> None:
    """Every chunk is verified as it is read. The places are claimed meanwhile, so the snapshot may be dropped."""
    with catalog.changed:
        if name not in claims.snapshots:
            raise InvalidArgument(f"no snapshot {name!r}; there are {', '.join(sorted(claims.snapshots)) or 'none'}")
        held = claims.hold(claims.snapshots[name])
    try:
        with typed():
            source = read_manifest(claims.disk.folders, snapshot_name(name))
            folders = Folders(paths_of(directory), claims.disk.layer)
            try:
                if not folders.fresh:
                    raise InvalidArgument(f"{folders.parts[0].path} holds a store already: name an empty directory")
                folders.settle()  # before the manifest: half a copy is no store
                _copy(source, folders, catalog, residency, segment_bytes)
            finally:
                folders.close()
    finally:
        with catalog.changed:
            claims.let_go(held, catalog.extents())


def _copy(source: Manifest, folders: Folders, catalog: Catalog, residency: Residency, segment_bytes: int) -> None:
    layer = folders.layer
    direct = all(layer.takes_direct(folder.fd) for folder in folders)
    engine = engines.start("threads", layer, AT_ONCE)
    target = Disk(folders, engine, direct=direct, capacity=None, segment_bytes=segment_bytes)
    try:
        copied: dict[Chunk, Chunk] = {}
        for chunks in _portions([chunk for row in source.rows for chunk in row.chunks]):
            with catalog.changed:
                slot = residency.room(residency.host, sum(c.extent.length for c in chunks), caller())
            assert slot is not None
            try:
                copied |= dict(zip(chunks, _move(chunks, slot, residency, target), strict=True))
            finally:
                with catalog.changed:
                    residency.host.give(slot)
                    catalog.changed.notify_all()
        target.sync()
        rows = tuple(Row(row.size, row.entries, tuple(copied[c] for c in row.chunks)) for row in source.rows)
        write_manifest(folders, MANIFEST, Manifest(folders.store, 0, rows))
    finally:
        target.close()


def _portions(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    for i in range(0, len(chunks), AT_ONCE):
        yield list(chunks[i : i + AT_ONCE])


def _move(chunks: Sequence[Chunk], slot: Slot, residency: Residency, target: Disk) -> list[Chunk]:
    """Read, verify, write; the same chunks where they are now."""
    extents, view = [target.allocate(c.nbytes) for c in chunks], residency.host.view(slot, 0, slot.length)
    _finished(partial(residency.disk.read, chunks, view))
    _finished(partial(target.write, extents, [c.nbytes for c in chunks], view))
    return [replace(chunk, extent=extent) for chunk, extent in zip(chunks, extents, strict=True)]


def _finished(begin: Callable[[Callable[[Batch], None]], None]) -> None:
    pending: Pending[Batch] = Pending()
    begin(pending.finish)
    if error := pending.wait().error:
        raise error
