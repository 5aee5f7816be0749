"""What the compressed optimizers share: flat buffers, rounds over the ranks, agreement, replicas, counters.

Note: nothing happens before everybody agrees. A round writes what it wants to communicate into ``work`` and leaves
momentum, variance, parameters and residuals alone; only when every message of the step was finite on every rank are they
replaced. A skipped step has changed nothing, on all ranks alike.
"""

import logging
from abc import abstractmethod
from collections.abc import Container, Iterable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, Literal

import numpy as np
import torch

from commpress.codecs import Codec, Policy, codec_named, policy_of
from commpress.collectives.allreduce import Outcome, Workspace
from commpress.collectives.consensus import AgreeOver
from commpress.collectives.scalars import gathered
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, NonFiniteGradient
from commpress.feedback import check_feedback
from commpress.kernels.adam import adam_arithmetic
from commpress.optim import checkpoint
from commpress.optim.agreement import Clipping, compare_replicas
from commpress.optim.channel import Channel
from commpress.optim.flat import Flat
from commpress.optim.lanes import Lanes
from commpress.optim.stepping import SteppingOptimizer
from commpress.schedules import Facts
from commpress.torch_private import adam
from commpress.work import Steps

log = logging.getLogger("commpress")

ENDLESS = 1e9  # steps after which a bias correction is 1 in every bit


class Round(Enum):
    EXACT = "exact"  # mean gradients, then what Adam or LAMB does
    COMPRESSED = "compressed"
    LOCAL = "local"  # nothing leaves this rank


