"""Named tensors on the fastest tier with room: device, host memory, disks.

store = TieredStore.open("/nvme/run1", host="8GiB")
store.put("moments", tensor)
with store.borrow("moments") as moments:      # in host memory; changes are kept
    moments.mul_(0.9)
store.commit()                                # from now on they survive a power cut
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import torch

from commpress.errors import Damaged, InvalidArgument, check_counts
from commpress.tiered_mem import engines
from commpress.tiered_mem.access import Access, AccessCounters, Borrow, Tier
from commpress.tiered_mem.arena import Arena
from commpress.tiered_mem.blocks import Catalog, Pending, caller
from commpress.tiered_mem.commit import Commits
from commpress.tiered_mem.disk import Disk, References, Wear
from commpress.tiered_mem.folders import Folders, Paths, typed
from commpress.tiered_mem.layer import MANIFEST, PAGE, FileLayer
from commpress.tiered_mem.manifest import DTYPES, Extent, Manifest, ManifestRow
from commpress.tiered_mem.packs import Packs
from commpress.tiered_mem.residency import Crossing, Residency, damaged
from commpress.tiered_mem.schedule import Schedule
from commpress.timeline import Timeline
from commpress.units import parse_bytes


@dataclass(frozen=True)
class Options:
    """Sizes in a store. ``chunk_bytes``: the largest chunk on disk. ``pack_below``: smaller tensors
    share chunks."""

    chunk_bytes: int = 4 << 20
    pack_below: int = 256 << 10
    pack_bytes: int = 1 << 20
    segment_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "pack_bytes", "segment_bytes"):
            if getattr(self, name) < PAGE or getattr(self, name) % PAGE:
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)}, expected a multiple of {PAGE}"
                )
        if not 0 <= self.pack_below <= self.pack_bytes <= self.chunk_bytes:
            raise InvalidArgument(
                f"pack_below is {self.pack_below}, pack_bytes {self.pack_bytes} and chunk_bytes "
                f"{self.chunk_bytes}, expected pack_below <= pack_bytes <= chunk_bytes"
            )


@dataclass(frozen=True)
class Info:
    """Description of one tensor, and the tier of its newest bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    tier: Literal["device", "host", "disk"]
    dirty: bool  # True if newer in memory than on disk
    pinned: bool


