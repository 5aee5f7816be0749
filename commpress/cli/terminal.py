"""The terminal: tables and progress, in colour where somebody looks, else plain text."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import IO, Any

WIDE = 30  # characters of a bar
EVERY = 0.2  # seconds between two pictures of the same thing
STYLES = {"bold": 1, "red": 31, "green": 32, "yellow": 33}


def looked_at(stream: IO[str] | None) -> bool:
    """True if ``stream`` is a terminal that moves its cursor."""
    return (
        stream is not None
        and not stream.closed
        and stream.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def styled(text: str, style: str) -> str:
    """``text`` in bold, green, yellow or red on a terminal."""
    if not looked_at(sys.stdout) or "NO_COLOR" in os.environ:
        return text
    return f"\033[{STYLES[style]}m{text}\033[0m"


def bar(share: float, width: int = WIDE) -> str:
    return f"{'█' * round(width * min(max(share, 0.0), 1.0)):<{width}}"


# ---------------------------------------------------------------- tables


def table(rows: Sequence[Mapping[str, str]], *, best: int = -1) -> str:
    """Rows that name their columns, the first flush left; ``best``: the row that stands out."""
    every = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = [line(row, widths) for row in every]
    return "\n".join(
        styled(text, "green") if i == best + 1 > 0 else text for i, text in enumerate(lines)
    )


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first.strip().ljust(widths[0]), *rest]).rstrip()


class Table:
    """A table that is printed as its rows are measured; text goes before it. ``cells`` names the
    columns of a row, and the first one says how wide they are."""

    def __init__(self, cells: Callable[[Any], Mapping[str, str]]) -> None:
        self.cells, self.widths = cells, list[int]()

    def __call__(self, row: Any) -> None:
        if isinstance(row, str):
            print(row, flush=True)
            return
        cells = self.cells(row)
        if not self.widths:
            self.widths = [max(len(name), len(cell) + 1) for name, cell in cells.items()]
            self.widths[0] = max(self.widths[0], 9)
            print(styled(line(list(cells), self.widths), "bold"))
        print(line(list(cells.values()), self.widths), flush=True)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph within 100 columns, or those of a narrower terminal."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    filled = textwrap.fill(
        text, width - len(indent), break_long_words=False, break_on_hyphens=False
    )
    return textwrap.indent(filled, indent)


def say(text: str) -> None:
    """Print a paragraph within 100 columns."""
    print(wrapped(text))


def picture(path: str, draw: Callable[[str], object]) -> None:
    """Draw it and say where it is, or say what is missing."""
    if find_spec("matplotlib") is None:
        print("\nno picture: it needs matplotlib (pip install 'commpress[demo]')")
    else:
        draw(path)
        print(f"\npicture: {Path(path).resolve()}")


def write_json(path: str, content: Any) -> None:
    Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n")


# ---------------------------------------------------------------- what is under way


class ProgressBar:
    """A bar on a terminal; elsewhere ``lines`` lines until all is done."""

    def __init__(self, title: str, *, lines: int = 0) -> None:
        self.title, self.lines, self.shown, self.last = title, lines, 0, 0.0
        self.terminal, self.start = looked_at(sys.stderr), perf_counter()

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, share: float, what: str) -> None:
        now = perf_counter()
        if self.terminal:
            if now - self.last < EVERY / 4 and share < 1:
                return
            self.last = now
            left = (now - self.start) * (1 / max(share, 1e-9) - 1)
            time = f" {left // 60:.0f}:{left % 60:02.0f} left" if share > 0 else ""
            self._write(f"{self.title} |{bar(share)}|{time} {what}")
        elif share * self.lines >= self.shown + 1:
            self.shown = int(share * self.lines)
            print(f"{self.title} {what}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.terminal:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
