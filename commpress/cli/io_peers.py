"""Others that read and write as the tiered store does, to be measured beside it: fio, and DeepSpeed's aio handle."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from commpress.errors import MissingPackage

FIO = ("io_uring", "libaio", "psync")
COLD = "io_uring cold"  # with as many buffers as there are chunks, where it otherwise uses ``depth`` of them again and again
HUGE = "io_uring huge"  # with its buffers in huge pages, as the store's memory is


@dataclass(frozen=True)
class Stretch:
    """A part of a file that is written already; ``direct``: past the page cache."""

    path: Path
    offset: int
    size: int
    direct: bool


def run_fio(fio: str, stretch: Stretch, kind: str, chunk: int, depth: int, verb: str) -> float:
    """One pass; psync gets ``depth`` threads instead of a queue. Nothing for huge pages where none are set aside.

    fio rounds its time up to whole milliseconds, half a millisecond too long on average, of the 30 that 512 MiB take on a
    fast device: that half is taken off.
    """
    jobs, queue = (depth, 1) if kind == "psync" else (1, stretch.size // chunk if kind == COLD else depth)
    command = [
        fio, "--name=b", f"--filename={stretch.path}", f"--rw={verb}", f"--bs={chunk}", f"--size={stretch.size // jobs}",
        f"--offset={stretch.offset}", f"--offset_increment={stretch.size // jobs}", f"--ioengine={kind.split()[0]}",
        f"--iodepth={queue}", f"--numjobs={jobs}", f"--direct={int(stretch.direct)}", "--thread", "--fallocate=none",
        "--group_reporting", "--output-format=json", *(["--mem=mmaphuge"] if kind == HUGE else []),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        return 0.0
    found = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0][verb]
    return float(found["io_bytes"] / max(found["runtime"] - 0.5, 0.5) * 1e3)


class DeepSpeed:
    """Its handle as it comes, without checksums: ``depth`` chunks begun at a time, in memory that it has locked itself."""

    def __init__(self, stretch: Stretch, chunk: int, depth: int) -> None:
        try:
            from deepspeed.ops.op_builder import AsyncIOBuilder
        except ImportError as error:
            raise MissingPackage("--deepspeed needs the package deepspeed, libaio-dev and a compiler") from error
        self._handle = AsyncIOBuilder().load(verbose=False).aio_handle()
        empty = torch.empty(0, dtype=torch.uint8)
        self._memory = [self._handle.new_cpu_locked_tensor(chunk, empty) for _ in range(depth)]
        self._stretch, self._chunk = stretch, chunk

    def rate(self, verb: str) -> float:
        """Bytes per second of one pass."""
        move = self._handle.async_pread if verb == "read" else self._handle.async_pwrite
        path, end, begin = str(self._stretch.path), self._stretch.offset + self._stretch.size, perf_counter()
        for first in range(self._stretch.offset, end, self._chunk * len(self._memory)):
            for memory, at in zip(self._memory, range(first, end, self._chunk), strict=False):
                move(memory, path, at)
            self._handle.wait()
        return self._stretch.size / (perf_counter() - begin)
