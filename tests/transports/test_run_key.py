"""Processes of a run with a key know each other by it; whoever has read the store and lacks the key
gets nowhere."""

import contextlib
import logging
import socket
import threading
import time

import pytest

from commpress.collectives.transports import meeting as meetings
from commpress.collectives.transports.epochs import Terms
from commpress.collectives.transports.meeting import (
    DIFFERS,
    ENLIST,
    HELLO,
    JOIN,
    PING,
    WELCOME,
    Door,
    Heartbeat,
    Knock,
    answers,
    knock,
)
from commpress.collectives.transports.run_key import (
    FILE,
    NONCE,
    PROOF,
    VARIABLE,
    new_run_key,
    run_key,
)
from commpress.errors import InvalidArgument, PeerFailure
from test_epochs import alone, close
from test_meeting import assert_connected, greeting, meetings_of, on_all
from test_meeting import close as hang_up

KEY, OTHER = new_run_key(), new_run_key()


@pytest.fixture(autouse=True)
def keyed(monkeypatch):
    monkeypatch.delenv(FILE, raising=False)
    monkeypatch.setenv(VARIABLE, KEY)


def connect(door):
    stranger = socket.create_connection(("127.0.0.1", door.port))
    stranger.settimeout(20)
    return stranger


@contextlib.contextmanager
def attended(door):
    """Hear who is at the door; the visits that have come."""
    came, end = [], threading.Event()

    def attend():
        while not end.is_set():
            for visit in door.arrivals():
                came.append(visit)
                visit.reply()
            time.sleep(0.001)

    attendant = threading.Thread(target=attend)
    attendant.start()
    try:
        yield came
    finally:
        end.set()
        attendant.join()
        for visit in came:
            visit.connection.close()
        door.close()


def door_of(monkeypatch, key):
    """A door of a process with this key, or none."""
    if key is None:
        monkeypatch.delenv(VARIABLE)
    else:
        monkeypatch.setenv(VARIABLE, key)
    return Door("127.0.0.1", socket.AF_INET, 4)


def whole(connection, count):
    words = b""
    while len(words) < count and (part := connection.recv(count - len(words))):
        words += part
    return words


@contextlib.contextmanager
def by_way_of(door, *, listener=None, step=0, change=lambda number, words: words):
    """The end of a line to a door on which somebody hears, and may ``change``, each of its four
    parts; what he has heard.

    The line is one that is there, or the next connection to ``listener``. ``step``: bytes at a
    time.
    """
    near, far = socket.socketpair() if listener is None else (None, None)
    heard = []

    def pass_on():
        caller = far if listener is None else listener.accept()[0]
        with caller, connect(door) as there:
            for number, count in enumerate((37 + NONCE, NONCE, PROOF, 1 + PROOF)):
                source, sink = (there, caller) if number % 2 else (caller, there)
                heard.append(change(number, whole(source, count)))
                for at in range(0, count, step or count):
                    sink.sendall(heard[-1][at : at + (step or count)])

    line = threading.Thread(target=pass_on)
    line.start()
    try:
        yield near, heard
    finally:
        if near is not None:
            near.close()
        line.join(60)


# ---------------------------------------------------------------- the key


def test_a_key_comes_from_the_environment_or_a_file(monkeypatch, tmp_path):
    assert run_key() == KEY.encode()
    file = tmp_path / "key"
    file.write_text(f"{OTHER}\n")
    monkeypatch.setenv(FILE, str(file))
    with pytest.raises(
        InvalidArgument, match=r"COMMPRESS_RUN_KEY and COMMPRESS_RUN_KEY_FILE are both set"
    ):
        run_key()
    monkeypatch.delenv(VARIABLE)
    assert run_key() == OTHER.encode()
    monkeypatch.setenv(FILE, str(tmp_path / "none"))
    with pytest.raises(
        InvalidArgument, match="none', expected a file that holds the key of the run"
    ):
        run_key()
    monkeypatch.delenv(FILE)
    assert run_key() is None


