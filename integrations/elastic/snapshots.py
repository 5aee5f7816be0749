"""Snapshots of a run in a TieredStore, each named by a step that all ranks agreed to.

A snapshot is whole or is not there: the store's own commit decides. What fails while one is written
leaves the last one as it was, and the run goes on with that.
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
_HOST = 64 << 20  # bytes of host memory of a store at least
# works everywhere; to measure which is the fastest takes longer than what a newcomer has to do
# beside
_ENGINE = "threads"


class Snapshots:
    """Folder of snapshots. Each process of a machine has a store of its own in it, ``folder/0`` or
    another that is free.

    - ``every``: steps from one snapshot to the next, the same on every rank.
    - ``keep``: how many are kept; only what changes between them costs room.
    - ``options``: of ``TieredStore.open``, such as ``disk="100GiB"``, or ``engine="auto"`` for the
      fastest on this disk.
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
        """Take the first store in the folder that nobody has open."""
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
            f"{self.folder} has no directory free of {SLOTS}: is it one of snapshots? ({refused})"
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
        """Host memory for tensors of so many bytes: one that is written, and one that is read."""
        if self.place is not None and 2 * largest + (16 << 20) > self._host:
            self._host = 4 * largest + (16 << 20)
            self._reopen(self.place)

    @property
    def store(self) -> TieredStore:
        if self._store is None:  # a full disk may have kept it from opening
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
        """The step of the newest; 0 if there is none. While the disk cannot be read it is that of
        the newest known."""
        with suppress(StorageError):
            self._last = max(self.steps, default=0)
        return self._last

    def save(self, step: int, document: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Keep this state as that of ``step``. A ``StorageError`` leaves the last snapshot as it
        was."""
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
            # there may be no room for that either: then it is opened when it is needed
            with suppress(StorageError):
                self._reopen(self.place)  # as it was committed
            raise
        for old in self.steps[: -self.keep]:
            self.store.drop_snapshot(f"step-{old:010d}")

    def give_way(self, step: int) -> None:
        """Let the state of ``step``, which the others have given, count instead of what is newer
        here: they take those steps anew. What is newer by more than one snapshot is of another run,
        or of one that they know nothing of: an error."""
        if self.last <= step:
            return
        if self.last > step + self.every:
            raise InvalidArgument(
                f"the snapshots in {self.place} are of step {self.last}, but the run that this "
                f"process joins is at step {step}: begin with this process, without join=, to go "
                "on from them, or give snapshots= another folder"
            )
        log.info(
            "snapshots of step %d give way to the run that has been joined, at step %d",
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
                f"the snapshot of step {step} in {self.place} is not what was written: its hash "
                "differs. Remove that directory; the other ranks have snapshots of their own",
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
    """The newest snapshot ``of`` some ranks, by default of any, on all of them: its step, document
    and tensors; step 0 if there is none. Collective."""
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
