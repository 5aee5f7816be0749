"""MASHA (arXiv 2110.03313): min-max games and other variational inequalities, compressed both ways.

    z½ = τ·z + (1 − τ)·w − γ·F(w)        c = mean of Q( γ·(F_i(z½) − F_i(w)) )        z ← z½ − c
    with probability 1 − τ, the same coin on all ranks:  w ← z, and F(w) := exact mean of F_i(w)

F_i is this rank's operator, what the closure leaves in ``grad``, with the sign turned in groups
that maximise. w is an anchor whose F(w) all ranks know. An unbiased codec, which keeps no residual,
makes it MASHA1; a biased one, with error feedback at both ends, MASHA2. Residuals are
displacements, so they stay right when γ changes. With Q the identity and τ = 0 it is the
extragradient method.
"""

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch

from commpress.codecs import Codec, Policy, policy_of
from commpress.collectives.allreduce import Outcome, settle
from commpress.collectives.buckets import Span
from commpress.collectives.exchange import Exchanges
from commpress.collectives.residual_state import check_fit, exact_state, residuals_of
from commpress.collectives.scalars import gathered
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, StateMismatch
from commpress.optim.fixed_groups import FixedGroups
from commpress.optim.optimizer import checksum, report_skipped, require_same
from commpress.torch_private import untraced
from commpress.work import Steps

KEYS = ("anchor", "operator", "mean_operator")  # w, F_i(w) and F(w)


