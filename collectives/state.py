"""State of an object that communicates: saved, loaded on the same or another number of ranks, and
handed over when ranks join, leave or die.

An object declares its state; the rest follows.

    residuals     what its exchanges owe: a sum over the ranks, R = (1/P)·Σ eᵢ + s
    bases         learnt by codecs of matrices              equal on all ranks
    copies()      tensors of its own                        equal on all ranks
    schedule()    numbers, text and lists                   equal on all ranks
    waiting()     tensors of an open round                  different; on other ranks their mean

A rank saves its own part (exact) or its shard of the totals (elastic), see ``residual_state``. When
the ranks change, residuals are handed over and ranks that are behind or new receive the rest
(``handover``).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypedDict

import torch

from commpress.codecs import Codec, policy_of
from commpress.collectives.allreduce import average, settle
from commpress.collectives.buckets import Span
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.handover import Handover, Standing
from commpress.collectives.residual_state import (
    Residuals,
    check_fit,
    elastic_of,
    exact_state,
    flat_parts,
    residuals_of,
    spread,
)
from commpress.collectives.transports.factory import on_reform
from commpress.collectives.transports.transport import Transport
from commpress.errors import StateMismatch, check_entries
from commpress.feedback import Key, ResidualStore
from commpress.work import Steps

State = dict[str, Any]
log = logging.getLogger("commpress")
PLACE = ("kind", "rank", "size")  # of the state of a set of exchanges


class Checked(NamedTuple):
    """Checked states of one checkpoint."""

    head: State  # common state, and what is joined for this rank
    residuals: dict[str, Residuals]  # by set of exchanges
    missing: str  # why there are no residuals: this is the state of another rank alone


class ConnectOptions(TypedDict, total=False):
    """Keyword options of ``Stateful.connect`` that optimizers pass on."""

    process_group: Any
    min_numel: int
    transport: Transport | None


class Stateful:
    """Object with a ``channel``, ``exchanges`` and a ``handover``, made by ``connect``.

    It overrides what it says (``copies``, ``schedule``, ``follow`` …). An object with several sets
    of exchanges names them in ``exchange_sets``; one whose state lies elsewhere overrides ``part``,
    ``elastic_part`` and ``joined`` too.

    - ``steps_done``: rounds of messages that all ranks have settled.
    """

    channel: Channel
    handover: Handover
    exchanges: Exchanges
    steps_done: int = 0
    alone = False  # whether the state of another rank alone will do, without residuals

    def connect(
        self,
        process_group: Any = None,
        *,
        codec: str | Codec | None,
        min_numel: int = 1024,
        transport: Transport | None = None,
    ) -> None:
        """Connect the ranks of ``process_group``, all of them by default; collective.

        - ``min_numel``: tensors with fewer elements are averaged exactly.
        - ``transport``: in place of ``process_group``.
        """
        self.channel = Channel.among(process_group) if transport is None else Channel(transport)
        size, workspace = self.channel.size, self.channel.workspace
        self.exchanges = Exchanges(policy_of(codec or "none", min_numel=min_numel), size, workspace)
        self.handover = Handover(self.channel)
        if transport is None:
            on_reform(process_group, self)

    # ------------------------------------------------------------ what an object says

    @property
    def number(self) -> int:
        """Number of rounds at which a state is saved."""
        return self.steps_done

    def exchange_sets(self) -> Mapping[str, Exchanges]:
        """Return all exchanges by name: their residuals are saved and handed over, their bases are
        shared."""
        return {"": self.exchanges}

    def copies(self) -> dict[str, torch.Tensor]:
        """Return float32 tensors that are equal on all ranks; loading writes into them."""
        return {}

    def schedule(self) -> State:
        """Return numbers that are equal on all ranks."""
        return {}

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        """Continue from a ``schedule`` that was saved, or that other ranks have after a change."""

    def check(self, schedule: Mapping[str, Any]) -> None:
        """Raise ``StateMismatch`` unless ``follow`` accepts ``schedule``."""
        check_entries(schedule, tuple(self.schedule()), "the state that ranks share")

    def numels(self) -> dict[str, int]:
        """Return the number of elements of each tensor that crosses the channel, as far as
        known."""
        return {}

    def waiting(self) -> dict[str, torch.Tensor]:
        """Return flat float32 tensors that differ between the ranks for a while; on other ranks
        their mean counts."""
        return {}

    def joined(self, states: Sequence[State], missing: str) -> State:
        """Return what ``follow`` needs besides the state of the first rank, from that of this rank
        or from those of all; ``missing``: from the state of another rank alone, and why."""
        return {}

    # ------------------------------------------------------------ a round

    def averaging(self, buffer: torch.Tensor, shapes: Mapping[str, Sequence[int]]) -> Steps[bool]:
        """Replace ``buffer``, float32, by its mean over the ranks, and settle the round: False, and
        nothing kept, if values were not finite on some rank. ``shapes``: by name, of the tensors in
        ``buffer``, one after the other."""
        spans, at = [], 0
        for name, shape in shapes.items():
            spans.append(Span(name, at, prod(shape)))
            at += spans[-1].numel
        exchange = self.exchanges.of(
            tuple(shapes), lambda: (spans, list(shapes.values())), buffer.device
        )
        call = self.channel.call(exchange.sequences, self.steps_done)
        outcomes = yield from exchange.steps(self.channel, buffer, call)
        taken = all(outcome.finite for outcome in outcomes)
        settle(outcomes, taken=taken)
        self.handover.settle(taken=taken)
        self.steps_done += 1
        return taken

    # ------------------------------------------------------------ saving

    def state_dict(self) -> State:
        """Return this rank's part, for a bitwise resume at the same world size: every rank saves
        and loads its own."""
        return self.part()

    def rank_state(self) -> State:
        """Return this rank's part of a checkpoint; the parts of all ranks together fit any world
        size. Collective.

        In two levels it holds both forms: a rank's residuals there belong to its node, so the exact
        form alone would not do.
        """
        own = self.part()
        return own if self.channel.levels is None else own | {"elastic": self.elastic_state_dict()}

    def elastic_state_dict(self) -> State:
        """Return this rank's shard of the total residual R, for a resume at any world size;
        collective, between steps. Rank 0's has the common state."""
        return self.channel.run(self.elastic_steps())

    def elastic_steps(self) -> Steps[State]:
        """``elastic_state_dict`` as an algorithm that may wait."""
        return self.elastic_part()

    def part(self) -> State:
        """Return all that this rank has of the state."""
        nodes = str(self.channel.levels or "")
        state = self.common() | _copied(self.waiting())
        for name, each in self.exchange_sets().items():
            kept = exact_state(each.residuals, self.channel, self.number, nodes)
            _put(state, name, kept | each.choices())
        return state

    def elastic_part(self) -> Steps[State]:
        """Return this rank's shard of all residuals, and on rank 0 the common state."""
        channel, means = self.channel, _copied(self.waiting())
        for mean in means.values():
            yield from average(mean, channel.call(1), name="window")
        state = self.common() | means if channel.rank == 0 else self.head()
        for name, each in self.exchange_sets().items():
            parts, sequence = self.parts_of(each), channel.take()
            kept = yield from elastic_of(parts, channel.transport, self.number, sequence)
            _put(state, name, kept | each.choices())
        return state

    def parts_of(self, exchanges: Exchanges) -> dict[Key, torch.Tensor]:
        """Return this rank's part of each piece; the mean of the parts over the ranks is R."""
        levels, parts = self.channel.levels, flat_parts(exchanges.residuals, self.channel.transport)
        if levels is None:
            return parts
        numels, whole = self.numels(), exchanges.bases
        lossy = {
            name: numels[name]
            for name in sorted(numels)
            if not exchanges.policy.choose(name, numels[name]).lossless and name not in whole
        }
        return levels.parts(exchanges.residuals, lossy) | {
            key: part for key, part in parts.items() if key[0] in whole
        }

    def shared_state(self) -> State:
        """Return the state that is equal on all ranks, without residuals."""
        state = self.common() | _copied(self.waiting())
        for name, each in self.exchange_sets().items():
            _put(state, name, each.choices())
        return state

    def head(self) -> State:
        """Return the entries by which a part is recognised."""
        return {"object": type(self).__name__, "step": self.number}

    def common(self) -> State:
        """Return the state that is equal on all ranks, without what codecs have learnt."""
        copies = _copied(self.copies())
        return self.head() | self.schedule() | ({"copies": copies} if copies else {})

    # ------------------------------------------------------------ loading

    def load_state_dict(self, *states: State) -> None:
        """Load this rank's ``state_dict``, or at any world size all ranks' states, of either kind,
        in any order. A state that does not fit changes nothing."""
        self.take_over(self.read(states))

    def load_shared_state(self, state: State) -> None:
        """Take over another rank's ``shared_state``; residuals stay."""
        self.check_common(state)
        self._take(state)

    def read(self, states: Sequence[State]) -> Checked:
        """Check states, this rank's own or those of all ranks; return what ``take_over`` loads."""
        levels, size = self.channel.levels, self.channel.size
        saved_as = size, str(levels or "")
        if all(
            "elastic" in state and (state["size"], state["nodes"]) != saved_as for state in states
        ):
            states = [state["elastic"] for state in states]
        sets, missing = self.exchange_sets(), ""
        for name in filter(None, sets):
            for state in states:
                check_entries(state, (name,), "the state of a rank")
                check_entries(state[name], PLACE, f"the {name!r} state of a rank")
        first = next(iter(sets))
        places: list[Any] = [tuple(_within(state, first).get(k) for k in PLACE) for state in states]
        mine = "exact", self.channel.rank, size
        own = [state for state, place in zip(states, places, strict=True) if place == mine]
        if self.alone and not own and len(states) == 1:
            kind, rank, ranks = places[0]
            if kind == "exact" and ranks > 1:
                missing = (
                    f"the loaded state is of rank {rank} of {ranks}, this is rank "
                    f"{self.channel.rank} of {size}"
                )
        residuals = {
            name: {} if missing else self.residuals_in(each, [_within(s, name) for s in states])
            for name, each in sets.items()
        }
        states = own or states
        head = min(states, key=lambda state: int(_within(state, first).get("rank", 0)))
        head = head | self.joined(states, missing)
        self.check_common(head)
        return Checked(head, residuals, missing)

    def residuals_in(self, exchanges: Exchanges, states: Sequence[State]) -> Residuals:
        """Return this rank's residuals of these exchanges; raise ``StateMismatch`` unless they
        fit."""
        levels, size = self.channel.levels, self.channel.size
        # their residuals are flat, in two levels too
        whole = states[0].get("bases", {}).keys() if states else {}

        def share(totals: dict[Key, torch.Tensor]) -> Residuals:
            flat = {key: total for key, total in totals.items() if key[0] in whole}
            rows = {key: total for key, total in totals.items() if key not in flat}
            return (levels.share(rows) if levels else spread(rows, size)) | spread(flat, size)

        _, residuals = residuals_of(states, self.channel, share=share, nodes=str(levels or ""))
        if numels := self.numels():
            in_rows = {k: kept for k, kept in residuals.items() if levels and k[0] not in whole}
            lengths = levels.lengths(numels) if levels else None
            check_fit(in_rows, numels, lengths, size=size)
            flat = {key: kept for key, kept in residuals.items() if key not in in_rows}
            check_fit(flat, numels, size=size)
        exchanges.residuals.check(residuals)
        return residuals

    def take_over(self, saved: Checked) -> None:
        """Load what ``read`` has checked."""
        if saved.missing:
            log.warning(
                "%s: residuals here start from zero, unless what this rank saved is loaded next. "
                "Load each rank's own state_dict(), or all ranks' to change the world size",
                saved.missing,
            )
        self._take(saved.head)
        for name, each in self.exchange_sets().items():
            each.load(saved.residuals[name])

    @torch.no_grad()
    def _take(self, state: State) -> None:
        for name, each in self.exchange_sets().items():
            each.load_choices(_within(state, name))
        for name, mine in self.copies().items():
            mine.copy_(state["copies"][name])
        self.steps_done = int(state["step"])
        self.follow(state)

    def check_common(self, state: State) -> None:
        """Raise ``StateMismatch`` unless what ranks share fits."""
        check_entries(state, ("step",), "the state that ranks share")
        here = type(self).__name__
        if (there := state.get("object", here)) != here:
            raise StateMismatch(f"the state is of {there}, this is {here}: load its own")
        for of, exchanges in self.exchange_sets().items():
            exchanges.check_choices(_within(state, of))
        self.check(state)
        own, saved = self.copies(), state.get("copies", {})
        check_entries(saved, tuple(own), "the copies of the state")
        for name, each in own.items():
            if saved[name].shape != each.shape:
                raise StateMismatch(
                    f"{name!r} has shape {tuple(saved[name].shape)} in the state, expected "
                    f"{tuple(each.shape)}: load the state of this model"
                )

    # ------------------------------------------------------------ other ranks

    def passing(self) -> State:
        """Return numbers that newcomers need besides ``schedule`` and that no checkpoint has."""
        return {}

    def shared(self) -> State:
        """Return numbers that are equal on all ranks, except that the last round may have changed
        them on some only."""
        return {"step": self.steps_done} | self.schedule() | self.passing()

    def shared_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return float32 tensors that are equal on all ranks in the same sense."""
        return {f"copy {name}": each for name, each in self.copies().items()}

    def closing(self, change: Change, standing: Standing) -> Steps[Callable[[], None]]:
        """Return a function that makes differing state equal, to be called once all ranks have got
        here."""
        yield from ()
        return lambda: None

    def arrive(self, change: Change, standing: Standing) -> None:
        """Finish or drop running work, before exchanges are cut again."""

    def catch_up(self, change: Change, standing: Standing) -> None:
        """Take over the ``shared`` tensors and numbers of others, on a rank that is behind or
        new."""
        for name, mine in self.copies().items():
            mine.copy_(standing.tensors[f"copy {name}"])

    def go_on(self, change: Change, standing: Standing) -> None:
        """Continue from the common state, like all other ranks."""
        self.steps_done = standing.shared["step"]
        self.follow(standing.shared, change)

    def reform(self, change: Change) -> Callable[[], None]:
        """Continue among the present ranks of the channel; collective. Call the result once all
        ranks have got here.

        A running step counts if another rank has finished it, else it is dropped.
        """
        return self.channel.run(self.reforming(change))

    @torch.no_grad()
    def reforming(self, change: Change) -> Steps[Callable[[], None]]:
        """``reform`` as an algorithm that may wait."""
        sets = self.exchange_sets()
        bases = {
            f"basis {name} {of}": basis
            for of, each in sets.items()
            for name, basis in each.bases.items()
        }
        standing = yield from self.handover.steps(
            change,
            self.stores(),
            self.channel.workspace,
            shared=self.shared(),
            tensors=bases | dict(self.shared_tensors()),
        )
        finish = yield from self.closing(change, standing)

        @torch.no_grad()
        def follow() -> None:
            self.arrive(change, standing)
            self.channel.workspace.clear()
            for of, each in sets.items():
                each.reform(self.channel.size)
                given = standing.tensors.items() if standing.behind else ()
                ends = f" {of}"
                each.bases |= {
                    name.removeprefix("basis ").removesuffix(ends): basis
                    for name, basis in given
                    if name.startswith("basis ") and name.endswith(ends)
                }
            if standing.behind:
                self.catch_up(change, standing)
            finish()
            self.go_on(change, standing)

        return self.handover.with_it(follow)

    def stores(self) -> dict[str, ResidualStore]:
        """Residuals of all exchanges."""
        return {name: each.residuals for name, each in self.exchange_sets().items()}

    def hand_over(self, leaving: Sequence[int]) -> None:
        """Hand the residuals of leaving ranks to the others; collective, between steps."""
        self.channel.run(self.leaving(leaving))

    def leaving(self, ranks: Sequence[int]) -> Steps[None]:
        """``hand_over`` as an algorithm that may wait."""
        return self.handover.leaving(ranks, self.stores())


def _copied(tensors: Mapping[str, torch.Tensor]) -> State:
    return {name: each.detach().clone() for name, each in tensors.items()}


def _within(state: State, name: str) -> State:
    """Return the state of a set of exchanges; the only one has no name and no level of its own."""
    inner: State = state.get(name, {}) if name else state
    return inner


def _put(state: State, name: str, part: State) -> None:
    state |= {name: part} if name else part
