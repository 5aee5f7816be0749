"""1-bit LAMB: exact LAMB steps until the variance is known, then momentum in one bit; each layer
keeps its own rate.

    exact       w = m/(√v + ε) + λx      c = clip(‖x‖ / ‖w‖)
                x ← x − γ·c·w      c̄ ← β_c·c̄ + (1 − β_c)·c
    compressed  p as in ``OneBitAdam``
      live        a ← β_c·a + (1 − β_c)·p      c = clip(‖x‖ / ‖a + λx‖)      x ← x − γ·c·(p + λx)
      frozen      ĝ = (s·p − β1·m)/(1 − β1)      ṽ ← β2·ṽ + (1 − β2)·ĝ²
                  f = max s/(√ṽ + ε), damped and clipped; neither variance below its floor
                  x ← x − γ·c̄·f·(p + λx)

Without bias corrections, which a layer's norm would divide away. s, and which layers are
compressed, as in ``tensor_states``.

Note: two methods for a layer's rate. ``frozen`` is the published one: rates of the warm-up times a
factor from the variance. It multiplies an old rate by the size of the present momentum, so if
gradients grow tenfold, steps do. ``live`` is LAMB's own rule, which costs no message, since all
ranks hold the same x and p. Its norm is that of an average of the last p: one bit makes each p too
long, but what is too much in one is taken back in the next.

Note: no united scale. The published form multiplies each layer's momentum so that one scale fits
all of them. Here every tensor has scales of its own, and a power of two in front of a layer changes
nothing.
"""

from collections.abc import Container, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import torch

from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.errors import InvalidArgument
from commpress.kernels import layer_shards
from commpress.kernels.devices import lamb_arithmetic
from commpress.kernels.lamb import LayerRule
from commpress.optim.flat import Flat
from commpress.optim.layout import alike, is_cut, named_parameters, refuse_held
from commpress.optim.onebit_adam import FreezingOptions, OneBitAdam
from commpress.optim.optimizer import RoundKind
from commpress.work import Steps


