"""Saving and loading residuals: plain dictionaries of tensors and numbers, loadable with ``weights_only=True``.

Exact: each rank its own residuals; the resumed run continues bit for bit. Elastic: only R = mean(sent) + reduced, each
rank a shard of it, N floats in all however many ranks; on the new ranks every sent residual is R and every reduced one
zero, so R, and with it everything still owed, is unchanged.
"""

from collections.abc import Sequence
from typing import Any

import torch

from commpress.codecs.family import EXACT
from commpress.collectives.allreduce import Workspace, reduce_message
from commpress.collectives.buckets import PIECE, one_message
from commpress.collectives.transport import Transport
from commpress.errors import StateMismatch
from commpress.feedback import Key, ResidualStore
from commpress.kernels.pieces import width_of
from commpress.work import run

_FORMAT = 1


def exact_state(store: ResidualStore, transport: Transport, step: int) -> dict[str, Any]:
    residuals = {
        _text(key): {"sent": sent.clone(), "reduced": reduced.clone()} for key, sent, reduced in store.places()
    }
    return _head("exact", transport, step) | {"residuals": residuals}


def elastic_state(store: ResidualStore, transport: Transport, step: int, sequence: int) -> dict[str, Any]:
    """Fold the own reduced residual into the own sent one (× P), average over the ranks, keep the own row of each piece."""
    places, parts = store.places(), []
    for _, sent, reduced in places:
        part = sent.clone()
        mine = part[transport.rank * reduced.numel() :][: reduced.numel()]
        mine += transport.size * reduced[: mine.numel()]
        parts.append(part)
    shards = {}
    if parts:
        flat = torch.cat(parts)
        message = one_message(flat.numel(), EXACT, transport.size, name="elastic state")
        run(reduce_message(flat, None, message=message, transport=transport, workspace=Workspace(), sequence=sequence))
        for (key, sent, _), total in zip(places, flat.split([p.numel() for p in parts]), strict=True):
            start = min(transport.rank * width_of(sent.numel(), transport.size), sent.numel())
            stop = min(start + width_of(sent.numel(), transport.size), sent.numel())
            shards[_text(key)] = {"numel": sent.numel(), "start": start, "values": total[start:stop].clone()}
    return _head("elastic", transport, step) | {"shards": shards}


def residuals_of(
    states: Sequence[dict[str, Any]], transport: Transport
) -> tuple[int, dict[Key, tuple[torch.Tensor, torch.Tensor]]]:
    """The step and this rank's residuals, from one exact state or all elastic ones."""
    if not states or any(s.get("format") != _FORMAT or s.get("kind") not in ("exact", "elastic") for s in states):
        raise StateMismatch(
            "expected what state_dict() or elastic_state_dict() gave; this is something else or of another version"
        )
    first = states[0]
    if any((s["kind"], s["size"]) != (first["kind"], first["size"]) for s in states):
        raise StateMismatch("got states of different kinds or world sizes: pass those of one checkpoint")
    if first["kind"] == "elastic":
        return first["step"], _from_shards(states, transport)
    if len(states) > 1:
        raise StateMismatch(f"got {len(states)} exact states, expected this rank's own: pass one")
    if (first["size"], first["rank"]) != (transport.size, transport.rank):
        raise StateMismatch(
            f"the state was saved by rank {first['rank']} of {first['size']}, this is rank {transport.rank} of "
            f"{transport.size}: load each rank's own file, or save with elastic_state_dict() to change the world size"
        )
    return first["step"], {_key(k): (v["sent"], v["reduced"]) for k, v in first["residuals"].items()}


def _from_shards(
    states: Sequence[dict[str, Any]], transport: Transport
) -> dict[Key, tuple[torch.Tensor, torch.Tensor]]:
    size = states[0]["size"]
    ranks = sorted(s["rank"] for s in states)
    if ranks != list(range(size)) or len({(s["step"], *sorted(s["shards"])) for s in states}) > 1:
        raise StateMismatch(
            f"an elastic state saved by {size} ranks needs all {size} parts of one step, got those of ranks {ranks} at "
            f"steps {sorted({s['step'] for s in states})}, not all with the same parameters or not all there"
        )
    residuals: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
    for text in states[0]["shards"]:
        numel = states[0]["shards"][text]["numel"]
        total = torch.zeros(numel, dtype=torch.float32)
        for state in states:
            shard = state["shards"][text]
            total[shard["start"] : shard["start"] + shard["values"].numel()] = shard["values"]
        residuals[_key(text)] = (total, torch.zeros(width_of(numel, transport.size), dtype=torch.float32))
    return residuals


def check_fit(residuals: dict[Key, tuple[torch.Tensor, torch.Tensor]], numels: dict[str, int]) -> None:
    """Every residual belongs to a parameter with these names and lengths."""
    for (name, offset), (sent, _) in residuals.items():
        if name not in numels:
            raise StateMismatch(
                f"the state has a residual of {name!r}, but the model has no such parameter: load the state of this model, "
                "saved with the same named_parameters"
            )
        if sent.numel() != min(PIECE, numels[name] - offset):
            raise StateMismatch(
                f"the state has {sent.numel()} residuals of {name!r} from element {offset} on, but that parameter has "
                f"{numels[name]} elements, cut every {PIECE}: load the state of this model"
            )


def _head(kind: str, transport: Transport, step: int) -> dict[str, Any]:
    return {"format": _FORMAT, "kind": kind, "rank": transport.rank, "size": transport.size, "step": step}


def _text(key: Key) -> str:
    return f"{key[0]}@{key[1]}"


def _key(text: str) -> Key:
    name, _, offset = text.rpartition("@")
    return name, int(offset)
