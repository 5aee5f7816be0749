"""The hierarchical all-reduce on simulated ranks: every oracle, even and uneven nodes, worlds to
64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import ByName, SignCodec, TernaryCodec, codec_named, policy_of
from commpress.codecs.family import EXACT, NAMES
from commpress.collectives import two_level
from commpress.collectives.allreduce import Call, Workspace, compressed_allreduce
from commpress.collectives.buckets import Span
from commpress.collectives.frame import HEADER
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.two_level import (
    Hierarchy,
    hierarchy_of,
    owners,
    reduce_routes,
    routes,
)
from commpress.errors import InvalidArgument, Mismatch
from commpress.kernels.pieces import NUMEL, RESIDUAL, SHARD, WIDTH
from one_reduction import feedback_for, hierarchical_allreduce
from recorded import Recorded
from test_allreduce import (
    check_a_bad_number,
    check_telescoping,
    errors_are_in_order,
    gradients,
)
from variants import every_second

TOPOLOGIES = [
    Topology.of(*sizes)
    for sizes in [
        (1,),
        (1, 1),
        (2,),
        (2, 2),
        (2, 1),
        (2, 2, 2),
        (3, 2, 3),
        (4, 4),
        (5, 1, 4),
        (4,) * 4,
        (8, 1),
        (3,) * 5,
        (16, 7, 16, 2),
        (60, 4),
        (9, 4),
        (2,) * 32,
    ]
] + [Topology.parse("0 3|1 2"), Topology.parse("1 4|0 2 3")]


class Group:
    """All ranks of a topology with feedback; ``reduce`` is one step. ``divided``: over the subsets
    that a transport has, else over its exchanges, to some ranks only."""

    def __init__(self, topology: Topology, numel: int, codec, *, divided: bool = True) -> None:
        self.size, self.numel, self.codec, self.step = topology.size, numel, codec_named(codec), 0
        self.whole = Loopback(topology.size).transports()
        if not divided:
            self.whole = [Recorded(transport) for transport in self.whole]
        self.hierarchies = []
        for transport in self.whole:
            h = hierarchy_of(topology, transport)
            between = {index: Recorded(t) for index, t in h.between.items()}
            self.hierarchies.append(Hierarchy(topology, Recorded(h.inside), between))
        self.feedbacks = [feedback_for(numel, codec, h) for h in self.hierarchies]

    def reduce(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        buffers, options = [x.clone() for x in inputs], {"codec": self.codec}
        options["sequence"] = 1000 * self.step
        ranks = zip(buffers, self.feedbacks, self.hierarchies, strict=True)
        self.finite = simulate(
            [hierarchical_allreduce(b, f, hierarchy=h, **options) for b, f, h in ranks]
        )
        self.step += 1
        return buffers

    def sent(self):
        return [feedback.sent for *_, feedback in self.kept()]

    def kept(self):
        """Residuals, each behind its rank's hierarchy, its message and its rank between nodes."""
        for h, feedbacks in zip(self.hierarchies, self.feedbacks, strict=True):
            plan = routes([Span("", 0, self.numel)], policy_of(self.codec), h)
            for route, by_slice in zip(plan, feedbacks, strict=True):
                for index, feedback in by_slice.items():
                    if feedback is not None:
                        yield h, route.between[index], h.between[index].rank, feedback

    def total_residual(self) -> np.ndarray:
        """R, slice by slice: Σ over the nodes of the sent residuals / divisor + the reduced ones
        side by side."""
        total = np.zeros(self.numel)
        for h, message, mine, feedback in self.kept():
            feedback.settle(message.pieces)
            for (_, at), line in zip(message.keys, message.pieces.table, strict=True):
                if line[RESIDUAL] < 0:
                    continue
                sent = feedback.sent[line[RESIDUAL] : line[RESIDUAL] + line[NUMEL]]
                total[at : at + line[NUMEL]] += sent.double().numpy() / h.divisor
                first = min(mine * line[WIDTH], line[NUMEL])
                last = min(first + line[WIDTH], line[NUMEL])
                reduced = feedback.reduced[line[SHARD] : line[SHARD] + last - first]
                total[at + first : at + last] += reduced.double().numpy()
        return total


