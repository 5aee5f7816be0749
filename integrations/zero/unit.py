"""Parameters of a streamed model that come and go together.

    store   pieces of the own row            in parameters' dtype
    flat    [ P · width ]                    there only while somebody holds the unit; parameters are views of it

Note: one storage for good. What autograd saves of a parameter, such as a transposed view, keeps the storage of ``flat``. So
its bytes are given back and taken anew, and the storage stays: what was saved in forward is whole again in backward.
Between, a parameter is one NaN seen as its shape: whoever reads it outside of its block gets NaN instead of a crash.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from commpress.collectives.reduce_scatter import gather_rows
from commpress.integrations.zero.bucket import ALIGN, Layout, Member
from commpress.integrations.zero.gradients import Channel
from commpress.integrations.zero.options import Place
from commpress.tiered_mem import TieredStore
from commpress.work import Steps


@dataclass(frozen=True)
class Piece:
    """A run of a unit's own row: one tensor of the store."""

    name: str
    start: int
    numel: int

    def of(self, row: torch.Tensor) -> torch.Tensor:
        return row[self.start : self.start + self.numel]


class Unit(Layout):
    """``holders`` counts who needs the values now."""

    def __init__(
        self, number: int, name: str, members: Sequence[Place], *, rank: int, ranks: int, prefix: str, numel: int
    ) -> None:
        super().__init__(number, members, rank=rank, ranks=ranks)
        self.name, self.holders = name, 0
        self.kept, self.shared = False, False
        numel = max(numel // ALIGN, 1) * ALIGN
        owned = -(-self.owned // ALIGN) * ALIGN
        self.pieces = [
            Piece(f"{prefix}/{number:05d}/{start // numel:04d}", start, min(numel, owned - start))
            for start in range(0, owned, numel)
        ]
        self.flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self._nothing = [nan.expand(m.parameter.shape) for m in self.members]
        self.resize(0)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def present(self) -> bool:
        return self.flat.untyped_storage().nbytes() > 0

    @property
    def row(self) -> torch.Tensor:
        return self.flat[self.first : self.first + self.width]

    def resize(self, nbytes: int) -> None:
        self.flat.untyped_storage().resize_(nbytes)

    def appear(self) -> None:
        """Parameters are views of ``flat``, whose bytes are to be filled."""
        if not self.present:
            self.resize(self.nbytes)
            for member in self.members:
                member.parameter.data = member.view(self.flat)

    def vanish(self) -> None:
        for member, nothing in zip(self.members, self._nothing, strict=True):
            member.parameter.data = nothing
        self.resize(0)

    def fill(self) -> None:
        """From the parameters, wherever they lie now; afterwards they are views of ``flat``."""
        self.resize(self.nbytes)
        self.flat.zero_()
        for member in self.members:
            view = member.view(self.flat)
            view.copy_(member.parameter)
            member.parameter.data = view

    def save(self, store: TieredStore) -> None:
        for piece in self.pieces:
            store.put(piece.name, piece.of(self.row))
            store.crossing.down += piece.numel * self.dtype.itemsize

    def load(self, store: TieredStore, row: torch.Tensor) -> None:
        """The own row."""
        for piece in self.pieces:
            with store.borrow(piece.name, write=False) as held:
                piece.of(row).copy_(held)
            store.crossing.up += piece.numel * self.dtype.itemsize

    @torch.no_grad()
    def read(self, store: TieredStore, member: Member) -> torch.Tensor:
        """A parameter's values, of what this rank owns."""
        values = torch.zeros(member.parameter.shape, dtype=self.dtype, device=self.device)
        for piece, here, there in self._of(member):
            with store.borrow(piece.name, write=False) as held:
                values.view(-1)[there].copy_(held[here])
        return values

    def write(self, store: TieredStore, member: Member) -> None:
        """Those that it has in memory now, as far as this rank owns them, to the store."""
        for piece, here, there in self._of(member):
            with store.borrow(piece.name) as held:
                held[here].copy_(member.view(self.flat).view(-1)[there])

    def _of(self, member: Member) -> Iterator[tuple[Piece, slice, slice]]:
        """(piece, elements of it, elements of the parameter) for what this rank owns."""
        for other, start, place in self.overlaps():
            for piece in self.pieces if other is member else ():
                low, high = max(place.start, piece.start), min(place.stop, piece.start + piece.numel)
                if low < high:
                    first = start + low - place.start
                    yield piece, slice(low - piece.start, high - piece.start), slice(first, first + high - low)

    def gather(self, store: TieredStore, channel: Channel, sequence: int) -> Steps[None]:
        """The rows of all ranks, by way of scratch: kernels see tensors as arrays, whose storage then keeps its size."""
        row = channel.scratch.lend(self.width, torch.float32, self.device)
        flat = channel.scratch.lend(self.numel, torch.float32, self.device)
        self.load(store, row)
        yield from gather_rows(
            row, flat, plan=self.gather_plan, transport=channel.transport, workspace=channel.scratch, sequence=sequence
        )
        self.flat.copy_(flat)
        channel.scratch.take_back(row, flat)


@dataclass(frozen=True)
class Home:
    """Where the values of a streamed parameter live; ``parameter.home``."""

    owner: object
    unit: Unit
