"""Saving and loading an optimizer: exact for a bitwise resume, elastic for another number of ranks
or another mesh.

A state has ``state`` and ``param_groups`` as in torch's Adam, and ``commpress``: the schedule and
the residuals. An optimizer whose state is divided over the ranks saves all of it there, each rank
its rows. All values are plain tensors, numbers and text, so it loads with ``weights_only=True``.

Where parameters are DTensors, an elastic state holds the shards of one rank, or its rows of them,
and their boxes. The shards of all ranks are joined to whole tensors, residuals included, and cut
along the boxes of the ranks that load them.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from commpress.collectives.buckets import PIECE
from commpress.collectives.residual_state import totals_of
from commpress.collectives.state import PLACE
from commpress.errors import StateMismatch, check_entries
from commpress.optim.layout import Box, box_of, is_cut, local
from commpress.optim.tensor_states import STATE
from commpress.schedules import Facts

if TYPE_CHECKING:
    from commpress.optim.optimizer import CompressedOptimizer
    from commpress.optim.replicated import ReplicatedOptimizer
    from commpress.optim.sharded import ShardedOptimizer

Part = dict[str, Any]  # the ``commpress`` entry of a rank's state

EXCHANGES = ("full", "quantized")
ROWS = ("master", "momentum", "variance")
LISTS = (*STATE, "trips", "lines")  # lists of ``tensor_states``


# ---------------------------------------------------------------- both ways


def elastic(optimizer: "CompressedOptimizer", state: dict[str, Any], part: Part) -> dict[str, Any]:
    """Return this rank's state from torch's and its elastic ``part``; tensors are those of rank
    0, or their means."""
    if optimizer.columns is not None:
        part["boxes"] = _boxes(optimizer)
    if not optimizer.divided:
        tensors = {}
        every = zip(optimizer.shared_numbers(), optimizer._flat.parameters, strict=True)
        for i, (number, p) in enumerate(every if optimizer.channel.rank == 0 else ()):
            tensors[number] = {key: local(each).clone() for key, each in optimizer.state[p].items()}
            if "exp_avg" in part:
                tensors[number]["exp_avg"] = optimizer._flat.view(part["exp_avg"], i).clone()
        state["state"] = tensors
    return state | {"commpress": part}


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
    states = [state | {"commpress": current(state["commpress"])} for state in states]
    if optimizer.columns is not None or any("boxes" in state["commpress"] for state in states):
        states = recut(optimizer, states)
    check_entries(states[0], ("param_groups",), "the state")
    groups = states[0]["param_groups"]
    check_groups(optimizer, groups)
    optimizer.take_over(optimizer.read([*map(with_torch, states)]))
    if optimizer.divided:
        take_groups(optimizer, groups, added_at=0)


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
    optimizer.take_over(optimizer.read(parts))


def with_torch(state: Mapping[str, Any]) -> Part:
    """Return the part of a state with torch's entries, to be loaded together."""
    check_entries(state, ("commpress",), "the state")
    return state["commpress"] | {k: state[k] for k in ("state", "param_groups") if k in state}


def current(part: Part) -> Part:
    """Return a part in the present form: earlier ones had a level more."""
    inner = part.get("schedule", {}) | part.get("waiting", {})
    rest = {k: v for k, v in part.items() if k not in ("schedule", "waiting", "optimizer")}
    return rest | inner | ({"object": part["optimizer"]} if "optimizer" in part else {})


def check_window(optimizer: "CompressedOptimizer", states: Sequence[Part]) -> None:
    """Raise ``StateMismatch`` if exact states of several ranks are of the middle of a window."""
    of = states[0]["quantized"]
    if len(states) > 1 and of["kind"] == "exact" and states[0].get("held"):
        raise StateMismatch(
            f"the states of {of['size']} ranks were saved {states[0]['held']} steps into a window, "
            f"in which ranks differ, and {optimizer.channel.size} go on: call "
            "optimizer.synchronize() before state_dict(), or save with elastic_state_dict()"
        )


