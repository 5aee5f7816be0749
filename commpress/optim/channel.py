"""One kind of round of an optimizer: which codec, what compression left behind, which parameters travel together."""

from collections.abc import Sequence
from functools import partial

import torch

from commpress.codecs.policy import Policy
from commpress.collectives.allreduce import Outcome, Workspace, reduce_bucket, reduce_message, settle
from commpress.collectives.buckets import Message, Share, Span, messages, share
from commpress.collectives.transports.transport import Transport
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.optim.flat import Flat
from commpress.work import Steps


class _Layout:
    def __init__(self, plan: list[Message], feedbacks: list[ErrorFeedback | None]) -> None:
        self.messages, self.feedbacks = plan, feedbacks


class Channel:
    """Residuals are found by parameter, so the same channel may carry all parameters at once or a bucket of them."""

    def __init__(self, flat: Flat, policy: Policy, transport: Transport, *, feedback: bool = True) -> None:
        self.flat, self.policy, self.transport, self.feedback = flat, policy, transport, feedback
        self.residuals = ResidualStore()
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self.shares: dict[str, Share] = {}  # of the parameters, by name, as they travel now

    def relay(self, flat: Flat) -> None:
        """Parameters were added, or travel otherwise: residuals stay with those that were there."""
        self.flat, self._layouts = flat, {}
        self.shares.clear()

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
            for span in spans:
                codec = self.policy.choose(span.name, span.numel)
                self.shares[span.name] = share(span.numel, codec, self.transport.size)
        return self._layouts[indices]

    def reduce(
        self, buffer: torch.Tensor, indices: Sequence[int], *, workspace: Workspace, sequence: int, key: int,
        asks: bool = False,
    ) -> Steps[list[Outcome]]:  # fmt: skip
        layout = self.layout(tuple(indices), workspace)
        return reduce_bucket(
            buffer, layout.feedbacks, messages=layout.messages, transport=self.transport, workspace=workspace,
            sequence=sequence, key=key, reduce=partial(reduce_message, asks=True) if asks else None,
        )  # fmt: skip

    def count(self, indices: Sequence[int], workspace: Workspace) -> int:
        """Messages that ``reduce`` sends: so many sequence numbers it uses."""
        return len(self.layout(tuple(indices), workspace).messages)

    def settle(self, outcomes: Sequence[Outcome], *, finite: bool) -> None:
        settle(outcomes, taken=finite)

    def scale(self, name: str, factor: torch.Tensor) -> None:
        """What is owed of a parameter is from now on in other units: multiplied by ``factor``, element by element."""
        for (whose, offset), sent, reduced in self.residuals.places():
            if whose == name:
                part = factor.view(-1)[offset : offset + sent.numel()]
                sent.mul_(part)
                own = part[self.transport.rank * reduced.numel() :][: reduced.numel()]
                reduced[: own.numel()].mul_(own)

    def move_to(self, other: "Channel") -> None:
        """The other channel owes it from now on."""
        other.residuals.load({key: tuple(r.clone() for r in every) for key, every in self.residuals.every().items()})
        self.residuals.load({})
