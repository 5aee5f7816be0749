"""One file per rank in a checkpoint of somebody else's: what ranks have apart from each other, such
as residuals."""

import logging
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("commpress")


def save_rank(own: dict[str, Any], folder: Path) -> None:
    """Write this rank's ``state_dict``, of a hook or of an optimizer; there are no files of more
    ranks afterwards."""
    rank, size = _place(own)
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in _files(folder).items() if rank == 0 else ():
        if number >= size:
            file.unlink()
    torch.save(own, folder / f"commpress-{rank}.pt")


def load_ranks(folder: Path, rank: int, size: int) -> list[dict[str, Any]]:
    """Load what this rank saved, or where another number of ranks did, what all of them saved;
    nothing, with a warning, if that is not there."""
    files = _files(folder)
    first = _read(files.get(rank, next(iter(files.values())))) if files else None
    saved = size if first is None else _place(first)[1]
    if first is None or (saved == size and rank not in files):
        log.warning(
            "%s has no commpress-%d.pt: what compression left behind on this rank is lost",
            folder,
            rank,
        )
        return []
    if saved == size and ("elastic" not in first or len(files) != saved):
        return [first]
    if len(files) != saved:
        log.warning(
            "%s has files of %d ranks, but %d saved it and %d go on: put the files of all of them "
            "there. What compression left behind is lost.",
            folder,
            len(files),
            saved,
            size,
        )
        return []
    return [_read(file) for file in files.values()]


def gathered_on_first(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's state on rank 0, nothing elsewhere; collective. It is read as a file is: tensors
    and numbers only."""
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
        torch.load(
            BytesIO(row[: int(length)].cpu().numpy().tobytes()),
            weights_only=True,
            map_location="cpu",
        )
        for row, length in zip(rows or (), lengths, strict=False)
    ]


def shards_part(state: Any) -> dict[str, Any]:
    """``state_dict`` of a ``ShardedState``, with the rank that it is of."""
    return {"rank": dist.get_rank(), "size": dist.get_world_size()} | state.state_dict()


def _files(folder: Path) -> dict[int, Path]:
    """Those of all ranks."""
    numbers = {file.stem.removeprefix("commpress-"): file for file in folder.glob("commpress-*.pt")}
    return {
        int(number): numbers[number] for number in sorted(filter(str.isdecimal, numbers), key=int)
    }


def _place(state: dict[str, Any]) -> tuple[int, int]:
    """The rank that saved it, and of how many."""
    part = state["commpress"]["quantized"] if "commpress" in state else state
    return part["rank"], part["size"]


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True, map_location="cpu")
