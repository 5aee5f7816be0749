"""The disk tier: chunks in segment files, striped over folders, never overwritten while a manifest
lists them.

A segment is reserved in full when it is made, so that a write to it cannot run out of room. Its
free parts follow from the manifests alone.
"""

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import accumulate

from commpress.checksum import checksum_of
from commpress.errors import Damaged, DiskFailure, DiskFull, StorageError
from commpress.tiered_mem.arena import Extents, padded
from commpress.tiered_mem.engines import PIECE, DiskEngine, Transfer
from commpress.tiered_mem.folders import Folders
from commpress.tiered_mem.layer import NO_ROOM, segment_name, segment_number
from commpress.tiered_mem.manifest import Chunk, Extent
from commpress.units import show_bytes
from commpress.work import started

SMALLEST_SEGMENT = 16 << 20
DAY = 86400.0


@dataclass(eq=False)
class Segment:
    fd: int
    size: int
    free: Extents
    unsynced: bool = False


class Batch:
    """Transfers that belong together, with their result: the checksum of each chunk in order, or an
    error."""

    def __init__(self, left: int, over: Callable[["Batch"], None]) -> None:
        """Expect ``left`` transfers; ``over`` is called once, after the last has ended."""
        self.checksums: list[int] = []
        self.error: BaseException | None = None
        self._left, self._over, self._lock = left, over, threading.Lock()
        if not left:
            over(self)

    def ended(self, error: BaseException | None) -> None:
        """Record the end of a transfer, in any thread and any order. A full disk takes precedence
        over other errors."""
        with self._lock:
            if error is not None and (self.error is None or isinstance(error, DiskFull)):
                self.error = error
            self._left -= 1
            last = not self._left
        if last:
            self._over(self)