@pytest.mark.parametrize("text", ["", "secret-words", " " * 40, "x" * 5000])
def test_a_key_that_is_too_short_or_long_is_refused_and_not_told(monkeypatch, tmp_path, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(
        InvalidArgument, match=r"COMMPRESS_RUN_KEY has \d+ bytes, expected 32 to 4,096: make one"
    ) as error:
        Door("127.0.0.1", socket.AF_INET, 2)
    assert not text.strip() or text not in str(error.value)
    (tmp_path / "key").write_text(text)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv(FILE, str(tmp_path / "key"))
    with pytest.raises(InvalidArgument, match=r"bytes, expected 32 to 4,096"):
        run_key()


# ---------------------------------------------------------------- those who have it


def test_ranks_with_the_key_meet_among_strangers():
    made = meetings_of(3)
    words = [
        b"",
        b"GET / HTTP/1.0",
        greeting(HELLO, made[0].door.token, 1),
        greeting(HELLO | meetings.KEYED, bytes(16), 1),
    ]
    strangers = [connect(each.door) for each in made for _ in words]
    for number, stranger in enumerate(strangers):
        stranger.sendall(words[number % len(words)])
    found = on_all(lambda each: each.connect_all(time.monotonic() + 60), made)
    assert_connected(found)
    hang_up(found, [*made, *strangers])


def test_a_greeting_and_a_proof_may_come_in_parts():
    door = Door("127.0.0.1", socket.AF_INET, 4)
    with attended(door) as came, by_way_of(door, step=1) as (line, _):
        assert Knock(line, door.here, HELLO, 3, (7, 8)).look() == WELCOME
    assert [(visit.kind, visit.rank, visit.epochs) for visit in came] == [(HELLO, 3, (7, 8))]


def test_who_is_asked_answers_and_a_silent_one_holds_up_no_others():
    """The silent one is asked first: the others' doors would have hung up by the time that it is
    given up."""
    doors = [Door("127.0.0.1", socket.AF_INET, 4) for _ in range(3)]
    with attended(doors[1]), attended(doors[2]):
        asked = {
            number: knock(door.here, PING, 0, (0, 0), 5.0) for number, door in enumerate(doors)
        }
        assert answers(asked, 2.5) == {1: WELCOME, 2: WELCOME}
    beat = Heartbeat(doors[0].here, lambda: (0, 0))
    with attended(doors[0]):
        until = time.monotonic() + 20
        while not beat.heard_since(0.0):
            beat.look()
            assert time.monotonic() < until
    beat.close()


# ---------------------------------------------------------------- those who have not


@pytest.mark.parametrize("kind", [HELLO, PING, ENLIST, JOIN])
@pytest.mark.parametrize(
    ("door", "caller"),
    [(KEY, None), (None, KEY), (KEY, OTHER)],
    ids=["no key", "a door without", "another key"],
)
def test_whoever_has_only_the_token_is_told_so_and_not_let_in(
    monkeypatch, caplog, kind, door, caller
):
    there, caplog_at = door_of(monkeypatch, door), caplog.at_level(logging.WARNING, "commpress")
    if caller is None:
        monkeypatch.delenv(VARIABLE)
    else:
        monkeypatch.setenv(VARIABLE, caller)
    with caplog_at, attended(there) as came:
        for _ in range(3):
            with knock(there.here, kind, 0, (0, 0), 20.0) as call:
                assert call.look() == DIFFERS
                assert call.socket.recv(1) == b""
        assert came == []
    assert len(caplog.records) == 1, "a stranger fills no log"
    assert KEY not in caplog.text


def test_a_proof_of_before_is_none():
    """A stranger on the way has heard all of a greeting, and says it again."""
    door = Door("127.0.0.1", socket.AF_INET, 4)
    with attended(door) as came:
        with by_way_of(door) as (line, heard):
            assert Knock(line, door.here, JOIN, 0, (0, 0)).look() == WELCOME
        with connect(door) as stranger:
            stranger.sendall(heard[0])
            assert len(whole(stranger, NONCE)) == NONCE
            stranger.sendall(heard[2])
            assert whole(stranger, 100) == DIFFERS
        assert len(came) == 1


def test_the_proof_of_one_answer_is_none_of_another():
    """Whoever is on the way cannot turn "gone on" into "welcome"."""
    door = Door("127.0.0.1", socket.AF_INET, 4)

    def change(number, words):
        return meetings.GONE_ON + words[1:] if number == 3 else words

    with attended(door), by_way_of(door, change=change) as (line, _):
        assert Knock(line, door.here, JOIN, 0, (0, 0)).look() == DIFFERS


@pytest.mark.parametrize("byte", [0, 25, 36, 40])
def test_a_greeting_that_somebody_changes_on_the_way_is_refused(byte):
    """Its kind, rank, epoch or number."""
    door = Door("127.0.0.1", socket.AF_INET, 4)

    def change(number, words):
        return words if number else words[:byte] + bytes([words[byte] ^ 1]) + words[byte + 1 :]

    with attended(door) as came, by_way_of(door, change=change) as (line, _):
        assert Knock(line, door.here, ENLIST, 5, (7, 8)).look() == DIFFERS
    assert came == []


def impostor(words):
    """A door that says this to everybody; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):  # it is shut
            while True:
                connection, _ = listener.accept()
                with connection:
                    whole(connection, 37 + NONCE)
                    for part in words:
                        connection.sendall(part)
                        whole(connection, PROOF)

    threading.Thread(target=answer, daemon=True).start()
    return listener


@pytest.mark.parametrize(
    "words", [(WELCOME,), (bytes(NONCE), WELCOME + bytes(PROOF)), (WELCOME * (NONCE + 1 + PROOF),)]
)
def test_a_door_that_cannot_prove_the_key_is_not_believed(words):
    """Its address stands in the store in place of a rank's, with that rank's token."""
    made, false = meetings_of(2), impostor(words)
    place = f"127.0.0.1 {false.getsockname()[1]} {made[0].door.token.hex()}"
    made[1].learn([place, made[1].here])
    if words == (WELCOME,):  # it hangs up: a rank that was taken for a stranger calls again
        with pytest.raises(PeerFailure, match=r"ranks \[0\] did not connect in time"):
            made[1].connect_all(time.monotonic() + 0.5)
    else:
        with pytest.raises(
            PeerFailure, match=r"rank 1 and rank 0 at 127\.0\.0\.1 port \d+ are not of one run"
        ) as error:
            made[1].connect_all(time.monotonic() + 60)
        assert error.value.ranks == (0,)
    false.close()
    hang_up([], made)


def test_a_call_that_somebody_passes_on_is_refused():
    """A stranger has put an address of its own into the store, and passes all on to the door that
    was meant."""
    door = Door("127.0.0.1", socket.AF_INET, 4)
    host, _, token = door.here.split(" ")
    relay = socket.create_server(("127.0.0.1", 0))
    place = f"{host} {relay.getsockname()[1]} {token}"
    with (
        relay,
        attended(door) as came,
        by_way_of(door, listener=relay),
        knock(place, JOIN, 0, (0, 0), 20.0) as call,
    ):
        assert call.look() == DIFFERS
    assert came == []


def test_who_knows_the_token_and_is_silent_is_hung_up_on(monkeypatch):
    """After its greeting, as before it."""
    monkeypatch.setattr(meetings, "PATIENCE", 0.2)
    door = Door("127.0.0.1", socket.AF_INET, 4)
    with attended(door) as came, connect(door) as stranger:
        stranger.sendall(greeting(JOIN | meetings.KEYED, door.token, 0) + bytes(NONCE))
        begun = time.monotonic()
        assert len(whole(stranger, NONCE)) == NONCE
        assert stranger.recv(1) == b""
        assert time.monotonic() - begun < 10
        assert not door._visitors
        assert came == []


def test_a_newcomer_without_the_key_is_told_so_by_name(monkeypatch):
    member = alone()
    monkeypatch.delenv(VARIABLE)
    newcomer = alone()
    member.membership.attend()
    newcomer.agree(Terms(contacts=lambda: [member.door.here]), 20.0)
    assert isinstance(newcomer.outcome, InvalidArgument)
    assert (
        "are not of one run: only one has the key of a run, or they have two. Set COMMPRESS_RUN_KEY"
        in str(newcomer.outcome)
    )
    assert member.membership.waiting == 0
    member.membership.close()
    close([newcomer])


def test_a_rank_without_the_key_is_told_so_and_the_other_one_who_is_missing(monkeypatch):
    made = meetings_of(2)
    monkeypatch.delenv(VARIABLE)

    def error_of(each):
        with pytest.raises(PeerFailure) as error:
            each.connect_all(time.monotonic() + 2.0)
        return str(error.value)

    keyed, other = on_all(error_of, made)
    assert "rank 0: ranks [1] did not connect in time" in keyed
    assert "rank 1 and rank 0 at 127.0.0.1 port" in other
    hang_up([], made)
