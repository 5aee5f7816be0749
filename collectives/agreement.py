"""Gather a few numbers of every rank, such as norms, hashes and votes, in one small collective.

Note: which ranks vote. The ranks of a data-parallel group read from each other's headers whether
the numbers of all were finite. Under tensor parallelism a replicated weight lives in several such
groups, and one that skips a step while another takes it drifts apart from it. Such groups therefore
vote over a ``Consensus`` of all ranks that must stay equal, before anything is committed.
"""

from collections.abc import Sequence

import numpy as np
import torch

from commpress.collectives.allreduce import Workspace, exchange
from commpress.collectives.frame import ALL_TO_ALL, HEADER, Frame
from commpress.collectives.transports.transport import Transport
from commpress.work import Steps


def gathered(
    values: Sequence[float],
    *,
    transport: Transport,
    sequence: int,
) -> Steps[np.ndarray]:
    """Gather ``values`` of every rank as float64[ranks, len(values)], through host memory.

    This is an all-to-all because rounds begin with one: if a rank begins a round instead, an error
    names it and nobody waits for it.
    """
    outbox, every = (
        torch.zeros(transport.size, HEADER + 8 * len(values), dtype=torch.uint8) for _ in range(2)
    )
    outbox[:, HEADER:] = torch.tensor(list(values), dtype=torch.float64).view(torch.uint8)
    frame = Frame(ALL_TO_ALL, transport.size, "scalars", len(values), sequence)
    flag = torch.zeros(1, dtype=torch.uint8)
    yield from exchange(every, outbox, frame, flag, transport, Workspace())
    return every[:, HEADER:].contiguous().view(torch.float64).numpy().copy()


class Consensus:
    """Votes over ``transport``. Every rank votes once on each question, even a rank with nothing to
    exchange."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self._votes = transport, 0

    def reserve(self) -> int:
        """Reserve and return the number of the next vote, in the same order on every rank."""
        self._votes += 1
        return self._votes - 1

    def agreed(self, finite: bool, *, number: int | None = None) -> Steps[bool]:
        """Return True on every rank if ``finite`` is true on all; ``number`` comes from
        ``reserve``."""
        every = yield from self.gathered([float(finite)], number=number)
        return bool(every.all())

    def gathered(self, values: Sequence[float], *, number: int | None = None) -> Steps[np.ndarray]:
        """Gather ``values`` of every rank as float64[ranks, len(values)]."""
        sequence = self.reserve() if number is None else number
        return gathered(values, transport=self.transport, sequence=sequence)
