"""1-bit Adam: exact steps until the variance is known, then momentum in one bit under a frozen
variance.

    exact       ḡ = mean g_i      m ← β1·m + (1 − β1)·ḡ      v ← β2·v + (1 − β2)·ḡ²  (torch's Adam)
                x ← (1 − γλ)·x − γ/(1 − β1ᵗ) · m/(√v̂ + ε)
    compressed  p_i = (β1·m + (1 − β1)·g_i)/s
                p ← mean of p_i, one bit both ways, error feedback both ways
                x ← (1 − γλ)·x − γ/(1 − β1ᵗ) · p      m ← s·p

``tensor_states`` says what s is, which tensors freeze and which wake up. Others go on with Adam's
steps, on gradients in eight bits.

Note: what travels. Once v is frozen, p = m/s obeys the recursion of momentum. In p all elements are
of one size, so one scale fits a block; sent as m, an element with a small variance would get its
neighbours' magnitude and move by that over its own √v.

Note: the trajectory. With R the residuals' total and d the difference between p and what an exact
mean would have given, d_t = β1·d_{t−1} + R_{t−1} − R_t: compression delays momentum and never loses
any.
"""

from collections.abc import Container, Sequence
from typing import Any

import torch

from commpress.collectives.handover import Standing
from commpress.optim.freezing import FreezingOptimizer
from commpress.optim.optimizer import RoundKind
from commpress.optim.replicated import ReplicatedOptimizer
from commpress.work import Steps


