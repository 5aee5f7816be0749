"""One rank's end of the way to its peers: a transport of its own, buffers, sequence numbers, a worker, a clock and counters."""

from datetime import timedelta
from typing import Any, TypeVar

import torch

from commpress.collectives.allreduce import Workspace
from commpress.collectives.transports.loopback import Loopback, Recorded, Timed
from commpress.collectives.transports.transport import Transport, own_transport
from commpress.work import Steps, Worker, run

T = TypeVar("T")

AT_ONCE = 4  # submitted algorithms under way at once, where messages are matched by tag


class Channel:
    """Numbers, sends, waits and counts for one object that communicates; every rank makes the same calls in the same order.

    Buffers belong to the worker while anything is submitted, else to the caller.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        name: str = "commpress",
        at_once: int = AT_ONCE,
        workspace: Workspace | None = None,
    ) -> None:
        self._clock = Timed(transport)
        self.transport = Recorded(self._clock)
        self.rank, self.size = transport.rank, transport.size
        self.workspace = Workspace() if workspace is None else workspace
        self.at_once = 1 if transport.ordered else at_once
        self._name, self._taken = name, 0
        self._worker: Worker | None = None

    @classmethod
    def among(cls, process_group: Any = None, *, timeout: timedelta | None = None, **options: Any) -> "Channel":
        """Over a transport of its own among the ranks of ``process_group``, collective; alone without torch.distributed."""
        return cls(own_transport(process_group, timeout=timeout) or Loopback(1).transport(0), **options)

    @property
    def inner(self) -> Transport:
        """The transport itself, without clock and counters."""
        return self._clock.inner

    # ------------------------------------------------------------ numbers

    def take(self, count: int = 1) -> int:
        """The first of ``count`` sequence numbers."""
        self._taken += count
        return self._taken - count

    # ------------------------------------------------------------ work

    def run(self, steps: Steps[T]) -> T:
        """The result of an algorithm, now and on this thread. Nothing that is submitted may be under way."""
        return run(steps)

    def submit(
        self, steps: Steps[T], *, waits: int | None = None, device: torch.device | None = None
    ) -> torch.futures.Future[T]:
        """Start an algorithm in the background, in the order of submission. ``waits``: see ``Worker.submit``."""
        if self._worker is None:
            self._worker = Worker(self._name, limit=self.at_once, device=device)
        return self._worker.submit(steps, waits=waits)

    def close(self) -> None:
        """Let what is under way finish, then end the worker; a later ``submit`` starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    # ------------------------------------------------------------ counted

    @property
    def sent_bytes(self) -> int:
        """Bytes that have left this rank, headers included."""
        return self.transport.sent_bytes

    @property
    def waited(self) -> float:
        """Seconds spent waiting for peers and the network."""
        return self._clock.seconds
