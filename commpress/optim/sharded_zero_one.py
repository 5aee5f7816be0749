"""0/1 Adam with its state partitioned over the ranks (ZeRO-1): nothing leaves in most steps, and no
rank has it all.

    exact  as ``ShardedOneBitAdam``, at steps of the variance schedule
    local  q_i ← β1·q_i + (1 − β1)·g_i      u_i ← (1 − γλ)·u_i + γ'·q_i
           A ← (1 − γλ)·A + γ'·β1ⁿ          at the n-th step
    sync   to the owner u_i/s in one bit    u = A·m + s·mean      w ← D·w − u/s      m ← u/Γ
           to everybody w − x in one bit

Γ, D and γ' are those of ``windows``; q and u begin a window at zero, A at zero. What s is, how
gradients are cut and who wakes up is in ``tensor_states``; as in ``ZeroOneAdam`` live tensors
travel as others do, in eight bits, and waking up brings exact steps for all.

Note: parameters stand still inside a window. To move them each rank would need all of the momentum
and an anchor to come back to, 8 bytes more per parameter, and dividing the state would save nothing
(``docs/optimizers.md``). So all ranks hold the same parameters at all times, and there is nothing
to synchronise before evaluating. In return a window is one step on one large batch, of length Γ,
and momentum smooths many short steps better than one long one: where a step at every gradient bears
a curvature of 38/γ (β1 = 0.9, in units of s), windows of n steps bear 2·(1 + A/Γ)/(Γ − A): 7.7/γ
for n = 4 at γ/2, 1.35/γ for n = 16 at γ/4. So they must grow more slowly than where ranks move:
``Linear`` keeps Γ within the largest γ so far.

Note: only what is new. m decays by known factors, so the owner adds its part, A·m, and messages
carry gradients alone.
"""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch

from commpress.logs import warn_on_first
from commpress.optim.checkpoint import check_entries, check_length
from commpress.optim.flat import Flat
from commpress.optim.optimizer import RoundKind
from commpress.optim.sharded import ShardedOptimizer
from commpress.optim.windows import (
    ENTRIES,
    Spans,
    WindowedOptimizer,
    WindowOptions,
    decay_of,
    rate_of,
)
from commpress.work import Steps

# rates of a window together, in peaks of the rate: above this a step at its end is warned of
LONG = 2.0


