"""Parameters cut into chunks of about equal length, whose master weights and moments are tensors of a store.

Cuts lie at multiples of ``ALIGN`` elements of a parameter: see the note on vectors in ``bucket``. A streamed parameter's
chunks are the pieces of its unit; in float32 a piece is itself the master weight.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from commpress.integrations.zero.bucket import ALIGN
from commpress.integrations.zero.options import Place
from commpress.integrations.zero.shards import local
from commpress.integrations.zero.unit import Home, Unit
from commpress.tiered_mem import TieredStore

WEIGHT, GRADIENT = "weight", "gradient"


@dataclass(frozen=True, eq=False)
class Run:
    """Elements of one parameter, of what this rank has of it, in a chunk."""

    parameter: torch.Tensor
    name: str
    index: int  # of the parameter, among all
    group: int
    start: int  # first element in the parameter
    at: int  # and in the chunk
    numel: int

    def inside(self, chunk: torch.Tensor) -> torch.Tensor:
        return chunk[self.at : self.at + self.numel]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor of the parameter's shape, which is cut as the parameter is."""
        return local(whole).detach().view(-1)[self.start : self.start + self.numel]


@dataclass(eq=False)
class Chunk:
    number: int
    prefix: str
    runs: list[Run] = field(default_factory=list)
    numel: int = 0
    piece: str = ""  # streamed: the parameters' own values in the store, in their dtype
    tier: str = "disk"  # where it is between steps
    master: str = ""  # the store's name of the float32 weights
    keys: list[str] = field(default_factory=list)  # moments that the store holds
    scalars: dict[str, Any] = field(default_factory=dict)  # the rest of the state, such as the number of steps
    stepped: bool = False

    def __post_init__(self) -> None:
        self.master = self.master or self.name(WEIGHT)

    def name(self, key: str) -> str:
        return f"{self.prefix}/{self.number:06d}/{key}"

    @property
    def on(self) -> Literal["host", "device"]:
        """Where it is updated."""
        return "device" if self.tier == "device" else "host"

    @property
    def gaps(self) -> bool:
        return self.numel != sum(run.numel for run in self.runs)

    @property
    def copied(self) -> bool:
        """The streamed values are not the master weights, and follow them."""
        return bool(self.piece) and self.piece != self.master

    def names(self) -> list[str]:
        """All but the gradient."""
        return [self.master, *([self.piece] if self.copied else []), *(self.name(key) for key in self.keys)]

    @contextmanager
    def borrowed(self, store: TieredStore, *, write: bool = True) -> Iterator[dict[str, torch.Tensor]]:
        names = {WEIGHT: self.master} | {key: self.name(key) for key in self.keys}
        with ExitStack() as stack:
            yield {key: stack.enter_context(store.borrow(name, on=self.on, write=write)) for key, name in names.items()}


def chunks(groups: Sequence[Sequence[Place]], numel: int, prefix: str) -> list[Chunk]:
    result: list[Chunk] = []
    numel = max(numel // ALIGN, 1) * ALIGN
    for number, group in enumerate(groups):
        chunk: Chunk | None = None
        for parameter, name, index in group:
            start, numel_here = 0, local(parameter).numel()
            while start < numel_here and not hasattr(parameter, "home"):
                if chunk is None or chunk.numel >= numel:
                    chunk = Chunk(len(result), prefix)
                    result.append(chunk)
                count = min(numel_here - start, numel - chunk.numel)
                chunk.runs.append(Run(parameter, name, index, number, start, chunk.numel, count))
                chunk.numel += -(-count // ALIGN) * ALIGN
                start += count
    return result + _streamed(groups, prefix, len(result))


def _streamed(groups: Sequence[Sequence[Place]], prefix: str, first: int) -> list[Chunk]:
    """One chunk for each piece of a unit that has a parameter among ``groups``."""
    known = {id(p): (name, index, number) for number, group in enumerate(groups) for p, name, index in group}
    units: dict[Unit, None] = {}
    for group in groups:
        units |= {home.unit: None for p, _, _ in group if isinstance(home := getattr(p, "home", None), Home)}
    result: list[Chunk] = []
    for unit in sorted(units, key=lambda unit: unit.number):
        for piece in unit.pieces:
            master = piece.name if unit.dtype == torch.float32 else ""
            chunk = Chunk(first + len(result), prefix, numel=piece.numel, piece=piece.name, master=master)
            for member, start, place in unit.overlaps():
                low, high = max(place.start, piece.start), min(place.stop, piece.start + piece.numel)
                if low < high and id(member.parameter) in known:
                    at = start + low - place.start
                    run = Run(member.parameter, *known[id(member.parameter)], at, low - piece.start, high - low)
                    chunk.runs.append(run)
            if chunk.runs:
                result.append(chunk)
    return result


def readable(gradient: torch.Tensor | None) -> bool:
    """Whether the processor's update can take it where it lies."""
    return (
        gradient is not None
        and gradient.dtype == torch.float32
        and gradient.device.type == "cpu"
        and gradient.layout == torch.strided
        and gradient.is_contiguous()
    )