@dataclass(eq=False)
class Disk:
    """Files of the disk tier. Not thread-safe except for ``read``, ``write`` and ``sync``: callers
    hold the store's lock."""

    folders: Folders
    engine: DiskEngine
    _: KW_ONLY
    direct: bool
    capacity: int | None
    segment_bytes: int

    def __post_init__(self) -> None:
        self.layer = self.folders.layer
        self._segments: dict[tuple[int, int], Segment] = {}
        self._next_number = [1] * len(self.folders.parts)
        self._next_folder = 0
        self._new_names: set[int] = set()  # folders with unsynced new files
        self._over: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._concluder = started("store-over", self._conclude)

    # ---------------------------------------------------------------- opening

    def adopt(self, extents: set[Extent]) -> dict[Extent, str]:
        """Open the segments with ``extents`` and take these; return damaged ones with the reason.
        Changes nothing on disk."""
        damaged: dict[Extent, str] = {}
        wanted = {(e.folder, e.segment) for e in extents}
        # a missing file keeps its number, because a manifest still lists it
        for part, number in wanted:
            self._next_number[part] = max(self._next_number[part], number + 1)
        for key, fd in self._files(direct=self.direct):
            if key in wanted:
                size = self.layer.size(fd)
                self._segments[key] = Segment(
                    fd, size, Extents(padded(size) if size % 4096 else size)
                )
            else:
                self.layer.close(fd)
        for extent in sorted(extents, key=lambda e: (e.folder, e.segment, e.offset)):
            segment = self._segments.get((extent.folder, extent.segment))
            if segment is None:
                damaged[extent] = "the file is missing"
            elif extent.offset + extent.length > segment.size:
                damaged[extent] = f"the file ends at {segment.size}"
            elif not segment.free.claim(extent.offset, extent.length):
                damaged[extent] = "two chunks claim the same bytes"
        return damaged

    def sweep(self) -> None:
        """Remove the segments that were not adopted."""
        for (part, number), fd in self._files():
            self.layer.close(fd)
            if (part, number) not in self._segments:
                self.layer.unlink(self.folders.parts[part].fd, segment_name(number))

    def _files(self, *, direct: bool = False) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield ((part, number), descriptor) of every segment, for the caller to close; refuse
        foreign files."""
        for part, folder in enumerate(self.folders.parts):
            for name in self.layer.names(folder.fd):
                if (number := segment_number(name)) is not None:
                    yield (part, number), self.layer.open(folder.fd, name, direct=direct)

    def reserve(self) -> None:
        """Make all segments that the budget allows."""
        if self.capacity is None:
            raise StorageError("reserve=True needs disk=, the bytes to reserve in each directory")
        for part in range(len(self.folders.parts)):
            while (left := self.capacity - self._total(part)) >= SMALLEST_SEGMENT:
                self._grow(part, 4096, at_most=left)

    # ---------------------------------------------------------------- room

    def allocate(self, nbytes: int) -> Extent:
        """Take room for ``nbytes``, from the folders in turn; raise ``DiskFull`` if none has it."""
        length, parts = padded(nbytes), len(self.folders.parts)
        order = [(self._next_folder + i) % parts for i in range(parts)]
        self._next_folder = (self._next_folder + 1) % parts
        for part in order:
            if extent := self._from_existing(part, length):
                return extent
            if self._grow(part, length):
                extent = self._from_existing(part, length)
                assert extent
                return extent
        raise self._full(length)

    def allocate_all(self, sizes: Sequence[int]) -> list[Extent]:
        """Take room for all sizes, contiguous if a single folder has it; if there is not enough,
        take none."""
        lengths = [padded(nbytes) for nbytes in sizes]
        if len(self.folders.parts) == 1 and (whole := self._from_existing(0, sum(lengths))):
            starts = accumulate(lengths, initial=whole.offset)
            return [
                Extent(0, whole.segment, start, length)
                for start, length in zip(starts, lengths, strict=False)
            ]
        extents: list[Extent] = []
        try:
            for nbytes in sizes:
                extents.append(self.allocate(nbytes))
        except BaseException:
            self.free(extents)
            raise
        return extents

    def free(self, extents: Iterable[Extent]) -> None:
        """Free extents, neighbors in one go, as the chunks of a tensor are."""
        begin = end = (0, 0, -1)
        for place in sorted((e.folder, e.segment, e.offset, e.length) for e in extents):
            if place[:3] != end:
                self._give(begin, end)
                begin = place[:3]
            end = (*place[:2], place[2] + place[3])
        self._give(begin, end)

    def _give(self, begin: tuple[int, int, int], end: tuple[int, int, int]) -> None:
        if segment := self._segments.get(begin[:2]):
            segment.free.give(begin[2], end[2] - begin[2])

    @property
    def used(self) -> int:
        return sum(s.free.size - s.free.free for s in self._segments.values())

    @property
    def reserved(self) -> int:
        return sum(s.size for s in self._segments.values())

    def _from_existing(self, part: int, length: int) -> Extent | None:
        for (folder, number), segment in self._segments.items():
            if folder == part and segment.free.longest >= length:
                offset = segment.free.take(length)
                assert offset is not None
                return Extent(part, number, offset, length)
        return None

    def _total(self, part: int) -> int:
        return sum(s.size for (folder, _), s in self._segments.items() if folder == part)

    def _grow(self, part: int, length: int, at_most: int | None = None) -> bool:
        """Make a new segment: as large as the folder's others together, between bounds, or just
        large enough if room is short. Return whether there was room."""
        total = self._total(part)
        wished = max(length, min(self.segment_bytes, max(total, SMALLEST_SEGMENT)))
        left = self.capacity - total if self.capacity is not None else wished
        for size in dict.fromkeys((wished, length)):
            if (at_most is None or size <= at_most) and size <= left and self._create(part, size):
                return True
        return False

    def _create(self, part: int, size: int) -> bool:
        folder, number = self.folders.parts[part].fd, self._next_number[part]
        name, fd = segment_name(number), -1
        try:
            fd = self.layer.open(folder, name, create=True, direct=self.direct)
            self.layer.reserve(fd, size)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.layer.unlink(folder, name)
            if fd >= 0:
                self.layer.close(fd)
            if error.errno in NO_ROOM:
                return False
            raise DiskFailure(
                f"cannot reserve {size} bytes in {self.folders.parts[part].path}: {error}"
            ) from error
        self._next_number[part] += 1
        self._segments[part, number] = Segment(fd, size, Extents(size))
        self._new_names.add(part)
        return True

    def _full(self, length: int) -> DiskFull:
        room = {str(f.path): self.layer.room(f.fd) for f in self.folders.parts}
        where = ", ".join(
            f"{path}: {show_bytes(free)} free on the disk" for path, free in room.items()
        )
        budget = (
            "" if self.capacity is None else f", budget {show_bytes(self.capacity)} a directory"
        )
        return DiskFull(
            f"no room for {show_bytes(length)} more ({where}{budget}). What was committed is "
            "intact; delete tensors or snapshots and commit, or give the store more room",
            missing=max(0, length - max(room.values())) or length,
        )

    # ---------------------------------------------------------------- transfers

    def write(
        self,
        extents: Sequence[Extent],
        sizes: Sequence[int],
        view: memoryview,
        done: Callable[[Batch], None],
    ) -> None:
        """Write contiguous chunks of ``view``, of ``sizes`` bytes each; padding is written, too,
        but is not part of the checksums."""

        def written(batch: Batch) -> None:
            for extent in extents:
                self._segments[extent.folder, extent.segment].unsynced = True
            done(batch)

        self._transfer(extents, sizes, view, written, write=True)

    def read(
        self, chunks: Sequence[Chunk], view: memoryview, done: Callable[[Batch], None]
    ) -> None:
        """Fill ``view`` with contiguous chunks; the batch's ``error`` is ``Damaged`` if a checksum
        does not match."""

        def arrived(batch: Batch) -> None:
            for chunk, checksum in zip(chunks, batch.checksums, strict=True):
                if batch.error is None and checksum != chunk.checksum:
                    extent = chunk.extent
                    batch.error = Damaged(
                        f"{chunk.nbytes} bytes at {extent.offset} of {self.place(extent)} do not "
                        f"match the checksum of generation {chunk.generation}",
                        file=self.place(extent),
                        offset=extent.offset,
                    )
            done(batch)

        self._transfer(
            [c.extent for c in chunks], [c.nbytes for c in chunks], view, arrived, write=False
        )

    def _transfer(
        self,
        extents: Sequence[Extent],
        sizes: Sequence[int],
        view: memoryview,
        over: Callable[[Batch], None],
        *,
        write: bool,
    ) -> None:
        """Transfer chunks in pieces, so that the last chunk, too, uses all of the engine's requests
        in the kernel. The engine makes the pieces as it takes them, because the submitting thread
        would hold the interpreter's lock while the disk waits."""
        files = [self._segments[extent.folder, extent.segment].fd for extent in extents]
        pieces: list[list[Transfer]] = [[] for _ in extents]

        def ended(extent: Extent, transfer: Transfer, error: BaseException | None) -> None:
            batch.ended(self._typed(error, extent, "write" if write else "read"))

        def finish(batch: Batch) -> None:
            batch.checksums = [
                joined([transfer.checksum or 0 for transfer in chunk]) for chunk in pieces
            ]
            pieces.clear()  # breaks the cycle of references with their callbacks
            over(batch)

        def made() -> Iterator[Transfer]:
            start = 0
            for fd, extent, nbytes, own in zip(files, extents, sizes, pieces, strict=True):
                done = partial(ended, extent)
                for at in range(0, extent.length, PIECE):
                    memory, hashed = (
                        view[start + at : start + min(at + PIECE, extent.length)],
                        min(PIECE, nbytes - at),
                    )
                    own.append(
                        Transfer(
                            fd, extent.offset + at, memory, write=write, done=done, hashed=hashed
                        )
                    )
                    yield own[-1]
                start += extent.length

        count = sum(-(-extent.length // PIECE) for extent in extents)
        batch = Batch(count, lambda batch: self._over.put(partial(finish, batch)))
        self.engine.submit(made())

    def _conclude(self) -> None:
        """Conclude batches in a separate thread, because that needs the store's lock and must not
        delay the engine's thread."""
        while over := self._over.get():
            over()
            del over

    def sync(self) -> None:
        """Make all writes that ended before this call survive a power cut."""
        for key, segment in list(self._segments.items()):
            if segment.unsynced:
                segment.unsynced = False
                try:
                    self.layer.sync(segment.fd)
                except OSError as error:
                    segment.unsynced = True
                    raise DiskFailure(
                        f"{self.place(Extent(*key, 0, 0))} could not be synced: {error}"
                    ) from error
        for part in list(self._new_names):
            try:
                self.layer.sync_folder(self.folders.parts[part].fd)
            except OSError as error:
                raise DiskFailure(
                    f"{self.folders.parts[part].path} could not be synced: {error}"
                ) from error
            self._new_names.discard(part)

    def place(self, extent: Extent) -> str:
        return str(self.folders.parts[extent.folder].path / segment_name(extent.segment))

    def close(self) -> None:
        self.engine.close()
        self._over.put(None)
        self._concluder.join()
        for segment in self._segments.values():
            self.layer.close(segment.fd)
        self._segments = {}

    def _typed(
        self, error: BaseException | None, extent: Extent, verb: str
    ) -> BaseException | None:
        if not isinstance(error, OSError):
            return error
        kind = DiskFull if error.errno in NO_ROOM else DiskFailure
        return kind(
            f"cannot {verb} {extent.length} bytes at {extent.offset} of {self.place(extent)}: "
            f"{error}"
        )


def joined(pieces: Sequence[int]) -> int:
    """Compute the checksum of a chunk from those of its pieces of ``PIECE`` bytes, which any thread
    may compute in any order."""
    return pieces[0] if len(pieces) == 1 else checksum_of(struct.pack(f"<{len(pieces)}Q", *pieces))


class References:
    """Places on disk that must not be reused, because manifests list them or because they failed.
    Guarded by the store's lock."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.generation = 0  # of the last commit
        self.committed: set[Extent] = set()
        self.coming: set[Extent] = set()  # of the running commit
        self.snapshots: dict[str, set[Extent]] = {}
        self._held: list[set[Extent]] = []  # being read for a copy
        # damaged, or listed in a manifest that may exist: never freed in this run
        self.lost: set[Extent] = set()

    def release(self, extents: Iterable[Extent]) -> None:
        """Free places that the current state no longer needs, unless something else refers to
        them."""
        referenced = (self.lost, self.committed, self.coming, *self.snapshots.values(), *self._held)
        self.disk.free(set(extents).difference(*referenced))

    def hold(self, extents: set[Extent]) -> set[Extent]:
        """Keep these places from being freed until ``let_go``."""
        self._held.append(extents)
        return extents

    def let_go(self, extents: set[Extent], current: set[Extent]) -> None:
        self._held = [held for held in self._held if held is not extents]
        self.release(extents - current)


@dataclass
class Wear:
    """Bytes written by the store, to compare with a drive's endurance and a budget. The manifest
    keeps the count from run to run (without what a crashed run wrote after its last commit)."""

    capacity: int  # bytes of the disks
    per_day: int | None = None  # budget
    written: int = 0
    born: float = field(default_factory=time.time)
    days: dict[str, int] = field(default_factory=dict)  # by UTC date

    def allow(self, nbytes: int) -> None:
        if (
            self.per_day is not None
            and (today := self.days.get(_today(), 0)) + nbytes > self.per_day
        ):
            raise DiskFull(
                f"the write budget of {show_bytes(self.per_day)} a day is used up "
                f"({show_bytes(today)} written today): committed tensors are intact; raise "
                "writes_per_day=, or host= so that less is written",
                missing=today + nbytes - self.per_day,
            )

    def count(self, nbytes: int) -> None:
        self.written += nbytes
        self.days[_today()] = self.days.get(_today(), 0) + nbytes
        while len(self.days) > 30:
            del self.days[min(self.days)]

    @property
    def drive_writes_per_day(self) -> float:
        """Mean over the life of the store, at least an hour, to compare with the DWPD of the
        drive's data sheet."""
        return self.written / self.capacity / (max(3600.0, time.time() - self.born) / DAY)


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
