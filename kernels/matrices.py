"""Table of matrices for the low-rank kernels."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

SOURCE, TALL, WIDE, RANK, LEFT, RIGHT, PLACE, MARK = range(8)
LOW_RANK = 64  # kind of a piece with a residual that belongs to a matrix
_UNIT = 1 << 15  # elements that a thread processes at a time
# elements of a strip of columns: half a megabyte, read twice, the second time from the cache
_STRIP = 1 << 17


class Matrix(NamedTuple):
    source: int  # first element in the buffer
    tall: int
    wide: int
    rank: int
    mark: int = 0  # seeds the matrix's first basis


@dataclass(frozen=True)
class Matrices:
    """The table of a low-rank codec, with a row per matrix; residuals and factors are concatenated
    in its order."""

    table: np.ndarray  # int64[matrices, 8]
    numel: int  # elements of all matrices: the length of their residual
    left: int  # elements of all P
    right: int  # elements of all Q

    @cached_property
    def row_units(self) -> np.ndarray:
        """Units of work int64[units, 3]: matrix, first and last row."""
        return self._units(TALL, [max(_UNIT // int(line[WIDE]), 1) for line in self.table])

    @cached_property
    def column_units(self) -> np.ndarray:
        """Units of work int64[units, 3]: matrix, first and last column."""
        return self._units(
            WIDE, [max(_STRIP // int(line[TALL]) // 16 * 16, 128) for line in self.table]
        )

    def _units(self, side: int, steps: list[int]) -> np.ndarray:
        units = [
            (i, first, min(first + step, int(line[side])))
            for i, (line, step) in enumerate(zip(self.table, steps, strict=True))
            for first in range(0, int(line[side]), step)
        ]
        return np.array(units, np.int64).reshape(-1, 3)


def stack(matrices: Iterable[Matrix]) -> Matrices:
    lines, left, right, place = [], 0, 0, 0
    for one in matrices:
        lines.append((one.source, one.tall, one.wide, one.rank, left, right, place, one.mark))
        left, right = left + one.rank * one.tall, right + one.rank * one.wide
        place += one.tall * one.wide
    return Matrices(np.array(lines, np.int64).reshape(-1, 8), place, left, right)
