"""The discrete cosine transform of matrices, chunk by chunk. It is orthonormal: errors are as large
on either side.

C = B·X·Bᵀ      B[k, n] = √(2/N)·cos(π·(2n + 1)·k / 2N), the first row divided by √2      X = Bᵀ·C·B
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class ChunkedCosine:
    """Chunks of a tensor seen as a matrix of shape[0] rows, a vector as one: as few as can be with
    sides up to ``longest``, all of one shape, padded with zeros."""

    rows: int
    columns: int
    longest: int

    @classmethod
    def of(cls, shape: Sequence[int], longest: int) -> "ChunkedCosine":
        rows = shape[0] if len(shape) > 1 else 1
        return cls(rows, math.prod(shape) // max(rows, 1), longest)

    @property
    def chunk(self) -> tuple[int, int]:
        """Rows and columns of a chunk."""
        return _even(self.rows, self.longest), _even(self.columns, self.longest)

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of chunks below and beside each other."""
        tall, wide = self.chunk
        return -(-self.rows // tall), -(-self.columns // wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[chunks, elements of one] of the coefficients."""
        (tall, wide), (below, beside) = self.chunk, self.grid
        padding = (0, beside * wide - self.columns, 0, below * tall - self.rows)
        chunks = torch.nn.functional.pad(x.reshape(self.rows, self.columns), padding)
        chunks = chunks.view(below, tall, beside, wide).transpose(1, 2)
        coefficients = _basis(tall, x.dtype, x.device) @ chunks @ _basis(wide, x.dtype, x.device).T
        return coefficients.reshape(below * beside, tall * wide)

    def backward(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The matrix [rows, columns] that has these coefficients."""
        (tall, wide), (below, beside) = self.chunk, self.grid
        chunks = coefficients.view(below, beside, tall, wide)
        chunks = (
            _basis(tall, chunks.dtype, chunks.device).T
            @ chunks
            @ _basis(wide, chunks.dtype, chunks.device)
        )
        return chunks.transpose(1, 2).reshape(below * tall, beside * wide)[
            : self.rows, : self.columns
        ]


def _even(length: int, longest: int) -> int:
    return -(-length // -(-length // longest))


@cache
def _basis(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    frequency, place = (
        torch.arange(size, dtype=torch.float64)[:, None],
        torch.arange(size, dtype=torch.float64),
    )
    basis = torch.cos(math.pi / (2 * size) * (2 * place + 1) * frequency) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis.to(dtype=dtype, device=device)
