"""Heartbeats: whether the process behind a door runs, asked again and again without waiting."""

import socket
import time
from collections.abc import Callable, Sequence

from commpress.collectives.transports import interface
from commpress.collectives.transports.meeting import GONE_ON, PING, WELCOME, Knock
from commpress.errors import PeerFailure

AGAIN = 0.25  # seconds between two questions
UNATTENDED = 1.0  # seconds without a look after which silence counts anew
GIVE_UP_AFTER = 5.0  # seconds without an answer to one of them
DOUBT = 0.5  # seconds that a rank is awaited before it is asked


class Heartbeat:
    """A question, asked again and again, whether the process behind a door runs."""

    def __init__(self, place: str, epochs: Callable[[], tuple[int, int]]) -> None:
        self._place, self._epochs = place, epochs
        # of the first question; of the last answer, if there was one
        self.since = self.answered = time.monotonic()
        # nobody listened; who listens there since may be another process, unless it answers
        self.dead = False
        self.gone_on = False  # it is of a later epoch
        self._began = 0.0
        self._looked = self.since
        self._socket: socket.socket | None = None
        self._call: Knock | None = None
        self._asked: tuple[int, int] | None = None  # of which epochs this process was then

    def look(self) -> None:
        """Go on with the question, without waiting."""
        now = time.monotonic()
        # this process was busy: the other one may have answered, and nobody looked
        if now > self._looked + UNATTENDED:
            self.answered = max(self.answered, now - UNATTENDED)
        self._looked = now
        if self._socket is None:
            if now < self._began + AGAIN:
                return
            host, port, _ = self._place.split(" ")
            self._began, self._call = now, None
            self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._socket.setblocking(False)
            self._socket.connect_ex(interface.for_connect(host, int(port)))
        try:
            if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, "nobody listens")
            if self._call is None:
                self._asked = self._epochs()
                self._call = Knock(self._socket, self._place, PING, 0, self._asked)
            answer = self._call.answer()
            if answer is None:
                raise BlockingIOError
            if answer in (WELCOME, GONE_ON):
                self.answered, self.dead = time.monotonic(), False
                # else it may be that this process has
                self.gone_on = answer == GONE_ON and self._asked == self._epochs()
            self.close()
        except BlockingIOError:
            if now > self._began + GIVE_UP_AFTER:
                self.close()
        except OSError as error:
            self.dead |= isinstance(error, ConnectionRefusedError)
            self.close()

    def heard_since(self, moment: float) -> bool:
        return self.answered > max(moment, self.since)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Awaited:
    """Ranks whose connections are awaited; one whose process is gone ends the wait."""

    def __init__(
        self, rank: int, places: Sequence[str], epochs: Callable[[], tuple[int, int]]
    ) -> None:
        self._rank, self._places, self._epochs = rank, places, epochs
        self._since = time.monotonic()
        self._asked: dict[int, Heartbeat] = {}

    def check(self, missing: Sequence[int]) -> None:
        """Go on asking those who are missing, without waiting; an error names who is gone."""
        if time.monotonic() < self._since + DOUBT:
            return
        for peer in missing:
            if peer not in self._asked:
                self._asked[peer] = Heartbeat(self._places[peer], self._epochs)
            self._asked[peer].look()
        if gone := tuple(peer for peer in missing if self._asked[peer].dead):
            said = (
                f"rank {self._rank}: the processes of ranks {list(gone)} ended before they "
                "connected."
            )
            raise PeerFailure(said, ranks=gone)

    def close(self) -> None:
        for each in self._asked.values():
            each.close()
