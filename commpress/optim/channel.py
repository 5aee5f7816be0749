"""One kind of round of an optimizer: which codec, what compression left behind, which parameters travel together."""

from collections.abc import Sequence

import torch

from commpress.codecs.policy import Policy
from commpress.collectives.allreduce import Outcome, Workspace, reduce_bucket, reduce_undecoded, settle
from commpress.collectives.buckets import Message, Span, messages
from commpress.collectives.transport import Transport
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.kernels.pieces import KEPT, NUMEL, SHARD, WIDTH
from commpress.optim.flat import Flat
from commpress.work import Steps


class _Layout:
    def __init__(self, plan: list[Message], feedbacks: list[ErrorFeedback | None]) -> None:
        self.messages, self.feedbacks = plan, feedbacks
        self.silenced: list[tuple[torch.Tensor, torch.Tensor]] | None = None


class Channel:
    """Residuals are found by parameter, so the same channel may carry all parameters at once or a bucket of them."""

    def __init__(self, flat: Flat, policy: Policy, transport: Transport, *, feedback: bool = True) -> None:
        self.flat, self.policy, self.transport, self.feedback = flat, policy, transport, feedback
        self.residuals = ResidualStore()
        self.dead: torch.Tensor | None = None  # elements that must neither be sent nor owe anything, in the flat buffer
        self._layouts: dict[tuple[int, ...], _Layout] = {}

    def relay(self, flat: Flat) -> None:
        """Parameters were added: residuals stay with those that were there."""
        self.flat, self._layouts = flat, {}

    def silence(self, dead: torch.Tensor | None) -> None:
        self.dead = dead if dead is not None and dead.numel() else None
        for layout in self._layouts.values():
            layout.silenced = None

    def layout(self, indices: tuple[int, ...], workspace: Workspace) -> _Layout:
        if indices not in self._layouts:
            taken = set(indices)
            for key in [key for key in self._layouts if not taken.isdisjoint(key)]:
                for message in self._layouts.pop(key).messages:
                    workspace.forget(message)
            spans = [Span(self.flat.names[i], *self.flat.places[i]) for i in indices]
            plan = messages(spans, self.policy, self.transport.size, feedback=self.feedback)
            feedbacks = [self.residuals.attach(m.keys, m.pieces, self.flat.device) for m in plan]
            self._layouts[indices] = _Layout(plan, feedbacks)
        return self._layouts[indices]

    def reduce(
        self, buffer: torch.Tensor, indices: Sequence[int], *, workspace: Workspace, sequence: int, key: int,
        undecoded: bool = False,
    ) -> Steps[list[Outcome]]:  # fmt: skip
        """``undecoded``: the mean is left in the outcomes."""
        layout = self.layout(tuple(indices), workspace)
        return reduce_bucket(
            buffer, layout.feedbacks, messages=layout.messages, transport=self.transport, workspace=workspace,
            sequence=sequence, key=key, reduce=reduce_undecoded if undecoded else None,
        )  # fmt: skip

    def count(self, indices: Sequence[int], workspace: Workspace) -> int:
        """Messages that ``reduce`` sends: so many sequence numbers it uses."""
        return len(self.layout(tuple(indices), workspace).messages)

    def settle(self, outcomes: Sequence[Outcome], *, finite: bool) -> None:
        settle(outcomes, taken=finite)
        if finite and self.dead is not None:
            self._forgive()

    def _forgive(self) -> None:
        """Dead elements owe nothing: one bit cannot say zero, and what it says instead must not come back."""
        for layout in self._layouts.values():
            if layout.silenced is None:
                layout.silenced = [self._dead_in(m) for m in layout.messages]
            for message, feedback, (sent, reduced) in zip(
                layout.messages, layout.feedbacks, layout.silenced, strict=True
            ):
                if feedback is not None and sent.numel():
                    feedback.settle(message.pieces)
                    feedback.sent.index_fill_(0, sent, 0.0)
                    feedback.reduced.index_fill_(0, reduced, 0.0)

    def _dead_in(self, message: Message) -> tuple[torch.Tensor, torch.Tensor]:
        """Dead elements of one message: where they lie in the sent residual and, of the own row, in the reduced one."""
        assert self.dead is not None
        sent, reduced = [self.dead[:0]], [self.dead[:0]]
        rank = self.transport.rank
        for first, line in zip(message.pieces.table[:, 0].tolist(), message.pieces.table.tolist(), strict=True):
            if line[KEPT] < 0:
                continue
            inside = self.dead[(self.dead >= first) & (self.dead < first + line[NUMEL])] - first
            sent.append(inside + line[KEPT])
            own = inside[inside // line[WIDTH] == rank] - rank * line[WIDTH]
            reduced.append(own + line[SHARD])
        return torch.cat(sent), torch.cat(reduced)
