"""Selection of an engine: find those that work here, and measure which is the fastest on this
disk."""

import contextlib
import mmap
from time import perf_counter

import numpy as np

from commpress.errors import InvalidArgument, MissingPackage
from commpress.tiered_mem.engines.aiofiles import AiofilesEngine
from commpress.tiered_mem.engines.libaio import LibaioEngine
from commpress.tiered_mem.engines.thread_pool import ThreadEngine
from commpress.tiered_mem.engines.transfer import DiskEngine, transfer_all
from commpress.tiered_mem.engines.uring import UringEngine
from commpress.tiered_mem.layer import FileLayer

# in order of processor time: the first of equally fast ones is chosen
NAMES = ("io_uring", "threads", "libaio", "aiofiles")
PROBE = "probe.tmp"
NEAR = 0.9  # share of the fastest rate that counts as equally fast


def start(name: str, layer: FileLayer, depth: int = 4) -> DiskEngine:
    match name:
        case "threads":
            return ThreadEngine(layer, depth)
        case "io_uring":
            return UringEngine(depth)
        case "libaio":
            return LibaioEngine(depth)
        case "aiofiles":
            return AiofilesEngine(layer, depth)
    raise InvalidArgument(f"engine is {name!r}, expected 'auto' or one of {', '.join(NAMES)}")


def available(layer: FileLayer) -> dict[str, str]:
    """Map each engine to '' if it works here, else to what is missing and the cure."""
    found = {}
    for name in NAMES:
        try:
            start(name, layer, 1).close()
            found[name] = ""
        except MissingPackage as error:
            found[name] = str(error)
        except OSError as error:
            found[name] = f"the kernel refuses: {error.strerror}"
    return found


def choose(
    layer: FileLayer, folder: int, *, direct: bool, depth: int = 4, seconds: float = 1.0
) -> tuple[str, dict[str, float]]:
    """Return the best engine, and for each engine bytes per second, the slower of writing and
    reading with checksums."""
    candidates = [name for name, missing in available(layer).items() if not missing]
    if not direct:  # for buffered files the kernel's queues only add a thread
        candidates = [name for name in candidates if name in ("threads", "aiofiles")]
    size = 16 << 20
    fd = layer.open(folder, PROBE, create=True, direct=direct)
    memory = mmap.mmap(-1, size)
    memory[:] = np.random.default_rng(0).bytes(size)  # random, because some disks compress
    try:
        layer.reserve(fd, size)
        speed = dict.fromkeys(candidates, 0.0)
        rounds = 3
        for _ in range(rounds):  # in turns, so that load from elsewhere affects all alike
            for name in candidates:
                engine = start(name, layer, depth)
                try:
                    share = seconds / rounds / len(candidates) / 2
                    rate = min(_rate(engine, fd, memory, write, share) for write in (True, False))
                    speed[name] = max(speed[name], rate)
                finally:
                    engine.close()
        best = max(speed.values())
        return next(name for name in candidates if speed[name] >= NEAR * best), speed
    finally:
        layer.close(fd)
        with contextlib.suppress(FileNotFoundError):
            layer.unlink(folder, PROBE)


def _rate(engine: DiskEngine, fd: int, memory: mmap.mmap, write: bool, seconds: float) -> float:
    """Return bytes per second of transfers like the store's, with the engine's depth."""
    view, moved, begin = memoryview(memory), 0, perf_counter()
    while moved == 0 or perf_counter() - begin < seconds:
        transfer_all(engine, fd, [(0, view)], write=write, hashed=True)
        moved += len(view)
    return moved / (perf_counter() - begin)
