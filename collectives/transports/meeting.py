"""Meeting of the ranks of a group for connections of our own: each has an address, a port and a token nobody else knows.

Whoever connects must know the listener's random token, which travels only among the ranks, and is told that he is in. Anybody
else may knock: nobody waits for him. A greeting says of which epoch of the group it is: connections of others are refused.
"""

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from commpress.collectives.transports import interface
from commpress.errors import PeerFailure

HELLO, PING = 4, 5  # kinds of greeting: a connection that stays; a question whether this process runs
ENLIST, JOIN = 7, 8  # of a member that wants to agree on who goes on; of one that wants to become a member
WELCOME, GONE_ON = b"!", b">"  # answers to a greeting; GONE_ON: this process is of another epoch
PATIENCE = 1.0  # seconds that a visitor has for his greeting
_AGAIN = 0.02  # seconds before a rank that was not taken in calls again
_LOOK = 0.05  # seconds between two looks at who has died meanwhile
STRANGERS = 64  # visitors at the door who have not greeted; the oldest goes when another comes
_TOKEN = 16
_GREETING = struct.Struct(f"<B{_TOKEN}sIQQ")  # kind, token, rank, epoch, the epoch that it may be of by now


class Visit(NamedTuple):
    """A visitor who has greeted as only ranks can."""

    kind: int
    rank: int
    connection: socket.socket
    epochs: tuple[int, int] = (0, 0)  # the one it is of, and the one that it may be of by now; 0: none


@dataclass(eq=False)
class _Visitor:
    connection: socket.socket
    until: float
    greeting: bytes = b""


class Door:
    """A listener, and the visitors who have not said who they are. Its file is readable when one of them is to be heard.

    Any thread may listen, and close it.
    """

    def __init__(self, address: str, family: socket.AddressFamily, room: int) -> None:
        self.token = secrets.token_bytes(_TOKEN)
        self._address = address
        self._listener = socket.create_server((address, 0), family=family, backlog=room + STRANGERS)
        self._listener.setblocking(False)
        self._room = room + STRANGERS
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._visitors: dict[socket.socket, _Visitor] = {}  # the oldest first
        self._lock, self._closed = threading.Lock(), False
        close_in_children(self)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def here(self) -> str:
        """The way to this door: address, port, token."""
        return f"{self._address} {self.port} {self.token.hex()}"

    def fileno(self) -> int:
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return, unused-ignore]

    def arrivals(self) -> list[Visit]:
        """Those who have greeted by now."""
        came: list[Visit] = []
        with self._lock:
            if self._closed:
                return came
            for key, _ in self._selector.select(0.0):
                for visitor in self._let_in() if key.fileobj is self._listener else [key.data]:
                    if visitor.connection in self._visitors and (visit := self._hear(visitor)) is not None:
                        came.append(visit)
            now = time.monotonic()
            for visitor in [v for v in self._visitors.values() if v.until < now]:
                self._dismiss(visitor)
        return came

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._selector.close()
        self._listener.close()
        for visitor in self._visitors.values():
            visitor.connection.close()
        self._visitors.clear()

    def forked(self) -> None:
        self._close()

    def _let_in(self) -> list[_Visitor]:
        """Everybody who has knocked."""
        came: list[_Visitor] = []
        with contextlib.suppress(OSError):  # nobody else; or he has gone again
            while len(came) < self._room:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                if len(self._visitors) >= self._room:
                    self._dismiss(next(iter(self._visitors.values())))
                visitor = _Visitor(connection, time.monotonic() + PATIENCE)
                try:
                    self._selector.register(connection, selectors.EVENT_READ, visitor)
                except OSError:  # the kernel watches no more files; he calls again
                    connection.close()
                    continue
                came.append(visitor)
                self._visitors[connection] = visitor
        return came

    def _hear(self, visitor: _Visitor) -> Visit | None:
        try:
            part = visitor.connection.recv(_GREETING.size - len(visitor.greeting))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        visitor.greeting += part
        if part and len(visitor.greeting) < _GREETING.size:
            return None
        if part:
            kind, token, rank, *epochs = _GREETING.unpack(visitor.greeting)
            if secrets.compare_digest(token, self.token):
                self._selector.unregister(visitor.connection)
                del self._visitors[visitor.connection]
                return Visit(kind, rank, visitor.connection, (epochs[0], epochs[1]))
        self._dismiss(visitor)
        return None

    def _dismiss(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection]
        visitor.connection.close()


