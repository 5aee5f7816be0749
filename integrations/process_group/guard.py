"""Agreement before data: a call is issued when every peer has sent a record of the same call.

Each call sends one record (``records``) to each peer over the control connections, and waits for
theirs. Only then is it passed to Gloo, which ends the process if a message is longer than the
receiver's buffer, so a disagreement must not reach it.

Note: one reader. The first thread that waits for a call reads for all (the leader); others wait for
it. If no thread waits for pending calls, the guard's own thread leads. It also watches for closed
connections, and aborts the transport when a peer is dead.

Note: failure. The ranks are then out of step, and this guard ends. ``reform``, or a new group,
makes another.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from commpress.collectives.transports.meeting import nothing
from commpress.errors import CommunicationError, Mismatch
from commpress.integrations.process_group.call import GroupWork, profiling
from commpress.integrations.process_group.control_connections import (
    ControlConnections,
    Events,
    Polls,
)
from commpress.integrations.process_group.records import (
    ANY_SOURCE,
    CALL,
    GAVE_UP,
    LEAVE,
    RECV,
    REFORM,
    SEND,
    Blame,
    Record,
    again,
    give_up_record,
    grace_of,
    speaks_of_a_peer,
)
from commpress.work import started

FIRST = 0.02  # seconds to wait for a single missing peer
LINGER = 0.5  # seconds for transfers to finish after a peer's death


class Guard:
    """Decide when the calls of one rank may be issued, and explain their failures."""

    def __init__(
        self,
        connections: ControlConnections,
        *,
        timeout: timedelta,
        abort: Callable[[], object],
        name: Callable[[int], str],
        reforms: Callable[[CommunicationError], object] = lambda error: None,
    ) -> None:
        """Guard calls over ``connections``. ``reforms`` is called when a peer wants to agree on new
        members."""
        self.rank, self.seconds = connections.rank, timeout.total_seconds()
        self.grace = grace_of(timeout)
        self.failure: CommunicationError | None = None
        self.reforming: set[int] = set()  # peers that want to agree on new members
        self._reforms = reforms
        self._connections, self._peers, self._abort = connections, connections.by_rank, abort
        self._blame = Blame(connections.rank, name)
        self._changed = threading.Condition()  # re-entrant: a future may call back into the group
        self._leading, self._closed = False, False
        self._collectives, self._pairs = PendingCollectives(self._peers), PendingPairs()
        # peers that wait to receive from any source: they are not to blame
        self._any_source: set[int] = set()
        self._unsettled: set[GroupWork] = set()
        self._dead: set[int] = set()
        self._notices: list[tuple[int, Record]] = []
        self._abort_at: float | None = None
        self._polls = Polls(connections)
        self._thread = started("commpress-guard", self._watch)

    # ------------------------------------------------------------ calls

    def collective(
        self,
        record: Record | dict[int, Record],
        work: GroupWork,
        expected: dict[int, Record] | None = None,
    ) -> None:
        """Send ``record`` (the same to all peers, or to each its own) and queue the call."""
        records = dict.fromkeys(self._peers, record) if isinstance(record, Record) else record
        with self._changed:
            self._check()
            self._add(work)
            for peer, own in self._collectives.enter(work, records, expected or records).items():
                self._peers[peer].send(own)
            self._receive(self._collectives.missing())
            self._advance()

    def point_to_point(self, record: Record, peer: int, work: GroupWork) -> None:
        """Queue a send to or a receive from one peer."""
        with self._changed:
            self._check()
            work.expected = {peer: record.mirrored()}
            self._add(work)
            if peer in self._peers:
                self._peers[peer].send(record)
            wanted = work.expected[peer].operation
            self._pairs.enter(work, peer, wanted, record.root)
            self._match(peer, wanted, record.root)
            self._advance()

    def any_source(self, record: Record, work: GroupWork) -> None:
        """Receive from the first peer that sends with this tag."""
        with self._changed:
            self._check()
            work.record = record
            self._add(work)
            self._pairs.enter_any_source(work, record.root)
            self._match_any_source(record.root)
            if not work.settled:
                self._send_all(Record(kind=ANY_SOURCE, give=1))
            self._advance()

    def settle(self, work: GroupWork, deadline: float | None = None) -> None:
        """Wait until ``work`` is issued or has failed."""
        with self._changed:
            while not work.settled:
                limit = work.deadline if deadline is None else min(deadline, work.deadline)
                left = limit - time.monotonic()
                if left <= 0:
                    self._expire(work)
                elif self._leading:
                    self._changed.wait(min(left, 1.0))
                else:
                    self._lead(min(left, 1.0))
            if self._unsettled and not self._leading and not profiling():
                self.nudge()

    def nudge(self) -> None:
        """Let the guard's thread handle pending calls."""
        self._polls.nudge()

    def look(self) -> bool:
        """Read records because data is late; return False if the group has failed, here or at a
        peer."""
        with self._changed:
            self._receive(list(self._polls.peers.values()))
            self._advance()
            if self._notices and self.failure is None:
                self._fail_by_notice()
            return self.failure is None

    def check(self) -> None:
        """Raise if the group has failed or a peer is dead: for waits outside of calls."""
        self.look()
        if self.failure is not None:
            raise again(self.failure)
        if self._dead:
            raise self._blame.died(sorted(self._dead))

    def _lead(self, seconds: float) -> None:
        """Wait for records and handle them; at first wait for a single missing peer, which avoids
        waking for every other one."""
        missing = self._collectives.missing()
        everybody = self._polls.everybody
        first = self._polls.one.get(missing[0]) if missing else None
        self._leading = True
        self._changed.release()
        try:
            events = first.poll(min(seconds, FIRST) * 1000) if first else []
            events = events or everybody.poll(seconds * 1000 + 1)
        finally:
            self._changed.acquire()
            self._leading = False
        self._receive({*missing, *self._peers_of(dict(events))})
        self._advance()
        self._changed.notify_all()

    def _check(self) -> None:
        if self.failure is not None:
            raise again(self.failure)
        if self._closed:
            raise CommunicationError("this group was destroyed: build a new one")

    def _add(self, work: GroupWork) -> None:
        work.deadline = time.monotonic() + self.seconds
        self._unsettled.add(work)

    # ------------------------------------------------------------ matching, under the lock

    def _receive(self, peers: Iterable[int]) -> None:
        for peer in peers:
            connection = self._peers[peer]
            if connection.unsent:
                connection.flush()
            for record in connection.records():
                if record.kind == CALL and record.operation in (SEND, RECV):
                    self._pairs.received(peer, record)
                    self._match(peer, record.operation, record.root)
                    self._match_any_source(record.root)
                elif record.kind == CALL:
                    self._collectives.received(peer, record)
                elif record.kind == LEAVE:
                    connection.left = True
                elif record.kind == REFORM:
                    connection.left = True
                    self._reform(peer, record)
                elif record.kind == ANY_SOURCE:
                    (self._any_source.add if record.give else self._any_source.discard)(peer)
                elif record.kind == GAVE_UP:
                    self._notices.append((peer, record))
            if not connection.open:
                self._hang_up(peer)

    def _hang_up(self, peer: int) -> None:
        if not self._polls.forget(self._peers[peer].socket.fileno()):
            return
        if not self._peers[peer].left and not self._closed:
            self._dead.add(peer)
            self._abort_at = time.monotonic() + LINGER
            self.nudge()

    def _match(self, peer: int, operation: int, tag: int) -> None:
        for work, record in self._pairs.matched(peer, operation, tag):
            if record != work.expected[peer]:
                self._fail(self._blame.disagreement(work, [(peer, record)]))
            if self.failure is not None:
                break
            self._issue(work)

    def _match_any_source(self, tag: int) -> None:
        while self.failure is None and (pair := self._pairs.matched_any_source(tag)):
            work, peer = pair
            assert work.record is not None
            work.source = peer
            work.expected = {peer: work.record.mirrored()}
            self._peers[peer].send(work.record)
            self._pairs.enter(work, peer, SEND, tag)
            self._match(peer, SEND, tag)
            if not self._pairs.from_any_source:
                self._send_all(Record(kind=ANY_SOURCE))

    def _advance(self) -> None:
        """Issue every collective on which all agree, in order; fail if a peer differs, is dead or
        has given up."""
        collectives = self._collectives
        while collectives and self.failure is None:
            missing = collectives.missing()
            gone = [peer for peer in missing if not self._peers[peer].open]
            if wrong := collectives.wrong():
                self._fail(self._blame.disagreement(collectives.oldest(), wrong))
            elif gone:
                self._lose(collectives.oldest(), gone)
            if missing or self.failure is not None:
                break
            self._issue(collectives.take())
        if len(self._polls.peers) < len(self._peers):
            for peer, connection in self._peers.items():
                if (
                    self.failure is None
                    and not connection.open
                    and (waiting := self._pairs.waiting_for(peer))
                ):
                    self._lose(waiting, [peer])
        # failures seen by this rank take precedence over notices
        if self._notices and self.failure is None and self._unsettled:
            self._fail_by_notice()

    def _issue(self, work: GroupWork) -> None:
        self._unsettled.discard(work)
        work.start()

    # ------------------------------------------------------------ failures, under the lock

    def _lose(self, work: GroupWork, gone: list[int]) -> None:
        self._fail(self._blame.lost(work, gone, left=any(self._peers[peer].left for peer in gone)))

    def _expire(self, work: GroupWork) -> None:
        """Fail a ``work`` that has reached its timeout, and name the ranks at fault and their
        calls."""
        if work.expected:
            late = self._collectives.late(work)
        else:
            late = [peer for peer in self._peers if peer not in self._any_source] or list(
                self._peers
            )
        doing = {
            peer: self._pairs.unmatched(peer) or self._collectives.does_instead(peer)
            for peer in late
        }
        others = {peer: record for peer, record in doing.items() if record}
        silent = [peer for peer in late if peer not in others]
        self._fail(self._blame.expired(work, self.seconds, silent, others))

    def _reform(self, peer: int | None, record: Record | None) -> None:
        """Stop, because a peer wants to agree on new members."""
        if peer is not None:
            self.reforming.add(peer)
        if self.failure is None and not self._closed:
            self._fail(
                self._blame.died(sorted(self._dead))
                if self._dead
                else self._blame.reforms(peer, record),
                tell=False,
            )
        if self.failure is not None and not self._closed:
            self._reforms(self.failure)

    def _fail_by_notice(self) -> None:
        self._fail(self._blame.notice(*self._notices[0], [*self._unsettled]), tell=False)

    def _fail(self, error: CommunicationError, *, tell: bool = True) -> None:
        self.failure = error
        if tell:
            self._send_all(give_up_record(error))
        early = any(work.early for work in self._unsettled)
        for work in self._unsettled:
            work.fail(error)
        self._unsettled.clear()
        # calls agreed on before a disagreement may still finish
        if early or not isinstance(error, Mismatch):
            self._abort_at = time.monotonic()
        self._collectives.clear()
        self.nudge()
        self._changed.notify_all()

    def _send_all(self, record: Record) -> None:
        for connection in self._peers.values():
            connection.send(record)

    # ------------------------------------------------------------ when the transport fails

    def explain(self, error: Exception, work: GroupWork) -> Exception:
        """Return the typed error for one of the transport, naming ranks that died, stopped or gave
        up; ``error`` itself if there are none."""
        text = str(error)
        if self.failure is None and not self._dead and not speaks_of_a_peer(text):
            return error
        deadline = time.monotonic() + self.grace
        asked = False
        while True:
            with self._changed:
                self._receive(list(self._polls.peers.values()))
                if self._dead and self.failure is None:
                    self._lose(work, sorted(self._dead))
                self.look()
            if self.failure is not None:
                return type(self.failure)(str(self.failure), ranks=self.failure.ranks)
            if not asked:
                asked, silent = True, self._connections.silent(self.grace / 2)
                with self._changed:
                    if silent and self.failure is None and not self._dead:
                        self._fail(self._blame.unanswered(work, silent, text))
            elif time.monotonic() >= deadline:
                with self._changed:
                    if self.failure is None:
                        self._fail(self._blame.failed(work, text))
            else:
                time.sleep(0.01)

    # ------------------------------------------------------------ the guard's thread

    def _watch(self) -> None:
        polls = self._polls
        while True:
            with self._changed:
                if self._ended():
                    return
                leading = bool(self._unsettled) and not self._leading
                self._leading |= leading
                limit = self._next_look()
            events = dict((polls.busy if leading else polls.idle).poll(limit))
            with self._changed:
                if leading:
                    self._leading = False
                if self._ended():
                    return
                due = self._look(events)
            if polls.bell in events and self._connections.membership.called():
                with self._changed:
                    self._reform(None, None)
            if due:
                self._abort()

    def _look(self, events: Events) -> bool:
        """Act on messages and expire late calls, under the lock; return whether to abort the
        transport now."""
        self._polls.clear(events)
        for connection in self._peers.values():
            if connection.unsent:
                connection.flush()
        self._receive(self._peers_of(events))
        self._advance()
        now = time.monotonic()
        for work in [w for w in self._unsettled if w.deadline <= now]:
            if not work.settled:
                self._expire(work)
        self._changed.notify_all()
        if self._abort_at is None or self._abort_at > now:
            return False
        if self.failure is None and self._dead:
            self._fail(self._blame.died(sorted(self._dead)))
        self._abort_at = None
        return True

    def _ended(self) -> bool:
        """Return whether the guard was closed. A method, because a value may change while the lock
        is released."""
        return self._closed

    def _next_look(self) -> float | None:
        """Return the milliseconds until the next deadline, or None."""
        dues = [work.deadline for work in self._unsettled]
        if self._abort_at is not None:
            dues.append(self._abort_at)
        if any(connection.unsent for connection in self._peers.values()):
            dues.append(time.monotonic() + 0.02)
        return max(0.0, 1000 * (min(dues) - time.monotonic())) + 1 if dues else None

    def _peers_of(self, events: Events) -> list[int]:
        return [self._polls.peers[fd] for fd in events if fd in self._polls.peers]

    def stop(self, error: CommunicationError, *, reforms: bool = False) -> None:
        """Fail pending and later calls with ``error``, or with an earlier one; the thread stays.

        ``reforms``: this rank is going to agree on new members: notify the peers and end the
        thread.
        """
        with self._changed:
            if self.failure is None:
                self._fail(error, tell=False)
            failure = self.failure
        if reforms and failure is not None:
            self._end(give_up_record(failure, reforms=True))

    def close(self) -> None:
        """Notify the peers, end the thread and close the connections."""
        self._end(Record(kind=LEAVE))

    def _end(self, last: Record) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for work in self._unsettled:
                work.fail(
                    CommunicationError(
                        f"the group was destroyed while {work.describe()} waited for its peers"
                    )
                )
            self._unsettled.clear()
            self._changed.notify_all()
        self.nudge()
        if self._thread is not threading.current_thread():
            self._thread.join(5)
        # it refers to the inner groups, which an error with its frames must not keep alive
        self._abort = nothing
        self._connections.close(last)
        self._polls.close()


