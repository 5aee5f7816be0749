"""Versions read back: records from a place, and blocks rebuilt from codes, each checked by its
hash."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.errors import Damaged, StateMismatch
from commpress.integrations.weights import weight_records as records
from commpress.integrations.weights.places import AT_ONCE, ReadablePlace
from commpress.integrations.weights.weight_records import HeadRecord, PayloadFile, VersionRecord
from commpress.kernels.cpu.exact import decode

T = TypeVar("T")
TRIES = 8  # as often as a publisher removes what is being read
CHUNK = 1 << 20  # bytes of a file that are asked for at once


def read_head(place: ReadablePlace, after: int = 0, wait: float = 0.0) -> HeadRecord | None:
    """The head, after up to ``wait`` seconds if it has nothing later than ``after``; None if
    nothing was published yet."""
    with suppress(FileNotFoundError):
        return records.unpack(HeadRecord, place.head(after, wait))
    return None


def up_to_date(
    place: ReadablePlace,
    call: Callable[[HeadRecord | None], T],
    held: VersionRecord,
    wait: float = 0.0,
) -> T:
    """``call(head)``; again with the head of then, where versions were removed as they were read.
    StateMismatch if it is that of another run, or of an older copy of the one held."""
    head = read_head(place, held.version, wait)
    for turn in range(TRIES, -1, -1):
        if head is not None:
            check_run(held, head)
            if head.newest < held.version:
                raise StateMismatch(
                    f"{place} ends with version {head.newest}, version {held.version} is held: it "
                    "is an older copy of the run"
                )
        try:
            return call(head)
        except Damaged:
            before, head = head, read_head(place)
            same = head is None or before is None or head.versions == before.versions
            if same or not turn:
                raise
    raise AssertionError


def read_version(place: ReadablePlace, version: int) -> VersionRecord:
    name = records.version_name(version)
    try:
        record = records.unpack(VersionRecord, place.read(name, 0, records.LONGEST_RECORD), name)
    except FileNotFoundError as error:
        raise Damaged(f"{name} is not there: it was removed or never written", file=name) from error
    if record.version != version:
        raise Damaged(f"{name} holds version {record.version}", file=name)
    return record


def followed(
    place: ReadablePlace, held: VersionRecord, anchor: int, later: Sequence[int]
) -> Iterator[VersionRecord]:
    """Read the versions of a route, each with its layout; StateMismatch or Damaged unless they lead
    on from each other, and from what is held if there is no anchor."""
    for version in ([anchor] if anchor else []) + [*later]:
        record = read_version(place, version)
        if version == anchor:
            check_run(held, record)
            if not record.anchors:
                what = f"version {version} follows from {record.base}, which is not there"
                raise Damaged(what, file=records.version_name(version))
        else:
            check_follows(held, record)
        layout = record.layout if record.anchors else held.layout
        held = record._replace(layout=layout)
        yield held


def check_run(held: VersionRecord, new: VersionRecord | HeadRecord) -> None:
    """StateMismatch for weights of another run, or of a publisher that another has followed."""
    if held.run and new.run != held.run:
        raise StateMismatch(
            f"these are weights of run {new.run}, expected run {held.run}: make a new Receiver to "
            "begin with that run"
        )
    if new.epoch < held.epoch:
        raise StateMismatch(
            f"this was published in epoch {new.epoch}, epoch {held.epoch} was seen before: an old "
            "publisher still writes, end it"
        )


def check_follows(held: VersionRecord, record: VersionRecord) -> None:
    """StateMismatch, with the reason, unless the differences of ``record`` lead on from what is
    held."""
    check_run(held, record)
    what = f"the differences of version {record.version}"
    if record.version <= held.version:
        raise StateMismatch(f"{what} were applied already: version {held.version} is held")
    if record.base != held.version:
        raise StateMismatch(
            f"{what} are from version {record.base}, but version {held.version} is held: apply "
            "those between, or begin with an anchor"
        )
    if not record.anchors and record.blocks != held.blocks:
        raise Damaged(f"{what} have other blocks", file=records.version_name(record.version))
    if record.base_digest != held.digest:
        raise StateMismatch(
            f"{what} are from weights of digest {record.base_digest:016x}, those of version "
            f"{held.version} held here have {held.digest:016x}: begin with an anchor"
        )


def read_ahead(
    place: ReadablePlace, file: PayloadFile, *, first: int = 0, ahead: int = AT_ONCE
) -> Iterator[bytes]:
    """The chunks of a file from byte ``first`` on; ``ahead`` of them are always under way."""
    starts = iter(range(first, file.nbytes, CHUNK))

    def ask(count: int) -> list[Future[bytes]]:
        return [place.begin(file.name, at, CHUNK) for at in islice(starts, count)]

    coming = deque(ask(ahead))

    def found() -> Iterator[bytes]:
        while coming:
            try:
                chunk = coming.popleft().result()
            except FileNotFoundError as error:
                raise Damaged(f"{file.name} is not there", file=file.name) from error
            coming.extend(ask(1))
            yield chunk

    return found()


class Codes:
    """Codes of one version and part, read in order. ``read``: the chunks of a file from a byte
    on."""

    def __init__(self, file: PayloadFile, read: Callable[[PayloadFile, int], Iterator[bytes]]):
        self._file, self._ends, self._read = file, np.cumsum(file.sizes), read
        self._first, self._content, self._coming = 0, bytearray(), read(file, 0)

    def code(self, block: int) -> bytes:
        end = int(self._ends[block])
        first = end - int(self._file.sizes[block])
        if not self._first <= first <= self._first + len(self._content) + CHUNK:
            self._first = first // CHUNK * CHUNK
            self._content, self._coming = bytearray(), self._read(self._file, self._first)
        while self._first + len(self._content) < end:
            if not (chunk := next(self._coming, b"")):
                name = self._file.name
                raise Damaged(f"{name} ends before byte {end:,}", file=name)
            self._content += chunk
        if first - self._first >= CHUNK:
            del self._content[: first - self._first]
            self._first = first
        return bytes(self._content[first - self._first : end - self._first])


class Summed:
    """Bytes on their way to a file, in chunks of ``CHUNK``, with their count and a running
    checksum."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts, self.nbytes, self.checksum = parts, 0, 0

    def __iter__(self) -> Iterator[bytes]:
        held = bytearray()
        for part in self._parts:
            held += part
            while len(held) >= CHUNK:
                yield self._counted(bytes(held[:CHUNK]))
                del held[:CHUNK]
        if held:
            yield self._counted(bytes(held))

    def _counted(self, chunk: bytes) -> bytes:
        self.nbytes, self.checksum = self.nbytes + len(chunk), checksum_of(chunk, self.checksum)
        return chunk


