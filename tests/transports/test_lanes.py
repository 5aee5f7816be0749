"""Several connections a peer: the rows of one, whatever becomes of the others, and their number the
same everywhere."""

import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from commpress.collectives.frame import HEADER
from commpress.collectives.transports import lanes, sockets
from commpress.collectives.transports.lanes import CONGESTION, CONNECTIONS, agreed
from commpress.collectives.transports.sockets import HAS, PIECE, envelope
from commpress.errors import Corrupted, InvalidArgument, Mismatch, PeerFailure
from test_faults import PATIENT, caught
from test_sockets import assert_came, on_all, post, transports
from ways import transport_by


@pytest.fixture
def wide(monkeypatch):
    """Transports over so many connections a peer, with small pieces."""
    monkeypatch.setattr(sockets, "DIVIDED", 5_000)
    monkeypatch.setattr(sockets, "PIECES", (1_000, 3_000))

    def make(size, connections, **options):
        monkeypatch.setenv(CONNECTIONS, str(connections))
        made = transports(size, **options)
        assert [t.mesh.connections for t in made] == [connections] * size
        return made

    return make


def peer(transport, rank):
    return transport.mesh.engine._peers[rank]


def ends(transport, rank):
    """Its connections to a peer, the first one first."""
    every = transport.mesh.engine._by_file.values()
    return [end for end in every if end.peer is peer(transport, rank)]


def until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("connections", [1, 2, 3, 8])
def test_rows_of_any_length_in_any_order(wide, size, connections):
    """Also where lengths are odd or differ, rows are empty, and transfers of a part of the ranks
    come between."""
    chance = random.Random(size + 10 * connections)
    lengths = [None, 0, 1, 999, 4_999, 5_000, 5_001, 12_345, 400_001]
    numels = {
        tag: [[chance.choice(lengths) for _ in range(size)] for _ in range(size)]
        for tag in range(12)
    }
    made = wide(size, connections)
    parts = [t.subset([0, size - 1]) for t in made]

    def play(transport):
        part, posted = parts[transport.rank], {}
        for tag in chance.sample(range(12), 12):
            posted[tag] = post(transport, tag, numels[tag])
            if part and not tag % 4:
                posted[tag + 100] = post(part, tag + 100, [[7_001] * 2] * 2)
        for tag, (out, work) in sorted(posted.items(), key=lambda item: -item[0]):
            work.wait()
            assert_came((part if tag >= 100 else transport).rank, tag, out)

    on_all(play, made)
    # nothing stays that the receiver has
    for t in made:
        for each in t.mesh.engine._peers.values():
            until(lambda each=each: not each.unconfirmed and not each.incoming)


@pytest.mark.parametrize("seed", range(3))
def test_connections_that_end_lose_nothing(wide, seed):
    """All but the first are shut down while 200 transfers go, one after the other, on any side."""
    made, chance = wide(2, 4), random.Random(seed)
    mortal = [
        end
        for r, t in enumerate(made)
        for end in chance.sample(ends(t, 1 - r)[1:], 5 if r == seed % 2 else 2)
    ]
    moments = dict(zip(sorted(chance.sample(range(190), len(mortal))), mortal, strict=True))

    def play(transport):
        for tag in range(200):
            out, work = post(transport, tag, [[50_000 + tag, 60_001], [70_003, tag]])
            if transport.rank == 0 and tag in moments and moments[tag].open:
                moments[tag].socket.shutdown(chance.choice([socket.SHUT_RD, socket.SHUT_RDWR]))
            work.wait()
            assert_came(transport.rank, tag, out)

    on_all(play, made)
    until(lambda: not any(peer(t, 1 - r).carriers for r, t in enumerate(made)))
    assert all(peer(t, 1 - r).open for r, t in enumerate(made))


def test_what_is_sent_again_is_what_was_posted(wide):
    """The tensor has other numbers by then; its connection ends before the peer reads anything."""
    one, two = wide(2, 2)
    sent = torch.arange(40_000, dtype=torch.int32).view(torch.uint8)
    rows = torch.cat([torch.zeros(2, HEADER, dtype=torch.uint8), sent.repeat(2, 1)], 1)
    work = one.all_to_all(torch.zeros_like(rows), rows, 1)
    until(lambda: 1 not in work.sending)
    rows.zero_()
    for end in peer(two, 0).carriers:
        end.socket.shutdown(socket.SHUT_RDWR)
    out = torch.zeros_like(rows)
    two.all_to_all(out, rows, 1).wait()
    assert torch.equal(out[0, HEADER:], sent)


def test_last_words_are_heard_whatever_connection_ends_first(wide):
    one, two = wide(2, 3)
    numels = [[None, 300_001], [None, None]]
    out, work = post(two, 0, numels)
    post(one, 0, numels)[1].wait()
    one.mesh.engine.close()
    work.wait()
    assert_came(1, 0, out)
    with pytest.raises(PeerFailure, match="rank 0 closed its connection") as error:
        post(two, 1, numels)[1].wait()
    assert error.value.ranks == (0,)


def test_the_end_of_the_first_connection_is_a_death(wide):
    one, two, three = wide(3, 3)
    numels = [[None, 20_000_000, None], [20_000_000, None, None], [None] * 3]
    _, work = post(one, 0, numels)
    peer(two, 0).socket.shutdown(socket.SHUT_RDWR)
    start = time.monotonic()
    with pytest.raises(PeerFailure, match="rank 1 closed its connection") as error:
        work.wait()
    assert error.value.ranks == (1,)
    assert time.monotonic() - start < 20
    assert list(one.lost()) == [1]
    assert list(three.lost()) == []


