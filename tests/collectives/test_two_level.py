"""The hierarchical all-reduce on simulated ranks: every oracle, even and uneven nodes, worlds to
64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import ByName, SignCodec, TernaryCodec, codec_named
from commpress.codecs.family import EXACT, NAMES
from commpress.collectives import two_level
from commpress.collectives.allreduce import Workspace, compressed_allreduce
from commpress.collectives.buckets import Span
from commpress.collectives.frame import HEADER
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.collectives.two_level import (
    Hierarchy,
    feedback_for,
    hierarchical_allreduce,
    hierarchy_of,
    owners,
    reduce_routes,
    routes,
)
from commpress.errors import InvalidArgument, Mismatch
from commpress.kernels.pieces import NUMEL, RESIDUAL, SHARD, SOURCE, WIDTH, width_of
from test_allreduce import errors_are_in_order
from variants import every_second

EVEN = [
    (1,),
    (1, 1),
    (2,),
    (2, 2),
    (3, 3),
    (2, 2, 2),
    (4, 4),
    (8, 8),
    (4,) * 4,
    (3,) * 5,
    (8,) * 8,
    (32, 32),
    (2,) * 32,
]
UNEVEN = [(2, 1), (1, 3), (3, 2, 3), (5, 1, 4), (8, 1), (4, 3), (5, 3), (16, 7, 16, 2), (60, 4)]
TOPOLOGIES = [Topology.of(*sizes) for sizes in EVEN + UNEVEN] + [
    Topology.parse("0 3|1 2"),
    Topology.parse("1 4|0 2 3"),
]


class Group:
    """All ranks of a topology with feedback; ``reduce`` is one step."""

    def __init__(self, topology: Topology, numel: int, codec) -> None:
        self.topology, self.numel, self.codec, self.step = topology, numel, codec_named(codec), 0
        self.hierarchies = []
        for transport in Loopback(topology.size).transports():
            h = hierarchy_of(topology, transport)
            between = {index: Recorded(t) for index, t in h.between.items()}
            self.hierarchies.append(Hierarchy(topology, Recorded(h.inside), between))
        self.feedbacks = [feedback_for(numel, codec, h) for h in self.hierarchies]

    def reduce(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        buffers = [x.clone() for x in inputs]
        self.finite = simulate(
            [
                hierarchical_allreduce(
                    b, f, codec=self.codec, hierarchy=h, sequence=1000 * self.step
                )
                for b, f, h in zip(buffers, self.feedbacks, self.hierarchies, strict=True)
            ]
        )
        self.step += 1
        return buffers

    def total_residual(self) -> np.ndarray:
        """R, slice by slice: Σ over the nodes of the sent residuals / divisor + the reduced ones
        side by side."""
        total = np.zeros(self.numel)
        for h, feedbacks in zip(self.hierarchies, self.feedbacks, strict=True):
            plan = routes([Span("", 0, self.numel)], two_level.policy_of(self.codec), h)
            for route, by_slice in zip(plan, feedbacks, strict=True):
                for index, feedback in by_slice.items():
                    if feedback is None:
                        continue
                    message, mine = route.between[index], h.between[index].rank
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

    @property
    def between_bytes(self) -> list[int]:
        return [sum(t.sent_bytes for t in h.between.values()) for h in self.hierarchies]


def gradients(size: int, numel: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator)
    return [common + torch.randn(numel, generator=generator) for _ in range(size)]


def integers(size: int, numel: int, seed: int) -> list[torch.Tensor]:
    """Numbers whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1000, 1000, (numel,), generator=generator).float() for _ in range(size)]


def flat(inputs: list[torch.Tensor]) -> torch.Tensor:
    buffers = [x.clone() for x in inputs]
    transports = Loopback(len(inputs)).transports()
    simulate(
        [
            compressed_allreduce(b, codec="none", transport=t)
            for b, t in zip(buffers, transports, strict=True)
        ]
    )
    return buffers[0]


