"""Walks through the package: the files that one call enters, and the lines of the functions it runs
there, in all threads that began while somebody looked."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import sources


class Walk:
    """``of`` one call: file of the package → numbers of the lines of its functions that were
    entered meanwhile."""

    def __init__(self) -> None:
        self._entered: set[CodeType] | None = None

    def of(self, call: Callable[[], object]) -> dict[str, set[int]]:
        self._entered = set()
        try:
            call()
        finally:
            entered, self._entered = self._entered, None
        return by_file(entered)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        entered = self._entered
        if event == "call" and entered is not None:
            entered.add(frame.f_code)


@contextmanager
def walking() -> Iterator[Walk]:
    """Look into this thread, and into those that begin from now on."""
    walk, before, before_here = Walk(), threading.getprofile(), sys.getprofile()
    threading.setprofile(walk._look)
    sys.setprofile(walk._look)
    try:
        yield walk
    finally:
        sys.setprofile(before_here)
        threading.setprofile(before)


def by_file(entered: set[CodeType]) -> dict[str, set[int]]:
    ours = {(sources.ROOT / path).resolve(): str(path) for path in sources.files()}
    found: dict[str, set[int]] = {}
    for code in entered:
        file = Path(code.co_filename).resolve()
        if file in ours:
            last = max(line for _, _, line in code.co_lines() if line)
            found.setdefault(ours[file], set()).update(range(code.co_firstlineno, last + 1))
    return found


def table(found: dict[str, set[int]]) -> str:
    """Files and lines, as the walk's test prints them."""
    rows = [f"{len(lines):5}  {name}" for name, lines in sorted(found.items())]
    return "\n".join([*rows, f"{sum(map(len, found.values())):5}  lines in {len(found)} files"])
