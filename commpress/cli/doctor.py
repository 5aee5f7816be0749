"""what works on this machine, and what to do about what does not

One line for each finding, with a cure where there is one. "note": works without it, or more slowly; "bad": something commpress
needs does not work. Exit status 1 if anything is bad, for scripts.

  commpress doctor                          everything, with the current directory's disk
  commpress doctor --directory /nvme/run1   another disk
  commpress doctor --only torch,network     some sections: torch, backends, MPI, GPU, NUMA, memory, disks, network, clocks
  commpress doctor --json findings.json     for programs
"""

import argparse
import ctypes
import os
import struct
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from commpress.cli import machine_findings, outputs, software_findings, table
from commpress.cli.finding import Finding, looked_at
from commpress.errors import CommpressError, InvalidArgument
from commpress.tiered_mem import FileLayer, engines, show_bytes
from commpress.tiered_mem.engines import thread_priority

DIOALIGN = 0x2000  # the bit of statx that asks for it
LOW = 10 << 30


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory", type=Path, default=Path(), metavar="D", help="on the disk to look at (default .)"
    )
    parser.add_argument("--only", metavar="A,B", help=f"sections: {', '.join(SECTIONS)}")
    parser.add_argument("--json", metavar="FILE", help="all findings")


def run(options: argparse.Namespace) -> int:
    wanted = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := [name for name in wanted if name not in SECTIONS]:
        raise InvalidArgument(f"--only has {unknown[0]!r}, expected some of {', '.join(SECTIONS)}")
    found = {}
    for title in wanted:
        print(title, flush=True)
        found[title] = looked_at(SECTIONS[title], options)
        for finding in found[title]:
            print(f"  {finding.state:<4}  {finding.what}" + (f"\n        {finding.cure}" if finding.cure else ""), flush=True)
    count = {state: sum(f.state == state for fs in found.values() for f in fs) for state in ("ok", "note", "bad")}
    print(f"\n{count['ok']} ok, {count['note']} to note, {count['bad']} bad")
    if options.json:
        sections = {title: [asdict(f) for f in findings] for title, findings in found.items()}
        table.write_json(options.json, {**outputs.machine(), "count": count, "sections": sections})
    return int(count["bad"] > 0)


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
            Finding("bad", f"{options.directory.absolute()} cannot be used: {error}", "name another with --directory")
        ]


def direct(layer: FileLayer, folder: int) -> Finding:
    if layer.takes_direct(folder):
        return Finding("ok", "files can be opened past the page cache (O_DIRECT)")
    return Finding(
        "note", "no O_DIRECT here: the store works buffered, slower and with more memory", "use a local disk"
    )


def alignment(folder: int, layer: FileLayer) -> Finding:
    fd = layer.open(folder, "alignment", create=True)
    try:
        found = direct_alignment(fd)
    finally:
        layer.close(fd)
    if found is None:
        return Finding("note", "the kernel does not tell the alignment of direct transfers; the store uses 4096")
    memory, offset = found
    if max(found) > 4096:
        return Finding(
            "bad", f"direct transfers want {max(found)} bytes, the store aligns to 4096", "open with direct=False"
        )
    return Finding(
        "ok", f"direct transfers want memory aligned to {memory} and offsets to {offset}; the store uses 4096"
    )


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment from statx, or None where the kernel or file system does not say. x86-64 and Arm."""
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
            Finding("note", f"engine {name} is missing", missing) if missing else Finding("ok", f"engine {name}")
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
    had = [what for what, there in (("short time slices", short), (f"priority raised by {raised}", raised > 0)) if there]
    if len(had) == 2:
        return Finding("ok", f"the thread of io_uring goes before those that compute: {', '.join(had)}")
    what = f"the thread of io_uring gets {had[0]} only" if had else "the thread of io_uring waits for its turn as all others do"
    cure = "while others compute reads may start 3 ms late: Linux 6.12 has short slices, CAP_SYS_NICE or ulimit -e 30 priority"
    return Finding("note", what, cure)


def room(layer: FileLayer, folder: int) -> Finding:
    free = layer.room(folder)
    state: Literal["ok", "note"] = "ok" if free >= LOW else "note"
    return Finding(state, f"{show_bytes(free)} free of {show_bytes(layer.capacity(folder))}")


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Finding]]] = {
    "torch": lambda options: [*software_findings.packages(), *software_findings.kernels()],
    "backends": lambda options: software_findings.backends(),
    "MPI": lambda options: software_findings.mpi(),
    "GPU": lambda options: software_findings.gpu(),
    "NUMA": lambda options: machine_findings.numa(),
    "memory": lambda options: machine_findings.memory(),
    "disks": disks,
    "network": lambda options: machine_findings.network(),
    "clocks": lambda options: machine_findings.clocks(),
}
