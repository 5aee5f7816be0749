"""Rounds: the exchanges of one backward, optimizer step or outer step, committed or discarded
together.

Headers agree whether the numbers of a message were finite on every rank of a channel. A round joins
these verdicts: if one exchange was not finite, the new residuals of all are discarded, on every
rank alike; with a ``Consensus``, also on ranks outside the channel that must stay equal. Futures
are set after that, so that nobody sees half a step.

Note: no overlap is lost. DDP waits for all futures of a backward at its end anyway.
"""

import threading
from collections.abc import Iterable

import torch

from commpress.collectives.agreement import Consensus
from commpress.collectives.allreduce import Outcome, settle
from commpress.errors import InvalidArgument
from commpress.work import Steps, future_on

# gradients become zeros, or NaN, or zeros and an error after backward
ON_NONFINITE = ("skip", "propagate", "raise")


def check_on_nonfinite(value: object, *, propagates: bool = True) -> None:
    """Check the option. ``propagates``: allow "propagate", which needs gradients to pass on."""
    if value not in ON_NONFINITE or (value == "propagate" and not propagates):
        expected = "'skip', 'propagate' or 'raise'" if propagates else "'skip' or 'raise'"
        raise InvalidArgument(f"on_nonfinite is {value!r}, expected {expected}")


class Round:
    """Exchanges that are committed or discarded together. Call ``begin`` for each, ``last`` once,
    ``end`` for each: the last to end closes the round.

    The submitting thread calls ``begin`` and ``last``, the thread that runs the steps ``end``.
    """

    def __init__(self, number: int = 0, *, consensus: Consensus | None = None) -> None:
        self.number, self.consensus = number, consensus
        self.finite = True
        self.error: Exception | None = None  # to be raised by the thread that began the round
        self.buffers: list[torch.Tensor] = []  # means that have arrived
        self._outcomes: list[Outcome] = []
        self._futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._open, self._complete, self._abandoned, self._failed = 0, False, False, False
        self._lock = threading.Lock()

    def begin(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Add an exchange; its future is set to ``buffer`` when the round has closed."""
        future = future_on(buffer.device)
        with self._lock:
            self._open += 1
            self._futures.append((future, buffer))
        return future

    def last(self) -> None:
        """Declare that no more exchanges begin."""
        with self._lock:
            self._complete = True

    def end(self, buffer: torch.Tensor, finite: bool, outcomes: Iterable[Outcome]) -> Steps[bool]:
        """End an exchange whose means are in ``buffer``, or not finite; return True if this closes
        the round: then call ``deliver``."""
        with self._lock:
            self._open -= 1
            self.finite &= finite
            self._outcomes += outcomes
            self.buffers.append(buffer)
            if self._abandoned:
                self._discard()
            if self._failed or self._open or not self._complete:
                return False
        if self.consensus is not None:
            self.finite = yield from self.consensus.agreed(self.finite)
        settle(self._outcomes, taken=self.finite)
        self._outcomes.clear()
        return True

    def close(self) -> None:
        """Declare that no more exchanges begin, if the last one was not known: the round closes
        when all have ended."""
        with self._lock:
            self._complete = True
            if not self._open:
                settle(self._outcomes, taken=self.finite)
                self._outcomes.clear()

    def deliver(self) -> None:
        """Set the futures."""
        for future, buffer in self._futures:
            future.set_result(buffer)
        self._futures.clear()

    def fail(self, error: Exception) -> None:
        """Give up the round: set futures to their buffers as they are, and keep ``error`` for the
        thread that began the round.

        Proposed residuals stay in the workspace: other ranks may have finished the round
        (``handover``).
        """
        with self._lock:
            self.error, self._failed = self.error or error, True
        self.deliver()

    def abandon(self) -> None:
        """Discard a round whose last exchange will never begin, such as that of a backward that was
        aborted."""
        with self._lock:
            self._abandoned = True
            self._discard()

    def _discard(self) -> None:
        settle(self._outcomes, taken=False)
        self._outcomes.clear()
