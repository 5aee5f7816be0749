"""Options, their kinds, and groups that several commands share. Nothing here loads torch: help is
shown at once.

A kind is a function of a text that returns the value or raises; its error is what the command says.
"""

import argparse
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from difflib import get_close_matches
from functools import wraps
from importlib.util import find_spec
from inspect import cleandoc
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from commpress.documents import read_json
from commpress.errors import CommpressError, InvalidArgument, MissingPackage
from commpress.units import (
    parse_bytes,
    parse_count,
    parse_link,
    parse_memory,
    parse_nodes,
    parse_rate,
    parse_time,
)

T = TypeVar("T")
Kind = Callable[[str], object]

PICTURES = (".png", ".svg", ".pdf")
FILES = ("json", "plot", "out")  # options that name a file which is written at the end
# of commpress doctor
SECTIONS = ("torch", "backends", "MPI", "GPU", "NUMA", "memory", "disks", "network")
HEADS = 4  # of the small model that commands train


def option(
    to: Any, name: str, kind: Kind | None = None, default: object = None, says: str = ""
) -> None:
    """Add an option by the name that help shows, ``--rounds N``; a name alone is a switch. The help
    text ends with the default, unless it tells of one itself."""
    flag, _, metavar = name.partition(" ")
    if default not in (None, "") and "default" not in says:
        says += f" (default {default})"
    says = says.strip().replace("%", "%%")
    if metavar:
        to.add_argument(flag, type=told(kind or str), default=default, metavar=metavar, help=says)
    else:
        to.add_argument(flag, action="store_true", help=says)


