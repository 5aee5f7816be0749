"""Membership of one process in its group: the epoch that it is of, the one that it may be of by
now, and its door; and the roster of a group that is to be.

Whoever leads an agreement decides on a roster, by what all have reported; no rule of it talks to
anybody.
"""

import contextlib
import logging
import secrets
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from commpress.collectives.change import Change
from commpress.collectives.transports.connection import Conversation, Message
from commpress.collectives.transports.meeting import (
    ENLIST,
    GONE_ON,
    JOIN,
    PING,
    STRANGERS,
    WELCOME,
    Door,
    Visit,
    close_in_children,
)
from commpress.errors import InvalidArgument
from commpress.work import started

REPORTING = 5.0  # seconds that a newcomer has for its report
SHOWN = 5  # differences that are named
_DIGITS = set("0123456789abcdef")  # of a token

log = logging.getLogger("commpress")


@dataclass(frozen=True)
class Epoch:
    """The members of a group between two changes. ``key``: a number that no other epoch has;
    ``lineage``: the group's."""

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
    """The key of the first epoch of a group, from its first door: the token there is nobody
    else's."""
    return int(place.split(" ")[2][:15], 16) | 1


def contact_of(place: str) -> str:
    """The text by which newcomers find a door."""
    host, port, token = place.split(" ")
    return f"{host}:{port}#{token}"


def is_contact(text: str) -> bool:
    where, hash, token = text.strip().rpartition("#")
    host, colon, port = where.rpartition(":")
    return bool(
        hash and colon and host and port.isdecimal() and len(token) == 32 and set(token) <= _DIGITS
    )


def place_of(contact: str) -> str:
    """The door of a contact."""
    if not is_contact(contact):
        raise InvalidArgument(
            f"join is {contact!r}, expected a member's group.contact, such as '10.0.0.1:4711#<32 "
            "digits>', or a store"
        )
    where, _, token = contact.strip().rpartition("#")
    host, _, port = where.rpartition(":")
    return f"{host} {port} {token}"


def differences(own: Mapping[str, str], theirs: Mapping[str, str], *, others: str) -> str:
    """Everything by name in which the sender of the second description differs, with both values;
    "" if there is nothing."""
    named = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
    found = [
        f"{name} is {theirs.get(name, 'missing')}, {others} {own.get(name, 'nothing')}"
        for name in named[:SHOWN]
    ]
    return "; ".join(found) + (f"; and {len(named) - SHOWN} more" if len(named) > SHOWN else "")


@dataclass(frozen=True)
class Proposal:
    """An epoch that is to be, as one of its members sees it."""

    epoch: Epoch
    change: Change
    facts: Message  # what the leader offers
    count: int


