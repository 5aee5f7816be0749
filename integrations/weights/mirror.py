"""Copies of published versions, and what is in them: pull, verify, stat."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from commpress.errors import Damaged, StateMismatch
from commpress.integrations.weights import replay
from commpress.integrations.weights import weight_records as records
from commpress.integrations.weights.http_place import reading_place
from commpress.integrations.weights.places import FolderPlace, ReadablePlace
from commpress.integrations.weights.receiver import Receiver
from commpress.integrations.weights.version_log import tidy
from commpress.integrations.weights.weight_layout import WeightLayout
from commpress.integrations.zero.safetensors_file import Writer

Told = Callable[[str], None]


@dataclass(frozen=True)
class Verified:
    """One version of a place."""

    version: int
    base: int
    epoch: int
    bytes: int  # of its differences
    anchor_bytes: int
    dense_bytes: int
    density: float
    parts: int


def stat(source: str | os.PathLike[str], *, key: bytes | None = None) -> list[Verified]:
    """Every version that can be had, by what its record says. ``key``: as of ``Receiver``."""
    return [_described(*each) for each in _versions(reading_place(source, key))]


def verify(
    source: str | os.PathLike[str], *, key: bytes | None = None, tell: Told = lambda _: None
) -> list[Verified]:
    """Read every byte of every version, and rebuild all weights.

    Damaged or StateMismatch where anything is not as published. ``key``: as of ``Receiver``;
    ``tell``: called with a line on each version.
    """
    place, found, held = reading_place(source, key), list[Verified](), replay.HeldVersion()
    chain: list[records.VersionRecord] = []  # from an anchor on, in one layout
    last: WeightLayout | None = None
    for record, layout in _versions(place):
        follows = held.version > 0 and record.base == held.version
        if follows:
            replay.check_follows(held, record)
        elif not record.anchors:
            what = f"version {record.version} follows from {record.base}, which is not there"
            raise Damaged(what, file=records.version_name(record.version))
        for file in (record.differences if follows else []) + record.anchors:
            for _ in _copied(place, file):
                pass
        if follows and last is not None and last.name == layout.name:
            chain.append(record)
        if record.anchors:
            _rebuild(place, last, chain)
            chain = [record]
        held, last = replay.held_by(record), layout
        found.append(_described(record, layout))
        tell(f"version {record.version}: {record.nbytes + record.anchor_nbytes:,} bytes")
    _rebuild(place, last, chain)
    return found


def _versions(place: ReadablePlace) -> Iterator[tuple[records.VersionRecord, WeightLayout]]:
    head = replay.read_head(place)
    layouts: dict[str, WeightLayout] = {}
    for version, _, _ in head.versions if head else []:
        record = replay.read_version(place, version)
        if record.layout not in layouts:
            layouts[record.layout] = replay.read_layout(place, record)
        record.check_layout(layouts[record.layout])
        yield record, layouts[record.layout]


def _rebuild(
    place: ReadablePlace, layout: WeightLayout | None, chain: list[records.VersionRecord]
) -> None:
    if layout is not None and chain:
        rebuilder = replay.Rebuilder(place, layout, chain, anchor=True, every=True)
        for part, s, b, _ in layout.blocks():
            rebuilder.block(part, s, b)


def _copied(place: ReadablePlace, file: records.PayloadFile) -> Iterator[bytes]:
    """The chunks of a file; Damaged at its end, if it is not the one that was published."""
    summed = replay.Summed(replay.read_ahead(place, file))
    yield from summed
    if (summed.nbytes, summed.checksum) != (file.nbytes, file.checksum):
        raise Damaged(
            f"{file.name} is not the file that was published: bytes are missing or changed",
            file=file.name,
        )


def _described(record: records.VersionRecord, layout: WeightLayout) -> Verified:
    return Verified(
        record.version,
        record.base,
        record.epoch,
        record.nbytes,
        record.anchor_nbytes,
        layout.nbytes,
        record.changed / max(layout.numel, 1),
        len(layout.parts),
    )


# ---------------------------------------------------------------- copies


def pull(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    key: bytes | None = None,
    wait: float = 0.0,
    tell: Told = lambda _: None,
) -> int:
    """Bring the folder's copy up to the source's newest version; returns its number, 0 if there is
    none. ``wait``: seconds for one to come, if the folder has the newest already.

    A copy is published weights itself: readers and other copies may take it as their source, so a
    slow link is crossed once for all of them. It may be interrupted at any byte: what is whole
    stays, and the next call goes on. ``key``: as of ``Receiver``; ``tell``: called with a line on
    each version.
    """
    place, copy = reading_place(source, key), FolderPlace(folder, make=True)
    own = replay.read_head(copy)
    return replay.up_to_date(
        place,
        lambda head: _pull(place, copy, head, tell) if head else 0,
        own.newest if own else 0,
        wait,
    )


def _pull(place: ReadablePlace, copy: FolderPlace, head: records.HeadRecord, tell: Told) -> int:
    own = replay.read_head(copy)
    held, had = replay.HeldVersion(), own.versions if own else []
    if own is not None:
        held = replay.held_by(replay.read_version(copy, own.newest))
        replay.check_run(held, head.run, head.epoch)
        if head.newest < own.newest:
            what = f"the copy in {copy} has version {own.newest} already"
            raise StateMismatch(f"{place} ends with version {head.newest}, {what}")
    anchor, later = head.route(head.newest, held.version)
    kept = {version for version, _, _ in head.versions}
    for version in ([anchor] if anchor else []) + later:
        record = replay.read_version(place, version)
        if version == anchor:  # nothing leads there from what the copy has
            replay.check_run(held, record.run, record.epoch)
            had = []
        else:
            replay.check_follows(held, record)
        _copy(place, copy, record, whole=version != anchor)
        held = replay.held_by(record)
        had = [each for each in had if each[0] in kept]
        had.append((version, record.base, bool(record.anchors)))
        copy.replace(records.HEAD_NAME, records.HeadRecord(record.run, record.epoch, had).pack())
        tell(f"version {version}: {record.nbytes + record.anchor_nbytes:,} bytes")
    tidy(copy, had, head.epoch)
    return head.newest


def _copy(
    place: ReadablePlace, copy: FolderPlace, record: records.VersionRecord, *, whole: bool
) -> None:
    """One version: files that are there and whole are not fetched again."""
    names = copy.names()
    if record.layout not in names:
        copy.replace(record.layout, records.pack_layout(replay.read_layout(place, record)))
    for file in (record.differences if whole else []) + record.anchors:
        try:
            for _ in _copied(copy, file):
                pass
        except Damaged:
            copy.write(file.name, _copied(place, file))
    name = records.version_name(record.version)
    if name not in names:
        copy.create(name, record.pack())


def save_safetensors(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    key: bytes | None = None,
    limit: int | str = "64GiB",
) -> int:
    """The newest version as one safetensors file, which appears when it is whole; returns its
    number, 0 if there is none."""
    receiver = Receiver(source, key=key, limit=limit)
    if receiver.prepare() is None:
        return 0
    version = receiver.install()
    weights: dict[str, torch.Tensor] = dict(receiver.weights)
    with Writer(path, weights, {"version": str(version)}) as file:
        for name, value in weights.items():
            file.write(name, value)
    return version
