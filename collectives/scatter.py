"""The exchange of who divides state among the ranks: means to their owners, and owners' values to
everybody."""

from collections.abc import Mapping, Sequence

import torch

from commpress.codecs import Policy
from commpress.collectives.allreduce import Outcome
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.reduce_scatter import Deal, Part, deals, gather_rows, reduce_rows
from commpress.errors import StateMismatch
from commpress.feedback import Key, Residual, ResidualStore
from commpress.kernels.pieces import NUMEL, width_of
from commpress.work import Steps


class Scatter:
    """Tensors of a flat buffer divided among the ranks: means go to their owners, and owners'
    values to everybody.

    Of each tensor rank r owns ``width`` elements from r·width on. What this rank owns lies side by
    side in a row of ``numel`` elements, where ``parts`` say. Who owns what is the same whatever the
    codecs are.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        policy: Policy,
        channel: Channel,
        device: torch.device,
        *,
        feedback: bool = True,
    ) -> None:
        self.policy, self.channel, self.device, self.feedback = policy, channel, device, feedback
        self.residuals = ResidualStore()
        self.parts: list[Part] = []
        self.numel = 0
        self.plan: list[Deal] = []
        self.extend(spans)

    def extend(self, spans: Sequence[Span]) -> None:
        """Divide these tensors too: behind the others, which stay where they are, with what is owed
        of them."""
        for span in spans:
            width = width_of(span.numel, self.channel.size)
            self.parts.append(Part(span.name, self.numel, width, span.numel, span.source))
            self.numel += width
        self.recut()

    def recut(self) -> None:
        """The policy says something else from now on; residuals stay with their tensors."""
        for deal in self.plan:
            self.channel.workspace.forget(deal.every)
        self.plan = self._deals()

    def _deals(self) -> list[Deal]:
        plan = deals(
            self.parts,
            self.policy,
            rank=self.channel.rank,
            ranks=self.channel.size,
            feedback=self.feedback,
        )
        self._feedbacks = [
            self.residuals.attach(deal.every.keys, deal.every.pieces, self.device) for deal in plan
        ]
        return plan

    def reduce(
        self, buffer: torch.Tensor, row: torch.Tensor, *, key: int, asks: bool = False
    ) -> Steps[list[Outcome]]:
        """row := what this rank owns of the mean of ``buffer``; commit or discard the outcomes."""
        return reduce_rows(
            buffer,
            row,
            self._feedbacks,
            plan=self.plan,
            transport=self.channel.transport,
            workspace=self.channel.workspace,
            sequence=self.channel.take(len(self.plan)),
            key=key,
            asks=asks,
        )

    def gather(self, row: torch.Tensor, buffer: torch.Tensor, *, key: int) -> Steps[list[bool]]:
        """buffer := the rows of all ranks, as far as the codec can say them; whether each message
        was finite."""
        return gather_rows(
            row,
            buffer,
            plan=self.plan,
            transport=self.channel.transport,
            workspace=self.channel.workspace,
            # other noise than on the way there
            sequence=self.channel.take(len(self.plan)),
            key=~key,
        )

    def check(self, residuals: Mapping[Key, Residual]) -> None:
        """Raise ``StateMismatch`` unless they are of these tensors."""
        numels = {part.name: part.numel for part in self.parts}
        for (name, offset), (sent, *_) in residuals.items():
            if offset + sent.numel() > numels.get(name, 0):
                raise StateMismatch(
                    f"the state has {sent.numel()} residuals of {name!r} from element {offset} on, "
                    f"of which this model has {numels.get(name, 0)}: load the state of this model, "
                    "saved with the same named_parameters"
                )

    def load(self, residuals: Mapping[Key, Residual]) -> None:
        """Residuals of these tensors, whatever number of ranks they were cut for. All or
        nothing."""
        self.check(residuals)
        sources = {part.name: (part.numel, part.source or 0) for part in self.parts}
        whole = torch.zeros(
            max((numel + source for numel, source in sources.values()), default=0),
            device=self.device,
        )
        for (name, offset), (sent, *_) in residuals.items():
            source = sources[name][1]
            whole[source + offset : source + offset + sent.numel()] = sent
        cut: dict[Key, Residual] = {}
        held = {name for name, _ in residuals}
        for deal in self.plan:
            for (name, first), line in zip(
                deal.every.keys, deal.every.pieces.table.tolist(), strict=True
            ):
                if name in held and line[NUMEL]:
                    source = sources[name][1] + first
                    cut[name, first] = (
                        whole[source : source + line[NUMEL]].clone(),
                        torch.zeros(0, device=self.device),
                    )
        self.residuals.load(cut)
