"""Options that several commands share. Nothing here loads torch: help is shown at once."""

import argparse
import os
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from commpress.documents import read_json
from commpress.errors import CommpressError, InvalidArgument, MissingPackage
from commpress.units import parse_bytes, parse_count, parse_link, parse_nodes

T = TypeVar("T")

PICTURES = (".png", ".svg", ".pdf")
FILES = ("json", "plot", "out")  # options that name a file which is written at the end
# of commpress doctor
SECTIONS = ("torch", "backends", "MPI", "GPU", "NUMA", "memory", "disks", "network", "clocks")
HEADS = 4  # of the small model that commands train


def size(text: str) -> int:
    """Bytes of '32MiB'."""
    return told(parse_bytes)(text)


def large(text: str) -> int:
    """Bytes of at least a KiB."""
    found = size(text)
    if found < 1024:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected at least 1KiB")
    return found


def told(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as the type of an option: its own error is what the command says."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except CommpressError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """The text itself, if ``parse`` takes it."""

    def convert(text: str) -> str:
        told(parse)(text)
        return text

    return convert


def at_least(least: int, most: int = 10**18) -> Callable[[str], int]:
    says = f"a whole number of at least {least}" + (f" and at most {most}" if most < 10**18 else "")

    def convert(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {says}")
        return int(text)

    return convert


def shared_width(text: str) -> int:
    """A width of the small model."""
    width = at_least(1, 1 << 14)(text)
    if width % HEADS:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a width that {HEADS} heads share")
    return width


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def positive(text: str) -> float:
    """A number above 0."""
    if not 0 < (found := _number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return found


def from_(least: float) -> Callable[[str], float]:
    """A number of at least ``least``."""

    def convert(text: str) -> float:
        if not least <= (found := _number(text)) < float("inf"):
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected a number of at least {least:g}"
            )
        return found

    return convert


def sections(text: str) -> str:
    """Of what ``commpress doctor`` looks at."""
    for name in text.split(","):
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(
                f"got {name!r}, expected some of {', '.join(SECTIONS)}{meant(name, SECTIONS)}"
            )
    return text


def byte_counts(text: str) -> list[int]:
    """Bytes of each of '1MiB,4MiB'."""
    return [size(part) for part in text.split(",")]


def meant(word: str, known: Collection[str]) -> str:
    close = get_close_matches(word, known, 1)
    return f": did you mean {close[0]!r}?" if close else ""


def readable(what: str) -> Callable[[str], str]:
    """The name of a file that is there."""

    def convert(text: str) -> str:
        if os.path.isdir(text) or not os.access(text, os.R_OK):
            raise argparse.ArgumentTypeError(f"{text!r} cannot be read, expected {what}")
        return text

    return convert


def word(name: str) -> Callable[[str], str]:
    """The text itself, if the function of ``refusals`` takes it."""

    def convert(text: str) -> str:
        from commpress.cli import refusals

        return checked(getattr(refusals, name))(text)

    return convert


def read_config(path: str) -> dict[str, Any]:
    """The content of a model's config.json."""
    content = read_json(path, 1 << 20, "the config.json of a model")
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InvalidArgument(
            f"{path} names no model_type, expected the config.json of a Hugging Face model"
        )
    return content


def _parameters(text: str) -> None:
    if parse_count(text) < 1000:
        raise InvalidArgument(f"got {text!r}, expected at least 1000 parameters")


def _factory(text: str) -> None:
    if not re.fullmatch(r"[^:]+:[^:]+", text):
        raise InvalidArgument(f"got {text!r}, expected module:function, such as mymodels:make_gpt")


def folder(text: str) -> Path:
    """One that is there and can be written."""
    if not os.path.isdir(text) or not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a folder that is there and can be written"
        )
    return Path(text)


def _device(text: str) -> str:
    if text != "cpu":
        try:
            parse_link(text)
        except CommpressError:
            raise InvalidArgument(
                f"got {text!r}, expected cpu or a memory bandwidth such as 900GB/s"
            ) from None
    return text


def counts(text: str) -> list[int]:
    """Positive numbers of '1,2,4'."""
    found = [
        int(part) if re.fullmatch(r"\s*[0-9]{1,18}\s*", part) else 0 for part in text.split(",")
    ]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected positive numbers such as 1,2,4,8")
    return found


