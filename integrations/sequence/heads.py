"""Heads for positions: from some positions with all heads to all positions with some heads, and
back (Ulysses)."""

from typing import Any

import torch

from commpress.codecs import Codec
from commpress.collectives.all_to_all.all_to_all import Way, all_to_all, compressed_all_to_all
from commpress.integrations.sequence.shift import SequencePlace
from commpress.work import Steps


def shares(heads: int, size: int) -> list[int]:
    """Heads of each rank: as even as they can be, the first ranks with one more."""
    return [heads // size + (r < heads % size) for r in range(size)]


def to_heads(
    x: torch.Tensor, place: SequencePlace, way: Way, *, codec: Codec, sequence: int
) -> Steps[torch.Tensor]:
    """[batch, own positions, heads, dim] to [batch, all positions, own heads, dim]."""
    batch, own, heads, dim = x.shape
    mine = shares(heads, place.size)
    inp = torch.cat([part.reshape(-1, dim) for part in x.split(mine, 2)])
    ins = [batch * own * count for count in mine]
    outs = [batch * length * mine[place.rank] for length in place.lengths]
    out = yield from _exchanged(inp, ins, outs, place, way, codec, sequence)
    parts = [
        part.view(batch, length, -1, dim)
        for part, length in zip(out.split(outs), place.lengths, strict=True)
        if length
    ]
    return (
        torch.cat(parts, 1) if mine[place.rank] else x.new_empty(batch, sum(place.lengths), 0, dim)
    )


def to_positions(
    x: torch.Tensor, heads: int, place: SequencePlace, way: Way, *, codec: Codec, sequence: int
) -> Steps[torch.Tensor]:
    """The way back: ``heads`` are all that there are."""
    batch, _, own, dim = x.shape
    mine, length = shares(heads, place.size), place.lengths[place.rank]
    inp = torch.cat([part.reshape(-1, dim) for part in x.split(list(place.lengths), 1)])
    ins = [batch * each * own for each in place.lengths]
    outs = [batch * length * count for count in mine]
    out = yield from _exchanged(inp, ins, outs, place, way, codec, sequence)
    return torch.cat(
        [
            part.view(batch, length, count, dim)
            for part, count in zip(out.split(outs), mine, strict=True)
        ],
        2,
    )


def _exchanged(
    inp: torch.Tensor,
    ins: list[int],
    outs: list[int],
    place: SequencePlace,
    way: Way,
    codec: Codec,
    sequence: int,
) -> Steps[torch.Tensor]:
    out = inp.new_empty(sum(outs), inp.shape[1])
    how: dict[str, Any] = {
        "transport": place.transport,
        "out_splits": outs,
        "in_splits": ins,
        "way": way,
        "sequence": sequence,
    }
    rows = inp.contiguous()
    yield from (
        all_to_all(out, rows, **how)
        if codec.lossless
        else compressed_all_to_all(out, rows, codec=codec, **how)
    )
    return out
