"""The collectives of one rank on which not all have agreed yet, in order, and what the peers have said.

Note: two kinds wait here. A call that all have promised (``forecast``) begins at once, and is checked when something is late
or on occasion; any other begins when every peer has said it. The transport tells calls apart by their order, so one begins
only after those before it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from commpress.integrations.process_group.calls import GroupWork, described
from commpress.integrations.process_group.forecast import NOTHING, Forecast, checksum
from commpress.integrations.process_group.records import RECORD, SAID, Record, unpack

BATCH = 8  # calls begun on promises are said together, so many at a time: half of the promises' lead


class Said:
    """What is kept of a call that has begun: not the call, which would keep its tensors alive."""

    def __init__(self, work: GroupWork) -> None:
        self.number, self.expected = work.number, work.expected

    def describe(self) -> str:
        return described(self.expected)


class Ledger:
    """``forecasts``: whether calls may begin on promises."""

    def __init__(self, peers: Iterable[int], *, forecasts: bool) -> None:
        self.begun: deque[Said] = deque()  # on promises; every peer has still to say them, or to be heard
        self.waiting: deque[GroupWork] = deque()
        self.unsaid, self.foreseen = bytearray(), 0  # records; calls that began on promises
        self._heard: dict[int, deque[bytes]] = {peer: deque() for peer in peers}
        self._counts = dict.fromkeys(self._heard, 0)  # collectives that each peer has said
        self._forecast = Forecast(self._heard) if forecasts else None
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self.begun or self.waiting)

    # ------------------------------------------------------------ what this rank says

    def enter(self, work: GroupWork, said: bytes) -> None:
        """A call that is said alike to every peer: its words are among ``unsaid``."""
        call = checksum(said) if work.foreseeable else NOTHING
        number, promise = self._entered(work, call)
        record = said[:8] + number + said[12:SAID]
        work.expected = dict.fromkeys(self._heard, record)
        self.unsaid += record + promise

    def enter_each(self, work: GroupWork, said: dict[int, bytes], expected: dict[int, bytes]) -> dict[int, bytes]:
        """One that is said differently: what to tell each peer, after ``unsaid``. Nobody foresees such a call."""
        number, promise = self._entered(work, NOTHING)
        work.expected = {peer: e[:8] + number + e[12:SAID] for peer, e in expected.items()}
        return {peer: s[:8] + number + s[12:SAID] + promise for peer, s in said.items()}

    def _entered(self, work: GroupWork, call: int) -> tuple[bytes, bytes]:
        work.number, work.call = self._number, call
        self._number += 1
        self.waiting.append(work)
        promise = self._forecast.promise(work.number, call) if self._forecast is not None else NOTHING
        return (work.number & 0xFFFFFFFF).to_bytes(4, "little"), promise.to_bytes(RECORD - SAID, "little")

    def take_unsaid(self, least: int = 1) -> bytes:
        """The records to be said, unless they are fewer than ``least``."""
        if len(self.unsaid) < least * RECORD:
            return b""
        words, self.unsaid = bytes(self.unsaid), bytearray()
        return words

    # ------------------------------------------------------------ what peers say

    def note(self, peer: int, data: bytes) -> None:
        self._heard[peer].append(data[:SAID])
        if self._forecast is not None:
            self._forecast.promised(peer, self._counts[peer], int.from_bytes(data[SAID:], "little"))
        self._counts[peer] += 1

    def begin_foreseen(self, begin: Callable[[GroupWork], object]) -> bool:
        """Begin the calls next in order that all have promised; whether none is left that waits."""
        while self.waiting and self._forecast is not None:
            work = self.waiting[0]
            if not work.call or not self._forecast.certain(work.number, work.call):
                return False
            self.waiting.popleft()
            self.begun.append(Said(work))
            self.foreseen += 1
            begin(work)
        return not self.waiting

    def oldest(self) -> Said | GroupWork:
        """The oldest call, which has begun if it is ``Said``."""
        return self.begun[0] if self.begun else self.waiting[0]

    def wrong(self) -> list[tuple[int, bytes]]:
        """The peers that have said something else than the oldest call, and what."""
        expected = self.oldest().expected
        return [(peer, heard[0]) for peer, heard in self._heard.items() if heard and heard[0] != expected[peer]]

    def missing(self) -> list[int]:
        """The peers that have not said the oldest call."""
        return [peer for peer, heard in self._heard.items() if not heard]

    def agreed(self) -> None:
        """All have said the oldest call."""
        work = self.begun.popleft() if self.begun else self.waiting.popleft()
        for heard in self._heard.values():
            heard.popleft()
        if self._forecast is not None:
            self._forecast.forget(work.number)

    # ------------------------------------------------------------ who is late

    def awaited(self) -> list[int]:
        """The peers that have not said the oldest call that has not begun."""
        place = len(self.begun)
        return [peer for peer, heard in self._heard.items() if len(heard) <= place] if self.waiting else []

    def late(self, work: GroupWork) -> list[int]:
        """The peers of ``work`` that have not said it."""
        place = next((i for i, each in enumerate(self) if each.number == work.number), None)
        return [peer for peer in work.expected if place is None or len(self._heard[peer]) <= place]

    def does_instead(self, peer: int) -> Record | None:
        """A collective that this peer has said and that this rank has not come to."""
        heard, place = self._heard[peer], len(self.begun) + len(self.waiting)
        return unpack(heard[place]) if len(heard) > place else None

    def __contains__(self, work: GroupWork) -> bool:
        return any(each.number == work.number for each in self)

    def __iter__(self) -> Iterator[Said | GroupWork]:
        yield from self.begun
        yield from self.waiting

    def clear(self) -> None:
        self.begun.clear()
        self.waiting.clear()
