"""Means of similar tokens in place of tokens: exact where it must be, measured where it is not."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import commpress
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import InvalidArgument
from commpress.integrations.experts.lsh import turn, vertices, walsh_hadamard
from test_experts import Batch

WIDTH = 48


def exchange_of(lsh, experts=4, **options):
    return commpress.ExpertExchange(experts, lsh=lsh, transport=Loopback(1).transport(0), **options)


def batch_of(tokens=200, experts=4, k=2, seed=0, dtype=torch.float32):
    """Tokens around a few centres."""
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((12, WIDTH))
    x = centres[draw.integers(0, 12, tokens)] + 0.2 * draw.standard_normal((tokens, WIDTH))
    idx = np.stack([draw.permutation(experts)[:k] for _ in range(tokens)])
    return (
        torch.from_numpy(x).to(dtype),
        torch.from_numpy(idx),
        torch.from_numpy(draw.random((tokens, k))).to(dtype),
    )


def curved(rows, counts):
    """Experts that differ and are not linear."""
    factor = torch.repeat_interleave(torch.arange(1.0, len(counts) + 1), counts)[:, None].to(
        rows.dtype
    )
    return torch.tanh(factor * rows) * 2 + rows


def test_the_fast_transform_is_the_matrix():
    for size in (2, 8, 64, 512):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64), matrix)
        x = torch.randn(5, size)
        torch.testing.assert_close(
            walsh_hadamard(x).double(), x.double() @ matrix / size**0.5, rtol=1e-5, atol=1e-5
        )


def test_turning_keeps_lengths_and_spreads_one_element():
    x = torch.randn(6, WIDTH)
    torch.testing.assert_close(turn(x, 64, 3).norm(dim=1), x.norm(dim=1))
    assert turn(torch.eye(WIDTH), 64, 3).abs().max() < 0.6
    assert not torch.equal(turn(x, WIDTH, 3), turn(x, WIDTH, 4))


def test_tokens_that_are_alike_share_hashes():
    """A hash tells near from far, as its law says: the chance to meet falls with the angle."""
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    other = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    met = [
        float((vertices(turn(x, 8, 0)) == vertices(turn(x + far * other, 8, 0))).float().mean())
        for far in (0.0, 0.1, 0.4, 1.0, 100.0)
    ]
    assert met[0] == 1
    assert met == sorted(met, reverse=True)
    assert met[1] > 0.8 > 0.5 > met[3]
    assert met[4] == pytest.approx(1 / 16, abs=0.02)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("k", [1, 3])
def test_no_more_travels_than_the_share(share, k):
    tokens, idx, gates = batch_of(tokens=500, k=k)
    exchange = exchange_of(commpress.LSH(share, probes=0))
    exchange(tokens, idx, gates, curved)
    assert 0.75 * share * 500 * k < exchange.counters.choices <= share * 500 * k


def test_one_mean_for_each_expert_at_least():
    tokens, idx, gates = batch_of(tokens=10)
    exchange = exchange_of(commpress.LSH(0.01, probes=0))
    exchange(tokens, idx, gates, curved)
    assert exchange.counters.choices == 4


@pytest.mark.parametrize("chunks", [1, 3])
def test_experts_that_shift_tokens_lose_nothing(chunks):
    tokens, idx, gates = batch_of()
    lsh = commpress.LSH(0.1)
    out = exchange_of(lsh)(tokens, idx, gates, lambda rows, _: rows, chunks=chunks)
    assert torch.equal(out, gates.sum(1, keepdim=True) * tokens)
    assert lsh.error == 0
    shift = torch.randn(4, WIDTH)
    moved = exchange_of(lsh)(
        tokens,
        idx,
        gates,
        lambda rows, counts: rows + torch.repeat_interleave(shift[: len(counts)], counts, 0),
        chunks=chunks,
    )
    torch.testing.assert_close(
        moved, (gates[:, :, None] * (tokens[:, None] + shift[idx])).sum(1), rtol=1e-5, atol=1e-5
    )
    assert lsh.error < 1e-6


def test_equal_tokens_and_linear_experts():
    """Tokens that are equal lose nothing with any expert; with a linear one the mean of a cluster
    is exact."""
    tokens, idx, gates = batch_of(tokens=20, k=1)
    many = [t.repeat(10, *[1] * (t.dim() - 1)) for t in (tokens, idx, gates)]
    lsh = commpress.LSH(0.1, hashes=40, dims=8, probes=0)
    out = exchange_of(lsh)(*many, curved)
    clusters = lsh.cluster(many[0], many[1])
    if len(clusters.offsets) == 20:
        torch.testing.assert_close(out, exchange_of(None)(*many, curved), rtol=1e-5, atol=1e-5)
    tokens, idx, _ = batch_of(k=1)
    matrix = torch.randn(WIDTH, WIDTH)
    out = exchange_of(commpress.LSH(0.1, probes=0))(
        tokens, idx, torch.ones(200, 1), lambda rows, _: rows @ matrix
    )
    clusters = commpress.LSH(0.1, probes=0).cluster(tokens, idx)
    for cluster in range(len(clusters.offsets)):
        here = clusters.where[:, 0] == cluster
        torch.testing.assert_close(
            out[here].mean(0), (tokens[here] @ matrix).mean(0), rtol=1e-4, atol=1e-4
        )


def test_gradients_by_differences():
    tokens, idx, gates = batch_of(tokens=24, dtype=torch.float64)
    exchange = exchange_of(commpress.LSH(0.3, probes=0, bound=100))
    layer = lambda x, g: exchange(x, idx, g, curved)  # noqa: E731
    assert torch.autograd.gradcheck(
        layer, (tokens.requires_grad_(), gates.requires_grad_()), fast_mode=True
    )
    assert 0 < exchange.counters.choices / exchange.counters.tokens <= 1


def test_the_error_is_measured_on_probes():
    """Over many calls the probes see every choice: their mean is that of the layer without
    gates."""
    tokens, idx, gates = batch_of(tokens=160, k=1)
    seen = []
    lsh = commpress.LSH(0.1, probes=16, bound=100)
    exchange = exchange_of(lsh)
    for _ in range(10):
        exchange(tokens, idx, gates, curved)
        seen.append(lsh.error)
    ones = torch.ones_like(gates)
    exact = exchange_of(None)(tokens, idx, ones, curved)
    blind = exchange_of(commpress.LSH(0.1, probes=0))(tokens, idx, ones, curved)
    true = float((blind - exact).norm() / exact.norm())
    assert true > 0.05
    assert np.mean(seen) == pytest.approx(true, rel=0.3)
    rough = exchange_of(lsh_rough := commpress.LSH(0.1, bound=100))
    rough(tokens, idx, gates, lambda rows, _: torch.sin(30 * rows))
    assert lsh_rough.error > 1.5 * max(seen)


def bounded():
    """Experts leave the small tokens of rank 0 as they are, so that it has no error; those of rank
    1 they do not."""
    rough = lambda rows, _: rows + torch.where(rows.abs() > 0.1, torch.sin(30 * rows), 0)  # noqa: E731
    lsh = commpress.LSH(0.1, bound=0.3, retry=3)
    exchange = commpress.ExpertExchange(4, lsh=lsh)
    rank, sent, errors = dist.get_rank(), [], []
    tokens, idx, gates = batch_of(seed=rank)
    tokens = tokens * (1e-3 if rank == 0 else 1)
    for _ in range(9):
        before = exchange.counters.choices
        out = exchange(tokens, idx, gates, rough)
        sent.append(exchange.counters.choices - before)
        errors.append(lsh.error)
    exact = gates.sum(1, keepdim=True) * rough(tokens, None)
    return sent, lsh.exact_calls, float((out - exact).abs().max()), max(errors)


def test_a_bound_switches_it_off_on_all_ranks_at_once(pool):
    found = pool.run(bounded)
    assert found[0][3] < 1e-6 < 0.3 < found[1][3]
    for sent, exact_calls, left, _ in found:
        assert [n == 400 for n in sent] == [
            False,
            False,
            True,
            True,
            True,
            False,
            False,
            True,
            True,
        ]
        assert exact_calls == 5
        assert left < 1e-5


def test_a_nan_travels_alone():
    tokens, idx, gates = batch_of()
    tokens[17, 3] = float("nan")
    spoilt = exchange_of(commpress.LSH(0.1, probes=0))(tokens, idx, gates, curved)
    assert spoilt[17].isnan().any()
    assert spoilt[torch.arange(200) != 17].isfinite().all()


def test_no_tokens_and_no_choices():
    batch = Batch(1, 4, 2, 1)
    lsh = commpress.LSH()
    for count in (0, 3):
        tokens = torch.randn(count, WIDTH, requires_grad=True)
        out = exchange_of(lsh)(
            tokens, torch.full((count, batch.k), -1), torch.ones(count, batch.k), curved
        )
        out.sum().backward()
        assert out.shape == tokens.grad.shape == (count, WIDTH)
        assert not out.any()


@pytest.mark.parametrize(
    "options", [{"share": 0}, {"share": 2}, {"hashes": 0}, {"bound": 0}, {"probes": -1}]
)
def test_mistakes_are_refused(options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        commpress.LSH(**options)
