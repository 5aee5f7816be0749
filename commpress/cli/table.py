"""Aligned columns for people, units they know, JSON for programs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from commpress.tiered_mem import parse_bytes as parse_bytes
from commpress.tiered_mem import show_bytes as show_bytes


def render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column flush left, the others flush right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(line(row, widths) for row in [head, *rows])


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


class Lines:
    """A table that is printed as its rows are measured: the head for the row None, with a title, then a line for each row."""

    def __init__(self, head: Sequence[str], widths: Sequence[int], cells: Callable[[Any], Sequence[str]]) -> None:
        self.head, self.cells = head, cells
        self.widths = [max(width, len(word)) for width, word in zip(widths, head, strict=True)]

    def __call__(self, row: Any, title: object = None) -> None:
        if row is None:
            print(f"# {title}\n{line(self.head, self.widths)}", flush=True)
        else:
            print(line(self.cells(row), self.widths), flush=True)


def write_json(path: str, content: Any) -> None:
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def verdict(bars: Sequence[tuple[str, bool]]) -> int:
    """Say which bars hold; the exit status: 1 if one does not."""
    for what, holds in bars:
        print(f"{'ok  ' if holds else 'FAIL'}  {what}")
    return 0 if all(holds for _, holds in bars) else 1
