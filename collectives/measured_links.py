"""Links between ranks, as measured. Loads no torch.

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
smallest exchange of a pair after a barrier of all ranks: it includes the delay of late ranks, for
which a collective's phases wait as well. Bandwidths are bytes per second in each direction: of one
pair alone, and of a node when all its ranks send to all others of the class at once, a message
between nodes counted where it leaves. ``burst`` bytes pass at once after a rest. ``stack`` is the
processor time, for the simulator. ``trials`` are all-reduces: elements, seconds flat, seconds in
two levels. Older files have none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from commpress.collectives.nodes import Topology
from commpress.documents import Document
from commpress.errors import InvalidArgument

FIRST = 1 << 16  # message bytes beyond which the cost per byte no longer falls
FILE = Document("commpress links", 1, 1 << 16, "commpress probe")
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
    # of the one machine that runs all nodes (namespaces, containers), 0 if there are several
    # machines
    cores: int
    # seconds of a core for a byte that torch's all-reduce of float32 sends: both ends and the sum
    ring_byte: float = 0.0
    half_byte: float = 0.0  # the same for bfloat16; 0 if not measured
    reduce: float = 0.0  # seconds of the shortest compressed all-reduce, between pieces of work
    busy: float = 0.0  # seconds of the smallest exchange of all ranks while every rank computes
    # seconds of a core for a message of torch's smallest all-reduce, both ends
    ring_message: float = 0.0
    reduce_core: float = 0.0  # seconds of a core of one rank for the shortest compressed all-reduce
    ring_busy: float = 0.0  # seconds of torch's smallest all-reduce while every rank computes
    first: float = 0.0  # seconds of a core at each end for the first ``FIRST`` bytes of a message
    # seconds until the last rank has encoded, relative to fairly shared ``cores``; 0: not measured
    uneven: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "the stack", may_be_zero=tuple(asdict(self)))


@dataclass(frozen=True)
class BufferTrial:
    """Seconds of one buffer's all-reduce in one level and in two."""

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
    """Measurements of links, with the nodes that were measured."""

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
    """Read a file written by ``Links.save``; raise an error with the reason for any other."""
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
