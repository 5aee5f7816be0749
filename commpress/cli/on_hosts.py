"""A command on several hosts at once, each a network namespace of this machine with a slow link; or
here, once."""

import argparse
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import IO, Any

from commpress.cli import launchers, terminal
from commpress.cli.hosts import Hosts

# seconds that the others have to end by themselves once one has failed, and then after SIGTERM
GRACE = 10.0
LOOK = 0.05  # seconds between two looks at what still runs
Line = Callable[[int, str], None]  # takes a host's number and a line that it printed


@dataclass
class HostEnded:
    """The end of the command on a host."""

    host: str
    address: str
    status: int
    seconds: float
    sent_bytes: int


def run(options: argparse.Namespace) -> int:
    with Hosts(options.count, rate=options.rate, delay=options.delay) as hosts:
        print(terminal.wrapped(headline(options.count, options)), flush=True)
        ended = together(hosts, options.command, _printed(hosts))
    print("\n" + terminal.table(list(map(_cells, ended))))
    if options.json:
        found = {name: getattr(options, name) for name in ("command", "rate", "delay")}
        terminal.write_json(options.json, found | {"hosts": [asdict(e) for e in ended]})
    return status(ended)


def _cells(ended: HostEnded) -> dict[str, str]:
    return {
        "host": ended.host,
        "address": ended.address,
        "status": str(ended.status),
        "seconds": f"{ended.seconds:.1f}",
        "MB sent": f"{ended.sent_bytes / 1e6:.1f}",
    }


def headline(count: int, options: argparse.Namespace) -> str:
    """Describe the hosts and their links."""
    rate = "as fast as this machine" if options.rate is None else f"{options.rate / 1e6:g} Mbit/s"
    late = f", {options.delay * 1e3:g} ms one way" if options.delay else ""
    return f"{count} hosts (network namespaces), links: {rate}{late}"


def status(ended: Sequence[HostEnded]) -> int:
    """The exit status of the first host that failed, 0 if none has."""
    failed = min((e for e in ended if e.status), key=lambda e: e.seconds, default=None)
    return 0 if failed is None else failed.status


def together(
    hosts: Hosts | None,
    command: Sequence[str],
    line: Line,
    environment: Mapping[str, str] | None = None,
) -> list[HostEnded]:
    """Run ``command`` on every host, or here as it is, and call ``line(host, text)`` with each line
    that it prints.

    On hosts a launcher is told how many machines there are and which one it is on; any other
    command gets the variables that torchrun gives to one process a machine. Once one host has
    failed, the others have ``GRACE`` seconds. Nothing that was started stays.
    """
    own, count = {**os.environ, **(environment or {})}, len(hosts) if hosts else 1
    sent = hosts.sent_bytes if hosts else lambda _: interface_bytes()
    begin, before = perf_counter(), [sent(host) for host in range(count)]
    found: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    for host in range(count):
        words, variables = list(command), dict[str, str]()
        if hosts:
            own.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1)))
            words, variables = launchers.placed(command, host, count, hosts.addresses[0])
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        streams["stderr"] = subprocess.STDOUT
        found.append(start(words, hosts, host, own | variables, **streams))
        readers.append(
            threading.Thread(target=read, args=(found[-1].stdout, host, line), daemon=True)
        )
        readers[-1].start()
    try:
        took = _waited(found, begin)
    finally:
        for process in found:
            _end(process, signal.SIGKILL)
    for reader in readers:
        reader.join(GRACE)
    return [
        HostEnded(
            hosts.names[host] if hosts else "",
            hosts.addresses[host] if hosts else "",
            process.returncode if process.returncode >= 0 else 128 - process.returncode,
            took[host],
            sent(host) - before[host],
        )
        for host, process in enumerate(found)
    ]


def start(
    command: Sequence[str], hosts: Hosts | None, host: int, env: Mapping[str, str], **streams: Any
) -> "subprocess.Popen[bytes]":
    """A process that leads a group of its own and ends with this one."""
    if shutil.which("setpriv"):
        command = ["setpriv", "--pdeathsig", "KILL", "--", *command]
    if hosts is not None:
        return hosts.start(host, command, env, start_new_session=True, **streams)
    return subprocess.Popen(command, env=env, start_new_session=True, **streams)


def send(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """A signal to a process and all that it has started: its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def interface_bytes() -> int:
    """Bytes that all interfaces of this machine have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(each.partition(":")[2].split()[8]) for each in lines)


def _waited(found: Sequence["subprocess.Popen[bytes]"], begin: float) -> list[float]:
    """Seconds after ``begin`` at which each process ended."""
    took: dict[int, float] = {}
    signals = iter((signal.SIGTERM, signal.SIGKILL))
    due: float | None = None  # when those that still run get the next signal
    while len(took) < len(found):
        now = perf_counter()
        for host, process in enumerate(found):
            if host not in took and process.poll() is not None:
                took[host] = now - begin
                due = now + GRACE if process.returncode and due is None else due
        if due is not None and now > due:
            due, number = now + GRACE, next(signals, signal.SIGKILL)
            for process in found:
                _end(process, number)
        sleep(LOOK)
    return [took[host] for host in range(len(found))]


def _end(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Send a signal to a process and all that it has started, if it still runs."""
    if process.poll() is None:
        send(process, number)
        if number == signal.SIGKILL:
            process.wait()


def read(stream: IO[bytes], host: int, line: Line) -> None:
    """Call ``line`` with each line of a stream until it ends."""
    with stream:
        for text in stream:
            line(host, text.decode(errors="replace").rstrip("\n"))


def _printed(hosts: Hosts) -> Line:
    """Print lines behind the name of their host, each in one piece."""
    alone = threading.Lock()

    def line(host: int, text: str) -> None:
        with alone:
            print(f"{hosts.names[host]} | {text}", flush=True)

    return line
