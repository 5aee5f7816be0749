"""Transfers over connections of our own, and the messages that they are made of."""

import struct
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from commpress.checksum import checksum_of
from commpress.collectives.frame import HEADER, LONGEST, same
from commpress.errors import CommunicationError, Corrupted, PeerFailure

_LENGTHS = struct.Struct("<QQ")  # tag, bytes of the payload
_SUM = struct.Struct("<Q")  # checksum of both and of the header
ENVELOPE = _LENGTHS.size + _SUM.size
HEAD = ENVELOPE + HEADER
GIVE_UP = 2**64 - 1  # the tag of a message in which a rank says why it gives up
LONGEST_REASON = 4096  # bytes of that
HUNG_UP = "closed its connection: it died, left or gave up waiting"
DAMAGED = (
    "sent an envelope that came damaged: memory or network corrupt data; check both before going on"
)

Parts = tuple[memoryview, ...]  # a header and a payload, or both in one


class Party(Protocol):
    """The transport that a transfer belongs to. Ranks are its own."""

    rank: int
    size: int
    members: tuple[int, ...]  # by rank: the number on the mesh
    timeout: timedelta
    failure: str | None

    def peer(self, rank: int) -> str:
        """The name of a rank in messages."""

    def drive(self, transfer: "SocketTransfer") -> None:
        """Until it is over or the time is."""

    def abandon(self, reason: str) -> None:
        """Use it no more, and tell the peers why."""


def envelope(tag: int, length: int, header: bytes) -> bytes:
    """The bytes that go before a header."""
    lengths = _LENGTHS.pack(tag, length)
    return lengths + _SUM.pack(checksum_of(lengths + header))


def opened(head: memoryview) -> tuple[int, int, bytes] | None:
    """Tag, bytes of the payload and header; None if they are not what was sent, or more than can
    be."""
    lengths, (told,), header = (
        bytes(head[: _LENGTHS.size]),
        _SUM.unpack(head[_LENGTHS.size : ENVELOPE]),
        bytes(head[ENVELOPE:]),
    )
    tag, length = _LENGTHS.unpack(lengths)
    limit = LONGEST_REASON if tag == GIVE_UP else LONGEST
    return (
        (tag, length, header) if checksum_of(lengths + header) == told and length <= limit else None
    )


@dataclass(eq=False)
class SocketTransfer:
    """Rows to and from peers. Ranks are those of its transport."""

    transport: Party
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
        transport.drive(self)
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
        seconds, transport, closed = (
            time.monotonic() - self.posted,
            self.transport,
            self.closed.keys(),
        )
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

    def fit(self, message: "IncomingMessage") -> bool:
        """Take the header; whether the payload may follow."""
        transfer, header = self.transfer, message.header
        self.parts[0][:HEADER] = header
        transfer.headers_due.pop(self.rank, None)
        wanted = transfer.wanted and transfer.wanted[self.rank]
        if wanted and not same(wanted, header):
            transfer.differ = True
            return False
        if message.length != len(self.payload):
            transfer.broken = (
                f"rank {self.rank} sent {message.length} bytes where {len(self.payload)} were due"
            )
            return False
        return True

    @property
    def payload(self) -> memoryview:
        return self.parts[1] if len(self.parts) > 1 else self.parts[0][HEADER:]


class IncomingMessage:
    """One that comes: into its receipt, aside if none is posted yet, or to nowhere if it does not
    fit."""

    def __init__(self, header: bytes, length: int) -> None:
        self.header, self.length, self.at = header, length, 0
        self.memory: memoryview | None = None
        self.receipt: Receipt | None = None
        self.gives_up = False

    def meet(self, receipt: Receipt) -> None:
        if not receipt.fit(self):
            self.memory = None
            return
        payload = receipt.payload
        if self.memory is not None:
            payload[: self.at] = self.memory[: self.at]
        self.memory, self.receipt = payload, receipt
        self.advance(0)

    def advance(self, count: int) -> None:
        self.at += count
        if self.at == self.length and self.receipt is not None:
            self.receipt.transfer.receiving.discard(self.receipt.rank)
            self.receipt = None


class OutgoingMessage:
    """One that goes. The reason for giving up belongs to no transfer."""

    def __init__(self, transfer: SocketTransfer | None, rank: int, parts: Parts, tag: int) -> None:
        self.transfer, self.rank = transfer, rank
        length = sum(map(len, parts)) - HEADER
        self.left: list[memoryview | bytes] = [
            envelope(tag, length, bytes(parts[0][:HEADER])),
            *parts,
        ]
        self.head = HEAD

    def advance(self, count: int) -> bool:
        """Count bytes that have gone; true if all have."""
        self.head -= count
        if self.head <= 0 and self.transfer is not None:
            self.transfer.headers_unsent.discard(self.rank)
        while self.left and count >= len(self.left[0]):
            count -= len(self.left.pop(0))
        if self.left:
            self.left[0] = memoryview(self.left[0])[count:]
            return False
        if self.transfer is not None:
            self.transfer.sending.discard(self.rank)
        return True
