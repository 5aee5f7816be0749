"""The mean of pairs: each rank exchanges tensors with one partner, drawn anew for each call.

    π = permutation(key)        pairs π₀π₁, π₂π₃, …        an odd one is alone
    x := (sᵢ·xᵢ + sⱼ·xⱼ) / (sᵢ + sⱼ)                       s: the ranks' shares

Weights travel uncompressed in float32: no rank knows its partner's weights, so it cannot send a
difference to them.

Note: both ranks of a pair get the same bits: the lower rank's tensor comes first in the sum.
"""

import sys
from collections.abc import Sequence
from math import isfinite, sqrt
from random import Random

import torch

from commpress.codecs import Policy
from commpress.codecs.family import EXACT
from commpress.codecs.policy import BySize, Same, policy_of
from commpress.collectives.allreduce import ALONGSIDE, Call, Outcome, Workspace, exchange
from commpress.collectives.buckets import MESSAGE, Message, Span, messages
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges, FlatExchange
from commpress.collectives.frame import ALL_GATHER, HEADER, Frame
from commpress.collectives.transports.transport import Subset
from commpress.errors import InvalidArgument
from commpress.kernels.pieces import aligned
from commpress.work import Steps, overlapped


def partners(key: int, size: int) -> list[int]:
    """Return each rank's partner, or the rank itself if it has none; the same on every rank for the
    same ``key``."""
    draw, order = Random(key), list(range(size))
    for last in range(size - 1, 0, -1):
        other = int(draw.random() * (last + 1))
        order[last], order[other] = order[other], order[last]
    mine = list(range(size))
    for a, b in zip(order[::2], order[1::2], strict=False):
        mine[a], mine[b] = b, a
    return mine


class PairMean(FlatExchange):
    """The mean over this rank and the partner drawn by ``key``. ``apart``: relative distance of
    this rank from the mean."""

    def __init__(self, spans: list[Span], named: list[Message]) -> None:
        super().__init__(spans, named)
        self.apart = 0.0

    def mean(
        self,
        channel: Channel,
        x: torch.Tensor,
        shares: Sequence[float],
        call: Call,
    ) -> Steps[list[Outcome]]:
        """Replace ``x`` by the mean above. If both shares are 0, the outcome is not finite. With
        share 0, ``x`` may hold any values."""
        me = channel.rank
        partner = partners(call.key, channel.size)[me]
        pair = sorted({me, partner})
        total = sum(shares[r] for r in pair)
        outcome = Outcome(self.messages[0], total > 0, None, None, channel.workspace)
        if shares[me] == 0:
            x.zero_()
        if partner == me:
            self.apart = 0.0
            return [outcome]
        factors = [shares[r] / total if total else 0.0 for r in pair]
        jobs = [
            self._mean(channel, pair, factors, x[at : at + MESSAGE], call.sequence + i)
            for i, at in enumerate(range(0, self.numel, MESSAGE))
        ]
        done = yield from overlapped(jobs, limit=ALONGSIDE)
        moved, norm = (sum(each) for each in zip(*done, strict=True))
        self.apart = sqrt(moved / norm) if norm and all(factors) else 0.0
        return [outcome]

    def _mean(
        self,
        channel: Channel,
        pair: list[int],
        factors: list[float],
        x: torch.Tensor,
        sequence: int,
    ) -> Steps[tuple[float, float]]:
        """Replace ``x`` by its mean; return ‖change‖² and ‖mean‖²."""
        workspace, between = channel.workspace, Subset(channel.transport, pair)
        size = HEADER + aligned(4 * x.numel())
        outbox, inbox = workspace.rows(size, 1, x.device), workspace.rows(size, 2, x.device)
        used = slice(HEADER, HEADER + 4 * x.numel())
        outbox[0, used].copy_(x.view(torch.uint8))
        frame = Frame(ALL_GATHER, 2, EXACT.spec, x.numel(), sequence, self.messages[0].label)
        mark = torch.zeros(1, dtype=torch.uint8, device=x.device)
        yield from exchange(inbox, outbox, frame, mark, between, workspace)
        first, second = (row.view(torch.float32) for row in inbox[:, used])
        mean = first * factors[0] + second * factors[1]
        squares = square_sum(mean - x), square_sum(mean)
        x.copy_(mean)
        workspace.give_rows(outbox, inbox)
        return squares


class PairMeans(Exchanges):
    """Exchanges between pairs, without residuals."""

    def __init__(self, policy: Policy, size: int, workspace: Workspace) -> None:
        super().__init__(policy, size, workspace, feedback=False)
        codec = policy_of(policy.large) if isinstance(policy, BySize) else policy
        if not isinstance(codec, Same) or codec.codec != EXACT:
            raise InvalidArgument(
                f"codec is {policy!r}, expected None: pairs exchange weights, of which neither "
                "knows what the other has, so there is no change to compress"
            )

    def _cut(
        self,
        spans: list[Span],
        shapes: Sequence[Sequence[int]],
        policy: Policy,
        device: torch.device,
    ) -> Exchange:
        return PairMean(
            spans, messages(spans, Same(EXACT), self.size, feedback=False, message=sys.maxsize)
        )


def square_sum(x: torch.Tensor) -> float:
    """Return ‖x‖² of a flat float32 tensor, summed in float64 over pieces that fit caches."""
    pieces = x.split(1 << 16 if x.device.type == "cpu" else 1 << 24)
    if isfinite(total := float(torch.stack([piece.dot(piece) for piece in pieces]).double().sum())):
        return total
    # elements beyond 1e16 overflow
    return float(torch.stack([piece.double().square().sum() for piece in pieces]).sum())
