"""Table of pieces for the kernels of codecs: how a buffer is divided into rows.

A *piece* is a range of one parameter with one codec. It is divided among the ranks by itself: row r
has its elements r·width … (r+1)·width, with width = ⌈numel / 8·rows⌉ · 8. A message is the
concatenation of one row of every piece of a bucket. So scales and shards never depend on the other
tensors in the bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from commpress.kernels import registered
from commpress.kernels.reference import CASTS, CHUNK, SIGN_L1, SIGN_RMS, code_bits, row_bytes

# bytes at whose multiples every piece, so every row, begins: NCCL copies rows that begin elsewhere
# byte by byte
ALIGNED = 16
# RESIDUAL < 0: no feedback
SOURCE, NUMEL, WIDTH, KIND, BLOCK, BITS, COLUMN, RESIDUAL, SHARD, HASH = range(10)


class Piece(NamedTuple):
    source: int  # first element in the buffer
    numel: int
    kind: int
    block: int  # elements per scale, 0: one scale per row
    hash: int = 0  # makes the noise of stochastic codecs independent between pieces
    feedback: bool = True  # keep the residual and send it later


@dataclass(frozen=True)
class Pieces:
    """The table, one row per piece, and sizes that follow from it."""

    table: np.ndarray  # int64[pieces, 10], columns as named above
    rows: int
    row_bytes: int
    numel: int  # elements of all pieces
    # elements of pieces with feedback: the length of a sent residual
    residual_numel: int
    # elements of one row of all pieces, with padding: the length of a reduced residual
    shard: int
    row_scales: bool  # True if a sign piece has one scale per row, so its residual can be lazy

    @cached_property
    def residual_runs(self) -> list[tuple[int, int, int]]:
        """Ranges (first element in the buffer, elements, first element in the sent residual) of
        pieces with feedback, merged if they are adjacent."""
        runs: list[tuple[int, int, int]] = []
        for source, numel, start in self.table[self.table[:, RESIDUAL] >= 0][
            :, [SOURCE, NUMEL, RESIDUAL]
        ].tolist():
            first, length, at = runs[-1] if runs else (-1, 0, 0)
            if (source, start) == (first + length, at + length):
                runs[-1] = (first, length + numel, at)
            else:
                runs.append((source, numel, start))
        return runs

    @cached_property
    def plain(self) -> bool:
        """True if there are only signs and casts."""
        return bool(np.isin(self.table[:, KIND], (SIGN_L1, SIGN_RMS, *CASTS)).all())

    @cached_property
    def registered(self) -> bool:
        """True if the codec is a registered one, which shares no message with others."""
        return len(self.table) > 0 and registered.known(int(self.table[0, KIND]))

    @cached_property
    def residual_layout(self) -> bytes:
        """Key that is equal for pieces whose residuals fit the same tensor."""
        return (
            self.table[:, [NUMEL, WIDTH, BLOCK, RESIDUAL, SHARD]].tobytes()
            + f"{self.rows} {self.row_scales}".encode()
        )

    @cached_property
    def blocks(self) -> int:
        """Blocks of one row of all pieces, the unit of work of a thread."""
        step = np.where(self.table[:, BLOCK] > 0, self.table[:, BLOCK], CHUNK)
        return int(np.sum(-(-self.table[:, WIDTH] // step)))


def width_of(numel: int, rows: int) -> int:
    return max(-(-numel // (8 * rows)) * 8, 8)


def aligned(size: int) -> int:
    """Return ``size`` or the next multiple of ``ALIGNED`` bytes."""
    return -(-size // ALIGNED) * ALIGNED


def cut(pieces: Sequence[Piece], rows: int, *, widths: Sequence[int] = ()) -> Pieces:
    """Make the table of ``pieces``; every piece starts at a multiple of ``ALIGNED`` bytes.

    ``widths``: elements of a row of each piece, multiples of 8, if they are not the fewest
    possible.
    """
    lines, column, numel, residual_numel, shard, row_scales = [], 0, 0, 0, 0, False
    for piece, width in zip(
        pieces, widths or [width_of(p.numel, rows) for p in pieces], strict=True
    ):
        users = registered.known(piece.kind)
        bits = 0 if users else code_bits(piece.kind)
        size = (
            registered.size_of(piece.kind, width)
            if users
            else row_bytes(piece.kind, width, piece.block)
        )
        at = residual_numel if piece.feedback else -1
        lines.append(
            (
                piece.source,
                piece.numel,
                width,
                piece.kind,
                piece.block,
                bits,
                column,
                at,
                shard,
                piece.hash,
            )
        )
        column += aligned(size)
        numel += piece.numel
        residual_numel += piece.numel if piece.feedback else 0
        shard += width
        row_scales = row_scales or (piece.block == 0 and piece.kind <= SIGN_RMS)
        if piece.block == 0 and piece.kind > SIGN_RMS and piece.kind not in CASTS:
            raise ValueError("one scale per row exists for the sign codec only")
    table = np.array(lines, np.int64).reshape(-1, 10)
    return Pieces(table, rows, column, numel, residual_numel, shard, row_scales)


def own_row(pieces: Pieces, rank: int) -> Pieces:
    """Return the table of row ``rank`` alone in a buffer of ``pieces.shard`` elements: encoding
    from that buffer gives a row of ``pieces``."""
    table = pieces.table.copy()
    table[:, SOURCE] = table[:, SHARD]
    table[:, NUMEL] = np.clip(pieces.table[:, NUMEL] - rank * table[:, WIDTH], 0, table[:, WIDTH])
    table[:, RESIDUAL] = np.where(table[:, RESIDUAL] >= 0, table[:, SHARD], -1)
    return replace(
        pieces, table=table, rows=1, numel=int(table[:, NUMEL].sum()), residual_numel=pieces.shard
    )
