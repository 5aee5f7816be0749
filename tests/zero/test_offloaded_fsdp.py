"""FSDP2 models whose optimizer lies in stores, each rank's own: bit for bit what the optimizer in
memory does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import commpress
from commpress.errors import InvalidArgument, StateMismatch
from fsdp_twin import Plan, shard
from small_store import open_store
from stream_twin import OPTIONS

PLAN = Plan(compressed=False)
LIMIT = 0.05


def offloaded(model, store, **more: Any) -> commpress.Offloaded:
    options = {"chunk_mb": 0.004, "max_grad_norm": LIMIT, **OPTIONS, **more}
    return commpress.Offloaded(model.parameters(), torch.optim.AdamW, store=store, **options)


def train(model, optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        for part in range(2):
            generator = torch.Generator().manual_seed((step * 10 + part) * 10 + dist.get_rank())
            x, y = (
                torch.randint(13, (6,), generator=generator),
                torch.randint(7, (6,), generator=generator),
            )
            loss = torch.nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
        losses.append(loss.item())
        if not isinstance(optimizer, commpress.Offloaded):
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def clip(model) -> None:
    """Clip by a norm that is summed in double."""
    gradients = [p.grad.to_local() for p in model.parameters()]
    total = torch.stack([g.double().square().sum() for g in gradients]).sum()
    dist.all_reduce(total)
    factor = torch.clamp(LIMIT / (total.sqrt().float() + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def whole(model) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def in_memory(plan: Plan, steps: int):
    model = shard(plan)
    losses = train(model, torch.optim.AdamW(model.parameters(), **OPTIONS), 0, steps)
    return losses, whole(model)


def in_stores(plan: Plan, folder: str, steps: int, more: dict[str, Any]):
    """Half of the steps, a commit, one step that is lost, and the rest in stores that were opened
    again."""
    path, half = f"{folder}/{dist.get_rank()}", steps // 2
    model = shard(plan)
    with open_store(path, host="2MiB") as store:
        optimizer = offloaded(model, store, **more)
        losses = train(model, optimizer, 0, half)
        optimizer.commit()
        train(model, optimizer, half, half + 1)
        here = sum(c.numel for c in optimizer.chunks)
    model = shard(plan)
    with open_store(path, host="2MiB") as store:
        optimizer = offloaded(model, store, **more)
        losses += train(model, optimizer, half, steps)
        total = sum(p.numel() for p in model.parameters())
        return losses, whole(model), here / total


@pytest.mark.parametrize(
    ("plan", "more", "size"),
    [
        (PLAN, {"gradients": "store"}, 2),
        (
            Plan(
                compressed=False, dtype=torch.bfloat16, reduce_dtype=torch.float32, recompute=True
            ),
            {},
            3,
        ),
    ],
    ids=["store", "mixed precision"],
)
def test_equals_the_optimizer_in_memory(pool, tmp_path, plan, more, size):
    wanted = pool.run(in_memory, plan, 8, size=size)
    found = pool.run(in_stores, plan, str(tmp_path), 8, more, size=size)
    for (losses, values), (ours, others, part) in zip(wanted, found, strict=True):
        assert ours == losses
        assert all(torch.equal(values[name], other) for name, other in others.items())
        assert part < 1 / size + 0.1


def saved(folder: str) -> dict[str, torch.Tensor]:
    model = shard(PLAN)
    with open_store(f"{folder}/{dist.get_rank()}", host="2MiB") as store:
        optimizer = offloaded(model, store)
        train(model, optimizer, 0, 3)
        assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
        first = next(iter(optimizer.state))
        whole_ones = {key: torch.zeros(first.shape) for key in ("exp_avg", "exp_avg_sq")}
        with pytest.raises(StateMismatch, match="exp_avg"):
            optimizer.state[first] = whole_ones | {"step": torch.tensor(1.0)}
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=f"{folder}/saved")
        return {
            name: optimizer.state[p]["exp_avg"].full_tensor()
            for name, p in model.named_parameters()
        }


def loaded(folder: str, kind: str) -> dict[str, torch.Tensor]:
    """At another world size, by an offloaded optimizer or torch's own."""
    model = shard(PLAN)
    with open_store(f"{folder}/{kind}{dist.get_rank()}", host="2MiB") as store:
        plain = torch.optim.AdamW(model.parameters(), **OPTIONS)
        optimizer = offloaded(model, store) if kind == "offloaded" else plain
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/saved")
        set_optimizer_state_dict(model, optimizer, state)
        assert {float(one["step"]) for one in optimizer.state.values()} == {3.0}
        return {
            name: optimizer.state[p]["exp_avg"].full_tensor()
            for name, p in model.named_parameters()
        }


def test_a_distributed_checkpoint_at_another_world_size(pool, tmp_path):
    wanted = pool.run(saved, str(tmp_path), size=2)[0]
    for kind in ("offloaded", "plain"):
        for found in pool.run(loaded, str(tmp_path), kind, size=3):
            assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def mixed(folder: str) -> None:
    parameters = [*shard(PLAN).parameters(), *torch.nn.Linear(3, 3).parameters()]
    with (
        open_store(f"{folder}/{dist.get_rank()}") as store,
        pytest.raises(InvalidArgument, match="max_grad_norm"),
    ):
        commpress.Offloaded(parameters, torch.optim.AdamW, store=store, max_grad_norm=1.0, lr=1e-3)


def test_a_norm_of_differently_cut_parameters_is_refused(pool, tmp_path):
    pool.run(mixed, str(tmp_path), size=2)


def cut_twice(folder):
    """Weights after a clipped step, in a store, on 2 × 2 ranks under tensor parallelism; and of the
    whole by torch."""
    mesh, ends = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    for cut in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 32, bias=False)
        if cut:  # the second cut of its rows: a _StridedShard
            parallelize_module(model, mesh["tp"], ColwiseParallel())
            fully_shard(model, mesh=mesh["dp"])
        with open_store(folder / f"{dist.get_rank()}-{cut}", host="2MiB") as store:
            options = {"store": store, "max_grad_norm": LIMIT, "chunk_mb": 0.004, "lr": 1.0}
            optimizer = commpress.Offloaded(model.parameters(), torch.optim.SGD, **options)
            model(
                torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
            ).square().mean().backward()
            optimizer.step()
        ends.append((model.weight.full_tensor() if cut else model.weight).detach().clone())
    return ends


def test_the_norm_of_what_is_cut_over_both_dimensions_of_a_mesh(pool, tmp_path):
    for found, whole in pool.run(cut_twice, tmp_path, size=4):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)


def halved_on_the_way(folder, cut):
    """Weights in bfloat16 after three steps, between which somebody else halves them; ``cut``: they
    are DTensors."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
    if cut:
        parallelize_module(model, init_device_mesh("cpu", (1,)), ColwiseParallel())
    with open_store(folder / f"{cut}", host="2MiB") as store:
        optimizer = commpress.Offloaded(model.parameters(), torch.optim.AdamW, lr=1e-2, store=store)
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with torch.no_grad():
                    model.weight.mul_(0.5)
    return (model.weight.to_local() if cut else model.weight).detach().float()


def test_what_others_write_into_a_dtensor_is_taken_up(pool, tmp_path):
    """torch counts writes of the DTensor, not of its shard."""
    ((plain,), (cut,)) = (
        pool.run(halved_on_the_way, tmp_path, cut, size=1) for cut in (False, True)
    )
    torch.testing.assert_close(cut, plain, rtol=0, atol=0)
