"""One backward of a DDP model, and the delivery of its errors to the caller."""

from typing import Any

import torch
from torch.autograd import Variable

from commpress.collectives.round import Round


class Backward:
    """A round of buckets with the job submitted for each."""

    def __init__(self, round: Round) -> None:
        self.round = round
        self.submitted: list[torch.futures.Future[Any]] = []

    def raise_errors(self) -> None:
        """Raise errors at the end of this backward, with their own types. Called once, inside the
        hook of the last bucket.

        Note: where errors are raised. DDP turns an exception in a future into "RuntimeError: Unable
        to cast", so autograd calls back before DDP looks at the futures. If no node of the graph is
        being evaluated (the first step of a static graph, a rank that has joined) it is too late
        for that: wait here. Errors are raised after DDP has finished, so that training may continue
        after them, as after ``group.reform``.
        """
        if torch._C._current_autograd_node() is None:
            self._wait()
        else:
            Variable._execution_engine.queue_callback(self._wait)

    def _wait(self) -> None:
        for future in self.submitted:
            try:
                future.wait()
            except Exception as error:
                self.round.fail(error)
        if self.round.error is None:
            return
        if torch._C._current_graph_task_id() < 0:
            raise self.round.error
        Variable._execution_engine.queue_callback(self._raise)

    def _raise(self) -> None:
        if self.round.error is not None:
            raise self.round.error
