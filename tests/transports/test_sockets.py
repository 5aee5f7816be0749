"""Connections of our own: ranks are threads here, each with a mesh over real sockets."""

import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.collectives.frame import HEADER, LONGEST, Frame, Rows, pack_rows
from commpress.collectives.transports import sockets
from commpress.collectives.transports.sockets import Mesh, SocketTransport, envelope
from commpress.errors import CommunicationError, Corrupted, InvalidArgument, PeerFailure

PATIENT = timedelta(seconds=60)


def transports(size, timeout=PATIENT):
    """One for each of so many ranks."""
    barrier, places = threading.Barrier(size), [b""] * size

    def make(rank):
        def tell(place):
            places[rank] = place
            barrier.wait()
            return list(places)

        return SocketTransport(Mesh(rank, range(size), tell, timeout), timeout=timeout)

    return on_all(make, range(size))


def on_all(function, items):
    with ThreadPoolExecutor(len(items)) as pool:
        return [future.result() for future in [pool.submit(function, item) for item in items]]


def row(numel, *, sender, receiver, tag):
    return torch.from_numpy(
        np.random.default_rng([sender, receiver, tag]).integers(0, 256, numel, dtype=np.uint8)
    )


def post(transport, tag, numels, lengths=None):
    """Rank a sends ``numels[a][b]`` bytes to rank b, None: no message; what comes, and the work to
    wait for.

    ``lengths`` is what this rank expects instead.
    """
    rank, size = transport.rank, transport.size
    expected = lengths or [numels[r][rank] for r in range(size)]
    out = {r: torch.zeros(n, dtype=torch.uint8) for r, n in enumerate(expected) if n is not None}
    inp = {
        r: row(n, sender=rank, receiver=r, tag=tag)
        for r, n in enumerate(numels[rank])
        if n is not None
    }
    header = pack_rows(dict.fromkeys(range(size), Frame(3, size, "none", 1, tag)), size)
    return out, transport.exchange(
        Rows(torch.zeros_like(header), out), Rows(header, inp), header, tag
    )


def assert_came(rank, tag, out):
    for sender, payload in out.items():
        assert torch.equal(payload, row(payload.numel(), sender=sender, receiver=rank, tag=tag))


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32), st.sampled_from([100, 30_000, 3_000_000]))
def test_exchanges_in_any_order(size, seed, top):
    """Every rank posts and waits in an order of its own, as often as not before its peers have
    posted."""
    chance = random.Random(seed)
    lengths = [lambda: None, lambda: 0, lambda: chance.randrange(top)]
    numels = {
        tag: [[chance.choice(lengths)() for _ in range(size)] for _ in range(size)]
        for tag in range(6)
    }
    orders = [
        (chance.sample(range(6), 6), chance.sample(range(6), 6), chance.random() * 0.01)
        for _ in range(size)
    ]

    def play(transport):
        posts, waits, pause = orders[transport.rank]
        posted = {}
        for tag in posts:
            posted[tag] = post(transport, tag, numels[tag])
            time.sleep(pause)
        for tag in waits:
            posted[tag][1].wait()
            assert_came(transport.rank, tag, posted[tag][0])

    on_all(play, transports(size))


def test_what_comes_early_is_bounded_and_nothing_is_stuck_behind_it(monkeypatch):
    """Rank 0 sends 20 MB that nobody has asked for yet; at most one message more than the bound is
    read aside."""
    monkeypatch.setattr(sockets, "EARLY", 3_000_000)
    one, two = transports(2)
    tags = range(20)
    numels = [[None, 1_000_000], [None, None]]
    ours = {tag: post(one, tag, numels) for tag in tags}
    time.sleep(5 * sockets.TICK)  # rank 1 has nothing to wait for, and nothing under way
    out, work = post(two, 19, numels)  # the last of them: all others lie before it
    work.wait()
    assert_came(1, 19, out)
    assert two.mesh.engine._early_bytes >= 19_000_000, (
        "what is due is read for whatever lies before it"
    )
    for tag in reversed(range(19)):
        out, work = post(two, tag, numels)
        work.wait()
        assert_came(1, tag, out)
    assert two.mesh.engine._early_bytes == 0
    for _, work in ours.values():
        work.wait()


