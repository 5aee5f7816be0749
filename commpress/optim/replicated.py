"""Optimizers whose whole state is on every rank: momentum, variance and parameters side by side, as
torch's Adam has them."""

from abc import abstractmethod
from collections.abc import Callable, Container, Sequence
from math import isfinite
from typing import Any

import torch

from commpress.codecs import policy_of
from commpress.collectives.allreduce import Outcome
from commpress.collectives.change import Change
from commpress.collectives.exchange import Exchange, Exchanges
from commpress.collectives.handover import Standing, cannot_follow
from commpress.optim import checkpoint
from commpress.optim.columns import alike
from commpress.optim.flat import Flat
from commpress.optim.optimizer import CompressedOptimizer, RoundKind
from commpress.torch_private import ENDLESS, adam
from commpress.work import Steps


class ReplicatedOptimizer(CompressedOptimizer):
    """Rounds in which every rank reduces what it would send and takes the same step from the
    mean."""

    full: Exchanges
    quantized: Exchanges
    states = checkpoint
    momentum: torch.Tensor
    variance: torch.Tensor
    _taken: torch.Tensor  # steps of each parameter, as torch's Adam counts them

    # ------------------------------------------------------------ what subclasses say

    @abstractmethod
    def prepare(
        self,
        group: dict[str, Any],
        indices: Sequence[int],
        gradients: dict[int, torch.Tensor] | None,
        gain: float,
    ) -> None:
        """Write into ``work`` what a compressed round sends of these parameters; change nothing
        else."""

    @abstractmethod
    def apply(self, kind: RoundKind) -> None:
        """Take the mean, which is in ``work``, over into momentum and parameters."""

    def local(self, gain: float) -> None:
        """A step without communication, for those whose ``round`` may say LOCAL."""
        raise TypeError(
            f"{type(self).__name__}.round() said LOCAL: the class must have local(gain), a step "
            "that sends nothing"
        )

    def allocate(self, had: int) -> None:
        """Make the buffers that ``_place`` does not know of; the first ``had`` parameters keep what
        they have in them."""

    # ------------------------------------------------------------ one step

    def before(self, kind: RoundKind) -> Steps[None]:
        """Wait for what backward has started, before anybody else sends."""
        if self.bucket_rounds is not None:
            yield from self.bucket_rounds.wait()
        trained = {i for _, at in self.groups() for i in at}
        for i in range(len(self._works)):
            if i not in trained:
                self._works[i].zero_()

    def take(self, kind: RoundKind) -> Steps[bool]:
        taken = True
        # nobody else asks
        if self.consensus is not None and (kind is RoundKind.LOCAL or self.channel.size == 1):
            finite = isfinite(self.squares()) and isfinite(self.own_squares)
            taken = yield from self.consensus.agreed(finite, self._flat.device)
        if not taken:
            return False
        if kind is RoundKind.LOCAL:
            self.local(self.gain())
        elif self.channel.size == 1:
            taken = yield from self._alone()
        else:
            taken = yield from self._together(kind)
        if taken:
            self._flat.publish()
            self._taken += 1
        return taken

    def _alone(self) -> Steps[bool]:
        """World size 1: Adam, on the gradients as they are."""
        if self.overflowed or not isfinite(self.squares()) or not isfinite(self.own_squares):
            return False
        every = range(len(self._flat.parameters))
        gradients, gain = [self._flat.gradient(i) for i in every], self.gain()
        if gain != 1.0 or self.clipping.max_norm is not None or self.columns is not None:
            for _, at in self.groups():
                self.take_gradients(at, None, gain)
            if not (yield from self._clip()):
                return False
            gradients = list(self._works)
            yield from self.measure(RoundKind.EXACT)
        self.exact([self._zero(i) if g is None else g for i, g in enumerate(gradients)])
        return True

    def _clip(self) -> Steps[bool]:
        """Clip the mean gradient in ``work``; False if its norm is not finite."""
        norm = None
        if self.columns is not None and self.clipping.max_norm is not None:
            norm = (yield from self.squares_of_mesh(self._works)) ** 0.5
        return self.clipping.clip(self, self.work, norm)

    def measure(self, kind: RoundKind) -> Steps[None]:
        """Ask the ranks with other shards for what ``apply`` and ``exact`` must know of whole
        tensors."""
        yield from ()

    def _zero(self, i: int) -> torch.Tensor:
        return torch.zeros_like(self._flat.weights[i])

    def _together(self, kind: RoundKind) -> Steps[bool]:
        outcomes: list[Outcome] = []
        left = {i for _, at in self.groups() for i in at}
        if self.bucket_rounds is not None:
            outcomes, indices = yield from self.bucket_rounds.finish(kind)
            left -= indices
        if left:
            gain = yield from self.clipping.agreed(self, self.gain(), exact=kind is RoundKind.EXACT)
            for group, at in self.groups():
                self.begin(kind, group, [i for i in at if i in left], gain)
            outcomes = outcomes + (yield from self.reduce(kind, sorted(left)))
        finite = all(outcome.finite for outcome in outcomes)
        # shards are clipped together, or not at all
        if kind is RoundKind.EXACT and (finite or self.columns is not None):
            finite = (yield from self._clip()) and finite
        if self.columns is not None:
            yield from self.measure(kind)
        taken = yield from self.settled(outcomes, finite)
        if taken:
            self.apply(kind)
        return taken

    def begin(
        self,
        kind: RoundKind,
        group: dict[str, Any],
        indices: Sequence[int],
        gain: float,
        gradients: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """Write what a round sends of ``indices``, all of one group, into ``work``; ``gradients``
        if not those in ``grad``."""
        if kind is RoundKind.EXACT:
            self.take_gradients(indices, gradients, gain)
        else:
            self.prepare(group, indices, gradients, gain)

    def take_gradients(
        self, indices: Sequence[int], gradients: dict[int, torch.Tensor] | None, gain: float
    ) -> None:
        """work := gain·g."""
        self.kernels.scaled(self._flat.segments(indices, gradients), self.work, gain=gain)

    def add_known(self, indices: Sequence[int], factor: float) -> None:
        """work := work + factor·m/s, of tensors that travel whole. All ranks know m, and need not
        be told what follows from it: a product of low rank, or few elements, have room for what is
        new alone."""
        for i in indices:
            if self.tensors.travels_whole(i):
                self._works[i].addcdiv_(self._momenta[i], self.tensors.divisor(i), value=factor)

    def exchange(self, kind: RoundKind, indices: Sequence[int]) -> Exchange:
        """The exchange by which these parameters cross the channel in a round of this kind."""
        exchanges, shapes = (
            self.full if kind is RoundKind.EXACT else self.quantized,
            self._flat.shapes,
        )
        return exchanges.of(
            tuple(indices),
            lambda: (self.spans(indices), [shapes[i] for i in indices]),
            self._flat.device,
        )

    def reduce(self, kind: RoundKind, indices: Sequence[int]) -> Steps[list[Outcome]]:
        """``work`` of these parameters := its mean."""
        exchange = self.exchange(kind, indices)
        return exchange.steps(
            self.channel,
            self.work,
            sequence=self.channel.take(exchange.sequences),
            key=self._key(),
            asks=self.asks(),
        )

    def exact(self, gradients: Sequence[torch.Tensor], among: Container[int] | None = None) -> None:
        """Adam's step with mean gradients: torch's own fused kernel, so equal in every bit.
        ``among``: only of these."""
        for group, every in self.groups():
            at = [i for i in every if among is None or i in among]
            if not at:
                continue
            lr, decay = float(group["lr"]), group["weight_decay"]
            self._counts.fill_(
                self.steps_done - group["added_at"] if group["bias_correction"] else ENDLESS
            )
            adam(
                [self._flat.weights[i] for i in at],
                [gradients[i] for i in at],
                [self._momenta[i] for i in at],
                [self._variances[i] for i in at],
                [],
                [self._count_tensors[i] for i in at],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=lr,
                weight_decay=decay,
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=True,
            )
            self.tensors.count(at, self.steps_done + 1)

    def replicated(self) -> list[torch.Tensor]:
        return self._flat.weights

    # ------------------------------------------------------------ buffers

    def _place(self, flat: Flat) -> None:
        if self.bucket_rounds is not None:
            self.bucket_rounds.take_back()
        had = 0 if self.flat is None else len(self.flat.parameters)
        before = (self.momentum, self.variance) if had else (None, None)
        super()._place(flat)
        count = len(flat.parameters)
        self.momentum, self.variance = map(flat.grown, before)
        self._empty = self.work[:0]
        self._counts = torch.zeros(count)  # of updates, for torch's kernel
        self._count_tensors = list(self._counts.unbind())
        self._taken = (
            torch.cat([self._taken, torch.zeros(count - had)]) if had else torch.zeros(count)
        )
        self._taken_tensors = list(self._taken.unbind())
        self._momenta, self._works, self._variances = map(
            flat.views, (self.momentum, self.work, self.variance)
        )
        every = [
            group for group in self.param_groups for p in group["params"] if id(p) in flat.index
        ]
        self.tensors.lay_out(flat, every, self.variance, self.channel.size)
        self._expose_state()
        if not had:
            exact, size, workspace = (
                policy_of(self.exact_codec, min_numel=256),
                self.channel.size,
                self.channel.workspace,
            )
            self.full = Exchanges(exact, size, workspace, feedback=self.error_feedback)
            self.quantized = Exchanges(
                self.tensors, size, workspace, feedback=self.error_feedback, seed=self.seed
            )
        self.full.recut()
        self.recut()
        self.allocate(had)

    def _expose_state(self) -> None:
        """``state`` as torch's Adam has it, and whether it is frozen; views of what is kept side by
        side."""
        for i, p in enumerate(self._flat.parameters):
            state = self.state[p]
            moments = {"exp_avg": self._momenta[i], "exp_avg_sq": self._variances[i]}
            state.update(
                step=self._taken_tensors[i],
                **{name: alike(moment, p) for name, moment in moments.items()},
            )
            state.update(self.tensors.views(i))
            if i in self._flat.shadowed:
                state["master"] = alike(self._flat.weights[i], p)

    # ------------------------------------------------------------ other ranks

    def reform(self, change: Change) -> Callable[[], None]:
        """Go on among other ranks, those of the channel by now; collective. Call the result when
        all have come as far.

        A step that was under way counts if it did so for others, or is left out. Who is new, or
        behind, then needs the weights of one who is not, and ``load_shared_state``: the next step
        compares.
        """
        if self.consensus is not None:
            raise cannot_follow(self, "agree_over names ranks that were")
        return self.channel.run(self.reforming(change))

    @torch.no_grad()
    def reforming(self, change: Change) -> Steps[Callable[[], None]]:
        """``reform`` as an algorithm that may wait."""
        if self.bucket_rounds is not None:
            self.bucket_rounds.drop()
        stores = {"full": self.full.residuals, "quantized": self.quantized.residuals}
        momenta = {f"momentum {i}": self._momenta[i] for i in self._woken}
        standing = yield from self.handover.steps(
            change,
            stores,
            self.channel.workspace,
            shared=self.common(),
            tensors=self.quantized.bases | momenta,
        )
        finish = yield from self.closing(change, standing)

        def follow() -> None:
            self.channel.workspace.clear()
            self.full.reform(self.channel.size)
            self.quantized.reform(self.channel.size)
            if standing.behind:
                bases = {
                    name: each
                    for name, each in standing.tensors.items()
                    if not name.startswith("momentum ")
                }
                self.quantized.bases.update(bases)
                if change.was is not None:
                    self.follow_waking(standing)
            finish()
            self.tensors.ranks = self.channel.size
            for i in range(len(self._flat.parameters)):
                self.tensors.divide(i)
            self.recut()
            self._reformed, self._asked, self._woken = True, False, []
            self.counters.lost_ranks = self.handover.lost

        return self.handover.with_it(follow)

    def common(self) -> dict[str, Any]:
        """Numbers that all ranks have in common, and that the last round may have changed on some
        of them only."""
        return {"woken": self._woken}

    def closing(self, change: Change, standing: Standing) -> Steps[Callable[[], None]]:
        """Make equal what ranks hold apart from each other: the result does, once all have come as
        far."""
        yield from ()
        return lambda: None

    def follow_waking(self, standing: Standing) -> None:
        """Tensors woke up elsewhere in the round that this rank could not finish."""

    def hand_over(self, leaving: Sequence[int]) -> None:
        """Let the others take over what these ranks owe, which are about to leave; collective over
        all, between steps."""
        stores = {"full": self.full.residuals, "quantized": self.quantized.residuals}
        self.channel.run(self.handover.leaving(leaving, stores))

    def shared_state(self) -> dict[str, Any]:
        """State that all ranks hold alike, weights that parameters do not show included; its
        tensors are those in use."""
        return torch.optim.Optimizer.state_dict(self) | {"commpress": checkpoint.common(self)}

    @torch.no_grad()
    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Take over another rank's ``shared_state``, with its weights; what this rank's compression
        owes stays as it is."""
        checkpoint.load_common(self, state)

    # ------------------------------------------------------------ checkpoints

    def elastic_steps(self) -> Steps[dict[str, Any]]:
        return checkpoint.elastic(self, torch.optim.Optimizer.state_dict(self))

    def momentum_squares(self) -> float:
        return sum(
            float((m / self.tensors.divisor(i)).square().sum()) for i, m in enumerate(self._momenta)
        )

    def forget(self) -> None:
        """Reset what a state that is about to be loaded may say nothing of."""
        self.tensors.begin()

    def schedule_state(self) -> dict[str, Any]:
        """State of the schedule beyond ``facts``."""
        return {}

    def resume(self, schedule: dict[str, Any] | None) -> None:
        """Continue from a ``schedule_state``; None: from torch's Adam."""

    def shared(self) -> Steps[dict[str, torch.Tensor]]:
        """Means of what differs between ranks: ``exp_avg`` and what ``schedule_state`` has, as flat
        buffers."""
        yield from ()
        return {}
