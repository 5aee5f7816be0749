"""One file per rank in a trainer's checkpoint, for states that differ between ranks: residuals
(``commpress-<rank>.pt``) and divided experts (``experts-<rank>.pt``)."""

import logging
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commpress.errors import StateMismatch
from commpress.integrations.ddp.hook import CompressedState
from commpress.integrations.experts.moe import experts_of
from commpress.integrations.fsdp.fsdp2 import ShardedState
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.optimizer import CompressedOptimizer

log = logging.getLogger("commpress")

# objects that compress: a hook's state, that of shards, or an optimizer
Compressor = CompressedState | ShardedState | CompressedOptimizer | LocalUpdates


def part_of(state: Compressor) -> dict[str, Any]:
    """Return this rank's part of a checkpoint; the parts of all ranks fit any number of ranks."""
    if isinstance(state, ShardedState):
        rank, size = place()
        return {"rank": rank, "size": size} | state.state_dict()
    if isinstance(state, CompressedOptimizer):
        # the trainer's own file has the rest, which is equal on all ranks
        return {"commpress": state.rank_state()}
    return state.rank_state()


def take_parts(state: Compressor, parts: list[dict[str, Any]]) -> None:
    """Load this rank's part, or those of all ranks of the saved run; without parts ``state`` stays
    unchanged."""
    if isinstance(state, ShardedState):
        state.forget_weights()
    if parts and isinstance(state, CompressedOptimizer):
        state.load_rank_state(*(part.get("commpress", part) for part in parts))
    elif parts:
        state.load_state_dict(*parts)


def save_rank(state: Compressor, folder: Path) -> None:
    """Write this rank's part, and delete files of ranks beyond the present ones."""
    own = part_of(state)
    rank, size = _saved_by(own)
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in _files(folder).items() if rank == 0 else ():
        if number >= size:
            file.unlink()
    torch.save(own, folder / f"commpress-{rank}.pt")


def load_rank(state: Compressor, folder: Path) -> None:
    """Load this rank's file, or those of all ranks if another number of ranks saved them; without
    files log a warning and load nothing."""
    # the channel of shards reaches only the ranks of their mesh
    apart = not isinstance(state, ShardedState)
    rank, size = (state.channel.rank, state.channel.size) if apart else place()
    take_parts(state, load_ranks(folder, rank, size))


def load_ranks(folder: Path, rank: int, size: int) -> list[dict[str, Any]]:
    """Return the parts in ``folder`` for this rank."""
    files = _files(folder)
    first = _read(files.get(rank, next(iter(files.values())))) if files else None
    saved = size if first is None else _saved_by(first)[1]
    if first is None or (saved == size and rank not in files):
        log.warning(
            "%s has no commpress-%d.pt: the residuals of this rank are lost",
            folder,
            rank,
        )
        return []
    if saved == size and ("elastic" not in first or len(files) != saved):
        return [first]
    if len(files) != saved:
        log.warning(
            "%s has files of %d ranks, but %d saved it and %d resume: put the files of all of them "
            "there. The residuals are lost.",
            folder,
            len(files),
            saved,
            size,
        )
        return []
    return [_read(file) for file in files.values()]


def gathered_on_first(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather every rank's state on rank 0, nothing elsewhere; collective. Like a file it may
    contain only tensors and plain data."""
    file = BytesIO()
    torch.save(own, file)
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device)
    lengths = [
        torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(lengths, torch.tensor([content.numel()], device=device))
    padded = content.new_zeros(int(max(lengths)))
    padded[: content.numel()] = content
    rows = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else None
    dist.gather(padded, rows)
    return [
        _read(BytesIO(row[: int(length)].cpu().numpy().tobytes()))
        for row, length in zip(rows or (), lengths, strict=False)
    ]


def place() -> tuple[int, int]:
    """Return rank and number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _files(folder: Path) -> dict[int, Path]:
    """Return the files of all ranks by rank."""
    numbers = {file.stem.removeprefix("commpress-"): file for file in folder.glob("commpress-*.pt")}
    return {
        int(number): numbers[number] for number in sorted(filter(str.isdecimal, numbers), key=int)
    }


def _saved_by(part: dict[str, Any]) -> tuple[int, int]:
    """Return the rank that saved a part, and the number of ranks."""
    part = part["commpress"]["quantized"] if "commpress" in part else part
    return part["rank"], part["size"]


def _read(file: Path | BytesIO) -> dict[str, Any]:
    return torch.load(file, weights_only=True, map_location="cpu")


# ---------------------------------------------------------------- divided experts


def save_experts(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write ``experts-<rank>.pt`` with this rank's divided experts and their state in torch's
    optimizer, if ``model`` has such experts.

    Note: the file of rank 0 also has the rest of the model. transformers saves models with experts
    under older names, gates included, by which a resuming Trainer does not find them.
    """
    layers = experts_of(model)
    if not layers:
        return
    rank, size = place()
    content: dict[str, Any] = {
        "size": size,
        "layers": [layer.state_dict() for layer in layers],
        "rest": _rest(model) if rank == 0 else {},
        "optimizer": {
            number: dict(optimizer.state[p])
            for number, p in _own_numbers(model, optimizer).items()
            if p in optimizer.state
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / f"experts-{rank}.pt")


def load_experts(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load this rank's file, after the model and the optimizer of another rank were loaded."""
    layers = experts_of(model)
    if not layers:
        return
    rank, size = place()
    file = folder / f"experts-{rank}.pt"
    if not file.exists():
        raise StateMismatch(
            f"{folder} has no {file.name} with the experts of this rank: it was saved without "
            "commpress.hf.DividedExperts, or by fewer ranks. Put the files of all ranks there, and "
            "resume on the same number of ranks"
        )
    saved = _read(file)
    if saved["size"] != size or len(saved["layers"]) != len(layers):
        raise StateMismatch(
            f"{file} has {len(saved['layers'])} layers of a run on {saved['size']} ranks, expected "
            f"{len(layers)} on {size}: resume on the same number of ranks"
        )
    rest = saved["rest"] or _read(folder / "experts-0.pt")["rest"]
    with torch.no_grad():
        for name, value in _rest(model).items():
            value.copy_(rest[name])
    for layer, state in zip(layers, saved["layers"], strict=True):
        layer.load_state_dict(state)
    for number, p in _own_numbers(model, optimizer).items():
        own = optimizer.state[p]
        for key, value in saved["optimizer"].get(number, {}).items():
            if not isinstance(value, torch.Tensor):
                own[key] = value
            elif isinstance(known := own.get(key), torch.Tensor) and known.shape == value.shape:
                known.copy_(value)
            else:
                own[key] = value.to(p.device) if value.dim() else value


def _rest(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, without divided experts."""
    apart = {id(each) for layer in experts_of(model) for each in layer.parameters()}
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name: each.detach() for name, each in every if id(each) not in apart}


def _own_numbers(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, torch.Tensor]:
    """Return the parameters of experts by their number in ``optimizer``; none for an optimizer of
    commpress, which saves them itself."""
    if isinstance(optimizer, CompressedOptimizer):
        return {}
    held = {id(p) for layer in experts_of(model) for p in layer.parameters()}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: p for number, p in enumerate(every) if id(p) in held}
