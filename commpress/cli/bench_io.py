"""Speed of the tiered store, reading and writing here, beside fio."""

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from commpress.cli import harness, terminal
from commpress.tiered_mem import FileLayer, Options, TieredStore, engines, parse_bytes, show_bytes

ENOUGH = 0.95  # of fio
FIO = ("io_uring", "libaio", "psync")
TENSOR = 16 << 20


@dataclass
class ChunkRates:
    """Bytes per second, medians over the rounds; 0 where fio has nothing to say."""

    chunk: int
    verb: str
    store: float
    low: float
    high: float
    fio: float = 0.0
    fio_engine: str = ""

    @property
    def of_fio(self) -> float | None:
        return self.store / self.fio if self.fio else None


def run(options: argparse.Namespace) -> int:
    size, fio = parse_bytes(options.size), None if options.no_fio else shutil.which("fio")
    rows: list[ChunkRates] = []
    with tempfile.TemporaryDirectory(prefix="bench-io-", dir=options.directory) as made:
        folder = Path(made)
        engine, speeds = chosen(folder, options.engine, options.depth)
        print(
            f"engine {engine}, depth {options.depth}, {show_bytes(size)} a figure, "
            f"{options.rounds} rounds, GB/s\n"
        )
        table = terminal.Table(cells)
        for chunk in options.chunks:
            transfers = passes(folder / f"{chunk}", chunk, size, engine, options.depth, fio)
            with transfers as calls, terminal.ProgressBar(show_bytes(chunk)) as progress:
                figures = harness.interleaved(calls, options.rounds, warm=1, progress=progress)
            shutil.rmtree(folder / f"{chunk}")
            for verb in ("write", "read"):
                rows.append(summary(chunk, verb, figures))
                table(rows[-1])
    suggest(rows, engine, speeds)
    return harness.deliver(options, rows, judge=judge, engine=engine)


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


def summary(chunk: int, verb: str, figures: dict[str, list[float]]) -> ChunkRates:
    ours = figures[f"store {verb}"]
    row = ChunkRates(chunk, verb, median(ours), min(ours), max(ours))
    fio = [(median(figures[f"{kind} {verb}"]), kind) for kind in FIO if f"{kind} {verb}" in figures]
    row.fio, row.fio_engine = max(fio, default=(0.0, ""))
    return row


def cells(row: ChunkRates) -> dict[str, str]:
    def gb(rate: float) -> str:
        return f"{rate / 1e9:.2f}" if rate else ""

    return {
        "chunk": show_bytes(row.chunk),
        "": row.verb,
        "store": gb(row.store),
        "min-max": f"{gb(row.low)}-{gb(row.high)}",
        "fio": gb(row.fio),
        "its engine": row.fio_engine,
        "of fio": "" if row.of_fio is None else f"{100 * row.of_fio:.0f}%",
    }


def suggest(rows: list[ChunkRates], engine: str, speeds: dict[str, float]) -> None:
    """The chunk size with the best slower direction, the smallest of near equals."""
    worst: dict[int, float] = {}
    for row in rows:
        worst[row.chunk] = min(worst.get(row.chunk, row.store), row.store)
    enough = ENOUGH * max(worst.values())
    best = min(chunk for chunk, speed in worst.items() if speed >= enough)
    print(
        f'\nsuggested: TieredStore.open(..., engine="{engine}", '
        f"options=Options(chunk_bytes={best >> 20} << 20))"
    )
    if speeds:
        each = ", ".join(f"{name} {speed / 1e9:.2f} GB/s" for name, speed in speeds.items())
        print(f"probed: {each}")


def judge(rows: list[ChunkRates]) -> list[tuple[str, bool]]:
    bars = []
    for row in rows:
        share = row.of_fio or 0.0
        said = f"{row.verb} at {show_bytes(row.chunk)} is {100 * share:.0f} % of fio, 95 % expected"
        bars.append((said, share >= ENOUGH))
    return bars


# ---------------------------------------------------- one pass over the same bytes, again and again


@contextmanager
def passes(
    folder: Path, chunk: int, size: int, engine: str, depth: int, fio: str | None
) -> Iterator[dict[str, Callable[[], float]]]:
    """Name → call that moves ``size`` bytes once and returns bytes per second. fio has a file of
    its own beside the store's."""
    settings = Options(chunk_bytes=chunk, segment_bytes=max(1 << 30, 2 * size))
    host = size + (4 << 20)
    with TieredStore.open(folder, host=host, engine=engine, depth=depth, options=settings) as store:
        each = max(chunk, min(TENSOR, size))
        names = [f"t{i}" for i in range(size // each)]
        for name in names:
            store.put(name, torch.randint(0, 256, (each,), dtype=torch.uint8))

        def write() -> float:
            for name in names:
                with store.borrow(name):  # newer in memory from now on
                    pass
            return timed(lambda: store.flush().wait())

        def read() -> float:
            store.flush().wait()
            store.evict(names).wait()
            return timed(lambda: store.prefetch(names).wait())

        def timed(call: Callable[[], object]) -> float:
            begin = perf_counter()
            call()
            return each * len(names) / (perf_counter() - begin)

        calls: dict[str, Callable[[], float]] = {"store write": write, "store read": read}
        for kind in FIO if fio else ():
            for verb in ("write", "read"):
                words = (fio or "", folder / "fio", kind, verb, chunk, size, depth, store.direct)
                calls[f"{kind} {verb}"] = partial(run_fio, *words)
        yield calls


def run_fio(
    fio: str, file: Path, kind: str, verb: str, chunk: int, size: int, depth: int, direct: bool
) -> float:
    """One pass; psync gets ``depth`` threads instead of a queue.

    fio rounds its time up to whole milliseconds, half a millisecond too long on average, of the 30
    that 512 MiB take on a fast device: that half is taken off.
    """
    jobs, queue = (depth, 1) if kind == "psync" else (1, depth)
    command = f"""
        {fio} --name=b --rw={verb} --bs={chunk} --size={size // jobs}
        --offset_increment={size // jobs} --ioengine={kind} --iodepth={queue} --numjobs={jobs}
        --direct={int(direct)} --thread --fallocate=none --group_reporting --output-format=json
    """.split()
    ran = subprocess.run([*command, f"--filename={file}"], capture_output=True, text=True)
    if ran.returncode:
        return 0.0
    found = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0][verb]
    return float(found["io_bytes"] / max(found["runtime"] - 0.5, 0.5) * 1e3)
