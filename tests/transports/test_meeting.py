"""Ranks find each other among strangers, whatever kind of address they have, and a child keeps
nothing of its parent's."""

import fcntl
import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from commpress.collectives.transports import interface
from commpress.collectives.transports import meeting as meetings
from commpress.collectives.transports.meeting import HELLO, PING, STRANGERS, WELCOME, Door, Meeting
from commpress.collectives.transports.sockets import Mesh, SocketTransport
from commpress.errors import CommunicationError, PeerFailure
from commpress.integrations.process_group.control_connections import ControlConnections, first_epoch
from group_calls import as_world
from test_faults import PATIENT, caught, reduce
from ways import transport_by


def connected(store, rank, size):
    agreement = first_epoch(store, rank, size)
    return ControlConnections(agreement, agreement.epoch, PATIENT)


def on_all(function, items):
    with ThreadPoolExecutor(len(items)) as pool:
        return [future.result() for future in [pool.submit(function, item) for item in items]]


def meetings_of(size):
    made = [Meeting(rank, size) for rank in range(size)]
    for each in made:
        each.learn([one.here for one in made])
    return made


def knock(meeting, words=b""):
    """A stranger: connects and says ``words``."""
    host, port, _ = meeting.here.split(" ")
    stranger = socket.create_connection((host, int(port)))
    stranger.sendall(words)
    return stranger


def greeting(kind, token, rank):
    return meetings._GREETING.pack(kind, token, rank, 0, 0)


def assert_connected(found):
    """Rank a and rank b hold two ends of one connection."""
    for rank, connections in enumerate(found):
        assert sorted(connections) == [r for r in range(len(found)) if r != rank]
        for peer, connection in connections.items():
            connection.setblocking(True)
            connection.sendall(bytes([rank, peer]))
    for rank, connections in enumerate(found):
        for peer, connection in connections.items():
            assert connection.recv(2) == bytes([peer, rank])


def close(found, made):
    for connection in [c for connections in found for c in connections.values()]:
        connection.close()
    for each in made:
        each.close()


# ---------------------------------------------------------------- strangers


def heard(door, seconds=1.0):
    """Those who have greeted, once there is news."""
    select.select([door], [], [], seconds)
    return door.arrivals()


def test_silent_strangers_hold_nobody_up():
    """Each would have had five seconds, one after the other."""
    made = meetings_of(3)
    strangers = [
        knock(each, words)
        for each in made
        for words in (b"", b"GET / HTTP/1.0", b"", b"\x04", b"", b"")
    ]
    start = time.monotonic()
    found = on_all(lambda each: each.connect_all(start + 60), made)
    assert time.monotonic() - start < 10
    assert_connected(found)
    close(found, [*made, *strangers])


def test_whoever_does_not_know_the_token_or_is_not_due_is_not_let_in():
    """Not even before the rank that he says he is."""
    made = meetings_of(2)
    token = made[0].door.token
    wrong = bytes([*token[:-1], token[-1] ^ 1])
    odd = [greeting(kind, each, 1) for kind in (HELLO, PING) for each in (wrong, bytes(16))]
    odd += [greeting(HELLO, token, rank) for rank in (0, 2, 7)] + [greeting(9, token, 1)]
    strangers = {knock(made[0], words): b"" for words in odd}
    strangers[knock(made[0], greeting(PING, token, 1))] = WELCOME
    found = on_all(lambda each: each.connect_all(time.monotonic() + 60), made)
    assert_connected(found)
    for stranger, answer in strangers.items():
        stranger.settimeout(60)
        assert stranger.recv(1) == answer
    close(found, [*made, *strangers])


def test_so_many_strangers_wait_at_the_door_and_no_more():
    door = Door("127.0.0.1", socket.AF_INET, 2)
    strangers = []
    for _ in range(STRANGERS + 20):
        strangers.append(socket.create_connection(("127.0.0.1", door.port)))
        assert heard(door) == []
        assert len(door._visitors) <= STRANGERS + 2
    strangers[0].settimeout(60)
    assert strangers[0].recv(1) == b"", "the oldest had to go"
    late = socket.create_connection(("127.0.0.1", door.port))
    late.sendall(greeting(HELLO, door.token, 1))
    deadline = time.monotonic() + 60
    while not (came := heard(door)):
        assert time.monotonic() < deadline
    assert came[0][:2] == (HELLO, 1)
    door.close()
    for one in [*strangers, late, came[0][2]]:
        one.close()


def test_a_stranger_has_a_second(monkeypatch):
    monkeypatch.setattr(meetings, "PATIENCE", 0.05)
    door = Door("127.0.0.1", socket.AF_INET, 2)
    stranger = socket.create_connection(("127.0.0.1", door.port))
    stranger.settimeout(60)
    assert heard(door) == []
    time.sleep(0.1)
    assert door.arrivals() == []
    assert stranger.recv(1) == b""
    door.close()
    stranger.close()


