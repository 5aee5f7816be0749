"""Findings on this machine: what works, and what to do about what does not; or the report to paste
into a bug report, in which nothing tells whose machine it is."""

import argparse
import getpass
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from commpress import __version__
from commpress.cli import option_groups, terminal
from commpress.collectives.transports.run_key import VARIABLE
from commpress.errors import CommpressError
from commpress.tiered_mem import FileLayer, engines, show_bytes

NEEDED = ("numpy", "llvmlite", "msgpack", "xxhash")
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
SECONDS = 30  # for a program or a thread to answer
SYS, PROC = Path("/sys"), Path("/proc")
JUMBO = 9000
LOW = 10 << 30
COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}


@dataclass(frozen=True)
class Finding:
    """``ok``; ``note``: works without it, or more slowly; ``bad``: something commpress needs does
    not work. ``cure``: what to do."""

    state: str
    what: str
    cure: str = ""


ok, note, bad = (partial(Finding, state) for state in COLOURS)


def looked_at(section: Callable[..., Iterable[Finding]], *args: object) -> list[Finding]:
    """A section that cannot look is a finding, not the end of the report."""
    try:
        return list(section(*args))
    except Exception as error:
        said = f"could not look: {type(error).__name__}: {error}"
        return [note(said, "this machine hides it; nothing follows")]


def run(options: argparse.Namespace) -> int:
    wanted = options.only.split(",") if options.only else list(SECTIONS)
    found = {}
    for title in wanted:
        if not options.report:
            print(title, flush=True)
        arguments = [options.directory] if title == "disks" else []
        found[title] = looked_at(SECTIONS[title], *arguments)
        for finding in [] if options.report else found[title]:
            state = terminal.styled(f"{finding.state:<4}", COLOURS[finding.state])
            lines = [
                terminal.wrapped(text, " " * 8) for text in (finding.what, finding.cure) if text
            ]
            print(f"  {state}  {chr(10).join(lines)[8:]}", flush=True)
    states = [finding.state for findings in found.values() for finding in findings]
    fine, notes, bad = map(states.count, COLOURS)
    print(report(found) if options.report else f"\n{fine} ok, {notes} to note, {bad} bad")
    return int(bad > 0)


# ---------------------------------------------------------------- software


def software() -> Iterator[Finding]:
    threads = f"{torch.get_num_threads()} threads"
    yield ok(f"Python {platform.python_version()}, torch {torch.__version__}, {threads}")
    yield ok(", ".join(f"{name} {installed(name)}" for name in NEEDED))
    yield from kernels()


def kernels() -> Iterator[Finding]:
    """Encode, residual and decode of the sign codec against the reference, bit for bit: compiled on
    the first call."""
    try:
        from commpress.cli.kernel_check import check_bytes
        from commpress.codecs import SignCodec

        check_bytes(SignCodec(), 4099)
    except Exception as error:
        said = f"the CPU kernels do not work: {type(error).__name__}: {str(error)[:200]}"
        cure = "pip install --upgrade llvmlite; if that does not help, install commpress again"
        yield bad(said, cure)
        return
    yield ok("the CPU kernels compile, and their bytes equal the reference")
    from commpress.kernels.cpu import object_cache

    if (folder := object_cache.writable()) is not None:
        yield ok(f"compiled kernels are kept in {folder}")
    else:
        tried = ", ".join(map(str, object_cache.folders()))
        yield note(
            "compiled kernels are not kept: no folder of this user's alone can be written "
            f"({tried})",
            "every process compiles for some seconds; set COMMPRESS_CACHE_DIR to a folder that "
            "nobody else may write to",
        )


def backends() -> Iterator[Finding]:
    yield gloo()
    try:
        import_module("commpress.backend")
        yield ok('backend "commpress" is registered by import commpress.backend')
    except Exception as error:
        said = f'backend "commpress" cannot be registered: {error}'
        yield bad(said, "import commpress.backend")
    if not dist.is_nccl_available():
        cure = "needed on GPUs only: a build of torch for CUDA has it"
        yield note("this torch has no NCCL", cure)
    elif not torch.cuda.is_available():
        yield note("NCCL is there, a GPU is not")
    else:
        yield ok(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    yield own_name()


def gloo() -> Finding:
    """Two ranks of this process exchange one number over real connections."""
    if not dist.is_gloo_available():
        return bad("this torch has no Gloo", "install an official build of torch")
    store, found = dist.HashStore(), list[object]()

    def rank(number: int) -> None:
        one = torch.ones(1)
        try:
            group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=SECONDS))
            group.allreduce([one]).wait()  # type: ignore[attr-defined]
            found.append(float(one))
        except Exception as error:  # it is told below
            found.append(str(error).strip().splitlines()[0][:200])

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    if found == [2.0, 2.0]:
        return ok("Gloo connects and sums")
    failures = [text for text in found if text != 2.0] or [f"no answer within {2 * SECONDS} s"]
    cure = "name an interface that works: GLOO_SOCKET_IFNAME=lo or eth0"
    return bad(f"Gloo does not connect: {failures[0]}", cure)


