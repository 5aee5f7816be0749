"""Layout of published weights: which part has which numbers of which tensor, and in which order.

A *part* is what one rank of the publisher compares. It has a stream for each type of numbers, and a
stream is a run of *pieces*: the elements ``first`` to ``last`` of a box of one tensor, in the order
of C. A stream is cut into blocks of 2²⁰ numbers, each of which has a code and a hash of its own.
All parts together have every element of every tensor once.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.kernels.exact_format import BFLOAT16, BLOCK, FLOAT32, PLAIN

MOST_TENSORS, MOST_PIECES, MOST_PARTS = 1 << 18, 1 << 20, 1 << 14
MOST_ELEMENTS, MOST_DIMS, LONGEST_NAME = 1 << 46, 16, 1 << 10


class NumberType(NamedTuple):
    """A type of numbers as the code sees it: unsigned integers, so many for each element."""

    dtype: torch.dtype
    unsigned: str
    words: int = 1
    kind: int = PLAIN

    @property
    def block(self) -> int:
        """Elements of a block."""
        return BLOCK // self.words

    def patterns(self, values: torch.Tensor) -> np.ndarray:
        """A flat tensor on the CPU as unsigned integers, without a copy."""
        return values.view(torch.uint8).numpy().view(self.unsigned)

    def integers(self, values: torch.Tensor) -> torch.Tensor:
        """The same of a tensor anywhere."""
        return values.view({"u1": torch.uint8, "u2": torch.int16, "u4": torch.int32}[self.unsigned])


_F8 = [getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")]
NUMBERS = {
    str(dtype).removeprefix("torch."): NumberType(dtype, unsigned, words, kind)
    for unsigned, words, kind, dtypes in (
        ("u1", 1, PLAIN, [torch.bool, torch.uint8, torch.int8, *_F8]),
        ("u2", 1, PLAIN, [torch.float16, torch.int16]),
        ("u2", 1, BFLOAT16, [torch.bfloat16]),
        ("u4", 1, FLOAT32, [torch.float32]),
        ("u4", 1, PLAIN, [torch.int32]),
        ("u4", 2, PLAIN, [torch.float64, torch.int64]),
    )
    for dtype in dtypes
}


class DescribedTensor(NamedTuple):
    """A tensor of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * NUMBERS[self.dtype].dtype.itemsize


class WeightPiece(NamedTuple):
    """Elements ``first`` to ``last`` of the box of ``size`` at ``begin`` of a tensor."""

    tensor: int
    begin: tuple[int, ...]
    size: tuple[int, ...]
    first: int
    last: int


class BlockRun(NamedTuple):
    """Elements of a piece that lie in one block, from ``at`` on there; ``first`` is counted in the
    piece's box."""

    piece: WeightPiece
    first: int
    last: int
    at: int


