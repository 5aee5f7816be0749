"""Control connections: one small TCP connection between every two ranks of a group, beside those
that carry the data.

They carry records and nothing else. One that closes without a record of leave is a
death: the kernel closes it whatever the process was doing. The door stays open: a peer that doubts
whether this process still runs connects to it and asks, and so do members and newcomers that want
to agree on who goes on (``agreement``).
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
    """This rank's end of the connection to one peer, over which both send records."""

    left = False  # the peer has told that it leaves

    def records(self) -> list[Record]:
        """The records that have come."""
        found = []
        for message in self.receive():
            if (record := Record.of(message)) is None:
                self.open = False
                break
            found.append(record)
        return found


class ControlConnections:
    """All of one rank in one epoch of a group; made by all its ranks together."""

    def __init__(
        self,
        membership: Membership,
        epoch: Epoch,
        timeout: timedelta,
        watch: Callable[[], object] = nothing,
    ) -> None:
        """``watch`` is called while peers are awaited; what it raises ends that."""
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

    # ------------------------------------------------------------ is it still running?

    def silent(self, seconds: float) -> tuple[int, ...]:
        """The peers whose processes do not answer within ``seconds``: stopped, or their machine is
        gone."""
        asked: dict[int, Knock] = {}
        doubted = [peer for peer, one in self.by_rank.items() if one.open]
        for peer in doubted:
            with contextlib.suppress(OSError):
                asked[peer] = self._meeting.call(peer, PING, seconds)
        said = answers(asked, seconds)
        return tuple(peer for peer in doubted if said.get(peer) != WELCOME)

    def forked(self) -> None:
        for connection in self.by_rank.values():
            connection.socket.close()

    def close(self, last: Record | None = None) -> None:
        """Send a last record to everybody and hang up."""
        for connection in self.by_rank.values():
            if last is not None:
                connection.send(last)
            connection.socket.close()


def first_epoch(store: dist.Store, rank: int, size: int) -> Membership:
    """The beginning of a group, by all its ranks together: they tell each other in ``store`` where
    their doors are."""
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
    """Files that a rank looks at while it waits: connections to its peers, the bell of its
    membership, a pipe by which others wake it.

    ``everybody``: news from any peer. ``one[peer]``: from that one, or that another hung up.
    ``busy``, ``idle``: for the thread that watches, with and without the news.
    """

    def __init__(self, connections: ControlConnections) -> None:
        self.wake, self._waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._waker, False)
        self.bell = connections.membership.bell.fileno()
        # whose connections are open
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
        """Look at this connection no more; False if it was forgotten before."""
        peer = self.peers.pop(fd, None)
        if peer is None:
            return False
        for poll in (self.everybody, self.idle, self.busy, *self.one.values()):
            poll.unregister(fd)
        del self.one[peer]
        return True

    def nudge(self) -> None:
        """Wake who waits in ``idle`` or ``busy``."""
        try:
            os.write(self._waker, b"!")
        except BlockingIOError:  # it has been asked more often than it could look
            return

    def clear(self, events: Events) -> None:
        """Take the nudges that have come."""
        if self.wake in events:
            while len(os.read(self.wake, 4096)) == 4096:
                pass

    def close(self) -> None:
        os.close(self.wake)
        os.close(self._waker)
