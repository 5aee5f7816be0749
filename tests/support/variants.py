"""Variants of a test: which run always, and which with the slow tests (``make slow``)."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest

seldom = partial(pytest.param, marks=pytest.mark.slow)


def few(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes, of which only so many variants run always that each value of each
    axis is in one."""
    every = [list(axis) for axis in axes]
    longest = max(map(len, every))
    often = {tuple(i % len(axis) for axis in every) for i in range(longest)}
    places = product(*(range(len(axis)) for axis in every))
    chosen = ((place, [axis[i] for axis, i in zip(every, place, strict=True)]) for place in places)
    return [
        pytest.param(*values) if place in often else seldom(*values) for place, values in chosen
    ]


def first(count: int, values: Sequence[Any]) -> list[Any]:
    """The values, of which those behind the first ``count`` run with the slow tests."""
    return [*values[:count], *(seldom(value) for value in values[count:])]


def every_second(values: Iterable[Any]) -> list[Any]:
    """The values, of which every second one runs with the slow tests."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [seldom(*row) if i % 2 else pytest.param(*row) for i, row in enumerate(rows)]
