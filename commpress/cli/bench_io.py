"""Speed of the tiered store, reading and writing here."""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from commpress.cli import harness, terminal
from commpress.tiered_mem import FileLayer, Options, TieredStore, engines, parse_bytes, show_bytes

NEAR = 0.95  # of the fastest, that a smaller chunk must reach
TENSOR = 16 << 20
Calls = Mapping[str, Callable[[], float]]  # by name, what moves all bytes once: bytes per second
# other calls in the same turns, from a folder, a chunk and whether files bypass the page cache
Others = Callable[[Path, int, bool], Calls]


@dataclass
class ChunkRates:
    """Bytes per second, medians over the rounds."""

    chunk: int
    verb: str
    store: float
    low: float
    high: float


def run(options: argparse.Namespace) -> int:
    rows: list[ChunkRates] = []
    with begun(options) as (folder, engine, speeds):
        table = terminal.Table(cells)
        for chunk, figures in measured(options, folder, engine):
            for verb in ("write", "read"):
                rows.append(ChunkRates(chunk, verb, *spread(figures, verb)))
                table(rows[-1])
    suggest(rows, engine, speeds)
    return harness.deliver(options, rows, engine=engine)


@contextmanager
def begun(options: argparse.Namespace) -> Iterator[tuple[Path, str, dict[str, float]]]:
    """A folder, the engine, and the speeds by which it was chosen."""
    with tempfile.TemporaryDirectory(prefix="bench-io-", dir=options.directory) as made:
        folder = Path(made)
        engine, speeds = chosen(folder, options.engine, options.depth)
        print(
            f"engine {engine}, depth {options.depth}, {options.size} a figure, "
            f"{options.rounds} rounds, GB/s\n"
        )
        yield folder, engine, speeds


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


def measured(
    options: argparse.Namespace,
    folder: Path,
    engine: str,
    others: Others = lambda *_: {},
) -> Iterator[tuple[int, dict[str, list[float]]]]:
    """Each chunk, and the figures of all calls, which take turns."""
    for chunk in options.chunks:
        transfers = passes(options, folder / f"{chunk}", chunk, engine, others)
        with transfers as calls, terminal.ProgressBar(show_bytes(chunk)) as progress:
            figures = harness.interleaved(calls, options.rounds, warm=1, progress=progress)
        shutil.rmtree(folder / f"{chunk}")
        yield chunk, figures


def spread(figures: Mapping[str, list[float]], verb: str) -> tuple[float, float, float]:
    """Median, least and largest of the store's."""
    ours = figures[f"store {verb}"]
    return median(ours), min(ours), max(ours)


def gb(rate: float) -> str:
    return f"{rate / 1e9:.2f}" if rate else ""


def cells(row: ChunkRates) -> dict[str, str]:
    return {
        "chunk": show_bytes(row.chunk),
        "": row.verb,
        "store": gb(row.store),
        "min-max": f"{gb(row.low)}-{gb(row.high)}",
    }


def suggest(rows: list[ChunkRates], engine: str, speeds: dict[str, float]) -> None:
    """The chunk size with the best slower direction, the smallest of near equals."""
    worst: dict[int, float] = {}
    for row in rows:
        worst[row.chunk] = min(worst.get(row.chunk, row.store), row.store)
    enough = NEAR * max(worst.values())
    best = min(chunk for chunk, speed in worst.items() if speed >= enough)
    print(
        f'\nsuggested: TieredStore.open(..., engine="{engine}", '
        f"options=Options(chunk_bytes={best >> 20} << 20))"
    )
    if speeds:
        each = ", ".join(f"{name} {speed / 1e9:.2f} GB/s" for name, speed in speeds.items())
        print(f"probed: {each}")


@contextmanager
def passes(
    options: argparse.Namespace, folder: Path, chunk: int, engine: str, others: Others
) -> Iterator[Calls]:
    """Calls that move the same bytes again and again."""
    size, depth = parse_bytes(options.size), options.depth
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

        own: Calls = {"store write": write, "store read": read}
        yield {**own, **others(folder, chunk, store.direct)}