K = TypeVar("K")
V = TypeVar("V")
Place = tuple[int, int, int]  # peer, its operation (SEND or RECV), tag


class PendingCollectives:
    """Queue of collectives that wait for agreement, and of the records received from each peer.

    The transport distinguishes calls by their order, so a call begins only after all earlier ones.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self._works: deque[GroupWork] = deque()
        self._received: dict[int, deque[Record]] = {peer: deque() for peer in peers}
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._works)

    def enter(
        self, work: GroupWork, records: dict[int, Record], expected: dict[int, Record]
    ) -> dict[int, Record]:
        """Number a call and queue it; return the record for each peer."""
        number, self._number = self._number, (self._number + 1) & 0xFFFFFFFF
        self._works.append(work)
        work.expected = {p: each._replace(sequence=number) for p, each in expected.items()}
        if records is expected:
            return work.expected
        return {p: each._replace(sequence=number) for p, each in records.items()}

    def received(self, peer: int, record: Record) -> None:
        self._received[peer].append(record)

    def oldest(self) -> GroupWork:
        return self._works[0]

    def wrong(self) -> list[tuple[int, Record]]:
        """Return the peers with another call than the oldest pending one, and their calls."""
        expected = self._works[0].expected
        return [
            (peer, records[0])
            for peer, records in self._received.items()
            if records and records[0] != expected[peer]
        ]

    def missing(self) -> list[int]:
        """Return the peers without a record of the oldest call; none if no call waits."""
        return (
            [peer for peer, records in self._received.items() if not records] if self._works else []
        )

    def take(self) -> GroupWork:
        """Remove and return the oldest call, on which all agree."""
        for records in self._received.values():
            records.popleft()
        return self._works.popleft()

    def late(self, work: GroupWork) -> list[int]:
        """Return the peers without a record of ``work``."""
        place = next((i for i, each in enumerate(self._works) if each is work), None)
        return [
            peer for peer in work.expected if place is None or len(self._received[peer]) <= place
        ]

    def does_instead(self, peer: int) -> Record | None:
        """Return a peer's record of a collective that this rank has not called."""
        records, place = self._received[peer], len(self._works)
        return records[place] if len(records) > place else None

    def clear(self) -> None:
        self._works.clear()


