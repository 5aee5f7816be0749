"""What every benchmark does with what it measured: ``--check`` judges it, ``--json`` writes it, ``--plot`` draws it."""

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from commpress import __version__
from commpress.cli import table
from commpress.errors import InvalidArgument, MissingPackage

Bars = Sequence[tuple[str, bool]]
PICTURES = (".png", ".svg", ".pdf")


def options(parser: argparse.ArgumentParser, *, check: str) -> None:
    """``check`` goes on from "exit status 1 unless"."""
    parser.add_argument("--check", action="store_true", help=f"exit status 1 unless {check}")
    parser.add_argument("--json", metavar="FILE", help="everything measured, with settings and versions")
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


def deliver(
    options: argparse.Namespace,
    rows: Sequence[Any] | None,
    *,
    judge: Callable[[], Bars],
    draw: Callable[[str], None],
    **more: Any,
) -> int:
    """The exit status. ``rows`` are dataclasses or dictionaries, None if they are written already; ``more`` goes beside."""
    bars = list(judge()) if options.check else []
    if options.json and rows is not None:
        content = {**machine(), "settings": settings(options), **more, "rows": list(map(row, rows)), "bars": bars}
        table.write_json(options.json, content)
    if options.plot:
        draw(options.plot)
        print(f"plot: {options.plot}")
    if bars:
        print()
    return table.verdict(bars)


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
