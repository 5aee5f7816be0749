"""A codec for each layer: the cheapest choice whose summed error stays below a bound (L-GreCo's
formulation).

    minimise Σ cost[l][o(l)]  subject to   Σ error[l][o(l)] ≤ bound   one option o for every layer l

``cheapest`` solves it exactly, by dynamic programming over the layers. Kept are the states that no
other beats in both cost and error and that may still lead to a better end than a known one: at a
price λ ≥ 0 of an error, Σ min(cost + λ·error) − λ·(what is left of the bound) is the least that the
layers to come can cost.

Errors are squared norms of what a codec loses of a gradient that was measured (``errors_of``);
costs are bytes or seconds. For the ranks of low-rank codecs the two change places: the least error
in the bytes that one rank for all layers would take (``assign_ranks``).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import frexp, isfinite, nan, prod

import numpy as np
import torch

from commpress.codecs import Codec, codec_named
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.collectives.buckets import one_message
from commpress.errors import InvalidArgument
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import aligned, width_of

OPTIONS = ("sign", "bits2", "bits3", "bits4", "int4", "bits6", "int8", "topk-64", "topk-16", "none")
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SPARE = 8  # columns of a sketch beyond the largest rank
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
    """The least cost with Σ error ≤ bound, of as many options for each layer; of equal costs, the
    least error."""
    cost, error = _table(costs, errors)
    # what the layers from each on err by at least
    least = _from_each(error.min(axis=1))
    slack = _ROUNDING * (abs(bound) + least[0])
    if least[0] > bound + slack:
        raise InvalidArgument(
            f"bound is {bound:g}, but the finest options err by {least[0]:g} in sum: add a finer "
            "codec"
        )
    price = _price(cost, error, bound)
    rest = _from_each((cost + price * error).min(axis=1))
    # a choice within the bound: the best option of each layer at the price, or the finest
    near = cost + price * error
    able = near if _at(near, error).sum() <= bound else error
    known = float(_at(able, cost).sum()) * (1 + _ROUNDING) + _ROUNDING
    spent, erred = np.zeros(1), np.zeros(1)  # of each state
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # of each layer: state before, option
    for layer in range(len(cost)):
        spent = (spent[:, None] + cost[layer]).ravel()
        erred = (erred[:, None] + error[layer]).ravel()
        ahead = rest[layer + 1] - price * (bound - erred)  # the least that is still to come
        possible = (erred + least[layer + 1] <= bound + slack) & (spent + ahead <= known)
        states = np.flatnonzero(possible)
        states = states[_front(spent[states], erred[states])]
        steps.append(np.divmod(states, cost.shape[1]))
        spent, erred = spent[states], erred[states]
    within = np.flatnonzero(erred <= bound)
    # if there is none, only rounding was in the way
    at = int(within[spent[within].argmin()] if len(within) else erred.argmin())
    found = float(spent[at]), float(erred[at])
    options: list[int] = []
    for before, option in reversed(steps):
        options.insert(0, int(option[at]))
        at = int(before[at])
    return Cheapest(tuple(options), *found)


def _table(
    costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Both as [layers, options]."""
    cost, error = np.array(costs, float), np.array(errors, float)
    if cost.shape != error.shape or not cost.size or not np.isfinite(cost + error).all():
        raise InvalidArgument(
            f"costs of {cost.shape} and errors of {error.shape} layers and options: expected as "
            "many of each, and some, all finite: leave out gradients with NaN"
        )
    if error.min() < 0:
        raise InvalidArgument(f"an error is {error.min():g}, expected none below 0")
    return cost, error


