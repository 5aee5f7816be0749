"""Choose the faster all-reduce from measured links."""

import math
from typing import Literal

import numpy as np

from commpress.codecs import Codec, codec_named
from commpress.codecs.family import EXACT
from commpress.codecs.whole_tensors import LowRankCodec, WholeTensorCodec
from commpress.collectives import two_level
from commpress.collectives.buckets import MESSAGE
from commpress.collectives.frame import HEADER
from commpress.collectives.measured_links import Links
from commpress.collectives.two_level import share
from commpress.kernels.pieces import width_of

Way = Literal["flat", "hierarchical"]


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
    return HEADER + -(-codec.row_bytes(width_of(numel, rows)) // 8) * 8


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
