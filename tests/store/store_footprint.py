"""Memory and interference of a tiered store, measured in a process of its own.

Run it on a machine that does nothing else.

  python tests/store/store_footprint.py memory --host 256MiB --tensors 4GiB
      peak resident memory above the start
  python tests/store/store_footprint.py overlap --seconds 20
      how much a busy core slows while the store streams
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from commpress.tiered_mem import TieredStore, parse_bytes


def peak() -> int:
    """Largest resident memory of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("this system does not tell its peak memory")


def memory(folder: str, host: int, total: int, engine: str) -> dict[str, float]:
    """Put, change, commit and read ``total`` bytes of tensors of 16 MiB through ``host`` bytes."""
    size = 4 << 20
    source, names = torch.zeros(size), [f"t{i}" for i in range(total // (4 * size))]
    source += 1
    with TieredStore.open(folder + "/warm", host="8MiB", engine=engine) as store:  # code, stacks
        store.put("x", source[: 1 << 20])
        store.commit()
        with store.borrow("x") as tensor:
            tensor += 1
    before = peak()
    with TieredStore.open(folder + "/store", host=host, engine=engine) as store:
        for name in names:
            store.put(name, source)
        for name in names:
            with store.borrow(name) as tensor:
                tensor += 1
        store.commit()
        wrong = 0
        for name in names:
            with store.borrow(name, write=False) as tensor:
                wrong += int(tensor[0] != 2) + int(tensor[-1] != 2)
    return {
        "baseline": before,
        "above": peak() - before,
        "host": host,
        "ratio": (peak() - before) / host,
        "wrong": wrong,
    }


def overlap(folder: str, seconds: float, engine: str, core: int) -> dict[str, float]:
    """A matrix product again and again on one core, alone and while the store writes and reads on
    the others, in turns."""
    cores = sorted(os.sched_getaffinity(0), key=lambda c: c == core)  # that one last
    torch.set_num_threads(1)
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    size, names = 4 << 20, [f"t{i}" for i in range(64)]
    os.sched_setaffinity(0, cores[:-1])  # for all threads that begin now
    with TieredStore.open(folder, host="256MiB", engine=engine, depth=4) as store:
        for name in names:
            store.put(name, torch.ones(size))
        store.commit()
        os.sched_setaffinity(0, cores[-1:])
        streaming, stop, rates = threading.Event(), threading.Event(), ([], [])
        half, size = names[: len(names) // 8], len(names) // 8 * 4 * size

        def stream() -> None:
            os.sched_setaffinity(0, cores[:-1])
            while not stop.is_set():
                if not streaming.wait(0.05):
                    continue
                for name in half:
                    with store.borrow(name):
                        pass  # newer in memory from now on
                for move, found in zip((store.evict, store.prefetch), rates, strict=True):
                    begin = time.perf_counter()
                    move(half).wait()
                    found.append(size / (time.perf_counter() - begin))

        thread = threading.Thread(target=stream)
        thread.start()
        alone, beside = [], []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for on, found in ((False, alone), (True, beside)):
                streaming.set() if on else streaming.clear()
                time.sleep(0.05)
                found.append(seconds_of(lambda: torch.mm(a, b)))
        stop.set()
        thread.join()
    wall, processor = (
        median(t[i] for t in beside) / median(t[i] for t in alone) - 1 for i in (0, 1)
    )
    written, read = map(median, rates)
    return {
        "slower": wall,
        "slower_in_processor_time": processor,  # without waiting for a core or for the interpreter
        "rounds": len(alone),
        "written_per_second": written,
        "read_per_second": read,
    }


def seconds_of(call: Callable[[], object]) -> tuple[float, float]:
    """By the clock and of the processor, for one call, over half a second of calls."""
    count, begin, used = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - begin < 0.5:
        call()
        count += 1
    return (time.perf_counter() - begin) / count, (time.thread_time() - used) / count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["memory", "overlap"])
    parser.add_argument("--directory", help="on the disk to use (default: a temporary one)")
    parser.add_argument("--host", default="256MiB")
    parser.add_argument("--tensors", default="4GiB")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--engine", default="auto", help="of the store (default auto)")
    parser.add_argument(
        "--core",
        type=int,
        default=max(os.sched_getaffinity(0)),
        help="that computes (default the last)",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="footprint-", dir=options.directory) as folder:
        if options.what == "memory":
            print(
                json.dumps(
                    memory(
                        folder,
                        parse_bytes(options.host),
                        parse_bytes(options.tensors),
                        options.engine,
                    )
                )
            )
        else:
            print(json.dumps(overlap(folder, options.seconds, options.engine, options.core)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
