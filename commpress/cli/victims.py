"""Processes that ``commpress chaos`` starts, harms, starts again, and of which it leaves none."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from commpress.cli.hosts import Hosts
from commpress.errors import CommpressError

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Victim:
    """One of the processes, in its first or a later life; it leads a process group, so that what it
    starts shares its fate."""

    def __init__(
        self, number: int, command: Sequence[str], folder: Path, hosts: Hosts | None
    ) -> None:
        self.number, self.command, self.folder, self.hosts = number, list(command), folder, hosts
        self.life, self.stopped = -1, False
        self.slowed_until: float | None = None  # clock
        self.away = False  # started again, and nothing committed since
        self.pending = False  # ended, and seen to
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Output of this life."""
        return self.folder / f"rank{self.number}.{self.life}.log"

    @property
    def events(self) -> Path:
        return self.folder / f"rank{self.number}.{self.life}.jsonl"

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return None if self.process is None else self.process.poll()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.status is None

    def start(self, environment: Mapping[str, str]) -> None:
        """Begin the next life."""
        self.life, self.stopped, self.pending = self.life + 1, False, False
        env = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment}
        env["COMMPRESS_EVENTS"] = str(self.events)
        with open(self.log, "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = _start(self.command, self.hosts, self.number, env, **streams)

    def send(self, number: signal.Signals) -> None:
        """A signal to the process and all that it has started."""
        if self.process is not None:
            _signal(self.process, number)
            self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)

    def last_words(self) -> str:
        """The last line that this life has written."""
        said = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        return said.rpartition("\n")[2].strip()[:400]


class LauncherStore:
    """A process that holds the store of the rendezvous, as torchrun's agent does: it is none of the
    ranks."""

    def __init__(self, hosts: Hosts | None) -> None:
        self.address = "127.0.0.1" if hosts is None else hosts.addresses[-1]
        host = 0 if hosts is None else len(hosts) - 1
        command = [sys.executable, "-c", _STORE, self.address]
        self.process = _start(
            command, hosts, host, os.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            raise CommpressError(
                "the process that holds the store of the rendezvous has ended before it listened"
            )
        self.port = int(said)

    def send(self, number: signal.Signals) -> None:
        _signal(self.process, number)


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """To it and all that it has started: its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _start(
    command: Sequence[str], hosts: Hosts | None, host: int, env: Mapping[str, str], **streams: Any
) -> "subprocess.Popen[bytes]":
    """A process that leads a group of its own and ends with this one."""
    if shutil.which("setpriv"):
        command = ["setpriv", "--pdeathsig", "KILL", "--", *command]
    if hosts is not None:
        return hosts.start(host, command, env, start_new_session=True, **streams)
    return subprocess.Popen(command, env=env, start_new_session=True, **streams)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# ---------------------------------------------------------------- nothing stays


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
