"""PowerSGD's arithmetic on the CPU: every matrix is read from memory three times and written twice.

``project`` computes M = gain · x + e and P = M·Q in one pass. ``fold`` computes Q = Mᵀ·P and the
residual M − P·Qᵀ while a strip of columns is in the cache. ``expand`` writes P·Qᵀ. Factors are
stored transposed, a row of memory for each column: P as float32[rank, rows], Q as float32[rank,
columns].

Note: bits. Every rank computes P̂ and P·Qᵀ by itself, and results must agree, so ``orthonormalize``
and ``expand`` have a fixed order of operations and no fused multiply-add: all processors give the
same bits.
"""

import numpy as np

from commpress.kernels.cpu.calls import Kernels, split
from commpress.kernels.cpu.row_codec import _floats
from commpress.kernels.matrices import LEFT, RIGHT, TALL, WIDE, Matrices

loops = Kernels("low_rank_loops")


def project(x, residual, m, p, q, matrices: Matrices, *, gain=1.0):
    """Set m := gain · x + residual and P := m·Q for every matrix; P is not finite where m is
    not."""
    units = matrices.row_units
    split(
        loops.project,
        len(units),
        m.numel(),
        x.numpy(),
        np.float32(gain),
        _floats(residual),
        m.numpy(),
        p.numpy(),
        q.numpy(),
        matrices.table,
        units,
    )


def fold(m, p, q, matrices: Matrices, *, subtract=True):
    """Set Q := mᵀ·P; with ``subtract`` also m −= P·Qᵀ, this rank's residual of its own part of the
    approximation."""
    units = matrices.column_units
    split(
        loops.fold,
        len(units),
        m.numel(),
        m.numpy(),
        p.numpy(),
        q.numpy(),
        subtract,
        matrices.table,
        units,
    )


def expand(p, q, x, matrices: Matrices, *, gain=1.0):
    """Set x := gain · P·Qᵀ at the place of every matrix."""
    units = matrices.row_units
    split(
        loops.expand,
        len(units),
        matrices.numel,
        p.numpy(),
        q.numpy(),
        x.numpy(),
        np.float32(gain),
        matrices.table,
        units,
    )


def orthonormalize_left(p, matrices: Matrices):
    """Make columns orthonormal; those that depend on earlier ones become zero."""
    split(
        loops.orthonormalize,
        len(matrices.table),
        64 * p.numel(),
        p.numpy(),
        matrices.table,
        LEFT,
        TALL,
        False,
        0,
    )


def orthonormalize_right(q, matrices: Matrices, key: int):
    """Make the basis of the next step: orthonormal columns, with new random ones in place of those
    that depend on earlier ones."""
    split(
        loops.orthonormalize,
        len(matrices.table),
        64 * q.numel(),
        q.numpy(),
        matrices.table,
        RIGHT,
        WIDE,
        True,
        np.uint32(key & 0xFFFFFFFF),
    )
