"""Local updates of tensor parallelism: each rank exchanges its shards, and a replica counts with
all of them or not at all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commpress
from local_twin import HiddenOf, options_of

STEPS = 8


class Net(nn.Module):
    """Two matrices to be cut, and a bias that every rank has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.up(x).relu())


def train(net, local, replica, *, bad=None):
    """Steps on a replica's own data; in step ``bad`` a gradient of the last rank is NaN."""
    for step in range(STEPS):
        torch.manual_seed(100 * replica + step)
        net(torch.randn(4, 16)).square().mean().backward()
        if step == bad and dist.get_rank() == dist.get_world_size() - 1:
            net.up.weight.grad.to_local()[0, 0] = float("nan")
        local.step()
        local.zero_grad()
    local.drain()


def whole(p):
    return p.full_tensor().detach().clone() if hasattr(p, "full_tensor") else p.detach().clone()


def one(options):
    """A plain replica on each of two ranks."""
    net = Net()
    local = commpress.LocalUpdates(
        torch.optim.SGD(net.parameters(), lr=0.05), codec=None, **options
    )
    train(net, local, dist.get_rank())
    return [whole(p) for p in net.parameters()]


def cut(options, bad=None):
    """Two replicas of two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(
        Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    group = mesh["dp"].get_group()
    local = commpress.LocalUpdates(inner, process_group=group, **options_of(**options))
    train(net, local, mesh["dp"].get_local_rank(), bad=bad)
    bias = net.down.bias.to_local().detach().clone()
    return [whole(p) for p in net.parameters()], bias, local.counters.dropped


@pytest.mark.parametrize(
    "options",
    [{"every": 3}, {"every": 3, "overlap": 1, "fragments": 2}, {"every": 2, "exact_steps": 3}],
    ids=str,
)
def test_cut_replicas_train_as_whole_ones(pool, options):
    twin = pool.run(one, options, size=2)[0]
    for weights, _, dropped in pool.run(cut, {"codec": None} | options, size=4):
        assert dropped == 0
        for found, expected in zip(weights, twin, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"every": 3}, {"every": 3, "overlap": 1}, {"every": 2, "exact_steps": 6}], ids=str
)
def test_a_replica_that_is_not_finite_in_one_shard_is_left_out_with_all(pool, options):
    """In the last step of a round; else the ranks with its other shard take its part of the bias
    that all of them have."""
    results = pool.run(cut, {"codec": "int8", "min_numel": 8} | options, 5, size=4)
    assert len({dropped for *_, dropped in results}) == 1
    assert results[0][2] >= 1
    for weights, bias, _ in results:
        torch.testing.assert_close(bias, results[0][1], rtol=0, atol=0)
        for found, expected in zip(weights, results[0][0], strict=True):
            assert torch.isfinite(found).all()
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def adam_on_replicas(mesh=None):
    """Train in hidden rounds; return weights, factors of the learning rate, and the bias here."""
    net, group = Net(), None
    if mesh is not None:
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))
        net = parallelize_module(
            net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        group = mesh["dp"].get_group()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    local = commpress.LocalUpdates(inner, process_group=group, every=HiddenOf(steps=1), codec=None)
    replica, gains = dist.get_rank() if mesh is None else mesh["dp"].get_local_rank(), []
    for step in range(STEPS):
        torch.manual_seed(100 * replica + step)
        net(torch.randn(4, 16)).square().mean().backward()
        local.step()
        local.zero_grad()
        gains.append(local.counters.gain)
    local.drain()
    bias = net.down.bias
    bias = bias.to_local() if hasattr(bias, "to_local") else bias
    return [whole(p) for p in net.parameters()], gains, bias.detach().clone()


def test_steps_of_cut_replicas_are_as_long_as_those_of_whole_ones(pool):
    """The spread is that of all shards: replicated parameters would else drift apart."""
    twin, factors, _ = pool.run(adam_on_replicas, size=2)[0]
    assert factors[-1] > 1.005
    every = pool.run(adam_on_replicas, (2, 2), size=4)
    for weights, gains, bias in every:
        assert gains == every[0][1]
        assert gains == pytest.approx(factors, rel=0.01)
        assert torch.equal(bias, every[0][2])
        for found, expected in zip(weights, twin, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
