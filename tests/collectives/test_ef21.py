"""EF21: the identity that ties its estimates, and what they are good for."""

import pytest
import torch

from commpress.codecs import ByName, TopKCodec, codec_named, policy_of
from commpress.collectives.allreduce import Workspace, reduce_bucket
from commpress.collectives.buckets import Span, messages
from commpress.collectives.channel import Channel
from commpress.collectives.ef21 import check_codec, reduce_changes
from commpress.collectives.exchange import Exchanges
from commpress.collectives.levels import Levels
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.two_level import hierarchy_of
from commpress.errors import InvalidArgument
from commpress.feedback import ResidualStore
from variants import first

SPANS = [Span("a", 0, 600), Span("exact", 600, 40), Span("b", 640, 363)]
NUMEL = 1003
CPU = torch.device("cpu")


class Ranks:
    """Several ranks in one process that keep estimates, or residuals."""

    def __init__(self, ranks, codec, *, ef21=True, spans=SPANS):
        self.plan = messages(spans, ByName({"exact": "none"}, policy_of(codec)), ranks, message=700)
        self.stores = [ResidualStore(ef21=ef21) for _ in range(ranks)]
        self.workspaces = [Workspace() for _ in range(ranks)]
        self.attach()

    def attach(self):
        self.feedbacks = [
            [store.attach(m.keys, m.pieces, CPU) for m in self.plan] for store in self.stores
        ]

    def reduce(self, inputs, step, gain=1.0):
        transports, buffers = Loopback(len(inputs)).transports(), [x.clone() for x in inputs]
        steps = [
            reduce_bucket(
                buffer,
                feedbacks,
                messages=self.plan,
                transport=transport,
                workspace=workspace,
                sequence=10 * step,
                gain=gain,
                reduce=reduce_changes if self.stores[0].ef21 else None,
            )
            for buffer, feedbacks, transport, workspace in zip(
                buffers, self.feedbacks, transports, self.workspaces, strict=True
            )
        ]
        outcomes = simulate(steps)
        finite = all(outcome.finite for each in outcomes for outcome in each)
        for outcome in (outcome for each in outcomes for outcome in each):
            outcome.commit() if finite else outcome.discard()
        return buffers, finite

    def joined(self, rank, which):
        """Of a and b: 0 minus what the others know of this rank, 1 what it owes of its rows, 2 what
        all know of the mean."""
        return {key: kept[which].clone() for key, kept in self.stores[rank].every().items()}


class Whole(Ranks):
    """As ``Ranks``, with the exchange that an integration would use: matrices or sketches."""

    def __init__(self, ranks, codec, *, ef21=True):
        self.channels = [Channel(transport) for transport in Loopback(ranks).transports()]
        policy = ByName({"exact": "none"}, policy_of(codec))
        self.exchanges = [Exchanges(policy, ranks, c.workspace, ef21=ef21) for c in self.channels]
        self.stores = [exchanges.residuals for exchanges in self.exchanges]

    def reduce(self, inputs, step, gain=1.0):
        buffers, where = [x.clone() for x in inputs], (SPANS, [(20, 30), (40,), (11, 33)])
        outcomes = simulate(
            [
                e.of(("all",), lambda: where, CPU).steps(
                    c, x, sequence=10 * step, key=step, gain=gain
                )
                for e, c, x in zip(self.exchanges, self.channels, buffers, strict=True)
            ]
        )
        for outcome in (outcome for each in outcomes for outcome in each):
            outcome.commit()
        return buffers, True


