"""The directories of a store: opened, locked, and known by an identity that says which store and which part of it."""

import contextlib
import os
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commpress.errors import Damaged, DirectoryRefused, InvalidArgument
from commpress.tiered_mem.layer import LOCK, FileLayer
from commpress.tiered_mem.manifest import NAME
from commpress.tiered_mem.record import TEMPORARY, load_record, store_record

IDENTITY, MAGIC = "identity", b"cmprsID1"


@dataclass(frozen=True)
class Folder:
    path: Path
    fd: int
    lock: int


class Folders:
    """The folders in the order of their parts; ``fresh`` if no store was here. The first part holds the manifest."""

    def __init__(self, paths: Sequence[Path], layer: FileLayer) -> None:
        self.layer, self._open = layer, list[Folder]()
        if len({path.absolute() for path in paths}) != len(paths) or not paths:
            raise InvalidArgument(f"directories are {[str(p) for p in paths]}, expected one or more different ones")
        try:
            for path in paths:
                fd = layer.open_folder(path)
                self._open.append(Folder(path, fd, -1))
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

    def _identify(self) -> tuple[bytes, list[Folder], bool]:
        identities = [self._identity(folder) for folder in self._open]
        known = [identity for identity in identities if identity]
        committed = any(NAME in self.layer.names(folder.fd) for folder in self._open)
        if not committed:  # new, or a creation that did not finish
            store = known[0][0] if known else uuid.uuid4().bytes
            for i, folder in enumerate(self._open):
                store_record(self.layer, folder.fd, IDENTITY, MAGIC, [store, i, len(self._open)])
            return store, self._open, True
        store, _, count = known[0]
        for folder, identity in zip(self._open, identities, strict=True):
            if identity is None or identity[0] != store:
                what = "no part of a store" if identity is None else "part of another store"
                raise DirectoryRefused(f"{folder.path} is {what}, expected a part of store {store.hex()}")
        by_part = {identity[1]: folder for identity, folder in zip(known, self._open, strict=True)}
        if missing := sorted(set(range(count)) - by_part.keys()):
            raise DirectoryRefused(
                f"store {store.hex()} has {count} directories, part {missing[0] + 1} is missing: name all of them"
            )
        return store, [by_part[i] for i in range(count)], False

    def _identity(self, folder: Folder) -> tuple[bytes, int, int] | None:
        try:
            store, part, count = load_record(self.layer, folder.fd, IDENTITY, MAGIC)
        except FileNotFoundError:
            foreign = [n for n in self.layer.names(folder.fd) if n != LOCK and not n.endswith(TEMPORARY)]
            if foreign:
                raise DirectoryRefused(
                    f"{folder.path} is neither empty nor a store: it holds {sorted(foreign)[0]!r}"
                ) from None
            return None
        except (Damaged, TypeError, ValueError) as error:
            raise DirectoryRefused(f"{folder.path} has a damaged identity: {error}") from error
        return bytes(store), int(part), int(count)

    def sweep(self) -> None:
        """Remove what an interrupted run left behind. What it renamed or removed is for good from here on: we build upon what
        we find, in places that only what was there before still needs, and a power cut must not bring that back."""
        for folder in self.parts:
            for name in self.layer.names(folder.fd):
                if name.endswith(TEMPORARY):
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
