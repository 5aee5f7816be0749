"""how fast the tiered store reads and writes here, beside fio

Through the store's own calls, checksums on, with a depth of 4 unless said otherwise, for chunks of several sizes:
  write   flush: tensors that are newer in memory go to disk
  read    prefetch: tensors on disk come back and are verified
"engine" is the same transfers without the store. "fio" is the best of its engines io_uring, libaio and psync, at the same
depth and size in the same file system, if fio is installed. Everything is measured in turns; medians.

  commpress bench io                                     in the current directory, about a minute
  commpress bench io --directory /nvme/tmp --size 2GiB   elsewhere, more bytes
  commpress bench io --engine io_uring --check           exit status 1 if the store is below 95 % of fio
"""

import argparse
import json
import mmap
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from commpress.cli import outputs, rounds, table
from commpress.errors import InvalidArgument
from commpress.tiered_mem import engines
from commpress.tiered_mem.engines.probe import transfer_all
from commpress.tiered_mem.layer import FileLayer
from commpress.tiered_mem.options import Options
from commpress.tiered_mem.sizes import parse_bytes, show_bytes
from commpress.tiered_mem.store import TieredStore

FIO = ("io_uring", "libaio", "psync")
ENOUGH = 0.95  # of fio


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory", type=Path, default=Path(), metavar="D", help="on the disk to measure (default .)"
    )
    parser.add_argument(
        "--chunks", default="1MiB,4MiB,16MiB,64MiB", metavar="A,B", help="default 1MiB,4MiB,16MiB,64MiB"
    )
    parser.add_argument("--size", default="512MiB", help="bytes written and read per figure (default 512MiB)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of everything, in turns (default 5)")
    parser.add_argument("--depth", type=int, default=4, metavar="N", help="transfers at once (default 4)")
    parser.add_argument("--engine", default="auto", help="auto (default), threads, io_uring, libaio or aiofiles")
    parser.add_argument("--no-fio", action="store_true", help="do not run fio")
    outputs.options(parser, check="the store reaches 95 %% of fio")


