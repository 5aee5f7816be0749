"""Moments in 8 bits: how far what is read lies from what was written, and what training makes of
it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commpress.integrations.zero.moments import BLOCK, decode, encode, size


def round_trip(values, *, squares, seed=0):
    coded, out = torch.zeros(size(values.numel()), dtype=torch.uint8), torch.empty_like(values)
    encode(values, coded, squares=squares, seed=seed)
    decode(coded, out, squares=squares)
    return out


def largest(values):
    """Of each element's block."""
    blocks = values.split(BLOCK)
    return torch.cat([block.abs().max().expand(len(block)) for block in blocks])


@given(numel=st.integers(1, 400), power=st.integers(-20, 12), seed=st.integers(0, 99))
def test_errors_are_bounded(numel, power, seed):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    values[seed % numel] = 0.0
    steps = largest(values) / 127
    assert ((round_trip(values, squares=False) - values).abs() <= steps * (0.5 + 1e-4)).all()
    squares = values.square()
    steps = largest(values) / 255
    found = round_trip(squares, squares=True, seed=seed).sqrt()
    assert ((found - values.abs()).abs() <= steps * (1 + 1e-3)).all()
    assert ((found == 0) == (squares == 0)).all()


def test_squares_are_right_in_the_mean():
    roots = torch.linspace(0.1, 1.0, 256)
    mean = sum(round_trip(roots.square(), squares=True, seed=k).sqrt() for k in range(400)) / 400
    assert (mean - roots).abs().max() < 5 * (1 / 255) / 2 / 400**0.5


@pytest.mark.parametrize("spread", [0.3, 0.7])
def test_adams_second_moment_and_its_steps_stay_right_over_many_steps(spread):
    """Gradients in a block have sizes that spread like this (log-normal); both moments are
    quantised in each step."""
    draw = torch.Generator().manual_seed(1)
    sizes = torch.exp(torch.randn(8 * BLOCK, generator=draw) * spread) * 1e-3
    m, v, coded_m, coded_v = (torch.zeros(len(sizes)) for _ in range(4))
    for step in range(1500):
        gradient = sizes * (0.2 + torch.randn(len(sizes), generator=draw))
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient.square()
        coded_m = round_trip(0.9 * coded_m + 0.1 * gradient, squares=False)
        coded_v = round_trip(0.999 * coded_v + 0.001 * gradient.square(), squares=True, seed=step)
    assert (coded_v.sqrt() / v.sqrt()).mean() == pytest.approx(1, abs=0.01)
    exact, found = m / v.sqrt(), coded_m / coded_v.sqrt()
    assert (found @ exact) / (exact @ exact) == pytest.approx(1, abs=0.01)


def test_bytes():
    assert size(1 << 20) == (1 << 20) * (1 + 4 / BLOCK)
    assert size(1) == BLOCK + 4
