"""Decoding signs and moving parameters in one pass: the mean is stored and used while it is in a register.

A pass of its own would read the mean back from memory, which takes as long as all the rest of it.
"""

import numpy as np
import torch

from commpress.kernels.cpu_arrays import bare, begins_line, floats
from commpress.kernels.cpu_lanes import WIDE, bits, load, number, put, signed
from commpress.kernels.cpu_threads import split
from commpress.kernels.pieces import BLOCK, COLUMN, NUMEL, SOURCE, WIDTH
from commpress.kernels.reference import CHUNK


@bare
def block_of(line, stride, b):
    """Block ``b`` of a piece of signs, counted row by row: its first element in the piece, elements, and where its scale and
    its codes lie in the wire."""
    block, width = line[BLOCK] if line[BLOCK] else CHUNK, line[WIDTH]
    count = (width + block - 1) // block
    r, k = b // count, b % count
    first, row = r * width + k * block, r * stride + line[COLUMN]
    codes = row + (4 * count if line[BLOCK] else 4) + k * block // 8
    return first, min(block, width - k * block, line[NUMEL] - first), row + (4 * k if line[BLOCK] else 0), codes


def blocks_of(table: np.ndarray, rows: int) -> np.ndarray:
    """Blocks of each piece of signs, all rows together."""
    block = np.where(table[:, BLOCK] > 0, table[:, BLOCK], CHUNK)
    return rows * -(-table[:, WIDTH] // block)


@bare
def _land(wire, stride, blocks, table, places, out, a, steps, keeps, past, start, stop):
    """Blocks ``start`` to ``stop``, numbered piece by piece, row by row; ``places`` has a line for each piece, x first."""
    done = 0
    for p in range(table.shape[0]):
        line, step, keep, x = table[p], steps[p], keeps[p], floats(places[p, 0], table[p, NUMEL])
        for b in range(max(start - done, 0), min(stop - done, blocks[p])):
            first, n, scale_at, codes = block_of(line, stride, b)
            scale, at = number(wire, scale_at), line[SOURCE] + first
            beyond, stream = past and begins_line(out, at), past and begins_line(x, first)
            for i in range(0, n, WIDE):
                left = n - i
                mean = signed(bits(wire, codes + i // 8, left), scale)
                put(mean, out, at + i, left, beyond)
                if a is None:
                    put(keep * load(x, first + i, left) - step * mean, x, first + i, left, False)
                else:
                    put(keep * load(a, at + i, left) - step * mean, x, first + i, left, stream)
        done += blocks[p]


def land_signs(
    wire: torch.Tensor, table: np.ndarray, places: np.ndarray, out: torch.Tensor, a: np.ndarray | None, steps: np.ndarray,
    keeps: np.ndarray, past: bool,
) -> None:  # fmt: skip
    """``out`` := the signs of the pieces in ``table``; x := keep·(a or x) − step·out."""
    rows, width = wire.shape
    flat = wire.as_strided(((rows - 1) * wire.stride(0) + width,), (1,)).numpy()
    blocks, numel = blocks_of(table, rows), int(table[:, NUMEL].sum())
    split(_land, int(blocks.sum()), numel, flat, wire.stride(0), blocks, table, places, out.numpy(), a, steps, keeps, past)
