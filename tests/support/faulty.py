"""A transport that fails on purpose."""

from collections.abc import Callable

import torch

from commpress.collectives.frame import Rows
from commpress.collectives.transports.transport import InFront, Transport
from commpress.work import Work


class Faulty(InFront):
    """Works ``after`` times, then lets ``fault(rows)`` spoil what this rank sends, or raises if it
    is an error."""

    def __init__(
        self, inner: Transport, *, after: int, fault: Callable[[torch.Tensor], object] | Exception
    ) -> None:
        self.left, self.fault = after, fault
        self.stand_for(inner)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._maybe(inp)
        return self.inner.all_to_all(out, inp, tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._maybe(inp)
        return self.inner.all_gather(out, inp, tag)

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        self._maybe(inp.headers)
        return self.inner.exchange(out, inp, wanted, tag)

    def _maybe(self, inp: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            if isinstance(self.fault, Exception):
                raise self.fault
            self.fault(inp)
