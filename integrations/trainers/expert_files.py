"""One file per rank in a checkpoint of somebody else's: the experts of that rank, and what torch's
optimizer has of them.

Note: that of rank 0 has the rest of the model too. transformers saves models of experts under names
of old, gates included, and a Trainer that goes on does not find them by these.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commpress.errors import StateMismatch
from commpress.integrations.experts.moe import experts_of
from commpress.optim.optimizer import CompressedOptimizer


def save_experts(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write ``experts-<rank>.pt``, where ``model`` has experts that are divided among ranks."""
    layers = experts_of(model)
    if not layers:
        return
    rank, size = _place()
    own = _own_numbers(model, optimizer)
    content: dict[str, Any] = {
        "size": size,
        "layers": [layer.state_dict() for layer in layers],
        "rest": _rest(model) if rank == 0 else {},
        "optimizer": {
            number: dict(optimizer.state[p]) for number, p in own.items() if p in optimizer.state
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / f"experts-{rank}.pt")


def load_experts(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Take over what this rank wrote, after somebody loaded the model and the optimizer of another
    rank."""
    layers = experts_of(model)
    if not layers:
        return
    rank, size = _place()
    file = folder / f"experts-{rank}.pt"
    if not file.exists():
        raise StateMismatch(
            f"{folder} has no {file.name}, the experts of this rank: it was saved without "
            "commpress.hf.DividedExperts, or by fewer ranks. Put the files of all ranks there, and "
            "go on with as many"
        )
    saved = torch.load(file, weights_only=True, map_location="cpu")
    if saved["size"] != size or len(saved["layers"]) != len(layers):
        raise StateMismatch(
            f"{file} has {len(saved['layers'])} layers of a run on {saved['size']} ranks, expected "
            f"{len(layers)} on {size}: go on with as many ranks as saved it"
        )
    rest = (
        saved["rest"]
        or torch.load(folder / "experts-0.pt", weights_only=True, map_location="cpu")["rest"]
    )
    with torch.no_grad():
        for name, value in _rest(model).items():
            value.copy_(rest[name])
    for layer, state in zip(layers, saved["layers"], strict=True):
        layer.load_state_dict(state)
    for number, p in _own_numbers(model, optimizer).items():
        for key, value in saved["optimizer"].get(number, {}).items():
            known = optimizer.state[p].get(key)
            if (
                isinstance(known, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and known.shape == value.shape
            ):
                known.copy_(value)
            else:
                optimizer.state[p][key] = (
                    value.to(p.device) if isinstance(value, torch.Tensor) and value.dim() else value
                )


def _rest(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, but those of divided experts."""
    apart = {id(each) for layer in experts_of(model) for each in layer.parameters()}
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name: each.detach() for name, each in every if id(each) not in apart}


def _own_numbers(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, torch.Tensor]:
    """Parameters of experts by their number in ``optimizer``; none where the optimizer is ours, and
    saves them itself."""
    if isinstance(optimizer, CompressedOptimizer):
        return {}
    held = {id(p) for layer in experts_of(model) for p in layer.parameters()}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: p for number, p in enumerate(every) if id(p) in held}


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def bare(things: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer of a Trainer's callback, out of accelerate's wrapper."""
    found: torch.optim.Optimizer = getattr(things["optimizer"], "optimizer", things["optimizer"])
    return found
