"""xxh3: the 64-bit checksum of everything that is stored or sent, at memory speed and without the
interpreter's lock."""

from collections.abc import Callable
from functools import cache

from commpress.errors import MissingPackage


@cache
def _xxh3() -> Callable[[bytes | memoryview, int], int]:
    """Return the one-shot function. A hash object that is fed in parts takes 50 % longer for a
    piece in the cache."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise MissingPackage(
            "messages and stores need xxhash for their checksums: pip install xxhash"
        ) from error
    return xxh3_64_intdigest  # type: ignore[no-any-return, unused-ignore]


def checksum_of(content: bytes | memoryview, seed: int = 0) -> int:
    return _xxh3()(content, seed)
