"""Findings on this machine: what works, and what to do about what does not."""

import argparse
import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, ParamSpec

import torch
import torch.distributed as dist

from commpress.cli import harness, option_groups, terminal
from commpress.errors import CommpressError
from commpress.tiered_mem import FileLayer, engines, show_bytes
from commpress.tiered_mem.engines import thread_priority

P = ParamSpec("P")
OLDEST = (2, 8)
NEEDED, USEFUL = (
    ("numpy", "llvmlite", "msgpack", "xxhash"),
    ("transformers", "accelerate", "lightning", "matplotlib"),
)
SECONDS = 30  # for a program or a thread to answer
SYS, PROC = Path("/sys"), Path("/proc")
STA_UNSYNC, TIME_ERROR = 0x0040, 5
JUMBO = 9000
DIOALIGN = 0x2000  # the bit of statx that asks for it
LOW = 10 << 30
COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}


@dataclass(frozen=True)
class Finding:
    """``note``: works without it, or more slowly. ``bad``: something commpress needs does not work.
    ``cure``: what to do."""

    state: Literal["ok", "note", "bad"]
    what: str
    cure: str = ""


def looked_at(
    section: Callable[P, list[Finding]], *args: P.args, **kwargs: P.kwargs
) -> list[Finding]:
    """A section that cannot look is a finding, not the end of the report."""
    try:
        return section(*args, **kwargs)
    except Exception as error:
        return [
            Finding(
                "note",
                f"could not look: {type(error).__name__}: {error}",
                "this machine hides it; nothing follows",
            )
        ]


def run(options: argparse.Namespace) -> int:
    wanted = options.only.split(",") if options.only else list(SECTIONS)
    found = {}
    for title in wanted:
        if not options.report:
            print(title, flush=True)
        found[title] = looked_at(SECTIONS[title], options)
        for finding in [] if options.report else found[title]:
            state = terminal.coloured(f"{finding.state:<4}", COLOURS[finding.state])
            told = terminal.wrapped(finding.what, " " * 8, " " * 8)[8:]
            cure = "\n" + terminal.wrapped(finding.cure, " " * 8, " " * 8) if finding.cure else ""
            print(f"  {state}  {told}{cure}", flush=True)
    count = {
        state: sum(f.state == state for fs in found.values() for f in fs)
        for state in ("ok", "note", "bad")
    }
    if options.report:
        from commpress.cli import bug_report

        print(bug_report.report(found))
    else:
        print(f"\n{count['ok']} ok, {count['note']} to note, {count['bad']} bad")
    if options.json:
        sections = {title: [asdict(f) for f in findings] for title, findings in found.items()}
        harness.write_json(
            options.json, {**harness.machine(), "count": count, "sections": sections}
        )
    return int(count["bad"] > 0)


# ---------------------------------------------------------------- software


def packages() -> list[Finding]:
    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    threads = f"{torch.get_num_threads()} threads"
    if number < OLDEST:
        old = Finding(
            "bad", f"torch {torch.__version__} is older than 2.8", "pip install --upgrade torch"
        )
    else:
        old = Finding(
            "ok", f"Python {platform.python_version()}, torch {torch.__version__}, {threads}"
        )
    missing = [name for name in NEEDED if not installed(name)]
    there = ", ".join(f"{name} {installed(name)}" for name in NEEDED if name not in missing)
    extras = [name for name in USEFUL if not installed(name)]
    found = [old, Finding("ok", there)]
    found += [Finding("bad", f"{name} is missing", f"pip install {name}") for name in missing]
    if extras:
        cure = "only what uses them needs them: pip install 'commpress[hf,lightning,demo]'"
        found.append(Finding("note", f"not installed: {', '.join(extras)}", cure))
    return found


def kernels() -> list[Finding]:
    """Encode, residual and decode of the sign codec against the reference, bit for bit: compiled on
    the first call."""
    try:
        from commpress.cli.bench_codec import check_bytes
        from commpress.codecs import SignCodec

        check_bytes(SignCodec(), 4099)
    except Exception as error:
        cure = "pip install --upgrade llvmlite; if that does not help, install commpress again"
        return [
            Finding(
                "bad",
                f"the CPU kernels do not work: {type(error).__name__}: {str(error)[:200]}",
                cure,
            )
        ]
    return [
        Finding("ok", "the CPU kernels compile, and their bytes equal the reference"),
        kernel_cache(),
        kernel_threads(),
    ]


