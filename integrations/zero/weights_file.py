"""A streamed model's values as a safetensors file, unit by unit: the model is never in memory as a whole.

8 bytes: length of the header | JSON {name: {dtype, shape, data_offsets}} | values, little-endian
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from commpress.errors import InvalidArgument, StateMismatch

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
LONGEST_HEADER = 100 << 20


class Writer:
    """A context; the file has its name when it has been left without an error."""

    def __init__(self, path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
        self._path, at = Path(path), 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, tensor in tensors.items():
            if tensor.dtype not in NAMES:
                raise InvalidArgument(f"{name!r} is {tensor.dtype}, which a safetensors file cannot hold")
            size = tensor.numel() * tensor.element_size()
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        self._text = text + b" " * (-len(text) % 8)
        self._header, self._temporary = header, self._path.with_name(self._path.name + ".part")

    def __enter__(self) -> "Writer":
        self._file: BinaryIO = self._temporary.open("wb")
        self._file.write(len(self._text).to_bytes(8, "little") + self._text)
        return self

    def write(self, name: str, values: torch.Tensor, start: int = 0) -> None:
        """All of a tensor, or what of it begins at element ``start``."""
        begin = self._header[name]["data_offsets"][0] + start * values.element_size()
        self._file.seek(8 + len(self._text) + begin)
        self._file.write(values.detach().cpu().clone().view(-1).view(torch.uint8).numpy().data)

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink()


class Reader:
    """Tensors of a file, one at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise StateMismatch(f"{file.name} is not a safetensors file: its header would have {length} bytes")
        try:
            self._header: dict[str, Any] = dict(json.loads(file.read(length)))
        except ValueError as error:
            raise StateMismatch(f"{file.name} is not a safetensors file: its header is no JSON ({error})") from error
        self._start = 8 + length

    def into(self, name: str, out: torch.Tensor, shape: tuple[int, ...] | None = None, start: int = 0) -> None:
        """Copy the values of a tensor like ``out``; or, of one of ``shape``, those from element ``start`` on."""
        shape, found = shape or tuple(out.shape), self._header.get(name)
        wanted = {"dtype": NAMES[out.dtype], "shape": list(shape)}
        if not isinstance(found, dict) or any(found.get(key) != value for key, value in wanted.items()):
            raise StateMismatch(
                f"{name!r} is {found} in the file, expected {wanted}: load the weights of the same model"
            )
        size, width = out.numel() * out.element_size(), out.element_size()
        first, last = found["data_offsets"]
        if last - first != (nbytes := math.prod(shape) * width):
            raise StateMismatch(f"{name!r} has data_offsets {[first, last]} in the file, expected {nbytes} bytes")
        self._file.seek(self._start + first + start * width)
        data = bytearray(self._file.read(size))
        if len(data) != size:
            raise StateMismatch(f"the file ends inside {name!r}")
        if size:
            out.copy_(torch.frombuffer(data, dtype=out.dtype).view(out.shape))