def assert_all_equal(results: list[torch.Tensor]) -> None:
    for result in results:
        assert torch.equal(results[0].view(torch.int32), result.view(torch.int32)), "ranks differ"


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("topology", every_second(TOPOLOGIES), ids=str)
def test_exact_sums_give_the_bits_of_the_flat_all_reduce(topology):
    for numel in (1, 7, 1000 + topology.size):
        xs = integers(topology.size, numel, numel)
        results = Group(topology, numel, "none").reduce(xs)
        assert_all_equal(results)
        assert torch.equal(results[0], flat(xs))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    numel=st.integers(1, 3000),
    seed=st.integers(0, 99),
)
def test_any_sums_equal_the_flat_ones_to_rounding(sizes, numel, seed):
    """The order of sums differs: P − 1 additions and a division, each off by at most half a unit of
    Σ |x|."""
    topology = Topology.of(*sizes)
    xs = gradients(topology.size, numel, seed)
    results = Group(topology, numel, "none").reduce(xs)
    assert_all_equal(results)
    bound = (
        np.finfo(np.float32).eps * topology.size * sum(x.abs().double() for x in xs) / topology.size
    )
    assert ((results[0].double() - flat(xs).double()).abs() <= bound + 1e-45).all()


def test_the_order_of_sums_is_that_of_local_ranks_then_nodes():
    xs = gradients(6, 999, 2)
    (result, *_) = Group(Topology.of(3, 3), 999, "none").reduce(xs)
    one, two = ((0.5 * ((a + b) + c)) for a, b, c in (xs[:3], xs[3:]))
    assert Group(Topology.of(3, 3), 1, "none").hierarchies[0].scale == 0.25
    assert torch.equal(result, (one + two) / 3)


# ---------------------------------------------------------------- compressed


def check_telescoping(topology, numel, codec, steps):
    group, peak = Group(topology, numel, codec), 4.0
    outputs, inputs = np.zeros(numel), np.zeros(numel)
    for step in range(steps):
        xs = gradients(topology.size, numel, 1000 * step + topology.size)
        results = group.reduce(xs)
        assert_all_equal(results)
        assert all(group.finite)
        outputs += results[0].double().numpy()
        inputs += np.mean([x.double().numpy() for x in xs], axis=0)
        sents = [
            f.sent
            for fs in group.feedbacks
            for route in fs
            for f in route.values()
            if f is not None
        ]
        peak = max(peak, *(s.abs().max().item() for s in sents if s.numel()), 4.0)
    error = np.abs(outputs + group.total_residual() - inputs).max()
    assert error <= 8 * steps * np.finfo(np.float32).eps * 2 * peak
    return outputs, inputs


@pytest.mark.parametrize("topology", every_second(TOPOLOGIES), ids=str)
@pytest.mark.parametrize(
    "codec", ["sign", pytest.param(SignCodec("l1", 0), marks=pytest.mark.slow)], ids=str
)
def test_telescoping_on_every_topology(topology, codec):
    check_telescoping(topology, 1000 + topology.size, codec, steps=6)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    numel=st.integers(1, 3000),
    codec=st.sampled_from([*NAMES, SignCodec(block=8), SignCodec("rms", 0)]),
)
def test_telescoping_for_every_codec_and_length(sizes, numel, codec):
    check_telescoping(Topology.of(*sizes), numel, codec, steps=4)


@pytest.mark.parametrize("topology", [Topology.of(2, 2), Topology.of(3, 3)], ids=str)
def test_a_mean_that_comes_back_in_another_codec_is_that_of_all_ranks(topology):
    """Three values say exactly what is as large everywhere."""
    xs = [torch.full((512,), 3.0) for _ in range(topology.size)]
    for result in Group(topology, 512, TernaryCodec(mean="bf16")).reduce(xs):
        torch.testing.assert_close(result, xs[0], rtol=1e-2, atol=0)


def test_residuals_are_a_share_of_the_flat_ones():
    """N / g per rank of what it sends, N / (g·m) of what it reduces."""
    topology, numel = Topology.of(4, 4), 64 * 1024
    for feedbacks in Group(topology, numel, "sign").feedbacks:
        (by_slice,) = feedbacks
        (feedback,) = by_slice.values()
        assert feedback.sent.numel() == numel // 4
        assert feedback.reduced.numel() == numel // 8