class Meeting:
    """One rank among the doors of all. ``here`` must reach its own, and those of all come to ``learn``.

    ``door``: one that stays when the meeting is over; without it the meeting has its own. Visitors who are not for this meeting
    go to ``others``. ``check`` is told while it waits for whom, and may raise.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        door: Door | None = None,
        epoch: int = 0,
        others: Callable[[Visit], object] | None = None,
        check: Callable[[Sequence[int]], object] = lambda missing: None,
    ) -> None:
        self.rank, self.size, self.epoch = rank, size, epoch
        self.door, self._lent = door or own_door(size), door is not None
        self.here = self.door.here
        self._places: list[str] = []
        self._others, self._check = others or _answer, check

    def learn(self, places: Sequence[str]) -> None:
        """Take every rank's ``here``, by rank."""
        self._places = list(places)

    def connect_all(self, deadline: float) -> dict[int, socket.socket]:
        """One connection to every peer: to lower ranks our own, from higher ones theirs.

        Note: a rank that was slow to greet is a stranger to its peer, who hangs up. So it calls again until it is welcome.
        """
        connections: dict[int, socket.socket] = {}
        calls: dict[int, socket.socket] = {}
        with selectors.DefaultSelector() as news:
            news.register(self.door, selectors.EVENT_READ)
            try:
                while missing := [r for r in range(self.size) if r != self.rank and r not in connections]:
                    self._check(missing)
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise self._absent(tuple(missing))
                    for peer in [r for r in missing if r < self.rank and r not in calls]:
                        calls[peer] = self._call(peer, left)
                        news.register(calls[peer], selectors.EVENT_READ, peer)
                    for key, _ in news.select(min(left, _LOOK)):
                        if key.fileobj is self.door:
                            connections |= self._received(missing)
                            continue
                        peer, connection = key.data, calls.pop(key.data)
                        news.unregister(connection)
                        if welcomed(connection):
                            connections[peer] = connection
                        else:
                            connection.close()
                            time.sleep(_AGAIN)
            except BaseException:
                for connection in [*connections.values(), *calls.values()]:
                    connection.close()
                raise
        return connections

    def call(self, peer: int, kind: int, seconds: float) -> socket.socket:
        """A connection to a peer on which we have said who we are. ``welcomed`` tells whether it took us in."""
        return knock(self._places[peer], kind, self.rank, (self.epoch, 0), seconds)

    def close(self) -> None:
        if not self._lent:
            self.door.close()

    def _call(self, peer: int, seconds: float) -> socket.socket:
        try:
            return self.call(peer, HELLO, seconds)
        except OSError as error:
            host, port, _ = self._places[peer].split(" ")
            raise PeerFailure(
                f"rank {self.rank} cannot reach rank {peer} at {host} port {port} ({error}). Every rank must be able to "
                "connect to every other; GLOO_SOCKET_IFNAME names the network interface to use.",
                ranks=(peer,),
            ) from error

    def _received(self, missing: Sequence[int]) -> dict[int, socket.socket]:
        """The connections that higher ranks have made."""
        came: dict[int, socket.socket] = {}
        for visit in self.door.arrivals():
            kind, peer, connection, (epoch, _) = visit
            due = kind == HELLO and epoch == self.epoch and peer in missing and peer > self.rank and peer not in came
            if not due:
                self._others(visit)
            elif welcome(connection):
                came[peer] = connection
            else:
                connection.close()
        return came

    def _absent(self, missing: tuple[int, ...]) -> PeerFailure:
        return PeerFailure(
            f"rank {self.rank}: ranks {list(missing)} did not connect in time: they died, are stuck, or cannot reach "
            f"{self.here.split(' ')[0]}; GLOO_SOCKET_IFNAME names the network interface to use.",
            ranks=missing,
        )


def nothing() -> None:
    """Nobody is known to be gone."""


def own_door(room: int) -> Door:
    """A new door on the interface by which peers find this rank."""
    address, family = interface.own_address()
    return Door(address, family, room)


def knock(place: str, kind: int, rank: int, epochs: tuple[int, int], seconds: float) -> socket.socket:
    """A connection to a door on which we have said who we are."""
    host, port, _ = place.split(" ")
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    connection.settimeout(max(seconds, 0.001))
    try:
        connection.connect(interface.for_connect(host, int(port)))
        connection.sendall(greeting(place, kind, rank, epochs))
    except OSError:
        connection.close()
        raise
    return connection


def greeting(place: str, kind: int, rank: int, epochs: tuple[int, int]) -> bytes:
    """The words that are due at a door."""
    return _GREETING.pack(kind, bytes.fromhex(place.split(" ")[2]), rank, *epochs)


def welcome(connection: socket.socket, answer: bytes = WELCOME) -> bool:
    """Tell a visitor that it is in; whether it is still there."""
    try:
        return connection.send(answer) == len(answer)
    except OSError:
        return False


def _answer(visit: Visit) -> None:
    """Tell whoever asks that this process runs."""
    with visit.connection:
        if visit.kind == PING:
            welcome(visit.connection)


def welcomed(connection: socket.socket) -> bool:
    """True if the peer that we have called took us in; waits as long as the connection does."""
    try:
        return connection.recv(len(WELCOME)) == WELCOME
    except OSError:
        return False


# ---------------------------------------------------------------- forked children


class FileOwner(Protocol):
    """An object with open files."""

    def forked(self) -> None:
        """Close them, in the child. Locks may be held by threads that are not there."""


_owners: weakref.WeakSet[FileOwner] = weakref.WeakSet()


def close_in_children(owner: FileOwner) -> None:
    """Have forked children close these files: while a child has a connection open, nobody notices that its parent has died.

    Programs that a process starts do not get them: Python marks every file that it opens so.
    """
    _register()
    _owners.add(owner)


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_close)


def _close() -> None:
    for owner in list(_owners):
        owner.forked()
