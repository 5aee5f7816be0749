"""The last mean as it came: 32 times shorter than momentum, and the same numbers.

Note: why. After a compressed round ``momentum`` is what the messages say. Who needs it next would read 4 bytes an element, and
decodes an eighth of one instead. Nor is momentum written, which would take as long as all the rest of a synchronisation,
until somebody looks (``plain_state``). Tensors that do not travel as signs are in momentum only.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from commpress.collectives.allreduce import Outcome
from commpress.collectives.buckets import Message
from commpress.collectives.frame import HEADER
from commpress.errors import InvalidArgument
from commpress.kernels import arithmetic
from commpress.kernels.adam import Segments
from commpress.kernels.pieces import Pieces


class KeptMean:
    """Says momentum only as long as nobody has written into it, which torch counts. Whoever writes momentum in ways that torch
    does not see must ``forget`` first."""

    def __init__(self, runs: Callable[[Segments, Sequence[Pieces]], Any]) -> None:
        self._runs = runs
        self.forget()

    def forget(self) -> None:
        self._messages: tuple[Message, ...] = ()
        self._wires: list[torch.Tensor] = []
        self._momentum: torch.Tensor | None = None
        self._version, self.unwritten = 0, False  # whether signs are here and not in momentum
        self._known: WeakKeyDictionary[Segments, Any] = WeakKeyDictionary()

    def over(self) -> None:
        """Momentum is something else from now on."""
        self._momentum, self.unwritten = None, False

    def keep(self, outcomes: Sequence[Outcome], momentum: torch.Tensor) -> None:
        """``momentum`` is what the outcomes say, but signs are not written there; rows have not been given back."""
        messages = tuple(outcome.message for outcome in outcomes)
        came = [outcome.rows[:, HEADER:] for outcome in outcomes if outcome.rows is not None]
        if messages != self._messages:
            self.forget()
            self._messages, self._wires = messages, [torch.empty(rows.shape, dtype=rows.dtype) for rows in came]
        for kept, rows in zip(self._wires, came, strict=True):
            kept.copy_(rows)
        self._momentum, self._version, self.unwritten = momentum, momentum._version, True

    def runs(self, layers: Segments, momentum: torch.Tensor) -> Any:
        """Where the messages say the momentum of ``layers``; None if they do not."""
        if momentum is not self._momentum or momentum._version != self._version:
            if self.unwritten:
                raise InvalidArgument(
                    "exp_avg was written to while messages hold what it is to be: before you write take it from the "
                    "optimizer's state anew, which puts there what it is"
                )
            return None
        if layers not in self._known:
            runs = self._known[layers] = self._runs(layers, [message.pieces for message in self._messages])
            runs.lie_in(self._wires)
        return self._known[layers]

    def write(self) -> None:
        """Into momentum what was not written there."""
        if self.unwritten:
            assert self._momentum is not None
            for message, rows in zip(self._messages, self._wires, strict=True):
                arithmetic(rows.device).decode(rows, self._momentum, message.pieces)
            self.unwritten = False