def told(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as argparse takes it: the error is what the command says."""

    @wraps(parse)
    def convert(text: str) -> T:
        try:
            return parse(text)
        except CommpressError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


# ---------------------------------------------------------------- kinds


def refused(text: str, expected: str) -> InvalidArgument:
    return InvalidArgument(f"got {text!r}, expected {expected}")


def checked(parse: Kind) -> Callable[[str], str]:
    """The text itself, if ``parse`` takes it."""

    def convert(text: str) -> str:
        parse(text)
        return text

    return convert


def word(name: str) -> Callable[[str], str]:
    """The text itself, if the function of ``refusals`` takes it."""

    def convert(text: str) -> str:
        from commpress.cli import refusals

        getattr(refusals, name)(text)
        return text

    return convert


def at_least(least: int, most: int = 10**18) -> Callable[[str], int]:
    says = f"a whole number of at least {least}" + (f" and at most {most}" if most < 10**18 else "")

    def convert(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or not least <= int(text) <= most:
            raise refused(text, says)
        return int(text)

    return convert


def where(parse: Kind, holds: Callable[[Any], object], expected: str) -> Kind:
    """Kind of a text that ``parse`` takes, where ``holds`` of the result."""

    def convert(text: str) -> object:
        with suppress(ValueError):
            if holds(found := parse(text)):
                return found
        raise refused(text, expected)

    return convert


def some_of(known: Collection[str]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        for name in text.split(","):
            if name not in known:
                raise refused(name, f"some of {', '.join(known)}{meant(name, known)}")
        return text

    return convert


def meant(word: str, known: Collection[str]) -> str:
    close = get_close_matches(word, known, 1)
    return f": did you mean {close[0]!r}?" if close else ""


def counts(text: str) -> list[int]:
    """Positive numbers of '1,2,4'."""
    if not re.fullmatch(r"\s*0*[1-9]\d{0,17}\s*(,\s*0*[1-9]\d{0,17}\s*)*", text, re.ASCII):
        raise refused(text, "positive numbers such as 1,2,4,8")
    return [int(part) for part in text.split(",")]


def readable(what: str) -> Callable[[str], str]:
    """The name of a file that is there."""

    def convert(text: str) -> str:
        if os.path.isdir(text) or not os.access(text, os.R_OK):
            raise InvalidArgument(f"{text!r} cannot be read, expected {what}")
        return text

    return convert


def read_config(path: str) -> dict[str, Any]:
    """The content of a model's config.json."""
    content = read_json(path, 1 << 20, "the config.json of a model")
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InvalidArgument(
            f"{path} names no model_type, expected the config.json of a Hugging Face model"
        )
    return content


KINDS: dict[str, Kind] = {  # of tables
    "": str,
    "int": int,
    "amount": where(float, lambda x: 0 <= x < inf, "a number of at least 0"),
    "bytes": parse_bytes,
    "config": checked(read_config),
    "counts": counts,
    "device": where(
        str,
        lambda text: text == "cpu" or parse_link(text),
        "cpu or a memory bandwidth such as 900GB/s",
    ),
    "factory": where(
        str,
        re.compile("[^:]+:[^:]+").fullmatch,
        "module:function, such as mymodels:make_gpt",
    ),
    "folder": where(
        Path,
        lambda path: path.is_dir() and os.access(path, os.W_OK),
        "a folder that is there and can be written",
    ),
    "large": where(parse_bytes, lambda n: n >= 1024, "at least 1KiB"),
    "link": checked(parse_link),
    "links": readable("what commpress probe wrote"),
    "memory": parse_memory,
    "names": lambda text: [name.strip() for name in text.split(",") if name.strip()],
    "nodes": checked(parse_nodes),
    "parameters": where(parse_count, lambda n: n >= 1000, "at least 1000 parameters"),
    "path": Path,
    "positive": where(float, lambda x: 0 < x < inf, "a number above 0"),
    "rate": parse_rate,
    "sections": some_of(SECTIONS),
    "size": checked(parse_bytes),
    "sizes": lambda text: list(map(parse_bytes, text.split(","))),
    "time": parse_time,
    "width": where(
        at_least(1, 1 << 14), lambda n: n % HEADS == 0, f"a width that {HEADS} heads share"
    ),
}


def kind_of(name: str) -> Kind:
    """Kind that a table names: one of ``KINDS``, ``refused by`` a function of ``refusals``, or
    whole numbers from ``1..`` or ``1..250``."""
    if name.startswith("refused by "):
        return word(name.removeprefix("refused by "))
    if ".." in name:
        least, _, most = name.partition("..")
        return at_least(int(least), int(most or 10**18))
    return KINDS[name]


def declare(parser: argparse.ArgumentParser, table: str) -> None:
    """Add the options of a table to a command.

        --rounds N | 1.. | 5 | of each measurement
        [machines]
        @cluster

    A line is the name as help shows it, the kind, the default and what it is, continued where the
    next one is indented. A name in brackets begins a group of help; ``@cluster`` stands for the
    table of that name. A name without dashes is an argument by its place.
    """
    to: Any = parser
    for line in re.sub(r"\n +", " ", cleandoc(table)).splitlines():
        if line.startswith("@"):
            declare(parser, TABLES[line[1:]])
        elif line.startswith("["):
            to = parser.add_argument_group(line[1:-1])
        else:
            name, kind, default, says = (cell.strip() for cell in line.split("|", 3))
            _declare(to, name, kind, default, says)


def _declare(to: Any, name: str, kind: str, default: str, says: str) -> None:
    flag, _, metavar = name.partition(" ")
    if flag == "command":
        to.add_argument(flag, nargs="*", metavar="-- COMMAND", help=says)
    elif not flag.startswith("--"):
        to.add_argument(flag, type=told(kind_of(kind)), metavar=metavar, help=says)
    elif kind.startswith("{"):
        to.add_argument(flag, choices=kind[1:-1].split(","), default=default, help=says)
    else:
        if default.strip("'") and "default" not in says:
            says += f" (default {default})"
        value: object = default.strip("'") if default else None
        # words of ``refusals`` stay what they are: looking them up loads numpy
        if default and not kind.startswith("refused by "):
            value = kind_of(kind)(default.strip("'"))
        option(to, name, kind_of(kind), value, says)


# ---------------------------------------------------------------- files that are written


def check_picture(name: str, path: str) -> None:
    if Path(path).suffix not in PICTURES:
        raise InvalidArgument(
            f"--{name} is {path!r}, expected a name that ends in {', '.join(PICTURES)}"
        )
    if find_spec("matplotlib") is None:
        raise MissingPackage(f"--{name} needs matplotlib: pip install 'commpress[demo]'")


def refuse_early(options: argparse.Namespace) -> None:
    """Files that cannot be written and pictures that cannot be drawn, before minutes of
    measuring."""
    for name in FILES:
        if not (path := getattr(options, name, None)):
            continue
        home = os.path.dirname(path) or "."
        written = path if os.path.exists(path) else home
        if os.path.isdir(path) or not os.path.isdir(home) or not os.access(written, os.W_OK):
            raise InvalidArgument(
                f"--{name} is {path!r}, expected the name of a file in a folder that is there and "
                "can be written"
            )
        if name == "plot":
            check_picture(name, path)


# ---------------------------------------------------------------- tables of several commands

TABLES = {
    "json": """
        --json FILE | | | all rows, with settings and versions
    """,
    "ranks": """
        --ranks N | 2.. | 4 | local processes (default 4); a launcher's own number wins
        --threads N | 1.. | 1 | of each rank
    """,
    "training": """
        --length N | 1.. | 64 | bytes of text in a window
        --width N | width | 384 | of the model
        --layers N | 1.. | 6 | of the model
    """,
    "train": """
        --ways A,B | refused by variants_of | compute,plain,bf16,powersgd1,sign | default
            compute,plain,bf16,powersgd1,sign; compute is always measured
        --bucket-mb MB | positive | 25.0 | of DDP; PowerSGD's hook has one bucket
        --rounds N | 1.. | 5 | of every variant
        --steps N | 1.. | 4 | of each round
        --batch N | 1.. | 4 | windows per rank and step
        @training
        @ranks
    """,
    "topology": """
        --topology NODES | refused by topology | auto | nodes x ranks as 2x4, sizes as 4,4,3, ranks
            as '0 2|1 3', or what the launcher says
    """,
    "links": """
        --rate RATE | rate | | of each host's link, as 100mbit (default: as fast as this machine)
        --delay TIME | time | 0s | of each link, one way, as 20ms (default none)
    """,
    "cluster": """
        [machines]
        --nodes NxR | nodes | 4x1 | nodes x ranks per node
        --link RATE,TIME | link | | of a node: rate and one-way latency (default 1gbit,100us)
        --links FILE | links | | what commpress probe wrote, for --nodes, --link and --inside
        --inside RATE,TIME | link | | of all ranks of a node among themselves (default
            40gbit,20us; else 200GB/s,5us)
        --device D | device | cpu | cpu: what kernels take here, measured now; or an accelerator's
            memory bandwidth, 900GB/s
        --cores N | amount | 0 | of each node, for its ranks (default: enough)
    """,
    "io": """
        --directory D | folder | . | on the disk to measure
        --chunks A,B | sizes | 1MiB,4MiB,16MiB,64MiB |
        --size SIZE | size | 512MiB | bytes written and read per figure
        --rounds N | 1.. | 5 | of everything
        --depth N | 1.. | 4 | transfers at once
        --engine | {auto,io_uring,threads,libaio,aiofiles} | auto | (default auto)
    """,
    "model": """
        [model]
        --parameters N | parameters | | a transformer of about so many, as 110M
        --model M:F | factory | | what calling F of the Python module M returns, a torch.nn.Module
        --config FILE | config | | config.json of a Hugging Face model
        --compute-ms T | positive | | of a step on a rank of its own, without communication
    """,
}


def sizes_of(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the sizes, each ``factor`` times the one before it."""
    if not 4 <= options.min_bytes <= options.max_bytes:
        raise InvalidArgument(
            f"expected 4 <= --min-bytes <= --max-bytes, got {options.min_bytes} and "
            f"{options.max_bytes}"
        )
    sizes = [options.min_bytes]
    while sizes[-1] * options.factor <= options.max_bytes:
        sizes.append(sizes[-1] * options.factor)
    return tuple(sizes)
