"""All-to-all for layers with experts on different ranks, with autograd, splits that change with
every call, and compression."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commpress.codecs import Codec, codec_named
from commpress.collectives.all_to_all.all_to_all import (
    Way,
    all_to_all,
    check_codec,
    compressed_all_to_all,
)
from commpress.collectives.channel import Channel
from commpress.collectives.topology import Topology
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument


class AllToAll:
    """Send rows to other ranks and back, differentiably: dispatch tokens to experts and combine
    their results.

    Construct it on every rank of ``process_group`` (default: all), in the same order as other
    groups, because it makes a new one.

    - ``codec``: int8, int4, fp8, bf16, fp16 or none, for activations; ``gradient_codec`` for
      gradients (default: the same).
    - ``topology``: nodes, to send rows in two levels; see ``Way``. The bits are the same.
    - ``process_group``: a process group or a transport, such as an ``MpiTransport``.

    The gradient of an all-to-all is the all-to-all with its splits exchanged. With compression it
    is a straight-through estimate, as if the codec were the identity, and is compressed, too.
    """

    def __init__(
        self,
        codec: str | Codec = "none",
        *,
        gradient_codec: str | Codec | None = None,
        topology: Topology | None = None,
        process_group: dist.ProcessGroup | Transport | None = None,
    ) -> None:
        self.codec = codec_named(codec)
        self.gradient_codec = self.codec if gradient_codec is None else codec_named(gradient_codec)
        check_codec(self.codec)
        check_codec(self.gradient_codec, "gradient_codec")
        self.way = Way(None if topology is None else topology.nodes)
        self.channel = channel_over(process_group, "AllToAll")
        self.transport = self.channel.transport

    def __call__(
        self,
        rows: torch.Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Send ``in_splits[r]`` of ``rows`` to each rank r; return the received rows in the order
        of ranks.

        If only ``in_splits`` is given, the ranks first exchange numbers of rows (``counts``).
        """
        if in_splits is not None and out_splits is None:
            out_splits = self.counts(in_splits)
        return _Exchange.apply(rows.contiguous(), self, out_splits, in_splits)

    def counts(self, in_splits: Sequence[int]) -> list[int]:
        """Return how many rows each rank will send here, after all ranks have exchanged their
        ``in_splits``."""
        sent = torch.tensor([int(n) for n in in_splits], dtype=torch.int64)
        received = torch.empty_like(sent)
        self.channel.run(
            all_to_all(
                received, sent, transport=self.transport, way=self.way, sequence=self.channel.take()
            )
        )
        return received.tolist()

    def send(
        self,
        rows: torch.Tensor,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
        codec: Codec,
        sequence: int,
    ) -> torch.Tensor:
        """Send and receive once, without autograd."""
        out = rows.new_empty(len(rows) if out_splits is None else sum(out_splits), *rows.shape[1:])
        how: dict[str, Any] = {
            "transport": self.transport,
            "out_splits": out_splits,
            "in_splits": in_splits,
            "way": self.way,
            "sequence": sequence,
        }
        steps = (
            all_to_all(out, rows, **how)
            if codec.lossless
            else compressed_all_to_all(out, rows, codec=codec, **how)
        )
        self.channel.run(steps)
        return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        exchange: AllToAll,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
    ) -> torch.Tensor:
        # also for backward, which may run at another time on each rank
        sequence = exchange.channel.take(2)
        ctx.exchange, ctx.sequence = exchange, sequence + 1
        ctx.out_splits, ctx.in_splits = out_splits, in_splits
        return exchange.send(rows, out_splits, in_splits, exchange.codec, sequence)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        exchange: AllToAll = ctx.exchange
        rows = gradients[0].contiguous()
        back = exchange.send(
            rows, ctx.in_splits, ctx.out_splits, exchange.gradient_codec, ctx.sequence
        )
        return back, None, None, None


def channel_over(group: dist.ProcessGroup | Transport | None, owner: str) -> Channel:
    """Make a channel for ``owner`` over a process group or a transport."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return Channel(group)
    if not dist.is_initialized():
        raise InvalidArgument(
            f"torch.distributed is not initialized: call init_process_group before {owner}"
        )
    return Channel.among(group)
