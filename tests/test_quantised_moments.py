"""Moments in 8 and 4 bits: how far what is read lies from what was written, and what training makes of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commpress.errors import InvalidArgument
from commpress.integrations.zero.moments import BLOCK, bits_of, decode, encode, size


def round_trip(values, bits, *, squares, seed=0):
    coded, out = torch.zeros(size(values.numel(), bits), dtype=torch.uint8), torch.empty_like(values)
    encode(values, coded, bits, squares=squares, seed=seed)
    decode(coded, out, bits, squares=squares)
    return out


def largest(values):
    """Of each element's block."""
    blocks = values.split(BLOCK)
    return torch.cat([block.abs().max().expand(len(block)) for block in blocks])


@given(numel=st.integers(1, 400), bits=st.sampled_from([8, 4]), power=st.integers(-20, 12), seed=st.integers(0, 99))
def test_errors_are_bounded(numel, bits, power, seed):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    values[seed % numel] = 0.0
    steps = largest(values) / (2 ** (bits - 1) - 1)
    assert ((round_trip(values, bits, squares=False) - values).abs() <= steps * (0.5 + 1e-4)).all()
    squares = values.square()
    steps = largest(values) / (2**bits - 1)
    found = round_trip(squares, bits, squares=True, seed=seed).sqrt()
    assert ((found - values.abs()).abs() <= steps * (1 + 1e-3)).all()
    assert ((found == 0) == (squares == 0)).all()


def test_squares_are_right_in_the_mean():
    roots = torch.linspace(0.1, 1.0, 256)
    mean = sum(round_trip(roots.square(), 4, squares=True, seed=k).sqrt() for k in range(400)) / 400
    assert (mean - roots).abs().max() < 5 * (1 / 15) / 2 / 400**0.5


def test_bytes():
    assert size(1 << 20, 8) == (1 << 20) * (1 + 4 / BLOCK)
    assert size(1 << 20, 4) == (1 << 20) * (0.5 + 4 / BLOCK)
    assert size(1, 8) == BLOCK + 4
    with pytest.raises(InvalidArgument, match="moments is 'int3'"):
        bits_of("int3")
