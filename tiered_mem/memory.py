"""A memory tier: one arena, allocated at the start, from which tensors get contiguous, page-aligned slots."""

import contextlib
import mmap
from dataclasses import dataclass

import torch

from commpress.errors import InvalidArgument
from commpress.tiered_mem.extents import Extents
from commpress.tiered_mem.layer import PAGE


@dataclass(eq=False, slots=True)
class Slot:
    """A taken range of an arena."""

    offset: int
    length: int


@dataclass
class Crossing:
    """Bytes copied between host memory and where a model computes: over PCIe, if that is a device. On a processor, which is
    both, those that would be."""

    up: int = 0  # to the model
    down: int = 0  # and from it


class Arena:
    """``capacity`` bytes in host memory (huge pages where the kernel has them) or on a device. Not thread-safe."""

    def __init__(self, capacity: int, device: torch.device | None = None) -> None:
        self.device = device
        self.capacity = capacity // PAGE * PAGE
        self.free = Extents(self.capacity)
        self.pinned = False
        if device is None:
            self._memory = mapped(max(self.capacity, PAGE))
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            self._view: memoryview | None = memoryview(self._memory)
        else:
            self.bytes, self._view = torch.empty(self.capacity, dtype=torch.uint8, device=device), None

    @property
    def used(self) -> int:
        return self.capacity - self.free.free

    def take(self, nbytes: int) -> Slot | None:
        length = padded(nbytes)
        offset = self.free.take(length)
        return None if offset is None else Slot(offset, length)

    def give(self, slot: Slot) -> None:
        self.free.give(slot.offset, slot.length)

    def view(self, slot: Slot, start: int, length: int) -> memoryview:
        """Bytes of a slot for a read or a write; host only."""
        assert self._view is not None
        assert start + length <= slot.length
        return self._view[slot.offset + start : slot.offset + start + length]

    def whole(self) -> memoryview:
        assert self._view is not None
        return self._view

    def tensor(self, slot: Slot, start: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        begin = slot.offset + start
        return self.bytes[begin : begin + nbytes].view(dtype).view(shape)

    def flat(self, slot: Slot) -> torch.Tensor:
        return self.bytes[slot.offset : slot.offset + slot.length]

    def touch(self) -> None:
        """Have the kernel back every page now: no surprise later, and no page fault on a hot path."""
        if self._view is not None:
            self.bytes.zero_()

    def pin(self) -> None:
        """Register the arena with CUDA, once, so that copies to and from the device are asynchronous and fast."""
        status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.capacity, 0)
        if int(status):
            raise InvalidArgument(
                f"CUDA cannot pin {self.capacity} bytes of host memory (error {int(status)}): "
                "lower host=, or raise the limit of locked memory (ulimit -l)"
            )
        self.pinned = True

    def close(self) -> None:
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.pinned = False


def mapped(nbytes: int) -> mmap.mmap:
    """Anonymous memory in huge pages, which the kernel gives private memory only: disks read a quarter more per second into
    them. A forked child gets none of it: nothing is copied, and no read under way lands in a page that is the child's now."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except AttributeError:  # not a Unix
        return mmap.mmap(-1, nbytes)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(getattr(mmap, advice))
    return memory


def padded(nbytes: int, unit: int = PAGE) -> int:
    return max(unit, -(-nbytes // unit) * unit)
