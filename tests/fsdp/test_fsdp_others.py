"""Hybrid sharding on real ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.errors import NonFiniteGradient
from fsdp_twin import Net
from ranks import caught
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
    return losses, models, state.counters.as_dict(), len(state.state_dict()["residuals"])


@pytest.mark.parametrize(
    ("codec", "shards"),
    [("none", None), ("int4", "int8"), seldom("none", "none")]
    + [seldom(codec, None) for codec in ("powersgd-2", "sign", "int8", "topk-16")],
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


# ---------------------------------------------------------------- not finite


def raised_by(model):
    """Steps and errors of a run in which rank 1 has an infinite loss in the second step; whoever
    catches the error goes on."""
    said = []
    for step, (x, y) in enumerate(batches(4)):
        infinite = step == 1 and dist.get_rank() == 1
        loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if infinite else 1.0)
        if isinstance(error := caught(loss.backward), NonFiniteGradient):
            said.append((step, "No residual of theirs was changed" in str(error)))
        model.zero_grad()
    return said


def raising():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["shard"])
    commpress.compress_hsdp(model, mesh["replicate"], "int8", min_numel=0, on_nonfinite="raise")
    return raised_by(model)


def test_the_policy_raise_raises_on_every_rank_after_backward(pool):
    assert pool.run(raising, size=4) == [[(1, True)]] * 4
