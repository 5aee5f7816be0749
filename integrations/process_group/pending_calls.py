"""Calls of one rank to which not all peers have agreed yet: collectives in order, sends and
receives by peer and tag."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from commpress.integrations.process_group.call import GroupWork
from commpress.integrations.process_group.records import RECV, SEND, Record, numbered, unpack

K = TypeVar("K")
V = TypeVar("V")
Place = tuple[int, int, int]  # peer, its operation (SEND or RECV), tag


class PendingCollectives:
    """Queue of collectives waiting for agreement, and of the records of them that have come from
    each peer.

    The transport tells calls apart by their order, so one begins only after those before it.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self._works: deque[GroupWork] = deque()
        self._received: dict[int, deque[bytes]] = {peer: deque() for peer in peers}
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._works)

    def enter(
        self, work: GroupWork, record: bytes | dict[int, bytes], expected: dict[int, bytes] | None
    ) -> dict[int, bytes]:
        """Number a call and queue it; the record that each peer is to get: the same for all, or its
        own."""
        number, self._number = self._number, self._number + 1
        self._works.append(work)
        if isinstance(record, bytes):
            work.expected = dict.fromkeys(self._received, numbered(record, number))
            return work.expected
        assert expected is not None
        work.expected = {peer: numbered(each, number) for peer, each in expected.items()}
        return {peer: numbered(each, number) for peer, each in record.items()}

    def received(self, peer: int, data: bytes) -> None:
        self._received[peer].append(data)

    def oldest(self) -> GroupWork:
        return self._works[0]

    def wrong(self) -> list[tuple[int, bytes]]:
        """The peers that call something else than the oldest call, and what."""
        expected = self._works[0].expected
        return [
            (peer, records[0])
            for peer, records in self._received.items()
            if records and records[0] != expected[peer]
        ]

    def missing(self) -> list[int]:
        """The peers that have not come to the oldest call; none where no call waits."""
        return (
            [peer for peer, records in self._received.items() if not records] if self._works else []
        )

    def take(self) -> GroupWork:
        """The oldest call, on which all agree."""
        for records in self._received.values():
            records.popleft()
        return self._works.popleft()

    def late(self, work: GroupWork) -> list[int]:
        """The peers of ``work`` that have not come to it."""
        place = next((i for i, each in enumerate(self._works) if each is work), None)
        return [
            peer for peer in work.expected if place is None or len(self._received[peer]) <= place
        ]

    def does_instead(self, peer: int) -> Record | None:
        """A collective that this peer has come to and this rank has not."""
        records, place = self._received[peer], len(self._works)
        return unpack(records[place]) if len(records) > place else None

    def clear(self) -> None:
        self._works.clear()


class PendingPairs:
    """Sends and receives of this rank and of its peers that wait for each other: first come first
    matched, by peer and tag.

    Empty queues are let go: a tag may never come again.
    """

    def __init__(self) -> None:
        self._works: dict[Place, deque[GroupWork]] = {}
        self._received: dict[Place, deque[bytes]] = {}
        self._any_source: dict[int, deque[GroupWork]] = {}  # tag → receives from any source
        self._senders: dict[int, deque[int]] = {}  # tag → peers whose sends wait, oldest first

    def enter(self, work: GroupWork, peer: int, operation: int, tag: int) -> None:
        """``work`` waits for ``operation`` of ``peer``."""
        self._works.setdefault((peer, operation, tag), deque()).append(work)

    def enter_any_source(self, work: GroupWork, tag: int) -> None:
        self._any_source.setdefault(tag, deque()).append(work)

    def received(self, peer: int, record: Record, data: bytes) -> None:
        self._received.setdefault((peer, record.operation, record.root), deque()).append(data)
        if record.operation == SEND:
            self._senders.setdefault(record.root, deque()).append(peer)

    def matched(self, peer: int, operation: int, tag: int) -> Iterator[tuple[GroupWork, bytes]]:
        """Take the pairs that have met, in order."""
        place = (peer, operation, tag)
        while place in self._works and place in self._received:
            work, data = _take(self._works, place), _take(self._received, place)
            if operation == SEND:
                self._senders[tag].remove(peer)
                if not self._senders[tag]:
                    del self._senders[tag]
            yield work, data

    def matched_any_source(self, tag: int) -> tuple[GroupWork, int] | None:
        """Take the oldest receive from any source, if a send waits for it, and the sender's
        rank."""
        if tag not in self._any_source or tag not in self._senders:
            return None
        return _take(self._any_source, tag), self._senders[tag][0]

    @property
    def from_any_source(self) -> bool:
        """A receive from any source waits."""
        return bool(self._any_source)

    def waiting_for(self, peer: int) -> GroupWork | None:
        return next((works[0] for (p, _, _), works in self._works.items() if p == peer), None)

    def unmatched(self, peer: int) -> Record | None:
        """A send or receive of ``peer`` that nothing here has matched."""
        return next(
            (unpack(records[0]) for (p, _, _), records in self._received.items() if p == peer), None
        )


def opposite(operation: int) -> int:
    return RECV if operation == SEND else SEND


def _take(queues: dict[K, deque[V]], key: K) -> V:
    value = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return value
