"""Collectives and training runs over a process group of any backend, for tests that compare
backends bit for bit."""

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import commpress.backend
from commpress.torch_private import all_gather_single, reduce_scatter_single

WIDTH = 32


def as_world(
    backend: str,
    file: str,
    function: Callable[..., Any],
    *args: Any,
    pg_options: Any = None,
    seconds: float = 60,
) -> Any:
    """``function(*args)`` with a default group of ``backend`` in place of the pool's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # Gloo fails on a rank that still connects while another leaves
    dist.destroy_process_group()
    assert "COMMPRESS" in dir(dist.Backend), commpress.backend
    dist.init_process_group(
        backend,
        init_method=f"file://{file}-{backend.replace(':', '-')}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        pg_options=pg_options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about its renamed functions
        return function(*args)


class Numbers:
    """Random tensors that differ between ranks and calls, and are the same on every backend."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(17 + dist.get_rank())

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * 100).to(dtype)


def every_collective() -> list[torch.Tensor]:
    """Every collective, point-to-point and coalesced call of torch.distributed; what each rank
    holds afterwards."""
    made, results = Numbers(), []
    rank, size = dist.get_rank(), dist.get_world_size()

    def keep(*tensors: torch.Tensor) -> None:
        results.extend(t.clone() for t in tensors)

    def finish(work: Any) -> None:
        assert work.get_future().wait() is not None
        work.wait()

    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            keep(x := made(7, 3, dtype=dtype))
            dist.all_reduce(x, op)
            keep(x)
    x = made(1000)
    finish(dist.all_reduce(x, async_op=True))
    y = made(9)
    works = [dist.all_reduce(t, async_op=True) for t in (x, y)]
    for work in reversed(works):
        work.wait()
    keep(x, y)
    x = made(3, 5)
    dist.broadcast(x, size - 1)
    dist.reduce(y, 0)
    keep(x, *([y] if rank == 0 else []))  # only the root's is defined
    rows = [torch.empty(4) for _ in range(size)]
    dist.all_gather(rows, made(4))
    keep(*rows)
    out = torch.empty(size * 6)
    finish(all_gather_single(out, made(6), async_op=True))
    keep(out)
    dist.gather(made(4), rows if rank == 1 else None, dst=1)
    keep(*rows)
    dist.scatter(rows[0], [made(4) for _ in range(size)] if rank == 0 else None, src=0)
    dist.reduce_scatter(rows[1], [made(4) for _ in range(size)])
    keep(*rows)
    out = torch.empty(5)
    reduce_scatter_single(out, made(5 * size))
    keep(out)
    with _coalescing_manager():
        for t in (x := made(6), y := made(11)):
            dist.all_reduce(t)
    keep(x, y)
    pairs = [(torch.empty(size * n), made(n)) for n in (2, 5)]
    with _coalescing_manager(async_ops=True) as together:
        for out, inp in pairs:
            all_gather_single(out, inp)
    together.wait()
    keep(*(out for out, _ in pairs))
    # symmetric: what i gives to j, j gives to i
    gives = [(rank + peer) % 3 for peer in range(size)]
    out = torch.empty(sum(gives), 2)
    dist.all_to_all_single(out, made(sum(gives), 2), gives, gives)
    keep(out)
    out = torch.empty(size, 3)
    dist.all_to_all_single(out, made(size, 3))
    keep(out)
    dist.barrier()
    for tag in (0, 5):
        out = torch.empty(8)
        sending = dist.isend(made(8), (rank + 1) % size, tag=tag)
        receiving = dist.irecv(out, (rank - 1) % size, tag=tag)
        receiving.wait()
        sending.wait()
        keep(out)
    to, fro = made(50), torch.empty(50)
    operations = [
        dist.P2POp(dist.isend, to, (rank + 1) % size),
        dist.P2POp(dist.irecv, fro, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    keep(fro)
    keep(*from_anyone(made, rank, size))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    keep(torch.tensor([o["rank"] for o in objects]))  # type: ignore[index]
    group = dist.group.WORLD
    keep(
        functional.all_reduce(made(4), "sum", group),
        functional.all_gather_tensor(made(2, 2), 0, group),
    )
    keep(
        functional.reduce_scatter_tensor(made(size * 2), "sum", 0, group),
        functional.broadcast(made(3), 1, group),
    )
    keep(functional.all_to_all_single(made(size), None, None, group))
    return results


def from_anyone(made: Numbers, rank: int, size: int) -> list[torch.Tensor]:
    if rank > 0:
        dist.send(made(3), 0)
        return []
    found = {}
    for _ in range(size - 1):
        out = torch.empty(3)
        found[dist.recv(out)] = out
    assert sorted(found) == list(range(1, size))
    return [found[r] for r in sorted(found)]


# ---------------------------------------------------------------- training


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)
    )


def train(model: nn.Module, steps: int = 4) -> list[torch.Tensor]:
    """Losses and, at every step, the norm by which gradients are clipped."""
    made, seen = Numbers(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = model(made(16, 8) / 100).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen += [loss.detach(), whole(norm.detach())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


def train_ddp() -> list[torch.Tensor]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.003)  # type: ignore[arg-type]
    return train(model) + [p.detach().clone() for p in model.parameters()]


def train_fsdp1() -> list[torch.Tensor]:
    model = FullyShardedDataParallel(
        net(),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
    )
    seen = train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return seen + [p.detach().clone() for p in model.parameters()]


def train_fsdp2(folder: str) -> list[torch.Tensor]:
    """On a 2-D mesh where there are four ranks; then through a distributed checkpoint and back."""
    size = dist.get_world_size()
    shape, names = ((2, 2), ("replicate", "shard")) if size == 4 else ((size,), ("shard",))
    model = net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model[0], model[2], model[4]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seen = train(model)
    saved = os.path.join(folder, dist.get_backend())
    checkpoint.save(model.state_dict(), checkpoint_id=saved)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    loaded = model.state_dict()
    checkpoint.load(loaded, checkpoint_id=saved)
    return seen + [whole(p).detach().clone() for p in loaded.values()]


def use_dtensor() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = Numbers()
    sharded = distribute_tensor(made(12, 6), mesh, [Shard(0)])
    moved = sharded.redistribute(mesh, [Shard(1)])
    product = sharded @ distribute_tensor(made(6, 4), mesh, [Replicate()])
    return [
        sharded.full_tensor(),
        moved.to_local().clone(),
        product.full_tensor(),
        whole(product.sum()),
    ]
