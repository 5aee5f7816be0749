"""The checksum of chunks and manifests: xxh3, 64 bits, at memory speed and without the interpreter's lock."""

import struct
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from commpress.errors import MissingPackage

PIECE = 1 << 20  # bytes of a chunk that are moved and hashed at once: the processor's cache still has them


class Checksum(Protocol):
    def update(self, content: bytes | memoryview) -> None: ...

    def intdigest(self) -> int: ...


@cache
def _xxh3() -> type[Checksum]:
    try:
        from xxhash import xxh3_64
    except ImportError as error:
        raise MissingPackage("the tiered store needs xxhash for its checksums: pip install xxhash") from error
    return xxh3_64  # type: ignore[no-any-return, unused-ignore]


def checksum_of(content: bytes | memoryview) -> int:
    taken = _xxh3()()
    taken.update(content)
    return taken.intdigest()


def joined(pieces: Sequence[int]) -> int:
    """The checksum of a chunk from those of its pieces of ``PIECE`` bytes, which can be taken in any order by any thread."""
    return pieces[0] if len(pieces) == 1 else checksum_of(struct.pack(f"<{len(pieces)}Q", *pieces))
