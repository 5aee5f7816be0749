"""Records of published versions: small msgpack documents behind a checksum, read with caps.

    head      what a reader asks first: the run, and its versions that can still be had
    v…        one version: how it follows from its base, where its codes are, hashes of the result,
              and with an anchor who has which numbers, from then on

A *run* is a random number that is made with the first version. An *epoch* counts the publishers of
a run, one after the other. The *digest* of a version is that of the hashes of all blocks, so it
says which bits a reader must have.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import msgpack
import numpy as np

from commpress.checksum import checksum_of
from commpress.errors import Damaged, InvalidArgument
from commpress.integrations.weights.weight_layout import WeightLayout, expect
from commpress.kernels.exact_format import BLOCK

HEAD_NAME = "head"
LONGEST_HEAD, LONGEST_RECORD = 1 << 22, 1 << 28
LONGEST_BLOCK = 4 * BLOCK + 1  # bytes of a code
_HEAD_BYTES = 16  # magic word, bytes of the body, checksum of it
_VERSION = re.compile(r"v(\d{15})(?:-|\Z)")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,199}")
T = TypeVar("T", bound=Any)


def version_name(version: int) -> str:
    return f"v{version:015d}"


def version_of(name: str) -> int:
    """The version that a file belongs to, 0 for others."""
    found = _VERSION.match(name)
    return int(found[1]) if found else 0


def payload_name(version: int, part: int, epoch: int, *, anchor: bool) -> str:
    return f"{version_name(version)}-{part:05d}-{epoch}.{'anchor' if anchor else 'difference'}"


def is_plain(name: str) -> bool:
    """True for the name of a file in the folder itself."""
    return bool(_PLAIN.fullmatch(name))


@dataclass(frozen=True)
class Version:
    """One published version; ``density`` is the share of numbers that changed."""

    version: int
    base: int
    epoch: int
    bytes: int  # of its differences
    anchor_bytes: int  # of all weights, beside them so that readers can begin here; 0 if not
    dense_bytes: int  # of the weights as they are
    density: float
    parts: int


class ListedVersion(NamedTuple):
    """A version that can be had; readers can begin with it if it is anchored."""

    version: int
    base: int
    anchored: bool


class PayloadFile(NamedTuple):
    """One part's codes of one version: a file, its checksum, and the bytes of each code."""

    name: str
    checksum: int
    sizes: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())


class VersionRecord(NamedTuple):
    """See above. ``hashes``: of every block, by part; ``changed``: numbers that differ from the
    base's. There is a file of differences and one of an anchor for each part, or none; the layout
    comes with anchors, the first version of a run has no base. One without a number stands for
    weights before the first."""

    run: str = ""
    epoch: int = 0
    version: int = 0
    base: int = 0
    base_digest: int = 0
    changed: int = 0
    hashes: tuple[np.ndarray, ...] = ()
    differences: tuple[PayloadFile, ...] = ()
    anchors: tuple[PayloadFile, ...] = ()
    layout: WeightLayout = WeightLayout()

    def __str__(self) -> str:
        return f"version {self.version}: {self.nbytes + self.anchor_nbytes:,} bytes"

    @property
    def digest(self) -> int:
        return checksum_of(b"".join(map(_packed, self.hashes)))

    @property
    def blocks(self) -> list[int]:
        """Return the number of blocks of each part."""
        return [len(each) for each in self.hashes]

    @property
    def nbytes(self) -> int:
        """Bytes of the differences."""
        return sum(file.nbytes for file in self.differences)

    @property
    def anchor_nbytes(self) -> int:
        return sum(file.nbytes for file in self.anchors)

    @property
    def listed(self) -> ListedVersion:
        return ListedVersion(self.version, self.base, bool(self.anchors))

    @property
    def facts(self) -> Version:
        density, dense = self.changed / max(self.layout.numel, 1), self.layout.nbytes
        about = self.version, self.base, self.epoch
        return Version(*about, self.nbytes, self.anchor_nbytes, dense, density, len(self.hashes))

    def check(self) -> None:
        """ValueError unless it is whole."""
        expect(is_plain(self.run), "a name")
        for files in filter(None, (self.differences, self.anchors)):
            expect([len(file.sizes) for file in files] == self.blocks, "other blocks")
        for file in self.differences + self.anchors:
            expect(is_plain(file.name), "a file")
            expect(bool((file.sizes <= LONGEST_BLOCK).all()), "a code's size")
        if self.anchors:
            self.layout.check()
            expect(self.layout.numel <= BLOCK * sum(self.blocks), "more numbers than its blocks")
            blocks = [len(self.layout.blocks(part)) for part in range(len(self.layout.parts))]
            expect(blocks == self.blocks, "other blocks than its layout")
        starts = self.anchors or (self.differences and self.base)
        expect(self.base < self.version and bool(starts), "a base")


