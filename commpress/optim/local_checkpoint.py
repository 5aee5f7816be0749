"""Saving and loading local updates: exact for a bitwise resume, elastic for another number of
ranks.

A state has the common part (Θ, the outer state, the position in the round) and this rank's own:
inner optimizers, residuals, and the mean of a running exchange. All values are plain tensors,
numbers and text: it loads with ``weights_only=True``.

When the ranks change, Θ and the outer state stay equal, each rank keeps its residuals, and a new
round begins:

exchange that nobody has finished         left out; what was trained goes with the next one
exchange that some ranks have finished    counts: the others take its mean, or Θ where that has
                                          moved already
overlap under way                         arrives now
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from commpress.collectives.change import Change
from commpress.collectives.handover import Standing
from commpress.collectives.residual_state import (
    check_fit,
    elastic_of,
    exact_state,
    flat_parts,
    residuals_of,
)
from commpress.errors import StateMismatch, check_entries
from commpress.feedback import ResidualStore
from commpress.optim.fragments import Flight
from commpress.optim.outer import State
from commpress.schedules import Facts, Pace
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.optim.local_updates import LocalUpdates

FORMAT = 1
SHARED = ("steps", "exchanged", "round", "facts", "weights", "outer", "layout")
EXACT = (*SHARED, "inner", "flight", "counts", "residuals", "choices")
ELASTIC = ("inner", "progress")
FLIGHT = ("fragment", "due", "taken", "mean")

log = logging.getLogger("commpress")


# ---------------------------------------------------------------- saving


def exact(local: "LocalUpdates") -> Steps[dict[str, Any]]:
    """Return this rank's state. A running exchange is waited for, and still arrives when it is
    due."""
    flight, transport, under_way = local.flight, local.channel.transport, None
    if flight is not None:
        taken = yield from flight.arrival()
        under_way = {
            "fragment": flight.fragment.number,
            "due": flight.due,
            "taken": taken,
            "mean": flight.fragment.work.clone(),
            "finite": flight.finite,
            "alpha": flight.alpha,
            "long": flight.long,
            "pace": list(flight.pace or ()),
        }
    with in_memory(local) as store:
        residuals = exact_state(store, transport, local.exchanged)
    return _shared(local) | {
        "kind": "exact",
        "rank": transport.rank,
        "size": transport.size,
        "inner": [optimizer.state_dict() for optimizer in local.inner],
        "flight": under_way,
        "counts": [[f.steps, f.tokens] for f in local.fragments],
        "residuals": residuals,
        "choices": local.exchanges.choices(),
        "pace": local.meter.state(),
    }


def common(local: "LocalUpdates") -> dict[str, Any]:
    """Return the state that is equal on all ranks, with this rank's inner optimizers for
    newcomers."""
    inner = [optimizer.state_dict() for optimizer in local.inner]
    return _shared(local) | {"kind": "shared", "inner": inner, "choices": local.exchanges.choices()}


def load_common(local: "LocalUpdates", state: dict[str, Any]) -> None:
    """Load another rank's ``common``; residuals stay."""
    if (
        state.get("format") != FORMAT
        or state.get("kind") != "shared"
        or len(state["inner"]) != len(local.inner)
    ):
        raise StateMismatch(
            f"expected what LocalUpdates.shared_state() gave, format {FORMAT}, of "
            f"{len(local.inner)} inner optimizers; this is of format {state.get('format')!r} and "
            f"kind {state.get('kind')!r}"
        )
    shared = _shared_of(local, [state])
    _forget_flight(local)
    for optimizer, each in zip(local.inner, state["inner"], strict=True):
        optimizer.load_state_dict(each)
    _load_shared(local, shared)
    local.exchanges.load_choices(state["choices"])
    with local.inner.weights_rewritten():
        for fragment in local.fragments:
            fragment.steps = fragment.tokens = 0
            with fragment.opened():
                fragment.merge(0.0)