def hash_of(content: np.ndarray, part: int, block: int) -> int:
    """The hash of a block, which in another's place is no match."""
    return checksum_of(content.data.cast("B"), part << 36 | block)


class Rebuilder:
    """Blocks of the last of some versions that follow each other in one layout.

    ``anchor``: the first of them stands for itself; without, blocks begin as those of the version
    before.
    """

    def __init__(
        self, place: ReadablePlace, versions: Sequence[VersionRecord], *, anchor: bool
    ) -> None:
        self.layout = layout = versions[-1].layout
        self.blocks = [layout.blocks(part) for part in range(len(layout.parts))]
        self._recent: dict[int, tuple[int, torch.Tensor]] = {}
        share = max(1, AT_ONCE // (len(versions) * max(len(layout.parts), 1)))

        def read(file: PayloadFile, first: int) -> Iterator[bytes]:
            return read_ahead(place, file, first=first, ahead=share)

        self._steps = [
            (record, [Codes(file, read) for file in record.differences])
            for record in versions[anchor:]
        ]
        if anchor:
            self._steps.insert(
                0, (versions[0], [Codes(file, read) for file in versions[0].anchors])
            )

    def into(self, part: int, block: int, target: torch.Tensor) -> None:
        """``target``, the block before if there is no anchor, becomes that of the last version.

        Damaged if that is not what was published.
        """
        numbers = self.layout.numbers(self.blocks[part][block][0])
        content = numbers.patterns(target)
        for record, codes in self._steps:
            decode(codes[part].code(block), content, numbers.kind)
            if hash_of(content, part, block) != int(record.hashes[part][block]):
                raise Damaged(
                    f"block {block} of part {part} of version {record.version} is not what was "
                    "published: bytes changed on the way, or it was made from other weights"
                )

    def rebuilt(self, part: int, block: int) -> torch.Tensor:
        """One that begins with an anchor. The last one of each part is still there."""
        if part not in self._recent or self._recent[part][0] != block:
            pieces = self.blocks[part][block]
            numel, dtype = (
                sum(piece.numel for piece in pieces),
                self.layout.numbers(pieces[0]).dtype,
            )
            content = torch.zeros(numel, dtype=dtype)
            self.into(part, block, content)
            self._recent[part] = block, content
        return self._recent[part][1]
