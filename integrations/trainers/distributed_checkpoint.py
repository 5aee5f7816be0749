"""States of commpress in ``torch.distributed.checkpoint``: every rank writes its part under its own
names, in parallel.

    # the same world size, bit for bit
    commpress.save_distributed(optimizer, "checkpoint/optimizer")
    # any world size
    commpress.save_distributed(optimizer, "checkpoint/optimizer", elastic=True)
    commpress.load_distributed(optimizer, "checkpoint/optimizer")

Tensors are saved as tensors; the structure around them is one msgpack document per rank, saved as a
tensor of bytes.

Note: torch's own ``.metadata`` is a pickle, which torch reads by ``pickle.load``, so that a file
could run any command. Here it is read by an unpickler that knows only torch's classes of metadata.
"""

import math
import pickle
import re
from pathlib import Path, PurePath
from typing import Any, Protocol

import msgpack
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from commpress.errors import InvalidArgument, StateMismatch

_OUTLINE = "outline"
_MAX_OUTLINE = _MAX_METADATA = 1 << 28  # limits in bytes
_NAME = re.compile(rf"rank(\d{{1,9}})/({_OUTLINE}|\d{{1,18}})")
_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        *(
            name
            for name, value in vars(torch).items()
            if isinstance(value, torch.dtype | torch.layout)
        ),
    },
}


class Savable(Protocol):
    """An object with a state of plain data on each rank: an optimizer, ``LocalUpdates`` or a hook's
    state."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /, *others: dict[str, Any]) -> None: ...


def save_distributed(state: Savable, folder: str | Path, *, elastic: bool = False) -> None:
    """Save every rank's part of ``state``, an optimizer or the result of ``compress``; collective
    over the default group. ``elastic`` states fit any world size, others resume bit for bit."""
    if elastic and not hasattr(state, "elastic_state_dict"):
        raise InvalidArgument(
            f"elastic is True, but a {type(state).__name__} has no elastic_state_dict: leave it "
            "out, and load at the same world size"
        )
    saved: Any = state
    part = saved.elastic_state_dict() if elastic else saved.state_dict()
    tensors: list[torch.Tensor] = []
    document = {"elastic": elastic, "state": _outlined(part, tensors)}
    outline = msgpack.packb(document, use_bin_type=True)
    rank, _ = _place()
    named = {_name(rank, i): tensor for i, tensor in enumerate(tensors)}
    named[_name(rank, _OUTLINE)] = torch.frombuffer(bytearray(outline), dtype=torch.uint8)
    dcp.save(named, checkpoint_id=str(folder))


def load_distributed(state: Savable, folder: str | Path) -> None:
    """Load a checkpoint of ``save_distributed``, after the model; collective over the default
    group."""
    reader = _Reader(folder)
    sizes = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and _NAME.fullmatch(name)
    }
    saved = sum(name.endswith(f"/{_OUTLINE}") for name in sizes)
    if not saved:
        raise StateMismatch(
            f"{folder} has no state: expected a folder of commpress.save_distributed"
        )
    rank, size = _place()
    elastic, own = _read(reader, sizes, [rank if rank < saved else 0])
    if elastic:
        _, own = _read(reader, sizes, list(range(saved)))
    elif saved != size:
        raise StateMismatch(
            f"{folder} was saved by {saved} ranks, but this group has {size}: save with "
            "elastic=True to change the world size"
        )
    state.load_state_dict(*own)


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class _Reader(dcp.FileSystemReader):
    """Reader that executes nothing from a checkpoint."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(str(folder))
        self.folder = Path(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read torch's metadata, and refuse other classes."""
        file = self.folder / ".metadata"
        if file.stat().st_size > _MAX_METADATA:
            raise StateMismatch(
                f"{file} has {file.stat().st_size} bytes, too many for the metadata of a checkpoint"
            )
        with file.open("rb") as stream:
            try:
                metadata = _MetadataUnpickler(stream).load()
            except StateMismatch:
                raise
            except Exception as error:  # broken bytes may raise any error
                raise StateMismatch(
                    f"{file} is no metadata of torch {torch.__version__}: {error!r}"
                ) from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise StateMismatch(
                f"{file} contains a {type(metadata).__name__}, expected a checkpoint of "
                "commpress.save_distributed"
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePath  # the folder in which it was saved
        if name not in _METADATA.get(module, ()):
            raise StateMismatch(
                f".metadata names {module}.{name}, which torch.distributed.checkpoint does not "
                "write: the checkpoint was manipulated, and reading it elsewhere may run a "
                "command. Nothing was executed"
            )
        return super().find_class(module, name)


def _read(reader: _Reader, sizes: dict[str, Any], ranks: list[int]) -> tuple[bool, list[Any]]:
    """Return whether the states of ``ranks`` are elastic, and the states."""
    wanted = {name: each for name, each in sizes.items() if int(_NAME.fullmatch(name)[1]) in ranks}  # type: ignore[index]
    nbytes = sum(math.prod(size) * dtype.itemsize for size, dtype in wanted.values())
    there = sum(file.stat().st_size for file in reader.folder.glob("*.distcp"))
    if nbytes > there:
        raise StateMismatch(
            f"{reader.folder}: .metadata describes tensors of {nbytes} bytes, the files have "
            f"{there}"
        )
    named = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in wanted.items()}
    dcp.load(named, storage_reader=reader)
    states, elastic = [], False
    for rank in ranks:
        document = named.get(_name(rank, _OUTLINE))
        if document is None:
            raise StateMismatch(
                f"{reader.folder} has no outline of rank {rank}: the checkpoint is incomplete"
            )
        if document.numel() > _MAX_OUTLINE:
            raise StateMismatch(
                f"{reader.folder}: the outline of rank {rank} has {document.numel()} bytes, too "
                "many"
            )
        try:
            outline = msgpack.unpackb(document.numpy().tobytes(), strict_map_key=False)
            elastic = outline["elastic"] is True
            states.append(_filled(outline["state"], named, rank))
        except (KeyError, TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
            raise StateMismatch(
                f"{reader.folder}: the outline of rank {rank} is broken: {error!r}"
            ) from error
    return elastic, states


def _outlined(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` with every tensor replaced by its number, and append tensors to
    ``tensors``."""
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
