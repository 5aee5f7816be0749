"""Saving and loading an optimizer: exact for a bitwise resume, elastic for another number of ranks
or another mesh.

A state has ``state`` and ``param_groups`` as in torch's Adam, and ``commpress``: the schedule and
the residuals. An optimizer whose state is divided over the ranks saves all of it there, each rank
its rows. All values are plain tensors, numbers and text, so it loads with ``weights_only=True``.

Where parameters are DTensors, an elastic state holds the shards of one rank, or its rows of them,
and their boxes. The shards of all ranks are joined to whole tensors, residuals included, and cut
along the boxes of the ranks that load them.
"""

import logging
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from commpress.codecs.family import EXACT
from commpress.collectives.allreduce import Call, reduce_message
from commpress.collectives.buckets import PIECE, one_message
from commpress.collectives.reduce_scatter import Scatter
from commpress.collectives.residual_state import (
    Residuals,
    check_fit,
    check_widths,
    elastic_state,
    exact_state,
    residuals_of,
    totals_of,
)
from commpress.errors import StateMismatch, check_entries
from commpress.optim.layout import Box, box_of, is_cut, local
from commpress.optim.local_experts import State
from commpress.optim.tensor_states import STATE
from commpress.schedules import Facts
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.optim.optimizer import CompressedOptimizer
    from commpress.optim.replicated import ReplicatedOptimizer
    from commpress.optim.sharded import ShardedOptimizer

Part = dict[str, Any]  # the ``commpress`` entry of a rank's state

EXCHANGES = ("full", "quantized")
ENTRIES = ("optimizer", "step", "facts", "schedule", *EXCHANGES)  # saved by every rank
DIVIDED = ("shapes", "tensors", "shards", "waiting")  # also saved with rows
ROWS = ("master", "momentum", "variance")
LISTS = (*STATE, "trips", "lines")  # lists of ``tensor_states``

log = logging.getLogger("commpress")


# ---------------------------------------------------------------- saving


def exact(optimizer: "CompressedOptimizer") -> Part:
    """Return this rank's own part, for the same number of ranks."""
    part = _head(optimizer)
    if optimizer.experts is not None:
        part["own"] = optimizer.experts.state()
    if optimizer.divided:
        part["waiting"] = {name: buffer.clone() for name, buffer in optimizer.waiting().items()}
    for name in EXCHANGES:
        exchange = getattr(optimizer, name)
        part[name] = exact_state(
            exchange.residuals, optimizer.channel.transport, optimizer.steps_done
        ) | _choices(exchange)
    return part


def elastic(optimizer: "CompressedOptimizer", state: dict[str, Any]) -> Steps[dict[str, Any]]:
    """Return this rank's part: its shard of the residuals, its rows, and on rank 0 the common
    state. Of tensors that differ between ranks, rank 0 saves the mean."""
    channel, part = optimizer.channel, _head(optimizer)
    message = one_message(optimizer._flat.numel, EXACT, channel.size, name="window")
    means = {name: buffer.clone() for name, buffer in optimizer.waiting().items()}
    for mean in means.values():
        yield from reduce_message(
            mean,
            None,
            message=message,
            call=Call(
                transport=channel.transport, workspace=channel.workspace, sequence=channel.take()
            ),
        )
    if optimizer.divided:
        part["waiting"] = means if channel.rank == 0 else {}
    elif channel.rank == 0:
        every = zip(optimizer.shared_numbers(), optimizer._flat.parameters, strict=True)
        for i, (number, p) in enumerate(every):
            tensors = {key: local(value).clone() for key, value in optimizer.state[p].items()}
            if "exp_avg" in means:
                tensors["exp_avg"] = optimizer._flat.view(means["exp_avg"], i).clone()
            state["state"][number] = tensors
        part["schedule"] |= means
    else:
        state["state"], part["schedule"] = {}, {}
    for name in EXCHANGES:
        exchange = getattr(optimizer, name)
        part[name] = yield from elastic_state(
            exchange.residuals, channel.transport, optimizer.steps_done, channel.take()
        )
        part[name] |= _choices(exchange)
    if optimizer.columns is not None:
        part["boxes"] = _boxes(optimizer)
    return state | {"commpress": part}