def sizes_of(options: argparse.Namespace) -> tuple[int, ...]:
    """From the smallest to the largest by a factor."""
    if not 4 <= options.min_bytes <= options.max_bytes or options.factor < 2:
        raise InvalidArgument(
            f"expected 4 <= --min-bytes <= --max-bytes and --factor >= 2, got {options.min_bytes}, "
            f"{options.max_bytes} and {options.factor}"
        )
    sizes = [options.min_bytes]
    while sizes[-1] * options.factor <= options.max_bytes:
        sizes.append(sizes[-1] * options.factor)
    return tuple(sizes)


def add_output(parser: argparse.ArgumentParser, *, check: str | None = None) -> None:
    """``check`` goes on from "exit status 1 unless"; commands without bars have none."""
    if check is not None:
        parser.add_argument(
            "--check", action="store_true", help=f"exit status 1 unless {check.replace('%', '%%')}"
        )
    parser.add_argument("--json", metavar="FILE", help="all rows, with settings and versions")
    parser.add_argument(
        "--plot", metavar="FILE", help="a picture of it: .png, .svg or .pdf (needs matplotlib)"
    )


def refuse_early(options: argparse.Namespace) -> None:
    """Files that cannot be written and pictures that cannot be drawn, before minutes of
    measuring."""
    for name in FILES:
        check_file(name, getattr(options, name, None))
    path = getattr(options, "plot", None)
    if path is None:
        return
    if Path(path).suffix not in PICTURES:
        raise InvalidArgument(
            f"--plot is {path!r}, expected a name that ends in {', '.join(PICTURES)}"
        )
    if find_spec("matplotlib") is None and not getattr(options, "draws_itself", False):
        raise MissingPackage("--plot needs matplotlib: pip install 'commpress[demo]'")


def check_file(name: str, path: str | None) -> None:
    """A name under which a file can be written, or nothing."""
    if not path:
        return
    folder = os.path.dirname(path) or "."
    if (
        os.path.isdir(path)
        or not os.path.isdir(folder)
        or not os.access(path if os.path.exists(path) else folder, os.W_OK)
    ):
        raise InvalidArgument(
            f"--{name} is {path!r}, expected the name of a file in a folder that is there and can "
            "be written"
        )


def check_json(path: str) -> None:
    check_file("json", path)


def add_sizes(parser: argparse.ArgumentParser, least: str, most: str, *, factor: int = 2) -> None:
    parser.add_argument(
        "--min-bytes", type=size, default=least, metavar="SIZE", help=f"default {least}"
    )
    parser.add_argument(
        "--max-bytes", type=size, default=most, metavar="SIZE", help=f"default {most}"
    )
    parser.add_argument(
        "--factor",
        type=at_least(2),
        default=factor,
        metavar="N",
        help=f"from one size to the next (default {factor})",
    )


def add_ranks(parser: argparse.ArgumentParser, *, ranks: int = 4) -> None:
    says = f"local processes (default {ranks}); a launcher's own number wins"
    parser.add_argument("--ranks", type=at_least(2), default=ranks, metavar="N", help=says)
    parser.add_argument(
        "--threads",
        type=at_least(1),
        default=1,
        metavar="N",
        help="threads of each rank (default 1)",
    )


def add_training(parser: argparse.ArgumentParser, *, rounds: int, steps: int, batch: int) -> None:
    for name, default, metavar, what in (
        ("rounds", rounds, "N", "of every variant"),
        ("steps", steps, "N", "steps of each round"),
        ("batch", batch, "N", "windows per rank and step"),
        ("length", 64, "N", "bytes of text in a window"),
        ("width", 384, "N", "of the model"),
        ("layers", 6, "N", "of the model"),
    ):
        kind = shared_width if name == "width" else at_least(1)
        parser.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            metavar=metavar,
            help=f"{what} (default {default})",
        )


def add_measuring(
    parser: argparse.ArgumentParser, *, rounds: int, steps: int, batch: int, check: str
) -> None:
    """All options of a command that times training steps on ranks, but for its own."""
    add_training(parser, rounds=rounds, steps=steps, batch=batch)
    add_ranks(parser)
    add_output(parser, check=check)