def die():
    os.environ[CONNECTIONS] = "3"
    transport, size = transport_by("sockets", PATIENT), dist.get_world_size()
    numels = [[3_000_000] * size] * size
    post(transport, 0, numels)[1].wait()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error, start, end = caught(lambda: post(transport, 1, numels)[1].wait())
    return error, end - start


def test_a_process_that_dies_is_named(mortal):
    found = [each for each in mortal.outcomes(die, size=3, lost=[1]) if each is not None]
    assert len(found) == 2
    for error, seconds in found:
        assert type(error) is PeerFailure
        assert error.ranks == (1,)
        assert seconds < 20


def test_a_silent_peer_is_named_at_the_timeout(wide):
    one, *others = wide(3, 3, timeout=timedelta(seconds=0.5))
    with pytest.raises(PeerFailure, match=r"rank 1 was silent for 0\.\d s; rank 2") as error:
        post(one, 0, [[9_000] * 3] * 3)[1].wait()
    assert error.value.ranks == (1, 2), others


@pytest.mark.parametrize(
    "words",
    [
        bytes(200),
        envelope(PIECE, 5_000, sockets._PIECE.pack(0, 10)),  # longer than its message
        envelope(PIECE, sockets.LONGEST + 1, sockets._PIECE.pack(0, 0)),
    ],
    ids=["noise", "beyond the end", "longer than memory"],
)
def test_damage_on_any_connection_is_named(wide, words):
    one, two = wide(2, 3)
    one.mesh.engine.divides = False  # its header goes, and the payload behind it is never read
    numels = [[None, 5_001], [None, None]]
    peer(one, 1).socket.sendall(envelope(0, 5_001, bytes(HEADER)))
    peer(one, 1).carriers[1].socket.sendall(words)
    with pytest.raises(Corrupted, match="rank 0 sent an envelope that came damaged") as error:
        post(two, 7, numels)[1].wait()
    assert error.value.ranks == (0,)


def test_a_word_that_comes_twice_is_no_harm(wide):
    one, two = wide(2, 2)
    for end in (peer(two, 0), peer(two, 0).told):
        end.socket.sendall(envelope(HAS, 0, sockets._PIECE.pack(0, 0)))
    numels = [[None, 9_000], [9_000, None]]
    on_all(lambda pair: pair[1].wait(), [post(t, 0, numels) for t in (one, two)])


# ---------------------------------------------------------------- how many


def agreement(monkeypatch, wishes, trips=None):
    """Return what ``agreed`` returns or raises on ranks of these environments and round trips."""
    said, all_said, here = [], threading.Event(), threading.Semaphore(0)
    trips = trips or [0.0] * len(wishes)

    def share(words):
        said.append(words)
        here.release()
        assert all_said.wait(60)
        return said

    def ask(trip):
        try:
            return agreed({}, share) if trip is None else agreed({1: trip}, share)
        except Exception as error:
            return error

    monkeypatch.setattr(lanes, "round_trip", float)
    with ThreadPoolExecutor(len(wishes)) as pool:
        found = []
        for wish, trip in zip(wishes, trips, strict=True):
            monkeypatch.setenv(CONNECTIONS, wish)
            found.append(pool.submit(ask, trip))
            assert here.acquire(timeout=60)
        all_said.set()
        return [each.result() for each in found]


@pytest.mark.parametrize(
    ("trips", "number"),
    [([0.0, 0.0], 1), ([0.0001, 0.0059], 1), ([0.0061, 0.0], 2), ([0.02, 0.03], 5), ([0.05, 9], 8)],
)
def test_the_longest_round_trip_decides(monkeypatch, trips, number):
    assert agreement(monkeypatch, [""] * 2, trips) == [number] * 2


def test_as_many_files_as_a_process_may_open(monkeypatch):
    monkeypatch.setattr(lanes.resource, "getrlimit", lambda _: (10, 10))
    assert agreement(monkeypatch, ["", ""], [0.05, 0.05]) == [3, 3]
    monkeypatch.setattr(lanes.resource, "getrlimit", lambda _: (4, 4))
    assert agreement(monkeypatch, ["", ""], [0.05, 0.05]) == [1, 1]


def test_the_number_is_one_for_all(monkeypatch):
    assert agreement(monkeypatch, ["16", "16"]) == [16, 16]
    for error in agreement(monkeypatch, ["2", "4", "2"]):
        assert type(error) is Mismatch
        assert "COMMPRESS_CONNECTIONS differs: by rank it is 2, 4, 2" in str(error)
        assert error.ranks == (1,)
    for wish in ("0", "17", "-1", "three", "1.5"):
        for error in agreement(monkeypatch, [wish] * 2):
            assert type(error) is InvalidArgument
            assert f"COMMPRESS_CONNECTIONS is '{wish}', expected a number from 1 to 16" in str(
                error
            )


def test_congestion_control_is_what_the_user_names(monkeypatch, wide):
    monkeypatch.setenv(CONGESTION, "reno")
    for r, t in enumerate(wide(2, 2)):
        for end in ends(t, 1 - r):
            name = end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") == b"reno"
    monkeypatch.setenv(CONGESTION, "warp")
    with pytest.raises(InvalidArgument, match=r"is 'warp' on rank 0.*it has: .*reno"):
        transports(2)


def test_the_kernel_tells_a_round_trip(connected):
    for end in connected:
        assert 0 <= lanes.round_trip(end) < 5
    left, right = socket.socketpair()
    with left, right:
        assert lanes.round_trip(left) == 0.0
