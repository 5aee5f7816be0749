"""The guard of one rank among threads: what it aborts after a disagreement, and what it hears while
data is late."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from commpress.errors import Mismatch
from commpress.integrations.process_group.call import GroupWork
from commpress.integrations.process_group.control_connections import ControlConnections, first_epoch
from commpress.integrations.process_group.guard import Guard
from commpress.integrations.process_group.records import call, give_up_record

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def connected(tmp_path):
    """The control connections of two ranks."""
    store = dist.FileStore(str(tmp_path / "store"), 2)

    def connect(rank):
        agreement = first_epoch(store, rank, 2)
        return ControlConnections(agreement, agreement.epoch, TIMEOUT)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(connect, range(2)))


def guarded(connections):
    aborted = threading.Event()
    return Guard(connections, timeout=TIMEOUT, abort=aborted.set, name=str), aborted


@pytest.mark.parametrize("early", [True, False])
def test_a_disagreement_aborts_only_what_was_issued_before_it(connected, early):
    guards, aborted = zip(*map(guarded, connected), strict=True)
    works = [GroupWork(guard, lambda work: None, []) for guard in guards]
    for guard, work, name in zip(guards, works, ("barrier", "all_reduce"), strict=True):
        work.early = early
        guard.collective(call(name, []), work)
    for guard, work in zip(guards, works, strict=True):
        guard.settle(work)
        assert type(work.error) is Mismatch
    for event in aborted:
        assert event.wait(60 if early else 0.1) == early
    for guard in guards:
        guard.close()


def test_who_waits_for_late_data_learns_that_a_peer_has_given_up(connected):
    """All agreed, so nothing is pending here; but the peer that gave up may never issue the
    call."""
    guard, _ = guarded(connected[0])
    peer = connected[1].by_rank[0]
    work, barrier = GroupWork(guard, lambda work: None, []), call("barrier", [])
    peer.send(barrier)
    guard.collective(barrier, work)
    guard.settle(work)
    assert work.error is None
    assert guard.look()
    peer.send(give_up_record(Mismatch("", ranks=(0,))))
    deadline = time.monotonic() + 60
    while guard.look() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert type(guard.failure) is Mismatch
    assert guard.failure.ranks == (1,)
    guard.close()
    connected[1].close()
