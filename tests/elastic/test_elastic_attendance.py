"""A process finds the run that it belongs to, and begins none beside one that goes on."""

import signal
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from commpress.collectives.transports.membership import Membership, contact_of
from commpress.errors import CommunicationError, Excluded, InvalidArgument
from commpress.integrations.elastic import attendance
from commpress.integrations.elastic.attendance import Attendance, at_sigterm, store_at
from commpress.integrations.process_group import reform
from test_epochs import alone


class Member:
    """A group of one, whose process answers who is at its door."""

    def __init__(self):
        self.process, self.stores, self.timeout = alone(), [], timedelta(seconds=5)
        self.membership: Membership = self.process.membership
        self._runs = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self):
        while not self._runs.wait(0.005):
            self.membership.listen()

    def announce(self, store):
        self.stores.append(store)
        reform.announce(self)

    def end(self):
        self._runs.set()
        self._thread.join()
        self.membership.close()


@pytest.fixture
def launcher(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv("COMMPRESS_STORE", "launcher:1")
    monkeypatch.delenv("COMMPRESS_JOIN", raising=False)
    monkeypatch.setattr(attendance, "store_at", lambda place, timeout: store)
    return store


def test_a_process_without_join_begins_no_run_beside_one_that_goes_on(launcher):
    """With the same store it would take the members' place there, and newcomers would come to
    it."""
    first, second = Member(), Member()
    assert not Attendance(first, None, None).begin()
    told = launcher.get(reform.MEMBERS)
    with pytest.raises(
        InvalidArgument, match=r"lists members of a running run, at .* without join="
    ):
        Attendance(second, None, None).begin()
    assert launcher.get(reform.MEMBERS) == told
    first.end()
    assert not Attendance(second, None, None).begin(), "it had ended"
    assert contact_of(second.membership.here) in launcher.get(reform.MEMBERS).decode()
    second.end()


def test_members_that_start_together_are_no_others_to_each_other(launcher):
    member = Member()
    for _ in range(3):
        assert not Attendance(member, None, None).begin()
    member.end()


def test_who_joins_is_told_to_the_store_when_it_is_a_member(launcher, monkeypatch):
    first, second = Member(), Member()
    Attendance(first, None, None).begin()
    told = launcher.get(reform.MEMBERS)
    monkeypatch.setenv("COMMPRESS_JOIN", "launcher:1")
    joins = Attendance(second, None, None)
    assert joins.begin()
    assert joins.join is launcher
    assert launcher.get(reform.MEMBERS) == told
    contact = contact_of(first.membership.here)
    assert Attendance(second, contact, None).begin()
    joins.announce()
    assert launcher.get(reform.MEMBERS) != told
    for each in (first, second):
        each.end()


def test_who_was_left_behind_joins_again_by_a_member_or_by_the_store(launcher, monkeypatch):
    here = Attendance(SimpleNamespace(timeout=timedelta(seconds=5)), None, None)
    here.join_again(Excluded("gone on", contact="10.0.0.1:5#" + 32 * "0"))
    assert here.join == "10.0.0.1:5#" + 32 * "0"
    here.join_again(Excluded("gone on"))
    assert here.join is launcher
    monkeypatch.delenv("COMMPRESS_STORE")
    with pytest.raises(Excluded):
        here.join_again(Excluded("gone on"))


@pytest.mark.parametrize("place", ["launcher", ":1", "launcher:x"])
def test_a_store_that_is_none_is_refused(place):
    with pytest.raises(InvalidArgument, match="expected host:port"):
        store_at(place, timedelta(seconds=1))


def test_the_first_sigterm_is_a_leave_and_the_programs_own_use_of_it_stays():
    called = []
    restore = at_sigterm(lambda: called.append(1))
    signal.raise_signal(signal.SIGTERM)
    assert called == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    restore()
    try:
        signal.signal(signal.SIGTERM, lambda *_: called.append(2))
        at_sigterm(lambda: called.append(3))()
        signal.raise_signal(signal.SIGTERM)
        assert called == [1, 2]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_server_that_is_no_store_is_an_error_in_time():
    """It takes the connection and says nothing: torch alone would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(CommunicationError, match="no store"):
            store_at(place, timedelta(seconds=0.5))
