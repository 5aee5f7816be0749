"""Layout of published weights: which part has which numbers of which tensor, and in which order.

A *part* is what one rank of the publisher compares: a run of *pieces*, each the elements ``first``
to ``last`` of a box of one tensor, in the order of C. Large pieces are cut and small ones joined to
blocks of up to 2²⁰ numbers, each of which has a code and a hash of its own. All parts together have
every element of every tensor once.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from commpress.kernels.exact_format import BFLOAT16, BLOCK, FLOAT32, PLAIN

MOST_ELEMENTS, MOST_DIMS = 1 << 46, 16


def host_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in host memory that any thread may write to: torch's default device may be another, and
    ``torch.inference_mode`` makes tensors that nobody may write to outside it."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device="cpu")


class NumberType(NamedTuple):
    """A type of numbers as the code sees it: unsigned integers, so many for each element."""

    dtype: torch.dtype
    unsigned: str
    words: int
    kind: int

    def integers(self, values: torch.Tensor) -> torch.Tensor:
        """A flat tensor as integers, on its device and without a copy."""
        return values.view({"u1": torch.uint8, "u2": torch.int16, "u4": torch.int32}[self.unsigned])

    def patterns(self, values: torch.Tensor) -> np.ndarray:
        """A flat tensor on the CPU as unsigned integers, without a copy."""
        return self.integers(values).numpy().view(self.unsigned)


_INTEGERS = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
_FLOAT8 = [f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")]
_NAMES = "bool", *_INTEGERS, "float16", "bfloat16", "float32", "float64", *_FLOAT8
NUMBERS = {
    name: NumberType(
        dtype,
        f"u{min(dtype.itemsize, 4)}",
        -(-dtype.itemsize // 4),
        {"bfloat16": BFLOAT16, "float32": FLOAT32}.get(name, PLAIN),
    )
    for name in _NAMES
    if (dtype := getattr(torch, name, None)) is not None
}


class DescribedTensor(NamedTuple):
    """A tensor of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of {list(self.shape)}"

    @property
    def numbers(self) -> NumberType:
        return NUMBERS[self.dtype]

    def zeros(self) -> torch.Tensor:
        return host_zeros(self.shape, self.numbers.dtype)


class WeightPiece(NamedTuple):
    """Elements ``first`` to ``last`` of the box of ``size`` at ``begin`` of a tensor."""

    tensor: int
    begin: tuple[int, ...]
    size: tuple[int, ...]
    first: int
    last: int

    @property
    def numel(self) -> int:
        return self.last - self.first

    @property
    def rows(self) -> tuple[int, int]:
        """The first and the last row of the tensor that it may have elements of."""
        row, begin = max(prod(self.size[1:]), 1), self.begin[0] if self.begin else 0
        return begin + self.first // row, begin + (self.last - 1) // row

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its elements in the whole tensor: a view where they lie in order, else a copy."""
        slab, inside = self._slab(tensor)
        return slab.reshape(-1)[inside]

    def write(self, values: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put its elements into the whole tensor, unless they are a view of it."""
        slab, inside = self._slab(tensor)
        whole = slab.reshape(-1)
        if whole[inside].data_ptr() != values.data_ptr():
            whole[inside] = values
        if whole.data_ptr() != slab.data_ptr():
            slab.copy_(whole.view(slab.shape))

    def _slab(self, tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """The rows of the box that it lies in, as a view, and its place in them."""
        box = tensor[tuple(slice(b, b + n) for b, n in zip(self.begin, self.size, strict=True))]
        row = prod(self.size[1:])
        start, inside = self.first // row, slice(self.first % row, self.first % row + self.numel)
        return (box if self.size else box.view(1))[start : -(-self.last // row)], inside


def placed(block: Sequence[WeightPiece]) -> Iterator[tuple[WeightPiece, slice]]:
    """Its pieces, and where their elements lie in it."""
    at = 0
    for piece in block:
        yield piece, slice(at, at + piece.numel)
        at += piece.numel


class WeightLayout(NamedTuple):
    """Tensors, names of tied ones, and the pieces of every part."""

    tensors: tuple[DescribedTensor, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[WeightPiece, ...], ...] = ()

    @property
    def model(self) -> tuple[Any, ...]:
        """The tensors, whoever has them."""
        return sorted(self.tensors), sorted(self.tied)

    @property
    def nbytes(self) -> int:
        return sum(prod(t.shape) * t.numbers.dtype.itemsize for t in self.tensors)

    @property
    def numel(self) -> int:
        """Numbers, as the code counts them."""
        return sum(prod(t.shape) * t.numbers.words for t in self.tensors)

    def numbers(self, piece: WeightPiece) -> NumberType:
        return self.tensors[piece.tensor].numbers

    def blocks(self, part: int) -> list[list[WeightPiece]]:
        """Pieces of one type of numbers, and at most ``BLOCK`` of these."""
        found, room, last = list[list[WeightPiece]](), 0, None
        for piece in self.parts[part]:
            numbers = self.numbers(piece)
            most = BLOCK // numbers.words
            for first in range(piece.first, piece.last, most):
                cut = piece._replace(first=first, last=min(first + most, piece.last))
                if numbers is not last or cut.numel > room:
                    found.append([])
                    room, last = most, numbers
                found[-1].append(cut)
                room -= cut.numel
        return found

    def check(self) -> None:
        """ValueError unless it is whole."""
        names = {tensor.name for tensor in self.tensors}
        expect(len(names) == len(self.tensors), "two tensors of one name")
        expect(all(of in names and alias not in names for alias, of in self.tied), "a tied name")
        for tensor in self.tensors:
            expect(tensor.dtype in NUMBERS, "a type")
            expect(len(tensor.shape) <= MOST_DIMS, "a shape")
            expect(prod(max(n, 1) for n in tensor.shape) <= MOST_ELEMENTS, "a shape")
        left = [prod(tensor.shape) for tensor in self.tensors]
        for piece in (piece for part in self.parts for piece in part):
            expect(piece.tensor < len(left), "a piece of no tensor")
            shape = self.tensors[piece.tensor].shape
            box = zip(piece.begin, piece.size, shape, strict=True)
            expect(all(begin + size <= n for begin, size, n in box), "a piece outside")
            expect(piece.first < piece.last <= prod(piece.size), "a piece outside its box")
            left[piece.tensor] -= piece.numel
        expect(not any(left), "elements that no piece has, or several")


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it has {what} that cannot be")