def test_compression_acts_on_averages_of_nodes():
    """Equal ranks in a node are one rank: the result is that of the flat all-reduce among the
    nodes."""
    numel, xs = 4096 * 6, gradients(2, 4096 * 6, 1)
    group = Group(Topology.of(2, 2), numel, SignCodec(block=256))
    results = group.reduce([xs[0], xs[0], xs[1], xs[1]])
    buffers = [x.clone() for x in xs]
    transports = Loopback(2).transports()
    codec = SignCodec(block=256)
    simulate(
        [
            compressed_allreduce(b, codec=codec, transport=t)
            for b, t in zip(buffers, transports, strict=True)
        ]
    )
    assert torch.equal(results[0], buffers[0])


def test_error_order_proves_that_codecs_ran():
    topology, numel = Topology.of(2, 3), 20_000
    xs = gradients(5, numel, 5)
    errors_are_in_order(xs, lambda name: Group(topology, numel, name))


# ---------------------------------------------------------------- pieces, bytes, faults


def test_messages_in_a_pipeline_change_nothing(monkeypatch):
    """Many small messages give the bits of few large ones: what a piece is decides, not what
    travels with it."""
    monkeypatch.setattr(two_level, "PIECE", 1000)
    topology, spans = (
        Topology.of(2, 3),
        [Span("a", 0, 2500), Span("b", 2500, 37), Span("c", 2537, 900)],
    )
    policy = ByName({"b": EXACT}, "sign")
    results = []
    for step in range(2):
        xs = gradients(5, 3437, step)
        results.append([x.clone() for x in xs])
        ranks = []
        for buffer, transport in zip(results[-1], Loopback(5).transports(), strict=True):
            h = hierarchy_of(topology, transport)
            plan = routes(spans, policy, h)
            assert len(plan) == 4
            ranks.append(
                reduce_routes(
                    buffer,
                    [r.zeros() for r in plan],
                    plan=plan,
                    hierarchy=h,
                    workspace=Workspace(),
                    sequence=0,
                )
            )
        simulate(ranks)
        assert_all_equal(results[-1])
        for span in spans:
            alone = [x[span.source : span.source + span.numel].clone() for x in xs]
            ranks = []
            for buffer, transport in zip(alone, Loopback(5).transports(), strict=True):
                h = hierarchy_of(topology, transport)
                plan = routes([span._replace(source=0)], policy, h)
                ranks.append(
                    reduce_routes(
                        buffer,
                        [r.zeros() for r in plan],
                        plan=plan,
                        hierarchy=h,
                        workspace=Workspace(),
                        sequence=0,
                    )
                )
            simulate(ranks)
            assert torch.equal(alone[0], results[-1][0][span.source : span.source + span.numel])


@pytest.mark.parametrize("topology", [Topology.of(2, 2), Topology.of(4, 1, 3)], ids=str)
def test_a_transport_that_cannot_be_divided_gives_the_same_bits(topology):
    """Recorded has no subsets: rows then go over its exchange, to some ranks only."""
    numel, group = 3000, Group(topology, 3000, "sign")
    transports = [Recorded(t) for t in Loopback(topology.size).transports()]
    hierarchies = [hierarchy_of(topology, t) for t in transports]
    feedbacks = [feedback_for(numel, "sign", h) for h in hierarchies]
    for step in range(3):
        xs = gradients(topology.size, numel, step)
        buffers = [x.clone() for x in xs]
        simulate(
            [
                hierarchical_allreduce(b, f, codec="sign", hierarchy=h, sequence=step)
                for b, f, h in zip(buffers, feedbacks, hierarchies, strict=True)
            ]
        )
        for result, buffer in zip(group.reduce(xs), buffers, strict=True):
            assert torch.equal(result, buffer)
    assert {op for t in transports for op in t.operations} == {"exchange"}


