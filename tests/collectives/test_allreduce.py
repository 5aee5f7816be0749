"""The compressed all-reduce on simulated ranks: every oracle, all world sizes, all odd lengths."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import (
    BlockCodec,
    CastCodec,
    RandomKCodec,
    SignCodec,
    TernaryCodec,
    codec_named,
)
from commpress.codecs.family import NAMES
from commpress.collectives.allreduce import compressed_allreduce
from commpress.collectives.buckets import one_message
from commpress.collectives.channel import Channel
from commpress.collectives.frame import HEADER
from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.collectives.transports.rows import Rows
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.kernels.pieces import width_of
from variants import few

WORLDS = [1, 2, 3, 4, 5, 7, 8, 16, 33, 64]


class Group:
    """P ranks with feedback; ``reduce`` is one step."""

    def __init__(self, size: int, numel: int, codec, *, feedback: bool = True) -> None:
        self.codec, self.size, self.numel = codec_named(codec), size, numel
        self.message = one_message(numel, self.codec, size, feedback=feedback)
        self.feedbacks = [ErrorFeedback.zeros(self.message.pieces) for _ in range(size)]
        self.transports = [Recorded(t) for t in Loopback(size).transports()]
        self.step = 0

    def reduce(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        buffers = [x.clone() for x in inputs]
        self.finite = simulate(
            [
                compressed_allreduce(b, f, codec=self.codec, transport=t, sequence=self.step)
                for b, f, t in zip(buffers, self.feedbacks, self.transports, strict=True)
            ]
        )
        self.step += 1
        return buffers

    def total_residual(self) -> np.ndarray:
        """R = mean of the sent residuals + the reduced ones, side by side; float64."""
        if self.codec.lossless:
            return np.zeros(self.numel)
        for feedback in self.feedbacks:
            feedback.settle(self.message.pieces)
        width = width_of(self.numel, self.size)
        reduced = np.concatenate(
            [
                f.reduced.double().numpy()[: max(min(width, self.numel - r * width), 0)]
                for r, f in enumerate(self.feedbacks)
            ]
        )
        return np.mean([f.sent.double().numpy() for f in self.feedbacks], axis=0) + reduced


def gradients(size: int, numel: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator)
    return [common + torch.randn(numel, generator=generator) for _ in range(size)]


def check_telescoping(size, numel, codec, steps, tolerance_steps=None):
    """Σ outputs + R_T = Σ mean inputs: holds for any codec, so it tests the bookkeeping and not the
    quality."""
    group = Group(size, numel, codec)
    outputs, inputs, peak = np.zeros(numel), np.zeros(numel), 0.0
    for step in range(steps):
        xs = gradients(size, numel, 1000 * step + size)
        results = group.reduce(xs)
        assert all(torch.equal(results[0], r) for r in results), "ranks differ"
        assert all(group.finite)
        outputs += results[0].double().numpy()
        inputs += np.mean([x.double().numpy() for x in xs], axis=0)
        peak = max(
            peak, *(f.sent.abs().max().item() for f in group.feedbacks if f.sent.numel()), 4.0
        )
    error = np.abs(outputs + group.total_residual() - inputs).max()
    assert error <= 4 * steps * np.finfo(np.float32).eps * 2 * peak
    return outputs, inputs


@pytest.mark.parametrize(
    ("size", "codec"), few(WORLDS, ["sign", SignCodec(block=0), "none", "sign-l1"]), ids=str
)
def test_telescoping_on_every_world_size(size, codec):
    check_telescoping(size, 1000 + size, codec, steps=12 if size <= 16 else 4)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 12),
    numel=st.integers(1, 3000),
    codec=st.sampled_from(
        [
            *NAMES,
            SignCodec(block=8),
            SignCodec("l1", 0),
            BlockCodec("int4", 8),
            TernaryCodec(64),
            CastCodec("fp16"),
        ]
    ),
)
def test_telescoping_for_every_codec_and_length(size, numel, codec):
    check_telescoping(size, numel, codec, steps=4)


@pytest.mark.parametrize(
    ("codec", "size"),
    few(["sign", "sign-l1", SignCodec(block=0), SignCodec("l1", 0)], WORLDS),
    ids=str,
)
def test_equal_sign_patterns_of_constant_magnitude_are_exact(size, codec):
    """x_i = k_i · p gives mean(k) · p and leaves nothing behind (the k are chosen so that sums are
    exact)."""
    numel = 8 * size * 3 + 5
    pattern = torch.where(torch.arange(numel) % 3 == 0, 1.0, -1.0)
    ks = [float(2 * i + 1) for i in range(size)]
    group = Group(size, numel, codec)
    for result in group.reduce([k * pattern for k in ks]):
        assert torch.equal(result, torch.tensor(sum(ks)) / size * pattern)
    assert np.abs(group.total_residual()).max() == 0


@pytest.mark.parametrize(
    ("scale", "sent", "reduced", "output"),
    [
        ("rms", [2.0, 4.0], [1.46446609, -3.53553391], 3.53553391),
        ("l1", [3.0, 3.0], [2.0, -2.0], 2.0),
    ],
)
def test_golden_vector(scale, sent, reduced, output):
    """P = 2, x_0 = (7, −1)×8, x_1 = (7, 1)×8: worked out by hand."""
    group = Group(2, 16, SignCodec(scale, 0))
    x0, x1 = torch.tensor([7.0, -1.0] * 8), torch.tensor([7.0, 1.0] * 8)
    results = group.reduce([x0, x1])
    np.testing.assert_allclose(results[0].numpy(), output, rtol=1e-7)
    np.testing.assert_allclose(
        group.total_residual() + results[0].numpy(), [7.0, 0.0] * 8, atol=1e-6
    )
    for feedback in group.feedbacks:
        np.testing.assert_allclose(feedback.reduced.numpy(), reduced * 4, rtol=1e-6)
    np.testing.assert_allclose(group.feedbacks[0].sent.numpy(), sent * 8, rtol=1e-7)
    np.testing.assert_allclose(group.feedbacks[1].sent.numpy(), [sent[0], -sent[1]] * 8, rtol=1e-7)


def test_zeros_stay_zero():
    for codec in NAMES:
        group = Group(3, 100, codec)
        for result in group.reduce([torch.zeros(100)] * 3):
            assert torch.equal(result, torch.zeros(100))
        assert np.abs(group.total_residual()).max() == 0


@pytest.mark.parametrize("codec", ["sign", SignCodec(block=0), "int8"], ids=str)
def test_padding_changes_nothing(codec):
    """A buffer whose last row is mostly padding gives the numbers of one that holds zeros there,
    element by element: padding never enters a scale. One block per row makes both geometries
    equal."""
    numel, size = 8 * 4 * 5 - 37, 4
    group = Group(size, numel, codec)
    rows = [x.clone() for x in gradients(size, numel, 3)]
    (result, *_) = group.reduce(rows)
    width = width_of(numel, size)
    for r in range(size):
        part = slice(r * width, min((r + 1) * width, numel))
        if part.start >= numel:
            continue
        alone = Group(size, 8 * size * width, codec)  # row r alone fills row 0 of a larger buffer
        xs = [
            torch.cat([x[part], torch.zeros(8 * size * width - (part.stop - part.start))])
            for x in rows
        ]
        if codec_named(codec).block and part.stop - part.start == width:
            assert torch.equal(
                alone.reduce(xs)[0][: part.stop - part.start].sign(), result[part].sign()
            )


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_bytes_are_those_of_the_formula(size):
    """Two collectives, 2·(P−1)·(n'/8P + 4 + header) bytes sent per rank."""
    numel = 64 * size * 16
    group = Group(size, numel, SignCodec(block=0))
    group.reduce(gradients(size, numel, 1))
    row = HEADER + -(-(numel // size // 8 + 4) // 8) * 8
    for transport in group.transports:
        assert transport.operations == ["all_to_all", "all_gather"]
        assert transport.sent_bytes == 2 * (size - 1) * row
    assert group.transports[0].sent_bytes < 2 * (size - 1) / size * numel / 8 + 2 * (size - 1) * (
        4 + HEADER + 8
    )


def test_permuting_ranks_permutes_residuals_only():
    size, numel = 4, 1000
    xs = gradients(size, numel, 7)
    one, two = Group(size, numel, "sign"), Group(size, numel, "sign")
    a, b = one.reduce(xs)[0], two.reduce(xs[::-1])[0]
    assert (a.sign() == b.sign()).float().mean() > 0.999
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for i in range(size):
        assert torch.equal(one.feedbacks[i].sent, two.feedbacks[size - 1 - i].sent)


def test_error_order_proves_that_codecs_ran():
    """1 bit > 4 bits > 8 bits > bf16 > exact = rounding only."""
    size, numel = 4, 20_000
    xs = gradients(size, numel, 5)
    errors_are_in_order(xs, lambda name: Group(size, numel, name))


def errors_are_in_order(xs, group):
    """``group(codec)`` reduces ``xs``; every codec errs more than the finer one after it."""
    mean = torch.stack([x.double() for x in xs]).mean(0)
    errors = {
        name: (group(name).reduce(xs)[0].double() - mean).norm().item()
        for name in ("sign", "int4", "int8", "bf16", "none")
    }
    assert errors["sign"] > errors["int4"] > errors["int8"] > errors["bf16"] > errors["none"]
    assert errors["none"] < 1e-4 < errors["bf16"]


def test_exact_codec_is_the_mean_in_rank_order():
    xs = gradients(3, 999, 2)
    for result in Group(3, 999, "none").reduce(xs):
        assert torch.equal(result, ((xs[0] + xs[1]) + xs[2]) / 3)


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_number_is_seen_by_all_and_poisons_nothing(codec, bad):
    size, numel = 4, 1000
    group = Group(size, numel, codec)
    group.reduce(gradients(size, numel, 1))
    before = [(f.sent.clone(), f.reduced.clone()) for f in group.feedbacks]
    xs = gradients(size, numel, 2)
    poisoned = [x.clone() for x in xs]
    poisoned[2][777] = bad
    results = group.reduce(poisoned)
    assert group.finite == [False] * size
    for result, x, feedback, (sent, reduced) in zip(
        results, poisoned, group.feedbacks, before, strict=True
    ):
        assert torch.equal(result.nan_to_num(1, 2, 3), x.nan_to_num(1, 2, 3)), "buffer changed"
        assert torch.equal(feedback.sent, sent)
        assert torch.equal(feedback.reduced, reduced)
    again = group.reduce(xs)
    assert all(group.finite)
    assert torch.isfinite(again[0]).all()


def test_noise_differs_between_steps_ranks_and_directions():
    """Of equal inputs other elements are drawn, and of a mean not those that were drawn for it:
    right on average."""
    numel, ranks, steps = 4096, 2, 20
    x = torch.full((numel,), 0.3)
    sent: list[torch.Tensor] = []
    total, transports = torch.zeros(numel), [Tapped(t, sent) for t in Loopback(ranks).transports()]
    for step in range(steps):
        buffers = [x.clone() for _ in transports]
        simulate(
            [
                compressed_allreduce(
                    b, codec=RandomKCodec(4, unbiased=True), transport=t, sequence=step
                )
                for b, t in zip(buffers, transports, strict=True)
            ]
        )
        total += buffers[0] / steps
    payloads = [rows[:, HEADER:].clone() for rows in sent]
    assert not any(
        torch.equal(a, b)
        for i, a in enumerate(payloads)
        for b in payloads[:i]
        if a.shape == b.shape
    )
    assert abs(float(total.mean()) - 0.3) < 0.03, "noise used twice would give 0.75"


@pytest.mark.parametrize("mean", ["shift5", "int8", "none"])
@pytest.mark.parametrize("size", [2, 8])
def test_the_noise_of_ternary_gradients_falls_with_the_number_of_ranks(size, mean):
    """Its variance is that of a mean of independent draws, (s·|c| − c²)/P; made ternary again it
    would be about that of one."""
    numel = 1 << 14
    x = torch.randn(numel, generator=torch.Generator().manual_seed(size))
    buffers = [x.clone() for _ in range(size)]
    simulate(
        [
            compressed_allreduce(b, codec=TernaryCodec(mean=mean), transport=t, sequence=3)
            for b, t in zip(buffers, Loopback(size).transports(), strict=True)
        ]
    )
    assert all(torch.equal(buffers[0], b) for b in buffers)
    blocks = x.view(-1, 2048)
    one = float((blocks.abs().amax(1, keepdim=True) * blocks.abs() - blocks.square()).sum())
    coarse = 0.08 if mean == "shift5" else 0.04  # of rounding the mean, and of so many draws
    assert float((buffers[0] - x).square().sum()) == pytest.approx(one / size, rel=coarse)


@pytest.mark.parametrize("clip", [0, 2.5], ids=["ternary", "terngrad"])
@pytest.mark.parametrize("size", [2, 8])
def test_ternary_gradients_lose_less_under_scales_of_their_own_than_under_the_greatest(size, clip):
    """The paper's way: one scale for a block on all ranks, and a mean that comes back as it is.
    Gradients of one rank are ten times those of another."""
    generator = torch.Generator().manual_seed(size)
    common = torch.randn(32, 2048, generator=generator)
    sizes = torch.logspace(0, 1, size).tolist()
    own = [times * (common + torch.randn(common.shape, generator=generator)) for times in sizes]
    mean = sum(own) / size

    buffers = [x.clone().flatten() for x in own]
    simulate(
        [
            compressed_allreduce(b, codec=TernaryCodec(clip=clip), transport=t, sequence=3)
            for b, t in zip(buffers, Loopback(size).transports(), strict=True)
        ]
    )

    limits = [(clip or math.inf) * x.square().mean(1, keepdim=True).sqrt() for x in own]
    clipped = [x.clamp(-limit, limit) for x, limit in zip(own, limits, strict=True)]
    scale = torch.stack([x.abs().amax(1, keepdim=True) for x in clipped]).amax(0)
    drawn = [torch.rand(x.shape, generator=generator) * scale < x.abs() for x in clipped]
    shared = sum(scale * x.sign() * kept for x, kept in zip(clipped, drawn, strict=True)) / size

    ours, theirs = float((buffers[0].view_as(mean) - mean).norm()), float((shared - mean).norm())
    assert ours < (0.96 if size == 2 else 0.8) * theirs


def test_a_spoilt_rank_spoils_a_mean_that_comes_back_in_another_codec():
    buffers = [torch.ones(5000) for _ in range(3)]
    buffers[1][77] = float("nan")
    before = [b.clone() for b in buffers]
    finite = simulate(
        [
            compressed_allreduce(b, codec="ternary", transport=t)
            for b, t in zip(buffers, Loopback(3).transports(), strict=True)
        ]
    )
    assert finite == [False] * 3
    assert torch.equal(buffers[0], before[0])


class Tapped:
    """Keeps a copy of all that is sent."""

    def __init__(self, inner, sent) -> None:
        self.inner, self.sent = inner, sent
        self.rank, self.size, self.ordered, self.checks = (
            inner.rank,
            inner.size,
            inner.ordered,
            inner.checks,
        )

    def all_to_all(self, out, inp, tag):
        self.sent.append(inp.clone())
        return self.inner.all_to_all(out, inp, tag)

    def all_gather(self, out, inp, tag):
        self.sent.append(inp.clone())
        return self.inner.all_gather(out, inp, tag)


@pytest.mark.parametrize(
    ("buffer", "match"),
    [
        (torch.zeros(8, dtype=torch.float64), "float64"),
        (torch.zeros(16)[::2], "not contiguous"),
        (torch.zeros(4, 4), "one dimension"),
    ],
)
def test_bad_buffers_are_named(buffer, match):
    with pytest.raises(InvalidArgument, match=match):
        next(compressed_allreduce(buffer, codec="sign", transport=Loopback(1).transport(0)))


def test_wrong_codec_name_says_which_exist():
    with pytest.raises(InvalidArgument, match="did you mean 'sign'"):
        codec_named("sing")
    with pytest.raises(InvalidArgument, match="power of two"):
        SignCodec(block=100)


@pytest.mark.parametrize("size", [2, 3])
def test_a_channel_counts_every_byte_that_leaves(size):
    """As the wrapper of the tests does, which looks at each peer's row."""
    recorded = [Recorded(t) for t in Loopback(size).transports()]
    channels = [Channel(t) for t in recorded]
    simulate(
        [
            compressed_allreduce(torch.ones(500), codec="sign", transport=c.transport)
            for c in channels
        ]
    )
    rows = {r: torch.zeros(10 * r, dtype=torch.uint8) for r in range(size)}
    for channel in channels:
        headers, wanted = (
            torch.zeros(size, HEADER, dtype=torch.uint8),
            torch.ones(size, dtype=torch.uint8),
        )
        channel.transport.exchange(Rows(headers.clone(), {}), Rows(headers, rows), wanted, 99)
    assert [c.sent_bytes for c in channels] == [t.sent_bytes for t in recorded]
    assert min(c.sent_bytes for c in channels) > 0
    assert min(c.waited for c in channels) > 0
