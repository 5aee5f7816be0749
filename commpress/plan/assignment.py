"""A codec for each layer: the cheapest choice whose summed error stays below a bound (L-GreCo's
formulation).

    minimise Σ cost[l][o(l)]  subject to   Σ error[l][o(l)] ≤ bound   one option o for every layer l

``cheapest`` solves it exactly, by dynamic programming over the layers. Kept are the states that no
other beats in both cost and error and that may still lead to a better end than the best one known:
for any price λ ≥ 0 of an error, Σ min(cost + λ·error) − λ·(what is left of the bound) is the least
that the layers to come can cost.

Errors are squared norms of what a codec loses of a gradient that was measured (``errors_of``);
costs are bytes or seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from commpress.codecs import codec_named
from commpress.collectives.buckets import one_message
from commpress.errors import InvalidArgument
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import width_of

OPTIONS = ("sign", "bits2", "bits3", "bits4", "int4", "bits6", "int8", "topk-64", "topk-16", "none")
_PRICES = 48
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Cheapest:
    """One option for each layer, by its index."""

    options: tuple[int, ...]
    cost: float
    error: float


def cheapest(
    costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], bound: float
) -> Cheapest:
    """The least cost with Σ error ≤ bound; of equal costs, the least error."""
    table = [np.asarray(row, float) for row in costs], [np.asarray(row, float) for row in errors]
    layers = [_undominated(c, e) for c, e in zip(*table, strict=True)]
    least = [float(e[front].min()) for front, e in zip(layers, table[1], strict=True)]
    least_error = np.cumsum([0.0, *least[::-1]])[::-1]  # of a layer and those after it
    slack = _ROUNDING * (abs(bound) + least_error[0])
    if least_error[0] > bound + slack:
        raise InvalidArgument(
            f"bound is {bound:g}, but the finest options err by {least_error[0]:g} in sum: add a "
            "finer codec"
        )
    prices, rest = _prices(layers, *table)
    best = _rounded(prices, layers, *table, bound)
    cost, error = np.zeros(1), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # of each layer: state before, option
    for i, front in enumerate(layers):
        cost = (cost[:, None] + table[0][i][front]).ravel()
        error = (error[:, None] + table[1][i][front]).ravel()
        left = bound - error
        # the least that is still to come, at the best of all prices
        ahead = np.max([rest[i + 1][k] - price * left for k, price in enumerate(prices)], axis=0)
        possible = (error + least_error[i + 1] <= bound + slack) & (
            cost + ahead <= best * (1 + _ROUNDING) + _ROUNDING
        )
        states = np.flatnonzero(possible)
        states = states[_front(cost[states], error[states])]
        steps.append((states // len(front), front[states % len(front)]))
        cost, error = cost[states], error[states]
    ends = np.flatnonzero(error <= bound)
    if not len(ends):  # only rounding was in the way
        ends = np.array([int(np.argmin(error))])
    at = int(ends[np.argmin(cost[ends])])
    found = Cheapest((), float(cost[at]), float(error[at]))
    options: list[int] = []
    for before, option in reversed(steps):
        options.append(int(option[at]))
        at = int(before[at])
    return Cheapest(tuple(options[::-1]), found.cost, found.error)


def _undominated(cost: np.ndarray, error: np.ndarray) -> np.ndarray:
    if len(cost) != len(error) or not len(cost):
        raise InvalidArgument(
            f"a layer has {len(cost)} costs and {len(error)} errors, expected as many of both, "
            "and some"
        )
    if not (np.isfinite(cost).all() and np.isfinite(error).all() and (error >= 0).all()):
        raise InvalidArgument(
            "costs and errors must be finite, errors not negative: leave out gradients with NaN"
        )
    return np.arange(len(cost))[_front(cost, error)]


def _front(cost: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Indices of what nothing else beats in both, the cheapest first."""
    order = np.lexsort((error, cost))
    lowest = np.minimum.accumulate(error[order])
    keep = np.ones(len(order), bool)
    keep[1:] = error[order][1:] < lowest[:-1]
    return order[keep]


