"""Order of ranks on a grid: the heaviest traffic of its groups on the fastest links.

Where links differ, which rank stands where decides a step. The search begins with ranks as they are
numbered, node by node, and with ranks gathered by their links, and exchanges two of them as long as
that makes the predicted step shorter.

Ranks ascend along all axes but dp, whose ranks do the same: torch sorts the ranks of a group, so in
another order a rank's place on the mesh would not be its rank in the group, by which it knows its
stage and its shard.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from commpress.plan.costs import Costs
from commpress.plan.grids import AXES, Grid, MeshDims, MeshStep, MeshWork, predicted
from commpress.plan.pair_links import PairLinks

TRIES = 2000  # predictions of one search
GAIN = 1e-6  # of a step that an exchange must save, so that rounding decides nothing


def place(
    grid: Grid,
    work: MeshWork,
    links: PairLinks,
    costs: Costs,
    dims: MeshDims | None = None,
    *,
    speeds: Sequence[float] | None = None,
    limit: float = np.inf,
) -> MeshStep:
    """The best order that the search finds, and a step with it."""

    def tried(order: Sequence[int]) -> MeshStep:
        return predicted(grid, work, links, costs, dims, order=order, speeds=speeds, limit=limit)

    numbered = ascending(np.argsort(links.node, kind="stable").tolist(), grid)
    best = tried(numbered)
    if grid.size < 3 or (links.speeds_alike() and speeds is None):
        return best
    left = TRIES
    for order in dict.fromkeys([tuple(numbered), *starts(grid, links)]):
        found, better = tried(order), True
        while better and left > 0:
            better = False
            for a, b in combinations(range(grid.size), 2):
                other = list(found.order)
                other[a], other[b] = other[b], other[a]
                other = ascending(other, grid)
                if left > 0 and other != list(found.order):
                    left -= 1
                    step = tried(other)
                    if step.seconds < found.seconds * (1 - GAIN):
                        found, better = step, True
        if found.seconds < best.seconds * (1 - GAIN):
            best = found
    return best


def starts(grid: Grid, links: PairLinks) -> list[tuple[int, ...]]:
    """Ranks gathered around the one with the fastest link and around one with none but slow ones,
    so that neighbours have the fastest links left."""
    rate = links.bandwidth[links.site[:, None], links.site].astype(float)
    np.fill_diagonal(rate, 0.0)
    fastest = rate.max(axis=1)
    return [
        tuple(ascending(gathered_from(first, rate, grid), grid))
        for first in sorted({int(fastest.argmax()), int(fastest.argmin())})
    ]


def ascending(order: Sequence[int], grid: Grid) -> list[int]:
    """``order`` with the ranks sorted along every axis but dp: sorting one leaves the others
    sorted."""
    places = np.asarray(order).reshape(grid)
    for axis, name in enumerate(AXES):
        if name != "dp":
            places = np.sort(places, axis=axis)
    return [int(rank) for rank in places.ravel()]


def gathered_from(first: int, rate: np.ndarray, grid: Grid) -> list[int]:
    """One rank after the other: the one that has the fastest links to those that share the smallest
    unfinished group."""
    order, left = [first], [rank for rank in range(len(rate)) if rank != first]
    sizes = np.cumprod(grid[::-1]).tolist()  # of tp's groups, then with sp, and so on
    while left:
        inside = next((len(order) % size for size in sizes if len(order) % size), 0)
        among = order[-inside:] if inside else order

        def links(rank: int, among: list[int] = among) -> tuple[float, float, int]:
            return float(rate[rank, among].min()), float(rate[rank, order].mean()), -rank

        order.append(max(left, key=links))
        left.remove(order[-1])
    return order
