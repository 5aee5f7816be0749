"""Manifest, which a commit writes last: every tensor with its chunks, their checksums and
generations.

A snapshot is another manifest with its own name: the chunks that it lists are not overwritten while
it exists.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from commpress.errors import Damaged
from commpress.tiered_mem.layer import MANIFEST, PAGE, SEGMENTS

MAGIC = b"cmprsTS2"  # its last byte is the version
LONGEST_NAME = 1024  # bytes of a tensor's name
LARGEST = 1 << 62  # of all numbers but checksums, so that sums of two fit 64 bits
DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True, slots=True)
class Extent:
    """Place of bytes on disk: ``length`` is aligned."""

    folder: int
    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The first ``nbytes`` of an extent, written in ``generation``, the number of the commit that
    made it last."""

    extent: Extent
    nbytes: int
    checksum: int
    generation: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in its block."""

    name: str
    start: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def like(self, other: "Entry") -> bool:
        return (self.dtype, self.shape) == (other.dtype, other.shape)


@dataclass(frozen=True, slots=True)
class ManifestRow:
    """A block: contiguous tensors, and the chunks that contain them in order."""

    size: int
    entries: tuple[Entry, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    store: bytes
    generation: int
    rows: tuple[ManifestRow, ...]
    written: int = 0  # bytes written to the disks in the life of the store
    born: float = 0.0
    days: dict[str, int] = field(default_factory=dict)  # bytes written by UTC date, the last days

    @property
    def extents(self) -> set[Extent]:
        return {chunk.extent for row in self.rows for chunk in row.chunks}

    def pack(self) -> list[Any]:
        rows = [
            [
                row.size,
                [[e.name, e.start, e.nbytes, e.dtype, e.shape] for e in row.entries],
                [
                    [
                        c.extent.folder,
                        c.extent.segment,
                        c.extent.offset,
                        c.extent.length,
                        c.nbytes,
                        c.checksum,
                        c.generation,
                    ]
                    for c in row.chunks
                ],
            ]
            for row in self.rows
        ]
        return [self.store, self.generation, rows, self.written, self.born, self.days]

    @staticmethod
    def unpack(content: Any, name: str = MANIFEST, *, folders: int | None = None) -> "Manifest":
        """Parse the result of ``pack`` with a check of every number, also against the count of
        ``folders`` if it is given; raise ``Damaged`` if a check fails."""
        try:
            store, generation, rows, written, born, days = content
            _require(type(store) is bytes and len(store) == 16, "a store is known by 16 bytes")
            _require(type(rows) is list and type(days) is dict, "there are rows and days")
            _require(type(born) in (int, float) and math.isfinite(born), "it was born at some time")
            parsed = tuple(_row(*row) for row in rows)
            found = Manifest(
                store, _natural(generation), parsed, _natural(written), float(born), dict(days)
            )
            for day, count in found.days.items():
                _require(
                    isinstance(day, str) and DAY.fullmatch(day) is not None,
                    f"{day!r:.100} is a day",
                )
                _natural(count)
            extents = [chunk.extent for row in parsed for chunk in row.chunks]
            _require(len(set(extents)) == len(extents), "every chunk has a place of its own")
            _require(
                folders is None or all(e.folder < folders for e in extents),
                f"there are {folders} directories",
            )
            names = [entry.name for row in parsed for entry in row.entries]
            _require(len(set(names)) == len(names), "every tensor is listed once")
        except (TypeError, ValueError) as error:
            raise Damaged(
                f"{name} has a valid checksum, but not the format of this version: {error}",
                file=name,
            ) from error
        return found


def _row(size: Any, entries: Any, chunks: Any) -> ManifestRow:
    row = ManifestRow(
        _natural(size), tuple(_entry(*e) for e in entries), tuple(_chunk(*c) for c in chunks)
    )
    _require(sum(c.nbytes for c in row.chunks) == row.size, "chunks fill their block")
    _require(
        all(c.nbytes == c.extent.length for c in row.chunks[:-1]),
        "chunks but the last are whole pages",
    )
    filled = sorted((e.start, e.start + e.nbytes) for e in row.entries if e.nbytes)
    _require(
        all(e.start + e.nbytes <= row.size for e in row.entries), "tensors lie inside their block"
    )
    _require(all(one[1] <= other[0] for one, other in pairwise(filled)), "tensors lie side by side")
    return row


def _entry(name: Any, start: Any, nbytes: Any, dtype: Any, shape: Any) -> Entry:
    _require(
        type(name) is str and 0 < len(name.encode()) <= LONGEST_NAME and "\0" not in name,
        "tensors have names",
    )
    _require(
        type(dtype) is str and dtype in DTYPES, f"{dtype!r:.100} is a dtype that this version knows"
    )
    _require(type(shape) in (list, tuple), "a shape is a row of numbers")
    entry = Entry(name, _natural(start), _natural(nbytes), dtype, tuple(_natural(n) for n in shape))
    itemsize = DTYPES[dtype].itemsize
    _require(strides_fit(entry.shape), f"{name!r:.100} has a shape that can be")
    _require(
        itemsize * math.prod(entry.shape) == entry.nbytes,
        f"{name!r:.100} has as many bytes as its shape",
    )
    _require(entry.start % itemsize == 0, f"{name!r:.100} is aligned")
    return entry


def strides_fit(shape: Iterable[int]) -> bool:
    """Return whether strides fit 64 bits; even those of an empty tensor must."""
    return math.prod(max(n, 1) for n in shape) <= LARGEST


def _chunk(
    folder: Any, segment: Any, offset: Any, length: Any, nbytes: Any, checksum: Any, generation: Any
) -> Chunk:
    extent = Extent(_natural(folder), _natural(segment), _natural(offset), _natural(length))
    chunk = Chunk(extent, _natural(nbytes), _natural(checksum, (1 << 64) - 1), _natural(generation))
    # leaves numbers for later segments
    _require(extent.segment < SEGMENTS // 2, "a segment has a number")
    _require(extent.offset % PAGE == 0 and extent.length % PAGE == 0, "chunks lie on pages")
    _require(0 < chunk.nbytes <= extent.length < chunk.nbytes + PAGE, "a chunk fits its extent")
    return chunk


def _natural(value: Any, largest: int = LARGEST) -> int:
    _require(
        type(value) is int and 0 <= value <= largest,
        f"{value!r:.100} is a number from 0 to {largest}",
    )
    return int(value)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it does not hold that {what}")
