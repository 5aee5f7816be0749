"""Codec for one edge of a pipeline: it turns a tensor of any float dtype into bytes, of a size that
follows from its shape."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from commpress.codecs import Codec, codec_named
from commpress.errors import InvalidArgument
from commpress.integrations.pipeline.tiles import TileCodec
from commpress.kernels import Piece, Pieces, arithmetic, cut
from commpress.kernels.reference import BITS, CASTS, FP8, INT4, INT8
from commpress.kernels.registered import known


class EdgeCodec(Protocol):
    """A codec is frozen and comparable; equal ``spec`` mean equal bytes."""

    @property
    def spec(self) -> str: ...

    def size(self, numel: int, width: int) -> int:
        """Return the bytes of ``numel`` elements in tokens of ``width``."""

    def encode(self, values: torch.Tensor, message: torch.Tensor, width: int) -> None:
        """Encode float32[numel] into ``message``, uint8."""

    def decode(self, message: torch.Tensor, values: torch.Tensor, width: int) -> None: ...


@dataclass(frozen=True)
class RowCodec:
    """A codec of the package, or a registered one, applied to the whole tensor as one row."""

    codec: Codec

    @property
    def spec(self) -> str:
        return self.codec.spec

    def size(self, numel: int, width: int) -> int:
        return self._row(numel).row_bytes

    def encode(self, values: torch.Tensor, message: torch.Tensor, width: int) -> None:
        row, flag = (
            self._row(values.numel()),
            torch.zeros(1, dtype=torch.uint8, device=values.device),
        )
        arithmetic(values.device, row).encode(values, message[None], flag, row)

    def decode(self, message: torch.Tensor, values: torch.Tensor, width: int) -> None:
        row = self._row(values.numel())
        arithmetic(values.device, row).decode(message[None], values, row)

    def _row(self, numel: int) -> Pieces:
        return _row(self.codec.kind, self.codec.block, numel)


@lru_cache(64)
def _row(kind: int, block: int, numel: int) -> Pieces:
    return cut([Piece(0, numel, kind, block, feedback=False)], 1)


def edge_codec(codec: "str | Codec | TileCodec", name: str = "codec") -> EdgeCodec | None:
    """Return the codec of an edge for a name or a codec; None if tensors are sent unchanged."""
    if codec == "tah4" or isinstance(codec, TileCodec):
        return TileCodec()
    found = codec_named(codec)
    if found.lossless:
        return None
    fine = found.kind & 0xFF == BITS and 3 <= found.kind >> 8 <= 8
    if not (found.kind in (INT8, INT4, FP8, *CASTS) or fine or known(found.kind)):
        raise InvalidArgument(
            f"{name} is {found.spec!r}, expected int4, int8, fp8, bf16, fp16, bits3 to bits8, "
            "tah4, none or a registered one: activations have no error feedback, so the errors of "
            "coarser codecs would be lost"
        )
    return RowCodec(found)


def exact_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def width_of(tensor: torch.Tensor) -> int:
    """Return the number of elements of a token."""
    return tensor.shape[-1] if tensor.dim() else 1


def encoded(tensor: torch.Tensor, codec: EdgeCodec) -> torch.Tensor:
    """Return a new message with a tensor's elements."""
    values, width = tensor.detach().reshape(-1).to(torch.float32), width_of(tensor)
    message = torch.empty(
        codec.size(values.numel(), width), dtype=torch.uint8, device=tensor.device
    )
    codec.encode(values, message, width)
    return message


def decode_into(tensor: torch.Tensor, message: torch.Tensor, codec: EdgeCodec) -> None:
    target, width = tensor.detach(), width_of(tensor)
    if target.dtype == torch.float32 and target.is_contiguous():
        codec.decode(message, target.view(-1), width)
        return
    values = torch.empty(target.numel(), dtype=torch.float32, device=target.device)
    codec.decode(message, values, width)
    target.copy_(values.view(target.shape))
