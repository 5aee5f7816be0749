"""Rows over TCP connections of our own, one between every two ranks; those of tensors on CUDA by
way of pinned host memory.

A message is an envelope (tag and bytes of the payload), a header of 64 bytes and the payload, one
behind the other: nobody asks before he sends. Whoever waits for a transfer moves the bytes of all
that are under way (the leader; others wait for him), so that no other thread stands between a
tensor and the kernel. What comes before its receive is posted is read aside.

Note: long fat links. Between ranks far apart (``lanes``) a long payload goes in pieces over several
connections: each takes the next piece when the kernel has room for it. The envelope and the header
go over the first connection, like all that is short, so that nothing waits behind a long row. The
receiver tells over one more connection, whose end harms nobody, which pieces it has. A connection
that ends before the first one is no death: others carry again what the receiver has not.

Note: when nobody waits. The kernel's buffers take a few MiB of each peer. A thread looks every
``TICK`` seconds, so that ranks that wait for each other in different transports or libraries still
come together.

Note: why not through Gloo. Its messages wait for a word from the receiver, its threads wake for
every part of one, and processes end where a message is longer than its receive. Measured in
docs/transports.md.
"""

import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import cast

import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.collectives.frame import HEADER, LONGEST, Rows, memory_of, rows_in, same
from commpress.collectives.transports.lanes import agreed, for_pieces
from commpress.collectives.transports.meeting import Meeting, close_in_children, nothing
from commpress.collectives.transports.staged import Scratch, Staged
from commpress.errors import CommunicationError, Corrupted, PeerFailure
from commpress.work import Work, started

_PLACE = 160  # bytes in which a rank says where it is
_LENGTHS = struct.Struct("<QQ")  # tag, bytes of the payload
_HEAD = struct.Struct(f"<QQQ{HEADER}s")  # these, a checksum of them and of the header, the header
_PIECE = struct.Struct(f"<QQ{HEADER - 16}x")  # number of its message between two ranks, offset
GIVE_UP = 2**64 - 1  # the tag of a message in which a rank says why it gives up
# of a piece of a payload; of the word that it has come; of what ranks say before all else
PIECE, HAS, SETTLE = 2**64 - 2, 2**64 - 3, 2**64 - 4
LONGEST_REASON = 4096  # bytes of that
HUNG_UP = "closed its connection: it died, left or gave up waiting"
DAMAGED = (
    "sent an envelope that came damaged: memory or network corrupt data; check both before going on"
)
_PARSED = 16 << 10  # bytes read at once while it is not known whose they are
ROOM = 4 << 20  # bytes a connection takes while nobody reads it, as far as the kernel allows
WAKE = 256 << 10  # bytes of a payload that are worth waking up for
EARLY = 256 << 20  # bytes read aside, above which a peer is read only if something is due from it
DIVIDED = 128 << 10  # bytes of a payload that goes in pieces, where there are several connections
PIECES = (64 << 10, 256 << 10)  # bytes of a piece, at least and at most
TICK = 0.02
READS = 8  # reads from one peer before another has its turn

Parts = tuple[memoryview, memoryview]  # a header and a payload


