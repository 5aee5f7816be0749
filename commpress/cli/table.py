"""Aligned columns for people, units they know, JSON for programs."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commpress.errors import InvalidArgument

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column flush left, the others flush right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(line(row, widths) for row in [head, *rows])


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def parse_bytes(text: str) -> int:
    """'32MiB' or '1000000' as a number of bytes."""
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS:
        raise InvalidArgument(f"size is {text!r}, expected a number with KiB, MiB, GiB, KB, MB, GB or nothing")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def write_json(path: str, content: Any) -> None:
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def verdict(bars: Sequence[tuple[str, bool]]) -> int:
    """Say which bars hold; the exit status: 1 if one does not."""
    for what, holds in bars:
        print(f"{'ok  ' if holds else 'FAIL'}  {what}")
    return 0 if all(holds for _, holds in bars) else 1
