"""Named tensors that live on the fastest tier with room: device, host memory, disks.

store = TieredStore.open("/nvme/run1", host="8GiB")
store.put("moments", tensor)
with store.borrow("moments") as moments:      # in host memory, changes are kept
    moments.mul_(0.9)
store.commit()                                # now a power cut cannot take them
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from commpress.errors import Damaged
from commpress.tiered_mem.background import Background
from commpress.tiered_mem.blocks import entry_of
from commpress.tiered_mem.copying import copy_snapshot
from commpress.tiered_mem.figures import Counters, Info, Place, Usage, info, places, usage
from commpress.tiered_mem.layer import FileLayer
from commpress.tiered_mem.lending import Borrow, Lending, Tier
from commpress.tiered_mem.memory import Crossing
from commpress.tiered_mem.opening import Budgets, Parts, assemble, restore
from commpress.tiered_mem.options import Options, Paths
from commpress.tiered_mem.pending import Pending, caller
from commpress.tiered_mem.placing import Placing
from commpress.tiered_mem.schedule import Schedule
from commpress.tiered_mem.transit import Transit
from commpress.tiered_mem.verification import verify
from commpress.tiered_mem.wear import Wear
from commpress.timeline import Timeline


class TieredStore:
    """Thread-safe. Made by ``open``; ``close`` it, or use it as a context. Only what was committed outlives it."""

    def __init__(self, parts: Parts) -> None:
        self._folders, self._catalog, self._residency = parts.folders, parts.catalog, parts.residency
        self._commits, self._claims, self._segment_bytes = parts.commits, parts.claims, parts.options.segment_bytes
        self._background, self.counters = Background(), Counters()
        self._transit = Transit(parts.catalog, parts.residency, self._background, self.counters)
        self._lending = Lending(parts.catalog, parts.residency, self._transit, self._background, self.counters)
        self._placing = Placing(parts.catalog, parts.residency, parts.claims, self._lending, parts.options)

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

        ``host``, ``device`` and ``disk`` (in each directory) are budgets that are never exceeded. ``engine`` is measured
        unless named; ``direct`` goes past the page cache where that works. ``pin`` registers host memory with CUDA.
        """
        parts = assemble(
            directory,
            Budgets.parse(host, device, disk, writes_per_day),
            accelerator=accelerator,
            reserve=reserve,
            engine=engine,
            depth=depth,
            direct=direct,
            pin=pin,
            options=options or Options(),
            layer=layer or FileLayer(),
        )
        return TieredStore(parts)

    @staticmethod
    def restore(directory: Paths, snapshot: str, *, layer: FileLayer | None = None) -> None:
        """Make a snapshot the state with which the store in ``directory``, which nobody has open, opens next."""
        restore(directory, snapshot, layer or FileLayer())

    def close(self) -> None:
        """End all threads and give the directories free. Changes since the last commit are gone."""
        if self._background.closed:
            return
        with self._catalog.changed:
            self._background.closed = True
            self._catalog.changed.notify_all()
        self._background.end()
        self._residency.disk.close()  # finishes what is under way
        self._residency.host.close()
        self._folders.close()

    def __enter__(self) -> "TieredStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- tensors

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy under ``name``, in host memory for now; replaces what was there."""
        self._background.check()
        entry = entry_of(name, tensor)
        with self._catalog.changed:
            known = self._catalog.names.get(name)
            same = known is not None and not known.damage and known.entries[name].like(entry)
        if same:
            with self.borrow(name) as place:
                place.copy_(tensor.detach())
        else:
            self._placing.put(entry, tensor)

    def borrow(self, name: str, *, on: Tier = "host", write: bool = True) -> Borrow:
        """A context with the tensor itself, on the tier asked for; changes are kept, also when the context is left by an
        error. One writer or many readers at a time. After the context the tensor is empty. ``async with`` works too."""
        return self._lending.borrow(name, on, write=write)

    def delete(self, name: str) -> None:
        """The disk still has it until the next commit."""
        self._background.check()
        self._placing.delete(name)

    def pin(self, name: str, *, on: Tier = "host") -> None:
        """Bring it there, and never evict it, until ``unpin``."""
        self._lending.acquire(name, on, write=False, who=caller(), pin=True)
        self._lending.release(name, write=False, who=caller())

    def unpin(self, name: str) -> None:
        with self._catalog.changed:
            self._catalog.block(name).pinned = False
            self._catalog.changed.notify_all()

    # ---------------------------------------------------------------- moving between tiers

    def prefetch(self, names: str | Iterable[str]) -> Pending[int]:
        """Begin to read tensors into host memory; the result is how many blocks were read. A hint: where everything in
        memory is in use, it is dropped."""
        return self._transit.prefetch(names)

    def evict(self, names: str | Iterable[str]) -> Pending[None]:
        """Write tensors to disk where they are newer in memory, and give their memory back."""
        return self._transit.evict(names)

    def flush(self, names: Iterable[str] | None = None) -> Pending[None]:
        """Write tensors that are newer in memory, and keep them there. Not yet a commit."""
        return self._transit.flush(names)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step: the first is recorded, the following ones are read ahead and evicted by plan."""
        schedule = self._residency.schedule
        with self._catalog.changed:
            schedule.begin()
            self._transit.read_ahead()
        try:
            yield
        finally:
            with self._catalog.changed:
                schedule.end(self._residency.seconds_to_read)

    # ---------------------------------------------------------------- durability

    def commit(self) -> int:
        """Everything as it is at this moment survives a crash when this returns; the commit's number. Waits for those
        who are writing; readers and later writers go on meanwhile."""
        self._background.check()
        self._placing.repack()
        return self._commits.commit()

    def commit_later(self) -> Pending[int]:
        """``commit`` in the background. What it keeps is the state of some moment after this call."""
        pending: Pending[int] = Pending()
        self._background.spawn(lambda: pending.run(self.commit))
        return pending

    def snapshot(self, name: str) -> int:
        """Commit, and keep this state under ``name`` beside all later ones; only what changes costs room."""
        self._background.check()
        return self._commits.commit(snapshot=name)

    def snapshots(self) -> list[str]:
        return self._commits.snapshots()

    def drop_snapshot(self, name: str) -> None:
        self._background.check()
        self._commits.drop_snapshot(name)

    def copy_snapshot(self, name: str, directory: Paths) -> None:
        """Make a store of its own of a snapshot, in an empty directory; this one goes on being used meanwhile."""
        self._background.check()
        copy_snapshot(name, directory, self._catalog, self._claims, self._residency, self._segment_bytes)

    def verify(self) -> list[Damaged]:
        """Read every chunk of the current state on disk; what is damaged, by tensor. Changes nothing."""
        self._background.check()
        return verify(self._catalog, self._residency)

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
            return info(self._catalog.block(name), name, self._residency)

    def places(self, name: str) -> list[Place]:
        """Where its bytes were last written, with what lies beside them; newer ones may be in memory."""
        with self._catalog.changed:
            return places(self._catalog.block(name), self._residency.disk)

    def traffic(self) -> tuple[int, int]:
        """Bytes of tensors read from disk and written to it since the store was opened."""
        return self._residency.read_bytes, self._residency.written_bytes

    @property
    def device(self) -> torch.device | None:
        """Where its device tier is."""
        arena = self._residency.device
        return None if arena is None else arena.bytes.device

    @property
    def crossing(self) -> Crossing:
        """Bytes between host memory and the device; ``Offloaded`` and ``stream`` count theirs here too."""
        return self._residency.crossing

    @property
    def timeline(self) -> Timeline | None:
        """Who watches; see ``commpress.watch``."""
        return self._residency.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._residency.timeline = timeline

    def usage(self) -> Usage:
        with self._catalog.changed:
            return usage(self._catalog.blocks.values(), self._residency)

    @property
    def schedule(self) -> Schedule:
        return self._residency.schedule

    @property
    def wear(self) -> Wear:
        return self._residency.wear

    @property
    def engine(self) -> str:
        return self._residency.disk.engine.name

    @property
    def direct(self) -> bool:
        return self._residency.disk.direct
