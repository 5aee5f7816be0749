"""Sequences divided among ranks against one process: rings and exchanges to the last bit, attention
up to rounding."""

import runpy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import sources
from commpress.codecs import codec_named
from commpress.collectives.all_to_all.all_to_all import Way
from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.errors import InvalidArgument
from commpress.integrations.pipeline.edge_codec import edge_codec
from commpress.integrations.sequence import SequenceGroups, SequenceParallel, divide_sequences
from commpress.integrations.sequence.heads import shares, to_heads, to_positions
from commpress.integrations.sequence.prefix_state import prefix, prefix_back
from commpress.integrations.sequence.ring_attention import attend, attend_back
from commpress.integrations.sequence.shift import SequencePlace, shift
from test_pipeline_edges import crossed
from variants import first

SIZES = [1, 2, 3, 5, 32]


def places(size, seed=0, wrap=lambda transport: transport):
    """Ends of a simulated group with uneven lengths, one of them 0 from 3 ranks on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (size,), generator=generator).tolist()
    if size > 2:
        lengths[1] = 0
    return [
        SequencePlace(wrap(transport), tuple(lengths)) for transport in Loopback(size).transports()
    ]


def parts(x, place, dim=-2):
    return x.split(list(place.lengths), dim)


def tensors(lengths, count, seed=1, heads=2, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(heads, sum(lengths), dim, generator=generator, dtype=dtype)
        for _ in range(count)
    ]


def plain(q, k, v, causal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_brings_every_part_round(size):
    every = places(size)
    x = [torch.randint(0, 255, (3 * length,), dtype=torch.uint8) for length in every[0].lengths]
    for by in {1, -1, 2}:
        out = [torch.empty_like(x[(r - by) % size]) for r in range(size)]
        simulate([shift(out[p.rank], x[p.rank], p, by=by, sequence=by % 7) for p in every])
        assert all(torch.equal(out[r], x[(r - by) % size]) for r in range(size))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_ring_attention_is_that_of_one_process(size, causal):
    """Output and gradients, float64 up to its rounding; with int8 all ranks attend to the same
    decoded keys and values."""
    every = places(size)
    q, k, v, gradient = tensors(every[0].lengths, 4)
    mine = [parts(x, every[0]) for x in (q, k, v, gradient)]
    found = simulate(
        [
            attend(*(x[p.rank] for x in mine[:3]), p, causal=causal, codec=None, sequence=0)
            for p in every
        ]
    )
    for x in (q, k, v):
        x.requires_grad_()
    truth = plain(q, k, v, causal)
    truth.backward(gradient)
    assert torch.allclose(torch.cat([out for out, _ in found], -2), truth, atol=1e-12)
    back = simulate(
        [
            attend_back(
                mine[3][p.rank],
                *(x[p.rank].detach() for x in mine[:3]),
                *found[p.rank],
                p,
                causal=causal,
                codec=None,
                gradient_codec=None,
                sequence=100,
            )
            for p in every
        ]
    )
    for i, x in enumerate((q, k, v)):
        assert torch.allclose(torch.cat([each[i] for each in back], -2), x.grad, atol=1e-12)


def test_coded_rings_do_not_add_up_errors():
    """Keys and values are encoded once: over 5 ranks as attending to what one process decodes;
    fewer bytes by the codec."""
    size, codec = 5, edge_codec("int8")
    recorded = {}

    def run(with_codec):
        every = places(size, wrap=Recorded)
        q, k, v = tensors(every[0].lengths, 3, heads=8, dim=64, dtype=torch.float32)
        found = simulate(
            [
                attend(
                    *(parts(x, p)[p.rank] for x in (q, k, v)),
                    p,
                    causal=False,
                    codec=with_codec,
                    sequence=0,
                )
                for p in every
            ]
        )
        recorded[with_codec] = sum(
            p.transport.sent_bytes - 64 * p.transport.messages for p in every
        )
        return torch.cat([out for out, _ in found], -2), q, k, v, every[0]

    run(None)
    out, q, k, v, place = run(codec)

    def coded(x):
        return torch.cat(
            [
                crossed(part.contiguous(), codec) if part.numel() else part
                for part in parts(x, place)
            ],
            -2,
        )

    seen = coded(k), coded(v)
    assert torch.allclose(out, plain(q, *seen, False), atol=1e-5)
    assert 3.5 < recorded[None] / recorded[codec] < 4


def test_a_causal_ring_sends_half():
    """Blocks stop where nobody behind needs them."""
    sent = []
    for causal in (False, True):
        every = [SequencePlace(Recorded(t), (4,) * 8) for t in Loopback(8).transports()]
        q = torch.randn(1, 32, 8)
        simulate(
            [
                attend(*[parts(q, p)[p.rank]] * 3, p, causal=causal, codec=None, sequence=0)
                for p in every
            ]
        )
        sent.append(sum(p.transport.messages for p in every))
    assert sent == [56, 28]


@pytest.mark.parametrize("heads", [1, 6, 7])
@pytest.mark.parametrize("size", SIZES)
def test_heads_for_positions_is_a_permutation(size, heads):
    """Bit for bit there and back, uneven heads and lengths, ranks without any."""
    every = places(size)
    (x,) = tensors(every[0].lengths, 1, heads=2 * heads)
    x = x.view(2, heads, -1, 8).transpose(1, 2).contiguous()
    way, none = Way(), codec_named("none")
    mine = parts(x, every[0], 1)
    there = simulate([to_heads(mine[p.rank], p, way, codec=none, sequence=0) for p in every])
    for got, expected in zip(there, x.split(shares(heads, size), 2), strict=True):
        assert torch.equal(got, expected)
    back = simulate(
        [to_positions(there[p.rank], heads, p, way, codec=none, sequence=1) for p in every]
    )
    assert all(torch.equal(a, b) for a, b in zip(back, mine, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_states_are_passed_on(size):
    """The decayed sum of all states before, and its transpose for gradients."""
    every = places(size)
    states, gradients = torch.randn(
        2, size, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind(0)
    decays = torch.rand(
        size, 3, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = simulate(
        [prefix(states[p.rank], decays[p.rank], p, codec=None, sequence=0) for p in every]
    )
    states.requires_grad_()
    before, truth = torch.zeros_like(states[0]), []
    for r in range(size):
        truth.append(before)
        before = before * decays[r] + states[r]
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    (torch.stack(truth) + 0 * states).backward(gradients)
    back = simulate(
        [prefix_back(gradients[p.rank], decays[p.rank], p, codec=None, sequence=0) for p in every]
    )
    assert torch.allclose(torch.stack(back), states.grad, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40), st.integers(1, 17))
def test_sequences_are_divided_among_groups(lengths, ranks):
    """Each once, where it has room, groups at multiples of their size; never later than all in one
    group after another."""
    most = -(-max(lengths) // (1 << ranks.bit_length() - 1))
    found = divide_sequences(lengths, ranks, most)
    assert sorted(i for share in found for i in share.sequences) == list(range(len(lengths)))
    assert [r for share in found for r in share.ranks] == list(range(ranks))
    for share in found:
        width = len(share.ranks)
        assert width & width - 1 == 0
        assert share.ranks[0] % width == 0
        assert all(lengths[i] <= most * width for i in share.sequences)
    last = max(sum(lengths[i] ** 2 for i in share.sequences) / len(share.ranks) for share in found)
    assert last <= sum(n**2 for n in lengths) / (1 << ranks.bit_length() - 1) + 1e-6


def test_long_sequences_get_many_ranks():
    lengths = [4000, *[500] * 8]
    for between, width in ((0.0, 8), (1e5, 4)):  # beyond a node of 4 a position's way costs
        found = divide_sequences(lengths, 8, 1000, node=4, between=between)
        assert [len(share.ranks) for share in found if 0 in share.sequences] == [width]
    with pytest.raises(InvalidArgument, match="the largest group"):
        divide_sequences([4000], 2, 1000)


def trained(kind):
    """Gradients of this rank's part of x through a small attention of one kind, by autograd, on
    real ranks."""
    rank, lengths = dist.get_rank(), [5, 3]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 8, 8, generator=generator)  # batch, heads, positions, dim
    mine = x.split(lengths, 2)[rank].clone().requires_grad_()
    ranks = SequenceParallel("none")
    ranks.divide(lengths[rank])
    if kind == "ring":
        out = ranks.ring_attention(mine, 2 * mine, mine.cos())
    else:
        wide = ranks.to_heads(mine.transpose(1, 2)).transpose(1, 2)
        out = ranks.to_positions(
            plain(wide, 2 * wide, wide.cos(), True).transpose(1, 2), 4
        ).transpose(1, 2)
    out.square().sum().backward()
    try:
        ranks.ring_attention(x, x, x)
    except InvalidArgument as error:
        return out.detach(), mine.grad, str(error)
    return out.detach(), mine.grad, ""


@pytest.mark.parametrize("kind", ["ring", "heads"])
def test_autograd_goes_through_on_real_ranks(pool, kind):
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    truth = plain(x, 2 * x, x.cos(), True)
    truth.square().sum().backward()
    found = pool.run(trained, kind, size=2)
    assert torch.allclose(torch.cat([out for out, _, _ in found], 2), truth, atol=1e-5)
    assert torch.allclose(torch.cat([gradient for _, gradient, _ in found], 2), x.grad, atol=1e-4)
    assert all("has 8 positions" in said for _, _, said in found)


def flexible():
    """Two groups of different size at once: sums of squares of each sequence by way of to_heads."""
    groups, rank = SequenceGroups(), dist.get_rank()
    ranks, mine = groups.of(divide_sequences([8, 4], 3, 4))
    sums = {}
    for i in mine:
        length = [8, 4][i] // ranks.channel.size
        ranks.divide(length)
        x = torch.arange(float([8, 4][i])).view(1, -1, 1, 1)[:, ranks.channel.rank * length :][
            :, :length
        ]
        wide = ranks.to_heads(x.expand(1, length, 2, 1).contiguous())
        sums[i] = float(wide[:, :, :1].square().sum())
    return rank, ranks.channel.size, sums


def test_groups_of_different_size_work_at_once(pool):
    found = pool.run(flexible, size=3)
    assert [size for _, size, _ in found] == [2, 2, 1]
    assert [sums for _, _, sums in found] == [{0: 140.0}, {0: 140.0}, {1: 14.0}]


def example(way, codec):
    """Losses of some steps of the example, on these ranks and in one process."""
    names = runpy.run_path(str(sources.ROOT / "examples" / "long_sequence.py"))
    ranks = SequenceGroups(codec) if way == "groups" else SequenceParallel(codec)
    return names["train"](way, ranks, 8), names["train"](
        way, None, 8
    ) if dist.get_rank() == 0 else None


@pytest.mark.parametrize("way", first(2, ["ring", "groups", "heads", "state"]))
def test_the_example_trains_as_one_process(pool, way):
    (losses, alone), *_ = pool.run(example, way, "none", size=3)
    assert losses == pytest.approx(alone, abs=1e-4)
    assert losses[7] < losses[3] - 0.1  # the same batch
    (coded, _), *_ = pool.run(example, way, "int8", size=2)
    assert coded == pytest.approx(alone, abs=0.05)
    assert coded != losses
