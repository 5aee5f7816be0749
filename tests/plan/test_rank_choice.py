"""Ranks of low-rank codecs, by the errors of a matrix's best approximations."""

from itertools import product
from math import prod

import pytest
import torch

from commpress.codecs import codec_named
from commpress.plan.assignment import assign_ranks, errors_of_ranks, rank_options


def decaying(rows, columns, power, seed=0):
    """A matrix whose singular values fall like k to the minus ``power``."""
    draws = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=draws)).Q for n in (rows, columns))
    values = torch.arange(1, min(rows, columns) + 1).float() ** -power
    return (u[:, : len(values)] * values) @ v[: len(values)]


@pytest.mark.parametrize("shape", [(1, 7), (40, 30), (60, 300), (400, 300)])
@pytest.mark.parametrize("power", [0.3, 1.5])
def test_errors_are_those_of_truncated_singular_values(shape, power):
    matrix, options = decaying(*shape, power), rank_options(codec_named("powersgd-5"))
    squares = torch.linalg.svdvals(matrix.double()) ** 2
    exact = [float(squares[rank:].sum()) for rank in options]
    found = errors_of_ranks(matrix, options)
    assert 5 in options
    assert found == pytest.approx(exact, rel=0.05, abs=1e-5 * float(squares.sum()))
    assert all(mine >= best * (1 - 1e-4) - 1e-6 for mine, best in zip(found, exact, strict=True))


@pytest.mark.parametrize("exponent", [100, -100])
def test_errors_scale_with_the_matrix(exponent):
    matrix, options = decaying(400, 300, 0.3), rank_options(codec_named("powersgd-5"))
    found = errors_of_ranks(matrix * 2.0**exponent, options)
    assert found == [each * 4.0**exponent for each in errors_of_ranks(matrix, options)]


def test_the_least_error_in_the_bytes_of_one_rank_for_all():
    codec, shapes = codec_named("powersgd-4+fp8"), {"a": (96, 80), "b": (64, 64), "c": (40, 48)}
    options = rank_options(codec)
    matrices = {
        name: scale * decaying(*shapes[name], power, seed)
        for seed, (name, scale, power) in enumerate([("a", 1, 0.2), ("b", 9, 1.0), ("c", 3, 0.5)])
    }
    errors = {name: errors_of_ranks(matrix, options) for name, matrix in matrices.items()}
    found = assign_ranks(errors, shapes, codec, ranks=4)

    def cost(name, rank):
        return codec_named(f"powersgd-{rank}+fp8").bits(shapes[name], 4) * prod(shapes[name])

    able = [[r for r in options if codec_named(f"powersgd-{r}").takes(shapes[n])] for n in shapes]
    budget = sum(cost(name, 4) for name in shapes)
    sums = {
        ranks: sum(errors[n][options.index(r)] for n, r in zip(shapes, ranks, strict=True))
        for ranks in product(*able)
        if sum(cost(n, r) for n, r in zip(shapes, ranks, strict=True)) <= budget
    }
    best = min(sums.values())
    assert sums[tuple(found.ranks[name] for name in shapes)] == pytest.approx(best)
    assert best < 0.9 * sums[4, 4, 4]
    assert found.share == pytest.approx(best / sums[4, 4, 4])


def test_a_matrix_keeps_ranks_that_save_bytes():
    codec, shapes = codec_named("powersgd-2"), {"loud": (24, 24), "quiet": (256, 256)}
    errors = {
        name: errors_of_ranks(scale * decaying(*shapes[name], 0.1), rank_options(codec))
        for name, scale in (("loud", 1000), ("quiet", 1))
    }
    found = assign_ranks(errors, shapes, codec, ranks=2).ranks
    assert codec_named(f"powersgd-{found['loud']}").takes(shapes["loud"])
    assert not codec_named(f"powersgd-{2 * found['loud']}").takes(shapes["loud"])