class HeadRecord(NamedTuple):
    """The versions that can be had, in ascending order."""

    run: str
    epoch: int
    versions: tuple[ListedVersion, ...]

    @property
    def newest(self) -> int:
        return self.versions[-1].version

    def check(self) -> None:
        """ValueError unless it is whole."""
        numbers = [each.version for each in self.versions]
        expect(is_plain(self.run) and bool(numbers), "a run")
        expect(numbers == sorted(set(numbers)), "an order")
        expect(all(each.base < each.version for each in self.versions), "a base")

    def route(self, target: int, held: int) -> tuple[bool, list[int]]:
        """(True if it begins with an anchor, versions in order) to ``target``: from ``held`` where
        differences lead from there, else from the newest anchor."""
        known = {each.version: each for each in self.versions}
        back, at = [], target
        while at in known and at != held:
            back.append(at)
            at = known[at].base
        if held and at == held:
            return False, back[::-1]
        for count, version in enumerate(back):
            if known[version].anchored:
                return True, back[count::-1]
        cure = "the publisher's next anchor ends the gap"
        raise Damaged(
            f"version {target} follows from {at}, which is not there any more: {cure}",
            file=HEAD_NAME,
        )


# ---------------------------------------------------------------- bytes

_MAGIC = {HeadRecord: b"cwH4", VersionRecord: b"cwV4"}


def pack(record: HeadRecord | VersionRecord) -> bytes:
    if isinstance(record, VersionRecord) and not record.anchors:
        record = record._replace(layout=WeightLayout())
    body: bytes = msgpack.packb(record, default=_packed)
    if len(body) > LONGEST_RECORD:
        raise InvalidArgument(
            f"a record would have {len(body):,} bytes, at most {LONGEST_RECORD:,} are read back"
        )
    return (
        _MAGIC[type(record)]
        + len(body).to_bytes(4, "little")
        + checksum_of(body).to_bytes(8, "little")
        + body
    )


def unpack(kind: type[T], data: bytes, name: str = HEAD_NAME) -> T:
    """The record in a file; Damaged for whatever is wrong with it."""
    body, length, magic = data[_HEAD_BYTES:], int.from_bytes(data[4:8], "little"), _MAGIC[kind]
    if data[:4] != magic or len(body) != length:
        what = f"{name} is no whole record of kind {magic.decode()}: {len(data):,} bytes"
        raise Damaged(what, file=name)
    if checksum_of(body) != int.from_bytes(data[8:_HEAD_BYTES], "little"):
        raise Damaged(f"{name} does not match its checksum", file=name)
    try:
        found: T = _typed(kind, msgpack.unpackb(body, max_ext_len=0))
        found.check()
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise Damaged(f"{name} cannot be read: {error}", file=name) from error
    return found


def _packed(numbers: np.ndarray) -> bytes:
    return numbers.astype("<u8").tobytes()


def _typed(kind: Any, value: Any) -> Any:
    """The value as a named tuple or a tuple of such, of numbers from 0, text and arrays."""
    if kind is np.ndarray:
        return np.frombuffer(value, "<u8").astype(np.uint64)
    if hasattr(kind, "_fields"):
        each = zip(kind.__annotations__.values(), value, strict=True)
        return kind(*(_typed(of, content) for of, content in each))
    if get_origin(kind) is tuple:
        of = get_args(kind)
        return tuple(_typed(of[0], content) for content in value)
    expect(type(value) is kind and (kind is not int or 0 <= value < 1 << 64), "a value")
    return value
