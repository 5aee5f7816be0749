"""Sketches in two levels: a node is a worker that has the sum of its ranks, alone or with estimates
(EF21)."""

import pytest
import torch

from commpress.codecs import ByName, policy_of
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.levels import Levels
from commpress.collectives.residual_state import flat_parts
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.two_level import hierarchy_of

SPANS = [Span("a", 0, 5000), Span("exact", 5000, 40), Span("b", 5040, 2960)]
NUMEL = 8000
CPU = torch.device("cpu")
LOSSY = {span.name: span.numel for span in SPANS if span.name != "exact"}


class Group:
    """Ranks in one process, each with the exchange that an integration would use: ``nodes`` are a
    topology or a number."""

    def __init__(self, nodes, codec="sketch-8", *, ef21=False, spans=SPANS):
        self.spans, self.step = spans, 0
        size = nodes if isinstance(nodes, int) else nodes.size
        self.channels = [Channel(transport) for transport in Loopback(size).transports()]
        if not isinstance(nodes, int):
            for channel in self.channels:
                channel.levels = Levels(hierarchy_of(nodes, channel.inner))
        policy = ByName({"exact": "none"}, policy_of(codec))
        self.exchanges = [
            Exchanges(policy, size, c.workspace, levels=c.levels, ef21=ef21) for c in self.channels
        ]

    def reduce(self, inputs, gain=1.0):
        buffers, where = (
            [x.clone() for x in inputs],
            (self.spans, [(span.numel,) for span in self.spans]),
        )
        outcomes = simulate(
            [
                e.of(("all",), lambda: where, CPU).steps(
                    c, x, sequence=10 * self.step, key=self.step, gain=gain
                )
                for e, c, x in zip(self.exchanges, self.channels, buffers, strict=True)
            ]
        )
        self.step += 1
        finite = [all(outcome.finite for outcome in each) for each in outcomes]
        assert len(set(finite)) == 1, "some ranks would skip this step, others would not"
        for outcome in (outcome for each in outcomes for outcome in each):
            outcome.commit() if finite[0] else outcome.discard()
        assert all(torch.equal(buffers[0], other) for other in buffers) or not finite[0]
        assert all(exchanges.quanta == self.exchanges[0].quanta for exchanges in self.exchanges)
        return buffers[0] if finite[0] else None

    def owed(self):
        """R of every element."""
        parts = []
        for e, channel in zip(self.exchanges, self.channels, strict=True):
            levels = channel.levels
            parts.append(
                levels.parts(e.residuals, LOSSY)
                if levels
                else flat_parts(e.residuals, channel.transport)
            )
        return {name: torch.stack([each[name, 0] for each in parts]).mean(0) for name in LOSSY}

    def kept(self):
        return [
            {k: [t.clone() for t in every] for k, every in e.residuals.every().items()}
            for e in self.exchanges
        ]

    @property
    def dense(self):
        return [channel.workspace.dense_sketches for channel in self.channels]


def inputs_of(ranks, step, numel=NUMEL):
    x = torch.randn(ranks, numel, generator=torch.Generator().manual_seed(step))
    x[:, : 5 * numel // 8] *= 1e-3
    return list(x)


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for key in one for a, b in zip(one[key], other[key], strict=True)
    )


changes = pytest.mark.parametrize("ef21", [False, True], ids=["residuals", "ef21"])


@changes
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_node_of_one_rank_is_that_rank(ranks, ef21):
    """In every bit what one level gives, whatever the lengths: outputs, residuals, quanta."""
    levels, flat = Group(Topology.of(*[1] * ranks), ef21=ef21), Group(ranks, ef21=ef21)
    for step in range(6):
        inputs = inputs_of(ranks, step)
        assert torch.equal(levels.reduce(inputs), flat.reduce(inputs))
    assert levels.exchanges[0].quanta == flat.exchanges[0].quanta
    assert levels.dense == flat.dense
    assert all(map(same, levels.kept(), flat.kept()))


@changes
@pytest.mark.parametrize("sizes", [(2, 2), (4, 4)], ids=str)
def test_a_node_is_a_worker_that_has_the_mean_of_its_ranks(sizes, ef21):
    """In every bit the sketch of so many ranks as there are nodes, where slices end where blocks
    do."""
    nodes, k = len(sizes), sizes[0]
    spans = [Span("a", 0, 2048 * nodes * k), Span("b", 2048 * nodes * k, 4096 * nodes * k)]
    numel = sum(span.numel for span in spans)
    levels, flat = (
        Group(Topology.of(*sizes), ef21=ef21, spans=spans),
        Group(nodes, ef21=ef21, spans=spans),
    )
    for step in range(5):
        inputs = inputs_of(nodes * k, step, numel)
        of_nodes = [sum(inputs[i * k + 1 : i * k + k], inputs[i * k]) / k for i in range(nodes)]
        assert torch.equal(levels.reduce(inputs), flat.reduce(of_nodes))
    assert levels.exchanges[0].quanta == flat.exchanges[0].quanta
    assert set(levels.dense) == {1}


