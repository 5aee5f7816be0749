"""Connections of two processes that tell each other something: messages in msgpack, each behind its
length."""

import contextlib
import select
import socket
import struct
import time
from typing import Any

import msgpack

from commpress.collectives.transports.meeting import ENLIST

SENDING = 5.0  # seconds in which a message must go
LONGEST = 64 << 20  # bytes of a message
_LENGTH = struct.Struct("<I")
Message = dict[str, Any]


class Connection:
    """This process's end. Neither ``send`` nor ``receive`` ever waits.

    ``open`` is False once the other end has hung up, or has said what is no message; ``close`` is
    left to the owner, who may watch the file.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.open = connection, True
        self.unsent = bytearray()
        self._data = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, said: Any) -> None:
        """Send a message: what the kernel does not take now goes with the next one or ``flush``."""
        text = msgpack.packb(said)
        self.unsent += _LENGTH.pack(len(text)) + text
        self.flush()

    def flush(self) -> None:
        try:
            del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            return
        except OSError:  # it is closed; reading will tell
            self.unsent.clear()

    def receive(self) -> list[Any]:
        """The messages that have come."""
        self._read()
        found, at = [], 0
        while len(self._data) >= at + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, at)
            start, at = at, at + _LENGTH.size + length
            if length <= LONGEST and len(self._data) < at:
                at = start
                break
            message = _message(self._data[start + _LENGTH.size : at]) if length <= LONGEST else None
            if message is None:
                self.open, at = False, len(self._data)
            else:
                found.append(message)
        self._data = self._data[at:]
        return found

    def _read(self) -> None:
        """Take what has come, but no more than a message: else ``receive`` takes one first, or
        hangs up."""
        while self.open and len(self._data) < LONGEST + _LENGTH.size:
            try:
                part = self.socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            self.open = bool(part)
            self._data += part
            if len(part) < 1 << 16:
                return

    def close(self) -> None:
        self.open = False
        self.socket.close()


class Conversation(Connection):
    """A connection over which two processes agree: each message names what it ``is``."""

    def __init__(self, connection: socket.socket, place: str = "", kind: int = ENLIST) -> None:
        super().__init__(connection)
        self.place, self.kind, self.since = place, kind, time.monotonic()
        self._seen: list[Message] = []  # that are still to be received

    def tell(self, what: str, **fields: Any) -> None:
        """Send a message, and wait until it has gone."""
        self.send({"is": what, **fields})
        until = time.monotonic() + SENDING
        while self.open and self.unsent:
            room = select.poll()
            room.register(self, select.POLLOUT)
            if room.poll(1000 * max(until - time.monotonic(), 0.0)):
                self.flush()
            else:
                self.close()

    def receive(self) -> list[Message]:
        found, self._seen = self._seen, []
        for message in super().receive():
            if not isinstance(message, dict) or "is" not in message:
                self.open = False
                break
            found.append(message)
        if not self.open:
            self.close()
        return found

    def look(self) -> list[Message]:
        """The messages that have come, which are still to be received."""
        self._seen = self.receive()
        return self._seen

    @property
    def news(self) -> bool:
        """True if there is something to ``receive``, or if the other end has hung up."""
        self._read()
        return bool(self._data or self._seen) or not self.open

    @property
    def gone(self) -> bool:
        """True if the other end has hung up."""
        self._read()
        return not self.open


def _message(text: bytes) -> Any:
    """The message of a process of ours; None if somebody else has said this."""
    try:
        return msgpack.unpackb(text)
    except ValueError:
        return None
