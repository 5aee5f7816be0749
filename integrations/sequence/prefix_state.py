"""Prefix of states over the ranks of a sequence: what linear attention has gathered before a rank's
first position (LASP).

before_r = Σ_{j<r} (Π_{j<i<r} decay_i) · state_j        decay_i: what rank i's positions leave of a
                                                        state that comes in
"""

import torch

from commpress.integrations.pipeline.edge_codec import EdgeCodec
from commpress.integrations.sequence.shift import (
    SequencePlace,
    packed,
    packed_size,
    shift,
    unpacked,
)
from commpress.work import Steps


def prefix(
    state: torch.Tensor,
    decay: torch.Tensor,
    place: SequencePlace,
    *,
    codec: EdgeCodec | None,
    sequence: int,
) -> Steps[torch.Tensor]:
    """before_r from the rank before, and decay · before_r + state to the rank behind. ``decay``
    broadcasts over ``state``."""
    return (yield from _along(state, decay, place, by=1, codec=codec, sequence=sequence))


def prefix_back(
    gradient: torch.Tensor,
    decay: torch.Tensor,
    place: SequencePlace,
    *,
    codec: EdgeCodec | None,
    sequence: int,
) -> Steps[torch.Tensor]:
    """The gradient of ``state``: that of what went to the rank behind, which comes back from
    there."""
    return (yield from _along(gradient, decay, place, by=-1, codec=codec, sequence=sequence))


def _along(
    own: torch.Tensor,
    decay: torch.Tensor,
    place: SequencePlace,
    *,
    by: int,
    codec: EdgeCodec | None,
    sequence: int,
) -> Steps[torch.Tensor]:
    behind, shapes = place.rank if by == 1 else place.size - 1 - place.rank, (own.shape,)
    came = torch.zeros_like(own)
    if behind > 0:
        room = torch.empty(
            sum(packed_size(shapes, own.dtype, codec)), dtype=torch.uint8, device=own.device
        )
        yield from shift(room, room[:0], place, by=by, sequence=sequence, sends=False)
        (came,) = unpacked(room, shapes, own.dtype, codec)
    if behind < place.size - 1:
        message = packed((came * decay + own,), codec)
        yield from shift(message[:0], message, place, by=by, sequence=sequence, receives=False)
    return came
