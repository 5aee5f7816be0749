"""how fast the tiered store reads and writes here, beside fio

Through the store's own calls, checksums on, with a depth of 4 unless said otherwise, for chunks of several sizes:
  write   flush: tensors that are newer in memory go to disk
  read    prefetch: tensors on disk come back and are verified
"engine" is the same transfers without the store, from as few buffers as fio has: one for each transfer at once, which stay in
the processor's cache while they are small; "bare" is the engine without checksums from as much memory as the tensors have: what
memory and disk allow. "fio" is the best of its engines io_uring, libaio and psync, at the same depth, if
fio is installed; "huge" is its io_uring with buffers in huge pages, as the store's memory is (where vm.nr_hugepages sets some
aside); "cold" is its io_uring with a buffer for every chunk, as tensors have, and so at a greater depth. All use the same
stretch of a file, in turns; medians.

  commpress bench io                                     in the current directory, about a minute
  commpress bench io --directory /nvme/tmp --size 2GiB   elsewhere, more bytes
  commpress bench io --engine io_uring --check           exit status 1 if the store is below 95 % of fio
  commpress bench io --deepspeed                         DeepSpeed's aio handle in turns with all this, as it comes
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from commpress.cli import outputs, rounds, table
from commpress.cli.io_passes import passes
from commpress.cli.io_peers import COLD, FIO, HUGE
from commpress.errors import InvalidArgument
from commpress.tiered_mem import FileLayer, engines, parse_bytes, show_bytes

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
    parser.add_argument("--deepspeed", action="store_true", help="run DeepSpeed's aio handle too, which must be installed")
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
        head = ["chunk", "", "store", "min-max", "engine", "bare", "fio", "its engine", "of fio", "huge", "cold"]
        widths = [7, 5, 6, 11, 6, 6, 6, 10, 6, 6, 6]
        if options.deepspeed:
            head, widths = [*head, "DeepSpeed"], [*widths, 9]
        print(table.line(head, widths))
        for chunk in chunks:
            transfers = passes(folder / f"{chunk}", chunk, size, engine, options.depth, fio, options.deepspeed)
            with transfers as calls, Progress(show_bytes(chunk)) as progress:
                figures = rounds.in_turns(calls, options.rounds, warm=1, progress=progress)
            shutil.rmtree(folder / f"{chunk}")
            for verb in ("write", "read"):
                row = summary(chunk, verb, figures)
                rows.append(row)
                print(table.line(cells_of(row)[: len(head)], widths), flush=True)
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
        "engine": median(figures[f"engine {verb}"]), "bare": median(figures[f"bare {verb}"]),
    }  # fmt: skip
    best = {kind: median(figures[f"fio {kind} {verb}"]) for kind in FIO if figures.get(f"fio {kind} {verb}")}
    if best:
        kind = max(best, key=lambda k: best[k])
        row |= {"fio": best[kind], "fio_engine": kind, "of_fio": median(ours) / best[kind], "fio_engines": best}
        row |= {key: median(figures[f"fio {of} {verb}"]) or None for key, of in (("huge", HUGE), ("cold", COLD))}
    if peer := figures.get(f"deepspeed {verb}"):
        row |= {"deepspeed": median(peer), "of_deepspeed": median(ours) / median(peer)}
    return row


def cells_of(row: dict[str, Any]) -> list[str]:
    span, of = f"{gb(row['low'])}-{gb(row['high'])}", f"{100 * row['of_fio']:.0f}%" if row.get("of_fio") else ""
    rates = [gb(row.get(key)) for key in ("store", "engine", "bare", "fio", "huge", "cold", "deepspeed")]
    return [show_bytes(row["chunk"]), row["verb"], rates[0], span, *rates[1:4], row.get("fio_engine", ""), of, *rates[4:]]


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
            panel.set_title(verb)
        panels[0].set_ylabel("chunk")
        charts.same_scale(panels)
