"""Base of the compressed optimizers: rounds over the ranks, agreement, replicas, counters.

``step`` drives an algorithm that may wait; a simulation runs many ranks' algorithms in lockstep.

Note: nothing changes before all ranks agree. A round writes its messages into ``work``; momentum,
variance, parameters and residuals are replaced only when every message of the step was finite on
every rank. A skipped step changes nothing on any rank; a step that raised changes nothing on this
rank.
"""

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from inspect import signature
from math import inf, isfinite
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from commpress.choice import PerLayer, check_layers, choice_of
from commpress.codecs import Codec, Policy, codec_named, policy_of
from commpress.codecs.family import EXACT
from commpress.codecs.policy import Same
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.collectives.allreduce import Outcome, settle
from commpress.collectives.buckets import Share, Span, share
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges, check_on_nonfinite
from commpress.collectives.handover import Handover
from commpress.collectives.reduce_scatter import Scatter
from commpress.collectives.state import Checked, Stateful
from commpress.collectives.transports.factory import (
    AgreeOver,
    DeviceMesh,
    consensus_over,
    on_reform,
    ranks_of,
)
from commpress.collectives.transports.transport import Transport
from commpress.errors import (
    CommunicationError,
    InvalidArgument,
    Mismatch,
    NonFiniteGradient,
    check_counts,
    check_entries,
    refuse_model,
    refuse_unknown,
)
from commpress.feedback import check_feedback
from commpress.kernels.devices import adam_arithmetic
from commpress.logs import warn_on_first
from commpress.optim import checkpoint
from commpress.optim.flat import Flat, adam_step
from commpress.optim.layout import (
    check_cut,
    columns_over,
    groups_on,
    is_cut,
    is_held,
    named_parameters,
    settle_gradient,
    tensors_in,
)
from commpress.optim.local_experts import ExpertAdam
from commpress.optim.tensor_states import TensorStates
from commpress.schedules import Facts
from commpress.torch_private import ENDLESS, untraced
from commpress.totals import Totals
from commpress.work import Steps

SAME_GROUPS = (
    "Call add_param_group on every rank between the same two steps, with the same parameters in "
    "the same order."
)

log = logging.getLogger("commpress")


class RoundKind(Enum):
    EXACT = "exact"  # mean gradients, then a step of Adam or LAMB
    COMPRESSED = "compressed"
    LOCAL = "local"  # nothing is sent


class OptimizerOptions(TypedDict, total=False):
    """Keyword options that all compressed optimizers take; ``OneBitAdam`` explains them."""

    bias_correction: bool
    codec: str | Codec | Policy | PerLayer
    exact_codec: str | Codec
    spiky_codec: str | Codec | None
    variance_floor: float
    min_numel: int
    max_grad_norm: float | None
    error_feedback: bool
    on_nonfinite: Literal["skip", "raise"]
    check_every: int
    mesh: DeviceMesh | None
    process_group: Any
    agree_over: AgreeOver | None
    transport: Transport | None
    grad_scaler: torch.amp.GradScaler | None


@dataclass
class OptimizerCounters(Totals):
    """Totals of one rank. Bytes are those this rank sent, headers included."""

    derived = ("wire_bytes", "ratio", "bits")
    steps: int = 0
    exact_rounds: int = 0
    compressed_rounds: int = 0
    local_steps: int = 0
    skipped_steps: int = 0
    ignored_gradients: int = 0  # not finite in a step without communication
    woken_tensors: int = 0  # whose variance was frozen too early (``optim.tensor_states``)
    # ranks that died with their residuals; ranks that handed them over are not counted
    lost_ranks: int = 0
    exact_bytes: int = 0
    compressed_bytes: int = 0
    local_bytes: int = 0  # always zero unless something is wrong
    # what float32 ring all-reduces of every step's gradients would have sent
    logical_bytes: int = 0
    round_bytes: int = 0  # bytes of one such all-reduce
    # cost of each parameter in a compressed round, by name
    shares: Mapping[str, Share] = field(default_factory=dict)
    choice: str = ""  # last choice of ``PerLayer``, with its reason

    def step(self, kind: str, taken: bool, sent_bytes: int, numel: int, ranks: int) -> None:
        self.steps += taken
        self.skipped_steps += not taken
        self.exact_rounds += kind == "exact"
        self.compressed_rounds += kind == "compressed"
        self.local_steps += kind == "local"
        name = f"{kind}_bytes"
        setattr(self, name, getattr(self, name) + sent_bytes)
        self.round_bytes = 8 * (ranks - 1) * numel // ranks
        self.logical_bytes += self.round_bytes

    @property
    def wire_bytes(self) -> int:
        return self.exact_bytes + self.compressed_bytes + self.local_bytes

    @property
    def ratio(self) -> float:
        """Bytes of float32 all-reduces over bytes sent."""
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def bits(self) -> float:
        """Per parameter in a compressed round, each way, headers included: float32 has 32. 0.0
        before the first one."""
        logical = self.round_bytes * self.compressed_rounds
        return 32 * self.compressed_bytes / logical if logical else 0.0

    def by_codec(self) -> dict[str, tuple[list[str], int, float]]:
        """Return, by codec, its parameters, their elements and bits per element; most bits
        first."""
        found: dict[str, tuple[list[str], int, float]] = {}
        for name, (numel, codec, bits) in self.shares.items():
            names, elements, sent = found.get(codec, ([], 0, 0.0))
            found[codec] = ([*names, name], elements + numel, sent + bits * numel)
        mean = {codec: (names, n, sent / max(n, 1)) for codec, (names, n, sent) in found.items()}
        return dict(sorted(mean.items(), key=lambda item: -item[1][1] * item[1][2]))

    def summary(self) -> str:
        return (
            f"{self.steps} steps: {self.exact_rounds} exact rounds, {self.compressed_rounds} "
            f"compressed, {self.local_steps} without communication; {self.wire_bytes / 1e6:.3f} MB "
            f"sent instead of {self.logical_bytes / 1e6:.3f} ({self.ratio:.1f} times "
            f"fewer){self._of_a_round()}" + (f"; chosen: {self.choice}" if self.choice else "")
        )

    def _of_a_round(self) -> str:
        if not self.bits:
            return ""
        every = max(sum(share.numel for share in self.shares.values()), 1)
        groups = [
            f"{bits:.2f} for {100 * numel / every:.0f} % of them ({codec}: {', '.join(names[:3])}"
            + (f" and {len(names) - 3} more)" if len(names) > 3 else ")")
            for codec, (names, numel, bits) in self.by_codec().items()
        ]
        return (
            f"; a compressed round sends {self.bits:.2f} bits per parameter"
            + ": " * bool(groups)
            + ", ".join(groups)
        )


