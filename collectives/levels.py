"""Two levels for a channel: whether they are faster, the hierarchy with its counters, and residuals
to save and load.

Residuals belong to slices, keyed by (parameter name, first element of the slice), and a slice's R
is the sum of the nodes' sent residuals / divisor + the reduced ones. An elastic checkpoint holds R
of the same flat pieces as without a topology, so either loads the other's.
"""

import logging
import math
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from commpress.codecs import Codec, codec_named, policy_of
from commpress.codecs.family import EXACT
from commpress.codecs.whole_tensors import LowRankCodec, WholeTensorCodec
from commpress.collectives import two_level
from commpress.collectives.buckets import MESSAGE, PIECE, Span
from commpress.collectives.channel import Channel, Counted
from commpress.collectives.frame import HEADER
from commpress.collectives.measured_links import Links
from commpress.collectives.residual_state import Residuals
from commpress.collectives.topology import Topology, agree
from commpress.collectives.two_level import Hierarchy, hierarchy_of, routes, share
from commpress.feedback import Key, ResidualStore
from commpress.kernels.pieces import NUMEL, RESIDUAL, WIDTH, aligned, width_of
from commpress.work import run

log = logging.getLogger("commpress")
Way = Literal["flat", "hierarchical"]


class Levels:
    """A hierarchy whose bytes are counted and whose waits are timed."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._inside = Counted(hierarchy.inside)
        self._between = {
            index: Counted(transport) for index, transport in hierarchy.between.items()
        }
        self.hierarchy = replace(hierarchy, inside=self._inside, between=self._between)

    def __str__(self) -> str:
        return str(self.hierarchy.topology)

    @property
    def sent_bytes(self) -> int:
        return self._inside.sent_bytes + self.between_bytes

    @property
    def between_bytes(self) -> int:
        """Bytes that left the node."""
        return sum(transport.sent_bytes for transport in self._between.values())

    @property
    def waited(self) -> float:
        """Seconds spent waiting for peers and the network."""
        return sum(transport.seconds for transport in (self._inside, *self._between.values()))

    # ------------------------------------------------------------ checkpoints

    def lengths(self, numels: dict[str, int]) -> dict[Key, int]:
        """Return the number of elements of every slice of this rank."""
        return {key: length for key, _, length, _ in self._slices(numels)}

    def parts(self, store: ResidualStore, numels: dict[str, int]) -> dict[Key, torch.Tensor]:
        """Return this rank's part of each flat piece; the mean of the parts over the ranks is R."""
        whole = {name: torch.zeros(numel) for name, numel in numels.items()}
        self._add(store, whole)
        return {
            (name, at): vector[at : at + PIECE]
            for name, vector in whole.items()
            for at in range(0, len(vector), PIECE)
        }

    def pay(self, store: ResidualStore, name: str, out: torch.Tensor) -> None:
        """Add the residual of a parameter to its gradient on this rank and zero it, as
        ``ResidualStore.pay`` does."""
        for sent, reduced in self._add(store, {name: out}):
            sent.zero_()
            reduced.zero_()

    def _add(
        self, store: ResidualStore, whole: dict[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Add this rank's part of R to vectors of these parameters; return the residuals that were
        read."""
        own = {key: (sent, reduced) for key, sent, reduced in store.places()}
        size, divisor = self.hierarchy.topology.size, self.hierarchy.divisor
        added = []
        for key, index, length, width in self._slices(
            {name: len(vector) for name, vector in whole.items()}
        ):
            if key in own:
                sent, reduced = own[key]
                name, start = key
                part = whole[name][start : start + length]
                part += size / divisor * sent
                row = part[self.hierarchy.between[index].rank * width :][:width]
                row += size * reduced[: row.numel()]
                added.append(own[key])
        return added

    def share(self, totals: dict[Key, torch.Tensor]) -> Residuals:
        """Make residuals whose R is ``totals``: equal sent residuals on all nodes, reduced ones
        zero."""
        pieces: dict[str, dict[int, torch.Tensor]] = {}
        for (name, offset), total in totals.items():
            pieces.setdefault(name, {})[offset] = total
        whole = {
            name: torch.cat([parts[at] for at in sorted(parts)]) for name, parts in pieces.items()
        }
        weight = self.hierarchy.divisor / len(self.hierarchy.topology.nodes)
        shared: Residuals = {}
        for key, _, length, width in self._slices(
            {name: len(vector) for name, vector in whole.items()}
        ):
            total = whole[key[0]][key[1] : key[1] + length]
            shared[key] = (weight * total, torch.zeros(width))
        return shared

    def _slices(self, numels: dict[str, int]) -> list[tuple[Key, int, int, int]]:
        """List (key, index, elements, elements per row) of this rank's slices of these
        parameters."""
        found = []
        for name, numel in numels.items():
            for route in routes([Span(name, 0, numel)], policy_of("sign"), self.hierarchy):
                for index, message in route.between.items():
                    for key, line in zip(message.keys, message.pieces.table, strict=True):
                        if line[RESIDUAL] >= 0:
                            found.append((key, index, int(line[NUMEL]), int(line[WIDTH])))
        return found


def divide(channel: Channel, topology: Topology | str | Links, numel: int, codec: Codec) -> None:
    """Give ``channel`` two levels from now on, unless one level is the only one or, by measured
    ``Links``, faster for ``numel`` elements; collective, before any work. "auto" reads each rank's
    launcher."""
    given = (
        Topology.parse(topology) if isinstance(topology, str) and topology != "auto" else topology
    )
    note = ""
    if isinstance(given, Links):
        note = choose(numel, codec, given)
        log.info(
            "buffers of %d elements on nodes %s: %s is the faster all-reduce",
            numel,
            given.topology,
            note,
        )
        given = given.topology
    agreed = run(agree(channel.inner, given if isinstance(given, Topology) else None, note=note))
    if not agreed.layered:
        level = logging.DEBUG if topology == "auto" else logging.WARNING
        log.log(
            level,
            (
                "one node, or one rank on every node: there is one level only, gradients are "
                "reduced flat"
            ),
        )
    if agreed.layered and note != "flat":
        channel.levels = Levels(hierarchy_of(agreed, channel.inner))
        channel.at_once = 1  # see ``two_level``: a rank sends before it waits


# ---------------------------------------------------------------- whether they are faster


def choose(numel: int, codec: str | Codec, links: Links) -> Way:
    """Choose the all-reduce that should be faster for ``numel`` elements: a pure function, the same
    on every rank.

    Trials decide, interpolated linearly in log-log scale. For other codecs and larger buffers, the
    model of bytes and latencies decides.
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
    """Model the seconds of two exchanges of one row with every other rank, by the slowest node."""
    nodes, size = links.topology.nodes, links.topology.size
    messages = max(-(-numel // MESSAGE), 1)
    row = _row(codec, -(-numel // messages), size, workers=size)
    out = max(len(node) * (size - len(node)) for node in nodes) * row
    inside = max(len(node) * (len(node) - 1) for node in nodes) * row
    return _pipelined([_phase(links, inside, out)] * 2, messages)


def hierarchical_seconds(numel: int, codec: str | Codec, links: Links) -> float:
    """Model the seconds of sums inside nodes, two exchanges between slice owners and encoded rows
    inside; messages overlap."""
    nodes, count = links.topology.nodes, len(links.topology.nodes)
    slices = links.topology.widest
    messages = max(-(-numel // two_level.PIECE), 1)
    numel = -(-numel // messages)
    codec, rows = codec_named(codec), slices * count
    row = _row(codec, numel, rows, workers=count)
    # low-rank codecs send factors
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
    """Return the bytes of one of ``rows`` rows; for codecs of whole tensors, of a square matrix of
    ``numel`` elements."""
    codec = codec_named(codec)
    if isinstance(codec, WholeTensorCodec):
        square = (math.isqrt(numel),) * 2
        bits = codec.bits(square, workers) if codec.takes(square) else 32.0
        return HEADER + math.ceil(bits / 64 * numel / rows) * 8
    return HEADER + aligned(codec.row_bytes(width_of(numel, rows)))


def _phase(links: Links, inside: int, between: int) -> tuple[float, float, float]:
    """Return latency, seconds inside and seconds between nodes for the bytes that leave the busiest
    rank or node."""
    latency = busy = crossing = 0.0
    if inside and links.inside:
        latency, busy = links.inside.latency, inside / links.inside.together
    if between and links.between:
        latency, crossing = max(latency, links.between.latency), between / links.between.together
    return latency, busy, crossing


def _pipelined(phases: list[tuple[float, float, float]], messages: int) -> float:
    """Return the seconds of all messages: the first takes all phases, each other only the busier
    class's time."""
    first = sum(latency + max(inside, between) for latency, inside, between in phases)
    return first + (messages - 1) * max(sum(p[1] for p in phases), sum(p[2] for p in phases))
