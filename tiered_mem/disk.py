"""The disk tier: chunks in segment files, striped over folders, never overwritten while a manifest
needs them.

A segment is reserved in full when it is made, so a write into it cannot run out of room. Which
parts of it are free is known from the manifests alone.
"""

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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

SMALLEST_SEGMENT = 16 << 20
DAY = 86400.0


@dataclass(eq=False)
class Segment:
    fd: int
    size: int
    free: Extents
    unsynced: bool = False


class Batch:
    """Transfers that belong together, and what became of them: the checksum of each chunk in order,
    an error if one failed."""

    def __init__(self, left: int, over: Callable[["Batch"], None]) -> None:
        """``over`` is called once, when ``left`` transfers have ended."""
        self.checksums: list[int] = []
        self.error: BaseException | None = None
        self._left, self._over, self._lock = left, over, threading.Lock()
        if not left:
            over(self)

    def ended(self, error: BaseException | None) -> None:
        """Transfers end in any thread, in any order. A full disk is the error to tell, whatever
        else failed."""
        with self._lock:
            if error is not None and (self.error is None or isinstance(error, DiskFull)):
                self.error = error
            self._left -= 1
            last = not self._left
        if last:
            self._over(self)


class Disk:
    """Not thread-safe but for ``read``, ``write`` and ``sync``: callers hold the store's lock."""

    def __init__(
        self,
        folders: Folders,
        engine: DiskEngine,
        *,
        direct: bool,
        capacity: int | None,
        segment_bytes: int,
    ) -> None:
        self.folders, self.engine, self.layer, self.direct = folders, engine, folders.layer, direct
        self.capacity, self.segment_bytes = capacity, segment_bytes
        self._segments: dict[tuple[int, int], Segment] = {}
        self._next_number = [1] * len(folders.parts)
        self._next_folder = 0
        self._new_names: set[int] = set()  # folders with files that a power cut could still take
        self._over: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._concluder = threading.Thread(target=self._conclude, name="store-over", daemon=True)
        self._concluder.start()

    # ---------------------------------------------------------------- opening

    def adopt(self, extents: set[Extent]) -> dict[Extent, str]:
        """Open the segments that hold ``extents`` and take those; returns what is damaged. Changes
        nothing on the disk."""
        damaged: dict[Extent, str] = {}
        wanted = {(e.folder, e.segment) for e in extents}
        # a file that is missing keeps its number: a manifest goes on listing it
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
        """Remove the segments that nobody has adopted."""
        for (part, number), fd in self._files():
            self.layer.close(fd)
            if (part, number) not in self._segments:
                self.layer.unlink(self.folders.parts[part].fd, segment_name(number))

    def _files(self, *, direct: bool = False) -> Iterator[tuple[tuple[int, int], int]]:
        """((part, number), descriptor) of every segment that is there, which the caller closes;
        refuses what is not ours."""
        for part, folder in enumerate(self.folders.parts):
            for name in self.layer.names(folder.fd):
                if (number := segment_number(name)) is not None:
                    yield (part, number), self.layer.open(folder.fd, name, direct=direct)

    def reserve(self) -> None:
        """Make all segments that the budget allows, now."""
        if self.capacity is None:
            raise StorageError("reserve=True needs disk=, the bytes to reserve in each directory")
        for part in range(len(self.folders.parts)):
            while (left := self.capacity - self._total(part)) >= SMALLEST_SEGMENT:
                self._grow(part, 4096, at_most=left)

    # ---------------------------------------------------------------- room

    def allocate(self, nbytes: int) -> Extent:
        """Room for ``nbytes``, in the folders by turns; DiskFull if none has it."""
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
        """Room for each, side by side where the only folder has it so; if it is not there for one,
        none is taken."""
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
        """Neighbours are given back at once, as chunks of one tensor are."""
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
        """A new segment: as large as the folder's others together, between bounds, or just large
        enough if room is short."""
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
        """Write what lies side by side in ``view``, as many bytes of it as ``sizes`` says; what
        they are padded with goes to the disk, but not into the checksums."""

        def written(batch: Batch) -> None:
            for extent in extents:
                self._segments[extent.folder, extent.segment].unsynced = True
            done(batch)

        self._transfer(extents, sizes, view, written, write=True)

    def read(
        self, chunks: Sequence[Chunk], view: memoryview, done: Callable[[Batch], None]
    ) -> None:
        """Fill ``view`` with chunks side by side; ``error`` is Damaged if the bytes are not those
        once written."""

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
        """Chunks move in pieces, each by itself: the last chunk too has all of the engine's places
        in the kernel. The engine makes them as it takes them: who submits would hold the
        interpreter's lock while the disk waits."""
        files = [self._segments[extent.folder, extent.segment].fd for extent in extents]
        pieces: list[list[Transfer]] = [[] for _ in extents]

        def ended(extent: Extent, transfer: Transfer, error: BaseException | None) -> None:
            batch.ended(self._typed(error, extent, "write" if write else "read"))

        def finish(batch: Batch) -> None:
            batch.checksums = [
                joined([transfer.checksum or 0 for transfer in chunk]) for chunk in pieces
            ]
            pieces.clear()  # or they and what they call would hold each other
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
        """Conclude a batch on a thread of its own, for it wants the store's lock and the engine's
        is to go on."""
        while over := self._over.get():
            over()
            del over

    def sync(self) -> None:
        """All writes that were done before this call survive a power cut after it."""
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
        if error is None or isinstance(error, StorageError):
            return error
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return DiskFull(
                f"cannot {verb} {extent.length} bytes at {extent.offset} of {self.place(extent)}: "
                f"{error}"
            )
        if isinstance(error, OSError):
            return DiskFailure(
                f"cannot {verb} {extent.length} bytes at {extent.offset} of {self.place(extent)}: "
                f"{error}"
            )
        return error


