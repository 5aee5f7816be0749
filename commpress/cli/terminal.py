"""The terminal: tables, bars and progress in colour where somebody looks and ``rich`` is installed,
else plain text."""

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from time import perf_counter
from types import TracebackType
from typing import IO, Any

from commpress.errors import InvalidArgument

WIDE = 30  # characters of a bar
EVERY = 0.2  # seconds between two pictures of the same thing


def colourful(stream: IO[str] | None) -> bool:
    """True if ``stream`` is a terminal that moves its cursor, and ``rich`` is there."""
    return looked_at(stream) and find_spec("rich") is not None


def looked_at(stream: IO[str] | None) -> bool:
    return (
        stream is not None
        and not stream.closed
        and stream.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def coloured(text: str, colour: str) -> str:
    """``text`` in green, yellow or red on a terminal."""
    if not colourful(sys.stdout) or "NO_COLOR" in os.environ:
        return text
    return f"\033[{dict(red=31, green=32, yellow=33)[colour]}m{text}\033[0m"


def bar(share: float, width: int = WIDE) -> str:
    return f"{'█' * round(width * min(max(share, 0.0), 1.0)):<{width}}"


# ---------------------------------------------------------------- tables


def render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column flush left, the others flush right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(line(row, widths) for row in [head, *rows])


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def show(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    best: Collection[int] = (),
    left: Collection[int] = (0,),
) -> None:
    """Print a table; ``best``: rows that stand out; ``left``: columns that are flush left."""
    if not colourful(sys.stdout):
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        for row in [head, *rows]:
            cells = (
                c.ljust(w) if i in left else c.rjust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            print("  ".join(cells).rstrip())
        return
    from rich.console import Console

    Console().print(_table(head, rows, best, left))


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], best: Collection[int], left: Collection[int]
) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(  # as wide as plain text: two spaces between columns
        box=box.SIMPLE_HEAD,
        header_style="bold",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i in left else "right", no_wrap=True)
    for i, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold green" if i in best else None)
    return table


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """A paragraph within 100 columns, or those of a narrower terminal; ``first`` begins it,
    ``indent`` its other lines."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    return "\n".join(
        textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def say(text: str) -> None:
    """Print a paragraph within 100 columns."""
    print(wrapped(text))


class Table:
    """A table that is printed as its rows are measured; text goes before it."""

    def __init__(
        self, head: Sequence[str], widths: Sequence[int], cells: Callable[[Any], Sequence[str]]
    ) -> None:
        self.head: Sequence[str] | None = head
        self.cells, self.widths = (
            cells,
            [max(width, len(word)) for width, word in zip(widths, head, strict=True)],
        )

    def __call__(self, row: Any) -> None:
        if isinstance(row, str):
            print(row, flush=True)
            return
        if self.head is not None:
            text = line(self.head, self.widths)
            print(f"\033[1m{text}\033[0m" if colourful(sys.stdout) else text)
            self.head = None
        print(line(self.cells(row), self.widths), flush=True)


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
            colour, end = ("\033[32m", "\033[0m") if colourful(sys.stderr) else ("", "")
            sys.stderr.write(f"\r\033[K{self.title} |{colour}{bar(share)}{end}|{time} {what}")
            sys.stderr.flush()
        elif share * self.lines >= self.shown + 1:
            self.shown = int(share * self.lines)
            print(f"{self.title} {what}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


@contextmanager
def working(what: str) -> Iterator[None]:
    """A sign of life with the seconds so far, below all that is printed meanwhile, where somebody
    looks."""
    if not (colourful(sys.stdout) and colourful(sys.stderr)):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield


class LiveTable:
    """A table that changes while it is looked at; elsewhere nothing is shown: ``said`` prints a
    line there."""

    def __init__(self, head: Sequence[str], *, left: Collection[int] = (0,)) -> None:
        self.head, self.left, self.last = head, left, 0.0
        self._live: Any = None
        if colourful(sys.stdout):
            from rich.live import Live

            self._live = Live(auto_refresh=False)

    def __enter__(self) -> "LiveTable":
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(
        self,
        rows: Callable[[], Sequence[Sequence[str]]],
        *,
        best: Collection[int] = (),
        now: bool = False,
    ) -> None:
        if self._live is None or (not now and perf_counter() - self.last < EVERY):
            return
        self.last = perf_counter()
        self._live.update(_table(self.head, rows(), best, self.left), refresh=True)

    def said(self, text: str) -> None:
        """A line for who reads a log."""
        if self._live is None:
            print(text, flush=True)


def check_picture(path: str, kinds: Sequence[str]) -> None:
    if not path.endswith(tuple(kinds)):
        raise InvalidArgument(
            f"the picture's name is {path!r}, expected one that ends in {', '.join(kinds)}"
        )
