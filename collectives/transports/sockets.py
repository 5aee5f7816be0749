"""Rows over TCP connections of our own, one between every two ranks; those of tensors on CUDA by
way of pinned host memory.

A message is an envelope (tag and bytes of the payload), a header of 64 bytes and the payload, one
behind the other: nobody asks before he sends. Whoever waits for a transfer moves the bytes of all
that are under way (the leader; others wait for him), so that no other thread stands between a
tensor and the kernel. What comes before its receive is posted is read aside.

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

import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.collectives.frame import HEADER, LONGEST, Rows, memory_of, rows_in, same
from commpress.collectives.transports.meeting import Meeting, close_in_children, nothing
from commpress.collectives.transports.staged import Scratch, Staged
from commpress.errors import CommunicationError, Corrupted, PeerFailure
from commpress.work import Work

_PLACE = 160  # bytes in which a rank says where it is
_LENGTHS = struct.Struct("<QQ")  # tag, bytes of the payload
_HEAD = struct.Struct(f"<QQQ{HEADER}s")  # these, a checksum of them and of the header, the header
GIVE_UP = 2**64 - 1  # the tag of a message in which a rank says why it gives up
LONGEST_REASON = 4096  # bytes of that
HUNG_UP = "closed its connection: it died, left or gave up waiting"
DAMAGED = (
    "sent an envelope that came damaged: memory or network corrupt data; check both before going on"
)
_PARSED = 16 << 10  # bytes read at once while it is not known whose they are
ROOM = 4 << 20  # bytes a connection takes while nobody reads it, as far as the kernel allows
WAKE = 256 << 10  # bytes of a payload that are worth waking up for
EARLY = 256 << 20  # bytes read aside, above which a peer is read only if something is due from it
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
        finally:
            meeting.close()
        self.engine = SocketEngine(connections)
        weakref.finalize(self, self.engine.close)


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


class IncomingMessage:
    """Message that comes: into its receipt, aside if none is posted yet, or to nowhere if it does
    not fit."""

    def __init__(self, header: bytes, length: int) -> None:
        self.header, self.length, self.at = header, length, 0
        self.memory: memoryview | None = None
        self.receipt: Receipt | None = None
        self.gives_up = False

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
                payload[: self.at] = self.memory[: self.at]
            self.memory, self.receipt = payload, receipt
            self.advance(0)
            return
        self.memory = None

    def advance(self, count: int) -> None:
        self.at += count
        if self.at == self.length and self.receipt is not None:
            self.receipt.transfer.receiving.discard(self.receipt.rank)
            self.receipt = None


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

    def advance(self, count: int) -> bool:
        """Count bytes that have gone; true if all have."""
        while self.left and count >= len(self.left[0]):
            count -= len(self.left.pop(0))
        if self.left:
            self.left[0] = self.left[0][count:]
        if self.transfer is not None and len(self.left) < 2:
            self.transfer.headers_unsent.discard(self.rank)
            if not self.left:
                self.transfer.sending.discard(self.rank)
        return not self.left


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


class _Peer:
    """This rank's end of the connection to one peer."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank, self.socket = rank, connection
        self.open = True
        self.end_of_it = ""  # how it was closed
        self.due = 0  # receipts posted that no message has met
        self.outgoing: deque[OutgoingMessage] = deque()
        self.message: IncomingMessage | None = None  # whose payload comes now
        self.unparsed = memoryview(bytearray(_PARSED))
        self.end = 0  # of what was read into ``unparsed``
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


