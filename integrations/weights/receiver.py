"""Receive versions: decoded beside the live weights, verified, and put in place between two
requests."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import groupby

import torch
from torch.distributed.tensor import DTensor

from commpress.errors import Damaged, InvalidArgument, StateMismatch
from commpress.integrations.weights import version_log
from commpress.integrations.weights.held_weights import Source, box_of, local, tensors_of
from commpress.integrations.weights.http_place import reading_place
from commpress.integrations.weights.places import ReadablePlace, StrPath
from commpress.integrations.weights.replay import Rebuilder
from commpress.integrations.weights.weight_layout import placed
from commpress.integrations.weights.weight_records import HeadRecord, VersionRecord
from commpress.units import parse_bytes, show_bytes

Mapped = Mapping[str, str | Callable[[Mapping[str, torch.Tensor]], torch.Tensor]]


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
        self, source: StrPath, *, key: bytes | None = None, limit: int | str = "64GiB"
    ) -> None:
        self._place: ReadablePlace = reading_place(source, key)
        self._limit = parse_bytes(limit)
        self._live, self._spare = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self._held, self._prepared = VersionRecord(), VersionRecord()
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), "commpress-receive")

    @property
    def version(self) -> int:
        """The version that is installed; 0 before the first."""
        return self._held.version

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The installed version in host memory, tied tensors under each of their names. Not to be
        changed."""
        return _with_tied(self._live, self._held)

    # ---------------------------------------------------------------- the next version

    def prepare(self, version: int | None = None, *, wait: float = 0.0) -> int | None:
        """Fetch, decode and verify the newest version, or ``version``, while the live one goes on
        being used. ``wait``: seconds for a newer one to come, if there is none yet.

        Returns its number, or None if there is nothing newer. An error leaves everything as it was:
        StateMismatch where versions do not follow from what is held, Damaged where bytes are
        missing or changed.
        """
        call = partial(self._prepare, version)
        return version_log.up_to_date(self._place, call, self._held, wait)

    def _prepare(self, version: int | None, head: HeadRecord | None) -> int | None:
        if head is None:
            return None
        target, held = head.newest if version is None else version, self._held
        if target not in (kept := [each.version for each in head.versions]):
            some = ", ".join(map(str, kept[-8:]))
            raise InvalidArgument(f"version is {version!r}, expected one that is kept: …, {some}")
        if version is not None and target <= held.version:
            what = f"version {target} was applied already: version {held.version} is held"
            raise StateMismatch(what)
        if target == held.version:
            there = version_log.read_version(self._place, target).digest
            if there != held.digest:
                raise StateMismatch(
                    f"version {target} there has digest {there:016x}, the one held here "
                    f"{held.digest:016x}: make a new Receiver"
                )
            return None
        try:
            self._rebuild(*head.route(target, held.version))
        except Damaged:
            anchored, route = head.route(target, 0)
            if not held.version or route[0] <= held.version:
                raise
            self._rebuild(anchored, route)
        return target

    def _rebuild(self, anchored: bool, route: list[int]) -> None:
        """Prepare the last of these versions, in the spare tensors. All differences of a block are
        applied in one pass over memory."""
        self._prepared = VersionRecord()  # its tensors are the spare ones
        records = list(version_log.followed(self._place, self._held, anchored, route))
        before = self._live
        for layout, group in groupby(records, key=lambda record: record.layout):
            if self.version and layout.model != self._held.layout.model:
                what = "the tensors of the next version are not those of the one held"
                raise StateMismatch(f"{what}: make a new Receiver")
            if layout.nbytes > self._limit:
                raise InvalidArgument(
                    f"limit is {show_bytes(self._limit)}, and {self._place} has weights of "
                    f"{show_bytes(layout.nbytes)}: allow more"
                )
            if before is self._spare or self._spare.keys() != {t.name for t in layout.tensors}:
                self._spare = {t.name: t.zeros() for t in layout.tensors}
            rebuilder = Rebuilder(self._place, list(group), anchored=anchored)
            self._fill(rebuilder, {} if anchored else before)
            before, anchored = self._spare, False
        self._prepared = records[-1]

    def _fill(self, rebuilder: Rebuilder, before: Mapping[str, torch.Tensor]) -> None:
        names, spare = [tensor.name for tensor in rebuilder.layout.tensors], self._spare

        def part(number: int) -> None:
            for b, block in enumerate(rebuilder.blocks[number]):
                content = block[0].read(spare[names[block[0].tensor]])  # in place, if that is all
                if len(block) > 1:
                    content = content.new_empty(sum(piece.numel for piece in block))
                for piece, at in placed(block) if before else ():
                    content[at].copy_(piece.read(before[names[piece.tensor]]))
                rebuilder.into(number, b, content)
                for piece, at in placed(block):
                    piece.write(content[at], spare[names[piece.tensor]])

        parts = [self._threads.submit(part, number) for number in range(len(rebuilder.blocks))]
        try:
            for each in parts:
                each.result()
        finally:  # whoever begins anew has the spare tensors alone
            for each in parts:
                each.cancel()
            wait(parts)

    # ---------------------------------------------------------------- in place

    def install(self, model: Source | None = None, mapping: Mapped | None = None) -> int:
        """Put the prepared version in place, and into ``model``'s tensors if one is given; returns
        its number.

        ``mapping``: for a name of the model, the name it has here, or a function that makes the
        tensor of all weights here, as one that fuses or transposes. Nothing is changed unless every
        tensor of the model has one of its shape.
        """
        prepared = self._prepared
        if not prepared.version:
            raise StateMismatch("there is no prepared version: call prepare() first")
        if model is not None:
            named = _with_tied(self._spare, prepared)
            with torch.no_grad():
                pairs = list(_pairs(tensors_of(model)(), named, mapping or {}))
            with torch.inference_mode():  # a model made in that mode takes no writes outside it
                for target, value in pairs:
                    target.copy_(value)
        self._live, self._spare = self._spare, self._live
        self._held, self._prepared = prepared, VersionRecord()
        return self.version


