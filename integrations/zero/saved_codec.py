"""Codecs of saved tensors, which turn the numbers of a storage into fewer bytes and back."""

from dataclasses import dataclass
from typing import Protocol

import torch

from commpress.codecs import Codec
from commpress.codecs.exponents import ExponentCodec
from commpress.collectives import exact_rows
from commpress.errors import InvalidArgument
from commpress.integrations.pipeline.edge_codec import (
    RowCodec,
    decode_into,
    edge_codec,
    encoded,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 1e38  # codecs of few bits overflow beyond


class SavedCodec(Protocol):
    """Numbers to bytes, and back into a tensor of the same shape and dtype."""

    lossy: bool

    def encode(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return the bytes, or None if the values are to be kept as they are."""

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None: ...


class ExactSaved:
    """Exponents of bfloat16 and float32 in fewer bits, every bit as it was, on the CPU."""

    lossy = False

    def encode(self, values: torch.Tensor) -> torch.Tensor | None:
        if not exact_rows.codes_exactly(values):
            return None
        return torch.from_numpy(exact_rows.encode(values))

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        exact_rows.decode(code.numpy(), values)


@dataclass(frozen=True)
class RowsSaved:
    """One row of a codec, such as int8. Values of which one is not finite, or larger than
    ``LARGEST``, are kept as they are."""

    codec: RowCodec
    lossy = True

    def encode(self, values: torch.Tensor) -> torch.Tensor | None:
        if values.dtype not in FLOATS or not values.numel():
            return None
        if not max(map(abs, _ends(values))) <= LARGEST:
            return None
        return encoded(values, self.codec)

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        decode_into(values, code, self.codec)


def saved_codec(codec: str | Codec | None) -> SavedCodec | None:
    """Return the codec of an option; None keeps tensors as they are."""
    if codec is None:
        return None
    if isinstance(codec, ExponentCodec) or codec == ExponentCodec.spec:
        return ExactSaved()
    found = edge_codec(codec)
    if found is None:
        return None
    if not isinstance(found, RowCodec):
        raise InvalidArgument(
            f"codec is {codec!r}, which rotates the tokens of a pipeline's edge, expected 'exact' "
            "or a codec of rows, such as 'int8'"
        )
    if found.spec == "fp16":
        raise InvalidArgument(
            "codec is 'fp16', in which saved tensors may overflow: pass 'bf16', of the same size"
        )
    return RowsSaved(found)


def _ends(values: torch.Tensor) -> tuple[float, float]:
    """Return the least and the largest value; NaN if there is one."""
    low, high = values.aminmax()
    return float(low), float(high)