def common(optimizer: "ReplicatedOptimizer") -> Part:
    """Return the part of the state that is equal on all ranks."""
    head = _head(optimizer)
    if "trips" in head["schedule"]:
        head["schedule"]["trips"] = [0] * len(optimizer._flat.parameters)  # each rank's own
    return head


def check_complete(optimizer: "ShardedOptimizer") -> None:
    if optimizer.missing:
        raise StateMismatch(optimizer.missing)


def _head(optimizer: "CompressedOptimizer") -> Part:
    return {
        "optimizer": type(optimizer).__name__,
        "step": optimizer.steps_done,
        "facts": optimizer.facts.as_dict(),
        "schedule": optimizer.schedule_state(),
    } | (_rows(optimizer) if _has_rows(optimizer) else {})


def _rows(optimizer: "ShardedOptimizer") -> Part:
    """Return the rows of this rank and the state of tensors that all ranks know."""
    check_complete(optimizer)
    shards = [
        {"parameter": part.parameter, "begin": part.begin}
        | {name: part.of(getattr(optimizer, name)).clone() for name in ROWS}
        for part in optimizer.parts
        if part.numel
    ]
    tensors = {name: getattr(optimizer.tensors, name).tolist() for name in LISTS}
    shapes = [list(shape) for shape in optimizer._flat.shapes]
    return {"tensors": tensors, "shards": shards, "shapes": shapes}


def _choices(exchange: Any) -> dict[str, Any]:
    """Return what codecs have learnt besides residuals; rows have no such codecs."""
    return {} if isinstance(exchange, Scatter) else exchange.choices()


def _has_rows(optimizer: "CompressedOptimizer") -> TypeGuard["ShardedOptimizer"]:
    return optimizer.divided


def _has_all(optimizer: "CompressedOptimizer") -> TypeGuard["ReplicatedOptimizer"]:
    return not optimizer.divided


# ---------------------------------------------------------------- loading


class _Read(NamedTuple):
    """Saved parts, checked and joined."""

    head: Part  # with the common state
    facts: Facts
    residuals: dict[str, Residuals]
    own: State | None  # state of this rank alone
    rows: dict[str, torch.Tensor]  # whole buffers, as far as they are known
    waiting: dict[str, torch.Tensor]
    missing: str  # missing state that this rank cannot go on without


def load(optimizer: "CompressedOptimizer", states: Sequence[dict[str, Any]]) -> None:
    """Load all of the state, or nothing if something does not fit."""
    if any("commpress" not in state for state in states):
        if _has_all(optimizer):
            _load_adam(optimizer, states[0])
            return
        raise StateMismatch(
            f"the state is not of a {type(optimizer).__name__}: expected what its state_dict() or "
            "elastic_state_dict() gave. torch.distributed.checkpoint.state_dict leaves out what "
            "each rank has for itself: save with commpress.save_distributed(optimizer, folder)"
        )
    if optimizer.columns is not None or any("boxes" in state["commpress"] for state in states):
        states = recut(optimizer, states)
    check_entries(states[0], ("param_groups",), "the state")
    check_groups(optimizer, states[0]["param_groups"])
    read = _read(optimizer, [state["commpress"] for state in states])
    if _has_all(optimizer):
        state = next(state for state in states if state["commpress"] is read.head)
        _check(optimizer, state, whole=True)
        optimizer.forget()
        _fill(optimizer, state)
        _begin_at(optimizer, read.head)
    _take(optimizer, read)
    if _has_rows(optimizer):
        take_groups(optimizer, states[0]["param_groups"])


def load_rank(optimizer: "CompressedOptimizer", parts: Sequence[Part]) -> None:
    """Load this rank's own part, or all ranks', after another rank's state gave the common
    state."""
    steps = sorted({int(part["step"]) for part in parts})
    if steps != [optimizer.steps_done]:
        raise StateMismatch(
            f"what ranks have apart from each other is of step {', '.join(map(str, steps))}, what "
            f"was loaded before is of step {optimizer.steps_done}: load the states of one "
            "checkpoint"
        )
    _take(optimizer, _read(optimizer, parts))