def kernel_cache() -> Finding:
    """The folder that keeps compiled kernels from one process to the next."""
    from commpress.kernels.cpu import object_cache

    if (folder := object_cache.writable()) is not None:
        return Finding("ok", f"compiled kernels are kept in {folder}")
    tried = ", ".join(map(str, object_cache.folders()))
    what = f"compiled kernels are not kept: no folder of this user's alone can be written ({tried})"
    cure = (
        "every process compiles for some seconds; set COMMPRESS_CACHE_DIR to a folder that nobody "
        "else may write to"
    )
    return Finding("note", what, cure)


def kernel_threads() -> Finding:
    from commpress.kernels.cpu import openmp as cpu_openmp

    if cpu_openmp.entry() is not None:
        return Finding("ok", "the CPU kernels run on the threads of torch")
    what = "this torch lets nobody use its threads: the CPU kernels run on threads of their own"
    return Finding(
        "note",
        what,
        "no cure; right after an operation of torch they share its cores with threads that spin",
    )


def backends() -> list[Finding]:
    found = [gloo()]
    try:
        import_module("commpress.backend")
        found.append(Finding("ok", 'backend "commpress" is registered by import commpress.backend'))
    except Exception as error:
        found.append(
            Finding(
                "bad",
                f'backend "commpress" cannot be registered: {error}',
                "import commpress.backend",
            )
        )
    if not dist.is_nccl_available():
        found.append(
            Finding(
                "note",
                "this torch has no NCCL",
                "needed on GPUs only: a build of torch for CUDA has it",
            )
        )
    elif not torch.cuda.is_available():
        found.append(Finding("note", "NCCL is there, a GPU is not"))
    else:
        found.append(Finding("ok", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"))
    if not dist.is_mpi_available():
        found.append(
            Finding(
                "note",
                "this torch has no MPI backend of its own",
                "not needed: commpress goes through mpi4py",
            )
        )
    return [*found, *own_name()]


def gloo() -> Finding:
    """Two ranks of this process exchange one number over real connections."""
    if not dist.is_gloo_available():
        return Finding("bad", "this torch has no Gloo", "install an official build of torch")
    store, failures, sums = dist.HashStore(), [], []

    def rank(number: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=SECONDS))
            one = torch.ones(1)
            group.allreduce([one]).wait()  # type: ignore[attr-defined]
            sums.append(float(one))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    if sums == [2.0, 2.0]:
        return Finding("ok", "Gloo connects and sums")
    said = (
        str(failures[0]).strip().splitlines()[0][:200]
        if failures
        else f"no answer within {2 * SECONDS} s"
    )
    return Finding(
        "bad",
        f"Gloo does not connect: {said}",
        "name an interface that works: GLOO_SOCKET_IFNAME=lo or eth0",
    )


def own_name() -> list[Finding]:
    """Gloo offers others the address of this machine's name, unless an interface is named."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        there = {name for _, name in socket.if_nameindex()}
        missing = [name for name in named.split(",") if name not in there]
        if missing:
            cure = f"unset it or name one of {', '.join(sorted(there))}"
            return [
                Finding("bad", f"GLOO_SOCKET_IFNAME names {missing[0]}, which is not there", cure)
            ]
        return [Finding("ok", f"Gloo uses {named} (GLOO_SOCKET_IFNAME)")]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return [
            Finding(
                "note",
                "this machine's name has no address",
                "for several machines: GLOO_SOCKET_IFNAME=eth0",
            )
        ]
    if address.startswith("127."):
        cure = (
            "fine on one machine; for several: commpress.init_process_group(), "
            "GLOO_SOCKET_IFNAME=eth0, or mend /etc/hosts"
        )
        what = (
            f"this machine's name is {address}: torch's Gloo offers others an address they cannot "
            "reach"
        )
        return [Finding("note", what, cure)]
    return [Finding("ok", f"this machine's name has an address ({address})")]


def mpi() -> list[Finding]:
    cure = "for MpiTransport and mpirun: pip install 'commpress[mpi]', which brings a whole MPI"
    if not installed("mpi4py"):
        return [Finding("note", "mpi4py is missing", cure)]
    said = answer(
        [
            sys.executable,
            "-c",
            "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0])",
        ]
    )
    if said is None:
        cure += "; or name yours: MPI4PY_LIBMPI=.../libmpi.so"
        return [Finding("note", f"mpi4py {installed('mpi4py')} does not start an MPI", cure)]
    found = [Finding("ok", f"mpi4py {installed('mpi4py')} on {said}")]
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        return [*found, Finding("note", "mpirun is not on the PATH", cure)]
    return [*found, Finding("ok", f"mpirun: {mpirun}")]


def gpu() -> list[Finding]:
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists():
            cure = "install a build of torch for CUDA that fits the driver"
            return [
                Finding(
                    "bad",
                    f"there is an NVIDIA device, but torch {torch.__version__} cannot use it",
                    cure,
                )
            ]
        return [
            Finding(
                "note",
                "no GPU: the CPU kernels work",
                "with one: torch for CUDA, commpress[cuda12] or [cuda13]",
            )
        ]
    found = []
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        found.append(
            Finding(
                "ok",
                (
                    f"{device.name}, {device.total_memory / 2**30:.0f} GiB, "
                    f"sm_{device.major}{device.minor}"
                ),
            )
        )
    cupy = installed("cupy-cuda12x") or installed("cupy-cuda13x") or installed("cupy")
    if cupy is None:
        major = (torch.version.cuda or "12").split(".")[0]
        return [
            *found,
            Finding(
                "bad",
                "CuPy is missing: no kernels for the GPU",
                f"pip install 'commpress[cuda{major}]'",
            ),
        ]
    said = answer([sys.executable, "-c", "import cupy; print(int(cupy.arange(3).sum()))"])
    if said != "3":
        return [
            *found,
            Finding("bad", f"CuPy {cupy} does not compute on the GPU", "see cupy.show_config()"),
        ]
    return [*found, Finding("ok", f"CuPy {cupy}")]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def answer(command: list[str]) -> str | None:
    """The last line that a program prints, None if it fails or does not end."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = ran.stdout.strip().splitlines()
    return lines[-1] if ran.returncode == 0 and lines else None


# ------------------------------------------------------------- the machine, read from Linux's files


def read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


# ---------------------------------------------------------------- processors and memory


def numa(root: Path = SYS) -> list[Finding]:
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    found = [Finding("ok", f"{allowed} of {os.cpu_count()} processors for this process")]
    nodes = sorted((root / "devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:]))
    if not nodes:
        return [
            *found,
            Finding("note", "the kernel does not tell which memory is near which processor (NUMA)"),
        ]
    if len(nodes) == 1:
        return [*found, Finding("ok", "one NUMA node: all memory is equally near")]
    parts = ", ".join(f"{node.name}: processors {read(node / 'cpulist')}" for node in nodes)
    cure = (
        "one rank per node, bound to it: torchrun --numa-binding=node, mpirun --bind-to numa, or "
        "numactl -N 0 -m 0"
    )
    return [
        *found,
        Finding(
            "note", f"{len(nodes)} NUMA nodes ({parts}): memory of another node is slower", cure
        ),
    ]


def memory(root: Path = PROC, system: Path = SYS) -> list[Finding]:
    numbers = dict(re.findall(r"^(\w+):\s+(\d+) kB", read(root / "meminfo") or "", re.M))
    found = []
    if {"MemTotal", "MemAvailable"} <= numbers.keys():
        total, free = (1024 * int(numbers[key]) for key in ("MemTotal", "MemAvailable"))
        found.append(Finding("ok", f"{show_bytes(free)} of {show_bytes(total)} available"))
    if (limit := read(system / "fs/cgroup/memory.max")) and limit.isdigit():
        found.append(
            Finding(
                "note",
                f"a control group ends this process beyond {show_bytes(int(limit))}",
                "stay below it",
            )
        )
    huge = read(system / "kernel/mm/transparent_hugepage/enabled") or ""
    if "[never]" in huge:
        cure = (
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: large buffers are "
            "touched faster"
        )
        found.append(Finding("note", "transparent huge pages are off", cure))
    elif huge:
        found.append(
            Finding("ok", f"transparent huge pages: {huge[huge.index('[') + 1 : huge.index(']')]}")
        )
    return [*found, locked()]


def locked() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Finding("ok", "memory can be pinned and registered without a limit")
    cure = (
        "ulimit -l unlimited, for pinned host memory and registered buffers; without it both are "
        "left out"
    )
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
        return Finding(
            "note", f"{what}, no carrier", "plug it in, or keep Gloo off it with GLOO_SOCKET_IFNAME"
        )
    if speed >= 10_000 and mtu < JUMBO:
        return Finding(
            "note",
            what,
            (
                f"at this speed an MTU of {JUMBO} saves processor time, if every switch between "
                "allows it"
            ),
        )
    return Finding(
        "ok", what + ("" if speed > 0 else ", speed not told: commpress probe measures it")
    )


# ---------------------------------------------------------------- clocks


def clocks(root: Path = SYS) -> list[Finding]:
    step, cost = smallest_step(), reading_cost()
    source = read(root / "devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    what = (
        f"monotonic clock: steps of {1e9 * step:.0f} ns, {1e9 * cost:.0f} ns to read (source "
        f"{source})"
    )
    slow = step > 1e-6 or cost > 2e-6
    cure = (
        "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource, where tsc is "
        "stable"
    )
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
    """Error of the wall clock, as the kernel believes (adjtimex, read only): it orders traces of
    several machines."""
    cure = (
        "start chronyd or systemd-timesyncd: traces of several machines are laid side by side by "
        "this clock"
    )
    # struct timex: modes, offset, freq, maxerror, esterror, status, each in a long
    record = (ctypes.c_long * 64)()
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


# ---------------------------------------------------------------- disks


def disks(options: argparse.Namespace) -> list[Finding]:
    """O_DIRECT, alignment, engines and room, for a store in this directory."""
    layer = FileLayer()
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=options.directory) as made:
            folder = layer.open_folder(Path(made) / "store")
            try:
                return [
                    direct(layer, folder),
                    alignment(folder, layer),
                    *engine_findings(layer),
                    precedence(),
                    room(layer, folder),
                ]
            finally:
                layer.close(folder)
    except (OSError, CommpressError) as error:
        return [
            Finding(
                "bad",
                f"{options.directory.absolute()} cannot be used: {error}",
                "name another with --directory",
            )
        ]


def direct(layer: FileLayer, folder: int) -> Finding:
    if layer.takes_direct(folder):
        return Finding("ok", "files can be opened past the page cache (O_DIRECT)")
    return Finding(
        "note",
        "no O_DIRECT here: the store works buffered, slower and with more memory",
        "use a local disk",
    )


def alignment(folder: int, layer: FileLayer) -> Finding:
    fd = layer.open(folder, "alignment", create=True)
    try:
        found = direct_alignment(fd)
    finally:
        layer.close(fd)
    if found is None:
        return Finding(
            "note",
            "the kernel does not tell the alignment of direct transfers; the store uses 4096",
        )
    memory, offset = found
    if max(found) > 4096:
        return Finding(
            "bad",
            f"direct transfers want {max(found)} bytes, the store aligns to 4096",
            "open with direct=False",
        )
    return Finding(
        "ok",
        (
            f"direct transfers want memory aligned to {memory} and offsets to {offset}; the store "
            "uses 4096"
        ),
    )


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment from statx, or None where the kernel or file system does not say.
    x86-64 and Arm."""
    number = {"x86_64": 332, "aarch64": 291}.get(os.uname().machine)
    if number is None:
        return None
    found = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), fd, b"", 0x1000, DIOALIGN, found):  # AT_EMPTY_PATH
        return None
    (mask,) = struct.unpack_from("<I", found.raw, 0)
    memory, offset = struct.unpack_from("<II", found.raw, 152)
    return (memory, offset) if mask & DIOALIGN and memory and offset else None


def engine_findings(layer: FileLayer) -> list[Finding]:
    found = []
    for name, missing in engines.available(layer).items():
        found.append(
            Finding("note", f"engine {name} is missing", missing)
            if missing
            else Finding("ok", f"engine {name}")
        )
    return found


def precedence() -> Finding:
    """As a store's own thread gets it: from the kernel, on a thread that ends afterwards."""

    def ask() -> tuple[int, bool]:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        thread_priority.raise_own()
        nice, short = thread_priority.own()
        return before - nice, short

    with ThreadPoolExecutor(1) as thread:
        raised, short = thread.submit(ask).result()
    had = [
        what
        for what, there in (
            ("short time slices", short),
            (f"priority raised by {raised}", raised > 0),
        )
        if there
    ]
    if len(had) == 2:
        return Finding(
            "ok", f"the thread of io_uring goes before those that compute: {', '.join(had)}"
        )
    what = (
        f"the thread of io_uring gets {had[0]} only"
        if had
        else "the thread of io_uring waits for its turn as all others do"
    )
    cure = (
        "while others compute reads may start 3 ms late: Linux 6.12 has short slices, "
        "CAP_SYS_NICE or ulimit -e 30 priority"
    )
    return Finding("note", what, cure)


def room(layer: FileLayer, folder: int) -> Finding:
    free = layer.room(folder)
    state: Literal["ok", "note"] = "ok" if free >= LOW else "note"
    return Finding(state, f"{show_bytes(free)} free of {show_bytes(layer.capacity(folder))}")


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Finding]]] = dict(
    zip(
        option_groups.SECTIONS,
        (
            lambda options: [*packages(), *kernels()],
            lambda options: backends(),
            lambda options: mpi(),
            lambda options: gpu(),
            lambda options: numa(),
            lambda options: memory(),
            disks,
            lambda options: network(),
            lambda options: clocks(),
        ),
        strict=True,
    )
)
