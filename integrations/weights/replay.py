"""Versions read back: records from a place, and blocks rebuilt from codes, each checked by its
hash."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.errors import Damaged, StateMismatch
from commpress.integrations.weights import weight_records as records
from commpress.integrations.weights.places import AT_ONCE, ReadablePlace
from commpress.integrations.weights.weight_layout import host_zeros
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
        if head is None and held.version:
            raise Damaged(
                f"{place} has no versions any more, version {held.version} is held: bring them "
                "back, or make a new Receiver",
                file=records.HEAD_NAME,
            )
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


class ReadAhead:
    """A file, read more or less in order: the chunks after one that was asked for are under way."""

    def __init__(self, place: ReadablePlace, file: PayloadFile, ahead: int = AT_ONCE) -> None:
        self._place, self._file, self._ahead = place, file, ahead
        self._coming = dict[int, Future[bytes]]()
        self._ask(0)

    def _ask(self, first: int) -> None:
        for start in range(first, min(first + self._ahead * CHUNK, self._file.nbytes), CHUNK):
            if start not in self._coming:
                self._coming[start] = self._place.begin(self._file.name, start, CHUNK)

    def __iter__(self) -> Iterator[bytes]:
        for first in range(0, self._file.nbytes, CHUNK):
            yield self.read(first, min(first + CHUNK, self._file.nbytes))

    def read(self, first: int, end: int) -> bytes:
        """Its bytes from ``first`` to ``end``; Damaged if it does not have them."""
        starts = range(first // CHUNK * CHUNK, end, CHUNK)
        self._coming = {at: each for at, each in self._coming.items() if at >= starts[0]}
        for start in starts:
            self._ask(start)
        name = self._file.name
        try:
            content = b"".join(self._coming[start].result() for start in starts)
        except FileNotFoundError as error:
            raise Damaged(f"{name} is not there", file=name) from error
        found = content[first - starts[0] : end - starts[0]]
        if len(found) < end - first:
            raise Damaged(f"{name} ends before byte {end:,}", file=name)
        return found


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
        files = [record.differences for record in versions]
        if anchor:
            files[0] = versions[0].anchors
        self._steps = [
            (record, [(ReadAhead(place, file, share), np.cumsum(file.sizes)) for file in each])
            for record, each in zip(versions, files, strict=True)
        ]

    def into(self, part: int, block: int, target: torch.Tensor) -> None:
        """``target``, the block before if there is no anchor, becomes that of the last version.

        Damaged if that is not what was published.
        """
        numbers = self.layout.numbers(self.blocks[part][block][0])
        content = numbers.patterns(target)
        for record, codes in self._steps:
            file, ends = codes[part]
            code = file.read(int(ends[block - 1]) if block else 0, int(ends[block]))
            decode(code, content, numbers.kind)
            if hash_of(content, part, block) != int(record.hashes[part][block]):
                raise Damaged(
                    f"block {block} of part {part} of version {record.version} is not what was "
                    "published: bytes changed on the way, or it was made from other weights"
                )

    def rebuilt(self, part: int, block: int) -> torch.Tensor:
        """One that begins with an anchor. The last one of each part is still there."""
        if part not in self._recent or self._recent[part][0] != block:
            pieces = self.blocks[part][block]
            numel = sum(piece.numel for piece in pieces)
            content = host_zeros([numel], self.layout.numbers(pieces[0]).dtype)
            self.into(part, block, content)
            self._recent[part] = block, content
        return self._recent[part][1]
