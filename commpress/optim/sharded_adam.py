"""1-bit Adam with its state partitioned over the ranks: what is new in the momentum goes to the
owners in one bit.

A compressed step of a frozen tensor (``tensor_states``):

    to the owner  what is new in the momentum, (1 − β1)·g_i/s + e_i, in one bit  (all-to-all)
                  e_i keeps the rest
    at the owner  m ← β1·m + s·mean        w ← Adam's step from m and the frozen v
    to everybody  w − x in one bit, x ← x + what arrived                         (all-gather)

Live tensors send gradients in eight bits, and their owner takes Adam's step; exact steps send
gradients to the owner and w to everybody as they are.

Note: only what is new. The owner has β1·m already, so nothing is lost and nobody else needs m.
"""

from collections.abc import Sequence
from typing import Any

import torch

from commpress.optim.freezing import FreezingOptimizer
from commpress.optim.optimizer import RoundKind
from commpress.optim.sharded import ShardedOptimizer
from commpress.work import Steps


class ShardedOneBitAdam(FreezingOptimizer, ShardedOptimizer):
    """AdamW: per parameter 12/P bytes of state, 2 of what all know of the variance and 4 of
    residual on each rank.

    Options are those of ``OneBitAdam``. All ranks hold the same parameters after each step.
    Gradients must be local: under DistributedDataParallel call ``commpress.overlap(ddp,
    optimizer)``, which keeps it from averaging them.
    """

    schedule_entries = ("frozen_at",)
    _ready: Sequence[int] = ()  # tensors that are to freeze

    def round(self) -> RoundKind:
        return RoundKind.EXACT if self.frozen_at is None else RoundKind.COMPRESSED

    def update(self, kind: RoundKind) -> Steps[None]:
        yield from ()
        trained = [i for _, at in self.groups() for i in at]
        live, frozen = self.tensors.part(trained)
        self.adam(trained if kind is RoundKind.EXACT else live)
        for part in self.owned(frozen) if kind is RoundKind.COMPRESSED else ():
            group, m = self.tensors.group(part.parameter), part.of(self.momentum)
            beta1, lr = group["betas"][0], float(group["lr"])
            m.mul_(beta1).addcmul_(part.of(self.mean), self.unit(part))
            self.apply_step(
                part, m, step=lr / self.correction(group), decay=1 - lr * group["weight_decay"]
            )
            self.bound_momentum(part, m)

    # ------------------------------------------------------------ freezing and thawing

    def schedule(self, kind: RoundKind) -> Steps[None]:
        self.unknown |= (
            self.due() if self.frozen_at is not None else (yield from self.ends_warmup())
        )

    def variance_sum(self) -> Steps[float]:
        every = yield from self.gathered([self.corrected_sum()])
        return float(every.sum())

    def variances(self) -> list[torch.Tensor]:
        return [part.of(self.variance) for part in self.parts]

    def agree(self) -> Steps[None]:
        live, _ = self.tensors.part(range(len(self._flat.parameters)))
        self._ready = self.ready(live) if self.due() else []
        # shards of a tensor are frozen or live together
        if self.columns is not None and self.due():
            self._ready = yield from self.columns.all_of(
                self._ready, len(self._flat.parameters), self._flat.device
            )

    def sort(self) -> None:
        """Live tensors whose variance may stand still freeze. What is owed of them is owed in units
        of p."""
        _, frozen = self.tensors.part(range(len(self._flat.parameters)))
        for i in frozen:
            self.tensors.divide(i)
        ready, self._ready = self._ready, []
        self.tensors.freeze(ready, self.steps_done)
        for i in ready:
            share = (1 - self.tensors.group(i)["betas"][0]) / self.tensors.divisor(i).float()
            self.quantized.residuals.scale(self._flat.names[i], share, self.channel.rank)
        self.recut()

    def wake(self, indices: Sequence[int]) -> Steps[None]:
        """One exact message brings what is owed into momentum; then these are live, and nothing is
        owed."""
        step = self.steps_done
        self.warn_woken(indices)
        for i in indices:
            owed = self._flat.view(self.work, i).view(-1).zero_()
            self.quantized.residuals.pay(
                self._flat.names[i], owed, self.channel.rank, self.channel.size
            )
        finite = yield from self.exact_mean(indices)
        for part in self.owned(indices):
            i, m = part.parameter, part.of(self.momentum)
            before = self.tensors.correction(i, int(self.tensors.variance_steps[i]))
            if finite:
                most = self.root(part).mul_(self.tensors.bound(i))
                m.addcmul_(part.of_whole(self._flat.view(self.work, i)), self.unit(part))
                m.copy_(torch.minimum(torch.maximum(m, -most), most))
            part.of(self.variance).mul_(
                self.tensors.correction(i, self.tensors.own_steps(i, step)) / before
            )
        self.tensors.thaw(indices, step)
        self.tensors.count(indices, step)
        self.recut()

    # ------------------------------------------------------------ checkpoints

    def schedule_state(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at}

    def resume(self, schedule: dict[str, Any]) -> None:
        self.frozen_at = schedule["frozen_at"]
