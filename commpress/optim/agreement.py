"""What ranks agree on before anything changes: one clip factor, and that they hold the same parameters."""

import logging
import zlib
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from commpress.collectives.scalars import gathered
from commpress.errors import InvalidArgument, Mismatch
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.optim.optimizer import CompressedOptimizer
    from commpress.optim.sharded_adam import ShardedOneBitAdam

    Clipped: TypeAlias = CompressedOptimizer | ShardedOneBitAdam

log = logging.getLogger("commpress")


class Clipping:
    """Gradients clipped to ``max_norm`` by one factor for all ranks; None leaves them as they are.

    After the freeze nobody has the mean gradient. Its norm is estimated as √(mean ‖g_i‖²) times the ratio that the two had
    during the exact steps, which ``facts.norm_ratio`` records.
    """

    def __init__(self, max_norm: float | None) -> None:
        if max_norm is not None and max_norm <= 0:
            raise InvalidArgument(f"max_grad_norm is {max_norm!r}, expected a positive number or None")
        self.max_norm = max_norm
        self._local_norm = 0.0  # √(mean ‖g_i‖²) of this step

    def factor(self, norm: float) -> float:
        return 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6))

    def agreed(self, optimizer: "Clipped", gain: float, *, exact: bool) -> Steps[float]:
        """The factor of this rank's gradients, ``gain`` included; an exact round clips their mean instead."""
        if self.max_norm is None:
            return gain
        flat = optimizer._flat
        mine = optimizer.kernels.square_sum(flat.segments(range(len(flat.parameters)))) * gain * gain
        every = yield from gathered(
            [mine], transport=optimizer.transport, sequence=optimizer.next_sequence(), device=flat.device
        )
        self._local_norm = float(every[:, 0].mean()) ** 0.5
        if exact or not np.isfinite(self._local_norm):
            return gain
        return gain * self.factor((optimizer.facts.norm_ratio or 1.0) * self._local_norm)

    def clip(self, optimizer: "Clipped", mean: torch.Tensor, norm: float | None = None) -> bool:
        """Clip the mean gradient as ``clip_grad_norm_`` does; False if its ``norm``, given if this is a part, is not finite."""
        if self.max_norm is None:
            return True
        norm, facts = float(torch.linalg.vector_norm(mean)) if norm is None else norm, optimizer.facts
        if not np.isfinite(norm):
            return False
        mean.mul_(self.factor(norm))
        if optimizer.transport.size > 1 and self._local_norm > 0:
            ratio = norm / self._local_norm
            facts.norm_ratio += (0.05 if facts.norm_ratio else 1.0) * (ratio - facts.norm_ratio)
        return True


def compare_replicas(optimizer: "CompressedOptimizer") -> Steps[None]:
    """Every rank holds the same parameters (mid-window: the same anchor), in every bit."""
    hashes = [_bits(w) for w in optimizer.replicated()]
    mine = zlib.crc32(np.array(hashes, np.int64).tobytes())
    numbers = [mine, optimizer.steps_done, _gradient_hash(optimizer)]
    every = yield from gathered(
        numbers, transport=optimizer.transport, sequence=optimizer.next_sequence(), device=optimizer._flat.device
    )
    different = tuple(r for r in range(optimizer.transport.size) if (every[r, :2] != every[0, :2]).any())
    if different:
        raise Mismatch(
            f"after {optimizer.steps_done} steps the parameters of ranks {list(different)} differ from those of rank 0 (steps "
            f"done: {[int(s) for s in every[:, 1]]}). Start every rank from the same weights (DistributedDataParallel "
            "broadcasts them) and change parameters only through this optimizer.",
            ranks=different,
        )
    if optimizer.under_way is None and every[0, 2] and (every[:, 2] == every[0, 2]).all():
        log.warning(
            "gradients are the same in every bit on all ranks: somebody averaged them already, so compression saves "
            "nothing. Under DistributedDataParallel call commpress.overlap(ddp, optimizer)."
        )


def _gradient_hash(optimizer: "CompressedOptimizer") -> int:
    gradients = (optimizer._flat.gradient(i) for i in range(len(optimizer._flat.parameters)))
    sums = [0 if g is None else _bits(g) for g in gradients]
    return zlib.crc32(np.array(sums, np.int64).tobytes()) if any(sums) else 0


def _bits(x: torch.Tensor) -> int:
    return int(x.view(-1).view(torch.int32).sum(dtype=torch.int64))
