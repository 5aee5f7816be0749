"""Lines: one small TCP connection between every two ranks of a group, beside the one that carries the data.

They carry records of 64 bytes and nothing else. A line that closes without a word of leave is a death: the kernel closes
it whatever the process was doing. The door stays open: a peer that doubts whether this process still runs connects to it
and asks.
"""

import contextlib
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from commpress.collectives.transports.meeting import PING, Meeting, close_in_children, welcome, welcomed
from commpress.integrations.process_group.records import RECORD


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
        self.door = self._meeting.door
        store.set(f"line/{rank}", self._meeting.here)
        try:
            self._meeting.learn([store.get(f"line/{peer}").decode() for peer in range(size)])
            connections = self._meeting.connect_all(time.monotonic() + timeout.total_seconds())
        except BaseException:
            self._meeting.close()
            raise
        self.lines = {peer: Line(connection) for peer, connection in connections.items()}
        close_in_children(self)

    # ------------------------------------------------------------ is it still running?

    def answer(self) -> None:
        """Tell whoever asks that this process runs; called when somebody is at the door."""
        for kind, _, connection in self.door.arrivals():
            with connection:
                if kind == PING:
                    welcome(connection)

    def silent(self, seconds: float) -> tuple[int, ...]:
        """The peers whose processes do not answer within ``seconds``: stopped, or their machine is gone."""
        asked: dict[int, socket.socket] = {}
        doubted = [peer for peer, line in self.lines.items() if line.open]
        for peer in doubted:
            with contextlib.suppress(OSError):
                asked[peer] = self._meeting.call(peer, PING, seconds)
        deadline = time.monotonic() + seconds
        answered = set()
        for peer, connection in asked.items():
            with connection:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                if welcomed(connection):
                    answered.add(peer)
        return tuple(peer for peer in doubted if peer not in answered)

    def forked(self) -> None:
        for line in self.lines.values():
            line.socket.close()

    def close(self, word: bytes) -> None:
        """Say ``word`` to everybody and hang up."""
        for line in self.lines.values():
            line.say(word)
            line.socket.close()
        self._meeting.close()
