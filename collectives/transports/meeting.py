"""Meeting of the ranks of a group for connections of our own: each has an address, a port and a token nobody else knows.

Whoever connects must know the listener's random token, which travels only among the ranks, and is told that he is in. Anybody
else may knock: nobody waits for him.
"""

import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from commpress.errors import CommunicationError, PeerFailure

HELLO, PING = 4, 5  # kinds of greeting: a connection that stays; a question whether this process runs
WELCOME = b"!"  # the answer to a greeting
PATIENCE = 1.0  # seconds that a visitor has for his greeting
_AGAIN = 0.02  # seconds before a rank that was not taken in calls again
STRANGERS = 64  # visitors at the door who have not greeted; the oldest goes when another comes
_TOKEN = 16
_GREETING = struct.Struct(f"<B{_TOKEN}sI")  # kind, token, rank
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_ADDRESSES = Path("/proc/net/if_inet6")  # Linux: address, index, prefix, scope, flags, interface
_LINK = 0x20  # the scope of an address that holds on one link only; the others are smaller


@dataclass(eq=False)
class _Visitor:
    connection: socket.socket
    until: float
    greeting: bytes = b""


class Door:
    """A listener, and the visitors who have not said who they are. Its file is readable when one of them is to be heard."""

    def __init__(self, address: str, family: socket.AddressFamily, room: int) -> None:
        self.token = secrets.token_bytes(_TOKEN)
        self._listener = socket.create_server((address, 0), family=family, backlog=room + STRANGERS)
        self._listener.setblocking(False)
        self._room = room + STRANGERS
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._visitors: dict[socket.socket, _Visitor] = {}  # the oldest first
        close_in_children(self)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def fileno(self) -> int:
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return, unused-ignore]

    def arrivals(self, seconds: float = 0.0) -> Iterator[tuple[int, int, socket.socket]]:
        """Kind, rank and connection of those who have greeted as only ranks can, waiting ``seconds`` at most for news."""
        for key, _ in self._selector.select(max(seconds, 0.0)):
            for visitor in self._let_in() if key.fileobj is self._listener else [key.data]:
                if visitor.connection in self._visitors:
                    yield from self._hear(visitor)
        now = time.monotonic()
        for visitor in [v for v in self._visitors.values() if v.until < now]:
            self._dismiss(visitor)

    def close(self) -> None:
        self._selector.close()
        self._listener.close()
        for visitor in self._visitors.values():
            visitor.connection.close()
        self._visitors.clear()

    def forked(self) -> None:
        self.close()

    def _let_in(self) -> list[_Visitor]:
        """Everybody who has knocked."""
        came: list[_Visitor] = []
        with contextlib.suppress(OSError):  # nobody else; or he has gone again
            while len(came) < self._room:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                if len(self._visitors) >= self._room:
                    self._dismiss(next(iter(self._visitors.values())))
                came.append(_Visitor(connection, time.monotonic() + PATIENCE))
                self._visitors[connection] = came[-1]
                self._selector.register(connection, selectors.EVENT_READ, came[-1])
        return came

    def _hear(self, visitor: _Visitor) -> Iterator[tuple[int, int, socket.socket]]:
        try:
            part = visitor.connection.recv(_GREETING.size - len(visitor.greeting))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        visitor.greeting += part
        if part and len(visitor.greeting) < _GREETING.size:
            return
        if part:
            kind, token, rank = _GREETING.unpack(visitor.greeting)
            if secrets.compare_digest(token, self.token):
                self._selector.unregister(visitor.connection)
                del self._visitors[visitor.connection]
                yield kind, rank, visitor.connection
                return
        self._dismiss(visitor)

    def _dismiss(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection]
        visitor.connection.close()


class Meeting:
    """One rank's door, and the places of the others. ``here`` must reach them, and theirs come to ``learn``."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        address, family = _own_address()
        self.door = Door(address, family, size)
        self.here = f"{address} {self.door.port} {self.door.token.hex()}"
        self._places: list[tuple[str, int, bytes]] = []

    def learn(self, places: Sequence[str]) -> None:
        """Take every rank's ``here``, by rank."""
        for place in places:
            host, port, token = place.split(" ")
            self._places.append((host, int(port), bytes.fromhex(token)))

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
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise self._absent(tuple(missing))
                    for peer in [r for r in missing if r < self.rank and r not in calls]:
                        calls[peer] = self._call(peer, left)
                        news.register(calls[peer], selectors.EVENT_READ, peer)
                    for key, _ in news.select(min(left, PATIENCE)):
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
        host, port, token = self._places[peer]
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection.settimeout(max(seconds, 0.001))
        try:
            connection.connect(_address(host, port))
            connection.sendall(_GREETING.pack(kind, token, self.rank))
        except OSError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self.door.close()

    def _call(self, peer: int, seconds: float) -> socket.socket:
        try:
            return self.call(peer, HELLO, seconds)
        except OSError as error:
            host, port, _ = self._places[peer]
            raise PeerFailure(
                f"rank {self.rank} cannot reach rank {peer} at {host} port {port} ({error}). Every rank must be able to "
                "connect to every other; GLOO_SOCKET_IFNAME names the network interface to use.",
                ranks=(peer,),
            ) from error

    def _received(self, missing: Sequence[int]) -> dict[int, socket.socket]:
        """The connections that higher ranks have made."""
        came: dict[int, socket.socket] = {}
        for kind, peer, connection in self.door.arrivals():
            due = kind == HELLO and peer in missing and peer > self.rank and peer not in came
            if (due or kind == PING) and welcome(connection) and due:
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


def welcome(connection: socket.socket) -> bool:
    """Tell a visitor that it is in; whether it is still there."""
    try:
        return connection.send(WELCOME) == len(WELCOME)
    except OSError:
        return False


def welcomed(connection: socket.socket) -> bool:
    """True if the peer that we have called took us in; waits as long as the connection does."""
    try:
        return connection.recv(len(WELCOME)) == WELCOME
    except OSError:
        return False


# ---------------------------------------------------------------- addresses


def _own_address() -> tuple[str, socket.AddressFamily]:
    """The address by which peers find this rank: by the rule that Gloo has, so that they can reach it if Gloo can."""
    if name := _interface():
        return _address_of(name)
    with contextlib.suppress(OSError):
        for family, _, _, _, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.create_server((str(where[0]), 0), family=family):
                return str(where[0]), family
    return "127.0.0.1", socket.AF_INET


def _interface() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def _address_of(interface: str) -> tuple[str, socket.AddressFamily]:
    """Its IPv4 address, else the IPv6 address that reaches furthest."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24]), socket.AF_INET
        except OSError as error:
            lines = [line.split() for line in (_ADDRESSES.read_text() if _ADDRESSES.exists() else "").splitlines()]
            found = sorted((int(scope, 16), address) for address, _, _, scope, _, name in lines if name == interface)
            if not found:
                raise CommunicationError(
                    f"GLOO_SOCKET_IFNAME is {interface!r}, but that network interface has no address ({error})"
                ) from error
    scope, address = found[0]
    text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return text + (f"%{interface}" if scope == _LINK else ""), socket.AF_INET6


def _address(host: str, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    """For ``connect``. An address that holds on one link only is reached over our own interface, whatever the peer says."""
    address, on_link, theirs = host.partition("%")
    return (address, port, 0, socket.if_nametoindex(_interface() or theirs)) if on_link else (address, port)


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
