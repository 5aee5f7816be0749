"""0/1 Adam: the variance is updated more and more rarely, and most steps need no communication.

    exact  mean gradients, as Adam; at steps of the variance schedule, or at the first one after the
           window they fell in
    local  m ← β1·m + (1 − β1)·g      u ← (1 − γλ)·u + γ'·m      x ← D·a − u/s  (nothing is sent)
    sync   d ← mean of u/s, one bit both ways      a ← D·a − d      x ← a      m ← s·d/Γ      u ← 0

a is the anchor, the parameters at the last synchronisation, the same on all ranks; D and Γ are what
weight decay leaves of it and of the learning rates since: D ← (1 − γλ)·D, Γ ← (1 − γλ)·Γ + γ', with
γ' = γ/(1 − β1ᵗ). ``tensor_states`` defines s, the clamping of gradients and m, and waking. No
tensor takes Adam's steps, as most steps send nothing: live tensors (``tensor_states``) travel as d
like all others, in eight bits, and a tensor that wakes brings exact steps for all.

Note: one message is enough. Between synchronisations the variance does not move, so the
displacement is linear in m: d gives both the new parameters and the mean momentum of the window.

Note: messages are the displacement u/s, not u. Its elements are of one size, so one scale fits a
block; in u, an element with a small variance would get its neighbours' magnitude and move by that
over s. And residuals are displacements too, still right when the variance has moved.

Note: nothing drifts. x is computed from the anchor at every step, never by undoing earlier steps,
so after a synchronisation all ranks hold the same bits, and a checkpoint of (a, u, m) continues in
the same bits. Weight decay stays out of u, which becomes m.

Note: exact steps once windows have begun divide by s as all others do, and an element that had no
gradient so far begins with v̂ = ḡ²: with the weight that is due to one of many updates, √v̂ would
stay far below |ḡ| until many more have come, and they come ever more rarely.

Partitioned over the ranks (``ShardedZeroOneAdam``), most steps send nothing, and no rank has all
state:

    exact  as ``ShardedOneBitAdam``, at steps of the variance schedule
    local  q_i ← β1·q_i + (1 − β1)·g_i      u_i ← (1 − γλ)·u_i + γ'·q_i
           A ← (1 − γλ)·A + γ'·β1ⁿ          at the n-th step
    sync   to the owner u_i/s in one bit    u = A·m + s·mean      w ← D·w − u/s      m ← u/Γ
           to everybody w − x in one bit

Γ, D and γ' are as above; q and u begin a window at zero, A at zero. ``tensor_states``
defines s, the clamping of gradients and waking; as in ``ZeroOneAdam``, live tensors travel like
others, in eight bits, and waking brings exact steps for all.

Note: parameters stand still inside a window. To move them each rank would need all of the momentum
and an anchor to come back to, 8 bytes more per parameter, and dividing the state would save nothing
(``docs/optimizers.md``). So all ranks hold the same parameters at all times, and there is nothing
to synchronise before evaluating. In return a window is one step on one large batch, of length Γ,
and momentum smooths many short steps better than one long one: where a step at every gradient bears
a curvature of 38/γ (β1 = 0.9, in units of s), windows of n steps bear 2·(1 + A/Γ)/(Γ − A): 7.7/γ
for n = 4 at γ/2, 1.35/γ for n = 16 at γ/4. So they must grow more slowly than where ranks move:
``Linear`` keeps Γ within the largest γ so far.

Note: only new gradients are sent. m decays by known factors, so the owner adds its part, A·m.
"""

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from copy import copy
from math import isfinite, sqrt
from typing import Any, Literal, Unpack

import torch

from commpress.collectives.agreement import gathered
from commpress.collectives.change import Change
from commpress.collectives.handover import Standing
from commpress.errors import check_counts, check_entries
from commpress.logs import warn_on_first
from commpress.optim.checkpoint import check_length
from commpress.optim.flat import Flat
from commpress.optim.optimizer import (
    CompressedOptimizer,
    OptimizerOptions,
    RoundKind,
    decay_of,
    rate_of,
)
from commpress.optim.replicated import ReplicatedOptimizer
from commpress.optim.sharded import ShardedOptimizer
from commpress.schedules import (
    DoublingUpdates,
    Facts,
    FollowRate,
    InverseRate,
    Sync,
    Updates,
    sync_named,
)
from commpress.work import Steps

Group = dict[str, Any]
Spans = Literal["qsr", "linear", "rate", "every"] | int | Sync

