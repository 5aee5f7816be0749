"""Bits that an optimizer says it sends in a compressed round are those it sends: in all, by codec,
by group of parameters."""

import pytest
import torch

import commpress
from commpress.codecs import TernaryCodec, codec_named
from commpress.collectives.buckets import share
from commpress.optim import OneBitAdam, ShardedOneBitAdam
from optim_twin import Replicas, noise

VOCABULARY, WIDTH, USED = 1000, 32, 100
SHAPES = ((VOCABULARY, WIDTH), (64, 64), (64,))
NAMES = ("embed.weight", "blocks.0.weight", "blocks.0.bias")


def trained(size=2, kind=OneBitAdam, **options):
    """Steps beyond the freeze; of the vocabulary only the first words are used."""

    def make(parameters, transport):
        named = list(zip(NAMES, parameters, strict=True))
        return kind(named, lr=1e-3, exact_steps=3, transport=transport, **options)

    group = Replicas(make, size, SHAPES)
    for step in range(6):
        gradients = noise(size, step, SHAPES)
        for mine in gradients:
            mine[0][USED:] = 0
        group.step(gradients)
    return group.optimizers[0]


@pytest.mark.parametrize(
    ("spiky_codec", "code"),
    [("fp8", 8 + 1 / 8), ("int8", 8 + 1 / 8), ("bits4", 4 + 5 / 16), ("log3", 3 + 1 / 8)],
)
def test_a_vocabulary_decides_how_many_bits_one_bit_adam_sends(spiky_codec, code):
    optimizer = trained(spiky_codec=spiky_codec)
    counters, every = optimizer.counters, sum(p.numel() for p in optimizer.flat.parameters)
    assert counters.compressed_rounds == 3
    said = sum(s.bits * s.numel for s in counters.shares.values()) / every
    assert counters.bits == pytest.approx(said, rel=0.03), "headers are not in the shares"
    assert counters.bits == pytest.approx(
        32 * counters.compressed_bytes / (3 * 4 * every), rel=1e-6
    )
    (codec, (names, numel, bits)), *_ = counters.by_codec().items()
    assert (codec, names, numel) == (
        codec_named(spiky_codec).spec,
        ["embed.weight"],
        VOCABULARY * WIDTH,
    )
    assert bits == pytest.approx(code, rel=0.01)
    summary = counters.summary()
    assert (
        f"a compressed round sends {counters.bits:.2f} bits per parameter: {bits:.2f} for 88 % of "
        "them"
    ) in summary
    assert f"({codec}: embed.weight)" in summary


def test_metrics_have_bits_by_group():
    optimizer = trained()
    sample = commpress.Metrics(optimizer).step()
    assert set(sample.bits) == {"embed", "blocks.0"}
    assert sample.bits["embed"] > 8 > 2 > sample.bits["blocks.0"] > 1
    assert sample.scalars()["bits/embed"] == sample.bits["embed"]
    endpoint = commpress.MetricsEndpoint()
    endpoint(sample)
    assert {metric.name for metric in endpoint.collect()} >= {"commpress_bits"}
    endpoint.close()


def test_the_sharded_one_says_it_too():
    optimizer = trained(kind=ShardedOneBitAdam)
    counters = optimizer.counters
    every = sum(s.numel for s in counters.shares.values())
    said = sum(s.bits * s.numel for s in counters.shares.values()) / every
    assert counters.bits == pytest.approx(said, rel=0.1)
    assert "bits per parameter: " in counters.summary()


def test_nothing_is_said_before_the_first_compressed_round():
    counters = OneBitAdam([torch.nn.Parameter(torch.ones(8))], lr=1e-3).counters
    assert counters.bits == 0
    assert "bits" not in counters.summary()


def test_bits_there_and_back_differ_where_a_mean_comes_back_in_another_codec():
    there = codec_named("sign").row_bytes(1 << 20)
    assert share(torch.Size([1 << 21]), codec_named("sign"), 2).bits == 8 * there / (1 << 20)
    bits = share(torch.Size([1 << 21]), TernaryCodec(mean="int8"), 2).bits
    assert bits == pytest.approx((2 + 32 / 2048 + 8 + 32 / 256) / 2)
