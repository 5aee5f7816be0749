"""Replicas (DistributedDataParallel) of a run, and a hook with exact means that survives failures.

Without a hook DDP divides by its first number of ranks, and is unusable after a failed backward.
This hook divides by the present number, completes every backward, and raises errors only then.
"""

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commpress.errors import InvalidArgument
from commpress.integrations.ddp.hook import Backward
from commpress.work import Steps, Worker


def replicas_of(modules: Iterable[torch.nn.Module], group: Any) -> list[DistributedDataParallel]:
    """Return the replicas inside these modules, such as one made by torch.compile, and those of
    ``group`` around them, if the program has named only the inner module."""
    named = list(modules)
    inside = [
        each
        for module in named
        for each in module.modules()
        if isinstance(each, DistributedDataParallel)
    ]
    level: list[Any] = [
        each for module in named for each in (*module.modules(), *module.parameters())
    ]
    seen, around = {id(each) for each in level}, []
    while level:
        level = [each for each in _owners(level) if id(each) not in seen]
        seen |= {id(each) for each in level}
        around += [each for each in level if _replicates(each, group)]
    return list({id(each): each for each in [*inside, *around]}.values())


def _replicates(module: torch.nn.Module, group: Any) -> bool:
    return (
        isinstance(module, DistributedDataParallel) and vars(module).get("process_group") is group
    )


def _owners(parts: Sequence[torch.nn.Module | torch.nn.Parameter]) -> list[torch.nn.Module]:
    """Return the modules that have some of these parts.

    Note: they are found by referrers. A list of all objects would include objects under
    construction in other threads, and a tuple with another reference cannot be completed
    (SystemError).
    """
    known = {id(part) for part in parts}

    def has_some(values: dict[str, Any]) -> bool:
        return not known.isdisjoint([id(each) for each in [*values.values()]])

    named = [each for each in gc.get_referrers(*parts) if type(each) is dict and has_some(each)]
    inside = gc.get_referrers(*named)
    every = [*inside, *gc.get_referrers(*[each for each in inside if type(each) is dict])]
    # by type, because isinstance would call proxies
    found = {id(each): each for each in every if issubclass(type(each), torch.nn.Module)}
    return [
        each
        for each in found.values()
        if any(has_some(vars(each).get(name, {})) for name in ("_modules", "_parameters"))
    ]


def check_ordered(ddp: DistributedDataParallel) -> None:
    """Raise ``InvalidArgument`` for a DDP without a hook that also exchanges which parameters were
    used: exact means are sent by a separate thread, and ranks must make the calls of one group in
    the same order."""
    for name in ("find_unused_parameters", "static_graph"):
        if getattr(ddp, name):
            raise InvalidArgument(
                f"DistributedDataParallel has {name}=True and no hook, so that the order of calls "
                "would differ between ranks: call commpress.compress(ddp, 'none'), which sends the "
                f"same means over its own channel, or leave {name} out"
            )


AT_ONCE = 4  # buckets reduced at once


class ExactMeans:
    """State of ``exact_means_hook``: the group, and the running backward.

    Note: the thread. A failed call of a commpress group on autograd's thread would end the backward
    before DDP has completed it.
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
        """Replace a worker whose job has failed, which takes no other."""
        if self._backward is not None and self._backward.error is not None:
            self._worker = None
        if self._worker is None:
            self._worker = Worker("commpress-exact-means", limit=AT_ONCE)
        self._backward = Backward()

    def _steps(self, buffer: torch.Tensor) -> Steps[None]:
        work = dist.all_reduce(buffer.div_(self.group.size()), group=self.group, async_op=True)
        assert work is not None
        yield work


def exact_means_hook(
    state: ExactMeans, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average ``bucket`` over the present ranks."""
    return state.reduce(bucket)
