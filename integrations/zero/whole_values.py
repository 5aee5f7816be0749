"""All values of a streamed model, under the names of the plain one: in memory, or unit by unit to and from a file."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from commpress.integrations.zero.tiling import wholes
from commpress.integrations.zero.weights_file import Reader, Writer


@dataclass(frozen=True)
class Own:
    """A tensor of the model and where it lies in one of the plain model's: all of that, but for tiles."""

    value: torch.Tensor
    name: str
    shape: tuple[int, ...]
    start: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(-1)[self.start : self.start + self.value.numel()].view(self.value.shape)

    @property
    def streamed(self) -> bool:
        return hasattr(self.value, "home")


def every(model: nn.Module) -> list[Own]:
    tiles = wholes(model)
    kept = model.state_dict(keep_vars=True)
    return [Own(value, *tiles.get(name, (name, tuple(value.shape), 0))) for name, value in kept.items()]


def by_unit(streamed: Any, own: list[Own]) -> Iterator[list[Own]]:
    """What lies in one unit after the other, each in memory meanwhile; collective."""
    for unit in streamed.units:
        ids = {id(m.parameter) for m in unit.members}
        with streamed.whole(unit):
            yield [one for one in own if id(one.value) in ids]


def state_dict(streamed: Any) -> dict[str, torch.Tensor]:
    own = every(streamed.model)
    state = {one.name: one.value.new_empty(one.shape) if one.streamed else one.value.detach() for one in own}
    for held in by_unit(streamed, own):
        for one in held:
            one.of(state[one.name]).copy_(one.value.detach())
    return state


def save(streamed: Any, path: str | os.PathLike[str]) -> None:
    """Rank 0 writes."""
    own = every(streamed.model)
    outlines = {one.name: torch.empty(one.shape, dtype=one.value.dtype, device="meta") for one in own}
    with Writer(path, outlines) if streamed.transport.rank == 0 else nullcontext() as writer:
        for one in own:
            if writer and not one.streamed:
                writer.write(one.name, one.value)
        for held in by_unit(streamed, own):
            for one in held:
                if writer:
                    writer.write(one.name, one.value, one.start)


def load(streamed: Any, path: str | os.PathLike[str]) -> None:
    own = {id(one.value): one for one in every(streamed.model)}
    with open(path, "rb") as file:
        reader = Reader(file)
        for unit in streamed.units:
            unit.appear()
            for member in unit.members:
                one = own[id(member.parameter)]
                reader.into(one.name, member.view(unit.flat), one.shape, one.start)
            unit.save(streamed.store)
            streamed.loaded(unit)
            if not unit.kept:
                unit.vanish()
        for one in own.values():
            if not one.streamed:
                reader.into(one.name, one.value)
