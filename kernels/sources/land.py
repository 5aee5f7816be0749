"""The loops of ``cpu_land``: signs decoded while something is done with them."""

import numpy as np

from commpress.kernels.pieces import ADDRESS, BLOCK, COLUMN, NUMEL, SOURCE, STRIDE, WIDTH
from commpress.kernels.reference import CHUNK
from commpress.kernels.sources.arrays import begins_line, floats, octets
from commpress.kernels.sources.decorators import bare
from commpress.kernels.sources.lanes import WIDE, bits, load, number, put, signed


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


@bare
def block_in(line, b):
    """Block ``b`` of a run: its first element in the run, elements, whether they lie in a wire, which, codes and scale."""
    landed, wire = line[ADDRESS] != 0, octets(line[ADDRESS], line[STRIDE])
    first, n, scale_at, codes = block_of(line, line[STRIDE], b)
    return first, n, landed, wire, codes, number(wire, scale_at) if landed else np.float32(0)


@bare
def land(wire, stride, blocks, table, places, out, a, steps, keeps, past, start, stop):
    """Blocks ``start`` to ``stop``, numbered piece by piece, row by row; ``places`` has a line for each piece, x first. Without
    ``out`` the mean is not stored."""
    done = 0
    for p in range(table.shape[0]):
        line, step, keep, x = table[p], steps[p], keeps[p], floats(places[p, 0], table[p, NUMEL])
        for b in range(max(start - done, 0), min(stop - done, blocks[p])):
            first, n, scale_at, codes = block_of(line, stride, b)
            scale, at = number(wire, scale_at), line[SOURCE] + first
            beyond, stream = False, past and begins_line(x, first)
            if out is not None:
                beyond = past and begins_line(out, at)
            for i in range(0, n, WIDE):
                left = n - i
                mean = signed(bits(wire, codes + i // 8, left), scale)
                if out is not None:
                    put(mean, out, at + i, left, beyond)
                if a is None:
                    put(keep * load(x, first + i, left) - step * mean, x, first + i, left, False)
                else:
                    put(keep * load(a, at + i, left) - step * mean, x, first + i, left, stream)
        done += blocks[p]
