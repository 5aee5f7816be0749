"""1-bit Adam with its state partitioned over the ranks (ZeRO-1): master weights, variance and momentum of 1/P each.

Each rank owns one row of every piece (``owners``), the row that it reduces. A compressed step of a frozen tensor (``lanes``):

    to the owner     what is new in the momentum, (1 − β1)·g_i/s + e_i, in one bit; e_i keeps the rest    (all-to-all)
    at the owner     m ← β1·m + s·mean        w ← Adam's step from m and the frozen v
    to everybody     w − x in one bit, x ← x + what arrived                                               (all-gather)

Live tensors send gradients in eight bits, and their owner takes Adam's step; exact steps send gradients to the owner and w to
everybody as they are.

Note: only what is new. The owner has β1·m already, so nothing is lost and nobody else needs m.

Note: no second residual. What the all-gather could not say is w − x itself, the gap between master weights and the
parameters that all ranks hold; the next step sends it.

Note: what everybody knows of the variance. s is about √v̂, which only the owner has. Divided by it all elements are of one
size, as one bit for each and one scale for a block assume; else an element with a small variance would get its neighbours'
magnitude and move by that over its own √v. So owners tell v to everybody, in bfloat16, whenever it has moved and is to be
divided by.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from commpress.codecs import Codec, Policy, codec_named, policy_of
from commpress.codecs.family import EXACT
from commpress.codecs.policy import Same
from commpress.collectives.allreduce import settle
from commpress.collectives.consensus import AgreeOver
from commpress.collectives.scalars import gathered
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, NonFiniteGradient
from commpress.feedback import check_feedback
from commpress.kernels.adam import adam_arithmetic
from commpress.optim import sharded_checkpoint
from commpress.optim.agreement import Clipping
from commpress.optim.channel import Channel
from commpress.optim.flat import Flat
from commpress.optim.lanes import Lanes
from commpress.optim.onebit_adam import check_defaults
from commpress.optim.optimizer import Round
from commpress.optim.owners import Owned, Owners
from commpress.optim.stepping import SteppingOptimizer
from commpress.schedules import AfterSteps, Facts, Freeze, WhenStable, pruned
from commpress.torch_private import adam
from commpress.work import Steps

log = logging.getLogger("commpress")


class ShardedOneBitAdam(SteppingOptimizer):
    """AdamW: per parameter 12/P bytes of state, 2 of what all know of the variance and 4 of residual on each rank.

    Options are those of ``OneBitAdam``. All ranks hold the same parameters after each step. Gradients must be local: under
    DistributedDataParallel call ``commpress.overlap(ddp, optimizer)``, which keeps it from averaging them.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int | Literal["auto"] | Freeze = "auto",
        codec: str | Codec | Policy = "sign",
        spiky_codec: str | Codec | None = "fp8",
        exact_codec: str | Codec = "none",
        min_numel: int = 256,
        variance_floor: float = 1e-3,
        max_grad_norm: float | None = None,
        error_feedback: bool = True,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        process_group: Any = None,
        agree_over: AgreeOver | None = None,
        transport: Transport | None = None,
        timeout: timedelta | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_defaults(defaults)
        self.freeze: Freeze
        if warmup_steps == "auto":
            self.freeze = WhenStable(window=max(round(1 / (1 - betas[1])), 1))
        else:
            self.freeze = AfterSteps(warmup_steps) if isinstance(warmup_steps, int) else warmup_steps
        check_feedback(error_feedback)
        if on_nonfinite not in ("skip", "raise"):
            raise InvalidArgument(f"on_nonfinite is {on_nonfinite!r}, expected 'skip' or 'raise'")
        if agree_over is not None and (max_grad_norm is not None or not isinstance(self.freeze, AfterSteps)):
            raise InvalidArgument(
                f"agree_over is given with max_grad_norm {max_grad_norm!r} and warmup_steps {warmup_steps!r}: groups that "
                "communicate apart would each clip by a factor of their own, or freeze at a step of their own. Leave "
                "max_grad_norm out and pass a number of steps"
            )
        self.exact_codec, self.on_nonfinite, self.seed = codec_named(exact_codec), on_nonfinite, seed
        finer = None if spiky_codec is None else codec_named(spiky_codec)
        self.lanes = Lanes(policy_of(codec, min_numel=min_numel), finer, self.exact_codec, min_numel, variance_floor)
        self.clipping, self.facts = Clipping(max_grad_norm), Facts()
        self.steps_done = 0
        self.frozen_at: int | None = None
        self.flat: Flat | None = None
        super().__init__(params, defaults)
        self.connect(transport, process_group, timeout, agree_over, grad_scaler)
        self._lay_out(error_feedback)

    def _lay_out(self, error_feedback: bool) -> None:
        self.flat = flat = Flat(*self.named_parameters())
        self.kernels = adam_arithmetic(flat.device)
        self.work = flat.new()
        self.known = torch.zeros(flat.numel, dtype=torch.bfloat16, device=flat.device)  # v, as far as it is to be divided by
        self.lanes.lay_out(flat, list(self.groups()), self.known, self.transport.size)
        self.full = self._owners(policy_of(self.exact_codec, min_numel=256), feedback=error_feedback)
        self.quantized = self._owners(self.lanes, feedback=error_feedback)
        self.rounded = self._owners(policy_of("bf16"), feedback=False)
        self.counters.shares = self.quantized.shares
        self.parts: list[list[Owned]] = [[] for _ in flat.parameters]
        for part in self.full.owned():
            self.parts[part.parameter].append(part)
        self.master, self.momentum, self.variance, self.mean = (
            torch.zeros(self.full.numel, device=flat.device) for _ in range(4)
        )
        for p, w in self.own(range(len(flat.parameters)), "master"):
            w.copy_(p)
        self.unknown = False  # whether ``known`` is out of date and about to be divided by
        self.missing = ""  # what an incomplete state lacks

    def _owners(self, policy: Policy, *, feedback: bool) -> Owners:
        return Owners(self._flat, policy, self.transport, self.workspace, feedback=feedback)

    @property
    def _flat(self) -> Flat:
        assert self.flat is not None
        return self.flat

    def groups(self) -> Iterator[tuple[dict[str, Any], range]]:
        edges = np.cumsum([0, *(len(group["params"]) for group in self.param_groups)]).tolist()
        for group, (begin, end) in zip(self.param_groups, pairwise(edges), strict=True):
            yield group, range(begin, end)

    def own(self, indices: Iterable[int], *names: str) -> Iterator[tuple[torch.Tensor, ...]]:
        """Of each piece of these parameters, the own elements of the parameter and of the named row buffers."""
        buffers = [getattr(self, name) for name in names]
        for i in indices:
            p = self._flat.parameters[i].detach().reshape(-1)
            for _, begin, numel, at in self.parts[i]:
                yield p[begin : begin + numel], *(b[at : at + numel] for b in buffers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.flat is not None:
            raise InvalidArgument(
                "add_param_group after construction: rows are dealt to the ranks already. Pass all groups to the constructor, "
                f"or make a second {type(self).__name__} for the new parameters"
            )
        super().add_param_group(param_group)

    @property
    def max_grad_norm(self) -> float | None:
        return self.clipping.max_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        if norm is not None and self.consensus is not None:
            raise InvalidArgument(f"max_grad_norm is {norm!r}, expected None: the optimizer has agree_over, see there")
        self.clipping = Clipping(norm)

    # ------------------------------------------------------------ one step

    def steps(self) -> Steps[bool]:
        sharded_checkpoint.check_complete(self)
        self._flat.check()
        self.facts.see(self.steps_done, max(float(group["lr"]) for group in self.param_groups))
        kind = self.round()
        if self.unknown and kind is not Round.EXACT:  # a state was loaded
            yield from self.learn()
        if kind is Round.LOCAL:
            taken = yield from self._apart()
        else:
            taken = yield from self._together(kind)
        self.lanes.remember(taken)
        if taken:
            self.steps_done += 1
            yield from self.after(kind)
            if self.unknown and self.round() is not Round.EXACT:
                yield from self.learn()
        self.counters.step(kind.value, taken, self.sent_bytes(), self._flat.numel, self.transport.size)
        if not taken:
            self._say_skipped()
        return taken

    def round(self) -> Round:
        return Round.EXACT if self.frozen_at is None else Round.COMPRESSED

    def _apart(self) -> Steps[bool]:
        if self.consensus is not None:
            squares = self.kernels.square_sum(self._flat.segments(range(len(self._flat.parameters))))
            if not (yield from self.consensus.agreed(bool(np.isfinite(squares)), self._flat.device)):
                return False
        self.local()
        return True

    def local(self) -> None:
        """A step without communication: there is none here."""

    def _together(self, kind: Round) -> Steps[bool]:
        exact = kind is Round.EXACT
        owners = self.full if exact else self.quantized
        gain = yield from self.clipping.agreed(self, self.gain(), exact=exact)
        self.prepare(kind, gain)
        outcomes, asked = yield from owners.gather_means(
            self.work, self.mean, key=self._key(), sequence=self._sequences(owners), asks=self.asks()
        )
        taken = all(outcome.finite for outcome in outcomes)
        if taken and exact:
            taken = yield from self._clip()
        if self.consensus is not None:
            taken = yield from self.consensus.agreed(taken, self._flat.device)
        settle(outcomes, taken=taken)
        if taken:
            self.update(kind)
            yield from self._publish(owners, whole=exact and self.exact_codec.lossless)
            if asked:
                yield from self._talk()
        return taken

    def _publish(self, owners: Owners, *, whole: bool) -> Steps[None]:
        """Parameters := master weights, or x := x + w − x as far as that can be said."""
        self.mean.zero_()
        for i in range(len(self.parts)):
            most = torch.inf if whole else self.longest(i)
            for x, w, change in self.own([i], "master", "mean"):
                change.copy_(w) if whole else torch.sub(w, x, out=change).clamp_(-most, most)
        yield from owners.spread(self.mean, self.work, key=self._key(), sequence=self._sequences(owners))
        for i, p in enumerate(self._flat.parameters):
            (p.copy_ if whole else p.add_)(self._flat.view(self.work, i))

    def longest(self, i: int) -> float:
        """The longest way that parameters go in one step: Adam's own bound. What is more of w − x goes in the next."""
        group = self.lanes.group(i)
        rate = float(group["lr"]) or self.facts.peak_lr
        return self.lanes.bound(i) * rate / (1 - group["betas"][0] ** (self.steps_done + 1))

    def _clip(self) -> Steps[bool]:
        if self.clipping.max_norm is None:
            return True
        squares = sum(float(mean.square().sum(dtype=torch.float64)) for _, mean in self.own(range(len(self.parts)), "mean"))
        every = yield from gathered(
            [squares], transport=self.transport, sequence=self.next_sequence(), device=self._flat.device
        )
        return self.clipping.clip(self, self.mean, norm=float(every.sum()) ** 0.5)

    def _key(self) -> int:
        return self.seed * 1_000_003 + self.steps_done

    def _sequences(self, owners: Owners) -> int:
        """The first of as many as the owners have messages."""
        self._sequence += len(owners.rows)
        return self._sequence - len(owners.rows)

    # ------------------------------------------------------------ what travels and what becomes of it

    def prepare(self, kind: Round, gain: float) -> None:
        """work := what goes to the owners."""
        live, frozen = self.lanes.part(range(len(self._flat.parameters)))
        for i in range(len(self._flat.parameters)) if kind is Round.EXACT else live:
            g, into = self._flat.gradient(i), self._flat.view(self.work, i)
            into.zero_() if g is None else torch.mul(g, gain, out=into)
        if kind is Round.COMPRESSED:
            self.cut(frozen, gain, self.work)
            for i in frozen:
                self._flat.view(self.work, i).div_(self.lanes.divisor(i)).mul_(1 - self.lanes.group(i)["betas"][0])

    def cut(self, indices: Sequence[int], gain: float, out: torch.Tensor) -> None:
        """out := gain·g within ±κ·s. What is not finite stays as it is, for all to see."""
        counts = torch.zeros(len(indices), dtype=torch.int64)
        for number, i in enumerate(indices):
            g, into = self._flat.gradient(i), self._flat.view(out, i)
            if g is None:
                into.zero_()
                continue
            torch.mul(g, gain, out=into)
            k, low, eps, reach = self.lanes.divisors([i])[0].tolist()
            root = (self._flat.view(self.known, i).float() * k).sqrt_()
            counts[number] = (into.abs() > reach * (root + eps)).sum()
            most = root.clamp_(min=low).add_(eps).mul_(reach)
            into.copy_(torch.where(into.isfinite(), torch.minimum(torch.maximum(into, -most), most), into))
        self.lanes.see(indices, counts)

    def update(self, kind: Round) -> None:
        """Momentum, variance and master weights of the own rows, from ``mean``."""
        live, frozen = self.lanes.part(range(len(self._flat.parameters)))
        self.adam(range(len(self._flat.parameters)) if kind is Round.EXACT else live)
        if kind is Round.COMPRESSED:
            for i in frozen:
                group = self.lanes.group(i)
                beta1, lr = group["betas"][0], float(group["lr"])
                correction = 1 - beta1 ** (self.steps_done + 1)
                for part in self.parts[i]:
                    m = self.row(self.momentum, part)
                    m.mul_(beta1).addcmul_(self.row(self.mean, part), self.unit(part))
                    self.descend(part, m, step=lr / correction, keep=1 - lr * group["weight_decay"])
                    self.bound(part, m)

    def adam(self, indices: Iterable[int]) -> None:
        """What Adam does with mean gradients: torch's own fused kernel."""
        taken = set(indices)
        for group, every in self.groups():
            rows = [part for i in every if i in taken for part in self.parts[i]]
            if not rows:
                continue
            w, g, m, v = ([self.row(b, part) for part in rows] for b in (self.master, self.mean, self.momentum, self.variance))
            adam(
                w, g, m, v, [], [torch.tensor(float(self.steps_done)) for _ in rows], fused=True, amsgrad=False,
                beta1=group["betas"][0], beta2=group["betas"][1], lr=float(group["lr"]), weight_decay=group["weight_decay"],
                eps=group["eps"], maximize=False, decoupled_weight_decay=True,
            )  # fmt: skip
        self.lanes.count(taken, self.steps_done + 1)

    def row(self, buffer: torch.Tensor, part: Owned) -> torch.Tensor:
        return buffer[part.at : part.at + part.numel]

    def root(self, part: Owned) -> torch.Tensor:
        """√v̂ of what is owned."""
        correction = self.lanes.correction(part.parameter, int(self.lanes.variance_steps[part.parameter]))
        return (self.row(self.variance, part) / correction).sqrt_()

    def unit(self, part: Owned) -> torch.Tensor:
        """s as whoever sent divided by it."""
        return self.lanes.divisor(part.parameter).view(-1)[part.begin : part.begin + part.numel]

    def descend(self, part: Owned, m: torch.Tensor, *, step: float, keep: float) -> None:
        """w ← keep·w − step·m/s."""
        _, low, eps, _ = self.lanes.divisors([part.parameter])[0].tolist()
        self.row(self.master, part).mul_(keep).addcdiv_(m, self.root(part).clamp_(min=low).add_(eps), value=-step)

    def bound(self, part: Owned, m: torch.Tensor) -> None:
        """m within Adam's own bound where it is noise: whoever divides it by the true √v does no harm."""
        low, root = float(self.lanes.divisors([part.parameter])[0, 1]), self.root(part)
        most = torch.where(root < low, root * self.lanes.bound(part.parameter), torch.inf)
        m.copy_(torch.minimum(torch.maximum(m, -most), most))

    # ------------------------------------------------------------ from lane to lane

    def after(self, kind: Round) -> Steps[None]:
        """Schedules, once a step is taken."""
        step = self.steps_done
        if self.frozen_at is not None:
            self.unknown |= self.due()
            return
        if self.freeze.probes(step):
            every = yield from gathered(
                [float(self.variance.sum(dtype=torch.float64))], transport=self.transport, sequence=self.next_sequence(),
                device=self._flat.device,
            )  # fmt: skip
            norm = float(every.sum()) / (1 - self.param_groups[0]["betas"][1] ** step)
            self.facts.norms = pruned([*self.facts.norms, (step, norm)], getattr(self.freeze, "window", 0))
        if self.freeze.freezes(step, self.facts):
            self.frozen_at, self.unknown = step, True
            owed = self.full.residuals.every()
            self.quantized.residuals.load({key: tuple(r.clone() for r in own) for key, own in owed.items()})
            self.full.residuals.load({})

    @property
    def patience(self) -> int:
        """Steps that a variance takes to forget what it was."""
        return max(round(2 / (1 - max(group["betas"][1] for group in self.param_groups))), 1)

    def learn(self) -> Steps[None]:
        """known := the variance of all owners, and what follows from it."""
        yield from self.rounded.spread(self.variance, self.work, key=0, sequence=self._sequences(self.rounded))
        self.known.copy_(self.work)
        self.unknown = False
        self.sort()

    def sort(self) -> None:
        """Live tensors whose variance may stand still freeze. What is owed of them is owed in units of p."""
        live, frozen = self.lanes.part(range(len(self._flat.parameters)))
        for i in frozen:
            self.lanes.divide(i)
        rested = [i for i in live if not self.lanes.thawed_at[i] or self.steps_done - self.lanes.thawed_at[i] >= self.patience]
        ready = [i for i in rested if self.lanes.may_freeze(i)] if self.due() else []
        self.lanes.freeze(ready, self.steps_done)
        for i in ready:
            self.quantized.scale(self._flat.names[i], (1 - self.lanes.group(i)["betas"][0]) / self.lanes.divisor(i).float())
        self.quantized.lay_out()

    def due(self) -> bool:
        """Whether tensors may freeze now: not because a state was loaded."""
        return self.frozen_at is not None and (self.steps_done - self.frozen_at) % max(self.patience // 8, 1) == 0

    def asks(self) -> bool:
        """Whether this rank wants tensors to wake up."""
        return bool(self.lanes.waking().any())

    def _talk(self) -> Steps[None]:
        """Which tensors are to wake up, as all ranks see it."""
        every = yield from gathered(
            self.lanes.waking().tolist(), transport=self.transport, sequence=self.next_sequence(), device=self._flat.device
        )
        indices = np.flatnonzero(every.any(axis=0)).tolist()
        if indices:
            yield from self.wake(indices)
            self.counters.woken_tensors += len(indices)

    def wake(self, indices: Sequence[int]) -> Steps[None]:
        """One exact message brings what is owed into momentum; then these are live, and nothing is owed."""
        step = self.steps_done + 1
        log.warning(
            "step %d: gradients are far beyond the frozen variance in %s. It moves on in exact steps from here, and freezes "
            "again after %d of them",
            step, ", ".join(map(self.lanes.name, indices)), self.patience,
        )  # fmt: skip
        for i in indices:
            owed = self._flat.view(self.work, i).view(-1).zero_()
            self.quantized.residuals.pay(self._flat.names[i], owed, self.transport.rank, self.transport.size)
        exact = Channel(self._flat, Same(EXACT), self.transport, feedback=False)
        sequence = self._sequence
        self._sequence += exact.count(indices, self.workspace)
        yield from exact.reduce(self.work, indices, workspace=self.workspace, sequence=sequence, key=0)
        for i in indices:
            before, owed = self.lanes.correction(i, int(self.lanes.variance_steps[i])), self._flat.view(self.work, i).view(-1)
            for part in self.parts[i]:
                m, most = self.row(self.momentum, part), self.root(part).mul_(self.lanes.bound(i))
                m.addcmul_(owed[part.begin : part.begin + part.numel], self.unit(part))
                m.copy_(torch.minimum(torch.maximum(m, -most), most))
                self.row(self.variance, part).mul_(self.lanes.correction(i, step) / before)
        self.lanes.thaw(indices, step)
        self.lanes.count(indices, step)
        self.quantized.lay_out()

    def _say_skipped(self) -> None:
        if self.on_nonfinite == "raise":
            raise NonFiniteGradient(
                f"the gradients of step {self.steps_done} hold NaN or infinity on some rank. Nothing was changed. Look for the "
                "cause in the loss, or pass on_nonfinite='skip'."
            )
        count = self.counters.skipped_steps
        if count <= 3 or count % 100 == 0:
            log.warning(
                "step %d was skipped on all ranks: gradients held NaN or infinity on some rank (%d so far)",
                self.steps_done, count,
            )  # fmt: skip

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for a bitwise resume at the same world size; parameters come with the model."""
        return super().state_dict() | {"commpress": self.rank_state()}

    def rank_state(self) -> dict[str, Any]:
        return sharded_checkpoint.exact(self)

    def elastic_steps(self) -> Steps[dict[str, Any]]:
        part = yield from sharded_checkpoint.elastic(self)
        return super().state_dict() | {"commpress": part}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *others: dict[str, Any]) -> None:
        """From this rank's ``state_dict`` or from all ranks' ``elastic_state_dict``s; load the model first."""
        sharded_checkpoint.load(self, [state_dict, *others])

    @torch.no_grad()
    def load_rank_state(self, part: dict[str, Any]) -> None:
        """From the ``commpress`` entry of this rank's own ``state_dict``, after loading another rank's."""
        sharded_checkpoint.load_rank(self, part)

    def owed(self) -> float:
        """‖what this rank's compression owes‖ / ‖momentum‖, both as steps; other ranks' rows are taken to be like the own."""
        left = sum(float(sent.square().sum()) for _, sent, _ in self.quantized.residuals.places())
        rows = (part for parts in self.parts for part in parts)
        own = sum(float((self.row(self.momentum, part) / self.unit(part)).square().sum()) for part in rows)
        return (left / (self.transport.size * own)) ** 0.5 if own else 0.0

    def schedule_state(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at}

    def resume(self, schedule: dict[str, Any]) -> None:
        self.frozen_at = schedule["frozen_at"]

    def waiting(self) -> dict[str, torch.Tensor]:
        """Flat buffers that differ between ranks; what counts for the run is their mean."""
        return {}