def own(optimizer: "CompressedOptimizer", states: Sequence[Part], missing: str) -> Part:
    """Return the state of this rank's local experts, None in that of another rank alone, which is
    followed by each rank's own."""
    if optimizer.experts is None:
        return {}
    channel, (_, rank, size) = optimizer.channel, (states[0]["quantized"][key] for key in PLACE)
    if missing and size == channel.size:
        return {"own": None}
    if (rank, size) != (channel.rank, channel.size) or "own" not in states[0]:
        raise StateMismatch(
            f"the state of {size} ranks has nothing of {optimizer.experts.flat.names[0]!r}, which "
            f"lies on this rank of {channel.size} alone: load this rank's own state_dict(), on as "
            "many ranks as saved it"
        )
    optimizer.experts.check(states[0]["own"])
    return {}


def _has_all(optimizer: "CompressedOptimizer") -> TypeGuard["ReplicatedOptimizer"]:
    return not optimizer.divided


# ---------------------------------------------------------------- what must fit


def check_groups(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], what: str = "the state"
) -> None:
    sizes, mine = (
        [len(group["params"]) for group in every] for every in (groups, optimizer.param_groups)
    )
    if sizes != mine:
        raise StateMismatch(
            f"{what} has groups of {sizes} parameters, this optimizer of {mine}: load the state of "
            "the same model into an optimizer of the same groups, those that came late included"
        )


def _check_steps(groups: Sequence[dict[str, Any]]) -> None:
    """Raise ``StateMismatch`` for groups whose steps are another Adam's."""
    for name in ("amsgrad", "maximize"):
        if any(group.get(name) for group in groups):
            raise StateMismatch(
                f"the state has groups with {name}=True, which no compressed optimizer does: train "
                "on with torch.optim.AdamW"
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


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, as a schedule may have changed them."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def take_groups(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], **missing: Any
) -> None:
    """Load the options of all groups; ``missing``: those that are not saved."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group |= missing | options_of(saved)


# ---------------------------------------------------------------- rows of divided state


def rows(optimizer: "ShardedOptimizer") -> Part:
    """Return the rows of this rank and the state of tensors that all ranks know."""
    shards = [
        {"parameter": part.parameter, "begin": part.begin}
        | {name: part.of(getattr(optimizer, name)).clone() for name in ROWS}
        for part in optimizer.parts
        if part.numel
    ]
    tensors = {name: getattr(optimizer.tensors, name).tolist() for name in LISTS}
    shapes = [list(shape) for shape in optimizer._flat.shapes]
    return {"tensors": tensors, "shards": shards, "shapes": shapes}


def take_rows(optimizer: "ShardedOptimizer", head: Mapping[str, Any]) -> None:
    """Load this rank's part of the tensors that ``joined_rows`` returned, and the state of
    tensors."""
    for owned in optimizer.parts:
        for name, whole in head["rows"][owned.parameter].items():
            owned.of(getattr(optimizer, name)).copy_(owned.of_whole(whole))
    for name in STATE:
        getattr(optimizer.tensors, name).copy_(torch.tensor(head["tensors"][name]))
    for name in ("trips", "lines"):
        getattr(optimizer.tensors, name)[:] = head["tensors"][name]


def check_shapes(optimizer: "ShardedOptimizer", head: Mapping[str, Any]) -> None:
    check_entries(head, ("shapes", "tensors"), "the state of a rank")
    flat, count = optimizer._flat, len(optimizer._flat.parameters)
    check_length(head["shapes"], count, "parameters")
    for name, mine, shape in zip(flat.names, flat.shapes, head["shapes"], strict=True):
        _check_shape(f"parameter {name!r}", shape, mine)
    check_entries(head["tensors"], LISTS, "the state of tensors")
    for name in LISTS:
        check_length(head["tensors"][name], count, f"{name!r} of parameters")


def joined_rows(
    optimizer: "ShardedOptimizer", parts: Sequence[Part], *, partial: bool
) -> list[dict[str, torch.Tensor]]:
    """Join rows to whole tensors; this rank's own rows must be there, unless the state is of
    another rank alone."""
    check_shapes(optimizer, parts[0])
    every, found = _tensors_in_rows(parts)
    for owned in () if partial else optimizer.parts:
        there = int(owned.of_whole(found[owned.parameter]).sum())
        if there != owned.numel:
            raise StateMismatch(
                f"the state has {there} of the {owned.numel} elements of parameter "
                f"{optimizer._flat.names[owned.parameter]!r} "
                f"{tuple(optimizer._flat.shapes[owned.parameter])} that this rank owns: load the "
                "states of all ranks"
            )
    return every


def _tensors_in_rows(
    parts: Sequence[Part],
) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """Join the rows of these ranks; return each parameter's tensors, and where they have rows."""
    for part in parts:
        check_entries(part, ("shapes", "shards"), "the state of a rank")
    shapes = parts[0]["shapes"]
    every = [{name: torch.zeros(shape) for name in ROWS} for shape in shapes]
    found = [torch.zeros(shape, dtype=torch.bool) for shape in shapes]
    for shard in (shard for part in parts for shard in part["shards"]):
        check_entries(shard, ("parameter", "begin", *ROWS), "the state of a part of a parameter")
        i, begin, numel = shard["parameter"], shard["begin"], shard["master"].numel()
        for name in ROWS:
            check_length(shard[name], numel, f"elements of {name!r} of parameter {i}")
        if i >= len(found) or begin + numel > found[i].numel():
            raise StateMismatch(
                f"the state has elements {begin} to {begin + numel} of parameter {i}, which this "
                "model lacks: load the state of this model"
            )
        found[i].view(-1)[begin : begin + numel] = True
        for name, tensor in every[i].items():
            tensor.view(-1)[begin : begin + numel] = shard[name]
    return every, found


