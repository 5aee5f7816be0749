"""Manifests as files: that of the last commit, and one for each snapshot."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from commpress.errors import Damaged, DiskFailure, DiskFull, InvalidArgument, StorageError
from commpress.tiered_mem.files import NO_ROOM
from commpress.tiered_mem.folders import Folders
from commpress.tiered_mem.manifest import MAGIC, Manifest
from commpress.tiered_mem.names import MANIFEST, SNAPSHOT, snapshot_name
from commpress.tiered_mem.record import load_record, store_record


def write_manifest(folders: Folders, name: str, manifest: Manifest) -> int:
    return store_record(folders.layer, folders.parts[0].fd, name, MAGIC, manifest.pack())


def read_manifest(folders: Folders, name: str) -> Manifest:
    content = load_record(folders.layer, folders.parts[0].fd, name, MAGIC)
    manifest = Manifest.unpack(content, name, folders=len(folders.parts))
    if manifest.store != folders.store:
        raise Damaged(f"{name} is of store {manifest.store.hex()}, expected {folders.store.hex()}", file=name)
    return manifest


def last_commit(folders: Folders) -> Manifest:
    """Damaged names the snapshots that are left, if it is missing or cannot be read."""
    try:
        return read_manifest(folders, MANIFEST)
    except (FileNotFoundError, Damaged) as error:
        what = f"the {MANIFEST} is missing" if isinstance(error, FileNotFoundError) else str(error)
        sound = ", ".join(map(repr, _sound_snapshots(folders)))
        cure = (
            f"TieredStore.restore(directory, name) makes one of the snapshots {sound} the last commit"
            if sound
            else "there is no snapshot that could be restored: put the file back from a copy, or name another directory"
        )
        path = folders.parts[0].path
        raise Damaged(f"{path}: {what}. Nothing was changed; {cure}", file=str(path / MANIFEST)) from error


def read_snapshots(folders: Folders) -> dict[str, Manifest]:
    found = {}
    for name in _snapshots(folders):
        try:
            found[name] = read_manifest(folders, snapshot_name(name))
        except Damaged as error:
            path = folders.parts[0].path / snapshot_name(name)
            raise Damaged(
                f"{path}: {error}. Nothing was changed; to go on without this snapshot, move the file away", file=str(path)
            ) from error
    return found


def restore_snapshot(folders: Folders, name: str) -> None:
    """Make a snapshot the state that the store opens with, whatever became of the last commit; the snapshot stays."""
    try:
        snapshot = read_manifest(folders, snapshot_name(name))
    except FileNotFoundError as error:
        raise InvalidArgument(
            f"no snapshot {name!r} in {folders.parts[0].path}; there are {', '.join(_snapshots(folders)) or 'none'}"
        ) from error
    now = snapshot
    with suppress(FileNotFoundError, Damaged):
        now = read_manifest(folders, MANIFEST)
    restored = Manifest(folders.store, now.generation + 1, snapshot.rows, now.written, now.born, now.days)
    write_manifest(folders, MANIFEST, restored)


def _snapshots(folders: Folders) -> list[str]:
    names = folders.layer.names(folders.parts[0].fd)
    return sorted(match[1] for name in names if (match := SNAPSHOT.fullmatch(name)))


def _sound_snapshots(folders: Folders) -> Iterator[str]:
    for name in _snapshots(folders):
        with suppress(StorageError, OSError):
            read_manifest(folders, snapshot_name(name))
            yield name


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
    return DiskFailure(f"the files of the store could not be read or written: {error}. What was committed before is intact")
