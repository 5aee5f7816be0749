"""Freezing of the variance: steps are exact until it has settled, then tensors stand still and wake
up when they must."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack

import torch

from commpress.errors import InvalidArgument
from commpress.logs import warn_on_first
from commpress.optim.optimizer import CompressedOptimizer, OptimizerOptions
from commpress.schedules import AfterSteps, Freeze, WhenStable, pruned
from commpress.work import Steps


class FreezingOptions(OptimizerOptions, total=False):
    """Keyword options of the optimizers whose variance freezes; ``OneBitAdam`` explains them."""

    exact_steps: int | Literal["auto"] | Freeze


class FreezingOptimizer(CompressedOptimizer):
    """Optimizer whose steps are exact until its variance freezes, whole or sharded."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        exact_steps: int | Literal["auto"] | Freeze = "auto",
        **options: Unpack[OptimizerOptions],
    ) -> None:
        mesh = options.get("mesh")
        several = options.get("agree_over") is not None or (mesh is not None and mesh.ndim > 1)
        if several and not isinstance(exact_steps, (int, AfterSteps)):
            raise InvalidArgument(
                f"exact_steps is {exact_steps!r} and mesh or agree_over is given: each group of "
                "ranks that communicate would freeze its variance at a step of its own. Pass a "
                "number of steps"
            )
        # the end of the warm-up; each tensor has a time of its own
        self.frozen_at: int | None = None
        super().__init__(params, lr, betas, eps, weight_decay, **options)
        if exact_steps == "auto":
            self.freeze: Freeze = WhenStable(window=max(round(1 / (1 - betas[1])), 1))
        else:
            self.freeze = AfterSteps(exact_steps) if isinstance(exact_steps, int) else exact_steps

    @abstractmethod
    def variance_sum(self) -> Steps[float]:
        """The sum of the bias-corrected variance of all parameters, the same on every rank."""

    @abstractmethod
    def variances(self) -> list[torch.Tensor]:
        """v of every parameter, as far as this rank has it."""

    def corrected_sum(self) -> float:
        """The sum of the bias-corrected variance, as far as this rank has it."""
        total = 0.0
        for i, v in enumerate(self.variances()):
            own = self.tensors.own_steps(i, self.steps_done)
            total += (
                float(v.sum(dtype=torch.float64)) / (1 - self.tensors.group(i)["betas"][1] ** own)
                if own
                else 0.0
            )
        return total

    def ends_warmup(self) -> Steps[bool]:
        """End of the warm-up, if it comes with the step that was taken; then what is owed of
        gradients is owed of momentum."""
        step = self.steps_done
        self.tensors.record(step, self.variances())
        if self.freeze.probes(step):
            norm = yield from self.variance_sum()
            self.facts.norms = pruned(
                [*self.facts.norms, (step, norm)], getattr(self.freeze, "window", 0)
            )
        if not self.freeze.freezes(step, self.facts):
            return False
        self.frozen_at = step
        self.full.residuals.move_to(self.quantized.residuals)
        return True

    def due(self) -> bool:
        """True when live tensors may freeze again: not because a state was loaded."""
        return (
            self.frozen_at is not None
            and (self.steps_done - self.frozen_at) % max(self.patience // 8, 1) == 0
        )

    def ready(self, live: Iterable[int]) -> list[int]:
        """Those of the live tensors that have been so for long enough and whose variance may stand
        still."""
        woken = self.tensors.thawed_at.tolist()
        rested = (i for i in live if not woken[i] or self.steps_done - woken[i] >= self.patience)
        ready = [i for i in rested if self._warmed_up(i) and self.tensors.may_freeze(i)]
        if self.steps_done == self.frozen_at:
            self._warn_of_unstable(ready)
        return ready

    def _warmed_up(self, i: int) -> bool:
        """True unless the parameter came late: then it is live for as long as the warm-up took, at
        most ``patience``."""
        assert self.frozen_at is not None
        own = self.tensors.own_steps(i, self.steps_done)
        return own == self.steps_done or own >= min(self.patience, self.frozen_at)

    def _warn_of_unstable(self, ready: Sequence[int]) -> None:
        found = self.tensors.unstable(ready, self.steps_done, self.variances())
        if found:
            # then others have not seen these
            partial = sum(v.numel() for v in self.variances()) < self._flat.numel
            warn_on_first(
                0 if partial else self.channel.rank,
                "step %d: the variance freezes, but gradients have changed in size: in the second "
                "half of these steps their mean square was %s of that in the first%s. Under a "
                "variance that does not hold steps are too long or too short. Choose exact_steps "
                "so that half of them come after the learning rate has risen, or 'auto'",
                self.steps_done,
                ", ".join(f"{ratio:.2g} times ({self.tensors.name(i)})" for i, ratio in found[:3]),
                f", and in {len(found) - 3} more tensors" if len(found) > 3 else "",
            )

    def warn_woken(self, indices: Sequence[int]) -> None:
        warn_on_first(
            self.channel.rank,
            "step %d: gradients are far beyond the frozen variance in %s. It moves on in exact "
            "steps from here, and freezes again after %d of them",
            self.steps_done,
            ", ".join(map(self.tensors.name, indices)),
            self.patience,
        )