def load_common(optimizer: "ReplicatedOptimizer", state: dict[str, Any]) -> None:
    """Load another rank's ``common`` and torch's state; residuals stay."""
    check_entries(state, ("param_groups", "commpress"), "the state")
    head = state["commpress"]
    check_entries(head, ("optimizer", "step", "facts", "schedule"), "the state that ranks share")
    _check_kind(optimizer, [head])
    check_groups(optimizer, state["param_groups"])
    _check(optimizer, state, whole=True)
    optimizer.check_schedule(head["schedule"])
    optimizer.forget()
    _fill(optimizer, state)
    _begin_at(optimizer, head)
    optimizer.resume(head["schedule"])


def _read(optimizer: "CompressedOptimizer", parts: Sequence[Part]) -> _Read:
    """Raise ``StateMismatch`` unless these parts, this rank's own or those of all, fit."""
    for part in parts:
        check_entries(part, ENTRIES + (DIVIDED if optimizer.divided else ()), "the state of a rank")
        for name in EXCHANGES:
            check_entries(part[name], ("kind", "rank", "size"), f"the {name!r} state of a rank")
    _check_kind(optimizer, parts)
    mine, own = optimizer.channel.transport, _own_in(optimizer, parts)
    parts = _own_of(parts, mine.rank, mine.size)
    head = next((part for part in parts if part["quantized"]["rank"] == 0), parts[0])
    schedule, of = head["schedule"], parts[0]["quantized"]
    if len(parts) > 1 and of["kind"] == "exact" and schedule.get("held"):
        raise StateMismatch(
            f"the states of {of['size']} ranks were saved {schedule['held']} steps into a window, "
            f"in which ranks differ, and {mine.size} go on: call optimizer.synchronize() before "
            "state_dict(), or save with elastic_state_dict()"
        )
    # the state of another rank alone, which gives the common state
    partial = (
        len(parts) == 1 < of["size"]
        and of["kind"] == "exact"
        and (of["rank"], of["size"]) != (mine.rank, mine.size)
    )
    residuals = {
        name: {} if partial else residuals_of([part[name] for part in parts], mine)[1]
        for name in EXCHANGES
    }
    optimizer.check_schedule(schedule)
    for name in EXCHANGES:
        _check_residuals(optimizer, getattr(optimizer, name), residuals[name], head[name])
    missing = ""
    waiting: dict[str, torch.Tensor] = {}
    rows: dict[str, torch.Tensor] = {}
    if partial:
        missing = (
            f"the loaded state is of rank {of['rank']} of {of['size']}, this is rank {mine.rank} "
            f"of {mine.size}"
        )
    if _has_rows(optimizer):
        waiting = next((part["waiting"] for part in parts if part["waiting"]), {})
        optimizer.check_waiting(schedule, waiting)
        _check_shapes(optimizer, head)
        rows = _joined_rows(optimizer, parts, partial=partial)
    return _Read(head, Facts.of(head["facts"]), residuals, own, rows, waiting, missing)


def _take(optimizer: "CompressedOptimizer", read: _Read) -> None:
    """Load the checked rows, schedules and residuals."""
    if _has_rows(optimizer):
        optimizer.missing = read.missing and (
            f"{read.missing}, which owns other parts: load each rank's own state_dict(), or all "
            "ranks' to change the world size. With a Trainer use the callback "
            "commpress.hf.Compress, with Lightning commpress.lightning.Compress, with Accelerate "
            "commpress.hf.RankFiles: they save and load every rank's part"
        )
        for owned in optimizer.parts:
            first = optimizer._flat.places[owned.parameter][0] + owned.begin
            for name, buffer in read.rows.items():
                owned.of(getattr(optimizer, name)).copy_(buffer[first : first + owned.numel])
        optimizer.steps_done, optimizer.facts = int(read.head["step"]), read.facts
        for name in STATE:
            getattr(optimizer.tensors, name).copy_(torch.tensor(read.head["tensors"][name]))
        for name in ("trips", "lines"):
            getattr(optimizer.tensors, name)[:] = read.head["tensors"][name]
        optimizer.unknown = True
    elif read.missing:
        log.warning(
            "%s: what compression left behind here starts from zero, unless a callback of "
            "commpress loads it next. Load each rank's own state_dict(), or all ranks' to change "
            "the world size",
            read.missing,
        )
    if optimizer.experts is not None and read.own is not None:
        optimizer.experts.load(read.own)
    optimizer.resume(read.head["schedule"])
    optimizer.recut()
    for name in EXCHANGES:
        _load_residuals(getattr(optimizer, name), read.residuals[name], read.head[name])
    for name, buffer in optimizer.waiting().items() if read.waiting else ():
        buffer.copy_(read.waiting[name])


