"""Publish versions of a model: each rank compares its shard with its copy of the last version."""

import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Literal, overload

import numpy as np
import torch
import torch.distributed as dist

from commpress.checksum import Checksum
from commpress.errors import InvalidArgument, StateMismatch, check_counts
from commpress.integrations.weights import held_weights, version_log
from commpress.integrations.weights import weight_records as records
from commpress.integrations.weights.own_part import Compared, OwnPart
from commpress.integrations.weights.places import StrPath, stored_place
from commpress.integrations.weights.replay import Rebuilder
from commpress.integrations.weights.weight_layout import WeightLayout
from commpress.integrations.weights.weight_records import Version
from commpress.tiered_mem.store import TieredStore

log = logging.getLogger("commpress")
Scanned = list[Future[Compared]]
_FIGURES = "bytes", "anchor_bytes", "dense_bytes", "density", "seconds", "scan_seconds", "ratio"
_DENSE = 0.5  # of the weights' own bytes: from here on differences hardly pay


@dataclass(frozen=True)
class Report(Version):
    """A version as its publisher knows it; ``WeightMetrics`` adds its readers."""

    seconds: float  # until the version could be had
    scan_seconds: float  # of them, those in which training stood still
    behind: dict[str, int] = field(default_factory=dict)  # versions, by reader
    asked: dict[str, float] = field(default_factory=dict)  # seconds since it did, by reader

    @property
    def step(self) -> int:
        return self.version

    @property
    def ratio(self) -> float:
        return self.dense_bytes / self.bytes if self.bytes else 1.0

    def scalars(self) -> dict[str, float]:
        """The figures, flat: ``bytes``, ``ratio``, ``behind/10.0.0.7`` and so on."""
        behind = {f"behind/{name}": versions for name, versions in self.behind.items()}
        asked = {f"asked/{name}": seconds for name, seconds in self.asked.items()}
        return {name: getattr(self, name) for name in _FIGURES} | behind | asked


