"""One buffer that is all-reduced again and again, the way the DDP hook does it: what benchmarks of the all-reduce share."""

from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any

import torch

from commpress.codecs import policy_of
from commpress.collectives.allreduce import Outcome, Workspace, reduce_bucket
from commpress.collectives.buckets import Message, Span, messages
from commpress.collectives.transports.transport import Transport
from commpress.feedback import ErrorFeedback
from commpress.kernels import arithmetic
from commpress.work import run as drive


class Watched:
    """The kernels of this processor, and the seconds of it that they have taken in this thread."""

    def __init__(self) -> None:
        self.seconds, self._kernels = 0.0, arithmetic(torch.device("cpu"))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._kernels, name)

        def watched(*args: Any, **options: Any) -> Any:
            start = thread_time()
            result = kernel(*args, **options)
            self.seconds += thread_time() - start
            return result

        return watched


class Reduced:
    """Every call starts from the same input; residuals stay in between. ``sequence`` goes on from buffer to buffer."""

    def __init__(self, numel: int, codec: str, transport: Transport, sequence: int) -> None:
        self.transport, self.codec, self.sequence = transport, codec, sequence
        self.spans, self.policy = [Span("buffer", 0, numel)], policy_of(codec)
        self.messages: list[Message] = messages(self.spans, self.policy, transport.size)
        self.workspace = Workspace()
        self.input = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))
        self.buffer = torch.empty(numel)
        self.forget()

    def forget(self) -> None:
        """Let go of what compression has left behind."""
        self.feedbacks = [ErrorFeedback.zeros(m.pieces) if m.pieces.kept else None for m in self.messages]
        self.rounds = 0

    def fill(self) -> None:
        self.buffer.copy_(self.input)

    def reduce(self) -> None:
        steps = reduce_bucket(
            self.buffer, self.feedbacks, messages=self.messages, transport=self.transport, workspace=self.workspace,
            sequence=self.sequence, key=self.rounds,
        )  # fmt: skip
        self.finish(drive(steps), len(self.messages))

    def finish(self, outcomes: Sequence[Outcome], count: int) -> None:
        for outcome in outcomes:
            outcome.commit()
        self.sequence += count
        self.rounds += 1
