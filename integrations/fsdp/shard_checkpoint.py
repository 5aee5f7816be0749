"""Residuals of a sharded model in checkpoints: plain tensors and numbers per rank, or DTensors
sharded like the parameters.

Exact: each rank saves its own residuals, for a bitwise resume. Elastic: only R, the mean of the
ranks' residuals, is saved, sharded like the parameters; every new rank gets R as its residual, so
that the mean does not change.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from commpress.collectives.allreduce import average
from commpress.collectives.powersgd import RowsOnly
from commpress.collectives.reduce_scatter import deals
from commpress.collectives.residual_state import key_of, text_of
from commpress.errors import StateMismatch, check_entries
from commpress.feedback import Key, ResidualStore
from commpress.integrations.fsdp.param_groups import column_mesh
from commpress.integrations.fsdp.whole_parameters import WholeParameters
from commpress.kernels.pieces import NUMEL, RESIDUAL

_FORMAT = 1
_NONE = torch.zeros(0)


_EXACT = ("layout", "step", "calls", "residuals", "between", "bases", "weights")


def exact_residuals(state: Any) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "kind": "exact",
        "layout": _layout(state),
        "step": state.step,
        "calls": [reducer.calls for reducer in state.reducers.values()],
        "residuals": _plain(state.residuals),
        "between": _plain(state.residuals_between),
        **({"kept_in": state.kept_in.spec} if not state.kept_in.lossless else {}),
        **_choices(state),
        **state.choice.saved(),
        "weights": {
            g.param_group.names[0]: g.own_row()
            for g in state.gatherers
            if g.difference and g.own_row() is not None
        },
    }


def load_exact(state: Any, saved: dict[str, Any]) -> None:
    _check(state, saved, "exact")
    if saved["layout"] != _layout(state):
        raise StateMismatch(
            f"the state was saved by rank and world size {saved['layout'][:2]} of units "
            f"{saved['layout'][2:]}, but this is {_layout(state)[:2]} of {_layout(state)[2:]}: "
            "load each rank's own file into the same model, or save with elastic_state_dict() to "
            "change the world size"
        )
    if saved.get("kept_in", "none") != state.kept_in.spec:
        raise StateMismatch(
            f"the state was saved with residuals in {saved.get('kept_in', 'none')!r}, but this run "
            f"keeps them in {state.kept_in.spec!r}: pass the same error_feedback=, or save with "
            "elastic_state_dict()"
        )
    _load_choices(state, saved["bases"])
    for store, name in ((state.residuals, "residuals"), (state.residuals_between, "between")):
        residuals = {key_of(text): sent for text, sent in saved[name].items()}
        if state.kept_in.lossless:
            _load_sent(store, residuals)
        else:
            store.load_codes(residuals)
    _load_steps(state, saved)
    for reducer, calls in zip(state.reducers.values(), saved["calls"], strict=True):
        reducer.calls = calls
    for gatherer in state.gatherers:
        gatherer.forget()
        gatherer.restored = saved["weights"].get(gatherer.param_group.names[0])


def _load_sent(store: ResidualStore, residuals: dict[Key, torch.Tensor]) -> None:
    """Load sent residuals; reduced ones, which only whole tensors have, start from zero."""
    reduced = {key: torch.zeros_like(reduced) for key, _, reduced in store.places()}
    store.load({key: (sent, reduced.get(key, _NONE)) for key, sent in residuals.items()})


def _load_steps(state: Any, saved: dict[str, Any]) -> None:
    state.step = saved["step"]
    state.resumed_at = state.step - state.counters.steps
    state.choice.load(saved)


def elastic_residuals(state: Any) -> dict[str, Any]:
    _check_elastic(state, "save with state_dict()")
    own = [(key, sent) for key, sent, _ in state.residuals.places()]
    result: dict[str, DTensor] = {}
    for reducer in state.reducers.values():
        group = reducer.param_group
        every = _in_order(reducer, own, group.ranks)
        parameters = dict(zip(group.names, group.parameters, strict=True))
        flat = torch.cat([whole.view(-1) for whole in every.values()])
        channel = reducer.channel.beside("checkpoint")  # its bytes are not counted
        channel.run(average(flat, channel.call(1), name="elastic state"))
        lengths = [whole.numel() for whole in every.values()]
        for name, whole in zip(every, flat.split(lengths), strict=True):
            parameter = parameters[name]
            mine = group.slices(name, whole)[channel.rank]
            result[name] = DTensor.from_local(
                mine.reshape(parameter.to_local().shape).clone(),
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
    return {
        "format": _FORMAT,
        "kind": "elastic",
        "step": state.step,
        "residuals": result,
        # torch's distributed checkpoints load into the keys and shapes that are there
        "bases": {
            name: _padded(basis, state.most) for name, basis in _choices(state)["bases"].items()
        },
        "rules": json.dumps(state.choice.saved().get("rules", {})),
    }


def _in_order(
    reducer: Any, residuals: Iterable[tuple[Key, torch.Tensor]], ranks: int
) -> dict[str, torch.Tensor]:
    """Sum residuals of ``ranks`` ranks, which had them in the order of their rows, into tensors in
    the order of the whole parameters."""
    group, device = reducer.param_group, reducer.param_group.parameters[0].device
    whole = {part.name: torch.zeros(part.numel, device=device) for part in reducer.parts}
    for (name, offset), sent in residuals:
        if name not in whole:
            continue
        if offset + sent.numel() > whole[name].numel():
            raise StateMismatch(
                f"the states have a residual of {name!r} at {offset}, unknown to this model"
            )
        whole[name][offset : offset + sent.numel()] += sent.to(device)
    for part in reducer.in_rows:
        flat, at = whole[part.name], 0
        whole[part.name] = torch.empty(group.shapes[part.name], device=device)
        for piece in group.cut(part.name, whole[part.name], ranks):
            piece.copy_(flat[at : at + piece.numel()].view(piece.shape))
            at += piece.numel()
    return whole


def load_elastic(state: Any, saved: dict[str, Any]) -> None:
    _check(state, saved, "elastic")
    _check_elastic(state, "load what state_dict() gave")
    whole = {name: _full(residual) for name, residual in saved["residuals"].items()}
    rules = json.loads(saved.get("rules", "{}"))
    bases = {name: basis[basis.any(1)] for name, basis in saved["bases"].items()}
    _load_whole(state, saved | {"rules": rules, "bases": bases}, whole)


def load_mean(state: Any, every: Sequence[dict[str, Any]]) -> None:
    """Load the exact states of all ranks of a run with another number of ranks."""
    for saved in every:
        _check(state, saved, "exact")
    ranks = [saved["layout"][0] for saved in every]
    size, units = every[0]["layout"][1], every[0]["layout"][2:]
    if sorted(ranks) != list(range(size)) or any(
        saved["layout"][1:] != [size, *units] for saved in every
    ):
        raise StateMismatch(
            f"the states are of ranks {sorted(ranks)} of a run on {size}: pass those of all its "
            "ranks, or this rank's own"
        )
    cure = f"resume on {size} ranks, or save with elastic_state_dict()"
    if _in_levels(state) or any(saved["between"] for saved in every):
        raise StateMismatch(f"residuals of two hops fit only the ranks that saved them: {cure}")
    if column_mesh(state.param_groups) is not None:
        raise StateMismatch(
            f"residuals under tensor parallelism fit only the ranks that saved them: {cure}"
        )
    if kept := next((saved["kept_in"] for saved in every if "kept_in" in saved), None):
        raise StateMismatch(
            f"residuals were kept in {kept!r}, in codes that fit only the ranks that saved them: "
            f"{cure}"
        )
    known = {part.name for reducer in state.reducers.values() for part in reducer.parts}
    residuals = [
        (key_of(text), sent) for saved in every for text, sent in saved["residuals"].items()
    ]
    if strange := next((name for (name, _), _ in residuals if name not in known), None):
        raise StateMismatch(f"the states have a residual of {strange!r}, unknown to this model")
    means = {}
    for reducer in state.reducers.values():
        for name, whole in _in_order(reducer, residuals, size).items():
            means[name] = whole / size
    _load_whole(state, every[0], means)


def _full(residual: Any) -> torch.Tensor:
    """Return the full tensor of a DTensor or of a plain tensor."""
    return (residual.full_tensor() if isinstance(residual, DTensor) else residual).float()


def _load_whole(state: Any, saved: dict[str, Any], every: dict[str, torch.Tensor]) -> None:
    """Set every residual to its part of ``every``."""
    residuals: dict[Key, torch.Tensor] = {}
    for reducer in state.reducers.values():
        missing = [part.name for part in reducer.parts if part.name not in every]
        if missing:
            raise StateMismatch(
                f"the state has no residual of {missing[0]!r}: it is of another model"
            )
        channel = reducer.channel
        plan = deals(
            reducer.in_rows,
            RowsOnly(reducer.hops[0].policy),
            rank=channel.rank,
            ranks=channel.size,
            feedback=state.error_feedback,
        )
        values = {
            p.name: reducer.param_group.columns_part(p.name, every[p.name]).reshape(-1)
            for p in reducer.parts
        }
        for part in reducer.in_rows:  # offsets count elements in the order of ranks
            slices = reducer.param_group.slices(part.name, values[part.name])
            values[part.name] = torch.cat([each.reshape(-1) for each in slices])
        for deal in plan:
            for (name, offset), line in zip(deal.every.keys, deal.every.pieces.table, strict=True):
                if line[RESIDUAL] >= 0:
                    residuals[name, offset] = values[name][offset:][: int(line[NUMEL])].clone()
        if reducer.whole is not None:
            for (name, offset), sent, _ in state.residuals.places():
                if name in reducer.whole.names:
                    residuals[name, offset] = values[name][offset:][: sent.numel()].clone()
        reducer.calls = saved["step"]
    _load_choices(state, saved["bases"])
    _load_sent(state.residuals, residuals)
    _load_steps(state, {"step": saved["step"], "rules": saved.get("rules", {})})
    state.forget_weights()


def _check_elastic(state: Any, cure: str) -> None:
    """Refuse two hops, and codecs of whole tensors under tensor parallelism, in which shard peers
    have different bases."""
    if state.residuals_between.places() or _in_levels(state):
        raise StateMismatch(
            f"residuals of two hops have no elastic form: {cure}, or leave topology= out"
        )
    if _whole(state) and column_mesh(state.param_groups) is not None:
        raise StateMismatch(
            f"PowerSGD has no elastic form under tensor parallelism: {cure}, or choose a codec of "
            "rows"
        )


def _choices(state: Any) -> dict[str, dict[str, Any]]:
    """Return the bases of whole-tensor codecs by parameter."""
    result: dict[str, dict[str, Any]] = {"bases": {}}
    for whole in _whole(state):
        for kind, found in whole.exchanges.choices().items():
            result[kind] |= found
    return result


def _padded(basis: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a basis with zeros up to so many rows, at least its own."""
    return torch.nn.functional.pad(basis, (0, 0, 0, max(rows - len(basis), 0)))


