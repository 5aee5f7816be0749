"""Directories of a store: they are opened, locked, and have an identity, the store and the part of
it. They contain small records: identities, the manifest of the last commit, and one for each
snapshot.
"""

import contextlib
import os
import struct
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from commpress.checksum import checksum_of
from commpress.errors import (
    Damaged,
    DirectoryRefused,
    DiskFailure,
    DiskFull,
    InvalidArgument,
    StorageError,
)
from commpress.tiered_mem.layer import (
    IDENTITY,
    LOCK,
    MANIFEST,
    NO_ROOM,
    SNAPSHOT,
    TEMPORARY,
    FileLayer,
    holds_state,
    is_temporary,
    read_fully,
    snapshot_name,
    write_fully,
)
from commpress.tiered_mem.manifest import MAGIC as MANIFEST_MAGIC
from commpress.tiered_mem.manifest import Manifest

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

MAGIC = b"cmprsID1"  # of an identity; the last byte of a magic word is a version
LONGEST_IDENTITY = 4096  # bytes
MOST = 1024  # directories of a store
HEAD = struct.Struct("<8sQQ")  # magic, length, checksum
LIMIT = 1 << 30  # bytes of a record: a manifest of some ten million chunks


@dataclass(frozen=True)
class Folder:
    """An open directory and its records: msgpack between a magic word and a checksum, read with
    limits, replaced atomically."""

    layer: FileLayer
    path: Path
    fd: int
    lock: int

    def store(self, name: str, magic: bytes, content: Any) -> int:
        """Replace the record ``name`` on disk, atomically; return the bytes written."""
        layer, body = self.layer, msgpack.packb(content)
        if len(body) > LIMIT:
            raise ValueError(f"{name} would take {len(body)} bytes, at most {LIMIT} are read back")
        temporary = name + TEMPORARY
        with contextlib.suppress(FileNotFoundError):
            layer.unlink(self.fd, temporary)
        fd = layer.open(self.fd, temporary, create=True)
        try:
            write_fully(layer, fd, HEAD.pack(magic, len(body), checksum_of(body)) + body)
            layer.sync(fd)
        finally:
            layer.close(fd)
        layer.rename(self.fd, temporary, name)
        layer.sync_folder(self.fd)
        return HEAD.size + len(body)

    def load(self, name: str, magic: bytes, *, limit: int = LIMIT) -> Any:
        """Return the content; raise FileNotFoundError, ``Damaged`` with the reason, or
        ``DirectoryRefused`` for an unknown version. Memory is allocated for at most ``limit``
        bytes, and not for more than the file has."""
        layer = self.layer
        fd = layer.open(self.fd, name, write=False)
        try:
            size, head = layer.size(fd), read_fully(layer, fd, HEAD.size)
            if len(head) < HEAD.size:
                raise Damaged(
                    f"{name} has {len(head)} bytes, expected at least {HEAD.size}", file=name
                )
            found, length, checksum = HEAD.unpack(head)
            if found[:-1] != magic[:-1]:
                raise Damaged(
                    f"{name} begins with {found!r}, expected {magic!r}: it is no file of a store",
                    file=name,
                )
            if found != magic:
                version, known = found[-1:].decode("latin1"), magic[-1:].decode()
                raise DirectoryRefused(
                    f"{self.path / name} is of version {version!r}, expected {known!r}: nothing "
                    "was changed, open the store with the release of commpress that wrote it"
                )
            if length != size - HEAD.size or length > limit:
                raise Damaged(
                    (
                        f"{name} has {size - HEAD.size} bytes after its head, expected {length} as "
                        f"in the head, at most {limit}"
                    ),
                    file=name,
                )
            body = read_fully(layer, fd, length, HEAD.size)
        finally:
            layer.close(fd)
        if checksum_of(body) != checksum:
            raise Damaged(f"{name} does not match its checksum", file=name)
        limits = {
            "max_str_len": 1 << 16,
            "max_bin_len": 1 << 10,
            "max_ext_len": 0,
            "max_map_len": 100,
        }
        try:
            return msgpack.unpackb(body, max_array_len=len(body), strict_map_key=True, **limits)
        except (ValueError, TypeError, MemoryError, msgpack.UnpackException) as error:
            raise Damaged(f"{name} cannot be read: {error}", file=name) from error


@dataclass(frozen=True)
class Identity:
    """Identity of a folder: its store, and its part of it."""

    store: bytes
    part: int
    count: int

    @staticmethod
    def unpack(content: Any) -> "Identity":
        store, part, count = content
        if (
            type(store) is not bytes
            or len(store) != 16
            or type(part) is not int
            or type(count) is not int
        ):
            raise ValueError("expected 16 bytes and two numbers")
        if not 0 <= part < count <= MOST:
            raise ValueError(f"it has part {part} of {count}")
        return Identity(store, part, count)


