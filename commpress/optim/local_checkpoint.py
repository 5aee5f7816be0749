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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from commpress.collectives.change import Change
from commpress.collectives.handover import Standing
from commpress.collectives.residual_state import elastic_of, flat_parts, residuals_of
from commpress.errors import StateMismatch, check_entries
from commpress.feedback import ResidualStore
from commpress.optim.fragments import Flight
from commpress.optim.outer import State
from commpress.schedules import Facts, Pace
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.optim.local_updates import LocalUpdates

SHARED = ("steps", "exchanged", "round", "facts", "weights", "outer", "layout")
OWN = ("flight", "counts")
FLIGHT = ("due", "taken", "finite", "alpha", "kept", "long")  # of a running exchange


# ---------------------------------------------------------------- saving


def shared(local: "LocalUpdates") -> dict[str, Any]:
    """Return the state that is equal on all ranks."""
    weights, outer = [], []
    for fragment in local.fragments:
        with fragment.opened():
            weights.append(fragment.weights.clone())
            outer.append(_copied(fragment.state))
    return {
        "steps": local.steps_done,
        "exchanged": local.exchanged,
        "round": local.rounds.state(),
        "facts": local.facts.as_dict(),
        "weights": weights,
        "outer": outer,
        "layout": [f.layout for f in local.fragments],
    }


def own(local: "LocalUpdates") -> dict[str, Any]:
    """Return the state of this rank; the mean of a running exchange has come."""
    flight, under_way = local.flight, None
    if flight is not None:
        under_way = {
            "fragment": flight.fragment.number,
            "mean": flight.fragment.work.clone(),
            "pace": list(flight.pace or ()),
        } | {name: getattr(flight, name) for name in FLIGHT}
        if flight.spread is not None:
            under_way["spread"] = flight.spread
        with flight.fragment.remembered() as left:
            if left:
                under_way["left"] = torch.cat([each.float().reshape(-1).cpu() for each in left])
    return {
        "inner": inner_of(local),
        "flight": under_way,
        "counts": [[f.steps, f.tokens] for f in local.fragments],
        "pace": local.meter.state(),
    }


def inner_of(local: "LocalUpdates") -> list[dict[str, Any]]:
    return [optimizer.state_dict() for optimizer in local.inner]


def elastic(local: "LocalUpdates") -> Steps[dict[str, Any]]:
    """Return this rank's part: its shard of the mean change plus residuals, and on rank 0 the
    common state."""
    transport, changes, state = local.channel.transport, {}, local.head()
    if transport.rank == 0 or not local.outer.equal:
        state = local.common()
    with in_memory(local) as store:
        residuals = flat_parts(store, transport)
    if not local.outer.equal:
        for fragment, weights, outer in zip(
            local.fragments, state["weights"], state["outer"], strict=True
        ):
            for flat in (weights, *(outer[name] for name in local.outer.buffers)):
                yield from fragment.mean_of_all(flat, local.exact, local.channel)
    local.inner.settle_weights()
    for i, fragment in enumerate(local.fragments):
        with fragment.opened():
            fragment.change(None if local.outer.equal else state["weights"][i])
        starts = {span.name: span.source for span in fragment.spans}
        for (name, offset), part in residuals.items():
            if name in starts:
                fragment.work[starts[name] + offset :][: part.numel()] += part
        changes[f"fragment {fragment.number}", 0] = fragment.work.cpu()
    progress = yield from elastic_of(changes, transport, local.number, local.channel.take())
    return (state if transport.rank == 0 else local.head()) | progress | {"inner": inner_of(local)}


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


