"""Versions read back: records from a place, and blocks rebuilt from codes, each checked by its
hash."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from time import monotonic, sleep
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.errors import Damaged, StateMismatch
from commpress.integrations.weights.places import AT_ONCE, ReadablePlace
from commpress.integrations.weights.weight_layout import WeightLayout
from commpress.integrations.weights.weight_records import (
    LONGEST_RECORD,
    HeadRecord,
    PayloadFile,
    VersionRecord,
    unpack_layout,
    version_name,
)
from commpress.kernels.cpu.exact import decode

T = TypeVar("T")
TRIES = 8  # as often as a publisher removes what is being read
CHUNK = 1 << 20  # bytes of a file that are asked for at once


class HeldVersion(NamedTuple):
    """The version that somebody has: what the next one must follow from."""

    run: str = ""
    epoch: int = 0
    version: int = 0
    digest: int = 0


def read_head(place: ReadablePlace, after: int = 0, wait: float = 0.0) -> HeadRecord | None:
    """The head, after up to ``wait`` seconds if it has nothing later than ``after``; None if
    nothing was published yet."""
    ends = monotonic() + wait
    while True:
        head, left = None, ends - monotonic()
        with suppress(FileNotFoundError):
            head = HeadRecord.unpack(place.head(after, max(left, 0.0)))
        if left <= 0 or (head is not None and head.newest > after):
            return head
        if head is None:
            sleep(min(left, 0.1))  # before the first version there is no head to wait at


def up_to_date(
    place: ReadablePlace,
    call: Callable[[HeadRecord | None], T],
    after: int = 0,
    wait: float = 0.0,
) -> T:
    """``call(head)``; again with the head of then, where versions were removed as they were
    read."""
    head = read_head(place, after, wait)
    for _ in range(TRIES):
        try:
            return call(head)
        except Damaged:
            before, head = head, read_head(place)
            if head is None or before is None or head.versions == before.versions:
                raise
    return call(head)


def read_version(place: ReadablePlace, version: int) -> VersionRecord:
    name = version_name(version)
    record = VersionRecord.unpack(_whole(place, name), name)
    if record.version != version:
        raise Damaged(f"{name} holds version {record.version}", file=name)
    return record


def read_layout(place: ReadablePlace, record: VersionRecord) -> WeightLayout:
    layout = unpack_layout(_whole(place, record.layout), record.layout)
    record.check_layout(layout)
    return layout


def _whole(place: ReadablePlace, name: str) -> bytes:
    try:
        return place.read(name, 0, LONGEST_RECORD)
    except FileNotFoundError as error:
        raise Damaged(f"{name} is not there: it was removed or never written", file=name) from error


def check_run(held: HeldVersion, run: str, epoch: int) -> None:
    """StateMismatch for weights of another run, or of a publisher that another has followed."""
    if held.run and run != held.run:
        raise StateMismatch(
            f"these are weights of run {run}, expected run {held.run}: make a new Receiver to "
            "begin with that run"
        )
    if epoch < held.epoch:
        raise StateMismatch(
            f"this was published in epoch {epoch}, epoch {held.epoch} was seen before: an old "
            "publisher still writes, end it"
        )


def check_follows(held: HeldVersion, record: VersionRecord) -> None:
    """StateMismatch, with the reason, unless the differences of ``record`` lead on from what is
    held."""
    check_run(held, record.run, record.epoch)
    what = f"the differences of version {record.version}"
    if record.version <= held.version:
        raise StateMismatch(f"{what} were applied already: version {held.version} is held")
    if record.base != held.version:
        raise StateMismatch(
            f"{what} are from version {record.base}, but version {held.version} is held: apply "
            "those between, or begin with an anchor"
        )
    if record.base_digest != held.digest:
        raise StateMismatch(
            f"{what} are from weights of digest {record.base_digest:016x}, those of version "
            f"{held.version} held here have {held.digest:016x}: begin with an anchor"
        )


def held_by(record: VersionRecord) -> HeldVersion:
    return HeldVersion(record.run, record.epoch, record.version, record.digest)


def read_ahead(
    place: ReadablePlace, file: PayloadFile, *, first: int = 0, ahead: int = AT_ONCE
) -> Iterator[bytes]:
    """The chunks of a file from byte ``first`` on; ``ahead`` of them are always under way."""
    places = iter(range(first, file.nbytes, CHUNK))

    def ask(count: int) -> list[Future[bytes]]:
        return [place.begin(file.name, at, CHUNK) for at in islice(places, count)]

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
    """Codes of one version and part, read in order."""

    def __init__(self, file: PayloadFile, read: Callable[[PayloadFile, int], Iterator[bytes]]):
        self._file, self._offsets, self._read = file, file.offsets(), read
        self._first, self._content, self._coming = 0, bytearray(), read(file, 0)

    def code(self, stream: int, block: int) -> bytes:
        first, size = int(self._offsets[stream][block]), int(self._file.sizes[stream][block])
        if not self._first <= first <= self._first + len(self._content) + CHUNK:
            self._first = first // CHUNK * CHUNK
            self._content, self._coming = bytearray(), self._read(self._file, self._first)
        while self._first + len(self._content) < first + size:
            if not (chunk := next(self._coming, b"")):
                raise Damaged(
                    f"{self._file.name} ends before byte {first + size:,}", file=self._file.name
                )
            self._content += chunk
        if first - self._first >= CHUNK:
            del self._content[: first - self._first]
            self._first = first
        return bytes(self._content[first - self._first : first - self._first + size])


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


def seed_of(part: int, stream: int, block: int) -> int:
    """A block that stands in another's place is no match."""
    return (part << 44 | stream << 36 | block) & (2**64 - 1)


