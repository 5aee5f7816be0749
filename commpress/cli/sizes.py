"""The sizes that a benchmark goes through, from the smallest to the largest by a factor."""

import argparse

from commpress.cli import table
from commpress.errors import InvalidArgument


def options(parser: argparse.ArgumentParser, least: str, most: str, *, factor: int = 2) -> None:
    parser.add_argument("--min-bytes", type=table.parse_bytes, default=least, metavar="SIZE", help=f"default {least}")
    parser.add_argument("--max-bytes", type=table.parse_bytes, default=most, metavar="SIZE", help=f"default {most}")
    parser.add_argument("--factor", type=int, default=factor, metavar="N", help=f"from one size to the next (default {factor})")


def chosen(options: argparse.Namespace) -> tuple[int, ...]:
    if not 4 <= options.min_bytes <= options.max_bytes or options.factor < 2:
        raise InvalidArgument(
            f"expected 4 <= --min-bytes <= --max-bytes and --factor >= 2, "
            f"got {options.min_bytes}, {options.max_bytes} and {options.factor}"
        )
    sizes = [options.min_bytes]
    while sizes[-1] * options.factor <= options.max_bytes:
        sizes.append(sizes[-1] * options.factor)
    return tuple(sizes)
