"""One rank trains with its optimizer in a store. Batches and learning rates depend on the step
alone, so that a run which goes on needs nothing but the store."""

from typing import Any

import torch

import commpress

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 411),
        torch.nn.Tanh(),
        torch.nn.Linear(411, 201),
        torch.nn.LayerNorm(201),
        torch.nn.Linear(201, 3),
    )


def loss_of(net: torch.nn.Module, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 31 + part)
    x, y = (
        torch.randn(8, 64, generator=generator),
        torch.randn(8, 3, generator=generator),
    )
    return (net(x) - y).square().mean()


def offloaded(
    net: torch.nn.Module, store: commpress.TieredStore, **more: Any
) -> commpress.Offloaded:
    options = {"chunk_mb": 0.032, **OPTIONS, **more}
    return commpress.Offloaded(net.parameters(), torch.optim.AdamW, store=store, **options)


def train(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    last: int,
) -> None:
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] * 0.95**step
        optimizer.zero_grad()
        for part in range(2):
            loss_of(net, step, part).backward()
        if net[0].weight.grad is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
