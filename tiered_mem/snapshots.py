"""Manifests as files: that of the last commit, and one for each snapshot."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from commpress.errors import Damaged, DiskFailure, DiskFull, InvalidArgument, StorageError
from commpress.tiered_mem.files import NO_ROOM
from commpress.tiered_mem.folders import Folders
from commpress.tiered_mem.manifest import MAGIC, NAME, Manifest
from commpress.tiered_mem.record import load_record, store_record

SNAPSHOT = re.compile(r"snapshot-([A-Za-z0-9][A-Za-z0-9._-]{0,99})")


def write_manifest(folders: Folders, name: str, manifest: Manifest) -> int:
    return store_record(folders.layer, folders.parts[0].fd, name, MAGIC, manifest.pack())


def read_manifest(folders: Folders, name: str) -> Manifest:
    manifest = Manifest.unpack(load_record(folders.layer, folders.parts[0].fd, name, MAGIC), name)
    if manifest.store != folders.store:
        raise Damaged(f"{name} is of store {manifest.store.hex()}, expected {folders.store.hex()}", file=name)
    return manifest


def restore_snapshot(folders: Folders, name: str) -> None:
    """Make a snapshot the state that the store opens with; the snapshot stays."""
    try:
        snapshot = read_manifest(folders, f"snapshot-{name}")
    except FileNotFoundError as error:
        raise InvalidArgument(f"no snapshot {name!r} in {folders.parts[0].path}") from error
    now = read_manifest(folders, NAME)
    restored = Manifest(now.store, now.generation + 1, snapshot.rows, now.written, now.born, now.days)
    write_manifest(folders, NAME, restored)


@contextmanager
def typed() -> Iterator[None]:
    """Errors of the operating system in ours."""
    try:
        yield
    except OSError as error:
        raise named(error) from error


def named(error: OSError) -> StorageError:
    if error.errno in NO_ROOM:
        return DiskFull(f"no room to write the manifest: {error}. What was committed before is intact", missing=1)
    return DiskFailure(f"the manifest could not be written: {error}. What was committed before is intact")
