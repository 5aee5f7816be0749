"""Copies of published versions, and what is in them: pull, verify, stat."""

from collections.abc import Callable, Iterator

from commpress.checksum import Checksum
from commpress.errors import Damaged, InvalidArgument
from commpress.integrations.weights import version_log
from commpress.integrations.weights import weight_records as records
from commpress.integrations.weights.http_place import reading_place
from commpress.integrations.weights.places import FolderPlace, ReadablePlace, StrPath
from commpress.integrations.weights.replay import ReadAhead, Rebuilder
from commpress.integrations.weights.weight_records import Version

Told = Callable[[str], None]


def stat(source: StrPath, *, key: bytes | None = None) -> list[Version]:
    """Every version that can be had, by what its record says. ``key``: as of ``Receiver``."""
    return [record.facts for record in _versions(reading_place(source, key))]


def verify(
    source: StrPath, *, key: bytes | None = None, tell: Told = lambda _: None
) -> list[Version]:
    """Read every byte of every version, and rebuild all weights.

    Damaged or StateMismatch where anything is not as published. ``key``: as of ``Receiver``;
    ``tell``: called with a line on each version.
    """
    place, found = reading_place(source, key), list[Version]()
    chain: list[records.VersionRecord] = []  # from an anchor on, in one layout
    for record in _versions(place):
        for file in (record.differences if chain else ()) + record.anchors:
            for _ in _copied(place, file):
                pass
        if chain and chain[-1].layout == record.layout:
            chain.append(record)
        if record.anchors:
            _rebuild(place, chain)
            chain = [record]
        found.append(record.facts)
        tell(str(record))
    _rebuild(place, chain)
    return found


def _versions(place: ReadablePlace) -> Iterator[records.VersionRecord]:
    head = version_log.read_head(place)
    route = [each.version for each in head.versions] if head else []
    return version_log.followed(place, records.VersionRecord(), True, route)


def _rebuild(place: ReadablePlace, chain: list[records.VersionRecord]) -> None:
    if chain:
        rebuilder = Rebuilder(place, chain, anchored=True)
        for part, blocks in enumerate(rebuilder.blocks):
            for b in range(len(blocks)):
                rebuilder.rebuilt(part, b)


def _copied(place: ReadablePlace, file: records.PayloadFile) -> Iterator[bytes]:
    """The chunks of a file; Damaged at its end, if it is not the one that was published."""
    checksum = Checksum()
    for chunk in ReadAhead(place, file):
        checksum.update(chunk)
        yield chunk
    if checksum.intdigest() != file.checksum:
        what = "bytes are missing or changed; if it is a copy's, remove the copy and pull it anew"
        raise Damaged(f"{file.name} is not the file that was published: {what}", file=file.name)


# ---------------------------------------------------------------- copies


def pull(
    source: StrPath,
    folder: StrPath,
    *,
    key: bytes | None = None,
    wait: float = 0.0,
    tell: Told = lambda _: None,
) -> int:
    """Bring the folder's copy up to the source's newest version; returns its number, 0 if there is
    none. ``wait``: seconds for one to come, if the folder has the newest already.

    It may be interrupted at any byte: what is whole stays, and the next call goes on. ``key``: as
    of ``Receiver``; ``tell``: called with a line on each version.
    """
    place, copy = reading_place(source, key), FolderPlace(folder, make=True)
    if version_log.epochs(copy):
        raise InvalidArgument(f"{str(copy)!r} is a folder that a publisher writes to: name another")
    own = version_log.read_head(copy)
    held = version_log.read_version(copy, own.newest) if own else records.VersionRecord()

    def bring(head: records.HeadRecord | None) -> int:
        if head is None:
            return 0
        had, kept = own.versions if own else (), {each.version for each in head.versions}
        anchored, route = head.route(head.newest, held.version)
        for record in version_log.followed(place, held, anchored, route):
            starts = anchored and record.version == route[0]  # from nothing that the copy has
            for file in (() if starts else record.differences) + record.anchors:
                try:  # it may be there already
                    for _ in _copied(copy, file):
                        pass
                except Damaged:
                    copy.write(file.name, _copied(place, file))
            copy.write(records.version_name(record.version), [records.pack(record)])
            had = (*(each for each in had if each.version in kept and not starts), record.listed)
            version_log.write_head(copy, record, had)
            tell(str(record))
        version_log.tidy(copy, had, head.epoch)
        return head.newest

    return version_log.up_to_date(place, bring, held, wait)
