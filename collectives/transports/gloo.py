"""Gloo's groups as torch makes them: their connections, to be cut; their threads, to be quieted;
and how long they must live.

Connections. Gloo offers no way to interrupt a call: one that waits for a peer which will never send
ends with the timeout, and destroying the group waits for it. A connection that is shut down ends it
at once, here and on the other side. They are found among the files of the process.

Threads. Gloo's thread takes the lock of a connection only if it is free, and asks again at once
while there is news. Whoever holds the lock writes to the connection, which wakes the peer's Gloo
thread. Where ranks share a core, that one takes the writer's place, and the writer's own spins
until the writer runs again: a time slice of 2 to 4 ms in an exchange that takes 0.2. Under
SCHED_BATCH a thread that wakes takes a core that is idle, else its turn.

Lifetime. The C++ reducer of DistributedDataParallel holds its group. Where it is the last to do so,
as after ``destroy_process_group()``, the end of the model waits for Gloo's threads without letting
go of the interpreter, while one of these needs the interpreter to let go of the tensors of a
collective: neither ever goes on. A group that Python holds is let go of without that lock.
"""

import atexit
import contextlib
import ctypes
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from commpress.collectives.transports import interface
from commpress.torch_private import gloo_at

T = TypeVar("T")
# Linux; elsewhere nothing is found, and nothing done
_FILES, _TASKS = Path("/proc/self/fd"), Path("/proc/self/task")
_THREAD = "gloo_tcp_loop"
_LOOK = 0.02  # seconds between two looks at who has died meanwhile
_kept: list[tuple[Any, Callable[[], bool]]] = []  # groups, and whether each is in use


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    """Gloo's group of these ranks, collective. By itself it asks the name server for this host each
    time."""
    if interface.named():
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    address, _ = interface.own_address()
    return gloo_at(address, store, rank, size, timeout)


def watched(make: Callable[[], T], watch: Callable[[], object]) -> T:
    """The result of ``make``, which waits for other ranks in C++, where nothing can end it.
    ``watch`` is called meanwhile.

    If it raises, ``make`` is left to its own timeout in its thread, and what it makes is let go of
    there.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name="commpress-connect", daemon=True).start()
    while not wait([made], _LOOK).done:
        watch()
    return made.result()


# ---------------------------------------------------------------- connections


class Connections:
    """Of one group: by file descriptor and by inode, because a descriptor may belong to another
    file by the time it is cut."""

    def __init__(self, inodes: dict[int, int]) -> None:
        self._inodes = inodes

    def __len__(self) -> int:
        return len(self._inodes)

    def cut(self) -> None:
        for descriptor, inode in self._inodes.items():
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(descriptor)) as connection,
            ):
                if os.fstat(connection.fileno()).st_ino == inode:
                    connection.shutdown(socket.SHUT_RDWR)


def connections_of(make: Callable[[], T], count: int) -> tuple[T, Connections]:
    """The result of ``make``, and the ``count`` connections that it opened.

    None of them if their number is another: then somebody else has opened some meanwhile, and these
    shall not be cut.
    """
    before = set(_sockets().items())
    made = make()
    opened = {
        fd: inode
        for fd, inode in _sockets().items()
        if (fd, inode) not in before and _connected(fd)
    }
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


# ---------------------------------------------------------------- threads


def yielding(make: Callable[[], T]) -> T:
    """The result of ``make``, the threads that Gloo starts meanwhile under SCHED_BATCH."""
    before = _threads()
    made = make()
    for thread in _threads() - before:
        with contextlib.suppress(OSError):  # it has ended, or this process may not
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return made


def _threads() -> set[int]:
    found = set()
    for task in _TASKS.iterdir() if _TASKS.is_dir() else []:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().strip() == _THREAD:
                found.add(int(task.name))
    return found


# ---------------------------------------------------------------- lifetime


def outlive(group: Any, in_use: Callable[[], bool] | None = None) -> None:
    """Keep ``group`` to the end of the process, or until another one is kept after this one is not
    ``in_use`` any more."""
    gone: list[Any] = [pair for pair in _kept if pair[0] is not group and not pair[1]()]
    _kept[:] = [pair for pair in _kept if pair[0] is not group and pair not in gone]
    let_go(gone)
    _kept.append((group, in_use or (lambda: _registered(group))))
    _never_let_go()


def let_go(groups: list[Any]) -> None:
    """Empty the list in a thread of its own: the end of a group waits for calls that nothing can
    end before their time.

    The caller must hold none of them any more.
    """
    if groups:
        threading.Thread(target=groups.clear, name="commpress-let-go", daemon=True).start()


def outliving() -> list[Any]:
    """The groups that are kept now."""
    return [group for group, _ in _kept]


def _registered(group: dist.ProcessGroup) -> bool:
    """True until it is destroyed."""
    try:
        return bool(dist.get_backend(group))
    except (ValueError, TypeError, AssertionError):
        return False


@cache
def _never_let_go() -> None:
    """Not at exit either, when modules are cleared in no order that could be relied on."""
    atexit.register(
        lambda: [ctypes.pythonapi.Py_IncRef(ctypes.py_object(group)) for group, _ in _kept]
    )


@cache
def linger_at_exit() -> None:
    """A thread of Gloo gives back the tensors of the last collective under the interpreter's lock:
    torch 2.13 aborts a process whose interpreter has begun to end by then, although all went
    well."""
    atexit.register(time.sleep, 0.02)
