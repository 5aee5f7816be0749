"""Meaning of the words of options, and options that do not go together. Loads no torch: wrong lines
are refused at once.

A function that is named after a command is called with all its options; ``option_groups.word``
names the others, which are called with the text of one.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from commpress.cli import launchers
from commpress.cli.contenders import names
from commpress.cli.hosts import MOST
from commpress.cli.option_groups import check_picture, meant, sizes_of
from commpress.codecs.family import NAMES
from commpress.codecs.registry import codec_named, may_register
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.collectives.measured_links import load_links
from commpress.collectives.nodes import MOST as MOST_RANKS
from commpress.collectives.nodes import Topology
from commpress.errors import InvalidArgument, MissingPackage
from commpress.integrations.trainers.launcher import place
from commpress.plan.cluster import RINGS
from commpress.units import parse_bytes, parse_nodes

T = TypeVar("T")
AUTO = "auto"  # as codec="auto"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# ---------------------------------------------------------------- words of one option

contenders, nodes = names, Topology.parse


def topology(text: str) -> None:
    if text != "auto":
        nodes(text)


def row_codec(text: str) -> None:
    """A codec of rows of a flat buffer: those of whole tensors say that they are none."""
    codec_named(text).row_bytes(8)


def variants_of(text: str) -> tuple[str, ...]:
    """Those that ``commpress bench train`` runs."""
    variants = tuple(dict.fromkeys(["compute", *text.split(",")]))
    for name in variants:
        check_variant(name)
    return variants


def check_variant(name: str) -> None:
    if not re.fullmatch(r"powersgd[1-9][0-9]{0,3}", name):
        known = dict.fromkeys(("compute", "plain", "hook", "bf16", AUTO, *NAMES))
        if name not in known:
            said = f"got {name!r}, expected powersgdN or one of {', '.join(known)}"
            raise InvalidArgument(said + meant(name, known))


# ---------------------------------------------------------------- options together


def demo(options: argparse.Namespace) -> None:
    if options.network in ("auto", "hosts"):
        on_hosts(options.ranks)
    if options.out:
        check_picture("out", options.out)


def on_hosts(ranks: int) -> None:
    if ranks > MOST:
        raise InvalidArgument(
            f"--ranks is {ranks}, expected at most {MOST} where each has a host of its own"
        )


def launched() -> bool:
    """True if torchrun, mpirun or srun started this process as one of several."""
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing and ("RANK" in os.environ or "WORLD_SIZE" in os.environ):
        there = [name for name in _TORCHRUN if name not in missing]
        raise InvalidArgument(
            f"{', '.join(there)} set but {', '.join(missing)} not: a launcher sets all four, "
            "unset them for local ranks"
        )
    where = place()
    return where is not None and (where.launcher == "torchrun" or where.size > 1)


def on_nodes(options: argparse.Namespace, option: str) -> None:
    """A launcher's ranks are counted when they meet."""
    text = getattr(options, option)
    if launched() or text in (None, "auto"):
        return
    if (size := nodes(text).size) != options.ranks:
        raise InvalidArgument(
            f"--{option} {text!r} has {size} ranks and --ranks is {options.ranks}: they must be "
            "as many"
        )


def probe(options: argparse.Namespace) -> None:
    on_nodes(options, "topology")


def hosts(options: argparse.Namespace, several: object = True) -> None:
    if not options.command:
        raise InvalidArgument("which command? write it behind --, as in '-- torchrun train.py'")
    if several:
        launchers.check(options.command)
    on_path(options.command)


def on_path(command: list[str]) -> None:
    beyond = [word for word in command if word != "env" and "=" not in word][:1]
    if beyond and shutil.which(beyond[0]) is None:
        hint = f": python {beyond[0]}" if beyond[0].endswith(".py") else ""
        raise InvalidArgument(f"there is no command {beyond[0]!r} on this machine's PATH{hint}")


def links(options: argparse.Namespace) -> None:
    if (options.rate or options.delay) and not options.hosts:
        raise InvalidArgument("--rate and --delay are of links between hosts: add --hosts")