def inputs_of(ranks, step):
    return list(torch.randn(ranks, NUMEL, generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize("codec", ["topk-16", "sign-l1", "int4", "bits2", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_all_know_is_what_they_heard(codec, ranks):
    """v = mean(h) − s, v is the same in every bit on every rank and is the output; exact tensors
    stay exact."""
    group = Ranks(ranks, codec)
    for step in range(15):
        inputs = inputs_of(ranks, step)
        outputs, _ = group.reduce(inputs, step)
        assert all(torch.equal(outputs[0], other) for other in outputs)
        torch.testing.assert_close(outputs[0][600:640], torch.stack(inputs).mean(0)[600:640])
        for name, source, numel in (("a", 0, 600), ("b", 640, 363)):
            key = (name, 0)
            known = group.joined(0, 2)[key]
            assert torch.equal(outputs[0][source : source + numel], known)
            heard = -torch.stack([group.joined(rank, 0)[key] for rank in range(ranks)]).mean(0)
            owed = torch.cat([group.joined(rank, 1)[key] for rank in range(ranks)])[:numel]
            torch.testing.assert_close(known, heard - owed, atol=2e-5, rtol=1e-5)


def test_a_gradient_that_stays_is_known_ever_more_exactly():
    """A residual goes on oscillating: top-k sends in turns what EF21 needs to send once."""
    codec = TopKCodec(1 / 8, 64)
    inputs = inputs_of(2, 0)
    mean = torch.stack(inputs).mean(0)
    changes, residuals = Ranks(2, codec), Ranks(2, codec, ef21=False)
    for step in range(60):
        known, late = changes.reduce(inputs, step)[0][0], residuals.reduce(inputs, step)[0][0]
    assert float((known - mean).norm() / mean.norm()) < 1e-4
    assert float((late - mean).norm() / mean.norm()) > 0.5


@pytest.mark.parametrize("codec", ["sketch-8", "powersgd-2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_whole_tensors_are_known_as_rows_are(codec, ranks):
    """v = mean(h), the same bits on every rank; and known ever more exactly, where residuals send
    the same late."""
    group, late = Whole(ranks, codec), Whole(ranks, codec, ef21=False)
    for step in range(4):
        inputs = inputs_of(ranks, step)
        outputs, _ = group.reduce(inputs, step)
        assert all(torch.equal(outputs[0], other) for other in outputs)
        for name, source, numel in (("a", 0, 600), ("b", 640, 363)):
            known = group.joined(ranks - 1, 2)[name, 0]
            assert torch.equal(outputs[0][source : source + numel], known)
            heard = -torch.stack([group.joined(rank, 0)[name, 0] for rank in range(ranks)]).mean(0)
            torch.testing.assert_close(known, heard, atol=2e-5, rtol=1e-5)
    mean = torch.stack(inputs).mean(0)
    for step in range(4, 34):
        known, residual = group.reduce(inputs, step)[0][0], late.reduce(inputs, step)[0][0]
    assert (
        float((known - mean).norm() / mean.norm())
        < 1e-3
        < 0.1
        < float((residual - mean).norm() / mean.norm())
    )


def equal_under_any_scale(plain, scaled, size):
    for step in range(6):
        scale = 2.0 ** (10 + step)
        inputs = inputs_of(size, step)
        one, _ = plain.reduce(inputs, step)
        other, _ = scaled.reduce([x * scale for x in inputs], step, gain=1 / scale)
        assert torch.equal(one[0], other[0] / scale)


def test_a_loss_scale_changes_nothing():
    """A power of two: estimates are in unscaled units, bit for bit."""
    plain, scaled = Ranks(2, "topk-16"), Ranks(2, "topk-16")
    equal_under_any_scale(plain, scaled, 2)
    assert all(
        torch.equal(plain.joined(1, 0)[key], value) for key, value in scaled.joined(1, 0).items()
    )


def test_a_bad_gradient_changes_nothing():
    group = Ranks(2, "topk-16")
    group.reduce(inputs_of(2, 0), 0)
    before = [group.joined(rank, which) for rank in (0, 1) for which in (0, 1, 2)]
    inputs = inputs_of(2, 1)
    inputs[1][5] = float("nan")
    _, finite = group.reduce(inputs, 1)
    assert not finite
    after = [group.joined(rank, which) for rank in (0, 1) for which in (0, 1, 2)]
    for was, now in zip(before, after, strict=True):
        assert all(torch.equal(was[key], now[key]) for key in was)


def test_estimates_move_with_their_parameters():
    """Other messages, the same estimates."""
    group, other = Ranks(2, "topk-16"), Ranks(2, "topk-16")
    for step in range(3):
        group.reduce(inputs_of(2, step), step)
        other.reduce(inputs_of(2, step), step)
    other.plan = messages(SPANS, ByName({"exact": "none"}, policy_of("topk-16")), 2)
    other.attach()
    assert len(other.plan) == 1 < len(group.plan)
    one, two = group.reduce(inputs_of(2, 3), 3)[0], other.reduce(inputs_of(2, 3), 3)[0]
    assert torch.equal(one[0], two[0])


@pytest.mark.parametrize("codec", ["none", "terngrad"])
def test_codecs_that_leave_nothing_out_are_refused(codec):
    with pytest.raises(InvalidArgument, match="EF21 is for codecs that leave something out"):
        check_codec(codec_named(codec))


# ---------------------------------------------------------------- nodes in place of ranks


class Nodes(Ranks):
    """The ranks of a topology, each with the exchange that an integration would use."""

    def __init__(self, topology, codec, *, spans=SPANS):
        self.topology, self.spans, self.numel = topology, spans, sum(span.numel for span in spans)
        self.channels = [Channel(transport) for transport in Loopback(topology.size).transports()]
        for channel in self.channels:
            channel.levels = Levels(hierarchy_of(topology, channel.inner))
        policy = ByName({"exact": "none"}, policy_of(codec))
        self.exchanges = [
            Exchanges(policy, c.size, c.workspace, levels=c.levels, ef21=True)
            for c in self.channels
        ]
        self.stores = [exchanges.residuals for exchanges in self.exchanges]

    def reduce(self, inputs, step, gain=1.0):
        buffers = [x.clone() for x in inputs]
        where = (self.spans, [(span.numel,) for span in self.spans])
        steps = [
            exchanges.of(("all",), lambda: where, CPU).steps(
                channel, buffer, sequence=10 * step, key=0, gain=gain
            )
            for buffer, exchanges, channel in zip(
                buffers, self.exchanges, self.channels, strict=True
            )
        ]
        outcomes = simulate(steps)
        finite = all(outcome.finite for each in outcomes for outcome in each)
        for outcome in (outcome for each in outcomes for outcome in each):
            outcome.commit() if finite else outcome.discard()
        return buffers, finite

    def owed(self):
        """−v of every element, from all ranks: what the nodes have heard of each other, less what
        owners keep back."""
        numels = {span.name: span.numel for span in self.spans if span.name != "exact"}
        parts = [
            c.levels.parts(store, numels)
            for c, store in zip(self.channels, self.stores, strict=True)
        ]
        return {key: torch.stack([each[key] for each in parts]).mean(0) for key in parts[0]}


CODECS = pytest.mark.parametrize("codec", ["topk-16", "sign", "int4", "bf16"])


@CODECS
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_node_of_one_rank_is_that_rank(codec, ranks):
    """In every bit what one level gives, whatever the lengths."""
    levels, flat = Nodes(Topology.of(*[1] * ranks), codec), Ranks(ranks, codec)
    for step in range(6):
        inputs = inputs_of(ranks, step)
        one, other = levels.reduce(inputs, step)[0], flat.reduce(inputs, step)[0]
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for rank in range(ranks):
        for which in (0, 1, 2):
            mine, theirs = levels.joined(rank, which), flat.joined(rank, which)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@CODECS
@pytest.mark.parametrize("sizes", [(2, 2), (4, 4), (2, 2, 2)], ids=str)
def test_a_node_is_a_worker_that_has_the_mean_of_its_ranks(codec, sizes):
    """In every bit the EF21 of so many ranks as there are nodes, where slices end where blocks
    do."""
    nodes, k = len(sizes), sizes[0]
    spans = [Span("a", 0, 2048 * nodes * k)]
    levels, flat = Nodes(Topology.of(*sizes), codec, spans=spans), Ranks(nodes, codec, spans=spans)
    for step in range(6):
        inputs = list(
            torch.randn(nodes * k, spans[0].numel, generator=torch.Generator().manual_seed(step))
        )
        of_nodes = [sum(inputs[i * k + 1 : i * k + k], inputs[i * k]) / k for i in range(nodes)]
        results, (expected, *_) = levels.reduce(inputs, step)[0], flat.reduce(of_nodes, step)[0]
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("sizes", first(1, [(1, 3, 2), (3, 1)]), ids=str)
@CODECS
def test_nodes_of_different_size_know_the_mean_of_all_ranks(codec, sizes):
    """Every rank weighs the same, v is the same everywhere, and what was heard less what is kept
    back."""
    topology = Topology.of(*sizes)
    group = Nodes(topology, codec)
    for step in range(8):
        inputs = inputs_of(topology.size, step)
        outputs, finite = group.reduce(inputs, step)
        assert finite
        assert all(torch.equal(outputs[0], other) for other in outputs)
        torch.testing.assert_close(outputs[0][600:640], torch.stack(inputs).mean(0)[600:640])
        for (name, _), owed in group.owed().items():
            source, numel = {"a": (0, 600), "b": (640, 363)}[name]
            torch.testing.assert_close(
                outputs[0][source : source + numel], -owed, atol=2e-5, rtol=1e-5
            )
    inputs = inputs_of(topology.size, 0)
    for step in range(40):
        outputs, _ = group.reduce(inputs, 10 + step)
    mean = torch.stack(inputs).mean(0)
    assert float((outputs[0] - mean).norm() / mean.norm()) < 0.01


def test_a_loss_scale_changes_nothing_in_two_levels():
    plain, scaled = (Nodes(Topology.of(3, 2), "topk-16") for _ in range(2))
    equal_under_any_scale(plain, scaled, 5)


@pytest.mark.parametrize("where", [5, 600, 1002])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)], ids=str)
def test_a_bad_gradient_of_one_rank_changes_nothing_on_any_node(sizes, where):
    group = Nodes(Topology.of(*sizes), "topk-16")
    group.reduce(inputs_of(4, 0), 0)
    before = [group.joined(rank, which) for rank in range(4) for which in (0, 1, 2)]
    inputs = inputs_of(4, 1)
    inputs[3][where] = float("nan")
    _, finite = group.reduce(inputs, 1)
    assert not finite
    after = [group.joined(rank, which) for rank in range(4) for which in (0, 1, 2)]
    for was, now in zip(before, after, strict=True):
        assert all(torch.equal(was[key], now[key]) for key in was)
