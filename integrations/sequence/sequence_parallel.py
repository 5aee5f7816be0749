"""Sequence parallelism, differentiable: ring attention, heads for positions, and states passed on,
over a channel of ours."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commpress.codecs import Codec, codec_named
from commpress.collectives.all_to_all.all_to_all import Way, all_to_all, check_codec
from commpress.collectives.channel import Channel
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument
from commpress.integrations.pipeline.edge_codec import edge_codec
from commpress.integrations.sequence import heads, prefix_state, ring_attention
from commpress.integrations.sequence.shift import SequencePlace


class SequenceParallel:
    """One rank's end of sequences that are divided among the ranks of ``process_group``, of
    ``transport`` or of ``channel``.

    Construct it on all of them, in the same order as other groups; every rank makes the same calls
    in the same order.

    - ``codec``: int8, int4, fp8, bf16, fp16, none or a registered one, for what is sent forward;
      ``gradient_codec`` for gradients (default: the same).

    ``divide(length)`` says how many positions this rank has of the sequences that follow; ranks may
    differ, and have none.
    """

    def __init__(
        self,
        codec: str | Codec = "none",
        *,
        gradient_codec: str | Codec | None = None,
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        channel: Channel | None = None,
    ) -> None:
        self.codec = codec_named(codec)
        self.gradient_codec = self.codec if gradient_codec is None else codec_named(gradient_codec)
        check_codec(self.codec)
        check_codec(self.gradient_codec, "gradient_codec")
        if channel is None and transport is None and not dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is not initialised: call init_process_group before "
                "SequenceParallel"
            )
        self.channel = channel or (
            Channel.among(process_group) if transport is None else Channel(transport)
        )
        self.way = Way()
        self.place = SequencePlace(self.channel.transport, ())

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each rank."""
        return self.place.lengths

    def divide(self, length: int, *, lengths: Sequence[int] | None = None) -> None:
        """This rank has ``length`` positions from here on; the ranks tell each other, unless all
        ``lengths`` are given."""
        transport, count = self.channel.transport, self.channel.size
        if lengths is None:
            told = torch.full((count,), length, dtype=torch.int64)
            every = torch.empty_like(told)
            self.channel.run(
                all_to_all(every, told, transport=transport, sequence=self.channel.take())
            )
            lengths = every.tolist()
        if len(lengths) != count or min(lengths) < 0 or lengths[self.channel.rank] != length:
            raise InvalidArgument(
                f"length is {length} and lengths are {list(lengths)}, expected one for each of "
                f"{count} ranks, none below 0, and this rank's at place {self.channel.rank}"
            )
        self.place = SequencePlace(transport, tuple(lengths), self.place.scratch)

    def ring_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True
    ) -> torch.Tensor:
        """Attention of all positions, of which this rank has [..., own positions, dim]."""
        self._check(-2, q=q, k=k, v=v)
        return _RingAttention.apply(q, k, v, self, causal)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, own positions, heads, dim] becomes [batch, all positions, own heads, dim]."""
        self._check(1, x=x)
        return _Heads.apply(x, self)

    def to_positions(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Back again; ``heads`` are those of all ranks together."""
        return _Positions.apply(x, self, heads)

    def prefix(self, state: torch.Tensor, decay: torch.Tensor | float = 1.0) -> torch.Tensor:
        """The sum of the states of all ranks before this one, each times the ``decay`` of the ranks
        between (LASP)."""
        decay = torch.as_tensor(decay, dtype=state.dtype, device=state.device)
        return _Prefix.apply(state, decay, self)

    def _check(self, dimension: int, **tensors: torch.Tensor) -> None:
        if not self.lengths:
            raise InvalidArgument(
                "nobody said how sequences are divided: call divide(length) first, on every rank"
            )
        mine = self.lengths[self.channel.rank]
        for name, tensor in tensors.items():
            if tensor.shape[dimension] != mine:
                raise InvalidArgument(
                    f"{name} of shape {tuple(tensor.shape)} has {tensor.shape[dimension]} "
                    f"positions, expected {mine} as divide() was told"
                )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ranks: SequenceParallel,
        causal: bool,
    ) -> torch.Tensor:
        # for backward too: its turn may differ by rank
        sequence = ranks.channel.take(3 * ranks.place.size)
        codec = edge_codec(ranks.codec)
        steps = ring_attention.attend(
            q, k, v, ranks.place, causal=causal, codec=codec, sequence=sequence
        )
        out, lse = ranks.channel.run(steps)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = (ranks, ranks.place, causal, codec, sequence + ranks.place.size)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ranks, place, causal, codec, sequence = ctx.how
        q, k, v, out, lse = ctx.saved_tensors
        found = ranks.channel.run(
            ring_attention.attend_back(
                gradients[0],
                q,
                k,
                v,
                out,
                lse,
                place,
                causal=causal,
                codec=codec,
                gradient_codec=edge_codec(ranks.gradient_codec),
                sequence=sequence,
            )
        )
        return *found, None, None


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
        sequence = ranks.channel.take(2)
        ctx.how = (ranks, ranks.place, x.shape[2], sequence + 1)
        return ranks.channel.run(
            heads.to_heads(x, ranks.place, ranks.way, codec=ranks.codec, sequence=sequence)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ranks, place, count, sequence = ctx.how
        steps = heads.to_positions(
            gradients[0], count, place, ranks.way, codec=ranks.gradient_codec, sequence=sequence
        )
        return ranks.channel.run(steps), None


class _Positions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SequenceParallel, count: int) -> torch.Tensor:
        sequence = ranks.channel.take(2)
        ctx.how = (ranks, ranks.place, sequence + 1)
        return ranks.channel.run(
            heads.to_positions(
                x, count, ranks.place, ranks.way, codec=ranks.codec, sequence=sequence
            )
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ranks, place, sequence = ctx.how
        steps = heads.to_heads(
            gradients[0], place, ranks.way, codec=ranks.gradient_codec, sequence=sequence
        )
        return ranks.channel.run(steps), None, None


class _Prefix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, state: torch.Tensor, decay: torch.Tensor, ranks: SequenceParallel
    ) -> torch.Tensor:
        sequence = ranks.channel.take(2)
        ctx.save_for_backward(decay)
        ctx.how = (ranks, ranks.place, sequence + 1)
        codec = edge_codec(ranks.codec)
        return ranks.channel.run(
            prefix_state.prefix(state, decay, ranks.place, codec=codec, sequence=sequence)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ranks, place, sequence = ctx.how
        (decay,) = ctx.saved_tensors
        codec = edge_codec(ranks.gradient_codec)
        steps = prefix_state.prefix_back(
            gradients[0].contiguous(), decay, place, codec=codec, sequence=sequence
        )
        return ranks.channel.run(steps), None, None
