"""Compressed optimizers in ``torch.distributed.checkpoint``: every rank's part under its own names, in parallel.

    commpress.save_distributed(optimizer, "checkpoint/optimizer")                  the same world size, bit for bit
    commpress.save_distributed(optimizer, "checkpoint/optimizer", elastic=True)    any world size
    commpress.load_distributed(optimizer, "checkpoint/optimizer")

Tensors are saved as tensors; what holds them together is one msgpack document per rank, itself a tensor of bytes.
"""

from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from commpress.errors import StateMismatch
from commpress.optim.optimizer import CompressedOptimizer

_OUTLINE = "outline"
_MAX_OUTLINE = 1 << 28  # bytes of one rank's document


def save_distributed(optimizer: CompressedOptimizer, folder: str | Path, *, elastic: bool = False) -> None:
    """Collective over the default group; ``elastic`` states fit any world size, others continue bit for bit."""
    state = optimizer.elastic_state_dict() if elastic else optimizer.state_dict()
    tensors: list[torch.Tensor] = []
    outline = msgpack.packb(_outlined(state, tensors), use_bin_type=True)
    named = {_name(optimizer.channel.rank, i): tensor for i, tensor in enumerate(tensors)}
    named[_name(optimizer.channel.rank, _OUTLINE)] = torch.frombuffer(bytearray(outline), dtype=torch.uint8)
    dcp.save(named, checkpoint_id=str(folder))


def load_distributed(optimizer: CompressedOptimizer, folder: str | Path) -> None:
    """From ``save_distributed``; load the model first. Collective over the default group."""
    sizes = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    saved = sum(name.endswith(f"/{_OUTLINE}") for name in sizes)
    if not saved:
        raise StateMismatch(f"{folder} holds no optimizer state: expected what commpress.save_distributed wrote")
    mine = optimizer.channel.rank
    own = _read(folder, sizes, [mine if mine < saved else 0])
    if _kind(own[0]) == "elastic":
        own = _read(folder, sizes, list(range(saved)))
    elif saved != optimizer.channel.size:
        raise StateMismatch(
            f"{folder} was saved by {saved} ranks, this group has {optimizer.channel.size}: save with elastic=True to change "
            "the world size"
        )
    optimizer.load_state_dict(*own)


def _read(folder: str | Path, sizes: dict[str, Any], ranks: list[int]) -> list[Any]:
    named = {
        name: torch.empty(size, dtype=dtype)
        for name, (size, dtype) in sizes.items()
        if int(name.split("/")[0].removeprefix("rank")) in ranks
    }
    dcp.load(named, checkpoint_id=str(folder))
    states = []
    for rank in ranks:
        document = named[_name(rank, _OUTLINE)]
        if document.numel() > _MAX_OUTLINE:
            raise StateMismatch(f"{folder}: the outline of rank {rank} has {document.numel()} bytes, too many to be one")
        outline = msgpack.unpackb(document.numpy().tobytes(), strict_map_key=False)
        states.append(_filled(outline, named, rank))
    return states


def _outlined(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with every tensor replaced by its number."""
    if torch.is_tensor(value):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"items": [[key, _outlined(each, tensors)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [_outlined(each, tensors) for each in value]
    return value


def _filled(outline: Any, named: dict[str, torch.Tensor], rank: int) -> Any:
    if isinstance(outline, dict):
        if "tensor" in outline:
            return named[_name(rank, outline["tensor"])]
        return {key: _filled(each, named, rank) for key, each in outline["items"]}
    if isinstance(outline, list):
        return [_filled(each, named, rank) for each in outline]
    return outline


def _name(rank: int, what: Any) -> str:
    return f"rank{rank}/{what}"


def _kind(state: dict[str, Any]) -> str:
    part = state["commpress"]
    return part["kind"] if "kind" in part else part["quantized"]["kind"]