def _check_kind(optimizer: "CompressedOptimizer", parts: Sequence[Part]) -> None:
    names = {part["optimizer"] for part in parts}
    if names != {type(optimizer).__name__}:
        raise StateMismatch(
            f"the state is of {', '.join(sorted(names))}, this is a {type(optimizer).__name__}"
        )


def _begin_at(optimizer: "CompressedOptimizer", head: Part) -> None:
    optimizer.steps_done, optimizer.facts = int(head["step"]), Facts.of(head["facts"])
    optimizer.tensors.follow(optimizer.steps_done)


def _check_residuals(
    optimizer: "CompressedOptimizer", exchange: Any, residuals: Residuals, part: Part
) -> None:
    if isinstance(exchange, Scatter):
        exchange.check(residuals)
        check_widths(residuals, optimizer.channel.size)
        return
    flat = optimizer._flat
    numels = {name: n for name, (_, n) in zip(flat.names, flat.places, strict=True)}
    check_fit(residuals, numels, size=optimizer.channel.size)
    exchange.check_choices(part)
    exchange.residuals.check(residuals)


def _load_residuals(exchange: Any, residuals: Residuals, part: Part) -> None:
    """Load this rank's residuals, and what codecs have learnt on all ranks."""
    if isinstance(exchange, Scatter):
        exchange.load(residuals)
    else:
        exchange.load_choices(part)
        exchange.residuals.load(residuals)


def _own_of(parts: Sequence[Part], rank: int, size: int) -> Sequence[Part]:
    """Return the part that this rank saved, if as many ranks saved exact ones; else all parts."""
    place = {"kind": "exact", "rank": rank, "size": size}
    return [part for part in parts if place.items() <= part["quantized"].items()] or parts


def _own_in(optimizer: "CompressedOptimizer", parts: Sequence[Part]) -> State | None:
    """Return the saved state of this rank's local experts; None in the state of another rank
    alone."""
    if optimizer.experts is None:
        return None
    transport = optimizer.channel.transport
    mine = [
        part
        for part in _own_of(parts, transport.rank, transport.size)
        if part["quantized"]["rank"] == transport.rank
    ]
    sizes = sorted({part["quantized"]["size"] for part in parts})
    if len(parts) == 1 and sizes == [transport.size] and not mine:
        return None  # each rank's own comes next
    if sizes != [transport.size] or "own" not in mine[0]:
        raise StateMismatch(
            f"the state of {sizes} ranks has nothing of {optimizer.experts.flat.names[0]!r}, which "
            f"lies on this rank of {transport.size} alone: load this rank's own state_dict(), on "
            "as many ranks as saved it"
        )
    found: State = mine[0]["own"]
    optimizer.experts.check(found)
    return found


# ---------------------------------------------------------------- what must fit


def check_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    sizes, mine = (
        [len(group["params"]) for group in every] for every in (groups, optimizer.param_groups)
    )
    if sizes != mine:
        raise StateMismatch(
            f"the state has groups of {sizes} parameters, this optimizer of {mine}: load the state "
            "of this model, after add_param_group for groups that came late"
        )


def check_length(found: Sequence[Any] | torch.Tensor, wanted: int, what: str) -> None:
    if len(found) != wanted:
        raise StateMismatch(
            f"the state has {len(found)} {what}, expected {wanted}: load the state of this model"
        )


def _check_shape(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise StateMismatch(
            f"the state holds {name} with shape {tuple(found)}, expected {tuple(wanted)}: load the "
            "state of this model"
        )


def take_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Load hyperparameters and the step at which each group was added, 0 if it is not saved."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group |= {"added_at": 0} | {
            key: value for key, value in saved.items() if key not in ("params", "param_names")
        }


# ---------------------------------------------------------------- rows of divided state


