"""1-bit Adam: exact steps until the variance is known, then momentum in one bit under a frozen
variance.

    exact       ḡ = mean g_i      m ← β1·m + (1 − β1)·ḡ      v ← β2·v + (1 − β2)·ḡ²  (torch's Adam)
                x ← (1 − γλ)·x − γ/(1 − β1ᵗ) · m/(√v̂ + ε)
    compressed  p_i = (β1·m + (1 − β1)·g_i)/s
                p ← mean of p_i, one bit both ways, error feedback both ways
                x ← (1 − γλ)·x − γ/(1 − β1ᵗ) · p      m ← s·p

``tensor_states`` defines s, which tensors freeze and which wake up. Live tensors continue with
Adam's steps, on gradients in eight bits.

Note: messages. Once v is frozen, p = m/s obeys the recursion of momentum. In p all elements are of
one size, so one scale fits a block; if m were sent, an element with a small variance would get its
neighbours' magnitude and move by that over its own √v.

Note: the trajectory. With R the residuals' total and d the difference between p and what an exact
mean would have given, d_t = β1·d_{t−1} + R_{t−1} − R_t: compression delays momentum and never loses
any.

Partitioned over the ranks (``ShardedOneBitAdam``) a compressed step of a frozen tensor is

    to the owner  what is new in the momentum, (1 − β1)·g_i/s + e_i, in one bit  (all-to-all)
                  e_i keeps the rest
    at the owner  m ← β1·m + s·mean        w ← Adam's step from m and the frozen v
    to everybody  w − x in one bit, x ← x + what arrived                         (all-gather)

Live tensors send gradients in eight bits, and their owner takes Adam's step; exact steps send
gradients to the owner and w to everybody as they are.

Note: only new momentum is sent. The owner already has β1·m, so nothing is lost and no other rank
needs m.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal, Unpack

import torch

from commpress.collectives.change import Change
from commpress.collectives.handover import Standing
from commpress.errors import InvalidArgument
from commpress.feedback import ResidualStore
from commpress.logs import warn_on_first
from commpress.optim.optimizer import (
    CompressedOptimizer,
    OptimizerOptions,
    RoundKind,
    decay_of,
    rate_of,
)
from commpress.optim.replicated import ReplicatedOptimizer
from commpress.optim.sharded import ShardedOptimizer
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
        # the end of the warm-up; each tensor has its own time as well
        self.frozen_at: int | None = None
        super().__init__(params, lr, betas, eps, weight_decay, **options)
        if exact_steps == "auto":
            self.freeze: Freeze = WhenStable(window=max(round(1 / (1 - betas[1])), 1))
        else:
            given: Any = exact_steps
            self.freeze = given if hasattr(given, "freezes") else AfterSteps(given)

    @property
    def frozen(self) -> bool:
        return self.frozen_at is not None

    def schedule(self) -> dict[str, Any]:
        return super().schedule() | {"frozen_at": self.frozen_at}

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        super().follow(schedule, change)
        self.frozen_at = schedule["frozen_at"]
        self.recut()

    def variance_sum(self) -> Steps[float]:
        """Return the sum of the bias-corrected variance of all parameters, the same on every
        rank."""
        total = 0.0
        for i, v in enumerate(self._variances):
            own = self.tensors.own_steps(i, self.steps_done)
            if own:
                correction = 1 - self.tensors.group(i)["betas"][1] ** own
                total += float(v.sum(dtype=torch.float64)) / correction
        return float((yield from self.gathered([total])).sum()) if self.divided else total

    def ends_warmup(self) -> Steps[bool]:
        """End the warm-up if the last step was its last; residuals of gradients become residuals of
        momentum."""
        step = self.steps_done
        self.tensors.record(step, self._variances)
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
        """True in steps in which live tensors may freeze; loading a state does not change these."""
        return (
            self.frozen_at is not None
            and (self.steps_done - self.frozen_at) % max(self.patience // 8, 1) == 0
        )

    def ready(self) -> Steps[list[int]]:
        """Return the tensors that have been live long enough and whose variance may freeze."""
        live, _ = self.tensors.part(self.numbers)
        woken = self.tensors.thawed_at.tolist()
        rested = (i for i in live if not woken[i] or self.steps_done - woken[i] >= self.patience)
        ready = [i for i in rested if self._warmed_up(i) and self.tensors.may_freeze(i)]
        if self.steps_done == self.frozen_at:
            self._warn_of_unstable(ready)
        if self.columns is not None:  # shards of a tensor are frozen or live together
            count = len(self._variances)
            ready = yield from self.columns.all_of(ready, count)
        return ready

    def _warmed_up(self, i: int) -> bool:
        """True if the parameter's warm-up is over: one added late is live for as long as the
        warm-up took, at most ``patience``."""
        assert self.frozen_at is not None
        own = self.tensors.own_steps(i, self.steps_done)
        return own == self.steps_done or own >= min(self.patience, self.frozen_at)

    def _warn_of_unstable(self, ready: Sequence[int]) -> None:
        found = self.tensors.unstable(ready, self.steps_done, self._variances)
        if found:
            # then other ranks have other tensors
            partial = sum(v.numel() for v in self._variances) < self._flat.numel
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

    def _freeze(self, ready: Sequence[int]) -> None:
        """Freeze these tensors; their residuals are in units of p from now on."""
        self.tensors.freeze(ready, self.steps_done)
        self._owe_momentum(ready)
        self.recut()

    def _owe_momentum(self, frozen: Sequence[int]) -> None:
        for i in frozen:
            self.quantized.residuals.scale(self._flat.names[i], self._share(i), self.channel.rank)

    def _share(self, i: int) -> torch.Tensor:
        """Return the momentum, in units of p, per unit of gradient."""
        return (1 - self.tensors.group(i)["betas"][0]) / self.tensors.divisor(i).float()

    def wake(self, indices: Sequence[int]) -> Steps[None]:
        """Add the residuals to momentum by one exact message, and make these tensors live."""
        warn_on_first(
            self.channel.rank,
            "step %d: gradients are far beyond the frozen variance in %s. It moves on in exact "
            "steps from here, and freezes again after %d of them",
            self.steps_done,
            ", ".join(map(self.tensors.name, indices)),
            self.patience,
        )
        residuals, channel = self.quantized.residuals, self.channel
        for i in indices:
            part = self._flat.view(self.work, i).view(-1).zero_()
            residuals.add_to(self._flat.names[i], part, channel.rank, channel.size)
        if (yield from self.exact_mean(indices)):
            self._take_owed(indices)
        self._let_wake(indices)

    def _take_owed(self, indices: Sequence[int]) -> None:
        """Add s·residual (in ``work``) to m, within Adam's own bound."""
        for i in indices:
            owed = self.own(self._flat.view(self.work, i), i)
            self._momenta[i].addcmul_(owed, self.unit(i))
            self._bound(i, self.root(i).mul_(self.tensors.bound(i)))

    def _let_wake(self, indices: Sequence[int]) -> None:
        self.quantized.residuals.clear([self._flat.names[i] for i in indices])
        self.tensors.thaw(indices, self.steps_done)
        self.recut()


