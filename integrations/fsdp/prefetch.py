"""Gather weights in advance of forward and reduce gradients during backward, in threads, on side
streams of a GPU."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable

from commpress.collectives.channel import Channel
from commpress.integrations.fsdp.param_groups import ParamGroup
from commpress.work import Steps, stream_of

# groups gathered in advance in forward: the network is busy while one is computed and the next is
# decoded
AHEAD = 2
# groups with running reductions before backward waits: each needs a buffer
AT_ONCE = 2


class _Reduction(NamedTuple):
    future: torch.futures.Future[Any]
    take: Callable[[Any], None]
    stream: "torch.cuda.Stream | None"  # of the caller


class Prefetcher:
    """Set torch's explicit prefetching: in forward a group begins the gathers of the next ones, in
    the order of the first forward.

    A user's own setting (``set_modules_to_forward_prefetch``) is kept.
    """

    def __init__(self, wanted: bool) -> None:
        self._order: list[ParamGroup] | None = [] if wanted else None

    def met(self, param_group: ParamGroup) -> None:
        """Record that ``param_group`` is gathered in forward, and begin the next gathers."""
        order = self._order
        if order is None:
            return
        if param_group not in order:
            order.append(param_group)
        elif param_group is order[0]:  # the second forward begins
            self._order = None
            if not any(each.prefetches for each in order):
                for i, each in enumerate(order[:-1], 1):
                    each.module.set_modules_to_forward_prefetch(
                        [after.module for after in order[i : i + AHEAD]]
                    )


class DeferredReductions:
    """Reductions that run during backward. At its end they are applied, in order, before
    ``backward()`` returns.

    torch reads a reduce-scatter's output at once; it gets zeros, and the results are added later.
    """

    def __init__(self) -> None:
        self._running: deque[torch.futures.Future[Any]] = deque()
        self._pending: defaultdict[int, list[_Reduction]] = defaultdict(list)

    def submit(
        self,
        channel: Channel,
        steps: Steps[Any],
        *tensors: torch.Tensor,
        take: Callable[[Any], None],
    ) -> None:
        """Run ``steps``, which use ``tensors``, and pass their result to ``take`` at the end of the
        running backward."""
        task = torch._C._current_graph_task_id()
        if task not in self._pending:
            Variable._execution_engine.queue_callback(partial(self._end, task))
        while len(self._running) >= AT_ONCE:
            self._running.popleft().wait()
        future = channel.submit(steps, *tensors)
        self._running.append(future)
        self._pending[task].append(_Reduction(future, take, stream_of(tensors[0].device)))

    def _end(self, task: int) -> None:
        with torch.no_grad():
            for each in self._pending.pop(task):
                finite = each.future.wait()
                if each.stream is not None:  # on which torch made the gradients
                    torch.cuda.current_stream(each.stream.device).wait_stream(each.stream)
                each.take(finite)

    def forget(self, *_args: object) -> None:
        """Drop, before forward, the reductions of a backward that ended with an error."""
        if self._pending and torch._C._current_graph_task_id() < 0:
            left, self._pending = self._pending, defaultdict(list)
            for reductions in left.values():
                for each in reductions:
                    each.future.wait()
