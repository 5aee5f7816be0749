"""The versions in a place, as their one writer sees them: claimed, committed, removed."""

from contextlib import suppress
from uuid import uuid4

from commpress.errors import StateMismatch
from commpress.integrations.weights import replay
from commpress.integrations.weights import weight_records as records
from commpress.integrations.weights.places import WeightPlace

Versions = tuple[records.ListedVersion, ...]


def claim(place: WeightPlace) -> tuple[int, str, Versions]:
    """(epoch, run, versions): from now on, publishers of earlier epochs cannot commit."""
    epoch = max(_epochs(place), default=0) + 1
    while True:
        with suppress(FileExistsError):
            place.create(f"epoch-{epoch}", b"")
            break
        epoch += 1
    for earlier in _epochs(place):
        if earlier < epoch - 1:
            place.remove(f"epoch-{earlier}")
    head, names = replay.read_head(place), place.names()
    run, versions = (head.run, head.versions) if head else (uuid4().hex, ())
    last = versions[-1].version if versions else 0
    for number in sorted({records.version_of(name) for name in names}):
        if number > last and records.version_name(number) in names:  # the head came late
            record = replay.read_version(place, number)
            run, last = record.run, number
            listed = records.ListedVersion(number, record.base, bool(record.anchors))
            versions = (*versions, listed)
    return epoch, run, versions


def claimed(place: WeightPlace, epoch: int) -> bool:
    """True where this rank sees what another has claimed."""
    return epoch in _epochs(place)


def commit(place: WeightPlace, record: records.VersionRecord, versions: Versions) -> None:
    """The version is published when its record is there; the head only says so."""
    name = records.version_name(record.version)
    cure = f"in {place}: end one of both, and make a new Publisher"
    if any(epoch > record.epoch for epoch in _epochs(place)):
        raise StateMismatch(f"another publisher has gone on with run {record.run} {cure}")
    try:
        place.create(name, records.pack(record))
    except FileExistsError as error:
        raise StateMismatch(f"another publisher has written {name} {cure}") from error
    head = records.HeadRecord(record.run, record.epoch, versions)
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


def _epochs(place: WeightPlace) -> list[int]:
    names = [name.partition("epoch-") for name in place.names()]
    return [int(rest) for before, found, rest in names if not before and found and rest.isdigit()]
