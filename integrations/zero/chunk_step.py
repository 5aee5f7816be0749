"""One step of the user's optimizer for one chunk, on the store's own tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from commpress.errors import InvalidArgument
from commpress.integrations.zero.chunk import WEIGHT, Chunk
from commpress.integrations.zero.stored_state import copied
from commpress.integrations.zero.wrapper import options_of


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch computes with so many in this thread. One that begins meanwhile has as many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ChunkStep:
    """``step``: an optimizer that knows this chunk alone, with the state that the store and the chunk have for it."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self._optimizer, self._options = optimizer, options

    def step(
        self,
        chunk: Chunk,
        gradients: Sequence[torch.Tensor],
        held: dict[str, torch.Tensor],
        param_groups: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """The states of the chunk's runs afterwards."""
        weights = [run.inside(held[WEIGHT]) for run in chunk.runs]
        groups: dict[int, list[torch.Tensor]] = {}
        for run, weight in zip(chunk.runs, weights, strict=True):
            groups.setdefault(run.group, []).append(weight)
        optimizer = self._optimizer(
            [{**options_of(param_groups[number]), "params": own} for number, own in groups.items()], **self._options
        )
        for run, weight, gradient in zip(chunk.runs, weights, gradients, strict=True):
            weight.grad = gradient.to(weight.device)
            if chunk.stepped:
                own = {key: run.inside(held[key]) for key in chunk.keys}
                optimizer.state[weight] = own | {key: copied(value) for key, value in chunk.scalars.items()}
        before = [dict(optimizer.state.get(weight, {})) for weight in weights]
        optimizer.step()
        states = [dict(optimizer.state[weight]) for weight in weights]
        if any(state[key] is not old[key] for state, old in zip(states, before, strict=True) for key in chunk.keys):
            raise InvalidArgument(
                f"{self._optimizer.__name__} replaces its state instead of changing it: it cannot be offloaded"
            )
        chunk.stepped = True
        optimizer.state.clear()  # the object may live on until the next collection of cycles: not with tensors
        for weight in weights:
            weight.grad = None
        return states
