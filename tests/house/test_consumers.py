"""Reinforcement learning on uneven ranks, as an example has it: it learns, and ranks stay alike."""

import runpy
from itertools import product

import pytest
import torch
import torch.distributed as dist

import sources
from gallery import alike, flat


def example(name):
    return runpy.run_path(str(sources.ROOT / "examples" / f"{name}.py"))


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 0.25], [0.31, 1.9, 0.77], [1.0, 1e-9, 1.0]])
def test_no_division_of_environments_ends_earlier(speeds):
    """Against all of them that leave no rank without one."""
    total = 10

    def ends(division):
        return max(n / speed for n, speed in zip(division, speeds, strict=True))

    every = [each for each in product(range(1, total), repeat=3) if sum(each) == total]
    found = example("many_environments")["shares"](total, speeds)
    assert sum(found) == total
    assert ends(found) == pytest.approx(min(map(ends, every)))


def carts(speeds):
    torch.set_num_threads(1)
    rewards, policy, counts, ratio = example("many_environments")["train"](60, speeds=speeds)
    return rewards, counts, ratio, alike(flat(policy))


def test_many_environments_on_uneven_ranks_earn_more_and_stay_alike(pool):
    for rewards, counts, ratio, same in pool.run(carts, [1.0, 1.0, 0.25], size=3):
        assert same
        assert sorted(counts) == sorted([43, 43, 10]) or counts[2] < counts[0] / 3
        assert sum(counts) == 96
        assert sum(rewards[-5:]) / 5 > 0.7 * sum(rewards[:5]) / 5, "rewards are below zero"
        assert ratio > 3


def weighted(_):
    """Gradients of two uneven ranks, weighted as the example does, and of one process with all of
    it."""
    torch.manual_seed(0)
    model, data = torch.nn.Linear(3, 1), torch.randn(8, 3)
    rank, size, counts = dist.get_rank(), dist.get_world_size(), [6, 2]
    part = data.split(counts)[rank]
    (model(part).square().mean() * counts[rank] * size / 8).backward()
    mean = model.weight.grad.clone()
    dist.all_reduce(mean)
    model.zero_grad()
    model(data).square().mean().backward()
    return torch.allclose(mean / size, model.weight.grad)


def test_weights_of_uneven_ranks_make_the_gradient_of_all_environments(pool):
    assert pool.run(weighted, None, size=2) == [True, True]
