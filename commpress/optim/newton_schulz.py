"""Arithmetic of Muon: Newton and Schulz's iteration, rates by shape, and who iterates for whom."""

from collections.abc import Sequence
from itertools import zip_longest
from math import prod, sqrt
from typing import Any

import torch

from commpress.optim.optimizer import decay_of


def orthogonalised(
    update: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return about UVᵀ of ``update`` = USVᵀ, in bfloat16: ``steps`` times x ← a·x + (b·G + c·G²)·x
    with G = xxᵀ, from ``update`` divided by its norm; of a batch of matrices, each by itself."""
    a, b, c = coefficients
    x, tall = update.bfloat16(), update.shape[-2] > update.shape[-1]
    x = x.mT if tall else x
    alone = x.ndim == 2
    add: Any = torch.addmm if alone else torch.baddbmm
    norm = x.norm() if alone else torch.stack([each.norm() for each in x])[:, None, None]
    x = x / norm.clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def direction(
    gradient: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]
) -> torch.Tensor:
    """Return the update of a parameter from its ``momentum``, which has the gradient already; the
    memory of the gradient is used."""
    mu, shape = group["momentum"], gradient.shape
    update = gradient.lerp_(momentum, mu) if group["nesterov"] else momentum
    how = group["ns_coefficients"], group["ns_steps"], group["eps"]
    rows = [*(group.get("split") or shape[-2:-1])]
    if len(rows) > 1 and len({*rows}) == 1:
        return orthogonalised(update.reshape(-1, rows[0], shape[-1]), *how).reshape(shape)
    parts = [orthogonalised(part, *how) for part in update.split(rows, dim=-2)]
    return torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]


def move(
    weights: torch.Tensor,
    update: torch.Tensor,
    group: dict[str, Any],
    begin: int = 0,
    rows: int = 0,
) -> None:
    """Take the step of a parameter's weights; ``begin``: the first of them, of ``rows`` rows, if
    these are not all."""
    weights.mul_(decay_of(group))
    first = -begin
    for count in group.get("split") or (rows or weights.shape[-2],):
        part = slice(max(first, 0), max(first + count, 0))
        rate = adjusted(float(group["lr"]), group["adjust_lr_fn"], (count, weights.shape[-1]))
        weights[..., part, :].add_(update[..., part, :], alpha=-rate)
        first += count


def adjusted(lr: float, adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix of this shape."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * sqrt(max(rows, columns)))
    return lr * sqrt(max(1, rows / columns))


def owners_of(
    shapes: Sequence[Sequence[int]], ranks: int, splits: Sequence[Sequence[int] | None] = ()
) -> list[int]:
    """Deal matrices to ranks so that all have about as many operations of an iteration to do: the
    largest first, each to the rank that has least to do. ``splits``: rows of the parts of each."""
    work = []
    for (*batch, m, n), split in zip_longest(shapes, splits):
        parts = [sorted((rows, n)) for rows in split or (m,)]
        work.append(prod(batch) * sum(least**2 * (2 * most + least) for least, most in parts))
    owners, loads = [0] * len(work), [0] * ranks
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += work[i]
    return owners
