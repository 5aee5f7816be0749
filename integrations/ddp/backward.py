"""One backward of a DDP model, and how its errors reach whoever called it."""

import torch
from torch.autograd import Variable

from commpress.collectives.allreduce import Outcome
from commpress.errors import NonFiniteGradient


class Backward:
    """Which buckets are still under way and what they proposed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.open, self.closed, self.finite = 0, False, True
        self.held: list[Outcome] = []
        self.buckets: list[torch.Tensor] = []  # that have come and whose fate is not known yet
        self._promised: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self.futures: list[torch.futures.Future[torch.Tensor]] = []
        self.error: NonFiniteGradient | None = None

    def promise(self, bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """For DDP, of a bucket whose fate others share. If one of them fails, ``raise_errors`` says so before DDP waits."""
        future: torch.futures.Future[torch.Tensor]
        future = torch.futures.Future() if bucket.device.type == "cpu" else torch.futures.Future(devices=[bucket.device])
        self._promised.append((future, bucket))
        return future

    def keep_promises(self) -> None:
        for future, bucket in self._promised:
            future.set_result(bucket)
        self._promised.clear()

    def raise_errors(self) -> None:
        """At the end of this backward, as what they are. Called once, inside the hook of the last bucket.

        Note: who raises. DDP makes "RuntimeError: Unable to cast" of an exception in a future, so autograd is asked to call
        back before DDP looks at the futures. Where no node of the graph is being evaluated (the first step of a static
        graph, a rank that has joined) it is too late for that: wait here. NonFiniteGradient comes after DDP has finished, so
        that training may go on after it.
        """
        if torch._C._current_autograd_node() is None:
            self._wait()
        else:
            Variable._execution_engine.queue_callback(self._wait)

    def _wait(self) -> None:
        for future in self.futures:
            future.wait()
        if self.error is None:
            return
        if torch._C._current_graph_task_id() < 0:
            raise self.error
        Variable._execution_engine.queue_callback(self._raise)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
