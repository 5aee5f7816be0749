"""Lines: one small TCP connection between every two ranks of a group, beside the one that carries the data.

They carry records of 64 bytes and nothing else. A line that closes without a word of leave is a death: the kernel closes
it whatever the process was doing. The listener stays open: a peer that doubts whether this process still runs connects to it
and asks.
"""

import contextlib
import select
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from commpress.collectives.meeting import PING, Meeting
from commpress.integrations.agreement import RECORD

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
        self._meeting = Meeting(rank, size)
        self.listener = self._meeting.listener
        store.set(f"line/{rank}", self._meeting.here)
        self._meeting.learn([store.get(f"line/{peer}").decode() for peer in range(size)])
        connections = self._meeting.connect_all(time.monotonic() + timeout.total_seconds())
        self.lines = {peer: Line(connection) for peer, connection in connections.items()}

    # ------------------------------------------------------------ is it still running?

    def answer(self) -> None:
        """Tell whoever asks that this process runs; called when the listener is readable."""
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            with connection:
                if self._meeting.greeted(connection, 1.0)[0] == PING:
                    connection.sendall(_ALIVE)

    def silent(self, seconds: float) -> tuple[int, ...]:
        """The peers whose processes do not answer within ``seconds``: stopped, or their machine is gone."""
        asked: dict[int, socket.socket] = {}
        for peer, line in self.lines.items():
            if line.open:
                connection = socket.socket(self.listener.family)
                connection.settimeout(seconds)
                with contextlib.suppress(OSError):
                    self._meeting.greet(connection, peer, PING)
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
        self._meeting.close()