ENTRIES = (
    "updates",
    "updated_at",
    "held",
    "span",
    "rates",
    "decays",
    "wakes",
    "exact_until",
    "quiet_until",
)
WAKING = 8  # exact steps for tensors that woke up
PATIENCE = 1000  # steps at its peak after which a scheduled rate counts as constant
LONGEST = 1000  # exact steps for parameters that were added late
# flat buffers that differ between ranks while a window is open
WINDOW = ("exp_avg", "accumulated", "anchor")
WAITING = ("innovation", "pending")  # those of the sharded optimizer
# sum of a window's rates, in units of the peak rate, above which a sharded step warns
LONG = 2.0


class Windows:
    """Windows between synchronisations: updates of the variance, progress in a window, sums of its
    steps: Γ and D of each parameter group."""

    def __init__(self, sync: Spans, variance_updates: int | Updates, exact_steps: int) -> None:
        check_counts(exact_steps=exact_steps)
        self.warmup = exact_steps
        self.sync = sync_named(sync)
        self.variance_schedule: Updates = (
            DoublingUpdates(variance_updates)
            if isinstance(variance_updates, int | float)
            else variance_updates
        )
        self.begin_anew(0)

    def begin_anew(self, steps_done: int) -> None:
        """Start again as after ``steps_done`` exact steps."""
        # updates of the variance: their number, and the step of the last
        self.updates, self.updated_at = steps_done, steps_done - 1
        # steps since the last synchronisation; planned steps of this window
        self.held, self.span = 0, 1
        self.rates: list[float] = []  # Γ of each group
        self.decays: list[float] = []  # D of each group
        # wakes so far; steps before which all steps are exact, and no rank may ask again
        self.wakes, self.exact_until, self.quiet_until = 0, 0, 0

    def follow(self, updates: int, updated_at: int, steps_done: int) -> None:
        """Load updates from a state after ``begin_anew``, unless another optimizer has trained
        since."""
        count = self.variance_schedule.count
        if (
            0 < updates <= updated_at + 1 <= steps_done
            and count(steps_done) <= count(updated_at + 1) + 1
        ):
            self.updates, self.updated_at = updates, updated_at

    def round(self, step: int, groups: Sequence[Group], facts: Facts) -> RoundKind:
        """Return the kind of a step. Exact steps wait for the end of a window, in which the
        variance must not move."""
        if step < self.warmup or (self.held == 0 and step < self.exact_until):
            return RoundKind.EXACT
        count = self.variance_schedule.count
        if self.held == 0 and count(step + 1) > count(self.updated_at + 1):
            return RoundKind.EXACT
        moved = any(rate > 0 for rate, _ in self.after(step, groups))
        return (
            RoundKind.COMPRESSED
            if self.held + 1 >= self.interval(step, groups, facts) and moved
            else RoundKind.LOCAL
        )

    def interval(self, step: int, groups: Sequence[Group], facts: Facts) -> int:
        if self.held:
            return self.span
        return max(self.sync.interval(step, max(float(group["lr"]) for group in groups), facts), 1)

    def waits_for_rate(self, step: int, groups: Sequence[Group], facts: Facts) -> bool:
        """True if this step is not local only because ``sync`` waits for a constant rate to
        fall."""
        count, rate = self.variance_schedule.count, max(float(group["lr"]) for group in groups)
        if (
            not isinstance(self.sync, FollowRate | InverseRate)
            or step < self.warmup
            or count(step + 1) > count(step)
        ):
            return False
        # set by torch's schedulers
        scheduled = any("initial_lr" in group for group in groups)
        passed = step - facts.peak_step > (PATIENCE if scheduled else 1)
        return passed and rate >= facts.peak_lr and self.sync.interval(step, rate, facts) <= 1

    @property
    def sums(self) -> list[tuple[float, float]]:
        """Return (Γ, D) of each group in the open window."""
        return list(zip(self.rates, self.decays, strict=True))

    def after(self, step: int, groups: Sequence[Group]) -> list[tuple[float, float]]:
        """Return (Γ, D) of each group after this step."""
        before = self.sums if self.held else [(0.0, 1.0)] * len(groups)
        return [
            (decay_of(group) * rate + rate_of(group, step), decay_of(group) * decay)
            for group, (rate, decay) in zip(groups, before, strict=True)
        ]

    def hold(self, window: Sequence[tuple[float, float]], span: int) -> None:
        """Record a local step."""
        self.rates, self.decays = map(list, zip(*window, strict=True))
        self.span = span
        self.held += 1

    @property
    def opening(self) -> int:
        """Return the largest number of exact steps at the beginning of a run."""
        count = self.variance_schedule.count
        scheduled = next(
            (step for step in range(LONGEST) if count(step + 1) == count(step)), LONGEST
        )
        return max(self.warmup, scheduled, 1)

    def grow(self, step: int, groups: int) -> None:
        """Continue with ``groups`` groups. Added ones begin with exact steps like a run; an open
        window ignores them."""
        if self.held:
            self.rates += [0.0] * (groups - len(self.rates))
            self.decays += [1.0] * (groups - len(self.decays))
        if step:
            self.exact_until = max(self.exact_until, step + self.opening)

    def updated(self, step: int) -> None:
        self.updates, self.updated_at = self.updates + 1, step

    def wake(self, step: int, steps: int) -> None:
        """Take ``steps`` exact steps from now on, then ignore requests, twice as long each time."""
        self.wakes, self.exact_until = self.wakes + 1, step + steps
        self.quiet_until = self.exact_until + (steps << self.wakes)

    def state(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in ENTRIES}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``WindowedOptimizer.check`` has accepted."""
        for name in ENTRIES:
            setattr(self, name, copy(state[name]))


class WindowOptions(OptimizerOptions, total=False):
    """Keyword options of the optimizers with local windows; ``ZeroOneAdam`` explains them."""

    variance_updates: int | Updates
    exact_steps: int


class WindowedOptimizer(CompressedOptimizer):
    """Optimizer that communicates at the end of windows, whole or sharded."""

    at_constant_rate = (
        "Pass sync=4 for one exchange in 4 steps at any rate, or sync='every' if this is what you "
        "want"
    )

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        sync: Spans = "qsr",
        variance_updates: int | Updates = 16,
        exact_steps: int = 0,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self.windows = Windows(sync, variance_updates, exact_steps)
        self._warned = False  # about a rate that never falls
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def schedule(self) -> dict[str, Any]:
        return super().schedule() | self.windows.state()

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        super().follow(schedule, change)
        self.windows.load(schedule)

    def check(self, schedule: Mapping[str, Any]) -> None:
        super().check(schedule)
        for name in ("rates", "decays") if schedule["held"] else ():
            check_length(schedule[name], len(self.param_groups), f"{name} of groups in a window")

    def _place(self, flat: Flat) -> None:
        grows = self.flat is not None
        super()._place(flat)
        if grows:
            self.windows.grow(self.steps_done, len(self.param_groups))

    def steps(self) -> Steps[bool]:
        self._follow_groups()
        if not self._warned and self.channel.size > 1:
            self._warned = self.windows.waits_for_rate(
                self.steps_done, self.param_groups, self.facts
            )
            if self._warned:
                warn_on_first(
                    self.channel.rank,
                    "step %d: the learning rate is constant at %g, and as long as it does not fall "
                    "NO STEP IS LOCAL: sync follows the rate ('qsr', 'linear', 'rate'), so all "
                    "ranks exchange momentum at every step. %s",
                    self.steps_done,
                    max(float(group["lr"]) for group in self.param_groups),
                    self.at_constant_rate,
                )
        began = self.steps_done - self.windows.held
        if self.windows.held and any(group["added_at"] > began for group in self.param_groups):
            yield from self.synchronizing()  # parameters added since then are not in the window
        return (yield from super().steps())

    def asks(self) -> bool:
        """Return False with ``agree_over``: exact steps of one group of ranks alone would make
        weights differ from those of others."""
        return (
            self.consensus is None
            and self.steps_done >= self.windows.quiet_until
            and super().asks()
        )

    def wake(self, indices: Sequence[int]) -> Steps[None]:
        """Wake tensors after closing the window. Each time, ranks may ask again only later: rare
        tokens would ask for ever."""
        self.windows.wake(self.steps_done, WAKING)
        self.tensors.trips[:] = 0
        warn_on_first(
            self.channel.rank,
            "step %d: gradients are far beyond the variance in %s. The next %d steps are exact",
            self.steps_done,
            ", ".join(map(self.tensors.name, indices)),
            WAKING,
        )
        yield from ()

    def as_momentum(self, i: int, offset: int, owed: torch.Tensor) -> torch.Tensor:
        """Convert residuals, which are displacements, to momentum: one step's displacement divided
        by its rate."""
        rate = rate_of(self.tensors.group(i), self.steps_done)
        return owed / rate if rate else torch.zeros_like(owed)

    def synchronize(self) -> None:
        """End the window now: all ranks hold the same parameters afterwards. Collective; free if
        nothing is pending."""
        with torch.no_grad():
            self.channel.run(self.synchronizing())

    @abstractmethod
    def synchronizing(self) -> Steps[None]:
        """``synchronize`` as an algorithm that may wait."""


class ZeroOneAdam(WindowedOptimizer, ReplicatedOptimizer):
    """AdamW that sends one bit per parameter every few steps. Options not named here are those of
    ``OneBitAdam``.

    - ``sync``: steps between synchronisations: "qsr" (default) every step while the learning rate
      rises, then by its inverse square: 2 at 0.7 of the peak, 4 at half of it, at most 16; "linear"
      by its inverse: 2 at half, 4 at a quarter; "rate" 2 after the peak and doubling each time the
      rate halves, at most 16; "every"; a number of steps, such as 4; or a ``schedules.Sync``. At a
      constant rate no step is local with the first three, and a warning says so: pass a number.
    - ``variance_updates``: exact steps at each interval 1, 2, 4, … (default 16), or a
      ``schedules.Updates``.
    - ``exact_steps``: number of first steps that are always exact (default 0); short runs need a
      tenth or more of their steps.

    Between synchronisations ranks hold different parameters: call ``synchronize()`` before
    evaluating or exporting.
    """

    # per parameter, the number of updates of its variance, and the step of the last one
    updated: torch.Tensor
    accumulated: torch.Tensor  # since the anchor; both are empty outside a window
    anchor: torch.Tensor
    _members: frozenset[int] = frozenset()  # parameters in the open window

    entries = (*ENTRIES, "stale", "trips", "common")

    # ------------------------------------------------------------ one step

    @property
    def frozen(self) -> bool:
        return self.steps_done > 0

    def round(self) -> RoundKind:
        if self.channel.size == 1:
            return RoundKind.EXACT
        return self.windows.round(self.steps_done, self.param_groups, self.facts)

    @property
    def held(self) -> int:
        """Steps since the last synchronisation."""
        return self.windows.held

    def prepare(
        self,
        group: dict[str, Any],
        indices: Sequence[int],
        gradients: dict[int, torch.Tensor] | None,
        gain: float,
    ) -> None:
        self.refresh()
        beyond = self.kernels.accumulate(
            self._flat.segments(indices, gradients),
            self.momentum,
            self.accumulated if self.held else self._empty,
            self.variance,
            self.work,
            self.tensors.divisors(indices),
            beta=group["betas"][0],
            gain=gain,
            lr=rate_of(group, self.steps_done),
            decay=decay_of(group),
        )
        self.tensors.see(indices, beyond)
        if not self.held:
            self.add_known(indices, -group["betas"][0] * rate_of(group, self.steps_done))

    def apply(self, kind: RoundKind) -> Steps[None]:
        yield from ()
        if kind is RoundKind.EXACT:
            self.exact(self._works)
        else:
            self._gather(self.windows.after(self.steps_done, self.param_groups))

    def _gather(self, window: list[tuple[float, float]]) -> None:
        """Update parameters and momentum from d in ``work``."""
        anchor = self.anchor if self.held else self._empty
        for (group, at), (rate, decay) in zip(self.groups(), window, strict=True):
            if not self.held:  # otherwise ranks have different m
                self.add_known(at, group["betas"][0] * rate)
            if len(at):
                self.kernels.apply_mean(
                    self._flat.placed(at),
                    self.work,
                    self.variance,
                    self.momentum,
                    anchor,
                    self.tensors.divisors(at),
                    step=1.0,
                    decay=decay,
                    momentum_scale=1 / rate if rate > 0 else 0.0,
                    most=self.tensors.bound(at[0]),
                )
        self.windows.held = 0

    def exact(self, gradients: Sequence[torch.Tensor], among: Container[int] | None = None) -> None:
        """Take an exact step, equal to Adam's as long as all steps were exact."""
        if self.channel.size == 1:
            self._close_alone()
        if self.windows.updates == self.steps_done:
            super().exact(gradients, among)
            return
        for group, at in self.groups():
            beta1, beta2 = group["betas"]
            for i in at:
                if not self.tensors.variance_steps[i]:
                    self.tensors.count([i], self.steps_done + 1)
                weight = (1 - beta2) / self.tensors.correction(i, int(self.updated[i, 0]) + 1)
                unit = self.tensors.correction(i, int(self.tensors.variance_steps[i]))
                self.kernels.update_variance(
                    self._flat.segments((i,), {i: gradients[i]}),
                    self.momentum,
                    self.variance,
                    beta=beta1,
                    weight=weight,
                    unit=unit,
                )
                self.tensors.divide(i)
            self.kernels.apply_step(
                self._flat.placed(at),
                self.momentum,
                self.variance,
                self.tensors.divisors(at),
                step=rate_of(group, self.steps_done),
                decay=decay_of(group),
            )

    def _close_alone(self) -> None:
        """Continue a state of several ranks on one: end its window here and apply the residuals."""
        self.windows.held = 0
        # on one rank there are no reduced residuals
        for (name, offset), owed, _ in self.quantized.residuals.places():
            self._flat.weights[self._flat.names.index(name)].view(-1)[
                offset : offset + owed.numel()
            ] -= owed
        self.quantized.residuals.load({})

    def local(self, gain: float) -> None:
        """Take a local step. A non-finite gradient leaves its momentum unchanged, because no other
        rank can be asked."""
        self.refresh()
        if self.held == 0:
            self._members = frozenset(self.trained)
        if self.accumulated.numel() == 0:
            self.accumulated, self.anchor = self._flat.new(), self._flat.new()
        span = self.windows.interval(self.steps_done, self.param_groups, self.facts)
        window, gain = (
            self.windows.after(self.steps_done, self.param_groups),
            self._local_gain(gain),
        )
        finite = gain > 0
        for (group, at), (_, decay) in zip(self.groups(), window, strict=True):
            segments = self._flat.segments(at) if gain else self._flat.placed(at)
            good, beyond = self.kernels.local_step(
                segments,
                self.momentum,
                self.accumulated,
                self.anchor,
                self.variance,
                self.tensors.divisors(at),
                beta=group["betas"][0] if gain else 1.0,
                gain=gain,
                lr=rate_of(group, self.steps_done),
                decay=decay_of(group),
                anchor_decay=decay,
                begins=self.held == 0,
            )
            self.tensors.see(at, beyond)
            finite &= good
        self.counters.ignored_gradients += not finite
        self.windows.hold(window, span)

    def _local_gain(self, gain: float) -> float:
        """Return the factor of the local gradients; 0 if they are to be clipped and their norm is
        not finite."""
        if self.max_grad_norm is None:
            return gain
        squares = self.squares(gain)
        return gain * self.factor_of_local(squares**0.5) if isfinite(squares) else 0.0

    def after(self, kind: RoundKind) -> Steps[None]:
        yield from ()
        if kind is RoundKind.EXACT:
            self.windows.updated(self.steps_done - 1)
            self.updated[:, 0] += 1
            self.updated[:, 1] = self.windows.updated_at
            self._stale = True
            if self.consensus is not None:
                self.refresh()
                yield from self.agree_on_floor()
        if self.windows.updates != self.steps_done and self.held == 0:
            self.tensors.keep_up(self.numbers, self.steps_done)

    # ------------------------------------------------------------ the variance

    def refresh(self) -> None:
        """Set divisors and codecs from the present variance."""
        if not self._stale:
            return
        for i in self.numbers:
            self.tensors.divide(i)
            ready = self.tensors.may_freeze(i)
            if ready != bool(self.tensors.frozen[i]):
                (self.tensors.freeze if ready else self.tensors.thaw)([i], self.steps_done)
        self.recut()
        self._stale = False

    def allocate(self, had: int) -> None:
        flat, new = self._flat, len(self._flat.parameters) - had
        rows = torch.tensor([0, self.windows.updated_at]).repeat(new, 1)
        self.updated = torch.cat([self.updated, rows]) if had else rows
        for row, p in zip(self.updated, flat.parameters, strict=True):
            self.state[p] |= {"variance_updates": row[0], "variance_updated_at": row[1]}
        if not had:
            self._begin_anew()
        elif self.accumulated.numel():
            self.accumulated, self.anchor = flat.grown(self.accumulated), flat.grown(self.anchor)
            for i in range(had, had + new):
                flat.view(self.anchor, i).copy_(flat.weights[i])
        else:
            self.accumulated = self.anchor = self._empty

    def _count_updates(self) -> None:
        """Record in ``state``, which torch's tools save, that every step so far was an update."""
        for i, row in enumerate(self.updated):
            row[0], row[1] = self.tensors.own_steps(i, self.steps_done), self.windows.updated_at

    def _begin_anew(self) -> None:
        self.accumulated = self.anchor = self._empty
        self._stale = True

    def forget(self) -> None:
        super().forget()
        self.updated.zero_()

    def is_trained(self, i: int) -> bool:
        """True if the parameter is trained; fixed until a window ends, because ranks hold different
        values inside."""
        return i in self._members if self.held else super().is_trained(i)

    def replicated(self) -> list[torch.Tensor]:
        return self._flat.views(self.anchor) if self.held else self._flat.weights

    # ------------------------------------------------------------ between windows

    def synchronizing(self) -> Steps[None]:
        if self.channel.size == 1:
            self._close_alone()
            self._flat.publish()
        if self.held == 0:
            return
        if self.bucket_rounds is not None:
            self.bucket_rounds.take_back()
        for i, work in enumerate(self._works):
            torch.div(self._flat.view(self.accumulated, i), self.tensors.divisor(i), out=work)
        if any(rate > 0 for rate in self.windows.rates):
            outcomes = yield from self.reduce(RoundKind.COMPRESSED, self.numbers)
            if not (yield from self.settled(outcomes)):
                self.work.zero_()
        self._gather(self.windows.sums)
        self._flat.publish()
        yield from self._agree_who_wakes(self.tensors.waking())
        self.counters.compressed_rounds += 1
        self.counters.compressed_bytes += self.sent_bytes()

    # ------------------------------------------------------------ other ranks

    def shared(self) -> dict[str, Any]:
        return super().shared() | {"windows": self.windows.state()}

    def closing(self, change: Change, standing: Standing) -> Steps[Callable[[], None]]:
        """End an open window with the exact mean of the displacements of the ranks that are
        furthest in it.

        A rank that took fewer of its steps, because another rank asked for a change in between, is
        behind.
        """
        channel, taking = self.channel, not standing.behind
        mine = [float(self.steps_done), float(self.held)] if taking else [-1.0, 0.0]
        every = yield from gathered(mine, transport=channel.transport, sequence=channel.take())
        furthest = int(every[:, 0].max())
        taking &= self.steps_done == furthest
        held = bool(every[every[:, 0] == furthest, 1].any())
        count = int((every[:, 0] == furthest).sum())
        if held:
            for i, work in enumerate(self._works):
                if taking:
                    torch.div(
                        self._flat.view(self.accumulated, i), self.tensors.divisor(i), out=work
                    )
                else:
                    work.zero_()
            yield from self.exact_mean(self.numbers)
            self.work *= channel.size / count

        def close() -> None:
            if held and taking:
                self._gather(self.windows.sums)
                self._flat.publish()
            self.windows.held = 0

        return close

    def follow_waking(self, standing: Standing) -> None:
        if standing.shared["woken"]:
            windows = standing.shared["windows"]
            self.windows.wakes, self.windows.exact_until, self.windows.quiet_until = (
                windows[name] for name in ("wakes", "exact_until", "quiet_until")
            )
            self.tensors.trips[:] = 0

    # ------------------------------------------------------------ checkpoints

    def schedule(self) -> dict[str, Any]:
        state = super().schedule() | {"stale": self._stale, "common": self.tensors.common}
        return state | ({"anchor": self.anchor.clone()} if self.held else {})

    def waiting(self) -> dict[str, torch.Tensor]:
        """Return momentum and accumulated steps, which differ between ranks inside a window."""
        differ = {"exp_avg": self.momentum, "accumulated": self.accumulated}
        return differ if self.held else {}

    def check(self, schedule: Mapping[str, Any]) -> None:
        super().check(schedule)
        if schedule["held"]:
            check_entries(schedule, WINDOW, "a state saved inside a window")
            for name in WINDOW:
                check_length(schedule[name], self._flat.numel, f"elements of {name!r} in a window")

    def follow_adam(self) -> None:
        self._begin_anew()
        self.windows.begin_anew(self.steps_done)
        self.recut()
        updates, updated_at = self.updated[0].tolist()
        self.windows.follow(updates, updated_at, self.steps_done)
        if self.windows.updates == self.steps_done:
            self._count_updates()
        if self.consensus is not None:
            # an exact step ends with an agreement on the floor
            self.windows.exact_until = self.steps_done + 1

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        super().follow(schedule, change)
        self._begin_anew()
        self.recut()
        self.tensors.common = schedule["common"]
        self._members = frozenset(
            i for i in self.numbers if ReplicatedOptimizer.is_trained(self, i)
        )
        self._stale = schedule["stale"]
        if schedule["held"]:
            self.accumulated, self.anchor = self._flat.new(), self._flat.new()
            self.momentum.copy_(schedule["exp_avg"])
            self.accumulated.copy_(schedule["accumulated"])
            self.anchor.copy_(schedule["anchor"])
            for (_, at), decay in zip(self.groups(), self.windows.decays, strict=True):
                self.kernels.local_step(  # x := D·a − u/s, nothing else changes
                    self._flat.placed(at),
                    self.momentum,
                    self.accumulated,
                    self.anchor,
                    self.variance,
                    self.tensors.divisors(at),
                    beta=1.0,
                    gain=0.0,
                    lr=0.0,
                    decay=1.0,
                    anchor_decay=decay,
                    begins=False,
                )
            self._flat.publish()


