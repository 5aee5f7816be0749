"""Ring attention: keys and values of each rank go round, and each rank attends to them block by
block with an online softmax.

    forward, for every block:    s = q kᵀ/√d      m ← max(m, s)
                                 l ← l·e^(m − m′) + Σ e^(s − m′)
                                 o ← o·e^(m − m′) + e^(s − m′) v
    backward, with D = Σ do·o:   p = e^(s − lse)      ds = p (do vᵀ − D)/√d      dq += ds k
                                 dk, dv go to the rank that has k, v

Keys and values are encoded once, where they are, and passed on as bytes: no hop adds an error, and
their own rank attends to what the others see. With a causal mask blocks stop at the last rank, for
nobody behind it needs them.
"""

import torch

from commpress.integrations.pipeline.edge_codec import EdgeCodec
from commpress.integrations.sequence.shift import (
    Begun,
    SequencePlace,
    packed,
    packed_size,
    shift,
    unpacked,
)
from commpress.work import Steps

Block = tuple[torch.Tensor, torch.Tensor]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    place: SequencePlace,
    *,
    causal: bool,
    codec: EdgeCodec | None,
    sequence: int,
) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
    """Output and log-sum-exp of this rank's queries; tensors are [..., positions, dim]. Takes
    ``place.size`` numbers."""
    most = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(most), q.new_zeros(*q.shape[:-1], v.shape[-1])
    walk = _blocks(k, v, place, causal=causal, codec=codec, sequence=sequence)
    while (found := (yield from walk.next())) is not None:
        source, (keys, values) = found
        if keys.shape[-2] == 0:
            continue
        scores = _scores(q, keys, place, source, causal=causal)
        peak = torch.maximum(most, scores.amax(-1, keepdim=True))
        safe = peak.clamp(min=torch.finfo(peak.dtype).min)  # where a position sees nothing yet
        weights, decay = (scores - safe).exp(), (most - safe).exp()
        most, total, out = (
            peak,
            total * decay + weights.sum(-1, keepdim=True),
            out * decay + weights @ values,
        )
    return out / total, most + total.log()


def attend_back(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    place: SequencePlace,
    *,
    causal: bool,
    codec: EdgeCodec | None,
    gradient_codec: EdgeCodec | None,
    sequence: int,
) -> Steps[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Gradients of queries, keys and values. What a block earns here goes straight to its rank,
    which adds in a fixed order.

    Takes twice ``place.size`` numbers.
    """
    me, size = place.rank, place.size
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    inner = (gradient * out).sum(-1, keepdim=True)
    shapes = (k.shape, v.shape)
    walk = _blocks(k, v, place, causal=causal, codec=codec, sequence=sequence)
    for hop in range(size):
        found = yield from walk.next()
        earned: Block | None = None
        if found is not None:
            source, (keys, values) = found
            weights = (_scores(q, keys, place, source, causal=causal) - lse).exp()
            ds = weights * (gradient @ values.mT - inner) * q.shape[-1] ** -0.5
            dq += ds @ keys
            earned = ds.mT @ q, weights.mT @ gradient
        comes = not causal or me + hop < size
        message = (
            q.new_empty(0, dtype=torch.uint8) if earned is None else packed(earned, gradient_codec)
        )
        room = torch.empty(
            sum(packed_size(shapes, k.dtype, gradient_codec)), dtype=torch.uint8, device=k.device
        )
        yield from shift(
            room,
            message,
            place,
            by=-hop,
            sequence=sequence + size + hop,
            sends=earned is not None,
            receives=comes,
        )
        if comes:
            one, other = unpacked(room, shapes, k.dtype, gradient_codec)
            dk += one
            dv += other
    return dq, dk, dv


class _blocks:
    """The blocks of all ranks that this one attends to, its own first; the next is on its way
    meanwhile."""

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        place: SequencePlace,
        *,
        causal: bool,
        codec: EdgeCodec | None,
        sequence: int,
    ) -> None:
        self.shapes, self.dtype, self.place = (k.shape, v.shape), k.dtype, place
        self.causal, self.codec, self.sequence, self.hop = causal, codec, sequence, 0
        self.message = packed((k, v), codec)
        self.coming: Begun | None = None
        self.room = self.message

    def next(self) -> Steps[tuple[int, Block] | None]:
        """The source and its keys and values; None if it is one that this rank does not see."""
        hop, me, size = self.hop, self.place.rank, self.place.size
        if self.coming is not None:
            yield from self.coming.finish()
            self.message = self.room
        self.hop, self.coming = hop + 1, None
        if hop == size:
            return None
        if hop + 1 < size:
            self._pass_on(hop)
        source = (me - hop) % size
        if self.causal and source > me:
            return None
        return source, self._at(source)

    def _pass_on(self, hop: int) -> None:
        me, size = self.place.rank, self.place.size
        held, coming = (me - hop) % size, (me - hop - 1) % size
        self.room = torch.empty(
            sum(self._sizes(coming)), dtype=torch.uint8, device=self.message.device
        )
        self.coming = Begun(
            shift(
                self.room,
                self.message,
                self.place,
                by=1,
                sequence=self.sequence + hop,
                sends=not self.causal or held <= me < size - 1,
                receives=not self.causal or coming < me,
            )
        )

    def _shapes(self, rank: int) -> tuple[torch.Size, ...]:
        return tuple(torch.Size((*s[:-2], self.place.lengths[rank], s[-1])) for s in self.shapes)

    def _sizes(self, rank: int) -> tuple[int, ...]:
        return packed_size(self._shapes(rank), self.dtype, self.codec)

    def _at(self, rank: int) -> Block:
        keys, values = unpacked(self.message, self._shapes(rank), self.dtype, self.codec)
        return keys, values


def _scores(
    q: torch.Tensor, keys: torch.Tensor, place: SequencePlace, source: int, *, causal: bool
) -> torch.Tensor:
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    if causal and source == place.rank:
        ahead = torch.ones(q.shape[-2], keys.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores
