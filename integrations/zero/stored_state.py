"""``optimizer.state`` of an optimizer whose state lies in a store: read when it is asked for, written when it is set."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.zero.chunk import WEIGHT, Chunk, Run
from commpress.integrations.zero.moments import Moments
from commpress.integrations.zero.shards import alike, is_cut, local
from commpress.integrations.zero.state import MASTER, like
from commpress.tiered_mem import TieredStore


class StoredState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """{parameter: its state, as the plain optimizer has it}. What is handed out are copies, cut as the parameter is.

    Half-precision parameters have their float32 master as one entry more.
    """

    def __init__(
        self, store: TieredStore, chunks: list[Chunk], moments: list[str], scalars: dict[str, Any], coded: Moments
    ) -> None:
        self._coded, self._store, self._chunks = coded, store, chunks
        self._moments, self._scalars = moments, scalars
        self._runs: dict[torch.Tensor, list[tuple[Chunk, Run]]] = {}
        for chunk in chunks:
            for run in chunk.runs:
                self._runs.setdefault(run.parameter, []).append((chunk, run))

    def __iter__(self) -> Iterator[torch.Tensor]:
        stepped = [p for p, runs in self._runs.items() if runs[0][0].stepped]
        return iter(sorted(stepped, key=lambda p: self._runs[p][0][1].index))

    def __len__(self) -> int:
        return sum(runs[0][0].stepped for runs in self._runs.values())

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and parameter in self._runs and self._runs[parameter][0][0].stepped

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        if parameter not in self:
            raise KeyError(parameter)
        runs = self._runs[parameter]
        if sum(run.numel for _, run in runs) != local(parameter).numel():
            raise InvalidArgument(
                f"parameter {runs[0][1].name!r} is spread over the ranks: its state is not here as a whole"
            )
        result = {key: copied(value) for key, value in runs[0][0].scalars.items()}
        keys = {key: key for key in self._moments} | ({} if parameter.dtype == torch.float32 else {MASTER: WEIGHT})
        values = {key: torch.empty(local(parameter).shape) for key in keys}
        for chunk, run in runs:
            with self._coded.opened(chunk, write=False) as held:
                for key, source in keys.items():
                    run.of(values[key]).copy_(run.inside(held[source]))
        result |= {key: alike(value, parameter) for key, value in values.items()}
        return dict(sorted(result.items()))

    @torch.no_grad()
    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        runs = self._runs[parameter]
        for key in self._moments:
            if key not in state or state[key].shape != parameter.shape or is_cut(state[key]) != is_cut(parameter):
                raise StateMismatch(
                    f"the state of {runs[0][1].name!r} has {key!r} of shape {tuple(getattr(state.get(key), 'shape', ()))}, "
                    f"expected {tuple(parameter.shape)}: load the state of the same model and optimizer"
                )
        for chunk, run in runs:
            self.begin(chunk)
            chunk.scalars = {key: like(example, state[key]) for key, example in self._scalars.items()}
            with self._coded.opened(chunk) as held:
                for key in self._moments:
                    run.inside(held[key]).copy_(run.of(state[key]))
                if MASTER in state:
                    run.inside(held[WEIGHT]).copy_(run.of(state[MASTER]))

    def __delitem__(self, parameter: torch.Tensor) -> None:
        """Zeros; a parameter's chunks begin anew when all that lie in them have been deleted."""
        for chunk, run in self._runs[parameter]:
            with self._coded.opened(chunk) as held:
                for key in chunk.keys:
                    run.inside(held[key]).zero_()

    def begin(self, chunk: Chunk) -> None:
        """The state of a step that has not been: zeros."""
        if chunk.stepped:
            return
        for key in self._moments:
            self._coded.put(chunk, key, torch.zeros(chunk.numel))
        chunk.keys, chunk.stepped = list(self._moments), True
        chunk.scalars = {key: like(example, 0) for key, example in self._scalars.items()}

    def begin_all(self) -> None:
        for chunk in self._chunks:
            self.begin(chunk)

    def clear(self) -> None:
        for chunk in self._chunks:
            for key in chunk.keys:
                self._store.delete(chunk.name(key))
            chunk.keys, chunk.scalars, chunk.stepped = [], {}, False


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
