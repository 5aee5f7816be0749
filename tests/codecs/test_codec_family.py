"""Promises of every codec: contraction or unbiasedness, nothing lost, bytes that stay what they
are, any input."""

import zlib
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import (
    BitsCodec,
    RandomKCodec,
    SparseCodec,
    TernaryCodec,
    TopKCodec,
    codec_named,
)
from commpress.codecs.family import NAMES
from commpress.codecs.registry import EXAMPLES
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.collectives.buckets import one_message
from commpress.kernels import reference
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.pieces import WIDTH, Piece, cut
from test_allreduce import Group, check_a_bad_number, check_telescoping
from variants import few

EVERY = {
    **NAMES,
    **{
        name: codec_named(name)
        for name in EXAMPLES
        if not isinstance(codec_named(name), (WholeTensorCodec, SparseCodec))
    },
    **{f"bits{b}": BitsCodec(b) for b in range(2, 9)},
    "bits4/64": BitsCodec(4, 64),
    "topk-8/256": TopKCodec(1 / 8, 256),
    "topk-1": TopKCodec(1.0),
    "randk-8-unbiased": RandomKCodec(8, unbiased=True),
}
every = pytest.mark.parametrize("codec", EVERY.values(), ids=EVERY.keys())


def encoded(codec, x, *, ranks=1, key=0):
    """Pieces, rows, and whether the encoder says that all was finite."""
    pieces = cut([Piece(0, x.numel(), codec.kind, codec.block, feedback=False)], ranks)
    sent, flag = (
        torch.zeros(*size, dtype=torch.uint8) for size in ((ranks, pieces.row_bytes), (1,))
    )
    cpu.encode(x, sent, flag, pieces, key=key)
    return pieces, sent, not flag.item()


def through(codec, x, *, ranks=1, key=0):
    """Decoded, and whether the encoder says that all was finite."""
    pieces, sent, finite = encoded(codec, x, ranks=ranks, key=key)
    out = torch.empty_like(x)
    cpu.decode(sent, out, pieces)
    return out, finite


def heavy(numel, seed, spread=1.0):
    draw = np.random.default_rng(seed)
    values = draw.standard_normal(numel) * np.exp(spread * draw.standard_normal(numel))
    return torch.from_numpy(values.astype(np.float32))


# ---------------------------------------------------------------- contraction


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 6000), seed=st.integers(0, 2**20), spread=st.sampled_from([0.0, 1.0, 4.0])
)
def test_contractions(numel, seed, spread):
    """‖c − Q(c)‖² against ‖c‖² for every codec that feedback relies on, with the bound that each
    claims."""
    c = heavy(numel, seed, spread)
    size = float(c.double().square().sum())
    bounds = {
        "sign-l1": 1.0,
        "fp8": 2.0**-6,
        "bf16": 2.0**-15,
        "fp16": 2.0**-20 if spread < 4 else 1.0,
        "none": 0.0,
    }
    bounds |= {"randk-32": 1.0, "log3": 1.0}
    bounds |= {f"bits{b}": 1.0 for b in range(2, 9)}
    bounds |= {"topk-64": 1 - 1 / 64, "topk-8/256": 1 - 1 / 8, "topk-1": 0.0}
    for name, bound in bounds.items():
        out, _ = through(EVERY[name], c)
        assert float((c - out).double().square().sum()) <= bound * size * (1 + 1e-6) + 1e-12, name
    for name, levels in (("int8", 127), ("int4", 7)):
        out, _ = through(EVERY[name], c)
        for start in range(0, numel, 256):
            off, peak = (x[start : start + 256].abs().max() for x in (c - out, c))
            assert off <= peak / levels * (0.5 + 1e-4), name


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(1, 3000), seed=st.integers(0, 2**20), spread=st.sampled_from([0.0, 1.0, 4.0])
)
def test_log3_keeps_signs_and_rounds_nothing_but_zero_to_zero(numel, seed, spread):
    """Signs, zeros and the peak as they were; a factor of two at most between an element and its
    code, or 1/16 of the peak."""
    c = heavy(numel, seed, spread)
    c[::7] = 0
    out, _ = through(NAMES["log3"], c)
    assert torch.equal(out.sign(), c.sign())
    for start in range(0, numel, 256):
        one, got = c[start : start + 256].double().abs(), out[start : start + 256].double().abs()
        peak = one.max()
        near = one >= peak / 32
        assert got[one == peak].eq(peak).all()
        assert (got[near] <= 2 * one[near]).all()
        assert (2 * got[near] >= one[near]).all()
        assert (got[~near & (one > 0)] == peak / 16).all()


