"""A disk in memory that fails when told to, and on which a power cut loses what was not synced.

Between two syncs a write is pending: after a power cut it is there, not there, or there in part (in
whole sectors), and later ones may be there without earlier ones. The same holds for names: made,
renamed and removed files.
"""

import errno
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from commpress.errors import DirectoryRefused
from commpress.tiered_mem import FileLayer

KINDS = ("EIO", "ENOSPC", "short", "cut", "torn 512", "torn 4096")


class PowerCut(OSError):
    def __init__(self) -> None:
        super().__init__(errno.EIO, "the power is off")


@dataclass(eq=False)
class File:
    now: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    # (offset, bytes), or (size, None)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def apply(self, change: tuple[int, bytes | None], to: bytearray) -> None:
        at, data = change
        end = at if data is None else at + len(data)
        if len(to) < end:
            to.extend(bytes(end - len(to)))
        if data is not None:
            to[at:end] = data

    def after_cut(self, draw: random.Random) -> "File":
        """Contents that a power cut leaves: any of the pending writes, each whole or in sectors of
        512 or 4096 bytes."""
        left, mood = bytearray(self.durable), draw.random()
        for change in self.pending:
            if mood < 0.2 or (mood < 0.8 and draw.random() < 0.5):
                continue
            at, data = change
            if data is None or draw.random() < 0.5:
                self.apply(change, left)
                continue
            sector = draw.choice((512, 4096))
            for start in range(0, len(data), sector):
                if draw.random() < 0.5:
                    self.apply((at + start, data[start : start + sector]), left)
        return File(bytearray(left), left)


@dataclass(eq=False)
class Directory:
    now: dict[str, File] = field(default_factory=dict)
    durable: dict[str, File] = field(default_factory=dict)
    # name gets file; the other name goes
    pending: list[tuple[str, File | None, str]] = field(default_factory=list)

    def change(self, name: str, file: File | None, gone: str = "") -> None:
        self.pending.append((name, file, gone))
        self._apply(self.pending[-1], self.now)

    @staticmethod
    def _apply(change: tuple[str, File | None, str], names: dict[str, File]) -> None:
        name, file, gone = change
        names.pop(gone, None)
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


class SimulatedDisk(FileLayer):
    """``fault(n, operation)`` names one of KINDS, or '', for the n-th operation. ``room`` bytes can
    be reserved in all."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.folders: dict[str, Directory] = {}
        self.fault: Callable[[int, str], str] = lambda n, operation: ""
        self.operations = 0
        self.off = False
        self.free = room
        self._open: dict[int, tuple[Directory, File | None, str]] = {}
        self._locks: dict[int, str] = {}
        self._next = 1000
        self._guard = threading.RLock()

    def after_cut(self, draw: random.Random) -> "SimulatedDisk":
        with self._guard:
            disk = SimulatedDisk(self.free)
            for path, old in self.folders.items():
                names = dict(old.durable)
                mood = draw.random()
                for change in old.pending:
                    if mood >= 0.2 and (mood >= 0.8 or draw.random() < 0.5):
                        Directory._apply(change, names)
                files = {id(f): f.after_cut(draw) for f in {*names.values()}}
                new = {name: files[id(file)] for name, file in names.items()}
                disk.folders[path] = Directory(dict(new), new)
            return disk

    def files(self) -> dict[str, int]:
        return {
            f"{path}/{name}": len(f.now)
            for path, folder in self.folders.items()
            for name, f in folder.now.items()
        }

    # ---------------------------------------------------------------- faults

    def _operate(self, operation: str) -> str:
        if self.off:
            raise PowerCut
        self.operations += 1
        kind = self.fault(self.operations, operation)
        if kind == "cut" or (kind.startswith("torn") and operation != "write"):
            self.off = True
            raise PowerCut
        if kind in ("EIO", "ENOSPC"):
            number = getattr(errno, kind)
            raise OSError(number, os.strerror(number))
        return kind

    # ---------------------------------------------------------------- the layer

    def open_folder(self, path: Path) -> int:
        with self._guard:
            folder = self.folders.setdefault(str(path), Directory())
            return self._descriptor(folder, None, str(path))

    def lock(self, folder: int, path: Path) -> int:
        with self._guard:
            if str(path) in self._locks.values():
                raise DirectoryRefused(f"{path} is in use by this test")
            held = self._descriptor(self._open[folder][0], None, str(path))
            self._locks[held] = str(path)
            return held

    def open(
        self,
        folder: int,
        name: str,
        *,
        create: bool = False,
        direct: bool = False,
        write: bool = True,
    ) -> int:
        with self._guard:
            directory = self._open[folder][0]
            if name not in directory.now:
                if not create:
                    raise FileNotFoundError(name)
                self._operate("create")
                directory.change(name, File())
            return self._descriptor(directory, directory.now[name], name)

    def close(self, fd: int) -> None:
        with self._guard:
            del self._open[fd]
            self._locks.pop(fd, None)

    def names(self, folder: int) -> list[str]:
        return list(self._open[folder][0].now)

    def size(self, fd: int) -> int:
        return len(self._file(fd).now)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        with self._guard:
            kind = self._operate("read")
            data = self._file(fd).now[offset : offset + len(view)]
            if kind == "short":
                data = data[: max(1, len(data) // 2)]
            view[: len(data)] = data
            return len(data)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        with self._guard:
            kind, data, file = self._operate("write"), bytes(view), self._file(fd)
            if kind == "short":
                data = data[: max(1, len(data) // 2)]
            # the sectors before the tear are on the disk, those after it are not
            if kind.startswith("torn"):
                data = data[: len(data) // 2 // int(kind[5:]) * int(kind[5:])]
                file.apply((offset, data), file.durable)
                self.off = True
                raise PowerCut
            file.pending.append((offset, data))
            file.apply(file.pending[-1], file.now)
            return len(data)

    def reserve(self, fd: int, size: int) -> None:
        with self._guard:
            self._operate("reserve")
            file = self._file(fd)
            if size - len(file.now) > self.free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.free -= max(0, size - len(file.now))
            file.pending.append((size, None))
            file.apply(file.pending[-1], file.now)

    def sync(self, fd: int) -> None:
        with self._guard:
            self._operate("sync")
            file = self._file(fd)
            for change in file.pending:
                file.apply(change, file.durable)
            file.pending.clear()

    def sync_folder(self, folder: int) -> None:
        with self._guard:
            self._operate("sync folder")
            directory = self._open[folder][0]
            directory.durable, directory.pending = dict(directory.now), []

    def rename(self, folder: int, old: str, new: str) -> None:
        with self._guard:
            self._operate("rename")
            directory = self._open[folder][0]
            directory.change(new, directory.now[old], gone=old)

    def unlink(self, folder: int, name: str) -> None:
        with self._guard:
            directory = self._open[folder][0]
            if name not in directory.now:
                raise FileNotFoundError(name)
            self._operate("unlink")
            self.free += len(directory.now[name].now)
            directory.change(name, None)

    def room(self, folder: int) -> int:
        return self.free

    def capacity(self, folder: int) -> int:
        return 1 << 40

    def takes_direct(self, folder: int) -> bool:
        return False

    def _descriptor(self, folder: Directory, file: File | None, name: str) -> int:
        self._next += 1
        self._open[self._next] = folder, file, name
        return self._next

    def _file(self, fd: int) -> File:
        file = self._open[fd][1]
        assert file is not None
        return file
