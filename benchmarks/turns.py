"""Variants of a training step, each in a process of its own: their steps alternate, so that what
else the machine does falls on all alike."""

import multiprocessing
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Steps = Generator[None, bool, Any]


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
