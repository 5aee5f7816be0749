"""The connections of a Gloo group, found among the files of the process, so that they can be cut.

Gloo offers no way to interrupt a call: one that waits for a peer which will never send ends with the timeout, and destroying
the group waits for it. A connection that is shut down ends it at once, here and on the other side.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_FILES = Path("/proc/self/fd")  # Linux; elsewhere nothing is found


class Connections:
    """Of one group: by file descriptor and by inode, because a descriptor may belong to another file by the time it is cut."""

    def __init__(self, inodes: dict[int, int]) -> None:
        self._inodes = inodes

    def __len__(self) -> int:
        return len(self._inodes)

    def cut(self) -> None:
        for descriptor, inode in self._inodes.items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode:
                    connection.shutdown(socket.SHUT_RDWR)


def connections_of(make: Callable[[], T], count: int) -> tuple[T, Connections]:
    """What ``make`` made, and the ``count`` connections that it opened.

    None of them if their number is another: then somebody else has opened some meanwhile, and these shall not be cut.
    """
    before = set(_sockets().items())
    made = make()
    opened = {fd: inode for fd, inode in _sockets().items() if (fd, inode) not in before and _connected(fd)}
    return made, Connections(opened if len(opened) == count else {})


def _sockets() -> dict[int, int]:
    """Inode by descriptor."""
    found = {}
    for name in os.listdir(_FILES) if _FILES.is_dir() else []:
        with contextlib.suppress(OSError):  # closed meanwhile, such as the listing's own
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _connected(descriptor: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        return bool(one.getpeername()) and one.family in (socket.AF_INET, socket.AF_INET6)
    return False
