"""The last mean as it came: 32 times shorter than momentum, and the same numbers.

Note: why. After a compressed round ``momentum`` is what the messages say. Who needs it next would read 4 bytes an element, and
decodes an eighth of one instead. ``momentum`` itself is written all the same: it is the state that people see, and tensors that
do not travel as signs are nowhere else.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from commpress.collectives.allreduce import Outcome
from commpress.collectives.buckets import Message
from commpress.collectives.frame import HEADER
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
        self._version = 0
        self._known: WeakKeyDictionary[Segments, Any] = WeakKeyDictionary()

    def keep(self, outcomes: Sequence[Outcome], momentum: torch.Tensor) -> None:
        """``momentum`` holds what the outcomes say, or will before anybody reads it; their rows have not been given back."""
        if momentum.device.type != "cpu":
            return
        messages = tuple(outcome.message for outcome in outcomes)
        came = [outcome.rows[:, HEADER:] for outcome in outcomes if outcome.rows is not None]
        if messages != self._messages:
            self.forget()
            self._messages, self._wires = messages, [torch.empty(rows.shape, dtype=rows.dtype) for rows in came]
        for kept, rows in zip(self._wires, came, strict=True):
            kept.copy_(rows)
        self._momentum, self._version = momentum, momentum._version

    def runs(self, layers: Segments, momentum: torch.Tensor) -> Any:
        """Where the messages say the momentum of ``layers``; None if they do not."""
        if momentum is not self._momentum or momentum._version != self._version:
            return None
        if layers not in self._known:
            runs = self._known[layers] = self._runs(layers, [message.pieces for message in self._messages])
            runs.lie_in(self._wires)
        return self._known[layers]