# ---------------------------------------------------------------- torch's part of a state


def _load_adam(optimizer: "ReplicatedOptimizer", state: dict[str, Any]) -> None:
    """Load momentum, variance and steps of torch's Adam: its run continues with exact steps. A
    state of ours that torch's tools have saved continues as it was, without residuals."""
    check_tensors(optimizer, state)
    counts, experts = _steps_of_groups(optimizer, state), optimizer.experts
    saved = [state["state"].get(i, {}) for i in _numbers(optimizer, state, shared=False)]
    found = None if experts is None else experts.of_adam(saved)
    optimizer.forget()
    fill(optimizer, state)
    optimizer.steps_done, optimizer.facts = max(counts), Facts()
    for group, count in zip(optimizer.param_groups, counts, strict=True):
        group["added_at"] = optimizer.steps_done - count
    optimizer.tensors.follow(optimizer.steps_done, doubt=True)
    optimizer.follow_adam()
    for exchanges in optimizer.exchange_sets().values():
        exchanges.load_choices({})
        exchanges.load({})
    if experts is not None and found is not None:
        experts.load(found)
    for i in range(len(optimizer._taken)):
        optimizer._taken[i] = optimizer.tensors.own_steps(i, optimizer.steps_done)


def _numbers(
    optimizer: "CompressedOptimizer", state: Mapping[str, Any], *, shared: bool
) -> list[int]:
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


def check_tensors(
    optimizer: "ReplicatedOptimizer", state: Mapping[str, Any], *, whole: bool = False
) -> None:
    """Check that groups and per-parameter tensors fit; ``whole``: also that none is missing."""
    check_entries(state, ("state", "param_groups"), "the state")
    check_groups(optimizer, state["param_groups"])
    _check_steps(state["param_groups"])
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


def fill(optimizer: "ReplicatedOptimizer", state: Mapping[str, Any]) -> None:
    """Load the checked hyperparameters and per-parameter tensors."""
    flat, numbers = optimizer._flat, _numbers(optimizer, state, shared=True)
    take_groups(optimizer, state["param_groups"], added_at=0)
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
    if head.get("held"):
        raise StateMismatch(
            f"the states were saved {head['held']} steps into a window: call "
            "optimizer.synchronize() before elastic_state_dict() to go on with other shards"
        )
    there = [_first(column)["commpress"]["boxes"] for column in columns.values()]
    _check_boxes(names, mine, there)
    every = [
        _tensors_in_rows([state["commpress"] for state in column])[0]
        if optimizer.divided
        else _tensors_on_first(column)
        for column in columns.values()
    ]
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