def own_name() -> Finding:
    """Gloo offers others the address of this machine's name, unless an interface is named."""
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        there = {name for _, name in socket.if_nameindex()}
        missing = [name for name in named.split(",") if name not in there]
        if not missing:
            return ok(f"Gloo uses {named} (GLOO_SOCKET_IFNAME)")
        cure = f"unset it or name one of {', '.join(sorted(there))}"
        return bad(f"GLOO_SOCKET_IFNAME names {missing[0]}, which is not there", cure)
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        cure = "for several machines: GLOO_SOCKET_IFNAME=eth0"
        return note("this machine's name has no address", cure)
    if not address.startswith("127."):
        return ok(f"this machine's name has an address ({address})")
    return note(
        f"this machine's name is {address}: torch's Gloo offers others an address they cannot "
        "reach",
        "fine on one machine; for several: commpress.init_process_group(), "
        "GLOO_SOCKET_IFNAME=eth0, or mend /etc/hosts",
    )


def mpi() -> Iterator[Finding]:
    cure = "for MpiTransport and mpirun: pip install 'commpress[mpi]', which brings a whole MPI"
    number = installed("mpi4py")
    if not number:
        yield note("mpi4py is missing", cure)
        return
    said = answer("from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0])")
    if said is None:
        cure += "; or name yours: MPI4PY_LIBMPI=.../libmpi.so"
        yield note(f"mpi4py {number} does not start an MPI", cure)
        return
    yield ok(f"mpi4py {number} on {said}")
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    yield ok(f"mpirun: {mpirun}") if mpirun else note("mpirun is not on the PATH", cure)


def gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists():
            said = f"there is an NVIDIA device, but torch {torch.__version__} cannot use it"
            yield bad(said, "install a build of torch for CUDA that fits the driver")
            return
        cure = "with one: torch for CUDA, commpress[cuda12] or [cuda13]"
        yield note("no GPU: the CPU kernels work", cure)
        return
    for device in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
        memory = show_bytes(device.total_memory)
        yield ok(f"{device.name}, {memory}, sm_{device.major}{device.minor}")
    if (cupy := next(filter(None, map(installed, CUPY)), None)) is None:
        major = (torch.version.cuda or "12").split(".")[0]
        cure = f"pip install 'commpress[cuda{major}]'"
        yield bad("CuPy is missing: no kernels for the GPU", cure)
    elif answer("import cupy; print(int(cupy.arange(3).sum()))") != "3":
        yield bad(f"CuPy {cupy} does not compute on the GPU", "see cupy.show_config()")
    else:
        yield ok(f"CuPy {cupy}")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def answer(code: str) -> str | None:
    """The last line that Python prints, None if it fails or does not end."""
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = ran.stdout.strip().splitlines()
    return lines[-1] if ran.returncode == 0 and lines else None


# ------------------------------------------------------------- the machine, read from Linux's files


