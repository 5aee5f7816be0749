"""Lines: one small TCP connection between every two ranks of a group, beside the one that carries the data.

They carry records of 64 bytes and nothing else. A line that closes without a word of leave is a death: the kernel closes
it whatever the process was doing. Whoever connects must know the listener's random token, which travels through the
store. The listener stays open: a peer that doubts whether this process still runs connects to it and asks.
"""

import contextlib
import fcntl
import os
import secrets
import select
import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

from commpress.errors import CommunicationError, PeerFailure
from commpress.integrations.agreement import HELLO, PING, RECORD

_TOKEN = 16
_GREETING = struct.Struct(f"<B{_TOKEN}sI")  # kind, token, rank
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_ALIVE = b"!"


class Line:
    """This rank's end of the connection to one peer."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.open, self.left = True, False  # left: the peer has said that it goes
        self.closed_at = 0.0
        self.unsent = bytearray()
        self._part = b""

    def say(self, record: bytes) -> None:
        """Never blocks: what the kernel does not take now goes with the next word or ``flush``."""
        if self.unsent:
            self.unsent += record
            self.flush()
            return
        try:
            count = self.socket.send(record)
        except BlockingIOError:
            count = 0
        except OSError:  # it is closed; reading will tell
            return
        if count < len(record):
            self.unsent += record[count:]

    def flush(self) -> None:
        with contextlib.suppress(OSError):  # BlockingIOError among them
            del self.unsent[: self.socket.send(self.unsent)]

    def hear(self) -> list[bytes]:
        """The whole records that have come."""
        if not self.open:
            return []
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.open, self.closed_at = False, time.monotonic()
            return []
        if len(data) == RECORD and not self._part:
            return [data]
        data = self._part + data
        whole = len(data) - len(data) % RECORD
        self._part = data[whole:]
        return [data[at : at + RECORD] for at in range(0, whole, RECORD)]


class Lines:
    """All lines of one rank of one group; made by all ranks together."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._token = secrets.token_bytes(_TOKEN)
        address, family = _own_address()
        self.listener = socket.create_server((address, 0), family=family, backlog=max(size, 16))
        store.set(f"line/{rank}", f"{address} {self.listener.getsockname()[1]} {self._token.hex()}")
        self._places: dict[int, tuple[str, int, bytes]] = {}
        for peer in range(size):
            if peer != rank:
                host, port, token = store.get(f"line/{peer}").decode().split(" ")
                self._places[peer] = (host, int(port), bytes.fromhex(token))
        self.lines: dict[int, Line] = {}
        deadline = time.monotonic() + timeout.total_seconds()
        for peer in range(rank):
            self.lines[peer] = Line(self._connect(peer, deadline))
        while len(self.lines) < size - 1:
            self._accept(deadline)
        self.listener.setblocking(False)

    def _connect(self, peer: int, deadline: float) -> socket.socket:
        host, port, token = self._places[peer]
        try:
            connection = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.001))
            connection.sendall(_GREETING.pack(HELLO, token, self.rank))
        except OSError as error:
            raise PeerFailure(
                f"rank {self.rank} cannot reach rank {peer} at {host}:{port} ({error}). Every rank must be able to connect to "
                "every other; GLOO_SOCKET_IFNAME names the network interface to use.",
                ranks=(peer,),
            ) from error
        return connection

    def _accept(self, deadline: float) -> None:
        missing = tuple(r for r in range(self.rank + 1, self.size) if r not in self.lines)
        self.listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = self.listener.accept()
        except TimeoutError as error:
            raise PeerFailure(
                f"rank {self.rank}: ranks {list(missing)} did not connect in time: they died, are stuck, or cannot reach "
                f"{self.listener.getsockname()[0]}; GLOO_SOCKET_IFNAME names the network interface to use.",
                ranks=missing,
            ) from error
        kind, peer = self._greeted(connection, max(deadline - time.monotonic(), 0.001))
        if kind == HELLO and peer in missing:
            self.lines[peer] = Line(connection)
        else:
            connection.close()

    def _greeted(self, connection: socket.socket, seconds: float) -> tuple[int, int]:
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

    # ------------------------------------------------------------ is it still running?

    def answer(self) -> None:
        """Tell whoever asks that this process runs; called when the listener is readable."""
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            with connection:
                if self._greeted(connection, 1.0)[0] == PING:
                    connection.sendall(_ALIVE)

    def silent(self, seconds: float) -> tuple[int, ...]:
        """The peers whose processes do not answer within ``seconds``: stopped, or their machine is gone."""
        asked: dict[int, socket.socket] = {}
        for peer, (host, port, token) in self._places.items():
            if self.lines[peer].open:
                connection = socket.socket(self.listener.family)
                connection.settimeout(seconds)
                with contextlib.suppress(OSError):
                    connection.connect((host, port))
                    connection.sendall(_GREETING.pack(PING, token, self.rank))
                asked[peer] = connection
        deadline = time.monotonic() + seconds
        silent = []
        for peer, connection in asked.items():
            with connection:
                ready, _, _ = select.select([connection], [], [], max(deadline - time.monotonic(), 0))
                try:
                    answered = bool(ready) and connection.recv(1) == _ALIVE
                except OSError:
                    answered = False
                if not answered:
                    silent.append(peer)
        return tuple(silent)

    def close(self, word: bytes) -> None:
        """Say ``word`` to everybody and hang up."""
        for line in self.lines.values():
            line.say(word)
            line.socket.close()
        self.listener.close()


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
