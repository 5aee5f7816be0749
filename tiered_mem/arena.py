"""Memory tiers: arenas allocated at the start, which give tensors contiguous, page-aligned slots.

Their bookkeeping of free ranges serves files, too.
"""

import contextlib
import mmap
from bisect import bisect_left, insort
from dataclasses import dataclass

import torch

from commpress.errors import InvalidArgument
from commpress.tiered_mem.layer import PAGE


class Extents:
    """Free space as ranges: best fit, with neighbors merged. Not thread-safe. Callers use multiples
    of one unit."""

    def __init__(self, size: int) -> None:
        self.size, self.free = size, 0
        self._length: dict[int, int] = {}  # offset → length of a free range
        self._offset: dict[int, int] = {}  # end → offset of a free range
        self._sorted: list[tuple[int, int]] = []  # (length, offset)
        if size:
            self.give(0, size)

    @property
    def longest(self) -> int:
        return self._sorted[-1][0] if self._sorted else 0

    def take(self, length: int) -> int | None:
        """Take ``length`` free bytes of the smallest range that fits; return their offset, or
        None."""
        at = bisect_left(self._sorted, (length, 0))
        if at == len(self._sorted):
            return None
        whole, offset = self._sorted[at]
        self._remove(offset, whole)
        if whole > length:
            self._add(offset + length, whole - length)
        return offset

    def claim(self, offset: int, length: int) -> bool:
        """Take exactly this range; return False without a change if a part of it is not free."""
        for start in reversed(self._length):  # in order of claims: newest first
            whole = self._length[start]
            if start <= offset and offset + length <= start + whole:
                self._remove(start, whole)
                if offset > start:
                    self._add(start, offset - start)
                if start + whole > offset + length:
                    self._add(offset + length, start + whole - offset - length)
                return True
        return False

    def give(self, offset: int, length: int) -> None:
        """Give a taken range back."""
        if offset in self._offset:  # end of a free range
            before = self._offset[offset]
            length += offset - before
            self._remove(before, offset - before)
            offset = before
        if (after := offset + length) in self._length:
            more = self._length[after]
            self._remove(after, more)
            length += more
        self._add(offset, length)

    def _add(self, offset: int, length: int) -> None:
        self._length[offset] = length
        self._offset[offset + length] = offset
        insort(self._sorted, (length, offset))
        self.free += length

    def _remove(self, offset: int, length: int) -> None:
        del self._length[offset], self._offset[offset + length]
        del self._sorted[bisect_left(self._sorted, (length, offset))]
        self.free -= length


@dataclass(eq=False, slots=True)
class Slot:
    """A taken range of an arena."""

    offset: int
    length: int


class Arena:
    """Memory of ``capacity`` bytes on the host (in huge pages if the kernel has them) or on a
    device. Not thread-safe."""

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
            self.bytes = torch.empty(self.capacity, dtype=torch.uint8, device=device)
            self._view = None

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

    def tensor(
        self, slot: Slot, start: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        begin = slot.offset + start
        return self.bytes[begin : begin + nbytes].view(dtype).view(shape)

    def flat(self, slot: Slot) -> torch.Tensor:
        return self.bytes[slot.offset : slot.offset + slot.length]

    def touch(self) -> None:
        """Let the kernel allocate every page now, so that there are no page faults later."""
        if self._view is not None:
            self.bytes.zero_()

    def pin(self) -> None:
        """Register the arena with CUDA, once, to make copies to and from the device asynchronous
        and fast."""
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
    """Map anonymous memory in huge pages, into which disks read a quarter more per second; the
    kernel has them for private memory only. A forked child does not get this memory: nothing is
    copied, and no running read writes to a page of the child."""
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