class OneBitAdam(FreezingOptimizer, ReplicatedOptimizer):
    """AdamW that sends about one bit per parameter once the variance has settled.

    Construct it on every rank of ``process_group`` (default: all), in the same order as other
    groups: it makes a new one. Under DistributedDataParallel also call ``commpress.overlap(ddp,
    optimizer)``: gradients are then not reduced twice.

    - ``exact_steps``: the number of exact steps (15 to 25 % of a run is usual), "auto" (default):
      until the variance is stable, or a ``schedules.Freeze``.
    - ``codec``: the codec of momentum. ``PerLayer`` chooses one for every layer anew, unless state
      is sharded.
    - ``min_numel``: tensors of fewer elements travel exactly.
    - ``spiky_codec``: for gradients of tensors whose variance does not freeze, because it is
      concentrated in few elements or zero somewhere (embeddings, output layers); "bits4" sends half
      as much, and moves elements of small gradients later. None: only zeros keep one from freezing,
      and it travels by ``exact_codec``.
    - ``exact_codec``: the codec of gradients in exact steps: "none" (default), "bf16", "int8" on
      slow links, or "log3" on the slowest, which costs final loss.
    - ``variance_floor``: no element's frozen variance is taken as less than this share of its
      tensor's mean.
    - ``error_feedback``: False drops the residuals, which does not converge; for comparisons only.
    - ``max_grad_norm``: clips by one factor that all ranks agree on. Do not use
      ``clip_grad_norm_``: gradients are local.
    - ``on_nonfinite``: "skip" the step on all ranks (default) or "raise"; nothing changes in either
      case.
    - ``mesh``: with tensor parallelism the whole DeviceMesh. Ranks that have the same shards
      average, over the dimensions in which no parameter is cut; all take or skip a step together.
      Needs a number as ``exact_steps``.
    - ``process_group``, ``agree_over``: in place of ``mesh``, the ranks that average, and a process
      group or DeviceMesh of all ranks that must stay equal, if these are more, as in pipelines.
      ``max_grad_norm`` then needs parameters that are DTensors.
    - ``check_every``: steps between comparisons of the replicas; 0 never.
    - ``grad_scaler``: AMP's GradScaler, which then follows the verdict of all ranks.
    - ``bias_correction``: correct both moments, as in Adam; DeepSpeed's optimizers do not.

    On one rank it equals Adam bit for bit.
    """

    entries = ("frozen_at", "trips")
    clips_shards = True

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

    def apply(self, kind: RoundKind) -> Steps[None]:
        yield from ()
        if kind is RoundKind.COMPRESSED:
            for group, at in self.groups():
                frozen = self.tensors.part(at)[1]
                self.add_known(frozen, group["betas"][0])
                self.apply_mean(group, frozen)
        self.exact(
            self._works,
            None if kind is RoundKind.EXACT else self.tensors.part(self.numbers)[0],
        )

    def apply_mean(self, group: dict[str, Any], frozen: tuple[int, ...]) -> None:
        """Update parameters and momentum of frozen tensors of one group from p in ``work``."""
        if not frozen:
            return
        self.kernels.apply_mean(
            self._flat.placed(frozen),
            self.work,
            self.variance,
            self.momentum,
            self._empty,
            self.tensors.divisors(frozen),
            step=rate_of(group, self.steps_done),
            decay=decay_of(group),
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
        if self.frozen:
            _, frozen = self.tensors.part(self.numbers)
            self.tensors.keep_up(frozen, self.steps_done)
        elif not (yield from self.ends_warmup()):
            return
        if self.due():
            self._freeze((yield from self.ready()))

    # ------------------------------------------------------------ freezing and thawing

    def follow_waking(self, standing: Standing) -> None:
        woken = standing.shared["woken"]
        for i in woken:
            self._momenta[i].copy_(standing.tensors[f"momentum {i}"])
        if woken:
            self._let_wake(woken)

    @torch.no_grad()
    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Load another rank's state; residuals of tensors that froze meanwhile become those of
        momentum."""
        warmed_up, before = self.frozen, self.tensors.frozen.tolist()
        super().load_shared_state(state)
        frozen = [i for i, each in enumerate(self.tensors.frozen.tolist()) if each]
        self._owe_late()
        self._owe_momentum([i for i in frozen if warmed_up and not before[i]])

    def closing(self, change: Change, standing: Standing) -> Steps[Callable[[], None]]:
        yield from ()
        woken = [self._flat.names[i] for i in standing.shared["woken"]]

        def finish() -> None:
            self._owe_late()
            # their residuals are in momentum already; those that ranks behind handed over would
            # count twice
            self.quantized.residuals.clear(woken)

        return finish

    def _owe_late(self) -> None:
        """Convert residuals of gradients, from ranks whose warm-up ended a step later, to those of
        momentum; existing residuals of momentum stay."""
        if not self.frozen:
            return
        late = ResidualStore()
        self.full.residuals.move_to(late)
        _, frozen = self.tensors.part(self.numbers)
        for i in frozen:
            late.scale(self._flat.names[i], self._share(i), self.channel.rank)
        self.quantized.residuals.merge(late)

    def _thaw_alone(self) -> None:
        """Continue a state of several ranks on one, which has nothing to compress, with Adam."""
        _, frozen = self.tensors.part(self.numbers)
        for i in frozen:
            part = self._works[i].view(-1).zero_()
            self.quantized.residuals.pay(self._flat.names[i], part, 0, 1)
        self._take_owed(frozen)
        self.tensors.thaw(frozen, self.steps_done)
        self.frozen_at = None

    def follow_adam(self) -> None:
        _, frozen = self.tensors.part(self.numbers)
        self.frozen_at = min((int(self.tensors.frozen_at[i]) for i in frozen), default=None)
        self.recut()


class ShardedOneBitAdam(FreezingOptimizer, ShardedOptimizer):
    """AdamW with state divided over P ranks: 12/P bytes per parameter, plus 2 for the shared
    variance and 4 for the residual.

    Options are those of ``OneBitAdam``. All ranks hold the same parameters after each step.
    Gradients must be local: under DistributedDataParallel call ``commpress.overlap(ddp,
    optimizer)``, which keeps it from averaging them.
    """

    entries = ("frozen_at",)

    def round(self) -> RoundKind:
        return RoundKind.EXACT if self.frozen_at is None else RoundKind.COMPRESSED

    def update(self, kind: RoundKind) -> Steps[None]:
        yield from ()
        trained = self.trained
        live, frozen = self.tensors.part(trained)
        self.adam(trained if kind is RoundKind.EXACT else live, self._means)
        for i in self.owned(frozen) if kind is RoundKind.COMPRESSED else ():
            group = self.tensors.group(i)
            m = self._momenta[i].mul_(group["betas"][0])
            m.addcmul_(self._means[i], self.unit(i))
            self.apply_step(i, step=rate_of(group, self.steps_done), decay=decay_of(group))
            self.bound_momentum(i)

    # ------------------------------------------------------------ freezing and thawing

    def reschedule(self, kind: RoundKind) -> Steps[None]:
        self.unknown |= self.due() if self.frozen else (yield from self.ends_warmup())

    def sort(self) -> Steps[None]:
        """Freeze live tensors whose variance is stable, and convert their residuals to units of
        p."""
        for i in self.tensors.part(self.numbers)[1]:
            self.tensors.divide(i)
        self._freeze((yield from self.ready()) if self.due() else [])

    def _let_wake(self, indices: Sequence[int]) -> None:
        for i in indices:
            done = int(self.tensors.variance_steps[i])
            own = self.tensors.own_steps(i, self.steps_done)
            self._variances[i].mul_(
                self.tensors.correction(i, own) / self.tensors.correction(i, done)
            )
        super()._let_wake(indices)
        self.tensors.count(indices, self.steps_done)
