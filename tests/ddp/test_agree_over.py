"""Data and tensor parallelism together: columns that communicate apart skip together.

One shard of a weight gets NaN in one step. Every weight that both columns hold must stay the same
in every bit on all four ranks. ``test_meshes`` has the hook of DistributedDataParallel.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import NonFiniteGradient
from ranks import refused
from test_meshes import Net

BAD = 2


def split(mesh):
    torch.manual_seed(0)
    model = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _pre_dp_module_transform(model)  # DTensors become the plain tensors that DDP knows
    return model


def batch(mesh, step):
    generator = torch.Generator().manual_seed(100 * step + mesh["dp"].get_local_rank())
    return torch.randn(6, 16, generator=generator), torch.randn(6, 8, generator=generator)


def replicated(model):
    cut = ("up.weight", "up.bias", "down.weight")
    return {
        name: p.detach().clone() for name, p in model.named_parameters() if not name.endswith(cut)
    }


def columns(shape=(2, 2)):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- optimizers


def step_with(make, bad, shape, options):
    """Weights that all ranks hold after ten steps of our optimizer; NaN in one shard at step
    ``bad``."""
    mesh = columns(shape)
    model = split(mesh)
    options = {
        "process_group": mesh["dp"].get_group(),
        "agree_over": mesh,
        "lr": 1e-2,
        "betas": (0.9, 0.99),
    } | options
    # a forward puts others of the same memory in their places
    held, raised = dict(model.named_parameters()), []
    optimizer = make(held.values(), **options)
    for step in range(10):
        x, _ = batch(mesh, step)
        model(x).square().mean().backward()
        if step == bad and dist.get_rank() == 0:
            held["up.weight"].grad[0, 0] = float("nan")
        try:
            optimizer.step()
        except NonFiniteGradient:
            raised.append(step)
        optimizer.zero_grad()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    counters = optimizer.counters.as_dict()
    return replicated(model), raised, counters["skipped_steps"], optimizer.steps_done


def onebit(parameters, **options):
    return commpress.OneBitAdam(parameters, exact_steps=4, **options)


@pytest.mark.parametrize(
    ("bad", "shape", "options"), [(6, (2, 2), {"on_nonfinite": "raise"}), (6, (1, 2), {})]
)
def test_optimizers_skip_together(pool, bad, shape, options):
    """``test_meshes`` has every optimizer."""
    results = pool.run(step_with, onebit, bad, shape, options, size=shape[0] * shape[1])
    for weights, raised, skipped, done in results:
        assert same(weights, results[0][0])
        assert all(torch.isfinite(w).all() for w in weights.values())
        assert (raised, skipped, done) == ([bad] if options else [], 1, 9)


# ---------------------------------------------------------------- FSDP2


class Halves(torch.autograd.Function):
    """The sum over the columns in forward, the gradient as it is in backward: Megatron's
    row-parallel end."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Shared(nn.Module):
    """A weight that both columns hold, behind one of which each column holds a half."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.part, self.whole = nn.Linear(16, 32), nn.Linear(32, 8)
        with torch.no_grad():
            self.part.weight.mul_(1 + dist.get_rank(group))

    def forward(self, x):
        return self.whole(Halves.apply(self.part(x).tanh(), self.group))


def shard(overlap, on_nonfinite):
    mesh = columns()
    model = Shared(mesh["tp"].get_group())
    for module in (model.part, model.whole, model):
        fully_shard(module, mesh=mesh["dp"])
    state = commpress.compress_fsdp(
        model,
        "int8",
        None,
        min_numel=1,
        overlap=overlap,
        on_nonfinite=on_nonfinite,
        agree_over=mesh,
    )
    raised = steps_that_raise(model, mesh, "inf")
    return model.whole.weight.full_tensor().detach(), raised, state.gradients.skipped_buckets


@pytest.mark.parametrize(
    ("overlap", "on_nonfinite"), [(True, "skip"), (False, "skip"), (True, "raise")]
)
def test_sharded_units_skip_together(pool, overlap, on_nonfinite):
    results = pool.run(shard, overlap, on_nonfinite, size=4)
    for weight, raised, skipped in results:
        assert torch.equal(weight, results[0][0])
        assert torch.isfinite(weight).all()
        assert (raised, skipped) == ([BAD] if on_nonfinite == "raise" else [], 2)


def steps_that_raise(model, mesh, bad):
    """Of some steps with SGD, in one of which the loss of rank 0 is ``bad``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    raised = []
    for step in range(5):
        x, y = batch(mesh, step)
        loss = (model(x) - y).square().mean()
        if step == BAD and dist.get_rank() == 0:
            loss = loss * float(bad)
        try:
            loss.backward()
            optimizer.step()
        except NonFiniteGradient:
            raised.append(step)
        optimizer.zero_grad()
    return raised


