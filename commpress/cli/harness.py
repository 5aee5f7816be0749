"""Harness of every benchmark: rows that come from all ranks become a table, and --check and --json
use them."""

import argparse
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commpress import __version__
from commpress.cli import ranks
from commpress.cli.terminal import Table, write_json

T = TypeVar("T")
Bars = Sequence[tuple[str, bool]]
Cells = Callable[[Any], Mapping[str, str]]  # a row as its columns


def run(
    options: argparse.Namespace,
    bench: Callable[..., Iterator[Any]],
    cells: Cells,
    *,
    judge: Callable[[Any], Bars] | None = None,
) -> int:
    """The exit status of a benchmark: ``bench(rank, size, options)`` yields rows on all ranks, and
    text for people. Those of rank 0 are shown as they come."""
    rows = ranks.on_ranks(partial(_collected, bench), options, Table(cells))
    if rows is None:  # not rank 0 of a launcher
        return 0
    return deliver(options, rows, judge=judge)


def _collected(
    bench: Callable[..., Iterator[Any]],
    rank: int,
    size: int,
    options: argparse.Namespace,
    report: Callable[[Any], None],
) -> list[Any]:
    rows = []
    for row in bench(rank, size, options):
        report(row)
        if not isinstance(row, str):
            rows.append(row)
    return rows


# ---------------------------------------------------------------- interleaved timing


def interleaved(
    calls: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warm: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, list[T]]:
    """All that each call returned in ``rounds`` rounds, after ``warm`` more that do not count.

    Each round begins with another call, and every other one goes backwards: who is first after a
    pause may find a faster disk than who comes last, and who always follows the same neighbour
    always finds the caches that it leaves.
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


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """Seconds per call of several back to back."""
    start = perf_counter()
    for _ in range(times):
        call()
    return (perf_counter() - start) / max(times, 1)


def together(call: Callable[[], object], times: int = 1) -> float:
    """The same, which all ranks begin together."""
    dist.barrier()
    return seconds(call, times)


def slowest(figures: Mapping[str, list[Any]]) -> dict[str, torch.Tensor]:
    """Largest of every figure that a rank has."""
    took = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return dict(zip(figures, took, strict=True))


def medians(
    calls: Mapping[str, Callable[[], float]], rounds: int, *, warm: int = 0
) -> dict[str, float]:
    """Medians of what each call returned in ``rounds`` rounds on the slowest rank; collective."""
    return {
        name: float(took.median())
        for name, took in slowest(interleaved(calls, rounds, warm=warm)).items()
    }


# ---------------------------------------------------------------- on paper


def deliver(
    options: argparse.Namespace,
    rows: Collection[Any],
    *,
    judge: Callable[[Any], Bars] | None = None,
    **more: Any,
) -> int:
    """The exit status, after what --check and --json ask for.

    ``rows`` are dataclasses or dictionaries; ``more`` goes beside them into the file.
    """
    bars = list(judge(rows)) if judge is not None and options.check else []
    if options.json:
        content = {
            **machine(),
            "settings": settings(options),
            **more,
            "rows": list(map(row, rows)),
            "bars": bars,
        }
        write_json(options.json, content)
    if bars:
        print()
    return verdict(bars)


def verdict(bars: Bars) -> int:
    """Say which bars hold; the exit status: 1 if one does not."""
    for what, holds in bars:
        print(f"{'ok  ' if holds else 'FAIL'}  {what}")
    return 0 if all(holds for _, holds in bars) else 1


def row(measured: Any) -> Any:
    """A dataclass with its properties, as a dictionary."""
    if not is_dataclass(measured) or isinstance(measured, type):
        return measured
    derived = [name for name, value in vars(type(measured)).items() if isinstance(value, property)]
    return asdict(measured) | {name: getattr(measured, name) for name in derived}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if not callable(value)}


def machine() -> dict[str, Any]:
    return {
        "commpress": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }
