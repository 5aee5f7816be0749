"""Saving and loading an optimizer whose state is divided over the ranks: for as many ranks, or for
any number."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from commpress.codecs.family import EXACT
from commpress.collectives.allreduce import reduce_message
from commpress.collectives.buckets import one_message
from commpress.collectives.residual_state import elastic_state, exact_state, residuals_of
from commpress.errors import StateMismatch
from commpress.optim.boxes import boxes_of, recut
from commpress.optim.checkpoint import (
    ENTRIES,
    check_closed,
    check_entries,
    check_groups,
    check_length,
    check_step,
    own_in,
    own_of,
    own_state,
    take_groups,
    take_own,
)
from commpress.optim.tensor_states import STATE
from commpress.schedules import Facts
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.optim.sharded import ShardedOptimizer

log = logging.getLogger("commpress")

SHARDED = ("master", "momentum", "variance")
SCATTERS = ("full", "quantized")
LISTS = (*STATE, "trips", "lines")  # of what ``tensor_states`` knows


def exact(optimizer: "ShardedOptimizer") -> dict[str, Any]:
    waiting = {name: buffer.clone() for name, buffer in optimizer.waiting().items()}
    return (
        _head(optimizer)
        | own_state(optimizer)
        | {"waiting": waiting}
        | {
            name: exact_state(
                getattr(optimizer, name).residuals,
                optimizer.channel.transport,
                optimizer.steps_done,
            )
            for name in SCATTERS
        }
    )


def elastic(optimizer: "ShardedOptimizer") -> Steps[dict[str, Any]]:
    """This rank's part. What waits differs between ranks; what counts for the run is its mean,
    which rank 0 saves."""
    part, waiting = (
        _head(optimizer),
        {name: buffer.clone() for name, buffer in optimizer.waiting().items()},
    )
    for name in SCATTERS:
        part[name] = yield from elastic_state(
            getattr(optimizer, name).residuals,
            optimizer.channel.transport,
            optimizer.steps_done,
            optimizer.channel.take(),
        )
    message = one_message(optimizer._flat.numel, EXACT, optimizer.channel.size, name="window")
    for mean in waiting.values():
        yield from reduce_message(
            mean,
            None,
            message=message,
            transport=optimizer.channel.transport,
            workspace=optimizer.channel.workspace,
            sequence=optimizer.channel.take(),
        )
    boxes = {} if optimizer.columns is None else {"boxes": boxes_of(optimizer)}
    return part | {"waiting": waiting if optimizer.channel.rank == 0 else {}} | boxes


def load(optimizer: "ShardedOptimizer", states: Sequence[dict[str, Any]]) -> None:
    """Take all of it, or nothing if something does not fit."""
    if any("commpress" not in state for state in states):
        raise StateMismatch(
            f"the state is not of a {type(optimizer).__name__}: expected what its state_dict() or "
            "elastic_state_dict() gave. torch.distributed.checkpoint.state_dict leaves out what "
            "each rank has for itself: save with commpress.save_distributed(optimizer, folder)"
        )
    if optimizer.columns is not None or any("boxes" in state["commpress"] for state in states):
        states = recut(optimizer, states)
    check_entries(states[0], ("param_groups",), "the state")
    groups = states[0]["param_groups"]
    check_groups(optimizer, groups)
    _take(optimizer, [state["commpress"] for state in states])
    take_groups(optimizer, groups)


def load_rank(optimizer: "ShardedOptimizer", parts: Sequence[dict[str, Any]]) -> None:
    check_step(optimizer, parts)
    _take(optimizer, parts)


def tensors_of(column: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tensors of each parameter, put together from what the ranks with the same shards own of
    them."""
    parts = [state["commpress"] for state in column]
    check_entries(parts[0], ("shapes",), "the state of a rank")
    every = [{name: torch.zeros(shape) for name in SHARDED} for shape in parts[0]["shapes"]]
    for part in parts:
        for shard in part["shards"]:
            for name, tensor in every[shard["parameter"]].items():
                tensor.view(-1)[shard["begin"] : shard["begin"] + shard[name].numel()] = shard[name]
    return every