def test_a_greeting_may_come_in_parts():
    door = Door("127.0.0.1", socket.AF_INET, 2)
    with socket.create_connection(("127.0.0.1", door.port)) as slow:
        for byte in greeting(HELLO, door.token, 1):
            slow.sendall(bytes([byte]))
            came = heard(door, 0.01)
    while not came:
        came = heard(door)
    assert came[0][:2] == (HELLO, 1)
    came[0][2].close()
    door.close()


def test_several_threads_may_listen_at_a_door_until_it_is_closed():
    """Each visitor is heard by one of them; whoever comes to a closed door hears nobody."""
    door, came, errors = Door("127.0.0.1", socket.AF_INET, 200), [], []
    words = greeting(HELLO, door.token, 1)

    def listen():
        try:
            while not door._closed:
                came.extend(door.arrivals())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=listen) for _ in range(3)]
    for thread in threads:
        thread.start()
    visitors = []
    for number in range(150):
        visitors.append(socket.create_connection(("127.0.0.1", door.port)))
        visitors[-1].sendall(words if number % 3 else words[:5])
        if number % 3 == 0:
            visitors[-1].close()
    deadline = time.monotonic() + 60
    while len(came) < 100 and not errors and time.monotonic() < deadline:
        time.sleep(0.01)
    door.close()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(came) == 100
    assert door.arrivals() == []
    for one in [*visitors, *(visit.connection for visit in came)]:
        one.close()


def test_a_visitor_whom_the_kernel_cannot_watch_is_turned_away_and_forgotten(monkeypatch):
    """He calls again. Once he was missed a second later, by a KeyError that ended the process."""
    monkeypatch.setattr(meetings, "PATIENCE", 0.05)
    door, watch = Door("127.0.0.1", socket.AF_INET, 2), None

    def full(*_):
        raise OSError(28, "no space left on device")

    watch = door._selector.register
    monkeypatch.setattr(door._selector, "register", full)
    first = socket.create_connection(("127.0.0.1", door.port))
    first.settimeout(60)
    assert heard(door) == []
    assert first.recv(1) == b""
    monkeypatch.setattr(door._selector, "register", watch)
    time.sleep(0.1)
    second = socket.create_connection(("127.0.0.1", door.port))
    second.sendall(greeting(HELLO, door.token, 1))
    deadline = time.monotonic() + 60
    while not (came := heard(door)):
        assert time.monotonic() < deadline
    door.close()
    for one in (first, second, came[0].connection):
        one.close()


def test_a_rank_that_was_taken_for_a_stranger_calls_again(monkeypatch):
    """Its first call is hung up on."""
    made, hung_up = meetings_of(2), []
    arrivals = made[0].door.arrivals

    def first_is_hung_up_on():
        for visit in arrivals():
            if hung_up:
                yield visit
            else:
                hung_up.append(visit.connection.close())

    monkeypatch.setattr(made[0].door, "arrivals", first_is_hung_up_on)
    found = on_all(lambda each: each.connect_all(time.monotonic() + 60), made)
    assert len(hung_up) == 1
    assert_connected(found)
    close(found, made)


def test_absent_ranks_are_named():
    made = meetings_of(3)
    with pytest.raises(
        PeerFailure, match=r"rank 1: ranks \[0, 2\] did not connect in time"
    ) as error:
        made[1].connect_all(time.monotonic() + 0.2)
    assert error.value.ranks == (0, 2)
    made[0].close()
    with pytest.raises(PeerFailure, match="rank 1 cannot reach rank 0 at") as error:
        made[1].connect_all(time.monotonic() + 60)
    assert error.value.ranks == (0,)
    close([], made[1:])


