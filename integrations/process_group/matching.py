"""Sends and receives: which of this rank's meets which of a peer's, first come first matched, by peer and tag."""

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

from commpress.integrations.process_group.calls import GroupWork
from commpress.integrations.process_group.records import RECV, SEND, Record, unpack

K = TypeVar("K")
V = TypeVar("V")
Place = tuple[int, int, int]  # peer, what it says (SEND or RECV), tag


class Matching:
    """Queues of what waits on both sides. Empty ones are let go: a tag may never come again."""

    def __init__(self) -> None:
        self._calls: dict[Place, deque[GroupWork]] = {}
        self._offers: dict[Place, deque[bytes]] = {}
        self._anyone: dict[int, deque[GroupWork]] = {}  # tag → receives from any source
        self._senders: dict[int, deque[int]] = {}  # tag → peers whose sends wait, oldest first

    def call(self, work: GroupWork, peer: int, operation: int, tag: int) -> None:
        """``work`` waits for ``peer`` to say ``operation``."""
        self._calls.setdefault((peer, operation, tag), deque()).append(work)

    def call_anyone(self, work: GroupWork, tag: int) -> None:
        self._anyone.setdefault(tag, deque()).append(work)

    def offer(self, peer: int, record: Record, data: bytes) -> None:
        """``peer`` has said ``data``."""
        self._offers.setdefault((peer, record.operation, record.root), deque()).append(data)
        if record.operation == SEND:
            self._senders.setdefault(record.root, deque()).append(peer)

    def met(self, peer: int, operation: int, tag: int) -> Iterator[tuple[GroupWork, bytes]]:
        """Take the pairs that have met, in order."""
        place = (peer, operation, tag)
        while place in self._calls and place in self._offers:
            work, data = _take(self._calls, place), _take(self._offers, place)
            if operation == SEND:
                self._senders[tag].remove(peer)
                if not self._senders[tag]:
                    del self._senders[tag]
            yield work, data

    def met_anyone(self, tag: int) -> tuple[GroupWork, int] | None:
        """Take the oldest receive from any source, if a send waits for it, and tell whose."""
        if tag not in self._anyone or tag not in self._senders:
            return None
        return _take(self._anyone, tag), self._senders[tag][0]

    @property
    def listens(self) -> bool:
        """Whether a receive from any source waits."""
        return bool(self._anyone)

    def waiting_for(self, peer: int) -> GroupWork | None:
        return next((calls[0] for (p, _, _), calls in self._calls.items() if p == peer), None)

    def offered(self, peer: int) -> Record | None:
        """What ``peer`` has offered that nothing here has matched."""
        return next((unpack(offers[0]) for (p, _, _), offers in self._offers.items() if p == peer), None)


def opposite(operation: int) -> int:
    return RECV if operation == SEND else SEND


def _take(queues: dict[K, deque[V]], key: K) -> V:
    value = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return value