class PendingPairs:
    """Sends and receives of this rank and of its peers that wait for each other, matched in order
    by peer and tag.

    Empty queues are deleted, because a tag may never be used again.
    """

    def __init__(self) -> None:
        self._works: dict[Place, deque[GroupWork]] = {}
        self._received: dict[Place, deque[Record]] = {}
        self._any_source: dict[int, deque[GroupWork]] = {}  # tag → receives from any source
        self._senders: dict[int, deque[int]] = {}  # tag → peers whose sends wait, oldest first

    def enter(self, work: GroupWork, peer: int, operation: int, tag: int) -> None:
        """Queue ``work``, which waits for ``operation`` of ``peer``."""
        self._works.setdefault((peer, operation, tag), deque()).append(work)

    def enter_any_source(self, work: GroupWork, tag: int) -> None:
        self._any_source.setdefault(tag, deque()).append(work)

    def received(self, peer: int, record: Record) -> None:
        self._received.setdefault((peer, record.operation, record.root), deque()).append(record)
        if record.operation == SEND:
            self._senders.setdefault(record.root, deque()).append(peer)

    def matched(self, peer: int, operation: int, tag: int) -> Iterator[tuple[GroupWork, Record]]:
        """Remove and yield the matched pairs, in order."""
        place = (peer, operation, tag)
        while place in self._works and place in self._received:
            work, record = _take(self._works, place), _take(self._received, place)
            if operation == SEND:
                self._senders[tag].remove(peer)
                if not self._senders[tag]:
                    del self._senders[tag]
            yield work, record

    def matched_any_source(self, tag: int) -> tuple[GroupWork, int] | None:
        """Remove and return the oldest receive from any source with the sender's rank, if a send
        waits for it."""
        if tag not in self._any_source or tag not in self._senders:
            return None
        return _take(self._any_source, tag), self._senders[tag][0]

    @property
    def from_any_source(self) -> bool:
        """True if a receive from any source waits."""
        return bool(self._any_source)

    def waiting_for(self, peer: int) -> GroupWork | None:
        return next((works[0] for (p, _, _), works in self._works.items() if p == peer), None)

    def unmatched(self, peer: int) -> Record | None:
        """Return a send or receive of ``peer`` without a match here."""
        return next(
            (records[0] for (p, _, _), records in self._received.items() if p == peer), None
        )


def _take(queues: dict[K, deque[V]], key: K) -> V:
    value = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return value
