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

from commpress.cli import harness
from commpress.errors import InvalidArgument
from commpress.tiered_mem import FileLayer, Options, TieredStore, engines, parse_bytes, show_bytes

ENOUGH = 0.95  # of fio
HUGE = "io_uring huge"  # with its buffers in huge pages, as the store's memory is
FIO = ("io_uring", "libaio", "psync", HUGE)
TENSOR = 16 << 20
TRIES = 6


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
    huge: float = 0.0

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
        table = harness.Table(cells)
        for chunk in options.chunks:
            transfers = passes(folder / f"{chunk}", chunk, size, engine, options.depth, fio)
            with transfers as calls, harness.ProgressBar(show_bytes(chunk)) as progress:
                figures = harness.interleaved(calls, options.rounds, warm=1, progress=progress)
            shutil.rmtree(folder / f"{chunk}")
            for verb in ("write", "read"):
                rows.append(summary(chunk, verb, figures))
                table(rows[-1])
    suggest(rows, engine, speeds)
    title = f"The tiered store on this disk, engine {engine}"
    draw = harness.drawing(title, cells, {"GB per second": ("store", "fio", "huge")})
    return harness.deliver(options, rows, judge=judge, draw=draw, engine=engine)


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
    fio = {
        kind: median(figures[f"fio {kind} {verb}"]) for kind in FIO if "fio psync read" in figures
    }
    if fio:
        row.huge = fio.pop(HUGE)
        row.fio, row.fio_engine = max((speed, kind) for kind, speed in fio.items())
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
        "huge": gb(row.huge),
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


@dataclass(frozen=True)
class Stretch:
    """A part of a file that is written already; ``direct``: past the page cache."""

    path: Path
    offset: int
    size: int
    direct: bool


def run_fio(fio: str, stretch: Stretch, kind: str, chunk: int, depth: int, verb: str) -> float:
    """One pass; psync gets ``depth`` threads instead of a queue. Nothing for huge pages where none
    are set aside.

    fio rounds its time up to whole milliseconds, half a millisecond too long on average, of the 30
    that 512 MiB take on a fast device: that half is taken off.
    """
    jobs, queue = (depth, 1) if kind == "psync" else (1, depth)
    command = f"""
        {fio} --name=b --rw={verb} --bs={chunk} --size={stretch.size // jobs}
        --offset={stretch.offset} --offset_increment={stretch.size // jobs}
        --ioengine={kind.split()[0]} --iodepth={queue} --numjobs={jobs}
        --direct={int(stretch.direct)} --thread --fallocate=none --group_reporting
        --output-format=json {"--mem=mmaphuge" if kind == HUGE else ""}
    """.split()
    command.append(f"--filename={stretch.path}")
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        return 0.0
    found = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0][verb]
    return float(found["io_bytes"] / max(found["runtime"] - 0.5, 0.5) * 1e3)


@contextmanager
def passes(
    folder: Path, chunk: int, size: int, engine: str, depth: int, fio: str | None
) -> Iterator[dict[str, Callable[[], float]]]:
    """Name → call that moves ``size`` bytes once and returns bytes per second.

    Where on a disk a file lies can change its speed by a tenth and more, so all of them use one
    stretch of one of the store's own files. Changes of the store alternate between this stretch and
    another; the others run while the store keeps to that.
    """
    settings = Options(chunk_bytes=chunk, segment_bytes=max(1 << 30, 2 * size))
    with TieredStore.open(
        folder, host=size + (4 << 20), engine=engine, depth=depth, options=settings
    ) as store:
        stored = Stored(store, size, max(chunk, TENSOR))
        calls = {"store write": stored.write, "store read": stored.read}
        for kind in FIO if fio else ():
            for verb in ("write", "read"):
                call = partial(run_fio, fio or "", stored.stretch, kind, chunk, depth, verb)
                calls[f"fio {kind} {verb}"] = partial(stored.aside, call)
        yield calls


class Stored:
    """Tensors of a store that are changed and written, evicted and read."""

    def __init__(self, store: TieredStore, size: int, tensor_bytes: int) -> None:
        self._store, self._size = store, size
        self._names = [f"t{i}" for i in range(size // tensor_bytes)]
        for name in self._names:
            store.put(name, torch.randint(0, 256, (tensor_bytes,), dtype=torch.uint8))

        def whole(found: Stretch | None) -> bool:
            return found is not None and found.offset + size <= found.path.stat().st_size

        self._change()
        found = self._change_until(whole, "the store's files have a stretch of that length")
        assert found is not None
        self.stretch = found

    def write(self) -> float:
        self._settle(here=False)
        self._dirty()
        return self._rate(lambda: self._store.flush().wait())

    def read(self) -> float:
        self._settle(here=True)
        self._store.evict(self._names).wait()
        return self._rate(lambda: self._store.prefetch(self._names).wait())

    def aside(self, call: Callable[[], float]) -> float:
        """While the stretch is free for others."""
        self._settle(here=False)
        return call()

    def _rate(self, call: Callable[[], object]) -> float:
        begin = perf_counter()
        call()
        return self._size / (perf_counter() - begin)

    def _settle(self, *, here: bool) -> None:
        why = "the store writes to two places by turns"
        self._change_until(lambda place: (place == self.stretch) == here, why)

    def _change_until(self, fits: Callable[[Stretch | None], bool], why: str) -> Stretch | None:
        """The place of the tensors, which are written anew until it fits."""
        for _ in range(TRIES):
            if fits(place := self._place()):
                return place
            self._change()
        raise InvalidArgument(f"--size is {self._size}: with a power of two {why}")

    def _change(self) -> None:
        self._dirty()
        self._store.flush().wait()

    def _dirty(self) -> None:
        for name in self._names:
            with self._store.borrow(name):
                pass

    def _place(self) -> Stretch | None:
        """The stretch in which the tensors lie, if they lie side by side."""
        places = [place for name in self._names for place in self._store.places(name)]
        at = places[0].offset
        for place in places:
            if place.file != places[0].file or place.offset != at:
                return None
            at += place.nbytes
        return Stretch(Path(places[0].file), places[0].offset, self._size, self._store.direct)
