"""Conversations of two processes: messages in JSON over a connection, each behind its length."""

import contextlib
import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from commpress.collectives.transports.meeting import ENLIST

SENDING = 5.0  # seconds in which a message must go
LONGEST = 64 << 20  # bytes of a message
_LENGTH = struct.Struct("<I")
Message = dict[str, Any]


class Conversation:
    """A connection over which two processes agree: messages in JSON, each behind its length."""

    def __init__(self, connection: socket.socket, place: str = "", kind: int = ENLIST) -> None:
        connection.setblocking(False)
        self.socket, self.place, self.kind = connection, place, kind
        self.open, self.since = True, time.monotonic()
        self._data = b""
        self._seen: list[Message] = []  # that are still to be received

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, what: str, **fields: Any) -> None:
        data = json.dumps({"is": what, **fields}).encode()
        try:
            self.socket.settimeout(SENDING)
            self.socket.sendall(_LENGTH.pack(len(data)) + data)
            self.socket.setblocking(False)
        except OSError:
            self.close()

    @property
    def unread(self) -> bool:
        """True if something was read that is still to be received."""
        return bool(self._data or self._seen)

    @property
    def news(self) -> bool:
        """True if there is something to ``receive``, or if the other end has hung up."""
        self._read()
        return self.unread or not self.open

    def _read(self) -> None:
        # else ``receive`` takes a message first, or hangs up
        while self.open and len(self._data) < LONGEST + _LENGTH.size:
            try:
                part = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                self.close()
            self._data += part

    def receive(self) -> list[Message]:
        """The messages that have come; ``open`` is False after the last, or after what is none."""
        self._read()
        found, self._seen = self._seen, []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > LONGEST:
                self.close()
                break
            if len(self._data) < _LENGTH.size + length:
                break
            text, self._data = (
                self._data[_LENGTH.size : _LENGTH.size + length],
                self._data[_LENGTH.size + length :],
            )
            if (message := _message(text)) is None:
                self.close()
                break
            found.append(message)
        return found

    def look(self) -> list[Message]:
        """The messages that have come, which are still to be received."""
        self._seen = self.receive()
        return self._seen

    @property
    def gone(self) -> bool:
        """True if the other end has hung up; takes nothing that has come."""
        if self.open:
            with contextlib.suppress(BlockingIOError):
                try:
                    if not self.socket.recv(1, socket.MSG_PEEK):
                        self.close()
                except ConnectionError:
                    self.close()
        return not self.open

    def close(self) -> None:
        self.open = False
        self.socket.close()


def with_news(links: Sequence[Conversation]) -> set[Conversation]:
    """Those with something to ``receive``, or whose other end has hung up; the kernel is asked once
    for all."""
    found, files, poll = set[Conversation](), dict[int, Conversation](), select.poll()
    for link in links:
        if link.unread or not link.open:
            found.add(link)
        else:
            files[link.fileno()] = link
            poll.register(link, select.POLLIN)
    return found | {files[file] for file, _ in poll.poll(0)}


def _message(text: bytes) -> Message | None:
    """The words of a process of ours; None if somebody else has said this."""
    try:
        said = json.loads(text)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "is" in said else None
