"""One file per rank in a checkpoint of somebody else's: what compression left behind there."""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commpress.integrations.ddp.hook import CompressedState

log = logging.getLogger("commpress")


def file_of(rank: int | str) -> str:
    return f"commpress-{rank}.pt"


def save_rank(own: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(own, folder / file_of(dist.get_rank()))


def load_rank(folder: Path) -> dict[str, Any] | None:
    """Load what this rank saved; None with a warning if it is not there."""
    file = folder / file_of(dist.get_rank())
    if not file.exists():
        log.warning("%s is missing: what compression left behind on this rank is lost", file)
        return None
    return _read(file)


def load_gradients(state: CompressedState, folder: Path) -> None:
    """From this rank's file, or where that was saved by another number of ranks, from those of all of them."""
    files = sorted(folder.glob(file_of("*")))
    size, own = dist.get_world_size(), folder / file_of(dist.get_rank())
    first = _read(own if own in files else files[0]) if files else None
    if first is None or (first["size"] == size and own not in files):
        log.warning("%s is missing: what compression left behind on this rank is lost", own)
    elif first["size"] == size:
        state.load_state_dict(first)
    elif len(files) != first["size"]:
        log.warning(
            "%s has files of %d ranks, but %d saved it and %d go on: put the files of all of them there. What compression left "
            "behind is lost.", folder, len(files), first["size"], size,
        )  # fmt: skip
    else:
        state.load_state_dict(*map(_read, files))


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True, map_location="cpu")
