"""Windows of 0/1 Adam between synchronisations: updates of the variance, progress in a window, sums
of its steps.

Γ and D of each parameter group are the effect of learning rates and weight decay in a window: Γ ←
(1 − γλ)·Γ + γ' and D ← (1 − γλ)·D, from 0 and 1, with γ' = γ/(1 − β1ᵗ).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Literal, Unpack

import torch

from commpress.collectives.change import Change
from commpress.errors import InvalidArgument
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


class Windows:
    def __init__(self, sync: Spans, variance_updates: int | Updates, exact_steps: int) -> None:
        if exact_steps < 0:
            raise InvalidArgument(
                f"exact_steps is {exact_steps}, expected 0 or more steps that are exact"
            )
        self.warmup = exact_steps
        self.sync = sync_named(sync)
        self.variance_schedule: Updates = (
            DoublingUpdates(variance_updates)
            if isinstance(variance_updates, int)
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