def test_a_rank_that_died_before_it_connected_ends_the_wait(tmp_path):
    """Long before the time is over, which here is longer than a test may take."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    store.set("control/1", "127.0.0.1 1 " + "00" * 16)  # nobody listens at this port
    agreement = first_epoch(store, 0, 2)
    with pytest.raises(PeerFailure, match=r"ranks \[1\] ended before they connected") as error:
        ControlConnections(agreement, agreement.epoch, timedelta(minutes=10))
    assert error.value.ranks == (1,)
    agreement.close()


def test_a_process_that_has_silent_visitors_answers_who_asks(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    one, two = on_all(lambda rank: connected(store, rank, 2), range(2))
    strangers = [knock(one._meeting) for _ in range(20)]
    assert two.silent(20) == ()
    with one.membership.attending:  # nobody hears who is at the door
        assert two.silent(0.1) == (0,)
    for stranger in strangers:
        stranger.close()
    for connections in (one, two):
        connections.close()
        connections.membership.close()


# ---------------------------------------------------------------- addresses


def needs_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")


def test_a_slow_name_server_is_asked_once_and_again_when_the_address_is_gone(monkeypatch):
    """Ranks meet again in every reform: a name server that takes seconds must not be in their
    pause."""
    asked, answer = [], ["127.0.0.1"]

    def slow(name, *_, **__):
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in answer]

    monkeypatch.setattr(interface, "_addresses", {})
    monkeypatch.setattr(socket, "gethostname", lambda: "slow-host")
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    for variable in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for _ in range(3):
        made = meetings_of(2)
        assert [each.here.split()[0] for each in made] == ["127.0.0.1"] * 2
        for each in made:
            each.close()
    assert asked == ["slow-host"]
    # the machine has moved to another network
    interface._addresses["slow-host"] = "203.0.113.7", socket.AF_INET
    answer[:] = ["203.0.113.8", "127.0.0.2"]
    made = meetings_of(1)
    assert made[0].here.startswith("127.0.0.2 ")
    made[0].close()
    assert asked == ["slow-host"] * 2


def test_ranks_with_ipv4_and_with_ipv6_meet(monkeypatch):
    """As where a host's name is ::1 in one container and 127.0.0.1 in the next."""
    needs_ipv6()
    addresses = [("::1", socket.AF_INET6), ("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
    made = []
    for rank, address in enumerate(addresses):
        monkeypatch.setattr(interface, "own_address", lambda address=address: address)
        made.append(Meeting(rank, 3))
    for each in made:
        each.learn([one.here for one in made])
    found = on_all(lambda each: each.connect_all(time.monotonic() + 60), made)
    assert_connected(found)
    close(found, made)


def test_an_interface_with_ipv6_only(monkeypatch, tmp_path):
    needs_ipv6()
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe8000000000000000fc00fffe000001 01 40 20 80       "
        "lo\n00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000002 04 40 00 82     eth0\n"
    )

    def no_ipv4(*_):
        raise OSError("cannot assign requested address")

    monkeypatch.setattr(fcntl, "ioctl", no_ipv4)
    monkeypatch.setattr(interface, "_TABLE", table)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = meetings_of(2)
    assert made[0].here.startswith("::1 ")
    found = on_all(lambda each: each.connect_all(time.monotonic() + 60), made)
    assert_connected(found)
    close(found, made)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(
        CommunicationError, match="'none0', but that network interface has no address"
    ):
        Meeting(0, 2)


def test_an_address_of_one_link_is_reached_over_the_own_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interface.for_connect("fe80::1%eth7", 5) == (
        "fe80::1",
        5,
        0,
        socket.if_nametoindex("lo"),
    )
    assert interface.for_connect("fe80::1", 5) == ("fe80::1", 5)


# ---------------------------------------------------------------- children


def die_beside_a_child(way):
    """Rank 1 has a child, as a data loader's worker is one, when it dies; rank 0 says when it
    knew."""
    if way == "control connections":
        group = dist.group.WORLD
        step = lambda: dist.all_reduce(torch.ones(3), group=group)  # noqa: E731
    else:
        transport, numbers = transport_by(way, PATIENT), iter(range(9))
        step = lambda: reduce(transport, sequence=next(numbers))  # noqa: E731
    step()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        store.set("child", str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(store.get("child"))
    try:
        error, start, end = caught(step)
    finally:
        os.kill(child, signal.SIGKILL)
    return error, end - start


@pytest.mark.parametrize("way", ["sockets", "control connections"])
def test_a_child_does_not_hide_the_death_of_its_parent(mortal, tmp_path, way):
    call = (
        (die_beside_a_child, way)
        if way == "sockets"
        else (in_commpress, f"{tmp_path}/file", die_beside_a_child, way)
    )
    (error, seconds), _ = mortal.outcomes(*call, lost=[1])
    assert type(error) is PeerFailure, error
    assert error.ranks == (1,)
    assert "closed" in str(error) or "died" in str(error)
    assert seconds < 20


def in_commpress(file, function, *args):
    return as_world("commpress", file, function, *args)


def test_a_child_has_none_of_the_connections():
    transports = on_all(lambda rank: mesh(rank), range(2))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        found = b"closed"
        try:
            if any(
                peer.socket.fileno() >= 0
                for t in transports
                for peer in t.mesh.engine._peers.values()
            ):
                found = b"open"
            transports[0].all_gather(
                torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(1, 64, dtype=torch.uint8), 0
            )
            found = b"used"
        except CommunicationError as error:
            found += b", forked" if "forked" in str(error) else b", error"
        finally:
            os.write(writer, found)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"closed, forked"
    rows = [torch.full((1, 64), t.rank, dtype=torch.uint8) for t in transports]

    def gather(transport):
        out = torch.zeros(2, 64, dtype=torch.uint8)
        transport.all_gather(out, rows[transport.rank], 0).wait()
        return out

    for out in on_all(gather, transports):
        assert torch.equal(out, torch.cat(rows))


PLACES, BARRIER = [b"", b""], threading.Barrier(2)


def mesh(rank):
    def tell(place):
        PLACES[rank] = place
        BARRIER.wait()
        return list(PLACES)

    return SocketTransport(
        Mesh(rank, range(2), tell, timedelta(seconds=60)), timeout=timedelta(seconds=60)
    )