def hybrid(on_nonfinite, agree):
    """Shards of one rank each in two columns of two replicas, the average over which is ours."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "shard", "tp"))
    model = Shared(mesh["tp"].get_group())
    for module in (model.part, model.whole, model):
        fully_shard(module, mesh=mesh["shard"])
    over = {"agree_over": mesh} if agree else {}
    state = commpress.compress_hsdp(
        model, mesh["dp"], "sign", min_numel=1, on_nonfinite=on_nonfinite, **over
    )
    raised = steps_that_raise(model, mesh, "nan")
    residuals = [kept for key, *kept in state.exchanges.residuals.places() if "whole" in key[0]]
    return (
        model.whole.weight.full_tensor().detach(),
        raised,
        state.counters.skipped_buckets,
        residuals,
    )


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_replicas_of_shards_skip_together(pool, on_nonfinite):
    results = pool.run(hybrid, on_nonfinite, True, size=4)
    for weight, raised, skipped, residuals in results:
        assert torch.equal(weight, results[0][0])
        assert torch.isfinite(weight).all()
        assert (raised, skipped) == ([BAD] if on_nonfinite == "raise" else [], 2)
        assert residuals
        assert all(torch.isfinite(kept).all() for every in residuals for kept in every)


def test_replicas_of_shards_that_do_not_agree_drift_apart(pool):
    """The test above would see it."""
    results = pool.run(hybrid, "skip", False, size=4)
    assert any(not torch.equal(weight, results[0][0]) for weight, *_ in results)


# ---------------------------------------------------------------- refused


def refusals():
    mesh = columns()
    group = mesh["dp"].get_group()
    ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    weights = [nn.Parameter(torch.ones(4))]
    cut = fully_shard(
        nn.Linear(4, 4),
        mesh=init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "shard", "tp"))["shard"],
    )
    layers = commpress.PerLayer("int4")
    calls = {
        "type": lambda: commpress.compress(ddp, agree_over="tp"),
        "ranks": lambda: commpress.compress(ddp, agree_over=mesh["tp"]),
        "replicas": lambda: commpress.compress_hsdp(cut, group, agree_over=mesh["tp"]),
        "auto": lambda: commpress.compress(ddp, "auto", agree_over=mesh),
        "layers": lambda: commpress.compress(ddp, layers, agree_over=mesh),
        "shards": lambda: commpress.compress_hsdp(cut, group, layers, agree_over=mesh),
        "freeze": lambda: commpress.OneBitAdam(weights, process_group=group, agree_over=mesh),
        "norm": lambda: onebit(weights, process_group=group, agree_over=mesh, max_grad_norm=1.0),
    }
    return refused(calls)


def test_what_cannot_be_agreed_on_is_refused_on_all_ranks(pool):
    for said in pool.run(refusals, size=4):
        assert "agree_over is 'tp', expected a process group or a DeviceMesh" in said["type"]
        for name in ("ranks", "replicas"):
            assert "but gradients are exchanged with ranks" in said[name]
        assert "codec is 'auto'" in said["auto"]
        for name in ("layers", "shards"):
            assert "agree_over, and it adds up errors over the ranks that average" in said[name]
        assert "Pass a number of steps" in said["freeze"]
        assert "Leave max_grad_norm out" in said["norm"]