@pytest.mark.parametrize(
    "topology", [Topology.of(2, 2), Topology.of(4, 4, 4), Topology.of(3, 2)], ids=str
)
@pytest.mark.parametrize(("codec", "bits"), [("none", 32), (SignCodec(block=0), 1)], ids=str)
def test_bytes_between_nodes_are_those_of_the_formula(topology, codec, bits):
    """A node sends 2·(m − 1) rows of each slice: 2·(m − 1)/m · N · bits/8 in all, plus headers and
    scales."""
    nodes, slices = len(topology.nodes), topology.widest
    numel = 8 * nodes * slices * 512
    group = Group(topology, numel, codec)
    group.reduce(gradients(topology.size, numel, 1))
    row = HEADER + numel // (nodes * slices) * bits // 8 + (8 if bits == 1 else 0)
    for node in topology.nodes:
        sent = sum(group.between_bytes[r] for r in node)
        assert sent == slices * 2 * (nodes - 1) * row
        assert (
            sent
            < 2 * (nodes - 1) / nodes * numel * bits / 8
            + slices * 2 * (nodes - 1) * (HEADER + 8)
            + 1
        )


def test_a_smaller_node_shares_its_slices_out():
    topology = Topology.of(5, 2, 1)
    assert [owners(topology, i) for i in range(5)] == [
        [0, 5, 7],
        [1, 5, 7],
        [2, 5, 7],
        [3, 6, 7],
        [4, 6, 7],
    ]
    assert [sorted(h.between) for h in Group(topology, 1, "none").hierarchies] == [
        [0],
        [1],
        [2],
        [3],
        [4],
        [0, 1, 2],
        [3, 4],
        [0, 1, 2, 3, 4],
    ]


@pytest.mark.parametrize(
    "topology", [Topology.of(2, 2), Topology.of(3, 1), Topology.of(5, 3)], ids=str
)
@pytest.mark.parametrize("codec", ["sign", "none", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 1, 999])
def test_one_bad_number_is_seen_by_all_and_poisons_nothing(topology, codec, bad, where):
    numel, group = 1000, Group(topology, 1000, codec)
    group.reduce(gradients(topology.size, numel, 1))
    before = group.total_residual()
    poisoned = gradients(topology.size, numel, 2)
    poisoned[-1][where] = bad
    results = group.reduce(poisoned)
    assert group.finite == [False] * topology.size
    for result, x in zip(results, poisoned, strict=True):
        assert torch.equal(result.nan_to_num(1, 2, 3), x.nan_to_num(1, 2, 3)), "buffer changed"
    np.testing.assert_array_equal(group.total_residual(), before)
    assert torch.isfinite(group.reduce(gradients(topology.size, numel, 3))[0]).all()
    assert all(group.finite)


def test_a_sum_that_overflows_is_seen_by_all():
    xs = [torch.full((1000,), 3e38) for _ in range(5)]
    group = Group(Topology.of(3, 2), 1000, "none")
    group.reduce(xs)
    assert group.finite == [False] * 5


def test_another_codec_on_one_rank_is_named():
    topology = Topology.of(2, 2)
    ranks = [
        hierarchical_allreduce(
            torch.ones(100), codec="int8" if r == 3 else "sign", hierarchy=hierarchy_of(topology, t)
        )
        for r, t in enumerate(Loopback(4).transports())
    ]
    with pytest.raises(Mismatch, match="int8"):
        simulate(ranks)


def test_a_topology_of_another_size_is_refused():
    with pytest.raises(InvalidArgument, match="has 3 ranks, the transport has 4"):
        hierarchy_of(Topology.of(2, 1), Loopback(4).transport(0))


def test_width_of_a_row_is_that_of_the_flat_message():
    h = hierarchy_of(Topology.of(3, 2), Loopback(5).transport(0))
    (route,) = routes([Span("", 0, 1000)], two_level.policy_of("sign"), h)
    assert route.message.pieces.table[0, WIDTH] == width_of(1000, 6)
    assert route.inside.table[0, SOURCE] == 0
