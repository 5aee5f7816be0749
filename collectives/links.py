"""The all-reduce that measured links make the faster one."""

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
