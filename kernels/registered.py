"""Codecs of users in plain torch, by their kinds in a table of pieces.

This module imports no torch: pieces need kinds, and a wheel is built without torch.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

REGISTERED = 64  # the family of kinds, see ``reference.kind_of``: far from the built-in ones


class PlainCodec(Protocol):
    """A codec in plain torch: it turns rows of floats into rows of bytes of a known size, and
    back."""

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of ``width`` elements."""

    def encode(self, values: "torch.Tensor") -> "torch.Tensor":
        """Return uint8[row_bytes(len)] for float32[len], len ≤ width of the row: shorter rows are
        padded with zero bytes."""

    def decode(self, row: "torch.Tensor", numel: int) -> "torch.Tensor":
        """Return float32[numel] from the bytes of a row: the same bits wherever it is called."""


_codecs: list[PlainCodec] = []


def add(codec: PlainCodec) -> int:
    """Add a codec and return its kind in this process; messages have its name."""
    _codecs.append(codec)
    return REGISTERED | (len(_codecs) - 1) << 8


def of_kind(kind: int) -> PlainCodec:
    return _codecs[kind >> 8]


def size_of(kind: int, width: int) -> int:
    """Return the bytes of a row: one that tells whether its numbers were finite, and the
    codec's."""
    return 1 + of_kind(kind).row_bytes(width)


def known(kind: int) -> bool:
    return kind & 255 == REGISTERED
