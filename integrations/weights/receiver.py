"""Receive versions: decoded beside the live weights, verified, and put in place between two
requests."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from commpress.errors import Damaged, InvalidArgument, StateMismatch
from commpress.integrations.weights import replay
from commpress.integrations.weights.held_weights import Source, box_of, local, tensors_of
from commpress.integrations.weights.http_place import reading_place
from commpress.integrations.weights.places import ReadablePlace
from commpress.integrations.weights.weight_layout import (
    NUMBERS,
    WeightLayout,
    contiguous,
    give,
    take,
)
from commpress.integrations.weights.weight_records import HeadRecord
from commpress.units import parse_bytes, show_bytes

Mapped = Mapping[str, str | Callable[[Mapping[str, torch.Tensor]], torch.Tensor]]


class _Prepared(NamedTuple):
    held: replay.HeldVersion
    layout: WeightLayout
    tensors: dict[str, torch.Tensor]


class Receiver:
    """``receiver = Receiver("http://trainer:9500")``; then, whenever it suits, ``prepare()`` and
    ``install(model)``.

    - ``source``: a folder, a URL of fsspec, or the ``http://`` of ``commpress weights serve``.
    - ``key``: the run's key, for a server that asks for one; by default that of
      ``COMMPRESS_RUN_KEY``.
    - ``limit``: weights of more bytes are refused before memory is taken for them.

    It holds the weights in host memory, and a second time while the next version is prepared.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        key: bytes | None = None,
        limit: int | str = "64GiB",
    ) -> None:
        self._place: ReadablePlace = reading_place(source, key)
        self._limit = parse_bytes(limit)
        self._live, self._spare = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self._held, self._layout = replay.HeldVersion(), WeightLayout([], {}, [])
        self._prepared: _Prepared | None = None
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), "commpress-receive")

    @property
    def version(self) -> int:
        """The version that is installed; 0 before the first."""
        return self._held.version

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The installed version in host memory, tied tensors under each of their names. Not to be
        changed."""
        return _with_tied(self._live, self._layout)

    # ---------------------------------------------------------------- the next version

    def newest(self) -> int:
        """The newest version that can be had; 0 if there is none."""
        head = self._seen(replay.read_head(self._place))
        return head.newest if head else 0

    def prepare(self, version: int | None = None, *, wait: float = 0.0) -> int | None:
        """Fetch, decode and verify the newest version, or ``version``, while the live one goes on
        being used. ``wait``: seconds for a newer one to come, if there is none yet.

        Returns its number, or None if there is nothing newer. An error leaves everything as it was:
        StateMismatch where versions do not follow from what is held, Damaged where bytes are
        missing or changed.
        """
        return replay.up_to_date(
            self._place, lambda head: self._prepare(self._seen(head), version), self.version, wait
        )

    def _prepare(self, head: HeadRecord | None, version: int | None) -> int | None:
        if head is None:
            return None
        target = head.newest if version is None else version
        if target not in {each for each, _, _ in head.versions}:
            kept = ", ".join(str(each) for each, _, _ in head.versions[-8:])
            raise InvalidArgument(f"version is {version!r}, expected one that is kept: …, {kept}")
        if target < self.version or (target == self.version and version is not None):
            what = f"version {target} was applied already: version {self.version} is held"
            raise StateMismatch(what)
        if target == self.version:
            self._same(head)
            return None
        try:
            self._prepared = self._rebuilt(*head.route(target, self.version))
        except Damaged:
            anchor, later = head.route(target, 0)
            if not self.version or anchor <= self.version:
                raise
            self._prepared = self._rebuilt(anchor, later)
        return target

    def _seen(self, head: HeadRecord | None) -> HeadRecord | None:
        """The head, unless it is that of another run or of an older copy of this one."""
        if head is not None:
            replay.check_run(self._held, head.run, head.epoch)
            if head.newest < self.version:
                raise StateMismatch(
                    f"{self._place} ends with version {head.newest}, version {self.version} is "
                    "held: it is an older copy of the run"
                )
        return head

    def _same(self, head: HeadRecord) -> None:
        """The version that is held is the one that is there, not another of its number."""
        record = replay.read_version(self._place, head.newest)
        if record.digest != self._held.digest:
            raise StateMismatch(
                f"version {record.version} there has digest {record.digest:016x}, the one held "
                f"here {self._held.digest:016x}: make a new Receiver"
            )

    def _rebuilt(self, anchor: int, later: list[int]) -> _Prepared:
        """The last of these versions, in the spare tensors. All differences of a block are applied
        in one pass over memory."""
        self._prepared = None  # its tensors are the spare ones
        versions = ([anchor] if anchor else []) + later
        records = [replay.read_version(self._place, version) for version in versions]
        held = self._held
        if anchor:
            replay.check_run(held, records[0].run, records[0].epoch)
            held = replay.held_by(records[0])
        for record in records[bool(anchor) :]:
            replay.check_follows(held, record)
            held = replay.held_by(record)
        before, layout, first = self._live, self._layout, bool(anchor)
        for _, group in groupby(records, key=lambda record: record.layout):
            alike = list(group)
            layout = self._checked(replay.read_layout(self._place, alike[-1]))
            if before is self._spare or self._spare.keys() != {t.name for t in layout.tensors}:
                self._spare = self._room(layout)
            rebuilder = replay.Rebuilder(self._place, layout, alike, anchor=first)
            self._fill(rebuilder, {} if first else before)
            before, first = self._spare, False
        return _Prepared(held, layout, before)

    def _checked(self, layout: WeightLayout) -> WeightLayout:
        if self._layout.tensors and layout.model != self._layout.model:
            what = "the tensors of the next version are not those of the one held"
            raise StateMismatch(f"{what}: make a new Receiver")
        if layout.nbytes > self._limit:
            raise InvalidArgument(
                f"limit is {show_bytes(self._limit)}, and {self._place} has weights of "
                f"{show_bytes(layout.nbytes)}: allow more"
            )
        return layout

    def _room(self, layout: WeightLayout) -> dict[str, torch.Tensor]:
        return {t.name: torch.zeros(t.shape, dtype=NUMBERS[t.dtype].dtype) for t in layout.tensors}

    def _fill(self, rebuilder: replay.Rebuilder, before: Mapping[str, torch.Tensor]) -> None:
        layout = rebuilder.layout
        old = {i: before[t.name] for i, t in enumerate(layout.tensors) if before}
        new = {i: self._spare[t.name] for i, t in enumerate(layout.tensors)}

        def part(number: int) -> None:
            for s, stream in enumerate(layout.parts[number]):
                room = torch.empty(stream.numbers.block, dtype=stream.numbers.dtype)
                for b, runs in enumerate(stream.blocks()):
                    numel = runs[-1].at + runs[-1].last - runs[-1].first
                    inside = contiguous(new, runs)
                    content = room[:numel] if inside is None else inside
                    if old:
                        take(old, runs, content)
                    rebuilder.into(number, s, b, stream.numbers.patterns(content))
                    if inside is None:
                        give(content, runs, new)

        for _ in self._threads.map(part, range(len(layout.parts))):
            pass

    # ---------------------------------------------------------------- in place

    def install(self, model: Source | None = None, mapping: Mapped | None = None) -> int:
        """Put the prepared version in place, and into ``model``'s tensors if one is given; returns
        its number.

        ``mapping``: for a name of the model, the name it has here, or a function that makes the
        tensor of all weights here, as one that fuses or transposes. Nothing is changed unless every
        tensor of the model has one of its shape.
        """
        if self._prepared is None:
            raise StateMismatch("there is no prepared version: call prepare() first")
        prepared = self._prepared
        if model is not None:
            named = _with_tied(prepared.tensors, prepared.layout)
            with torch.no_grad():
                for target, value in list(_pairs(tensors_of(model)(), named, mapping or {})):
                    target.copy_(value)
        self._live, self._spare = prepared.tensors, self._live
        self._held, self._layout, self._prepared = prepared.held, prepared.layout, None
        return self.version


def _with_tied(tensors: dict[str, torch.Tensor], layout: WeightLayout) -> dict[str, torch.Tensor]:
    return tensors | {alias: tensors[name] for alias, name in layout.tied.items()}


def _pairs(
    targets: Mapping[str, torch.Tensor], named: Mapping[str, torch.Tensor], mapping: Mapped
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(a tensor of the model, its new value); StateMismatch if any does not fit."""
    seen: set[int] = set()
    for name, target in targets.items():
        if id(target) in seen:
            continue
        seen.add(id(target))
        source = mapping.get(name, name)
        value = named.get(source) if isinstance(source, str) else source(named)
        if value is None:
            raise StateMismatch(
                f"{name!r} of the model is not published; mapping= can name or make it: "
                f"{', '.join(list(named)[:5])}, …"
            )
        wide = torch.promote_types(value.dtype, target.dtype) == target.dtype
        if value.shape != target.shape or not wide:
            raise StateMismatch(
                f"{name!r} is {target.dtype} of {list(target.shape)} in the model, the new one "
                f"{value.dtype} of {list(value.shape)}: mapping= can give a function that fits it"
            )
        if isinstance(target, DTensor):
            box = box_of(name, target)
            value = value[tuple(slice(b, b + n) for b, n in zip(box.begin, box.size, strict=True))]
        yield local(target), value
    if any(not isinstance(source, str) for source in mapping.values()):
        return  # nobody knows which of them a function takes
    used = {id(named[str(mapping.get(name, name))]) for name in targets}
    if unused := [name for name, value in named.items() if id(value) not in used]:
        raise StateMismatch(
            f"{unused[0]!r} is published, and the model has no such tensor: mapping= can say where "
            "it belongs"
        )
