"""Control connections: one TCP connection between every two ranks of a group, besides those for
data.

They carry only records. If one closes without a record of leaving, the peer is dead, because the
kernel closes it whatever the process was doing. The listening socket stays open: a peer that doubts
whether this process still runs connects to it and asks, and so do members and newcomers that agree
on new members (``agreement``).
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from commpress.collectives.transports.connection import Connection
from commpress.collectives.transports.meeting import (
    PING,
    WELCOME,
    Awaited,
    Knock,
    Meeting,
    answers,
    close_in_children,
    nothing,
    own_door,
)
from commpress.collectives.transports.membership import Epoch, Membership, first_key
from commpress.integrations.process_group.records import Record

_HANGUP = select.POLLRDHUP if hasattr(select, "POLLRDHUP") else 0
Events = dict[int, int]  # by file descriptor


class ControlConnection(Connection):
    """This rank's end of the connection to one peer; both send records over it."""

    left = False  # the peer has announced that it leaves

    def records(self) -> list[Record]:
        """Return the records received so far."""
        found = []
        for message in self.receive():
            if (record := Record.of(message)) is None:
                self.open = False
                break
            found.append(record)
        return found


class ControlConnections:
    """All control connections of one rank in one epoch of a group; all ranks make them together."""

    def __init__(
        self,
        membership: Membership,
        epoch: Epoch,
        timeout: timedelta,
        watch: Callable[[], object] = nothing,
    ) -> None:
        """Connect to all peers. ``watch`` is called during the wait; an error that it raises ends
        that."""
        rank, size = epoch.places.index(membership.here), len(epoch.places)
        self.rank, self.size, self.membership = rank, size, membership
        awaited = Awaited(rank, epoch.places, lambda: membership.keys)

        def check(missing: Sequence[int]) -> None:
            awaited.check(missing)
            watch()

        self._meeting = Meeting(
            rank, size, door=membership.door, epoch=epoch.key, others=membership.hear, check=check
        )
        self._meeting.learn(epoch.places)
        try:
            with membership.attending:
                connections = self._meeting.connect_all(time.monotonic() + timeout.total_seconds())
        finally:
            awaited.close()
        self.by_rank = {
            peer: ControlConnection(connection) for peer, connection in connections.items()
        }
        close_in_children(self)

    # ------------------------------------------------------------ are peers running?

    def silent(self, seconds: float) -> tuple[int, ...]:
        """Return the peers whose processes do not answer within ``seconds``, because they are
        stopped or their machine is down."""
        asked: dict[int, Knock] = {}
        doubted = [peer for peer, one in self.by_rank.items() if one.open]
        for peer in doubted:
            with contextlib.suppress(OSError):
                asked[peer] = self._meeting.call(peer, PING, seconds)
        found = answers(asked, seconds)
        return tuple(peer for peer in doubted if found.get(peer) != WELCOME)

    def forked(self) -> None:
        for connection in self.by_rank.values():
            connection.socket.close()

    def close(self, last: Record | None = None) -> None:
        """Send a last record to all peers and close the connections."""
        for connection in self.by_rank.values():
            if last is not None:
                connection.send(last)
            connection.socket.close()


def first_epoch(store: dist.Store, rank: int, size: int) -> Membership:
    """Begin a group, together with all its ranks: they exchange their addresses through
    ``store``."""
    door = own_door(size)
    try:
        store.set(f"control/{rank}", door.here)
        places = (
            [store.get(f"control/{peer}").decode() for peer in range(size)]
            if size > 1
            else [door.here]
        )
    except BaseException:
        door.close()
        raise
    key = first_key(places[0])
    return Membership(door, Epoch(0, key, key, tuple(places))).attend()


class Polls:
    """File descriptors that a rank polls while it waits: connections to its peers, the bell of its
    membership, and a pipe by which other threads wake it.

    ``everybody``: records from any peer. ``one[peer]``: records from that peer, or a closed
    connection to another. ``busy``, ``idle``: for the guard's thread, with and without records.
    """

    def __init__(self, connections: ControlConnections) -> None:
        self.wake, self._waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._waker, False)
        self.bell = connections.membership.bell.fileno()
        # peers with open connections
        self.peers = {one.socket.fileno(): peer for peer, one in connections.by_rank.items()}
        self.everybody, self.idle, self.busy = select.poll(), select.poll(), select.poll()
        self.one = {peer: select.poll() for peer in connections.by_rank}
        for fd, peer in self.peers.items():
            self.everybody.register(fd, select.POLLIN)
            self.busy.register(fd, select.POLLIN)
            self.idle.register(fd, _HANGUP)
            for other, poll in self.one.items():
                poll.register(fd, select.POLLIN if other == peer else _HANGUP)
        for poll in (self.idle, self.busy):
            poll.register(self.wake, select.POLLIN)
            poll.register(self.bell, select.POLLIN)

    def forget(self, fd: int) -> bool:
        """Stop polling a connection; return False if it was forgotten before."""
        peer = self.peers.pop(fd, None)
        if peer is None:
            return False
        for poll in (self.everybody, self.idle, self.busy, *self.one.values()):
            poll.unregister(fd)
        del self.one[peer]
        return True

    def nudge(self) -> None:
        """Wake the thread that waits in ``idle`` or ``busy``."""
        try:
            os.write(self._waker, b"!")
        except BlockingIOError:  # the pipe is full of nudges, which is enough
            return

    def clear(self, events: Events) -> None:
        """Read all nudges from the pipe."""
        if self.wake in events:
            while len(os.read(self.wake, 4096)) == 4096:
                pass

    def close(self) -> None:
        os.close(self.wake)
        os.close(self._waker)
