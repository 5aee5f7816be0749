"""Rehearsals: steps that are undone, after which a model does no longer what it does in its first
steps only.

DDP lays out its buckets in the second step, those of a static graph in the third. Ranks that begin
together do so together; who is to meet others later has to be past it, for in one step some would
lay out buckets and others exchange gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from commpress.integrations.elastic.batches import Batches
from commpress.integrations.elastic.repeat import StepMark
from commpress.integrations.elastic.shared_state import SharedState
from commpress.optim.optimizer import CompressedOptimizer

STEPS = 2


class Rehearsal:
    """First steps of these replicas."""

    def __init__(self, replicas: Sequence[DistributedDataParallel], mark: StepMark) -> None:
        self._mark = mark
        self.steps = STEPS + any(each.static_graph for each in replicas) if replicas else 0

    def over(self, steps: int) -> bool:
        """True once replicas that have committed so many steps are past their first ones."""
        return steps >= self.steps

    def end(self) -> None:
        """Replicas are past their first steps."""
        self.steps = 0

    def run(
        self,
        train_step: Callable[..., Any],
        state: SharedState,
        batches: Batches,
        owners: Iterable[Any],
    ) -> None:
        """Do them alone, or all ranks together; ``end`` when all have. Afterwards all is as it was:
        ``state``, the position in the data, random numbers, and what ``owners`` of residuals have
        on this rank; also where a step raises."""
        document, tensors = state.taken_apart()
        shared = [each.clone() for each in tensors]
        own = [(load, deepcopy(save())) for save, load in map(_own_state, owners) if save and load]
        self._mark.begin()
        try:
            for _ in range(self.steps):
                batches.ready()
                train_step(*batches.next())
        finally:
            state.load(document, shared)
            for load, saved in own:
                load(saved)
            self._mark.undo()
            self._mark.draw_again()
            batches.restart()


def _own_state(owner: Any) -> tuple[Any, Any]:
    """Functions that give and take what this rank has and others do not."""
    if isinstance(owner, CompressedOptimizer):
        return owner.rank_state, owner.load_rank_state
    return getattr(owner, "state_dict", None), getattr(owner, "load_state_dict", None)
