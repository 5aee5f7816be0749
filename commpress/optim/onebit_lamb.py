"""1-bit LAMB: exact LAMB steps until the variance is known, then momentum in one bit; layers keep rates of their own.

    exact       w = m/(√v + ε) + λx      c = clip(‖x‖ / ‖w‖)         x ← x − γ·c·w           c̄ ← β_c·c̄ + (1 − β_c)·c
    compressed  p as in ``OneBitAdam``
      live        a ← β_c·a + (1 − β_c)·p      c = clip(‖x‖ / ‖a + λx‖)      x ← x − γ·c·(p + λx)
      frozen      ĝ = (p − β1·p_before)/(1 − β1)/r      ṽ ← β2·ṽ + (1 − β2)·ĝ²
                  f = max (√v_frozen + ε)/(√ṽ + ε), damped and clipped; neither variance below its floor
                  x ← x − γ·c̄·f·(p + λx)

Without bias corrections, which a layer's norm would divide away.

Note: two ways to a layer's rate. ``frozen`` is the published one: rates of the warm-up times a factor from the variance. It
multiplies a rate of long ago by the size of today's momentum, and where gradients grow tenfold, steps do. ``live`` is
LAMB's own rule, which costs no message, since all ranks hold the same x and p. Its norm is that of an average of the last
p: one bit makes each p too long, but what is too much in one is taken back in the next.

Note: no united scale. The published form multiplies each layer's momentum so that one scale fits all of them. Here every
tensor has scales of its own, and a power of two in front of a layer changes nothing.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal

import torch

from commpress.collectives.allreduce import Outcome
from commpress.collectives.buckets import Message
from commpress.collectives.frame import HEADER
from commpress.errors import InvalidArgument, StateMismatch
from commpress.kernels import arithmetic
from commpress.kernels.adam import Segments
from commpress.kernels.lamb import LayerRule, lamb_arithmetic
from commpress.optim.onebit_adam import OneBitAdam
from commpress.optim.optimizer import Round

STATE = ("coefficient", "factor", "fresh", "course")  # c̄, f, ṽ, a


class OneBitLamb(OneBitAdam):
    """LAMB for large batches. Options not named here are those of ``OneBitAdam``.

    - ``rates``: of layers after the warm-up: "live" (default) or "frozen", the published rule; see above.
    - ``coefficients``: bounds of a layer's rate; ``coefficient_beta``: β_c, how slowly averages follow.
    - ``factors``: bounds of f; ``factor_change``: how much f may change in one step, relatively; of frozen rates.
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
        **options: Any,
    ) -> None:
        if rates not in ("live", "frozen"):
            raise InvalidArgument(f"rates is {rates!r}, expected 'live' or 'frozen'")
        for name, (low, high) in {"coefficients": coefficients, "factors": factors}.items():
            if not 0 < low <= high:
                raise InvalidArgument(f"{name} is {(low, high)!r}, expected two positive numbers in ascending order")
        if not 0 <= coefficient_beta < 1 or not 0 < factor_change < 1:
            raise InvalidArgument(
                f"coefficient_beta is {coefficient_beta!r} and factor_change {factor_change!r}, expected numbers between 0 "
                "and 1"
            )
        self.rates, self.coefficients, self.coefficient_beta = rates, coefficients, coefficient_beta
        self.factors, self.factor_change = factors, factor_change
        self.coefficient = self.factor = self.fresh = self.course = self.least = torch.empty(0)
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=False, **options)

    def exact(self, gradients: Sequence[torch.Tensor]) -> None:
        if self.frozen:
            self.thaw()
        for group, at in self.groups():
            segments = self._flat.segments(at, gradients)
            self.layers.exact(
                segments, self.momentum, self.variance, self.work, self.coefficient[at.start : at.stop], self._rule(group)
            )

    def _rule(self, group: dict[str, Any]) -> LayerRule:
        return LayerRule(
            group["betas"], group["eps"], float(group["lr"]), group["weight_decay"], self.coefficients,
            self.coefficient_beta, self.factors, self.factor_change,
        )  # fmt: skip

    def apply(self, kind: Round, outcomes: Sequence[Outcome]) -> None:
        if kind is Round.EXACT:
            self.exact(self._works)
            return
        start = perf_counter()
        messages, wires = self._arrived(outcomes)
        layers = [self._flat.placed(at) for _, at in self.groups()]
        runs = [self._runs(at, mine, messages, wires) for (_, at), mine in zip(self.groups(), layers, strict=True)]
        before = [self.kept.runs(mine, self.momentum) for mine in layers]
        if self.kept.unwritten and not all(now.alike(then) for now, then in zip(runs, before, strict=True)):
            self.kept.write()
        self.take_mean()  # work now is the momentum before
        for (group, at), mine, now, then in zip(self.groups(), layers, runs, before, strict=True):
            of = slice(at.start, at.stop)
            if self.rates == "live":
                self.layers.live(mine, now, self.momentum, self.course, self._rule(group), stored=not self.keeps)
                continue
            self.layers.frozen(
                mine, now, then, self.momentum, self.work, self.reciprocal, self.fresh, self.least[of],
                self.coefficient[of], self.factor[of], self._rule(group), stored=not self.keeps,
            )  # fmt: skip
        self.workspace.decoded(start)
        self.keep(outcomes, self.momentum)
        for outcome in outcomes:
            outcome.landed()

    def _arrived(self, outcomes: Sequence[Outcome]) -> tuple[tuple[Message, ...], list[torch.Tensor]]:
        """What came and where, once decoded but for what is decoded while parameters move. Dead elements are made zero in
        between, so with them nothing is left."""
        messages = tuple(outcome.message for outcome in outcomes)
        wires = [outcome.rows[:, HEADER:] for outcome in outcomes if outcome.rows is not None]
        whole = self.quantized.dead is not None
        for message, rows in zip(messages, wires, strict=True):
            if whole:
                arithmetic(self.work.device).decode(rows, self.work, message.pieces)
            else:
                self.layers.decode(rows, message.pieces, self.work)
        return ((), []) if whole else (messages, wires)

    def _runs(self, at: range, layers: Segments, messages: tuple[Message, ...], wires: Sequence[torch.Tensor]) -> Any:
        """How the layers of a group lie in what came: the same until other messages come."""
        if at not in self._known or self._known[at][0] != messages:
            self._known[at] = messages, self.kernels.runs(layers, [message.pieces for message in messages])
        runs = self._known[at][1]
        if runs is not None:
            runs.lie_in(wires)
        return runs

    # ------------------------------------------------------------ state

    def after(self, kind: Round) -> None:
        was = self.frozen
        super().after(kind)
        if self.frozen and not was:
            if self.rates == "live":
                self.course.copy_(self.momentum)
            else:
                self.fresh.copy_(self.variance)

    def thaw_or_freeze(self) -> None:
        super().thaw_or_freeze()
        self._known: dict[range, tuple[tuple[Message, ...], Any]] = {}  # messages that came, and their runs
        self.fresh = self.course = self._empty
        if not self.frozen:
            return
        if self.rates == "live":
            self.course = self._flat.new()
            return
        self.fresh = self._flat.new()
        means = [v.mean() if v.numel() else v.sum() for v in self._variances]
        self.least = self.frozen_variance.floor * torch.stack(means)

    def allocate(self) -> None:
        self.layers = lamb_arithmetic(self._flat.device)
        count, before = len(self._flat.parameters), self.coefficient
        self.coefficient = torch.zeros(count, device=self._flat.device)
        self.coefficient[: before.numel()] = before
        self.factor = torch.ones(count, device=self._flat.device)
        super().allocate()

    def schedule_state(self) -> dict[str, Any]:
        return super().schedule_state() | {name: getattr(self, name).clone() for name in STATE}

    def resume(self, schedule: dict[str, Any] | None) -> None:
        super().resume(schedule)
        if schedule is None:
            return
        for name in STATE:
            mine, theirs = getattr(self, name), schedule[name]
            if mine.shape != theirs.shape:
                raise StateMismatch(
                    f"the state has {theirs.numel()} numbers as {name!r}, expected {mine.numel()}: load the state of this "
                    "model into an optimizer with the same rates"
                )
            mine.copy_(theirs)
