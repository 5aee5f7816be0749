"""Metrics: samples add up to the counters they are made of, and say the same through every door."""

import http.client
import json
import logging
import re
import socket
import sys
import threading
import time
import urllib.request

import pytest
import torch
import torch.distributed as dist
from prometheus_client import parser
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument, MissingPackage
from commpress.integrations.observe.endpoint import AT_ONCE
from commpress.integrations.observe.metrics import StepMetrics, by_layer, to_writer
from expert_batch import Batch, through
from local_twin import Ranks
from local_twin import noise as drawn_noise

MANY = 100  # clients that ask half a question


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        self.head = torch.nn.Linear(64, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def train(codec, every):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    state = commpress.compress(ddp, codec=codec, min_numel=256)
    state.measure_every = 1
    samples, endpoint = [], commpress.MetricsEndpoint(labels={"rank": dist.get_rank()})
    metrics = commpress.Metrics(state, to=[samples.append, endpoint], every=every, norms_every=2)
    before = state.counters.wire_bytes
    for _ in range(6):
        ddp(torch.randn(4, 64)).square().mean().backward()
        metrics.step()
    sent = sum(s.wire_bytes for s in samples)
    assert sent == state.counters.wire_bytes - before > 0
    assert sum(s.logical_bytes for s in samples) == state.counters.logical_bytes
    assert sum(s.encode_seconds for s in samples) == pytest.approx(state.counters.encode_seconds)
    assert sum(s.steps for s in samples) == 6
    text = urllib.request.urlopen(endpoint.url, timeout=30).read().decode()
    endpoint.close()
    left = {}
    for (name, _), residual, _ in state.residuals.places():
        left[by_layer(name)] = left.get(by_layer(name), 0.0) + float(residual.square().sum())
    return [s.scalars() for s in samples], sent, text, {k: v**0.5 for k, v in left.items()}


@pytest.mark.parametrize("every", [1, 3])
def test_samples_add_up(pool, every):
    samples, sent, text, left = pool.run(train, "sign", every, size=2)[0]
    assert len(samples) == 6 // every
    last = samples[-1]
    assert last["ratio"] > 5
    assert 0 < last["error/blocks.0"] < 1
    assert last["residual/blocks.1"] == pytest.approx(left["blocks.1"]), "of the last even step"
    assert last["encode_seconds"] > 0 < last["decode_seconds"]
    read = samples_of(text)
    assert read["commpress_wire_bytes_total", "rank", "0"] == sent
    assert read["commpress_steps_total", "rank", "0"] == 6
    assert 0 < read["commpress_compression_error", "group", "blocks.0", "rank", "0"] < 1


def optimize():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = commpress.OneBitAdam(model.parameters(), lr=1e-3, exact_steps=1)
    metrics = commpress.Metrics(optimizer, norms_every=1)
    samples = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        samples.append(metrics.step())
    return samples


def test_of_an_optimizer(pool):
    exact, first, second = pool.run(optimize, size=2)[0]
    assert exact.wire_bytes > 4 * first.wire_bytes > 0
    assert exact.ratio < 2 < second.ratio
    assert sum(second.residuals.values()) > 0
    assert second.encode_seconds > 0


def test_of_local_updates(tmp_path, endpoint):
    """Of two ranks in this process: what adds up does, all ranks show one hash, and files and
    Prometheus say the same."""
    ranks = Ranks(2, every=2, codec="int4", outer=commpress.Nesterov(), fragments=2)
    file, samples = tmp_path / "metrics.jsonl", [[], []]
    sinks = [[samples[0].append, endpoint, commpress.to_json_lines(file)], [samples[1].append]]
    metrics = [
        commpress.Metrics(local, to=to, norms_every=1)
        for local, to in zip(ranks.local, sinks, strict=True)
    ]
    for step in range(5):
        ranks.step(drawn_noise(2, step))
        for each in metrics:
            each.step()
    local, first, last = ranks.local[0], samples[0][0], samples[0][-1]
    assert sum(s.wire_bytes for s in samples[0]) == local.counters.sent_bytes > 0
    assert sum(s.rounds for s in samples[0]) == local.counters.rounds == 2
    assert sum(s.exchanges for s in samples[0]) == local.counters.exchanges == 5
    numel = sum(p.numel() for p in ranks.parameters[0])
    assert [s.logical_bytes for s in samples[0]] == [4 * numel] * 5
    assert [s.shared_weights for s in samples[0]] == [s.shared_weights for s in samples[1]]
    assert last.shared_weights == local.digest() != first.shared_weights
    assert last.participants == 2
    assert 0 < last.spread == local.counters.spread
    assert sum(last.residuals.values()) > 0 < sum(s.encode_seconds for s in samples[0])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["shared_weights"] == last.shared_weights
    assert lines[-1]["spread"] == last.spread
    read = samples_of(ask(endpoint)[1])
    assert read["commpress_rounds_total",] == 2
    assert read["commpress_wire_bytes_total",] == local.counters.sent_bytes
    assert read["commpress_spread",] == last.spread
    assert read["commpress_shared_weights_info", "hash", last.shared_weights] == 1


def test_of_a_store(tmp_path):
    with commpress.TieredStore.open(tmp_path / "store", host="1MiB", engine="threads") as store:
        metrics = commpress.Metrics(store=store)
        for i in range(2):
            store.put(f"t{i}", torch.full((150_000,), float(i)))
        store.commit()
        written = metrics.step()
        with store.borrow("t0", write=False) as tensor:
            assert float(tensor[0]) == 0
        with store.borrow("t1", write=False) as tensor:
            assert float(tensor[0]) == 1
        read = metrics.step()
    assert written.disk_written_bytes == 2 * 600_000
    assert read.disk_written_bytes == 0 < read.disk_read_bytes
    assert read.stalls >= 1
    assert read.stall_seconds > 0


def test_a_writer_gets_scalars():
    got = []

    class Writer:
        def add_scalar(self, tag, value, step):
            got.append((tag, value, step))

    to_writer(Writer())(StepMetrics(7, 1, 0.5, wire_bytes=3, errors={"head": 0.25}))
    assert ("commpress/wire_bytes", 3, 7) in got
    assert ("commpress/error/head", 0.25, 7) in got


# ---------------------------------------------------------------- the endpoint


def samples_of(text):
    """As Prometheus's own parser reads it: (name, label, value, …) → number."""
    families = parser.text_string_to_metric_families(text)
    return {
        (s.name, *sum(sorted(s.labels.items()), ())): s.value
        for family in families
        for s in family.samples
    }


def ask(endpoint, path="/metrics", host=None):
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


@pytest.fixture
def endpoint(request):
    made = commpress.MetricsEndpoint(**getattr(request, "param", {}))
    yield made
    made.close()


@pytest.mark.parametrize("endpoint", [{"labels": {"job": 'a "b"\\\n'}}], indirect=True)
def test_the_endpoint_adds_up_and_answers_its_own_address_only(endpoint):
    endpoint(StepMetrics(1, 2, 0.5, wire_bytes=10, residuals={"blocks.0": 1.5}))
    endpoint(StepMetrics(3, 2, 1.0, wire_bytes=5, residuals={"blocks.0": 2.5}))
    status, text = ask(endpoint)
    assert status == 200
    read, job = samples_of(text), ("job", 'a "b"\\\n')
    assert read["commpress_wire_bytes_total", *job] == 15
    assert read["commpress_step_seconds", *job] == 0.5
    assert read["commpress_residual_norm", "group", "blocks.0", *job] == 2.5
    families = {family.name: family.type for family in parser.text_string_to_metric_families(text)}
    assert families["commpress_wire_bytes"] == "counter"
    assert families["commpress_residual_norm"] == "gauge"
    assert ask(endpoint, host="evil.example")[0] == 403
    assert ask(endpoint, host=f"localhost:{endpoint.port}")[0] == 200


def raw(endpoint, request):
    """The first line of the answer to these bytes; of HTTP before 1.0, which has none, its whole
    body."""
    with socket.create_connection((endpoint.host, endpoint.port), timeout=30) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        parts = list(iter(lambda: client.recv(65536), b""))
    return b"".join(parts).split(b"\r\n")[0]


BAD_HOSTS = [
    "[::1",
    "::1]",
    "[::1%lo",
    "::1",
    "a@127.0.0.1",
    "127.0.0.1/x",
    "127.0.0.1, 127.0.0.1",
    "\xff",
    "127.0.0.1\r\nHost: 127.0.0.1",
    "127.0.0.1\r\n folded",
]


@pytest.mark.parametrize("endpoint", [{}, {"host": "0.0.0.0"}], indirect=True)
def test_headers_that_cannot_be_read_are_bad_requests(endpoint, capfd):
    def status(host, accept="*/*"):
        return raw(
            endpoint,
            f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nAccept: {accept}\r\n\r\n".encode("latin1"),
        )

    for host in BAD_HOSTS:
        assert status(host) == b"HTTP/1.0 400 Bad Request", host
    for accept in (
        "text/plain; version=x",
        "application/openmetrics-text; version=1.x",
        "text/plain; version=1.0.0x",
    ):
        assert status("127.0.0.1", accept) == b"HTTP/1.0 400 Bad Request", accept
    for host in ("127.0.0.1", "[::1]", "[::1]:9400", "LocalHost:", "127.8.9.10:1"):
        assert status(host) == b"HTTP/1.0 200 OK", host
    assert capfd.readouterr().err == ""


def half_request(endpoint):
    client = socket.create_connection((endpoint.host, endpoint.port), timeout=30)
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127")
    return client


def answering():
    return [t for t in threading.enumerate() if "process_request_thread" in t.name]


def ended(client):
    """True if the other side lets go of it within socket's own timeout."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_requests_hold_few_threads_and_a_scrape_comes_through(endpoint):
    clients, most = [], 0
    for _ in range(MANY):
        clients.append(half_request(endpoint))
        most = max(most, len(answering()))
    assert ask(endpoint)[0] == 200  # accepted after all of these
    most = max(most, len(answering()))
    assert 1 <= most <= 2 * AT_ONCE, "those that end may still be counted"
    assert all(ended(client) for client in clients[: MANY - AT_ONCE]), "the oldest make room"
    endpoint.close()
    assert all(ended(client) for client in clients[MANY - AT_ONCE :]), "closing lets go of all"
    for client in clients:
        client.close()


@pytest.mark.parametrize("endpoint", [{"timeout": 0.2}], indirect=True)
def test_a_client_that_drips_is_cut_off(endpoint):
    with half_request(endpoint) as silent, half_request(endpoint) as dripping:
        dripping.settimeout(0.05)
        until = time.monotonic() + 60
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012
            while time.monotonic() < until:
                dripping.sendall(b"x")
                time.sleep(0.05)
        assert ended(silent)


@pytest.mark.parametrize(
    ("host", "warns"), [("localhost", False), ("::1", False), ("0.0.0.0", True), ("::", True)]
)
def test_beyond_loopback_it_warns_and_answers_every_name(host, warns, caplog):
    with caplog.at_level(logging.WARNING, "commpress"):
        endpoint = commpress.MetricsEndpoint(host=host)
    said = [r.message for r in caplog.records if "without authentication" in r.message]
    assert len(said) == warns
    assert urllib.request.urlopen(endpoint.url, timeout=30).status == 200
    if warns:
        assert endpoint.url in said[0]
        assert ask(endpoint, host="node7.cluster.example:9400")[0] == 200
    endpoint.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "192.0.2.7"}, "host is '192.0.2.7'"),  # of documentation: nobody's
        ({"host": ""}, "host is ''"),
        ({"host": "::1::"}, "host is '::1::'"),
        ({"port": 70_000}, "port 70000"),
        ({"timeout": 0}, "timeout is 0"),
        ({"labels": {"a b": 1}}, "labels have 'a b'"),
        ({"labels": {"__x": 1}}, "labels have '__x'"),
        ({"labels": {"straße": 1}}, "labels have 'straße'"),
        ({"labels": {"group": 1}}, "labels have 'group'"),
    ],
)
def test_what_cannot_be_served_is_refused(options, says):
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        commpress.MetricsEndpoint(**options)


def test_a_port_that_is_taken_is_refused(endpoint):
    with pytest.raises(InvalidArgument, match=f"port {endpoint.port}"):
        commpress.MetricsEndpoint(endpoint.port)


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "commpress.integrations.observe.endpoint")
    monkeypatch.delattr(commpress, "MetricsEndpoint", raising=False)
    with pytest.raises(MissingPackage, match=re.escape("pip install 'commpress[metrics]'")):
        commpress.MetricsEndpoint  # noqa: B018


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "pass at least one of them"),
        ({"state": 3}, "state is a int"),
        ({"store": object(), "every": 0}, "every is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, says):
    with pytest.raises(InvalidArgument, match=says):
        commpress.Metrics(**options)


def test_groups():
    names = ["module.blocks.0.qkv.weight", "head.weight", "tokens", "h.11.mlp.bias", "layers2.3.x"]
    assert [by_layer(name) for name in names] == [
        "module.blocks.0",
        "head",
        "tokens",
        "h.11",
        "layers2.3",
    ]


def test_experts_are_measured():
    """Over four simulated ranks: samples add up to the counters, by expert too, and say the same to
    Prometheus."""
    batch = Batch(4, 8, 3, 1)
    exchanges = [
        commpress.ExpertExchange(8, process_group=t, topology="2x2", capacity=0.9)
        for t in Loopback(4).transports()
    ]
    samples, endpoint = [], commpress.MetricsEndpoint()
    metrics = commpress.Metrics(
        experts={"layer0": exchanges[1]}, to=[samples.append, endpoint], every=1
    )
    for _ in range(3):
        simulate([through(e, batch, torch.ones(8)) for e in exchanges])
        metrics.step()
    text = urllib.request.urlopen(endpoint.url, timeout=30).read().decode()
    endpoint.close()
    counters = exchanges[1].counters
    for name in ("choices", "dropped", "duplicated", "inside_bytes", "between_bytes"):
        assert sum(getattr(s, f"expert_{name}") for s in samples) == getattr(counters, name) > 0
    assert [
        sum(s.expert_tokens[f"layer0/{e}"] for s in samples) for e in (2, 3)
    ] == counters.expert_tokens
    assert samples[-1].scalars()["imbalance/layer0"] == counters.imbalance > 1
    read = samples_of(text)
    assert read["commpress_expert_between_bytes_total",] == counters.between_bytes
    assert read["commpress_expert_tokens", "group", "layer0/2"] == counters.expert_tokens[0] / 3
    assert read["commpress_imbalance", "group", "layer0"] == pytest.approx(counters.imbalance)
    with pytest.raises(InvalidArgument, match="experts has a int"):
        commpress.Metrics(experts={"layer0": 3})
