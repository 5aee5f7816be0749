"""Membership over doors: whoever can still speak goes on in one group, whatever dies meanwhile, and
never in two."""

import contextlib
import gc
import random
import select
import socket
import threading
import time
import weakref
from dataclasses import replace

import pytest

from commpress.collectives.change import Change
from commpress.collectives.transports import connection, epochs, meeting
from commpress.collectives.transports.connection import Conversation
from commpress.collectives.transports.epochs import Agreement, Terms
from commpress.collectives.transports.meeting import JOIN, Door, knock
from commpress.collectives.transports.membership import (
    Epoch,
    Membership,
    contact_of,
    new_key,
    place_of,
)
from commpress.errors import CommunicationError, Excluded, InvalidArgument, NoQuorum, PeerFailure


class Killed(BaseException):
    """The process is no more."""


class Process:
    """A member as a thread: ``when`` names the moment at which it dies."""

    refusal = ""

    def __init__(self, when=""):
        self.door = Door("127.0.0.1", socket.AF_INET, 16)
        self.when, self.built, self.history, self.outcome = when, None, [], None
        self.membership = None

    def reach(self, moment):
        if moment == self.when:
            self.door.close()
            raise Killed(moment)

    def offer(self, places):
        self.reach("offer")
        return {"from": self.door.here}

    def build(self, proposal, watch):
        self.reach("build")
        self.built = proposal.epoch.key
        if self.when == "built":
            self.reach("built")
        return lambda: self.history.append(
            (proposal.epoch.number, proposal.epoch.key, proposal.epoch.places)
        )

    def undo(self):
        self.built = None

    def agree(self, terms=None, timeout=20.0):
        terms = terms or Terms()
        try:
            self.reach("start")
            self.outcome = Agreement(self.membership, terms, self, timeout).run()[0]
        except (CommunicationError, InvalidArgument) as error:
            self.outcome = error
        except Killed:
            self.outcome = None


@pytest.fixture(autouse=True)
def _swift(monkeypatch):
    monkeypatch.setattr(epochs, "SILENCE", 1.0)
    monkeypatch.setattr(meeting, "AGAIN", 0.05)
    monkeypatch.setattr(meeting, "UNATTENDED", 0.2)
    monkeypatch.setattr(epochs, "TICK", 0.01)


def group(*moments):
    """Processes of one epoch."""
    made = [Process(when) for when in moments]
    epoch = Epoch(0, new_key(), new_key(), tuple(each.door.here for each in made))
    for each in made:
        each.membership = Membership(each.door, epoch)
    return made


def alone(when=""):
    return group(when)[0]


