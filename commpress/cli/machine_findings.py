"""What the machine offers: processors and their memory, limits, network interfaces, clocks. Read from Linux's files."""

import ctypes
import os
import re
import resource
import time
from pathlib import Path

from commpress.cli.finding import Finding
from commpress.tiered_mem import show_bytes

SYS, PROC = Path("/sys"), Path("/proc")
STA_UNSYNC, TIME_ERROR = 0x0040, 5
JUMBO = 9000


def read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


# ---------------------------------------------------------------- processors and memory


def numa(root: Path = SYS) -> list[Finding]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [Finding("ok", f"{allowed} of {os.cpu_count()} processors for this process")]
    nodes = sorted((root / "devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:]))
    if not nodes:
        return [*found, Finding("note", "the kernel does not tell which memory is near which processor (NUMA)")]
    if len(nodes) == 1:
        return [*found, Finding("ok", "one NUMA node: all memory is equally near")]
    parts = ", ".join(f"{node.name}: processors {read(node / 'cpulist')}" for node in nodes)
    cure = "one rank per node, bound to it: torchrun --numa-binding=node, mpirun --bind-to numa, or numactl -N 0 -m 0"
    return [*found, Finding("note", f"{len(nodes)} NUMA nodes ({parts}): memory of another node is slower", cure)]


def memory(root: Path = PROC, system: Path = SYS) -> list[Finding]:
    numbers = dict(re.findall(r"^(\w+):\s+(\d+) kB", read(root / "meminfo") or "", re.M))
    found = []
    if {"MemTotal", "MemAvailable"} <= numbers.keys():
        total, free = (1024 * int(numbers[key]) for key in ("MemTotal", "MemAvailable"))
        found.append(Finding("ok", f"{show_bytes(free)} of {show_bytes(total)} available"))
    if (limit := read(system / "fs/cgroup/memory.max")) and limit.isdigit():
        found.append(Finding("note", f"a control group ends this process beyond {show_bytes(int(limit))}", "stay below it"))
    huge = read(system / "kernel/mm/transparent_hugepage/enabled") or ""
    if "[never]" in huge:
        cure = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: large buffers are touched faster"
        found.append(Finding("note", "transparent huge pages are off", cure))
    elif huge:
        found.append(Finding("ok", f"transparent huge pages: {huge[huge.index('[') + 1 : huge.index(']')]}"))
    return [*found, locked()]


def locked() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Finding("ok", "memory can be pinned and registered without a limit")
    cure = "ulimit -l unlimited, for pinned host memory and registered buffers; without it both are left out"
    return Finding("note", f"only {show_bytes(soft)} of memory can be locked", cure)


# ---------------------------------------------------------------- network


def network(root: Path = SYS) -> list[Finding]:
    return [interface(path) for path in sorted((root / "class/net").iterdir()) if is_up(path)] or [
        Finding("bad", "no network interface is up, not even loopback", "ip link set lo up")
    ]


def is_up(path: Path) -> bool:
    """By its flags: loopback's operstate is "unknown"."""
    flags = read(path / "flags")
    return flags is not None and bool(int(flags, 16) & 1)


def interface(path: Path) -> Finding:
    mtu, speed = int(read(path / "mtu") or 0), int(read(path / "speed") or -1)
    what = f"{path.name}: MTU {mtu}" + (f", {speed / 1000:g} Gbit/s" if speed > 0 else "")
    if path.name == "lo":
        return Finding("ok", what)
    if read(path / "carrier") == "0":
        return Finding("note", f"{what}, no carrier", "plug it in, or keep Gloo off it with GLOO_SOCKET_IFNAME")
    if speed >= 10_000 and mtu < JUMBO:
        return Finding("note", what, f"at this speed an MTU of {JUMBO} saves processor time, if every switch between allows it")
    return Finding("ok", what + ("" if speed > 0 else ", speed not told: commpress probe measures it"))


# ---------------------------------------------------------------- clocks


def clocks(root: Path = SYS) -> list[Finding]:
    step, cost = smallest_step(), reading_cost()
    source = read(root / "devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    what = f"monotonic clock: steps of {1e9 * step:.0f} ns, {1e9 * cost:.0f} ns to read (source {source})"
    slow = step > 1e-6 or cost > 2e-6
    cure = "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource, where tsc is stable"
    return [Finding("note" if slow else "ok", what, cure if slow else ""), offset()]


def smallest_step(tries: int = 100) -> float:
    """The smallest difference between two readings that is not zero."""
    steps = []
    for _ in range(tries):
        now = then = time.perf_counter()
        while then == now:
            then = time.perf_counter()
        steps.append(then - now)
    return min(steps)


def reading_cost(reads: int = 2000) -> float:
    """Of the best of a few tries: others may run in between."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(reads):
            time.perf_counter()
        best = min(best, (time.perf_counter() - start) / reads)
    return best


def offset() -> Finding:
    """How far the wall clock may be off, as the kernel believes (adjtimex, read only): it orders traces of several machines."""
    cure = "start chronyd or systemd-timesyncd: traces of several machines are laid side by side by this clock"
    record = (ctypes.c_long * 64)()  # struct timex: modes, offset, freq, maxerror, esterror, status, each in a long
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(record)
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        return Finding("note", "the kernel does not tell how far the wall clock is off", cure)
    microseconds, status = record[3], record[5] & 0xFFFFFFFF
    if state == TIME_ERROR or status & STA_UNSYNC:
        return Finding("note", "the wall clock follows no time server: its offset is unknown", cure)
    return Finding("ok", f"wall clock synchronised, at most {microseconds / 1e3:.3g} ms off")
