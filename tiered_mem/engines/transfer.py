"""Transfers between memory and files, and the engines that take them and say of each, once and from
a thread of their own, how it ended."""

import errno
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from commpress.checksum import checksum_of
from commpress.tiered_mem.layer import PAGE

# bytes of a chunk that are moved and hashed at once: the processor's cache still has them
PIECE = 1 << 20


class Transfer:
    """Bytes between memory and a file, and the checksum of the first ``hashed`` of them as they lie
    in memory.

    An engine takes the checksum just before bytes are written and just after they were read, while
    the processor's cache has them, then calls ``done`` with None or the error. ``done`` does not
    run in the thread that submitted.
    """

    __slots__ = ("checksum", "done", "fd", "hashed", "moved", "offset", "view", "write")

    def __init__(
        self,
        fd: int,
        offset: int,
        view: memoryview,
        *,
        write: bool,
        done: Callable[["Transfer", BaseException | None], None],
        hashed: int = 0,
    ) -> None:
        self.fd, self.offset, self.view, self.write = fd, offset, view, write
        self.done, self.hashed = done, hashed
        self.moved = 0
        self.checksum: int | None = None

    @property
    def rest(self) -> memoryview:
        return self.view[self.moved :] if self.moved else self.view

    def advance(self, count: int) -> bool:
        """After the system moved ``count`` bytes: whether all are there. What is short goes on from
        an aligned place."""
        if count == 0:
            if self.write:
                raise OSError(errno.ENOSPC, "the system wrote nothing")
            raise OSError(errno.EIO, f"the file ends {len(self.rest)} bytes early")
        moved = self.moved + count
        self.moved = moved if moved == len(self.view) else moved // PAGE * PAGE
        return self.moved == len(self.view)

    def hash(self) -> None:
        """Take the checksum, unless it is there already."""
        if self.checksum is None:
            self.checksum = checksum_of(self.view[: self.hashed]) if self.hashed else 0


class DiskEngine(Protocol):
    name: str
    depth: int  # transfers that the kernel sees at once

    def submit(self, transfers: Iterable[Transfer]) -> None: ...

    def register(self, memory: memoryview) -> None:
        """Transfers will come from this memory: pin it in the kernel where that pays."""

    def close(self) -> None:
        """Finish what was submitted, then end all threads."""


def transfer_all(
    engine: DiskEngine,
    fd: int,
    pieces: list[tuple[int, memoryview]],
    *,
    write: bool,
    hashed: bool = False,
) -> None:
    """Move every (offset, memory), as the store does in transfers of ``PIECE`` bytes, and wait;
    raises the first error."""
    parts = [
        (at + i, view[i : i + PIECE]) for at, view in pieces for i in range(0, len(view), PIECE)
    ]
    left, errors, over, lock = len(parts), [], threading.Event(), threading.Lock()

    def done(_: Transfer, error: BaseException | None) -> None:
        nonlocal left
        with lock:
            left -= 1
            if error:
                errors.append(error)
            if not left:
                over.set()

    engine.submit(
        Transfer(fd, at, view, write=write, done=done, hashed=len(view) if hashed else 0)
        for at, view in parts
    )
    over.wait()
    if errors:
        raise errors[0]