class OneBitLamb(OneBitAdam):
    """LAMB for large batches. Options not named here are those of ``OneBitAdam``.

    - ``rates``: of layers after the warm-up: "live" (default) or "frozen", the published rule; see
      above.
    - ``coefficients``: bounds of a layer's rate; ``coefficient_beta``: β_c, how slowly averages
      follow.
    - ``factors``: bounds of f; ``factor_change``: how much f may change in one step, relatively; of
      frozen rates.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rates: Literal["live", "frozen"] = "live",
        coefficients: tuple[float, float] = (0.01, 10.0),
        coefficient_beta: float = 0.9,
        factors: tuple[float, float] = (0.5, 4.0),
        factor_change: float = 0.1,
        **options: Unpack[FreezingOptions],
    ) -> None:
        if rates not in ("live", "frozen"):
            raise InvalidArgument(f"rates is {rates!r}, expected 'live' or 'frozen'")
        for name, (low, high) in {"coefficients": coefficients, "factors": factors}.items():
            if not 0 < low <= high:
                raise InvalidArgument(
                    f"{name} is {(low, high)!r}, expected two positive numbers in ascending order"
                )
        if not 0 <= coefficient_beta < 1 or not 0 < factor_change < 1:
            raise InvalidArgument(
                f"coefficient_beta is {coefficient_beta!r} and factor_change {factor_change!r}, "
                "expected numbers between 0 and 1"
            )
        if "bias_correction" in options:
            raise InvalidArgument(
                f"bias_correction is {options['bias_correction']!r}, but LAMB here has none: "
                "leave it out"
            )
        self.rates, self.coefficients, self.coefficient_beta = rates, coefficients, coefficient_beta
        self.factors, self.factor_change = factors, factor_change
        self.coefficient = self.factor = self.fresh = self.course = torch.empty(0)
        super().__init__(
            params, lr, betas, eps, weight_decay, **options, **{"bias_correction": False}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        why = (
            "goes as far in each tensor as its norm says, which depends on how many experts lie on "
            "a rank"
        )
        refuse_held(
            "OneBitLamb", zip(*reversed(named_parameters(self.param_groups[-1:])), strict=True), why
        )

    def exact(self, gradients: Sequence[torch.Tensor], among: Container[int] | None = None) -> None:
        if among is None and self.frozen:
            self._thaw_alone()
        for group, every in self.groups():
            at = [i for i in every if among is None or i in among]
            coefficient = self.coefficient[at]
            segments = self._flat.segments(at, gradients)
            self.layers.exact(
                segments,
                self.momentum,
                self.variance,
                self.work,
                coefficient,
                self._rule(group),
                *self._known(at),
            )
            self.coefficient[at] = coefficient
            self.tensors.count(at, self.steps_done + 1)

    def norm_of_mean(self) -> Steps[float | None]:
        """Return the norm of the mean gradient, tensor by tensor: between them ``work`` has what is
        left of the directions of the last exact step."""
        if self.columns is not None:
            return (yield from super().norm_of_mean())
        norms = [torch.linalg.vector_norm(mean) for mean in self._works]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def _rule(self, group: dict[str, Any]) -> LayerRule:
        return LayerRule(
            group["betas"],
            group["eps"],
            float(group["lr"]),
            group["weight_decay"],
            self.coefficients,
            self.coefficient_beta,
            self.factors,
            self.factor_change,
        )

    def apply_mean(self, group: dict[str, Any], frozen: tuple[int, ...]) -> None:
        if not frozen:
            return
        at, rule, most = list(frozen), self._rule(group), self.tensors.bound(frozen[0])
        layers, divisors = self._flat.placed(frozen), self.tensors.divisors(at)
        if self.rates == "live":
            self.layers.live(
                layers,
                self.work,
                self.variance,
                self.momentum,
                self.course,
                divisors,
                rule,
                *self._known(at),
                most=most,
            )
            return
        factor = self.factor[at]
        self.layers.frozen(
            layers,
            self.work,
            self.variance,
            self.momentum,
            self.fresh,
            divisors,
            self.coefficient[at],
            factor,
            rule,
            most=most,
        )
        self.factor[at] = factor

    # ------------------------------------------------------------ shards of layers

    def measure(self, kind: RoundKind) -> Steps[None]:
        """Sum squared norms of sharded layers over shard peers, in double, so that rates are equal
        on all."""
        if self.columns is None:
            return
        own = np.zeros(2 * len(self._works))
        for group, at in self.groups():
            rule, (live, frozen) = self._rule(group), self.tensors.part(at)
            exact = tuple(at) if kind is RoundKind.EXACT else live
            segments = self._flat.segments(exact, self._works)
            own[_pairs(exact)] = layer_shards.exact_squares(
                segments, self.momentum, self.variance, rule
            )
            if kind is RoundKind.COMPRESSED:
                own[_pairs(frozen)] = layer_shards.live_squares(
                    self._flat.placed(frozen), self.work, self.course, rule
                )
        own *= np.repeat([self.columns.share(p) for p in self._flat.parameters], 2)
        self._squares = (yield from self.columns.gathered(own.tolist())).sum(axis=0)

    def _known(self, at: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Return squared norms of these layers, if they differ from those of this rank's shards."""
        return () if self.columns is None else (self._squares[_pairs(at)],)

    def _check_codecs(self, flat: Flat) -> None:
        super()._check_codecs(flat)
        cut = any(map(is_cut, flat.parameters))
        if cut and self.rates == "frozen":
            raise InvalidArgument(
                "rates is 'frozen' and parameters are DTensors, expected 'live': leave rates= out"
            )
        whole = (
            self.codec.choose(name, numel)
            for name, (_, numel) in zip(flat.names, flat.places, strict=True)
        )
        if cut and (
            found := next((codec for codec in whole if isinstance(codec, WholeTensorCodec)), None)
        ):
            raise InvalidArgument(
                f"codec is {found.spec!r} and parameters are DTensors, of which this rank has "
                "shards: choose a codec of rows such as 'sign', or OneBitAdam"
            )

    # ------------------------------------------------------------ state

    def _freeze(self, ready: Sequence[int]) -> None:
        super()._freeze(ready)
        for i in ready:
            if self.rates == "live":
                torch.div(
                    self._momenta[i], self.tensors.divisor(i), out=self._flat.view(self.course, i)
                )
            else:
                self._flat.view(self.fresh, i).copy_(self._variances[i])
                self.factor[i] = 1.0

    def allocate(self, had: int) -> None:
        self.layers = (
            layer_shards if self.columns is not None else lamb_arithmetic(self._flat.device)
        )
        device, new = self._flat.device, len(self._flat.parameters) - had
        self.coefficient = torch.cat([self.coefficient.to(device), torch.zeros(new, device=device)])
        self.factor = torch.cat([self.factor.to(device), torch.ones(new, device=device)])
        average = self._flat.grown(
            (self.course if self.rates == "live" else self.fresh) if had else None
        )
        self.course, self.fresh = (
            (average, self._empty) if self.rates == "live" else (self._empty, average)
        )
        for i, p in enumerate(self._flat.parameters):
            self.state[p] |= {
                "coefficient": self.coefficient[i],
                "factor": self.factor[i],
                **self._average(i),
            }

    def _average(self, i: int) -> dict[str, torch.Tensor]:
        if self.rates == "live":
            return {"course": alike(self._flat.view(self.course, i), self._flat.parameters[i])}
        return {"fresh": self._flat.view(self.fresh, i)}


def _pairs(at: Sequence[int]) -> list[int]:
    """Return the indices of two numbers for each of these parameters."""
    return [2 * i + k for i in at for k in (0, 1)]