def elastic(local: "LocalUpdates") -> Steps[dict[str, Any]]:
    """Return this rank's part: its shard of the mean change plus residuals, and on rank 0 the
    common state."""
    transport, changes = local.channel.transport, {}
    shared: dict[str, Any] = {"format": FORMAT}
    if transport.rank == 0 or not local.outer.equal:
        shared = _shared(local)
    with in_memory(local) as store:
        owed = flat_parts(store, transport)
    if not local.outer.equal:
        for fragment, weights, outer in zip(
            local.fragments, shared["weights"], shared["outer"], strict=True
        ):
            for flat in (weights, *(outer[name] for name in local.outer.buffers)):
                yield from fragment.mean_of_all(flat, local.exact, local.channel)
    local.inner.settle_weights()
    for i, fragment in enumerate(local.fragments):
        with fragment.opened():
            fragment.change(None if local.outer.equal else shared["weights"][i])
        starts = {span.name: span.source for span in fragment.spans}
        for (name, offset), part in owed.items():
            if name in starts:
                fragment.work[starts[name] + offset :][: part.numel()] += part
        changes[f"fragment {fragment.number}", 0] = fragment.work.cpu()
    progress = yield from elastic_of(changes, transport, local.exchanged, local.channel.take())
    shared = shared if transport.rank == 0 else {"format": FORMAT}
    inner = [optimizer.state_dict() for optimizer in local.inner]
    return shared | {"kind": "elastic", "inner": inner, "progress": progress}


def _shared(local: "LocalUpdates") -> dict[str, Any]:
    """Return the state that is equal on all ranks."""
    weights, outer = [], []
    for fragment in local.fragments:
        with fragment.opened():
            weights.append(fragment.weights.clone())
            outer.append(_copied(fragment.state))
    return {
        "format": FORMAT,
        "steps": local.steps_done,
        "exchanged": local.exchanged,
        "round": local.schedule.state(),
        "facts": local.facts.as_dict(),
        "weights": weights,
        "outer": outer,
        "layout": [f.layout for f in local.fragments],
    }


@contextmanager
def in_memory(local: "LocalUpdates") -> Iterator[ResidualStore]:
    """Keep the residuals of all fragments in memory inside the context."""
    for fragment in local.fragments:
        fragment.bring(local.exchanges)
    try:
        yield local.exchanges.residuals
    finally:
        for fragment in local.fragments:
            fragment.put_back(local.exchanges)


# ---------------------------------------------------------------- loading


def load(local: "LocalUpdates", states: list[dict[str, Any]]) -> None:
    """Load this rank's exact state, or those of all ranks, exact or elastic; nothing if they do not
    fit."""
    for state in states:
        if state.get("format") != FORMAT or state.get("kind") not in ("exact", "elastic"):
            raise StateMismatch(
                "expected what LocalUpdates.state_dict() or elastic_state_dict() gave, format "
                f"{FORMAT}; this is of format {state.get('format')!r} and kind "
                f"{state.get('kind')!r}"
            )
        check_entries(state, EXACT if state["kind"] == "exact" else ELASTIC, "the state")
    is_exact, transport = states[0]["kind"] == "exact", local.channel.transport
    states = _own(local, states) if is_exact else states
    shared, inner = _shared_of(local, states), states[transport.rank % len(states)]["inner"]
    if len(inner) != len(local.inner):
        raise StateMismatch(
            f"the state holds {len(inner)} inner optimizers, expected {len(local.inner)}"
        )
    if is_exact:
        _check_own(local, states[0])
    residuals: Any = {}
    if is_exact and (len(states) > 1 or _place(states[0]) == (transport.rank, transport.size)):
        _, residuals = residuals_of([each["residuals"] for each in states], transport)
    changes: Any = {}
    if not is_exact:
        whole: Any = dict  # each rank needs all of the mean change, not its part
        _, changes = residuals_of([each["progress"] for each in states], transport, share=whole)
    local.exchanges.residuals.check(residuals)
    numels = {each.name: each.numel for f in local.fragments for each in f.locals}
    check_fit(residuals, numels, size=local.channel.size)
    _forget_flight(local)
    local.exchanges.residuals.load(residuals)
    for fragment in local.fragments:
        fragment.put_back(local.exchanges)
    for optimizer, each in zip(local.inner, inner, strict=True):
        optimizer.load_state_dict(each)
    _load_shared(local, shared)
    if is_exact:
        _load_own(local, states[0])
    else:
        _load_changes(local, changes)