def compare(options: argparse.Namespace) -> None:
    hosts(options, options.hosts)
    text, methods = " ".join(options.command), options.methods.split(",")
    if "{method}" not in text:
        raise InvalidArgument(
            "the command has no {method}: write it where the script takes a codec, as in "
            "'train.py --codec {method}', or before it: 'env CODEC={method} torchrun train.py'"
        )
    if len(methods) < 2 or not all(methods) or len(set(methods)) < len(methods):
        raise InvalidArgument(
            f"--methods is {options.methods!r}, expected at least two different ones: none,int8"
        )
    if options.seeds > 1 and "{seed}" not in text:
        raise InvalidArgument(
            f"--seeds is {options.seeds} and the command has no {{seed}}: all runs would be the "
            "same. Write it where the script takes a seed"
        )
    links(options)
    if options.out != "compare.svg":
        check_picture("out", options.out)
    try:
        groups = re.compile(options.pattern).groupindex
    except re.error as error:
        raise InvalidArgument(f"--pattern is {options.pattern!r}: {error}") from None
    if options.pattern and "loss" not in groups:
        raise InvalidArgument(
            f"--pattern is {options.pattern!r}, expected a group (?P<loss>...) around the number"
        )


def bench_allreduce(options: argparse.Namespace) -> None:
    launched(), sizes_of(options)


def bench_io(options: argparse.Namespace) -> None:
    size, chunks = parse_bytes(options.size), options.chunks
    if min(chunks) < 1 << 20 or not size or size % max(chunks):
        raise InvalidArgument("--chunks must be at least 1MiB and divide --size")


def bench_train(options: argparse.Namespace) -> None:
    launched()


# ---------------------------------------------------------------- predictions


def plan(options: argparse.Namespace) -> None:
    _model(options)
    _cluster(options)
    planned_codecs(options)


def _unused(options: argparse.Namespace, what: str, names: str) -> None:
    """Refuse options that would change nothing."""
    for name in names.split():
        if getattr(options, name) != options.usual(name):
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{option} changes nothing in {what}: leave it out")


def planned_codecs(options: argparse.Namespace) -> None:
    """The codecs that a plan is to choose from."""
    for way in options.allow:
        if way not in RINGS and way != "local" and not _comes(way, options):
            _found("allow", way, codec_named)


def _comes(name: str, options: argparse.Namespace) -> bool:
    """True for a codec that the module of --model may register: it is looked up when that is
    imported."""
    module = (options.model or "").partition(":")[0]
    return bool(module) and module not in sys.modules and may_register(name)


def _found(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"--{option} has {text!r}: {error}") from None


def simulate(options: argparse.Namespace) -> None:
    cluster = _cluster(options)
    if len(cluster.nodes) == cluster.size:
        _unused(options, "nodes of one rank", "layered")
    if trains(options):
        _unused(options, "a training step", "bytes")
        _model(options)
    else:
        _unused(options, "an all-reduce without a model", "compute_ms")
    if parse_bytes(options.bytes) < 4:
        raise InvalidArgument(f"--bytes is {options.bytes!r}, expected at least 4: one float32")
    simulated_ways(options)


def trains(options: argparse.Namespace) -> bool:
    return bool(options.parameters or options.model or options.config)


def simulated_ways(options: argparse.Namespace) -> None:
    """Ways that can be simulated."""
    for way in options.ways.split(","):
        if way not in RINGS and not _comes(way, options):
            found = _found("ways", way, codec_named)
            if isinstance(found, LowRankCodec) and not trains(options):
                raise InvalidArgument(f"{way} needs shapes: give --parameters, --model or --config")


def _model(options: argparse.Namespace) -> None:
    if sum(bool(given) for given in (options.parameters, options.model, options.config)) != 1:
        raise InvalidArgument(
            "expected one of --parameters, --model and --config: what is to be trained?"
        )
    if options.config and find_spec("transformers") is None:
        raise MissingPackage("--config needs transformers: pip install 'commpress[hf]'")
    if not options.compute_ms:
        raise InvalidArgument(
            "--compute-ms is missing: what one rank takes for a step without communication"
        )


def _cluster(options: argparse.Namespace) -> Topology:
    """The nodes, as they are described or were measured."""
    if options.links:
        _unused(options, "--links", "nodes link inside")
        found = _found("links", options.links, load_links).topology
    else:
        count, ranks = parse_nodes(options.nodes)
        found = Topology.of(*[ranks] * min(count, MOST_RANKS + 1))
    if found.size < 2:
        raise InvalidArgument("a cluster of one rank sends nothing: give --nodes with at least two")
    return found