class Membership:
    """One process's part in its group's epochs, from the first to the last.

    ``bell``: readable while a member that wants to agree may be waiting. ``attending``: held by
    whoever listens at the door by himself, for as long as he does.
    """

    def __init__(self, door: Door, epoch: Epoch) -> None:
        self.door, self.epoch = door, epoch
        # staged, and whether it is complete is in doubt
        self.ready: tuple[Proposal, Callable[[], None]] | None = None
        # of what this process trains: newcomers must have the same
        self.description: Callable[[], Mapping[str, str]] = dict
        self.expected = 0  # the key of an epoch that somebody else has agreed on
        self.dead: set[str] = set()  # doors at which nobody listens any more
        self._callers: deque[Conversation] = deque()
        # newcomers who have not reported, by file, the oldest first; the kernel tells who does
        self._silent, self._reports = dict[int, Conversation](), select.poll()
        self._lock, self.attending = threading.RLock(), threading.Lock()
        self.bell, self._rope = socket.socketpair()
        self.bell.setblocking(False)
        self._rope.setblocking(False)
        self._attendant: threading.Thread | None = None
        close_in_children(self)

    def attend(self) -> "Membership":
        """Answer at the door until it is shut, in a thread that does nothing else."""
        self._ended, self._end = socket.socketpair()
        self._attendant = started("commpress-door", self._attend)
        return self

    def _attend(self) -> None:
        with self._ended, selectors.DefaultSelector() as news:
            news.register(self.door, selectors.EVENT_READ)
            news.register(self._ended, selectors.EVENT_READ)
            while all(key.fileobj is self.door for key, _ in news.select()):
                with self.attending:
                    self.listen()

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
        """Newcomers at the door who have reported and are like this process. Who is not is sent
        away.

        Asked in every step: many who have only greeted cost one question to the kernel together.
        """
        with self._lock:
            self._hear_reports()
            welcome = sum(self._suits(link) for link in self._callers if link.kind == JOIN)
            self._callers = deque(link for link in self._callers if link.open)
        return welcome

    def _hear_reports(self) -> None:
        """Have newcomers who report wait among the callers. They have little time for it."""
        for file, _ in self._reports.poll(0):
            link = self._silent[file]
            if link.look() or not link.open:
                self._no_more_silent(file)
                self._callers.extend([link] * link.open)
        late = time.monotonic() - REPORTING
        while self._silent and self._silent[first := next(iter(self._silent))].since < late:
            self._no_more_silent(first).close()

    def _no_more_silent(self, file: int) -> Conversation:
        self._reports.unregister(file)
        return self._silent.pop(file)

    def _suits(self, link: Conversation) -> bool:
        """True if a newcomer who has reported may become a member."""
        for report in link.look():
            text = self.unlike(report)
            if text:
                log.info("a newcomer was sent away: %r", text)
                link.tell("refused", kind="InvalidArgument", text=text, ranks=[])
                link.close()
            return link.open and not text
        return False

    def unlike(self, report: Message) -> str:
        """Everything in which the sender of a report is unlike this process; "" if there is
        nothing."""
        theirs = report.get("describes")
        found = differences(
            self.description(),
            theirs if isinstance(theirs, dict) else {},
            others="the members have",
        )
        why = (
            f"this process is unlike the members that it wants to join: {found}. Construct on it "
            "what they have"
        )
        return why if found else ""

    def answer(self, visit: Visit) -> bool:
        """Take a visitor in, or tell that this process runs, or is of another epoch; True if a
        member wants to agree."""
        known = any(key in self.keys for key in visit.epochs if key)
        if visit.kind in (ENLIST, JOIN) and (known or visit.kind == JOIN) and visit.reply():
            with self._lock:
                self.give_back([Conversation(visit.connection, kind=visit.kind)])
            return visit.kind == ENLIST
        with visit.connection:
            if visit.kind in (PING, ENLIST):
                visit.reply(WELCOME if known or not any(visit.epochs) else GONE_ON)
        return False

    def hear(self, visit: Visit) -> None:
        """Answer a visitor; ring if it is a member that wants to agree."""
        if self.answer(visit):
            with contextlib.suppress(BlockingIOError):  # it has rung for long
                self._rope.send(b"!")

    def listen(self) -> None:
        """Answer who is at the door. In any thread."""
        with self._lock:
            for visit in self.door.arrivals():
                self.hear(visit)

    def called(self) -> bool:
        """Hush the bell; whether a member waits that wants to agree."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                self.bell.recv(4096)
            return any(link.kind == ENLIST and not link.gone for link in self._callers)

    def callers(self) -> list[Conversation]:
        """Take those who have come."""
        with self._lock:
            found = [*self._callers, *map(self._no_more_silent, list(self._silent))]
            self._callers.clear()
        return found

    def give_back(self, links: Iterable[Conversation]) -> None:
        """Have callers wait at the door, again."""
        with self._lock:
            for link in links:
                if link.kind != JOIN or link.look():
                    self._callers.append(link)
                elif link.open:
                    if len(self._silent) >= STRANGERS:
                        self._hear_reports()
                    if len(self._silent) >= STRANGERS:
                        self._no_more_silent(next(iter(self._silent))).close()
                    self._silent[link.fileno()] = link
                    self._reports.register(link, select.POLLIN)

    def close(self) -> None:
        """Shut the door; whoever waits at it is told."""
        if self._attendant is not None:
            self._end.send(b"!")
            if self._attendant is not threading.current_thread():
                self._attendant.join(5)
            self._attendant = None
            self._end.close()
        self.door.close()
        self.forked()
        self.bell.close()
        self._rope.close()

    def forked(self) -> None:
        for link in (*self._callers, *self._silent.values()):
            link.close()

    def complete(self) -> Change:
        """The epoch that is ready is this process's from now on."""
        assert self.ready is not None
        (proposal, commit), self.ready = self.ready, None
        self.epoch, self.expected = proposal.epoch, 0
        commit()
        return proposal.change