def _front(cost: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Indices of what nothing else beats in both, the cheapest first."""
    order = np.lexsort((error, cost))
    lowest = np.minimum.accumulate(error[order])
    return order[np.append(True, error[order][1:] < lowest[:-1])]


def _from_each(values: np.ndarray) -> np.ndarray:
    """Sums of each layer's and all after it; at the end 0."""
    return np.append(np.cumsum(values[::-1], axis=0)[::-1], np.zeros_like(values[:1]), axis=0)


def _price(cost: np.ndarray, error: np.ndarray, bound: float) -> float:
    """The least of all prices, from one option of a layer to another, at which the best option of
    each layer errs by no more than the bound in sum."""
    less = error[:, :, None] - error[:, None]
    paid = (cost[:, None] - cost[:, :, None])[less > 0] / less[less > 0]
    paid = np.unique(np.append(paid[paid > 0], 0.0))
    at = bisect_left(paid, True, key=lambda price: _at(cost + price * error, error).sum() <= bound)
    return float(paid[min(at, len(paid) - 1)])


def _at(choosing: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Each layer's entry where ``choosing`` is least."""
    return np.take_along_axis(table, choosing.argmin(axis=1)[:, None], 1)[:, 0]


# ---------------------------------------------------------------- measured


def errors_of(gradient: torch.Tensor, codecs: Sequence[str | Codec]) -> list[float]:
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
    row = aligned(codec_named(codec).row_bytes(width_of(numel, ranks)))
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
) -> Assignment:
    """The fewest bytes at a total error no larger than with ``uniform`` for every parameter."""
    codecs = tuple(dict.fromkeys([*OPTIONS, uniform]))
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


# ---------------------------------------------------------------- ranks


def rank_options(codec: LowRankCodec) -> tuple[int, ...]:
    return tuple(sorted({*RANKS, codec.rank}))


def errors_of_ranks(matrix: torch.Tensor, options: Sequence[int]) -> list[float]:
    """‖M − Mᵣ‖² of the best approximation of each rank, from a random sketch that two rounds of
    power iteration have turned towards the largest singular vectors; NaN unless M is finite."""
    peak = float(matrix.abs().amax())
    if not isfinite(peak):
        return [nan] * len(options)
    exponent = frexp(peak)[1]  # products of M with itself may overflow
    m, columns = (matrix.double() * 2.0**-exponent).float(), options[-1] + SPARE
    m = m if len(m) <= m.shape[1] else m.T
    if len(m) > columns:
        draws = torch.Generator(m.device).manual_seed(0)
        sketch = m @ torch.randn(m.shape[1], columns, generator=draws, device=m.device)
        for _ in range(2):
            sketch = m @ (m.T @ torch.linalg.qr(sketch).Q)
        m = torch.linalg.qr(sketch).Q.T @ m
    m = m.double()
    squares = (4.0**exponent * torch.linalg.eigvalsh(m @ m.T).flip(0).cumsum(0)).tolist()
    whole = float(matrix.double().square().sum())
    return [max(whole - squares[min(rank, len(squares)) - 1], 0.0) for rank in options]


@dataclass(frozen=True)
class RankAssignment:
    """A rank for each matrix, and what that errs in sum, as a share of one rank's for all."""

    ranks: Mapping[str, int]
    share: float


def assign_ranks(
    errors: Mapping[str, Sequence[float]],
    shapes: Mapping[str, tuple[int, int]],
    codec: LowRankCodec,
    *,
    ranks: int,
) -> RankAssignment:
    """The least summed error in the bytes that ``codec`` takes for all matrices. ``errors``: of
    each of ``rank_options(codec)``."""
    options = rank_options(codec)
    codecs = [replace(codec, rank=rank) for rank in options]
    able: list[list[int]] = []  # by matrix: options that save bytes, the largest again for others
    for shape in map(shapes.__getitem__, errors):
        takes = [i for i, each in enumerate(codecs) if each.takes(shape)]
        able.append(takes + takes[-1:] * (len(options) - len(takes)))
    losses = [[row[i] for i in at] for row, at in zip(errors.values(), able, strict=True)]
    nbytes = [
        [codecs[i].bits(shapes[name], ranks) * prod(shapes[name]) / 4 for i in at]
        for name, at in zip(errors, able, strict=True)
    ]
    uniform = options.index(codec.rank)
    found = cheapest(losses, nbytes, sum(row[uniform] for row in nbytes))
    chosen = zip(errors, able, found.options, strict=True)
    usual = sum(row[uniform] for row in losses)
    return RankAssignment(
        {name: options[at[option]] for name, at, option in chosen},
        found.cost / usual if usual else 1.0,
    )
