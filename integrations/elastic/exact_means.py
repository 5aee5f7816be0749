"""Exact means of DistributedDataParallel's buckets by the group's own all-reduce, from which a
model recovers.

Without a hook DDP divides by the number of ranks that it saw first, and is of no use after a
backward that failed. This one divides by those that there are, ends every backward, and only then
raises what went wrong.
"""

from typing import Any

import torch
import torch.distributed as dist

from commpress.collectives.round import Round
from commpress.integrations.ddp.backward import Backward
from commpress.work import Steps, Worker

AT_ONCE = 4  # buckets under way


class ExactMeans:
    """State of ``exact_means_hook``: the group, and the backward that is under way.

    Note: the thread. Called on autograd's, a group of ours lets a failed call end the backward
    before DDP has finished it.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._backward: Backward | None = None
        self._worker: Worker | None = None

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0 or self._backward is None:
            self._begin()
        assert self._backward is not None
        assert self._worker is not None
        backward, buffer = self._backward, bucket.buffer()
        mean = self._worker.submit(self._steps(buffer), buffer, waits=1)
        finished: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        mean.add_done_callback(lambda _: finished.set_result(buffer))
        backward.submitted.append(mean)
        if bucket.is_last():
            backward.raise_errors()
        return finished

    def _begin(self) -> None:
        """A worker whose job has failed takes no other."""
        if self._backward is not None and self._backward.round.error is not None:
            self._worker = None
        if self._worker is None:
            self._worker = Worker("commpress-exact-means", limit=AT_ONCE)
        self._backward = Backward(Round())

    def _steps(self, buffer: torch.Tensor) -> Steps[None]:
        work = dist.all_reduce(buffer.div_(self.group.size()), group=self.group, async_op=True)
        assert work is not None
        yield work


def exact_means_hook(
    state: ExactMeans, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average ``bucket`` over the ranks that there are."""
    return state.reduce(bucket)
