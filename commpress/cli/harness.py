"""Harness of every benchmark: calls interleaved on all ranks, rows become a table, and --check, --json and --plot use them."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commpress import __version__
from commpress.cli import ranks
from commpress.errors import InvalidArgument, MissingPackage
from commpress.tiered_mem import parse_bytes

T = TypeVar("T")
Bars = Sequence[tuple[str, bool]]
PICTURES = (".png", ".svg", ".pdf")
MOST, ENOUGH = 15, 0.5  # repetitions of a short call, or fewer once they have taken so many seconds


def run(
    options: argparse.Namespace,
    bench: Callable[..., Any],
    *,
    judge: Callable[[Any], Bars],
    draw: Callable[[str, Any], None],
    report: Callable[[Any], None] = print,
    summary: Callable[[Any], str] | None = None,
) -> int:
    """The exit status of ``bench(rank, size, options, report)`` on all ranks, whose result on rank 0 is the rows.

    ``report`` is called with what rank 0 reports, ``summary`` says what is printed of all rows at the end.
    """
    rows = ranks.on_ranks(bench, options, report)
    if rows is None:  # not rank 0 of a launcher
        return 0
    if summary is not None:
        print(summary(rows))
    return deliver(options, rows, judge=judge, draw=draw)


# ---------------------------------------------------------------- options


def add_options(parser: argparse.ArgumentParser, *, check: str | None = None) -> None:
    """``check`` goes on from "exit status 1 unless"; commands without bars have none."""
    if check is not None:
        parser.add_argument("--check", action="store_true", help=f"exit status 1 unless {check.replace('%', '%%')}")
    parser.add_argument("--json", metavar="FILE", help="all rows, with settings and versions")
    parser.add_argument("--plot", metavar="FILE", help="a picture of it: .png, .svg or .pdf (needs matplotlib)")


def refuse_early(options: argparse.Namespace) -> None:
    """A picture that cannot be drawn is refused before minutes of measuring."""
    path = getattr(options, "plot", None)
    if path is None:
        return
    if Path(path).suffix not in PICTURES:
        raise InvalidArgument(f"--plot is {path!r}, expected a name that ends in {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise MissingPackage("--plot needs matplotlib: pip install 'commpress[demo]'")


def add_sizes(parser: argparse.ArgumentParser, least: str, most: str, *, factor: int = 2) -> None:
    parser.add_argument("--min-bytes", type=parse_bytes, default=least, metavar="SIZE", help=f"default {least}")
    parser.add_argument("--max-bytes", type=parse_bytes, default=most, metavar="SIZE", help=f"default {most}")
    parser.add_argument("--factor", type=int, default=factor, metavar="N", help=f"from one size to the next (default {factor})")


def sizes_of(options: argparse.Namespace) -> tuple[int, ...]:
    """From the smallest to the largest by a factor."""
    if not 4 <= options.min_bytes <= options.max_bytes or options.factor < 2:
        raise InvalidArgument(
            f"expected 4 <= --min-bytes <= --max-bytes and --factor >= 2, "
            f"got {options.min_bytes}, {options.max_bytes} and {options.factor}"
        )
    sizes = [options.min_bytes]
    while sizes[-1] * options.factor <= options.max_bytes:
        sizes.append(sizes[-1] * options.factor)
    return tuple(sizes)


# ---------------------------------------------------------------- interleaved timing


def interleaved(
    calls: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warm: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, list[T]]:
    """All that each call returned in ``rounds`` rounds, after ``warm`` more that do not count.

    Each round begins with another call, and every other one goes backwards: who is first after a pause may find a faster disk
    than who comes last, and who always follows the same neighbour always finds the caches that it leaves.
    """
    figures: dict[str, list[T]] = {name: [] for name in calls}
    names, total = list(calls), warm + rounds
    for done in range(total):
        first = done * max(len(names) // total, 1) % len(names)
        order = names[first:] + names[:first]
        for i, name in enumerate(order if done % 2 == 0 else reversed(order)):
            if progress is not None:
                progress((done + i / len(names)) / total, name)
            figure = calls[name]()
            if done >= warm:
                figures[name].append(figure)
    return figures


def together(call: Callable[[], object], times: int = 1) -> float:
    """Seconds per call of several back to back, which all ranks begin together."""
    dist.barrier()
    start = perf_counter()
    for _ in range(times):
        call()
    return (perf_counter() - start) / max(times, 1)


def slowest(figures: Mapping[str, list[Any]]) -> dict[str, torch.Tensor]:
    """Of every figure the largest that a rank has."""
    took = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return dict(zip(figures, took, strict=True))


def medians(calls: Mapping[str, Callable[[], float]], rounds: int, *, warm: int = 0) -> dict[str, float]:
    """Of what each call returned in ``rounds`` rounds on the slowest rank; collective."""
    return {name: float(took.median()) for name, took in slowest(interleaved(calls, rounds, warm=warm)).items()}


def alternately(calls: Mapping[str, Callable[[], object]], *, least: int = 3, most: int = MOST) -> dict[str, float]:
    """Median seconds of each call on this rank alone, interleaved; once before, not timed."""
    for call in calls.values():
        call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    first = next(iter(took.values()))
    while len(first) < most and (len(first) < least or sum(first) < ENOUGH):
        for name, call in calls.items():
            start = perf_counter()
            call()
            took[name].append(perf_counter() - start)
    return {name: median(times) for name, times in took.items()}


class ProgressBar:
    """A bar on a terminal; elsewhere ``lines`` lines until all is done."""

    def __init__(self, title: str, *, lines: int = 0) -> None:
        self.title, self.lines, self.shown = title, lines, 0
        self.terminal, self.start = sys.stderr.isatty(), perf_counter()

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, share: float, what: str) -> None:
        if self.terminal:
            left = (perf_counter() - self.start) * (1 / max(share, 1e-9) - 1)
            time = f" {left // 60:.0f}:{left % 60:02.0f} left" if share > 0 else ""
            sys.stderr.write(f"\r\033[K{self.title} |{'█' * round(30 * share):<30}|{time} {what}")
            sys.stderr.flush()
        elif share * self.lines >= self.shown + 1:
            self.shown = int(share * self.lines)
            print(f"{self.title} {what}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.terminal:
            sys.stderr.write("\r\033[K")


# ---------------------------------------------------------------- on paper


def render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column flush left, the others flush right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(line(row, widths) for row in [head, *rows])


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


class Table:
    """A table that is printed as its rows are measured; text goes before it."""

    def __init__(self, head: Sequence[str], widths: Sequence[int], cells: Callable[[Any], Sequence[str]]) -> None:
        self.head: Sequence[str] | None = head
        self.cells, self.widths = cells, [max(width, len(word)) for width, word in zip(widths, head, strict=True)]

    def __call__(self, row: Any) -> None:
        if isinstance(row, str):
            print(row, flush=True)
            return
        if self.head is not None:
            print(line(self.head, self.widths))
            self.head = None
        print(line(self.cells(row), self.widths), flush=True)


def deliver(
    options: argparse.Namespace,
    rows: Collection[Any],
    *,
    judge: Callable[[Any], Bars] | None = None,
    draw: Callable[[str, Any], None] | None = None,
    **more: Any,
) -> int:
    """The exit status, after what --check, --json and --plot ask for.

    ``rows`` are dataclasses or dictionaries; ``more`` goes beside them into the file.
    """
    bars = list(judge(rows)) if judge is not None and options.check else []
    if options.json:
        content = {**machine(), "settings": settings(options), **more, "rows": list(map(row, rows)), "bars": bars}
        write_json(options.json, content)
    if draw is not None and options.plot:
        draw(options.plot, rows)
        print(f"plot: {options.plot}")
    if bars:
        print()
    return verdict(bars)


def verdict(bars: Bars) -> int:
    """Say which bars hold; the exit status: 1 if one does not."""
    for what, holds in bars:
        print(f"{'ok  ' if holds else 'FAIL'}  {what}")
    return 0 if all(holds for _, holds in bars) else 1


def write_json(path: str, content: Any) -> None:
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def row(measured: Any) -> Any:
    """A dataclass with its properties, as a dictionary."""
    if not is_dataclass(measured) or isinstance(measured, type):
        return measured
    derived = [name for name, value in vars(type(measured)).items() if isinstance(value, property)]
    return asdict(measured) | {name: getattr(measured, name) for name in derived}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if not callable(v)}


def machine() -> dict[str, Any]:
    return {
        "commpress": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "processor": platform.machine(), "cores": os.cpu_count(),
    }  # fmt: skip
