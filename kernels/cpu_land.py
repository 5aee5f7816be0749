"""Decoding signs while something is done with them: the mean is used where it is in a register.

A pass of its own would read the mean back from memory, which takes as long as all the rest of it. For the same reason whoever
needs a mean again decodes it again, from a message that is 32 times shorter than what it says: ``Runs`` tell where it lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from commpress.kernels.adam import Segments
from commpress.kernels.cpu_arrays import bare, begins_line, floats, octets
from commpress.kernels.cpu_lanes import WIDE, bits, load, number, put, signed
from commpress.kernels.cpu_threads import split
from commpress.kernels.pieces import BLOCK, COLUMN, KIND, NUMEL, SOURCE, WIDTH, Pieces
from commpress.kernels.reference import CHUNK, SIGN_RMS

ADDRESS, STRIDE, BLOCKS, MESSAGE = range(10, 14)  # of the first row or 0, of rows, of all rows together, which or −1


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
def block_in(line, b):
    """Block ``b`` of a run: its first element in the run, elements, whether they lie in a wire, which, codes and scale."""
    landed, wire = line[ADDRESS] != 0, octets(line[ADDRESS], line[STRIDE])
    first, n, scale_at, codes = block_of(line, line[STRIDE], b)
    return first, n, landed, wire, codes, number(wire, scale_at) if landed else np.float32(0)


@bare
def _land(wire, stride, blocks, table, places, out, a, steps, keeps, past, start, stop):
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


def land_signs(
    wire: torch.Tensor, table: np.ndarray, places: np.ndarray, out: torch.Tensor | None, a: np.ndarray | None,
    steps: np.ndarray, keeps: np.ndarray, past: bool,
) -> None:  # fmt: skip
    """``out``, if there is one, := the signs of the pieces in ``table``; x := keep·(a or x) − step·signs."""
    rows, width = wire.shape
    flat = wire.as_strided(((rows - 1) * wire.stride(0) + width,), (1,)).numpy()
    blocks, numel = blocks_of(table, rows), int(table[:, NUMEL].sum())
    into = None if out is None else out.numpy()
    split(_land, int(blocks.sum()), numel, flat, wire.stride(0), blocks, table, places, into, a, steps, keeps, past)


@dataclass(frozen=True)
class Runs:
    """Of what the mean of each layer is made: pieces of signs that lie in the wires of messages, or all of it in the buffer.

    ``lines`` are those of ``Pieces``, layer by layer, with the columns named above; a layer in the buffer is one block.
    """

    edges: np.ndarray  # where each layer begins in the lines
    lines: np.ndarray

    @cached_property
    def owners(self) -> np.ndarray:
        """The layer of each line."""
        return np.repeat(np.arange(len(self.edges) - 1), np.diff(self.edges))

    def alike(self, other: "Runs") -> bool:
        """Whether the same blocks came in the same places of a message."""
        return self.lines.shape == other.lines.shape and bool((self.lines[:, :ADDRESS] == other.lines[:, :ADDRESS]).all())

    def unsaid(self) -> np.ndarray:
        """The lines, with everything in the buffer."""
        lines = self.lines.copy()
        lines[:, ADDRESS] = 0
        return lines

    def lie_in(self, wires: Sequence[torch.Tensor]) -> None:
        """Where the messages came to lie: rows without headers."""
        signs = self.lines[:, MESSAGE] >= 0
        of = self.lines[signs, MESSAGE]
        self.lines[signs, ADDRESS] = np.array([rows.data_ptr() for rows in wires], np.int64)[of]
        self.lines[signs, STRIDE] = np.array([rows.stride(0) for rows in wires], np.int64)[of]


def runs(segments: Segments, messages: Sequence[Pieces]) -> Runs:
    """How these layers come in messages of which ``decode`` leaves the signs; in none at all if everything was decoded."""
    layers, found = segments.table, [np.empty((0, MESSAGE + 1), np.int64)]
    for message, pieces in enumerate(messages):
        signs = pieces.table[pieces.table[:, KIND] <= SIGN_RMS]
        rest = np.zeros((len(signs), MESSAGE + 1 - ADDRESS), np.int64)
        rest[:, BLOCKS - ADDRESS], rest[:, MESSAGE - ADDRESS] = blocks_of(signs, pieces.rows), message
        found.append(np.hstack([signs, rest]))
    signs, first, numel = np.concatenate(found), layers[:, 2], layers[:, 3]
    ends = first + numel
    order = np.argsort(ends, kind="stable")
    after = np.searchsorted(ends[order], signs[:, SOURCE], side="right")  # the layer that ends behind, if it has begun
    owners = np.append(order, 0)[after]
    inside = (after < len(layers)) & (signs[:, SOURCE] >= np.append(first, 0)[owners])
    left = np.setdiff1d(np.flatnonzero(numel), owners[inside])
    plain = np.zeros((len(left), MESSAGE + 1), np.int64)
    plain[:, SOURCE], plain[:, BLOCKS], plain[:, MESSAGE] = first[left], 1, -1
    for column in (NUMEL, WIDTH, BLOCK):
        plain[:, column] = numel[left]
    lines, owners = np.concatenate([signs[inside], plain]), np.concatenate([owners[inside], left])
    by_layer = np.lexsort((lines[:, SOURCE], owners))
    return Runs(np.searchsorted(owners[by_layer], np.arange(len(layers) + 1)), lines[by_layer])
