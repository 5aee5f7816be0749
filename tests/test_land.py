"""Decoding and moving parameters in one pass: the bits of a decoding and a move after it, for every mixture of codecs."""

import numpy as np
import pytest
import torch

from commpress.codecs import codec_named
from commpress.codecs.family import SignCodec
from commpress.codecs.policy import policy_of
from commpress.collectives.buckets import Span, messages
from commpress.kernels import adam, cpu, cpu_adam, cpu_lamb, cpu_threads, lamb
from commpress.optim.flat import Flat
from optim_twin import start

SHAPES = ((40, 50), (7,), (0,), (300, 11), (130,), (4100,), (65,), (256, 16))
STEPS, KEEPS = (0.1, 0.3), (0.99, 0.98)


def arrived(flat, codec, size, **cuts):
    """Messages made of noise, and their rows."""
    spans = [Span(name, *place) for name, place in zip(flat.names, flat.places, strict=True)]
    values = torch.randn(flat.numel, generator=torch.Generator().manual_seed(3))
    for message in messages(spans, policy_of(codec, min_numel=100), size, message=5000, **cuts):
        pieces = message.pieces
        rows, flag = torch.zeros(size, pieces.row_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        cpu.encode(values, rows, flag, pieces, key=5)
        yield message, rows


def landed(fused, codec, size, anchored):
    """Parameters and mean after one message, its rows made of noise, with the groups of even and of odd parameters."""
    flat = Flat([torch.nn.Parameter(p) for p in start(SHAPES)], [str(i) for i in range(len(SHAPES))])
    a, mean = flat.new(), flat.new()
    a.copy_(torch.randn(flat.numel, generator=torch.Generator().manual_seed(4)))
    a = a if anchored else a[:0]
    for message, rows in arrived(flat, codec, size):
        pieces = message.pieces
        segments, owners = flat.landing(message)
        steps, keeps = (np.array(numbers, np.float32)[owners % 2] for numbers in (STEPS, KEEPS))
        if fused:
            fused.land(rows, pieces, segments, mean, a, steps=steps, keeps=keeps)
        else:
            cpu.decode(rows, mean, pieces)
    if not fused:
        for group in (0, 1):
            every = range(group, len(SHAPES), 2)
            cpu_adam.descend(flat.placed(every), mean, a, step=STEPS[group], keep=KEEPS[group])
    return [mean, *flat.weights]


CODECS = {
    "blocks": SignCodec(), "small blocks": SignCodec(block=512), "rows": SignCodec(block=0), "mean": SignCodec(scale="l1"),
    "int8": codec_named("int8"), "none": codec_named("none"),
}  # fmt: skip


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("anchored", [True, False])
def test_landing_is_decoding_and_then_moving(compiled, monkeypatch, codec, size, anchored):
    expected = landed(None, codec, size, anchored)
    for mine, theirs in zip(landed(adam, codec, size, anchored), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    monkeypatch.setattr(cpu_threads, "_PARALLEL_NUMEL", 500)
    for past, threads in ((False, 1), (True, 1), (True, 3)):
        monkeypatch.setattr(cpu_adam, "PAST", 0 if past else 1 << 60)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            got = landed(cpu_adam, codec, size, anchored)
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(start(SHAPES), expected[1:], strict=True))


RULE = lamb.LayerRule((0.9, 0.99), 1e-6, 1e-2, 0.1, (0.01, 10.0), 0.9, (0.5, 4.0), 0.1)


def moved(arithmetic, rates, codec, size, whole):
    """Two steps of LAMB for two groups of layers; ``whole``: everything was decoded before."""
    flat = Flat([torch.nn.Parameter(p) for p in start(SHAPES)], [str(i) for i in range(len(SHAPES))])
    draws = torch.Generator().manual_seed(5)
    mean, last, course, fresh, r = (torch.rand(flat.numel, generator=draws) + 0.5 for _ in range(5))
    coefficient, factor, floor = torch.full((8,), 0.3), torch.ones(8), torch.full((8,), 1e-3)
    came = list(arrived(flat, codec, size, piece=1500))
    for message, rows in came:
        (cpu if whole else arithmetic).decode(rows, *((mean, message.pieces) if whole else (message.pieces, mean)))
    for _ in range(2):
        for group in (range(3), range(3, 8)):
            layers, of = flat.placed(group), slice(group.start, group.stop)
            found = (cpu_adam if arithmetic is cpu_lamb else adam).runs
            runs = found(layers, [] if whole else [message.pieces for message, _ in came])
            if runs is not None and not whole:
                runs.lie_in([rows for _, rows in came])
            if rates == "live":
                arithmetic.live(layers, runs, mean, course, RULE)
            else:
                now = floor[of], coefficient[of], factor[of]
                arithmetic.frozen(layers, runs, None, mean, last.clone(), r, fresh, *now, RULE)
    inside = torch.cat([torch.arange(first, first + numel) for first, numel in flat.places])
    return [mean[inside], course[inside], fresh[inside], factor, *flat.weights]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("rates", ["live", "frozen"])
def test_lamb_lands_what_decoding_first_would_have_given(compiled, monkeypatch, codec, size, rates):
    """Element by element in every bit; norms are summed block by block, so rates differ in rounding."""
    expected = moved(cpu_lamb, rates, codec, size, whole=True)
    for mine, theirs in zip(moved(lamb, rates, codec, size, whole=False), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    got = moved(cpu_lamb, rates, codec, size, whole=False)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got[:3], expected, strict=False))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    monkeypatch.setattr(cpu_threads, "_PARALLEL_NUMEL", 500)
    monkeypatch.setattr(cpu_lamb, "PAST", 0)
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            again = moved(cpu_lamb, rates, codec, size, whole=False)
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, got, strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(start(SHAPES), got[4:], strict=True))
