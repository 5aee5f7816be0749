"""Models trained by ``Partitioned``, by ``Offloaded`` and streamed, beside their plain twins."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commpress

WIDTH = 40


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.middle = nn.Sequential(
            nn.Linear(WIDTH, 33), nn.LayerNorm(33), nn.Linear(33, WIDTH, bias=False)
        )
        self.unused = nn.Parameter(torch.zeros(5))
        self.head = nn.Linear(WIDTH, 19)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.frozen(self.tokens(x))
        return self.head(h + self.middle(h).tanh())


@dataclass(frozen=True)
class Plan:
    steps: int = 6
    accumulate: int = 1
    max_norm: float = 0.0
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1})
    partitioned: dict[str, Any] = field(default_factory=lambda: {"bucket_mb": 0.004})
    dtype: torch.dtype = torch.float32
    decay: float = 0.9  # of the learning rate in every step
    sync_every: bool = False  # reduce every backward, not only the last of a step
    scale: float = 0.0  # a GradScaler's first scale
    bad: tuple[int, ...] = ()  # steps at which the last rank brings an infinite gradient


def made(plan: Plan) -> Net:
    torch.manual_seed(3)
    return Net().to(plan.dtype)


def groups(model: Net) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    plain = [p for name, p in named if name.endswith("bias")]
    return [
        {"params": [p for name, p in named if not name.endswith("bias")]},
        {"params": plain, "weight_decay": 0.0},
    ]


def loss_of(model: nn.Module, net: Net, rank: int, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((step * 31 + part) * 31 + rank)
    x = torch.randint(0, 19, (6, 4), generator=generator)
    loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.roll(1, 1).flatten())
    return loss + 0.0 * net.unused.sum().float()


def with_ddp(plan: Plan) -> tuple[list[torch.Tensor], dict[str, Any], list[float]]:
    """Parameters, the optimizer's state and the losses; gradients are summed in rank order."""
    rank, model = dist.get_rank(), made(plan)
    ddp = DistributedDataParallel(model)
    commpress.compress(ddp, "none")
    optimizer = plan.optimizer(groups(model), **plan.options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, plan.decay)
    losses = []
    for step in range(plan.steps):
        for part in range(plan.accumulate):
            last = part == plan.accumulate - 1
            with nullcontext() if last else ddp.no_sync():
                loss = loss_of(ddp, model, rank, step, part)
                loss.backward()
        losses.append(loss.item())
        if plan.max_norm:
            clip(model.parameters(), plan.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return values(model), optimizer.state_dict(), losses


def partitioned(plan: Plan, net: Net, **options: Any) -> commpress.Partitioned:
    return commpress.Partitioned(
        groups(net), plan.optimizer, **{**plan.options, **plan.partitioned, **options}
    )


def with_partitioned(plan: Plan, **options: Any) -> tuple[Net, commpress.Partitioned, list[float]]:
    """Losses, or scales of a GradScaler, last."""
    rank, model = dist.get_rank(), made(plan)
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=plan.scale, growth_interval=2)
        if plan.scale
        else None
    )
    optimizer = partitioned(plan, model, grad_scaler=scaler, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, plan.decay)
    losses = []
    for step in range(plan.steps):
        for part in range(plan.accumulate):
            last = part == plan.accumulate - 1
            with nullcontext() if last or plan.sync_every else optimizer.no_sync():
                loss = loss_of(model, model, rank, step, part)
                if step in plan.bad and rank == dist.get_world_size() - 1:
                    loss = loss * float("inf")
                (scaler.scale(loss) if scaler else loss).backward()
        losses.append(loss.item())
        if plan.max_norm:
            optimizer.clip_grad_norm_(plan.max_norm)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
            losses[-1] = scaler.get_scale()
        else:
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, optimizer, losses


# ---------------------------------------------------------------- what is compared


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def equal_states(mine: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> None:
    """``state_dict()["state"]`` of two optimizers."""
    assert mine.keys() == theirs.keys()
    for number, one in theirs.items():
        assert one.keys() == mine[number].keys()
        assert all(torch.equal(one[key], mine[number][key]) for key in one), number


def clip(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clip by a norm that is summed in double."""
    found = {p: p.grad for p in parameters if p.grad is not None}
    norm = torch.stack([g.double().square().sum() for g in found.values()])
    torch.nn.utils.clip_grads_with_norm_(found, limit, norm.sum().sqrt().float())


def fill(parameters: Iterable[torch.Tensor]) -> None:
    """Set missing gradients to zero, as a model streamed over ranks does."""
    for p in parameters:
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)


class Masters:
    """An AdamW of float32 masters, which half-precision parameters follow."""

    def __init__(self, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [p.detach().float() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, **options)

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor] | None = None) -> None:
        """With these, or with those that the parameters have, which they keep no longer."""
        for i, (p, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            own = torch.zeros_like(p) if p.grad is None else p.grad
            master.grad, p.grad = own.float() if gradients is None else gradients[i], None
        self.adam.step()
        for p, master in zip(self.parameters, self.masters, strict=True):
            p.copy_(master)


@contextmanager
def without_older_objects() -> Iterator[None]:
    """Hide objects that are there from gc, which would walk through all of torch at each look at
    the few that come now."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def tensor_bytes() -> int:
    """Of all tensors in this process that gc sees, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
