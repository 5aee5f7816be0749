"""A training run of any kind under commpress.elastic, as one process of several: what is trained,
and how, by name."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import commpress.backend
from gallery import gallery

SAMPLES, BATCH = 4000, 4
Made = tuple[Callable[..., Any], dict[str, Any]]


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = nn.BatchNorm1d(64) if norm else nn.Tanh()
    return nn.Sequential(
        nn.Linear(16, 64), middle, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def stepping(model: nn.Module, optimizer: Any, schedule: Any = None) -> Callable[[Any], float]:
    def train_step(batch: Any) -> float:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return train_step


def hook(codec: str = "sign", *, norm: bool = False) -> Made:
    ddp = DistributedDataParallel(net(norm=norm), static_graph=norm)
    commpress.compress(ddp, codec)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    return stepping(ddp, optimizer, schedule), {
        "model": ddp,
        "optimizer": optimizer,
        "schedule": schedule,
    }


def plain() -> Made:
    """The replica has no name in the state."""
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    return stepping(ddp, optimizer), {"model": ddp.module, "optimizer": optimizer}


def scaled() -> Made:
    ddp, scaler = DistributedDataParallel(net()), torch.amp.GradScaler("cpu", growth_interval=20)
    commpress.compress(ddp, "int8", grad_scaler=scaler)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    def train_step(batch: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ddp, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return float(loss.detach())

    return train_step, {"model": ddp, "optimizer": optimizer, "scaler": scaler}


def accumulated() -> Made:
    train_step, state = hook("int8")
    ddp, optimizer = state["model"], state["optimizer"]

    def all_of_them(batches: Any) -> float:
        for batch in batches[:-1]:
            with ddp.no_sync():
                (loss_of(ddp, batch) / len(batches)).backward()
        return float(train_step(batches[-1]))

    del optimizer
    return all_of_them, state


def compressed(kind: str) -> Made:
    model = net()
    cls = {"onebit": commpress.OneBitAdam, "zero-one": commpress.ZeroOneAdam}[kind]
    options = {"exact_steps": 30} if kind == "onebit" else {}
    optimizer = cls(model.named_parameters(), lr=1e-3, **options)
    return stepping(model, optimizer), {"model": model, "optimizer": optimizer}


def toy() -> Made:
    """An optimizer of the gallery, which says nothing of other ranks."""
    model = net()
    optimizer = gallery("ef_momentum").EFMomentum(model.parameters(), lr=1e-3, min_numel=0)
    return stepping(model, optimizer), {"model": model, "optimizer": optimizer}


def overlapped() -> Made:
    ddp = DistributedDataParallel(net())
    optimizer = commpress.OneBitAdam(ddp.module.named_parameters(), lr=1e-3, exact_steps=30)
    commpress.overlap(ddp, optimizer)
    return stepping(ddp, optimizer), {"model": ddp, "optimizer": optimizer}


def local() -> Made:
    model = net()
    optimizer = commpress.LocalUpdates(torch.optim.AdamW(model.parameters(), lr=1e-3), every=5)
    return stepping(model, optimizer), {"model": model, "optimizer": optimizer}


def fsdp() -> Made:
    model = net()
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    commpress.compress_fsdp(model, codec="int8", weights="none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return stepping(model, optimizer), {"model": model, "optimizer": optimizer}


def divided(kind: str) -> Made:
    model = net()
    if kind == "sharded":
        optimizer: Any = commpress.ShardedOneBitAdam(
            model.named_parameters(), lr=1e-3, exact_steps=30
        )
    else:
        optimizer = commpress.Partitioned(
            model.named_parameters(), torch.optim.AdamW, lr=1e-3, codec="int8"
        )
    return stepping(model, optimizer), {"model": model, "optimizer": optimizer}


WHOLE = {
    "hook": hook,
    "low-rank": lambda: hook("powersgd-2"),
    "norm": lambda: hook("int8", norm=True),
    "plain": plain,
    "scaled": scaled,
    "accumulated": accumulated,
    "onebit": lambda: compressed("onebit"),
    "zero-one": lambda: compressed("zero-one"),
    "overlap": overlapped,
    "local": local,
    "toy": toy,
}
DIVIDED = {
    "fsdp": fsdp,
    "sharded": lambda: divided("sharded"),
    "partitioned": lambda: divided("partitioned"),
}


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 16, generator=draws)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def run_of(
    kind: str,
    *,
    workers: int = 0,
    before: Callable[[int], object] = lambda step: None,
    **options: Any,
) -> Any:
    """The loop of this process, over the default group; ``before`` is called in each step, with the
    steps committed so far."""
    dataset, times = data(), 3 if kind == "accumulated" else 1
    sampler = commpress.ElasticSampler(dataset, BATCH * times, seed=3)
    loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers)
    run: Any = None

    def watched(made: Made) -> Made:
        train_step, state = made

        def step(batch: Any) -> Any:
            if run is not None:
                before(run.step)
            return train_step(batch)

        return step, state

    if kind in DIVIDED:
        run = commpress.elastic(build=lambda: watched(DIVIDED[kind]()), data=loader, **options)
    else:
        run = commpress.elastic(*watched(WHOLE[kind]()), data=loader, **options)
    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*WHOLE, *DIVIDED])
    parser.add_argument("--join")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--snapshots")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    commpress.init_process_group("commpress")
    snapshots = (
        commpress.Snapshots(options.snapshots, every=options.every) if options.snapshots else None
    )
    run = run_of(
        options.kind,
        workers=options.workers,
        before=lambda step: time.sleep(options.pace),
        steps=options.steps,
        join=options.join,
        snapshots=snapshots,
    )
    if options.join is None:
        print(f"join with --join {run.contact}", flush=True)
    losses = list(run)
    print(f"{losses[0]:.3f} {losses[-1]:.3f}; {run.counters.summary()}")
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
