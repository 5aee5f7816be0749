"""The gradients of one chunk after the other, in float32 where the chunk is updated: as backward left them in parameters, or
from the store."""

from collections.abc import Sequence

import torch

from commpress.integrations.zero.chunk import Chunk, Run, readable
from commpress.integrations.zero.shards import local
from commpress.integrations.zero.stored_gradients import StoredGradients
from commpress.tiered_mem import TieredStore


class ChunkGradients:
    """``taken``: gradients by the number of their parameter, instead of those that parameters have by now."""

    def __init__(self, store: TieredStore, chunks: Sequence[Chunk], taken: dict[int, torch.Tensor] | None) -> None:
        self._store, self._chunks, self.taken = store, chunks, taken
        self.stored: StoredGradients | None = None
        self._buffers: dict[str, torch.Tensor] = {}  # as long as the longest chunk

    def ready(self, chunk: Chunk, factor: torch.Tensor | None) -> list[torch.Tensor]:
        """Those of its runs, clipped; those of the parameters themselves where they can be read as they are."""
        plain = [] if self.stored else self._plain(chunk)
        if factor is None and plain and all(readable(gradient) for gradient in plain):
            self._count(chunk, plain)
            return [run.of(gradient) for run, gradient in zip(chunk.runs, plain, strict=True) if gradient is not None]
        flat = self.buffer(chunk)
        if self.stored is not None:
            self.stored.into(chunk, flat)
        for run, gradient in zip(chunk.runs, plain, strict=False):
            run.inside(flat).zero_() if gradient is None else run.inside(flat).copy_(run.of(gradient.contiguous()))
        self._count(chunk, plain)
        if factor is not None:
            flat.mul_(factor.to(flat.device))
        return [run.inside(flat) for run in chunk.runs]

    def square_sum(self) -> float:
        """Σ g² in double, summed where the gradients lie."""
        if self.stored is not None:
            return self.stored.square_sum()
        found = [(run, g) for chunk in self._chunks for run, g in zip(chunk.runs, self._plain(chunk), strict=True)]
        parts = [run.of(g.contiguous()) for run, g in found if g is not None]
        return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)

    def take(self, parameter: torch.Tensor, index: int) -> None:
        """It is used beside the next backward, which begins with none."""
        assert self.taken is not None
        self.taken.pop(index, None)
        if parameter.grad is not None:
            self.taken[index], parameter.grad = parameter.grad, None

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        """For a chunk's values, where it is updated; zeros where no parameter is."""
        if chunk.on not in self._buffers:
            longest = max(c.numel for c in self._chunks if c.on == chunk.on)
            self._buffers[chunk.on] = torch.zeros(longest, device=self._store.device if chunk.on == "device" else "cpu")
        flat = self._buffers[chunk.on][: chunk.numel]
        return flat.zero_() if chunk.gaps else flat

    def _plain(self, chunk: Chunk) -> list[torch.Tensor | None]:
        found = [run.parameter.grad if self.taken is None else self.taken.get(run.index) for run in chunk.runs]
        return [None if gradient is None else local(gradient) for gradient in found]

    def _count(self, chunk: Chunk, plain: Sequence[torch.Tensor | None]) -> None:
        if chunk.on == "host":
            pairs: list[tuple[Run, torch.Tensor | None]] = list(zip(chunk.runs, plain, strict=False))
            self._store.crossing.down += sum(run.numel * g.dtype.itemsize for run, g in pairs if g is not None)