def read(path: Path) -> str:
    """The text of a file; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def numa(root: Path = SYS) -> Iterator[Finding]:
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    yield ok(f"{len(usable) or os.cpu_count()} of {os.cpu_count()} processors for this process")
    nodes = sorted((root / "devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:]))
    if not nodes:
        yield note("the kernel does not tell which memory is near which processor (NUMA)")
    elif len(nodes) == 1:
        yield ok("one NUMA node: all memory is equally near")
    else:
        parts = ", ".join(f"{node.name}: processors {read(node / 'cpulist')}" for node in nodes)
        yield note(
            f"{len(nodes)} NUMA nodes ({parts}): memory of another node is slower",
            "one rank per node, bound to it: torchrun --numa-binding=node, mpirun --bind-to numa, "
            "or numactl -N 0 -m 0",
        )


def memory(root: Path = PROC, system: Path = SYS) -> Iterator[Finding]:
    numbers = dict(re.findall(r"^(\w+):\s+(\d+) kB", read(root / "meminfo"), re.M))
    if {"MemTotal", "MemAvailable"} <= numbers.keys():
        total, free = (
            show_bytes(1024 * int(numbers[f"Mem{key}"])) for key in ("Total", "Available")
        )
        yield ok(f"{free} of {total} available")
    if (limit := read(system / "fs/cgroup/memory.max")).isdigit():
        said = f"a control group ends this process beyond {show_bytes(int(limit))}"
        yield note(said, "stay below it")
    huge = read(system / "kernel/mm/transparent_hugepage/enabled")
    if "[never]" in huge:
        yield note(
            "transparent huge pages are off",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: large buffers are "
            "touched faster",
        )
    elif huge:
        yield ok(f"transparent huge pages: {huge[huge.index('[') + 1 : huge.index(']')]}")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        yield ok("memory can be pinned and registered without a limit")
    else:
        yield note(
            f"only {show_bytes(soft)} of memory can be locked",
            "ulimit -l unlimited, for pinned host memory and registered buffers; without it both "
            "are left out",
        )


def network(root: Path = SYS) -> Iterator[Finding]:
    paths = sorted((root / "class/net").glob("*"))
    # by flags: loopback's operstate is "unknown"
    up = [path for path in paths if int(read(path / "flags") or "0", 16) & 1]
    yield from map(interface, up)
    if not up:
        yield bad("no network interface is up, not even loopback", "ip link set lo up")


def interface(path: Path) -> Finding:
    mtu, speed = int(read(path / "mtu") or 0), int(read(path / "speed") or -1)
    what = f"{path.name}: MTU {mtu}" + (f", {speed / 1000:g} Gbit/s" if speed > 0 else "")
    if path.name == "lo":
        return ok(what)
    if read(path / "carrier") == "0":
        cure = "plug it in, or keep Gloo off it with GLOO_SOCKET_IFNAME"
        return note(f"{what}, no carrier", cure)
    if speed >= 10_000 and mtu < JUMBO:
        cure = f"at this speed an MTU of {JUMBO} saves processor time, if every switch allows it"
        return note(what, cure)
    return ok(what + ("" if speed > 0 else ", speed not told: commpress probe measures it"))


# ---------------------------------------------------------------- disks


def disks(directory: Path) -> Iterator[Finding]:
    """O_DIRECT, alignment, engines and room, for a store in this directory."""
    layer = FileLayer()
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=directory) as made:
            folder = layer.open_folder(Path(made) / "store")
            try:
                yield from on_disk(layer, folder)
            finally:
                layer.close(folder)
    except (OSError, CommpressError) as error:
        said = f"{directory.absolute()} cannot be used: {error}"
        yield bad(said, "name another with --directory")


def on_disk(layer: FileLayer, folder: int) -> Iterator[Finding]:
    if layer.takes_direct(folder):
        yield ok("files can be opened past the page cache (O_DIRECT)")
    else:
        said = "no O_DIRECT here: the store works buffered, slower and with more memory"
        yield note(said, "use a local disk")
    yield from engine_findings(layer)
    free = layer.room(folder)
    state = ok if free >= LOW else note
    yield state(f"{show_bytes(free)} free of {show_bytes(layer.capacity(folder))}")


def engine_findings(layer: FileLayer) -> Iterator[Finding]:
    for name, missing in engines.available(layer).items():
        yield note(f"engine {name} is missing", missing) if missing else ok(f"engine {name}")


SECTIONS: dict[str, Callable[..., Iterable[Finding]]] = dict(
    zip(
        option_groups.SECTIONS,
        (software, backends, mpi, gpu, numa, memory, disks, network),
        strict=True,
    )
)


# ---------------------------------------------------------------- the report

REPORTED = (
    "torch",
    *NEEDED,
    "numba",
    *CUPY,
    "mpi4py",
    "libaio",
    "aiofiles",
    "transformers",
    "accelerate",
    "lightning",
    "matplotlib",
    "deepspeed",
)
BUILD = re.compile(r"GCC|C\+\+ Version|oneDNN|OpenMP|LAPACK|CPU capability|CUDA Runtime|CuDNN")
VARIABLES = ("COMMPRESS_", "GLOO_", "NCCL_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "TORCH_")


def report(found: dict[str, list[Finding]]) -> str:
    """Markdown; ``found`` are findings by section."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    numbers = {name: installed(name) for name in REPORTED}
    shown = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    build = [line[:100] for line in shown if BUILD.search(line) and "Build settings" not in line]
    lines = [
        f"commpress {__version__}, Python {platform.python_version()}, {system}",
        "packages: " + ", ".join(f"{name} {number}" for name, number in numbers.items() if number),
        f"torch for CUDA {torch.version.cuda}: {'; '.join(build)}",
        f"NVIDIA driver: {read(PROC / 'driver/nvidia/version').partition(chr(10))[0] or 'none'}",
    ]
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            # no secret of a run, by which somebody could join it
            hidden = re.sub(r"#[0-9a-f]{32}\b", "#<token>", value)
            lines.append(f"set: {name}={'<key>' if name == VARIABLE else hidden}")
    for section, findings in found.items():
        lines += [f"{finding.state:<4}  {section}: {finding.what}" for finding in findings]
    return "```\n" + scrubbed("\n".join(lines)) + "\n```"


def scrubbed(text: str) -> str:
    """Text without addresses, the names of host and user, and the home directory."""
    text = text.replace("127.0.0.1", "localhost")
    for address in (
        r"\b\d{1,3}(\.\d{1,3}){3}\b",
        r"(?i:\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b|(?<=enx)[0-9a-f]{12}\b)",
        r"\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4}\b|\b[0-9a-f]{1,4}(?::[0-9a-f]{1,4})*::[0-9a-f:]*",
    ):
        text = re.sub(address, "<address>", text)
    text = text.replace(str(Path.home()), "~") if str(Path.home()) != "/" else text
    for name, shown in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if name and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return ""