def test_log3_is_a_contraction_even_where_one_element_towers():
    c = torch.full((256,), 1e-6)
    c[7] = 1.0
    out, _ = through(NAMES["log3"], c)
    assert 0.99 < float((c - out).square().sum() / c.square().sum()) < 1


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(1, 3000),
    seed=st.integers(0, 2**20),
    bits=st.integers(2, 8),
    block=st.sampled_from([8, 64, 512]),
)
def test_outliers_do_not_stretch_the_grid(numel, seed, bits, block):
    """Each block: extremes exact, the others within half a step of a grid over their own range and
    zero."""
    c = heavy(numel, seed, 2.0)
    out, _ = through(BitsCodec(bits, block), c)
    for start in range(0, numel, block):
        one, got = c[start : start + block].double(), out[start : start + block].double()
        least, greatest = int(one.argmin()), int(one.argmax())
        assert got[least] == one[least]
        assert got[greatest] == one[greatest]
        rest = torch.ones(len(one), dtype=torch.bool)
        rest[[least, greatest]] = False
        if rest.any():
            step = (one[rest].max().clamp(min=0) - one[rest].min().clamp(max=0)) / (2**bits - 1)
            assert (one - got)[rest].abs().max() <= step * 0.5 + 1e-5 * one[
                rest
            ].abs().max() + 1e-30


@settings(max_examples=40, deadline=None)
@given(numel=st.integers(1, 6000), seed=st.integers(0, 2**20))
def test_sign_keeps_the_norm_of_every_block(numel, seed):
    c = heavy(numel, seed)
    out, _ = through(NAMES["sign"], c)
    for start in range(0, numel, 2048):
        one, got = c[start : start + 2048].double(), out[start : start + 2048].double()
        assert torch.equal(got.sign(), torch.where(one >= 0, 1.0, -1.0).double())
        assert float(got.norm()) == pytest.approx(float(one.norm()), rel=1e-5)


# ---------------------------------------------------------------- the mean over draws


@pytest.mark.parametrize("name", ["ternary", "terngrad", "randk-8-unbiased"])
def test_the_mean_over_draws_is_the_input(name):
    """And the variance is the one claimed: s·|c| − c² for ternary of scale s, (run − 1)·c² for one
    of ``run``. The mean of terngrad is what is left after clipping."""
    codec, c, draws = EVERY[name], heavy(2048, 3, 0.5), 4000
    total, squares = torch.zeros(2048, dtype=torch.float64), torch.zeros(2048, dtype=torch.float64)
    limit = 2.5 * float(c.square().mean().sqrt()) if name == "terngrad" else float(c.abs().max())
    mean = c.double().clamp(-limit, limit)
    for key in range(draws):
        out = through(codec, c, key=key * 7919)[0].double()
        total += out
        squares += (out - mean).square()
    ternary = limit * mean.abs() - mean.square()
    claimed = 7 * mean.square() if name.startswith("randk") else ternary
    off = (total / draws - mean).abs() / ((claimed / draws).sqrt() + 1e-5 * limit)
    # sent often enough that their means are near normal
    often = draws * mean.abs() > 50 * limit
    assert often.sum() > 1000
    assert float(off[often].max()) < 5.5
    assert abs(float(squares.sum() / draws / claimed.sum()) - 1) < 0.05


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_shifted_grid_is_right_on_average(bits):
    """One shift for a whole block: its mean is the input, its variance step² / 12, an element of
    the grid's width included."""
    codec, c, draws = BitsCodec(bits, 64, shifted=True), heavy(64, 4, 0.5), 2000
    every = torch.stack([through(codec, c, key=key * 7919)[0] for key in range(draws)]).double()
    rest = torch.ones(64, dtype=torch.bool)
    rest[[int(c.argmin()), int(c.argmax())]] = False
    step = float(c[rest].max() - c[rest].min()) / (2**bits - 2)
    assert float((every - c)[:, rest].abs().max()) <= 0.501 * step
    assert float((every.mean(0) - c)[rest].abs().max()) < 5 * step / (12 * draws) ** 0.5
    assert float((every - c)[:, rest].square().mean() / step**2) == pytest.approx(1 / 12, rel=0.03)
    assert torch.equal(through(codec, c, key=3)[0], through(codec, c, key=3)[0])


