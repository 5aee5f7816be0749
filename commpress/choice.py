"""Choice: the codecs of each step, alike on all ranks.

    choice.at(step, peers)       the codecs of the step that begins, whether its buckets are to be
                                 observed, and the step until which the answer holds; may wait
    choice.looks(step)           whether buckets of this step are to be observed
    choice.observe(step, seen)   record one of these buckets, as this rank sent it
    choice.state()               data for ranks that join and for a resumed run

A fixed codec is the simplest choice. Others try several, choose for every layer, or wrap another
choice: exact first steps, an alarm. Callers treat all alike. A step without compression
(``Now.policy`` is None) also sends the residuals of earlier steps.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from commpress.alarm import NONE, WARN, Alarm, Peers
from commpress.codecs import Codec, Policy, codec_named
from commpress.codecs.planned import PLAIN
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.collectives.agreement import Consensus
from commpress.collectives.allreduce import Outcome, average
from commpress.collectives.buckets import Span
from commpress.collectives.powersgd import MatrixPlan
from commpress.errors import InvalidArgument, check_counts
from commpress.kernels.matrices import SOURCE, TALL, WIDE
from commpress.logs import tell_on_first, warn_on_first
from commpress.plan.assignment import (
    OPTIONS,
    assign_by,
    assign_ranks,
    errors_of,
    errors_of_ranks,
    rank_options,
)
from commpress.work import Steps

AUTO = "auto"
# from the most exact to the coarsest; a codec that may change a loss is tried only on request
METHODS = (PLAIN, "fp8", "int4")
# also tried where ranks reduce in one level, and used if its residuals stay small
LOW_RANK = "powersgd-8+fp8"
UNTIMED = 3  # first steps: DDP rebuilds its buckets, memory is allocated, kernels are compiled
CONSECUTIVE = 3  # steps of a method in a row; the first of them does not count
ROUNDS = 4  # turns of each method
MARGIN = 0.03  # share of its seconds that a coarser method must save over a finer one
LATE = 2.0  # limit of residuals, in gradients, for a codec that the user did not ask for
SETTLED = 20  # steps before the first look at the ranks of gradients
SAMPLED = 1 << 16  # elements examined, spread evenly over all parameters
EVERY = 100  # steps between two looks at the chosen codec
PATIENCE = 2  # late looks in a row before another codec replaces it

Named = Callable[[str | Codec | Policy], Policy]  # makes the policy of an option


class Now(NamedTuple):
    """Decision for a step: ``policy`` None is torch's own all-reduce, ``exact`` sends floats in
    commpress's messages."""

    policy: Policy | None
    exact: bool = False
    looks: bool = False  # its buckets are to be observed
    until: float = 0.0  # the step before which the answer stays the same


class Seen(NamedTuple):
    """A bucket of this rank: its gradient, the encoder's input, the outcomes with new residuals,
    and the plans of what travels as matrices. A tensor may have several spans."""

    spans: Sequence[Span]
    gradient: torch.Tensor
    compensated: torch.Tensor | None
    outcomes: Sequence[Outcome]
    plans: Sequence[MatrixPlan] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's gradient of each tensor, its spans one after the other."""
        parts: dict[str, list[torch.Tensor]] = {}
        for span in self.spans:
            part = self.gradient[span.source : span.source + span.numel]
            parts.setdefault(span.name, []).append(part)
        return {name: torch.cat(own) if own[1:] else own[0] for name, own in parts.items()}


