"""Gradients on their way from autograd into a store: a chunk's are one float32 tensor there, from the first that comes to
the step that uses them up. No parameter keeps a gradient."""

from typing import Any

import torch

from commpress.errors import InvalidArgument
from commpress.integrations.zero.chunk import GRADIENT, Chunk, Run
from commpress.integrations.zero.shards import local
from commpress.tiered_mem import Pending, TieredStore

UNDER_WAY = 2  # writes that are not waited for


class StoredGradients:
    """``passes(chunk)``: the chunk does not stay in memory, so its gradient is written as soon as it is complete."""

    def __init__(self, store: TieredStore, chunks: list[Chunk], passes: Any) -> None:
        self._store, self._chunks, self._passes = store, chunks, passes
        self._there: dict[Chunk, set[Run]] = {}  # what the store holds
        self._squares: dict[Chunk, float] = {}  # of the norm, where the gradient is complete
        self._new: dict[Chunk, set[Run]] = {}  # what has come in this backward
        self._leaving: list[Pending[None]] = []
        self._scratch = torch.zeros(max(c.numel for c in chunks))

    def hook(self, parameter: torch.Tensor) -> Any:
        runs = [(chunk, run) for chunk in self._chunks for run in chunk.runs if run.parameter is parameter]

        def arrived(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            gradient = local(parameter.grad)
            if gradient.layout != torch.strided:
                raise InvalidArgument(
                    f"the gradient of {runs[0][1].name!r} is sparse: build its module with sparse=False"
                )
            gradient = gradient.contiguous()
            parameter.grad = None
            for chunk, run in runs:
                self.add(chunk, {run: run.of(gradient)})

        return parameter.register_post_accumulate_grad_hook(arrived)

    @torch.no_grad()
    def add(self, chunk: Chunk, values: dict[Run, torch.Tensor]) -> None:
        there, name = self._there.setdefault(chunk, set()), chunk.name(GRADIENT)
        new = self._new.setdefault(chunk, set())
        if not there:
            flat = self._scratch[: chunk.numel].zero_()
            for run, value in values.items():
                run.inside(flat).copy_(value)
            self._store.put(name, flat)
        else:
            with self._store.borrow(name) as held:
                for run, value in values.items():
                    own, value = run.inside(held), value.to(held.device)
                    own.add_(value) if run in there else own.copy_(value)
        self._store.crossing.down += sum(value.nbytes for value in values.values())
        there.update(values)
        new.update(values)
        self._squares.pop(chunk, None)
        if len(new) == len(chunk.runs):
            new.clear()
            self._complete(chunk)

    def _complete(self, chunk: Chunk) -> None:
        self._squares[chunk] = self._square(chunk)
        if self._passes(chunk):
            self._leaving.append(self._store.evict(chunk.name(GRADIENT)))
            if len(self._leaving) > UNDER_WAY:
                self._leaving.pop(0).wait()

    def _square(self, chunk: Chunk) -> float:
        with self._store.borrow(chunk.name(GRADIENT), write=False) as held:
            return sum(
                float(torch.linalg.vector_norm(run.inside(held), dtype=torch.float64)) ** 2 for run in chunk.runs
            )

    def square_sum(self) -> float:
        """Σ g² in double, of each chunk as it was when its last gradient came."""
        for chunk in self._there:
            self._new[chunk].clear()
            if chunk not in self._squares:
                self._squares[chunk] = self._square(chunk)
        return sum(self._squares[chunk] for chunk in self._chunks if chunk in self._squares)

    def into(self, chunk: Chunk, flat: torch.Tensor) -> torch.Tensor:
        """The gradient of a chunk; zeros where there is none."""
        if chunk not in self._there:
            return flat.zero_()
        if chunk.on == "device":
            self._store.crossing.up += flat.nbytes
        with self._store.borrow(chunk.name(GRADIENT), write=False) as held:
            return flat.copy_(held)

    def name(self, chunk: Chunk) -> list[str]:
        return [chunk.name(GRADIENT)] if chunk in self._there else []

    def forget(self, chunk: Chunk) -> None:
        """The gradient has been used up, or is not wanted; nothing is written for that."""
        if self._there.pop(chunk, None) is not None:
            self._store.delete(chunk.name(GRADIENT))
        self._squares.pop(chunk, None)
        self._new.pop(chunk, None)

    def clear(self) -> None:
        self.settle()
        for chunk in list(self._there):
            self.forget(chunk)

    def settle(self) -> None:
        """Wait for the writes under way; raises what went wrong with them."""
        leaving, self._leaving = self._leaving, []
        for pending in leaving:
            pending.wait()