def current(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in the present form: earlier ones had a level more."""
    if "choices" in state:
        return state | state["residuals"] | state["choices"]
    return state | state.get("progress", {})


def joined(local: "LocalUpdates", states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return this rank's inner optimizers, its common state if those of ranks differ, and the mean
    change of an elastic state."""
    exact, rank = states[0]["kind"] == "exact", local.channel.rank
    for state in states:
        check_entries(state, (*SHARED, *OWN, "inner") if exact else ("inner",), "the state")
    mine = states[rank % len(states)]
    found = {"inner": mine["inner"]}
    if not exact:
        whole: Any = dict  # each rank needs all of the mean change, not its part
        return found | {"changes": residuals_of(states, local.channel, share=whole)[1]}
    if (states[0]["rank"], states[0]["size"]) != (rank, local.channel.size) or len(states) > 1:
        _check_ended(local, states)
    return found | ({} if local.outer.equal else {name: mine[name] for name in SHARED})


def _check_ended(local: "LocalUpdates", states: Sequence[dict[str, Any]]) -> None:
    """Raise ``StateMismatch`` unless states of other ranks are of the end of a round."""
    pairs = (
        (a, b) for s in states for a, b in zip(s["weights"], states[0]["weights"], strict=True)
    )
    if (
        states[0]["flight"] is not None
        or any(steps for each in states for steps, _ in each["counts"])
        or any(not torch.equal(*pair) for pair in pairs)  # with Gossip
    ):
        raise StateMismatch(
            f"the state was saved by rank {states[0]['rank']} of {states[0]['size']} in the middle "
            f"of a round, in which ranks differ, and this is rank {local.channel.rank} of "
            f"{local.channel.size}: load each rank's own, or call drain() before state_dict(), or "
            "save with elastic_state_dict()"
        )


def check(local: "LocalUpdates", state: Mapping[str, Any]) -> None:
    """Raise ``StateMismatch`` unless a state fits."""
    if state.get("layout") != [f.layout for f in local.fragments]:
        raise StateMismatch(
            "the state is of other parameters or fragments (its layout), or that of rank 0 is "
            "missing: load the state of this model, with the fragments= of the run that saved it"
        )
    _check_shared(local, state)
    if len(state["inner"]) != len(local.inner):
        raise StateMismatch(
            f"the state holds {len(state['inner'])} inner optimizers, expected {len(local.inner)}"
        )
    if state.get("kind") == "exact":
        _check_own(local, state)


def follow(local: "LocalUpdates", state: Mapping[str, Any]) -> None:
    """Continue from a checked state: of this rank, elastic, or what ranks share."""
    _forget_flight(local)
    for optimizer, each in zip(local.inner, state["inner"], strict=True):
        optimizer.load_state_dict(each)
    _load_shared(local, state)
    if state.get("kind") == "exact":
        _load_own(local, state)
        return
    with local.inner.weights_rewritten():
        for fragment in local.fragments:
            moved = "changes" in state
            fragment.steps = fragment.tokens = int(moved)
            with fragment.opened():
                if moved:  # to Θ minus the mean change, from which every rank continues
                    fragment.set_change(state["changes"][f"fragment {fragment.number}", 0])
                else:
                    fragment.merge(0.0)


def _check_shared(local: "LocalUpdates", shared: Mapping[str, Any]) -> None:
    """Raise ``StateMismatch`` unless the common state is complete and has the same fragments."""
    check_entries(shared, (*SHARED, "inner"), "the state that ranks share")
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


def _check_own(local: "LocalUpdates", state: Mapping[str, Any]) -> None:
    """Raise ``StateMismatch`` unless a rank's own state is complete and fits."""
    if (flight := state["flight"]) is not None:
        tensors = ("mean", "left") if flight.get("alpha", 0.0) is None else ("mean",)
        check_entries(flight, ("fragment", "due", "taken", *tensors), "the exchange under way")
        number = int(flight["fragment"])
        if not 0 <= number < len(local.fragments):
            raise StateMismatch(
                f"the exchange under way is of fragment {number}, expected one below "
                f"{len(local.fragments)}: load the state of this model"
            )
        wanted = local.fragments[number].numel
        for name in tensors:
            if flight[name].numel() != wanted:
                raise StateMismatch(
                    f"the {name!r} under way has {flight[name].numel()} elements, expected "
                    f"{wanted}: load the state of this model"
                )


def _forget_flight(local: "LocalUpdates") -> None:
    """Finish and drop a running exchange, because a state is about to be loaded."""
    flight, local.flight = local.flight, None
    if flight is not None:
        if flight.future is not None:
            flight.future.wait()
        flight.fragment.forget()
        flight.fragment.detach(local.exchanges)


def _load_shared(local: "LocalUpdates", state: Mapping[str, Any]) -> None:
    local.steps_done, local.exchanged = int(state["steps"]), int(state["exchanged"])
    local.finished = local.exchanged  # the mean of a running exchange is known too
    local.facts = Facts.of(state["facts"])
    local.rounds.load(state["round"])
    for fragment, weights, outer in zip(
        local.fragments, state["weights"], state["outer"], strict=True
    ):
        with fragment.opened(write=True):
            fragment.weights.copy_(weights)
            fragment.state.clear()
            fragment.state.update(_copied(outer))


def _load_own(local: "LocalUpdates", state: Mapping[str, Any]) -> None:
    """Load from an exact state this rank's training progress and the mean of a running exchange."""
    for fragment, (steps, tokens) in zip(local.fragments, state["counts"], strict=True):
        fragment.steps, fragment.tokens = int(steps), int(tokens)
    if "pace" in state:
        local.meter.load(state["pace"])
    flight = state["flight"]
    if flight is not None:
        fragment = local.fragments[int(flight["fragment"])]
        fragment.attach(local.exchanges)
        fragment.work.copy_(flight["mean"])
        if "left" in flight:
            fragment.recall(flight["left"])
        local.flight = Flight(
            fragment,
            pace=Pace(*map(float, flight["pace"])) if flight.get("pace") else None,
            **{k: flight[k] for k in (*FLIGHT, "spread") if k in flight},
        )
        local.taken = local.flight.taken


def _copied(state: State) -> State:
    return {name: each.clone() if torch.is_tensor(each) else each for name, each in state.items()}


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
