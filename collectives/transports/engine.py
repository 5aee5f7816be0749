"""Engine that moves messages over the connections of one rank, in whatever thread waits for one of
them.

Whoever waits for a transfer moves the bytes of all that are under way (the leader; others wait for
him), so that no other thread stands between a tensor and the kernel. What comes before its receive
is posted is read aside.

Note: when nobody waits. The kernel's buffers take a few MiB of each peer. A thread looks every
``TICK`` seconds, so that ranks that wait for each other in different transports or libraries still
come together.
"""

import select
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping

import numpy as np

from commpress.collectives.frame import HEADER
from commpress.collectives.transports.meeting import close_in_children
from commpress.collectives.transports.messages import (
    DAMAGED,
    GIVE_UP,
    HEAD,
    HUNG_UP,
    LONGEST_REASON,
    IncomingMessage,
    OutgoingMessage,
    Parts,
    Receipt,
    SocketTransfer,
    opened,
)
from commpress.errors import CommunicationError, Corrupted

_PARSED = 16 << 10  # bytes read at once while it is not known whose they are
ROOM = 4 << 20  # bytes a connection takes while nobody reads it, as far as the kernel allows
WAKE = 256 << 10  # bytes of a payload that are worth waking up for
EARLY = 256 << 20  # bytes read aside, above which a peer is read only if something is due from it
TICK = 0.02
READS = 8  # reads from one peer before another has its turn


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
    ) -> SocketTransfer:
        """Make room for what comes, send what goes as far as the kernel takes it."""
        transport = transfer.transport
        rank, size, members = transport.rank, transport.size, transport.members
        tag &= 0xFFFFFFFFFFFFFFFF
        with self._changed:
            if self._closed:
                raise CommunicationError(
                    "these connections are closed, or belong to the process that this one was "
                    "forked from"
                )
            if self._given_up:
                at_fault = tuple(members.index(r) for r in self._damaged if r in members)
                kind = Corrupted if self._damaged else CommunicationError
                raise kind(
                    f"these connections failed before: {self._given_up} Build a new process group.",
                    ranks=at_fault,
                )
            self._under_way.add(transfer)
            for peer in [(rank - i) % size for i in range(1, size)]:
                if peer in out:
                    transfer.receiving.add(peer)
                    transfer.headers_due[peer] = out[peer][0]
                    self._expect(
                        self._peers[members[peer]], Receipt(transfer, peer, out[peer]), tag
                    )
            for peer in [(rank + i) % size for i in range(1, size)]:
                if peer in inp:
                    transfer.sending.add(peer)
                    transfer.headers_unsent.add(peer)
                    self._send(
                        self._peers[members[peer]], OutgoingMessage(transfer, peer, inp[peer], tag)
                    )
            self._settle(transfer)
        if not self._busy.is_set():
            self._busy.set()
        return transfer

    def drive(self, transfer: SocketTransfer, deadline: float) -> None:
        """Until the transfer is over or the deadline has passed."""
        with self._changed:
            while not transfer.over and (left := deadline - time.monotonic()) > 0:
                if self._leading:
                    self._changed.wait(min(left, 1.0))
                else:
                    self._lead(min(left, 1.0))
            self._drop(transfer)

    def look(self) -> dict[int, str]:
        """Peers whose connection is closed, and how. Takes what has come, and waits for nothing."""
        with self._changed:
            if not self._leading and not self._closed:
                self._act(self._poll.poll(0))
                self._changed.notify_all()
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

    def _lead(self, seconds: float) -> None:
        self._leading = True
        self._changed.release()
        try:
            events = self._poll.poll(seconds)
        finally:
            self._changed.acquire()
            self._leading = False
        self._act(events)
        self._changed.notify_all()

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
            done = peer.outgoing.popleft()
            if done.transfer is not None:
                self._settle(done.transfer)
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
        peer.wake_at(
            1 if peer.message is None else max(min(peer.message.length - peer.message.at, WAKE), 1)
        )
        self._listen(peer)

    def _parse(self, peer: _Peer) -> None:
        at, end = 0, peer.end
        while end - at >= HEAD and peer.message is None:
            head = opened(peer.unparsed[at : at + HEAD])
            if head is None:
                self._refuse(peer, DAMAGED)
                return
            tag, length, header = head
            message = IncomingMessage(header, length)
            at += HEAD
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
        self._settle(receipt.transfer)

    def _advance(self, peer: _Peer, message: IncomingMessage, count: int) -> None:
        transfer = message.receipt.transfer if message.receipt is not None else None
        message.advance(count)
        peer.message = message if message.at < message.length else None
        if message.gives_up and peer.message is None and message.memory is not None:
            how = f"gave up: {bytes(message.memory).decode('utf-8', 'replace')}"
            self._hang_up(peer, how)
            self._give_up(f"rank {peer.rank} {how}", tell=False)
        if transfer is not None:
            self._settle(transfer)

    def _settle(self, transfer: SocketTransfer) -> None:
        if transfer.over:
            self._under_way.discard(transfer)

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
        words = reason.encode()[:LONGEST_REASON]
        for peer in self._peers.values():
            self._send(
                peer,
                OutgoingMessage(None, peer.rank, (memoryview(bytes(HEADER) + words),), GIVE_UP),
            )

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
                if not self._under_way and not any(peer.outgoing for peer in self._peers.values()):
                    self._busy.clear()
                elif not self._leading and time.monotonic() - self._driven > TICK / 2:
                    self._act(self._poll.poll(0))
                    self._changed.notify_all()
        self._poll.close()