@dataclass(frozen=True)
class FileRange:
    """A part of a tensor on disk."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Usage:
    """Bytes by tier. ``fragmentation``: share of the bytes taken on disk that no tensor uses."""

    host: int
    host_capacity: int
    device: int
    device_capacity: int
    disk: int
    disk_reserved: int
    tensors: int
    fragmentation: float


class TieredStore:
    """Thread-safe store of named tensors. ``open`` makes it; call ``close``, or use it as a context
    manager. Only committed state survives its end."""

    def __init__(
        self, catalog: Catalog, residency: Residency, folders: Folders, options: Options
    ) -> None:
        self._catalog, self._residency, self._folders = catalog, residency, folders
        self._commits = Commits(catalog, residency, folders)
        self._access = Access(catalog, residency)
        self._packs = Packs(
            catalog, residency, self._access, below=options.pack_below, nbytes=options.pack_bytes
        )
        self._settlers: list[weakref.WeakMethod[Callable[[], None]]] = []

    # ---------------------------------------------------------------- opening and closing

    @staticmethod
    def open(
        directory: Paths,
        *,
        host: str | int = "1GiB",
        device: str | int = 0,
        accelerator: str | torch.device = "cuda",
        disk: str | int | None = None,
        reserve: bool = False,
        engine: str = "auto",
        depth: int = 4,
        direct: bool | None = None,
        pin: bool | None = None,
        writes_per_day: str | int | None = None,
        options: Options | None = None,
        layer: FileLayer | None = None,
    ) -> "TieredStore":
        """Open the store in one directory, or striped over several, and make it if there is none.

        ``host``, ``device`` and ``disk`` (in each directory) are budgets that are never exceeded.

        - ``accelerator``: device of the device tier.
        - ``reserve``: reserve the room of ``disk`` now, so that it is available later.
        - ``engine``: engine for transfers to disks; "auto" measures which is the fastest.
        - ``depth``: number of requests that a disk gets at once.
        - ``direct``: bypass the page cache; None does so if the file system supports it.
        - ``pin``: register host memory with CUDA, after which the process cannot be forked; None
          does so if this process uses CUDA already or has a ``device`` budget.
        - ``writes_per_day``: budget in bytes that spares flash memory; writes beyond it are
          refused.
        - ``options``: sizes of chunks and packs.
        - ``layer``: calls of the file system, for tests that simulate failures.
        """
        options, layer = options or Options(), layer or FileLayer()
        on_card = torch.device(accelerator).type == "cuda"
        host_bytes, device_bytes = parse_bytes(host), parse_bytes(device)
        if pin is None:
            pin = torch.cuda.is_initialized() or bool(on_card and device_bytes)
        disk_bytes = None if disk is None else parse_bytes(disk)
        per_day = None if writes_per_day is None else parse_bytes(writes_per_day)
        if host_bytes < options.pack_bytes:
            raise InvalidArgument(
                f"host is {host_bytes} bytes, expected at least pack_bytes = {options.pack_bytes}"
            )
        check_counts(1, depth=depth)
        with typed():
            folders = Folders(directory, layer)
        opened: Disk | None = None
        try:
            with typed():
                # Everything is read and checked before anything is removed.
                last = None if folders.fresh else folders.last_commit()
                snapshots = {} if folders.fresh else folders.snapshots()
                opened = _disk(folders, disk_bytes, engine, depth, direct, options)
                wear = Wear(sum(layer.capacity(folder.fd) for folder in folders), per_day)
                catalog = Catalog()
                residency = Residency(
                    catalog.changed,
                    References(opened),
                    _host(host_bytes, opened, pin),
                    Arena(device_bytes, torch.device(accelerator)) if device_bytes else None,
                    chunk_bytes=options.chunk_bytes,
                    wear=wear,
                    schedule=Schedule(host_bytes),
                )
                if last is None:
                    last = Manifest(folders.store, 0, (), 0, wear.born)
                    folders.write_manifest(MANIFEST, last)
                    folders.settle()
                _load(last, snapshots, catalog, residency)
                folders.sweep()
                opened.sweep()
                if reserve:
                    opened.reserve()
                return TieredStore(catalog, residency, folders, options)
        except BaseException:
            if opened is not None:
                opened.close()
            folders.close()
            raise

    @staticmethod
    def restore(directory: Paths, snapshot: str, *, layer: FileLayer | None = None) -> None:
        """Make a snapshot the state with which the store in ``directory`` opens next; no process
        may have it open."""
        with typed():
            folders = Folders(directory, layer or FileLayer())
            try:
                if folders.fresh:
                    raise InvalidArgument(f"{folders.parts[0].path} has no store")
                folders.restore(snapshot)
            finally:
                folders.close()

    def settle_with(self, finish: Callable[[], None]) -> None:
        """Call the bound method ``finish`` before each commit, snapshot and close: it ends what
        another thread is still changing. Its object is not kept alive."""
        self._settlers.append(weakref.WeakMethod(finish))

    def _settle(self) -> None:
        self._settlers = [one for one in self._settlers if one() is not None]
        errors = []
        for one in self._settlers:
            try:
                if (finish := one()) is not None:
                    finish()
            except Exception as error:  # the others are to be waited for, too
                errors.append(error)
        if errors:
            raise errors[0]

    def held(self) -> str | None:
        """Return the name of a tensor that the caller has borrowed, if there is one."""
        return self._access.held()

    def close(self) -> None:
        """End all threads and unlock the directories. Changes since the last commit are lost."""
        background = self._access.background
        if background.closed:
            return
        with suppress(Exception):  # lost with the changes
            self._settle()
        with self._catalog.changed:
            background.closed = True
            self._catalog.changed.notify_all()
        background.end()
        self._residency.disk.close()  # finishes running transfers
        self._residency.host.close()
        self._folders.close()

    def __enter__(self) -> "TieredStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- tensors

    @property
    def counters(self) -> AccessCounters:
        return self._access.counters

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Store a copy under ``name``, at first in host memory; replace an earlier tensor of that
        name."""
        self._check()
        self._packs.put(name, tensor)

    def borrow(self, name: str, *, on: Tier = "host", write: bool = True) -> Borrow:
        """Return a context manager that yields the tensor itself, on the requested tier. Changes
        are kept, even if an error leaves the context. There is one writer or any number of readers
        at a time. After the context the tensor is empty. ``async with`` works, too."""
        return self._access.borrow(name, on, write=write)

    def used_on(self, name: str, device: torch.device) -> None:
        """Note that this thread's stream on ``device`` may still read a tensor, borrowed in host
        memory, when the context has been left: who writes it next, or frees its memory, waits."""
        if device.type != "cpu":
            self._access.used_on(name, device)

    def delete(self, name: str) -> None:
        """Delete a tensor. The last commit on disk still has it until the next one."""
        self._check()
        self._packs.delete(name)

    def pin(self, name: str, *, on: Tier = "host") -> None:
        """Bring a tensor to a tier, and never evict it until ``unpin``."""
        self._access.acquire(name, on, write=False, who=caller(), pin=True)
        self._access.release(name, write=False, who=caller())

    def unpin(self, name: str) -> None:
        with self._catalog.changed:
            self._catalog.block(name).pinned = False
            self._catalog.changed.notify_all()

    # ---------------------------------------------------------------- moving between tiers

    def prefetch(self, names: str | Iterable[str]) -> Pending[int]:
        """Begin to read tensors into host memory, where they stay until their first use, or until
        as many bytes as it has were evicted instead; the result is the number of blocks read. This
        is a hint, ignored if everything in memory is in use."""
        return self._access.prefetch(names)

    def evict(self, names: str | Iterable[str]) -> Pending[None]:
        """Write tensors that are newer in memory to disk, and free their memory. What others use,
        or tensors packed with it, stays."""
        return self._access.evict(names)

    def flush(self, names: Iterable[str] | None = None) -> Pending[None]:
        """Write tensors that are newer in memory to disk, and keep them in memory. It does not
        commit them."""
        return self._access.flush(names)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark a training step: the first one is recorded, and in later ones tensors are read in
        advance and evicted by that plan."""
        schedule = self._residency.schedule
        with self._catalog.changed:
            schedule.begin()
            self._access.read_ahead()
        try:
            yield
        finally:
            with self._catalog.changed:
                schedule.end(self._residency.seconds_to_read)

    # ---------------------------------------------------------------- durability

    def commit(self) -> int:
        """Make the present state survive a crash; return the commit's number. It waits for present
        writers, while readers and later writers continue."""
        self._check()
        self._settle()
        self._packs.repack()
        return self._commits.commit()

    def commit_later(self) -> Pending[int]:
        """Call ``commit`` in the background. It saves the state of some moment after this call."""
        pending: Pending[int] = Pending()
        self._settle()
        self._access.background.spawn(lambda: pending.run(self.commit))
        return pending

    def snapshot(self, name: str) -> int:
        """Commit, and keep this state under ``name`` besides all later ones; only tensors that
        change take room."""
        self._check()
        self._settle()
        return self._commits.commit(snapshot=name)

    def snapshots(self) -> list[str]:
        return self._commits.snapshots()

    def drop_snapshot(self, name: str) -> None:
        self._check()
        self._commits.drop_snapshot(name)

    def copy_snapshot(self, name: str, directory: Paths) -> None:
        """Copy a snapshot to an empty directory as a new store; this store stays usable."""
        self._check()
        self._commits.copy_snapshot(name, directory)

    def verify(self) -> list[Damaged]:
        """Read every chunk of the current state on disk; return the damage by tensor. Changes
        nothing."""
        self._check()
        return self._commits.verify()

    # ---------------------------------------------------------------- looking

    def __iter__(self) -> Iterator[str]:
        with self._catalog.changed:
            return iter(list(self._catalog.names))

    def __len__(self) -> int:
        return len(self._catalog.names)

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.names

    def info(self, name: str) -> Info:
        with self._catalog.changed:
            block = self._catalog.block(name)
            entry, tier = block.entries[name], self._residency.tier(block)
            return Info(
                name,
                entry.shape,
                DTYPES[entry.dtype],
                entry.nbytes,
                tier,
                dirty=block.dirty,
                pinned=block.pinned,
            )

    def places(self, name: str) -> list[FileRange]:
        """Return the places on disk to which a tensor's block was last written; newer bytes may be
        in memory."""
        disk = self._residency.disk
        with self._catalog.changed:
            chunks = self._catalog.block(name).chunks
            return [
                FileRange(disk.place(chunk.extent), chunk.extent.offset, chunk.nbytes)
                for chunk in chunks
            ]

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of tensors read from disk and written to it since the store was
        opened."""
        return self._residency.read_bytes, self._residency.written_bytes

    @property
    def device(self) -> torch.device | None:
        """Device of the device tier, None without one."""
        arena = self._residency.device
        return None if arena is None else arena.bytes.device

    @property
    def crossing(self) -> Crossing:
        """Bytes between host memory and the device; ``Offloaded`` and ``stream`` add theirs
        here."""
        return self._residency.crossing

    @property
    def timeline(self) -> Timeline | None:
        """Timeline on which spans are recorded; see ``commpress.watch``."""
        return self._residency.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._residency.timeline = timeline

    def usage(self) -> Usage:
        host, device, disk = self._residency.host, self._residency.device, self._residency.disk
        with self._catalog.changed:
            blocks = self._catalog.blocks.values()
            taken = sum(chunk.extent.length for block in blocks for chunk in block.chunks)
            filled = sum(block.live for block in blocks if block.chunks)
            return Usage(
                host=host.used,
                host_capacity=host.capacity,
                device=device.used if device else 0,
                device_capacity=device.capacity if device else 0,
                disk=disk.used,
                disk_reserved=disk.reserved,
                tensors=sum(block.live for block in blocks),
                fragmentation=1 - filled / taken if taken else 0.0,
            )

    @property
    def schedule(self) -> Schedule:
        return self._residency.schedule

    @property
    def wear(self) -> Wear:
        return self._residency.wear

    @property
    def pack_below(self) -> int:
        """Bytes below which tensors share a chunk and move together."""
        return self._packs.below

    @property
    def engine(self) -> str:
        return self._residency.disk.engine.name

    @property
    def direct(self) -> bool:
        return self._residency.disk.direct

    def _check(self) -> None:
        self._access.background.check()