def with_tensors(state: dict[str, Any], tensors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """This state with other tensors, such as ``tensors_of`` gives, all of each in one part."""
    shapes = [list(one[SHARDED[0]].shape) for one in tensors]
    shards = [
        {"parameter": i, "begin": 0} | {name: tensor.view(-1) for name, tensor in one.items()}
        for i, one in enumerate(tensors)
        if one[SHARDED[0]].numel()
    ]
    return state | {"commpress": state["commpress"] | {"shapes": shapes, "shards": shards}}


def check_complete(optimizer: "ShardedOptimizer") -> None:
    if optimizer.missing:
        raise StateMismatch(optimizer.missing)


def _head(optimizer: "ShardedOptimizer") -> dict[str, Any]:
    check_complete(optimizer)
    shards = [
        {"parameter": part.parameter, "begin": part.begin}
        | {name: part.of(getattr(optimizer, name)).clone() for name in SHARDED}
        for part in optimizer.parts
        if part.numel
    ]
    tensors = {name: getattr(optimizer.tensors, name).tolist() for name in LISTS}
    return {
        "optimizer": type(optimizer).__name__,
        "step": optimizer.steps_done,
        "facts": optimizer.facts.as_dict(),
        "schedule": optimizer.schedule_state(),
        "tensors": tensors,
        "shards": shards,
        "shapes": [list(shape) for shape in optimizer._flat.shapes],
    }


def _take(optimizer: "ShardedOptimizer", parts: Sequence[dict[str, Any]]) -> None:
    for part in parts:
        check_entries(
            part, (*ENTRIES, "shapes", "tensors", "shards", "waiting"), "the state of a rank"
        )
    names = {part["optimizer"] for part in parts}
    if names != {type(optimizer).__name__}:
        raise StateMismatch(
            f"the state is of {', '.join(sorted(names))}, this is a {type(optimizer).__name__}"
        )
    mine = optimizer.channel.transport
    parts = own_of(parts, mine.rank, mine.size)
    check_closed(parts, mine.size)
    head, of = parts[0], parts[0]["quantized"]
    partial = (
        len(parts) == 1 < of["size"]
        and of["kind"] == "exact"
        and (of["rank"], of["size"]) != (mine.rank, mine.size)
    )
    residuals = (
        {}
        if partial
        else {name: residuals_of([part[name] for part in parts], mine)[1] for name in SCATTERS}
    )
    saved: dict[str, torch.Tensor] = next(
        (part["waiting"] for part in parts if part["waiting"]), {}
    )
    facts = Facts.of(head["facts"])
    _check_shapes(optimizer, head)
    optimizer.check_schedule(head["schedule"])
    optimizer.check_waiting(head["schedule"], saved)
    for name in SCATTERS:
        getattr(optimizer, name).check(residuals.get(name, {}))
    whole, own = _whole(optimizer, parts, partial=partial), own_in(optimizer, parts)

    optimizer.missing = (
        (
            f"the loaded state is of rank {of['rank']} of {of['size']}, and this is rank "
            f"{mine.rank} of {mine.size}, which owns other parts: load each rank's own "
            "state_dict(), or all ranks' to change the world size. With a Trainer use the callback "
            "commpress.hf.Compress, with Lightning commpress.lightning.Compress, with Accelerate "
            "commpress.hf.RankFiles: they save and load every rank's part"
        )
        if partial
        else ""
    )
    for owned in optimizer.parts:
        first = optimizer._flat.places[owned.parameter][0] + owned.begin
        for name, buffer in whole.items():
            owned.of(getattr(optimizer, name)).copy_(buffer[first : first + owned.numel])
    take_own(optimizer, own)
    optimizer.steps_done, optimizer.facts = int(head["step"]), facts
    for name in STATE:
        getattr(optimizer.tensors, name).copy_(torch.tensor(head["tensors"][name]))
    optimizer.tensors.trips[:] = head["tensors"]["trips"]
    optimizer.tensors.lines[:] = head["tensors"]["lines"]
    optimizer.resume(head["schedule"])
    optimizer.unknown = True
    optimizer.recut()
    for name in SCATTERS:
        getattr(optimizer, name).load(residuals.get(name, {}))
    for name, buffer in optimizer.waiting().items():
        buffer.copy_(saved[name])


def _check_shapes(optimizer: "ShardedOptimizer", head: dict[str, Any]) -> None:
    flat = optimizer._flat
    check_length(head["shapes"], len(flat.parameters), "parameters")
    for name, mine, shape in zip(flat.names, flat.shapes, head["shapes"], strict=True):
        if tuple(shape) != tuple(mine):
            raise StateMismatch(
                f"the state holds parameter {name!r} with shape {tuple(shape)}, expected "
                f"{tuple(mine)}: load the state of this model"
            )
    check_entries(head["tensors"], LISTS, "the state of tensors")
    for name in LISTS:
        check_length(head["tensors"][name], len(flat.parameters), f"{name!r} of parameters")


def _whole(
    optimizer: "ShardedOptimizer", parts: Sequence[dict[str, Any]], *, partial: bool
) -> dict[str, torch.Tensor]:
    """Buffers of all parameters from their parts, laid out as these are; what this rank owns must
    be there."""
    flat = optimizer._flat
    whole, found = {name: flat.new() for name in SHARDED}, torch.zeros(flat.numel, dtype=torch.bool)
    for part in parts:
        for shard in part["shards"]:
            i, begin, numel = shard["parameter"], shard["begin"], shard["master"].numel()
            if i >= len(flat.places) or begin + numel > flat.places[i][1]:
                raise StateMismatch(
                    f"the state has elements {begin} to {begin + numel} of parameter {i}, which "
                    "this model lacks: load the state of this model"
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
