"""Means of similar tokens in place of tokens: exact where it must be, measured where it is not."""

import pytest
import torch
import torch.distributed as dist

import commpress
from commpress.collectives import Loopback
from gallery import gallery

pytestmark = pytest.mark.slow
WIDTH = 48
LSH = gallery("lsh_moe")


def plain(experts=4):
    return commpress.ExpertExchange(experts, process_group=Loopback(1).transport(0))


def exchange_of(share, **options):
    return LSH.LSHExchange(plain(), share, **options)


def batch_of(tokens=200, k=2, seed=0, dtype=torch.float32):
    """Tokens around a few centres."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(12, WIDTH, generator=draw, dtype=dtype)
    x = centres[torch.randint(12, (tokens,), generator=draw)]
    x = x + 0.2 * torch.randn(tokens, WIDTH, generator=draw, dtype=dtype)
    idx = torch.rand(tokens, 4, generator=draw).argsort(1)[:, :k]
    return x, idx, torch.rand(tokens, k, generator=draw, dtype=dtype)


def curved(rows, counts):
    """Experts that differ and are not linear."""
    factor = torch.repeat_interleave(torch.arange(1.0, len(counts) + 1), counts)[:, None].to(
        rows.dtype
    )
    return torch.tanh(factor * rows) * 2 + rows


def test_turning_keeps_lengths_and_spreads_one_element():
    x = torch.randn(6, WIDTH)
    torch.testing.assert_close(LSH.turn(x, 64, 3).norm(dim=1), x.norm(dim=1))
    assert LSH.turn(torch.eye(WIDTH), 64, 3).abs().max() < 0.6
    assert not torch.equal(LSH.turn(x, WIDTH, 3), LSH.turn(x, WIDTH, 4))


def test_tokens_that_are_alike_share_hashes():
    """A hash tells near from far, as its law says: the chance to meet falls with the angle."""
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    other = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    hashes = [LSH.vertices(LSH.turn(x + far * other, 8, 0)) for far in (0.0, 0.1, 0.4, 1.0, 100.0)]
    met = [float((hashes[0] == each).float().mean()) for each in hashes]
    assert met[0] == 1
    assert met == sorted(met, reverse=True)
    assert met[1] > 0.8 > 0.5 > met[3]
    assert met[4] == pytest.approx(1 / 16, abs=0.02)


@pytest.mark.parametrize(("share", "k"), [(0.05, 3), (0.5, 1)])
def test_no_more_travels_than_the_share(share, k):
    means = exchange_of(share, probes=0)
    means(*batch_of(tokens=500, k=k), curved)
    assert 0.5 * share * 500 * k < means.exchange.counters.choices <= share * 500 * k
    few = exchange_of(0.01, probes=0)
    few(*batch_of(tokens=10), curved)
    assert few.exchange.counters.choices == 4  # one mean for each expert at least


def test_experts_that_shift_tokens_lose_nothing():
    tokens, idx, gates = batch_of()
    means, shift = exchange_of(0.1), torch.randn(4, WIDTH)

    def moved(rows, counts):
        return rows + torch.repeat_interleave(shift[: len(counts)], counts, 0)

    out = means(tokens, idx, gates, moved, chunks=3)
    torch.testing.assert_close(
        out, (gates[:, :, None] * (tokens[:, None] + shift[idx])).sum(1), rtol=1e-5, atol=1e-5
    )
    assert means.error < 1e-6


def test_equal_tokens_lose_nothing_and_with_linear_experts_the_mean_is_exact():
    many = [t.repeat(10, *[1] * (t.dim() - 1)) for t in batch_of(tokens=20, k=1)]
    out = exchange_of(0.1, hashes=40, probes=0)(*many, curved)
    exact = plain()(*many, curved)
    assert (out - exact).norm() < 0.1 * exact.norm()
    tokens, idx, _ = batch_of(k=1)
    matrix, means = torch.randn(WIDTH, WIDTH), exchange_of(0.1, probes=0)
    out = means(tokens, idx, torch.ones(200, 1), lambda rows, _: rows @ matrix)
    _, _, where, _ = means.cluster(tokens, idx)
    for cluster in where.unique():
        here = where[:, 0] == cluster
        torch.testing.assert_close(
            out[here].mean(0), (tokens[here] @ matrix).mean(0), rtol=1e-4, atol=1e-4
        )


def test_gradients_by_differences():
    tokens, idx, gates = batch_of(tokens=24, dtype=torch.float64)
    means = exchange_of(0.3, probes=0, bound=100)

    def layer(x, weights):
        return means(x, idx, weights, curved)

    assert torch.autograd.gradcheck(
        layer, (tokens.requires_grad_(), gates.requires_grad_()), fast_mode=True
    )


def test_the_error_is_measured_on_probes():
    """Over many calls the probes see every choice: their mean is that of the layer without
    gates."""
    tokens, idx, gates = batch_of(tokens=160, k=1)
    means, seen = exchange_of(0.1, probes=16, bound=100), []
    for _ in range(10):
        means(tokens, idx, gates, curved)
        seen.append(means.error)
    ones = torch.ones_like(gates)
    exact = plain()(tokens, idx, ones, curved)
    blind = exchange_of(0.1, probes=0)(tokens, idx, ones, curved)
    true = float((blind - exact).norm() / exact.norm())
    assert true > 0.05
    assert sum(seen) / 10 == pytest.approx(true, rel=0.3)
    rough = exchange_of(0.1, bound=100)
    rough(tokens, idx, gates, lambda rows, _: torch.sin(30 * rows))
    assert rough.error > 1.5 * max(seen)


def bounded():
    """Experts leave the small tokens of rank 0 as they are, so that it has no error; those of rank
    1 they do not."""

    def rough(rows, _):
        return rows + torch.where(rows.abs() > 0.1, torch.sin(30 * rows), 0)

    means = LSH.LSHExchange(commpress.ExpertExchange(4), 0.1, bound=0.3, retry=3)
    rank, sent, errors = dist.get_rank(), [], []
    tokens, idx, gates = batch_of(seed=rank)
    tokens = tokens * (1e-3 if rank == 0 else 1)
    for _ in range(8):
        before = means.exchange.counters.choices
        out = means(tokens, idx, gates, rough)
        sent.append(means.exchange.counters.choices - before)
        errors.append(means.error)
    exact = gates.sum(1, keepdim=True) * rough(tokens, None)
    return sent, means.exact_calls, float((out - exact).abs().max()), max(errors)


def test_a_bound_switches_it_off_on_all_ranks_at_once(pool):
    found = pool.run(bounded)
    assert found[0][3] < 1e-6 < 0.3 < found[1][3]
    for sent, exact_calls, left, _ in found:
        assert [n == 400 for n in sent] == [False, True, True, True] * 2
        assert exact_calls == 6
        assert left < 1e-5


def test_a_nan_travels_alone_and_no_tokens_do_not_travel():
    tokens, idx, gates = batch_of()
    tokens[17, 3] = float("nan")
    spoilt = exchange_of(0.1, probes=0)(tokens, idx, gates, curved)
    assert spoilt[17].isnan().any()
    assert spoilt[torch.arange(200) != 17].isfinite().all()
    for count in (0, 3):
        tokens = torch.randn(count, WIDTH, requires_grad=True)
        nothing = torch.full((count, 2), -1)
        out = exchange_of(0.2)(tokens, nothing, torch.ones(count, 2), curved)
        out.sum().backward()
        assert out.shape == tokens.grad.shape == (count, WIDTH)
        assert not out.any()
    with pytest.raises(ValueError, match="share is 2"):
        exchange_of(2)


def trained(share):
    return gallery("lsh_moe").train(200, share)


def test_a_layer_learns_with_a_fifth_of_the_choices(pool):
    whole, means = (pool.run(trained, share)[0] for share in (None, 0.2))
    assert whole[1] == 1.0
    assert means[1] < 0.22
    assert means[0][-1] < 0.05 * means[0][0]
