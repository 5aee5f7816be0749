"""What a commit writes last: every tensor, the chunks it lies in, their checksums and generations.

A snapshot is a second manifest under a name of its own: the chunks it lists are not written again while it is there.
"""

from dataclasses import dataclass, field
from typing import Any

from commpress.errors import Damaged

MAGIC = b"cmprsTS2"
NAME = "manifest"
LONGEST_NAME = 1024  # bytes of a tensor's name


@dataclass(frozen=True, slots=True)
class Extent:
    """Where bytes lie on disk: ``length`` is aligned."""

    folder: int
    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """``nbytes`` at the beginning of an extent, written in ``generation``, the number of the commit that made it last."""

    extent: Extent
    nbytes: int
    checksum: int
    generation: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in its block."""

    name: str
    start: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def like(self, other: "Entry") -> bool:
        return (self.dtype, self.shape) == (other.dtype, other.shape)


@dataclass(frozen=True, slots=True)
class Row:
    """One block: tensors that lie side by side, and the chunks that hold them in order."""

    size: int
    entries: tuple[Entry, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    store: bytes
    generation: int
    rows: tuple[Row, ...]
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
    def unpack(content: Any, name: str = NAME) -> "Manifest":
        """From what ``pack`` made, every number checked; Damaged otherwise."""
        try:
            store, generation, rows, written, born, days = content
            parsed = tuple(_row(size, entries, chunks) for size, entries, chunks in rows)
            found = Manifest(bytes(store), _natural(generation), parsed, _natural(written), float(born), dict(days))
            for day, count in found.days.items():
                _require(isinstance(day, str), "a day is a text")
                _natural(count)
        except (TypeError, ValueError) as error:
            raise Damaged(
                f"{name} has a checksum that fits, but not the form of this version: {error}", file=name
            ) from error
        names = [entry.name for row in found.rows for entry in row.entries]
        if len(names) != len(set(names)):
            raise Damaged(f"{name} lists a tensor twice", file=name)
        return found


def _row(size: Any, entries: Any, chunks: Any) -> Row:
    row = Row(_natural(size), tuple(_entry(*e) for e in entries), tuple(_chunk(*c) for c in chunks))
    _require(sum(c.nbytes for c in row.chunks) == row.size, "chunks fill their block")
    _require(all(e.start + e.nbytes <= row.size for e in row.entries), "tensors lie inside their block")
    return row


def _entry(name: Any, start: Any, nbytes: Any, dtype: Any, shape: Any) -> Entry:
    _require(isinstance(name, str) and isinstance(dtype, str), "names and dtypes are texts")
    return Entry(name, _natural(start), _natural(nbytes), dtype, tuple(_natural(n) for n in shape))


def _chunk(folder: Any, segment: Any, offset: Any, length: Any, nbytes: Any, checksum: Any, generation: Any) -> Chunk:
    extent = Extent(_natural(folder), _natural(segment), _natural(offset), _natural(length))
    chunk = Chunk(extent, _natural(nbytes), _natural(checksum), _natural(generation))
    _require(chunk.nbytes <= extent.length, "a chunk fits its extent")
    return chunk


def _natural(value: Any) -> int:
    _require(type(value) is int and value >= 0, f"{value!r} is a natural number")
    return int(value)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it does not hold that {what}")
