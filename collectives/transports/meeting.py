"""Meeting of the ranks of a group for connections of our own: each has an address, a port and a
token nobody else knows.

Whoever connects must know the listener's random token, which travels only among the ranks, and is
told that he is in. Anybody else may knock: nobody waits for him. A greeting says of which epoch of
the group it is: connections of others are refused.

A store tells the token to all who reach it. So where the run has a key (``run_key``) both ends
prove that they have it:

    caller → door   greeting with the bit KEYED, the caller's random number
    door → caller   a random number of its own
    caller → door   proof over both, the greeting and the door's address
    door → caller   the answer, and a proof over the same and the answer

An end without the key, or with another one, is told DIFFERS.

Heartbeats ask again and again at a door, without waiting, whether the process behind it runs.
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, Protocol, TypeVar

from commpress.collectives.transports import interface
from commpress.collectives.transports.run_key import (
    CALLER,
    DOOR,
    FILE,
    NONCE,
    PROOF,
    VARIABLE,
    nonce,
    proof,
    proves,
    run_key,
)
from commpress.errors import PeerFailure

# kinds of greeting: a connection that stays; a question whether this process runs
HELLO, PING = 4, 5
# of a member that wants to agree on who goes on; of one that wants to become a member
ENLIST, JOIN = 7, 8
KEYED = 0x80  # with a kind: the caller has the key of the run
WELCOME, GONE_ON = b"!", b">"  # answers to a greeting; GONE_ON: this process is of another epoch
# an answer without a proof: only one of both has the key of the run, or they have two
DIFFERS = b"k"
PATIENCE = 1.0  # seconds that a visitor has for his greeting, and again for his proof
_AGAIN = 0.02  # seconds before a rank that was not taken in calls again
_LOOK = 0.05  # seconds between two looks at who has died meanwhile
STRANGERS = 64  # visitors at the door who have not greeted; the oldest goes when another comes
_TOKEN = 16
# kind, token, rank, epoch, the epoch that it may be of by now
_GREETING = struct.Struct(f"<B{_TOKEN}sIQQ")
GIVE_ALL = (
    f"only one has the key of a run, or they have two. Set {VARIABLE} or {FILE} alike in every "
    "process of the run"
)
T = TypeVar("T")

log = logging.getLogger("commpress")


def _no_proof(answer: bytes) -> bytes:
    """The proof of a run without a key."""
    return b""


class Visit(NamedTuple):
    """A visitor who has greeted as only ranks can."""

    kind: int
    rank: int
    connection: socket.socket
    # the one it is of, and the one that it may be of by now; 0: none
    epochs: tuple[int, int] = (0, 0)
    proof: Callable[[bytes], bytes] = _no_proof  # of an answer

    def reply(self, answer: bytes = WELCOME) -> bool:
        """Tell the visitor that it is in; whether it is still there."""
        words = answer + self.proof(answer)
        try:
            return self.connection.send(words) == len(words)
        except OSError:
            return False


@dataclass(eq=False)
class _Visitor:
    connection: socket.socket
    until: float
    words: bytes = b""
    challenge: bytes = b""  # the door's number, once it is sent

    @property
    def due(self) -> int:
        """Bytes of his words, as far as they are due by now."""
        keyed = bool(self.words) and bool(self.words[0] & KEYED)
        return _GREETING.size + keyed * NONCE + bool(self.challenge) * PROOF


class Door:
    """A listener, and the visitors who have not said who they are. Its file is readable when one of
    them is to be heard.

    Any thread may listen, and close it.
    """

    def __init__(self, address: str, family: socket.AddressFamily, room: int) -> None:
        self.token, self._key, self._warned = secrets.token_bytes(_TOKEN), run_key(), False
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
                    if (
                        visitor.connection in self._visitors
                        and (visit := self._hear(visitor)) is not None
                    ):
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
            part = visitor.connection.recv(visitor.due - len(visitor.words))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        visitor.words += part
        if part and len(visitor.words) < visitor.due:
            return None
        visit = self._recognised(visitor) if part else None
        if visit is not None:
            self._selector.unregister(visitor.connection)
            del self._visitors[visitor.connection]
        elif not part or len(visitor.words) == visitor.due:  # else his proof is due now
            self._dismiss(visitor)
        return visit

    def _recognised(self, visitor: _Visitor) -> Visit | None:
        """The visit of one who has said all that is due; None if he is a stranger, or has a proof
        to give first."""
        greeting = visitor.words[: visitor.due - bool(visitor.challenge) * PROOF]
        kind, token, rank, *epochs = _GREETING.unpack(greeting[: _GREETING.size])
        if not secrets.compare_digest(token, self.token):
            return None
        visit = partial(Visit, kind & ~KEYED, rank, visitor.connection, (epochs[0], epochs[1]))
        if bool(kind & KEYED) != (self._key is not None):
            self._refuse(visitor)
            return None
        if self._key is None:
            return visit()
        if not visitor.challenge:
            visitor.challenge, visitor.until = nonce(), visitor.until + PATIENCE
            with contextlib.suppress(OSError):  # he is gone, and no proof comes
                visitor.connection.send(visitor.challenge)
            return None
        seen = self.here, greeting, visitor.challenge
        if not proves(visitor.words[-PROOF:], proof(self._key, CALLER, *seen)):
            self._refuse(visitor)
            return None
        return visit(partial(proof, self._key, DOOR, *seen))

    def _refuse(self, visitor: _Visitor) -> None:
        """Tell a visitor who knows the token that he has no key, or another one."""
        if not self._warned:
            self._warned = True
            log.warning(
                "somebody at %s knows this door's token and not the run's key: %s",
                _peer(visitor.connection),
                GIVE_ALL,
            )
        with contextlib.suppress(OSError):  # he is gone
            visitor.connection.send(DIFFERS)

    def _dismiss(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection]
        visitor.connection.close()


class Meeting:
    """One rank among the doors of all. ``here`` must reach its own, and those of all come to
    ``learn``.

    ``door``: one that stays when the meeting is over; without it the meeting has its own. Visitors
    who are not for this meeting go to ``others``. ``check`` is told while it waits for whom, and
    may raise.
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

        Note: a rank that was slow to greet is a stranger to its peer, who hangs up. So it calls
        again until it is welcome.
        """
        connections: dict[int, socket.socket] = {}
        calls: dict[int, Knock] = {}
        with selectors.DefaultSelector() as news:
            news.register(self.door, selectors.EVENT_READ)
            try:
                while missing := [
                    r for r in range(self.size) if r != self.rank and r not in connections
                ]:
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
                        peer, call = key.data, calls[key.data]
                        answer = call.look()
                        if answer is None:
                            continue
                        news.unregister(call)
                        del calls[peer]
                        if answer == WELCOME:
                            connections[peer] = call.socket
                            continue
                        call.close()
                        if answer == DIFFERS:
                            raise self._differs(peer)
                        time.sleep(_AGAIN)
            except BaseException:
                for connection in [
                    *connections.values(),
                    *(call.socket for call in calls.values()),
                ]:
                    connection.close()
                raise
        return connections

    def call(self, peer: int, kind: int, seconds: float) -> "Knock":
        """A connection to a peer on which we have said who we are. ``look`` tells whether it took
        us in."""
        return knock(self._places[peer], kind, self.rank, (self.epoch, 0), seconds)

    def close(self) -> None:
        if not self._lent:
            self.door.close()

    def _call(self, peer: int, seconds: float) -> "Knock":
        try:
            call = self.call(peer, HELLO, seconds)
            call.socket.setblocking(False)
            return call
        except OSError as error:
            host, port, _ = self._places[peer].split(" ")
            raise PeerFailure(
                f"rank {self.rank} cannot reach rank {peer} at {host} port {port} ({error}). Every "
                "rank must be able to connect to every other; GLOO_SOCKET_IFNAME names the network "
                "interface to use.",
                ranks=(peer,),
            ) from error

    def _received(self, missing: Sequence[int]) -> dict[int, socket.socket]:
        """The connections that higher ranks have made."""
        came: dict[int, socket.socket] = {}
        for visit in self.door.arrivals():
            kind, peer, connection, (epoch, _), _ = visit
            due = (
                kind == HELLO
                and epoch == self.epoch
                and peer in missing
                and peer > self.rank
                and peer not in came
            )
            if not due:
                self._others(visit)
            elif visit.reply():
                came[peer] = connection
            else:
                connection.close()
        return came

    def _differs(self, peer: int) -> PeerFailure:
        host, port, _ = self._places[peer].split(" ")
        return PeerFailure(
            (
                f"rank {self.rank} and rank {peer} at {host} port {port} are not of one run: "
                f"{GIVE_ALL}"
            ),
            ranks=(peer,),
        )

    def _absent(self, missing: tuple[int, ...]) -> PeerFailure:
        return PeerFailure(
            f"rank {self.rank}: ranks {list(missing)} did not connect in time: they died, are "
            f"stuck, or cannot reach {self.here.split(' ')[0]}; GLOO_SOCKET_IFNAME names the "
            "network interface to use.",
            ranks=missing,
        )


def nothing() -> None:
    """Nobody is known to be gone."""


def own_door(room: int) -> Door:
    """A new door on the interface by which peers find this rank."""
    address, family = interface.own_address()
    return Door(address, family, room)


class Knock:
    """A call at a door, from the greeting to the answer."""

    def __init__(
        self, connection: socket.socket, place: str, kind: int, rank: int, epochs: tuple[int, int]
    ) -> None:
        """Greet over a connection that is made."""
        self.socket, self._place, self._key = connection, place, run_key()
        keyed = self._key is not None
        self._greeting = _GREETING.pack(
            kind | keyed * KEYED, bytes.fromhex(place.split(" ")[2]), rank, *epochs
        )
        self._greeting += nonce() if keyed else b""
        self._challenge, self._words = b"", b""  # the door's number; what it says now
        connection.sendall(self._greeting)

    def __enter__(self) -> "Knock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self.socket.fileno()

    def look(self) -> bytes | None:
        """The answer, b"" where there will be none; None if it has not come yet. Waits as long as
        the connection does."""
        try:
            return self.answer()
        except OSError:
            return b""

    def answer(self) -> bytes | None:
        """Like ``look``; errors of the connection are raised."""
        while True:
            due = 1 if self._key is None else 1 + PROOF if self._challenge else NONCE
            try:
                part = self.socket.recv(due - len(self._words))
            except BlockingIOError:
                return None
            self._words += part
            if not part:
                return DIFFERS if self._words == DIFFERS else b""
            if len(self._words) < due:
                continue
            if self._key is None:
                return self._words
            if self._challenge:
                answer, given = self._words[:1], self._words[1:]
                seen = self._place, self._greeting, self._challenge, answer
                return answer if proves(given, proof(self._key, DOOR, *seen)) else DIFFERS
            self._challenge, self._words = self._words, b""
            self.socket.sendall(
                proof(self._key, CALLER, self._place, self._greeting, self._challenge)
            )

    def close(self) -> None:
        self.socket.close()


def knock(place: str, kind: int, rank: int, epochs: tuple[int, int], seconds: float) -> Knock:
    """A call at a door, by a connection on which we have said who we are."""
    host, port, _ = place.split(" ")
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    connection.settimeout(max(seconds, 0.001))
    try:
        connection.connect(interface.for_connect(host, int(port)))
        return Knock(connection, place, kind, rank, epochs)
    except BaseException:
        connection.close()
        raise


def answers(calls: Mapping[T, Knock], seconds: float) -> dict[T, bytes]:
    """Answers of those who give one in time. The calls are closed."""
    found: dict[T, bytes] = {}
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as news, contextlib.ExitStack() as stack:
        for who, call in calls.items():
            stack.enter_context(call)
            call.socket.setblocking(False)
            news.register(call, selectors.EVENT_READ, who)
        while len(found) < len(calls) and (left := until - time.monotonic()) > 0:
            for key, _ in news.select(left):
                answer = calls[key.data].look()
                if answer is not None:
                    found[key.data] = answer
                    news.unregister(key.fileobj)
    return found


def _answer(visit: Visit) -> None:
    """Tell whoever asks that this process runs."""
    with visit.connection:
        if visit.kind == PING:
            visit.reply()


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "an address unknown"


# ---------------------------------------------------------------- forked children


class FileOwner(Protocol):
    """An object with open files."""

    def forked(self) -> None:
        """Close them, in the child. Locks may be held by threads that are not there."""


_owners: weakref.WeakSet[FileOwner] = weakref.WeakSet()


def close_in_children(owner: FileOwner) -> None:
    """Have forked children close these files: while a child has a connection open, nobody notices
    that its parent has died.

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
            self.answered = now
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

    def hear(self) -> None:
        """Take note of a message of that process, which is as good as an answer."""
        self.answered = time.monotonic()

    @property
    def silent(self) -> float:
        """Seconds without an answer, when it was last looked for one: this process may have been
        stopped since."""
        return self._looked - self.answered

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