def _load_choices(state: Any, bases: dict[str, torch.Tensor]) -> None:
    for whole in _whole(state):
        own = {name: basis for name, basis in bases.items() if name in whole.names}
        whole.exchanges.load_choices({"bases": own})


def _whole(state: Any) -> list[WholeParameters]:
    return [reducer.whole for reducer in state.reducers.values() if reducer.whole is not None]


def _in_levels(state: Any) -> bool:
    """True if residuals of whole tensors belong to nodes."""
    return state.error_feedback and any(
        whole.exchanges.levels is not None for whole in _whole(state)
    )


def _plain(store: ResidualStore) -> dict[str, torch.Tensor]:
    if store.kind is not None:
        return {text_of(key): codes.clone() for key, codes in store.codes().items()}
    return {text_of(key): sent.clone() for key, sent, _ in store.places()}


def _layout(state: Any) -> list[Any]:
    """Return the facts that must be equal for an exact resume."""
    first = state.param_groups[0]
    return [
        first.mesh.get_local_rank(),
        first.ranks,
        *(each.names[0] for each in state.param_groups),
    ]


def _check(state: Any, saved: dict[str, Any], kind: str) -> None:
    if saved.get("format") != _FORMAT or saved.get("kind") != kind:
        raise StateMismatch(
            f"the state has format {saved.get('format')!r} and kind {saved.get('kind')!r}, "
            f"expected {_FORMAT!r} and {kind!r}: load a state_dict() or elastic_state_dict() of "
            "this version"
        )
    check_entries(saved, _EXACT if kind == "exact" else (), "the state")
