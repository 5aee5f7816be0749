"""Hybrid sharding, and the older FullyShardedDataParallel, on real ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import commpress
from commpress.errors import NonFiniteGradient
from fsdp_twin import Block, Net
from variants import seldom


def batches(steps, same=False):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 10 + (0 if same else dist.get_rank()))
        yield (
            torch.randint(13, (6,), generator=generator),
            torch.randint(7, (6,), generator=generator),
        )


def trained(model, steps=4, same=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches(steps, same):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def hybrid(codec, shards=None):
    """Native hybrid sharding against one dimension of the mesh with our average over the other;
    ``shards``: ours as well."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    models, losses, state = [], [], None
    for ours in (False, True):
        torch.manual_seed(0)
        model = Net()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["shard"] if ours else mesh)
        if ours and shards is not None:
            commpress.compress_fsdp(model, shards, shards, min_numel=0)
        if ours:
            state = commpress.compress_hsdp(model, mesh["replicate"], codec, min_numel=0)
        losses.append(trained(model))
        models.append({n: p.full_tensor().detach().clone() for n, p in model.named_parameters()})
    saved = state.state_dict()
    state.load_state_dict(saved)
    return losses, models, state.counters.as_dict(), len(saved["residuals"])


@pytest.mark.parametrize(
    ("codec", "shards"),
    [(codec, None) for codec in ("none", "sign", "powersgd-2")]
    + [("int4", "int8")]
    + [seldom("int8", None), seldom("topk-16", None), seldom("none", "none")],
)
def test_hybrid_sharding_compresses_the_replicate_dimension(pool, codec, shards):
    results = pool.run(hybrid, codec, shards, size=4)
    for losses, (native, ours), counters, residuals in results:
        for name in native:
            assert torch.equal(ours[name], results[0][1][1][name]), name  # replicas stay equal
            if codec == "none":
                torch.testing.assert_close(ours[name], native[name], atol=1e-6, rtol=1e-6)
            else:
                torch.testing.assert_close(ours[name], native[name], atol=0.15, rtol=0.2)
        if codec != "none":
            assert losses[0] != losses[1]
            assert counters["compressed_elements"] > 0
            assert residuals
            assert counters["wire_bytes"] < 0.5 * counters["logical_bytes"]


def two_dimensions():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    fully_shard(model, mesh=mesh)
    try:
        commpress.compress_fsdp(model)
    except commpress.CommpressError as error:
        return str(error)
    return "nothing"


def test_a_mesh_of_two_dimensions_is_refused_with_the_cure(pool):
    for said in pool.run(two_dimensions, size=2):
        assert "compress_hsdp(model, mesh['replicate'])" in said


# ---------------------------------------------------------------- the older class


def older(codec, strategy, same=False, dtype=torch.float32):
    torch.set_num_threads(1)
    losses, models, state = [], [], None
    for ours in (False, True):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            Net().to(dtype),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        if ours:
            state = commpress.FlatShardState(codec)
            model.register_comm_hook(state, commpress.compressed_reduce_scatter_hook)
        losses.append(trained(model, same=same))
        with FullyShardedDataParallel.summon_full_params(model):
            models.append({n: p.detach().float().clone() for n, p in model.named_parameters()})
    saved = state.state_dict()
    state.load_state_dict(saved)
    return losses, models, state.counters.as_dict(), len(saved["residuals"])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_the_older_class_with_a_hook(pool, codec, strategy):
    results = pool.run(older, codec, strategy, size=2)
    for losses, (plain, ours), counters, residuals in results:
        for name in plain:
            assert torch.equal(ours[name], results[0][1][1][name]), name
            if codec == "none":
                assert torch.equal(ours[name], plain[name]), name
            else:
                torch.testing.assert_close(ours[name], plain[name], atol=0.12, rtol=0.2)
        if codec != "none":
            assert losses[0] != losses[1]
            # one for each unit, or each row of it
            assert residuals == (3 if strategy == "NO_SHARD" else 6)
            assert counters["steps"] == 4
            assert 0 < counters["wire_bytes"] < 0.5 * counters["logical_bytes"]


# ---------------------------------------------------------------- not finite


def raising(kind):
    """Rank 1 has an infinite loss in the second step; whoever catches the error goes on."""
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = Net()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["shard"])
        commpress.compress_hsdp(model, mesh["replicate"], "int8", min_numel=0, on_nonfinite="raise")
    else:
        model = FullyShardedDataParallel(
            Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
        )
        state = commpress.FlatShardState("int8", on_nonfinite="raise")
        model.register_comm_hook(state, commpress.compressed_reduce_scatter_hook)
    said = []
    for step, (x, y) in enumerate(batches(4)):
        loss = nn.functional.cross_entropy(model(x), y) * (
            float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        )
        try:
            loss.backward()
        except NonFiniteGradient as error:
            said.append((step, str(error)))
        model.zero_grad()
    return said


@pytest.mark.parametrize("kind", ["hybrid", "older"])
def test_the_policy_raise_raises_on_every_rank_after_backward(pool, kind):
    for said in pool.run(raising, kind, size=4):
        ((step, words),) = said
        assert step == 1
        assert "No residual was changed" in words