def _disk(
    folders: Folders,
    capacity: int | None,
    engine: str,
    depth: int,
    direct: bool | None,
    options: Options,
) -> Disk:
    layer = folders.layer
    possible = all(layer.takes_direct(folder.fd) for folder in folders)
    if direct and not possible:
        raise InvalidArgument(
            f"direct=True, but {folders.parts[0].path} does not take O_DIRECT: leave direct= out"
        )
    straight = possible if direct is None else direct
    if engine == "auto":
        engine, _ = engines.choose(layer, folders.parts[0].fd, direct=straight, depth=depth)
    running = engines.start(engine, layer, depth)
    return Disk(
        folders, running, direct=straight, capacity=capacity, segment_bytes=options.segment_bytes
    )


def _host(nbytes: int, disk: Disk, pin: bool) -> Arena:
    arena = Arena(nbytes)
    arena.touch()
    disk.engine.register(arena.whole())
    if pin:
        arena.pin()
    return arena


def _load(
    manifest: Manifest, snapshots: Mapping[str, Manifest], catalog: Catalog, residency: Residency
) -> None:
    """Load the state of the last commit."""
    references, wear = residency.references, residency.wear
    references.generation, references.committed = manifest.generation, manifest.extents
    references.snapshots = {name: snapshot.extents for name, snapshot in snapshots.items()}
    wear.written, wear.born, wear.days = (
        manifest.written,
        manifest.born or wear.born,
        dict(manifest.days),
    )
    bad = references.disk.adopt(references.committed.union(*references.snapshots.values()))
    references.lost |= bad.keys()
    for row in manifest.rows:
        _load_row(row, catalog, references.disk, bad)


def _load_row(row: ManifestRow, catalog: Catalog, disk: Disk, bad: Mapping[Extent, str]) -> None:
    block = catalog.new_block()
    block.size, block.chunks = row.size, row.chunks
    block.entries = {entry.name: entry for entry in row.entries}
    catalog.names |= dict.fromkeys(block.entries, block)
    for chunk in row.chunks:
        if (what := bad.get(chunk.extent)) and not block.damage:
            place = disk.place(chunk.extent)
            error = Damaged(
                f"{place} at {chunk.extent.offset}: {what}", file=place, offset=chunk.extent.offset
            )
            block.damage = damaged(block, error)