def _check_shapes(optimizer: "ShardedOptimizer", head: Part) -> None:
    flat, count = optimizer._flat, len(optimizer._flat.parameters)
    check_length(head["shapes"], count, "parameters")
    for name, mine, shape in zip(flat.names, flat.shapes, head["shapes"], strict=True):
        _check_shape(f"parameter {name!r}", shape, mine)
    check_entries(head["tensors"], LISTS, "the state of tensors")
    for name in LISTS:
        check_length(head["tensors"][name], count, f"{name!r} of parameters")


def _joined_rows(
    optimizer: "ShardedOptimizer", parts: Sequence[Part], *, partial: bool
) -> dict[str, torch.Tensor]:
    """Join rows to buffers of all parameters; this rank's own rows must be there, unless the state
    is of another rank alone."""
    flat = optimizer._flat
    whole, found = {name: flat.new() for name in ROWS}, torch.zeros(flat.numel, dtype=torch.bool)
    for shard in (shard for part in parts for shard in part["shards"]):
        check_entries(shard, ("parameter", "begin", *ROWS), "the state of a part of a parameter")
        i, begin, numel = shard["parameter"], shard["begin"], shard["master"].numel()
        for name in ROWS:
            check_length(shard[name], numel, f"elements of {name!r} of parameter {i}")
        if i >= len(flat.places) or begin + numel > flat.places[i][1]:
            raise StateMismatch(
                f"the state has elements {begin} to {begin + numel} of parameter {i}, which this "
                "model lacks: load the state of this model"
            )
        first = flat.places[i][0] + begin
        found[first : first + numel] = True
        for name, buffer in whole.items():
            buffer[first : first + numel] = shard[name]
    for owned in () if partial else optimizer.parts:
        first = flat.places[owned.parameter][0] + owned.begin
        there = int(found[first : first + owned.numel].sum())
        if there != owned.numel:
            raise StateMismatch(
                f"the state has {there} of the {owned.numel} elements of parameter "
                f"{flat.names[owned.parameter]!r} {tuple(flat.shapes[owned.parameter])} that this "
                "rank owns: load the states of all ranks"
            )
    return whole


# ---------------------------------------------------------------- torch's part of a state


def _load_adam(optimizer: "ReplicatedOptimizer", state: dict[str, Any]) -> None:
    """Load momentum, variance and steps of torch's Adam: its run continues with exact steps. A
    state of ours that torch's tools have saved continues as it was, without residuals."""
    _check(optimizer, state)
    counts, own = _steps_of_groups(optimizer, state), optimizer.experts
    saved = [state["state"].get(i, {}) for i in _numbers(optimizer, state, shared=False)]
    found = None if own is None else own.of_adam(saved)
    optimizer.forget()
    _fill(optimizer, state)
    optimizer.steps_done, optimizer.facts = max(counts), Facts()
    for group, count in zip(optimizer.param_groups, counts, strict=True):
        group["added_at"] = optimizer.steps_done - count
    optimizer.tensors.follow(optimizer.steps_done, doubt=True)
    optimizer.resume(None)
    for name in EXCHANGES:
        _load_residuals(getattr(optimizer, name), {}, {})
    if own is not None and found is not None:
        own.load(found)
    for i in range(len(optimizer._taken)):
        optimizer._taken[i] = optimizer.tensors.own_steps(i, optimizer.steps_done)


def _numbers(optimizer: "CompressedOptimizer", state: dict[str, Any], *, shared: bool) -> list[int]:
    """Return a state's numbers of the parameters that all ranks hold, or of the others."""
    every = [number for group in state["param_groups"] for number in group["params"]]
    known = set(optimizer.shared_numbers())
    return [number for i, number in enumerate(every) if (i in known) == shared]


