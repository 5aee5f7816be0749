"""Local updates: every rank trains by itself for a round of steps, then all exchange their changes
once.

    Δᵢ = Θ − θᵢ       aᵢ = K·wᵢ/Σw · Δᵢ + ρ·eᵢ  Δ̄ = mean of Q(aᵢ), the same bits on every rank
    Θ ← Outer(Θ, Δ̄)   θᵢ ← α·θᵢ + (1 − α)·Θ   α = τ / (τ + H): τ steps of H were computed meanwhile

θᵢ are the parameters of rank i, Θ the shared weights, w its steps or tokens. ``fragments`` of the
parameters take turns within a round; with ``overlap`` a fragment's exchange runs during the next
``overlap`` steps. By default a round is the shortest whose exchange hides behind computing.

Note: Θ depends only on the steps at which fragments leave and arrive. If measured times decide
these, all ranks use the same recorded seconds.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, sqrt
from time import monotonic
from typing import Any, Literal

import torch

from commpress.checksum import checksum_of
from commpress.codecs import BlockCodec, CastCodec, Codec, LowRankCodec, Policy, policy_of
from commpress.collectives.allreduce import Call, settle
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges
from commpress.collectives.handover import Handover, Standing, cannot_follow
from commpress.collectives.pairwise import square_sum
from commpress.collectives.residual_state import Residuals
from commpress.collectives.state import Checked, Stateful
from commpress.collectives.transports.factory import DeviceMesh, on_reform, ranks_of
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, check_counts
from commpress.logs import warn_on_first
from commpress.optim import local_checkpoint
from commpress.optim.fragments import Arrived, Flight, Fragment, StoredFragment, check_room, cut
from commpress.optim.inner_optimizers import InnerOptimizers, check_hidden, check_inner, check_ranks
from commpress.optim.layout import LocalWeights, columns_of, groups_on, is_held
from commpress.optim.optimizer import loss_of
from commpress.optim.outer import Average, Nesterov, Outer, outer_of
from commpress.optim.rounds import (
    ExchangeHeader,
    LocalCounters,
    PaceMeter,
    RoundSchedule,
    SharedWarmup,
    check_same,
    slowest,
)
from commpress.schedules import (
    CODECS,
    UNKNOWN,
    Every,
    Facts,
    Hidden,
    Pace,
    Rung,
    Seconds,
    Sync,
    sync_of,
)
from commpress.tiered_mem import TieredStore
from commpress.torch_private import untraced
from commpress.work import Steps, run

log = logging.getLogger("commpress")

WEIGHTS = ("equal", "tokens", "steps")
MIN_NUMEL = 256  # smaller tensors travel exactly
KEEP = "keep"


class LocalUpdates(Stateful, torch.optim.Optimizer):
    """Train with ``inner`` on every rank separately, and exchange changes once per round.

    This takes the optimizer's place in a loop, in learning rate schedulers, GradScaler and
    Accelerate's ``prepare``.

    - ``inner``: a torch optimizer, or several. The model stays bare: no DistributedDataParallel
      around it.
    - ``every``: steps of a round: "auto", a number, ``commpress.QSR(alpha, base)`` or
      ``commpress.Seconds(60)``. With "auto" a round is the smallest whose exchange hides behind
      computing, as both are measured, and overlaps with all of it.
    - ``outer``: the rule that moves the shared weights: ``Nesterov``, ``Average``, ``SlowMo``,
      ``SparseLoCo``, ``Gossip``, or a function that makes a torch optimizer. By default
      ``Nesterov``; of "auto" ``Average`` in rounds of up to 20 steps.
    - ``codec``: of changes, both ways; None: float32. Tensors of fewer than 256 elements travel
      exactly, unless a ``Policy`` decides. "auto" is "int4", and with ``every="auto"`` and its own
      ``outer`` a coarser one where rounds would else need more than 2 steps.
    - ``feedback_decay``: residuals are multiplied by it each round; with 0 there are none.
    - ``fragments``: a number, or lists of parameters: parts of the model that take turns within a
      round.
    - ``overlap``: steps τ that are computed while a fragment is under way, or (τ, α) with the share
      of the rank's own weights when it arrives, by default τ / (τ + every). (τ, "keep") goes on
      from the shared weights and what the rank has trained meanwhile. ``every="auto"``, which
      chooses τ, does so by default where it averages, at first with half of what was trained and
      from step 150 with all; with (0, "keep") always with all.
    - ``process_group``: the ranks that average, or a ``Transport`` among them. Each of them may
      stand for other ranks under FSDP2 or tensor parallelism, which together leave out a change
      that is not finite in the shard of one of them. Local experts are not averaged: each rank
      trains its own, in every step.
    - ``mesh``: in place of ``process_group``, the whole mesh of a model under tensor parallelism:
      ranks average over the dimensions in which no parameter is cut.
    - ``exact_steps``: steps before the first round, in which gradients are averaged exactly.
    - ``weight``: "equal", "tokens" (say ``step(tokens=...)``) or "steps": how much a rank counts.
    - ``store``: "host" or "device", the place of Θ and the outer state; or this rank's own
      TieredStore, or one and a prefix of names ("local"): it also keeps residuals, and brings those
      of a fragment to memory for its exchange.
    - ``lengthen``: multiply the learning rates of ``inner`` by √(1 + spread²) within each step, and
      divide by it the weight decay that is apart from gradients, with the mean spread of the ranks'
      changes over 100 steps: noise makes Adam's steps on one rank shorter than on mean gradients.
      By default where ``every="auto"`` averages Adam, AdamW, NAdam, RAdam or Adamax of torch.
    """

    alone = True
    _step_supports_amp_scaling = True  # a GradScaler calls ``step`` always: ranks count steps alike

    def __init__(
        self,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        every: int | Sync | Seconds | Literal["auto"] = "auto",
        outer: Outer | Callable[..., torch.optim.Optimizer] | None = None,
        codec: str | Codec | Policy | None = "auto",
        feedback_decay: float = 0.95,
        fragments: int | Sequence[Sequence[torch.Tensor]] = 1,
        overlap: int | tuple[int, float | Literal["keep"]] = 0,
        exact_steps: int = 0,
        mesh: DeviceMesh | None = None,
        process_group: Any = None,
        weight: Literal["equal", "tokens", "steps"] = "equal",
        store: Literal["host", "device"] | TieredStore | tuple[TieredStore, str] = "host",
        lengthen: bool | None = None,
    ) -> None:
        # as torch does on unpickling: groups and state are those of ``inner``
        self.__setstate__({"defaults": {}})
        self.inner = InnerOptimizers(inner)
        if not 0 <= feedback_decay <= 1:
            raise InvalidArgument(
                f"feedback_decay is {feedback_decay!r}, expected a number from 0 to 1"
            )
        overlap, alpha = overlap if isinstance(overlap, tuple) else (overlap, None)
        store, prefix = store if isinstance(store, tuple) else (store, "local")
        transport = process_group if isinstance(process_group, Transport) else None
        check_counts(overlap=overlap, exact_steps=exact_steps)
        if every == "auto" and overlap:
            raise InvalidArgument(
                f"overlap is {overlap} with every='auto', which chooses it: leave it out, or give "
                "every= as a number"
            )
        if alpha is not None and (
            (alpha != KEEP and not (isinstance(alpha, (int, float)) and 0 <= alpha < 1))
            or (alpha and not overlap and every != "auto")
        ):
            raise InvalidArgument(
                f"alpha is {alpha!r} with overlap={overlap}, expected 0, or with an overlap 'keep' "
                "or a number from 0 to below 1: without overlap nothing has been trained since "
                "the change left"
            )
        if weight not in WEIGHTS:
            raise InvalidArgument(
                f"weight is {weight!r}, expected one of {', '.join(map(repr, WEIGHTS))}"
            )
        if not isinstance(store, TieredStore) and store not in ("host", "device"):
            raise InvalidArgument(f"store is {store!r}, expected 'host', 'device' or a TieredStore")
        self.every = sync_of(every)
        usual = Average() if isinstance(self.every, Hidden) else Nesterov()
        self.outer = outer_of(usual if outer is None else outer)
        self._outer_of_long_rounds = Nesterov() if outer is None else self.outer
        self.feedback_decay, self.weight = feedback_decay, weight
        self.alpha: float | Literal["keep"] | None = alpha
        self.store = store
        self.counters, self.facts, self.meter = LocalCounters(), Facts(), PaceMeter()
        self._backgrounds = transport is None
        check_inner(self.inner, self.every, exact_steps)
        trained = self.inner.weights()
        process_group, _ = groups_on(mesh, (each.parameter for each in trained), process_group)
        ranks = ranks_of(process_group) if transport is None else tuple(range(transport.size))
        shared = [each for each in trained if not is_held(each.name, each.parameter, ranks)]
        # parameters that only some of these ranks hold: they are not averaged
        self.apart = len(trained) - len(shared)
        if not shared:
            raise InvalidArgument(
                "inner trains nothing but experts that are divided among ranks: there is nothing "
                "to average"
            )
        parts = cut(shared, fragments)
        self.rounds = RoundSchedule(self.every, len(parts), overlap=overlap)
        whole = isinstance(self.every, Hidden) or (
            isinstance(self.every, Every) and 0 < overlap == self.every.steps
        )
        if alpha == 0 and whole and len(parts) == 1:
            raise InvalidArgument(
                f"alpha is 0 and with every={every!r} an exchange overlaps with a whole round: a "
                "rank would begin each round at weights that are a round old, which made the loss "
                "more than 6 % worse in trials. Leave alpha out, or overlap less"
            )
        self.fragments = [self._fragment(i, part, prefix) for i, part in enumerate(parts)]
        if transport is None:
            over = dict[str, Any](device=self.fragments[0].device)
            self.channel = Channel.among(process_group, name="commpress-local", **over)
            self.control = Channel.among(process_group, name="commpress-local-control", **over)
        else:
            self.channel = Channel(transport, name="commpress-local")
            self.control = self.channel.beside("commpress-local-control")
        least = 0 if codec is None or hasattr(codec, "choose") else MIN_NUMEL
        names: Sequence[str | Codec | Policy] = ["none" if codec is None else codec]
        if codec == "auto":
            names = CODECS if isinstance(self.every, Hidden) and outer is None else CODECS[:1]
        # codecs that rounds may use
        self.codecs = [policy_of(name, min_numel=least) for name in names]
        self.exchanges = self.outer.exchanges(
            self.codecs[0], self.channel, feedback=feedback_decay > 0 and codec is not None
        )
        check_ranks(self.inner, self.channel)
        check_hidden(self.inner, self.every)
        self._lengthen(lengthen)
        self.columns = columns_of(self.inner.parameters) if transport is None else None
        self.exact = Exchanges(policy_of("none"), self.channel.size, self.channel.workspace)
        self._warmup = SharedWarmup(
            exact_steps, self.fragments, self.exact, self.channel, self.control, self.columns
        )
        if isinstance(store, TieredStore):
            check_room(self.fragments, store, overlap=overlap > 0 or isinstance(self.every, Hidden))
        self.steps_done, self.exchanged = 0, 0
        # exchanges whose outcome is known here; whether the last counted
        self.finished, self.taken = 0, True
        # the fragment whose shared weights the last exchange moved
        self.moved: int | None = None
        self._decayed = -1  # the exchange for which residuals were decayed
        self.handover = Handover(self.channel)
        self.flight: Flight | None = None
        self._ended = False  # this rank has no more data
        self._all_ended = 0  # consecutive exchanges in which every rank reported this
        self._begin_round()
        if transport is None:
            on_reform(process_group, self)

    # ------------------------------------------------------------ parameters

    def _fragment(self, number: int, part: Sequence[LocalWeights], prefix: str) -> Fragment:
        if isinstance(self.store, TieredStore) and any(each.numel for each in part):
            return StoredFragment(number, part, self.outer, store=self.store, prefix=prefix)
        return Fragment(number, part, self.outer, host=self.store != "device")

    def _lengthen(self, wanted: bool | None) -> None:
        """Let the steps of ``inner`` follow the ranks' spread, where that is known to help."""
        able = isinstance(self.every, Hidden) and type(self.outer) is Average and self.inner.of_adam
        if wanted and not (able and all(self._fine(f, LowRankCodec) for f in self.fragments)):
            raise InvalidArgument(
                "lengthen is True, expected it with every='auto', outer=None or Average(), a codec "
                "as fine as 'int4' or a low-rank one, and as inner Adam, AdamW, NAdam, RAdam or "
                "Adamax of torch: where steps follow the size of gradients, noise does not shorten "
                "them"
            )
        self.lengthens = able and wanted is not False
        if self.lengthens:
            self.inner.lengthen(self._gain)

    def _gain(self) -> float:
        """Return the factor of the next step's learning rates."""
        gain = 1.0 if self.warms_up or self.rounds.long else self.facts.gain
        self.counters.gain = gain
        return gain

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        return {p: of for optimizer in self.inner for p, of in optimizer.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad(set_to_none=set_to_none)

    # ------------------------------------------------------------ steps

    @untraced
    def step(self, closure: Callable[[], Any] | None = None, *, tokens: int = 0) -> Any:
        """Step each inner optimizer; at the end of a round, exchange. ``tokens``: number of tokens
        in this step.

        With a GradScaler a rank with overflowed gradients skips its step, but still takes part in
        the exchange.
        """
        loss = loss_of(closure)
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
        """Remove a GradScaler's scale from the gradients."""
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            for p in self.inner.parameters:
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))

    @untraced
    def synchronize(self) -> None:
        """Average gradients over the ranks, in a step of the warm-up. Call it before clipping;
        otherwise ``step`` calls it."""
        run(self.synchronizing())

    @torch.no_grad()
    def synchronizing(self) -> Steps[None]:
        """``synchronize`` as an algorithm that may wait."""
        self.inner.check_unaveraged()
        yield from self._warmup.average(self.steps_done)

    def after_step(self, *, tokens: int = 0) -> None:
        """Exchange if due, after a GradScaler or trainer has called the inner optimizers itself."""
        run(self.steps(tokens=tokens))

    def steps(self, *, tokens: int = 0) -> Steps[None]:
        """``after_step`` as an algorithm that may wait."""
        if isinstance(self.every, Hidden) and self._exchanges_next():
            for device in {
                fragment.device for fragment in self.fragments if fragment.device.type == "cuda"
            }:
                torch.cuda.synchronize(device)  # computing must not count as time of an exchange
        with self.meter.between_steps():
            yield from self._after_step(tokens)

    def _exchanges_next(self) -> bool:
        """True if an exchange begins or ends after this step."""
        done = self.steps_done + 1
        return self.rounds.due(done) or (self.flight is not None and done >= self.flight.due)

    @torch.no_grad()
    def _after_step(self, tokens: int) -> Steps[None]:
        if self.weight == "tokens" and tokens <= 0:
            raise InvalidArgument(
                f"tokens is {tokens}, expected a positive number in every step, as "
                "weight='tokens' asks"
            )
        self.inner.check_unaveraged()
        if self.warms_up and self._warmup.averaged != self.steps_done:
            raise InvalidArgument(
                f"exact_steps is {self._warmup.steps} and step {self.steps_done} was taken without "
                "averaging gradients: call synchronize() between backward and the inner "
                "optimizer's step, or let LocalUpdates.step() do both"
            )
        self.inner.check_unchanged()
        self.facts.see(self.steps_done, self.inner.rate)
        self.steps_done += 1
        self.counters.steps += 1
        if self.steps_done <= self._warmup.steps:
            self.counters.dropped = self._warmup.dropped
            self.counters.sent_bytes = self._sent_bytes()
            if not self.warms_up:
                self._end_warmup()
            return
        for fragment in self.fragments:
            fragment.steps += 1
            fragment.tokens += tokens
        if self.flight is not None and self.steps_done >= self.flight.due:
            yield from self._arrive()
        while self.rounds.due(self.steps_done):
            yield from self._leave()
            assert self.flight is not None
            if self.flight.due == self.steps_done:
                yield from self._arrive()
        if self.rounds.due_soon(self.steps_done):
            self.fragments[self.rounds.next].prefetch()

    @property
    def warms_up(self) -> bool:
        """True if the next step is one of the warm-up."""
        return self.steps_done < self._warmup.steps

    def _end_warmup(self) -> None:
        """Set Θ to the parameters, which are equal on every rank, and begin rounds."""
        for fragment in self.fragments:
            with fragment.opened(write=True):
                fragment.read(fragment.weights)
        self._begin_round()

    # ------------------------------------------------------------ exchanges

    def _begin_round(self) -> None:
        self.rounds.begin(
            self.steps_done, self.inner.rate, self.facts, alone=self.channel.size == 1
        )
        self.counters.every, self.counters.overlap = self.rounds.length, self.rounds.overlap

    def _leave(self) -> Steps[None]:
        """Send the change of the next fragment; the previous one has arrived."""
        if self.flight is not None:
            yield from self._arrive()
        self._choose_codec()
        fragment = self.fragments[self.rounds.next]
        self.inner.settle_weights()
        exchange = fragment.attach(self.exchanges)
        fragment.change()
        header = self._header(fragment)
        trained, fragment.steps, fragment.tokens = (fragment.steps, fragment.tokens), 0, 0
        call = self.channel.call(exchange.sequences, header.number)
        steps = self._exchange(fragment, exchange, header, self.control.take(), call)
        self.flight = Flight(
            fragment,
            self.steps_done,
            steps,
            trained=trained,
            finite=header.finite,
            long=self.rounds.long,
        )
        self.exchanged += 1
        self.flight.turn = self.rounds.turn
        if self.rounds.leave():
            self._begin_round()
            self.flight.turn = 0.0
        overlap = self.rounds.overlap
        self.flight.due += overlap
        self.flight.alpha = self._alpha(overlap) if header.finite else 0.0
        if self.flight.alpha is None:
            fragment.remember()
            if self.alpha is None and isinstance(self.every, Hidden):
                self.flight.kept = self.every.kept(self.steps_done)
        if overlap and self._backgrounds and self.channel.size > 1:
            self.flight.future = self.channel.submit(steps, fragment.work)

    def _choose_codec(self) -> None:
        """Use the codec in which exchanges hide behind few steps. Nothing is under way."""
        rung = self.facts.codec
        if len(self.codecs) > 1 and isinstance(self.every, Hidden):
            rung.follow(self.facts.paces, self.every)
            self.counters.codec = CODECS[rung.number]
            self.exchanges.use(self.codecs[rung.number])

    def _alpha(self, overlap: int) -> float | None:
        """Return the share of a rank's own weights when an exchange arrives after ``overlap``
        steps, by default the share of training that the mean lacks; None for "keep" and by
        default in rounds of "auto" that average."""
        if not overlap:
            return 0.0
        if (
            self.alpha is None
            and isinstance(self.every, Hidden)
            and isinstance(self.outer, Average)
            and not self.rounds.long
        ):
            return None
        if self.alpha is None:
            return overlap / (overlap + max(self.rounds.length, overlap))
        return None if isinstance(self.alpha, str) else self.alpha

    def _header(self, fragment: Fragment) -> ExchangeHeader:
        """Return this rank's header for the exchange of the change in the fragment's ``work``."""
        square = square_sum(fragment.work)
        weight = {"equal": 1.0, "tokens": float(fragment.tokens), "steps": float(fragment.steps)}[
            self.weight
        ]
        return ExchangeHeader(
            self.exchanged,
            fragment.number,
            fragment.halves() if self.outer.equal else (float(fragment.layout), 0.0),
            weight if fragment.steps and isfinite(square) else 0.0,
            square,
            self._ended,
            self.meter.tell(),
        )

    def _exchange(
        self,
        fragment: Fragment,
        exchange: Exchange,
        header: ExchangeHeader,
        sequence: int,
        call: Call,
    ) -> Steps[Arrived]:
        """Replace ``work`` by its weighted mean; return True if it counts, False if no rank has
        trained or a mean is not finite.

        Also return the previous pace of the slowest rank, if measured, and when all had come.
        """
        sent_before = self._sent_bytes()
        if self.columns is not None:
            column = yield from self.columns.gathered([float(header.finite), *header.pace])
            header = replace(
                header, pace=slowest([Pace(*row) for row in column[:, 1:].tolist()]) or UNKNOWN
            )
            header = header if column[:, 0].all() else header.left_out()
        headers = yield from header.gathered(self.control, sequence)
        check_same(headers, shared=self.outer.equal)
        start = monotonic()
        self._all_ended = self._all_ended + 1 if all(each.ended for each in headers) else 0
        wild = [rank for rank, each in enumerate(headers) if not each.finite]
        if wild:
            self.counters.dropped += 1
            text = (
                "weights of ranks %s are not finite: their change is left out, they get the "
                "shared weights"
            )
            warn_on_first(self.channel.rank, text, wild)
        weights = [each.weight for each in headers]
        total, pace = sum(weights), slowest([each.pace for each in headers])
        if total == 0:
            return self._finish(header, taken=False), pace, start, None
        if self.feedback_decay != 1 and self._decayed != header.number:
            self._decayed = header.number
            self.exchanges.residuals.decay({s.name for s in fragment.spans}, self.feedback_decay)
        outcomes = yield from self.outer.exchange(
            exchange,
            self.channel,
            fragment.work,
            fragment.weights,
            [weight * len(weights) / total for weight in weights],
            call,
        )
        taken = all(outcome.finite for outcome in outcomes)
        self.meter.exchanged(monotonic() - start)
        squares = [each.square if each.finite else 0.0 for each in headers]
        # a low-rank mean is shorter than the mean, so that spread is a little too large
        fine, spread = any(squares) and self._fine(fragment, LowRankCodec), None
        around, mean = 0.0, 0.0
        if fine:
            around, mean = self.outer.spread(exchange, fragment.work, weights, squares)
        if self.columns is not None:
            column = yield from self.columns.gathered([float(taken), float(fine), around, mean])
            taken, fine = bool(column[:, 0].all()), bool(column[:, 1].all())
            around, mean = column[:, 2:].sum(axis=0).tolist()
        settle(outcomes, taken=taken)
        self.counters.rounds += fragment.number == len(self.fragments) - 1
        self.counters.changed += fragment.numel
        self.counters.change_bytes += self._sent_bytes() - sent_before
        if any(squares):
            self.counters.participants = sum(weight > 0 for weight in weights)
            if fine and isfinite(around + mean):
                spread = around / mean if mean > 0 else 0.0
            shown = spread if self._fine(fragment) else None
            self.counters.spread = None if shown is None else sqrt(shown)
        spread = spread if self.lengthens else None
        return self._finish(header, taken=taken), pace, start, spread

    def _finish(self, header: ExchangeHeader, *, taken: bool) -> bool:
        self.handover.settle(taken=taken)
        self.finished, self.taken = header.number + 1, taken
        return taken

    def _arrive(self) -> Steps[None]:
        """Wait for the mean change of the running exchange: move the shared weights, then the
        parameters."""
        flight, start = self.flight, monotonic()
        assert flight is not None
        taken = yield from flight.arrival()
        self.flight, waited = None, monotonic() - start
        self.counters.waited += waited
        self.meter.waited(waited)
        if flight.met is not None:  # else a rank that was late once would be late in every round
            self.rounds.clock = flight.met - flight.turn
        if flight.pace is not None:
            self.facts.keep(flight.pace)
        if flight.spread is not None:
            steps = self.rounds.length / self.rounds.fragments
            self.facts.scatter(flight.spread, self.channel.size, steps)
        self.land(flight, taken=taken)
        flight.fragment.detach(self.exchanges)
        self.counters.exchanges += 1
        self.counters.sent_bytes = self._sent_bytes()

    def land(self, flight: Flight, *, taken: bool) -> None:
        """Apply the mean, if it counts, and move parameters toward the shared weights."""
        fragment, self.moved = flight.fragment, flight.fragment.number
        outer = self._outer_of_long_rounds if flight.long else self.outer
        if taken:
            with fragment.opened(write=True):
                outer.ready(fragment.weights, fragment.state)
                outer.step(
                    fragment.weights,
                    fragment.work.to(fragment.weights.device),
                    fragment.state,
                    self.inner.rate,
                )
        with self.inner.weights_rewritten():
            if not flight.finite:
                self._restart()
            with fragment.opened():
                if flight.alpha is None:
                    fragment.carry_over(flight.kept)
                else:
                    fragment.merge(flight.alpha)

    def _restart(self) -> None:
        """Replace non-finite weights by Θ and reset non-finite inner states.

        This covers all fragments at once: a forward through a non-finite one would spoil the others
        again.
        """
        for each in self.fragments:
            if not each.finite():
                with each.opened():
                    each.merge(0.0)
                each.steps = each.tokens = 0
        restarts = self.inner.restart()
        if restarts and not self.counters.restarts:
            log.warning(
                "weights of this rank were not finite: states of %d parameters in its inner "
                "optimizers were not either and start anew, here and whenever it happens again",
                restarts,
            )
        self.counters.restarts += restarts

    def _fine(self, fragment: Fragment, *others: type[Codec]) -> bool:
        """True if the codecs' errors are small compared with the spread of changes, or codecs are
        among ``others``."""
        codecs = [self.exchanges.policy.choose(each.name, each.numel) for each in fragment.locals]
        return all(
            isinstance(c, (CastCodec, *others))
            or (isinstance(c, BlockCodec) and c.number != "log3")
            for c in codecs
        )

    def _sent_bytes(self) -> int:
        return self.channel.sent_bytes + self.control.sent_bytes

    # ------------------------------------------------------------ other ranks

    @torch.no_grad()
    def reforming(self, change: Change) -> Steps[Callable[[], None]]:
        """Continue among other ranks. A running exchange counts if some rank has finished it; else
        its changes go with the next. A round begins on all ranks. Newcomers need
        ``load_shared_state``."""
        if self.inner.together:
            raise cannot_follow(
                self, "inner has ranks that train together (they have shards, or average gradients)"
            )
        self._furthest = yield from local_checkpoint.furthest(self, change)
        for fragment in self.fragments:
            fragment.bring(self.exchanges)
        try:
            return (yield from super().reforming(change))
        except BaseException:
            for fragment in self.fragments:
                fragment.put_back(self.exchanges)
            raise

    def exchange_sets(self) -> Mapping[str, Exchanges]:
        return {"": self.exchanges}

    def shared(self) -> dict[str, Any]:
        numbers = {"steps": self._furthest, "exchanged": self.finished, "taken": self.taken}
        return numbers | {"codec": self.facts.codec.as_list(), "spread": self.facts.spread}

    def shared_tensors(self) -> Mapping[str, torch.Tensor]:
        return local_checkpoint.last(self)

    def arrive(self, change: Change, standing: Standing) -> None:
        local_checkpoint.arrive(self, change, standing)

    def go_on(self, change: Change, standing: Standing) -> None:
        self.exact.reform(self.channel.size)
        for fragment in self.fragments:
            fragment.put_back(self.exchanges)
        self.counters.lost_ranks = self.handover.lost
        self.facts.codec = Rung.of(standing.shared["codec"])
        self.facts.spread = min(standing.shared["spread"], self.channel.size - 1.0)
        self.begin_at(standing.shared["steps"], standing.shared["exchanged"])

    def begin_at(self, steps: int, exchanged: int) -> None:
        """Set the counts of steps and exchanges, equal on all ranks, and begin a round."""
        self.steps_done, self.exchanged, self.finished = steps, exchanged, exchanged
        self._all_ended = 0
        self._warmup.begin_anew()
        self.meter.begin_anew()
        self.facts.paces = []
        if self.warms_up:
            self._end_warmup()
        else:
            self._begin_round()

    def leaving(self, ranks: Sequence[int]) -> Steps[None]:
        """``hand_over``, between exchanges, as an algorithm that may wait."""
        with local_checkpoint.in_memory(self):
            yield from super().leaving(ranks)

    def shared_state(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, and this rank's inner optimizers for
        newcomers."""
        if self.warms_up:
            self._end_warmup()
        return super().shared_state() | {"inner": local_checkpoint.inner_of(self)}

    @torch.no_grad()
    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Take over another rank's ``shared_state``: parameters become Θ, this rank's residuals
        stay."""
        super().load_shared_state(state)
        self._warmup.averaged = -1

    # ------------------------------------------------------------ the end

    @property
    def pending(self) -> bool:
        """True if this rank has changes that it has not exchanged, or waits for an exchange."""
        return self.flight is not None or any(fragment.steps for fragment in self.fragments)

    def drain(self) -> None:
        """Exchange all remaining changes, until every rank has called it; afterwards parameters are
        Θ, equal on every rank.

        A rank that runs out of data calls it and keeps taking part in the others' rounds, with
        weight 0.
        """
        run(self.draining())

    @torch.no_grad()
    def draining(self) -> Steps[None]:
        """``drain`` as an algorithm that may wait."""
        if self.warms_up:
            self._end_warmup()
        if self.flight is not None:
            yield from self._arrive()
        self._ended, self._all_ended = True, 0
        while self._all_ended < len(self.fragments):
            yield from self._leave()
            yield from self._arrive()
        self._ended = False
        if not self.outer.equal:
            for fragment in self.fragments:
                with fragment.opened(write=True):
                    yield from fragment.mean_of_all(fragment.weights, self.exact, self.channel)
            self.counters.sent_bytes = self._sent_bytes()
        with self.inner.weights_rewritten():
            for fragment in self.fragments:
                with fragment.opened():
                    fragment.merge(0.0)
        self._begin_round()

    def close(self) -> None:
        self.inner.let_go()
        self.channel.close()
        self.control.close()

    # ------------------------------------------------------------ checkpoints

    @property
    def number(self) -> int:
        return self.exchanged

    def numels(self) -> dict[str, int]:
        return {each.name: each.numel for f in self.fragments for each in f.locals}

    def schedule(self) -> dict[str, Any]:
        return local_checkpoint.shared(self)

    def check(self, schedule: Mapping[str, Any]) -> None:
        local_checkpoint.check(self, schedule)

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        local_checkpoint.follow(self, schedule)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, including the inner optimizers': with the model's it resumes
        bit for bit, even in an overlap."""
        return run(self.saving())

    def rank_state(self) -> dict[str, Any]:
        return self.state_dict()

    @torch.no_grad()
    def saving(self) -> Steps[dict[str, Any]]:
        """``state_dict`` as an algorithm that may wait. A running exchange is waited for, and still
        arrives when it is due."""
        if self.warms_up:
            self._end_warmup()
        with self.meter.paused():
            if self.flight is not None:
                yield from self.flight.arrival()
            return self.part()

    def part(self) -> dict[str, Any]:
        with local_checkpoint.in_memory(self):
            return super().part() | local_checkpoint.own(self)

    def elastic_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a state for any number of ranks; collective. Load the parts of
        all ranks on each.

        An exchange under way arrives first. Changes since the last exchange are in the state as
        their mean, with the residuals: all ranks that load it start from there, alike.
        """
        return run(self.elastic_steps())

    @torch.no_grad()
    def elastic_steps(self) -> Steps[dict[str, Any]]:
        if self.apart:
            raise InvalidArgument(
                f"elastic_state_dict fits any number of ranks, but {self.apart} parameters are of "
                "experts that lie on this one alone: save state_dict() on every rank, and load it "
                "on as many"
            )
        if self.warms_up:
            self._end_warmup()
        if self.flight is not None:
            yield from self._arrive()
        return (yield from local_checkpoint.elastic(self))

    @torch.no_grad()
    def load_state_dict(  # type: ignore[override]
        self, state_dict: dict[str, Any], *others: dict[str, Any]
    ) -> None:
        """Load this rank's ``state_dict``, or all ranks' ``elastic_state_dict``. Load the model
        first.

        After ``drain``, the states of all ranks also fit another number of ranks.
        """
        super().load_state_dict(*map(local_checkpoint.current, (state_dict, *others)))
        # neither has been done yet for the next step and the next exchange
        self._decayed = self._warmup.averaged = -1

    def residuals_in(self, exchanges: Exchanges, states: Sequence[dict[str, Any]]) -> Residuals:
        """Return this rank's residuals; those of an elastic state are in the mean change."""
        elastic = bool(states) and states[0].get("kind") == "elastic"
        return {} if elastic else super().residuals_in(exchanges, states)

    def joined(self, states: Sequence[dict[str, Any]], missing: str) -> dict[str, Any]:
        return local_checkpoint.joined(self, states)

    def take_over(self, saved: Checked) -> None:
        super().take_over(saved)
        for fragment in self.fragments:
            fragment.put_back(self.exchanges)

    # ------------------------------------------------------------ figures

    def digest(self) -> str:
        """Return a hash of the shared weights: the same on every rank, with ``Gossip`` only after
        ``drain``."""
        digests = b"".join(f.digest().to_bytes(8, "little") for f in self.fragments)
        return f"{checksum_of(digests):016x}"

    def report(self) -> str:
        """Return a readable summary of the run so far."""
        return (
            f"{self.counters.summary(spread_of=self.outer.spread_of)}, shared weights "
            f"{self.digest()}"
        )
