"""Free space as ranges: best fit, neighbours merge. Used for files and for memory."""

from bisect import bisect_left, insort


class Extents:
    """Not thread-safe. All lengths are multiples of one unit that the caller keeps to."""

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
        """The offset of ``length`` free bytes, now taken, or None. The smallest range that fits is cut."""
        at = bisect_left(self._sorted, (length, 0))
        if at == len(self._sorted):
            return None
        whole, offset = self._sorted[at]
        self._remove(offset, whole)
        if whole > length:
            self._add(offset + length, whole - length)
        return offset

    def claim(self, offset: int, length: int) -> bool:
        """Take exactly this range; False, and nothing changes, if a part of it is not free."""
        for start in reversed(self._length):  # claimed in order, the range cut last comes first
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
        if offset in self._offset:  # a free range ends here
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