class SocketEngine:
    """Moves what is under way on the connections of one rank. All methods may be called by any
    thread."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._poll = select.epoll()
        self._peers = {rank: _Peer(rank, connection) for rank, connection in connections.items()}
        self._by_file = {peer.socket.fileno(): peer for peer in self._peers.values()}
        for file, peer in self._by_file.items():
            self._poll.register(file, peer.mask)
        self._receipts: dict[tuple[int, int], Receipt] = {}
        self._early: dict[tuple[int, int], deque[IncomingMessage]] = defaultdict(deque)
        self._early_bytes = 0
        self._under_way: set[SocketTransfer] = set()
        self._leading = self._closed = False
        self._given_up, self._damaged = "", list[int]()
        self._driven = 0.0
        self._busy = threading.Event()
        close_in_children(self)
        self._thread = threading.Thread(target=self._watch, name="commpress-sockets", daemon=True)
        self._thread.start()

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
            if not self._leading and not self._closed:
                self._act(self._poll.poll(0))
            return {peer.rank: peer.end_of_it for peer in self._peers.values() if not peer.open}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for peer in self._peers.values():
                peer.socket.close()
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
        for peer in self._peers.values():
            peer.open = False
            peer.socket.close()
        self._poll.close()

    # ------------------------------------------------------------ under the lock

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

    def _act(self, events: list[tuple[int, int]]) -> None:
        self._driven = time.monotonic()
        for file, what in events:
            peer = self._by_file.get(file)
            if peer is None:
                continue
            if what & select.EPOLLOUT:
                self._flush(peer)
            if peer.open and what & ~select.EPOLLOUT:
                self._read(peer)
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
                    self._listen(each)
            message.meet(receipt)
            if message.at < message.length and not peer.open:
                receipt.transfer.closed[receipt.rank] = peer.end_of_it
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
            self._listen(peer)

    def _send(self, peer: _Peer, sending: OutgoingMessage) -> None:
        if not peer.open:
            if sending.transfer is not None:
                sending.transfer.closed[sending.rank] = peer.end_of_it
            return
        peer.outgoing.append(sending)
        if len(peer.outgoing) == 1:
            self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        while peer.outgoing:
            try:
                count = peer.socket.sendmsg(peer.outgoing[0].left)
            except BlockingIOError:
                break
            except OSError:
                self._read(peer)  # why it gave up, if it said so
                if peer.open:
                    self._hang_up(peer)
                return
            if not peer.outgoing[0].advance(count):
                break
            peer.outgoing.popleft()
        if bool(peer.outgoing) != bool(peer.mask & select.EPOLLOUT):
            self._listen(peer)

    def _listen(self, peer: _Peer) -> None:
        """Choose the news of a peer that count now."""
        mask = (0 if self._ignored(peer) else select.EPOLLIN) | (
            select.EPOLLOUT if peer.outgoing else 0
        )
        if mask != peer.mask and peer.open:
            peer.mask = mask
            self._poll.modify(peer.socket.fileno(), mask)

    def _ignored(self, peer: _Peer) -> bool:
        """True where nothing is due from it, and enough read aside."""
        return self._early_bytes > EARLY and not peer.due and peer.message is None

    def _read(self, peer: _Peer) -> None:
        for i in range(READS):
            message = peer.message
            if i and self._ignored(peer):
                break
            if message is None:
                room = peer.unparsed[peer.end :]
            elif message.memory is None:
                room = peer.unparsed[: message.length - message.at]
            else:
                room = message.memory[message.at :]
            try:
                count = peer.socket.recv_into(room)
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                self._hang_up(peer)
                return
            if message is None:
                peer.end += count
                self._parse(peer)
            else:
                self._advance(peer, message, count)
            if not peer.open:
                return
            if count < len(room):
                break
        message = peer.message
        peer.wake_at(1 if message is None else min(message.length - message.at, WAKE))
        if self._early_bytes > EARLY:
            self._listen(peer)

    def _parse(self, peer: _Peer) -> None:
        at, end = 0, peer.end
        while end - at >= _HEAD.size and peer.message is None:
            head = opened(peer.unparsed[at : at + _HEAD.size])
            if head is None:
                self._refuse(peer, DAMAGED)
                return
            tag, length, header = head
            message = IncomingMessage(header, length)
            at += _HEAD.size
            self._place(peer, message, tag)
            if not peer.open:
                return
            part = min(length, end - at)
            if part and message.memory is not None:
                message.memory[:part] = peer.unparsed[at : at + part]
            at += part
            self._advance(peer, message, part)
            if not peer.open:
                return  # type: ignore[unreachable]  # mypy does not know that ``_advance`` may hang up
        if at < end:
            peer.unparsed[: end - at] = bytes(peer.unparsed[at:end])
        peer.end = end - at

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

    def _advance(self, peer: _Peer, message: IncomingMessage, count: int) -> None:
        message.advance(count)
        peer.message = message if message.at < message.length else None
        if message.gives_up and peer.message is None and message.memory is not None:
            how = f"gave up: {bytes(message.memory).decode('utf-8', 'replace')}"
            self._hang_up(peer, how)
            self._give_up(f"rank {peer.rank} {how}", tell=False)

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
            message = peer.message
            if (
                message is not None
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

    def _hang_up(self, peer: _Peer, how: str = HUNG_UP) -> None:
        """The peer has closed its end, whatever it was doing, or is of no more use."""
        peer.open, peer.end_of_it = False, how
        self._poll.unregister(peer.socket.fileno())
        del self._by_file[peer.socket.fileno()]
        peer.socket.close()
        for sending in peer.outgoing:
            if sending.transfer is not None:
                sending.transfer.closed[sending.rank] = how
        peer.outgoing.clear()
        for key in [key for key in self._receipts if key[0] == peer.rank]:
            receipt = self._receipts.pop(key)
            receipt.transfer.closed[receipt.rank] = how
        if peer.message is not None and peer.message.receipt is not None:
            peer.message.receipt.transfer.closed[peer.message.receipt.rank] = how
        self._changed.notify_all()

    # ------------------------------------------------------------ when nobody waits

    def _watch(self) -> None:
        while True:
            self._busy.wait()
            time.sleep(TICK)
            with self._changed:
                if self._closed:
                    break
                self._under_way = {each for each in self._under_way if not each.over}
                if not self._under_way and not any(peer.outgoing for peer in self._peers.values()):
                    self._busy.clear()
                elif not self._leading and time.monotonic() - self._driven > TICK / 2:
                    self._act(self._poll.poll(0))
        self._poll.close()


def _parts(message: torch.Tensor) -> dict[int, Parts]:
    return {r: (row[:HEADER], row[HEADER:]) for r, row in enumerate(rows_in(message))}


def _apart(rows: Rows) -> dict[int, Parts]:
    headers = rows_in(rows.headers)
    return {r: (headers[r], memory_of(payload)) for r, payload in rows.payloads.items()}