class CompressedOptimizer(SteppingOptimizer):
    """See ``OneBitAdam`` for the options. Subclasses say what a round sends and what it does with the answer."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        codec: str | Codec | Policy = "sign",
        exact_codec: str | Codec = "none",
        spiky_codec: str | Codec | None = "fp8",
        variance_floor: float = 1e-3,
        min_numel: int = 256,
        max_grad_norm: float | None = None,
        error_feedback: bool = True,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        check_every: int = 1000,
        process_group: Any = None,
        agree_over: AgreeOver | None = None,
        transport: Transport | None = None,
        timeout: timedelta | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
    ) -> None:
        if agree_over is not None and max_grad_norm is not None:
            raise InvalidArgument(
                f"max_grad_norm is {max_grad_norm!r} and agree_over is given: groups that communicate apart would each clip by "
                "a factor of its own, and weights that all of them hold would drift apart. Leave max_grad_norm out"
            )
        if on_nonfinite not in ("skip", "raise"):
            raise InvalidArgument(f"on_nonfinite is {on_nonfinite!r}, expected 'skip' or 'raise'")
        self.codec = policy_of(codec, min_numel=min_numel)
        self.exact_codec = codec_named(exact_codec)
        finer = None if spiky_codec is None else codec_named(spiky_codec)
        self.lanes = Lanes(self.codec, finer, self.exact_codec, min_numel, variance_floor)
        self.clipping, self.on_nonfinite, self.check_every, self.seed = (
            Clipping(max_grad_norm), on_nonfinite, check_every, seed,
        )  # fmt: skip
        check_feedback(error_feedback)
        self.error_feedback = error_feedback
        self.flat: Flat | None = None
        self.facts = Facts()
        self.steps_done = 0
        super().__init__(params, defaults)
        self.connect(transport, process_group, timeout, agree_over, grad_scaler)
        self._asked = False  # whether some rank did in this step's headers
        self.under_way: Any = None  # what an overlapping hook has started (``integrations.overlap``)
        self._lay_out()

    # ------------------------------------------------------------ what subclasses say

    @abstractmethod
    def round(self) -> Round:
        """What this step does: a function of the step and of recorded facts, the same on every rank."""

    @abstractmethod
    def prepare(
        self, group: dict[str, Any], indices: Sequence[int], gradients: dict[int, torch.Tensor] | None, gain: float
    ) -> None:
        """Write into ``work`` what a compressed round sends of these parameters; change nothing else."""

    @abstractmethod
    def apply(self, kind: Round) -> None:
        """Take the mean, which is in ``work``, over into momentum and parameters."""

    def local(self, gain: float) -> None:
        """A step without communication, for those whose ``round`` may say LOCAL."""
        raise TypeError(f"{type(self).__name__}.round() said LOCAL: the class must have local(gain), a step that sends nothing")

    def allocate(self) -> None:
        """Make the buffers that ``_lay_out`` does not know of."""

    def wake(self, indices: Sequence[int]) -> Steps[None]:
        """Some rank saw that these tensors are no longer those whose variance was frozen (see ``lanes``)."""
        yield from ()

    # ------------------------------------------------------------ one step

    def steps(self) -> Steps[bool]:
        """One step as an algorithm that may wait; returns whether it was taken, the same on every rank."""
        assert self.flat is not None
        self.flat.check()
        if self.transport.size > 1 and self.check_every and self.steps_done % self.check_every == 0:
            yield from compare_replicas(self)
        self.facts.see(self.steps_done, max(float(group["lr"]) for group in self.param_groups))
        kind = self.round()
        taken = True
        if self.consensus is not None and (kind is Round.LOCAL or self.transport.size == 1):  # nobody else asks
            squares = self.kernels.square_sum(self.flat.segments(range(len(self.flat.parameters))))
            taken = yield from self.consensus.agreed(bool(np.isfinite(squares)), self.flat.device)
        if not taken:
            pass
        elif kind is Round.LOCAL:
            self.local(self.gain())
        elif self.transport.size == 1:
            taken = self._alone()
        else:
            taken = yield from self._together(kind)
        if taken:
            self.flat.publish()
            self.steps_done += 1
            self._taken += 1
        self.lanes.remember(taken)
        if taken:
            self.after(kind)
            yield from self._talk()
        self.counters.step(kind.value, taken, self.sent_bytes(), self.flat.numel, self.transport.size)
        if not taken:
            self._say_skipped()
        return taken

    def after(self, kind: Round) -> None:
        """Facts and schedules, once a step is taken."""

    def _alone(self) -> bool:
        """World size 1: Adam, on the gradients as they are."""
        if self.overflowed:
            return False
        every = range(len(self._flat.parameters))
        gradients, gain = [self._flat.gradient(i) for i in every], self.gain()
        if gain != 1.0 or self.clipping.max_norm is not None:
            for _, at in self.groups():
                self.kernels.blend(self._flat.segments(at), self.momentum, self.work, beta=0.0, gain=gain)
            if not self.clipping.clip(self, self.work):
                return False
            gradients = list(self._works)
        self.exact([self._zero(i) if g is None else g for i, g in enumerate(gradients)])
        return True

    def _zero(self, i: int) -> torch.Tensor:
        return torch.zeros_like(self._flat.weights[i])

    def _together(self, kind: Round) -> Steps[bool]:
        started: list[Outcome] = []
        left = set(range(len(self._flat.parameters)))
        if self.under_way is not None:
            outcomes, indices = yield from self.under_way.finish(kind)
            started, left = outcomes, left - indices
        outcomes = []
        if left:
            gain = yield from self.clipping.agreed(self, self.gain(), exact=kind is Round.EXACT)
            for group, at in self.groups():
                self.begin(kind, group, [i for i in at if i in left], gain)
            outcomes = yield from self.reduce(kind, sorted(left), workspace=self.workspace)
        finite = all(outcome.finite for outcome in started + outcomes)
        if finite and kind is Round.EXACT and not self.clipping.clip(self, self.work):
            finite = False
        if self.consensus is not None:
            finite = yield from self.consensus.agreed(finite, self._flat.device)
        self.channel(kind).settle(started + outcomes, finite=finite)
        self._asked = finite and any(outcome.asks for outcome in started + outcomes)
        if finite:
            self.apply(kind)
        return finite

    def _talk(self) -> Steps[None]:
        """If some rank asked for it in a header: which tensors are to wake up, as all ranks see it."""
        if not self._asked:
            return
        self._asked = False
        every = yield from gathered(
            self.lanes.waking().tolist(), transport=self.transport, sequence=self.next_sequence(), device=self._flat.device
        )
        indices = np.flatnonzero(every.any(axis=0)).tolist()
        if indices:
            yield from self.wake(indices)
            self.counters.woken_tensors += len(indices)

    def begin(
        self,
        kind: Round,
        group: dict[str, Any],
        indices: Sequence[int],
        gain: float,
        gradients: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """Write what a round sends of ``indices``, all of one group, into ``work``; ``gradients`` if not those in ``grad``."""
        if kind is Round.EXACT:
            self.blend(indices, gradients, gain)
        else:
            self.prepare(group, indices, gradients, gain)

    def blend(self, indices: Sequence[int], gradients: dict[int, torch.Tensor] | None, gain: float) -> None:
        """work := gain·g."""
        self.kernels.blend(self._flat.segments(indices, gradients), self.momentum, self.work, beta=0.0, gain=gain)

    def reduce(self, kind: Round, indices: Sequence[int], *, workspace: Workspace) -> Steps[list[Outcome]]:
        channel = self.channel(kind)
        sequence = self._sequence
        self._sequence += channel.count(indices, workspace)
        return channel.reduce(
            self.work, indices, workspace=workspace, sequence=sequence, key=self.seed * 1_000_003 + self.steps_done,
            asks=self.asks(),
        )  # fmt: skip

    def asks(self) -> bool:
        """Whether this rank wants tensors to wake up."""
        return bool(self.lanes.waking().any())

    def channel(self, kind: Round) -> Channel:
        return self.full if kind is Round.EXACT else self.quantized

    def exact(self, gradients: Sequence[torch.Tensor], among: Container[int] | None = None) -> None:
        """What Adam does with mean gradients: torch's own fused kernel, so equal in every bit. ``among``: only of these."""
        for group, every in self.groups():
            at = [i for i in every if among is None or i in among]
            if not at:
                continue
            lr, decay = float(group["lr"]), group["weight_decay"]
            self._counts.fill_(self.steps_done if group["bias_correction"] else ENDLESS)
            adam(
                [self._flat.weights[i] for i in at], [gradients[i] for i in at], [self._momenta[i] for i in at],
                [self._variances[i] for i in at], [], [self._count_tensors[i] for i in at], fused=True, amsgrad=False,
                beta1=group["betas"][0], beta2=group["betas"][1], lr=lr, weight_decay=decay, eps=group["eps"],
                maximize=False, decoupled_weight_decay=True,
            )  # fmt: skip
            self.lanes.count(at, self.steps_done + 1)

    # ------------------------------------------------------------ agreement

    @property
    def max_grad_norm(self) -> float | None:
        return self.clipping.max_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        if norm is not None and self.consensus is not None:
            raise InvalidArgument(f"max_grad_norm is {norm!r}, expected None: the optimizer has agree_over, see there")
        self.clipping = Clipping(norm)

    def replicated(self) -> list[torch.Tensor]:
        return self._flat.weights

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
                self.steps_done,
                count,
            )

    # ------------------------------------------------------------ buffers

    @property
    def _flat(self) -> Flat:
        assert self.flat is not None
        return self.flat

    def groups(self) -> Iterable[tuple[dict[str, Any], range]]:
        """Each group and the numbers of its parameters."""
        return zip(self.param_groups, self._indices, strict=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.flat is not None and self.frozen:
            raise InvalidArgument(
                "add_param_group after the variance was frozen: the new parameters would have none. Add them before, or make "
                "a second optimizer for them"
            )
        super().add_param_group(param_group)
        if self.flat is not None:
            self._lay_out()

    @property
    def frozen(self) -> bool:
        return False

    def _lay_out(self) -> None:
        """Place all parameters; what earlier ones had stays theirs."""
        first = self.flat is None
        before = {p: dict(state) for p, state in self.state.items()}
        parameters: list[torch.Tensor] = []
        names: list[str] = []
        self._indices: list[range] = []
        for group in self.param_groups:
            at = range(len(parameters), len(parameters) + len(group["params"]))
            self._indices.append(at)
            parameters += group["params"]
            names += group.get("param_names") or [f"#{i:05d}" for i in at]
        self.flat = Flat(parameters, names)
        self.kernels = adam_arithmetic(self.flat.device)
        self.momentum, self.variance, self.work = self.flat.new(), self.flat.new(), self.flat.new()
        self._empty = self.work[:0]
        self._counts = torch.zeros(len(parameters))  # of updates, for torch's kernel
        self._count_tensors = list(self._counts.unbind())
        self._taken = torch.full((len(parameters),), float(self.steps_done))
        self._taken_tensors = list(self._taken.unbind())
        self._momenta, self._works = self.flat.views(self.momentum), self.flat.views(self.work)
        self._variances = self.flat.views(self.variance)
        for i, p in enumerate(parameters):
            if p in before:
                self._momenta[i].copy_(before[p]["exp_avg"])
                self._variances[i].copy_(before[p]["exp_avg_sq"])
        self.lanes.lay_out(self.flat, list(self.groups()), self.variance, self.transport.size)
        self.lanes.count(range(len(parameters)), self.steps_done)
        self._show()
        if first:
            exact, feedback = policy_of(self.exact_codec, min_numel=256), self.error_feedback
            self.full = Channel(self.flat, exact, self.transport, feedback=feedback)
            self.quantized = Channel(self.flat, self.lanes, self.transport, feedback=feedback)
            self.counters.shares = self.quantized.shares
        else:
            self.full.relay(self.flat)
            self.quantized.relay(self.flat)
        self.allocate()

    def _show(self) -> None:
        """``state`` as torch's Adam has it, and which lane a parameter is in; views of what is kept side by side."""
        for i, p in enumerate(self._flat.parameters):
            state = self.state[p]
            state.update(step=self._taken_tensors[i], exp_avg=self._momenta[i], exp_avg_sq=self._variances[i])
            state.update(self.lanes.views(i))
            if i in self._flat.shadowed:
                state["master"] = self._flat.weights[i]

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for a bitwise resume at the same world size: every rank saves and loads its own."""
        return super().state_dict() | {"commpress": self.rank_state()}

    def elastic_steps(self) -> Steps[dict[str, Any]]:
        return checkpoint.elastic(self, super().state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *others: dict[str, Any]) -> None:
        """From this rank's ``state_dict``, from all ranks' ``elastic_state_dict``s, or from torch's Adam or AdamW."""
        checkpoint.load(self, [state_dict, *others])

    @torch.no_grad()
    def load_rank_state(self, part: dict[str, Any]) -> None:
        """From the ``commpress`` entry of this rank's own ``state_dict``, after loading another rank's."""
        checkpoint.load_rank(self, part)

    def rank_state(self) -> dict[str, Any]:
        return checkpoint.exact(self)

    def owed(self) -> float:
        """‖what this rank's compression owes‖ / ‖momentum‖."""
        left = sum(float(sent.square().sum()) for _, sent, _ in self.quantized.residuals.places())
        norm = float(torch.linalg.vector_norm(self.momentum))
        return left**0.5 / norm if norm else 0.0

    def schedule_state(self) -> dict[str, Any]:
        """Where the schedule stands beyond ``facts``."""
        return {}

    def resume(self, schedule: dict[str, Any] | None) -> None:
        """Continue from a ``schedule_state``; None: from torch's Adam."""

    def shared(self) -> Steps[dict[str, torch.Tensor]]:
        """What ranks have apart from each other, averaged: ``exp_avg`` and what ``schedule_state`` has, as flat buffers."""
        yield from ()
        return {}