class CompressedOptimizer(Stateful, torch.optim.Optimizer, ABC):
    """Base of the optimizers; ``OneBitAdam`` explains the options.

    Subclasses define the messages of a round and the use of their mean.

    Note: one verdict for all GradScalers. A scaler looks at the gradients of its own rank only. It
    always calls ``step``, because this optimizer supports scaling, and the verdict of all ranks is
    then written into the tensors that its ``update`` reads: all halve their scale, or none does. In
    a step without communication none does.
    """

    averages_gradients = True  # over all ranks, in ``step``: nothing else may
    clips_shards = False  # ``max_grad_norm`` is of whole gradients, where parameters are DTensors
    divided = False  # each rank has the state of a part of every tensor
    _step_supports_amp_scaling = True  # gradients keep their scale until they are read
    full: Exchanges | Scatter  # exchange gradients in exact rounds
    quantized: Exchanges | Scatter  # exchange messages in compressed rounds
    # buffers of this rank's part of every tensor
    momentum: torch.Tensor
    variance: torch.Tensor
    mean: torch.Tensor  # mean of the messages
    master: torch.Tensor  # float32 weights, if ``divided``
    entries: tuple[str, ...] = ()  # keys of its schedule
    alone = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        codec: str | Codec | Policy | PerLayer = "sign",
        exact_codec: str | Codec = "none",
        spiky_codec: str | Codec | None = "fp8",
        variance_floor: float = 1e-3,
        min_numel: int = 256,
        max_grad_norm: float | None = None,
        error_feedback: bool = True,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        check_every: int = 1000,
        mesh: DeviceMesh | None = None,
        process_group: Any = None,
        agree_over: AgreeOver | None = None,
        transport: Transport | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(type(self), unknown)
        check_numbers({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        check_feedback(error_feedback)
        check_counts(check_every=check_every)
        check_on_nonfinite(on_nonfinite, propagates=False)
        # codecs of compressed rounds, chosen anew between two of them
        self.choice = choice_of(codec, partial(policy_of, min_numel=min_numel), tries=False)
        self.compressed = 0  # rounds that were taken, by which the choice counts
        if self.choice.usual is None:
            raise InvalidArgument("codec is None, expected a codec: 'none' sends float32")
        self.codec, self.exact_codec = self.choice.usual, codec_named(exact_codec)
        finer = None if spiky_codec is None else codec_named(spiky_codec)
        self.tensors = TensorStates(self.codec, finer, self.exact_codec, min_numel, variance_floor)
        _check_norm(max_grad_norm)
        self._max_norm, self.facts = max_grad_norm, Facts()
        self._local_norm = 0.0  # √(mean ‖g_i‖²) of this step
        self._clipped = 1.0  # the factor of this step, for gradients that are not in its messages
        self.on_nonfinite, self.check_every = on_nonfinite, check_every
        self.error_feedback, self.grad_scaler = error_feedback, grad_scaler
        self.counters = OptimizerCounters()
        # rounds started by a hook (``integrations.ddp.overlap``)
        self.bucket_rounds: Any = None
        self._asked = False  # whether some rank asked in this step's headers
        refuse_model(params)
        self._counted = 0  # bytes in ``counters`` so far
        self.flat: Flat | None = None
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        params = list(params)
        process_group, agree_over = groups_on(mesh, tensors_in(params), process_group, agree_over)
        self._ranks = ranks_of(process_group) if transport is None else tuple(range(transport.size))
        self.experts: ExpertAdam | None = None  # steps of local experts
        super().__init__(params, own | {"added_at": 0})
        flat = Flat(*self.named_parameters())
        self._check_codecs(flat)
        among = {"process_group": process_group, "agree_over": agree_over}
        cut = any(map(is_cut, flat.parameters))
        if agree_over is not None and max_grad_norm is not None and not (cut and self.clips_shards):
            raise InvalidArgument(
                f"max_grad_norm is {max_grad_norm!r} and agree_over is given: groups that "
                "communicate apart would each clip by a factor of its own, and weights that all of "
                "them hold would drift apart. Leave max_grad_norm out, or use OneBitAdam or "
                "OneBitLamb on parameters that are DTensors, which say who holds what"
            )
        # shard peers, if parameters are sharded
        self.columns = columns_over(flat.parameters, flat.names, **among) if cut else None
        # votes of further ranks that must stay equal
        self.consensus = consensus_over(agree_over, process_group)
        self._laid_out = list(self.param_groups)
        name = "commpress-optimizer"
        self.channel = (
            Channel.among(process_group, name=name, device=flat.device)
            if transport is None
            else Channel(transport, name=name)
        )
        divided = "divided state, whose weights come back in the same codec, and it sees gradients"
        check_layers(codec, self.channel.size, self.consensus, divided if self.divided else "")
        self.handover = Handover(self.channel)
        self._woken: list[int] = []  # tensors that the last round woke
        self._reformed = False  # since the last step: compare replicas
        self._place(flat)
        self._place_experts()
        if transport is None:
            on_reform(process_group, self)

    def _check_codecs(self, flat: Flat) -> None:
        """Refuse codecs that no round can use, on any number of ranks."""
        for option, codec in (
            ("exact_codec", self.exact_codec),
            ("spiky_codec", self.tensors.finer),
        ):
            if isinstance(codec, WholeTensorCodec):
                raise InvalidArgument(
                    f"{option} is {codec.spec!r}, which compresses whole tensors: gradients travel "
                    "in rows where every element counts for its variance. Choose a codec of rows "
                    "such as 'int8'"
                )

    # ------------------------------------------------------------ parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train these parameters too, from the next step on: before the first or between any two,
        in a warm-up or after it.

        Call it on every rank between the same two steps, with the same parameters of the same
        values. It sends nothing itself; the next ``step`` first compares the groups and weights of
        all ranks, and ends an open window of 0/1 Adam.

        State of the other parameters stays the same in every bit. New ones begin as in AdamW, with
        a count of their own steps (since ``added_at`` in the group). In 1-bit Adam and LAMB they
        are live for as long as the warm-up took; in 0/1 Adam all parameters take as many exact
        steps as at the beginning of a run.
        """
        count = len(self.param_groups)
        super().add_param_group(param_group)
        self.param_groups[-1]["added_at"] = self.steps_done
        try:
            check_numbers(self.param_groups[-1])
            _refuse_options(type(self), param_group, self.defaults)
            if self.flat is not None:
                self._follow_groups()
        except Exception:
            del self.param_groups[count:]
            raise

    def _follow_groups(self) -> None:
        """Lay out again if groups were added or replaced: Lightning assigns ``param_groups`` when
        it resumes."""
        groups, before = self.param_groups, self._flat
        same = len(groups) == len(self._laid_out) and all(
            a is b for a, b in zip(groups, self._laid_out, strict=True)
        )
        had = len(before.parameters) + (0 if self.experts is None else len(self.experts))
        if same and sum(len(group["params"]) for group in groups) == had:
            return
        parameters, names = self.named_parameters()
        count = len(parameters)
        if count < len(before.parameters) or any(
            p is not q for p, q in zip(before.parameters, parameters, strict=False)
        ):
            raise InvalidArgument(
                f"param_groups holds {count} parameters, not those {len(before.parameters)} that "
                "the optimizer has state of, in their order, and then new ones: call "
                "add_param_group for new ones, construct another optimizer for others"
            )
        flat = Flat(parameters, names)
        self._check_codecs(flat)
        cut = next((name for name, p in zip(names, parameters, strict=True) if is_cut(p)), None)
        if cut is not None and self.columns is None:
            raise InvalidArgument(
                f"parameter {cut!r} is a DTensor, and the optimizer was constructed without any: "
                "construct one for these"
            )
        check_cut(parameters, names, self.channel.group)
        flat.follow(before)
        for group in groups:
            group["added_at"] = min(int(group.get("added_at", self.steps_done)), self.steps_done)
        self._laid_out = list(groups)
        self._place(flat)
        self._place_experts()

    def named_parameters(self) -> tuple[list[torch.Tensor], list[str]]:
        """List the parameters that all ranks hold, group by group, and their names."""
        parameters, names = named_parameters(self.param_groups)
        shared = [i for i, p in enumerate(parameters) if not is_held(names[i], p, self._ranks)]
        if parameters and not shared:
            raise InvalidArgument(
                f"params has {len(parameters)} parameters, all of experts that are divided among "
                "ranks: nothing of them is sent, so give them to torch.optim.AdamW, or this "
                "optimizer the others too"
            )
        return [parameters[i] for i in shared], [names[i] for i in shared]

    def shared_numbers(self) -> list[int]:
        """Return torch's numbers, counted over all groups, of the parameters that all ranks
        hold."""
        known = self._flat.index
        return [
            i
            for i, p in enumerate(p for group in self.param_groups for p in group["params"])
            if id(p) in known
        ]

    def _place_experts(self) -> None:
        """Make the state of local experts; earlier ones keep theirs."""
        names, known = named_parameters(self.param_groups)[1], self._flat.index
        every = [(group, p) for group in self.param_groups for p in group["params"]]
        own = [
            (group, name, p)
            for (group, p), name in zip(every, names, strict=True)
            if id(p) not in known
        ]
        self.experts = ExpertAdam(own, self.state, self.experts) if own else None

    @property
    def _flat(self) -> Flat:
        if self.flat is None:
            raise InvalidArgument(
                f"this {type(self).__name__} was copied or unpickled, and a copy has no connection "
                "to other ranks: construct one on every rank and load_state_dict()"
            )
        return self.flat

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.flat = self.grad_scaler = self.experts = None

    def groups(self) -> Iterator[tuple[dict[str, Any], range | tuple[int, ...]]]:
        """Yield each group and the numbers of its trained parameters, the same on every rank."""
        first, known = 0, self._flat.index
        for group in self.param_groups:
            every = range(first, first + sum(id(p) in known for p in group["params"]))
            first = every.stop
            trained = tuple(i for i in every if self.is_trained(i))
            yield group, every if len(trained) == len(every) else trained

    @property
    def numbers(self) -> range:
        """Number all parameters, as ``flat`` has them."""
        return range(len(self._flat.parameters))

    @property
    def trained(self) -> list[int]:
        """Return the numbers of trained parameters, the same on every rank."""
        return [i for _, at in self.groups() for i in at]

    def is_trained(self, i: int) -> bool:
        """Return false for parameters that need no gradient and have none, as torch's optimizers
        do. A gradient that is missing on this rank alone counts as zero."""
        p = self._flat.parameters[i]
        return p.requires_grad or p.grad is not None

    def spans(self, indices: Sequence[int]) -> list[Span]:
        flat = self._flat
        return [Span(flat.names[i], *flat.places[i]) for i in indices]

    def _place(self, flat: Flat) -> None:
        """Make the buffers of these parameters; the first ones, if known, keep their values."""
        self.flat = flat
        self.kernels = adam_arithmetic(flat.device)
        self.work = flat.new()

    def _lay_out(self, variance: torch.Tensor) -> None:
        """Describe the parameters to ``tensors``; ``variance`` is known to all ranks."""
        flat = self._flat
        every = [
            group for group in self.param_groups for p in group["params"] if id(p) in flat.index
        ]
        self.tensors.lay_out(flat, every, variance, self.channel.size)

    def recut(self) -> None:
        """Cut again, because codecs of compressed rounds have changed."""
        self.quantized.recut()
        self.tensors.recut()
        self._count_shares()

    def _use_choice(self) -> None:
        """Send the next messages in the codecs that were chosen last."""
        policy = self.choice.usual
        if policy is not None and policy != self.codec:
            self.codec = self.tensors.codec = policy
            self.recut()

    def _count_shares(self) -> None:
        flat, size = self._flat, self.channel.size
        shapes = dict(zip(flat.names, flat.shapes, strict=True))
        self.counters.shares = {
            n: share(s, self.tensors.choose(n, s.numel()), size) for n, s in shapes.items()
        }

    # ------------------------------------------------------------ for subclasses

    @abstractmethod
    def round(self) -> RoundKind:
        """Return the kind of this step: a function of the step and of recorded facts, the same on
        every rank."""

    @abstractmethod
    def part_of(self, buffer: torch.Tensor, i: int) -> torch.Tensor:
        """View this rank's part of a parameter in a buffer of this rank's parts."""

    @abstractmethod
    def own(self, tensor: torch.Tensor, i: int) -> torch.Tensor:
        """View this rank's part in a whole parameter."""

    @abstractmethod
    def send(self, kind: RoundKind) -> Steps[list[Outcome]]:
        """Send the messages of this round, and write what this rank needs of their mean to
        ``mean``."""

    @abstractmethod
    def apply(self, kind: RoundKind) -> Steps[None]:
        """Apply ``mean`` to momentum and parameters."""

    def norm_of_mean(self) -> Steps[float | None]:
        """Return the norm of the mean gradient if ``mean`` is a part of it."""
        yield from ()
        return None

    def measure(self, kind: RoundKind) -> Steps[None]:
        """Collect the norms of whole tensors for ``apply`` and ``exact`` from other shards."""
        yield from ()

    def exchanged(self, kind: RoundKind) -> Steps[bool]:
        """Take part in one round and apply its outcome; return whether it was taken, the same on
        every rank."""
        outcomes = yield from self.send(kind)
        finite = all(outcome.finite for outcome in outcomes)
        # shards are clipped together, or not at all
        if kind is RoundKind.EXACT and (finite or self.columns is not None):
            finite = (yield from self.clip()) and finite
        if self.columns is not None:
            yield from self.measure(kind)
        taken = yield from self.settled(outcomes, finite)
        if taken:
            yield from self.apply(kind)
        return taken

    # ------------------------------------------------------------ one factor for all ranks

    def agree_on_gain(self, *, exact: bool) -> Steps[float]:
        """Agree on the factor of local gradients, 1 / loss scale included; an exact round clips
        their mean instead.

        After the freeze no rank has the mean gradient. Its norm is estimated as √(mean ‖g_i‖²)
        times their ratio during the exact steps, ``facts.norm_ratio``.
        """
        gain = self.gain()
        if self._max_norm is None:
            return gain
        if self.columns is not None:
            gradients = [self._flat.gradient(i) for i in self.numbers]
            self._local_norm = (yield from self.squares_of_mesh(gradients, gain)) ** 0.5
        else:
            every = yield from self.gathered([self.squares(gain)])
            self._local_norm = float(every[:, 0].mean()) ** 0.5
        if exact or not isfinite(self._local_norm):
            return gain
        return gain * self.factor_of_local(self._local_norm)

    def factor_of_local(self, norm: float) -> float:
        """Return the factor for local gradients of this norm."""
        return self._factor((self.facts.norm_ratio or 1.0) * norm)

    def clip(self) -> Steps[bool]:
        """Clip the mean gradient as ``clip_grad_norm_`` does; False if its norm is not finite."""
        if self._max_norm is None:
            return True
        known = yield from self.norm_of_mean()
        norm = float(torch.linalg.vector_norm(self.mean)) if known is None else known
        if not isfinite(norm):
            return False
        self.mean.mul_(self._factor(norm))
        if self.channel.size > 1 and self._local_norm > 0:
            ratio, facts = norm / self._local_norm, self.facts
            facts.norm_ratio += (0.05 if facts.norm_ratio else 1.0) * (ratio - facts.norm_ratio)
        return True

    def _factor(self, norm: float) -> float:
        """Return the factor for gradients of this norm, beside those of local experts."""
        whole = (norm * norm + self.expert_squares) ** 0.5 if isfinite(norm) else norm
        if self._max_norm is not None:
            self._clipped = min(1.0, self._max_norm / (whole + 1e-6))
        return self._clipped

    def local(self, gain: float) -> None:
        """Step without communication, in optimizers whose ``round`` may be LOCAL."""
        raise TypeError(
            f"{type(self).__name__}.round() said LOCAL: the class must have local(gain), a step "
            "that sends nothing"
        )

    def take(self, kind: RoundKind) -> Steps[bool]:
        """Run one round; return whether it was taken, the same on every rank that must stay
        equal."""
        alone = self.channel.size == 1 and not self.divided
        # no message carries this verdict
        if self.consensus is not None and (kind is RoundKind.LOCAL or alone):
            finite = isfinite(self.squares()) and isfinite(self.expert_squares)
            if not (yield from self.consensus.agreed(finite)):
                return False
        if kind is not RoundKind.LOCAL:
            return (yield from self.exchanged(kind))
        self.local(self.gain())
        return True

    def before(self, kind: RoundKind) -> Steps[None]:
        """Fetch the values that a round of this kind needs."""
        yield from ()

    def after(self, kind: RoundKind) -> Steps[None]:
        """Update facts and schedules after a step was taken."""
        yield from ()

    def wake(self, indices: Sequence[int]) -> Steps[None]:
        """Wake tensors whose gradients no longer fit their frozen variance (see
        ``tensor_states``)."""
        yield from ()

    def replicated(self) -> list[torch.Tensor]:
        """Return the tensors that are equal on every rank."""
        return [self._flat.shard(i) for i in self.numbers]

    # ------------------------------------------------------------ this rank's part of every tensor

    def _show(self) -> None:
        """View this rank's part of every tensor, by number: weights, momentum, variance and the
        mean of the messages."""

        def views(buffer: torch.Tensor) -> list[torch.Tensor]:
            return [self.part_of(buffer, i) for i in self.numbers]

        self._momenta, self._variances = views(self.momentum), views(self.variance)
        self._means = views(self.mean)
        self._weights = views(self.master) if self.divided else self._flat.weights

    def unit(self, i: int) -> torch.Tensor:
        """Return s of this rank's part, the divisor of messages."""
        return self.own(self.tensors.divisor(i), i)

    def root(self, i: int) -> torch.Tensor:
        """Return √v̂ of this rank's part."""
        correction = self.tensors.correction(i, int(self.tensors.variance_steps[i]))
        return (self._variances[i] / correction).sqrt_()

    def _bound(self, i: int, most: torch.Tensor) -> None:
        """Clamp m to ±``most``."""
        m = self._momenta[i]
        m.copy_(torch.minimum(torch.maximum(m, -most), most))

    def adam(self, indices: Iterable[int], gradients: Sequence[torch.Tensor]) -> None:
        """Take Adam's step of these parameters, with mean gradients by number."""
        taken = set(indices)
        for group, every in self.groups():
            at = [i for i in every if i in taken]
            done = self.steps_done - group["added_at"] if group["bias_correction"] else ENDLESS
            if at:
                adam_step(
                    group,
                    [self._weights[i] for i in at],
                    [gradients[i] for i in at],
                    [self._momenta[i] for i in at],
                    [self._variances[i] for i in at],
                    list(torch.full((len(at),), float(done)).unbind()),
                )
        self.tensors.count(taken, self.steps_done + 1)

    # ------------------------------------------------------------ one step

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        self._follow_groups()
        if self.grad_scaler is None and hasattr(self, "found_inf"):
            raise InvalidArgument(
                "step was called by a GradScaler that this optimizer does not know, and cannot "
                "tell what all ranks agreed on: pass it as grad_scaler= to the constructor, or to "
                "commpress.overlap"
            )
        try:
            taken = self.channel.run(self.steps())
        except NonFiniteGradient:
            self._update_scaler(taken=False)
            raise
        self._update_scaler(taken=taken)
        return loss

    def steps(self) -> Steps[bool]:
        """Take one step, as an algorithm that may wait; return whether it was taken, the same on
        every rank."""
        self._follow_groups()
        self._flat.check()
        for p in self._flat.parameters if self.columns is not None else ():
            settle_gradient(p)
        self.facts.see(self.steps_done, max(float(group["lr"]) for group in self.param_groups))
        kind = self.round()
        yield from self.before(kind)
        if self.channel.size > 1 and self._comparison_is_due():
            yield from self._compare_replicas()
        try:
            yield from self._agree_on_experts(kind)
            taken = yield from self.take(kind)
        except CommunicationError:
            self.tensors.remember(False)
            raise
        if taken:
            self._step_experts(kind)
        self._use_choice()
        waking = self.tensors.waking()  # if a header asked for it
        self.tensors.remember(taken)
        if taken:
            self.steps_done += 1
            self.compressed += kind is RoundKind.COMPRESSED
            yield from self.after(kind)
            yield from self._agree_who_wakes(waking)
        self.counters.step(
            kind.value, taken, self.sent_bytes(), self._flat.numel, self.channel.size
        )
        if not taken:
            self._report_skipped()
        return taken

    def _agree_on_experts(self, kind: RoundKind) -> Steps[None]:
        """Sum the squares of gradients of local experts over all ranks. In a step without
        communication, this rank's own squares stand for those of the others."""
        if self.experts is None:
            return
        squares = inf if self.overflowed else self.experts.squares(self.gain())
        if kind is RoundKind.LOCAL or self.channel.size == 1:
            self.experts.total = squares * self.channel.size
        else:
            self.experts.total = float((yield from self.gathered([squares])).sum())

    @property
    def expert_squares(self) -> float:
        """Squares from ``_agree_on_experts``, not finite if a gradient was not; 0 without local
        experts."""
        return 0.0 if self.experts is None else self.experts.total

    def _step_experts(self, kind: RoundKind) -> None:
        if self.experts is None:
            return
        if kind is RoundKind.LOCAL and not isfinite(self.experts.total):
            self.counters.ignored_gradients += 1
            return
        self.experts.step(self.gain() * self._clipped)

    def gathered(self, values: Sequence[float]) -> Steps[np.ndarray]:
        """Gather ``values`` of every rank as float64[ranks, len(values)]."""
        return self.channel.gathered(values)

    def exact_mean(self, indices: Sequence[int]) -> Steps[bool]:
        """Replace ``work`` of these parameters by its exact mean; return whether it is finite."""
        exchanges = Exchanges(
            Same(EXACT), self.channel.size, self.channel.workspace, feedback=False
        )
        exact = exchanges.of(
            tuple(indices), lambda: (self.spans(indices), [()] * len(indices)), self._flat.device
        )
        call = self.channel.call(exact.sequences)
        outcomes = yield from exact.steps(self.channel, self.work, call)
        return all(outcome.finite for outcome in outcomes)

    def gain(self) -> float:
        """Return 1 / loss scale if gradients still have a GradScaler's scale, else 1."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else 1.0 / float(scale)

    @property
    def overflowed(self) -> bool:
        """True if a GradScaler found infinity in the gradients of this rank."""
        return bool(float(getattr(self, "found_inf", 0.0)))

    def squares(self, gain: float = 1.0) -> float:
        """Return ‖gain·g‖² of this rank."""
        return self.kernels.square_sum(self._flat.segments(self.numbers)) * gain * gain

    def sent_bytes(self) -> int:
        """Return bytes sent since the last call: rounds may begin long before ``step``."""
        before, self._counted = self._counted, self.channel.sent_bytes
        return self._counted - before

    # ------------------------------------------------------------ agreement

    def settled(self, outcomes: Sequence[Outcome], finite: bool = True) -> Steps[bool]:
        """Commit all outcomes if all ranks that must stay equal were finite, else discard them."""
        finite = (
            finite and isfinite(self.expert_squares) and all(outcome.finite for outcome in outcomes)
        )
        asked = any(outcome.asks for outcome in outcomes)
        if self.consensus is not None:
            every = yield from self.consensus.gathered([float(finite), float(asked)])
            finite = bool(every[:, 0].all())
            if self.columns is not None:
                asked = bool(every[:, 1].any())
        settle(outcomes, taken=finite)
        self.handover.settle(taken=finite)
        self._woken = []
        self._asked = finite and asked
        return finite

    def squares_of_mesh(
        self, tensors: Sequence[torch.Tensor | None], gain: float = 1.0
    ) -> Steps[float]:
        """Return ‖gain·g‖² of whole gradients from the shards of all ranks, averaged over
        replicas."""
        assert self.columns is not None
        assert self.consensus is not None
        own = sum(
            self.columns.share(p) * float(g.square().sum(dtype=torch.float64))
            for p, g in zip(self._flat.parameters, tensors, strict=True)
            if g is not None
        )
        every = yield from self.consensus.gathered([own * gain * gain])
        return float(every.sum()) / self.channel.size

    @property
    def patience(self) -> int:
        """Number of steps in which a variance forgets its earlier values."""
        return max(round(2 / (1 - max(group["betas"][1] for group in self.param_groups))), 1)

    def agree_on_floor(self) -> Steps[None]:
        """Agree on the floor of tensors without variance, taken over all other tensors; with
        ``agree_over``, those of all its ranks."""
        if self.consensus is not None:
            squares = yield from self.consensus.gathered(self.tensors.squares())
            total, numel = squares.sum(axis=0)
            self.tensors.common = float(np.sqrt(total / max(numel, 1)))

    def asks(self) -> bool:
        """True if this rank wants tensors to wake up."""
        return bool(self.tensors.waking().any())

    def _agree_who_wakes(self, waking: np.ndarray) -> Steps[None]:
        """Wake the tensors that ranks meant when they asked in a header.

        Later findings wait for the next request: otherwise the requests of other ranks would decide
        when tensors wake, and shard peers would differ. The step before this stays valid even if a
        peer fails here; the next step raises."""
        if not self._asked:
            return
        self._asked = False
        try:
            every = yield from self.gathered(waking.tolist())
            if self.columns is not None:  # shards of a tensor are frozen or live together
                asked: list[float] = np.atleast_1d(every.any(axis=0)).astype(float).tolist()
                every = yield from self.columns.gathered(asked)
            indices = np.flatnonzero(every.any(axis=0)).tolist()
            if indices:
                yield from self.wake(indices)
        except CommunicationError as error:
            log.warning(
                "step %d is done, but tensors that should wake up after it could not: %s",
                self.steps_done,
                error,
            )
            return
        if indices:
            self.handover.settle(taken=True)
            self._woken = indices
            self.counters.woken_tensors += len(indices)

    @property
    def max_grad_norm(self) -> float | None:
        return self._max_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        if (
            norm is not None
            and self.consensus is not None
            and not (self.columns is not None and self.clips_shards)
        ):
            raise InvalidArgument(
                f"max_grad_norm is {norm!r}, expected None: the optimizer has agree_over, see there"
            )
        _check_norm(norm)
        self._max_norm, self._clipped = norm, 1.0

    def _comparison_is_due(self) -> bool:
        came = self._reformed or any(
            group["added_at"] == self.steps_done for group in self.param_groups
        )
        return self.check_every > 0 and (came or self.steps_done % self.check_every == 0)

    def _compare_replicas(self) -> Steps[None]:
        """Check that groups and parameters (inside a window: the anchor) are equal on every rank,
        bit for bit."""
        flat = self._flat
        sums = [0 if g is None else bits_of(g) for g in map(flat.gradient, self.numbers)]
        gradients = checksum_of(sums) if any(sums) else 0
        mine = [checksum_of(map(bits_of, self.replicated())), self.steps_done, gradients]
        try:
            every = yield from self.gathered([*mine, *self._layout()])
        except Mismatch as mismatch:
            raise Mismatch(f"{mismatch} {SAME_GROUPS}", ranks=mismatch.ranks) from None
        if different := different_from_first(every[:, 3:]):
            counts = ", ".join(
                f"rank {r} {int(groups)} with {int(count)}"
                for r, (groups, count, _) in enumerate(every[:, 3:])
            )
            raise Mismatch(
                f"ranks {list(different)} have other parameter groups than rank 0 (groups and "
                f"parameters: {counts}; or names, shapes, dtypes, or the step at which they came). "
                f"{SAME_GROUPS}",
                ranks=different,
            )
        if different := different_from_first(every[:, :2]):
            raise Mismatch(
                f"after {self.steps_done} steps the parameters of ranks {list(different)} differ "
                f"from those of rank 0 (steps done: {every[:, 1].astype(int).tolist()}). Start "
                "every rank from the same weights (DistributedDataParallel broadcasts them) and "
                "change parameters only through this optimizer.",
                ranks=different,
            )
        self._reformed = False
        if self.bucket_rounds is None and every[0, 2] and (every[:, 2] == every[0, 2]).all():
            warn_on_first(
                self.channel.rank,
                "gradients are the same in every bit on all ranks: somebody averaged them already, "
                "so compression saves nothing. Under DistributedDataParallel call "
                "commpress.overlap(ddp, optimizer).",
            )

    def _layout(self) -> tuple[int, int, int]:
        """Return the number of groups, of parameters, and a checksum of names, shapes and
        dtypes."""
        flat = self._flat
        said = [
            (group["added_at"], sum(id(p) in flat.index for p in group["params"]))
            for group in self.param_groups
        ]
        every = [
            (n, tuple(s), p.dtype)
            for n, s, p in zip(flat.names, flat.shapes, flat.parameters, strict=True)
        ]
        return len(said), len(every), zlib.crc32(repr((said, every, self.experts is None)).encode())

    def _report_skipped(self) -> None:
        """Raise, or warn at intervals, that the step was skipped on all ranks."""
        step, count = self.steps_done, self.counters.skipped_steps
        if self.on_nonfinite == "raise":
            raise NonFiniteGradient(
                f"the gradients of step {step} hold NaN or infinity on some rank. Nothing was "
                "changed. Look for the cause in the loss, or pass on_nonfinite='skip'."
            )
        if count <= 3 or count % 100 == 0:
            warn_on_first(
                self.channel.rank,
                "step %d was skipped on all ranks: gradients held NaN or infinity on some rank (%d "
                "so far)",
                step,
                count,
            )

    def _update_scaler(self, *, taken: bool) -> None:
        if (
            self.grad_scaler is not None
            and self.grad_scaler._scale is not None
            and hasattr(self, "found_inf")
        ):
            verdict = torch.tensor(float(not taken), device=self.grad_scaler._scale.device)
            self.grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {
                verdict.device: verdict
            }

    # ------------------------------------------------------------ checkpoints

    def exchange_sets(self) -> Mapping[str, Any]:
        return {"full": self.full, "quantized": self.quantized}

    def numels(self) -> dict[str, int]:
        return {n: numel for n, (_, numel) in zip(self._flat.names, self._flat.places, strict=True)}

    def schedule(self) -> dict[str, Any]:
        trips = {"trips": self.tensors.trips.tolist()} if "trips" in self.entries else {}
        chosen = self.choice.state()
        chosen |= {"compressed": self.compressed} if chosen else {}
        return {"facts": self.facts.as_dict()} | trips | chosen

    def check(self, schedule: Mapping[str, Any]) -> None:
        check_entries(schedule, ("facts", *self.entries), "the state of a rank")
        Facts.of(schedule["facts"])
        if "trips" in self.entries:
            count = len(self._flat.parameters)
            checkpoint.check_length(schedule["trips"], count, "counts of large gradients")

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        self.facts = Facts.of(schedule["facts"])
        self.choice.load(schedule)
        self.compressed = schedule.get("compressed", 0)
        self._use_choice()
        if self.experts is not None and schedule.get("own") is not None:
            self.experts.load(schedule["own"])
        if "trips" in self.entries:
            self.tensors.trips[:] = schedule["trips"]

    def part(self) -> dict[str, Any]:
        own = {} if self.experts is None else {"own": self.experts.state()}
        return super().part() | own

    def joined(self, states: Sequence[dict[str, Any]], missing: str) -> dict[str, Any]:
        checkpoint.check_window(self, states)
        return checkpoint.own(self, states, missing)

    def state_dict(self) -> dict[str, Any]:
        return torch.optim.Optimizer.state_dict(self) | {"commpress": self.part()}

    def elastic_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a state for any world size; collective, between steps. Rank
        0's part has the common state."""
        if self.experts is not None:
            name = self.experts.flat.names[0]
            raise InvalidArgument(
                f"elastic_state_dict fits any number of ranks, but {name!r} lies on this one "
                "alone: save state_dict() on every rank, and load it on as many"
            )
        return super().elastic_state_dict()

    def elastic_steps(self) -> Steps[dict[str, Any]]:
        part = yield from self.elastic_part()
        return checkpoint.elastic(self, torch.optim.Optimizer.state_dict(self), part)

    @torch.no_grad()
    def load_state_dict(  # type: ignore[override]
        self, state_dict: dict[str, Any], *others: dict[str, Any]
    ) -> None:
        """Load this rank's ``state_dict`` or all ranks' ``elastic_state_dict``s. Where every rank
        has all state, that of torch's Adam or AdamW will do; where it is divided, load the model
        first. A state that does not fit changes nothing."""
        self._follow_groups()
        checkpoint.load(self, [state_dict, *others])

    @torch.no_grad()
    def load_rank_state(self, *parts: dict[str, Any]) -> None:
        """Load this rank's ``rank_state``, the ``commpress`` entry of its ``state_dict``, or all
        ranks', however many, after another rank's state gave the common state."""
        checkpoint.load_rank(self, parts)

    @torch.no_grad()
    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Take over another rank's ``shared_state``, with its weights; residuals stay."""
        super().load_shared_state(checkpoint.with_torch(state))

    def read(self, states: Sequence[dict[str, Any]]) -> Checked:
        return super().read([checkpoint.current(state) for state in states])

    # ------------------------------------------------------------ residuals

    def relative_residual(self) -> float:
        """Return ‖residual of this rank‖ / ‖momentum‖, both divided by s as in a step."""
        numbers, left = {name: i for i, name in enumerate(self._flat.names)}, 0.0
        for (name, offset), sent, _ in self.quantized.residuals.places():
            left += float(self.as_momentum(numbers[name], offset, sent).square().sum())
        return (left / self.momentum_squares()) ** 0.5 if left else 0.0

    def as_momentum(self, i: int, offset: int, owed: torch.Tensor) -> torch.Tensor:
        """Convert a piece's residual into units of m/s; those of live tensors are gradients."""
        if self.tensors.frozen[i]:
            return owed
        return (
            owed
            * (1 - self.tensors.group(i)["betas"][0])
            / self.tensors.divisor(i).view(-1)[offset : offset + owed.numel()]
        )

    def momentum_squares(self) -> float:
        """Return ‖m/s‖² of all parameters, estimated from this rank's rows if state is divided."""
        squares = (float((m / self.unit(i)).square().sum()) for i, m in enumerate(self._momenta))
        return (self.channel.size if self.divided else 1) * sum(squares)


DEEPSPEED = {  # its options, and ours
    "freeze_step": "exact_steps=",
    "var_freeze_step": "variance_updates=, which become ever rarer and do not end",
    "var_update_scaler": "variance_updates=",
    "local_step_scaler": "sync=",
    "local_step_clipper": "sync=",
    "comm_backend_name": "process_group=",
    "cuda_aware": "process_group=",
    "deepspeed": "no engine: call step() yourself",
    "max_coeff": "coefficients=(low, high)",
    "min_coeff": "coefficients=(low, high)",
    "factor_max": "factors=(low, high)",
    "factor_min": "factors=(low, high)",
    "factor_threshold": "factor_change=",
    "coeff_beta": "coefficient_beta=",
}


def _refuse_unknown(kind: type, options: dict[str, Any]) -> None:
    """Raise an error for unknown options; for DeepSpeed's, name ours."""
    for word, value in options.items():
        if word in DEEPSPEED:
            name = kind.__name__
            raise InvalidArgument(
                f"{name} got {word}={value!r}, which is DeepSpeed's word; here it is "
                f"{DEEPSPEED[word]}"
            )
    refuse_unknown(kind.__name__, options, *_constructors(kind))


def _constructors(kind: type) -> list[Callable[..., object]]:
    return [base.__init__ for base in kind.__mro__ if issubclass(base, CompressedOptimizer)]


def _refuse_options(kind: type, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise an error for options in a parameter group that only the constructor reads."""
    every = {name for each in _constructors(kind) for name in signature(each).parameters}
    for name in sorted(every.intersection(group) - {"params", *defaults}):
        raise InvalidArgument(
            f"{name} is {group[name]!r} in a parameter group, but {kind.__name__} has one for all: "
            "pass it to the constructor; codecs by name are commpress.ByName({...}, 'sign')"
        )


def _check_norm(norm: float | None) -> None:
    if norm is not None and not norm > 0:
        raise InvalidArgument(f"max_grad_norm is {norm!r}, expected a positive number or None")


def check_numbers(group: dict[str, Any]) -> None:
    """Raise ``InvalidArgument`` for hyperparameters of a group that Adam cannot use."""
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0:
            raise InvalidArgument(f"{name} is {group[name]!r}, expected a number of at least 0")
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise InvalidArgument(
                f"{name} is {group[name]!r} in a parameter group, expected False: no compressed "
                "optimizer does that"
            )
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InvalidArgument(f"betas is {betas!r}, expected two numbers of at least 0 and below 1")
    if betas[0] ** 2 >= betas[1]:
        raise InvalidArgument(
            f"betas is {betas!r}, expected the square of the first to be below the second: else a "
            "step of Adam has no bound, and what one bit says of momentum would be divided by next "
            "to nothing"
        )


def rate_of(group: dict[str, Any], step: int) -> float:
    """Return the learning rate divided by Adam's correction of momentum in this step."""
    own = step - group.get("added_at", 0)
    correction = 1 - group["betas"][0] ** (own + 1) if group.get("bias_correction", True) else 1.0
    return float(group["lr"]) / correction


def decay_of(group: dict[str, Any]) -> float:
    """Return the weight decay factor of a step."""
    return 1 - float(group["lr"]) * group["weight_decay"]


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss from a closure, run with gradients enabled, or None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def different_from_first(rows: np.ndarray) -> tuple[int, ...]:
    """Return the ranks whose row differs from rank 0's."""
    return tuple(np.flatnonzero((rows != rows[0]).any(axis=1)).tolist())


def checksum_of(sums: Iterable[int]) -> int:
    return zlib.crc32(np.array(list(sums), np.int64).tobytes())


def bits_of(x: torch.Tensor) -> int:
    return int(x.float().contiguous().view(-1).view(torch.int32).sum(dtype=torch.int64))
