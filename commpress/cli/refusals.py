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
from collections.abc import Callable, Collection
from importlib.util import find_spec
from itertools import chain
from typing import NoReturn, TypeVar

from commpress.cli import fault_schedule, launchers
from commpress.cli.contenders import names
from commpress.cli.hosts import MOST
from commpress.cli.option_groups import check_picture, meant, sizes_of
from commpress.codecs.codec import Codec
from commpress.codecs.family import NAMES, SignCodec
from commpress.codecs.registry import codec_named, may_register
from commpress.codecs.whole_tensors import LowRankCodec, WholeTensorCodec
from commpress.collectives.measured_links import load_links
from commpress.collectives.nodes import MOST as MOST_RANKS
from commpress.collectives.nodes import Topology
from commpress.errors import InvalidArgument, MissingPackage
from commpress.integrations.trainers.launcher import place
from commpress.plan.grid import Grid, MeshDims, dims_of, grid_of, speeds_of
from commpress.plan.pair_links import load_pairs
from commpress.plan.way_names import PREFIX, RINGS, local_way
from commpress.tiered_mem.engines import NAMES as ENGINES
from commpress.units import parse_bytes, parse_nodes

CODECS: dict[str, Codec] = {
    "sign": SignCodec(),
    "sign/row": SignCodec(block=0),
} | NAMES  # of bench codec
T = TypeVar("T")
AUTO = "auto"  # as codec="auto"
COMPARED = ({"powersgd1", "sign"}, {"plain", AUTO})  # by bench train --check
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# ---------------------------------------------------------------- words of one option

contenders, codec, nodes, dims = names, codec_named, Topology.parse, dims_of


def grid(text: str) -> None:
    if text:
        grid_of(text)


def topology(text: str) -> None:
    if text != "auto":
        nodes(text)


def row_codec(text: str) -> None:
    """A codec of rows of a flat buffer: those of whole tensors say that they are none."""
    codec_named(text).row_bytes(8)


def timed(text: str) -> None:
    for name in text.split(","):
        _one_of(name, CODECS, "some of")


def engine(text: str) -> None:
    _one_of(text, ("auto", *ENGINES), "one of")


def _one_of(name: str, known: Collection[str], expected: str) -> None:
    if name not in known:
        raise InvalidArgument(
            f"got {name!r}, expected {expected} {', '.join(known)}{meant(name, known)}"
        )


def variants_of(text: str) -> tuple[str, ...]:
    """Those that ``commpress bench train`` runs."""
    variants = tuple(dict.fromkeys(["compute", *text.split(",")]))
    for name in variants:
        check_variant(name)
    return variants


def check_variant(name: str) -> None:
    if not re.fullmatch(r"powersgd[1-9][0-9]{0,3}", name):
        known = tuple(dict.fromkeys(("compute", "plain", "hook", "bf16", AUTO, *NAMES)))
        _one_of(name, known, "powersgdN or one of")


# ---------------------------------------------------------------- options together


def demo(options: argparse.Namespace) -> None:
    if options.network in ("auto", "hosts"):
        _hosts(options.ranks)
    if options.out:
        check_picture("out", options.out)


def _hosts(ranks: int) -> None:
    if ranks > MOST:
        raise InvalidArgument(
            f"--ranks is {ranks}, expected at most {MOST} where each has a host of its own"
        )


def launched() -> bool:
    """True if torchrun, mpirun or srun started this process as one of several."""
    there = [name for name in _TORCHRUN if name in os.environ]
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing and ("RANK" in there or "WORLD_SIZE" in there):
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


def hosts(options: argparse.Namespace) -> None:
    if not options.command:
        raise InvalidArgument("which command? write it behind --, as in '-- torchrun train.py'")
    if options.count:
        launchers.check(options.command)
    _on_path(options.command)


def _on_path(command: list[str]) -> None:
    beyond = [word for word in command if word != "env" and "=" not in word][:1]
    if beyond and shutil.which(beyond[0]) is None:
        hint = f": python {beyond[0]}" if beyond[0].endswith(".py") else ""
        raise InvalidArgument(f"there is no command {beyond[0]!r} on this machine's PATH{hint}")


def compare(options: argparse.Namespace) -> None:
    hosts(options)
    text, methods = " ".join(options.command), options.methods.split(",")
    if "{method}" not in text:
        raise InvalidArgument(
            "the command has no {method}: write it where the script takes a codec, as in "
            "'train.py --codec {method}', or before it: 'env CODEC={method} torchrun train.py'"
        )
    if len(set(methods)) < 2 or not all(methods) or len(set(methods)) < len(methods):
        raise InvalidArgument(
            f"--methods is {options.methods!r}, expected at least two different ones: none,int8"
        )
    if options.seeds > 1 and "{seed}" not in text:
        raise InvalidArgument(
            f"--seeds is {options.seeds} and the command has no {{seed}}: all runs would be the "
            "same. Write it where the script takes a seed"
        )
    if (options.rate or options.delay) and not options.count:
        raise InvalidArgument("--rate and --delay are of links between hosts: add --hosts 2")
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