def test_random_places_are_even_and_change():
    """Every element is sent equally often, by two ranks at different places."""
    codec, ones, counts = RandomKCodec(16), torch.ones(160), torch.zeros(160)
    for key in range(4000):
        counts += through(codec, ones, key=key * 104_729)[0]
    assert abs(float(counts.mean()) - 250) < 1e-3
    assert float((counts - 250).abs().max()) < 5 * 250**0.5
    assert not torch.equal(through(codec, ones, key=1)[0], through(codec, ones, key=2)[0])


def test_terngrad_clips_at_the_root_mean_square():
    c = heavy(4096, 5)
    out, _ = through(codec_named("terngrad"), c)
    for start in (0, 2048):
        block, got = c[start : start + 2048], out[start : start + 2048]
        limit = 2.5 * float(block.square().mean().sqrt())
        assert float(got.abs().max()) <= limit * (1 + 1e-6)
        assert float(got.abs().max()) == pytest.approx(
            min(limit, float(block.abs().max())), rel=1e-5
        )
        assert set(got.sign().tolist()) == {-1.0, 0.0, 1.0}
    noisy = float((through(TernaryCodec(), c)[0] - c).norm())
    assert float((out - c).norm()) < 0.7 * noisy


def test_noise_is_not_kept():
    """No residual for codecs whose error has no mean to send later."""
    assert [name for name, codec in EVERY.items() if not codec.feedback] == [
        "terngrad",
        "randk-8-unbiased",
    ]
    message = one_message(100, codec_named("terngrad"), 2)
    assert message.pieces.residual_numel == 0


# ---------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize(("name", "ranks"), few([*EVERY, "two-bits", "topk-64+bits2"], [2, 3]))
def test_telescoping(name, ranks):
    """Σ outputs + R = Σ mean inputs, for any codec with feedback; ranks agree in every bit for all.
    What is not finite on one of them is said to all and changes nothing."""
    group = Group(ranks, 1337, EVERY.get(name) or name)
    if group.codec.feedback:
        check_telescoping(group, 25)
    for bad in (np.nan, np.inf):
        check_a_bad_number(group, bad, [700])


# ---------------------------------------------------------------- bytes


def golden():
    index = np.arange(1003, dtype=np.int64)
    x = (((index * 7919) % 2003 - 1001) / np.float32(37)).astype(np.float32)
    x[::97] *= 100
    return x


GOLDEN = {
    "bf16": 0xEDAC9517,
    "bits/2/512": 0x256AA8F4,
    "bits/3/512": 0x7C5511A8,
    "bits/4/512": 0xBFDA69F6,
    "bits/4/64": 0x6E7FEE48,
    "bits/5/512": 0xA3EA46C3,
    "bits/6/512": 0x771D7568,
    "bits/7/512": 0x60ECF977,
    "bits/8/512": 0x552C9A25,
    "shift/8/512": 0x87CBE23E,
    "fp16": 0xA17C09B1,
    "fp8/256": 0xA40C27E7,
    "int4/256": 0x9212257C,
    "int8/256": 0x5C8BD06B,
    "log3/256": 0x530253EB,
    "none": 0x0C7DFFE9,
    "randk-unbiased/8/2048": 0x52C69F5A,
    "randk/32/2048": 0x7CA7CBC8,
    "sign/l1/2048": 0xB9A44494,
    "sign/rms/2048": 0xF4ACD776,
    "ternary/2048/0/shift5": 0xB4C6D439,
    "ternary/2048/25/shift5": 0x2489561F,
    "topk/2048/2048": 0x15FB5C2A,
    "topk/32/2048": 0x36C1F0D6,
    "topk/32/256": 0xE57F53E3,
}


@every
def test_bytes_stay_what_they_are(codec):
    """A message written by one version is read by the next: the law's bytes of a fixed input, as a
    checksum."""
    x = golden()
    rows = [
        reference.encode_row(
            x[first : first + 336], codec.kind, 336, codec.block, first=first, key=99
        )
        for first in range(0, len(x), 336)
    ]
    assert zlib.crc32(np.concatenate(rows).tobytes()) == GOLDEN[codec.spec]


