"""Membership of one process in its group: the epoch that it is of, the one that it may be of by now, and its door."""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from commpress.collectives.change import Change
from commpress.collectives.transports.conversation import Conversation, Message
from commpress.collectives.transports.meeting import (
    ENLIST,
    GONE_ON,
    JOIN,
    PING,
    WELCOME,
    Door,
    Visit,
    close_in_children,
    welcome,
)
from commpress.errors import InvalidArgument


@dataclass(frozen=True)
class Epoch:
    """The members of a group between two changes. ``key``: a number that no other epoch has; ``lineage``: the group's."""

    number: int
    key: int
    lineage: int
    places: tuple[str, ...]  # the doors, by rank

    @classmethod
    def of(cls, message: Message) -> "Epoch":
        return cls(message["number"], message["key"], message["lineage"], tuple(message["places"]))

    def rank(self, place: str) -> int | None:
        return self.places.index(place) if place in self.places else None


def new_key() -> int:
    """A random number that fits into a greeting and is not 0."""
    return secrets.randbits(63) | 1


def first_key(place: str) -> int:
    """The key of the first epoch of a group, from its first door: the token there is nobody else's."""
    return int(place.split(" ")[2][:15], 16) | 1


def contact_of(place: str) -> str:
    """The text by which newcomers find a door."""
    host, port, token = place.split(" ")
    return f"{host}:{port}#{token}"


def is_contact(text: str) -> bool:
    where, hash, token = text.strip().rpartition("#")
    host, colon, port = where.rpartition(":")
    return bool(hash and colon and host and port.isdecimal() and len(token) == 32)


def place_of(contact: str) -> str:
    """The door of a contact."""
    if not is_contact(contact):
        raise InvalidArgument(
            f"join is {contact!r}, expected a member's group.contact, such as '10.0.0.1:4711#<32 digits>', or a store"
        )
    where, _, token = contact.strip().rpartition("#")
    host, _, port = where.rpartition(":")
    return f"{host} {port} {token}"


@dataclass(frozen=True)
class Proposal:
    """An epoch that is to be, as one of its members sees it."""

    epoch: Epoch
    change: Change
    facts: Message  # what the leader offers
    count: int


class Membership:
    """One process's part in its group's epochs, from the first to the last."""

    def __init__(self, door: Door, epoch: Epoch) -> None:
        self.door, self.epoch = door, epoch
        self.ready: tuple[Proposal, Callable[[], None]] | None = None  # staged, and whether it is complete is in doubt
        self.expected = 0  # the key of an epoch that somebody else has agreed on
        self._callers: deque[Conversation] = deque()
        self._lock = threading.RLock()
        close_in_children(self)

    @property
    def here(self) -> str:
        return self.door.here

    @property
    def rank(self) -> int:
        return self.epoch.rank(self.here) or 0

    @property
    def keys(self) -> tuple[int, int]:
        """Of the epoch that this process is of, and of the one that it may be of by now."""
        return self.epoch.key, self.ready[0].epoch.key if self.ready else self.expected

    @property
    def waiting(self) -> int:
        """Newcomers at the door."""
        with self._lock:
            self._callers = deque(link for link in self._callers if not link.gone)
            return sum(link.kind == JOIN for link in self._callers)

    def answer(self, visit: Visit) -> bool:
        """Take a visitor in, or tell that this process runs, or is of another epoch; True if a member wants to agree."""
        known = any(key in self.keys for key in visit.epochs if key)
        if visit.kind in (ENLIST, JOIN) and (known or visit.kind == JOIN) and welcome(visit.connection):
            with self._lock:
                self._callers.append(Conversation(visit.connection, kind=visit.kind))
            return visit.kind == ENLIST
        with visit.connection:
            if visit.kind in (PING, ENLIST):
                welcome(visit.connection, WELCOME if known or not any(visit.epochs) else GONE_ON)
        return False

    def listen(self) -> bool:
        """Answer who is at the door; True if a member that wants to agree is among them. In any thread."""
        with self._lock:
            return any([self.answer(visit) for visit in self.door.arrivals()])

    def callers(self) -> list[Conversation]:
        """Take those who have come."""
        with self._lock:
            found, self._callers = list(self._callers), deque()
        return found

    def give_back(self, links: Iterable[Conversation]) -> None:
        """Have callers wait at the door again."""
        with self._lock:
            self._callers.extendleft(links)

    def close(self) -> None:
        """Shut the door; whoever waits at it is told."""
        self.door.close()
        self.forked()

    def forked(self) -> None:
        for link in self._callers:
            link.close()

    def complete(self) -> Change:
        """The epoch that is ready is this process's from now on."""
        assert self.ready is not None
        (proposal, commit), self.ready = self.ready, None
        self.epoch, self.expected = proposal.epoch, 0
        commit()
        return proposal.change
