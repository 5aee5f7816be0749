"""Times of calls that take turns, so that the moods of a machine and a network hit all of them alike."""

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
MOST, ENOUGH = 15, 0.5  # repetitions of a short call, or fewer once they have taken so many seconds


def in_turns(
    calls: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warm: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, list[T]]:
    """What each call returned in each of ``rounds`` rounds, after ``warm`` more that do not count.

    Each round begins with another call, and every other one goes backwards: who is first after a pause may find a faster disk
    than who comes last, and who always follows the same neighbour always finds the caches that it leaves.
    """
    figures: dict[str, list[T]] = {name: [] for name in calls}
    names, total = list(calls), warm + rounds
    for turn in range(total):
        first = turn * max(len(names) // total, 1) % len(names)
        order = names[first:] + names[:first]
        for i, name in enumerate(order if turn % 2 == 0 else reversed(order)):
            if progress is not None:
                progress(name, (turn + i / len(names)) / total)
            figure = calls[name]()
            if turn >= warm:
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


def medians(figures: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(took.median()) for name, took in figures.items()}


def alternately(calls: Mapping[str, Callable[[], object]], *, least: int = 3, most: int = MOST) -> dict[str, float]:
    """Median seconds of each call on this rank alone, called in turn; once before, not timed."""
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


def wrong(buffer: torch.Tensor) -> int:
    """Elements whose bits are not those of rank 0, over all ranks."""
    first = buffer.clone()
    dist.broadcast(first, 0)
    count = (first.view(torch.int32) != buffer.view(torch.int32)).sum()
    dist.all_reduce(count)
    return int(count)