def test_small_rows_byte_by_byte():
    """Worked out by hand."""
    c = np.array([0, 1, 2, 3, -4, 0.5, 9, 1], np.float32)
    row = reference.encode_row(c, TopKCodec(2 / 8, 8).kind, 8, 8)
    assert row[:8].view(np.float32).tolist() == [-4.0, 9.0]
    assert row[8:].view("<u2").tolist() == [4, 6]
    row = reference.encode_row(c, reference.LOG, 8, 8)
    assert row[:4].view(np.float32).tolist() == [9.0]
    assert row[4:].tolist() == [0b000_001_01, 0b0_010_110_0, 0b01_011_001]
    row = reference.encode_row(c, BitsCodec(2, 8).kind, 8, 8)
    # step, zero, least, greatest
    assert row[:16].view(np.float32).tolist() == [1.0, 0.0, -4.0, 9.0]
    assert row[16:20].view("<u2").tolist() == [4, 6]
    assert row[20:].tolist() == [0b00_01_10_11, 0b00_00_00_01]
    row = reference.encode_row(c, BitsCodec(3, 8).kind, 8, 8)
    assert len(row) == 20 + 3
    row = reference.encode_row(c, RandomKCodec(4, block=8).kind, 8, 8, key=5)
    assert len(row) == 4 + 2 * 4
    assert row[:4].view("<u4").tolist() == [5]


# ---------------------------------------------------------------- any input

HARD = {
    "zeros": np.zeros(1000),
    "minus zeros": -np.zeros(1000),
    "denormals": np.linspace(-1e-40, 1e-40, 1000),
    "one-hot": np.eye(1, 1000, 500)[0],
    "tiny and huge": np.where(np.arange(1000) % 2, 1e-30, 1e30),
    "constant": np.full(1000, -3.25),
    "one element": np.array([-7.0]),
    "two elements": np.array([1e-3, -1e3]),
    "odd length": np.linspace(-1, 1, 997),
    "just past a block": np.linspace(-1, 1, 2049),
    "eight and one": np.linspace(-2, 5, 9),
}


@every
@pytest.mark.parametrize("name", HARD)
def test_hard_inputs(codec, name):
    """Finite in, finite out; the fast path gives the law's bytes; and what is zero everywhere stays
    zero."""
    x = torch.from_numpy(HARD[name].astype(np.float32))
    if name == "tiny and huge" and codec.spec.startswith(("sign/rms", "ternary/2048/")):
        x = x * 1e-15  # squares must fit
    for ranks in (1, 3):
        out, finite = through(codec, x, ranks=ranks, key=3)
        assert finite
        assert torch.isfinite(out).all()
        assert (
            out.any()
            or not x.any()
            or codec.spec.startswith("randk")
            or float(x.abs().max()) < 2.0**-99
        )
        if not x.any():
            assert not out.any()
        pieces, sent, _ = encoded(codec, x, ranks=ranks, key=3)
        width = int(pieces.table[0, WIDTH])
        for first in range(0, x.numel(), width):
            part, row = x.numpy()[first : first + width], sent[first // width].numpy()
            law = reference.encode_row(part, codec.kind, width, codec.block, first=first, key=3)
            assert np.array_equal(row[: len(law)], law)


@every
def test_what_is_not_finite_is_said(codec):
    for bad, place in product((np.inf, -np.inf, np.nan), (0, 511, 996)):
        x = heavy(997, 1)
        x[place] = bad
        _, finite = through(codec, x, ranks=3)
        assert not finite, (bad, place)


def test_top_k_has_no_places_in_a_block_that_is_not_finite():
    """Nothing of it is decoded, not even twice at one place."""
    codec, x = TopKCodec(4 / 16, 16), heavy(16, 1)
    x[3] = float("nan")
    row = reference.encode_row(x.numpy(), codec.kind, 16, 16)
    assert np.isnan(row[:4].view(np.float32)[0])
    assert (row[16:].view("<u2") == 0xFFFF).all()
    assert not reference.decode_row(row, codec.kind, 16, 16, 16).any()
    out, finite = through(codec, x)
    assert not finite
    assert not out.any()
