"""The directories of a store: opened, locked, and known by an identity that says which store and which part of it."""

import contextlib
import os
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commpress.errors import Damaged, DirectoryRefused, InvalidArgument
from commpress.tiered_mem.layer import FileLayer
from commpress.tiered_mem.manifest import MAGIC as MANIFEST_MAGIC
from commpress.tiered_mem.manifest import Manifest
from commpress.tiered_mem.names import IDENTITY, LOCK, MANIFEST, holds_state, is_temporary
from commpress.tiered_mem.record import load_record, store_record

MAGIC = b"cmprsID1"
LONGEST_IDENTITY = 4096  # bytes
MOST = 1024  # directories of a store


@dataclass(frozen=True)
class Folder:
    path: Path
    fd: int
    lock: int


@dataclass(frozen=True)
class Identity:
    """Which store a folder belongs to, and which part of it this is."""

    store: bytes
    part: int
    count: int

    @staticmethod
    def unpack(content: Any) -> "Identity":
        store, part, count = content
        if type(store) is not bytes or len(store) != 16 or type(part) is not int or type(count) is not int:
            raise ValueError("it is not 16 bytes and two numbers")
        if not 0 <= part < count <= MOST:
            raise ValueError(f"it says part {part} of {count}")
        return Identity(store, part, count)


class Folders:
    """The folders in the order of their parts; ``fresh`` if no store is here yet. The first part holds the manifest.

    Looking changes nothing but the lock: what is found is judged first, by whoever opens it.
    """

    def __init__(self, paths: Sequence[Path], layer: FileLayer) -> None:
        self.layer, self._open = layer, list[Folder]()
        if len({path.absolute() for path in paths}) != len(paths) or not 0 < len(paths) <= MOST:
            raise InvalidArgument(f"directories are {[str(p) for p in paths]}, expected 1 to {MOST} different ones")
        try:
            for path in paths:
                fd = layer.open_folder(path)
                self._open.append(Folder(path, fd, -1))
                self._refuse_foreign(self._open[-1])
                self._open[-1] = Folder(path, fd, layer.lock(fd, path))
            self.store, self.parts, self.fresh = self._identify()
            os.register_at_fork(after_in_child=_Forked(self))
        except BaseException:
            self.close()
            raise

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.parts)

    def close(self) -> None:
        for folder in self._open:
            if folder.lock >= 0:
                self.layer.close(folder.lock)
            self.layer.close(folder.fd)
        self._open = []

    def settle(self) -> None:
        """From now on a store is here. The first part says so last: where it does, everything else was there before, a
        manifest too, and if that is missing later it was lost."""
        for part, folder in reversed(list(enumerate(self.parts))):
            store_record(self.layer, folder.fd, IDENTITY, MAGIC, [self.store, part, len(self.parts)])
        self.fresh = False

    def _refuse_foreign(self, folder: Folder) -> None:
        """Somebody else's directory gets not even a lock."""
        names = self.layer.names(folder.fd)
        foreign = [n for n in names if n != LOCK and not is_temporary(n) and not holds_state(n)]
        if foreign and IDENTITY not in names:
            raise DirectoryRefused(f"{folder.path} is neither empty nor a store: it holds {sorted(foreign)[0]!r}")

    def _identify(self) -> tuple[bytes, list[Folder], bool]:
        """What the folders are together: a store, nothing yet, or the beginning of one, which has a first manifest and not yet
        all identities."""
        identities = [self._identity(folder) for folder in self._open]
        known = [identity for identity in identities if identity]
        if not any(identity.part == 0 for identity in known) and (begun := self._begun(identities)):
            return begun
        first = next((identity for identity in known if identity.part == 0), known[0])
        parts: dict[int, Folder] = {}
        for folder, identity in zip(self._open, identities, strict=True):
            if identity is None or identity.store != first.store:
                what = "no part of a store" if identity is None else "part of another store"
                raise DirectoryRefused(f"{folder.path} is {what}, expected a part of store {first.store.hex()}")
            if identity.count != first.count or identity.part in parts:
                raise DirectoryRefused(
                    f"{folder.path} says that it is part {identity.part + 1} of {identity.count} of store "
                    f"{first.store.hex()}, which does not fit the others: was it copied? Name the directories of one store"
                )
            parts[identity.part] = folder
        if missing := sorted(set(range(first.count)) - parts.keys()):
            raise DirectoryRefused(
                f"store {first.store.hex()} has {first.count} directories, part {missing[0] + 1} is missing: name all of them"
            )
        return first.store, [parts[i] for i in range(first.count)], False

    def _begun(self, identities: Sequence[Identity | None]) -> tuple[bytes, list[Folder], bool] | None:
        """Folders in which nothing was ever committed; None if that cannot be said. Damaged if there is state whose identity is
        missing."""
        store, first = b"", None
        for folder, identity in zip(self._open, identities, strict=True):
            if identity is not None:
                continue
            held = [name for name in sorted(self.layer.names(folder.fd)) if holds_state(name)]
            found = self._first_manifest(folder) if held == [MANIFEST] else None
            if held and not found:
                raise Damaged(
                    f"{folder.path} holds {held[0]!r} but no {IDENTITY!r}, so whose it is cannot be told: nothing was changed. "
                    "Put the file back from a copy, or name another directory",
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
        """Of which store it is, if nothing was committed yet."""
        manifest = Manifest.unpack(load_record(self.layer, folder.fd, MANIFEST, MANIFEST_MAGIC))
        return manifest.store if not manifest.generation and not manifest.rows else b""

    def _identity(self, folder: Folder) -> Identity | None:
        try:
            return Identity.unpack(load_record(self.layer, folder.fd, IDENTITY, MAGIC, limit=LONGEST_IDENTITY))
        except FileNotFoundError:
            return None
        except (Damaged, TypeError, ValueError) as error:
            raise DirectoryRefused(f"{folder.path} has a damaged identity: {error}") from error

    def sweep(self) -> None:
        """Remove what an interrupted run left behind. What it renamed or removed is for good from here on: we build upon what
        we find, in places that only what was there before still needs, and a power cut must not bring that back."""
        for folder in self.parts:
            for name in self.layer.names(folder.fd):
                if is_temporary(name):
                    with contextlib.suppress(FileNotFoundError):
                        self.layer.unlink(folder.fd, name)
            self.layer.sync_folder(folder.fd)


class _Forked:
    """A child process must not go on holding the lock when its parent is gone."""

    def __init__(self, folders: Folders) -> None:
        self._folders = weakref.ref(folders)

    def __call__(self) -> None:
        if folders := self._folders():
            folders.close()