class SocketTransport:
    """Among all ranks of a mesh, or some of them, ascending."""

    ordered, checks = False, True

    def __init__(self, mesh: "Mesh", *, timeout: timedelta, members: Sequence[int] = ()) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.members = tuple(members or range(len(mesh.world)))
        self.rank, self.size = self.members.index(mesh.rank), len(self.members)
        self.failure: str | None = None

    @cached_property
    def _scratch(self) -> Scratch:
        return Scratch(pinned=True)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        if inp.device.type == "cuda":
            return Staged(self, self._scratch).all_to_all(out, inp, tag)
        ours = _parts(inp)
        wanted = dict.fromkeys(ours, bytes(ours[self.rank][0]))
        out[self.rank] = inp[self.rank]
        return self._post(_parts(out), ours, wanted, tag, (out, inp))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        if inp.device.type == "cuda":
            return Staged(self, self._scratch).all_gather(out, inp, tag)
        ours = _parts(inp)[0]
        out[self.rank] = inp[0]
        return self._post(_parts(out), dict.fromkeys(range(self.size), ours), None, tag, (out, inp))

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        if any(p.device.type == "cuda" for p in (*out.payloads.values(), *inp.payloads.values())):
            return Staged(self, self._scratch).exchange(out, inp, wanted, tag)
        rows = rows_in(wanted)
        expected = {r: bytes(rows[r]) for r in out.payloads}
        if self.rank in inp.payloads:
            out.payloads[self.rank].copy_(inp.payloads[self.rank])
            out.headers[self.rank] = inp.headers[self.rank]
        return self._post(_apart(out), _apart(inp), expected, tag, (out, inp))

    def subset(self, ranks: Sequence[int]) -> "SocketTransport | None":
        if self.rank not in ranks:
            return None
        members = sorted(self.members[r] for r in ranks)
        return SocketTransport(self.mesh, timeout=self.timeout, members=members)

    def abandon(self, reason: str) -> None:
        self.failure = reason
        self.mesh.engine.abandon(reason)

    def peer(self, rank: int) -> str:
        """The name of a rank in messages: its number here, and globally where that differs."""
        world = self.mesh.world[self.members[rank]]
        return f"rank {rank}" if world == rank else f"rank {rank} (global rank {world})"

    def early(self) -> dict[int, bytes]:
        """Messages that have come before this rank asked for them: a header of each by its tag."""
        return self.mesh.engine.early()

    def lost(self) -> dict[int, str]:
        """Ranks that are gone, as far as their connections say by now, and how."""
        gone = self.mesh.engine.look()
        return {r: gone[member] for r, member in enumerate(self.members) if member in gone}

    def _post(
        self,
        out: Mapping[int, Parts],
        inp: Mapping[int, Parts],
        wanted: dict[int, bytes] | None,
        tag: int,
        keep: object,
    ) -> Work:
        if self.failure:
            raise CommunicationError(
                f"this transport failed before: {self.failure} Destroy the process group and "
                "build a new one."
            )
        transfer = SocketTransfer(self, wanted, keep)
        self.mesh.engine.post(transfer, out, inp, tag)
        return transfer


class Mesh:
    """The connections of one rank, shared by a transport and its subsets: closed when the last of
    them goes.

    Made by all ranks together. ``world`` has their global numbers; ``tell`` gives every rank what
    all of them say. ``check`` is called while ranks are awaited, and raises if one of them is gone.
    """

    def __init__(
        self,
        rank: int,
        world: Sequence[int],
        tell: Callable[[bytes], list[bytes]],
        timeout: timedelta,
        check: Callable[[], object] = nothing,
    ) -> None:
        self.rank, self.world = rank, tuple(world)
        deadline = time.monotonic() + timeout.total_seconds()
        meeting = Meeting(rank, len(world), check=lambda missing: check())
        try:
            meeting.learn(
                [place.decode().strip() for place in tell(meeting.here.encode().ljust(_PLACE))]
            )
            connections = meeting.connect_all(deadline)
            self.engine = SocketEngine(connections)
            weakref.finalize(self, self.engine.close)
            self.connections = agreed(connections, lambda said: self._share(said, timeout))
            if self.connections > 1:
                self.engine.divides = True  # before a peer can know that all are connected
                more = [meeting.connect_all(deadline) for _ in range(self.connections + 1)]
                self.engine.widen(more, timeout.total_seconds() / 2)
        finally:
            meeting.close()

    def _share(self, said: bytes, timeout: timedelta) -> list[bytes]:
        """Return the words of every rank, all equally long."""
        ours = torch.tensor([[*bytes(HEADER), *said]], dtype=torch.uint8)
        every = ours.repeat(len(self.world), 1)
        SocketTransport(self, timeout=timeout).all_gather(every, ours, SETTLE).wait()
        return [bytes(row[HEADER:].tolist()) for row in every]


