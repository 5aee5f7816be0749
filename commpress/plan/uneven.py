"""Shares of different size for ranks of different speed: of a batch, of a model's layers, of
parameters.

All three make the last rank finish as early as can be, exactly:

    shares  x_i whole, Σ x_i = total, x_i ≤ most_i     minimise max_i fixed_i + x_i / speed_i
            (a batch, parameters)
    stages  layers in order, one range for each stage  minimise max_j fixed_j + Σ cost / speed_j
            (a pipeline)
"""

from collections.abc import Sequence

import numpy as np

from commpress.errors import InvalidArgument


def shares(
    total: int,
    speeds: Sequence[float],
    *,
    fixed: Sequence[float] | None = None,
    most: Sequence[int] | None = None,
    least: int = 0,
) -> list[int]:
    """Units for each rank: ``speeds`` units per second after ``fixed`` seconds (its links), at most
    ``most`` (its memory)."""
    speed = _speeds(speeds)
    late = np.zeros(len(speed)) if fixed is None else np.asarray(fixed, float)
    room = (
        np.full(len(speed), total, np.int64)
        if most is None
        else np.minimum(np.asarray(most, np.int64), total)
    )
    if len(late) != len(speed) or len(room) != len(speed):
        raise InvalidArgument(
            f"{len(speed)} speeds, {len(late)} fixed and {len(room)} most: expected as many of each"
        )
    if total < least * len(speed) or int(room.sum()) < total or (room < least).any():
        raise InvalidArgument(
            f"total is {total}, expected from {least * len(speed)} to {int(room.sum())}, what "
            f"{len(speed)} ranks may have"
        )

    def within(seconds: float) -> np.ndarray:
        return np.clip(np.floor((seconds - late) * speed + 1e-9), least, room).astype(np.int64)

    low, high = 0.0, float((late + room / speed).max())
    for _ in range(64):
        middle = (low + high) / 2
        if int(within(middle).sum()) >= total:
            high = middle
        else:
            low = middle
    found = within(high)
    for _ in range(int(found.sum()) - total):  # several reach a unit at the same moment
        found[int(np.where(found > least, late + found / speed, -np.inf).argmax())] -= 1
    return [int(n) for n in found]


def stages(
    costs: Sequence[float], speeds: Sequence[float], *, fixed: Sequence[float] | None = None
) -> list[int]:
    """Layers of each stage, in order and at least one each; by dynamic programming over where
    stages end."""
    speed = _speeds(speeds)
    count, layers = len(speed), len(costs)
    if layers < count:
        raise InvalidArgument(
            f"{layers} layers cannot fill {count} stages: expected at least one layer for each"
        )
    late = np.zeros(count) if fixed is None else np.asarray(fixed, float)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    best = np.full((count + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    ends = np.zeros((count + 1, layers + 1), np.int64)
    for j in range(1, count + 1):
        for end in range(j, layers - count + j + 1):
            took = np.maximum(
                best[j - 1, j - 1 : end],
                late[j - 1] + (before[end] - before[j - 1 : end]) / speed[j - 1],
            )
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
