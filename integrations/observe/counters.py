"""Counters of a hook."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from commpress.collectives.allreduce import Outcome
from commpress.collectives.buckets import Message, Span
from commpress.collectives.channel import Channel
from commpress.collectives.exact_rows import ExactMessage
from commpress.collectives.reduce_scatter import Deal
from commpress.kernels.pieces import KIND, NUMEL, RESIDUAL
from commpress.kernels.reference import CASTS
from commpress.logs import tell_on_first, warn_on_first
from commpress.totals import Totals


@dataclass
class Counters(Totals):
    """Totals of one rank since the state was made. Bytes are those that this rank sent, including
    headers."""

    steps: int = 0
    skipped_steps: int = 0
    skipped_buckets: int = 0
    plain_steps: int = 0  # steps by torch's own all-reduce
    messages: int = 0
    # bytes of a float32 ring all-reduce of the same buckets: 8·(P−1)/P per element
    logical_bytes: int = 0
    wire_bytes: int = 0
    # part of wire_bytes that left the node; counted with a topology
    between_bytes: int = 0
    compressed_elements: int = 0
    exact_elements: int = 0
    # part of exact_elements that torch's all-reduce averaged, because no codec takes their dtype or
    # layout (float64, complex, sparse)
    plain_elements: int = 0
    encode_seconds: float = 0.0
    # waiting for peers and the network, partly overlapped with backward
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0
    # ranks that died and lost their residuals; ranks that handed these over are not counted
    lost_ranks: int = 0
    choice: str = ""  # choice of codec="auto" or of a plan, with its reason
    # parameter → ‖c − Q(c)‖ / ‖c‖, last measured
    errors: dict[str, float] = field(default_factory=dict)

    def bucket(self, numel: int, messages: Sequence[Message], ranks: int) -> None:
        self.messages += len(messages)
        self.logical_bytes += 8 * (ranks - 1) * numel // ranks
        for message in messages:
            self.exact_elements += message.exact
            self.compressed_elements += message.pieces.numel - message.exact

    def elements(self, plan: Sequence[Deal | ExactMessage], ranks: int = 1) -> None:
        """Count the elements of the received rows of a reduce-scatter or an all-gather."""
        for deal in plan:
            if isinstance(deal, ExactMessage):
                self.compressed_elements += ranks * (deal.stop - deal.start)
                continue
            table = deal.every.pieces.table
            lossy = int(table[~np.isin(table[:, KIND], CASTS), NUMEL].sum())
            self.compressed_elements += lossy
            self.exact_elements += deal.every.pieces.numel - lossy

    def channels(self, channels: Iterable[Channel]) -> None:
        """Take the totals of channels and their workspaces."""
        every = list(channels)
        self.wire_bytes = sum(channel.sent_bytes for channel in every)
        self.wire_seconds = sum(channel.waited for channel in every)
        self.encode_seconds = sum(channel.workspace.encode_seconds for channel in every)
        self.decode_seconds = sum(channel.workspace.decode_seconds for channel in every)

    def step(self, finite: bool, channel: Channel, beside: int = 0) -> None:
        """``beside``: bytes that did not cross the channel."""
        self.steps += 1
        self.skipped_steps += not finite
        self.channels([channel])
        self.wire_bytes += beside
        self.between_bytes = channel.between_bytes

    @classmethod
    def together(cls, every: Sequence["Counters"]) -> "Counters":
        """Combine the counters of several states that took the same steps: bytes, messages and
        seconds add up."""
        total = cls()
        for counters in every:
            for name, value in vars(counters).items():
                mine = getattr(total, name)
                alike = name in ("steps", "skipped_steps", "plain_steps")
                setattr(
                    total,
                    name,
                    max(mine, value)
                    if alike
                    else mine | value
                    if name == "errors"
                    else mine + value,
                )
        return total

    @property
    def ratio(self) -> float:
        """Factor by which bytes are fewer than float32's."""
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def say(self, rank: int, *, wanted: bool) -> None:
        """Log a summary after the first step that may be compressed, or warn if ``wanted`` and
        nothing was compressed."""
        if wanted and self.compressed_elements == 0:
            warn_on_first(
                rank,
                "nothing was compressed: every tensor has fewer than min_numel elements, matches "
                "exclude, or has a dtype that codecs do not take",
            )
        else:
            tell_on_first(rank, "up to the first compressed step: %s", self.summary())

    def summary(self) -> str:
        elements = self.compressed_elements + self.exact_elements
        plain = 100 * self.plain_elements / elements if elements else 0.0
        share = 100 * self.compressed_elements / elements if elements else 0.0
        crossed = (
            f"{self.between_bytes / max(self.steps, 1) / 1e6:.3f} of them between nodes, "
            if self.between_bytes
            else ""
        )
        return (
            f"{self.wire_bytes / max(self.steps, 1) / 1e6:.3f} MB sent per step instead of "
            f"{self.logical_bytes / max(self.steps, 1) / 1e6:.3f} ({self.ratio:.1f} times "
            f"fewer), {crossed}"
            f"{share:.1f} % of elements compressed"
            + (
                f", {plain:.1f} % (float64, complex or sparse) averaged by torch"
                if self.plain_elements
                else ""
            )
            + (f"; chosen: {self.choice}" if self.choice else "")
        )


def relative_errors(
    before: torch.Tensor, spans: Sequence[Span], outcomes: Sequence[Outcome]
) -> dict[str, float]:
    """Return ‖residual‖ / ‖compensated‖ of each parameter, from the encoder's input and the
    proposed residuals."""
    left: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.proposed is None:
            continue
        outcome.proposed.settle(outcome.message.pieces)
        for (name, _), line in zip(outcome.message.keys, outcome.message.pieces.table, strict=True):
            if line[RESIDUAL] >= 0:
                part = outcome.proposed.sent[line[RESIDUAL] : line[RESIDUAL] + line[NUMEL]]
                left[name] = left.get(name, 0.0) + float(part.square().sum())
    norms = {s.name: float(before[s.source : s.source + s.numel].square().sum()) for s in spans}
    return {
        name: (value / norms[name]) ** 0.5 if norms[name] else 0.0 for name, value in left.items()
    }