@pytest.mark.parametrize("topology", ["2x2", "1,3,2", "0 3|1 2"])
def test_nothing_is_lost(topology):
    """Σ outputs + R = Σ mean(inputs), every rank weighs the same, and what is exact is exact."""
    topology = Topology.parse(topology)
    group = Group(topology)
    sent, wanted = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(2))
    for step in range(8):
        inputs = inputs_of(topology.size, step)
        mean = torch.stack(inputs).double().mean(0)
        output = group.reduce(inputs)
        torch.testing.assert_close(
            output[5000:5040].double(), mean[5000:5040], atol=1e-6, rtol=1e-6
        )
        sent += output
        wanted += mean
    owed = group.owed()
    for span in SPANS:
        if span.name in owed:
            at = slice(span.source, span.source + span.numel)
            torch.testing.assert_close(sent[at] + owed[span.name], wanted[at], atol=1e-5, rtol=1e-5)
            assert float(owed[span.name].norm()) < 0.9 * float(wanted[at].norm())
    assert group.exchanges[0].quanta["a"] < group.exchanges[0].quanta["b"] / 100


@pytest.mark.parametrize("codec", ["sign", "int4"])
def test_what_rows_owed_is_sent_when_a_sketch_takes_their_place(codec):
    topology = Topology.of(3, 2)
    group = Group(topology, codec)
    sent, wanted = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(2))
    for step in range(6):
        if step == 3:
            for exchanges in group.exchanges:
                exchanges.use(ByName({"exact": "none"}, policy_of("sketch-8")))
        inputs = inputs_of(5, step)
        sent += group.reduce(inputs)
        wanted += torch.stack(inputs).double().mean(0)
    for span in SPANS:
        if span.name in LOSSY:
            at = slice(span.source, span.source + span.numel)
            torch.testing.assert_close(
                sent[at] + group.owed()[span.name], wanted[at], atol=1e-5, rtol=1e-5
            )


@changes
@pytest.mark.parametrize(("where", "bad"), [(7, "overflow"), (5010, "nan"), (7999, "overflow")])
def test_a_bad_gradient_of_one_node_changes_nothing_on_any(where, bad, ef21):
    """NaN on one rank, or finite numbers whose sum in their node is not."""
    group = Group(Topology.of(2, 2, 1), ef21=ef21)
    group.reduce(inputs_of(5, 0))
    group.reduce(inputs_of(5, 1))
    kept, quanta, inputs = group.kept(), dict(group.exchanges[0].quanta), inputs_of(5, 2)
    inputs[2][where] = inputs[3][where] = 3e38
    if bad == "nan":
        inputs[2][where], inputs[3][where] = float("nan"), 0.0
    assert group.reduce(inputs) is None
    assert all(map(same, kept, group.kept()))
    assert group.exchanges[3].quanta == quanta


def test_a_loss_scale_changes_nothing():
    plain, scaled = Group(Topology.of(2, 1)), Group(Topology.of(2, 1))
    for step in range(4):
        inputs = inputs_of(3, step)
        one, other = plain.reduce(inputs), scaled.reduce([64 * x for x in inputs], gain=1 / 64)
        assert torch.equal(one, other / 64)


def test_nodes_send_no_more_than_one_rank_of_the_flat_sketch():
    """All ranks of a node together send what one worker would, slice by slice, but for headers."""
    spans = [Span("a", 0, 65536)]
    levels, flat = Group(Topology.of(4, 4), spans=spans), Group(2, spans=spans)
    for group, ranks in ((levels, 8), (flat, 2)):
        group.reduce(inputs_of(ranks, 0, 65536))
    before = [sum(c.between_bytes for c in levels.channels[:4]), flat.channels[0].sent_bytes]
    levels.reduce(inputs_of(8, 1, 65536))
    flat.reduce(inputs_of(2, 1, 65536))
    node, worker = (
        sum(c.between_bytes for c in levels.channels[:4]) - before[0],
        flat.channels[0].sent_bytes - before[1],
    )
    assert worker < node < 1.1 * worker
    assert levels.dense == [1] * 8


@pytest.mark.parametrize("where", [1, 4999])
def test_one_slice_may_go_densely_while_others_do_not(where):
    """A leap in one slice: only its owners send densely, and every rank ends up with the same
    bits."""
    group = Group(Topology.of(3, 1))
    for step in range(2):
        group.reduce(inputs_of(4, step))
    before, inputs = group.dense, inputs_of(4, 2)
    inputs[1][where] = 1e6
    output = group.reduce(inputs)
    assert sorted(now - was for now, was in zip(group.dense, before, strict=True)) == [0, 0, 1, 1]
    assert float(output[where]) == pytest.approx(1e6 / 4, rel=1e-3)


@pytest.mark.parametrize("sizes", [(3, 1), (2, 2)], ids=str)
def test_a_gradient_that_stays_is_known_ever_more_exactly(sizes):
    """EF21: v is what nodes have heard of each other, and comes near the mean."""
    group, inputs = Group(Topology.of(*sizes), ef21=True), inputs_of(4, 0)
    mean = torch.stack(inputs).mean(0)
    for _ in range(25):
        output = group.reduce(inputs)
    for name, owed in group.owed().items():
        source = {"a": 0, "b": 5040}[name]
        torch.testing.assert_close(output[source : source + len(owed)], -owed, atol=2e-5, rtol=1e-5)
        part = mean[source : source + len(owed)]
        assert float((output[source : source + len(owed)] - part).norm() / part.norm()) < 1e-3
