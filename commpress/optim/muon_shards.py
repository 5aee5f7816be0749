"""Muon where every rank has some rows of each parameter, as under ``fully_shard``, which has
averaged their gradients.

    to the owner   rows of g + e in ``codec``, e keeps the rest                       (all-to-all)
    at the owner   m and u as in ``muon``, from all rows
    back           rows of Q(u + f) in ``update_codec``, f keeps the rest             (all-to-all)

Matrices take turns: beside its state a rank has the matrices of one turn, and the rows of one.

Note: all ranks first say whether their gradients are finite, so that a step is left out before
anything has changed.
"""

from collections.abc import Container, Mapping, Sequence
from math import isfinite
from typing import Any

import torch

from commpress.codecs import Codec
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import MESSAGE
from commpress.collectives.channel import Channel
from commpress.collectives.frame import HEADER
from commpress.collectives.owned_rows import OwnedRows, Turn, Whole, turns
from commpress.collectives.transports.factory import DeviceMesh
from commpress.errors import InvalidArgument, StateMismatch, check_entries
from commpress.feedback import Key
from commpress.optim.flat import Flat
from commpress.optim.layout import box_of, is_cut, local
from commpress.optim.newton_schulz import direction, move, owners_of
from commpress.work import Steps

Groups = Sequence[dict[str, Any]]  # the group of each parameter


def mesh_of(parameters: Sequence[Any], names: Sequence[str]) -> DeviceMesh | None:
    """Return the mesh whose ranks have rows of every parameter; None if all are whole."""
    cut: Any = next((p for p in parameters if is_cut(p)), None)
    for name, p in zip(names, parameters, strict=True) if cut is not None else ():
        if not is_cut(p):
            raise InvalidArgument(
                f"parameter {name!r} is a plain tensor and others are DTensors, whose gradients "
                "are averaged already: make one Muon for each kind, or shard it with fully_shard"
            )
        if p.device_mesh.ndim != 1 or not p.placements[0].is_shard(0):
            raise InvalidArgument(
                f"parameter {name!r} is a DTensor placed {p.placements} on {p.device_mesh}, and "
                "Muon takes rows over a mesh of one dimension, Shard(0), as fully_shard makes "
                "them: shard the model so, without tensor parallelism and replicas (HSDP)"
            )
        if p.device_mesh != cut.device_mesh:
            raise InvalidArgument(
                f"parameter {name!r} is on {p.device_mesh} and another on {cut.device_mesh}: make "
                "one Muon for each mesh"
            )
    return None if cut is None else cut.device_mesh


