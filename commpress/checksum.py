"""xxh3: the 64-bit checksum of everything that is stored or sent, at memory speed and without the
interpreter's lock.

``checksum_of(content, seed=0)`` is one call: a hash object that is fed in parts takes 50 % longer
for a piece in the cache. ``Checksum`` is that object, for files that are written piece by piece.
"""

from xxhash import xxh3_64 as Checksum
from xxhash import xxh3_64_intdigest as checksum_of

__all__ = ["Checksum", "checksum_of"]