def run(options: argparse.Namespace) -> int:
    chunks, size = [parse_bytes(c) for c in options.chunks.split(",")], parse_bytes(options.size)
    if min(chunks) < 1 << 20 or size % max(chunks) or options.rounds < 1:
        raise InvalidArgument("--chunks must be at least 1MiB, divide --size, and --rounds must be at least 1")
    fio = None if options.no_fio else shutil.which("fio")
    if options.check and not fio:
        raise InvalidArgument("--check compares with fio: apt-get install fio")
    folder = Path(tempfile.mkdtemp(prefix="bench-io-", dir=options.directory))
    rows = []
    try:
        engine, speeds = chosen(folder, options.engine, options.depth)
        print(f"engine {engine}, depth {options.depth}, {show_bytes(size)} a figure, {options.rounds} rounds, GB/s\n")
        head = ["chunk", "", "store", "engine", "fio", "of fio", "store min-max"]
        widths = [7, 5, 6, 6, 6, 6, 13]
        print(table.line(head, widths))
        for chunk in chunks:
            transfers = measured(folder, chunk, size, engine, options.depth, fio)
            with transfers as calls, Progress(show_bytes(chunk)) as progress:
                figures = rounds.in_turns(calls, options.rounds, warm=1, progress=progress)
            for verb in ("write", "read"):
                row = summary(chunk, verb, figures)
                rows.append(row)
                cells = [show_bytes(chunk), verb, *(gb(row.get(k)) for k in ("store", "engine", "fio"))]
                of = f"{100 * row['of_fio']:.0f}%" if row.get("of_fio") else ""
                print(table.line([*cells, of, f"{gb(row['low'])}-{gb(row['high'])}"], widths), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    suggest(rows, engine, speeds)
    return outputs.deliver(options, rows, judge=lambda: judge(rows), draw=lambda path: draw(path, rows, engine), engine=engine)


def chosen(folder: Path, engine: str, depth: int) -> tuple[str, dict[str, float]]:
    layer = FileLayer()
    fd = layer.open_folder(folder / "probe")
    try:
        if engine != "auto":
            engines.start(engine, layer, 1).close()
            return engine, {}
        return engines.choose(layer, fd, direct=layer.takes_direct(fd), depth=depth)
    finally:
        layer.close(fd)


# ---------------------------------------------------------------- what is measured


@contextmanager
def measured(
    folder: Path, chunk: int, size: int, engine: str, depth: int, fio: str | None
) -> Iterator[dict[str, Callable[[], float]]]:
    """Name → call that moves ``size`` bytes once and returns bytes per second."""
    layer = FileLayer()
    settings = Options(chunk_bytes=chunk, segment_bytes=max(1 << 30, 2 * size))
    tensor_bytes = max(chunk, 16 << 20)
    names = [f"t{i}" for i in range(size // tensor_bytes)]
    raw = layer.open_folder(folder / "raw")
    direct = layer.takes_direct(raw)
    file = layer.open(raw, "data", create=True, direct=direct)
    layer.reserve(file, size)
    lane = engines.start(engine, layer, depth)
    with TieredStore.open(
        folder / "store", host=size + (4 << 20), engine=engine, depth=depth, options=settings
    ) as store:
        memory = memoryview(mmap.mmap(-1, size))
        torch.frombuffer(memory, dtype=torch.uint8).random_(0, 256)
        for i, name in enumerate(names):
            store.put(name, torch.frombuffer(memory, dtype=torch.uint8)[i * tensor_bytes : (i + 1) * tensor_bytes])
        pieces = [(at, memory[at : at + chunk]) for at in range(0, size, chunk)]

        def dirty() -> None:
            for name in names:
                with store.borrow(name):
                    pass

        def write() -> float:
            dirty()
            return rate(size, lambda: store.flush().wait())

        def read() -> float:
            store.evict(names).wait()
            return rate(size, lambda: store.prefetch(names).wait())

        def with_engine(write: bool) -> float:
            return rate(size, lambda: transfer_all(lane, file, pieces, write=write))

        calls: dict[str, Callable[[], float]] = {
            "store write": write,
            "engine write": lambda: with_engine(True),
            "store read": read,
            "engine read": lambda: with_engine(False),
        }
        if fio:
            for kind in FIO:
                for verb in ("write", "read"):
                    calls[f"fio {kind} {verb}"] = lambda kind=kind, verb=verb: run_fio(  # type: ignore[misc]
                        fio, folder / "fio", kind, verb, chunk, size, depth, direct
                    )
        for _ in range(2):  # the two places that changes alternate between are written once before they are measured
            write()
        try:
            yield calls
        finally:
            lane.close()
            layer.close(file)
            layer.close(raw)
            (folder / "fio").unlink(missing_ok=True)
    shutil.rmtree(folder / "store")
    shutil.rmtree(folder / "raw")


def rate(size: int, call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return size / (perf_counter() - begin)


def run_fio(fio: str, path: Path, kind: str, verb: str, chunk: int, size: int, depth: int, direct: bool) -> float:
    """One pass over a file that is written beforehand; psync gets ``depth`` processes instead of a queue."""
    jobs, queue = (depth, 1) if kind == "psync" else (1, depth)
    command = [
        fio, "--name=b", f"--filename={path}", f"--rw={verb}", f"--bs={chunk}", f"--size={size // jobs}",
        f"--ioengine={kind}", f"--iodepth={queue}", f"--numjobs={jobs}", f"--direct={int(direct)}", "--thread",
        f"--offset_increment={size // jobs}", "--group_reporting", "--output-format=json", "--fallocate=none",
    ]  # fmt: skip
    if not path.exists():
        fill = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).numpy().tobytes()
        with path.open("wb") as file:
            for _ in range(size >> 20):
                file.write(fill)
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        return 0.0
    return float(json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0][verb]["bw_bytes"])


# ---------------------------------------------------------------- in turns, in words


class Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, title: str) -> None:
        self.title = title

    def __enter__(self) -> "Progress":
        return self

    def __call__(self, what: str, share: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{'█' * round(30 * share):<30} {self.title}: {what}")
            sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")


def summary(chunk: int, verb: str, figures: dict[str, list[float]]) -> dict[str, Any]:
    ours = figures[f"store {verb}"]
    row: dict[str, Any] = {
        "chunk": chunk, "verb": verb, "store": median(ours), "low": min(ours), "high": max(ours),
        "engine": median(figures[f"engine {verb}"]),
    }  # fmt: skip
    best = {kind: median(figures[f"fio {kind} {verb}"]) for kind in FIO if figures.get(f"fio {kind} {verb}")}
    if best:
        kind = max(best, key=lambda k: best[k])
        row |= {"fio": best[kind], "fio_engine": kind, "of_fio": median(ours) / best[kind]}
    return row


def gb(rate: object) -> str:
    return f"{rate / 1e9:.2f}" if isinstance(rate, float) else ""


def suggest(rows: list[dict[str, Any]], engine: str, speeds: dict[str, float]) -> None:
    """The chunk size with the best slower direction, the smallest of near equals."""
    worst: dict[int, float] = {}
    for row in rows:
        chunk, speed = int(row["chunk"]), float(row["store"])
        worst[chunk] = min(worst.get(chunk, speed), speed)
    best = next(chunk for chunk, speed in sorted(worst.items()) if speed >= ENOUGH * max(worst.values()))
    print(f'\nsuggested: TieredStore.open(..., engine="{engine}", options=Options(chunk_bytes={best >> 20} << 20))')
    if speeds:
        print("probed: " + ", ".join(f"{name} {speed / 1e9:.2f} GB/s" for name, speed in speeds.items()))


def judge(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [
        (
            f"{r['verb']} at {show_bytes(r['chunk'])} is {100 * r['of_fio']:.0f} % of fio, 95 % expected",
            r["of_fio"] >= ENOUGH,
        )
        for r in rows
    ]


def draw(path: str, rows: list[dict[str, Any]], engine: str) -> None:
    from commpress.cli import charts

    with charts.chart(path, f"The tiered store on this disk, engine {engine}", panels=2, share=True) as panels:
        for verb, panel in zip(("write", "read"), panels, strict=True):
            of = [row for row in rows if row["verb"] == verb]
            series = {key: [row[key] / 1e9 if key in row else None for row in of] for key in ("fio", "engine", "store")}
            if not any(series["fio"]):
                del series["fio"]
            charts.bars(panel, [show_bytes(row["chunk"]) for row in of], series, "GB per second", show="{:.2f}")
            panel.set(title=verb, ylabel="chunk")
