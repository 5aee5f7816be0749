"""What an engine is: it takes transfers and says of each, once and from a thread of its own, how it ended."""

import errno
from collections.abc import Callable, Iterable
from typing import Protocol

from commpress.tiered_mem.checksum import Checksum, checksum
from commpress.tiered_mem.layer import PAGE


class Transfer:
    """Bytes between memory and a file, and the checksum of the first ``hashed`` of them as they lie in memory.

    An engine takes the checksum before bytes are written and after they were read, then calls ``done`` with None or the
    error. ``done`` does not run in the thread that submitted.
    """

    __slots__ = ("_checksum", "_taken", "done", "fd", "hashed", "moved", "offset", "view", "write")

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
        self._taken = 0
        self._checksum: Checksum | None = None

    @property
    def rest(self) -> memoryview:
        return self.view[self.moved :]

    def advance(self, count: int) -> bool:
        """After the system moved ``count`` bytes: whether all are there. What is short goes on from an aligned place."""
        if count == 0:
            if self.write:
                raise OSError(errno.ENOSPC, "the system wrote nothing")
            raise OSError(errno.EIO, f"the file ends {len(self.rest)} bytes early")
        moved = self.moved + count
        self.moved = moved if moved == len(self.view) else moved // PAGE * PAGE
        return self.moved == len(self.view)

    def take(self, end: int) -> None:
        """Have the checksum cover what lies before ``end``, if it does not yet."""
        end = min(end, self.hashed)
        if self._checksum is None:
            self._checksum = checksum()
        if end > self._taken:
            self._checksum.update(self.view[self._taken : end])
            self._taken = end

    @property
    def checksum(self) -> int:
        self.take(self.hashed)
        assert self._checksum
        return self._checksum.intdigest()


class Engine(Protocol):
    name: str
    depth: int  # transfers that the kernel sees at once

    def submit(self, transfers: Iterable[Transfer]) -> None: ...

    def register(self, memory: memoryview) -> None:
        """Transfers will come from this memory: pin it in the kernel where that pays."""

    def close(self) -> None:
        """Finish what was submitted, then end all threads."""
