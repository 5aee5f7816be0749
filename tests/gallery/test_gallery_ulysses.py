"""Heads for positions against one process: a permutation bit for bit, and what trains on it."""

import pytest
import torch
import torch.distributed as dist

from gallery import gallery

pytestmark = pytest.mark.slow
LENGTHS = {1: [5], 2: [4, 3], 3: [3, 0, 5], 4: [2, 0, 5, 1]}


def turned(heads):
    rank, lengths = dist.get_rank(), LENGTHS[dist.get_world_size()]
    ranks = gallery("ulysses").Ulysses(lengths[rank])
    x = torch.arange(2.0 * sum(lengths) * heads * 3).view(2, -1, heads, 3)
    mine = x.split(lengths, 1)[rank]
    there = ranks.to_heads(mine)
    return (
        ranks.lengths == lengths,
        torch.equal(there, x.split(ranks.shares(heads), 2)[rank]),
        torch.equal(ranks.to_positions(there, heads), mine),
    )


@pytest.mark.parametrize("heads", [1, 6, 7])
@pytest.mark.parametrize("size", LENGTHS)
def test_heads_for_positions_is_a_permutation(pool, size, heads):
    """Bit for bit there and back, uneven heads and lengths, ranks without any."""
    assert all(all(each) for each in pool.run(turned, heads, size=size))


def attended():
    rank, lengths, names = dist.get_rank(), LENGTHS[dist.get_world_size()], gallery("ulysses")
    ranks = names.Ulysses(lengths[rank])
    x = torch.randn(2, 8, 4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mine = x.detach().split(lengths, 1)[rank].clone().requires_grad_()
    names.whole(x, 2 * x, x.cos()).square().sum().backward()
    ranks.attention(mine, 2 * mine, mine.cos()).square().sum().backward()
    with pytest.raises(ValueError, match="9 positions"):
        ranks.to_heads(torch.zeros(2, 9, 4, 8))
    return torch.allclose(mine.grad, x.grad.split(lengths, 1)[rank], atol=1e-4)


def test_gradients_are_those_of_one_process(pool):
    assert pool.run(attended, size=3) == [True] * 3
