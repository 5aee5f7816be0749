"""Versions over HTTP: whoever has the key reads, nobody else reads or is believed, and nobody stops
the others."""

import http.client
import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from commpress.errors import CommunicationError, Corrupted, InvalidArgument
from commpress.integrations.weights import http_place, places
from commpress.weights import Publisher, Receiver, WeightServer, pull, verify

KEY, OTHER = b"k" * 40, b"o" * 40


@pytest.fixture
def folder(tmp_path):
    weights = {"w": torch.arange(50_000, dtype=torch.int32), "v": torch.zeros(3)}
    with Publisher(weights, tmp_path / "run") as publisher:
        for _ in range(3):
            publisher.publish()
            weights["w"] += 1
    (tmp_path / "secret").write_text("not for anybody")
    return tmp_path / "run"


@pytest.fixture
def server(folder):
    serving = WeightServer(folder, key=KEY)
    yield serving
    serving.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(http_place, "PAUSE", 0.01)


def asked(server, name, headers=None):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
    try:
        connection.request("GET", name, headers={"Range": "bytes=0-99"} | (headers or {}))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_reader_with_the_key_gets_every_version(server):
    reader = Receiver(server.url, key=KEY)
    assert reader.prepare() == 3
    reader.install()
    assert torch.equal(reader.weights["w"], torch.arange(2, 50_002, dtype=torch.int32))
    assert len(verify(server.url, key=KEY)) == 3
    assert server.readers["127.0.0.1"][0] == 3
    assert server.sent_bytes > 0


def test_a_stranger_reads_nothing(server, tmp_path):
    for name in (
        "/head",
        "/v000000000000001",
        "/",
        "/../secret",
        "//etc/passwd",
        "/%2e%2e/secret",
        "/head?x",
        "/nothing",
    ):
        status, body = asked(server, name)
        assert (status in (400, 401), body) == (True, b"")
    with pytest.raises(InvalidArgument, match="asks for the key of the run"):
        Receiver(server.url).prepare()
    for call in (
        lambda: Receiver(server.url, key=OTHER).prepare(),
        lambda: pull(server.url, tmp_path / "x", key=OTHER),
    ):
        with pytest.raises(InvalidArgument, match="has another key of the run"):
            call()


def test_what_was_heard_cannot_be_said_again(server):
    """A request is good once, for one range, on one connection."""
    place = http_place.HttpPlace(server.url, KEY)
    place.read("head", 0, 100)
    heard, (wire, _) = [], place._idle[0]
    request = wire.request
    wire.request = lambda *a, **k: (heard.append(k["headers"]), request(*a, **k))
    place.read("head", 0, 100)
    said = next(headers for headers in heard if "Authorization" in headers)
    assert asked(server, "/head", said) == (401, b"")
    fresh = http_place.HttpPlace(server.url, KEY)
    fresh.read("head", 0, 100)
    wire, _ = fresh._idle[0]
    wire.request("GET", "/head", headers=said)
    response = wire.getresponse()
    assert (response.status, response.read()) == (401, b"")


class Impostor(BaseHTTPRequestHandler):
    """Answers with what it found in the folder, and cannot prove a key."""

    folder, proof = None, "0" * 64

    def do_GET(self):
        path = self.folder / self.path[1:]
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = path.read_bytes()[first : last + 1] if path.exists() else b""
        self.send_response(206 if body else 404)
        self.send_header(
            "Content-Range",
            f"bytes {first}-{first + len(body) - 1}/{path.stat().st_size if body else 0}",
        )
        self.send_header("Content-Length", str(len(body)))
        self.send_header(http_place.CHALLENGE, "00" * 16)
        self.send_header(http_place.PROOF_HEADER, self.proof)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("proof", ["0" * 64, "", "zz", "é" * 3])
def test_a_server_without_the_key_is_not_believed(folder, proof):
    handler = type("Handler", (Impostor,), {"folder": folder, "proof": proof})
    with HTTPServer(("127.0.0.1", 0), handler) as impostor:
        threading.Thread(target=impostor.serve_forever, args=(0.05,), daemon=True).start()
        reader = Receiver(f"http://127.0.0.1:{impostor.server_port}", key=KEY)
        with pytest.raises((Corrupted, CommunicationError)):
            reader.prepare()
        assert reader.version == 0
        impostor.shutdown()


def test_a_server_without_a_key_serves_this_machine_only(folder):
    with pytest.raises(InvalidArgument, match="set COMMPRESS_RUN_KEY to the same secret"):
        WeightServer(folder, host="0.0.0.0")
    serving = WeightServer(folder)
    assert Receiver(serving.url).prepare() == 3
    with pytest.raises(Corrupted, match="does not prove that it has the key"):
        Receiver(serving.url, key=KEY).prepare()
    serving.close()
    with pytest.raises(InvalidArgument, match="does not let this process listen"):
        WeightServer(folder, host="203.0.113.1", key=KEY)