def _steps_of_groups(optimizer: "CompressedOptimizer", state: dict[str, Any]) -> list[int]:
    """Return the steps that each group has taken, fewer for a group that was added late."""
    counts: list[int] = []
    shared = set(_numbers(optimizer, state, shared=True)) & state["state"].keys()
    for number, group in enumerate(state["param_groups"]):
        steps = {int(state["state"][i]["step"]) for i in group["params"] if i in shared}
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
    """Check that groups and per-parameter tensors fit; ``whole``: also that none is missing."""
    check_entries(state, ("state", "param_groups"), "the state")
    check_groups(optimizer, state["param_groups"])
    flat, numbers = optimizer._flat, _numbers(optimizer, state, shared=True)
    for name, p, shape, number in zip(
        flat.names, flat.parameters, flat.shapes, numbers, strict=True
    ):
        own, saved = optimizer.state[p], state["state"].get(number, {})
        wanted = own.keys() - {"master"} if whole else {"step", "exp_avg", "exp_avg_sq"}
        if whole or saved:
            check_entries(saved, sorted(wanted), f"the state of parameter {name!r} {tuple(shape)}")
        for key, value in saved.items():
            if key not in own:
                raise _unknown(optimizer, name, p, key)
            if torch.is_tensor(value):
                into = own[key] if is_cut(value) else local(own[key])
                _check_shape(f"{key!r} of parameter {name!r}", value.shape, into.shape)


def _unknown(
    optimizer: "ReplicatedOptimizer", name: str, parameter: torch.Tensor, key: str
) -> StateMismatch:
    """Return the error for an entry of a parameter that this optimizer does not know."""
    if key == "master":
        return StateMismatch(
            f"parameter {name!r} is {parameter.dtype}, and was in half precision when the state "
            "was saved: give it that dtype before its optimizer is made. peft turns half-precision "
            "adapters into float32 where it makes or loads them, unless "
            "autocast_adapter_dtype=False is given"
        )
    return StateMismatch(
        f"the state holds {key!r} of parameter {name!r} but {type(optimizer).__name__} has no such "
        f"thing: expected {sorted(optimizer.state[parameter])}"
    )


def _fill(optimizer: "ReplicatedOptimizer", state: dict[str, Any]) -> None:
    """Load the checked hyperparameters and per-parameter tensors."""
    flat, numbers = optimizer._flat, _numbers(optimizer, state, shared=True)
    take_groups(optimizer, state["param_groups"])
    for p, number in zip(flat.parameters, numbers, strict=True):
        for key, value in state["state"].get(number, {}).items():
            into = optimizer.state[p][key]
            if into is not value:
                local(into).copy_(torch.as_tensor(local(value)))
    if flat.shadowed and not any("master" in s for s in state["state"].values()):
        flat.adopt()
    flat.publish()


# ---------------------------------------------------------------- other shards


