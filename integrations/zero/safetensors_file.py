"""Safetensors files of weights and of states. They are written and read tensor by tensor, never as
a whole; any reader of the format can open them, and nothing is unpickled.

8 bytes: length of the header | JSON {name: {dtype, shape, data_offsets}} | values, little-endian

Tensors of a state are named by their path in it, "residuals/layer.weight@0/sent"; everything else
is JSON in the file's metadata.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch

from commpress.errors import InvalidArgument, StateMismatch

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LONGEST_HEADER = 100 << 20
INDEX = "model.safetensors.index.json"
ALONE = "model.safetensors"
METADATA = "__metadata__"  # entry of the header that is no tensor
OUTLINE = "commpress"  # key of the metadata
Plain = str | int | float | bool | None


class Writer:
    """Context manager that writes a file, which gets its name at an exit without an error."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._path, at = Path(path), 0
        header: dict[str, Any] = {METADATA: {"format": "pt", **(metadata or {})}}
        for name, tensor in tensors.items():
            if tensor.dtype not in NAMES:
                raise InvalidArgument(
                    f"{name!r} is {tensor.dtype}, which no safetensors file has: convert it"
                )
            size = tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + size],
            }
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        self._text = text + b" " * (-len(text) % 8)
        if len(self._text) > LONGEST_HEADER:
            raise InvalidArgument(
                f"{path} would have a header of {len(self._text)} bytes, which is too long for "
                "readers: save fewer tensors"
            )
        self._header, self._temporary = header, self._path.with_name(self._path.name + ".part")

    def __enter__(self) -> "Writer":
        self._file: BinaryIO = self._temporary.open("wb")
        self._file.write(len(self._text).to_bytes(8, "little") + self._text)
        return self

    def write(self, name: str, values: torch.Tensor, start: int = 0) -> None:
        """Write a tensor, or its elements from ``start`` on."""
        begin = self._header[name]["data_offsets"][0] + start * values.element_size()
        self._file.seek(8 + len(self._text) + begin)
        self._file.write(
            values.detach()
            .cpu()
            .clone(memory_format=torch.contiguous_format)
            .view(-1)
            .view(torch.uint8)
            .numpy()
            .data
        )

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink()


class Reader:
    """Read tensors of a file, one at a time. The header is checked against the file before memory
    is allocated."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._nbytes = file, os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(LONGEST_HEADER, self._nbytes - 8):
            raise StateMismatch(
                f"{file.name} is not a safetensors file: its header would have {length} bytes"
            )
        try:
            self._header: dict[str, Any] = dict(json.loads(file.read(length)))
        except (ValueError, TypeError, RecursionError) as error:
            raise StateMismatch(
                f"{file.name} is not a safetensors file: its header is no JSON ({error})"
            ) from error
        self._start = 8 + length
        metadata = self._header.pop(METADATA, {})
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def names(self) -> list[str]:
        return list(self._header)

    def nbytes(self, name: str) -> int:
        dtype, shape, _ = self._entry(name)
        return math.prod(shape) * dtype.itemsize

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is in the file."""
        dtype, shape, _ = self._entry(name)
        out = torch.empty(shape, dtype=dtype)
        self.into(name, out)
        return out

    def into(
        self, name: str, out: torch.Tensor, shape: tuple[int, ...] | None = None, start: int = 0
    ) -> None:
        """Copy a tensor of ``out``'s shape into ``out``; or, of a tensor of ``shape``, the elements
        from ``start`` on.

        Floats are converted to ``out``'s dtype.
        """
        wanted = shape or tuple(out.shape)
        dtype, found, first = self._entry(name)
        if found != wanted or (
            dtype != out.dtype and not (dtype.is_floating_point and out.is_floating_point())
        ):
            raise StateMismatch(
                f"{name!r} is {NAMES[dtype]} of {list(found)} in the file, expected "
                f"{NAMES[out.dtype]} of {list(wanted)}: load the weights of the same model"
            )
        size = out.numel() * dtype.itemsize
        self._file.seek(self._start + first + start * dtype.itemsize)
        data = bytearray(self._file.read(size))
        if len(data) != size:
            raise StateMismatch(f"the file ends inside {name!r}")
        if size:
            out.copy_(torch.frombuffer(data, dtype=dtype).view(out.shape))

    def _entry(self, name: str) -> tuple[torch.dtype, tuple[int, ...], int]:
        """Return (dtype, shape, first byte) of a tensor, after checking that it is inside the
        file."""
        found = self._header.get(name)
        if found is None:
            raise StateMismatch(
                f"{name!r} is not in {self._file.name}: load the weights of the same model"
            )
        try:
            dtype, shape, (first, last) = (
                DTYPES[found["dtype"]],
                tuple(found["shape"]),
                found["data_offsets"],
            )
            whole = all(type(number) is int and number >= 0 for number in (*shape, first, last))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise StateMismatch(
                f"{name!r} is {found} in {self._file.name}, expected {'/'.join(DTYPES)}, a shape "
                "and offsets"
            )
        if (
            last - first != (nbytes := math.prod(shape) * dtype.itemsize)
            or self._start + last > self._nbytes
        ):
            raise StateMismatch(
                f"{name!r} has data_offsets {[first, last]} in {self._file.name}, expected "
                f"{nbytes} bytes inside the file"
            )
        return dtype, shape, first