def _prices(
    layers: Sequence[np.ndarray], costs: Sequence[np.ndarray], errors: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Prices of an error, and for each layer what it and those after it cost at least at each
    price."""
    slopes = [
        -np.diff(c[front]) / np.diff(e[front])
        for front, c, e in zip(layers, costs, errors, strict=True)
        if len(front) > 1
    ]
    every = np.concatenate([s[np.isfinite(s) & (s > 0)] for s in slopes]) if slopes else np.zeros(0)
    prices = np.concatenate(
        [[0.0], np.quantile(every, np.linspace(0, 1, _PRICES)) if len(every) else []]
    )
    each = [
        np.min(c[front] + prices[:, None] * e[front], axis=1)
        for front, c, e in zip(layers, costs, errors, strict=True)
    ]
    return prices, np.cumsum([np.zeros(len(prices)), *each[::-1]], axis=0)[::-1]


def _rounded(
    prices: np.ndarray,
    layers: Sequence[np.ndarray],
    costs: Sequence[np.ndarray],
    errors: Sequence[np.ndarray],
    bound: float,
) -> float:
    """The cost of some choice within the bound: at a price the best option of each layer, made
    cheaper where room is left."""
    best = sum(
        float(c[front][np.argmin(e[front])])
        for front, c, e in zip(layers, costs, errors, strict=True)
    )
    for price in prices:
        chosen = [
            int(np.argmin(c[f] + price * e[f]))
            for f, c, e in zip(layers, costs, errors, strict=True)
        ]
        left = bound - sum(float(e[f][o]) for f, e, o in zip(layers, errors, chosen, strict=True))
        if left < 0:
            continue
        total = sum(float(c[f][o]) for f, c, o in zip(layers, costs, chosen, strict=True))
        for front, c, e, o in zip(layers, costs, errors, chosen, strict=True):
            for cheaper in range(o):  # the front is sorted by cost
                if (more := float(e[front][cheaper] - e[front][o])) <= left:
                    left, total = left - more, total - float(c[front][o] - c[front][cheaper])
                    break
        best = min(best, total)
    return best


# ---------------------------------------------------------------- measured


def errors_of(gradient: torch.Tensor, codecs: Sequence[str]) -> list[float]:
    """‖g − Q(g)‖² of each codec, computed by the kernels that production runs, without error
    feedback."""
    flat = gradient.detach().float().reshape(-1).contiguous()
    flag = torch.zeros(1, dtype=torch.uint8, device=flat.device)
    found = []
    for name in codecs:
        message = one_message(flat.numel(), codec_named(name), 1, feedback=False)
        row = torch.zeros(1, message.pieces.row_bytes, dtype=torch.uint8, device=flat.device)
        out = torch.empty_like(flat)
        kernels = arithmetic(flat.device, message.pieces)
        kernels.encode(flat, row, flag, message.pieces)
        kernels.decode(row, out, message.pieces)
        found.append(float((out.double() - flat.double()).square().sum()))
    return found


def bytes_of(numel: int, codec: str, ranks: int) -> int:
    """Payload that one rank sends for a tensor in the two exchanges of an all-reduce."""
    row = -(-codec_named(codec).row_bytes(width_of(numel, ranks)) // 8) * 8
    return 2 * (ranks - 1) * row


@dataclass(frozen=True)
class Assignment:
    """A codec for each parameter, and what it costs beside one codec for all."""

    rules: Mapping[str, str]
    nbytes: float
    error: float
    uniform_bytes: float
    uniform_error: float

    @property
    def gain(self) -> float:
        """Times that bytes are fewer."""
        return self.uniform_bytes / self.nbytes


def assign(
    gradients: Mapping[str, torch.Tensor],
    *,
    ranks: int,
    uniform: str = "int4",
    options: Sequence[str] = OPTIONS,
) -> Assignment:
    """The fewest bytes at a total error no larger than with ``uniform`` for every parameter."""
    codecs = tuple(dict.fromkeys([*options, uniform]))
    errors = {name: errors_of(gradient, codecs) for name, gradient in gradients.items()}
    numels = {name: gradient.numel() for name, gradient in gradients.items()}
    return assign_by(errors, numels, codecs, ranks=ranks, uniform=uniform)


def assign_by(
    errors: Mapping[str, Sequence[float]],
    numels: Mapping[str, int],
    codecs: Sequence[str],
    *,
    ranks: int,
    uniform: str,
) -> Assignment:
    """The same from errors of each of ``codecs``, ``uniform`` among them."""
    costs = [[float(bytes_of(numels[name], codec, ranks)) for codec in codecs] for name in errors]
    at = codecs.index(uniform)
    bound = sum(row[at] for row in errors.values())
    found = cheapest(costs, list(errors.values()), bound)
    rules = {name: codecs[o] for name, o in zip(errors, found.options, strict=True)}
    return Assignment(rules, found.cost, found.error, sum(row[at] for row in costs), bound)
