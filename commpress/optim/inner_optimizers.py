"""Inner optimizers of local updates: which of them train weights that may be moved from outside, and over which ranks."""

from collections.abc import Sequence
from typing import Any

import torch

from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument
from commpress.optim.local_weights import LocalWeights, WeightHolder
from commpress.optim.masha import Masha
from commpress.optim.optimizer import CompressedOptimizer
from commpress.optim.sharded import ShardedOptimizer
from commpress.optim.windows import WindowedOptimizer
from commpress.schedules import Seconds, Sync

BETWEEN = 'group= is for the ranks between which LocalUpdates averages, as mesh["replicate"].get_group(); '


def weights_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[LocalWeights]:
    """Weights that they train, as far as this rank has them; parameters without names are counted."""
    found: list[LocalWeights] = []
    first = 0
    for number, optimizer in enumerate(optimizers):
        mine: list[LocalWeights] = []
        if isinstance(optimizer, WeightHolder):
            mine = optimizer.local_weights()
        else:
            for group in optimizer.param_groups:
                names = group.get("param_names") or [f"#{i:05d}" for i in range(first, first + len(group["params"]))]
                first += len(group["params"])
                mine += [LocalWeights(name, p) for name, p in zip(names, group["params"], strict=True) if p.requires_grad]
        taken = {each.name for each in found}  # of optimizers before: of several modules, say, that name theirs alike
        for each in mine:
            each.name = f"{number}: {each.name}" if each.name in taken else each.name
        found += mine
    if not found:
        raise InvalidArgument("inner has no parameter that requires a gradient, expected at least one")
    seen: dict[int, str] = {}
    for each in found:
        if id(each.source) in seen:
            other = seen[id(each.source)]
            raise InvalidArgument(f"parameter {each.name!r} is in inner twice, also as {other!r}: leave one out")
        seen[id(each.source)] = each.name
    return found


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """All that they were given, frozen ones too."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def check_inner(optimizers: Sequence[torch.optim.Optimizer], every: "Sync | Seconds", warmup: int) -> None:
    """Raise ``InvalidArgument`` for what cannot train locally, before anything communicates."""
    for optimizer in optimizers:
        what = type(optimizer).__name__
        if isinstance(optimizer, WindowedOptimizer | Masha):
            raise InvalidArgument(
                f"inner is {what}, which goes apart from its ranks and comes back by itself: use OneBitAdam within a node, or "
                "an optimizer of torch"
            )
        if warmup and isinstance(optimizer, WeightHolder):
            raise InvalidArgument(
                f"warmup is {warmup}, and inner is {what}, whose gradients are not in parameter.grad when it steps: leave "
                "warmup= out"
            )
        masters = isinstance(optimizer, CompressedOptimizer) and optimizer.flat is not None and optimizer.flat.shadowed
        if isinstance(optimizer, ShardedOptimizer) or masters:
            raise InvalidArgument(
                f"inner is {what} with float32 master weights beside the parameters, which would not follow Θ: use "
                "commpress.Partitioned, or float32 parameters and no sharding"
            )
    held = any(isinstance(optimizer, WeightHolder) and optimizer.inner_channel is not None for optimizer in optimizers)
    cut = any(_mesh(p) is not None for p in parameters_of(optimizers))
    together = held or cut or any(isinstance(optimizer, CompressedOptimizer) for optimizer in optimizers)
    if isinstance(every, Seconds) and together:
        raise InvalidArgument(
            f"every is {every!r}, but the ranks inside a group train together (shards, or gradients that are averaged) and "
            "must count steps alike: give a number of steps or commpress.QSR"
        )


def check_ranks(optimizers: Sequence[torch.optim.Optimizer], channel: Channel) -> None:
    """Raise ``InvalidArgument`` where ranks that average here do so in every step already, or have other shards."""
    for optimizer in optimizers:
        inner = optimizer.inner_channel if isinstance(optimizer, WeightHolder) else getattr(optimizer, "channel", None)
        if isinstance(inner, Channel) and inner.shares_ranks(channel):
            raise InvalidArgument(
                f"inner is {type(optimizer).__name__} over the ranks between which LocalUpdates averages: it averages their "
                f"gradients in every step, so nothing would be saved. {BETWEEN}give the optimizer (or stream) the ranks "
                "inside a node as process_group="
            )
    for p in parameters_of(optimizers):
        mesh = _mesh(p)
        if mesh is None:
            continue
        shared = len(set(mesh.mesh.flatten().tolist()) & set(channel.members)) > 1
        if shared or channel.group is None:
            raise InvalidArgument(
                f"parameters are DTensors on {mesh}, and LocalUpdates averages between ranks of that mesh: these have other "
                f"shards, or average gradients in every step. {BETWEEN}and the model's mesh has the others: "
                'fully_shard(..., mesh=mesh["shard"])'
            )


def _mesh(parameter: Any) -> Any:
    """Of a DTensor."""
    return getattr(parameter, "device_mesh", None)
