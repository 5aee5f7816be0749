"""Arithmetic of Muon: Newton and Schulz's iteration, rates by shape, and who iterates for whom."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch


def orthogonalised(
    update: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return about UVᵀ of ``update`` = USVᵀ, in bfloat16: ``steps`` times x ← a·x + (b·G + c·G²)·x
    with G = xxᵀ, from ``update`` divided by its norm."""
    a, b, c = coefficients
    x, tall = update.bfloat16(), update.shape[0] > update.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def direction(
    gradient: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]
) -> torch.Tensor:
    """Return the update of a matrix from its ``momentum``, which has the gradient already; the
    memory of the gradient is used."""
    mu = group["momentum"]
    update = gradient.lerp_(momentum, mu) if group["nesterov"] else momentum
    return orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])


def adjusted(lr: float, adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix of this shape."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * sqrt(max(rows, columns)))
    return lr * sqrt(max(1, rows / columns))


def owners_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Deal matrices to ranks so that all have about as many operations of an iteration to do: the
    largest first, each to the rank that has least to do."""
    work = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    owners, loads = [0] * len(work), [0] * ranks
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += work[i]
    return owners