def chaos(options: argparse.Namespace) -> list[fault_schedule.Fault]:
    """The faults to make."""
    if not sys.platform.startswith("linux"):
        raise InvalidArgument(
            f"chaos needs Linux (process groups that adopt orphans, /proc), this is {sys.platform}"
        )
    _on_path(options.command)
    if (options.rate or options.delay) and not options.hosts:
        raise InvalidArgument("--rate and --delay are of links between hosts: add --hosts")
    if options.hosts:
        _hosts(options.ranks + 1)  # one is the launcher's
    if options.schedule:
        faults = fault_schedule.read(options.schedule, options.ranks)
    else:
        faults = fault_schedule.drawn(
            [kind for kind in options.faults.split(",") if kind],
            options.faults_per_hour,
            options.ranks,
            options.seconds,
            options.seed,
            first=options.calm,
        )
    if not options.hosts and any(fault.kind == "cut" for fault in faults):
        raise InvalidArgument("a link can be cut only between hosts: add --hosts, or leave cut out")
    return faults


def bench_codec(options: argparse.Namespace) -> None:
    if options.check and not (
        "sign" in (options.codec or "sign").split(",") and {1, 2} <= set(options.threads)
    ):
        raise InvalidArgument("--check needs the codec sign on 1 and 2 threads")


def bench_allreduce(options: argparse.Namespace) -> None:
    launched(), sizes_of(options)


def bench_io(options: argparse.Namespace) -> None:
    size, chunks = parse_bytes(options.size), options.chunks
    if min(chunks) < 1 << 20 or not size or size % max(chunks):
        raise InvalidArgument("--chunks must be at least 1MiB and divide --size")
    if options.check and (options.no_fio or not shutil.which("fio")):
        raise InvalidArgument("--check compares with fio: apt-get install fio")


def bench_train(options: argparse.Namespace) -> None:
    variants = variants_of(options.ways)
    if options.check and not any(compared <= set(variants) for compared in COMPARED):
        raise InvalidArgument(
            "--check compares sign and powersgd1, or auto and plain: name both in --ways"
        )
    launched(), bucket_sizes(variants, options.bucket_mb)


def bucket_sizes(variants: tuple[str, ...], words: list[str]) -> dict[str, float]:
    """MB of the buckets from words like '25' and 'sign=4': of a variant, and under '' of all
    others."""
    sizes = {"": 25.0}
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            sizes[name] = float(number)
        except ValueError:
            sizes[name] = 0.0
        if not 0 < sizes[name] < float("inf") or name not in ("", *variants):
            raise InvalidArgument(
                f"--bucket-mb has {word!r}, expected a number or variant=number with a variant "
                "that runs"
            )
        if name.startswith("powersgd"):
            raise InvalidArgument(
                "torch's PowerSGD hook needs all gradients in one bucket, so it has no --bucket-mb"
            )
    return sizes


# ---------------------------------------------------------------- predictions


def plan(options: argparse.Namespace) -> None:
    _model(options)
    if options.mesh:
        _not_with("--mesh", options, **OF_PLAN, **OF_CORES)
    else:
        _not_with("a plan without --mesh", options, **OF_GRIDS, **OF_MESH)
    if not options.compute_ms:
        raise InvalidArgument(
            "--compute-ms is missing: what one rank takes for a step without communication"
        )
    if options.mesh and options.memory.keys() - {"device"}:
        raise InvalidArgument(
            f"--memory has {', '.join(options.memory)}: grids keep all on the device, expected "
            "device=SIZE"
        )
    if options.mesh and options.experts and options.parameters:
        no_experts(options)
    if options.mesh and options.pairs:
        _not_with("--pairs", options, links=None, **OF_LINKS, **OF_RACKS)
        size = _found("pairs", options.pairs, load_pairs).size
    else:
        size = _cluster(options).size
    if options.mesh:
        speeds_of(options.speeds, size)
    planned_codecs(options)


# options of one kind of prediction, and their values where they are not given
OF_GRIDS = {"batch": None, "length": 512, "micro": 1, "experts": 0, "experts_per_token": 2}
OF_LINKS = {"nodes": "4x1", "link": None, "inside": None, "foreign": None}
OF_RACKS = {"rack": 0, "oversubscription": 1.0}
OF_CORES = {"cores": 0, "machine_cores": 0, "message_us": None, "byte_ns": None, "straggler": 1.0}
OF_MESH = {"pairs": None, "dims": "", "speeds": None}
OF_PLAN = {
    "ways": None,
    "gradients": None,
    "uniform": "int4",
    "calls": False,
    "bucket_mb": 25.0,
    "host_rate": "12GB/s",
    "disk_rate": "2GB/s",
    "plot": None,
}


