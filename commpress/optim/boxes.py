"""Boxes: which part of every parameter a rank has, and states cut anew where other ranks have other
parts.

An elastic state of an optimizer whose parameters are DTensors holds the shards of one rank, or of
sharded optimizers a part of them, and their boxes. Those of all ranks are joined to whole tensors,
what compression owes among them, and cut along the boxes of whoever loads them. Where a state has
its tensors only its own kind knows: ``tensors_of`` and ``with_tensors`` of ``checkpoint`` and
``sharded_checkpoint``.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from commpress.collectives.buckets import PIECE
from commpress.collectives.residual_state import totals_of
from commpress.errors import StateMismatch
from commpress.optim.columns import is_cut

if TYPE_CHECKING:
    from commpress.optim.optimizer import CompressedOptimizer

# the whole tensor's ``shape``, where the part ``begin``s and its ``size``
Box = dict[str, list[int]]
EXCHANGES = ("full", "quantized")


def box_of(parameter: Any) -> Box:
    """The part of a parameter that this rank has: all of it, unless it is a DTensor."""
    shape = list(parameter.shape)
    begin, size = [0] * len(shape), list(shape)
    if is_cut(parameter):
        mesh = parameter.device_mesh
        places = zip(mesh.mesh.shape, mesh.get_coordinate(), parameter.placements, strict=True)
        for ranks, place, placement in places:
            if placement.is_shard():
                d = placement.dim
                width = -(-size[d] // ranks)  # as ``torch.chunk`` cuts
                first = min(place * width, size[d])
                begin[d], size[d] = begin[d] + first, min(width, size[d] - first)
    return {"shape": shape, "begin": begin, "size": size}


def boxes_of(optimizer: "CompressedOptimizer") -> list[Box]:
    return [box_of(p) for p in optimizer._flat.parameters]


def recut(
    optimizer: "CompressedOptimizer", states: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One elastic state of this rank's boxes from those of all ranks, which may have had others."""
    parts = [state["commpress"] for state in states]
    if any(part["quantized"]["kind"] != "elastic" for part in parts):
        return list(states)  # of this rank alone, for the same mesh
    mine, names = boxes_of(optimizer), optimizer._flat.names
    whole = [
        {"shape": box["shape"], "begin": [0] * len(box["shape"]), "size": box["shape"]}
        for box in mine
    ]
    columns: dict[str, list[dict[str, Any]]] = {}
    for state in states:
        boxes = state["commpress"].setdefault("boxes", whole)
        columns.setdefault(repr(boxes), []).append(state)
    firsts = [_first(column) for column in columns.values()]
    head = firsts[0]["commpress"]
    if head["schedule"].get("held"):
        raise StateMismatch(
            f"the states were saved {head['schedule']['held']} steps into a window: call "
            "optimizer.synchronize() before elastic_state_dict() to go on with other shards"
        )
    _check(mine, names, firsts)
    every = [optimizer.states.tensors_of(column) for column in columns.values()]
    tensors = []
    for i, box in enumerate(mine):
        of = [
            (first["commpress"]["boxes"][i], each[i])
            for first, each in zip(firsts, every, strict=True)
        ]
        tensors.append({key: _cut(box, [(b, s[key]) for b, s in of], key) for key in of[0][1]})
    result: dict[str, Any] = optimizer.states.with_tensors(firsts[0], tensors)
    result["commpress"]["boxes"] = mine
    for exchange in EXCHANGES:
        owes = [_by_name(column, exchange) for column in columns.values()]
        shards = {}
        for i, (name, box) in enumerate(zip(names, mine, strict=True)):
            owed = [
                (first["commpress"]["boxes"][i], owe.get(name))
                for first, owe in zip(firsts, owes, strict=True)
            ]
            if all(part is None for _, part in owed):
                continue
            parts_of = [
                (b, torch.zeros(prod(b["size"])) if part is None else part) for b, part in owed
            ]
            cut = _cut(box, [(b, part.view(b["size"])) for b, part in parts_of], exchange).reshape(
                -1
            )
            for at in range(0, cut.numel(), PIECE):
                piece = cut[at : at + PIECE]
                shards[f"{name}@{at}"] = {
                    "numel": piece.numel(),
                    "start": 0,
                    "values": piece.clone(),
                }
        one = {key: value for key, value in head[exchange].items() if key != "shards"}
        result["commpress"][exchange] = one | {"rank": 0, "size": 1, "shards": shards}
    return [result]


def _first(column: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state that holds what the ranks with the same shards have in common."""
    found = [state for state in column if state["commpress"]["quantized"]["rank"] == 0]
    size = column[0]["commpress"]["quantized"]["size"]
    if not found or len({state["commpress"]["quantized"]["rank"] for state in column}) < size:
        raise StateMismatch(
            f"of {size} ranks with the same shards {len(column)} states were given: pass those of "
            "all ranks"
        )
    return found[0]


def _check(mine: Sequence[Box], names: Sequence[str], firsts: Sequence[dict[str, Any]]) -> None:
    for i, (name, box) in enumerate(zip(names, mine, strict=True)):
        boxes = [first["commpress"]["boxes"] for first in firsts]
        shapes = {tuple(each[i]["shape"]) if i < len(each) else None for each in boxes}
        if shapes != {tuple(box["shape"])}:
            raise StateMismatch(
                f"the state holds parameter {name!r} with shape {shapes}, expected "
                f"{tuple(box['shape'])}: load the state of this model"
            )
        different = {(tuple(each[i]["begin"]), tuple(each[i]["size"])) for each in boxes}
        there = sum(prod(size) for _, size in different)
        if there != prod(box["shape"]):
            raise StateMismatch(
                f"the states hold {there} of the {prod(box['shape'])} elements of parameter "
                f"{name!r}: pass those of all ranks"
            )


def _by_name(column: Sequence[dict[str, Any]], exchange: str) -> dict[str, torch.Tensor]:
    """R of every parameter, flat, as far as these ranks have the parameter."""
    pieces = sorted(totals_of([dict(state["commpress"][exchange]) for state in column]).items())
    names = dict.fromkeys(name for (name, _), _ in pieces)
    return {
        each: torch.cat([values for (name, _), values in pieces if name == each]) for each in names
    }


def _cut(box: Box, parts: Sequence[tuple[Box, Any]], key: str) -> Any:
    """The part that ``box`` has of a tensor of which there are these parts; numbers are the same
    everywhere."""
    example = parts[0][1]
    if (
        not isinstance(example, torch.Tensor)
        or (example.dim() == 0 and box["shape"])
        or key == "step"
    ):
        return example
    whole = torch.zeros(box["shape"], dtype=example.dtype)
    for at, part in parts:
        whole[tuple(_slices(at))] = part
    return whole[tuple(_slices(box))].clone()


def _slices(box: Box) -> Iterator[slice]:
    return (
        slice(begin, begin + size) for begin, size in zip(box["begin"], box["size"], strict=True)
    )
