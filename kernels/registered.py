"""Codecs that users wrote in plain torch, by the kind under which a piece names one.

Imports no torch: pieces know kinds, and a wheel is built where there is no torch.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

REGISTERED = 64  # the family of kinds, see ``reference.kind_of``: far from those that kernels know


class PlainCodec(Protocol):
    """A codec in plain torch: rows of floats to rows of bytes of a known size, and back."""

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of ``width`` elements."""

    def encode(self, values: "torch.Tensor") -> "torch.Tensor":
        """uint8[row_bytes(len)] for float32[len], len ≤ width of the row: shorter rows are padded
        with zero bytes."""

    def decode(self, row: "torch.Tensor", numel: int) -> "torch.Tensor":
        """float32[numel] from the bytes of a row: the same bits wherever it is called."""


_codecs: list[PlainCodec] = []


def add(codec: PlainCodec) -> int:
    """The kind of one more codec, in this process: what travels is its name."""
    _codecs.append(codec)
    return REGISTERED | (len(_codecs) - 1) << 8


def of_kind(kind: int) -> PlainCodec:
    return _codecs[kind >> 8]


def size_of(kind: int, width: int) -> int:
    """Bytes of a row: one that says whether its numbers were finite, and the codec's."""
    return 1 + of_kind(kind).row_bytes(width)


def known(kind: int) -> bool:
    return kind & 255 == REGISTERED
