"""State that moves: of one object that communicates, saved and loaded on as many ranks or on
others, and handed over when ranks come, leave or die.

An object says what it has; the rest follows.

    residuals     what its exchanges owe: a sum over the ranks, R = (1/P)·Σ eᵢ + s
    bases         learnt by codecs of matrices              equal on all ranks
    copies()      tensors of its own                        equal on all ranks
    schedule()    numbers, text and lists                   equal on all ranks

Whoever saves gives its own part, exact, or its shard of the totals, elastic (``residual_state``).
Whoever goes on among other ranks hands over residuals, and gives the rest to those that are behind
or new (``handover``).
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch

from commpress.codecs import Codec, policy_of
from commpress.collectives.allreduce import settle
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


class Reformable:
    """Object that goes on when ranks come, leave or die: it hands residuals over, and those behind
    or new get from others what all ranks have alike."""

    channel: Channel
    handover: Handover

    def exchange_sets(self) -> Mapping[str, Exchanges]:
        """All exchanges by name: their residuals are handed over, their bases are shared."""
        raise NotImplementedError

    def shared(self) -> State:
        """Numbers that are equal on all ranks, and that the last round may have changed on some of
        them only."""
        return {}

    def shared_tensors(self) -> Mapping[str, torch.Tensor]:
        """Likewise tensors, float32."""
        return {}

    def closing(self, change: Change, standing: Standing) -> Steps[Callable[[], None]]:
        """Return a function that makes state equal in which ranks differ, for when all have come as
        far."""
        yield from ()
        return lambda: None

    def arrive(self, change: Change, standing: Standing) -> None:
        """End what is under way, before exchanges are cut anew."""

    def catch_up(self, change: Change, standing: Standing) -> None:
        """Take over ``shared`` tensors and numbers of others as a rank that is behind, or new."""

    def go_on(self, change: Change, standing: Standing) -> None:
        """Begin as all others do from here on."""

    def reform(self, change: Change) -> Callable[[], None]:
        """Continue among the present ranks of the channel; collective. Call the result when all
        have come as far.

        A step under way counts if it counts for others, else it is left out.
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


