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
from commpress.kernels.cpu_threads import split
from commpress.kernels.pieces import ADDRESS, BLOCK, BLOCKS, KIND, MESSAGE, NUMEL, SOURCE, STRIDE, WIDTH, Pieces
from commpress.kernels.reference import CHUNK, SIGN_RMS
from commpress.kernels.sources import land as loops


def blocks_of(table: np.ndarray, rows: int) -> np.ndarray:
    """Blocks of each piece of signs, all rows together."""
    block = np.where(table[:, BLOCK] > 0, table[:, BLOCK], CHUNK)
    return rows * -(-table[:, WIDTH] // block)


def land_signs(
    wire: torch.Tensor, table: np.ndarray, places: np.ndarray, out: torch.Tensor | None, a: np.ndarray | None,
    steps: np.ndarray, keeps: np.ndarray, past: bool,
) -> None:  # fmt: skip
    """``out``, if there is one, := the signs of the pieces in ``table``; x := keep·(a or x) − step·signs."""
    rows, width = wire.shape
    flat = wire.as_strided(((rows - 1) * wire.stride(0) + width,), (1,)).numpy()
    blocks, numel = blocks_of(table, rows), int(table[:, NUMEL].sum())
    into = None if out is None else out.numpy()
    split(loops.land, int(blocks.sum()), numel, flat, wire.stride(0), blocks, table, places, into, a, steps, keeps, past)


@dataclass(frozen=True)
class Runs:
    """Of what the mean of each layer is made: pieces of signs that lie in the wires of messages, or all of it in the buffer.

    ``lines`` are those of ``Pieces``, layer by layer, with four more columns; a layer in the buffer is one block.
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
