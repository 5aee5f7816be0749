"""0/1 Adam: the variance is updated ever more rarely, and most steps need no communication at all.

    exact       mean gradients, as Adam; at steps of the variance schedule, or at the first one after the window they fell in
    local       m ← β1·m + (1 − β1)·g      u ← (1 − γλ)·u + γ'·m      x ← D·a − u·r       r = 1/(√v̂ + ε)       (nothing is sent)
    sync        d ← mean of u·r, one bit both ways      a ← D·a − d      x ← a      m ← d/(r·Γ)      u ← 0

a is the anchor, the parameters at the last synchronisation, the same on all ranks; D and Γ are what weight decay leaves
of it and of the learning rates since: D ← (1 − γλ)·D, Γ ← (1 − γλ)·Γ + γ', with γ' = γ/(1 − β1ᵗ).

Note: one message is enough. Between synchronisations the variance does not move, so the displacement is linear in m: d
gives both the new parameters and the mean momentum of the window.

Note: what travels is the displacement u·r, not u. Its elements are of one size, so one scale fits a block; of u, an element
with a small variance would get its neighbours' magnitude and move by that times r. And what compression leaves behind is a
displacement too, still right when the variance has moved.

Note: nothing drifts. x is computed from the anchor at every step, never by undoing earlier steps, so after a
synchronisation all ranks hold the same bits, and a checkpoint of (a, u, m) continues in the same bits. Weight decay stays
out of u, which becomes m.

Note: momentum may be lazy. After a synchronisation ``momentum`` is d, and ``shares`` 1/Γ of each group; the
next step forms m = d/(r·Γ) where it reads it, which saves a pass. Nor are signs of d stored: they are read again from the
messages that brought them (``kept_mean``). ``settle`` makes it plain; looking at ``state``, saving and exact steps do.
"""

from collections.abc import Sequence
from typing import Any

import torch

from commpress.codecs import Codec, codec_named
from commpress.collectives.allreduce import Outcome, reduce_message
from commpress.collectives.buckets import one_message
from commpress.errors import StateMismatch
from commpress.kernels.adam import Segments
from commpress.optim.frozen import FrozenVariance
from commpress.optim.kept_mean import KeptMean
from commpress.optim.onebit_adam import check_defaults
from commpress.optim.optimizer import CompressedOptimizer, Round
from commpress.optim.windows import Spans, Windows, keep, rate_of
from commpress.schedules import Updates
from commpress.work import Steps, run


