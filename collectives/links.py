"""Links between ranks, as measured, and the all-reduce that they make the faster one.

The file that ``commpress probe`` writes is JSON of at most 64 KiB:

    {"format": "commpress links", "version": 1, "nodes": [[0, 1], [2, 3]],
     "inside":  {"latency": 3e-5, "bandwidth": 2e9, "together": 1e9},
     "between": {"latency": 1e-4, "bandwidth": 1.2e7, "together": 1.2e7, "burst": 14e3},
     "stack":   {"exchange": 4e-4, "message": 1e-4, "byte": 2e-10, "ring": 2e-4, "cores": 2,
                 "ring_byte": 4e-10, "half_byte": 6e-10, "reduce": 2e-3, "busy": 3e-3,
                 "ring_message": 2e-4, "reduce_core": 8e-4, "ring_busy": 3e-4, "first": 3e-5,
                 "uneven": 1.25},
     "trials":  {"none": [[1024, 2e-3, 3e-3], [4096, 2e-3, 3e-3]], "sign": [[1024, 2e-3, 3e-3]]}}

One entry per class of pairs, ``null`` where there is no such pair. Latency is the seconds of the
smallest exchange of a pair, from a barrier of all ranks on: so it holds what ranks come late, which
a collective's phases wait for as well. Bandwidths are bytes per second in each direction: of one
pair alone, and of a node when all its ranks send to all others of the class at once, a message
between nodes counted where it leaves. ``burst`` bytes pass at once after a rest. ``stack`` is what
that costs processors, for the simulator. ``trials`` are all-reduces of so many elements: seconds
flat, and by way of nodes. Files without them are older.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from commpress.codecs import Codec, codec_named
from commpress.codecs.family import EXACT
from commpress.codecs.whole_tensors import LowRankCodec, WholeTensorCodec
from commpress.collectives import two_level
from commpress.collectives.buckets import MESSAGE
from commpress.collectives.frame import HEADER
from commpress.collectives.topology import Topology
from commpress.collectives.two_level import share
from commpress.documents import Document
from commpress.errors import InvalidArgument
from commpress.kernels.pieces import width_of

FIRST = 1 << 16  # bytes of a message, beyond which what each costs no longer falls
FILE = Document("commpress links", 1, 1 << 16, "commpress probe")
Way = Literal["flat", "hierarchical"]
T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """One class of pairs."""

    latency: float  # seconds
    bandwidth: float  # bytes per second, one pair alone
    together: float  # bytes per second of a node, all pairs at once
    burst: float = 0.0  # bytes that pass at once after a rest

    def __post_init__(self) -> None:
        _check(self, "a link", may_be_zero=("burst",))


@dataclass(frozen=True)
class Stack:
    """Costs of the network in processor time, all ranks exchanging with all others."""

    exchange: float  # seconds of the smallest exchange of all ranks, between pieces of work
    message: float  # seconds of a core for one message, sender and receiver together
    byte: float  # seconds of a core for a byte, at each end
    ring: float  # seconds of torch's smallest all-reduce
    # of the one machine that all nodes lie on (namespaces, containers), 0 if they are several
    cores: int
    # seconds of a core for a byte that torch's all-reduce of float32 sends: both ends and the sum
    ring_byte: float = 0.0
    half_byte: float = 0.0  # the same of bfloat16; 0 where it was not measured
    reduce: float = 0.0  # seconds of the shortest compressed all-reduce, between pieces of work
    busy: float = 0.0  # seconds of the smallest exchange of all ranks while every rank computes
    # seconds of a core for a message of torch's smallest all-reduce, both ends
    ring_message: float = 0.0
    reduce_core: float = 0.0  # seconds of a core of one rank for the shortest compressed all-reduce
    ring_busy: float = 0.0  # seconds of torch's smallest all-reduce while every rank computes
    first: float = 0.0  # seconds of a core at each end for the first ``FIRST`` bytes of a message
    # encoding until the last rank is done, of what it takes with ``cores`` shared fairly; 0: not
    # measured
    uneven: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "the stack", may_be_zero=tuple(asdict(self)))


@dataclass(frozen=True)
class BufferTrial:
    """One buffer, all-reduced both ways."""

    numel: int
    flat: float  # seconds
    hierarchical: float

    def __post_init__(self) -> None:
        _check(self, "a trial")


def _check(measured: Any, what: str, *, may_be_zero: Sequence[str] = ()) -> None:
    for name, value in asdict(measured).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        zero = name in may_be_zero
        if not number or not (0 < value < math.inf or (zero and value == 0)):
            raise InvalidArgument(
                f"{name} of {what} is {value!r}, expected a positive number"
                f"{' or 0' if zero else ''}: run commpress probe again"
            )


@dataclass(frozen=True)
class Links:
    """Measurements of links, and the nodes among which they were taken."""

    topology: Topology
    inside: Link | None
    between: Link | None
    stack: Stack | None = None
    # by codec, in ascending order
    trials: Mapping[str, Sequence[BufferTrial]] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        content: dict[str, Any] = {"nodes": self.topology.nodes}
        for name, part in (
            ("inside", self.inside),
            ("between", self.between),
            ("stack", self.stack),
        ):
            content[name] = None if part is None else asdict(part)
        content["trials"] = {
            codec: [list(asdict(trial).values()) for trial in tried]
            for codec, tried in self.trials.items()
        }
        FILE.write(path, content)


def load_links(path: str | Path) -> Links:
    """Read what ``Links.save`` wrote; anything else is refused with a reason."""
    content = FILE.read(path)
    nodes = content.get("nodes")
    if not isinstance(nodes, list) or not all(
        isinstance(node, list) and all(type(rank) is int for rank in node) for node in nodes
    ):
        raise InvalidArgument(
            f"{path} has nodes {nodes!r}, expected lists of ranks: run commpress probe again"
        )
    parts = (
        _part(path, content, "inside", Link),
        _part(path, content, "between", Link),
        _part(path, content, "stack", Stack),
    )
    return Links(
        Topology(tuple(map(tuple, nodes))), *parts, _trials(path, content.get("trials", {}))
    )


def _part(path: str | Path, content: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    found, every = content.get(name), fields(kind)  # type: ignore[arg-type]
    wanted = [f.name for f in every if f.default is MISSING]
    if found is None:
        return None
    if not isinstance(found, dict) or not set(wanted) <= found.keys() <= {f.name for f in every}:
        raise InvalidArgument(
            f"{path} has {name} {found!r}, expected {', '.join(wanted[:-1])} and {wanted[-1]}"
        )
    return kind(**found)


def _trials(path: str | Path, found: Any) -> dict[str, tuple[BufferTrial, ...]]:
    rows = [row for tried in found.values() for row in tried] if _lists(found) else None
    if rows is None or not all(isinstance(row, list) and len(row) == 3 for row in rows):
        raise InvalidArgument(
            f"{path} has trials {found!r}, expected [elements, seconds, seconds] by codec"
        )
    return {
        codec: tuple(sorted((BufferTrial(*row) for row in tried), key=lambda t: t.numel))
        for codec, tried in found.items()
    }


def _lists(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(tried, list) for tried in found.values())


# ---------------------------------------------------------------- which way


def choose(numel: int, codec: str | Codec, links: Links) -> Way:
    """The all-reduce that should be faster for ``numel`` elements. A pure function: every rank
    comes to the same answer.

    What was tried decides, between two trials as if times were straight lines on paper with two
    logarithmic scales. Other codecs and larger buffers are left to the model of bytes and
    latencies.
    """
    if not links.topology.layered or links.inside is None or links.between is None:
        return "flat"
    tried = links.trials.get(codec_named(codec).spec, ())
    if tried and numel <= tried[-1].numel:
        sizes = [math.log(t.numel) for t in tried]
        gains = [math.log(t.flat / t.hierarchical) for t in tried]
        return (
            "hierarchical"
            if float(np.interp(math.log(max(numel, 1)), sizes, gains)) > 0
            else "flat"
        )
    return (
        "hierarchical"
        if hierarchical_seconds(numel, codec, links) < flat_seconds(numel, codec, links)
        else "flat"
    )


def flat_seconds(numel: int, codec: str | Codec, links: Links) -> float:
    """Two exchanges of one row with every other rank; the slowest node decides."""
    nodes, size = links.topology.nodes, links.topology.size
    messages = max(-(-numel // MESSAGE), 1)
    row = _row(codec, -(-numel // messages), size, workers=size)
    out = max(len(node) * (size - len(node)) for node in nodes) * row
    inside = max(len(node) * (len(node) - 1) for node in nodes) * row
    return _pipelined([_phase(links, inside, out)] * 2, messages)


def hierarchical_seconds(numel: int, codec: str | Codec, links: Links) -> float:
    """Sums inside, two exchanges between the owners of a slice, encoded rows inside; messages
    overlap."""
    nodes, count = links.topology.nodes, len(links.topology.nodes)
    slices = links.topology.widest
    messages = max(-(-numel // two_level.PIECE), 1)
    numel = -(-numel // messages)
    codec, rows = codec_named(codec), slices * count
    row = _row(codec, numel, rows, workers=count)
    # of matrices, factors
    floats = (row if isinstance(codec, LowRankCodec) else _row(EXACT, numel, rows)) - HEADER
    sums = max(
        len(n) * (len(n) - 1) * (HEADER + share(slices, len(n)) * count * floats) for n in nodes
    )
    back = max(len(n) * (len(n) - 1) * share(slices, len(n)) * count * row for n in nodes)
    out = slices * (count - 1) * row
    phases = [
        _phase(links, sums, 0),
        _phase(links, 0, out),
        _phase(links, 0, out),
        _phase(links, back, 0),
    ]
    return _pipelined(phases, messages)


def _row(codec: str | Codec, numel: int, rows: int, *, workers: int = 1) -> int:
    """Bytes of one of so many rows; of what compresses whole tensors, as if these elements were a
    square matrix."""
    codec = codec_named(codec)
    if isinstance(codec, WholeTensorCodec):
        square = (math.isqrt(numel),) * 2
        bits = codec.bits(square, workers) if codec.takes(square) else 32.0
        return HEADER + math.ceil(bits / 64 * numel / rows) * 8
    return HEADER + -(-codec.row_bytes(width_of(numel, rows)) // 8) * 8


def _phase(links: Links, inside: int, between: int) -> tuple[float, float, float]:
    """(latency, seconds of the class inside, seconds of the class between) of bytes that leave the
    busiest rank or node."""
    latency = busy = crossing = 0.0
    if inside and links.inside:
        latency, busy = links.inside.latency, inside / links.inside.together
    if between and links.between:
        latency, crossing = max(latency, links.between.latency), between / links.between.together
    return latency, busy, crossing


def _pipelined(phases: list[tuple[float, float, float]], messages: int) -> float:
    """The first message goes through all phases; every other adds what the busier of the two
    classes needs for it."""
    first = sum(latency + max(inside, between) for latency, inside, between in phases)
    return first + (messages - 1) * max(sum(p[1] for p in phases), sum(p[2] for p in phases))
