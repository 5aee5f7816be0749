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
from typing import Any

import torch

from commpress.cli import harness
from commpress.errors import InvalidArgument, MissingPackage
from commpress.tiered_mem import FileLayer, Options, TieredStore, engines, parse_bytes, show_bytes
from commpress.tiered_mem.arena import Arena
from commpress.tiered_mem.engines.transfer import transfer_all

ENOUGH = 0.95  # of fio
FIO = ("io_uring", "libaio", "psync")
# with as many buffers as there are chunks, where it otherwise uses ``depth`` of them again and
# again
COLD = "io_uring cold"
HUGE = "io_uring huge"  # with its buffers in huge pages, as the store's memory is
TENSOR = 16 << 20
TRIES = 6


def run(options: argparse.Namespace) -> int:
    size = parse_bytes(options.size)
    fio = None if options.no_fio else shutil.which("fio")
    folder = Path(tempfile.mkdtemp(prefix="bench-io-", dir=options.directory))
    rows = []
    try:
        engine, speeds = chosen(folder, options.engine, options.depth)
        print(
            f"engine {engine}, depth {options.depth}, {show_bytes(size)} a figure, "
            f"{options.rounds} rounds, GB/s\n"
        )
        head = [
            "chunk",
            "",
            "store",
            "min-max",
            "engine",
            "bare",
            "fio",
            "its engine",
            "of fio",
            "huge",
            "cold",
        ]
        widths = [7, 5, 6, 11, 6, 6, 6, 10, 6, 6, 6]
        if options.deepspeed:
            head, widths = [*head, "DeepSpeed"], [*widths, 9]
        print(harness.line(head, widths))
        for chunk in options.chunks:
            transfers = passes(
                folder / f"{chunk}", chunk, size, engine, options.depth, fio, options.deepspeed
            )
            with transfers as calls, harness.ProgressBar(show_bytes(chunk)) as progress:
                figures = harness.interleaved(calls, options.rounds, warm=1, progress=progress)
            shutil.rmtree(folder / f"{chunk}")
            for verb in ("write", "read"):
                row = summary(chunk, verb, figures)
                rows.append(row)
                print(harness.line(cells_of(row)[: len(head)], widths), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    suggest(rows, engine, speeds)
    return harness.deliver(
        options, rows, judge=judge, draw=partial(draw, engine=engine), engine=engine
    )


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


def summary(chunk: int, verb: str, figures: dict[str, list[float]]) -> dict[str, Any]:
    ours = figures[f"store {verb}"]
    row: dict[str, Any] = {
        "chunk": chunk,
        "verb": verb,
        "store": median(ours),
        "low": min(ours),
        "high": max(ours),
        "engine": median(figures[f"engine {verb}"]),
        "bare": median(figures[f"bare {verb}"]),
    }
    best = {
        kind: median(figures[f"fio {kind} {verb}"])
        for kind in FIO
        if figures.get(f"fio {kind} {verb}")
    }
    if best:
        kind = max(best, key=lambda k: best[k])
        row |= {
            "fio": best[kind],
            "fio_engine": kind,
            "of_fio": median(ours) / best[kind],
            "fio_engines": best,
        }
        row |= {
            key: median(figures[f"fio {of} {verb}"]) or None
            for key, of in (("huge", HUGE), ("cold", COLD))
        }
    if peer := figures.get(f"deepspeed {verb}"):
        row |= {"deepspeed": median(peer), "of_deepspeed": median(ours) / median(peer)}
    return row


def cells_of(row: dict[str, Any]) -> list[str]:
    span, of = (
        f"{gb(row['low'])}-{gb(row['high'])}",
        f"{100 * row['of_fio']:.0f}%" if row.get("of_fio") else "",
    )
    rates = [
        gb(row.get(key)) for key in ("store", "engine", "bare", "fio", "huge", "cold", "deepspeed")
    ]
    return [
        show_bytes(row["chunk"]),
        row["verb"],
        rates[0],
        span,
        *rates[1:4],
        row.get("fio_engine", ""),
        of,
        *rates[4:],
    ]


def gb(rate: object) -> str:
    return f"{rate / 1e9:.2f}" if isinstance(rate, float) else ""


def suggest(rows: list[dict[str, Any]], engine: str, speeds: dict[str, float]) -> None:
    """The chunk size with the best slower direction, the smallest of near equals."""
    worst: dict[int, float] = {}
    for row in rows:
        chunk, speed = int(row["chunk"]), float(row["store"])
        worst[chunk] = min(worst.get(chunk, speed), speed)
    best = next(
        chunk for chunk, speed in sorted(worst.items()) if speed >= ENOUGH * max(worst.values())
    )
    print(
        f'\nsuggested: TieredStore.open(..., engine="{engine}", '
        f"options=Options(chunk_bytes={best >> 20} << 20))"
    )
    if speeds:
        print(
            "probed: "
            + ", ".join(f"{name} {speed / 1e9:.2f} GB/s" for name, speed in speeds.items())
        )


def judge(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [
        (
            (
                f"{r['verb']} at {show_bytes(r['chunk'])} is {100 * r['of_fio']:.0f} % of fio, 95 "
                "% expected"
            ),
            r["of_fio"] >= ENOUGH,
        )
        for r in rows
    ]


def draw(path: str, rows: list[dict[str, Any]], *, engine: str) -> None:
    from commpress.cli import charts

    with charts.chart(
        path, f"The tiered store on this disk, engine {engine}", panels=2, share=True
    ) as panels:
        for verb, panel in zip(("write", "read"), panels, strict=True):
            of = [row for row in rows if row["verb"] == verb]
            series = {
                key: [row[key] / 1e9 if key in row else None for row in of]
                for key in ("fio", "engine", "store")
            }
            if not any(series["fio"]):
                del series["fio"]
            charts.bars(
                panel,
                [show_bytes(row["chunk"]) for row in of],
                series,
                "GB per second",
                show="{:.2f}",
            )
            panel.set_title(verb)
        panels[0].set_ylabel("chunk")
        charts.same_scale(panels)


# ----------------------------------------------------- others that read and write as the store does


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
    jobs, queue = (
        (depth, 1) if kind == "psync" else (1, stretch.size // chunk if kind == COLD else depth)
    )
    command = [
        fio,
        "--name=b",
        f"--filename={stretch.path}",
        f"--rw={verb}",
        f"--bs={chunk}",
        f"--size={stretch.size // jobs}",
        f"--offset={stretch.offset}",
        f"--offset_increment={stretch.size // jobs}",
        f"--ioengine={kind.split()[0]}",
        f"--iodepth={queue}",
        f"--numjobs={jobs}",
        f"--direct={int(stretch.direct)}",
        "--thread",
        "--fallocate=none",
        "--group_reporting",
        "--output-format=json",
        *(["--mem=mmaphuge"] if kind == HUGE else []),
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        return 0.0
    found = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0][verb]
    return float(found["io_bytes"] / max(found["runtime"] - 0.5, 0.5) * 1e3)


class DeepSpeed:
    """Its handle as it comes, without checksums: ``depth`` chunks begun at a time, in memory that
    it has locked itself."""

    def __init__(self, stretch: Stretch, chunk: int, depth: int) -> None:
        try:
            from deepspeed.ops.op_builder import AsyncIOBuilder
        except ImportError as error:
            raise MissingPackage(
                "--deepspeed needs the package deepspeed, libaio-dev and a compiler"
            ) from error
        self._handle = AsyncIOBuilder().load(verbose=False).aio_handle()
        empty = torch.empty(0, dtype=torch.uint8)
        self._memory = [self._handle.new_cpu_locked_tensor(chunk, empty) for _ in range(depth)]
        self._stretch, self._chunk = stretch, chunk

    def rate(self, verb: str) -> float:
        """Bytes per second of one pass."""
        move = self._handle.async_pread if verb == "read" else self._handle.async_pwrite
        path, end, begin = (
            str(self._stretch.path),
            self._stretch.offset + self._stretch.size,
            perf_counter(),
        )
        for first in range(self._stretch.offset, end, self._chunk * len(self._memory)):
            for memory, at in zip(self._memory, range(first, end, self._chunk), strict=False):
                move(memory, path, at)
            self._handle.wait()
        return self._stretch.size / (perf_counter() - begin)


# ---------------------------------------------------- one pass over the same bytes, again and again


@contextmanager
def passes(
    folder: Path, chunk: int, size: int, engine: str, depth: int, fio: str | None, deepspeed: bool
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
        stretch = stored.stretch
        calls: dict[str, Callable[[], float]] = {
            "store write": stored.write,
            "store read": stored.read,
        }
        with (
            Alone(stretch, chunk, engine, depth) as alone,
            Alone(stretch, chunk, engine, depth, bare=True) as bare,
        ):
            others: dict[str, Callable[[str], float]] = {"engine": alone.rate, "bare": bare.rate}
            if fio:
                others |= {
                    f"fio {kind}": partial(run_fio, fio, stretch, kind, chunk, depth)
                    for kind in (*FIO, COLD, HUGE)
                }
            if deepspeed:
                others["deepspeed"] = DeepSpeed(stretch, chunk, depth).rate
            for name, call in others.items():
                for verb in ("write", "read"):
                    calls[f"{name} {verb}"] = partial(stored.aside, partial(call, verb))
            yield calls


class Stored:
    """Tensors of a store that are changed and written, evicted and read."""

    def __init__(self, store: TieredStore, size: int, tensor_bytes: int) -> None:
        self._store, self._size = store, size
        self._names = [f"t{i}" for i in range(size // tensor_bytes)]
        for name in self._names:
            store.put(name, torch.randint(0, 256, (tensor_bytes,), dtype=torch.uint8))
        for _ in range(TRIES):
            self._change()
            if (found := self._place()) and found.offset + size <= found.path.stat().st_size:
                self.stretch = found
                break
        else:
            raise InvalidArgument(
                f"--size is {size}: with a power of two the store's files have a stretch of that "
                "length"
            )

    def write(self) -> float:
        self._settle(here=False)
        self._dirty()
        return rate(self._size, lambda: self._store.flush().wait())

    def read(self) -> float:
        self._settle(here=True)
        self._store.evict(self._names).wait()
        return rate(self._size, lambda: self._store.prefetch(self._names).wait())

    def aside(self, call: Callable[[], float]) -> float:
        """While the stretch is free for others."""
        self._settle(here=False)
        return call()

    def _settle(self, *, here: bool) -> None:
        for _ in range(TRIES):
            if (self._place() == self.stretch) == here:
                return
            self._change()
        raise InvalidArgument(
            f"--size is {self._size}: with a power of two the store writes to two places by turns"
        )

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


class Alone:
    """An engine, checksums on, from as few buffers as fio has: one for each transfer at once. Or
    ``bare``: no checksums, and as much memory as the tensors have, which is in no cache: what
    memory and disk allow at that depth."""

    def __init__(
        self, stretch: Stretch, chunk: int, engine: str, depth: int, *, bare: bool = False
    ) -> None:
        self._layer, self._stretch, self._hashed = FileLayer(), stretch, not bare
        folder = self._layer.open_folder(stretch.path.parent)
        try:
            self._file = self._layer.open(folder, stretch.path.name, direct=stretch.direct)
        finally:
            self._layer.close(folder)
        self._engine, self._buffers = (
            engines.start(engine, self._layer, depth),
            Arena(stretch.size if bare else depth * chunk),
        )
        self._buffers.bytes.random_(0, 256)
        self._engine.register(self._buffers.whole())
        memory = self._buffers.whole()
        ends = range(0, stretch.size, chunk)
        self._pieces = [(stretch.offset + at, memory[at % len(memory) :][:chunk]) for at in ends]

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._layer.close(self._file)

    def rate(self, verb: str) -> float:
        write = verb == "write"
        move = partial(
            transfer_all, self._engine, self._file, self._pieces, write=write, hashed=self._hashed
        )
        return rate(self._stretch.size, move)


def rate(size: int, call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return size / (perf_counter() - begin)
