"""Shares of different size for ranks of different speed: of a batch, and of a model's layers.

Both make the last rank finish as early as can be, exactly:

    shares  x_i whole, Σ x_i = total               minimise max_i x_i / speed_i (a batch)
    stages  layers in order, a range for a stage   minimise max_j Σ cost / speed_j (a pipeline)
"""

from collections.abc import Sequence

import numpy as np

from commpress.errors import InvalidArgument


def shares(total: int, speeds: Sequence[float], *, least: int = 0) -> list[int]:
    """Units for each rank, which does ``speed`` of them per second; at least ``least`` each."""
    speed = _speeds(speeds)
    if total < least * len(speed):
        raise InvalidArgument(
            f"total is {total}, expected at least {least} for each of {len(speed)} ranks"
        )

    # what all have done when the last of them could end, if units could be divided
    found = np.maximum(np.floor(total * speed / speed.sum() + 1e-9), least).astype(np.int64)
    while left := total - int(found.sum()):
        if left > 0:
            found[int(((found + 1) / speed).argmin())] += 1
        else:
            found[int(np.where(found > least, found / speed, -np.inf).argmax())] -= 1
    return [int(n) for n in found]


def stages(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Layers of each stage, in order and at least one each; by dynamic programming over where
    stages end."""
    speed = _speeds(speeds)
    count, layers = len(speed), len(costs)
    if layers < count:
        raise InvalidArgument(
            f"{layers} layers cannot fill {count} stages: expected at least one layer for each"
        )
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    best = np.full((count + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    ends = np.zeros((count + 1, layers + 1), np.int64)
    for j in range(1, count + 1):
        for end in range(j, layers - count + j + 1):
            took = (before[end] - before[j - 1 : end]) / speed[j - 1]
            took = np.maximum(best[j - 1, j - 1 : end], took)
            at = int(took.argmin())
            best[j, end], ends[j, end] = took[at], at + j - 1
    found, end = [], layers
    for j in range(count, 0, -1):
        found.append(end - int(ends[j, end]))
        end = int(ends[j, end])
    return found[::-1]


def _speeds(speeds: Sequence[float]) -> np.ndarray:
    found = np.asarray(speeds, float)
    if found.ndim != 1 or not len(found) or not (np.isfinite(found).all() and (found > 0).all()):
        raise InvalidArgument(f"speeds are {speeds!r}, expected a positive number for each rank")
    return found