class Folders:
    """The folders in the order of their parts; ``fresh`` if there is no store yet. The first part
    has the manifest.

    Construction changes nothing but the lock: the caller checks the contents first.
    """

    def __init__(self, directory: Paths, layer: FileLayer) -> None:
        paths = [
            Path(p)
            for p in ([directory] if isinstance(directory, (str, os.PathLike)) else directory)
        ]
        self.layer, self._open = layer, list[Folder]()
        if len({path.absolute() for path in paths}) != len(paths) or not 0 < len(paths) <= MOST:
            raise InvalidArgument(
                f"directories are {[str(p) for p in paths]}, expected 1 to {MOST} different ones"
            )
        try:
            for path in paths:
                fd = layer.open_folder(path)
                self._open.append(Folder(layer, path, fd, -1))
                self._refuse_foreign(self._open[-1])
                self._open[-1] = replace(self._open[-1], lock=layer.lock(fd, path))
            self.store, self.parts, self.fresh = self._identify()
            os.register_at_fork(after_in_child=partial(_close, weakref.ref(self)))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Folder]:
        return iter(self.parts)

    def close(self) -> None:
        for folder in self._open:
            if folder.lock >= 0:
                self.layer.close(folder.lock)
            self.layer.close(folder.fd)
        self._open = []

    def settle(self) -> None:
        """Write the identities, by which these folders become a store. That of the first part is
        written last, so that it proves that everything else existed, including a manifest."""
        for part, folder in reversed(list(enumerate(self.parts))):
            folder.store(IDENTITY, MAGIC, [self.store, part, len(self.parts)])
        self.fresh = False

    def sweep(self) -> None:
        """Remove files left by an interrupted run, and sync its renames and removals. They must be
        final, because this run will reuse places that only the earlier files needed."""
        for folder in self.parts:
            for name in self.layer.names(folder.fd):
                if is_temporary(name):
                    with contextlib.suppress(FileNotFoundError):
                        self.layer.unlink(folder.fd, name)
            self.layer.sync_folder(folder.fd)

    # ---------------------------------------------------------------- manifests

    def write_manifest(self, name: str, manifest: Manifest) -> int:
        """Write a manifest; return the bytes written."""
        return self.parts[0].store(name, MANIFEST_MAGIC, manifest.pack())

    def read_manifest(self, name: str) -> Manifest:
        manifest = Manifest.unpack(
            self.parts[0].load(name, MANIFEST_MAGIC), name, folders=len(self.parts)
        )
        if manifest.store != self.store:
            raise Damaged(
                f"{name} is of store {manifest.store.hex()}, expected {self.store.hex()}", file=name
            )
        return manifest

    def last_commit(self) -> Manifest:
        """Return the manifest of the last commit; if it is missing or damaged, the error lists
        intact snapshots."""
        try:
            return self.read_manifest(MANIFEST)
        except (FileNotFoundError, Damaged) as error:
            what = (
                f"the {MANIFEST} is missing" if isinstance(error, FileNotFoundError) else str(error)
            )
            sound = ", ".join(map(repr, self._sound_snapshots()))
            cure = (
                (
                    f"TieredStore.restore(directory, name) makes one of the snapshots {sound} the "
                    "last commit"
                )
                if sound
                else (
                    "there is no snapshot to restore: restore the file from a copy, or pass "
                    "another directory"
                )
            )
            path = self.parts[0].path
            raise Damaged(
                f"{path}: {what}. Nothing was changed; {cure}", file=str(path / MANIFEST)
            ) from error

    def snapshots(self) -> dict[str, Manifest]:
        found = {}
        for name in self._snapshot_names():
            try:
                found[name] = self.read_manifest(snapshot_name(name))
            except Damaged as error:
                path = self.parts[0].path / snapshot_name(name)
                raise Damaged(
                    (
                        f"{path}: {error}. Nothing was changed; to continue without this snapshot, "
                        "move the file away"
                    ),
                    file=str(path),
                ) from error
        return found

    def restore(self, name: str) -> None:
        """Make a snapshot the state with which the store opens, regardless of the last commit; the
        snapshot stays."""
        try:
            snapshot = self.read_manifest(snapshot_name(name))
        except FileNotFoundError as error:
            raise InvalidArgument(
                f"no snapshot {name!r} in {self.parts[0].path}; there are "
                f"{', '.join(self._snapshot_names()) or 'none'}"
            ) from error
        now = snapshot
        with contextlib.suppress(FileNotFoundError, Damaged):
            now = self.read_manifest(MANIFEST)
        restored = Manifest(
            self.store, now.generation + 1, snapshot.rows, now.written, now.born, now.days
        )
        self.write_manifest(MANIFEST, restored)

    def _snapshot_names(self) -> list[str]:
        names = self.layer.names(self.parts[0].fd)
        return sorted(match[1] for name in names if (match := SNAPSHOT.fullmatch(name)))

    def _sound_snapshots(self) -> Iterator[str]:
        for name in self._snapshot_names():
            with contextlib.suppress(StorageError, OSError):
                self.read_manifest(snapshot_name(name))
                yield name

    # ---------------------------------------------------------------- identities

    def _refuse_foreign(self, folder: Folder) -> None:
        """Refuse a foreign directory, without even locking it."""
        names = self.layer.names(folder.fd)
        foreign = [n for n in names if n != LOCK and not is_temporary(n) and not holds_state(n)]
        if foreign and IDENTITY not in names:
            raise DirectoryRefused(
                f"{folder.path} is neither empty nor a store: it contains {sorted(foreign)[0]!r}. "
                "Pass another directory"
            )

    def _identify(self) -> tuple[bytes, list[Folder], bool]:
        """Identify the folders as a whole: a store, empty ones, or the beginning of a store, which
        has a first manifest but not yet all identities."""
        identities = [self._identity(folder) for folder in self._open]
        known = [identity for identity in identities if identity]
        if not any(identity.part == 0 for identity in known) and (begun := self._begun(identities)):
            return begun
        first = next((identity for identity in known if identity.part == 0), known[0])
        parts: dict[int, Folder] = {}
        for folder, identity in zip(self._open, identities, strict=True):
            if identity is None or identity.store != first.store:
                what = "no part of a store" if identity is None else "part of another store"
                raise DirectoryRefused(
                    f"{folder.path} is {what}, expected a part of store {first.store.hex()}"
                )
            if identity.count != first.count or identity.part in parts:
                raise DirectoryRefused(
                    f"{folder.path} is part {identity.part + 1} of {identity.count} of store "
                    f"{first.store.hex()}, which does not fit the others, as after a copy: pass "
                    "the directories of one store"
                )
            parts[identity.part] = folder
        if missing := sorted(set(range(first.count)) - parts.keys()):
            raise DirectoryRefused(
                f"store {first.store.hex()} has {first.count} directories, but part "
                f"{missing[0] + 1} is missing: pass all of them"
            )
        return first.store, [parts[i] for i in range(first.count)], False

    def _begun(
        self, identities: Sequence[Identity | None]
    ) -> tuple[bytes, list[Folder], bool] | None:
        """Return folders in which nothing was ever committed; None if that is not certain. Raise
        ``Damaged`` if there is state without an identity."""
        store, first = b"", None
        for folder, identity in zip(self._open, identities, strict=True):
            if identity is not None:
                continue
            held = [name for name in sorted(self.layer.names(folder.fd)) if holds_state(name)]
            found = self._first_manifest(folder) if held == [MANIFEST] else None
            if held and not found:
                raise Damaged(
                    f"{folder.path} contains {held[0]!r} but no {IDENTITY!r}, so its store is "
                    "unknown: nothing was changed. Restore the file from a copy, or pass another "
                    "directory",
                    file=str(folder.path / IDENTITY),
                )
            if found and first:
                return None
            store, first = (found, folder) if found else (store, first)
        if any(identity.store != store for identity in identities if identity):
            return None
        if first is None:
            return uuid.uuid4().bytes, self._open, True
        return store, [first, *(folder for folder in self._open if folder is not first)], True

    def _first_manifest(self, folder: Folder) -> bytes:
        """Return the store's identity, if nothing was committed yet, else b""."""
        manifest = Manifest.unpack(folder.load(MANIFEST, MANIFEST_MAGIC))
        return manifest.store if not manifest.generation and not manifest.rows else b""

    def _identity(self, folder: Folder) -> Identity | None:
        try:
            return Identity.unpack(folder.load(IDENTITY, MAGIC, limit=LONGEST_IDENTITY))
        except FileNotFoundError:
            return None
        except (Damaged, TypeError, ValueError) as error:
            raise DirectoryRefused(f"{folder.path} has a damaged identity: {error}") from error


def _close(folders: "weakref.ref[Folders]") -> None:
    """Close the folders in a forked child, which must not keep the lock after its parent's end."""
    if (here := folders()) is not None:
        here.close()


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """Turn errors of the operating system into ``StorageError``."""
    try:
        yield
    except OSError as error:
        raise named(error) from error


def named(error: OSError) -> StorageError:
    if error.errno in NO_ROOM:
        return DiskFull(
            f"no room to write the manifest: {error}. The last commit is intact; free some room",
            missing=1,
        )
    return DiskFailure(
        f"the files of the store could not be read or written: {error}. The last commit is intact"
    )
