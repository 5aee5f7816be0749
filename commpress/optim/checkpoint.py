"""Saving and loading an optimizer: exact for a bitwise resume, elastic for another number of ranks.

A state is what torch's Adam gives, ``state`` and ``param_groups``, plus ``commpress``: where the
schedule stands and what compression left behind. Plain tensors, numbers and text throughout: it
loads with ``weights_only=True``.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from commpress.collectives.exchange import Exchanges
from commpress.collectives.residual_state import check_fit, elastic_state, exact_state, residuals_of
from commpress.errors import StateMismatch
from commpress.optim.boxes import boxes_of, recut
from commpress.optim.columns import is_cut, local
from commpress.schedules import Facts
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.optim.optimizer import CompressedOptimizer
    from commpress.optim.replicated import ReplicatedOptimizer

# of what every rank saves
ENTRIES = ("optimizer", "step", "facts", "schedule", "full", "quantized")

log = logging.getLogger("commpress")


def exact(optimizer: "ReplicatedOptimizer") -> dict[str, Any]:
    return (
        _head(optimizer)
        | own_state(optimizer)
        | {
            name: exact_state(
                exchanges.residuals, optimizer.channel.transport, optimizer.steps_done
            )
            | exchanges.choices()
            for name, exchanges in _exchanges(optimizer)
        }
    )


def elastic(optimizer: "ReplicatedOptimizer", state: dict[str, Any]) -> Steps[dict[str, Any]]:
    """This rank's part: its shard of what is still owed, and on rank 0 what all ranks share."""
    shared, part = (yield from optimizer.shared()), _head(optimizer)
    momentum = shared.get("exp_avg")
    if optimizer.channel.rank == 0:
        for i, (number, p) in enumerate(
            zip(optimizer.shared_numbers(), optimizer._flat.parameters, strict=True)
        ):
            state["state"][number] = {
                key: local(value).clone() for key, value in optimizer.state[p].items()
            }
            if momentum is not None:
                state["state"][number]["exp_avg"] = optimizer._flat.view(momentum, i).clone()
        part["schedule"] |= shared
    else:
        state["state"], part["schedule"] = {}, {}
    for name, exchanges in _exchanges(optimizer):
        residuals = yield from elastic_state(
            exchanges.residuals,
            optimizer.channel.transport,
            optimizer.steps_done,
            optimizer.channel.take(),
        )
        part[name] = residuals | exchanges.choices()
    if optimizer.columns is not None:
        part["boxes"] = boxes_of(optimizer)
    return state | {"commpress": part}


def load(optimizer: "ReplicatedOptimizer", states: Sequence[dict[str, Any]]) -> None:
    """Take all of it, or nothing if something does not fit."""
    if any("commpress" not in state for state in states):
        _load_adam(optimizer, states[0])
        return
    if optimizer.columns is not None or any("boxes" in state["commpress"] for state in states):
        states = recut(optimizer, states)
    check_entries(states[0], ("param_groups",), "the state")
    check_groups(optimizer, states[0]["param_groups"])
    residuals, head = _residuals(optimizer, [state["commpress"] for state in states])
    own = own_in(optimizer, [state["commpress"] for state in states])
    state = next(state for state in states if state["commpress"] is head)
    _check(optimizer, state, whole=True)
    facts = Facts.of(head["facts"])
    _take_left(optimizer, head, residuals)
    optimizer.forget()
    _fill(optimizer, state)
    take_own(optimizer, own)
    optimizer.steps_done, optimizer.facts = int(head["step"]), facts
    optimizer.tensors.follow(optimizer.steps_done)
    optimizer.resume(head["schedule"])