def joined(pieces: Sequence[int]) -> int:
    """The checksum of a chunk from those of its pieces of ``PIECE`` bytes, which can be taken in
    any order by any thread."""
    return pieces[0] if len(pieces) == 1 else checksum_of(struct.pack(f"<{len(pieces)}Q", *pieces))


class References:
    """Places on disk that must stay as they are: listed in manifests, or not to be trusted. Guarded
    by the store's lock."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.generation = 0  # of the last commit
        self.committed: set[Extent] = set()
        self.coming: set[Extent] = set()  # of the commit under way
        self.snapshots: dict[str, set[Extent]] = {}
        self._held: list[set[Extent]] = []  # being read by somebody who copies them
        # damaged, or of a manifest that may or may not be there: never free in this run
        self.lost: set[Extent] = set()

    def release(self, extents: Iterable[Extent]) -> None:
        """The current state needs these places no more; they are free if nothing else refers to
        them."""
        referenced = (self.lost, self.committed, self.coming, *self.snapshots.values(), *self._held)
        self.disk.free(set(extents).difference(*referenced))

    def hold(self, extents: set[Extent]) -> set[Extent]:
        """Nobody frees these places until ``let_go``, whatever manifest goes."""
        self._held.append(extents)
        return extents

    def let_go(self, extents: set[Extent], current: set[Extent]) -> None:
        self._held = [held for held in self._held if held is not extents]
        self.release(extents - current)


@dataclass
class Wear:
    """Bytes that the store writes, against what a drive endures and a budget. Counted in the
    manifest, so it goes on from run to run (what a crashed run wrote after its last commit is
    lost)."""

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
                f"the write budget of {show_bytes(self.per_day)} a day is spent "
                f"({show_bytes(today)} written today): what was committed is intact; raise "
                "writes_per_day=, or give more memory so that less is written",
                missing=today + nbytes - self.per_day,
            )

    def count(self, nbytes: int) -> None:
        self.written += nbytes
        self.days[_today()] = self.days.get(_today(), 0) + nbytes
        while len(self.days) > 30:
            del self.days[min(self.days)]

    @property
    def drive_writes_per_day(self) -> float:
        """Mean over the life of the store, at least an hour; compare with the DWPD of the drive's
        data sheet."""
        return self.written / self.capacity / (max(3600.0, time.time() - self.born) / DAY)


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
