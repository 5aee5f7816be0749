"""A Hadamard rotation of blocks, which spreads an outlier over its block, so that a coarse scale
fits the other elements."""

from collections.abc import Sequence
from functools import cache

import torch

from commpress.kernels.pieces import KIND, NUMEL, SOURCE, Pieces
from commpress.kernels.reference import CASTS

BLOCK = 64


@cache
def hadamard(device: torch.device) -> torch.Tensor:
    """Return the matrix, which is orthonormal and symmetric, and so its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / BLOCK**0.5


def rotate(buffer: torch.Tensor, tables: Sequence[Pieces]) -> None:
    """Rotate every whole block of the quantized pieces, in place. A second call undoes it; a
    partial block at the end of a piece is not rotated."""
    matrix = hadamard(buffer.device)
    for pieces in tables:
        for line in pieces.table:
            count = int(line[NUMEL]) // BLOCK
            if count and line[KIND] not in CASTS:
                blocks = buffer[line[SOURCE] : line[SOURCE] + count * BLOCK].view(count, BLOCK)
                blocks.copy_(blocks @ matrix)