def tensors_of(column: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tensors of each parameter as the ranks with the same shards have them: rank 0 has saved
    all."""
    first = next(state for state in column if state["commpress"]["quantized"]["rank"] == 0)
    return [first["state"].get(i, {}) for i in range(len(first["commpress"]["boxes"]))]


def with_tensors(state: dict[str, Any], tensors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """This state with other tensors, such as ``tensors_of`` gives."""
    return state | {"state": dict(enumerate(tensors)), "commpress": dict(state["commpress"])}


def load_rank(optimizer: "ReplicatedOptimizer", parts: Sequence[dict[str, Any]]) -> None:
    """This rank's own part, or all ranks', after a state of another rank gave what all share."""
    check_step(optimizer, parts)
    residuals, head = _residuals(optimizer, parts)
    own = own_in(optimizer, parts)
    _take_left(optimizer, head, residuals)
    take_own(optimizer, own)
    optimizer.resume(head["schedule"])


def common(optimizer: "ReplicatedOptimizer") -> dict[str, Any]:
    """Part of the state of a rank that all have in common."""
    head = _head(optimizer)
    if "trips" in head["schedule"]:
        head["schedule"]["trips"] = [0] * len(optimizer._flat.parameters)  # each rank's own
    return head


def load_common(optimizer: "ReplicatedOptimizer", state: dict[str, Any]) -> None:
    """Take over another rank's ``common`` and torch's state; residuals stay."""
    check_entries(state, ("param_groups", "commpress"), "the state")
    head = state["commpress"]
    check_entries(head, ("optimizer", "step", "facts", "schedule"), "the state that ranks share")
    if head["optimizer"] != type(optimizer).__name__:
        raise StateMismatch(
            f"the state is of {head['optimizer']}, this is a {type(optimizer).__name__}"
        )
    check_groups(optimizer, state["param_groups"])
    _check(optimizer, state, whole=True)
    optimizer.check_schedule(head["schedule"])
    optimizer.forget()
    _fill(optimizer, state)
    optimizer.steps_done, optimizer.facts = int(head["step"]), Facts.of(head["facts"])
    optimizer.tensors.follow(optimizer.steps_done)
    optimizer.resume(head["schedule"])


def check_step(optimizer: "CompressedOptimizer", parts: Sequence[dict[str, Any]]) -> None:
    steps = sorted({int(part["step"]) for part in parts})
    if steps != [optimizer.steps_done]:
        raise StateMismatch(
            f"what ranks have apart from each other is of step {', '.join(map(str, steps))}, what "
            f"was loaded before is of step {optimizer.steps_done}: load the states of one "
            "checkpoint"
        )


def own_of(parts: Sequence[dict[str, Any]], rank: int, size: int) -> Sequence[dict[str, Any]]:
    """The one that this rank saved, if as many ranks saved exact ones; else all of them."""
    place = {"kind": "exact", "rank": rank, "size": size}
    return [part for part in parts if place.items() <= part["quantized"].items()] or parts


def own_state(optimizer: "CompressedOptimizer") -> dict[str, Any]:
    """Entry of a rank's state with what not all ranks hold, if there is such."""
    return {} if optimizer.own is None else {"own": optimizer.own.state()}


def own_in(
    optimizer: "CompressedOptimizer", parts: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """State that this rank saved of the parameters that not all hold; None in the state of another
    rank alone."""
    if optimizer.own is None:
        return None
    transport = optimizer.channel.transport
    mine = [
        part
        for part in own_of(parts, transport.rank, transport.size)
        if part["quantized"]["rank"] == transport.rank
    ]
    sizes = sorted({part["quantized"]["size"] for part in parts})
    if len(parts) == 1 and sizes == [transport.size] and not mine:
        return None  # each rank's own comes next
    if sizes != [transport.size] or "own" not in mine[0]:
        raise StateMismatch(
            f"the state of {sizes} ranks has nothing of {optimizer.own.flat.names[0]!r}, which "
            f"lies on this rank of {transport.size} alone: load this rank's own state_dict(), on "
            "as many ranks as saved it"
        )
    found: dict[str, Any] = mine[0]["own"]
    optimizer.own.check(found)
    return found


def take_own(optimizer: "CompressedOptimizer", found: dict[str, Any] | None) -> None:
    if optimizer.own is not None and found is not None:
        optimizer.own.load(found)


def check_closed(parts: Sequence[dict[str, Any]], size: int) -> None:
    """Exact states of other ranks hold no open window, of which each has its own view."""
    of = parts[0]["quantized"]
    if len(parts) > 1 and of["kind"] == "exact" and parts[0]["schedule"].get("held"):
        raise StateMismatch(
            f"the states of {of['size']} ranks were saved {parts[0]['schedule']['held']} steps "
            f"into a window, in which ranks differ, and {size} go on: call optimizer.synchronize() "
            "before state_dict(), or save with elastic_state_dict()"
        )


def check_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    sizes, mine = (
        [len(group["params"]) for group in every] for every in (groups, optimizer.param_groups)
    )
    if sizes != mine:
        raise StateMismatch(
            f"the state has groups of {sizes} parameters, this optimizer of {mine}: load the state "
            "of this model, after add_param_group for groups that came late"
        )


def check_entries(state: Mapping[str, Any], entries: Iterable[str], what: str) -> None:
    missing = [entry for entry in entries if entry not in state]
    if missing:
        raise StateMismatch(
            f"{what} has no {', '.join(map(repr, missing))}: it is only a part of a state, or of "
            "another version of commpress. Load all that state_dict() or elastic_state_dict() of "
            "this version gave"
        )


def check_length(found: Sequence[Any] | torch.Tensor, wanted: int, what: str) -> None:
    if len(found) != wanted:
        raise StateMismatch(
            f"the state has {len(found)} {what}, expected {wanted}: load the state of this model"
        )


def other_dtype(name: str, parameter: torch.Tensor) -> StateMismatch:
    """The error for a parameter whose float32 master one side has and the other has not."""
    return StateMismatch(
        f"parameter {name!r} is {parameter.dtype}, and was in half precision when the state was "
        "saved: give it that dtype before its optimizer is made. peft turns half-precision "
        "adapters into float32 where it makes or loads them, unless autocast_adapter_dtype=False "
        "is given"
    )


def take_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Hyperparameters as the state has them, and when each group came: of groups that do not say
    so, at the beginning."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        beginning = {"added_at": 0} if "added_at" in group else {}
        group.update(
            beginning
            | {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        )


def _exchanges(optimizer: "ReplicatedOptimizer") -> list[tuple[str, Exchanges]]:
    return [("full", optimizer.full), ("quantized", optimizer.quantized)]


def _take_left(
    optimizer: "ReplicatedOptimizer", part: dict[str, Any], residuals: dict[str, Any]
) -> None:
    """Take over what compression left behind on this rank, nothing if that is not known, and what
    codecs have learnt on all."""
    for name, exchanges in _exchanges(optimizer):
        exchanges.load_choices(part.get(name, {}))
        exchanges.residuals.load(residuals.get(name, {}))


def _head(optimizer: "ReplicatedOptimizer") -> dict[str, Any]:
    return {
        "optimizer": type(optimizer).__name__,
        "step": optimizer.steps_done,
        "facts": optimizer.facts.as_dict(),
        "schedule": optimizer.schedule_state(),
    }


def _residuals(
    optimizer: "ReplicatedOptimizer", parts: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's residuals, and the part that holds what all share. Of another rank's exact state
    alone there are none."""
    for part in parts:
        check_entries(part, ENTRIES, "the state of a rank")
    names = {part["optimizer"] for part in parts}
    if names != {type(optimizer).__name__}:
        raise StateMismatch(
            f"the state is of {', '.join(sorted(names))}, this is a {type(optimizer).__name__}"
        )
    mine, flat = optimizer.channel.transport, optimizer._flat
    parts = own_of(parts, mine.rank, mine.size)
    check_closed(parts, mine.size)
    head = next((part for part in parts if part["quantized"]["rank"] == 0), parts[0])
    of = parts[0]["quantized"]
    if (
        len(parts) == 1
        and of["kind"] == "exact"
        and (of["rank"], of["size"]) != (mine.rank, mine.size)
    ):
        if of["size"] > 1:  # one rank alone owes nothing
            log.warning(
                "the loaded state is of rank %d of %d, this is rank %d of %d: what compression "
                "left behind here starts from zero, unless a callback of commpress loads it next. "
                "Load each rank's own state_dict(), or all ranks' to change the world size",
                of["rank"],
                of["size"],
                mine.rank,
                mine.size,
            )
        optimizer.check_schedule(head["schedule"])
        return {}, head
    numels = {name: numel for name, (_, numel) in zip(flat.names, flat.places, strict=True)}
    residuals = {}
    for name, _ in _exchanges(optimizer):
        _, residuals[name] = residuals_of(
            [part[name] for part in parts], optimizer.channel.transport
        )
        check_fit(residuals[name], numels)
    optimizer.check_schedule(head["schedule"])
    for name, exchanges in _exchanges(optimizer):
        exchanges.check_choices(head[name])
        exchanges.residuals.check(residuals[name])
    return residuals, head


def _load_adam(optimizer: "ReplicatedOptimizer", state: dict[str, Any]) -> None:
    """Momentum, variance and steps of torch's Adam: a run begun with it goes on with exact steps.
    One that torch's tools have carried from here to here goes on as it was, but for what
    compression left behind."""
    _check(optimizer, state)
    counts, own = _steps_of_groups(optimizer, state), None
    if optimizer.own is not None:
        own = optimizer.own.of_adam(
            [state["state"].get(i, {}) for i in _numbers(optimizer, state, shared=False)]
        )
    optimizer.forget()
    _fill(optimizer, state)
    optimizer.steps_done, optimizer.facts = max(counts), Facts()
    for group, count in zip(optimizer.param_groups, counts, strict=True):
        group["added_at"] = optimizer.steps_done - count
    optimizer.tensors.follow(optimizer.steps_done, doubt=True)
    optimizer.resume(None)
    _take_left(optimizer, {}, {})
    take_own(optimizer, own)
    for i in range(len(optimizer._taken)):
        optimizer._taken[i] = optimizer.tensors.own_steps(i, optimizer.steps_done)


def _numbers(optimizer: "CompressedOptimizer", state: dict[str, Any], *, shared: bool) -> list[int]:
    """The numbers that a state has for the parameters that all ranks hold, or for the others."""
    every = [number for group in state["param_groups"] for number in group["params"]]
    known = set(optimizer.shared_numbers())
    return [number for i, number in enumerate(every) if (i in known) == shared]


def _steps_of_groups(optimizer: "CompressedOptimizer", state: dict[str, Any]) -> list[int]:
    """Steps that each group has taken, which a group that came late has taken fewer of."""
    counts: list[int] = []
    shared = set(_numbers(optimizer, state, shared=True))
    for number, group in enumerate(state["param_groups"]):
        steps = {
            int(state["state"][i]["step"])
            for i in group["params"]
            if i in state["state"] and i in shared
        }
        if len(steps) > 1:
            raise StateMismatch(
                f"the parameters of group {number} have taken {sorted(steps)} steps, expected one "
                "number for all: give those that began late a group of their own"
            )
        counts.append(steps.pop() if steps else 0)
    every = max(counts)
    return [
        count if group["params"] else every
        for count, group in zip(counts, state["param_groups"], strict=True)
    ]


def _check(optimizer: "ReplicatedOptimizer", state: dict[str, Any], *, whole: bool = False) -> None:
    """All groups and per-parameter tensors fit; ``whole``: none is missing."""
    check_entries(state, ("state", "param_groups"), "the state")
    groups, flat = state["param_groups"], optimizer._flat
    check_groups(optimizer, groups)
    numbers = _numbers(optimizer, state, shared=True)
    own = [optimizer.state[p] for p in flat.parameters]
    for i, number in enumerate(numbers):
        saved = state["state"].get(number, {})
        if whole or saved:
            wanted = own[i].keys() - {"master"} if whole else ("step", "exp_avg", "exp_avg_sq")
            check_entries(
                saved,
                sorted(wanted),
                f"the state of parameter {flat.names[i]!r} {tuple(flat.shapes[i])}",
            )
        for key, value in saved.items():
            into = own[i].get(key)
            if into is None and key == "master":
                raise other_dtype(flat.names[i], flat.parameters[i])
            if into is not None and not is_cut(value):
                into = local(into)
            if into is None or (torch.is_tensor(value) and value.shape != into.shape):
                raise StateMismatch(
                    f"the state holds {key!r} of parameter {flat.names[i]!r} "
                    + (
                        (
                            f"with shape {tuple(value.shape)}, expected {tuple(into.shape)}: load "
                            "the state of this model"
                        )
                        if into is not None
                        else (
                            f"but {type(optimizer).__name__} has no such thing: expected "
                            f"{sorted(own[i])}"
                        )
                    )
                )


def _fill(optimizer: "ReplicatedOptimizer", state: dict[str, Any]) -> None:
    """Hyperparameters and per-parameter tensors, which were found to fit."""
    groups, flat = state["param_groups"], optimizer._flat
    take_groups(optimizer, groups)
    own = [optimizer.state[p] for p in flat.parameters]
    for i, number in enumerate(_numbers(optimizer, state, shared=True)):
        for key, value in state["state"].get(number, {}).items():
            if own[i][key] is not value:
                local(own[i][key]).copy_(torch.as_tensor(local(value)))
    if flat.shadowed and not any("master" in s for s in state["state"].values()):
        flat.adopt()
    flat.publish()
