"""Parameters with a codec of whole tensors (PowerSGD): every rank averages them whole and keeps its
slices.

Over a channel of two levels nodes send exact sums of their ranks, as under DDP with a topology.
"""

from collections.abc import Sequence

import torch

from commpress.codecs import Policy
from commpress.collectives.allreduce import Call, Outcome
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges, Tensors
from commpress.collectives.reduce_scatter import Part
from commpress.feedback import ResidualStore
from commpress.integrations.fsdp.param_groups import ParamGroup
from commpress.work import Steps


class WholeParameters:
    """Gradients of whole parameters, copied from the rows of all ranks to a workspace buffer, and
    back to one row."""

    def __init__(
        self,
        param_group: ParamGroup,
        parts: Sequence[Part],
        policy: Policy,
        channel: Channel,
        *,
        residuals: ResidualStore,
        feedback: bool,
        any_rank: bool = False,
    ) -> None:
        self.param_group, self.parts, self.channel = param_group, parts, channel
        self.device = param_group.parameters[0].device
        self.shapes = [param_group.shapes[part.name] for part in parts]
        self.exchanges = Exchanges(
            policy,
            channel.size,
            channel.workspace,
            levels=channel.levels,
            residuals=residuals,
            feedback=feedback,
            any_rank=any_rank,
        )
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Cut by this policy from the next call on; residuals have their places at once."""
        self.exchanges.use(policy)
        self.exchanges.of(self.names, self._tensors, self.device)

    @property
    def exchange(self) -> Exchange:
        """The exchange by the present policy."""
        return self.exchanges.of(self.names, self._tensors, self.device)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def numel(self) -> int:
        """Number of elements of all parameters together."""
        return sum(part.numel for part in self.parts)

    def _tensors(self) -> Tensors:
        spans, at = [], 0
        for part in self.parts:
            spans.append(Span(part.name, at, part.numel))
            at += part.numel
        return spans, self.shapes

    def steps(
        self, gradients: torch.Tensor, whole: torch.Tensor, call: Call
    ) -> Steps[list[Outcome]]:
        """Write the means to ``whole``; ``gradients`` has a row for every rank. See
        ``Exchange.steps``."""
        self.collect(gradients, whole)
        return (yield from self.exchange.steps(self.channel, whole, call))

    def collect(self, gradients: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy this rank's own gradients to ``whole``."""
        rows = gradients.view(self.channel.size, -1)
        for part, slices in zip(self.parts, self._slices(whole), strict=True):
            for row, values in zip(rows, slices, strict=True):
                values.copy_(row[part.at : part.at + values.numel()].view(values.shape))

    def deliver(self, whole: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        """Write this rank's slices of ``whole`` times ``factor`` to ``out``, each at its
        parameter's place in a row."""
        for part, slices in zip(self.parts, self._slices(whole), strict=True):
            own = slices[self.channel.rank]
            torch.mul(own, factor, out=out[part.at : part.at + own.numel()].view(own.shape))

    def _slices(self, whole: torch.Tensor) -> list[list[torch.Tensor]]:
        spans = self.exchange.spans
        return [
            self.param_group.slices(span.name, whole[span.source : span.source + span.numel])
            for span in spans
        ]