class Publisher(AbstractContextManager["Publisher"]):
    """``publisher = Publisher(model, to="/shared/run1")``, then ``publisher.publish()`` after an
    optimizer step.

    - ``weights``: a module (its parameters and persistent buffers), names with tensors, or a
      function that gives them, such as adapters alone or weights with adapters merged in.
    - ``to``: a folder that all ranks see, or a URL of fsspec. If it holds a run of the same model,
      that run goes on.
    - ``dtype``: publish floats in another type, as ``torch.bfloat16`` of masters in float32.
    - ``anchor_every``: versions between two that readers can begin with; by default a new one is
      written when the differences since the last weigh as much as it does.
    - ``keep``: anchors that are kept; older versions are removed.
    - ``store``: a ``TieredStore`` for the copy of this rank's shard; by default it is in memory.
    - ``process_group``: the ranks that hold the model together; the default group if there is one.

    Collective: all ranks of the group construct it and call ``publish``.
    """

    def __init__(
        self,
        weights: held_weights.Source,
        to: StrPath,
        *,
        dtype: torch.dtype | None = None,
        anchor_every: int | None = None,
        keep: int = 2,
        store: TieredStore | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_counts(1, keep=keep, anchor_every=1 if anchor_every is None else anchor_every)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InvalidArgument(f"dtype is {dtype!r}, expected floats such as torch.bfloat16")
        if not isinstance(store, TieredStore | None):
            raise InvalidArgument(f"store is {store!r}, expected a TieredStore")
        tensors = held_weights.tensors_of(weights)
        self._anchor_every, self._keep = anchor_every, keep
        self._pending: Future[None] | None = None
        self.report: Report | None = None  # on the last version that can be had
        self._failure: Exception | None = None
        self._gather = held_weights.RankGather(process_group)
        try:
            self._place = stored_place(to, make=True)
            self._layout = held_weights.layout_over(self._gather, tensors(), dtype)
            epoch, run, versions = self._gather.first(lambda: version_log.claim(self._place))
            seen = self._gather.together(lambda: epoch in version_log.epochs(self._place))
            if not all(seen):
                raise InvalidArgument(
                    f"to is {os.fspath(to)!r}, and rank {seen.index(False)} does not see there "
                    "what rank 0 writes: name a folder that all ranks share, or an object store"
                )
            prefix = f"published/{run}/{epoch}/"
            self._part = OwnPart(self._layout, self._gather.rank, tensors, dtype, store, prefix)
            self._versions = tuple(records.ListedVersion(*each) for each in versions)
            self._held = records.VersionRecord(run, epoch)
            self._since = [self._held]  # versions from the last one with an anchor on
            if versions:
                self._gather.together(self._take_over)
        except BaseException:
            self._gather.close()
            raise
        self._background = ThreadPoolExecutor(1, "commpress-publish")

    # ---------------------------------------------------------------- publishing

    @property
    def version(self) -> int:
        """The last version that can be had; 0 before the first."""
        return self._held.version

    @overload
    def publish(self, version: int | None = None, *, wait: Literal[True] = True) -> Report: ...

    @overload
    def publish(self, version: int | None = None, *, wait: bool) -> Report | None: ...

    def publish(self, version: int | None = None, *, wait: bool = True) -> Report | None:
        """Publish the weights as they are now, as the next version or as ``version``, a larger
        number than the last.

        With ``wait=False`` this returns when the weights were compared with the last version: they
        may change again. The rest is done in the background, and ``wait()`` or the next call raises
        what goes wrong there.
        """
        self.wait()
        if self._failure is not None:
            raise StateMismatch(
                f"this publisher has ended ({self._failure}): make a new Publisher, which goes on "
                "with the last version that could be had"
            ) from self._failure
        started = monotonic()
        scanned: Scanned | Exception
        try:
            scanned = self._part.scan(first=not self._held.version)
        except Exception as error:  # of this rank: the others learn of it where all meet
            scanned = error
        except BaseException:  # copies may be of two versions
            self._failure = StateMismatch("it was interrupted")
            raise
        spent = monotonic() - started
        self._pending = self._background.submit(self._finish, version, scanned, started, spent)
        return self.wait() if wait else None

    def wait(self) -> Report | None:
        """The report of the last version, which can be had now; None before the first."""
        if self._pending is not None:
            try:
                self._pending.result()
            except Exception as error:
                self._failure, self._pending = error, None
                raise
            self._pending = None  # not where this call was interrupted: it goes on
        return self.report

    def close(self) -> None:
        """Wait for the version that is under way, and end the threads."""
        try:
            self.wait()
        finally:
            self._failure = self._failure or StateMismatch("it was closed")
            self._background.shutdown()
            self._part.close()
            self._gather.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- in the background

    def _finish(
        self, asked: int | None, scanned: Scanned | Exception, started: float, spent: float
    ) -> None:
        """Payload first, then the record, then the head; copies advance after that."""
        base, layout, compared = self._held, self._layout, list[Compared]()

        def ready() -> tuple[int, int, list[int]]:
            if isinstance(scanned, Exception):
                raise scanned
            version = base.version + 1 if asked is None else asked
            if type(version) is not int or not base.version < version < 1 << 48:
                expected = f"expected a whole number above {base.version}, the last one"
                raise InvalidArgument(f"version is {asked!r}, {expected}")
            compared.extend(each.result() for each in scanned)
            changed = sum(each.changed for each in compared)
            return version, changed, [each.hashed for each in compared]

        every = self._gather.together(ready)
        version, *others = sorted({number for number, *_ in every})
        if others:
            both = [version, *others]
            raise InvalidArgument(f"ranks publish versions {both}, expected one of them")
        codes = [each.code for each in compared]
        differences = self._written(version, codes, anchor=False) if base.version else ()
        nbytes = sum(file.nbytes for file in differences)
        anchored = not base.version or self._anchor_due(nbytes)
        own = self._part.anchor_codes(codes)
        record = base._replace(
            version=version,
            base=base.version,
            base_digest=base.digest,
            changed=sum(changed for _, changed, _ in every),
            hashes=tuple(np.array(hashed, np.uint64) for *_, hashed in every),
            differences=differences,
            anchors=self._written(version, own, anchor=True) if anchored else (),
            layout=layout,
        )
        versions = version_log.kept((*self._versions, record.listed), self._keep)
        self._gather.first(lambda: version_log.commit(self._place, record, versions))
        report = Report(**asdict(record.facts), seconds=monotonic() - started, scan_seconds=spent)

        def settle() -> None:
            self._part.advance(codes)
            if not self._gather.rank:
                version_log.tidy(self._place, versions, base.epoch)

        self._gather.together(settle)  # a rank that could not would keep the others waiting later
        self._held, self._versions, self.report = record, versions, report
        self._since = [record] if anchored else [*self._since, record]
        if not self._gather.rank and nbytes > _DENSE * report.dense_bytes:
            what = f"version {version} have {nbytes / report.dense_bytes:.0%} of the weights' bytes"
            cure = "they pay at rates of fine-tuning, not of training from scratch"
            log.warning("the differences of %s: %s", what, cure)

    def _anchor_due(self, nbytes: int) -> bool:
        anchor, *since = self._since
        if anchor.layout != self._layout:
            return True
        if self._anchor_every is not None:
            return len(self._since) >= self._anchor_every
        return sum(record.nbytes for record in since) + nbytes >= anchor.anchor_nbytes

    def _written(
        self, version: int, codes: Iterable[bytes], *, anchor: bool
    ) -> tuple[records.PayloadFile, ...]:
        """Write this rank's file; those of all ranks."""
        sizes, checksum = list[int](), Checksum()
        name = records.payload_name(version, self._gather.rank, self._held.epoch, anchor=anchor)

        def counted() -> Iterator[bytes]:
            for code in codes:
                sizes.append(len(code))
                checksum.update(code)
                yield code

        def write() -> tuple[str, int, list[int]]:
            self._place.write(name, counted())
            return name, checksum.intdigest(), sizes

        return tuple(
            records.PayloadFile(name, digest, np.array(sizes, np.uint64))
            for name, digest, sizes in self._gather.together(write)
        )

    # ------------------------------------------------------------- where an earlier publisher ended

    def _take_over(self) -> None:
        """The copy becomes the last version, wherever its ranks had it."""
        place, held = self._place, self._held
        head = records.HeadRecord(held.run, held.epoch, self._versions)
        route = head.route(head.newest, 0)
        found = list(version_log.followed(place, records.VersionRecord(), *route))
        if found[-1].layout.model != self._layout.model:
            where = _difference(found[-1].layout, self._layout)
            raise StateMismatch(f"{place} holds another model, {where}: name another folder")
        self._part.fill(Rebuilder(place, found, anchored=True))
        self._held = found[-1]._replace(epoch=held.epoch)
        self._since = found


def _difference(theirs: WeightLayout, ours: WeightLayout) -> str:
    """The first tensor in which two models differ."""
    unlike = sorted({*theirs.tensors} ^ {*ours.tensors})
    if not unlike:
        return "with other tied names"
    there, here = (
        next((each for each in layout.tensors if each.name == unlike[0].name), "absent")
        for layout in (theirs, ours)
    )
    return f"{unlike[0].name!r} is {there} there and {here} here"
