"""Transfers between memory and files, and the interface of engines, which report the end of each
transfer once, from their own thread."""

import errno
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from commpress.checksum import checksum_of
from commpress.tiered_mem.layer import PAGE

# bytes of a chunk that are moved and hashed at once, while the processor's cache has them
PIECE = 1 << 20


class Transfer:
    """A transfer between memory and a file, with the checksum of its first ``hashed`` bytes in
    memory.

    An engine computes the checksum just before bytes are written or just after they were read,
    while the processor's cache has them, then calls ``done`` with None or the error, in another
    thread than the submitting one.
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
        """Record that the system has moved ``count`` bytes; return whether that was all. A short
        transfer continues at an aligned position."""
        if count == 0:
            if self.write:
                raise OSError(errno.ENOSPC, "the system wrote nothing")
            raise OSError(errno.EIO, f"the file ends {len(self.rest)} bytes early")
        moved = self.moved + count
        self.moved = moved if moved == len(self.view) else moved // PAGE * PAGE
        return self.moved == len(self.view)

    def hash(self) -> None:
        """Compute the checksum, unless it was computed before."""
        if self.checksum is None:
            self.checksum = checksum_of(self.view[: self.hashed]) if self.hashed else 0

    def end(self, error: BaseException | None) -> None:
        """Report the end, after computing the checksum of what was read."""
        if error is None:
            self.hash()
        self.done(self, error)


class DiskEngine(Protocol):
    name: str
    depth: int  # transfers that the kernel sees at once

    def submit(self, transfers: Iterable[Transfer]) -> None: ...

    def register(self, memory: memoryview) -> None:
        """Prepare for transfers from this memory, by pinning it in the kernel if that pays."""

    def close(self) -> None:
        """Finish submitted transfers, then end all threads."""


def transfer_all(
    engine: DiskEngine,
    fd: int,
    pieces: list[tuple[int, memoryview]],
    *,
    write: bool,
    hashed: bool = False,
) -> None:
    """Transfer every (offset, memory) in pieces of ``PIECE`` bytes, like the store, and wait; raise
    the first error."""
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