class MuonShards:
    """Matrices of a Muon of which every rank has some rows, and momentum of those it owns.

    - ``numbers``: which parameters are matrices that travel.
    - ``batches``: momentum of parameters with matrices that are whole on their rank, as experts
      are; none of these travels.
    """

    def __init__(
        self,
        flat: Flat,
        groups: Groups,
        channel: Channel,
        there: Codec,
        back: Codec,
        *,
        lossless: bool,
    ) -> None:
        self.flat, self.channel = flat, channel
        muon = [i for i, group in enumerate(groups) if group["use_muon"]]
        self.numbers = numbers = [i for i in muon if flat.parameters[i].ndim == 2]
        self.batches = {
            i: torch.zeros(flat.shapes[i], device=flat.device) for i in muon if i not in numbers
        }
        self.shapes = [torch.Size(flat.parameters[i].shape) for i in numbers]
        named = [(flat.names[i], shape) for i, shape in zip(numbers, self.shapes, strict=True)]
        splits = [groups[i].get("split") for i in numbers]
        owners = owners_of(self.shapes, channel.size, splits)
        self.turns = turns(named, owners, channel.size)
        channel.workspace.pooled = True  # messages of turns differ in length
        among = channel, flat.device
        self.gradients = OwnedRows(self.turns, there, *among, back=False)
        self.updates = OwnedRows(self.turns, back, *among, back=True, feedback=not lossless)
        self.rows = torch.zeros(max(turn.rows for turn in self.turns), device=flat.device)
        self.whole = torch.zeros(max(turn.whole for turn in self.turns), device=flat.device)
        self.momentum = {
            i: torch.zeros(shape, device=flat.device)
            for i, shape, owner in zip(numbers, self.shapes, owners, strict=True)
            if owner == channel.rank
        }

    # ------------------------------------------------------------ one step

    def agreed(self) -> Steps[tuple[bool, set[int]]]:
        """Return whether all gradients are finite, and which parameters have one, on any rank."""
        gradients = [p.grad for p in self.flat.parameters]
        finite = all(g is None or is_finite(local(g)) for g in gradients)
        votes = [float(finite), *(float(g is not None) for g in gradients)]
        every = yield from self.channel.gathered(votes)
        trained = {i for i in range(len(gradients)) if every[:, i + 1].any()}
        return bool(every[:, 0].all()), trained

    def steps(self, groups: Groups, trained: Container[int], *, key: int) -> Steps[bool]:
        """Take the step of all matrices; return whether all updates were finite. One that is not is
        left out."""
        finite = True
        for number, turn in enumerate(self.turns):
            finite &= yield from self._turn(number, turn, groups, trained, key)
        for i, momentum in self.batches.items():
            if i in trained:
                self._batch(i, momentum, groups[i])
        return finite

    def _batch(self, i: int, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        """Take the step of matrices that are whole on this rank, as many at once as hold a
        message."""
        count = max(MESSAGE // self.channel.size // max(momentum[:1].numel(), 1), 1)
        gradient = self.flat.gradient(i)
        for first in range(0, len(momentum), count):
            part = slice(first, first + count)
            mine = momentum[part]
            mean = torch.zeros_like(mine) if gradient is None else gradient[part].clone()
            mine.lerp_(mean, 1 - group["momentum"])
            move(self.flat.weights[i][part], direction(mean, mine, group), group)

    def _turn(
        self, number: int, turn: Turn, groups: Groups, trained: Container[int], key: int
    ) -> Steps[bool]:
        for each in turn.tensors:
            gradient, into = self.flat.parameters[self.numbers[each.number]].grad, self._rows(each)
            into.zero_() if gradient is None else into.copy_(local(gradient))
        outcomes = yield from self.gradients.move(number, self.rows, self.whole, key=key)
        finite = all(outcome.finite for outcome in outcomes)
        settle(outcomes, taken=finite)
        if not finite:
            return False
        still = []  # without a gradient: an update lacks what it lacked
        for each in turn.tensors:
            i, shape = self.numbers[each.number], self.shapes[each.number]
            if i not in trained:
                still.append(each.name)
            if i in self.momentum:
                mean = self.whole[each.place :][: each.numel].view(shape)
                momentum, rest = self.momentum[i], 1 - groups[i]["momentum"]
                if i in trained:
                    mean.copy_(direction(mean, momentum.lerp_(mean, rest), groups[i]))
                else:  # only what gradients lacked before has come
                    momentum.add_(mean, alpha=rest)
                    mean.zero_()
        lacking = {key: sent.clone() for key, sent in self._lacking(still).items()}
        outcomes = yield from self.updates.move(number, self.whole, self.rows, key=~key)
        finite = all(outcome.finite for outcome in outcomes)
        settle(outcomes, taken=finite)
        for key_of, sent in self._lacking(still).items() if finite else ():
            sent.copy_(lacking[key_of])
        for each in turn.tensors if finite else ():
            i = self.numbers[each.number]
            if i in trained:
                p, weights = self.flat.parameters[i], self.flat.weights[i]
                begin, rows = box_of(p)["begin"][0], p.shape[0]
                move(weights, self._rows(each), groups[i], begin, rows)
        return finite

    def _rows(self, each: Whole) -> torch.Tensor:
        shape = self.flat.shapes[self.numbers[each.number]]
        return self.rows[each.at :][: shape.numel()].view(shape)

    def _lacking(self, names: Container[str]) -> dict[Key, torch.Tensor]:
        """Return what updates of these matrices lack, in use."""
        if not names:
            return {}
        places = self.updates.residuals.places()
        return {key: sent for key, sent, _ in places if key[0] in names}

    @property
    def sent_bytes(self) -> int:
        """Bytes, headers included, that this rank sends in a step."""
        votes = HEADER + 8 * (1 + len(self.flat.parameters))
        messages = (*self.gradients.plan, *self.updates.plan)
        return (self.channel.size - 1) * (votes + sum(deal.size for deal in messages))


def is_finite(values: torch.Tensor) -> bool:
    return not values.numel() or all(isfinite(end) for end in map(float, values.aminmax()))


# ---------------------------------------------------------------- state

Kept = Mapping[str, Mapping[str, torch.Tensor]]  # tensors of each parameter


def rows_state(parameters: Mapping[str, torch.Tensor], kept: Kept) -> dict[str, Any]:
    """Return this rank's rows of ``kept``, and where they begin."""
    return {
        name: {"begin": box_of(parameters[name])["begin"][0]}
        | {kind: rows.clone() for kind, rows in tensors.items()}
        for name, tensors in kept.items()
    }


def rows_joined(
    states: Sequence[Mapping[str, Any]], parameters: Mapping[str, torch.Tensor], kept: Kept
) -> dict[str, dict[str, torch.Tensor]]:
    """Cut this rank's rows from those in its own state, or in the states of all ranks."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensors in kept.items():
        for state in states:
            check_entries(state["rows"], (name,), "the rows of the state")
            check_entries(state["rows"][name], ("begin", *tensors), f"the rows of {name!r}")
        parts = sorted((state["rows"][name] for state in states), key=lambda part: part["begin"])
        first = box_of(parameters[name])["begin"][0] - parts[0]["begin"]
        found[name] = {
            kind: torch.cat([part[kind] for part in parts])[first:][: len(rows)]
            for kind, rows in tensors.items()
        }
        for kind, rows in found[name].items():
            if first < 0 or rows.shape != tensors[kind].shape:
                raise StateMismatch(
                    f"the state has {kind!r} of {name!r} with shape {tuple(rows.shape)}, expected "
                    f"{tuple(tensors[kind].shape)}: load the states of all ranks, of this model"
                )
    return found
