"""The thread that moves a Gloo group's bytes, kept from pushing others off their core.

Gloo's thread takes the lock of a connection only if it is free, and asks again at once while there is news. Whoever holds the
lock writes to the connection, which wakes the peer's Gloo thread. Where ranks share a core, that one takes the writer's
place, and the writer's own spins until the writer runs again: a time slice of 2 to 4 ms in an exchange that takes 0.2. Under
SCHED_BATCH a thread that wakes takes a core that is idle, else its turn.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_TASKS = Path("/proc/self/task")  # Linux; elsewhere nothing is found, and nothing done
_NAME = "gloo_tcp_loop"


def yielding(make: Callable[[], T]) -> T:
    """What ``make`` makes, the threads that Gloo starts meanwhile under SCHED_BATCH."""
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
            if (task / "comm").read_text().strip() == _NAME:
                found.add(int(task.name))
    return found
