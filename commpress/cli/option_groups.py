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
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile, ZipFile

from commpress.documents import read_json
from commpress.errors import CommpressError, InvalidArgument, MissingPackage
from commpress.units import parse_bytes, parse_count, parse_link, parse_nodes

T = TypeVar("T")
Kind = Callable[[str], object]

# contents of files
GRADIENTS = "{n: p.grad for n, p in model.named_parameters()} that torch.save wrote"
PICTURES = (".png", ".svg", ".pdf")
FILES = ("json", "plot", "out")  # options that name a file which is written at the end
# of commpress doctor
SECTIONS = ("torch", "backends", "MPI", "GPU", "NUMA", "memory", "disks", "network", "clocks")
HEADS = 4  # of the small model that commands train


def option(
    to: Any,
    name: str,
    kind: Kind | None = None,
    default: object = None,
    says: str = "",
    **more: Any,
) -> None:
    """Add an option by the name that help shows, ``--rounds N``; a name alone is a switch. The help
    text ends with the default, unless it tells of one itself."""
    flag, _, metavar = name.partition(" ")
    if default not in (None, "") and "default" not in says:
        says += f" (default {default})"
    if metavar:
        more |= {"type": told(kind or str), "default": default, "metavar": metavar}
    else:
        more |= {"action": "store_true"}
    to.add_argument(flag, help=says.strip().replace("%", "%%"), **more)


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


natural, from_zero, several = at_least(1), at_least(0), at_least(2)