def _with_tied(tensors: dict[str, torch.Tensor], held: VersionRecord) -> dict[str, torch.Tensor]:
    return tensors | {alias: tensors[name] for alias, name in held.layout.tied}


def _pairs(
    targets: Mapping[str, torch.Tensor], named: Mapping[str, torch.Tensor], mapping: Mapped
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(a tensor of the model, its new value); StateMismatch if any does not fit."""
    for name, source in mapping.items() if isinstance(mapping, Mapping) else [("", mapping)]:
        if name not in targets or not (isinstance(source, str) or callable(source)):
            raise InvalidArgument(
                f"mapping has {name!r}: {source!r}, expected a name of the model, and for it one "
                "that is published or a function"
            )
    seen = dict[int, tuple[str, torch.Tensor]]()
    for name, target in targets.items():
        source = mapping.get(name, name)
        value = named.get(source) if isinstance(source, str) else source(named)
        if id(target) in seen:
            first, taken = seen[id(target)]
            if value is not None and not _same_bits(value, taken):
                raise StateMismatch(
                    f"{first!r} and {name!r} are one tensor of the model, and others are "
                    "published for them: untie them, or publish weights that are tied"
                )
            continue
        if not isinstance(value, torch.Tensor):
            raise StateMismatch(
                f"{name!r} of the model is not published; mapping= can name or make it: "
                f"{', '.join(list(named)[:5])}, …"
            )
        seen[id(target)] = name, value
        wide = value.is_floating_point() and target.dtype in (torch.float32, torch.float64)
        same = value.dtype == target.dtype or (wide and value.itemsize < target.itemsize)
        if value.shape != target.shape or not same:
            raise StateMismatch(
                f"{name!r} is {target.dtype} of {list(target.shape)} in the model, the new one "
                f"{value.dtype} of {list(value.shape)}: mapping= can give a function that fits it"
            )
        if isinstance(target, DTensor):
            box = zip(*box_of(name, target), strict=True)
            value = value[tuple(slice(begin, begin + size) for begin, size in box)]
        yield local(target), value
    if any(not isinstance(source, str) for source in mapping.values()):
        return  # nobody knows which of them a function takes
    used = {id(named[str(mapping.get(name, name))]) for name in targets}
    for name, value in named.items():
        if id(value) not in used:
            cure = "mapping= can say where it belongs"
            raise StateMismatch(f"{name!r} is published, and the model has no such tensor: {cure}")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))
