"""Snapshots of a run in a TieredStore, each named by a step on which all ranks agreed.

A snapshot is complete or absent, by the store's own commit. An error during writing leaves the last
one unchanged, and the run continues.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from commpress.collectives.channel import Channel
from commpress.errors import Damaged, DirectoryRefused, InvalidArgument, StorageError, check_counts
from commpress.integrations.elastic.healing import (
    empty_tensors,
    hash_of,
    hash_of_all,
    packed,
    share,
)
from commpress.tiered_mem import TieredStore

SLOTS = 256  # processes of one machine that may share a folder
log = logging.getLogger("commpress")

_NAME = re.compile(r"step-(\d+)")
_HOST = 64 << 20  # fewest bytes of a store's host memory
# works everywhere; measuring which engine is the fastest would take longer than a newcomer needs
# for all else
_ENGINE = "threads"


class Snapshots:
    """Folder of snapshots. Each process of a machine has its own store in it, ``folder/0`` or
    another that is free.

    - ``every``: steps between two snapshots, the same on every rank.
    - ``keep``: number of snapshots to keep; only tensors that differ between them take room.
    - ``options``: options of ``TieredStore.open``, such as ``disk="100GiB"``, or ``engine="auto"``
      for the fastest on this disk.
    """

    def __init__(
        self, folder: str | Path, *, every: int = 1000, keep: int = 2, **options: Any
    ) -> None:
        check_counts(every=every, keep=keep)
        if not every or not keep:
            raise InvalidArgument(f"every is {every} and keep {keep}, expected at least 1 of both")
        self.folder, self.every, self.keep, self.options = Path(folder), every, keep, options
        self.place: Path | None = None
        self._store: TieredStore | None = None
        self._last = 0
        self._host = _HOST

    def open(self) -> None:
        """Open the first store in the folder that no other process has open."""
        if self._store is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for slot in range(SLOTS):
            try:
                self._reopen(self.folder / str(slot))
                return
            except DirectoryRefused as error:
                refused = error
        raise DirectoryRefused(
            f"{self.folder} has none of {SLOTS} directories free ({refused}): pass a folder that "
            "only snapshots use"
        ) from refused

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _reopen(self, place: Path) -> None:
        self.close()
        self.place = place
        usual: dict[str, Any] = {"host": self._host, "engine": _ENGINE}
        self._store = TieredStore.open(place, **(usual | self.options))

    def _make_room(self, largest: int) -> None:
        """Reserve host memory for two tensors of up to ``largest`` bytes: one being written, and
        one being read."""
        if self.place is not None and 2 * largest + (16 << 20) > self._host:
            self._host = 4 * largest + (16 << 20)
            self._reopen(self.place)

    @property
    def store(self) -> TieredStore:
        if self._store is None:  # a full disk may have prevented it from opening
            assert self.place is not None, "open() comes first"
            self._reopen(self.place)
        assert self._store is not None
        return self._store

    @property
    def steps(self) -> list[int]:
        """Steps with a snapshot, ascending."""
        return sorted(
            int(found[1]) for name in self.store.snapshots() if (found := _NAME.fullmatch(name))
        )

    @property
    def last(self) -> int:
        """Step of the newest snapshot, 0 if there is none. While the disk cannot be read, the
        newest known step."""
        with suppress(StorageError):
            self._last = max(self.steps, default=0)
        return self._last

    def save(self, step: int, document: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Save this state as that of ``step``. A ``StorageError`` leaves the last snapshot
        unchanged."""
        self._make_room(max((each.nbytes for each in tensors), default=0))
        hashes = [hash_of(each) for each in tensors]
        try:
            self.store.put("document", torch.frombuffer(bytearray(document), dtype=torch.uint8))
            for number, tensor in enumerate(tensors):
                self.store.put(f"tensor-{number}", tensor.detach().cpu())
            self.store.put("hash", torch.tensor([_signed(hash_of_all(document, hashes)), step]))
            for name in [name for name in self.store if _number(name) >= len(tensors)]:
                self.store.delete(name)
            self.store.snapshot(f"step-{step:010d}")
            self._last = step
        except StorageError:
            assert self.place is not None
            # there may be no room for that either: then it is opened on the next use
            with suppress(StorageError):
                self._reopen(self.place)  # with its last commit
            raise
        for old in self.steps[: -self.keep]:
            self.store.drop_snapshot(f"step-{old:010d}")

    def give_way(self, step: int) -> None:
        """Drop snapshots newer than ``step``, the state received from the others, which repeat
        those steps. Raise if one is newer by more than one snapshot, because it belongs to another
        run."""
        if self.last <= step:
            return
        if self.last > step + self.every:
            raise InvalidArgument(
                f"the snapshots in {self.place} are of step {self.last}, but the run that this "
                f"process joins is at step {step}: start this process first, without join=, to "
                "resume from them, or pass another folder as snapshots="
            )
        log.info(
            "snapshots of step %d are dropped for the joined run, which is at step %d",
            self.last,
            step,
        )
        for old in self.steps:
            self.store.drop_snapshot(f"step-{old:010d}")
        self._last = 0

    def load(self) -> tuple[int, bytes, list[torch.Tensor]]:
        """Return step, document and tensors of the newest snapshot."""
        self._make_room(max((self.store.info(name).nbytes for name in self.store), default=0))
        with self.store.borrow("document", write=False) as content:
            document = content.numpy().tobytes()
        tensors = empty_tensors(document)
        for number, tensor in enumerate(tensors):
            with self.store.borrow(f"tensor-{number}", write=False) as content:
                tensor.copy_(content)
        with self.store.borrow("hash", write=False) as content:
            told, step = content.tolist()
        if (
            told != _signed(hash_of_all(document, [hash_of(each) for each in tensors]))
            or step != self.last
        ):
            raise Damaged(
                f"the snapshot of step {step} in {self.place} is damaged: its hash differs. Remove "
                "that directory; the other ranks have their own snapshots",
                names=(f"step-{step:010d}",),
            )
        return step, document, tensors


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _number(name: str) -> int:
    return int(name.removeprefix("tensor-")) if name.startswith("tensor-") else -1


def newest(
    snapshots: Snapshots, channel: Channel, *, of: Sequence[int] = ()
) -> tuple[int, bytes, list[torch.Tensor]]:
    """Return, on all ranks, step, document and tensors of the newest snapshot ``of`` some ranks, by
    default of any; step 0 if there is none. Collective."""
    mine = snapshots.last if channel.rank in (of or range(channel.size)) else 0
    steps: np.ndarray = channel.run(channel.gathered([float(mine)]))[:, 0]
    step = int(steps.max())
    if not step:
        return 0, packed({}, []), []
    donors = [rank for rank, last in enumerate(steps) if last == step]
    needy = [rank for rank in range(channel.size) if rank not in donors]
    _, document, tensors = snapshots.load() if channel.rank in donors else (0, b"", [])
    if needy:
        document, tensors, _ = channel.run(
            share(document, tensors, channel, donors=donors, needy=needy)
        )
    return step, document, tensors
