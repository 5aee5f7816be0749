"""Metrics: samples add up to the counters they are made of, and say the same through every door."""

import http.client
import re
import urllib.request

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import InvalidArgument
from commpress.integrations.metrics import StepMetrics, by_layer, to_writer

LINE = re.compile(r'^commpress_[a-z_]+(\{([a-z_]+="[^"]*",?)*\})? -?[0-9.e+-]+$')


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
    state = commpress.compress(ddp, codec=codec, min_numel=256, measure_every=1)
    samples, endpoint = [], commpress.MetricsEndpoint(labels={"rank": dist.get_rank()})
    metrics = commpress.Metrics(state, to=[samples.append, endpoint], every=every, norms_every=2)
    before = state.counters.wire_bytes
    for _ in range(6):
        ddp(torch.randn(4, 64)).square().mean().backward()
        metrics.step()
    wire = sum(s.wire_bytes for s in samples)
    assert wire == state.counters.wire_bytes - before > 0
    assert sum(s.logical_bytes for s in samples) == state.counters.logical_bytes
    assert sum(s.encode_seconds for s in samples) == pytest.approx(state.counters.encode_seconds)
    assert sum(s.steps for s in samples) == 6
    text = urllib.request.urlopen(endpoint.url, timeout=30).read().decode()
    endpoint.close()
    left = {}
    for (name, _), sent, _ in state.residuals.places():
        left[by_layer(name)] = left.get(by_layer(name), 0.0) + float(sent.square().sum())
    return [s.scalars() for s in samples], wire, text, {k: v**0.5 for k, v in left.items()}


@pytest.mark.parametrize("every", [1, 3])
def test_samples_add_up(pool, every):
    samples, wire, text, left = pool.run(train, "sign", every, size=2)[0]
    assert len(samples) == 6 // every
    last = samples[-1]
    assert last["ratio"] > 5
    assert 0 < last["error/blocks.0"] < 1
    assert last["owed/blocks.1"] == pytest.approx(left["blocks.1"]), "norms of the last even step"
    assert last["encode_seconds"] > 0 < last["decode_seconds"]
    lines = text.splitlines()
    assert f'commpress_wire_bytes_total{{rank="0"}} {wire}' in lines
    assert 'commpress_steps_total{rank="0"} 6' in lines
    assert all(LINE.match(line) for line in lines if not line.startswith("#")), text
    assert any(line.startswith('commpress_compression_error{rank="0",group="blocks.0"}') for line in lines)


def optimize():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = commpress.OneBitAdam(model.parameters(), lr=1e-3, warmup_steps=1)
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
    assert sum(second.owed.values()) > 0
    assert second.encode_seconds > 0


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


def test_tensorboard_takes_them(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        to_writer(writer)(StepMetrics(1, 1, 0.5, wire_bytes=3))
    assert any(tmp_path.iterdir())


# ---------------------------------------------------------------- the endpoint


def ask(endpoint, path="/metrics", host=None):
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.getheader("Content-Type"), answer.read().decode()


def test_the_endpoint_answers_its_own_name_only():
    endpoint = commpress.MetricsEndpoint(labels={"job": 'a "b"\\\n'})
    try:
        endpoint(StepMetrics(1, 2, 0.5, wire_bytes=10, owed={"blocks.0": 1.5}))
        endpoint(StepMetrics(3, 2, 1.0, wire_bytes=5, owed={"blocks.0": 2.5}))
        status, kind, text = ask(endpoint)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        job = r'{job="a \"b\"\\\n"}'
        assert f"commpress_wire_bytes_total{job} 15" in text.splitlines()
        assert f"commpress_step_seconds{job} 0.5" in text.splitlines()
        assert r'commpress_owed_norm{job="a \"b\"\\\n",group="blocks.0"} 2.5' in text.splitlines()
        assert text.count("# TYPE commpress_wire_bytes_total counter") == 1
        assert ask(endpoint, "/")[0] == 404
        assert ask(endpoint, host="evil.example")[0] == 403
        assert ask(endpoint, host=f"localhost:{endpoint.port}")[0] == 200
        parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
        families = {f.name: f for f in parser.text_string_to_metric_families(text)}
        (sample,) = families["commpress_wire_bytes"].samples
        assert (sample.value, sample.labels) == (15, {"job": 'a "b"\\\n'})
        assert families["commpress_owed_norm"].type == "gauge"
    finally:
        endpoint.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "example.org", ""])
def test_only_loopback(host):
    with pytest.raises(InvalidArgument, match="expected a loopback address"):
        commpress.MetricsEndpoint(host=host)


@pytest.mark.parametrize(
    ("options", "says"),
    [({}, "nothing to measure"), ({"state": 3}, "state is a int"), ({"store": object(), "every": 0}, "every is 0")],
)
def test_what_cannot_be_measured_is_refused(options, says):
    with pytest.raises(InvalidArgument, match=says):
        commpress.Metrics(**options)


def test_groups():
    names = ["module.blocks.0.qkv.weight", "head.weight", "tokens", "h.11.mlp.bias", "layers2.3.x"]
    assert [by_layer(name) for name in names] == ["module.blocks.0", "head", "tokens", "h.11", "layers2.3"]
