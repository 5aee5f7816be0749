"""Records of published versions: small msgpack documents behind a checksum, read with caps.

    head      what a reader asks first: the run, and its versions that can still be had
    v…        one version: how it follows from its base, where its codes are, and hashes of the
              result
    layout-…  who has which numbers; versions name it

A *run* is a random number that is made with the first version. An *epoch* counts the publishers of
a run, one after the other. The *digest* of a version is that of the hashes of all blocks, so it
says which bits a reader must have.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from commpress.checksum import checksum_of
from commpress.errors import Damaged, InvalidArgument
from commpress.integrations.weights.weight_layout import MOST_PARTS, WeightLayout
from commpress.kernels.exact_format import BLOCK

HEAD_NAME = "head"
_HEAD_MAGIC, _VERSION_MAGIC, _LAYOUT_MAGIC = b"cwH1", b"cwV1", b"cwL1"
_HEAD_BYTES = 16  # magic word, bytes of the body, checksum of it
LONGEST_HEAD, LONGEST_RECORD = 1 << 22, 1 << 28
MOST_VERSIONS = 1 << 16
LONGEST_BLOCK = 4 * BLOCK + 1  # bytes of a code
_VERSION = re.compile(r"v(\d{15})(?:-|\Z)")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,199}")


def version_name(version: int) -> str:
    return f"v{version:015d}"


def version_of(name: str) -> int:
    """The version that a file belongs to, 0 for others."""
    found = _VERSION.match(name)
    return int(found[1]) if found else 0


def payload_name(version: int, part: int, epoch: int, *, anchor: bool) -> str:
    return f"{version_name(version)}-{part:05d}-{epoch}.{'anchor' if anchor else 'difference'}"


@dataclass
class PayloadFile:
    """One part's codes of one version: a file, its bytes and checksum, and the bytes of each code,
    stream by stream."""

    name: str
    nbytes: int
    checksum: int
    sizes: list[np.ndarray]

    def offsets(self) -> list[np.ndarray]:
        """First byte of each code, stream by stream."""
        ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *self.sizes]))
        cuts = np.cumsum([len(sizes) for sizes in self.sizes])[:-1]
        return np.split(ends[:-1], cuts)

    def pack(self) -> list[Any]:
        sizes = [each.astype("<u4").tobytes() for each in self.sizes]
        return [self.name, self.nbytes, self.checksum, sizes]

    @staticmethod
    def unpack(content: Any) -> "PayloadFile":
        name, nbytes, checksum, packed = content
        sizes = [np.frombuffer(each, "<u4").astype(np.int64) for each in packed]
        every = np.concatenate([np.ones(1, np.int64), *sizes])
        _expect(is_plain(name) and _number(checksum), "a file")
        _expect(int(every.sum()) - 1 == nbytes, "a file of a size")
        _expect(0 < int(every.min()) <= int(every.max()) <= LONGEST_BLOCK, "a code of a size")
        return PayloadFile(name, nbytes, checksum, sizes)


@dataclass
class VersionRecord:
    """See above. ``hashes``: of every block, by part and stream. The first version of a run has no
    base."""

    run: str
    epoch: int
    version: int
    base: int
    base_digest: int
    layout: str
    hashes: list[list[np.ndarray]]
    changed: int  # numbers that differ from the base's
    differences: list[PayloadFile] = field(default_factory=list)  # a file for each part, or none
    anchors: list[PayloadFile] = field(default_factory=list)

    @property
    def digest(self) -> int:
        packed = b"".join(each.astype("<u8").tobytes() for part in self.hashes for each in part)
        return checksum_of(packed, checksum_of(self.layout.encode()))

    @property
    def nbytes(self) -> int:
        """Bytes of the differences."""
        return sum(file.nbytes for file in self.differences)

    @property
    def anchor_nbytes(self) -> int:
        return sum(file.nbytes for file in self.anchors)

    def pack(self) -> bytes:
        hashes = [[each.astype("<u8").tobytes() for each in part] for part in self.hashes]
        files = [[file.pack() for file in files] for files in (self.differences, self.anchors)]
        names = [self.run, self.epoch, self.version, self.base, self.base_digest, self.layout]
        return _record(_VERSION_MAGIC, [*names, hashes, self.changed, *files])

    @staticmethod
    def unpack(data: bytes, name: str) -> "VersionRecord":
        with _readable(name):
            content = _unrecord(_VERSION_MAGIC, data, name)
            run, epoch, version, base, digest, layout, hashes, changed, *files = content
            _expect(all(map(_number, (epoch, version, base, digest, changed))), "a number")
            _expect(is_plain(run) and is_plain(layout) and len(hashes) <= MOST_PARTS, "a name")
            found = [[np.frombuffer(h, "<u8").astype(np.uint64) for h in part] for part in hashes]
            differences, anchors = ([PayloadFile.unpack(file) for file in each] for each in files)
            shape = [[len(each) for each in part] for part in found]
            for each in filter(None, (differences, anchors)):
                _expect([[len(s) for s in f.sizes] for f in each] == shape, "other blocks")
            _expect(base < version and bool(anchors or (differences and base)), "a base")
        return VersionRecord(
            run, epoch, version, base, digest, layout, found, changed, differences, anchors
        )

    def check_layout(self, layout: WeightLayout) -> None:
        """Damaged unless the blocks are those of the layout."""
        expected = [[len(stream.blocks()) for stream in streams] for streams in layout.parts]
        if [[len(each) for each in part] for part in self.hashes] != expected:
            name = version_name(self.version)
            raise Damaged(f"{name} has other blocks than its {self.layout}", file=name)


@dataclass
class HeadRecord:
    """The versions that can be had, in ascending order: (version, base, True if it has an "
    "anchor)."""

    run: str
    epoch: int
    versions: list[tuple[int, int, bool]]

    @property
    def newest(self) -> int:
        return self.versions[-1][0]

    def pack(self) -> bytes:
        return _record(_HEAD_MAGIC, [self.run, self.epoch, [list(each) for each in self.versions]])

    @staticmethod
    def unpack(data: bytes) -> "HeadRecord":
        with _readable(HEAD_NAME):
            run, epoch, versions = _unrecord(_HEAD_MAGIC, data, HEAD_NAME)
            found = [(version, base, anchored) for version, base, anchored in versions]
            numbers = [version for version, _, _ in found]
            _expect(is_plain(run) and 0 < len(found) <= MOST_VERSIONS, "a run")
            _expect(
                all(map(_number, [epoch, *numbers, *(base for _, base, _ in found)])), "a number"
            )
            _expect(all(type(anchored) is bool for _, _, anchored in found), "an anchor")
            _expect(numbers == sorted(set(numbers)), "an order")
            _expect(all(base < version for version, base, _ in found), "a base")
        return HeadRecord(run, epoch, found)

    def route(self, target: int, held: int) -> tuple[int, list[int]]:
        """(anchor to begin with or 0, versions whose differences follow) to ``target``.

        From ``held`` where differences lead from there, else from the newest anchor.
        """
        bases = {version: base for version, base, _ in self.versions}
        anchored = {version for version, _, has in self.versions if has}
        back, at = [], target
        while at in bases and at != held:
            back.append(at)
            at = bases[at]
        if held and at == held:
            return 0, back[::-1]
        for count, version in enumerate(back):
            if version in anchored:
                return version, back[:count][::-1]
        cure = "the publisher's next anchor ends the gap"
        raise Damaged(
            f"version {target} follows from {at}, which is not there any more: {cure}",
            file=HEAD_NAME,
        )


def pack_layout(layout: WeightLayout) -> bytes:
    return _record(_LAYOUT_MAGIC, layout.packed)


def unpack_layout(data: bytes, name: str) -> WeightLayout:
    with _readable(name):
        found = WeightLayout.unpack(_unrecord(_LAYOUT_MAGIC, data, name))
        _expect(found.name == name, "other content")
    return found


def is_plain(name: Any) -> bool:
    """True for the name of a file in the folder itself."""
    return type(name) is str and bool(_PLAIN.fullmatch(name))


def _number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it has {what} that cannot be")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Damaged for whatever is wrong inside."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise Damaged(f"{name} cannot be read: {error}", file=name) from error


def _record(magic: bytes, content: Any) -> bytes:
    """msgpack behind a magic word, its length and its checksum."""
    body: bytes = content if isinstance(content, bytes) else msgpack.packb(content)
    if len(body) > LONGEST_RECORD:
        raise InvalidArgument(
            f"a record would have {len(body):,} bytes, at most {LONGEST_RECORD:,} are read back"
        )
    return magic + len(body).to_bytes(4, "little") + checksum_of(body).to_bytes(8, "little") + body


def _unrecord(magic: bytes, data: bytes, name: str) -> Any:
    """The content of a record; Damaged if it is not whole."""
    body, length, kind = data[_HEAD_BYTES:], int.from_bytes(data[4:8], "little"), magic.decode()
    if data[:4] != magic or len(body) != length:
        raise Damaged(f"{name} is no whole record of kind {kind}: {len(data):,} bytes", file=name)
    if checksum_of(body) != int.from_bytes(data[8:_HEAD_BYTES], "little"):
        raise Damaged(f"{name} does not match its checksum", file=name)
    try:
        return msgpack.unpackb(body, strict_map_key=True, max_ext_len=0)
    except (RecursionError, msgpack.UnpackException) as error:
        raise ValueError(error) from error