class WeightStream(NamedTuple):
    """The pieces of one type of numbers in one part."""

    dtype: str
    pieces: tuple[WeightPiece, ...]

    @property
    def numbers(self) -> NumberType:
        return NUMBERS[self.dtype]

    @property
    def numel(self) -> int:
        return sum(piece.last - piece.first for piece in self.pieces)

    def blocks(self) -> list[list[BlockRun]]:
        """List what lies in each block."""
        whole = self.numbers.block
        found: list[list[BlockRun]] = [[] for _ in range(-(-self.numel // whole))]
        at = 0
        for piece in self.pieces:
            first = piece.first
            while first < piece.last:
                block, inside = divmod(at, whole)
                count = min(piece.last - first, whole - inside)
                found[block].append(BlockRun(piece, first, first + count, inside))
                first, at = first + count, at + count
        return found


class WeightLayout:
    """Tensors, names of tied ones, and the streams of every part."""

    def __init__(
        self,
        tensors: Sequence[DescribedTensor],
        tied: Mapping[str, str],
        parts: Sequence[Sequence[WeightStream]],
    ) -> None:
        self.tensors, self.tied = tuple(tensors), dict(tied)
        self.parts = tuple(tuple(streams) for streams in parts)

    @cached_property
    def packed(self) -> bytes:
        parts = [
            [[stream.dtype, [list(piece) for piece in stream.pieces]] for stream in part]
            for part in self.parts
        ]
        packed: bytes = msgpack.packb([[list(t) for t in self.tensors], self.tied, parts])
        return packed

    @cached_property
    def name(self) -> str:
        """The same for equal layouts only, in all likelihood."""
        return f"layout-{checksum_of(self.packed):016x}{checksum_of(self.packed, 1):016x}"

    @property
    def model(self) -> tuple[Any, ...]:
        """The tensors, whoever has them."""
        return tuple(sorted(self.tensors)), tuple(sorted(self.tied.items()))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def numel(self) -> int:
        """Numbers, as the code counts them."""
        return sum(tensor.numel * NUMBERS[tensor.dtype].words for tensor in self.tensors)

    def blocks(self) -> Iterator[tuple[int, int, int, list[BlockRun]]]:
        """(part, stream, number, what lies in it) of every block."""
        for part, streams in enumerate(self.parts):
            for s, stream in enumerate(streams):
                for b, runs in enumerate(stream.blocks()):
                    yield part, s, b, runs

    @staticmethod
    def unpack(content: Any) -> "WeightLayout":
        """ValueError or TypeError for anything that is not a whole layout."""
        tensors, tied, parts = content
        _expect(len(tensors) <= MOST_TENSORS and len(parts) <= MOST_PARTS, "so many parts")
        described = [DescribedTensor(_name(n), dtype, _shape(shape)) for n, dtype, shape in tensors]
        names = {tensor.name for tensor in described}
        _expect(len(names) == len(described), "two tensors of one name")
        sizes = [tensor.numel for tensor in described if tensor.dtype in NUMBERS]
        _expect(len(sizes) == len(described) and max(sizes, default=0) <= MOST_ELEMENTS, "a type")
        aliases = {_name(alias): name for alias, name in tied.items()}
        known = names >= set(aliases.values()) and not names & aliases.keys()
        _expect(known, "names of tied tensors")
        left, count, streams = [t.numel for t in described], 0, []
        for part in parts:
            found = []
            for dtype, pieces in part:
                count += len(pieces)
                _expect(dtype in NUMBERS and count <= MOST_PIECES, "a stream")
                checked = tuple(_piece(piece, dtype, described) for piece in pieces)
                for piece in checked:
                    left[piece.tensor] -= piece.last - piece.first
                found.append(WeightStream(dtype, checked))
            streams.append(found)
        _expect(not any(left), "elements that no piece has, or several")
        return WeightLayout(described, aliases, streams)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it has {what} that cannot be")


def _name(name: Any) -> str:
    _expect(type(name) is str and 0 < len(name) <= LONGEST_NAME, "a name")
    return str(name)


def _shape(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    _expect(len(found) <= MOST_DIMS, "a shape")
    _expect(all(type(n) is int and 0 <= n <= MOST_ELEMENTS for n in found), "a shape")
    return found


def _piece(content: Any, dtype: str, tensors: Sequence[DescribedTensor]) -> WeightPiece:
    tensor, begin, size, first, last = content
    _expect(type(tensor) is int and 0 <= tensor < len(tensors), "a piece of no tensor")
    piece = WeightPiece(tensor, _shape(begin), _shape(size), *_shape((first, last)))
    box, of = list(zip(piece.begin, piece.size, strict=True)), tensors[tensor]
    _expect(of.dtype == dtype and len(box) == len(of.shape), "a piece")
    _expect(all(b + s <= n for (b, s), n in zip(box, of.shape, strict=True)), "a piece outside")
    _expect(piece.first < piece.last <= prod(piece.size), "a piece outside its box")
    return piece


# ---------------------------------------------------------------- whole tensors


def take(tensors: Mapping[int, torch.Tensor], runs: Sequence[BlockRun], out: torch.Tensor) -> None:
    """out := the elements of a block, from whole tensors."""
    for run in runs:
        slab, first = _slab(tensors[run.piece.tensor], run)
        count = run.last - run.first
        out[run.at : run.at + count] = slab.reshape(-1)[first : first + count]


def give(
    values: torch.Tensor, runs: Sequence[BlockRun], tensors: Mapping[int, torch.Tensor]
) -> None:
    """Put the elements of a block into whole tensors."""
    for run in runs:
        slab, first = _slab(tensors[run.piece.tensor], run)
        count = run.last - run.first
        whole = slab.reshape(-1)  # a copy, where rows of the box are not whole rows of the tensor
        whole[first : first + count] = values[run.at : run.at + count]
        if whole.data_ptr() != slab.data_ptr():
            slab.copy_(whole.view(slab.shape))


def contiguous(
    tensors: Mapping[int, torch.Tensor], runs: Sequence[BlockRun]
) -> torch.Tensor | None:
    """The very memory of a block that lies in one tensor, in order; None for others."""
    if len(runs) > 1:
        return None
    slab, first = _slab(tensors[runs[0].piece.tensor], runs[0])
    return (
        slab.view(-1)[first : first + runs[0].last - runs[0].first]
        if slab.is_contiguous()
        else None
    )


def _slab(tensor: torch.Tensor, run: BlockRun) -> tuple[torch.Tensor, int]:
    """The rows of a box that a run lies in, as a view, and where it begins in them."""
    piece = run.piece
    box = tensor[tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.size, strict=True))]
    if not piece.size:
        return box, run.first
    row = prod(piece.size[1:])
    start = run.first // row
    return box[start : -(-run.last // row)], run.first - start * row


def rows_meet(tensor: torch.Tensor, one: BlockRun, other: BlockRun) -> bool:
    """False where two runs of a tensor can have no element in common, by the rows that they lie "
    "in."""
    (a, b), (c, d) = (_rows(run) for run in (one, other))
    return (a < d and c < b) or not tensor.dim()


def _rows(run: BlockRun) -> tuple[int, int]:
    row = max(prod(run.piece.size[1:]), 1)
    begin = run.piece.begin[0] if run.piece.begin else 0
    return begin + run.first // row, begin - (-run.last // row)