def test_an_answer_of_a_wrong_size_is_refused(folder):
    class Larger(Impostor):
        def do_GET(self):
            self.headers.replace_header("Range", "bytes=0-9999999")
            super().do_GET()

    handler = type("Handler", (Larger,), {"folder": folder})
    with HTTPServer(("127.0.0.1", 0), handler) as impostor:
        threading.Thread(target=impostor.serve_forever, args=(0.05,), daemon=True).start()
        with pytest.raises(CommunicationError, match="expected 206"):
            http_place.HttpPlace(f"http://127.0.0.1:{impostor.server_port}", None).read(
                "head", 0, 10
            )
        impostor.shutdown()


def test_strangers_that_hold_all_connections_make_room_for_readers(server, monkeypatch):
    monkeypatch.setattr(server, "at_once", 8)
    idle = [socket.create_connection((server.host, server.port)) for _ in range(20)]
    for connection in idle[::2]:
        connection.sendall(b"GET /head HTTP/1.1\r\nX-Slow: ")
    reader = Receiver(server.url, key=KEY)
    assert reader.prepare() == 3
    for connection in idle:
        connection.close()


def test_a_stranger_that_says_nothing_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(server, "stranger_seconds", 0.2)
    with socket.create_connection((server.host, server.port)) as connection:
        connection.settimeout(20)
        assert connection.recv(1) == b""


def test_a_connection_that_breaks_is_made_again(server):
    reader = Receiver(server.url, key=KEY)
    assert reader.prepare(1) == 1
    reader.install()
    server.cut(lambda ends, stranger: True)
    time.sleep(0.05)
    assert reader.prepare() == 3
    server.close()
    with pytest.raises(CommunicationError, match="in 4 tries"):
        reader.prepare()


def test_rubbish_is_answered_or_ended(server):
    lines = [
        b"\x00" * 100,
        b"GET " + b"a" * 70_000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"PUT /head HTTP/1.1\r\n\r\n",
    ]
    lines += [
        b"GET /head HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"GET /head HTTP/1.1\r\nRange: bytes=9-" + b"9" * 30 + b"\r\n\r\n",
    ]
    for line in lines:
        with socket.create_connection((server.host, server.port)) as connection:
            connection.settimeout(20)
            connection.sendall(line + b"\r\n\r\n")
            answer = connection.recv(100)
            assert b" 200 " not in answer
            assert b" 206 " not in answer
    assert Receiver(server.url, key=KEY).prepare() == 3


# ---------------------------------------------------------------- waiting, and relays


@pytest.mark.parametrize("kind", ["folder", "server", "relay"])
def test_a_reader_that_waits_has_a_version_as_soon_as_it_can_be_had(tmp_path, kind):
    """Not at the end of its patience; and it waits for the first version too."""
    weights = {"w": torch.zeros(1000)}
    (tmp_path / "run").mkdir()
    server = WeightServer(tmp_path / "run", key=KEY)
    relay = WeightServer(server.url, key=KEY)
    source = {"folder": tmp_path / "run", "server": server.url, "relay": relay.url}[kind]
    reader, came = Receiver(source, key=KEY), []
    assert reader.prepare(wait=0.1) is None

    def read():
        for _ in range(3):
            reader.prepare(wait=60)
            came.append((reader.install(), time.monotonic()))

    reading = threading.Thread(target=read)
    reading.start()
    with Publisher(weights, tmp_path / "run") as publisher:
        for version in (1, 2, 3):
            time.sleep(0.3)
            publisher.publish()
            committed = time.monotonic()
            weights["w"] += 1
            while len(came) < version and time.monotonic() < committed + 10:
                time.sleep(0.01)
            assert came[-1][0] == version
            assert came[-1][1] - committed < 5
    reading.join()
    begins = time.monotonic()
    assert reader.prepare(wait=0.3) is None
    assert time.monotonic() - begins > 0.25
    relay.close()
    server.close()


def test_a_late_reader_does_not_wait_behind_one_that_has_the_newest_version(server):
    """The relay has just begun, and one request waits for what is to come."""
    relay = WeightServer(server.url, key=KEY)
    early, late = Receiver(server.url, key=KEY), Receiver(relay.url, key=KEY)
    early.prepare()
    early.install()
    early._place = Receiver(relay.url, key=KEY)._place
    waiting = threading.Thread(target=early.prepare, kwargs={"wait": 4})
    waiting.start()
    time.sleep(1)
    begins = time.monotonic()
    assert late.prepare(wait=4) == 3
    assert time.monotonic() - begins < 2
    late.install()
    assert late.prepare(wait=0.1) is None
    waiting.join()
    relay.close()


def readers_of(source, count):
    """All at once, each by itself; what they have then."""
    readers = [Receiver(source, key=KEY) for _ in range(count)]
    threads = [threading.Thread(target=reader.prepare) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(reader.install(), reader.weights) for reader in readers]


