"""Ways of training that no other step has run: two ranks on the card, by Gloo and pinned memory,
each beside the same on the processor."""

from collections.abc import Callable
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli.ranks import LocalRanks
from commpress.cli.ranks import Report as Told
from gpu.machine import Card, Machine, Twin
from gpu.runner import Report

STEPS, RATE = 6, 2.0**-9
# of a rate, in the mean over all elements: where a sum near zero rounds to another sign, one
# element moves another way
NEAR = 0.1
Way = Callable[[nn.Module, ExitStack], Any]


def hooked(codec: Any) -> Way:
    def way(model: nn.Module, _: ExitStack) -> Any:
        wrapped = DistributedDataParallel(model)
        commpress.compress(wrapped, codec, min_numel=0)
        return wrapped, adamw(model)

    return way


def sharded(*codecs: Any, **options: Any) -> Way:
    def way(model: nn.Module, _: ExitStack) -> Any:
        fully_shard(model)
        commpress.compress_fsdp(model, *codecs, min_numel=0, **options)
        return model, adamw(model)

    return way


def optimized(kind: Callable[..., Any], **options: Any) -> Way:
    return lambda model, _: (model, kind(model.parameters(), lr=RATE, **options))


def local(**options: Any) -> Way:
    return lambda model, _: (
        model,
        commpress.LocalUpdates(adamw(model), **options),
    )


def partitioned(**options: Any) -> Way:
    return optimized(commpress.Partitioned, optimizer=torch.optim.AdamW, **options)


def kept(model: nn.Module, stack: ExitStack) -> Any:
    """Partitioned, with its state in a store."""
    folder = stack.enter_context(TemporaryDirectory(prefix="commpress-gpu-"))
    store = commpress.TieredStore.open(f"{folder}/{dist.get_rank()}", host="64MiB")
    return partitioned(codec="int8", store=stack.enter_context(store))(model, stack)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


WAYS: dict[str, Way] = {
    "powersgd-4": hooked("powersgd-4"),
    "powersgd-4+fp8": hooked("powersgd-4+fp8"),
    "PerLayer": hooked(commpress.PerLayer("int4", every=2)),
    "OneBitAdam": optimized(commpress.OneBitAdam, exact_steps=2, min_numel=0),
    "ZeroOneAdam": optimized(commpress.ZeroOneAdam, min_numel=0),
    "OneBitLamb": optimized(commpress.OneBitLamb, exact_steps=2, min_numel=0),
    "Muon": optimized(commpress.Muon),
    "LocalUpdates": local(every=2, codec="int8"),
    "hidden rounds": local(every=2, codec="fp8", overlap=(1, 0.5)),
    "Partitioned": partitioned(codec="int8"),
    "Partitioned, in a store": kept,
    "FSDP2": sharded("fp8", "int8"),
    "FSDP2, exact weights": sharded("int8", weights="exact"),
}

APART = ("hidden rounds",)  # ranks go on from mixtures of their own


def features(machine: Machine, report: Report) -> None:
    """Optimizers, local updates, ZeRO and FSDP2 of two ranks, on the card and on the processor."""
    for name in WAYS:
        with report.line(name), LocalRanks(2, forked=True) as pool:
            apart, unequal = pool.call(_both, (machine.twin, name), _nothing)
            what = f"{name}: weights apart from the processor's"
            report(what, apart, "rates", limit=NEAR, bound="most")
            if name not in APART:
                report(
                    f"{name}: elements that differ between ranks", unequal, limit=0, bound="most"
                )


def _nothing(*_: object) -> None:
    """Ranks report at their end."""


def _both(rank: int, size: int, task: tuple[bool, str], told: Told) -> tuple[float, float]:
    twin, name = task
    machine: Machine = Twin() if twin else Card()
    here, there = (
        _trained(WAYS[name], device, rank) for device in (machine.device, torch.device("cpu"))
    )
    least, most = here.clone(), here.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float((here - there).abs().mean()) / RATE, float((least != most).sum())


def _trained(way: Way, device: torch.device, rank: int) -> torch.Tensor:
    """Weights on the host after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
    draw = torch.Generator().manual_seed(1 + rank)
    with ExitStack() as stack:
        called, inner = way(model, stack)
        for _ in range(STEPS):
            x = torch.randn(16, 64, generator=draw).to(device)
            (called(x) - x.roll(1, 1)).square().mean().backward()
            inner.step()
            inner.zero_grad()
        for end in ("finish", "synchronize", "close"):
            if callable(call := getattr(inner, end, None)):
                call()
        return torch.cat([_whole(p).flatten().cpu() for p in model.parameters()])


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
