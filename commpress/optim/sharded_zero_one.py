"""0/1 Adam with its state partitioned over the ranks (ZeRO-1): nothing leaves in most steps, and no rank has it all.

    exact       as ``ShardedOneBitAdam``, at steps of the variance schedule
    local       q_i ← β1·q_i + (1 − β1)·g_i      s_i ← (1 − γλ)·s_i + γ'·q_i      A ← (1 − γλ)·A + γ'·β1ⁿ        (n-th step)
    sync        to the owner s_i in one bit;  u = A·m + mean of s_i      w ← D·w − u/(√v̂ + ε)      m ← u/Γ
                to everybody w − x in one bit

Γ, D and γ' are those of ``windows``; q and s begin a window at zero, A at zero.

Note: parameters stand still inside a window. To move them each rank would need the variance of all parameters and an anchor to
come back to, 8 bytes more per parameter, which is what dividing the state is to save. So all ranks hold the same parameters
at all times, and there is nothing to synchronise before evaluating.

Note: only what is new. m decays by known factors, so the owner adds its part, A·m, and messages carry gradients alone.
"""

from typing import Any

import torch

from commpress.codecs import codec_named
from commpress.collectives.allreduce import reduce_message
from commpress.collectives.buckets import one_message
from commpress.optim.optimizer import Round
from commpress.optim.sharded_adam import ShardedOneBitAdam
from commpress.optim.windows import Spans, Windows, keep, rate_of
from commpress.schedules import Facts, Updates
from commpress.work import Steps

WAITING = ("innovation", "pending")  # q and s


class ShardedZeroOneAdam(ShardedOneBitAdam):
    """``sync``, ``variance_updates``, ``warmup_steps`` as in ``ZeroOneAdam``, other options as in ``ShardedOneBitAdam``.

    Per parameter 16/P bytes of state on each rank, 4 of residual and 8 of what waits for the end of a window.
    """

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
        warmup_steps: int = 0,
        **options: Any,
    ) -> None:
        self.windows, self.facts = Windows(sync, variance_updates, warmup_steps), Facts()
        super().__init__(params, lr, betas, eps, weight_decay, warmup_steps=1, **options)
        self.innovation, self.pending = self.flat.new(), self.flat.new()
        self.carried = [0.0] * len(self.param_groups)  # A of each group

    # ------------------------------------------------------------ one step

    def round(self) -> Round:
        self.facts.see(self.steps_done, max(float(group["lr"]) for group in self.param_groups))
        return self.windows.round(self.steps_done, self.param_groups, self.facts)

    def local(self) -> None:
        """A gradient that is not finite counts as zero: nobody can be asked, and the window goes on."""
        everything = self.flat.segments(range(len(self.flat.parameters)))
        finite = self.kernels.square_sum(everything) < float("inf")
        self.counters.ignored_gradients += not finite
        for group, at in self._groups():
            segments = self.flat.segments(at) if finite else self.flat.placed(at)
            self._accumulate(group, segments)
            self.kernels.blend(segments, self.innovation, self.innovation, beta=group["betas"][0], gain=self.gain())
        self.pending, self.work = self.work, self.pending
        span = self.windows.interval(self.steps_done, self.param_groups, self.facts)
        self.carried = self._carry()
        self.windows.hold(self.windows.after(self.steps_done, self.param_groups), span)

    def prepare(self, kind: Round) -> None:
        if kind is Round.EXACT:
            super().prepare(kind)
            return
        for group, at in self._groups():
            self._accumulate(group, self.flat.segments(at))

    def _accumulate(self, group: dict[str, Any], segments: Any) -> None:
        """work := s after this step; q stays."""
        self.kernels.accumulate(
            segments, self.innovation, self.pending, self.pending[:0], self.work, beta=group["betas"][0], gain=self.gain(),
            lr=rate_of(group, self.steps_done), keep=keep(group),
        )  # fmt: skip

    def _carry(self) -> list[float]:
        """A of each group once this step is in."""
        before, step = self.carried if self.windows.held else [0.0] * len(self.param_groups), self.windows.held + 1
        return [
            keep(group) * carried + rate_of(group, self.steps_done) * group["betas"][0] ** step
            for group, carried in zip(self.param_groups, before, strict=True)
        ]

    def descend(self, number: int, w: torch.Tensor, m: torch.Tensor, mean: torch.Tensor, r: torch.Tensor) -> None:
        rate, kept = self.windows.after(self.steps_done, self.param_groups)[number]
        m.mul_(self._carry()[number]).add_(mean)
        w.mul_(kept).addcmul_(m, r, value=-1)
        m.mul_(1 / rate if rate > 0 else 0.0)

    def after(self, kind: Round) -> None:
        if kind is Round.EXACT:
            self.windows.updated(self.steps_done - 1)
            self.reciprocal = self.mean[:0]
        elif kind is Round.COMPRESSED and self.windows.held:
            self.windows.held = 0
            self.innovation.zero_()
            self.pending.zero_()

    def variance_updates(self) -> int:
        return self.windows.updates

    def exact_rates(self, group: dict[str, Any]) -> tuple[float, float]:
        return self.windows.exact_rates(group, self.steps_done)

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        waiting = {name: getattr(self, name).clone() for name in WAITING} if self.windows.held else {}
        return super().state_dict() | {"schedule": self._schedule(), "waiting": waiting}

    def elastic_steps(self) -> Steps[dict[str, Any]]:
        """What waits differs between ranks; what counts for the run is its mean, which rank 0 saves."""
        state = yield from super().elastic_steps()
        waiting = {name: getattr(self, name).clone() for name in WAITING} if self.windows.held else {}
        message = one_message(self.flat.numel, codec_named("none"), self.transport.size, name="window")
        for mean in waiting.values():
            yield from reduce_message(
                mean, None, message=message, transport=self.transport, workspace=self.workspace, sequence=self.next_sequence()
            )
        return state | {"schedule": self._schedule(), "waiting": waiting if self.transport.rank == 0 else {}}

    def _schedule(self) -> dict[str, Any]:
        return self.windows.state() | {"facts": self.facts.as_dict(), "carried": list(self.carried)}

    @torch.no_grad()
    def load_state_dict(self, *states: dict[str, Any]) -> None:
        super().load_state_dict(*states)
        schedule = states[0]["schedule"]
        self.windows.load(schedule)
        self.facts, self.carried = Facts.of(schedule["facts"]), list(schedule["carried"])
        waiting: dict[str, torch.Tensor] = next((state["waiting"] for state in states if state["waiting"]), {})
        for name in WAITING:
            buffer = getattr(self, name)
            buffer.copy_(waiting[name]) if name in waiting else buffer.zero_()
