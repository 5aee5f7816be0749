"""The mean of sparse changes in one phase: an all-gather of payloads, decoded by every rank in the
order of ranks.

    c = g·x + e        y = Q(c)        e ← c − y  y to everybody                    (all-gather)
    x := Σᵢ sᵢ·clip(yᵢ) / (K·g)                   sᵢ: the rank's share, 1 in the mean
    clip(yᵢ) = yᵢ · min(1, median‖y‖ / ‖yᵢ‖)      block by block, over the ranks that say something
                                                  in it

Blocks run through all tensors of the buffer, so small tensors cost no more bytes than their
elements. The median (the lower of two) limits an outlier to the norm of the other ranks.

Note: the same bits everywhere. The order of every sum is fixed: norms are added by halves, ranks
one after the other.
"""

import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from commpress.codecs import Policy, SparseCodec
from commpress.codecs.policy import BySize, Same, policy_of
from commpress.collectives.allreduce import ALONGSIDE, Call, Outcome, Workspace, exchange
from commpress.collectives.buckets import MESSAGE, Message, Span, messages
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges, FlatExchange
from commpress.collectives.frame import ALL_GATHER, ASKS, HEADER, NOT_FINITE, Frame
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.kernels.pieces import aligned
from commpress.work import Steps, overlapped


class GatherMean(FlatExchange):
    """The mean of what the ranks sent, decoded by each of them. ``clip``: limit the norm of each
    rank's block to the median."""

    def __init__(
        self,
        spans: list[Span],
        named: list[Message],
        codec: SparseCodec,
        feedback: ErrorFeedback | None,
        *,
        clip: bool = True,
    ) -> None:
        super().__init__(spans, named)
        self.codec, self.feedback, self.clip = codec, feedback, clip

    def mean(
        self,
        channel: Channel,
        x: torch.Tensor,
        shares: Sequence[float],
        call: Call,
    ) -> Steps[list[Outcome]]:
        """Replace ``x`` by the mean above. A rank with share 0 keeps its residual and sends
        zeros."""
        (message,), old, new = self.messages, self.feedback, None
        if old is not None:
            old.join(message.pieces, channel.rank)
            new = channel.workspace.propose(message, old, x.device)
        jobs = []
        for i, at in enumerate(range(0, self.numel, MESSAGE)):
            part = slice(at, min(at + MESSAGE, self.numel))
            jobs.append(
                self._mean(
                    call.after(i),
                    x[part],
                    None if old is None else old.sent[part],
                    None if new is None else new.sent[part],
                    shares,
                )
            )
        flags = yield from overlapped(jobs, limit=ALONGSIDE)
        finite, asked = (
            not any(flag & NOT_FINITE for flag in flags),
            any(flag & ASKS for flag in flags),
        )
        return [Outcome(message, finite, old, new, channel.workspace, asks=asked)]

    def _mean(
        self,
        call: Call,
        x: torch.Tensor,
        old: torch.Tensor | None,
        new: torch.Tensor | None,
        shares: Sequence[float],
    ) -> Steps[int]:
        """Replace ``x`` by its mean if all ranks were finite; return the flags of all ranks."""
        transport, workspace, sequence = call[:3]
        device, code, gain, ranks = x.device, self.codec.arithmetic, call.gain, transport.size
        used, start = code.row_bytes(x.numel()), perf_counter()
        size = HEADER + aligned(used)
        outbox, inbox = workspace.rows(size, 1, device), workspace.rows(size, ranks, device)
        row, flag = outbox[0, HEADER:].zero_()[:used], ASKS * call.asks
        if new is not None and old is not None:
            new.copy_(old)
        if shares[transport.rank]:
            values = x * gain if old is None else x * gain + old
            if bool(torch.isfinite(values).all()):
                row.copy_(code.encode(values))
                if new is not None:
                    torch.sub(values, code.decode(row, x.numel()), out=new)
            else:
                flag |= NOT_FINITE
        workspace.encoded(start)
        frame = Frame(
            ALL_GATHER, ranks, self.codec.spec, x.numel(), sequence, self.messages[0].label
        )
        mark = torch.full((1,), flag, dtype=torch.uint8, device=device)
        flags = yield from exchange(inbox, outbox, frame, mark, transport, workspace)
        start = perf_counter()
        if not flags & NOT_FINITE:
            x.zero_()
            heard = [rank for rank, share in enumerate(shares) if share]
            self._add(x, inbox[heard, HEADER:], [shares[rank] for rank in heard])
            x.div_(gain * ranks)
        workspace.decoded(start)
        workspace.give_rows(outbox, inbox)
        return flags

    def _add(self, out: torch.Tensor, rows: torch.Tensor, shares: Sequence[float]) -> None:
        """Add each decoded row, times its share, to ``out``."""
        weights = torch.tensor(shares, dtype=torch.float64, device=out.device)[:, None]
        for places, values in self.codec.arithmetic.sparse(rows, out.numel()):
            factors = within_median(_norms(values)) * weights if self.clip else weights
            values = values * factors.float()[:, :, None]
            for at, said in zip(places.flatten(1), values.flatten(1), strict=True):
                out[at] = out[at] + said


def within_median(norms: torch.Tensor) -> torch.Tensor:
    """Return factors of at most 1 that limit norms [ranks, blocks] to each block's median above
    zero."""
    ascending = norms.sort(dim=0).values
    silent = (ascending == 0).sum(0)
    median = ascending.gather(0, ((len(norms) + silent - 1) // 2)[None])
    return torch.where(norms > median, median / norms, 1.0)


def _norms(values: torch.Tensor) -> torch.Tensor:
    """Return float64 norms along the last dimension, added by halves: the same on every machine."""
    squares = values.double().square()
    width = 1 << (squares.shape[-1] - 1).bit_length()
    squares = torch.nn.functional.pad(squares, (0, width - squares.shape[-1]))
    while width > 1:
        width //= 2
        squares = squares[..., :width] + squares[..., width:]
    return squares[..., 0].sqrt()


class GatherMeans(Exchanges):
    """Exchanges of sparse changes, all with one codec; a policy's ``min_numel`` is ignored."""

    def __init__(
        self,
        policy: Policy,
        size: int,
        workspace: Workspace,
        *,
        clip: bool = True,
        feedback: bool = True,
    ) -> None:
        super().__init__(policy, size, workspace, feedback=feedback)
        self.codec, self.clip = _one_sparse(policy), clip

    def _cut(
        self,
        spans: list[Span],
        shapes: Sequence[Sequence[int]],
        policy: Policy,
        device: torch.device,
    ) -> Exchange:
        named = messages(
            spans, Same(self.codec), self.size, feedback=self.feedback, message=sys.maxsize
        )
        # of one, or of nothing
        feedbacks = [
            self.residuals.attach(message.keys, message.pieces, device) for message in named
        ]
        return GatherMean(spans, named, self.codec, *(feedbacks or [None]), clip=self.clip)


def _one_sparse(policy: Policy) -> SparseCodec:
    inner: Any = policy_of(policy.large) if isinstance(policy, BySize) else policy
    codec = inner.codec if isinstance(inner, Same) else inner
    if not isinstance(codec, SparseCodec):
        raise InvalidArgument(
            f"codec is {getattr(codec, 'spec', codec)!r}, expected one sparse codec for all "
            "tensors, such as 'topk-64+bits2': every rank sends its whole change to every other"
        )
    return codec
