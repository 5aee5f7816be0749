"""Residuals of a sharded model in checkpoints: plain tensors and numbers per rank, or DTensors that lie like the parameters.

Exact: each rank its own residuals, for a bitwise resume. Elastic: only R, the mean of the ranks' residuals, sharded like the
parameters; on the new ranks every residual is R, so the mean, and with it everything still owed, is unchanged.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from commpress.codecs import policy_of
from commpress.collectives.reduce_scatter import deals, reduce_rows
from commpress.errors import StateMismatch
from commpress.feedback import Key, ResidualStore
from commpress.kernels.pieces import KEPT, NUMEL
from commpress.work import run

_FORMAT = 1
_NONE = torch.zeros(0)


def exact_residuals(state: Any) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "kind": "exact",
        "layout": _layout(state),
        "step": state.step,
        "calls": [reducer.calls for reducer in state.reducers.values()],
        "residuals": _plain(state.residuals),
        "between": _plain(state.residuals_between),
        "weights": {g.unit.names[0]: g.own_row() for g in state.gatherers if g.difference and g.own_row() is not None},
    }


def load_exact(state: Any, saved: dict[str, Any]) -> None:
    _check(state, saved, "exact")
    if saved["layout"] != _layout(state):
        raise StateMismatch(
            f"the state was saved by rank and world size {saved['layout'][:2]} of units {saved['layout'][2:]}, this is "
            f"{_layout(state)[:2]} of {_layout(state)[2:]}: load each rank's own file into the same model, or save with "
            "elastic_state_dict() to change the world size"
        )
    state.residuals.load({_key(k): (v, _NONE) for k, v in saved["residuals"].items()})
    state.residuals_between.load({_key(k): (v, _NONE) for k, v in saved["between"].items()})
    state.step = saved["step"]
    for reducer, calls in zip(state.reducers.values(), saved["calls"], strict=True):
        reducer.calls = calls
    for gatherer in state.gatherers:
        gatherer.forget()
        gatherer.restored = saved["weights"].get(gatherer.unit.names[0])


def elastic_residuals(state: Any) -> dict[str, Any]:
    held: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for (name, offset), sent, _ in state.residuals.places():
        held.setdefault(name, []).append((offset, sent))
    if state.residuals_between.places():
        raise StateMismatch("residuals of two hops have no elastic form: save with state_dict()")
    result: dict[str, DTensor] = {}
    for reducer in state.reducers.values():
        unit, parts = reducer.unit, reducer.parts
        transport = reducer.hops[0].transport
        rows = torch.zeros(unit.ranks, reducer.stride, device=unit.parameters[0].device)
        for part in parts:
            whole = torch.zeros(unit.ranks * part.width, device=rows.device)
            for offset, sent in held.get(part.name, []):
                whole[offset : offset + sent.numel()] = sent
            rows[:, part.at : part.at + part.width] = whole.view(unit.ranks, -1)
        shard = torch.zeros(reducer.stride, device=rows.device)
        plan = deals(parts, policy_of("none"), rank=transport.rank, ranks=transport.size, feedback=False)
        run(
            reduce_rows(
                rows.view(-1), shard, [None] * len(plan), plan=plan, transport=transport, workspace=state.reducing,
                sequence=state.sequence(len(plan)),
            )
        )  # fmt: skip
        parameters = dict(zip(unit.names, unit.parameters, strict=True))
        for part in parts:
            parameter = parameters[part.name]
            local = parameter.to_local()
            values = shard[part.at : part.at + local.numel()].view(local.shape).clone()
            result[part.name] = DTensor.from_local(
                values, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
    return {"format": _FORMAT, "kind": "elastic", "step": state.step, "residuals": result}


def load_elastic(state: Any, saved: dict[str, Any]) -> None:
    _check(state, saved, "elastic")
    residuals: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
    for reducer in state.reducers.values():
        missing = [part.name for part in reducer.parts if part.name not in saved["residuals"]]
        if missing:
            raise StateMismatch(f"the state has no residual of {missing[0]!r}: it is of another model")
        transport = reducer.hops[0].transport
        plan = deals(
            reducer.parts, reducer.hops[0].policy, rank=transport.rank, ranks=transport.size,
            feedback=state.error_feedback,
        )  # fmt: skip
        whole = {part.name: saved["residuals"][part.name].full_tensor().float().reshape(-1) for part in reducer.parts}
        for deal in plan:
            for (name, offset), line in zip(deal.every.keys, deal.every.pieces.table, strict=True):
                if line[KEPT] >= 0:
                    residuals[name, offset] = (whole[name][offset : offset + int(line[NUMEL])].clone(), _NONE)
        reducer.calls = saved["step"]
    state.residuals.load(residuals)
    state.step = saved["step"]
    state.forget_weights()


def _plain(store: ResidualStore) -> dict[str, torch.Tensor]:
    return {f"{name}@{offset}": sent.clone() for (name, offset), sent, _ in store.places()}


def _key(text: str) -> Key:
    name, _, offset = text.rpartition("@")
    return name, int(offset)


def _layout(state: Any) -> list[Any]:
    """What must be the same for an exact resume."""
    first = state.units[0]
    return [first.mesh.get_local_rank(), first.ranks, *(unit.names[0] for unit in state.units)]


def _check(state: Any, saved: dict[str, Any], kind: str) -> None:
    if saved.get("format") != _FORMAT or saved.get("kind") != kind:
        raise StateMismatch(
            "expected what state_dict() or elastic_state_dict() gave; this is something else or of another version"
        )