class ZeroOneAdam(CompressedOptimizer):
    """AdamW that sends one bit per parameter every few steps. Options not named here are those of ``OneBitAdam``.

    - ``sync``: how far apart synchronisations are: "qsr" (default) every step while the learning rate rises, then by its
      inverse square: 2 at 0.7 of the peak, 4 at half of it, at most 16; "rate" 2 after the peak and doubling each time the
      rate halves, at most 16; "every"; or a ``schedules.Sync``.
    - ``variance_updates``: exact steps at each interval 1, 2, 4, … (default 16), or a ``schedules.Updates``.
    - ``warmup_steps``: so many first steps are exact in any case (default 0); short runs want a tenth or more of their steps.

    Between synchronisations ranks hold different parameters: call ``synchronize()`` before evaluating or exporting.
    """

    lands = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        sync: Spans = "qsr",
        variance_updates: int | Updates = 16,
        warmup_steps: int = 0,
        spiky_codec: str | Codec | None = "int8",
        variance_floor: float = 1e-3,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
        }  # fmt: skip
        check_defaults(defaults)
        self.windows = Windows(sync, variance_updates, warmup_steps)
        self.spiky_codec = None if spiky_codec is None else codec_named(spiky_codec)
        self.frozen_variance = FrozenVariance(variance_floor)
        self.spiky: list[str] | None = None  # decided at the first compressed round
        self.shares: list[float] | None = None  # of each group, if momentum is lazy
        self.reciprocal = self.accumulated = self.anchor = torch.empty(0)
        super().__init__(params, defaults, **options)

    # ------------------------------------------------------------ what a step does

    @property
    def frozen(self) -> bool:
        return self.steps_done > 0

    def round(self) -> Round:
        if self.transport.size == 1:
            return Round.EXACT
        return self.windows.round(self.steps_done, self.param_groups, self.facts)

    @property
    def held(self) -> int:
        """Steps since the last synchronisation."""
        return self.windows.held

    def prepare(self, group: dict[str, Any], segments: Segments, gain: float) -> None:
        self.refresh()
        self.kernels.accumulate(
            segments, self.momentum, self.accumulated if self.held else self._empty, self.reciprocal, self.work,
            beta=group["betas"][0], gain=gain, lr=rate_of(group, self.steps_done), keep=keep(group),
            share=self._share(group), said=self._said(segments),
        )  # fmt: skip

    def apply(self, kind: Round, outcomes: Sequence[Outcome]) -> None:
        if kind is Round.EXACT:
            self.exact(self._works)
        else:
            self._gather(outcomes, self.windows.after(self.steps_done, self.param_groups))

    def _gather(self, outcomes: Sequence[Outcome], window: list[tuple[float, float]]) -> None:
        self.keep(outcomes, self.work)
        moves = [(1.0, kept) for _, kept in window]
        self.land(outcomes, self.anchor if self.held else self._empty, moves, stored=not self.keeps)
        self.exchange_momentum()
        self.shares = [1 / rate if rate > 0 else 0.0 for rate, _ in window]
        self.windows.held = 0

    def _share(self, group: dict[str, Any]) -> float | None:
        if self.shares is None:
            return None
        return next(share for mine, share in zip(self.param_groups, self.shares, strict=True) if mine is group)

    def _said(self, segments: Segments) -> Any:
        """Where messages say what momentum is made of."""
        return None if self.shares is None else self.kept.runs(segments.before or segments, self.momentum)

    def settle(self) -> None:
        super().settle()
        if self.shares is not None:
            for (_, at), share in zip(self.groups(), self.shares, strict=True):
                for i in at:
                    self._momenta[i].mul_(share).div_(self._flat.view(self.reciprocal, i))
            self.shares = None

    def exact(self, gradients: Sequence[torch.Tensor]) -> None:
        self.settle()
        super().exact(gradients)

    def local(self, gain: float) -> None:
        """A gradient that is not finite leaves its momentum as it is: nobody can be asked, and the window goes on."""
        self.refresh()
        if self.accumulated.numel() == 0:
            self.accumulated, self.anchor = self._flat.new(), self._flat.new()
        span = self.windows.interval(self.steps_done, self.param_groups, self.facts)
        window, gain = self.windows.after(self.steps_done, self.param_groups), self._local_gain(gain)
        finite = gain > 0
        for (group, at), (_, kept) in zip(self.groups(), window, strict=True):
            segments = self._flat.segments(at) if gain else self._flat.placed(at)
            finite &= self.kernels.wander(
                segments, self.momentum, self.accumulated, self.anchor, self.reciprocal,
                beta=group["betas"][0] if gain else 1.0, gain=gain, lr=rate_of(group, self.steps_done), keep=keep(group),
                kept=kept, begins=self.held == 0, share=self._share(group), said=self._said(segments),
            )  # fmt: skip
        self.shares = None
        self.kept.over()
        self.counters.ignored_gradients += not finite
        self.windows.hold(window, span)

    def _local_gain(self, gain: float) -> float:
        """The factor of the local gradients; 0, so that none of them counts, if they are to be clipped and have no norm."""
        if self.clipping.max_norm is None:
            return gain
        squares = self.kernels.square_sum(self._flat.segments(range(len(self._flat.parameters)))) * gain * gain
        return gain * self.clipping.factor((self.facts.norm_ratio or 1.0) * squares**0.5) if squares < float("inf") else 0.0

    def after(self, kind: Round) -> None:
        if kind is Round.EXACT:
            self.windows.updated(self.steps_done - 1)
            self._stale = True

    # ------------------------------------------------------------ the variance

    def variance_updates(self) -> int:
        return self.windows.updates

    def exact_rates(self, group: dict[str, Any]) -> tuple[float, float]:
        return self.windows.exact_rates(group, self.steps_done)

    def refresh(self) -> None:
        """Reciprocals, codecs and dead elements of the variance as it is now."""
        if not self._stale:
            return
        if self.reciprocal.numel() == 0:
            self.reciprocal = self._flat.new()
        spiky = self.frozen_variance.freeze(self, self.reciprocal, self.windows.updates)
        if self.spiky is None:
            self.spiky = spiky
            self.quantized.relay(self._flat)
            self.quantized.policy = self.frozen_variance.policy(self.codec, self.spiky_codec, self.spiky)
        self.quantized.silence(self.frozen_variance.dead(self, self.quantized.policy))
        self._stale = False

    def allocate(self) -> None:
        self.reciprocal = self.accumulated = self.anchor = self._empty
        self.shares, self._stale, self.kept = None, True, KeptMean(self.kernels.runs)

    def replicated(self) -> list[torch.Tensor]:
        return self._flat.views(self.anchor) if self.held else self._flat.weights

    # ------------------------------------------------------------ between windows

    def synchronize(self) -> None:
        """End the window now: all ranks hold the same parameters afterwards. Collective; free if nothing is pending."""
        with torch.no_grad():
            run(self.synchronizing())

    def synchronizing(self) -> Steps[None]:
        if self.held == 0:
            return
        torch.mul(self.accumulated, self.reciprocal, out=self.work)
        outcomes: list[Outcome] = []
        if any(rate > 0 for rate in self.windows.rates):
            outcomes = yield from self.reduce(
                Round.COMPRESSED, range(len(self._flat.parameters)), workspace=self.workspace
            )
            finite = all(outcome.finite for outcome in outcomes)
            if self.consensus is not None:
                finite = yield from self.consensus.agreed(finite, self._flat.device)
            self.quantized.settle(outcomes, finite=finite)
            if not finite:
                outcomes = []
                self.work.zero_()
        self._gather(outcomes, list(zip(self.windows.rates, self.windows.kept, strict=True)))
        self._flat.publish()
        self.counters.compressed_rounds += 1
        self.counters.compressed_bytes += self.sent_bytes()

    # ------------------------------------------------------------ checkpoints

    def schedule_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.windows.state() | {"spiky": self.spiky}
        if self.held:
            state |= {"accumulated": self.accumulated.clone(), "anchor": self.anchor.clone()}
        return state

    def shared(self) -> Steps[dict[str, torch.Tensor]]:
        """Mid-window ranks differ in momentum and accumulated steps; what counts for the run is the mean of both."""
        if not self.held:
            return {}
        means = {"exp_avg": self.momentum.clone(), "accumulated": self.accumulated.clone()}
        message = one_message(self._flat.numel, codec_named("none"), self.transport.size, name="window")
        for mean in means.values():
            yield from reduce_message(
                mean, None, message=message, transport=self.transport, workspace=self.workspace,
                sequence=self.next_sequence(),
            )  # fmt: skip
        return means

    def resume(self, schedule: dict[str, Any] | None) -> None:
        self.allocate()
        self.windows.begin_anew(self.steps_done)
        self.spiky = None
        self.quantized.relay(self._flat)
        self.quantized.policy = self.codec
        if schedule is None:
            return
        self.windows.load(schedule)
        self.spiky = schedule["spiky"]
        if self.spiky is not None:
            self.quantized.policy = self.frozen_variance.policy(self.codec, self.spiky_codec, self.spiky)
            self.refresh()
        if schedule["held"]:
            if schedule["anchor"].shape != self.work.shape:
                raise StateMismatch(
                    f"the state has {schedule['anchor'].numel()} anchored elements, expected {self.work.numel()}: load the "
                    "state of this model"
                )
            self.accumulated, self.anchor = self._flat.new(), self._flat.new()
            self.accumulated.copy_(schedule["accumulated"])
            self.anchor.copy_(schedule["anchor"])
            for (_, at), kept in zip(self.groups(), self.windows.kept, strict=True):
                self.kernels.wander(  # x := D·a − u/(√v̂ + ε), nothing else changes
                    self._flat.placed(at), self.momentum, self.accumulated, self.anchor, self.reciprocal,
                    beta=1.0, gain=0.0, lr=0.0, keep=1.0, kept=kept, begins=False,
                )  # fmt: skip
            self._flat.publish()
