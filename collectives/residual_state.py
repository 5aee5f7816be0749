"""Saving and loading residuals: plain dictionaries of tensors and numbers, loadable with
``weights_only=True``.

Exact: each rank saves its own residuals; the resumed run continues bit for bit. Elastic: each rank
saves a shard of R = mean(sent) + reduced, N floats in all for any number of ranks; on the new ranks
every sent residual is R and every reduced one zero, so the total R is unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from commpress.collectives.allreduce import Call, Workspace, average
from commpress.collectives.buckets import PIECE
from commpress.collectives.transports.transport import Transport
from commpress.errors import StateMismatch, check_entries
from commpress.feedback import Key, Residual, ResidualStore, add_reduced
from commpress.kernels.pieces import width_of
from commpress.work import Steps

_FORMAT = 1
Residuals = dict[Key, Residual]
_TENSORS = ("sent", "reduced")
_SHARD = ("numel", "start", "values")


class Ranked(Protocol):
    """Anything with a rank and a size: a transport or a group."""

    rank: int
    size: int


@dataclass
class Ranks:
    rank: int
    size: int


def exact_state(
    store: ResidualStore, transport: Ranked, step: int, nodes: str = ""
) -> dict[str, Any]:
    """Return this rank's residuals. ``nodes``: the topology, if it decides which rank has which
    residual."""
    residuals = {
        text_of(key): {name: tensor.clone() for name, tensor in zip(_TENSORS, kept, strict=True)}
        for key, kept in store.every().items()
    }
    state = _head("exact", transport, step) | {"residuals": residuals}
    return state | ({"nodes": nodes} if nodes else {})


def flat_parts(store: ResidualStore, transport: Transport) -> dict[Key, torch.Tensor]:
    """Return this rank's part of each piece; the mean of the parts over the ranks is R."""
    parts = {key: (sent.clone(), reduced) for key, sent, reduced in store.places()}
    for part, reduced in parts.values():
        add_reduced(part, reduced, transport.rank, transport.size)
    return {key: part for key, (part, _) in parts.items()}


def elastic_of(
    parts: dict[Key, torch.Tensor], transport: Transport, step: int, sequence: int
) -> Steps[dict[str, Any]]:
    """Average the parts over the ranks and return this rank's row of each piece."""
    shards = {}
    if parts:
        flat = torch.cat(list(parts.values()))
        yield from average(flat, Call(transport, Workspace(), sequence), name="elastic state")
        for (key, part), total in zip(
            parts.items(), flat.split([p.numel() for p in parts.values()]), strict=True
        ):
            start = min(transport.rank * width_of(part.numel(), transport.size), part.numel())
            stop = min(start + width_of(part.numel(), transport.size), part.numel())
            shards[text_of(key)] = {
                "numel": part.numel(),
                "start": start,
                "values": total[start:stop].clone(),
            }
    return _head("elastic", transport, step) | {"shards": shards}


def residuals_of(
    states: Sequence[dict[str, Any]],
    transport: Ranked,
    *,
    share: Callable[[dict[Key, torch.Tensor]], Residuals] | None = None,
    nodes: str = "",
) -> tuple[int, Residuals]:
    """Return the step and this rank's residuals, from its own exact state, or from all states,
    elastic or exact, of any world size.

    ``share`` makes them from R if pieces are not flat; ``nodes``: see ``exact_state``.
    """
    if not states or any(
        s.get("format") != _FORMAT or s.get("kind") not in ("exact", "elastic") for s in states
    ):
        found = sorted({str(s.get("format")) for s in states}) or "none"
        raise StateMismatch(
            f"expected what state_dict() or elastic_state_dict() gave, format {_FORMAT}; this is "
            f"of format {found} and kind {sorted({str(s.get('kind')) for s in states})}: something "
            "else, or of another version of commpress"
        )
    for state in states:
        _check_whole(state)
    first = states[0]
    if any((s["kind"], s["size"]) != (first["kind"], first["size"]) for s in states):
        raise StateMismatch(
            "got states of different kinds or world sizes: pass those of one checkpoint"
        )
    if first.get("ef21"):
        raise StateMismatch(
            "the state holds estimates of EF21 (error_feedback='ef21'), which commpress no longer "
            "has: go on from the model and optimizer alone, with residuals of zero"
        )
    if first["kind"] == "exact" and len(states) > 1:
        states = [
            s for s in states if (s["size"], s["rank"]) == (transport.size, transport.rank)
        ] or states
        first = states[0]
    if first["kind"] == "elastic" or len(states) > 1 or (first["size"] == 1 != transport.size):
        totals = totals_of(states) if first["kind"] == "elastic" else _from_exact(states)
        if share is not None:
            return first["step"], share(totals)
        return first["step"], spread(totals, transport.size)
    if (first["size"], first["rank"]) != (transport.size, transport.rank):
        raise StateMismatch(
            f"the state was saved by rank {first['rank']} of {first['size']}, this is rank "
            f"{transport.rank} of {transport.size}: load each rank's own file, or to change the "
            "world size those of all ranks on every rank"
        )
    if first.get("nodes", "") != nodes:
        raise StateMismatch(
            f"the state was saved with {_nodes(first.get('nodes', ''))}, this run has "
            f"{_nodes(nodes)}: pass the same topology=, or save with elastic_state_dict() to "
            "change it"
        )
    return first["step"], {
        key_of(k): tuple(v[name] for name in _TENSORS if name in v)
        for k, v in first["residuals"].items()
    }


