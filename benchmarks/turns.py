"""Calls, and steps of processes of their own, that alternate, so that what else the machine does
falls on all alike."""

import multiprocessing
from collections.abc import Callable, Generator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from commpress.cli.harness import seconds

Steps = Generator[None, bool, Any]
MOST, ENOUGH = 15, 0.5  # repetitions of a short call, or fewer once they have taken so many seconds


def in_turns(
    names: Sequence[str], train: Callable[..., Steps], steps: int, *given: Any
) -> list[Any]:
    """Run ``train(name, *given)`` for every name, and return what each returns: a generator that
    yields before each step, and gets False in place of one at the end."""
    spawn, running = multiprocessing.get_context("spawn"), []
    for name in names:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(train, name, given, theirs), daemon=True)
        process.start()
        running.append((ours, process))
    for _ in range(steps):
        for ours, _ in running:
            ours.send(True)
            ours.recv()
    found = []
    for ours, process in running:
        ours.send(False)
        found.append(ours.recv())
        process.join()
    return found


def _serve(
    train: Callable[..., Steps], name: str, given: tuple[Any, ...], parent: Connection
) -> None:
    running = train(name, *given)
    next(running)
    try:
        while True:
            running.send(parent.recv())
            parent.send(None)
    except StopIteration as ended:
        parent.send(ended.value)


def resident() -> int:
    """Return the most bytes of memory that this process had (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10


def alternately(
    calls: Mapping[str, Callable[[], object]], *, least: int = 3, most: int = MOST
) -> dict[str, float]:
    """Median seconds of each call on this rank alone, interleaved; once before, not timed."""
    for call in calls.values():
        call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    first = next(iter(took.values()))
    while len(first) < most and (len(first) < least or sum(first) < ENOUGH):
        for name, call in calls.items():
            took[name].append(seconds(call))
    return {name: median(times) for name, times in took.items()}