def from_(least: float, says: str = "") -> Callable[[str], float]:
    """A number of at least ``least``."""

    def convert(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if not least <= found < float("inf"):
            raise refused(text, says or f"a number of at least {least:g}")
        return found

    return convert


positive = from_(5e-324, "a number above 0")


def large(text: str) -> int:
    """Bytes of at least a KiB."""
    if (found := parse_bytes(text)) < 1024:
        raise refused(text, "at least 1KiB")
    return found


def shared_width(text: str) -> int:
    """A width of the small model."""
    width = at_least(1, 1 << 14)(text)
    if width % HEADS:
        raise refused(text, f"a width that {HEADS} heads share")
    return width


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


def byte_counts(text: str) -> list[int]:
    """Bytes of each of '1MiB,4MiB'."""
    return [parse_bytes(part) for part in text.split(",")]


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


def saved(what: str) -> Callable[[str], str]:
    """The name of a file that ``torch.save`` made, which is an archive of zip."""

    def convert(text: str) -> str:
        with suppress(BadZipFile), ZipFile(readable(what)(text)) as file:
            if any(name.endswith("/data.pkl") for name in file.namelist()):
                return text
        raise InvalidArgument(f"{text!r} is no file of torch.save, expected {what}")

    return convert


def folder(text: str) -> Path:
    """One that is there and can be written."""
    if not os.path.isdir(text) or not os.access(text, os.W_OK):
        raise refused(text, "a folder that is there and can be written")
    return Path(text)


def read_config(path: str) -> dict[str, Any]:
    """The content of a model's config.json."""
    content = read_json(path, 1 << 20, "the config.json of a model")
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InvalidArgument(
            f"{path} names no model_type, expected the config.json of a Hugging Face model"
        )
    return content


def parameters(text: str) -> int:
    if (found := parse_count(text)) < 1000:
        raise refused(text, "at least 1000 parameters")
    return found


def factory(text: str) -> str:
    if not re.fullmatch(r"[^:]+:[^:]+", text):
        raise refused(text, "module:function, such as mymodels:make_gpt")
    return text


def device(text: str) -> str:
    try:
        parse_link("none" if text == "cpu" else text)
    except CommpressError:
        raise refused(text, "cpu or a memory bandwidth such as 900GB/s") from None
    return text


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


# ---------------------------------------------------------------- groups


def add_output(parser: argparse.ArgumentParser, *, check: str | None = None) -> None:
    """``check`` goes on from "exit status 1 unless"; commands without bars have none."""
    if check is not None:
        option(parser, "--check", says=f"exit status 1 unless {check}")
    option(parser, "--json FILE", says="all rows, with settings and versions")
    says = "a picture of it: .png, .svg or .pdf (needs matplotlib)"
    option(parser, "--plot FILE", says=says)


def add_sizes(parser: argparse.ArgumentParser, least: str, most: str, *, factor: int = 2) -> None:
    option(parser, "--min-bytes SIZE", parse_bytes, least)
    option(parser, "--max-bytes SIZE", parse_bytes, most)
    option(parser, "--factor N", several, factor, "from one size to the next")


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


def add_ranks(parser: argparse.ArgumentParser, *, ranks: int = 4) -> None:
    says = f"local processes (default {ranks}); a launcher's own number wins"
    option(parser, "--ranks N", several, ranks, says)
    option(parser, "--threads N", natural, 1, "of each rank")


def add_training(parser: argparse.ArgumentParser, *, rounds: int, steps: int, batch: int) -> None:
    option(parser, "--rounds N", natural, rounds, "of every variant")
    option(parser, "--steps N", natural, steps, "of each round")
    option(parser, "--batch N", natural, batch, "windows per rank and step")
    option(parser, "--length N", natural, 64, "bytes of text in a window")
    option(parser, "--width N", shared_width, 384, "of the model")
    option(parser, "--layers N", natural, 6, "of the model")


def add_measuring(
    parser: argparse.ArgumentParser, *, rounds: int, steps: int, batch: int, check: str
) -> None:
    """All options of a command that times training steps on ranks, but for its own."""
    add_training(parser, rounds=rounds, steps=steps, batch=batch)
    add_ranks(parser)
    add_output(parser, check=check)


def add_topology(parser: argparse.ArgumentParser) -> None:
    says = "nodes x ranks as 2x4, sizes as 4,4,3, ranks as '0 2|1 3', or what the launcher says"
    option(parser, "--topology NODES", word("topology"), "auto", says)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machines")
    option(group, "--nodes NxR", checked(parse_nodes), "4x1", "nodes x ranks per node")
    says = "of a node: rate and one-way latency (default 1gbit,100us)"
    option(group, "--link RATE,TIME", checked(parse_link), None, says)
    probed = readable("what commpress probe wrote")
    says = "what commpress probe wrote, for --nodes, --link and --inside"
    option(group, "--links FILE", probed, None, says)
    says = "of all ranks of a node among themselves (default 40gbit,20us; else 200GB/s,5us)"
    option(group, "--inside RATE,TIME", checked(parse_link), None, says)
    says = (
        "cpu: what kernels take here, measured now; or an accelerator's memory bandwidth, 900GB/s"
    )
    option(group, "--device D", device, "cpu", says)
    option(group, "--cores N", from_(0), 0, "of each node, for its ranks (default: enough)")


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    option(group, "--parameters N", parameters, None, "a transformer of about so many, as 110M")
    says = "what calling F of the Python module M returns, a torch.nn.Module"
    option(group, "--model M:F", factory, None, says)
    says = "config.json of a Hugging Face model"
    option(group, "--config FILE", checked(read_config), None, says)
    says = "of a step on a rank of its own, without communication"
    option(group, "--compute-ms T", positive, None, says)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("meshes")
    says = "every grid of parallelism instead of ways to average gradients"
    option(group, "--mesh", says=says)
    probed = readable("what commpress probe --pairs --json wrote")
    says = "links of every two ranks: what commpress probe --pairs --json wrote"
    option(group, "--pairs FILE", probed, None, says)
    says = "codecs, as dp=int4,ep=int8 (default: dp chosen)"
    option(group, "--dims D=C,…", word("dims"), "", says)
    says = "of each rank, as 1,1,0.5,0.5: uneven stages, batches (default alike)"
    option(group, "--speeds A,B", says=says)
    says = "sequences of a step on all ranks (default 4 for each rank)"
    option(group, "--batch N", natural, None, says)
    option(group, "--length N", natural, 512, "tokens of a sequence")
    option(group, "--micro N", natural, 1, "sequences of a micro-batch")
    says = "of a layer, all ranks together (default: many)"
    option(group, "--experts E", from_zero, 0, says)
    option(group, "--experts-per-token K", natural, 2, "that a gate chooses")