class ShardedZeroOneAdam(WindowedOptimizer, ShardedOptimizer):
    """``sync``, ``variance_updates``, ``exact_steps`` as in ``ZeroOneAdam``, other options as in
    ``ShardedOneBitAdam``.

    ``sync`` is "linear" by default: windows grow by the inverse of the learning rate, not by its
    square, for parameters stand still inside one and take all its steps at its end. Longer ones are
    taken and, where they may do harm, warned of.

    Per parameter 8 bytes of what waits for the end of a window more than there. ``synchronize()``
    at the end of training takes in what an open window has gathered.
    """

    schedule_entries = (*ENTRIES, "carried")
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
        self._long = False  # whether a long step was warned of
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

    def local(self) -> None:
        """A gradient that is not finite counts as zero: nobody can be asked, and the window goes
        on."""
        span = self.windows.interval(self.steps_done, self.param_groups, self.facts)
        self._warn_of_long_step(span)
        every = range(len(self._flat.parameters))
        gain = self.gain()
        squares = self.squares(gain)
        finite = math.isfinite(squares)
        self.counters.ignored_gradients += not finite
        if finite:
            self.cut(every, gain * self.clipping.of_local(self, squares**0.5), self.work)
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
        self.cut(range(len(self._flat.parameters)), gain, self.work)
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
        """A of each group once this step is in."""
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
            self.adam(i for _, at in self.groups() for i in at)
        else:
            yield from self._observe()

    def longest(self, i: int) -> float:
        """The longest way of all steps of the window together."""
        window = self.windows.after(self.steps_done, self.param_groups)
        rate = next(
            rate for (_, at), (rate, _) in zip(self.groups(), window, strict=True) if i in at
        )
        return (
            self.tensors.bound(i) * rate / math.sqrt(self.tensors.share_of_variance(i))
            if rate > 0
            else super().longest(i)
        )

    def _gather(self, window: Sequence[tuple[float, float]], carried: Sequence[float]) -> None:
        """Master weights and momentum from the displacement in ``mean``."""
        for (_, at), (rate, decay), own in zip(self.groups(), window, carried, strict=True):
            for part in self.owned(at):
                m = part.of(self.momentum)
                m.mul_(own).addcmul_(part.of(self.mean), self.unit(part))
                self.apply_step(part, m, step=1.0, decay=decay)
                m.mul_(1 / rate if rate > 0 else 0.0)
                self.bound_momentum(part, m)

    def _observe(self) -> Steps[None]:
        """An exact step after windows have begun: its variance counts, and an element without any
        begins with v̂ = g²."""
        for group, at in self.groups():
            beta1, beta2 = group["betas"]
            self.tensors.variance_steps[list(at)] += 1
            for part in self.owned(at):
                done = int(self.tensors.variance_steps[part.parameter])
                before, after = (
                    self.tensors.correction(part.parameter, count) for count in (done - 1, done)
                )
                g, m, v = (part.of(b) for b in (self.mean, self.momentum, self.variance))
                seen = v > 0
                square = g.square()
                v.div_(before).lerp_(square, (1 - beta2) / after).copy_(
                    torch.where(seen, v, square)
                ).mul_(after)
                m.lerp_(g, 1 - beta1)
        own = [float(part.of(self.variance).sum(dtype=torch.float64)) for part in self.parts]
        # owners alone know v as it is now
        for i, total in enumerate((yield from self.gathered(own)).sum(axis=0)):
            self.tensors.divide(i, total=float(total))
        for group, at in self.groups():
            for part in self.owned(at):
                m = part.of(self.momentum)
                self.apply_step(
                    part, m, step=rate_of(group, self.steps_done), decay=decay_of(group)
                )

    def schedule(self, kind: RoundKind) -> Steps[None]:
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

    def sort(self) -> None:
        """Divisors and codecs of the variance as it is now."""
        frozen = self.tensors.frozen.tolist()
        for i in range(len(self._flat.parameters)):
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
        for i in range(len(self._flat.parameters)):
            torch.div(
                self._flat.view(self.pending, i),
                self.tensors.divisor(i),
                out=self._flat.view(self.work, i),
            )
        outcomes = yield from self.quantized.reduce(self.work, self.mean, key=self._key())
        if (yield from self.settled(outcomes)):
            self._gather(
                list(zip(self.windows.rates, self.windows.decays, strict=True)), self.carried
            )
            yield from self._publish(self.quantized, whole=False)
        self._close()
        self.counters.compressed_rounds += 1
        self.counters.compressed_bytes += self.sent_bytes()

    # ------------------------------------------------------------ checkpoints

    def schedule_state(self) -> dict[str, Any]:
        return self.windows.state() | {"carried": list(self.carried)}

    def check_schedule(self, schedule: dict[str, Any]) -> None:
        super().check_schedule(schedule)
        check_length(schedule["carried"], len(self.param_groups), "rates of momentum in a window")

    def check_waiting(self, schedule: dict[str, Any], waiting: dict[str, torch.Tensor]) -> None:
        if schedule["held"]:
            check_entries(waiting, ("innovation", "pending"), "a state saved inside a window")
            for name in ("innovation", "pending"):
                check_length(waiting[name], self._flat.numel, f"elements of {name!r} in a window")

    def resume(self, schedule: dict[str, Any]) -> None:
        self.windows.load(schedule)
        self.carried = list(schedule["carried"])
        if not self.windows.held:
            self.innovation.zero_()
            self.pending.zero_()

    def waiting(self) -> dict[str, torch.Tensor]:
        return {"innovation": self.innovation, "pending": self.pending} if self.windows.held else {}
