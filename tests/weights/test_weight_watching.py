"""Copies of published weights in a tiered store, and figures of versions and readers."""

import json
import re
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
import torch

import commpress
from commpress.errors import InvalidArgument
from commpress.tiered_mem import TieredStore
from commpress.weights import Publisher, Receiver, WeightMetrics, WeightServer, verify


def model(numel):
    draws = torch.Generator().manual_seed(0)
    return {"a": torch.randn(numel, generator=draws).bfloat16(), "b": torch.randn(5)}


def move(weights, seed):
    draws = torch.Generator().manual_seed(seed)
    for value in weights.values():
        value += (torch.rand(value.shape, generator=draws) < 0.02) * value * 2.0**-7


def test_copies_in_a_store_smaller_than_them_give_the_same_files(tmp_path):
    """Eight blocks of 2 MiB, 6 MiB of memory, so some are on the disk between versions."""
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    with TieredStore.open(tmp_path / "store", host="6MiB", engine="threads") as store:
        for restart in range(2):
            weights = model(8 << 20)
            for seed in range(3 * restart):
                move(weights, seed)
            with (
                Publisher(weights, plain, anchor_every=2) as one,
                Publisher(weights, stored, anchor_every=2, store=store) as two,
            ):
                for seed in range(3 * restart, 3 * restart + 3):
                    move(weights, seed)
                    a, b = one.publish(), two.publish()
                    assert (a.version, a.bytes, a.density) == (b.version, b.bytes, b.density)
                assert len(store) == 9
                assert store.usage().host <= 6 << 20
                assert store.usage().disk > 0
            assert not len(store)
    assert [each.bytes for each in verify(plain)] == [each.bytes for each in verify(stored)]
    reader = Receiver(stored)
    reader.prepare()
    reader.install()
    for name, value in weights.items():
        assert torch.equal(reader.weights[name], value)


def test_a_publisher_that_follows_another_in_its_store_has_copies_of_its_own(tmp_path):
    weights = {"w": torch.zeros(100)}
    with TieredStore.open(tmp_path / "store", host="1MiB") as store:
        first = Publisher(weights, tmp_path / "run", store=store)
        first.publish()
        with Publisher(weights, tmp_path / "run", store=store) as second:
            first.close()
            weights["w"] += 1
            assert second.publish().version == 2
        assert not list(store)
    assert len(verify(tmp_path / "run")) == 2


@pytest.fixture
def watched(tmp_path):
    weights = model(100_000)
    with Publisher(weights, tmp_path / "run") as publisher:
        publisher.publish()
        server = WeightServer(tmp_path / "run")
        yield SimpleNamespace(weights=weights, publisher=publisher, server=server, seen=[])
        server.close()


def test_every_version_is_told_once_with_the_staleness_of_its_readers(watched, tmp_path):
    lines, scalars = tmp_path / "lines.json", {}
    writer = SimpleNamespace(add_scalar=lambda tag, value, at: scalars.update({(tag, at): value}))
    sinks = [watched.seen.append, commpress.to_json_lines(lines), commpress.to_writer(writer)]
    metrics = WeightMetrics(watched.publisher, watched.server, to=sinks)
    first = metrics.step()
    assert (first.step, first.behind, first.density) == (1, {}, 1.0)
    assert metrics.step() is None
    reader = Receiver(watched.server.url)
    reader.prepare()
    for seed in range(2):
        move(watched.weights, seed)
        report = watched.publisher.publish()
    sample = metrics.step()
    assert sample.step == report.version == 3
    assert (sample.bytes, sample.density) == (report.bytes, report.density)
    assert sample.behind == {"127.0.0.1": 2}
    assert 0 <= sample.asked["127.0.0.1"] < 60
    assert sample.ratio == sample.dense_bytes / sample.bytes > 5
    assert watched.seen == [first, sample]
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [each["step"] for each in told] == [1, 3]
    assert scalars["commpress/behind/127.0.0.1", 3] == 2
    assert scalars["commpress/bytes", 3] == report.bytes


def test_a_version_under_way_is_told_when_it_can_be_had(watched):
    metrics = WeightMetrics(watched.publisher, to=[watched.seen.append])
    metrics.step()
    move(watched.weights, 3)
    watched.publisher.publish(wait=False)
    metrics.step()  # it may be there or not
    watched.publisher.wait()
    metrics.step()
    assert [sample.step for sample in watched.seen] == [1, 2]
    assert watched.seen[-1].asked == {}


def test_prometheus_reads_versions_and_readers(watched):
    endpoint = commpress.MetricsEndpoint(labels={"run": "one"})
    Receiver(watched.server.url).prepare()
    move(watched.weights, 0)
    watched.publisher.publish()
    WeightMetrics(watched.publisher, watched.server, to=[endpoint]).step()
    text = urlopen(endpoint.url, timeout=30).read().decode()
    endpoint.close()
    assert re.search(r'^commpress_weights_version\{run="one"\} 2.0$', text, re.MULTILINE)
    behind = r'^commpress_weights_behind\{reader="127.0.0.1",run="one"\} 1.0$'
    assert re.search(behind, text, re.MULTILINE)


def test_metrics_without_a_sink_are_refused(watched):
    with pytest.raises(InvalidArgument, match="to is \\[\\]"):
        WeightMetrics(watched.publisher, to=[])
