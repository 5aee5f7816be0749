"""Weigh the repository: tokens and lines of each room, public names and their options.

    python tests/weigh.py                 this tree
    python tests/weigh.py FOLDER          another checkout, beside it

Tokens are Python's, without comments, docstrings and line ends: neither long lines nor packing
helps. ``make weigh`` runs it.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("collectives", "commpress", "integrations", "kernels", "tiered_mem")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
MOST = 12  # options of a public call


def room(path: Path) -> str:
    """Two folders deep inside the product and the tests, one elsewhere."""
    first, *rest = path.parts[:-1] or (path.name,)
    deeper = first in ("commpress", "integrations", "tests") and rest
    return f"{first}/{rest[0]}" if deeper else first


def tokens(source: str) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    strings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            strings.add((node.body[0].lineno, node.body[0].col_offset))
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(each.type not in LAYOUT and each.start not in strings for each in found)


def weigh(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Tokens and lines, by room, of the Python files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.split()
    counted, lines = Counter(), Counter()
    for path in map(Path, listed):
        source = (folder / path).read_text()
        counted[room(path)] += tokens(source)
        lines[room(path)] += len(source.splitlines())
    return counted, lines


def options() -> dict[str, int]:
    """Options of every public call of the installed commpress: arguments with a default."""
    import inspect

    import commpress

    found = {}
    for name in commpress.__all__:
        taker = getattr(commpress, name)
        if callable(taker) and not (isinstance(taker, type) and issubclass(taker, Exception)):
            parameters = inspect.signature(taker).parameters.values()
            found[name] = sum(each.default is not each.empty for each in parameters)
    return found


def table(folders: list[Path]) -> str:
    weights = [weigh(folder) for folder in folders]
    rooms = sorted({name for counted, _ in weights for name in counted})
    rows = [["room", *(head for _ in folders for head in ("tokens", "lines"))]]
    sums = {"product": PRODUCT, "tests": ("tests",), "all": ("",)}
    for name in [*rooms, *sums]:
        row = [name]
        for counted, lines in weights:
            for each in (counted, lines):
                value = each[name]
                if name in sums:
                    value = sum(n for r, n in each.items() if r.startswith(sums[name]))
                row.append(f"{value:,}")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


if __name__ == "__main__":
    print(table([*map(Path, sys.argv[1:]), ROOT]))
    found = options()
    large = {name: count for name, count in found.items() if count > MOST}
    print(f"\n{len(found)} public calls; more than {MOST} options: {large}")