def integers(size: int, numel: int, seed: int) -> list[torch.Tensor]:
    """Numbers whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1000, 1000, (numel,), generator=generator).float() for _ in range(size)]


def flat(inputs: list[torch.Tensor], codec="none") -> torch.Tensor:
    buffers = [x.clone() for x in inputs]
    ranks = zip(buffers, Loopback(len(inputs)).transports(), strict=True)
    simulate([compressed_allreduce(b, codec=codec, transport=t) for b, t in ranks])
    return buffers[0]


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("topology", every_second(TOPOLOGIES), ids=str)
def test_exact_sums_give_the_bits_of_the_flat_all_reduce(topology):
    for numel in (1, 7, 1000 + topology.size):
        xs = integers(topology.size, numel, numel)
        mean = flat(xs)
        assert all(torch.equal(each, mean) for each in Group(topology, numel, "none").reduce(xs))


def test_the_order_of_sums_is_that_of_local_ranks_then_nodes():
    xs, group = gradients(6, 999, 2), Group(Topology.of(3, 3), 999, "none")
    one, two = (0.5 * ((a + b) + c) for a, b, c in (xs[:3], xs[3:]))
    assert group.hierarchies[0].scale == 0.25
    assert torch.equal(group.reduce(xs)[0], (one + two) / 3)


# ---------------------------------------------------------------- compressed


@pytest.mark.parametrize("topology", every_second(TOPOLOGIES), ids=str)
def test_telescoping_on_every_topology(topology):
    check_telescoping(Group(topology, 1000 + topology.size, "sign"), 6, slack=8)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    numel=st.integers(1, 3000),
    codec=st.sampled_from([*NAMES, SignCodec(block=8), SignCodec("rms", 0), SignCodec("l1", 0)]),
)
def test_telescoping_for_every_codec_and_length(sizes, numel, codec):
    check_telescoping(Group(Topology.of(*sizes), numel, codec), 4, slack=8)


@pytest.mark.parametrize("topology", [Topology.of(2, 2), Topology.of(4, 1, 3)], ids=str)
def test_a_transport_that_cannot_be_divided_gives_the_same_bits(topology):
    group = Group(topology, 3000, "sign", divided=False)
    mine = check_telescoping(group, 3, slack=8)
    assert {op for t in group.whole for op in t.operations} == {"exchange"}
    assert np.array_equal(mine, check_telescoping(Group(topology, 3000, "sign"), 3, slack=8))


def test_compression_acts_on_averages_of_nodes():
    """Equal ranks in a node are one rank: the result is that of the flat all-reduce among the
    nodes. Three values say exactly what is as large everywhere, and come back in another codec."""
    numel, xs = 4096 * 6, gradients(2, 4096 * 6, 1)
    group = Group(Topology.of(2, 2), numel, SignCodec(block=256))
    found = group.reduce([xs[0], xs[0], xs[1], xs[1]])[0]
    assert torch.equal(found, flat(xs, SignCodec(block=256)))
    threes = [torch.full((512,), 3.0)] * 6
    found = Group(Topology.of(3, 3), 512, TernaryCodec(mean="bf16")).reduce(threes)[0]
    torch.testing.assert_close(found, threes[0], rtol=1e-2, atol=0)


def test_error_order_proves_that_codecs_ran():
    topology, numel = Topology.of(2, 3), 20_000
    errors_are_in_order(gradients(5, numel, 5), lambda name: Group(topology, numel, name))


# ---------------------------------------------------------------- pieces, bytes, faults


def test_messages_in_a_pipeline_change_nothing(monkeypatch):
    """Many small messages give the bits of few large ones: what a piece is decides, not what
    travels with it."""
    monkeypatch.setattr(two_level, "PIECE", 1000)
    topology, policy = Topology.of(2, 3), ByName({"b": EXACT}, "sign")
    spans = [Span("a", 0, 2500), Span("b", 2500, 37), Span("c", 2537, 900)]

    def reduced(xs, spans):
        ranks, buffers = [], [x.clone() for x in xs]
        for buffer, transport in zip(buffers, Loopback(5).transports(), strict=True):
            h = hierarchy_of(topology, transport)
            plan = routes(spans, policy, h)
            call = Call(h.inside, Workspace())
            ranks.append(reduce_routes(buffer, [r.zeros() for r in plan], plan, h, call))
        simulate(ranks)
        assert all(torch.equal(buffers[0], b) for b in buffers)
        return buffers[0], len(plan)

    for step in range(2):
        xs = gradients(5, 3437, step)
        together, count = reduced(xs, spans)
        assert count == 4
        for span in spans:
            part = slice(span.source, span.source + span.numel)
            alone, _ = reduced([x[part] for x in xs], [span._replace(source=0)])
            assert torch.equal(alone, together[part])


@pytest.mark.parametrize(("codec", "bits"), [("none", 32), (SignCodec(block=0), 1)], ids=str)
def test_bytes_between_nodes_and_residuals_are_those_of_the_formula(codec, bits):
    """A node sends 2·(m − 1) rows of each slice: 2·(m − 1)/m · N · bits/8 in all, plus headers and
    scales. It owes N / g per rank of what it sends, N / (g·m) of what it reduces."""
    for topology in (Topology.of(2, 2), Topology.of(4, 4, 4), Topology.of(3, 2)):
        nodes, slices = len(topology.nodes), topology.widest
        numel = 8 * nodes * slices * 512
        group = Group(topology, numel, codec)
        group.reduce(gradients(topology.size, numel, 1))
        row = HEADER + numel // (nodes * slices) * bits // 8 + (16 if bits == 1 else 0)
        sent = [sum(t.sent_bytes for t in h.between.values()) for h in group.hierarchies]
        for node in topology.nodes:
            assert sum(sent[r] for r in node) == slices * 2 * (nodes - 1) * row
        for *_, feedback in group.kept():
            assert feedback.sent.numel() == numel // slices
            assert feedback.reduced.numel() == numel // (slices * nodes)


def test_a_smaller_node_shares_its_slices_out():
    topology = Topology.of(5, 2, 1)
    owned = [[0, 5, 7], [1, 5, 7], [2, 5, 7], [3, 6, 7], [4, 6, 7]]
    assert [owners(topology, i) for i in range(5)] == owned
    for rank, h in enumerate(Group(topology, 1, "none").hierarchies):
        assert sorted(h.between) == [i for i, ranks in enumerate(owned) if rank in ranks]


@pytest.mark.parametrize(
    ("topology", "codec"),
    [(Topology.of(2, 2), "sign"), (Topology.of(3, 1), "none"), (Topology.of(5, 3), "int8")],
    ids=str,
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_number_is_seen_by_all_and_poisons_nothing(topology, codec, bad):
    check_a_bad_number(Group(topology, 1000, codec), bad, [0, 1, 999])


def test_a_sum_that_overflows_is_seen_by_all():
    group = Group(Topology.of(3, 2), 1000, "none")
    group.reduce([torch.full((1000,), 3e38)] * 5)
    assert group.finite == [False] * 5


def test_what_cannot_be_one_group_is_refused():
    ranks = [
        hierarchical_allreduce(torch.ones(100), codec=codec, hierarchy=hierarchy_of(nodes, t))
        for codec, nodes, t in zip(
            ["sign"] * 3 + ["int8"], [Topology.of(2, 2)] * 4, Loopback(4).transports(), strict=True
        )
    ]
    with pytest.raises(Mismatch, match="int8"):
        simulate(ranks)
    with pytest.raises(InvalidArgument, match="has 3 ranks, the transport has 4"):
        hierarchy_of(Topology.of(2, 1), Loopback(4).transport(0))
