"""Signals that ask a command to end, and processes of which it leaves none."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Ended(BaseException):
    """A signal has asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def status(self, command: str) -> int:
        """The exit status, after a line that names the signal."""
        said = f"commpress: {command} ended by {signal.Signals(self.number).name}"
        print(said, file=sys.stderr)
        return 128 + self.number


@contextmanager
def none_left() -> Iterator[None]:
    """End all processes that were started inside, and theirs, however it ends; a signal that asks
    for it raises ``Ended``."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in asked}
    here = set(_descendants(os.getpid()))
    _adopt(True)
    for number in asked:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, signal.SIG_IGN)  # nothing shall stop the cleaning
        while left := [pid for pid in _descendants(os.getpid()) if pid not in here]:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        _adopt(False)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(number)


def _adopt(orphans: bool) -> None:
    """Orphans among our descendants become children of this process, where it finds them
    (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, int(orphans), 0, 0, 0)


def _descendants(of: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
    found = [of]
    for pid in found:  # which grows
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]
