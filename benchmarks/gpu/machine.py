"""The machine that is measured: a card with CUDA, or the processor as its twin, on which every line
runs small."""

import os
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
)


@dataclass(frozen=True)
class Counts:
    """Counts of one call, by the profiler."""

    launches: int
    waits: int  # of the host for the device
    copies: int


class Machine(ABC):
    """A device, its clock and its profiler."""

    twin: bool
    device: torch.device
    instead = ""  # what stands for CUDA

    def size(self, card: int, twin: int) -> int:
        return twin if self.twin else card

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that the device was given to do."""

    def took(self, call: Callable[[], object]) -> float:
        """Seconds of one call, from an idle device to an idle device."""
        self.synchronize()
        start = perf_counter()
        call()
        self.synchronize()
        return perf_counter() - start

    def seconds(self, call: Callable[[], object], *, times: int = 5, warm: int = 2) -> float:
        """The median of several calls, by the device's own clock where it has one."""
        for _ in range(warm):
            call()
        return median(self._timed(call) for _ in range(times))

    def _timed(self, call: Callable[[], object]) -> float:
        return self.took(call)

    def copied(self, numel: int) -> float:
        """Bytes per second, read and written, of a copy of so many floats."""
        source, target = (
            torch.ones(numel, device=self.device),
            torch.empty(numel, device=self.device),
        )
        return 8 * numel / self.seconds(lambda: target.copy_(source))

    @abstractmethod
    def counted(self, call: Callable[[], object]) -> Counts:
        """Launches, waits and copies of one call."""

    def join(self, backend: str = "") -> None:
        """A default process group of one rank."""
        if not self.twin:
            torch.cuda.set_device(self.device)
        file = Path(tempfile.mkdtemp(prefix="commpress-gpu-"), "group")
        dist.init_process_group(
            backend or self.backend, init_method=f"file://{file}", rank=0, world_size=1
        )

    @property
    def backend(self) -> str:
        return "gloo" if self.twin else "nccl"


class Card(Machine):
    """The first device of CUDA."""

    def __init__(self) -> None:
        self.twin, self.device = False, torch.device("cuda", 0)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def _timed(self, call: Callable[[], object]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def counted(self, call: Callable[[], object]) -> Counts:
        from torch.profiler import ProfilerActivity, profile

        call()
        self.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            call()
            self.synchronize()  # which is one wait
        events = list(seen.events() or [])
        there = [
            event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        copies = sum(name.startswith(("Memcpy", "Memset")) for name in there)
        return Counts(len(there) - copies, sum(event.name in WAITS for event in events) - 1, copies)


class Twin(Machine):
    """The processor: the same calls, small. Its figures mean nothing."""

    instead = (
        "perf_counter for events, Gloo for NCCL, Numba or a shim for CuPy, operations of torch for "
        "launches, host memory"
    )

    def __init__(self) -> None:
        self.twin, self.device = True, torch.device("cpu")
        torch.set_num_threads(1)

    def synchronize(self) -> None:
        """The processor is never behind."""

    def counted(self, call: Callable[[], object]) -> Counts:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as seen:
            call()
        names = Counter(event.name for event in seen.events() or [])
        operations = sum(count for name, count in names.items() if name.startswith("aten::"))
        return Counts(operations, names["aten::_local_scalar_dense"], names["aten::copy_"])


def described(twin: bool) -> dict[str, Any]:
    """The card, and versions of what drives it. For a process of its own: it wakes CUDA."""
    facts: dict[str, Any] = {"torch": torch.__version__, "cores": os.cpu_count(), "twin": twin}
    if twin:
        return facts | {"card": "CPU twin", "instead": Twin.instead}
    if not torch.cuda.is_available():
        return facts | {"card": ""}
    about = torch.cuda.get_device_properties(0)
    facts |= {
        "card": about.name,
        "gib": round(about.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
    facts |= {
        "capability": f"sm_{about.major}{about.minor}",
        "multiprocessors": about.multi_processor_count,
    }
    for package in ("cupy", "triton", "numba"):
        facts[package] = __import__(package).__version__ if find_spec(package) else "not installed"
    return facts