def _own(local: "LocalUpdates", states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the state that this rank saved, if as many ranks saved; else all, which must be from
    the end of a round."""
    place = local.channel.rank, local.channel.size
    own = [each for each in states if _place(each) == place]
    if own:
        return own
    rank, size = _place(states[0])
    pairs = (
        (a, b) for s in states for a, b in zip(s["weights"], states[0]["weights"], strict=True)
    )
    if (
        states[0]["flight"] is not None
        or any(steps for each in states for steps, _ in each["counts"])
        or any(not torch.equal(*pair) for pair in pairs)  # with Gossip
    ):
        raise StateMismatch(
            f"the state was saved by rank {rank} of {size} in the middle of a round, in which "
            f"ranks differ, and this is rank {place[0]} of {place[1]}: load each rank's own, or "
            "call drain() before state_dict(), or save with elastic_state_dict()"
        )
    if len(states) == 1 and size > 1:
        log.warning(
            "the loaded state is of rank %d of %d, this is rank %d of %d: what compression left "
            "behind here starts from zero, unless what this rank saved is loaded next",
            rank,
            size,
            *place,
        )
    return states


def _shared_of(local: "LocalUpdates", states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state with the common part; if the parts differ, the one for this rank."""
    shared = next((each for each in states if "weights" in each), None)
    if states[0]["kind"] == "exact" and not local.outer.equal:
        shared = states[local.channel.rank % len(states)]
    if shared is None or shared.get("layout") != [f.layout for f in local.fragments]:
        raise StateMismatch(
            "the state is of other parameters or fragments (its layout), or that of rank 0 is "
            "missing: load the state of this model, with the fragments= of the run that saved it"
        )
    _check_shared(local, shared)
    return shared


def _check_shared(local: "LocalUpdates", shared: dict[str, Any]) -> None:
    """Raise ``StateMismatch`` unless the common state is complete and has the same fragments."""
    check_entries(shared, SHARED, "the state that ranks share")
    Facts.of(shared["facts"])
    every = zip(local.fragments, shared["weights"], shared["outer"], strict=True)
    for fragment, weights, outer in every:
        kept = [name for name in local.outer.buffers if name in fragment.state]
        check_entries(outer, kept, f"the outer state of fragment {fragment.number}")
        own = {name: each for name, each in outer.items() if torch.is_tensor(each) and each.dim()}
        for name, each in {"weights": weights, **own}.items():
            if each.shape != (fragment.numel,):
                raise StateMismatch(
                    f"{name!r} of fragment {fragment.number} has shape {tuple(each.shape)}, "
                    f"expected {(fragment.numel,)}: load the state of this model"
                )


def _check_own(local: "LocalUpdates", state: dict[str, Any]) -> None:
    """Raise ``StateMismatch`` unless a rank's own state is complete and fits."""
    local.exchanges.check_choices(state["choices"])
    if (flight := state["flight"]) is not None:
        check_entries(flight, FLIGHT, "the exchange under way")
        number = int(flight["fragment"])
        if not 0 <= number < len(local.fragments):
            raise StateMismatch(
                f"the exchange under way is of fragment {number}, expected one below "
                f"{len(local.fragments)}: load the state of this model"
            )
        wanted = local.fragments[number].numel
        if flight["mean"].numel() != wanted:
            raise StateMismatch(
                f"the 'mean' under way has {flight['mean'].numel()} elements, expected {wanted}: "
                "load the state of this model"
            )


def _forget_flight(local: "LocalUpdates") -> None:
    """Finish and drop a running exchange, because a state is about to be loaded."""
    flight, local.flight = local.flight, None
    if flight is not None:
        if flight.future is not None:
            flight.future.wait()
        flight.fragment.detach(local.exchanges)


def _load_shared(local: "LocalUpdates", state: dict[str, Any]) -> None:
    local.steps_done, local.exchanged = int(state["steps"]), int(state["exchanged"])
    local.finished = local.exchanged  # the mean of a running exchange is known too
    local.facts = Facts.of(state["facts"])
    local.schedule.load(state["round"])
    for fragment, weights, outer in zip(
        local.fragments, state["weights"], state["outer"], strict=True
    ):
        with fragment.opened(write=True):
            fragment.weights.copy_(weights)
            fragment.state.clear()
            fragment.state.update(_copied(outer))


def _load_own(local: "LocalUpdates", state: dict[str, Any]) -> None:
    """Load from an exact state this rank's training progress and the mean of a running exchange."""
    for fragment, (steps, tokens) in zip(local.fragments, state["counts"], strict=True):
        fragment.steps, fragment.tokens = int(steps), int(tokens)
    local.exchanges.load_choices(state["choices"])
    if "pace" in state:
        local.meter.load(state["pace"])
    flight = state["flight"]
    if flight is not None:
        fragment = local.fragments[int(flight["fragment"])]
        fragment.attach(local.exchanges)
        fragment.work.copy_(flight["mean"])
        local.flight = Flight(
            fragment,
            int(flight["due"]),
            taken=bool(flight["taken"]),
            finite=bool(flight.get("finite", True)),
            alpha=float(flight.get("alpha", local.alpha or 0.0)),
            long=bool(flight.get("long", False)),
            pace=Pace(*map(float, flight["pace"])) if flight.get("pace") else None,
        )
        local.taken = local.flight.taken


def _load_changes(local: "LocalUpdates", changes: dict[tuple[str, int], torch.Tensor]) -> None:
    """Set parameters to Θ minus the mean change, from which every rank continues."""
    with local.inner.weights_rewritten():
        for fragment in local.fragments:
            with fragment.opened():
                fragment.set_change(changes[f"fragment {fragment.number}", 0])
            fragment.steps = fragment.tokens = 1


def _copied(state: State) -> State:
    return {name: each.clone() if torch.is_tensor(each) else each for name, each in state.items()}


def _place(state: dict[str, Any]) -> tuple[int, int]:
    return state["residuals"]["rank"], state["residuals"]["size"]


# ---------------------------------------------------------------- other ranks

# tensors of the last exchange
MEAN, WEIGHTS, OUTER = "mean", "weights", "outer "


def has_arrived(local: "LocalUpdates") -> bool:
    """True if the mean of the running exchange is known."""
    return local.flight is not None and local.finished == local.exchanged


def furthest(local: "LocalUpdates", change: Change) -> Steps[int]:
    """Return the largest number of steps that a rank has taken."""
    mine = [0.0 if change.was is None else float(local.steps_done)]
    counts = yield from local.channel.gathered(mine)
    return int(counts.max())


def last(local: "LocalUpdates") -> dict[str, torch.Tensor]:
    """Return the outcome of the last exchange that this rank finished: its mean, or the shared
    weights after it."""
    if local.flight is not None and has_arrived(local):
        return {MEAN: local.flight.fragment.work}
    if local.moved is None or local.flight is not None:
        return {}
    fragment = local.fragments[local.moved]
    with fragment.opened():
        outer = {
            OUTER + name: each.float().clone()
            for name, each in fragment.state.items()
            if torch.is_tensor(each)
        }
        return {WEIGHTS: fragment.weights.clone()} | outer


def arrive(local: "LocalUpdates", change: Change, standing: Standing) -> None:
    """Apply the running exchange if other ranks have finished it."""
    came, given = has_arrived(local), standing.tensors
    flight, local.flight = local.flight, None
    if flight is None:
        return
    if change.was is not None:
        if MEAN in given:
            flight.fragment.work.copy_(given[MEAN])
            local.land(flight, taken=standing.shared["taken"])
        elif WEIGHTS in given:
            _move(local, flight, given)
        elif came:
            local.land(flight, taken=local.taken)
        else:
            flight.give_up()
    flight.fragment.detach(local.exchanges)


def _move(local: "LocalUpdates", flight: Flight, given: dict[str, Any]) -> None:
    """Take Θ from a rank where the mean has arrived, and update this rank's weights as if it had
    arrived here."""
    fragment = flight.fragment
    with fragment.opened(write=True):
        fragment.weights.copy_(given[WEIGHTS])
        for name, each in given.items():
            if name.startswith(OUTER):
                here = fragment.state.get(name.removeprefix(OUTER))
                if torch.is_tensor(here):
                    here.copy_(each)
                else:
                    fragment.state[name.removeprefix(OUTER)] = each.to(fragment.weights.device)
    local.land(flight, taken=False)
