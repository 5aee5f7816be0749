"""Commits and snapshots: write data first, then the manifest, then free the old places. Also
verification, and copies of snapshots as new stores.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from commpress.errors import Damaged, DiskFailure, InvalidArgument, StorageError
from commpress.tiered_mem import engines
from commpress.tiered_mem.arena import Slot
from commpress.tiered_mem.blocks import Block, Catalog, Pending, caller
from commpress.tiered_mem.disk import Batch, Disk
from commpress.tiered_mem.folders import Folders, Paths, named, typed
from commpress.tiered_mem.layer import MANIFEST, SNAPSHOT, snapshot_name
from commpress.tiered_mem.manifest import Chunk, Extent, Manifest, ManifestRow
from commpress.tiered_mem.residency import Residency, damaged

AT_ONCE = 4  # chunks in memory during the copy of a snapshot


@dataclass(eq=False)
class Commits:
    """Commits, one at a time. Tensors may be borrowed between the cut and the manifest: the commit
    has the state of the cut."""

    _catalog: Catalog
    _residency: Residency
    _folders: Folders
    _broken: StorageError | None = None

    def __post_init__(self) -> None:
        self._references = self._residency.references
        self._one = threading.Lock()

    # ---------------------------------------------------------------- committing

    def commit(self, snapshot: str | None = None) -> int:
        """Write the present state to disk and return the commit's number."""
        changed, references = self._catalog.changed, self._references
        if snapshot is not None and not SNAPSHOT.fullmatch(snapshot_name(snapshot)):
            raise InvalidArgument(
                f"snapshot is {snapshot!r}, expected up to 100 letters, digits, '.', '_' or '-', "
                "not ending in '.tmp'"
            )
        with self._one:
            if self._broken:
                raise self._broken
            if snapshot in references.snapshots:
                raise InvalidArgument(
                    f"there is already a snapshot {snapshot!r}: drop it first, or use another name"
                )
            with changed:
                cut = self._cut()
                frozen = [block for block in cut if block.dirty]
                for block in frozen:
                    block.frozen = True
                references.coming = {
                    chunk.extent
                    for block, row in cut.items()
                    if not block.frozen
                    for chunk in row.chunks
                }
            try:
                with changed:
                    self._flush(cut, frozen)
                self._sync()
                self._write(cut, snapshot)
            except BaseException:
                with changed:
                    for block in frozen:
                        block.frozen = False
                    given_up, references.coming = references.coming, set()
                    self._release(given_up)
                    changed.notify_all()
                raise
            return references.generation

    def _cut(self) -> dict[Block, ManifestRow]:
        """Wait until there are no writers; then return the state of all blocks. Present writers may
        borrow more."""
        catalog, me = self._catalog, caller()
        blocks = catalog.blocks.values()
        mine = [name for block in blocks for name, use in block.uses.items() if use.writer == me]
        if mine:
            raise InvalidArgument(
                f"commit was called while {mine[0]!r} is borrowed here for writing: leave its "
                "context first"
            )
        catalog.cutting = True
        try:
            while any(block.written for block in blocks):
                catalog.changed.wait()
            return {block: block.row() for block in blocks if block.entries}
        finally:
            catalog.cutting = False
            catalog.changed.notify_all()

    def _flush(self, cut: dict[Block, ManifestRow], frozen: list[Block]) -> None:
        """Write dirty blocks. A block is unfrozen as soon as it is written; its new place is
        recorded in ``cut``."""
        for block in frozen:
            block.failure = None
        ahead = iter(frozen)
        for block in frozen:
            while block.dirty or block.flushing:
                if block.failure:
                    raise block.failure
                self._start(block, ahead)
                if block.moving:
                    self._catalog.changed.wait()
            row = cut[block] = replace(cut[block], chunks=block.chunks)
            self._references.coming.update(chunk.extent for chunk in row.chunks)
            block.frozen = False
            self._catalog.changed.notify_all()

    def _start(self, block: Block, ahead: Iterator[Block]) -> None:
        """Begin to write this block, and all blocks after it."""
        for other in (block, *ahead):
            if other.dirty and not other.moving:
                self._residency.flush(other, caller())

    def _sync(self) -> None:
        try:
            self._references.disk.sync()
        except StorageError as error:
            # The system may have dropped what it could not write, and report success for a second
            # attempt.
            self._broken = DiskFailure(
                f"{error}. The store cannot commit any more: reopen it at the last commit"
            )
            raise self._broken from error

    def _write(self, cut: dict[Block, ManifestRow], snapshot: str | None) -> None:
        references, wear = self._references, self._residency.wear
        manifest = Manifest(
            self._folders.store,
            references.generation + 1,
            tuple(cut.values()),
            wear.written,
            wear.born,
            dict(wear.days),
        )
        try:
            wear.count(self._folders.write_manifest(MANIFEST, manifest))
        except OSError as error:
            # It is unknown whether the rename has reached the disk: the places of both manifests
            # stay in use.
            with self._catalog.changed:
                references.committed = references.committed | references.coming
            raise named(error) from error
        with self._catalog.changed:
            references.generation += 1
            old, references.committed = references.committed, references.coming
            references.coming = set()
            if snapshot is not None:
                references.snapshots[snapshot] = references.committed
            self._release(old)
        if snapshot is not None:
            try:
                wear.count(self._folders.write_manifest(snapshot_name(snapshot), manifest))
            except OSError as error:
                # it may exist or not: its places stay in use, its name is free again
                with self._catalog.changed:
                    references.lost |= references.snapshots.pop(snapshot)
                raise named(error) from error

    def _release(self, extents: set[Extent]) -> None:
        """Free places that a manifest no longer lists, except those of the current state. Needs the
        lock."""
        self._references.release(extents - self._catalog.extents())

    # ---------------------------------------------------------------- snapshots

    def snapshots(self) -> list[str]:
        return sorted(self._references.snapshots)

    def drop_snapshot(self, name: str) -> None:
        layer, folder = self._folders.layer, self._folders.parts[0].fd
        with self._one:
            extents = self._extents_of(name)
            with typed():
                layer.unlink(folder, snapshot_name(name))
                layer.sync_folder(folder)
            with self._catalog.changed:
                del self._references.snapshots[name]
                self._release(extents)

    def _extents_of(self, snapshot: str) -> set[Extent]:
        known = self._references.snapshots
        if snapshot not in known:
            raise InvalidArgument(
                f"no snapshot {snapshot!r}; there are {', '.join(self.snapshots()) or 'none'}"
            )
        return known[snapshot]

    def copy_snapshot(self, name: str, directory: Paths) -> None:
        """Copy a snapshot, with a check of every chunk. Its places stay in use, so that it may be
        dropped during the copy."""
        references, changed = self._references, self._catalog.changed
        with changed:
            held = references.hold(self._extents_of(name))
        try:
            with typed():
                source = self._folders.read_manifest(snapshot_name(name))
                folders = Folders(directory, self._folders.layer)
                try:
                    if not folders.fresh:
                        raise InvalidArgument(
                            f"{folders.parts[0].path} already has a store: pass an empty directory"
                        )
                    folders.settle()  # before the manifest, so that a partial copy is no store
                    self._copy(source, folders)
                finally:
                    folders.close()
        finally:
            with changed:
                references.let_go(held, self._catalog.extents())

    def _copy(self, source: Manifest, folders: Folders) -> None:
        layer = folders.layer
        direct = all(layer.takes_direct(folder.fd) for folder in folders)
        engine = engines.start("threads", layer, AT_ONCE)
        target = Disk(
            folders,
            engine,
            direct=direct,
            capacity=None,
            segment_bytes=self._residency.disk.segment_bytes,
        )
        try:
            copied: dict[Chunk, Chunk] = {}
            chunks = [chunk for row in source.rows for chunk in row.chunks]
            for some in (chunks[i : i + AT_ONCE] for i in range(0, len(chunks), AT_ONCE)):
                with self._scratch(sum(chunk.extent.length for chunk in some)) as slot:
                    copied |= dict(zip(some, self._move(some, slot, target), strict=True))
            target.sync()
            rows = tuple(
                replace(row, chunks=tuple(map(copied.__getitem__, row.chunks)))
                for row in source.rows
            )
            folders.write_manifest(MANIFEST, Manifest(folders.store, 0, rows))
        finally:
            target.close()

    def _move(self, chunks: Sequence[Chunk], slot: Slot, target: Disk) -> list[Chunk]:
        """Read, verify and write chunks; return them with their new places."""
        extents = [target.allocate(chunk.nbytes) for chunk in chunks]
        view = self._residency.host.view(slot, 0, slot.length)
        for begin in (
            partial(self._residency.disk.read, chunks, view),
            partial(target.write, extents, [chunk.nbytes for chunk in chunks], view),
        ):
            if error := _error_of(begin):
                raise error
        return [
            replace(chunk, extent=extent) for chunk, extent in zip(chunks, extents, strict=True)
        ]

    # ---------------------------------------------------------------- verification

    def verify(self) -> list[Damaged]:
        """Return the damage by tensor, without tensors that are rewritten in the meantime. Changes
        nothing."""
        changed, found = self._catalog.changed, list[Damaged]()
        with changed:
            state = [(block, block.chunks) for block in self._catalog.blocks.values()]
        largest = max((chunk.extent.length for _, chunks in state for chunk in chunks), default=0)
        with self._scratch(largest) as slot:
            for block, chunks in state:
                view = self._residency.host.view(slot, 0, slot.length)
                read = (
                    _error_of(partial(self._residency.disk.read, [c], view[: c.extent.length]))
                    for c in chunks
                )
                error = block.damage or next(filter(None, read), None)
                with changed:
                    if error is None or block.chunks != chunks:
                        continue
                    if not isinstance(error, Damaged):
                        raise error
                    if block.entries:
                        found.append(block.damage or damaged(block, error))
        return found

    @contextmanager
    def _scratch(self, nbytes: int) -> Iterator[Slot]:
        """Borrow host memory for the context."""
        host, changed = self._residency.host, self._catalog.changed
        with changed:
            slot = self._residency.room(host, nbytes, caller())
        assert slot is not None
        try:
            yield slot
        finally:
            with changed:
                host.give(slot)
                changed.notify_all()


def _error_of(begin: Callable[[Callable[[Batch], None]], None]) -> BaseException | None:
    """Begin transfers, wait for them and return their error."""
    pending: Pending[Batch] = Pending()
    begin(pending.finish)
    return pending.wait().error
