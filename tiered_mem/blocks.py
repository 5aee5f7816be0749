"""A block: tensors that lie side by side, move together and share chunks. One large tensor, or a pack of small ones."""

from collections import Counter
from dataclasses import dataclass, field

import torch

from commpress.errors import Damaged, InvalidArgument
from commpress.tiered_mem.manifest import DTYPES, LONGEST_NAME, Chunk, Entry, Row, strides_fit
from commpress.tiered_mem.memory import Arena, Slot
from commpress.tiered_mem.pending import Pending


@dataclass(eq=False)
class Use:
    """Who has one tensor: any number of readers, or one writer."""

    readers: Counter[object] = field(default_factory=Counter)
    writer: object = None

    def __bool__(self) -> bool:
        return bool(self.readers) or self.writer is not None

    def holders(self) -> set[object]:
        return set(self.readers) | ({self.writer} if self.writer is not None else set())


@dataclass(eq=False)
class Block:
    """Everything here is guarded by the store's lock, but for the bytes: those belong to whoever borrows or moves them."""

    number: int
    size: int = 0  # bytes in use
    capacity: int = 0  # bytes of the slot of a pack that is still being filled
    entries: dict[str, Entry] = field(default_factory=dict)
    chunks: tuple[Chunk, ...] = ()  # on disk; current unless dirty
    dirty: bool = False
    arena: Arena | None = None
    slot: Slot | None = None
    uses: dict[str, Use] = field(default_factory=dict)
    moving: Pending[None] | None = None  # being read, written or copied
    flushing: bool = False  # being written: may be read meanwhile
    leaving: bool = False  # give the memory back as soon as it is clean and unused
    frozen: bool = False  # a commit still needs the bytes as they are
    pinned: bool = False
    prefetched: bool = False  # read ahead and not used since
    failure: BaseException | None = None  # of the last write
    damage: Damaged | None = None  # of the bytes on disk
    event: "torch.cuda.Event | None" = None  # the device's last use of the bytes

    @property
    def used(self) -> bool:
        return any(self.uses.values())

    @property
    def written(self) -> bool:
        """Somebody may be changing the bytes."""
        return any(use.writer is not None for use in self.uses.values())

    @property
    def idle(self) -> bool:
        """Nobody uses it, moves it or needs it as it is."""
        return not (self.uses or self.moving or self.frozen)

    @property
    def live(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def row(self) -> Row:
        return Row(self.size, tuple(self.entries.values()), self.chunks)

    def settle(self) -> None:
        """Wait until the device is done with the bytes."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None


def entry_of(name: str, tensor: torch.Tensor, start: int = 0) -> Entry:
    """Where and what a tensor is; refuses what cannot be stored."""
    if not isinstance(name, str) or not name or len(name.encode(errors="surrogatepass")) > LONGEST_NAME:
        raise InvalidArgument(f"name is {name!r:.100}, expected a text of 1 to {LONGEST_NAME} bytes")
    if "\0" in name:
        raise InvalidArgument(f"name is {name!r:.100}, expected a text without the character 0")
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise InvalidArgument(f"name {name!r} holds half a character (a surrogate), which no file can keep")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise InvalidArgument(
            f"{name!r} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, expected a dense one of "
            f"{', '.join(DTYPES)}"
        )
    if not strides_fit(tensor.shape):
        raise InvalidArgument(f"{name!r} has shape {tuple(tensor.shape)}, whose strides are beyond 64 bits")
    return Entry(name, start, tensor.numel() * tensor.element_size(), dtype, tuple(tensor.shape))


def aligned(start: int, entry: Entry) -> int:
    """Where a tensor may begin in a pack: packed tightly if it is tiny."""
    unit = 64 if entry.nbytes >= 4096 else DTYPES[entry.dtype].itemsize
    return -(-start // unit) * unit