class Masha(FixedGroups):
    """``Masha([{"params": x}, {"params": y, "maximize": True}], lr=0.3, tau=0.75)``; ``step`` needs
    a closure.

    The closure clears the gradients, computes the loss of all of this rank's data, calls backward
    and returns the loss. It is called once in a step, twice where the anchor moves. Parameters
    begin alike on all ranks. Do not wrap models in DistributedDataParallel, which would average
    gradients before they are compressed.

    - ``lr``: γ. About √(1 − τ) / L for operators of Lipschitz constant L, less for coarser codecs.
    - ``tau``: τ, the share of steps that only send compressed differences. Exact ones cost as much
      as the others together where 1 − τ is one over the factor by which the codec compresses.
    - ``codec``, ``min_numel``, ``exclude``: what travels how, as for ``commpress.compress``.
    - ``on_nonfinite``: "skip" leaves out a step whose operator is not finite on some rank, on all
      of them; "raise" raises.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-1,
        tau: float = 0.75,
        *,
        maximize: bool = False,
        codec: str | Codec | Policy = "topk-16",
        min_numel: int = 256,
        exclude: tuple[str, ...] = (),
        on_nonfinite: Literal["skip", "raise"] = "skip",
        process_group: Any = None,
        transport: Transport | None = None,
        timeout: timedelta | None = None,
        seed: int = 0,
    ) -> None:
        if not float(lr) >= 0:
            raise InvalidArgument(f"lr is {lr!r}, expected a number of at least 0")
        if not 0 <= tau < 1:
            raise InvalidArgument(
                f"tau is {tau!r}, expected a number of at least 0 and below 1: with 1 the anchor "
                "never moves"
            )
        policy = policy_of(codec, min_numel=min_numel, exclude=exclude)
        self.tau, self.seed = tau, seed
        super().__init__(
            params,
            {"lr": lr, "maximize": maximize},
            "averages all that it trains",
            on_nonfinite=on_nonfinite,
            process_group=process_group,
            transport=transport,
            timeout=timeout,
        )
        flat = self._flat
        size, workspace = self.channel.size, self.channel.workspace
        self.exchanges = Exchanges(
            policy if size > 1 else policy_of("none"), size, workspace, seed=seed
        )
        self._evaluated = False  # whether the operators at the anchor are known
        self._anchor, self._operator, self._mean = (flat.new() for _ in KEYS)
        self._before, self._work, self._next = (flat.new() for _ in range(3))
        self._hold(**dict(zip(KEYS, (self._anchor, self._operator, self._mean), strict=True)))

    # ------------------------------------------------------------ one step

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            raise InvalidArgument(
                "step was called without a closure: MASHA asks for gradients at points of its own"
            )
        losses: list[Any] = []
        taken = self.channel.run(self.steps(lambda: losses.append(closure())))
        if not taken:
            report_skipped(
                self.steps_done, self.counters.skipped_steps, self.on_nonfinite, self.channel.rank
            )
        return losses[0]

    @torch.no_grad()
    def steps(self, closure: Callable[[], Any]) -> Steps[bool]:
        """One step as an algorithm that may wait; returns whether it was taken, the same on every
        rank."""
        self._flat.check()
        outcomes: list[Outcome] = []
        taken, sent, exact = False, self.channel.sent_bytes, self.counters.exact_bytes
        self._keep(self._before)
        try:
            taken = yield from self._advance(closure, outcomes)
        finally:
            settle(outcomes, taken=taken)
            if not taken:
                self._put(self._before)
        sent = self.channel.sent_bytes - sent - (self.counters.exact_bytes - exact)
        self.counters.step("compressed", taken, sent, self._flat.numel, self.channel.size)
        self.steps_done += taken
        return taken

    def _advance(self, closure: Callable[[], Any], outcomes: list[Outcome]) -> Steps[bool]:
        flat = self._flat
        if not self._evaluated and self.steps_done == 0:
            numbers, sequence = [checksum(flat.weights), self.steps_done], self.channel.take()
            options: dict[str, Any] = {"transport": self.channel.transport, "device": flat.device}
            require_same(
                (yield from gathered(numbers, sequence=sequence, **options)), self.steps_done
            )
            self._keep(self._anchor)
        if not self._evaluated:
            self._put(self._anchor)
            self._evaluate(closure, self._operator)
            self._mean.copy_(self._operator)
            self._evaluated = yield from self._reduce(self._mean, outcomes, exact=True)
            if not self._evaluated:
                return False
        for group, i in self._each():
            before, anchor, mean = (
                flat.view(b, i) for b in (self._before, self._anchor, self._mean)
            )
            flat.weights[i].copy_(anchor.lerp(before, self.tau).sub_(mean, alpha=group["lr"]))
        flat.publish()
        self._evaluate(closure, self._work)
        self._work -= self._operator
        for group, i in self._each():
            flat.view(self._work, i).mul_(group["lr"])
        if not (yield from self._reduce(self._work, outcomes)):
            return False
        for i, change in enumerate(flat.views(self._work)):
            flat.weights[i].sub_(change)
        flat.publish()
        if random.Random(f"{self.seed} {self.steps_done}").random() >= self.tau:
            self._evaluate(closure, self._next)
            self._work.copy_(self._next)
            if not (yield from self._reduce(self._work, outcomes, exact=True)):
                return False
            self._keep(self._anchor)
            self._operator.copy_(self._next)
            self._mean.copy_(self._work)
        return True

    def _evaluate(self, closure: Callable[[], Any], out: torch.Tensor) -> None:
        """This rank's operator where the parameters are now."""
        with torch.enable_grad():
            closure()
        for group, i in self._each():
            gradient, view = self._flat.gradient(i), self._flat.view(out, i)
            if gradient is None:
                view.zero_()
            else:
                torch.mul(gradient, -1.0 if group["maximize"] else 1.0, out=view)

    def _reduce(
        self, buffer: torch.Tensor, outcomes: list[Outcome], *, exact: bool = False
    ) -> Steps[bool]:
        """The mean of ``buffer`` in its place; whether it is finite, the same on every rank."""
        flat, before = self._flat, self.channel.sent_bytes
        spans = [Span(name, *place) for name, place in zip(flat.names, flat.places, strict=True)]
        shapes = [p.shape for p in flat.parameters]
        exchange = self.exchanges.of(
            tuple(flat.names), lambda: (spans, shapes), flat.device, exact=exact
        )
        sequence, key = (
            self.channel.take(exchange.sequences),
            self.seed * 1_000_003 + self.steps_done,
        )
        more = yield from exchange.steps(self.channel, buffer, sequence=sequence, key=key)
        outcomes += more
        if exact:
            self.counters.exact_rounds += 1
            self.counters.exact_bytes += self.channel.sent_bytes - before
        return all(outcome.finite for outcome in more)

    def _keep(self, buffer: torch.Tensor) -> None:
        for view, weight in zip(self._flat.views(buffer), self._flat.weights, strict=True):
            view.copy_(weight)

    def _put(self, buffer: torch.Tensor) -> None:
        for view, weight in zip(self._flat.views(buffer), self._flat.weights, strict=True):
            weight.copy_(view)
        self._flat.publish()

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: every rank saves and loads its own, or on another number of ranks
        those of all."""
        residuals = exact_state(self.exchanges.residuals, self.channel.transport, self.steps_done)
        head = {"optimizer": "Masha", "evaluated": self._evaluated}
        return super().state_dict() | {"commpress": head | residuals | self.exchanges.choices()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *others: dict[str, Any]) -> None:
        """From this rank's ``state_dict``, bit for bit, or from those of all ranks; load the
        model's weights too.

        On another number of ranks the next step asks for the operators at the anchor again, and
        sends them exactly.
        """
        states = [state_dict, *others]
        parts = [state.get("commpress", {}) for state in states]
        if any(part.get("optimizer") != "Masha" for part in parts):
            raise StateMismatch(
                "expected what Masha.state_dict() gave, of this rank or of all. "
                "torch.distributed.checkpoint.state_dict leaves a part of it out: save it with "
                "torch.save, on each rank its own"
            )
        rank, size = self.channel.rank, self.channel.size
        step, residuals = residuals_of(parts, self.channel.transport)
        flat, mine = (
            self._flat,
            [i for i, part in enumerate(parts) if (part["rank"], part["size"]) == (rank, size)],
        )
        check_fit(
            residuals,
            {name: numel for name, (_, numel) in zip(flat.names, flat.places, strict=True)},
        )
        state, part = (every[mine[0] if mine else 0] for every in (states, parts))
        self._take_state(state)
        self._evaluated = part["evaluated"] and bool(mine)
        self.steps_done = step
        self.exchanges.load_choices(part)
        self.exchanges.residuals.load(residuals)
        flat.publish()
