"""The moments of chunks: float32 for who computes with them, as the store holds them float32 or quantised."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from commpress.integrations.zero import quantised
from commpress.integrations.zero.chunk import WEIGHT, Chunk
from commpress.tiered_mem import TieredStore


class Moments:
    """``bits`` 0 is float32. ``turn`` is the step: noise of the rounding follows from it alone."""

    def __init__(self, store: TieredStore, bits: int) -> None:
        self._store, self.bits, self.turn = store, bits, 0
        self._scratch: dict[str, torch.Tensor] = {}

    def nbytes(self, numel: int) -> int:
        return quantised.size(numel, self.bits) if self.bits else 4 * numel

    def put(self, chunk: Chunk, key: str, values: torch.Tensor) -> None:
        if self.bits:
            wire = torch.zeros(self.nbytes(chunk.numel), dtype=torch.uint8)
            self._encode(chunk, key, values, wire)
            values = wire
        self._store.put(chunk.name(key), values)

    @contextmanager
    def opened(self, chunk: Chunk, *, write: bool = True) -> Iterator[dict[str, torch.Tensor]]:
        """The master weights and moments of a chunk; changes are kept if ``write``, errors apart."""
        with chunk.borrowed(self._store, write=write) as held:
            if not self.bits:
                yield held
                return
            values = {key: held[key] if key == WEIGHT else self._decode(chunk, key, held[key]) for key in held}
            yield values
            if write:
                for key in chunk.keys:
                    self._encode(chunk, key, values[key], held[key])

    def _decode(self, chunk: Chunk, key: str, wire: torch.Tensor) -> torch.Tensor:
        if key not in self._scratch or self._scratch[key].numel() < chunk.numel:
            self._scratch[key] = torch.zeros(chunk.numel)
        values = self._scratch[key][: chunk.numel]
        quantised.decode(wire, values, self.bits, squares=key in quantised.SQUARES)
        return values

    def _encode(self, chunk: Chunk, key: str, values: torch.Tensor, wire: torch.Tensor) -> None:
        seed = zlib.crc32(f"{self.turn}.{chunk.number}.{key}".encode())
        quantised.encode(values, wire, self.bits, squares=key in quantised.SQUARES, seed=seed)
