"""1-bit LAMB: exact LAMB steps until the variance is known, then momentum in one bit and layer rates that adapt to it.

    exact       w = m/(√v + ε) + λx      c = clip(‖x‖ / ‖w‖)         x ← x − γ·c·w           c̄ ← β_c·c̄ + (1 − β_c)·c
    compressed  m ← mean of m_i, one bit;  ĝ = (m − β1·m_before)/(1 − β1);  ṽ ← β2·ṽ + (1 − β2)·ĝ²
                f = max (√v_frozen + ε)/(√ṽ + ε), damped and clipped; neither variance below its floor
                x ← x − γ·c̄·f·(m/(√v_frozen + ε) + λx)

Without bias corrections, which a layer's norm would divide away.

Note: no united scale. The published form multiplies each layer's momentum so that one scale fits all of them. Here every
tensor has scales of its own, and a power of two in front of a layer changes nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch

from commpress.errors import InvalidArgument, StateMismatch
from commpress.kernels.lamb import LayerRule, lamb_arithmetic
from commpress.optim.onebit_adam import OneBitAdam
from commpress.optim.optimizer import Round


class OneBitLamb(OneBitAdam):
    """LAMB for large batches. Options not named here are those of ``OneBitAdam``.

    - ``coefficients``: bounds of a layer's rate ‖x‖ / ‖w‖; ``coefficient_beta``: how slowly c̄ follows it.
    - ``factors``: bounds of f; ``factor_change``: how much f may change in one step, relatively.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        coefficients: tuple[float, float] = (0.01, 10.0),
        coefficient_beta: float = 0.9,
        factors: tuple[float, float] = (0.5, 4.0),
        factor_change: float = 0.1,
        **options: Any,
    ) -> None:
        for name, (low, high) in {"coefficients": coefficients, "factors": factors}.items():
            if not 0 < low <= high:
                raise InvalidArgument(f"{name} is {(low, high)!r}, expected two positive numbers in ascending order")
        if not 0 <= coefficient_beta < 1 or not 0 < factor_change < 1:
            raise InvalidArgument(
                f"coefficient_beta is {coefficient_beta!r} and factor_change {factor_change!r}, expected numbers between 0 "
                "and 1"
            )
        self.coefficients, self.coefficient_beta = coefficients, coefficient_beta
        self.factors, self.factor_change = factors, factor_change
        self.coefficient = self.factor = self.fresh = self.least = torch.empty(0)
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=False, **options)

    def exact(self, gradients: Sequence[torch.Tensor]) -> None:
        for group, at in self.groups():
            segments = self._flat.segments(at, {i: gradients[i] for i in at})
            self.layers.exact(
                segments, self.momentum, self.variance, self.work, self.coefficient[at.start : at.stop], self._rule(group)
            )

    def _rule(self, group: dict[str, Any]) -> LayerRule:
        return LayerRule(
            group["betas"], group["eps"], float(group["lr"]), group["weight_decay"], self.coefficients,
            self.coefficient_beta, self.factors, self.factor_change,
        )  # fmt: skip

    def apply(self, kind: Round) -> None:
        if kind is Round.EXACT:
            self.exact(self._works)
            return
        self.take_mean()  # work now holds the momentum before
        for group, at in self.groups():
            of = slice(at.start, at.stop)
            self.layers.frozen(
                self._flat.placed(at), self.momentum, self.work, self.reciprocal, self.fresh, self.least[of],
                self.coefficient[of], self.factor[of], self._rule(group),
            )  # fmt: skip

    # ------------------------------------------------------------ state

    def thaw_or_freeze(self) -> None:
        super().thaw_or_freeze()
        if self.frozen:
            means = [v.mean() if v.numel() else v.sum() for v in self._variances]
            self.least = self.frozen_variance.floor * torch.stack(means)
        if self.frozen and self.fresh.numel() == 0:
            self.fresh = self._flat.new()
            self.fresh.copy_(self.variance)

    def allocate(self) -> None:
        self.layers = lamb_arithmetic(self._flat.device)
        count, before = len(self._flat.parameters), self.coefficient
        self.coefficient = torch.zeros(count, device=self._flat.device)
        self.coefficient[: before.numel()] = before
        self.factor = torch.ones(count, device=self._flat.device)
        self.fresh = self._empty
        super().allocate()

    def schedule_state(self) -> dict[str, Any]:
        return super().schedule_state() | {
            "coefficient": self.coefficient.clone(), "factor": self.factor.clone(), "fresh": self.fresh.clone(),
        }  # fmt: skip

    def resume(self, schedule: dict[str, Any] | None) -> None:
        self.fresh = self._empty
        super().resume(schedule)
        if schedule is None:
            return
        for name in ("coefficient", "factor", "fresh"):
            mine, theirs = getattr(self, name), schedule[name]
            if mine.shape != theirs.shape:
                raise StateMismatch(
                    f"the state has {theirs.numel()} numbers as {name!r}, expected {mine.numel()}: load the state of this model"
                )
            mine.copy_(theirs)
