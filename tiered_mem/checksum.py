"""The checksum of chunks and manifests: xxh3, 64 bits, at memory speed and without the interpreter's lock."""

from functools import cache
from typing import Protocol

from commpress.errors import MissingPackage


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


def checksum() -> Checksum:
    """Of nothing yet."""
    return _xxh3()()


def checksum_of(content: bytes | memoryview) -> int:
    taken = checksum()
    taken.update(content)
    return taken.intdigest()
