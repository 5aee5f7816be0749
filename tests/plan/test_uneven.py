"""Shares of different size: no other division lets the last rank finish earlier."""

from itertools import combinations, product

import numpy as np
import pytest

from commpress.errors import InvalidArgument
from commpress.plan.uneven import shares, stages


@pytest.mark.parametrize("seed", range(8))
def test_no_division_of_a_batch_ends_earlier(seed):
    """Against all of them: random speeds, links that take some time of their own, and memory that
    allows so much."""
    rng = np.random.default_rng(seed)
    speeds, fixed = rng.uniform(0.2, 2, 3), rng.uniform(0, 3, 3) * (seed % 2)
    most = rng.integers(4, 9, 3).tolist() if seed % 3 == 0 else None
    total = 10

    def ends(division):
        return max(
            late + n / speed for late, n, speed in zip(fixed, division, speeds, strict=True) if n
        )

    every = [division for division in product(range(total + 1), repeat=3) if sum(division) == total]
    every = [
        division
        for division in every
        if all(n <= m for n, m in zip(division, most or division, strict=True))
    ]
    found = shares(total, speeds, fixed=fixed, most=most)
    assert sum(found) == total
    assert most is None or all(n <= m for n, m in zip(found, most, strict=True))
    assert ends(found) == pytest.approx(min(map(ends, every)))


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_of_the_layers_ends_earlier(seed):
    rng = np.random.default_rng(seed)
    costs, speeds = rng.uniform(0.5, 2, 8), rng.uniform(0.3, 1, 3)
    fixed = rng.uniform(0, 1, 3) * (seed % 2)

    def ends(sizes):
        cuts = np.cumsum([0, *sizes])
        return max(
            f + costs[a:b].sum() / s
            for f, a, b, s in zip(fixed, cuts, cuts[1:], speeds, strict=False)
        )

    every = [(a, b - a, 8 - b) for a, b in combinations(range(1, 8), 2)]
    found = stages(costs, speeds, fixed=fixed)
    assert sum(found) == 8
    assert min(found) >= 1
    assert ends(found) == pytest.approx(min(map(ends, every)))


def test_parameters_of_a_sharded_model_follow_speed_and_memory():
    """A billion elements in no time: twice as fast, twice as many; a full rank hands its rest
    on."""
    assert shares(3_000_000_000, [1e9, 2e9]) == [1_000_000_000, 2_000_000_000]
    assert shares(3_000_000_000, [1e9, 2e9], most=[3_000_000_000, 500_000_000]) == [
        2_500_000_000,
        500_000_000,
    ]
    assert shares(7, [1, 1, 1]) in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
    assert shares(4, [1, 1e-9, 1], least=1)[1] == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: shares(10, [1, 0]), "positive number"),
        (lambda: shares(10, [1, 1], most=[4, 4]), "from 0 to 8"),
        (lambda: shares(1, [1, 1], least=1), "from 2"),
        (lambda: shares(4, [1, 1], fixed=[1]), "as many of each"),
        (lambda: stages([1, 1], [1, 1, 1]), "at least one layer"),
    ],
)
def test_what_cannot_be_divided_is_refused(call, error):
    with pytest.raises(InvalidArgument, match=error):
        call()
