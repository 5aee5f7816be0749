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
def _word(wire, at, left):
    """64 codes, or the first ``left`` and zeros: what lies behind them may not be there."""
    if left >= WIDE:
        return bits(wire, at)
    word = np.uint64(0)
    for i in range((left + 7) // 8):
        word |= np.uint64(wire[at + i]) << np.uint64(8 * i)
    return word


@bare
def _land(wire, stride, rows, table, places, out, a, steps, keeps, past, start, stop):
    """Blocks ``start`` to ``stop``, numbered piece by piece, row by row; ``places`` has a line for each piece, x first."""
    done = 0
    for p in range(table.shape[0]):
        line, step, keep = table[p], steps[p], keeps[p]
        block, width = line[BLOCK] if line[BLOCK] else CHUNK, line[WIDTH]
        count, x = (width + block - 1) // block, floats(places[p, 0], line[NUMEL])
        for b in range(max(start - done, 0), min(stop - done, rows * count)):
            r, k = b // count, b % count
            first = r * width + k * block
            n, row, at = min(block, width - k * block, line[NUMEL] - first), r * stride + line[COLUMN], line[SOURCE] + first
            scale = number(wire, row + (4 * k if line[BLOCK] else 0))
            codes = row + (4 * count if line[BLOCK] else 4) + k * block // 8
            beyond, stream = past and begins_line(out, at), past and begins_line(x, first)
            for i in range(0, n, WIDE):
                left = n - i
                mean = signed(_word(wire, codes + i // 8, left), scale)
                put(mean, out, at + i, left, beyond)
                if a is None:
                    put(keep * load(x, first + i, left) - step * mean, x, first + i, left, False)
                else:
                    put(keep * load(a, at + i, left) - step * mean, x, first + i, left, stream)
        done += rows * count


def land_signs(
    wire: torch.Tensor, table: np.ndarray, places: np.ndarray, out: torch.Tensor, a: np.ndarray | None, steps: np.ndarray,
    keeps: np.ndarray, past: bool,
) -> None:  # fmt: skip
    """``out`` := the signs of the pieces in ``table``; x := keep·(a or x) − step·out."""
    rows, width = wire.shape
    flat = wire.as_strided(((rows - 1) * wire.stride(0) + width,), (1,)).numpy()
    block = np.where(table[:, BLOCK] > 0, table[:, BLOCK], CHUNK)
    blocks = rows * int(np.sum(-(-table[:, WIDTH] // block)))
    numel = int(table[:, NUMEL].sum())
    split(_land, blocks, numel, flat, wire.stride(0), rows, table, places, out.numpy(), a, steps, keeps, past)