class OneBitAdam(FreezingOptimizer, ReplicatedOptimizer):
    """AdamW that sends about one bit per parameter once the variance has settled.

    Construct it on every rank of ``process_group`` (default: all), in the same order as other
    groups: it makes a new one. Under DistributedDataParallel also call ``commpress.overlap(ddp,
    optimizer)``: gradients are then not reduced twice.

    - ``exact_steps``: so many exact steps (15 to 25 % of a run is usual), "auto" (default) ends
      them when the variance is stable, or a ``schedules.Freeze``.
    - ``codec``, ``min_numel``: how momentum travels; smaller tensors travel exactly.
    - ``spiky_codec``: for gradients of tensors whose variance does not freeze, because it is
      concentrated in few elements or zero somewhere (embeddings, output layers); "bits4" sends half
      as much, and moves elements of small gradients later. None: only zeros keep one from freezing,
      and it travels by ``exact_codec``.
    - ``exact_codec``: how gradients travel in exact steps: "none" (default), "bf16", "int8" on slow
      links, or "log3" on the slowest, which costs final loss
    - ``variance_floor``: no element's frozen variance is taken as less than this share of its
      tensor's mean.
    - ``error_feedback``: False forgets what compression leaves behind, which does not converge; to
      show just that.
    - ``max_grad_norm``: clips by one factor that all ranks agree on. Do not use
      ``clip_grad_norm_``: gradients are local.
    - ``on_nonfinite``: "skip" the step on all ranks (default) or "raise"; nothing is changed either
      way.
    - ``mesh``: with tensor parallelism the whole DeviceMesh. Ranks that have the same shards
      average, over the dimensions in which no parameter is cut; all take or skip a step together.
      Needs a number as ``exact_steps``.
    - ``process_group``, ``agree_over``: in place of ``mesh``, the ranks that average, and a process
      group or DeviceMesh of all ranks that must stay equal, where these are more, as in pipelines.
      No ``max_grad_norm`` then, unless parameters are DTensors.
    - ``check_every``: steps between comparisons of the replicas; 0 never.
    - ``grad_scaler``: AMP's GradScaler, if there is one: it is told what all ranks agreed on.

    On one rank it is Adam, in every bit.
    """

    schedule_entries = ("frozen_at", "trips")
    clips_shards = True

    @property
    def frozen(self) -> bool:
        return self.frozen_at is not None

    def round(self) -> RoundKind:
        return RoundKind.COMPRESSED if self.frozen and self.channel.size > 1 else RoundKind.EXACT

    def prepare(
        self,
        group: dict[str, Any],
        indices: Sequence[int],
        gradients: dict[int, torch.Tensor] | None,
        gain: float,
    ) -> None:
        live, frozen = self.tensors.part(indices)
        self.take_gradients(live, gradients, gain)
        beyond = self.kernels.accumulate(
            self._flat.segments(frozen, gradients),
            self.momentum,
            self._empty,
            self.variance,
            self.work,
            self.tensors.divisors(frozen),
            beta=group["betas"][0],
            gain=gain,
        )
        self.tensors.see(frozen, beyond)
        self.add_known(frozen, -group["betas"][0])

    def apply(self, kind: RoundKind) -> None:
        if kind is RoundKind.COMPRESSED:
            for group, at in self.groups():
                frozen = self.tensors.part(at)[1]
                self.add_known(frozen, group["betas"][0])
                self.apply_mean(group, frozen)
        self.exact(
            self._works,
            None if kind is RoundKind.EXACT else self.tensors.part(range(len(self._works)))[0],
        )

    def apply_mean(self, group: dict[str, Any], frozen: tuple[int, ...]) -> None:
        """Parameters and momentum of frozen tensors of one group, from p in ``work``."""
        if not frozen:
            return
        lr, correction = (
            float(group["lr"]),
            1 - group["betas"][0] ** (self.steps_done + 1 - group["added_at"]),
        )
        self.kernels.apply_mean(
            self._flat.placed(frozen),
            self.work,
            self.variance,
            self.momentum,
            self._empty,
            self.tensors.divisors(frozen),
            step=lr / (correction if group["bias_correction"] else 1.0),
            decay=1 - lr * group["weight_decay"],
            momentum_scale=1.0,
            most=self.tensors.bound(frozen[0]),
        )

    def exact(self, gradients: Sequence[torch.Tensor], among: Container[int] | None = None) -> None:
        if among is None and self.frozen:
            self._thaw_alone()
        super().exact(gradients, among)

    def after(self, kind: RoundKind) -> Steps[None]:
        if self.channel.size == 1:
            return
        live, frozen = self.tensors.part(range(len(self._flat.parameters)))
        if self.frozen_at is not None:
            self.tensors.keep_up(frozen, self.steps_done)
        elif not (yield from self.ends_warmup()):
            return
        if self.due():
            ready = self.ready(live)
            if self.columns is not None:  # shards of a tensor are frozen or live together
                ready = yield from self.columns.all_of(
                    ready, len(self._flat.parameters), self._flat.device
                )
            self._freeze(ready)

    def variance_sum(self) -> Steps[float]:
        yield from ()
        return self.corrected_sum()

    def variances(self) -> list[torch.Tensor]:
        return self._variances

    # ------------------------------------------------------------ freezing and thawing

    def _freeze(self, ready: Sequence[int]) -> None:
        """Residuals of these are in units of p from here on."""
        self.tensors.freeze(ready, self.steps_done)
        self._owe_momentum(ready)
        self.recut()

    def _owe_momentum(self, frozen: Sequence[int]) -> None:
        for i in frozen:
            share = 1 - self.tensors.group(i)["betas"][0]
            self.quantized.residuals.scale(
                self._flat.names[i], share / self.tensors.divisor(i), self.channel.rank
            )

    def wake(self, indices: Sequence[int]) -> Steps[None]:
        """One exact message brings what is owed into momentum; then these are live, and nothing is
        owed."""
        self.warn_woken(indices)
        for i in indices:
            part = self._works[i].view(-1).zero_()
            self.quantized.residuals.owed(
                self._flat.names[i], part, self.channel.rank, self.channel.size
            )
        if (yield from self.exact_mean(indices)):
            self._take_owed(indices)
        self._let_wake(indices)

    def _let_wake(self, indices: Sequence[int]) -> None:
        self.quantized.residuals.clear([self._flat.names[i] for i in indices])
        self.tensors.thaw(indices, self.steps_done)
        self.recut()

    def follow_waking(self, standing: Standing) -> None:
        woken = standing.shared["woken"]
        for i in woken:
            self._momenta[i].copy_(standing.tensors[f"momentum {i}"])
        if woken:
            self._let_wake(woken)

    @torch.no_grad()
    def load_shared_state(self, state: dict[str, Any]) -> None:
        """As for all; of tensors that froze meanwhile momentum is owed here too, no gradients."""
        warmed_up, before = self.frozen, self.tensors.frozen.tolist()
        super().load_shared_state(state)
        if self.frozen and not warmed_up:
            self.full.residuals.move_to(self.quantized.residuals)
        self._owe_momentum(
            [i for i, frozen in enumerate(self.tensors.frozen.tolist()) if frozen and not before[i]]
        )

    def _thaw_alone(self) -> None:
        """A state of several ranks goes on with one, which has nothing to compress: Adam from here
        on."""
        _, frozen = self.tensors.part(range(len(self._flat.parameters)))
        for i in frozen:
            self._pay(i)
        self._take_owed(frozen)
        self.tensors.thaw(frozen, self.steps_done)
        self.frozen_at = None

    def _pay(self, i: int) -> None:
        """work := this rank's part of what is owed of a parameter, which is owed no more."""
        part = self._works[i].view(-1).zero_()
        self.quantized.residuals.pay(
            self._flat.names[i], part, self.channel.rank, self.channel.size
        )

    def _take_owed(self, indices: Sequence[int]) -> None:
        """m := m + s·what is owed, which is in ``work``, within Adam's own bound."""
        for i in indices:
            s, v = self.tensors.divisor(i), self._variances[i]
            most = (
                (v / self.tensors.correction(i, int(self.tensors.variance_steps[i])))
                .sqrt_()
                .mul_(self.tensors.bound(i))
            )
            m = self._momenta[i].addcmul_(self._works[i], s)
            m.copy_(torch.minimum(torch.maximum(m, -most), most))

    # ------------------------------------------------------------ checkpoints

    def schedule_state(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at, "trips": self.tensors.trips.tolist()}

    def resume(self, schedule: dict[str, Any] | None) -> None:
        """Without a schedule, what the state says of the tensors is all there is."""
        if schedule is None:
            _, frozen = self.tensors.part(range(len(self._flat.parameters)))
            self.frozen_at = min((int(self.tensors.frozen_at[i]) for i in frozen), default=None)
        else:
            self.frozen_at = schedule["frozen_at"]
            self.tensors.trips[:] = schedule["trips"]
        self.recut()