@dataclass(frozen=True)
class Roster:
    """Members from now on."""

    base: Epoch  # that goes on
    adopt: int  # the key of the epoch that counts as complete for those who are ready for it
    places: tuple[str, ...]  # the members' doors, by rank
    sources: tuple[int | None, ...]  # rank of each in ``base``, None for a newcomer

    @classmethod
    def merged(
        cls, base: Epoch, adopt: int, members: Sequence[Message], joining: Sequence[Message]
    ) -> "tuple[Roster, list[tuple[str, str]]]":
        """Merge ``base`` with groups that want to join, whose ranks follow as newcomers.

        Return with it the doors of refused ranks, which have trained as long or longer, and the
        reasons.
        """
        here = {report["place"] for report in members}
        others: dict[int, list[Message]] = {}
        for report in joining:
            others.setdefault(report["epoch"]["key"], []).append(report)
        years = max(report["age"] for report in members)
        refused: list[tuple[str, str]] = []
        for group in others.values():
            lineage, age = group[0]["epoch"]["lineage"], max(report["age"] for report in group)
            if lineage != base.lineage and age >= years and age > 0:
                text = (
                    f"this group has trained for {age} steps and the members for {years}, so its "
                    "weights are not given up: give age=0 to reform() here to take theirs, or let "
                    "them join this group"
                )
                refused += [(report["place"], text) for report in group]
        out = {place for place, _ in refused}
        joined = [
            report["place"]
            for report in sorted(joining, key=_seniority)
            if report["place"] not in out
        ]
        survivors = [place for place in base.places if place in {*here, *joined}]
        newcomers = [place for place in joined if place not in survivors]
        sources = [base.rank(place) for place in survivors] + [None] * len(newcomers)
        return cls(base, adopt, (*survivors, *newcomers), tuple(sources)), refused

    @classmethod
    def appointed(cls, reports: Mapping[str, Message], *, ordered: bool) -> "Roster":
        """Make the roster of appointed members, by their doors, on the epoch of which most keep
        their order."""
        found: list[tuple[int, int, int, Roster]] = []
        for base in (Epoch.of(report["epoch"]) for report in reports.values()):
            rank = {
                place: base.rank(place) if base.key in keys_of(report) else None
                for place, report in reports.items()
            }
            places = list(reports)
            if not ordered:
                places.sort(key=partial(_before, rank))
            kept = 0  # ranks that keep their order, from the first on
            while kept < len(places) and _follows([rank[place] for place in places[: kept + 1]]):
                kept += 1
            sources = [rank[place] for place in places[:kept]] + [None] * (len(places) - kept)
            found.append(
                (kept, base.number, -len(found), cls(base, base.key, tuple(places), tuple(sources)))
            )
        *_, best = max(found, key=lambda each: each[:3])
        return best


def base_of(members: Sequence[Message]) -> tuple[Epoch, int]:
    """The epoch from which to go on, and its key if it is to be adopted by those who are ready for
    it."""
    last = max((Epoch.of(report["epoch"]) for report in members), key=lambda epoch: epoch.number)
    doubted = [Epoch.of(report["ready"]) for report in members if report["ready"]]
    for epoch in sorted(doubted, key=lambda epoch: epoch.number, reverse=True):
        concerned = [report for report in members if report["place"] in epoch.places]
        if epoch.number > last.number and all(
            (report["ready"] or {}).get("key") == epoch.key for report in concerned
        ):
            return epoch, epoch.key
    return last, last.key


def may_go_on(
    base: Epoch, members: Sequence[Message], dead: Iterable[str], linked: Iterable[str]
) -> bool:
    """True where no others of ``base`` can go on without these members: they are more than half of
    it, or half with its first; or the processes of all others are ``dead``, who had not begun to
    agree by themselves, or with one of the ``linked``."""
    size, here = len(base.places), {report["place"] for report in members}
    lost = [place for place in base.places if place not in here]
    present = size - len(lost)
    if 2 * present > size or (2 * present == size and base.places[0] in here):
        return True
    began = {place for report in members for place in report["began"]}
    met = set(linked).union(*(report["linked"] for report in members))
    return all(place in dead and (place not in began or place in met) for place in lost)


def keys_of(report: Message) -> tuple[int, int]:
    """Keys of a member's epoch, and of the one that it may have entered since."""
    return report["epoch"]["key"], (report["ready"] or {}).get("key", 0)


def _before(ranks: Mapping[str, int | None], place: str) -> tuple[bool, int]:
    """Survivors in their order come before newcomers."""
    rank = ranks[place]
    return rank is None, rank or 0


def _follows(ranks: Sequence[int | None]) -> bool:
    """True if the last of them is a rank, and above the one before it."""
    last = ranks[-1]
    before = ranks[-2] if len(ranks) > 1 else None
    return last is not None and (before is None or last > before)


def _seniority(report: Message) -> tuple[int, int]:
    """Newcomers of one group stay together, in their order."""
    places = report["epoch"]["places"]
    return report["epoch"]["key"], places.index(report["place"]) if report[
        "place"
    ] in places else len(places)
