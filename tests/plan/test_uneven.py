"""Shares of different size: no other division lets the last rank finish earlier."""

from itertools import combinations, product

import numpy as np
import pytest

from commpress.errors import InvalidArgument
from commpress.plan.uneven import shares, stages


@pytest.mark.parametrize("seed", range(8))
def test_no_division_of_a_batch_ends_earlier(seed):
    """Against all of them, of random speeds."""
    speeds, total = np.random.default_rng(seed).uniform(0.2, 2, 3), 10

    def ends(division):
        return max(n / speed for n, speed in zip(division, speeds, strict=True))

    every = [division for division in product(range(total + 1), repeat=3) if sum(division) == total]
    found = shares(total, speeds)
    assert sum(found) == total
    assert ends(found) == pytest.approx(min(map(ends, every)))


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_of_the_layers_ends_earlier(seed):
    rng = np.random.default_rng(seed)
    costs, speeds = rng.uniform(0.5, 2, 8), rng.uniform(0.3, 1, 3)

    def ends(sizes):
        cuts = np.cumsum([0, *sizes])
        return max(costs[a:b].sum() / s for a, b, s in zip(cuts, cuts[1:], speeds, strict=False))

    every = [(a, b - a, 8 - b) for a, b in combinations(range(1, 8), 2)]
    found = stages(costs, speeds)
    assert sum(found) == 8
    assert min(found) >= 1
    assert ends(found) == pytest.approx(min(map(ends, every)))


def test_large_and_least_shares():
    """A billion elements in no time: twice as fast, twice as many."""
    assert shares(3_000_000_000, [1e9, 2e9]) == [1_000_000_000, 2_000_000_000]
    assert shares(7, [1, 1, 1]) in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
    assert shares(4, [1, 1e-9, 1], least=1)[1] == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: shares(10, [1, 0]), "positive number"),
        (lambda: shares(1, [1, 1], least=1), "at least 1 for each"),
        (lambda: stages([1, 1], [1, 1, 1]), "at least one layer"),
    ],
)
def test_what_cannot_be_divided_is_refused(call, error):
    with pytest.raises(InvalidArgument, match=error):
        call()
