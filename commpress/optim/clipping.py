"""Clipping of gradients by one factor for all ranks, although none knows the norm of the mean."""

from math import isfinite
from typing import TYPE_CHECKING

import torch

from commpress.errors import InvalidArgument
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.optim.optimizer import CompressedOptimizer


class Clipping:
    """Gradients clipped to ``max_norm`` by one factor for all ranks; None leaves them as they are.

    After the freeze no rank has the mean gradient. Its norm is estimated as √(mean ‖g_i‖²) times
    their ratio during the exact steps, ``facts.norm_ratio``.
    """

    def __init__(self, max_norm: float | None) -> None:
        if max_norm is not None and max_norm <= 0:
            raise InvalidArgument(
                f"max_grad_norm is {max_norm!r}, expected a positive number or None"
            )
        self.max_norm = max_norm
        self._local_norm = 0.0  # √(mean ‖g_i‖²) of this step
        self.last = 1.0  # the factor of this step, for gradients that are not in its messages

    def factor(self, norm: float, own: float = 0.0) -> float:
        """Return the factor for gradients of this norm; ``own``: squares of local experts'
        gradients."""
        whole = (norm * norm + own) ** 0.5 if isfinite(norm) else norm
        self.last = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (whole + 1e-6))
        return self.last

    def agreed(self, optimizer: "CompressedOptimizer", gain: float, *, exact: bool) -> Steps[float]:
        """Agree on the factor of local gradients, ``gain`` included; an exact round clips their
        mean instead."""
        if self.max_norm is None:
            return gain
        if optimizer.columns is not None:
            gradients = [
                optimizer._flat.gradient(i) for i in range(len(optimizer._flat.parameters))
            ]
            self._local_norm = (yield from optimizer.squares_of_mesh(gradients, gain)) ** 0.5
        else:
            every = yield from optimizer.gathered([optimizer.squares(gain)])
            self._local_norm = float(every[:, 0].mean()) ** 0.5
        if exact or not isfinite(self._local_norm):
            return gain
        return gain * self.of_local(optimizer, self._local_norm)

    def of_local(self, optimizer: "CompressedOptimizer", norm: float) -> float:
        """Return the factor for local gradients of this norm."""
        return self.factor((optimizer.facts.norm_ratio or 1.0) * norm, optimizer.expert_squares)

    def clip(
        self, optimizer: "CompressedOptimizer", mean: torch.Tensor, norm: float | None = None
    ) -> bool:
        """Clip the mean gradient as ``clip_grad_norm_`` does; False if its ``norm``, given if this
        is a part, is not finite."""
        if self.max_norm is None:
            return True
        norm, facts = (
            float(torch.linalg.vector_norm(mean)) if norm is None else norm,
            optimizer.facts,
        )
        if not isfinite(norm):
            return False
        mean.mul_(self.factor(norm, optimizer.expert_squares))
        if optimizer.channel.size > 1 and self._local_norm > 0:
            ratio = norm / self._local_norm
            facts.norm_ratio += (0.05 if facts.norm_ratio else 1.0) * (ratio - facts.norm_ratio)
        return True
