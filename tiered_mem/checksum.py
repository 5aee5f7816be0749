"""The checksum of chunks and manifests: xxh3, 64 bits, at memory speed and without the interpreter's lock."""

import struct
from collections.abc import Callable, Sequence
from functools import cache

from commpress.errors import MissingPackage

PIECE = 1 << 20  # bytes of a chunk that are moved and hashed at once: the processor's cache still has them


@cache
def _xxh3() -> Callable[[bytes | memoryview], int]:
    """In one call: an object that is fed takes half as long again for a piece that is in the cache."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise MissingPackage("the tiered store needs xxhash for its checksums: pip install xxhash") from error
    return xxh3_64_intdigest  # type: ignore[no-any-return, unused-ignore]


def checksum_of(content: bytes | memoryview) -> int:
    return _xxh3()(content)


def joined(pieces: Sequence[int]) -> int:
    """The checksum of a chunk from those of its pieces of ``PIECE`` bytes, which can be taken in any order by any thread."""
    return pieces[0] if len(pieces) == 1 else checksum_of(struct.pack(f"<{len(pieces)}Q", *pieces))