def together(processes, terms=None, timeout=20.0):
    """All of them reform at once; their outcomes."""
    terms = terms or [Terms(said=bytes([i])) for i in range(len(processes))]
    threads = [
        threading.Thread(target=one.agree, args=(each, timeout))
        for one, each in zip(processes, terms, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "an agreement hangs"
    return [one.outcome for one in processes]


def take_in(processes, terms, size):
    """Reform until all newcomers are in: one that comes late is taken in by the next."""
    together(processes, [terms] * len(processes))
    while processes[0].outcome.size < size:
        assert any(one.membership.waiting for one in processes)
        together(processes, [terms] * len(processes))


def knocking(newcomers, age, member):
    """Threads of processes that want to join, once all are at the member's door."""
    terms = Terms(age=age, contacts=lambda: [member.door.here])
    threads = [threading.Thread(target=one.agree, args=(terms,)) for one in newcomers]
    for thread in threads:
        thread.start()
    while member.membership.waiting < len(newcomers):
        member.membership.listen()
        time.sleep(0.005)
    return threads


@contextlib.contextmanager
def answering(*processes):
    """They run, and do not come: their doors are answered meanwhile."""
    done = threading.Event()

    def answer():
        while not done.is_set():
            for one in processes:
                one.membership.listen()
            time.sleep(0.005)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def close(processes):
    for one in processes:
        one.door.close()


def assert_agree(processes):
    """They are one group, each with its rank, and nobody is in doubt."""
    epochs = {one.membership.epoch for one in processes}
    assert len(epochs) == 1, [one.outcome for one in processes]
    assert set(epochs.pop().places) == {one.door.here for one in processes}
    for one in processes:
        assert one.membership.ready is None
        assert one.outcome.rank == one.membership.rank
        assert replace(one.outcome, rank=0) == replace(processes[0].outcome, rank=0)


def crowds():
    """Moments at which members die, also the last: anywhere, any number."""
    for dead in ((), (0,), (1,), (2,), (0, 1), (1, 2)):
        yield tuple("start" if rank in dead else "" for rank in range(3))
    for moment in ("offer", "build", "built"):
        yield (moment, "", "", "")
    yield from (("", "build", "", ""), ("", "built", "", ""))
    yield ("start", "offer", "build", "built", "")
    for seed in range(6):
        draw = random.Random(seed)
        yield (*(draw.choice(["", "", "start", "offer", "build", "built"]) for _ in range(5)), "")


@pytest.mark.parametrize("moments", crowds(), ids=" ".join)
def test_whoever_is_left_goes_on_as_one_group_in_their_order(moments):
    crowd = group(*moments)
    together(crowd)
    # only a leader offers
    left = [rank for rank, one in enumerate(crowd) if not one.when or one.outcome is not None]
    survivors = [crowd[rank] for rank in left]
    assert_agree(survivors)
    change = survivors[0].outcome
    assert change.sources == tuple(left)
    assert change.lost == tuple(sorted({*range(len(crowd))} - {*left}))
    assert change.reports == tuple(bytes([rank]) for rank in left)
    if not any(moments):
        together(crowd)
        assert_agree(crowd)
        assert crowd[0].outcome.epoch == change.epoch + 1
    close(crowd)


@pytest.mark.parametrize("size", [1, 2])
def test_newcomers_follow_whoever_was_there(size):
    members, newcomers = group("", ""), group(*[""] * size)
    threads = knocking(newcomers, 0, members[1])
    take_in(members, Terms(age=5), 2 + size)
    for thread in threads:
        thread.join(60)
    assert_agree([*members, *newcomers])
    assert members[0].outcome.sources == (0, 1, *[None] * size)
    assert newcomers[0].outcome.was is None
    assert len(members[0].outcome.new) == size
    close([*members, *newcomers])


def test_a_newcomer_names_the_contact_at_which_nobody_is():
    member, newcomer = alone(), alone()
    gone = member.door.here
    close([member])
    newcomer.agree(Terms(contacts=lambda: [gone]), timeout=0.5)
    assert isinstance(newcomer.outcome, PeerFailure)
    for said in (contact_of(gone), "its process is gone", "join="):
        assert said in str(newcomer.outcome)
    close([newcomer])


@pytest.mark.parametrize("ends", ["", "build"])
def test_members_ask_whether_a_slow_newcomer_runs_and_are_not_taken_for_latecomers(
    monkeypatch, ends
):
    """Its door answers that it is of another epoch, which it is: nobody has gone on without the
    members."""
    three, newcomer, whole = group("", "", ""), alone(ends), Conversation.tell

    def send(link, kind, **content):
        if kind == "accept" and threading.current_thread() is joining:
            until = time.monotonic() + 0.4
            while time.monotonic() < until:
                newcomer.membership.listen()
                time.sleep(0.01)
        return whole(link, kind, **content)

    monkeypatch.setattr(Conversation, "tell", send)
    terms = Terms(contacts=lambda: [three[0].door.here])
    joining = threading.Thread(target=newcomer.agree, args=(terms,))
    joining.start()
    take_in(three, Terms(age=1), 3 if ends else 4)
    joining.join(60)
    assert_agree([*three, newcomer] if not ends else three)
    close([*three, newcomer])


@pytest.mark.parametrize("age", [3, 10**9])
def test_a_group_that_has_trained_as_long_or_longer_is_refused(age):
    """It would replace the members' weights, and its age is what it says of itself."""
    members, older = group("", ""), alone()
    (joiner,) = knocking([older], age, members[0])
    together(members, [Terms(age=3)] * 2)
    joiner.join(60)
    assert [one.outcome.sources for one in members] == [(0, 1)] * 2
    assert isinstance(older.outcome, InvalidArgument)
    assert f"has trained for {age} steps and the members for 3" in str(older.outcome)
    assert "give age=0 to reform() here to take theirs" in str(older.outcome)
    close([*members, older])


def test_a_minority_does_not_go_on():
    """Three of five neither answer nor are dead."""
    five = group(*[""] * 5)
    outcomes = together(five[3:], timeout=16.0)
    for outcome in outcomes:
        assert isinstance(outcome, NoQuorum)
        assert "2 of 5 ranks are left, which is no majority" in str(outcome)
        assert outcome.ranks == (0, 1, 2) or outcome is not outcomes[0]
    close(five)


@pytest.mark.parametrize(("here", "goes_on"), [((0, 1), True), ((2, 3), False)])
def test_of_two_halves_the_one_with_the_first_rank_goes_on(here, goes_on):
    four = group(*[""] * 4)
    some = [four[rank] for rank in here]
    together(some, timeout=8.0)
    if goes_on:
        assert_agree(some)
    else:
        assert all(isinstance(one.outcome, NoQuorum) for one in some)
    close(four)


def test_one_that_was_stopped_is_told_that_the_others_went_on():
    """It did not answer; then it asks them. It may join again, in the same process."""
    three = group(*[""] * 3)
    together(three[:2])
    assert_agree(three[:2])
    with answering(*three[:2]):
        together(three[2:])
    assert isinstance(three[2].outcome, Excluded)
    contact = place_of(three[2].outcome.contact)
    (asked,) = (one for one in three[:2] if one.door.here == contact)
    (again,) = knocking(three[2:], 9, asked)
    take_in(three[:2], Terms(age=9), 3)
    again.join(60)
    assert_agree(three)
    assert three[2].outcome.was is None
    close(three)


def test_objects_that_differ_are_named():
    two = group("", "")
    outcomes = together(two, [Terms(labels=lambda: ["a"]), Terms(labels=lambda: ["a", "b"])])
    for outcome in outcomes:
        assert isinstance(outcome, InvalidArgument)
        assert "construct the same ones" in str(outcome)
    close(two)


def test_objects_that_nobody_holds_any_more_do_not_count():
    """A cycle keeps one alive on one rank only, until the garbage collector has run."""

    class Owner:
        def __init__(self):
            self.itself = self

    held = weakref.ref(Owner())
    two = group("", "")
    together(two, [Terms(), Terms(labels=lambda: ["owner"] if held() else [])])
    assert_agree(two)
    close(two)


def test_a_process_that_is_gone_stays_so_where_another_listens_since():
    """Ports are given away again. Of three members one is gone; the second runs at first, and does
    not come."""
    three = group("", "start", "")
    host, port, _ = three[1].door.here.split(" ")
    three[1].agree()
    with answering(three[2]):
        together(three[:1], timeout=2.0)
    assert isinstance(three[0].outcome, PeerFailure), "the second may come yet"
    assert "Rank 2: it runs, but did not come" in str(three[0].outcome)
    three[2].door.close()
    with socket.create_server((host, int(port))):
        together(three[:1], timeout=5.0)
    assert_agree(three[:1])
    close(three[:1])


def test_who_is_silent_may_come_until_the_time_is_nearly_over():
    """Two of four, without the first, which is late; the other one stays silent."""
    four = group(*[""] * 4)

    def come():
        four[0].membership.attend()  # who comes when it has gone on is told so
        four[0].agree()

    late = threading.Timer(4.5, come)
    late.start()
    together(four[2:], timeout=8.0)
    late.join()
    # who needs too long to reach the first is told to join
    went_on = [one for one in four if isinstance(one.outcome, Change)]
    assert_agree(went_on)
    assert four[0] in went_on
    assert len(went_on) > 1
    assert not any(isinstance(one.outcome, NoQuorum) for one in four)
    four[0].membership.close()
    close(four[1:])


def test_who_collects_garbage_for_long_is_waited_for(monkeypatch):
    """No thread of a process runs meanwhile, so that nobody answers at its door."""

    class Owner:
        def __init__(self):
            self.itself = self

    gc.collect()
    gc.freeze()  # a collection of what other tests have left stops all three, as no process would
    gc.disable()  # the object lies there until it is asked for
    three, held, collect = group("", "", ""), weakref.ref(Owner()), epochs.gc.collect

    def slowly():
        if threading.current_thread().name == "slow":
            time.sleep(1.5 * epochs.SILENCE)
        collect()

    monkeypatch.setattr(epochs.gc, "collect", slowly)
    monkeypatch.setattr(epochs, "SILENCE", 2.0)
    terms = Terms(labels=lambda: ["owner"] if held() else [])
    slow = threading.Thread(target=three[2].agree, args=[terms, 60.0], name="slow")
    slow.start()
    together(three[:2], timeout=60.0)
    slow.join()
    gc.enable()
    assert_agree(three)
    close(three)


def test_the_report_of_a_slow_collector_is_as_good_as_an_answer():
    """Its door has not been attended for long, and the report comes before the next answer."""
    two = group("", "")
    agreement, place = Agreement(two[0].membership, Terms(), two[0], 20.0), two[1].door.here
    agreement.sweeping.add(place)
    agreement._probe(place).answered -= 10 * epochs.SILENCE
    assert agreement._state(place) == ""
    agreement._swept(place)
    assert agreement._state(place) == ""
    agreement._probe(place).answered -= 10 * epochs.SILENCE
    assert agreement._state(place) == epochs.SILENT
    close(two)


def test_who_was_stopped_itself_takes_nobody_for_silent(monkeypatch):
    """It is stopped after it looked for an answer, and before it thinks about what it saw."""
    look, two = meeting.Heartbeat.look, group("", "")

    def stopped(probe):
        look(probe)
        time.sleep(1.5 * epochs.SILENCE)

    monkeypatch.setattr(meeting.Heartbeat, "look", stopped)
    with answering(two[1]):
        agreement = Agreement(two[0].membership, Terms(), two[0], 20.0)
        assert agreement._state(two[1].door.here) == ""
    close(two)


def test_a_minimum_is_kept():
    two = group("", "start")
    together(two, [Terms(minimum=2), Terms()], timeout=2.0)
    assert isinstance(two[0].outcome, NoQuorum)
    assert "minimum is 2" in str(two[0].outcome)
    close(two)


def test_nobody_answers_in_time():
    """The leader runs and is not there: its door is answered, by its other thread."""
    two = group("", "")
    start = time.monotonic()
    with answering(two[0]):
        together(two[1:], timeout=1.0)
    assert isinstance(two[1].outcome, PeerFailure)
    assert two[1].outcome.ranks == (0,)
    assert time.monotonic() - start < 10
    close(two)


@pytest.mark.parametrize("said", [b"\x05\0\0\0\xff\xfe{]x", b"\x01\0\0\0\x90", b"\xff\xff\xff\xff"])
def test_who_says_nonsense_is_not_listened_to_any_more(said):
    near, far = socket.socketpair()
    with near:
        near.sendall(said)
        link = Conversation(far)
        assert link.receive() == []
        assert not link.open


def test_an_endless_message_is_not_read_to_its_end(monkeypatch):
    """Whoever has been let in and is of ill will sends more than a message may have, faster than it
    is looked at."""
    monkeypatch.setattr(connection, "LONGEST", 1 << 16)
    near, far = socket.socketpair()
    near.settimeout(0.5)
    sent = [0]

    def send():
        while sent[0] < 64 << 20:
            try:
                sent[0] += near.send(bytes(1 << 16))
            except OSError:
                return

    link, endless = Conversation(far), threading.Thread(target=send)
    near.sendall((1 << 16).to_bytes(4, "little"))
    endless.start()
    while endless.is_alive():
        assert link.news
        time.sleep(0.001)
    assert sent[0] < 8 << 20, "no more than a message, and what the kernel holds"
    assert link.receive() == []
    assert not link.open
    near.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x05\0\0\0\xff\xfe{]x",
        b"\x01\0\0\0\x90",
        b"\x0b\0\0\0\x81\xa2is\xa6report",
        b"\xff\xff\xff\xff",
    ],
)
def test_who_joins_and_says_nothing_or_nonsense_is_sent_away(said):
    """It knows the token, as a newcomer that was stopped, or of another version: it holds up one
    agreement at most."""
    first = alone()
    with knock(first.door.here, JOIN, 0, (0, 0), 5.0) as stranger:
        stranger.socket.sendall(said)
        while not select.select([stranger], [], [], 0.01)[0]:  # it is taken in
            first.membership.listen()
        begun = time.monotonic()
        together([first])
        assert first.outcome.size == 1
        assert time.monotonic() - begun < 5.0
        assert not first.membership.waiting
        stranger.socket.settimeout(5.0)
        assert stranger.look() == b"!"
        while stranger.socket.recv(4096):  # the reason, for who has reported
            continue
    close([first])