class ShardedZeroOneAdam(WindowedOptimizer, ShardedOptimizer):
    """``sync``, ``variance_updates``, ``exact_steps`` as in ``ZeroOneAdam``, other options as in
    ``ShardedOneBitAdam``.

    ``sync`` is "linear" by default: windows grow by the inverse of the learning rate, not by its
    square, for parameters stand still inside one and take all its steps at its end. Longer windows
    are allowed, with a warning if they may do harm.

    The state that waits for the end of a window takes 8 more bytes per parameter than there.
    ``synchronize()`` at the end of training applies an open window.
    """

    entries = (*ENTRIES, "carried")
    at_constant_rate = (
        "Let the rate fall, with sync='linear', the default: parameters stand still inside a "
        "window, and one of several steps at this rate may not be stable (ZeroOneAdam moves them, "
        "and takes sync=4). Or pass sync='every' if this is wanted"
    )

    innovation: torch.Tensor  # q
    pending: torch.Tensor  # u
    carried: list[float]  # A of each group

    def __init__(
        self, params: Any, *args: Any, sync: Spans = "linear", **options: Unpack[WindowOptions]
    ) -> None:
        self._long = False  # whether the warning about a long step was given
        super().__init__(params, *args, sync=sync, **options)

    def _place(self, flat: Flat) -> None:
        first = self.flat is None
        before, carried = (
            ((None, None), []) if first else ((self.innovation, self.pending), self.carried)
        )
        super()._place(flat)
        self.innovation, self.pending = map(flat.grown, before)
        self.carried = carried + [0.0] * (len(self.param_groups) - len(carried))

    # ------------------------------------------------------------ one step

    def round(self) -> RoundKind:
        return self.windows.round(self.steps_done, self.param_groups, self.facts)

    def local(self, gain: float) -> None:
        """Take a local step. A non-finite gradient counts as zero, because no other rank can be
        asked."""
        span = self.windows.interval(self.steps_done, self.param_groups, self.facts)
        self._warn_of_long_step(span)
        squares = self.squares(gain)
        finite = isfinite(squares)
        self.counters.ignored_gradients += not finite
        if finite:
            gain *= self.factor_of_local(squares**0.5)
            self.cut(self.numbers, gain, self.work)
        else:
            self.work.zero_()
        for group, at in self.groups():
            beta1 = group["betas"][0]
            for i in at:
                q, u, g = (
                    self._flat.view(b, i) for b in (self.innovation, self.pending, self.work)
                )
                q.mul_(beta1).add_(g, alpha=1 - beta1)
                u.mul_(decay_of(group)).add_(q, alpha=rate_of(group, self.steps_done))
        self.carried = self._carry()
        self.windows.hold(self.windows.after(self.steps_done, self.param_groups), span)

    def _warn_of_long_step(self, span: int) -> None:
        peak = self.facts.peak_lr
        length = (
            span * max(float(group["lr"]) for group in self.param_groups) / peak
            if peak > 0
            else 0.0
        )
        if self._long or length <= LONG * (1 + 1e-9):
            return
        self._long = True
        warn_on_first(
            self.channel.rank,
            "step %d: parameters stand still for a window of %d steps, and at its end go up to "
            "%.1f times as far as in a step of the largest learning rate so far. What was stable "
            "may be so no longer: pass sync='linear', the default, or a learning rate that is "
            "lower by as much",
            self.steps_done,
            span,
            length,
        )

    def prepare(self, kind: RoundKind, gain: float) -> None:
        if kind is RoundKind.EXACT:
            super().prepare(kind, gain)
            return
        self.cut(self.numbers, gain, self.work)
        for group, at in self.groups():
            beta1, rate = group["betas"][0], rate_of(group, self.steps_done)
            for i in at:
                q, u, d = (
                    self._flat.view(b, i) for b in (self.innovation, self.pending, self.work)
                )
                d.mul_((1 - beta1) * rate).add_(q, alpha=beta1 * rate).add_(
                    u, alpha=decay_of(group)
                )
                d.div_(self.tensors.divisor(i))

    def _carry(self) -> list[float]:
        """Return A of each group after this step."""
        before, step = (
            self.carried if self.windows.held else [0.0] * len(self.param_groups),
            self.windows.held + 1,
        )
        return [
            decay_of(group) * carried + rate_of(group, self.steps_done) * group["betas"][0] ** step
            for group, carried in zip(self.param_groups, before, strict=True)
        ]

    def update(self, kind: RoundKind) -> Steps[None]:
        if kind is RoundKind.COMPRESSED:
            self._gather(self.windows.after(self.steps_done, self.param_groups), self._carry())
        elif self.windows.updates == self.steps_done:
            self.adam(self.trained, self._means)
        else:
            yield from self._observe()

    def longest(self, i: int) -> float:
        """Return the longest move in all steps of the window together."""
        window = self.windows.after(self.steps_done, self.param_groups)
        rate = next(
            rate for (_, at), (rate, _) in zip(self.groups(), window, strict=True) if i in at
        )
        return (
            self.tensors.bound(i) * rate / sqrt(self.tensors.share_of_variance(i))
            if rate > 0
            else super().longest(i)
        )

    def _gather(self, window: Sequence[tuple[float, float]], carried: Sequence[float]) -> None:
        """Update master weights and momentum from the displacement in ``mean``."""
        for (_, at), (rate, decay), own in zip(self.groups(), window, carried, strict=True):
            for i in self.owned(at):
                m = self._momenta[i].mul_(own).addcmul_(self._means[i], self.unit(i))
                self.apply_step(i, step=1.0, decay=decay)
                m.mul_(1 / rate if rate > 0 else 0.0)
                self.bound_momentum(i)

    def _observe(self) -> Steps[None]:
        """Update the variance in an exact step after windows have begun; an element without any
        begins with v̂ = g²."""
        for group, at in self.groups():
            beta1, beta2 = group["betas"]
            self.tensors.variance_steps[list(at)] += 1
            for i in self.owned(at):
                done = int(self.tensors.variance_steps[i])
                before, after = (self.tensors.correction(i, n) for n in (done - 1, done))
                g, m, v = self._means[i], self._momenta[i], self._variances[i]
                seen = v > 0
                square = g.square()
                v.div_(before).lerp_(square, (1 - beta2) / after).copy_(
                    torch.where(seen, v, square)
                ).mul_(after)
                m.lerp_(g, 1 - beta1)
        own = [float(v.sum(dtype=torch.float64)) for v in self._variances]
        # only owners know the present v
        for i, total in enumerate((yield from self.gathered(own)).sum(axis=0)):
            self.tensors.divide(i, total=float(total))
        for group, at in self.groups():
            for i in self.owned(at):
                self.apply_step(i, step=rate_of(group, self.steps_done), decay=decay_of(group))

    def reschedule(self, kind: RoundKind) -> Steps[None]:
        yield from ()
        if kind is RoundKind.EXACT:
            self.windows.updated(self.steps_done - 1)
            self.unknown = True
        elif kind is RoundKind.COMPRESSED:
            self._close()

    def _close(self) -> None:
        if self.windows.held:
            self.windows.held = 0
            self.innovation.zero_()
            self.pending.zero_()

    # ------------------------------------------------------------ the variance

    def sort(self) -> Steps[None]:
        """Set divisors and codecs from the present variance."""
        yield from ()
        frozen = self.tensors.frozen.tolist()
        for i in self.numbers:
            self.tensors.divide(i)
            ready = self.tensors.may_freeze(i)
            if ready and not frozen[i]:
                self.tensors.freeze([i], self.steps_done)
            elif not ready:
                self.tensors.frozen_at[i] = 0
        self.recut()

    # ------------------------------------------------------------ between windows

    def synchronizing(self) -> Steps[None]:
        if self.windows.held == 0:
            return
        for i in self.numbers:
            torch.div(
                self._flat.view(self.pending, i),
                self.tensors.divisor(i),
                out=self._flat.view(self.work, i),
            )
        outcomes = yield from self.quantized.reduce(self.work, self.mean, key=self.steps_done)
        if (yield from self.settled(outcomes)):
            self._gather(self.windows.sums, self.carried)
            yield from self._publish(self.quantized, whole=False)
        self._close()
        self.counters.compressed_rounds += 1
        self.counters.compressed_bytes += self.sent_bytes()

    # ------------------------------------------------------------ checkpoints

    def schedule(self) -> dict[str, Any]:
        return super().schedule() | {"carried": list(self.carried)}

    def check(self, schedule: Mapping[str, Any]) -> None:
        super().check(schedule)
        check_length(schedule["carried"], len(self.param_groups), "rates of momentum in a window")
        if schedule["held"]:
            check_entries(schedule, WAITING, "a state saved inside a window")
            for name in WAITING:
                check_length(schedule[name], self._flat.numel, f"elements of {name!r} in a window")

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        super().follow(schedule, change)
        self.carried = list(schedule["carried"])
        for name in WAITING:
            buffer = getattr(self, name)
            buffer.copy_(schedule[name]) if self.windows.held else buffer.zero_()
        self.recut()

    def waiting(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in WAITING} if self.windows.held else {}