class Choice:
    """The same codecs in every step, or torch's own all-reduce."""

    why = ""  # reason of the choice, in words

    def __init__(self, usual: Policy | None, *, start: int = 0) -> None:
        """``start``: the first step that is compressed."""
        self.usual, self.start = usual, start

    def at(self, step: int, peers: Peers, *, aborted: bool = False) -> Steps[Now]:
        """Return the codecs of the step that begins; collective. ``aborted``: the last backward was
        aborted."""
        yield from ()
        exact = step < self.start
        return Now(self.usual, exact, until=self.start if exact else inf)

    def looks(self, step: int) -> bool:
        """True if buckets of this step are to be observed, as ``at`` says."""
        return False

    def observe(self, step: int, seen: Seen) -> None:
        """Record a bucket of a finite step for which ``looks`` is true."""

    def state(self) -> dict[str, Any]:
        """Return the data that all ranks have in common."""
        return {}

    def saved(self) -> dict[str, Any]:
        """Return the part of ``state`` that belongs in checkpoints."""
        return self.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` or ``saved``."""


# ---------------------------------------------------------------- a trial


class Auto(Choice):
    """Try every method for a few steps in turn, then use the fastest whose residuals stay small.

    The method of a step of the trial is a pure function of the step's number. At the end the ranks
    exchange the seconds of their steps, once: the slowest rank's seconds count, so that all ranks
    decide alike. A resumed run tries again.

    For ``judged`` methods, which the user did not ask for, ranks also measure the lateness: the
    norm of the residual relative to the gradient.

        ‖Σᵢ eᵢ / P + s‖ / ‖mean gradient‖        1: one whole gradient is still to be sent

    The residuals of all ranks are summed first, because a low-rank codec leaves on each rank the
    noise in which its gradient differs from the others, and this adds up to little. ``fp8`` has a
    lateness of 0.04, ``int4`` 0.2, ``powersgd-8+fp8`` 0.1 to 0.5, ``sign`` 5 to 100 (a GPT of 0.9
    million parameters, 240 steps): up to ``LATE`` training is as good as without compression.
    """

    def __init__(
        self,
        methods: Sequence[str],
        named: Named,
        *,
        widens: bool = False,
        start: int = 0,
        numel: int = SAMPLED,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Try ``methods``, and ``LOW_RANK`` if ``widens`` and the ranks reduce in one level.
        ``numel``: elements of all parameters together."""
        super().__init__(named(methods[-1]), start=start)
        self.methods, self.judged = tuple(methods), tuple[str, ...]()
        self._named, self._clock = named, clock
        self._widens = widens and LOW_RANK not in methods
        self._stride = max(numel // SAMPLED, 1)
        # sample of each parameter in the last observed step, and its number of elements
        self._samples: dict[str, tuple[torch.Tensor, int]] = {}
        self._begin()

    def _begin(self) -> None:
        self.method, self.instead, self.late = "", "", 0  # the result, and the second best
        self._step = 0  # step of the trial
        self._took: list[float] = []  # seconds of each step until the next one began
        self._began = 0.0
        self._lateness: dict[str, float] = {}

    @property
    def steps(self) -> int:
        """Number of steps of the trial."""
        return steps_of_trial(self.methods)

    def turn(self, step: int) -> str:
        """Return the method of a step of the trial."""
        return self.methods[max(step - UNTIMED, 0) // CONSECUTIVE % len(self.methods)]

    def at(self, step: int, peers: Peers, *, aborted: bool = False) -> Steps[Now]:
        if step < self.start:
            return Now(self.usual, exact=True)
        if not aborted:
            yield from (self._watch if self.method else self._try)(step, peers)
        method = self.method or self.turn(self._step - 1)
        policy = None if method == PLAIN else self._named(method)
        return Now(policy, looks=self.looks(step))

    def _try(self, step: int, peers: Peers) -> Steps[None]:
        """Record the last step of the trial and begin the next one, or decide after the last."""
        now, channel = self._clock(), peers.channel
        if self._step == 0:
            if self._widens and channel.levels is None and LOW_RANK not in self.methods:
                usual, more = self.methods[: len(METHODS)], self.methods[len(METHODS) :]
                self.methods, self.judged = (*usual, LOW_RANK, *more), (LOW_RANK,)
        else:
            self._took.append(now - self._began)
            if self._judges():
                self._lateness[self.turn(self._step - 1)] = yield from self._late(peers)
        self._step, self._began = self._step + 1, now
        if self._step > self.steps:
            every = yield from channel.gathered(self._took)
            self.method, self.why = self.decide(every.max(axis=0).tolist())
            tell_on_first(channel.rank, "codec='auto' goes on with %s", self.why)

    def decide(self, seconds: Sequence[float]) -> tuple[str, str]:
        """Return the chosen method and the reason. ``seconds``: those of the slowest rank in each
        step."""
        took: dict[str, list[float]] = {method: [] for method in self.methods}
        for step in range(UNTIMED, self.steps):
            if (step - UNTIMED) % CONSECUTIVE:
                took[self.turn(step)].append(seconds[step])
        medians = {method: median(every) for method, every in took.items()}
        able = [method for method in self.methods if self._lateness.get(method, 0.0) <= LATE]
        chosen = _best(medians, able)
        if chosen in self.judged:
            self.instead = _best(medians, [each for each in able if each not in self.judged])
        measured = ", ".join(f"{each} {1e3 * taken:.4g} ms" for each, taken in medians.items())
        kept = [
            f"{each} keeps back {late:.2g} gradients (at most {LATE:g})"
            for each, late in self._lateness.items()
        ]
        return chosen, "; ".join([f"{chosen}, because a step took {measured}", *kept])

    def _watch(self, step: int, peers: Peers) -> Steps[None]:
        """Replace the chosen codec if its lateness stays above the limit."""
        if not self.instead or not self._due(step - 1):
            return
        lateness = yield from self._late(peers)
        self.late = self.late + 1 if lateness > LATE else 0
        if self.late < PATIENCE:
            return
        self.why = f"{self.instead}, because {self.method} kept back {lateness:.2g} gradients"
        told = "codec='auto' goes on with %s from step %d on"
        warn_on_first(peers.channel.rank, told, self.why, step)
        self.method, self.instead = self.instead, ""

    def _due(self, step: int) -> bool:
        return step % EVERY == EVERY - 1

    def _judges(self) -> bool:
        """Return whether the current step is the last one of a judged method."""
        step = self._step - 1
        last = step >= self.steps - CONSECUTIVE * len(self.methods)
        ends = (step - UNTIMED) % CONSECUTIVE == CONSECUTIVE - 1
        return last and ends and self.turn(step) in self.judged

    def looks(self, step: int) -> bool:
        return self._judges() if not self.method else bool(self.instead) and self._due(step)

    def observe(self, step: int, seen: Seen) -> None:
        for name, own in seen.tensors().items():
            self._samples[name] = own[:: self._stride].clone(), own.numel()

    def _late(self, peers: Peers) -> Steps[float]:
        """Return the lateness in the observed step, equal on all ranks."""
        if not self._samples:  # the step was not finite
            return 0.0
        own, left = list[torch.Tensor](), list[torch.Tensor]()
        for name, (sample, numel) in sorted(self._samples.items()):
            residual = torch.zeros(numel, device=sample.device)
            assert peers.add_residual is not None
            peers.add_residual(name, residual)
            own.append(sample)
            left.append(residual[:: self._stride])
        self._samples.clear()
        table = torch.cat([*own, *left])
        yield from average(table, peers.channel.call(1), name="lateness")
        gradient, behind = table.view(2, -1).double().norm(dim=1).tolist()
        return behind / gradient if gradient > 0 else 0.0

    def state(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "instead": self.instead,
            "late": self.late,
            "why": self.why if self.method else "",
        }

    def saved(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        if "method" not in state:
            return
        self._begin()
        self.method, self.instead = state["method"], state["instead"]
        self.late, self.why = state["late"], state["why"]


def _best(medians: Mapping[str, float], able: Sequence[str]) -> str:
    """Return the fastest method, or a finer one that is hardly slower."""
    best = min(medians[method] for method in able)
    return next(method for method in able if medians[method] * (1 - MARGIN) <= best)


def steps_of_trial(methods: Sequence[str]) -> int:
    return UNTIMED + CONSECUTIVE * ROUNDS * len(methods)


def methods_of(codec: object) -> tuple[str, ...]:
    """Return the methods that 'auto' tries: 'auto+sign' adds to the usual ones, 'auto:fp8,sign'
    replaces all but no compression. Empty for any other codec."""
    found = re.fullmatch(rf"{AUTO}(?:([+:])(.*))?", codec) if isinstance(codec, str) else None
    if found is None:
        return ()
    more = [name.strip() for name in found[2].split(",")] if found[1] else []
    methods = (PLAIN, *more) if found[1] == ":" else (*METHODS, *more)
    for method in methods[1:]:
        codec_named(method)
    return tuple(dict.fromkeys(methods))


# ---------------------------------------------------------------- a codec for every layer


@dataclass(frozen=True)
class PerLayer:
    """Choose a codec for every layer from the current gradients, again every ``every`` steps: the
    fewest bytes at the total error that ``uniform`` would make in all layers. Of PowerSGD the rank
    of every matrix: the least total error in the bytes of ``uniform``.

    ``commpress.compress(ddp, commpress.PerLayer("powersgd-8+fp8", every=100))``.

    - ``uniform``: the codec that sets the total error, or the bytes.
    - ``every``: steps between two choices.
    """

    uniform: str = "int4"
    every: int = 1000

    def __post_init__(self) -> None:
        check_counts(every=self.every)
        if not isinstance(self.uniform, str) or self.every < 1:
            raise InvalidArgument(
                f"PerLayer got {self.uniform!r} and every={self.every!r}, expected a name such as "
                "'int4' and a number from 1"
            )
        codec_named(self.uniform)


@dataclass(frozen=True)
class Ruled:
    """A policy with codecs by name, and ``base`` for all other parameters."""

    base: Policy
    rules: Mapping[str, str]

    def choose(self, name: str, numel: int) -> Codec:
        return (
            codec_named(self.rules[name]) if name in self.rules else self.base.choose(name, numel)
        )


class Layered(Choice):
    """Choose a codec for every layer as ``PerLayer`` describes (``plan.assignment``).

    In a step that is due, every rank measures the error of each option for its own gradients.
    Before the next step the ranks sum their errors, once, and each solves the same problem, so that
    all find the same codecs. Layers that are sent exactly stay so. Gradients with NaN or infinity
    change nothing.
    """

    def __init__(self, wanted: PerLayer, named: Named, *, start: int = 0) -> None:
        self.base = named(wanted.uniform)  # decides which layers are sent exactly
        super().__init__(self.base, start=start)
        self.wanted = wanted
        self.options = tuple(dict.fromkeys([*OPTIONS, wanted.uniform]))
        self.rules: dict[str, str] = {}  # name → codec, as last chosen
        self._errors: dict[str, list[float]] = {}
        self._shapes: dict[str, tuple[int, int]] = {}

    def looks(self, step: int) -> bool:
        return step >= self.start and (step - self.start) % self.wanted.every == 0

    def observe(self, step: int, seen: Seen) -> None:
        for name, own in seen.tensors().items():
            if not self.base.choose(name, own.numel()).lossless:
                self._errors[name] = errors_of(own, self.options)
                self._shapes[name] = 1, own.numel()

    def at(self, step: int, peers: Peers, *, aborted: bool = False) -> Steps[Now]:
        if self._errors:
            yield from self._decide(step - 1, peers)
        return Now(self.usual, exact=step < self.start, looks=self.looks(step))

    def _decide(self, step: int, peers: Peers) -> Steps[None]:
        names = sorted(self._errors)
        own = torch.tensor([self._errors[n] for n in names], dtype=torch.float64)
        table = yield from peers.total(own)
        self._errors.clear()
        if not torch.isfinite(table).all():
            return
        rules, gain = self.assigned(
            dict(zip(names, table.tolist(), strict=True)), peers.channel.size
        )
        self.why = f"of step {step}: {gain}"
        self._use(self.rules | rules)

    def assigned(
        self, errors: Mapping[str, Sequence[float]], ranks: int
    ) -> tuple[dict[str, str], str]:
        """Return the codec of each of these layers, and what that gains."""
        uniform, numels = self.wanted.uniform, {name: self._shapes[name][1] for name in errors}
        found = assign_by(errors, numels, self.options, ranks=ranks, uniform=uniform)
        gain = f"{found.gain:.2f} times fewer bytes than {uniform} for every layer, at its error"
        return dict(found.rules), gain

    def _use(self, rules: Mapping[str, str]) -> None:
        self.rules = dict(rules)
        self.usual = Ruled(self.base, self.rules) if rules else self.base

    def state(self) -> dict[str, Any]:
        return {"rules": dict(self.rules)}

    def saved(self) -> dict[str, Any]:
        errors = {name: (self._shapes[name], every) for name, every in self._errors.items()}
        return self.state() | ({"errors": errors} if errors else {})

    def load(self, state: Mapping[str, Any]) -> None:
        rules, errors = state.get("rules", {}), state.get("errors", {})
        for codec in rules.values():
            codec_named(codec)
        self._errors = {name: list(every) for name, (_, every) in errors.items()}
        self._shapes |= {name: tuple(shape) for name, (shape, _) in errors.items()}
        self._use(rules)


class LayeredRanks(Layered):
    """Choose the rank of every matrix that travels as two factors; other tensors stay with the
    codec that they have, so that residuals keep their cut."""

    def __init__(
        self, wanted: PerLayer, codec: LowRankCodec, named: Named, *, start: int = 0
    ) -> None:
        super().__init__(wanted, named, start=start)
        self._codec, self._ranks = codec, rank_options(codec)

    def looks(self, step: int) -> bool:
        # the very first gradients of a model say little about the ranks of later ones
        every, since = self.wanted.every, step - self.start
        return since >= 0 and since % every == min(SETTLED, every - 1)

    def observe(self, step: int, seen: Seen) -> None:
        for plan in seen.plans:
            for name, line in zip(plan.names, plan.matrices.table.tolist(), strict=True):
                shape = line[TALL], line[WIDE]
                part = seen.gradient[line[SOURCE] :][: shape[0] * shape[1]]
                self._errors[name] = errors_of_ranks(part.view(shape), self._ranks)
                self._shapes[name] = shape

    def assigned(
        self, errors: Mapping[str, Sequence[float]], ranks: int
    ) -> tuple[dict[str, str], str]:
        uniform = self.wanted.uniform
        found = assign_ranks(errors, self._shapes, self._codec, ranks=ranks)
        rules = {n: re.sub(r"\d+", str(rank), uniform, count=1) for n, rank in found.ranks.items()}
        return rules, f"{found.share:.2f} of the error of {uniform} for every layer, in its bytes"


def check_layers(codec: object, size: int, consensus: Consensus | None, beside: str = "") -> None:
    """Refuse ``PerLayer`` beside what it does not see: a ``consensus`` of more ranks than the
    ``size`` that choose together, or as ``beside`` says."""
    if consensus is not None and consensus.transport.size > size and not beside:
        beside = (
            "agree_over, and it adds up errors over the ranks that average, not over all that must "
            "stay equal"
        )
    if isinstance(codec, PerLayer) and beside:
        raise InvalidArgument(
            f"codec is {codec!r} with {beside}: name a codec, such as {codec.uniform!r}"
        )


# ---------------------------------------------------------------- an alarm


class Alarmed(Choice):
    """Follow another choice, except that while its alarm lasts the alarm's codec is used."""

    def __init__(self, inner: Choice, alarm: Alarm, named: Named, *, start: int = 0) -> None:
        super().__init__(inner.usual, start=start)
        self.inner, self.alarm = inner, alarm
        self._then = None if alarm.then in (WARN, NONE) else named(alarm.then)

    @property
    def why(self) -> str:  # type: ignore[override]
        return self.inner.why

    def at(self, step: int, peers: Peers, *, aborted: bool = False) -> Steps[Now]:
        now = yield from self.inner.at(step, peers, aborted=aborted)
        if not aborted and self.alarm.due(step - 1 - self.start):
            yield from self.alarm.look(peers, step - 1)
        now = Now(self._then) if self.alarm.active else now
        return now._replace(looks=self.looks(step), until=0.0)

    def looks(self, step: int) -> bool:
        return self.inner.looks(step) or self.alarm.due(step - self.start)

    def observe(self, step: int, seen: Seen) -> None:
        if self.inner.looks(step):
            self.inner.observe(step, seen)
        if self.alarm.due(step - self.start) and seen.compensated is not None:
            self.alarm.measure(seen.gradient, seen.compensated, seen.outcomes)

    def state(self) -> dict[str, Any]:
        return self.inner.state() | {"alarm": self.alarm.state_dict()}

    def saved(self) -> dict[str, Any]:
        return self.inner.saved() | {"alarm": self.alarm.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.inner.load(state)
        if "alarm" in state:
            self.alarm.load_state_dict(state["alarm"])


# ---------------------------------------------------------------- options


def choice_of(
    codec: str | Codec | Policy | PerLayer | None,
    named: Named,
    *,
    exact_steps: int = 0,
    alarm: Alarm | None = None,
    numel: int = SAMPLED,
    tries: bool = True,
) -> Choice:
    """Make the choice for these options. ``codec`` None compresses nothing; ``named`` makes a
    policy of a codec; ``numel`` is the number of elements of all parameters together; ``tries``:
    ``codec`` may be "auto"."""
    choice: Choice
    if methods := methods_of(codec) if tries else ():
        widens = isinstance(codec, str) and ":" not in codec
        choice = Auto(methods, named, widens=widens, start=exact_steps, numel=numel)
    elif isinstance(codec, PerLayer):
        uniform = codec_named(codec.uniform)
        choice = (
            LayeredRanks(codec, uniform, named, start=exact_steps)
            if isinstance(uniform, LowRankCodec)
            else Layered(codec, named, start=exact_steps)
        )
    else:
        choice = Choice(None if codec is None else named(codec), start=exact_steps)
    return choice if alarm is None else Alarmed(choice, alarm, named, start=exact_steps)