@dataclass(eq=False)
class SocketTransfer:
    """Rows to and from peers. Ranks are those of its transport."""

    transport: SocketTransport
    wanted: dict[int, bytes] | None  # the header that is due from each rank, if that is known
    keep: object  # the tensors whose memory moves
    posted: float = field(default_factory=time.monotonic)
    # ranks whose header has not come, and where it belongs
    headers_due: dict[int, memoryview] = field(default_factory=dict)
    headers_unsent: set[int] = field(default_factory=set)  # ranks to which our header has not gone
    receiving: set[int] = field(default_factory=set)
    sending: set[int] = field(default_factory=set)
    # ranks that hung up before the end, and how
    closed: dict[int, str] = field(default_factory=dict)
    differ: bool = False  # a header is not the one that is due
    given_up: str = ""  # some rank of the mesh uses these connections no more: why
    damaged: tuple[int, ...] = ()  # ranks whose bytes were the reason, by their numbers on the mesh
    broken: str = ""  # a payload is not as long as its header says

    @property
    def over(self) -> bool:
        if self.closed or self.broken or self.given_up:
            return True
        if self.differ:
            return not self.headers_due and not self.headers_unsent
        return not self.receiving and not self.sending

    def wait(self) -> None:
        """Until every row is here and every own row gone, or a peer's header differs: then
        ``verify`` names it."""
        transport = self.transport
        transport.mesh.engine.drive(self, time.monotonic() + transport.timeout.total_seconds())
        if self.broken:
            transport.abandon(f"rank {transport.rank}: {self.broken}.")
            raise CommunicationError(f"rank {transport.rank}: {self.broken}")
        if self.differ and self.wanted:
            for r, header in self.headers_due.items():
                header[:HEADER] = self.wanted[r]  # not to blame
            transport.failure = "the ranks disagreed and left messages behind."
        elif not self.over or self.closed or (self.given_up and (self.receiving or self.sending)):
            raise self._failure()

    def _failure(self) -> CommunicationError:
        """Name the ranks at fault.

        Note: closed or silent. Whoever has waited in vain may end before we do, and looks dead
        then. So a connection that closes late does not excuse ranks that sent nothing all the time;
        one that closes early was a death.
        """
        seconds, transport = time.monotonic() - self.posted, self.transport
        closed = self.closed.keys()
        damaged = sorted(r for r, how in self.closed.items() if how == DAMAGED)
        told = damaged or sorted(r for r, how in self.closed.items() if how != HUNG_UP)
        late = seconds >= transport.timeout.total_seconds() / 2 and not told
        silent = sorted(self.receiving - closed) if late or not closed else []
        blocked = sorted(self.sending - closed) if not closed and not silent else []
        says = [f"{transport.peer(r)} was silent for {seconds:.1f} s" for r in silent]
        says += [f"{transport.peer(r)} took nothing for {seconds:.1f} s" for r in blocked]
        says += [f"{transport.peer(r)} {self.closed[r]}" for r in sorted(closed)]
        if self.given_up and not closed:
            told = [transport.members.index(r) for r in self.damaged if r in transport.members]
            silent, blocked, says = [], [], [self.given_up.rstrip(".")]
        transport.failure = f"rank {transport.rank}: " + "; ".join(says) + "."
        kind = Corrupted if damaged or self.damaged else PeerFailure
        return kind(transport.failure, ranks=tuple(told or silent or blocked or sorted(closed)))


@dataclass(eq=False)
class Receipt:
    """Memory for a row that one rank sends."""

    transfer: SocketTransfer
    rank: int
    parts: Parts


@dataclass(eq=False)
class IncomingMessage:
    """Message that comes: into its receipt, aside if none is posted yet, or to nowhere if it does
    not fit."""

    header: bytes
    length: int
    at: int = 0
    memory: memoryview | None = None
    receipt: Receipt | None = None
    gives_up: bool = False
    divided: bool = False
    had: set[int] = field(default_factory=set)  # offsets of the pieces that have come
    end_of_it: str = ""  # how the peer went before it was whole

    def end(self, how: str) -> None:
        """The peer went before the message was whole."""
        self.end_of_it = how
        if self.receipt is not None:
            self.receipt.transfer.closed[self.receipt.rank] = how

    def meet(self, receipt: Receipt) -> None:
        """Bring the header where it belongs, and what has come of the payload, if that fits."""
        transfer, (header, payload) = receipt.transfer, receipt.parts
        header[:] = self.header
        del transfer.headers_due[receipt.rank]
        wanted = transfer.wanted and transfer.wanted[receipt.rank]
        if wanted and not same(wanted, self.header):
            transfer.differ = True
        elif self.length != len(payload):
            transfer.broken = (
                f"rank {receipt.rank} sent {self.length} bytes where {len(payload)} were due"
            )
        else:
            if self.memory is not None:
                came = self.length if self.divided else self.at
                payload[:came] = self.memory[:came]
            self.memory, self.receipt = payload, receipt
            self.advance(0)
            return
        self.memory = None

    def advance(self, count: int) -> None:
        self.at += count
        if self.at == self.length and self.receipt is not None:
            self.receipt.transfer.receiving.discard(self.receipt.rank)
            self.receipt = None


class IncomingPiece:
    """Part of a message that comes over any connection, perhaps twice: then to nowhere."""

    receipt, gives_up, divided = None, False, False

    def __init__(self, whole: IncomingMessage | None, header: bytes, length: int) -> None:
        self.whole, self.header, self.length, self.at = whole, header, length, 0
        self.number, self.offset = _PIECE.unpack(header)

    @property
    def memory(self) -> memoryview | None:
        whole = self.whole
        if whole is None or whole.memory is None or self.offset in whole.had:
            return None
        return whole.memory[self.offset : self.offset + self.length]

    def advance(self, count: int) -> None:
        self.at += count
        if self.at == self.length and self.whole and self.offset not in self.whole.had:
            self.whole.had.add(self.offset)
            self.whole.advance(self.length)