def add_topology(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology",
        type=word("topology"),
        default="auto",
        metavar="NODES",
        help=(
            "nodes x ranks as 2x4, sizes as 4,4,3, ranks as '0 2|1 3', or what the launcher says "
            "(default auto)"
        ),
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machines")
    group.add_argument(
        "--nodes",
        type=checked(parse_nodes),
        default="4x1",
        metavar="NxR",
        help="nodes x ranks per node; several kinds as 8x4,2x4 (default 4x1)",
    )
    group.add_argument(
        "--link",
        action="append",
        type=checked(parse_link),
        metavar="RATE,TIME",
        help=(
            "of a node: rate and one-way latency, as 1gbit,100us; once for each kind of node "
            "(default 1gbit,100us)"
        ),
    )
    group.add_argument(
        "--links",
        type=readable("what commpress probe wrote"),
        metavar="FILE",
        help="what commpress probe wrote, for --nodes, --link and --inside",
    )
    group.add_argument(
        "--inside",
        type=checked(parse_link),
        metavar="RATE,TIME",
        help="of all ranks of a node among themselves (default 40gbit,20us; else 200GB/s,5us)",
    )
    group.add_argument(
        "--foreign",
        type=checked(parse_link),
        metavar="RATE",
        help="between nodes of different kinds, where that is slower",
    )
    group.add_argument(
        "--rack",
        type=at_least(0),
        default=0,
        metavar="N",
        help="nodes below one switch (default: all)",
    )
    group.add_argument(
        "--oversubscription",
        type=from_(1),
        default=1.0,
        metavar="F",
        help="of a rack's uplink (default 1)",
    )
    group.add_argument(
        "--straggler",
        type=positive,
        default=1.0,
        metavar="F",
        help="one node computes F times slower",
    )
    group.add_argument(
        "--device",
        type=told(_device),
        default="cpu",
        metavar="D",
        help=(
            "cpu: what kernels take here, measured now; or an accelerator's memory bandwidth, as "
            "900GB/s (default cpu)"
        ),
    )
    group.add_argument(
        "--cores",
        type=from_(0),
        default=0,
        metavar="N",
        help="of each node, for its ranks (default: enough)",
    )
    group.add_argument(
        "--machine-cores",
        type=from_(0),
        default=0,
        metavar="N",
        help="all nodes lie on one machine of N cores (namespaces)",
    )
    group.add_argument(
        "--message-us",
        type=from_(0),
        metavar="T",
        help="of a core for each message (default 60 over cpu, else 5)",
    )
    group.add_argument(
        "--byte-ns",
        type=from_(0),
        metavar="T",
        help="of a core for each byte sent or received (default 0.4, else 0)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--parameters",
        type=checked(_parameters),
        metavar="N",
        help="a transformer of about so many, as 110M",
    )
    group.add_argument(
        "--model",
        type=checked(_factory),
        metavar="M:F",
        help="what calling F of the Python module M returns, a torch.nn.Module",
    )
    group.add_argument(
        "--config",
        type=checked(read_config),
        metavar="FILE",
        help="config.json of a Hugging Face model",
    )
    group.add_argument(
        "--compute-ms",
        type=positive,
        metavar="T",
        help="of a step on a rank of its own, without communication",
    )
    group.add_argument(
        "--bucket-mb", type=positive, default=25.0, metavar="MB", help="of DDP (default 25)"
    )


def add_batch(group: Any) -> None:
    group.add_argument(
        "--batch",
        type=at_least(1),
        metavar="N",
        help="sequences of a step on all ranks (default 4 for each rank)",
    )
    group.add_argument(
        "--length",
        type=at_least(1),
        default=512,
        metavar="N",
        help="tokens of a sequence (default 512)",
    )
    group.add_argument(
        "--micro",
        type=at_least(1),
        default=1,
        metavar="N",
        help="sequences of a micro-batch (default 1)",
    )
    group.add_argument(
        "--experts",
        type=at_least(0),
        default=0,
        metavar="E",
        help="of a layer, all ranks together (default: many)",
    )
    group.add_argument(
        "--experts-per-token",
        type=at_least(1),
        default=2,
        metavar="K",
        help="that a gate chooses (default 2)",
    )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("meshes")
    group.add_argument(
        "--mesh",
        action="store_true",
        help="every grid of parallelism instead of ways to average gradients",
    )
    group.add_argument(
        "--pairs",
        type=readable("what commpress probe --pairs --json wrote"),
        metavar="FILE",
        help="links of every two ranks: what commpress probe --pairs --json wrote",
    )
    add_batch(group)
    group.add_argument(
        "--dims",
        type=word("dims"),
        default="",
        metavar="D=C,…",
        help="codecs, as dp=int4,ep=int8 (default: dp chosen)",
    )
    group.add_argument(
        "--speeds",
        metavar="A,B",
        help="of each rank, as 1,1,0.5,0.5: uneven stages, batches (default alike)",
    )
