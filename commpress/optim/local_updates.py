"""Local updates: every rank trains by itself for a round of steps, then all exchange what changed, once.

    Δᵢ = Θ − θᵢ          aᵢ = K·wᵢ/Σw · Δᵢ + ρ·eᵢ         Δ̄ = mean of Q(aᵢ), the same bits on every rank
    Θ ← Outer(Θ, Δ̄)      θᵢ ← α·θᵢ + (1 − α)·Θ            α = 0 unless training went on meanwhile

θᵢ are the parameters of rank i, Θ the shared weights, w counts what a rank has trained on. ``fragments`` of the parameters take
turns within a round; with ``overlap`` a fragment's exchange runs while the next so many steps are computed.

Note: Θ follows from the steps at which fragments leave and arrive alone, not from how long the network takes.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import ceil, isfinite
from time import monotonic
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from commpress.checksum import checksum_of
from commpress.codecs import Codec, Policy, policy_of
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges
from commpress.collectives.residual_state import elastic_of, exact_state, flat_parts, residuals_of
from commpress.collectives.scalars import gathered
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, Mismatch, StateMismatch
from commpress.feedback import ResidualStore
from commpress.optim.fragments import Fragment, cut
from commpress.optim.inner_optimizers import check_inner, check_ranks, parameters_of, weights_of
from commpress.optim.local_weights import LocalWeights, WeightHolder
from commpress.optim.outer import Nesterov, Outer, State, outer_of, square_sum
from commpress.optim.stored_fragment import StoredFragment, check_room
from commpress.optim.warmup import SharedWarmup
from commpress.schedules import Facts, Seconds, Sync, sync_of
from commpress.tiered_mem import TieredStore
from commpress.work import Steps, run

log = logging.getLogger("commpress")

ALONE: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()  # DDP modules whose ranks each keep their own gradients
WEIGHTS = ("equal", "tokens", "steps")
FORMAT = 1


@dataclass
class LocalCounters:
    """Figures of local updates on this rank."""

    steps: int = 0
    rounds: int = 0  # of all fragments
    exchanges: int = 0  # of one fragment each
    sent_bytes: int = 0
    waited: float = 0.0  # seconds in which training stood still for an exchange
    dropped: int = 0  # exchanges in which some rank's change was not finite and was left out
    spread: float = 0.0  # root mean square over the ranks of ‖Δᵢ − Δ̄‖, relative to ‖Δ̄‖, of the last exchange
    participants: int = 0  # ranks whose weight in it was above zero


@dataclass(eq=False)
class Flight:
    """An exchange under way. ``mean`` is there once it has arrived, and from a checkpoint from the beginning."""

    fragment: Fragment
    due: int  # step after which it arrives
    steps: Steps[bool] | None
    future: torch.futures.Future[bool] | None = None
    kept: bool = True  # whether the mean is to be taken


class LocalUpdates(torch.optim.Optimizer):
    """Trains with ``inner`` on every rank by itself and exchanges changes once a round. Takes the optimizer's place in a loop,
    and in what expects one: schedulers of learning rates, GradScaler, Accelerate's ``prepare``.

    - ``inner``: a torch optimizer, or several. The model stays bare: no DistributedDataParallel around it.
    - ``every``: steps of a round, a number, ``commpress.QSR(alpha, base)`` or ``commpress.Seconds(60)``.
    - ``outer``: the rule that moves the shared weights: ``Nesterov``, ``Average``, ``SlowMo``, ``SparseLoCo``, ``Gossip``, or a
      function that makes a torch optimizer.
    - ``codec``: of changes, both ways, with residuals unless ``error_feedback`` is False; None: float32.
    - ``feedback_decay``: residuals are multiplied by it each round.
    - ``fragments``: a number, or lists of parameters: parts of the model that take turns within a round.
    - ``overlap``: steps that are computed while a fragment is under way; ``alpha``: the share of the rank's own weights when it
      arrives.
    - ``group``: the ranks that average. Inside it may stand another kind of parallelism, such as FSDP2 over other ranks.
    - ``warmup``: steps before the first round in which all ranks train as one: their gradients are averaged exactly.
    - ``weight``: "equal", "tokens" (say ``step(tokens=...)``) or "steps": how much a rank counts.
    - ``keep``: "host" or "device": where Θ and the state of the outer step lie; or a TieredStore of this rank's own, which
      also has the residuals, under ``prefix``, and brings those of a fragment to memory for its exchange.
    """

    _step_supports_amp_scaling = True  # a GradScaler calls ``step`` always: ranks count steps alike

    def __init__(
        self,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        every: int | Sync | Seconds = 30,
        outer: Outer | Callable[..., torch.optim.Optimizer] | None = None,
        codec: str | Codec | Policy | None = "int4",
        error_feedback: bool = True,
        feedback_decay: float = 0.95,
        fragments: int | Sequence[Sequence[torch.Tensor]] = 1,
        overlap: int = 0,
        alpha: float = 0.0,
        warmup: int = 0,
        group: Any = None,
        weight: Literal["equal", "tokens", "steps"] = "equal",
        keep: Literal["host", "device"] | TieredStore = "host",
        prefix: str = "local",
        min_numel: int = 256,
        timeout: timedelta | None = None,
        transport: Transport | None = None,
        seed: int = 0,
    ) -> None:
        self.__setstate__({"defaults": {}})  # as torch's own from a file: groups and state are those of ``inner``
        self.inner = [inner] if isinstance(inner, torch.optim.Optimizer) else list(inner)
        if not self.inner or not all(isinstance(each, torch.optim.Optimizer) for each in self.inner):
            raise InvalidArgument(f"inner is {inner!r}, expected a torch optimizer or a list of them")
        if not 0 <= feedback_decay <= 1:
            raise InvalidArgument(f"feedback_decay is {feedback_decay!r}, expected a number from 0 to 1")
        if isinstance(overlap, bool) or not isinstance(overlap, int) or overlap < 0:
            raise InvalidArgument(
                f"overlap is {overlap!r}, expected a number of steps, less than a round has, 0 for none: a whole round "
                "of overlap made the loss more than 6 % worse in trials"
            )
        if not 0 <= alpha < 1 or (alpha and not overlap):
            raise InvalidArgument(
                f"alpha is {alpha!r} with overlap={overlap}, expected 0, or with an overlap a number from 0 to below 1: "
                "without overlap nothing has been trained since the change left"
            )
        if weight not in WEIGHTS:
            raise InvalidArgument(f"weight is {weight!r}, expected one of {', '.join(map(repr, WEIGHTS))}")
        if not isinstance(keep, TieredStore) and keep not in ("host", "device"):
            raise InvalidArgument(f"keep is {keep!r}, expected 'host', 'device' or a TieredStore")
        self.every, self.outer = sync_of(every), outer_of(Nesterov() if outer is None else outer)
        self.feedback_decay, self.overlap, self.alpha, self.weight, self.keep = feedback_decay, overlap, alpha, weight, keep
        self.seed, self.counters, self.facts = seed, LocalCounters(), Facts()
        self._backgrounds = transport is None
        check_inner(self.inner, self.every, warmup)
        self._given = len(parameters_of(self.inner))
        self._frozen = [p for p in parameters_of(self.inner) if not p.requires_grad]
        self._holders = [each for each in self.inner if isinstance(each, WeightHolder)]
        self._checked_wrappers = False
        parts = cut(weights_of(self.inner), fragments)
        self.fragments = [self._fragment(i, part, prefix) for i, part in enumerate(parts)]
        if transport is None:
            self.channel = Channel.among(group, timeout=timeout, name="commpress-local")
            self._control = Channel.among(group, timeout=timeout, name="commpress-local-control")
        else:
            self.channel = Channel(transport, name="commpress-local")
            self._control = self.channel.beside("commpress-local-control")
        policy = policy_of("none" if codec is None else codec, min_numel=min_numel)
        self.exchanges = self.outer.exchanges(policy, self.channel, feedback=error_feedback and codec is not None, seed=seed)
        check_ranks(self.inner, self.channel)
        self._exact = Exchanges(policy_of("none"), self.channel.size, self.channel.workspace)
        self._warmup = SharedWarmup(warmup, self.fragments, self._exact, self.channel, self._control)
        if isinstance(keep, TieredStore):
            check_room(self.fragments, keep)
            for fragment in self.fragments:  # once, to know how much they leave behind
                fragment.attach(self.exchanges)
                fragment.detach(self.exchanges)
            check_room(self.fragments, keep)
        self.steps_done, self.exchanged = 0, 0
        self._flight: Flight | None = None
        self._ended = False  # this rank has no more data
        self._all_ended = 0  # exchanges in a row of which every rank said so
        self._begin_round()

    # ------------------------------------------------------------ parameters

    def _fragment(self, number: int, part: Sequence[LocalWeights], prefix: str) -> Fragment:
        if isinstance(self.keep, TieredStore) and any(each.numel for each in part):
            return StoredFragment(number, part, self.outer, store=self.keep, prefix=prefix)
        return Fragment(number, part, self.outer, host=self.keep != "device")

    def _check_parameters(self) -> None:
        """They are those of the beginning: who comes later, or thaws, has no Θ."""
        given = parameters_of(self.inner)
        if len(given) != self._given or any(p.requires_grad for p in self._frozen):
            what = "more parameters than" if len(given) != self._given else "parameters that require a gradient and did not"
            raise InvalidArgument(
                f"inner has {what} when LocalUpdates was made (add_param_group, or layers that were unfrozen): call drain(), "
                "and make a new LocalUpdates"
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.inner for group in optimizer.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        return {p: of for optimizer in self.inner for p, of in optimizer.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad(set_to_none=set_to_none)

    # ------------------------------------------------------------ steps

    def step(self, closure: Callable[[], Any] | None = None, *, tokens: int = 0) -> Any:
        """A step of each inner optimizer; then, where it is time, an exchange. ``tokens``: what the step was computed from.

        With a GradScaler a rank whose gradients overflowed leaves its step out, and takes part in the exchange all the same.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run(self.stepping(tokens=tokens))
        return loss

    @torch.no_grad()
    def stepping(self, *, tokens: int = 0) -> Steps[None]:
        """``step`` as an algorithm that may wait."""
        overflowed = bool(getattr(self, "found_inf", False))
        if self.warms_up:  # the ranks' scales may differ, their steps must not
            self._unscale()
            yield from self.synchronizing()
            overflowed = not self._warmup.finite
        elif not overflowed:
            self._unscale()
        if not overflowed:
            for optimizer in self.inner:
                optimizer.step()
        yield from self.steps(tokens=tokens)

    def _unscale(self) -> None:
        """Take off the scale that a GradScaler left on the gradients."""
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            for p in parameters_of(self.inner):
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))

    def synchronize(self) -> None:
        """Average gradients over the ranks, in a step of the warm-up. Call it before clipping; ``step`` does it otherwise."""
        run(self.synchronizing())

    @torch.no_grad()
    def synchronizing(self) -> Steps[None]:
        """``synchronize`` as an algorithm that may wait."""
        self._refuse_wrappers()
        yield from self._warmup.average(self.steps_done)

    def advance(self, *, tokens: int = 0) -> None:
        """Somebody else has called the inner optimizers, such as a GradScaler or a trainer: exchange where it is time."""
        run(self.steps(tokens=tokens))

    @torch.no_grad()
    def steps(self, *, tokens: int = 0) -> Steps[None]:
        """``advance`` as an algorithm that may wait."""
        if self.weight == "tokens" and tokens <= 0:
            raise InvalidArgument(f"tokens is {tokens}, expected a positive number in every step, as weight='tokens' asks")
        self._refuse_wrappers()
        if self.warms_up and self._warmup.averaged != self.steps_done:
            raise InvalidArgument(
                f"warmup is {self._warmup.steps} and step {self.steps_done} was taken without averaging gradients: call "
                "synchronize() between backward and the inner optimizer's step, or let LocalUpdates.step() do both"
            )
        self._check_parameters()
        rate = max(float(group["lr"]) for group in self.param_groups)
        self.facts.see(self.steps_done, rate)
        self.steps_done += 1
        self.counters.steps += 1
        if self.steps_done <= self._warmup.steps:
            self.counters.dropped = self._warmup.dropped
            self.counters.sent_bytes = self.channel.sent_bytes + self._control.sent_bytes
            if not self.warms_up:
                self._end_warmup()
            return
        for fragment in self.fragments:
            fragment.steps += 1
            fragment.tokens += tokens
        if self._flight is not None and self.steps_done >= self._flight.due:
            yield from self._arrive()
        while self._is_time():
            yield from self._leave()
            if self.overlap == 0:
                yield from self._arrive()
        if self._is_time(ahead=1):
            self.fragments[self._next].prefetch()

    @property
    def warms_up(self) -> bool:
        """True if the next step is one of the warm-up."""
        return self.steps_done < self._warmup.steps

    def _end_warmup(self) -> None:
        """Θ := parameters, which are the same on every rank; rounds begin here."""
        for fragment in self.fragments:
            with fragment.opened(write=True):
                fragment.read(fragment.weights)
        self._begin_round()

    def _refuse_wrappers(self) -> None:
        if not self._checked_wrappers:
            self._checked_wrappers = True
            _refuse_ddp(parameters_of(self.inner))

    def _begin_round(self) -> None:
        self._next, self._from, self._clock = 0, self.steps_done, monotonic()
        self._length = 0
        if not isinstance(self.every, Seconds):
            rate = max(float(group["lr"]) for group in self.param_groups)
            shortest = len(self.fragments) * (self.overlap + 1) if self.overlap else len(self.fragments)
            self._length = max(self.every.interval(self.steps_done, rate, self.facts), shortest)

    def _is_time(self, ahead: int = 0) -> bool:
        """True if the next fragment's change is to leave: fragments leave one after the other, evenly over a round.

        ``ahead``: after so many more steps, as far as can be told.
        """
        done, share = self.steps_done - self._from, (self._next + 1) / len(self.fragments)
        if done + ahead == 0:
            return False
        if isinstance(self.every, Seconds):
            return (monotonic() - self._clock) * (1 + ahead / max(done, 1)) >= self.every.seconds * share
        return done + ahead >= ceil(self._length * share)

    def _leave(self) -> Steps[None]:
        """Send the change of the next fragment on its way."""
        if self._flight is not None:
            yield from self._arrive()
        fragment = self.fragments[self._next]
        self._settle_weights()
        exchange = fragment.attach(self.exchanges)
        fragment.change()
        squares = square_sum(fragment.work)
        weight = {"equal": 1.0, "tokens": float(fragment.tokens), "steps": float(fragment.steps)}[self.weight]
        weight = weight if fragment.steps else 0.0  # who has trained on nothing has nothing to say
        same = fragment.halves() if self.outer.equal else (float(fragment.layout), float(self._key(self.exchanged)))
        head = [
            float(self.exchanged), float(fragment.number), *same, weight if isfinite(squares) else 0.0,
            float(isfinite(squares)), squares if isfinite(squares) else 0.0, float(self._ended),
        ]  # fmt: skip
        fragment.steps = fragment.tokens = 0
        numbers = self._control.take(), self.channel.take(exchange.sequences)
        steps = self._exchange(fragment, exchange, head, numbers)
        self._flight = Flight(fragment, self.steps_done + self.overlap, steps)
        if self.overlap and self._backgrounds and self.channel.size > 1:
            self._flight.future = self.channel.submit(steps, device=fragment.device)
        self.exchanged += 1
        self._next += 1
        if self._next == len(self.fragments):
            self.counters.rounds += 1
            self._begin_round()

    def _key(self, exchanged: int) -> int:
        """Seed of what is drawn in this exchange, the same on every rank."""
        return self.seed * 1_000_003 + exchanged

    def _exchange(self, fragment: Fragment, exchange: Exchange, head: list[float], numbers: tuple[int, int]) -> Steps[bool]:
        """``work`` := its weighted mean, if anybody has something to say."""
        every = yield from gathered(head, transport=self._control.transport, sequence=numbers[0])
        different = tuple(r for r in range(len(every)) if (every[r, :4] != every[0, :4]).any())
        if different and not self.outer.equal:
            raise Mismatch(
                f"ranks {list(different)} are not where rank 0 is: exchange {int(every[0, 0])}, fragment {fragment.number}, "
                "or would draw other partners. Load checkpoints of one step, and give all ranks the same inner parameters and "
                "the same seed.",
                ranks=different,
            )
        if different:
            raise Mismatch(
                f"the shared weights of ranks {list(different)} differ from those of rank 0 at exchange {int(every[0, 0])} "
                f"(fragment {fragment.number}). Start every rank from the same weights, load checkpoints of one step, and give "
                "all ranks the same inner parameters.",
                ranks=different,
            )
        weights, finite, squares, ended = every[:, 4], every[:, 5], every[:, 6], every[:, 7]
        self._all_ended = self._all_ended + 1 if ended.all() else 0
        if not finite.all():
            self.counters.dropped += 1
            wild = [r for r in range(len(every)) if not finite[r]]
            log.warning("weights of ranks %s are not finite: their change is left out, they get the shared weights", wild)
        total = float(weights.sum())
        self.counters.participants = int((weights > 0).sum())
        if total == 0:
            return False
        if self.feedback_decay != 1:
            self.exchanges.residuals.decay({s.name for s in fragment.spans}, self.feedback_decay)
        outcomes = yield from self.outer.exchange(
            exchange, self.channel, fragment.work, fragment.weights, fragment.state,
            shares=[float(weight) * len(every) / total for weight in weights], sequence=numbers[1],
            key=self._key(int(head[0])),
        )  # fmt: skip
        taken = all(outcome.finite for outcome in outcomes)
        for outcome in outcomes:
            (outcome.commit if taken else outcome.discard)()
        self.counters.spread = self.outer.spread(exchange, fragment.work, weights.tolist(), squares.tolist())
        return taken

    def _arrive(self) -> Steps[None]:
        """Take in the mean change that is under way: move the shared weights, then the parameters."""
        flight, self._flight = self._flight, None
        assert flight is not None
        start = monotonic()
        if flight.future is not None:
            taken = flight.future.wait()
        elif flight.steps is not None:
            taken = yield from flight.steps
        else:
            taken = flight.kept
        self.counters.waited += monotonic() - start
        fragment = flight.fragment
        if taken:
            rate = max(float(group["lr"]) for group in self.param_groups)
            with fragment.opened(write=True):
                self.outer.step(fragment.weights, fragment.work.to(fragment.weights.device), fragment.state, rate)
        self._settle_weights()
        with fragment.opened():
            fragment.merge(self.alpha)
        self._weights_written()
        fragment.detach(self.exchanges)
        self.counters.exchanges += 1
        self.counters.sent_bytes = self.channel.sent_bytes + self._control.sent_bytes

    def _settle_weights(self) -> None:
        for holder in self._holders:
            holder.settle_weights()

    def _weights_written(self) -> None:
        for holder in self._holders:
            holder.weights_written()

    # ------------------------------------------------------------ the end

    @property
    def pending(self) -> bool:
        """True if this rank has trained what the others do not know of, or waits for an exchange under way."""
        return self._flight is not None or any(fragment.steps for fragment in self.fragments)

    def drain(self) -> None:
        """Exchange all that is left, until every rank has called it; afterwards parameters are Θ, equal on every rank.

        A rank that runs out of data calls it and goes on taking part in the others' rounds, with weight 0.
        """
        run(self.draining())

    @torch.no_grad()
    def draining(self) -> Steps[None]:
        """``drain`` as an algorithm that may wait."""
        if self.warms_up:
            self._end_warmup()
        if self._flight is not None:
            yield from self._arrive()
        self._ended, self._all_ended = True, 0
        while self._all_ended < len(self.fragments):
            yield from self._leave()
            yield from self._arrive()
        self._ended = False
        self._settle_weights()
        for fragment in self.fragments:
            with fragment.opened(write=not self.outer.equal):
                if not self.outer.equal:
                    yield from self._mean_of_all(fragment.weights)
                fragment.merge(0.0)
        self._weights_written()
        self._begin_round()

    def _mean_of_all(self, flat: torch.Tensor) -> Steps[None]:
        """``flat`` := its exact mean over all ranks, the same bits on each."""
        if not flat.numel():
            return
        span, work = Span("", 0, flat.numel()), flat.to(self.fragments[0].device, copy=True)
        exchange = self._exact.of((("all", len(flat)),), lambda: ([span], [(len(flat),)]), work.device)
        outcomes = yield from exchange.steps(self.channel, work, sequence=self.channel.take(exchange.sequences), key=0)
        for outcome in outcomes:
            outcome.commit()
        flat.copy_(work)

    def close(self) -> None:
        self.channel.close()
        self._control.close()

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, the inner optimizers' included: with the model's it resumes in every bit, also in an overlap."""
        return run(self.saving())

    @torch.no_grad()
    def saving(self) -> Steps[dict[str, Any]]:
        """``state_dict`` as an algorithm that may wait."""
        if self.warms_up:
            self._end_warmup()
        yield from self._settle()
        flight, transport = self._flight, self.channel.transport
        under_way = None
        if flight is not None:
            under_way = {
                "fragment": flight.fragment.number, "due": flight.due, "taken": flight.kept,
                "mean": flight.fragment.work.clone(),
            }  # fmt: skip
        with self._residuals() as store:
            residuals = exact_state(store, transport, self.exchanged)
        return self._shared() | {
            "kind": "exact",
            "rank": transport.rank,
            "size": transport.size,
            "inner": self._inner_states(),
            "flight": under_way,
            "counts": [[f.steps, f.tokens] for f in self.fragments],
            "residuals": residuals,
            "choices": self.exchanges.choices(),
        }

    def elastic_state_dict(self) -> dict[str, Any]:
        """This rank's part of a state for any number of ranks; collective. Load the parts of all ranks, on each.

        What is under way arrives first. What ranks have trained since their last exchange is in it as its mean, with what
        compression owes: who loads it starts from there, on all ranks alike.
        """
        return run(self.saving_elastically())

    @torch.no_grad()
    def saving_elastically(self) -> Steps[dict[str, Any]]:
        """``elastic_state_dict`` as an algorithm that may wait."""
        if self.warms_up:
            self._end_warmup()
        if self._flight is not None:
            yield from self._arrive()
        transport, parts = self.channel.transport, {}
        shared: dict[str, Any] = {"format": FORMAT}
        if self.channel.rank == 0 or not self.outer.equal:
            shared = self._shared()
        with self._residuals() as store:
            owed = flat_parts(store, transport)
        if not self.outer.equal:
            for flat in [*shared["weights"], *(state[name] for state in shared["outer"] for name in self.outer.buffers)]:
                yield from self._mean_of_all(flat)
        self._settle_weights()
        for i, fragment in enumerate(self.fragments):
            with fragment.opened():
                fragment.change(None if self.outer.equal else shared["weights"][i])
            starts = {s.name: s.source for s in fragment.spans}
            for (name, offset), part in owed.items():
                if name in starts:
                    fragment.work[starts[name] + offset :][: part.numel()] += part
            parts[f"fragment {fragment.number}", 0] = fragment.work.cpu()
        progress = yield from elastic_of(parts, transport, self.exchanged, self.channel.take())
        shared = shared if self.channel.rank == 0 else {"format": FORMAT}
        return shared | {"kind": "elastic", "inner": self._inner_states(), "progress": progress}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], *others: dict[str, Any]) -> None:
        """Load this rank's ``state_dict``, or all ranks' ``elastic_state_dict``. The model is to be loaded before.

        Where ``drain`` came before ``state_dict``, the states of all ranks fit another number of them too.
        """
        states = [state, *others]
        if any(each.get("format") != FORMAT or each.get("kind") not in ("exact", "elastic") for each in states):
            raise StateMismatch(
                f"expected what LocalUpdates.state_dict() or elastic_state_dict() gave, format {FORMAT}; this is of format "
                f"{state.get('format')!r} and kind {state.get('kind')!r}"
            )
        transport, exact = self.channel.transport, state["kind"] == "exact"
        if exact:
            states = self._own(states)
        shared = next((each for each in states if "weights" in each), None)
        if exact and not self.outer.equal:
            shared = states[transport.rank % len(states)]
        if shared is None or shared["layout"] != [f.layout for f in self.fragments]:
            raise StateMismatch(
                "the state is of other parameters or fragments, or that of rank 0 is missing: load the state of this model, "
                "with the fragments= of the run that saved it"
            )
        loaded: dict[Any, Any] = {}
        if exact and (len(states) > 1 or _place(states[0]) == (transport.rank, transport.size)):
            _, loaded = residuals_of([each["residuals"] for each in states], transport)
        elif not exact:
            _, totals = residuals_of([each["progress"] for each in states], transport, share=lambda every: every)  # type: ignore[arg-type,return-value]
        self._settle_quietly()
        self.exchanges.residuals.load(loaded)
        for fragment in self.fragments:
            fragment.put_back(self.exchanges)
        inner = states[transport.rank % len(states)]["inner"]
        if len(inner) != len(self.inner):
            raise StateMismatch(f"the state holds {len(inner)} inner optimizers, expected {len(self.inner)}")
        for optimizer, each in zip(self.inner, inner, strict=True):
            optimizer.load_state_dict(each)
        self.steps_done, self.exchanged = int(shared["steps"]), int(shared["exchanged"])
        self.facts = Facts.of(shared["facts"])
        self._next, self._from, self._length = (int(each) for each in shared["round"])
        self._clock = monotonic()
        for fragment, weights, outer in zip(self.fragments, shared["weights"], shared["outer"], strict=True):
            with fragment.opened(write=True):
                fragment.weights.copy_(weights)
                fragment.state.clear()
                fragment.state.update(_copied(outer))
            fragment.steps = fragment.tokens = 0
        if not exact:
            self._settle_weights()
            for fragment in self.fragments:
                with fragment.opened():
                    fragment.set_change(totals[f"fragment {fragment.number}", 0])  # type: ignore[arg-type]
                fragment.steps = fragment.tokens = 1
            self._weights_written()
            return
        for fragment, (steps, tokens) in zip(self.fragments, states[0]["counts"], strict=True):
            fragment.steps, fragment.tokens = int(steps), int(tokens)
        self.exchanges.load_choices(states[0]["choices"])
        flight = states[0]["flight"]
        if flight is not None:
            fragment = self.fragments[int(flight["fragment"])]
            fragment.attach(self.exchanges)
            fragment.work.copy_(flight["mean"])
            self._flight = Flight(fragment, int(flight["due"]), None, kept=bool(flight["taken"]))

    def _own(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The one that this rank saved, if as many ranks saved it; else all of them, which must be of the end of a round."""
        place = self.channel.rank, self.channel.size
        own = [each for each in states if _place(each) == place]
        if own:
            return own
        rank, size = _place(states[0])
        if states[0]["flight"] is not None or any(steps for each in states for steps, _ in each["counts"]):
            raise StateMismatch(
                f"the state was saved by rank {rank} of {size} in the middle of a round, in which ranks differ, and this is "
                f"rank {place[0]} of {place[1]}: load each rank's own, or call drain() before state_dict(), or save with "
                "elastic_state_dict()"
            )
        if len(states) == 1 and size > 1:
            log.warning(
                "the loaded state is of rank %d of %d, this is rank %d of %d: what compression left behind here starts from "
                "zero, unless what this rank saved is loaded next", rank, size, *place,
            )  # fmt: skip
        return states

    def _settle(self) -> Steps[None]:
        """Wait for what is under way; it arrives when it is due."""
        flight = self._flight
        if flight is not None:
            if flight.future is not None:
                flight.kept = flight.future.wait()
            elif flight.steps is not None:
                flight.kept = yield from flight.steps
            flight.future = flight.steps = None

    def _settle_quietly(self) -> None:
        """Let go of what is under way: a state is being loaded over it."""
        flight, self._flight = self._flight, None
        if flight is not None:
            if flight.future is not None:
                flight.future.wait()
            flight.fragment.detach(self.exchanges)

    @contextmanager
    def _residuals(self) -> Iterator[ResidualStore]:
        """Those of all fragments, in memory meanwhile."""
        for fragment in self.fragments:
            fragment.bring(self.exchanges)
        try:
            yield self.exchanges.residuals
        finally:
            for fragment in self.fragments:
                fragment.put_back(self.exchanges)

    def _inner_states(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.inner]

    def _shared(self) -> dict[str, Any]:
        """State that all ranks hold alike."""
        weights, outer = [], []
        for fragment in self.fragments:
            with fragment.opened():
                weights.append(fragment.weights.clone())
                outer.append(_copied(fragment.state))
        return {
            "format": FORMAT,
            "steps": self.steps_done,
            "exchanged": self.exchanged,
            "round": [self._next, self._from, self._length],
            "facts": self.facts.as_dict(),
            "weights": weights,
            "outer": outer,
            "layout": [f.layout for f in self.fragments],
        }

    # ------------------------------------------------------------ figures

    def digest(self) -> str:
        """Hash of the shared weights: the same on every rank, with ``Gossip`` after ``drain``."""
        return f"{checksum_of(b''.join(f.digest().to_bytes(8, 'little') for f in self.fragments)):016x}"

    def report(self) -> str:
        """Figures of the run so far, for people."""
        c, numel = self.counters, sum(f.numel for f in self.fragments)
        bits = 8 * c.sent_bytes / max(c.exchanges / len(self.fragments), 1) / max(numel, 1)
        return (
            f"{c.steps} steps, {c.rounds} rounds, {c.sent_bytes / 1e6:.1f} MB sent ({bits:.2f} bits per parameter and round), "
            f"waited {c.waited:.1f} s, last spread {c.spread:.2g} of {self.outer.spread_of} over {c.participants} ranks, "
            f"{c.dropped} exchanges with a change left out, shared weights {self.digest()}"
        )


def _copied(state: State) -> State:
    return {name: each.clone() if torch.is_tensor(each) else each for name, each in state.items()}


def _place(state: dict[str, Any]) -> tuple[int, int]:
    return state["residuals"]["rank"], state["residuals"]["size"]


def _refuse_ddp(parameters: Sequence[torch.Tensor]) -> None:
    """Raise where DistributedDataParallel averages gradients of these parameters at every step."""
    mine, kinds = {id(p) for p in parameters}, [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for each in gc.get_referrers(kind):  # its instances are among them
            if isinstance(each, kind) and each not in ALONE and any(id(p) in mine for p in each.parameters()):
                raise InvalidArgument(
                    "the model is wrapped in DistributedDataParallel, which averages gradients at every step: nothing would "
                    "be saved. Leave the wrapper out, or call commpress.keep_local(ddp) before the first backward"
                )