def test_a_crowded_rank_reads_only_what_is_due(monkeypatch):
    monkeypatch.setattr(sockets, "EARLY", 3_000_000)
    one, two, three = transports(3)
    none = [None] * 3
    big, small = [[None, 4_000_000, None], none, none], [none, none, [None, 8, None]]
    ahead = [post(one, tag, big) for tag in range(10)]
    for tag in range(100, 110):
        on_all(lambda pair: pair[1].wait(), [post(t, tag, small) for t in (two, three)])
        time.sleep(sockets.TICK)
    assert 0 < two.mesh.engine._early_bytes <= 3_000_000 + 4_000_000
    came = [post(two, tag, big) for tag in range(10)]
    on_all(lambda pair: pair[1].wait(), [*ahead, *came])
    for tag, (out, _) in enumerate(came):
        assert_came(1, tag, out)


def test_bytes_move_when_their_rank_waits_elsewhere():
    """40 MB are more than the kernel takes: rank 1, which never waits for them, has to read
    them."""
    one, two = transports(2)
    numels = [[None, 40_000_000], [None, None]]
    out, _ = post(two, 0, numels)
    post(one, 0, numels)[1].wait()
    deadline = time.monotonic() + 60
    while not torch.equal(out[0], row(40_000_000, sender=0, receiver=1, tag=0)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("due", [999, 1001, 0, 5000])
def test_a_payload_of_another_length_is_refused(due):
    one, two = transports(2)
    numels = [[None, 1000], [None, None]]
    post(one, 0, numels)[1].wait()
    out, work = post(two, 0, numels, lengths=[due, None])
    with pytest.raises(CommunicationError, match=f"rank 0 sent 1000 bytes where {due} were due"):
        work.wait()
    assert not out[0].any()
    with pytest.raises(CommunicationError, match="failed before"):
        post(two, 1, numels)


@pytest.mark.parametrize("length", [LONGEST + 1, 2**63], ids=["more than the memory", "2**63"])
def test_a_length_that_cannot_be_takes_no_memory(length):
    """Though its envelope is whole."""
    one, two = transports(2)
    header = bytes(HEADER)
    one.mesh.engine._peers[1].socket.sendall(envelope(5, length, header))
    with pytest.raises(Corrupted, match="rank 0 sent an envelope that came damaged") as caught:
        post(two, 0, [[None, 8], [None, None]])[1].wait()
    assert caught.value.ranks == (0,)


def test_damage_is_named_by_an_exchange_that_waits_for_somebody_else():
    """Rank 1 has sent its row, then noise; its row is taken, and rank 2 is what the exchange waits
    for."""
    one, two, three = transports(3)
    numels = [[None] * 3, [8, None, None], [8, None, None]]
    out, work = post(one, 0, numels)
    post(two, 0, numels)[1].wait()
    two.mesh.engine._peers[0].socket.sendall(bytes(200))
    with pytest.raises(Corrupted, match="rank 1 sent an envelope that came damaged") as caught:
        work.wait()
    assert caught.value.ranks == (1,), three
    assert_came(0, 0, {1: out[1]})


def test_a_tag_serves_one_exchange_at_a_time():
    one, other = transports(2)
    numels = [[None, 8], [8, None]]
    post(one, 7, numels)
    with pytest.raises(CommunicationError, match="tag 7"):
        post(one, 7, numels)
    assert other.failure is None


def test_last_words_are_heard():
    """Rank 0 has sent its row when it goes; who needs nothing else of it does not miss it."""
    one, two = transports(2)
    numels = [[None, 3_000], [None, None]]
    post(one, 0, numels)
    one.mesh.engine.close()
    out, work = post(two, 0, numels)
    work.wait()
    assert_came(1, 0, out)
    with pytest.raises(PeerFailure) as caught:
        post(two, 1, numels)[1].wait()
    assert caught.value.ranks == (0,)
    assert "closed its connection" in str(caught.value)


def test_silent_and_deaf_ranks_are_told_apart():
    seconds = timedelta(seconds=0.5)
    one, *others = transports(3, seconds)
    with pytest.raises(
        PeerFailure, match=r"rank 0: rank 1 was silent for 0\.\d s; rank 2 was silent"
    ) as caught:
        post(one, 0, [[8] * 3] * 3)[1].wait()
    assert caught.value.ranks == (1, 2)
    one, *others = transports(2, seconds)
    # more than the kernel takes
    with pytest.raises(PeerFailure, match=r"rank 1 took nothing for 0\.\d s") as caught:
        post(one, 0, [[None, 90_000_000], [None, None]])[1].wait()
    assert caught.value.ranks == (1,), others


def test_nothing_stays_when_transports_go():
    def running():
        return {thread for thread in threading.enumerate() if thread.name == "commpress-sockets"}

    before = running()
    made = transports(3)
    parts = [made[0].subset([0, 2]), made[2].subset([0, 2])]
    assert len(running() - before) == 3
    del made
    gc.collect()
    table = [[None, 100], [100, None]]
    on_all(lambda part: post(part, 0, table)[1].wait(), parts)
    del parts
    gc.collect()
    deadline = time.monotonic() + 30
    while running() - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class OnCard(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    device = property(lambda _: torch.device("cuda", 0))

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def staged_exchange(transport):
    """Rows of all three operations as a GPU would send them, and plain ones; the bytes that
    came."""
    came, rank, size = [], transport.rank, transport.size
    for tag, kind in enumerate((OnCard, torch.Tensor)):
        header = pack_rows(dict.fromkeys(range(size), Frame(3, size, "none", 1, tag)), size)
        sent = torch.cat(
            [header, torch.stack([row(100, sender=rank, receiver=r, tag=0) for r in range(size)])],
            1,
        )
        outs = [torch.zeros_like(sent).as_subclass(kind) for _ in range(3)]
        transport.all_to_all(outs[0], sent.as_subclass(kind), 4 * tag).wait()
        transport.all_gather(outs[1], sent[:1].as_subclass(kind), 4 * tag + 1).wait()
        payloads = {r: sent[r, HEADER:].clone().as_subclass(kind) for r in range(size)}
        into = Rows(
            torch.zeros_like(header),
            {r: torch.zeros(100, dtype=torch.uint8).as_subclass(kind) for r in payloads},
        )
        transport.exchange(into, Rows(header, payloads), header, 4 * tag + 2).wait()
        came.append(
            [x.as_subclass(torch.Tensor) for x in (outs[0], outs[1], *into.payloads.values())]
        )
    return came


def test_rows_on_cuda_go_by_way_of_the_host(monkeypatch):
    monkeypatch.setattr("commpress.work.stream_of", lambda device: None)
    for on_card, plain in on_all(staged_exchange, transports(3)):
        assert all(map(torch.equal, on_card[2:], plain[2:]))
        # their headers have other numbers
        for one, other in zip(on_card[:2], plain[:2], strict=True):
            assert torch.equal(one[:, HEADER:], other[:, HEADER:])
            assert other[:, HEADER:].any()


def test_rows_on_a_device_are_refused():
    for transport in transports(2):
        rows = torch.empty(2, HEADER, dtype=torch.uint8, device="meta")
        with pytest.raises(
            InvalidArgument, match="rows are on meta: expected tensors on the CPU, or on CUDA"
        ):
            transport.all_to_all(rows, rows, 0)
