"""What comes next, from what has come before: programs repeat themselves, so ranks can agree on calls ahead of time.

With each call a rank promises one ``AHEAD`` calls on, by a checksum of its record: under that number it will hand to the
transport no other call, unless all ranks have said that one. Where all have promised what this rank calls, itself included,
the call can start at once. A promise costs nothing and binds nobody: who calls something else says so and waits for the others,
who cannot have begun, or have begun what was promised and disagree.
"""

from collections.abc import Iterable
from functools import lru_cache
from zlib import crc32

from commpress.integrations.process_group.records import SAID

AHEAD = 16
NOTHING = 0  # no promise
_DEPTHS = (8, 2)  # so many calls before are alike where the past is taken for the future: the longer, the surer
_MEMORY = 1 << 16  # calls remembered


@lru_cache(maxsize=1024)
def checksum(record: bytes) -> int:
    """Of what a record says, its number left out."""
    return crc32(record[12:SAID], crc32(record[:8])) or 1


class Forecast:
    def __init__(self, peers: Iterable[int]) -> None:
        self._past: list[int] = []
        self._seen: list[dict[tuple[int, ...], int]] = [{} for _ in _DEPTHS]  # the calls before → how many had been made
        self._mine: dict[int, int] = {}  # number → checksum
        self._theirs: dict[int, dict[int, int]] = {peer: {} for peer in peers}

    def promise(self, number: int, call: int) -> int:
        """For number ``number`` + AHEAD, when this rank makes ``call``; NOTHING if nothing is known."""
        promised = self._next(call)
        if promised:
            self._mine[number + AHEAD] = promised
        return promised

    def promised(self, peer: int, number: int, promise: int) -> None:
        """``peer`` has promised, with its call ``number``."""
        if promise:
            self._theirs[peer][number + AHEAD] = promise

    def certain(self, number: int, call: int) -> bool:
        """Whether all ranks have promised this call."""
        if self._mine.get(number) != call:
            return False
        return all(promises.get(number) == call for promises in self._theirs.values())

    def forget(self, number: int) -> None:
        self._mine.pop(number, None)
        for promises in self._theirs.values():
            promises.pop(number, None)

    def _next(self, call: int) -> int:
        """What came AHEAD calls after the last time that the same calls came, the past repeated where it is too short."""
        past = self._past
        if len(past) == _MEMORY:
            past.clear()
            for seen in self._seen:
                seen.clear()
        past.append(call)
        count, found = len(past), 0
        for depth, seen in zip(_DEPTHS, self._seen, strict=True):
            if count >= depth:
                before = tuple(past[-depth:])
                found = found or seen.get(before, 0)
                seen[before] = count
        return past[found + (AHEAD - 1) % (count - found)] if found else NOTHING
