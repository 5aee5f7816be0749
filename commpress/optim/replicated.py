"""Optimizers whose whole state is on every rank: momentum, variance and parameters side by side, as
torch's Adam has them."""

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from math import isfinite
from typing import Any

import torch

from commpress.alarm import Peers
from commpress.choice import Layered, Seen
from commpress.codecs import policy_of
from commpress.collectives.allreduce import Outcome
from commpress.collectives.change import Change
from commpress.collectives.exchange import Exchange, Exchanges
from commpress.collectives.handover import Standing, cannot_follow
from commpress.optim import checkpoint
from commpress.optim.flat import Flat
from commpress.optim.layout import alike
from commpress.optim.optimizer import CompressedOptimizer, RoundKind
from commpress.work import Steps


class ReplicatedOptimizer(CompressedOptimizer):
    """Optimizer whose ranks average their messages and take the same step from the mean."""

    full: Exchanges
    quantized: Exchanges
    _taken: torch.Tensor  # steps of each parameter, as torch's Adam counts them

    # ------------------------------------------------------------ for subclasses

    @abstractmethod
    def prepare(
        self,
        group: dict[str, Any],
        indices: Sequence[int],
        gradients: dict[int, torch.Tensor] | None,
        gain: float,
    ) -> None:
        """Write the messages of a compressed round into ``work``, and change nothing else."""

    def allocate(self, had: int) -> None:
        """Make the buffers beyond those of ``_place``; the first ``had`` parameters keep their
        values."""

    # ------------------------------------------------------------ one step

    def before(self, kind: RoundKind) -> Steps[None]:
        """Wait for messages that backward has started before sending others."""
        if self.bucket_rounds is not None:
            yield from self.bucket_rounds.wait()
        trained = set(self.trained)
        for i in self.numbers:
            if i not in trained:
                self._works[i].zero_()

    def take(self, kind: RoundKind) -> Steps[bool]:
        taken = yield from super().take(kind)
        if taken:
            self._flat.publish()
            self._taken += 1
        return taken

    def exchanged(self, kind: RoundKind) -> Steps[bool]:
        return (yield from self._alone() if self.channel.size == 1 else super().exchanged(kind))

    def _alone(self) -> Steps[bool]:
        """Take Adam's step on the local gradients, at world size 1."""
        if self.overflowed or not isfinite(self.squares()) or not isfinite(self.expert_squares):
            return False
        every = self.numbers
        gradients, gain = [self._flat.gradient(i) for i in every], self.gain()
        if gain != 1.0 or self.max_grad_norm is not None or self.columns is not None:
            for _, at in self.groups():
                self.take_gradients(at, None, gain)
            if not (yield from self.clip()):
                return False
            gradients = list(self._works)
            yield from self.measure(RoundKind.EXACT)
        zeros = map(torch.zeros_like, self._weights)
        self.exact([z if g is None else g for g, z in zip(gradients, zeros, strict=True)])
        return True

    def norm_of_mean(self) -> Steps[float | None]:
        if self.columns is None:
            return None
        return (yield from self.squares_of_mesh(self._works)) ** 0.5

    def send(self, kind: RoundKind) -> Steps[list[Outcome]]:
        outcomes: list[Outcome] = []
        left = set(self.trained)
        if self.bucket_rounds is not None:
            outcomes, indices = yield from self.bucket_rounds.finish(kind)
            left -= indices
        if left:
            gain = yield from self.agree_on_gain(exact=kind is RoundKind.EXACT)
            for group, at in self.groups():
                self.begin(kind, group, [i for i in at if i in left], gain)
            outcomes = outcomes + (yield from self.reduce(kind, sorted(left)))
        if kind is RoundKind.COMPRESSED and all(outcome.finite for outcome in outcomes):
            yield from self.choice.at(self.compressed + 1, Peers(self.channel))
            self.counters.choice = self.choice.why
        return outcomes

    def begin(
        self,
        kind: RoundKind,
        group: dict[str, Any],
        indices: Sequence[int],
        gain: float,
        gradients: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """Write the messages of ``indices``, all of one group, into ``work``; ``gradients`` replace
        those in ``grad``."""
        if kind is RoundKind.EXACT:
            self.take_gradients(indices, gradients, gain)
        else:
            self.prepare(group, indices, gradients, gain)

    def take_gradients(
        self, indices: Sequence[int], gradients: dict[int, torch.Tensor] | None, gain: float
    ) -> None:
        """Set ``work`` to gain·g."""
        self.kernels.scaled(self._flat.segments(indices, gradients), self.work, gain=gain)

    def add_known(self, indices: Sequence[int], factor: float) -> None:
        """Add factor·m/s to ``work``, for tensors with whole-tensor codecs. All ranks know m, so
        only the new part is sent: a low-rank product has no room for more."""
        for i in indices:
            if i in self.tensors.whole:
                self._works[i].addcdiv_(self._momenta[i], self.tensors.divisor(i), value=factor)

    def exchange(self, kind: RoundKind, indices: Sequence[int]) -> Exchange:
        """Return the exchange of these parameters in a round of this kind."""
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
        """Replace ``work`` of these parameters by its mean."""
        exchange = self.exchange(kind, indices)
        if kind is RoundKind.COMPRESSED and self.choice.looks(self.compressed):
            spans = self.spans(self.tensors.part(indices)[1])
            self.choice.observe(self.compressed, Seen(spans, self.work, None, (), exchange.plans))
        call = self.channel.call(exchange.sequences, self.steps_done, asks=self.asks())
        return exchange.steps(self.channel, self.work, call)

    def exact(self, gradients: Sequence[torch.Tensor], among: Container[int] | None = None) -> None:
        """Take an exact step with mean gradients, here Adam's. ``among``: only these parameters."""
        trained = self.trained
        self.adam((i for i in trained if among is None or i in among), gradients)

    def replicated(self) -> list[torch.Tensor]:
        return self._flat.weights

    # ------------------------------------------------------------ buffers

    def part_of(self, buffer: torch.Tensor, i: int) -> torch.Tensor:
        return self._flat.view(buffer, i)

    def own(self, tensor: torch.Tensor, i: int) -> torch.Tensor:
        return tensor

    def _place(self, flat: Flat) -> None:
        if self.bucket_rounds is not None:
            self.bucket_rounds.take_back()
        had = 0 if self.flat is None else len(self.flat.parameters)
        before = (self.momentum, self.variance) if had else (None, None)
        super()._place(flat)
        self.momentum, self.variance = map(flat.grown, before)
        self.mean, self._empty = self.work, self.work[:0]
        new = torch.zeros(len(flat.parameters) - had)
        self._taken = torch.cat([self._taken, new]) if had else new
        self._show()
        self._works = self._means
        self._lay_out(self.variance)
        self._expose_state()
        if not had:
            exact = policy_of(self.exact_codec, min_numel=256)
            among = self.channel.size, self.channel.workspace
            self.full = Exchanges(exact, *among, feedback=self.error_feedback)
            self.quantized = Exchanges(
                self.tensors,
                *among,
                feedback=self.error_feedback,
                any_rank=isinstance(self.choice, Layered),
            )
        self.full.recut()
        self.recut()
        self.allocate(had)

    def _expose_state(self) -> None:
        """Give ``state`` the entries of torch's Adam, and whether tensors are frozen, as views."""
        for i, (p, step) in enumerate(zip(self._flat.parameters, self._taken, strict=True)):
            moments = {"exp_avg": self._momenta[i], "exp_avg_sq": self._variances[i]}
            if i in self._flat.shadowed:
                moments["master"] = self._flat.weights[i]
            cut = {name: alike(moment, p) for name, moment in moments.items()}
            self.state[p] |= {"step": step} | cut | self.tensors.views(i)

    # ------------------------------------------------------------ other ranks

    def reforming(self, change: Change) -> Steps[Callable[[], None]]:
        """Continue among other ranks. Newcomers and ranks behind then need the weights of another
        rank and ``load_shared_state``: the next step compares replicas."""
        if self.consensus is not None:
            raise cannot_follow(self, "agree_over names ranks that were")
        if self.bucket_rounds is not None:
            self.bucket_rounds.drop()
        return (yield from super().reforming(change))

    def shared(self) -> dict[str, Any]:
        return {"woken": self._woken}

    def shared_tensors(self) -> Mapping[str, torch.Tensor]:
        return {f"momentum {i}": self._momenta[i] for i in self._woken}

    def catch_up(self, change: Change, standing: Standing) -> None:
        if change.was is not None:
            self.follow_waking(standing)

    def follow_waking(self, standing: Standing) -> None:
        """Wake the tensors that woke on other ranks in the round that this rank could not
        finish."""

    def go_on(self, change: Change, standing: Standing) -> None:
        self.tensors.ranks = self.channel.size
        self.choice.load(self.choice.state())  # without errors that some ranks have not summed
        for i in self.numbers:
            self.tensors.divide(i)
        self.recut()
        self._reformed, self._asked, self._woken = True, False, []
        self.counters.lost_ranks = self.handover.lost

    def shared_state(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, including float32 weights of other dtypes'
        parameters; its tensors are those in use."""
        part = super().shared_state()
        if "trips" in part:
            part["trips"] = [0] * len(part["trips"])  # each rank's own
        return torch.optim.Optimizer.state_dict(self) | {"commpress": part}

    # ------------------------------------------------------------ checkpoints

    def check(self, schedule: Mapping[str, Any]) -> None:
        super().check(schedule)
        if "param_groups" in schedule:
            checkpoint.check_tensors(self, schedule, whole=True)

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        """Continue from a checked state; torch's part, if it is there, comes first."""
        if "param_groups" in schedule:
            self.forget()
            checkpoint.fill(self, schedule)
            self.tensors.follow(self.steps_done)
        super().follow(schedule, change)

    def follow_adam(self) -> None:
        """Continue from momentum, variance and steps of torch's Adam, which are loaded."""
        self.recut()

    def forget(self) -> None:
        """Reset entries that a state about to be loaded may lack."""
        self.tensors.begin()