def recut(
    optimizer: "CompressedOptimizer", states: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Make one elastic state for this rank's boxes from the states of all ranks, whatever their
    boxes."""
    if any(state["commpress"]["quantized"]["kind"] != "elastic" for state in states):
        return list(states)  # of this rank alone, for the same mesh
    mine, names = _boxes(optimizer), optimizer._flat.names
    whole = [box | {"begin": [0] * len(box["shape"]), "size": box["shape"]} for box in mine]
    columns: dict[str, list[dict[str, Any]]] = {}
    for state in states:
        boxes = state["commpress"].setdefault("boxes", whole)
        columns.setdefault(repr(boxes), []).append(state)
    first = _first(next(iter(columns.values())))
    head = first["commpress"]
    if head["schedule"].get("held"):
        raise StateMismatch(
            f"the states were saved {head['schedule']['held']} steps into a window: call "
            "optimizer.synchronize() before elastic_state_dict() to go on with other shards"
        )
    there = [_first(column)["commpress"]["boxes"] for column in columns.values()]
    _check_boxes(names, mine, there)
    tensors_of = _tensors_in_rows if optimizer.divided else _tensors_on_first
    every = [tensors_of(column) for column in columns.values()]
    tensors = []
    for i, box in enumerate(mine):
        parts = [(boxes[i], each[i]) for boxes, each in zip(there, every, strict=True)]
        tensors.append(
            {key: _cut(box, [(b, part[key]) for b, part in parts], key) for key in parts[0][1]}
        )
    part = head | {"boxes": mine}
    for exchange in EXCHANGES:
        residuals = [_residuals_by_name(column, exchange) for column in columns.values()]
        shards: dict[str, Any] = {}
        for i, (name, box) in enumerate(zip(names, mine, strict=True)):
            if not any(name in each for each in residuals):
                continue
            left = []
            for boxes, each in zip(there, residuals, strict=True):
                size = boxes[i]["size"]
                left.append((boxes[i], each.get(name, torch.zeros(prod(size))).view(size)))
            cut = _cut(box, left, exchange).reshape(-1)
            for at in range(0, cut.numel(), PIECE):
                values = cut[at : at + PIECE].clone()
                shards[f"{name}@{at}"] = {"numel": len(values), "start": 0, "values": values}
        part[exchange] = head[exchange] | {"rank": 0, "size": 1, "shards": shards}
    if optimizer.divided:
        shapes = [list(one[ROWS[0]].shape) for one in tensors]
        rows = [
            {"parameter": i, "begin": 0} | {name: tensor.view(-1) for name, tensor in one.items()}
            for i, one in enumerate(tensors)
            if one[ROWS[0]].numel()
        ]
        return [first | {"commpress": part | {"shapes": shapes, "shards": rows}}]
    return [first | {"state": dict(enumerate(tensors)), "commpress": part}]


def _boxes(optimizer: "CompressedOptimizer") -> list[Box]:
    return [box_of(p) for p in optimizer._flat.parameters]


def _first(column: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state with the common part of the ranks that have the same shards."""
    ranks = {state["commpress"]["quantized"]["rank"]: state for state in column}
    size = column[0]["commpress"]["quantized"]["size"]
    if 0 not in ranks or len(ranks) < size:
        raise StateMismatch(
            f"of {size} ranks with the same shards {len(column)} states were given: pass those of "
            "all ranks"
        )
    return ranks[0]


def _check_boxes(names: Sequence[str], mine: Sequence[Box], there: Sequence[Sequence[Box]]) -> None:
    for i, (name, box) in enumerate(zip(names, mine, strict=True)):
        shapes = {tuple(each[i]["shape"]) if i < len(each) else None for each in there}
        if shapes != {tuple(box["shape"])}:
            raise StateMismatch(
                f"the state holds parameter {name!r} with shape {shapes}, expected "
                f"{tuple(box['shape'])}: load the state of this model"
            )
        different = {(tuple(each[i]["begin"]), tuple(each[i]["size"])) for each in there}
        found = sum(prod(size) for _, size in different)
        if found != prod(box["shape"]):
            raise StateMismatch(
                f"the states hold {found} of the {prod(box['shape'])} elements of parameter "
                f"{name!r}: pass those of all ranks"
            )


def _tensors_on_first(column: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each parameter's tensors, saved by the first of the ranks with the same shards."""
    first = _first(column)
    return [first["state"].get(i, {}) for i in range(len(first["commpress"]["boxes"]))]


def _tensors_in_rows(column: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each parameter's tensors, joined from the rows of the ranks with the same shards."""
    parts = [state["commpress"] for state in column]
    check_entries(parts[0], ("shapes",), "the state of a rank")
    every = [{name: torch.zeros(shape) for name in ROWS} for shape in parts[0]["shapes"]]
    for shard in (shard for part in parts for shard in part["shards"]):
        for name, tensor in every[shard["parameter"]].items():
            tensor.view(-1)[shard["begin"] : shard["begin"] + shard[name].numel()] = shard[name]
    return every


def _residuals_by_name(column: Sequence[dict[str, Any]], exchange: str) -> dict[str, torch.Tensor]:
    """Return the flat R of every parameter, as far as these ranks have it."""
    pieces: dict[str, list[torch.Tensor]] = {}
    totals = totals_of([dict(state["commpress"][exchange]) for state in column])
    for (name, _), values in sorted(totals.items()):
        pieces.setdefault(name, []).append(values)
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def _cut(box: Box, parts: Sequence[tuple[Box, Any]], key: str) -> Any:
    """Cut the part in ``box`` from a tensor's ``parts``; numbers are the same in all parts."""
    example = parts[0][1]
    single = not isinstance(example, torch.Tensor) or (example.dim() == 0 and box["shape"])
    if single or key == "step":
        return example
    whole = torch.zeros(box["shape"], dtype=example.dtype)
    for at, part in parts:
        whole[tuple(_slices(at))] = part
    return whole[tuple(_slices(box))].clone()


def _slices(box: Box) -> Iterator[slice]:
    return (
        slice(begin, begin + size) for begin, size in zip(box["begin"], box["size"], strict=True)
    )