def _not_with(what: str, options: argparse.Namespace, **usual: object) -> None:
    """Refuse options that would change nothing."""
    for name, value in usual.items():
        if getattr(options, name) != value:
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{option} changes nothing in {what}: leave it out")


def no_experts(options: argparse.Namespace) -> NoReturn:
    raise InvalidArgument(
        f"--experts is {options.experts}, but no parameter of the model is named after experts: "
        "give its --config, or leave --experts out"
    )


def planned_codecs(options: argparse.Namespace) -> None:
    """The codecs that a plan is to choose from."""
    for option in ("ways", "allow", "uniform"):
        for way in (word.strip() for word in (getattr(options, option) or "").split(",")):
            local = (option, way) == ("allow", "local") and not options.mesh
            if way and way not in RINGS and not local and not _comes(way, options):
                _found(option, way, codec_named)
    dims = _found("dims", options.dims, dims_of)
    if not any(_comes(name, options) for name in dims.values()):
        _found("dims", options.dims, lambda text: MeshDims(**dims))


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
    trained = bool(options.parameters or options.model or options.config)
    cluster = _cluster(options)
    if len(cluster.nodes) == cluster.size:
        _not_with("nodes of one rank", options, layered=False)
    if options.plot and not options.scaling:
        raise InvalidArgument("--plot draws times against ranks: give --scaling, too")
    if options.grid:
        _model(options)
        _not_with("a simulation with --grid", options, scaling=None, layered=False)
        as_many(grid_of(options.grid), cluster.size)
        if not options.compute_ms:
            raise InvalidArgument(
                "a step on a grid needs --compute-ms: what a rank takes for its share of it, alone"
            )
    else:
        _not_with("a simulation without --grid", options, **OF_GRIDS)
    if trained:
        _not_with("a training step", options, bytes="32MiB")
    else:
        _not_with("an all-reduce without a model", options, compute_ms=None, bucket_mb=25.0)
    if trained and not options.grid:
        _model(options)
        if not options.compute_ms:
            raise InvalidArgument(
                "a training step needs --compute-ms: what one rank takes for it without "
                "communication"
            )
    if parse_bytes(options.bytes) < 4:
        raise InvalidArgument(f"--bytes is {options.bytes!r}, expected at least 4: one float32")
    simulated_ways(options)


def simulated_ways(options: argparse.Namespace) -> None:
    """Ways that can be simulated."""
    trained = bool(options.parameters or options.model or options.config)
    for way in options.ways.split(","):
        local, found = way.startswith(PREFIX), None
        if way not in RINGS and not _comes(way.removeprefix(PREFIX).partition(":")[0], options):
            found = _found("ways", way, local_way if local else codec_named)
        if options.grid and (local or isinstance(found, WholeTensorCodec)):
            raise InvalidArgument(
                f"--ways has {way}, not simulated on a grid: name rings, or codecs of rows such "
                "as int8"
            )
        if local and not trained:
            raise InvalidArgument(
                f"{way} needs a model: give --parameters, --model or --config, and --compute-ms"
            )
        if isinstance(found, LowRankCodec) and not trained:
            raise InvalidArgument(f"{way} needs shapes: give --parameters, --model or --config")


def as_many(grid: Grid, ranks: int) -> None:
    if grid.size != ranks:
        raise InvalidArgument(
            f"--grid {grid} has {grid.size} ranks and the nodes have {ranks}: they must be as many"
        )


def _model(options: argparse.Namespace) -> None:
    if sum(bool(given) for given in (options.parameters, options.model, options.config)) != 1:
        raise InvalidArgument(
            "expected one of --parameters, --model and --config: what is to be trained?"
        )
    if options.config and find_spec("transformers") is None:
        raise MissingPackage("--config needs transformers: pip install 'commpress[hf]'")


def _cluster(options: argparse.Namespace) -> Topology:
    """The nodes, as they are described or were measured."""
    if options.links:
        _not_with("--links", options, **OF_LINKS)
        found = _found("links", options.links, load_links).topology
    else:
        kinds = parse_nodes(options.nodes)
        if len(kinds) == 1:
            _not_with("nodes of one kind", options, foreign=None)
            if not options.rack:
                _not_with("a cluster without --rack", options, oversubscription=1.0)
        if len(options.link or [""]) not in (1, len(kinds)):
            raise InvalidArgument(
                f"--link is given {len(options.link)} times, expected once, or once for each of "
                f"{len(kinds)} kinds"
            )
        known = [[ranks] * min(count, MOST_RANKS + 1) for count, ranks in kinds]
        found = Topology.of(*chain.from_iterable(known))
    several(found.size)
    return found


def several(ranks: int) -> None:
    if ranks < 2:
        raise InvalidArgument("a cluster of one rank sends nothing: give --nodes with at least two")
