"""The versions in a place: read and followed by readers; claimed, committed and removed by their
one writer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import TypeVar
from uuid import uuid4

from commpress.errors import Damaged, StateMismatch
from commpress.integrations.weights import weight_records as records
from commpress.integrations.weights.places import PART, ReadablePlace, WeightPlace
from commpress.integrations.weights.weight_records import HeadRecord, ListedVersion, VersionRecord

T = TypeVar("T")
Versions = tuple[ListedVersion, ...]
TRIES = 8  # as often as a publisher removes what is being read
EPOCH = "epoch-"  # begins the name of a file that a publisher makes

# ---------------------------------------------------------------- as readers see them


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
            if head in (None, before) or not turn:
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
    place: ReadablePlace, held: VersionRecord, anchored: bool, route: Sequence[int]
) -> Iterator[VersionRecord]:
    """Read the versions of a route, each with its layout; StateMismatch or Damaged unless they lead
    on from each other, and from what is held if the route does not begin with an anchor."""
    for version in route:
        record = read_version(place, version)
        check_run(held, record)
        if not anchored:
            check_follows(held, record)
        elif not record.anchors:
            what = f"version {version} follows from {record.base}, which is not there"
            raise Damaged(what, file=records.version_name(version))
        held = record if record.anchors else record._replace(layout=held.layout)
        anchored = False
        yield held


def check_run(held: VersionRecord, new: VersionRecord | HeadRecord) -> None:
    """StateMismatch for weights of another run, or of a publisher that another has followed."""
    if held.run and new.run != held.run:
        cure = "make a new Receiver to begin with that run"
        raise StateMismatch(f"these are weights of run {new.run}, expected run {held.run}: {cure}")
    if new.epoch < held.epoch:
        raise StateMismatch(
            f"this was published in epoch {new.epoch}, epoch {held.epoch} was seen before: an old "
            "publisher still writes, end it"
        )


def check_follows(held: VersionRecord, record: VersionRecord) -> None:
    """StateMismatch, with the reason, unless the differences of ``record`` lead on from what is
    held."""
    what = f"the differences of version {record.version}"
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


# ---------------------------------------------------------------- as their writer sees them


def claim(place: WeightPlace) -> tuple[int, str, Versions]:
    """(epoch, run, versions): from now on, publishers of earlier epochs cannot commit."""
    head = read_head(place)
    last = max([*epochs(place), head.epoch if head else 0])  # a copy has no other sign of them
    for epoch in count(last + 1):
        with suppress(FileExistsError):
            place.write(f"{EPOCH}{epoch}", [], anew=True)
            break
    old = {f"{EPOCH}{earlier}" for earlier in epochs(place) if earlier < epoch - 1}
    for name in place.names():
        if name in old or name.endswith(PART):  # drafts, of publishers that were killed
            place.remove(name)
    head, names = read_head(place), place.names()  # as nobody else can change them any more
    run, versions = (head.run, head.versions) if head else (uuid4().hex, ())
    last = versions[-1].version if versions else 0
    for number in sorted({records.version_of(name) for name in names}):
        if number > last and records.version_name(number) in names:  # the head came late
            record = read_version(place, number)
            run, last = record.run, number
            versions = (*versions, record.listed)
    return epoch, run, versions


def commit(place: WeightPlace, record: VersionRecord, versions: Versions) -> None:
    """The version is published when its record is there; the head only says so."""
    name = records.version_name(record.version)
    cure = f"in {place}: end one of both, and make a new Publisher"
    if any(epoch > record.epoch for epoch in epochs(place)):
        raise StateMismatch(f"another publisher has gone on with run {record.run} {cure}")
    try:
        place.write(name, [records.pack(record)], anew=True)
    except FileExistsError as error:
        raise StateMismatch(f"another publisher has written {name} {cure}") from error
    write_head(place, record, versions)


def write_head(place: WeightPlace, record: VersionRecord, versions: Versions) -> None:
    """``record`` is that of the newest version."""
    head = HeadRecord(record.run, record.epoch, versions)
    place.write(records.HEAD_NAME, [records.pack(head)])


def kept(versions: Versions, anchors: int) -> Versions:
    """Versions from the oldest of the newest ``anchors`` on."""
    found = [i for i, each in enumerate(versions) if each.anchored]
    return versions[found[-anchors] :] if len(found) > anchors else versions


def tidy(place: WeightPlace, versions: Versions, epoch: int) -> None:
    """Remove files of versions that are gone, and of publishers that did not get as far."""
    names, numbers = place.names(), {each.version for each in versions}
    for name in names:
        number = records.version_of(name)
        if not number or number > versions[-1].version:
            continue
        begun = "-" in name and f"-{epoch}." not in name
        if number not in numbers or (begun and records.version_name(number) not in names):
            place.remove(name)


def epochs(place: WeightPlace) -> list[int]:
    """The publishers that have claimed a place."""
    names = [name.removeprefix(EPOCH) for name in place.names() if name.startswith(EPOCH)]
    return [int(name) for name in names if name.isdigit()]