class Stateful(Reformable):
    """Object with a ``channel``, ``exchanges`` and a ``handover``, made by ``connect``.

    - ``steps_done``: rounds of messages that all ranks have settled.
    """

    exchanges: Exchanges
    steps_done: int = 0

    def connect(
        self,
        process_group: Any = None,
        *,
        codec: str | Codec | None,
        min_numel: int = 1024,
        seed: int = 0,
        transport: Transport | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Connect the ranks of ``process_group``, all of them by default; collective."""
        self.channel = (
            Channel.among(process_group, timeout=timeout)
            if transport is None
            else Channel(transport)
        )
        size, workspace = self.channel.size, self.channel.workspace
        self.exchanges = Exchanges(
            policy_of(codec or "none", min_numel=min_numel), size, workspace, seed=seed
        )
        self.handover = Handover(self.channel)
        if transport is None:
            on_reform(process_group, self)

    # ------------------------------------------------------------ what an object says

    def copies(self) -> dict[str, torch.Tensor]:
        """Tensors that are equal on all ranks, float32; loading writes into them."""
        return {}

    def schedule(self) -> State:
        """Numbers that are equal on all ranks."""
        return {}

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        """Go on from a ``schedule`` that was saved, or that others have after a change of ranks."""

    def check(self, schedule: Mapping[str, Any]) -> None:
        """Raise ``StateMismatch`` unless ``follow`` can take it."""
        check_entries(schedule, tuple(self.schedule()), "the state that ranks share")

    def numels(self) -> dict[str, int]:
        """Elements of each tensor that crosses the channel, as far as they are known."""
        return {}

    # ------------------------------------------------------------ a round

    def averaging(self, buffer: torch.Tensor, shapes: Mapping[str, Sequence[int]]) -> Steps[bool]:
        """Replace ``buffer``, float32, by its mean over the ranks, and settle the round: False, and
        nothing kept, if values were not finite on some rank. ``shapes``: of the tensors that lie in
        it one after the other, by name."""
        spans, at = [], 0
        for name, shape in shapes.items():
            spans.append(Span(name, at, prod(shape)))
            at += spans[-1].numel
        exchange = self.exchanges.of(
            tuple(shapes), lambda: (spans, list(shapes.values())), buffer.device
        )
        outcomes = yield from exchange.steps(
            self.channel,
            buffer,
            sequence=self.channel.take(exchange.sequences),
            key=self.steps_done,
        )
        taken = all(outcome.finite for outcome in outcomes)
        settle(outcomes, taken=taken)
        self.handover.settle(taken=taken)
        self.steps_done += 1
        return taken

    # ------------------------------------------------------------ saving

    def state_dict(self) -> State:
        """This rank's part, for a bitwise resume at the same world size: every rank saves and loads
        its own."""
        nodes = str(self.channel.levels or "")
        state = exact_state(self.exchanges.residuals, self.channel, self.steps_done, nodes)
        return state | self._common()

    def rank_state(self) -> State:
        """Give this rank's part of a checkpoint; the parts of all ranks together fit any world
        size. Collective.

        In two levels it holds both forms: a rank's residuals there belong to its node, so the exact
        form alone would not do.
        """
        own = self.state_dict()
        return own if self.channel.levels is None else own | {"elastic": self.elastic_state_dict()}

    def elastic_state_dict(self) -> State:
        """This rank's shard of the total residual R, for a resume at any world size; collective,
        between steps."""
        return self.channel.run(self.elastic_steps())

    def elastic_steps(self) -> Steps[State]:
        """``elastic_state_dict`` as an algorithm that may wait."""
        sequence, levels = self.channel.take(), self.channel.levels
        parts = flat_parts(self.exchanges.residuals, self.channel.transport)
        if levels is not None:
            numels, policy, whole = self.numels(), self.exchanges.policy, self.exchanges.bases
            lossy = {
                name: numels[name]
                for name in sorted(numels)
                if not policy.choose(name, numels[name]).lossless and name not in whole
            }
            parts = levels.parts(self.exchanges.residuals, lossy) | {
                key: part for key, part in parts.items() if key[0] in whole
            }
        transport = self.channel.transport
        state = yield from elastic_of(parts, transport, self.steps_done, sequence)
        return state | self._common()

    def shared_state(self) -> State:
        """State that all ranks have alike, without residuals."""
        return {"step": self.steps_done} | self._common()

    def _common(self) -> State:
        copies = {name: each.detach().clone() for name, each in self.copies().items()}
        state = {"object": type(self).__name__} | self.exchanges.choices() | self.schedule()
        return state | ({"copies": copies} if copies else {})

    # ------------------------------------------------------------ loading

    def load_state_dict(self, *states: State) -> None:
        """From this rank's ``state_dict``, or at any world size from all ranks' states, of either
        kind, in any order. What does not fit changes nothing."""
        levels, size = self.channel.levels, self.channel.size
        saved_as = size, str(levels or "")
        if all(
            "elastic" in state and (state["size"], state["nodes"]) != saved_as for state in states
        ):
            states = tuple(state["elastic"] for state in states)
        # tensors whose residuals lie flat in two levels, too
        whole = states[0].get("bases", {}).keys() if states else {}

        def share(totals: dict[Key, torch.Tensor]) -> Residuals:
            flat = {key: total for key, total in totals.items() if key[0] in whole}
            rows = {key: total for key, total in totals.items() if key not in flat}
            return (levels.share(rows) if levels else spread(rows, size)) | spread(flat, size)

        step, residuals = residuals_of(states, self.channel, share=share, nodes=str(levels or ""))
        if numels := self.numels():
            in_rows = {k: kept for k, kept in residuals.items() if levels and k[0] not in whole}
            lengths = levels.lengths(numels) if levels else None
            check_fit(in_rows, numels, lengths, size=size)
            flat = {key: kept for key, kept in residuals.items() if key not in in_rows}
            check_fit(flat, numels, size=size)
        self.exchanges.residuals.check(residuals)
        self._take(step, states[0])
        self.exchanges.residuals.load(residuals)

    def load_shared_state(self, state: State) -> None:
        """Take over another rank's ``shared_state``; residuals stay."""
        check_entries(state, ("step",), "the state that ranks share")
        self._take(state["step"], state)

    @torch.no_grad()
    def _take(self, step: int, state: State) -> None:
        copies = self._checked(state)
        self.exchanges.load_choices(state)
        for mine, theirs in copies:
            mine.copy_(theirs)
        self.steps_done = step
        self.follow(state)

    def _checked(self, state: State) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies here and in the state, side by side, if all that is common fits."""
        here = type(self).__name__
        if (there := state.get("object", here)) != here:
            raise StateMismatch(f"the state is of {there}, this is {here}: load its own")
        self.exchanges.check_choices(state)
        self.check(state)
        own, saved = self.copies(), state.get("copies", {})
        check_entries(saved, tuple(own), "the copies of the state")
        for name, each in own.items():
            if saved[name].shape != each.shape:
                raise StateMismatch(
                    f"{name!r} has shape {tuple(saved[name].shape)} in the state, expected "
                    f"{tuple(each.shape)}: load the state of this model"
                )
        return [(each, saved[name]) for name, each in own.items()]

    # ------------------------------------------------------------ other ranks

    def passing(self) -> State:
        """Numbers that newcomers need beside ``schedule``, and that no checkpoint holds."""
        return {}

    def exchange_sets(self) -> Mapping[str, Exchanges]:
        return {"": self.exchanges}

    def shared(self) -> State:
        return {"step": self.steps_done} | self.schedule() | self.passing()

    def shared_tensors(self) -> Mapping[str, torch.Tensor]:
        return {f"copy {name}": each for name, each in self.copies().items()}

    def catch_up(self, change: Change, standing: Standing) -> None:
        for name, mine in self.copies().items():
            mine.copy_(standing.tensors[f"copy {name}"])

    def go_on(self, change: Change, standing: Standing) -> None:
        self.steps_done = standing.shared["step"]
        self.follow(standing.shared, change)
