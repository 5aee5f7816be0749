"""Commits and snapshots: data first, then the manifest, then the old places are free. And what
reads them back: verification, and copies of snapshots as stores of their own.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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

AT_ONCE = 4  # chunks in memory while a snapshot is copied


class Commits:
    """One commit at a time. Between cut and manifest, tensors go on being borrowed: what is written
    is the cut."""

    def __init__(self, catalog: Catalog, residency: Residency, folders: Folders) -> None:
        self._catalog, self._residency, self._references, self._folders = (
            catalog,
            residency,
            residency.references,
            folders,
        )
        self._broken: StorageError | None = None
        self._one = threading.Lock()

    # ---------------------------------------------------------------- committing

    def commit(self, snapshot: str | None = None) -> int:
        """Everything as it is now is on the disk when this returns; returns the commit's number."""
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
                    f"there is a snapshot {snapshot!r} already: drop it first, or take another name"
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
        """Wait until nobody writes; then the state of all blocks. Who writes already may go on to
        borrow more."""
        catalog, me = self._catalog, caller()
        blocks = catalog.blocks.values()
        mine = [name for block in blocks for name, use in block.uses.items() if use.writer == me]
        if mine:
            raise InvalidArgument(
                f"commit while {mine[0]!r} is borrowed here for writing: leave its context first"
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
        """Write what is dirty. A block thaws as soon as it is written; where it went is kept in
        ``cut``."""
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
            row = cut[block] = ManifestRow(cut[block].size, cut[block].entries, block.chunks)
            self._references.coming.update(chunk.extent for chunk in row.chunks)
            block.frozen = False
            self._catalog.changed.notify_all()

    def _start(self, block: Block, ahead: Iterator[Block]) -> None:
        """Begin to write this block, and all that come after it."""
        for other in (block, *ahead):
            if other.dirty and not other.moving:
                self._residency.flush(other, caller())

    def _sync(self) -> None:
        try:
            self._references.disk.sync()
        except StorageError as error:
            # The system may have forgotten what it could not write, and would call a second attempt
            # a success.
            self._broken = DiskFailure(
                f"{error}. Nothing can be committed any more: reopen, at the last commit"
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
            # Whether the rename has reached the disk is unknown: the places of both manifests stay
            # untouched.
            with self._catalog.changed:
                references.committed = references.committed | references.coming
            raise named(error) from error
        with self._catalog.changed:
            references.generation += 1
            old, references.committed, references.coming = (
                references.committed,
                references.coming,
                set(),
            )
            if snapshot is not None:
                references.snapshots[snapshot] = references.committed
            self._release(old)
        if snapshot is not None:
            try:
                wear.count(self._folders.write_manifest(snapshot_name(snapshot), manifest))
            except OSError as error:
                # it may be there or not: the places stay untouched, the name is free again
                with self._catalog.changed:
                    references.lost |= references.snapshots.pop(snapshot)
                raise named(error) from error

    def _release(self, extents: set[Extent]) -> None:
        """A manifest lists these places no more; those of the current state stay. Called with the
        lock held."""
        self._references.release(extents - self._catalog.extents())

    # ---------------------------------------------------------------- snapshots

    def snapshots(self) -> list[str]:
        return sorted(self._references.snapshots)

    def drop_snapshot(self, name: str) -> None:
        references, layer, folder = self._references, self._folders.layer, self._folders.parts[0].fd
        with self._one:
            if name not in references.snapshots:
                raise InvalidArgument(
                    f"no snapshot {name!r}; there are {', '.join(self.snapshots()) or 'none'}"
                )
            try:
                layer.unlink(folder, snapshot_name(name))
                layer.sync_folder(folder)
            except OSError as error:
                raise named(error) from error
            with self._catalog.changed:
                self._release(references.snapshots.pop(name))

    def copy_snapshot(self, name: str, directory: Paths) -> None:
        """Every chunk is verified as it is read. The places stay as they are meanwhile, so the
        snapshot may be dropped."""
        references, changed = self._references, self._catalog.changed
        with changed:
            if name not in references.snapshots:
                raise InvalidArgument(
                    f"no snapshot {name!r}; there are {', '.join(self.snapshots()) or 'none'}"
                )
            held = references.hold(references.snapshots[name])
        try:
            with typed():
                source = self._folders.read_manifest(snapshot_name(name))
                folders = Folders(directory, self._folders.layer)
                try:
                    if not folders.fresh:
                        raise InvalidArgument(
                            f"{folders.parts[0].path} holds a store already: name an empty "
                            "directory"
                        )
                    folders.settle()  # before the manifest: half a copy is no store
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
                ManifestRow(row.size, row.entries, tuple(copied[c] for c in row.chunks))
                for row in source.rows
            )
            folders.write_manifest(MANIFEST, Manifest(folders.store, 0, rows))
        finally:
            target.close()

    def _move(self, chunks: Sequence[Chunk], slot: Slot, target: Disk) -> list[Chunk]:
        """Read, verify, write; the same chunks where they are now."""
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
        """Damage, by tensor; what is rewritten meanwhile is left out. Changes nothing."""
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
        """Host memory for a while."""
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
    """Wait for transfers, from their beginning."""
    pending: Pending[Batch] = Pending()
    begin(pending.finish)
    return pending.wait().error
