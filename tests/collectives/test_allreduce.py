"""The compressed all-reduce on simulated ranks: every oracle, all world sizes, all odd lengths."""

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
from commpress.collectives.frame import HEADER, Rows
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.transports.transport import InFront
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.kernels.pieces import aligned, width_of
from recorded import Recorded
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

    def sent(self) -> list[torch.Tensor]:
        return [feedback.sent for feedback in self.feedbacks]

    def total_residual(self) -> np.ndarray:
        """R = mean of the sent residuals + the reduced ones, side by side; float64."""
        if not self.message.pieces.residual_numel:
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


def check_telescoping(group, steps, slack=4):
    """Σ outputs + R_T = Σ mean inputs: holds for any codec, so it tests the bookkeeping and not the
    quality. Returns Σ outputs."""
    outputs, inputs, peak = np.zeros(group.numel), np.zeros(group.numel), 0.0
    for step in range(steps):
        xs = gradients(group.size, group.numel, 1000 * step + group.size)
        results = group.reduce(xs)
        assert all(torch.equal(results[0], r) for r in results), "ranks differ"
        assert all(group.finite)
        outputs += results[0].double().numpy()
        inputs += np.mean([x.double().numpy() for x in xs], axis=0)
        peak = max(peak, *(sent.abs().max().item() for sent in group.sent() if sent.numel()), 4.0)
    error = np.abs(outputs + group.total_residual() - inputs).max()
    assert error <= slack * steps * np.finfo(np.float32).eps * 2 * peak
    return outputs


def check_a_bad_number(group, bad, wheres):
    """It is seen by all and poisons nothing."""
    group.reduce(gradients(group.size, group.numel, 1))
    before, xs = group.total_residual(), gradients(group.size, group.numel, 2)
    for where in wheres:
        poisoned = [x.clone() for x in xs]
        poisoned[-1][where] = bad
        results = group.reduce(poisoned)
        assert group.finite == [False] * group.size
        for result, x in zip(results, poisoned, strict=True):
            assert torch.equal(result.nan_to_num(1, 2, 3), x.nan_to_num(1, 2, 3)), "buffer changed"
        np.testing.assert_array_equal(group.total_residual(), before)
    again = group.reduce(xs)
    assert all(group.finite)
    assert torch.isfinite(again[0]).all()
    assert all(torch.equal(again[0], each) for each in again)


@pytest.mark.parametrize(
    ("size", "codec"), few(WORLDS, ["sign", SignCodec(block=0), "none", "sign-l1"]), ids=str
)
def test_telescoping_on_every_world_size(size, codec):
    check_telescoping(Group(size, 1000 + size, codec), steps=12 if size <= 16 else 4)


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
    check_telescoping(Group(size, numel, codec), steps=4)


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


class Tapped(InFront):
    """Keeps a copy of all that is sent."""

    def __init__(self, inner, sent):
        self.stand_for(inner)
        self.sent = sent

    def all_to_all(self, out, inp, tag):
        self.sent.append(inp.clone())
        return self.inner.all_to_all(out, inp, tag)

    def all_gather(self, out, inp, tag):
        self.sent.append(inp.clone())
        return self.inner.all_gather(out, inp, tag)


def test_noise_differs_between_steps_ranks_and_directions():
    """Of equal inputs other elements are drawn, and of a mean not those that were drawn for it:
    right on average."""
    x, steps = torch.full((4096,), 0.3), 20
    sent: list[torch.Tensor] = []
    total, transports = torch.zeros(4096), [Tapped(t, sent) for t in Loopback(2).transports()]
    for step in range(steps):
        total += reduced(x, RandomKCodec(4, unbiased=True), transports, sequence=step) / steps
    payloads = [rows[:, HEADER:] for rows in sent]
    pairs = [(a, b) for i, a in enumerate(payloads) for b in payloads[:i] if a.shape == b.shape]
    assert not any(torch.equal(a, b) for a, b in pairs)
    assert abs(float(total.mean()) - 0.3) < 0.03, "noise used twice would give 0.75"


def reduced(x, codec, transports, sequence=3):
    """The mean of equal buffers."""
    buffers = [x.clone() for _ in transports]
    pairs = zip(buffers, transports, strict=True)
    steps = [compressed_allreduce(b, codec=codec, transport=t, sequence=sequence) for b, t in pairs]
    simulate(steps)
    assert all(torch.equal(buffers[0], b) for b in buffers)
    return buffers[0]


@pytest.mark.parametrize("mean", ["shift5", "int8", "none"])
def test_the_noise_of_ternary_gradients_falls_with_the_number_of_ranks(mean):
    """Its variance is that of a mean of independent draws, (s·|c| − c²)/P; made ternary again it
    would be about that of one."""
    for size in (2, 8):
        x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(size))
        found = reduced(x, TernaryCodec(mean=mean), Loopback(size).transports())
        blocks = x.view(-1, 2048)
        one = float((blocks.abs().amax(1, keepdim=True) * blocks.abs() - blocks.square()).sum())
        coarse = 0.08 if mean == "shift5" else 0.04  # of rounding the mean, and of so many draws
        assert float((found - x).square().sum()) == pytest.approx(one / size, rel=coarse)


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


@pytest.mark.parametrize("size", [2, 4, 64])
def test_bytes_are_those_of_the_formula_and_a_channel_counts_them(size):
    """Two collectives, 2·(P−1)·(n'/8P + 4 + header) bytes sent per rank."""
    numel, recorded = 64 * size * 16, [Recorded(t) for t in Loopback(size).transports()]
    channels = [Channel(t) for t in recorded]
    reduced(torch.ones(numel), SignCodec(block=0), [c.transport for c in channels])
    row = HEADER + aligned(numel // size // 8 + 4)
    for channel, transport in zip(channels, recorded, strict=True):
        assert transport.operations == ["all_to_all", "all_gather"]
        assert channel.sent_bytes == transport.sent_bytes == 2 * (size - 1) * row
        assert channel.waited > 0
        headers = torch.zeros(size, HEADER, dtype=torch.uint8)
        rows = {r: torch.zeros(10 * r, dtype=torch.uint8) for r in range(size)}
        wanted = torch.ones(size, dtype=torch.uint8)
        channel.transport.exchange(Rows(headers.clone(), {}), Rows(headers, rows), wanted, 99)
        assert channel.sent_bytes == transport.sent_bytes > 2 * (size - 1) * row


@pytest.mark.parametrize(
    ("codec", "size"), few(["sign", "sign-l1", SignCodec(block=0)], WORLDS), ids=str
)
def test_equal_sign_patterns_of_constant_magnitude_are_exact(size, codec):
    """x_i = k_i · p gives mean(k) · p and leaves nothing behind, also of zeros (the k are chosen so
    that sums are exact)."""
    numel = 8 * size * 3 + 5
    pattern = torch.where(torch.arange(numel) % 3 == 0, 1.0, -1.0)
    for times in (1.0, 0.0):
        ks = [times * (2 * i + 1) for i in range(size)]
        group = Group(size, numel, codec)
        for result in group.reduce([k * pattern for k in ks]):
            assert torch.equal(result, torch.tensor(sum(ks)) / size * pattern)
        assert np.abs(group.total_residual()).max() == 0