class Rebuilder:
    """Blocks of the last of some versions that follow each other in one layout.

    ``anchor``: the first of them stands for itself; without, blocks begin as those of the version
    before. ``every``: the hashes of all versions are compared, not only the last one's.
    """

    def __init__(
        self,
        place: ReadablePlace,
        layout: WeightLayout,
        records: Sequence[VersionRecord],
        *,
        anchor: bool,
        every: bool = False,
    ) -> None:
        self.layout, self._every = layout, every
        share = max(1, AT_ONCE // (len(records) * max(len(layout.parts), 1)))

        def read(file: PayloadFile, first: int) -> Iterator[bytes]:
            return read_ahead(place, file, first=first, ahead=share)

        files = [r.anchors if anchor and not i else r.differences for i, r in enumerate(records)]
        self._steps = [
            (record, [Codes(file, read) for file in each])
            for record, each in zip(records, files, strict=True)
        ]
        self._recent: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def into(self, part: int, stream: int, block: int, target: np.ndarray) -> None:
        """``target``, the block before if there is no anchor, becomes that of the last version.

        Damaged if that is not what was published.
        """
        kind, seed = self.layout.parts[part][stream].numbers.kind, seed_of(part, stream, block)
        for record, codes in self._steps:
            decode(codes[part].code(stream, block), target, kind)
            if self._every or record is self._steps[-1][0]:
                found = checksum_of(target.data.cast("B"), seed)
                if found != int(record.hashes[part][stream][block]):
                    raise Damaged(
                        f"block {block} of part {part} of version {record.version} is not what was "
                        "published: bytes changed on the way, or it was made from other weights"
                    )

    def block(self, part: int, stream: int, block: int) -> torch.Tensor:
        """One that begins with an anchor. Those that were asked for last are still there."""
        number, content = self._recent.get((part, stream), (-1, torch.empty(0)))
        if number != block:
            of = self.layout.parts[part][stream]
            numel = min(of.numbers.block, of.numel - block * of.numbers.block)
            content = torch.zeros(numel, dtype=of.numbers.dtype)
            self.into(part, stream, block, of.numbers.patterns(content))
            self._recent[part, stream] = block, content
        return content
