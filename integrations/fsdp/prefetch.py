"""What FSDP2 does on streams and a CPU lacks: weights gathered ahead of forward, gradients reduced behind backward."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from commpress.integrations.fsdp.param_groups import Unit
from commpress.work import Steps, Worker

AHEAD = 2  # units gathered ahead in forward: so the network is busy while one is computed and the next decoded
AT_ONCE = 2  # units whose gradients are under way before backward has to wait: their buffers are what it costs


class Ahead:
    """In forward a unit begins the gathers of the next ones, in the order of the first forward: torch's explicit prefetching.

    A user who has set it already (``set_modules_to_forward_prefetch``) is left alone.
    """

    def __init__(self, wanted: bool) -> None:
        self._order: list[Unit] | None = [] if wanted else None

    def met(self, unit: Unit) -> None:
        """``unit`` is gathered in forward."""
        order = self._order
        if order is None:
            return
        if unit not in order:
            order.append(unit)
        elif unit is order[0]:  # the second forward begins
            self._order = None
            if not any(each.prefetches for each in order):
                for i, each in enumerate(order[:-1], 1):
                    each.module.set_modules_to_forward_prefetch([after.module for after in order[i : i + AHEAD]])


class Late:
    """Reductions that go on while backward does. At its end they land, in order, before ``backward()`` returns.

    torch takes a reduce-scatter's output at once; it is given zeros, and what lands is added.
    """

    def __init__(self) -> None:
        self._worker = Worker("commpress-gradients", limit=2)
        self._running: deque[torch.futures.Future[Any]] = deque()
        self._flights: defaultdict[int, list[tuple[torch.futures.Future[Any], Callable[[Any], None]]]] = defaultdict(list)

    def submit(self, steps: Steps[Any], land: Callable[[Any], None]) -> None:
        """``land`` gets the result of ``steps`` when the backward under way ends."""
        task = torch._C._current_graph_task_id()
        if task not in self._flights:
            Variable._execution_engine.queue_callback(partial(self._end, task))
        while len(self._running) >= AT_ONCE:
            self._running.popleft().wait()
        future = self._worker.submit(steps)
        self._running.append(future)
        self._flights[task].append((future, land))

    def _end(self, task: int) -> None:
        with torch.no_grad():
            for future, land in self._flights.pop(task):
                land(future.wait())

    def forget(self, *_: object) -> None:
        """Before forward: what a backward left behind that ended with an error never lands."""
        if self._flights and torch._C._current_graph_task_id() < 0:
            left, self._flights = self._flights, defaultdict(list)
            for flights in left.values():
                for future, _land in flights:
                    future.wait()
