"""How the ranks of a group find each other for connections of our own: an address, a port and a token nobody else knows.

Whoever connects must know the listener's random token, which travels only among the ranks. The listener stays open.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from commpress.errors import CommunicationError, PeerFailure

HELLO, PING = 4, 5  # kinds of greeting: a connection that stays; a question whether this process runs
_TOKEN = 16
_GREETING = struct.Struct(f"<B{_TOKEN}sI")  # kind, token, rank
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


class Meeting:
    """One rank's listener, and the places of the others. ``here`` must reach them, and theirs come to ``learn``."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._token = secrets.token_bytes(_TOKEN)
        address, family = _own_address()
        self.listener = socket.create_server((address, 0), family=family, backlog=max(size, 16))
        self.here = f"{address} {self.listener.getsockname()[1]} {self._token.hex()}"
        self._places: list[tuple[str, int, bytes]] = []

    def learn(self, places: Sequence[str]) -> None:
        """What every rank has as ``here``, by rank."""
        for place in places:
            host, port, token = place.split(" ")
            self._places.append((host, int(port), bytes.fromhex(token)))

    def connect_all(self, deadline: float) -> dict[int, socket.socket]:
        """One connection to every peer: to lower ranks our own, from higher ones theirs."""
        connections = {peer: self._connect(peer, deadline) for peer in range(self.rank)}
        while len(connections) < self.size - 1:
            missing = tuple(r for r in range(self.rank + 1, self.size) if r not in connections)
            connection, kind, peer = self._accept(missing, deadline)
            if kind == HELLO and peer in missing:
                connections[peer] = connection
            else:
                connection.close()
        self.listener.setblocking(False)
        return connections

    def greet(self, connection: socket.socket, peer: int, kind: int) -> None:
        """Connect and say who we are."""
        host, port, token = self._places[peer]
        connection.connect((host, port))
        connection.sendall(_GREETING.pack(kind, token, self.rank))

    def greeted(self, connection: socket.socket, seconds: float) -> tuple[int, int]:
        """Kind and rank of whoever has connected; (0, -1) for a stranger."""
        connection.settimeout(min(seconds, 5.0))
        greeting = b""
        with contextlib.suppress(OSError):
            while len(greeting) < _GREETING.size and (part := connection.recv(_GREETING.size - len(greeting))):
                greeting += part
        if len(greeting) < _GREETING.size:
            return 0, -1
        kind, token, peer = _GREETING.unpack(greeting)
        return (kind, peer) if secrets.compare_digest(token, self._token) else (0, -1)

    def close(self) -> None:
        self.listener.close()

    def _connect(self, peer: int, deadline: float) -> socket.socket:
        connection = socket.socket(self.listener.family)
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            self.greet(connection, peer, HELLO)
        except OSError as error:
            connection.close()
            host, port, _ = self._places[peer]
            raise PeerFailure(
                f"rank {self.rank} cannot reach rank {peer} at {host}:{port} ({error}). Every rank must be able to connect to "
                "every other; GLOO_SOCKET_IFNAME names the network interface to use.",
                ranks=(peer,),
            ) from error
        return connection

    def _accept(self, missing: tuple[int, ...], deadline: float) -> tuple[socket.socket, int, int]:
        self.listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = self.listener.accept()
        except TimeoutError as error:
            raise PeerFailure(
                f"rank {self.rank}: ranks {list(missing)} did not connect in time: they died, are stuck, or cannot reach "
                f"{self.listener.getsockname()[0]}; GLOO_SOCKET_IFNAME names the network interface to use.",
                ranks=missing,
            ) from error
        return connection, *self.greeted(connection, max(deadline - time.monotonic(), 0.001))


def _own_address() -> tuple[str, socket.AddressFamily]:
    """Where peers find this rank: by the rule that Gloo has, so that they can reach it if Gloo can."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError as error:
                raise CommunicationError(
                    f"GLOO_SOCKET_IFNAME is {name!r}, but that network interface has no IPv4 address ({error})"
                ) from error
        return socket.inet_ntoa(answer[20:24]), socket.AF_INET
    with contextlib.suppress(OSError):
        for family, _, _, _, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.create_server((str(where[0]), 0), family=family):
                return str(where[0]), family
    return "127.0.0.1", socket.AF_INET
