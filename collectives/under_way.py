"""What is under way on connections of our own: exchanges, and the messages that they are made of."""

import struct
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import numpy as np

from commpress.collectives.frame import HEADER, same
from commpress.errors import CommunicationError, PeerFailure

ENVELOPE = struct.Struct("<QQ")  # tag, bytes of the payload
HEAD = ENVELOPE.size + HEADER

Parts = tuple[memoryview, ...]  # a header and a payload, or both in one


class Party(Protocol):
    """The transport that an exchange belongs to. Ranks are its own."""

    rank: int
    size: int
    members: tuple[int, ...]  # by rank: the number on the mesh
    timeout: timedelta
    failure: str | None

    def peer(self, rank: int) -> str:
        """How messages name a rank."""

    def drive(self, exchange: "Exchange") -> None:
        """Until it is over or the time is."""


@dataclass(eq=False)
class Exchange:
    """Rows to and from peers. Ranks are those of its transport."""

    transport: Party
    wanted: dict[int, bytes] | None  # the header that is due from each rank, if that is known
    keep: object  # the tensors whose memory moves
    posted: float = field(default_factory=time.monotonic)
    unheard: dict[int, memoryview] = field(default_factory=dict)  # ranks whose header has not come, and where it belongs
    untold: set[int] = field(default_factory=set)  # ranks to which our header has not gone
    receiving: set[int] = field(default_factory=set)
    sending: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)  # ranks that hung up before the end
    differ: bool = False  # a header is not the one that is due
    broken: str = ""  # a payload is not as long as its header says

    @property
    def over(self) -> bool:
        if self.closed or self.broken:
            return True
        if self.differ:
            return not self.unheard and not self.untold
        return not self.receiving and not self.sending

    def wait(self) -> None:
        """Until every row is here and every own row gone, or a peer's header differs: then ``verify`` names it."""
        transport = self.transport
        transport.drive(self)
        if self.broken:
            transport.failure = self.broken
            raise CommunicationError(f"rank {transport.rank}: {self.broken}")
        if self.differ and self.wanted:
            for r, header in self.unheard.items():
                header[:HEADER] = self.wanted[r]  # not to blame
            transport.failure = "the ranks disagreed and left messages behind."
        elif not self.over or self.closed:
            raise self._failure()

    def _failure(self) -> PeerFailure:
        """Name the ranks at fault.

        Note: closed or silent. Whoever has waited in vain may end before we do, and looks dead then. So a connection that
        closes late does not excuse ranks that sent nothing all the time; one that closes early was a death.
        """
        seconds, transport = time.monotonic() - self.posted, self.transport
        late = seconds >= transport.timeout.total_seconds() / 2
        silent = sorted(self.receiving - self.closed) if late or not self.closed else []
        deaf = sorted(self.sending - self.closed) if not self.closed and not silent else []
        says = [f"{transport.peer(r)} was silent for {seconds:.1f} s" for r in silent]
        says += [f"{transport.peer(r)} took nothing for {seconds:.1f} s" for r in deaf]
        says += [f"{transport.peer(r)} closed its connection: it died, left or gave up waiting" for r in sorted(self.closed)]
        transport.failure = f"rank {transport.rank}: " + "; ".join(says) + "."
        return PeerFailure(transport.failure, ranks=tuple(silent or deaf or sorted(self.closed)))


@dataclass(eq=False)
class Receipt:
    """Where a row is due that one rank sends."""

    exchange: Exchange
    rank: int
    parts: Parts

    def fit(self, message: "Message") -> bool:
        """Take the header; whether the payload may follow."""
        exchange, header = self.exchange, message.header
        self.parts[0][:HEADER] = header
        exchange.unheard.pop(self.rank, None)
        wanted = exchange.wanted and exchange.wanted[self.rank]
        if wanted and wanted != header and not same(np.frombuffer(wanted, np.uint8), np.frombuffer(header, np.uint8)):
            exchange.differ = True
            return False
        if message.length != len(self.payload):
            exchange.broken = f"rank {self.rank} sent {message.length} bytes where {len(self.payload)} were due"
            return False
        return True

    @property
    def payload(self) -> memoryview:
        return self.parts[1] if len(self.parts) > 1 else self.parts[0][HEADER:]


class Message:
    """One that comes: into its receipt, aside if none is posted yet, or to nowhere if it does not fit."""

    def __init__(self, header: bytes, length: int) -> None:
        self.header, self.length, self.at = header, length, 0
        self.memory: memoryview | None = None
        self.receipt: Receipt | None = None

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
            self.receipt.exchange.receiving.discard(self.receipt.rank)
            self.receipt = None


class Sending:
    """One that goes."""

    def __init__(self, exchange: Exchange, rank: int, parts: Parts, tag: int) -> None:
        self.exchange, self.rank = exchange, rank
        length = sum(map(len, parts)) - HEADER
        self.left: list[memoryview | bytes] = [ENVELOPE.pack(tag, length), *parts]
        self.head = HEAD

    def advance(self, count: int) -> bool:
        """Whether all of it is gone."""
        self.head -= count
        if self.head <= 0:
            self.exchange.untold.discard(self.rank)
        while self.left and count >= len(self.left[0]):
            count -= len(self.left.pop(0))
        if self.left:
            self.left[0] = memoryview(self.left[0])[count:]
            return False
        self.exchange.sending.discard(self.rank)
        return True
