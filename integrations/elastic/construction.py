"""Construction of what is divided among the ranks: anew for those that there are, and as the newest
snapshot has it."""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from commpress.collectives.channel import Channel
from commpress.collectives.scalars import gathered
from commpress.integrations.elastic.healing import share
from commpress.integrations.elastic.repeat import RandomState
from commpress.integrations.elastic.shared_state import packed
from commpress.integrations.elastic.snapshots import Snapshots

Made = tuple[Callable[..., Any], Mapping[str, Any]]


class Build:
    """A user's ``build``: called with the random numbers that the run began with, so that it makes
    the same each time.

    What is made over the group from the first call on is of that build, and goes no further when
    the next one comes.
    """

    def __init__(self, build: Callable[[], Made], registry: Any) -> None:
        self.build, self._random = build, RandomState()
        self._registry, self._before, self._built = registry, registry.mark(), False

    def __call__(self) -> Made:
        now, self._built = RandomState(), True
        self._random.put_back()
        try:
            return self.build()
        finally:
            now.put_back()

    def let_go(self, objects: Mapping[str, Any]) -> None:
        """Of what was built: errors under way, and hooks on parameters, may hold it for a while."""
        if not self._built:
            return
        self._built = False
        for each in objects.values():
            if isinstance(getattr(each, "channel", None), Channel) and hasattr(each, "close"):
                each.close()
        self._registry.return_to(self._before)
        gc.collect()


def newest(
    snapshots: Snapshots, channel: Channel, *, of: Sequence[int] = (), **options: Any
) -> tuple[int, bytes, list[torch.Tensor]]:
    """The newest snapshot ``of`` some ranks, by default of any, on all of them: its step, document
    and tensors; step 0 if there is none. Collective."""
    mine = snapshots.last if channel.rank in (of or range(channel.size)) else 0
    told = gathered([float(mine)], transport=channel.transport, sequence=channel.take())
    steps: np.ndarray = channel.run(told)[:, 0]
    step = int(steps.max())
    if not step:
        return 0, packed({}, []), []
    donors = [rank for rank, last in enumerate(steps) if last == step]
    needy = [rank for rank in range(channel.size) if rank not in donors]
    _, document, tensors = snapshots.load() if channel.rank in donors else (0, b"", [])
    if needy:
        document, tensors, _ = channel.run(
            share(document, tensors, channel, donors=donors, needy=needy, **options)
        )
    return step, document, tensors