Incoming = IncomingMessage | IncomingPiece


class OutgoingMessage:
    """Message that goes. The reason for giving up belongs to no transfer."""

    def __init__(
        self,
        transfer: SocketTransfer | None,
        rank: int,
        header: bytes,
        payload: memoryview,
        tag: int,
    ) -> None:
        self.transfer, self.rank = transfer, rank
        self.left = [memoryview(envelope(tag, len(payload), header)), payload]
        self.unsent = set[OutgoingPiece]()  # those that have never gone as a whole
        self.unconfirmed = set[OutgoingPiece]()

    def divide(self, number: int, connections: int) -> "list[OutgoingPiece]":
        """Leave the payload to pieces, a few for each connection."""
        payload, (least, most) = self.left.pop(), PIECES
        self.left.append(payload[:0])
        size = min(max(len(payload) // (4 * connections), least), most)
        pieces = [
            OutgoingPiece(self, _PIECE.pack(number, at), payload[at : at + size])
            for at in range(0, len(payload), size)
        ]
        self.unsent, self.unconfirmed = set(pieces), set(pieces)
        return pieces

    def advance(self, count: int) -> bool:
        """Count bytes that have gone; true if all have."""
        while self.left and count >= len(self.left[0]):
            count -= len(self.left.pop(0))
        if self.left:
            self.left[0] = self.left[0][count:]
        if self.transfer is not None and len(self.left) < 2:
            self.transfer.headers_unsent.discard(self.rank)
            if not self.left and not self.unsent:
                self.transfer.sending.discard(self.rank)
                for piece in self.unconfirmed:
                    piece.keep()
        return not self.left

    def fail(self, how: str) -> None:
        """The peer has hung up."""
        if self.transfer is not None:
            self.transfer.closed[self.rank] = how


class OutgoingPiece(OutgoingMessage):
    """Part of a payload, until the receiver has said that it has it."""

    carrier: "_Connection | None" = None

    def __init__(self, whole: OutgoingMessage, header: bytes, payload: memoryview) -> None:
        super().__init__(None, whole.rank, header, payload, PIECE)
        self.whole, self.header, self.payload = whole, header, payload

    def advance(self, count: int) -> bool:
        gone = super().advance(count)
        if gone and self in self.whole.unsent:
            self.whole.unsent.remove(self)
            self.whole.advance(0)
        return gone

    def keep(self) -> None:
        """Have the bytes in memory of our own, whatever becomes of the tensor."""
        self.payload = memoryview(bytes(self.payload))
        if self.left:
            self.left[-1] = self.payload[len(self.payload) - len(self.left[-1]) :]

    def again(self) -> None:
        """Go from the start."""
        self.left = [memoryview(envelope(PIECE, len(self.payload), self.header)), self.payload]

    def fail(self, how: str) -> None:
        if self in self.whole.unsent:
            self.whole.fail(how)


def envelope(tag: int, length: int, header: bytes) -> bytes:
    """Return a header behind its envelope."""
    return _HEAD.pack(tag, length, checksum_of(_LENGTHS.pack(tag, length) + header), header)


def opened(head: memoryview) -> tuple[int, int, bytes] | None:
    """Return tag, bytes of the payload and header; None if they are not what was sent, or more than
    can be."""
    tag, length, told, header = _HEAD.unpack(head)
    limit = LONGEST_REASON if tag == GIVE_UP else LONGEST
    whole = checksum_of(_LENGTHS.pack(tag, length) + header) == told and length <= limit
    return (tag, length, header) if whole else None


class _Connection:
    """This rank's end of a connection to a peer."""

    def __init__(self, peer: "_Peer | None", connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.peer = peer if peer is not None else cast(_Peer, self)
        self.open = True
        self.outgoing: deque[OutgoingMessage] = deque()
        # whose payload comes now
        self.message: Incoming | None = None
        self.unparsed = memoryview(bytearray(_PARSED))
        self.end = 0  # of what was read into ``unparsed``
        self.early = False  # a piece has come whose message has not
        self.mask = select.EPOLLIN
        self._wake_at = 0
        # makes the kernel's buffer as large as the wake-up would need, and leaves it so
        self.wake_at(ROOM)
        self.wake_at(1)

    def wake_at(self, count: int) -> None:
        """Wake up for so many bytes."""
        if count != self._wake_at:
            self._wake_at = count
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


class _Peer(_Connection):
    """The first connection to a peer, and what is known of it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        super().__init__(None, connection)
        self.rank = rank
        self.end_of_it = ""  # how it was closed
        self.due = 0  # receipts posted that no message has met
        self.carriers: list[_Connection] = []  # of pieces
        self.told: _Connection | None = None  # which pieces have come
        self.sent = self.came = 0  # divided messages
        self.pieces: deque[OutgoingPiece] = deque()  # that no connection has taken
        self.unconfirmed: dict[bytes, OutgoingPiece] = {}  # taken, by their headers
        self.incoming: dict[int, IncomingMessage] = {}  # divided, and not whole yet


class SocketEngine:
    """Moves what is under way on the connections of one rank. All methods may be called by any
    thread."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._poll = select.epoll()
        self._peers = {rank: _Peer(rank, connection) for rank, connection in connections.items()}
        self._by_file: dict[int, _Connection] = {}
        for peer in self._peers.values():
            self._watch_for(peer)
        self.divides = False  # long payloads, so that peers expect them in pieces
        self._receipts: dict[tuple[int, int], Receipt] = {}
        self._early: dict[tuple[int, int], deque[IncomingMessage]] = defaultdict(deque)
        self._early_bytes = 0
        self._under_way: set[SocketTransfer] = set()
        self._leading = self._closed = False
        self._given_up, self._damaged = "", list[int]()
        self._driven = 0.0
        self._busy = threading.Event()
        close_in_children(self)
        started("commpress-sockets", self._watch)

    def widen(self, more: Sequence[Mapping[int, socket.socket]], seconds: float) -> None:
        """Take further connections to every peer: the last for receipts, the others for pieces,
        given up where nobody acknowledges one for so long."""
        with self._changed:
            for peer in self._peers.values():
                for each in more:
                    for_pieces(each[peer.rank], seconds)
                *peer.carriers, peer.told = [_Connection(peer, each[peer.rank]) for each in more]
                for end in (*peer.carriers, peer.told):
                    self._watch_for(end)

    def post(
        self, transfer: SocketTransfer, out: Mapping[int, Parts], inp: Mapping[int, Parts], tag: int
    ) -> None:
        """Make room for what comes, send what goes as far as the kernel takes it."""
        transport, members = transfer.transport, transfer.transport.members
        rank, size = transport.rank, transport.size
        tag &= 0xFFFFFFFFFFFFFFFF
        with self._changed:
            if self._closed or self._given_up:
                raise self._unusable(members)
            self._under_way.add(transfer)
            for r in (each % size for each in range(rank - 1, rank - size, -1)):
                if r in out:
                    transfer.receiving.add(r)
                    transfer.headers_due[r] = out[r][0]
                    self._expect(self._peers[members[r]], Receipt(transfer, r, out[r]), tag)
            for r in (each % size for each in range(rank + 1, rank + size)):
                if r in inp:
                    transfer.sending.add(r)
                    transfer.headers_unsent.add(r)
                    header, payload = inp[r]
                    message = OutgoingMessage(transfer, r, bytes(header), payload, tag)
                    self._send(self._peers[members[r]], message)
        if not self._busy.is_set():
            self._busy.set()

    def drive(self, transfer: SocketTransfer, deadline: float) -> None:
        """Until the transfer is over or the deadline has passed."""
        with self._changed:
            while not transfer.over and (left := deadline - time.monotonic()) > 0:
                if self._leading:
                    self._changed.wait(min(left, 1.0))
                    continue
                self._leading = True
                self._changed.release()
                try:
                    events = self._poll.poll(min(left, 1.0))
                finally:
                    self._changed.acquire()
                    self._leading = False
                self._act(events)
            self._drop(transfer)

    def look(self) -> dict[int, str]:
        """Peers whose connection is closed, and how. Takes what has come, and waits for nothing."""
        with self._changed:
            self._take_what_came()
            return {peer.rank: peer.end_of_it for peer in self._peers.values() if not peer.open}

    def early(self) -> dict[int, bytes]:
        """Headers by tag, one each, of messages that have come and that nobody has asked for. Waits
        for nothing."""
        with self._changed:
            self._take_what_came()
            return {tag: waiting[0].header for (_, tag), waiting in self._early.items()}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for end in self._by_file.values():
                end.socket.close()
            self._busy.set()

    def abandon(self, reason: str) -> None:
        """Use these connections no more, and tell the peers why."""
        with self._changed:
            self._give_up(reason)
        self._busy.set()

    def forked(self) -> None:
        """Locks are new, whoever held the old ones is not here."""
        self._changed, self._busy = threading.Condition(threading.Lock()), threading.Event()
        self._closed = True
        for end in self._by_file.values():
            end.open = False
            end.socket.close()
        self._poll.close()

    # ------------------------------------------------------------ under the lock

    def _take_what_came(self) -> None:
        if not self._leading and not self._closed:
            self._act(self._poll.poll(0))

    def _unusable(self, members: Sequence[int]) -> CommunicationError:
        if self._closed:
            return CommunicationError(
                "these connections are closed, or belong to the process that this one was forked "
                "from"
            )
        return (Corrupted if self._damaged else CommunicationError)(
            f"these connections failed before: {self._given_up} Build a new process group.",
            ranks=tuple(members.index(r) for r in self._damaged if r in members),
        )

    def _watch_for(self, end: _Connection) -> None:
        self._by_file[end.socket.fileno()] = end
        self._poll.register(end.socket.fileno(), end.mask)

    def _act(self, events: list[tuple[int, int]]) -> None:
        self._driven = time.monotonic()
        for file, what in events:
            end = self._by_file.get(file)
            if end is None:
                continue
            if what & select.EPOLLOUT:
                self._flush(end)
            if end.open and what & ~select.EPOLLOUT:
                self._read(end)
        self._changed.notify_all()

    def _expect(self, peer: _Peer, receipt: Receipt, tag: int) -> None:
        key = peer.rank, tag
        waiting = self._early.get(key)
        if waiting:
            message = waiting.popleft()
            if not waiting:
                del self._early[key]
            crowded = self._early_bytes > EARLY
            self._early_bytes -= message.length
            if crowded:
                for each in self._peers.values():
                    self._resume(each)
            message.meet(receipt)
            if message.end_of_it:
                receipt.transfer.closed[receipt.rank] = message.end_of_it
            return
        if key in self._receipts:
            raise CommunicationError(
                f"two transfers under way at once have tag {tag}: each needs its own"
            )
        if not peer.open:
            receipt.transfer.closed[receipt.rank] = peer.end_of_it
            return
        self._receipts[key] = receipt
        peer.due += 1
        if self._early_bytes > EARLY:
            self._resume(peer)

    def _resume(self, end: _Connection) -> None:
        """Go on with a connection that was not read for a while."""
        end.early = False
        if end.open and end.end and end.message is None and not self._ignored(end):
            self._parse(end)
        self._listen(end)

    def _send(self, peer: _Peer, sending: OutgoingMessage) -> None:
        if not peer.open:
            sending.fail(peer.end_of_it)
            return
        if self.divides and len(sending.left[1]) >= DIVIDED:
            peer.pieces += sending.divide(peer.sent, len(peer.carriers) or 1)
            peer.sent += 1
        peer.outgoing.append(sending)
        if len(peer.outgoing) == 1:
            self._flush(peer)
        if peer.pieces:
            self._deal(peer)

    def _deal(self, peer: _Peer) -> None:
        """Give each idle connection a piece, and more to those that can send them."""
        idle = [end for end in peer.carriers or [peer] if not end.outgoing]
        for end in [each for each in idle if peer.pieces and self._take(each)]:
            self._flush(end)

    def _take(self, end: _Connection) -> bool:
        """Have a connection carry the next piece, if it is one for pieces and there is one."""
        peer = end.peer
        if not end.open or end not in (peer.carriers or [peer]):
            return False
        piece = peer.pieces.popleft()
        piece.carrier, peer.unconfirmed[piece.header] = end, piece
        end.outgoing.append(piece)
        return True

    def _flush(self, end: _Connection) -> None:
        while end.outgoing or (end.peer.pieces and self._take(end)):
            try:
                count = end.socket.sendmsg(end.outgoing[0].left)
            except BlockingIOError:
                break
            except OSError:
                self._read(end)  # why it gave up, if it said so
                if end.open:
                    self._hang_up(end)
                return
            if not end.outgoing[0].advance(count):
                break
            end.outgoing.popleft()
        self._listen(end)

    def _listen(self, end: _Connection) -> None:
        """Choose the news of a connection that count now."""
        mask = (0 if self._ignored(end) else select.EPOLLIN) | (
            select.EPOLLOUT if end.outgoing else 0
        )
        if mask != end.mask and end.open:
            end.mask = mask
            self._poll.modify(end.socket.fileno(), mask)

    def _ignored(self, end: _Connection) -> bool:
        """True where a piece waits for its message, or nothing is due from a peer, and enough read
        aside."""
        if end is not end.peer:
            return end.early
        return self._early_bytes > EARLY and not end.peer.due and end.message is None

    def _read(self, end: _Connection) -> None:
        for i in range(READS):
            message = end.message
            if i and self._ignored(end):
                break
            memory = None if message is None else message.memory
            if message is None:
                room = end.unparsed[end.end :]
            elif memory is None:
                room = end.unparsed[: message.length - message.at]
            else:
                room = memory[message.at :]
            try:
                count = end.socket.recv_into(room)
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                self._hang_up(end)
                return
            if message is None:
                end.end += count
                self._parse(end)
            else:
                self._advance(end, message, count)
            if not end.open:
                return
            if count < len(room):
                break
        message = end.message
        end.wake_at(1 if message is None else min(message.length - message.at, WAKE))
        if end.early or self._early_bytes > EARLY:
            self._listen(end)

    def _parse(self, end: _Connection) -> None:
        at, filled = 0, end.end
        message: Incoming | None
        while filled - at >= _HEAD.size and end.message is None:
            if at and self.divides and self._ignored(end):
                break
            head = opened(end.unparsed[at : at + _HEAD.size])
            if head is None:
                self._refuse(end.peer, DAMAGED)
                return
            tag, length, header = head
            if PIECE >= tag >= HAS:
                message = self._piece(end, tag, length, header)
            else:
                message = IncomingMessage(header, length)
                message.divided = self.divides and length >= DIVIDED
                self._place(end.peer, message, tag)
                if message.divided:
                    self._divided(end.peer, message)
            if not end.open:
                return
            if end.early:
                break
            at += _HEAD.size
            if message is None or message.divided:
                continue
            part = min(length, filled - at)
            if part and (memory := message.memory) is not None:
                memory[:part] = end.unparsed[at : at + part]
            at += part
            self._advance(end, message, part)
            if not end.open:
                return  # type: ignore[unreachable]  # mypy does not know that ``_advance`` may hang up
        if at < filled:
            end.unparsed[: filled - at] = bytes(end.unparsed[at:filled])
        end.end = filled - at

    def _piece(
        self, end: _Connection, tag: int, length: int, header: bytes
    ) -> IncomingPiece | None:
        """A piece that comes now; None where its message has not come, or for a word about ours."""
        peer = end.peer
        if tag == HAS:
            if (sent := peer.unconfirmed.pop(header, None)) is not None:
                sent.whole.unconfirmed.discard(sent)
            return None
        number, offset = _PIECE.unpack(header)
        whole = peer.incoming.get(number)
        end.early = number >= peer.came and peer.open and end is not peer
        if (end is peer and number >= peer.came) or (whole and offset + length > whole.length):
            self._refuse(peer, DAMAGED)
        return None if end.early else IncomingPiece(whole, header, length)

    def _divided(self, peer: _Peer, message: IncomingMessage) -> None:
        """The payload of a message comes in pieces; some may wait for it."""
        peer.incoming[peer.came] = message
        peer.came += 1
        for carrier in [each for each in peer.carriers if each.early]:
            self._resume(carrier)

    def _place(self, peer: _Peer, message: IncomingMessage, tag: int) -> None:
        if tag == GIVE_UP:
            message.memory, message.gives_up = memoryview(bytearray(message.length)), True
            return
        receipt = self._receipts.pop((peer.rank, tag), None)
        if receipt is None:
            try:
                message.memory = np.empty(message.length, np.uint8).data
            except MemoryError:
                self._refuse(peer, f"sent {message.length} bytes, for which there is no room")
                return
            self._early[peer.rank, tag].append(message)
            self._early_bytes += message.length
            return
        peer.due -= 1
        message.meet(receipt)

    def _advance(self, end: _Connection, message: Incoming, count: int) -> None:
        message.advance(count)
        end.message = message if message.at < message.length else None
        if end.message is None and isinstance(message, IncomingPiece):
            self._confirm(end.peer, message)
        elif message.gives_up and end.message is None and message.memory is not None:
            how = f"gave up: {bytes(message.memory).decode('utf-8', 'replace')}"
            self._hang_up(end.peer, how)
            self._give_up(f"rank {end.peer.rank} {how}", tell=False)

    def _confirm(self, peer: _Peer, piece: IncomingPiece) -> None:
        """Tell the peer that a piece has come."""
        if piece.whole is not None and piece.whole.at == piece.whole.length:
            peer.incoming.pop(piece.number, None)
            if not peer.open and not peer.incoming:
                self._cut(peer)
        end = peer.told if peer.told is not None and peer.told.open else peer
        if end.open:
            word = OutgoingMessage(None, peer.rank, piece.header, memoryview(b""), HAS)
            end.outgoing.append(word)
            self._listen(end)

    def _drop(self, transfer: SocketTransfer) -> None:
        """Have a failed transfer take no more messages; its own that lie here still leave, for
        peers that wait for them."""
        self._under_way.discard(transfer)
        if not transfer.receiving:
            return
        for key in [key for key, receipt in self._receipts.items() if receipt.transfer is transfer]:
            del self._receipts[key]
            self._peers[key[0]].due -= 1
        for peer in self._peers.values():
            for message in (peer.message, *peer.incoming.values()):
                if (
                    isinstance(message, IncomingMessage)
                    and message.receipt is not None
                    and message.receipt.transfer is transfer
                ):
                    message.memory = message.receipt = None

    def _refuse(self, peer: _Peer, how: str) -> None:
        """Give up on a peer whose bytes are of no use, and tell all ranks."""
        self._damaged.append(peer.rank)
        self._give_up(f"rank {peer.rank} {how}.")
        if peer.open:
            self._hang_up(peer, how)

    def _give_up(self, reason: str, *, tell: bool = True) -> None:
        """End all that is under way, with every peer: a rank that has given up on one no longer
        answers the others."""
        if self._closed or self._given_up:
            return
        self._given_up = reason
        for transfer in self._under_way:
            transfer.given_up, transfer.damaged = reason, tuple(self._damaged)
        self._changed.notify_all()
        if not tell:
            return
        words = memoryview(reason.encode()[:LONGEST_REASON])
        for peer in self._peers.values():
            self._send(peer, OutgoingMessage(None, peer.rank, bytes(HEADER), words, GIVE_UP))

    def _hang_up(self, end: _Connection, how: str = HUNG_UP) -> None:
        """The peer has closed its end, whatever it was doing, or is of no more use. While the first
        connection is there the others replace one that ends; what has gone over them still comes
        when it is not."""
        self._close(end)
        peer = end.peer
        if end is peer:
            peer.end_of_it = how
            for sending in (*peer.outgoing, *peer.pieces, *peer.unconfirmed.values()):
                sending.fail(how)
            peer.pieces.clear()
            peer.unconfirmed.clear()
            for each in (peer, *peer.carriers):
                each.outgoing.clear()
            for key in [key for key in self._receipts if key[0] == peer.rank]:
                receipt = self._receipts.pop(key)
                receipt.transfer.closed[receipt.rank] = how
            if isinstance(peer.message, IncomingMessage):
                peer.message.end(how)
            for carrier in list(peer.carriers):
                self._resume(carrier)
        elif end in peer.carriers:
            peer.carriers.remove(end)
            end.outgoing.clear()
            for piece in [each for each in peer.unconfirmed.values() if each.carrier is end]:
                del peer.unconfirmed[piece.header]
                piece.again()
                peer.pieces.appendleft(piece)
            self._deal(peer)
        if not peer.open and (how != HUNG_UP or not peer.incoming or not peer.carriers):
            self._cut(peer)
        self._changed.notify_all()

    def _cut(self, peer: _Peer) -> None:
        """Nothing more comes from a peer that has hung up."""
        for message in peer.incoming.values():
            message.end(peer.end_of_it)
        peer.incoming.clear()
        for end in [each for each in self._by_file.values() if each.peer is peer]:
            self._close(end)

    def _close(self, end: _Connection) -> None:
        end.open = False
        self._poll.unregister(end.socket.fileno())
        del self._by_file[end.socket.fileno()]
        end.socket.close()

    # ------------------------------------------------------------ when nobody waits

    def _watch(self) -> None:
        while True:
            self._busy.wait()
            time.sleep(TICK)
            with self._changed:
                if self._closed:
                    break
                self._under_way = {each for each in self._under_way if not each.over}
                if not self._under_way and not any(
                    end.outgoing or end.peer.unconfirmed for end in self._by_file.values()
                ):
                    self._busy.clear()
                elif not self._leading and time.monotonic() - self._driven > TICK / 2:
                    self._act(self._poll.poll(0))
        self._poll.close()


def _parts(message: torch.Tensor) -> dict[int, Parts]:
    return {r: (row[:HEADER], row[HEADER:]) for r, row in enumerate(rows_in(message))}


def _apart(rows: Rows) -> dict[int, Parts]:
    headers = rows_in(rows.headers)
    return {r: (headers[r], memory_of(payload)) for r, payload in rows.payloads.items()}
