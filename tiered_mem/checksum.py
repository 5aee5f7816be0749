"""The checksum of chunks and manifests, taken piece by piece."""

import struct
from collections.abc import Sequence

from commpress.checksum import checksum_of

PIECE = 1 << 20  # bytes of a chunk that are moved and hashed at once: the processor's cache still has them


def joined(pieces: Sequence[int]) -> int:
    """The checksum of a chunk from those of its pieces of ``PIECE`` bytes, which can be taken in any order by any thread."""
    return pieces[0] if len(pieces) == 1 else checksum_of(struct.pack(f"<{len(pieces)}Q", *pieces))
