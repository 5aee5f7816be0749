"""What follows from a variance that no longer moves: step sizes per element, which tensors are hard, which elements dead."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from commpress.codecs import ByName, Codec, Policy
from commpress.errors import InvalidArgument
from commpress.kernels.reference import SIGN_RMS

if TYPE_CHECKING:
    from commpress.optim.optimizer import CompressedOptimizer

SPIKY = 0.2  # (mean √v)² / mean v below this: few elements hold most of the variance (1 if all are equal)


@dataclass
class FrozenVariance:
    """``floor``: the share of a tensor's mean variance below which no element's variance is taken.

    Note: rows that wake up. A row without gradients so far has variance zero, and Adam would move it by γ·m/ε at its first
    one. The floor bounds that step. An element without variance that travels in one bit is dead instead: one bit cannot say
    zero, so it is neither sent nor moved.
    """

    floor: float

    def __post_init__(self) -> None:
        if self.floor < 0:
            raise InvalidArgument(f"variance_floor is {self.floor!r}, expected a number of at least 0")

    def freeze(self, optimizer: "CompressedOptimizer", reciprocal: torch.Tensor, updates: int) -> list[str]:
        """reciprocal := 1 / (√v̂ + ε); returns the names of tensors whose variance is spiky."""
        spiky, flat = [], optimizer._flat
        for group, at in optimizer.groups():
            correction = 1 - group["betas"][1] ** updates if group["bias_correction"] else 1.0
            for i in at:
                v, r = flat.view(optimizer.variance, i), flat.view(reciprocal, i)
                mean = v.mean() if v.numel() else v.sum()
                root = torch.maximum(v, self.floor * mean).div_(correction).sqrt_()
                if v.numel() > 1 and float(mean) > 0 and float(v.sqrt().mean().square() / mean) < SPIKY:
                    spiky.append(flat.names[i])
                r.copy_(root.add_(group["eps"]).reciprocal_())
        return spiky

    def policy(self, codec: Policy, spiky_codec: Codec | None, spiky: list[str]) -> Policy:
        if spiky_codec is None or not spiky:
            return codec
        return ByName({f"^{re.escape(name)}$": spiky_codec for name in spiky}, codec)

    def dead(self, optimizer: "CompressedOptimizer", policy: Policy) -> torch.Tensor | None:
        """Elements without variance that would travel in one bit, as positions in the flat buffer."""
        flat, found = optimizer._flat, []
        for i, (first, numel) in enumerate(flat.places):
            if policy.choose(flat.names[i], numel).kind <= SIGN_RMS:
                dead = (optimizer.variance[first : first + numel] == 0).nonzero().view(-1)
                if dead.numel():
                    found.append(dead + first)
        return torch.cat(found) if found else None
