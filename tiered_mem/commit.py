"""Commits and snapshots: data first, then the manifest, then the old places are free."""

import threading
from collections.abc import Iterator

from commpress.errors import DiskFailure, InvalidArgument, StorageError
from commpress.tiered_mem.blocks import Block
from commpress.tiered_mem.catalog import Catalog
from commpress.tiered_mem.claims import Claims
from commpress.tiered_mem.folders import Folders
from commpress.tiered_mem.manifest import Extent, Manifest, Row
from commpress.tiered_mem.names import MANIFEST, SNAPSHOT, snapshot_name
from commpress.tiered_mem.pending import caller
from commpress.tiered_mem.residency import Residency
from commpress.tiered_mem.snapshots import named, write_manifest


class Commits:
    """One commit at a time. Between cut and manifest, tensors go on being borrowed: what is written is the cut."""

    def __init__(self, catalog: Catalog, residency: Residency, claims: Claims, folders: Folders) -> None:
        self._catalog, self._residency, self._claims, self._folders = catalog, residency, claims, folders
        self._broken: StorageError | None = None
        self._one = threading.Lock()

    # ---------------------------------------------------------------- committing

    def commit(self, snapshot: str | None = None) -> int:
        """Everything as it is now is on the disk when this returns; returns the commit's number."""
        changed, claims = self._catalog.changed, self._claims
        if snapshot is not None and not SNAPSHOT.fullmatch(snapshot_name(snapshot)):
            raise InvalidArgument(
                f"snapshot is {snapshot!r}, expected up to 100 letters, digits, '.', '_' or '-', not ending in '.tmp'"
            )
        with self._one:
            if self._broken:
                raise self._broken
            if snapshot in claims.snapshots:
                raise InvalidArgument(f"there is a snapshot {snapshot!r} already: drop it first, or take another name")
            with changed:
                cut = self._cut()
                frozen = [block for block in cut if block.dirty]
                for block in frozen:
                    block.frozen = True
                claims.coming = {chunk.extent for block, row in cut.items() if not block.frozen for chunk in row.chunks}
            try:
                with changed:
                    self._flush(cut, frozen)
                self._sync()
                self._write(cut, snapshot)
            except BaseException:
                with changed:
                    for block in frozen:
                        block.frozen = False
                    given_up, claims.coming = claims.coming, set()
                    self._release(given_up)
                    changed.notify_all()
                raise
            return claims.generation

    def _cut(self) -> dict[Block, Row]:
        """Wait until nobody writes; then the state of all blocks. Who writes already may go on to borrow more."""
        catalog, me = self._catalog, caller()
        blocks = catalog.blocks.values()
        mine = [name for block in blocks for name, use in block.uses.items() if use.writer == me]
        if mine:
            raise InvalidArgument(f"commit while {mine[0]!r} is borrowed here for writing: leave its context first")
        catalog.cutting = True
        try:
            while any(block.written for block in blocks):
                catalog.changed.wait()
            return {block: block.row() for block in blocks if block.entries}
        finally:
            catalog.cutting = False
            catalog.changed.notify_all()

    def _flush(self, cut: dict[Block, Row], frozen: list[Block]) -> None:
        """Write what is dirty. A block thaws as soon as it is written; where it went is kept in ``cut``."""
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
            row = cut[block] = Row(cut[block].size, cut[block].entries, block.chunks)
            self._claims.coming.update(chunk.extent for chunk in row.chunks)
            block.frozen = False
            self._catalog.changed.notify_all()

    def _start(self, block: Block, ahead: Iterator[Block]) -> None:
        """Begin to write this block, and all that come after it."""
        for other in (block, *ahead):
            if other.dirty and not other.moving:
                self._residency.flush(other, caller())

    def _sync(self) -> None:
        try:
            self._claims.disk.sync()
        except StorageError as error:
            # The system may have forgotten what it could not write, and would call a second attempt a success.
            self._broken = DiskFailure(f"{error}. Nothing can be committed any more: reopen, at the last commit")
            raise self._broken from error

    def _write(self, cut: dict[Block, Row], snapshot: str | None) -> None:
        claims, wear = self._claims, self._residency.wear
        manifest = Manifest(
            self._folders.store, claims.generation + 1, tuple(cut.values()), wear.written, wear.born, dict(wear.days)
        )
        try:
            wear.count(write_manifest(self._folders, MANIFEST, manifest))
        except OSError as error:
            # Whether the rename has reached the disk is unknown: the places of both manifests stay untouched.
            with self._catalog.changed:
                claims.committed = claims.committed | claims.coming
            raise named(error) from error
        with self._catalog.changed:
            claims.generation += 1
            old, claims.committed, claims.coming = claims.committed, claims.coming, set()
            if snapshot is not None:
                claims.snapshots[snapshot] = claims.committed
            self._release(old)
        if snapshot is not None:
            try:
                wear.count(write_manifest(self._folders, snapshot_name(snapshot), manifest))
            except OSError as error:
                with self._catalog.changed:  # it may be there or not: the places stay untouched, the name is free again
                    claims.lost |= claims.snapshots.pop(snapshot)
                raise named(error) from error

    def _release(self, extents: set[Extent]) -> None:
        """A manifest lists these places no more; those of the current state stay. Called with the lock held."""
        self._claims.release(extents - self._catalog.extents())

    # ---------------------------------------------------------------- snapshots

    def snapshots(self) -> list[str]:
        return sorted(self._claims.snapshots)

    def drop_snapshot(self, name: str) -> None:
        claims, layer, folder = self._claims, self._folders.layer, self._folders.parts[0].fd
        with self._one:
            if name not in claims.snapshots:
                raise InvalidArgument(f"no snapshot {name!r}; there are {', '.join(self.snapshots()) or 'none'}")
            try:
                layer.unlink(folder, snapshot_name(name))
                layer.sync_folder(folder)
            except OSError as error:
                raise named(error) from error
            with self._catalog.changed:
                self._release(claims.snapshots.pop(name))
