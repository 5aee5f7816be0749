"""Results that are kept in a file as they come: whoever stops a long benchmark loses one of them,
and goes on from there."""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from commpress.cli import terminal


def write(path: str | None, content: dict[str, Any]) -> None:
    """Whole or not at all; nothing without a path."""
    if path:
        terminal.write_json(f"{path}.part", content)
        Path(f"{path}.part").replace(path)


def read(path: str | None, key: str) -> list[dict[str, Any]]:
    """The entries of a file; none if it is not there."""
    if not path or not Path(path).exists():
        return []
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())[key]
    return found


class Runs:
    """Results by run: dataclasses of which ``result`` has its ``run``."""

    def __init__(self, path: str | None, run: type, result: type) -> None:
        self.path = path
        every = [result(**entry | {"run": run(**entry["run"])}) for entry in read(path, "runs")]
        self.done = {one.run: one for one in every}

    def of(
        self,
        runs: list[Any],
        train: Callable[[Any], Any],
        processes: int,
        tell: Callable[[Any], object] = lambda _: None,
    ) -> list[Any]:
        """Results in order; missing ones are trained, so many processes at once."""
        missing = [each for each in dict.fromkeys(runs) if each not in self.done]
        if processes <= 1:
            self._add(map(train, missing), tell)
        else:
            with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
                self._add(pool.map(train, missing), tell)
        return [self.done[each] for each in runs]

    def _add(self, found: Iterable[Any], tell: Callable[[Any], object]) -> None:
        for one in found:
            self.done[one.run] = one
            write(self.path, {"runs": [asdict(each) for each in self.done.values()]})
            tell(one)