def residuals_of_all(states: Sequence[dict[str, Any]], transport: Ranked) -> Residuals:
    """Return this rank's residuals from its own exact state, or from those of all ranks, each of
    which has other elements."""
    own = [s for s in states if (s["size"], s["rank"]) == (transport.size, transport.rank)]
    if own or len(states) == 1:
        return residuals_of(own or states, transport)[1]
    ranks = sorted(state["rank"] for state in states)
    if ranks != list(range(states[0]["size"])) or len({state["step"] for state in states}) > 1:
        raise StateMismatch(
            f"a state of {states[0]['size']} ranks needs all parts of one step, got those of ranks "
            f"{ranks}: pass what every rank has saved"
        )
    found: Residuals = {}
    for state in states:
        found |= residuals_of([state], Ranks(state["rank"], state["size"]))[1]
    return found


def _check_whole(state: dict[str, Any]) -> None:
    """Raise ``StateMismatch`` if an entry of a saved state is missing."""
    what, entries = ("residuals", _TENSORS) if state["kind"] == "exact" else ("shards", _SHARD)
    check_entries(state, ("rank", "size", "step", what), "the state of residuals")
    for text, kept in state[what].items():
        check_entries(kept, entries, f"the residual of {text!r}")


def check_widths(residuals: Residuals, size: int) -> None:
    """Check that each reduced residual is a row of its piece, or empty."""
    for (name, offset), (sent, *reduced) in residuals.items():
        numel, wanted = sum(each.numel() for each in reduced), width_of(sent.numel(), size)
        if numel not in (0, wanted):
            raise StateMismatch(
                f"the reduced residual of parameter {name!r} at offset {offset} has {numel} "
                f"elements, expected {wanted}: the state is damaged, or of another model"
            )


def spread(totals: dict[Key, torch.Tensor], size: int) -> Residuals:
    """Make the residuals of one of ``size`` ranks, so that their R is ``totals``."""
    return {
        key: (total, torch.zeros(width_of(total.numel(), size))) for key, total in totals.items()
    }


def _from_exact(states: Sequence[dict[str, Any]]) -> dict[Key, torch.Tensor]:
    """Compute R of every piece from the exact states of all ranks."""
    if any(s.get("nodes") for s in states):
        raise StateMismatch(
            "the states were saved with a topology: to change the world size save with "
            "elastic_state_dict()"
        )
    for state in states:
        pairs = {key_of(k): (v["sent"], v["reduced"]) for k, v in state["residuals"].items()}
        check_widths(pairs, state["size"])
    states = _whole(states, "residuals")
    totals: dict[Key, torch.Tensor] = {}
    for text in states[0]["residuals"]:
        kept = [s["residuals"][text] for s in states]
        parts = [each["sent"].clone() for each in kept]
        for rank, each in enumerate(kept):
            add_reduced(parts[rank], each["reduced"], rank, len(kept))
        totals[key_of(text)] = torch.stack(parts).mean(0)
    return totals


def _whole(states: Sequence[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """Sort states by rank; raise unless they are those of all ranks after the same step."""
    size = states[0]["size"]
    ranks = sorted(s["rank"] for s in states)
    if ranks != list(range(size)) or len({(s["step"], *sorted(s[what])) for s in states}) > 1:
        raise StateMismatch(
            f"a state of {size} ranks needs all {size} parts of one step, got those of ranks "
            f"{ranks} at steps {sorted({s['step'] for s in states})}, not all with the same "
            "parameters or not all there"
        )
    return sorted(states, key=lambda s: s["rank"])


def _nodes(nodes: str) -> str:
    return f"nodes {nodes!r}" if nodes else "no topology"


def totals_of(states: Sequence[dict[str, Any]]) -> dict[Key, torch.Tensor]:
    """Compute R of every piece."""
    states = _whole(states, "shards")
    totals: dict[Key, torch.Tensor] = {}
    for text in states[0]["shards"]:
        numel = states[0]["shards"][text]["numel"]
        total = torch.zeros(numel, dtype=torch.float32)
        for state in states:
            shard = state["shards"][text]
            total[shard["start"] : shard["start"] + shard["values"].numel()] = shard["values"]
        totals[key_of(text)] = total
    return totals


def check_fit(
    residuals: Residuals,
    numels: dict[str, int],
    lengths: dict[Key, int] | None = None,
    *,
    size: int,
) -> None:
    """Check that every residual fits a parameter in ``numels``; ``lengths`` gives pieces other than
    the usual ones, which ``size`` ranks cut into rows."""
    for (name, offset), (sent, *_) in residuals.items():
        if name not in numels:
            raise StateMismatch(
                f"the state has a residual of {name!r}, but the model has no such parameter: load "
                "the state of this model, saved with the same named_parameters"
            )
        wanted = (
            min(PIECE, numels[name] - offset) if lengths is None else lengths.get((name, offset))
        )
        if sent.numel() != wanted:
            raise StateMismatch(
                f"the state has {sent.numel()} residuals of {name!r} from element {offset} on, but "
                f"that parameter has {numels[name]} elements, "
                f"{f'cut every {PIECE}' if lengths is None else f'of which {wanted} from there'}: "
                "load the state of this model"
            )
    if lengths is None:
        check_widths(residuals, size)


def _head(kind: str, transport: Ranked, step: int) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "kind": kind,
        "rank": transport.rank,
        "size": transport.size,
        "step": step,
    }


def text_of(key: Key) -> str:
    """Return the text under which a residual is saved."""
    return f"{key[0]}@{key[1]}"


def key_of(text: str) -> Key:
    name, _, offset = text.rpartition("@")
    return name, int(offset)
