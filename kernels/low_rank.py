"""PowerSGD's arithmetic as in ``cpu.low_rank``, in torch operations batched by shape, for CUDA.

The vendor's library computes products, so results equal those of the CPU path up to rounding, not
bit for bit, and ranks agree bit for bit only on devices of one kind.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from commpress.kernels.matrices import LEFT, MARK, PLACE, RANK, RIGHT, SOURCE, TALL, WIDE, Matrices


class _Group(NamedTuple):
    """Matrices of one shape, contiguous in residuals and factors."""

    lines: np.ndarray
    number: int
    tall: int
    wide: int
    rank: int

    def all(self, flat: torch.Tensor, first: int, rows: int, columns: int) -> torch.Tensor:
        at = int(self.lines[0, first])
        return flat[at : at + self.number * rows * columns].view(self.number, rows, columns)

    def places(self, x: torch.Tensor) -> list[torch.Tensor]:
        numel = self.tall * self.wide
        return [x[s : s + numel].view(self.tall, self.wide) for s in self.lines[:, SOURCE].tolist()]


def _groups(matrices: Matrices) -> Iterator[_Group]:
    table = matrices.table
    edges = [
        0,
        *(np.flatnonzero(np.any(table[1:, 1:4] != table[:-1, 1:4], axis=1)) + 1).tolist(),
        len(table),
    ]
    for first, last in pairwise(edges):
        lines = table[first:last]
        yield _Group(
            lines, last - first, int(lines[0, TALL]), int(lines[0, WIDE]), int(lines[0, RANK])
        )


def project(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    m: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    matrices: Matrices,
    *,
    gain: float = 1.0,
) -> None:
    for group in _groups(matrices):
        new = group.all(m, PLACE, group.tall, group.wide)
        torch.stack(group.places(x), out=new)
        if residual is None:
            new.mul_(gain)
        else:
            old = group.all(residual, PLACE, group.tall, group.wide)
            torch.add(old, new, alpha=gain, out=new)
        right, left = (
            group.all(q, RIGHT, group.rank, group.wide),
            group.all(p, LEFT, group.rank, group.tall),
        )
        torch.bmm(right, new.transpose(1, 2), out=left)


def fold(
    m: torch.Tensor, p: torch.Tensor, q: torch.Tensor, matrices: Matrices, *, subtract: bool = True
) -> None:
    for group in _groups(matrices):
        whole, left = (
            group.all(m, PLACE, group.tall, group.wide),
            group.all(p, LEFT, group.rank, group.tall),
        )
        right = group.all(q, RIGHT, group.rank, group.wide)
        torch.bmm(left, whole, out=right)
        if subtract:
            whole.baddbmm_(left.transpose(1, 2), right, alpha=-1)


def expand(
    p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, matrices: Matrices, *, gain: float = 1.0
) -> None:
    for group in _groups(matrices):
        left, right = (
            group.all(p, LEFT, group.rank, group.tall),
            group.all(q, RIGHT, group.rank, group.wide),
        )
        product = torch.bmm(left.transpose(1, 2), right).mul_(gain)
        torch._foreach_copy_(group.places(x), list(product.unbind()))


def orthonormalize_left(p: torch.Tensor, matrices: Matrices) -> None:
    for group in _groups(matrices):
        _gram_schmidt(group.all(p, LEFT, group.rank, group.tall), None)


def orthonormalize_right(q: torch.Tensor, matrices: Matrices, key: int) -> None:
    for group in _groups(matrices):
        noise = torch.empty(group.number, group.rank, group.wide)
        for i, mark in enumerate(group.lines[:, MARK].tolist()):
            noise[i].uniform_(
                -0.5, 0.5, generator=torch.Generator().manual_seed((key << 32) ^ mark)
            )
        _gram_schmidt(group.all(q, RIGHT, group.rank, group.wide), noise.to(q.device))


def _gram_schmidt(factor: torch.Tensor, noise: torch.Tensor | None) -> None:
    """Orthonormalize rows in place, in float64, without reading a value from the device."""
    work = factor.double()
    for k in range(work.shape[1]):
        column, alive = _against(work[:, k], work[:, :k])
        if noise is not None:
            fresh, _ = _against(noise[:, k].double(), work[:, :k])
            column = torch.where(alive, column, fresh)
        work[:, k] = column
    factor.copy_(work)


def _against(column: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``column`` [count, n] without its part in the span of ``others``, normalized to 1, or
    zero if nothing is left."""
    before = column.norm(dim=1, keepdim=True)
    for _ in range(2):  # two passes suffice
        column = column - torch.einsum(
            "cj,cjn->cn", torch.einsum("cn,cjn->cj", column, others), others
        )
    norm = column.norm(dim=1, keepdim=True)
    alive = norm > 1e-7 * before
    return torch.where(alive, column / norm, torch.zeros_like(column)), alive