class Checkpoint(ExitStack):
    """Context manager that opens a safetensors file, or a folder of several with
    ``model.safetensors.index.json``.

    Files stay open until its end; only their headers are in memory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path)
        self._readers: list[Reader] = []

    def __enter__(self) -> "Checkpoint":
        super().__enter__()
        try:
            self._readers = [Reader(self.enter_context(file.open("rb"))) for file in self._files()]
        except BaseException:
            self.close()
            raise
        return self

    def _files(self) -> list[Path]:
        path = self._path
        if path.is_dir():
            found = [path / name for name in (INDEX, ALONE) if (path / name).exists()]
            if not found:
                raise InvalidArgument(
                    f"{path} has neither {INDEX} nor {ALONE}: pass a folder of save_pretrained"
                )
            path = found[0]
        if path.suffix != ".json":
            return [path]
        if path.stat().st_size > LONGEST_HEADER:
            raise StateMismatch(
                f"{path} has {path.stat().st_size} bytes, which is no index of weights"
            )
        try:
            names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
            outside = [
                name
                for name in names
                if Path(name).name != name or not name.endswith(".safetensors")
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StateMismatch(f"{path} is no index of weights: {error!r}") from error
        if outside:
            raise StateMismatch(f"{path} names {outside[0]!r}, expected files beside it")
        return [path.with_name(name) for name in names]

    def holds(self, names: Iterable[str]) -> bool:
        return any(name in reader for reader in self._readers for name in names)

    def into(self, names: list[str], out: torch.Tensor, shape: tuple[int, ...], start: int) -> None:
        """Call ``Reader.into`` with the first of a tensor's names that is in a file, because files
        have tied weights under one name."""
        for name in names:
            for reader in self._readers:
                if name in reader:
                    return reader.into(name, out, shape, start)
        raise StateMismatch(
            f"{' or '.join(map(repr, names))} is not in {self._path}: load the weights of the "
            "same model"
        )


# ---------------------------------------------------------------- states


def save_safetensors(state: Mapping[Any, Any], path: str | os.PathLike[str]) -> None:
    """Write a ``state_dict`` of commpress, or any other of dictionaries, lists, tensors, numbers
    and strings, as a safetensors file.

    Every rank writes its own. A file gets its name when it is complete.
    """
    tensors: dict[str, torch.Tensor] = {}
    outline = json.dumps(outline_of(state, "", tensors), separators=(",", ":"))
    with Writer(path, tensors, {OUTLINE: outline}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def load_safetensors(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Read a state written by ``save_safetensors``, for ``load_state_dict``. Tensors are on the
    processor."""
    with open(path, "rb") as file:
        reader = Reader(file)
        outline = reader.metadata.get(OUTLINE)
        if not isinstance(outline, str):
            raise StateMismatch(
                f"{path} was not written by commpress.save_safetensors: read it with the package "
                "safetensors"
            )
        names = reader.names()
        if (claimed := sum(reader.nbytes(name) for name in names)) > (
            nbytes := os.fstat(file.fileno()).st_size
        ):
            raise StateMismatch(
                f"{path} claims {claimed} bytes of tensors and has {nbytes}: its tensors overlap"
            )
        tensors = {name: reader.read(name) for name in names}
    try:
        state = state_of(json.loads(outline), tensors)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StateMismatch(f"the metadata of {path} do not describe a state: {error!r}") from error
    if not isinstance(state, dict):
        raise StateMismatch(f"{path} contains a {type(state).__name__}, expected a dictionary")
    return state


def outline_of(
    value: Any,
    place: str,
    tensors: dict[str, torch.Tensor],
    take: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Convert ``value`` to JSON, and add its tensors to ``tensors``, as ``take`` returns them."""
    if isinstance(value, torch.Tensor):
        name = place or "tensor"
        while name in tensors or name == METADATA:
            name += "'"
        tensors[name] = (take or _dense)(place, value)
        return {"tensor": name}
    if isinstance(value, Mapping):
        if odd := [key for key in value if type(key) not in (str, int)]:
            raise InvalidArgument(
                f"{place or 'the state'} has the key {odd[0]!r}, expected strings and integers"
            )
        under = f"{place}/" if place else ""
        return {
            "dict": [
                [key, outline_of(each, f"{under}{key}", tensors, take)]
                for key, each in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {
            kind: [outline_of(each, f"{place}/{i}", tensors, take) for i, each in enumerate(value)]
        }
    if isinstance(value, Plain):
        return value
    raise InvalidArgument(
        f"{place} is a {type(value).__name__}, expected tensors, numbers, strings, lists and "
        "dictionaries"
    )


def _dense(place: str, value: torch.Tensor) -> torch.Tensor:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_sparse or value.is_meta:
        raise InvalidArgument(
            f"{place} is a {type(value).__name__} on {value.device}, expected a dense one in memory"
        )
    return value


def state_of(outline: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what ``outline_of`` converted; raise ``ValueError`` or ``KeyError`` for anything
    else."""
    match outline:
        case {"tensor": str(name)}:
            return tensors[name]
        case {"dict": list(pairs)}:
            return {key: state_of(each, tensors) for key, each in pairs}
        case {"list": list(parts)}:
            return [state_of(each, tensors) for each in parts]
        case {"tuple": list(parts)}:
            return tuple(state_of(each, tensors) for each in parts)
        case str() | int() | float() | None:
            return outline
    raise ValueError(f"{outline!r} is neither a tensor, a collection nor a value")
