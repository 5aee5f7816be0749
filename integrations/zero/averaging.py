"""A check, in the first steps, for ranks that update equal weights with different gradients: then
nothing averages gradients, and the replicas diverge. There is no other way to find out, because
DistributedDataParallel, FSDP or the user's own loop may average.

Ranks write samples to the store of the default group and read those that others have written. No
rank waits, so a rank may skip a step; of two ranks the later one sees both samples.
"""

import logging
import zlib
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist

from commpress.collectives.transports.factory import initialized
from commpress.torch_private import default_store

log = logging.getLogger("commpress")

STEPS = 3
PARAMETERS = 256  # checked, at most
ELEMENTS = 4096  # of a weight, to identify it
SAMPLES = 16  # elements of its gradient
NOISE = 0.05  # relative difference of equal averages, summed in another order in half precision
ROW = np.dtype([("weight", "<u4"), ("gradient", "<f4", (SAMPLES,))])


class AveragingCheck:
    """The check of one optimizer. Call ``note`` for every tensor before it is updated, ``compare``
    after the step."""

    def __init__(self, optimizer: str, names: Iterable[str], store: dist.Store) -> None:
        self._optimizer, self._rank, self._size = optimizer, dist.get_rank(), dist.get_world_size()
        key = f"commpress/replicas/{zlib.crc32(';'.join(names).encode()):08x}"
        # number of optimizers of the same parameters that this rank has made
        alike = store.add(f"{key}/{self._rank}", 1)
        self._store = dist.PrefixStore(f"{key}/{alike}", store)
        self.over = False
        self._rows: list[tuple[int, np.ndarray]] = []
        self._mine: list[np.ndarray] = []  # samples of each step
        self._awaited: set[tuple[int, int]] = set()  # (step, rank)

    def note(self, weight: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if len(self._rows) == PARAMETERS:
            return
        start, row = (
            weight.detach().flatten()[:ELEMENTS].float().cpu().numpy(),
            np.zeros(SAMPLES, np.float32),
        )
        # constant weights, such as ones, identify no parameter
        known = zlib.crc32(start.tobytes()) if len(start) and (start != start[0]).any() else 0
        if gradient is not None:
            some = gradient.detach().flatten()[:ELEMENTS]
            some = some[:: max(len(some) // SAMPLES, 1)][:SAMPLES].float().cpu()
            row[: len(some)] = some.numpy()
        self._rows.append((known, row))

    def compare(self) -> None:
        """Log a warning, on one rank, if gradients are not averaged."""
        self._mine.append(np.array(self._rows, ROW))
        self._rows = []
        self.over = len(self._mine) == STEPS
        try:
            self._exchange(len(self._mine) - 1)
        # the store's process has ended: those who communicate report that
        except RuntimeError as error:
            self.over = True
            log.debug("gradients are not compared over the ranks: %s", error)

    def _exchange(self, step: int) -> None:
        self._store.set(f"{step}/{self._rank}", self._mine[step].tobytes().hex())
        self._awaited |= {(step, peer) for peer in self._peers()}
        for one in sorted(self._awaited):
            key = "{}/{}".format(*one)
            if self._store.check([key]):
                self._awaited.discard(one)
                theirs = bytes.fromhex(self._store.get(key).decode())
                mine = self._mine[one[0]]
                if len(theirs) == mine.nbytes and _apart(mine, np.frombuffer(theirs, ROW)):
                    self._warn(one[1])

    def _peers(self) -> set[int]:
        """Return the ranks at distances 1, 2, 4 … on both sides."""
        far = [1 << i for i in range(self._size.bit_length()) if 1 << i < self._size]
        return {(self._rank + sign * d) % self._size for d in far for sign in (1, -1)}

    def _warn(self, peer: int) -> None:
        if self._store.add("warned", 1) == 1:
            log.warning(
                "ranks %d and %d update equal weights with different gradients: these are not "
                "averaged, and the replicas diverge. %s does not communicate. Use "
                "commpress.Partitioned(params, ..., store=store), which averages, or wrap the "
                "model in DistributedDataParallel",
                *sorted((self._rank, peer)),
                self._optimizer,
            )


def averaging_check(optimizer: str, names: Iterable[str]) -> AveragingCheck | None:
    """Return a check, or None if this is the only rank or there is no store for it."""
    if not initialized() or dist.get_world_size() == 1 or (store := default_store()) is None:
        return None
    try:
        return AveragingCheck(optimizer, names, store)
    except RuntimeError as error:  # such as the store of torch's fake group, which stores nothing
        log.debug("gradients will not be compared over the ranks: %s", error)
        return None


def _apart(mine: np.ndarray, theirs: np.ndarray) -> bool:
    same = (mine["weight"] == theirs["weight"]) & (mine["weight"] != 0)
    one, other = mine["gradient"][same], theirs["gradient"][same]
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return False
    return bool(
        np.linalg.norm(one - other) > NOISE * max(np.linalg.norm(one), np.linalg.norm(other))
    )