def test_readers_of_a_relay_and_of_its_relay_cross_the_slow_link_once(tmp_path):
    """Three readers of a relay, three of a relay of that: the first server sends each byte of a
    version once, and little else."""
    weights = {"w": torch.arange(3_000_000, dtype=torch.int32)}
    with Publisher(weights, tmp_path / "run") as publisher:
        report = publisher.publish()
        server = WeightServer(tmp_path / "run", key=KEY)
        relay = WeightServer(server.url, key=KEY)
        further = WeightServer(relay.url, key=KEY)
        for turn in range(3):
            before = server.sent_bytes, relay.sent_bytes
            found = readers_of(relay.url, 3) + readers_of(further.url, 3)
            assert all(version == report.version for version, _ in found)
            assert all(torch.equal(each["w"], weights["w"]) for _, each in found)
            crossed = server.sent_bytes - before[0]
            needed = report.anchor_bytes if turn == 0 else report.bytes
            assert needed <= crossed <= 1.1 * needed  # the rest is in the relay already
            assert 4 * needed <= relay.sent_bytes - before[1]
            weights["w"][torch.randperm(3_000_000)[:300_000]] += 1
            report = publisher.publish()
    for each in (further, relay, server):
        each.close()


def test_a_relay_begins_anew_with_another_run_and_says_when_its_source_is_gone(folder, tmp_path):
    server = WeightServer(folder, key=KEY)
    relay = WeightServer(server.url, key=KEY)
    assert readers_of(relay.url, 1)[0][0] == 3
    for path in folder.iterdir():
        path.unlink()
    weights = {"w": torch.ones(7)}
    with Publisher(weights, folder) as publisher:
        for _ in range(3):  # files of the same names
            publisher.publish()
    version, found = readers_of(relay.url, 1)[0]
    assert version == 3
    assert torch.equal(found["w"], weights["w"])
    server.close()
    with pytest.raises(CommunicationError, match="502"):
        Receiver(relay.url, key=KEY).prepare()
    relay.close()


def test_a_relay_hands_on_what_a_publisher_wrote_that_went_on_from_a_copy(folder, tmp_path):
    """A version that was lost with the run's folder comes again, with the same name and other
    weights."""
    pull(folder, tmp_path / "copy")
    weights = {"w": torch.arange(50_000, dtype=torch.int32) + 3, "v": torch.zeros(3)}
    with Publisher(weights, folder) as publisher:
        publisher.publish()
    server = WeightServer(folder, key=KEY)
    relay = WeightServer(server.url, key=KEY)
    assert readers_of(relay.url, 1)[0][0] == 4
    for path in folder.iterdir():
        path.unlink()
    shutil.copytree(tmp_path / "copy", folder, dirs_exist_ok=True)
    weights["v"] += 7
    with Publisher(weights, folder) as publisher:  # of epoch 2 again
        publisher.publish()
    with Publisher(weights, folder) as publisher:
        weights["v"] += 1
        publisher.publish()
    version, found = readers_of(relay.url, 1)[0]
    assert version == 5
    assert torch.equal(found["v"], weights["v"])
    relay.close()
    server.close()


def test_a_stranger_at_a_relay_reads_nothing(server):
    relay = WeightServer(server.url, key=KEY)
    for name in ("/head", "/head?after=0&seconds=9.000", "/v000000000000001"):
        assert asked(relay, name) == (401, b"")
    relay.close()


def test_twenty_readers_that_wait_look_into_the_folder_as_often_as_one(tmp_path, monkeypatch):
    """Readers look at most twenty times a second; one that comes late need not wait with them."""
    looks, read = [], places.FolderPlace.look
    monkeypatch.setattr(
        places.FolderPlace, "look", lambda *args: looks.append(args[0]) or read(*args)
    )
    weights = {"w": torch.zeros(100)}
    with Publisher(weights, tmp_path / "run") as publisher:
        publisher.publish()
        server = WeightServer(tmp_path / "run", key=KEY)
        readers, came = [Receiver(server.url, key=KEY) for _ in range(20)], []
        for reader in readers:
            reader.prepare()
            reader.install()

        def wait(reader):
            came.append(reader.prepare(wait=30))

        waiting = [threading.Thread(target=wait, args=[reader]) for reader in readers]
        for thread in waiting:
            thread.start()
        time.sleep(0.5)  # all of them are there
        looks.clear()
        begins = time.monotonic()
        time.sleep(1.5)
        count, seconds = len(looks), time.monotonic() - begins
        late, begins = Receiver(server.url, key=KEY), time.monotonic()
        assert late.prepare(wait=30) == 1
        assert time.monotonic() - begins < 10
        publisher.publish()
        for thread in waiting:
            thread.join()
    assert came == [2] * 20
    assert 2 <= count <= 20 * seconds + 2
    server.close()
