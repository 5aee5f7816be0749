"""The simulator against the real collectives (bytes), closed forms (seconds) and itself (one rank
for many)."""

import inspect
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import policy_of
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.collectives.allreduce import Workspace, reduce_bucket
from commpress.collectives.buckets import Span, messages
from commpress.collectives.frame import HEADER
from commpress.collectives.links import FIRST, Link, Links, Stack
from commpress.collectives.powersgd import RowsOnly, matrices_of, plan_matrices, reduce_matrices
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.collectives.two_level import Hierarchy, hierarchy_of, reduce_routes, routes
from commpress.kernels.cpu import low_rank, row_codec
from commpress.plan import ring
from commpress.plan.clock import Clock, Cores, TokenBucket
from commpress.plan.cluster import Cluster, Node, measured_cluster
from commpress.plan.costs import Cost, Costs, SizedKernels, device_costs
from commpress.plan.model import Model, ModelBucket, Shape, transformer
from commpress.plan.simulator import Training, simulate_calls, simulate_step
from commpress.plan.ways import buckets_by, buffer_by, step_by, widest
from commpress.units import parse_link, parse_nodes

FREE = Costs({0: Cost(0.0, 0.0, 0.0)}, 0.0, 0.0, 0.0)  # arithmetic that takes no time
COSTS = device_costs(1e11)
NUMEL = 100_003


def cluster(*kinds, **options):
    return Cluster(tuple(kinds), **({"latency": 1e-3, "inside_latency": 1e-4} | options))


def of(nodes, ranks, nic=1e8, **options):
    return cluster((Node(ranks, nic, inside=1e9), nodes), **options)


# ------------------------------------------------ bytes: those of the real collective, on real data


@pytest.mark.parametrize("codec", ["none", "sign", "int4", "topk-64", "bits3"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_bytes_are_those_of_the_real_all_reduce(compiled, size, codec):
    transports = [Recorded(t) for t in Loopback(size).transports()]
    cut = messages([Span("x", 0, NUMEL)], policy_of(codec), size, feedback=False)
    simulate(
        [
            reduce_bucket(
                torch.ones(NUMEL),
                [None] * len(cut),
                messages=cut,
                transport=t,
                workspace=Workspace(),
                sequence=0,
            )
            for t in transports
        ]
    )
    found = simulate_calls(of(size, 1), COSTS, buffer_by(codec, NUMEL, COSTS), NUMEL)
    assert found.traffic.nbytes == transports[0].sent_bytes
    assert found.traffic.between == found.traffic.nbytes


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (3, 2), (2, 4)])
def test_bytes_are_those_of_the_real_hierarchy(compiled, nodes, ranks):
    shape = of(nodes, ranks)
    hierarchies = [hierarchy_of(shape.topology, t) for t in Loopback(shape.size).transports()]
    inside = [Recorded(h.inside) for h in hierarchies]
    between = [{i: Recorded(t) for i, t in h.between.items()} for h in hierarchies]
    steps = []
    for h, a, b in zip(hierarchies, inside, between, strict=True):
        own = Hierarchy(h.topology, a, b)
        plan = routes([Span("x", 0, NUMEL)], policy_of("int8"), own, feedback=False)
        steps.append(
            reduce_routes(
                torch.ones(NUMEL),
                [{}] * len(plan),
                plan=plan,
                hierarchy=own,
                workspace=Workspace(),
                sequence=0,
            )
        )
    simulate(steps)
    found = simulate_calls(shape, COSTS, buffer_by("int8", NUMEL, COSTS, layered=True), NUMEL)
    crossing = sum(t.sent_bytes for t in between[0].values())
    assert found.traffic.between == crossing
    assert found.traffic.nbytes == crossing + inside[0].sent_bytes


def test_bytes_are_those_of_real_low_rank(compiled):
    shapes = [("a", (64, 48)), ("b", (96, 64)), ("c", (100,))]
    model = Model(tuple(Shape(name, sizes) for name, sizes in shapes))
    (bucket,) = model.buckets()
    policy = policy_of(LowRankCodec(2))
    matrices = matrices_of(bucket.spans, bucket.shapes, policy)
    transports = [Recorded(t) for t in Loopback(4).transports()]
    steps = []
    for t in transports:
        plan = plan_matrices(matrices, 4, {}, device=torch.device("cpu"))
        steps.append(
            reduce_matrices(
                torch.randn(bucket.numel),
                None,
                plan=plan,
                transport=t,
                workspace=Workspace(),
                sequence=1,
            )
        )
    simulate(steps)
    rest = recorded_rest(bucket, {span.name for span, _ in matrices}, policy)
    found = simulate_calls(
        of(4, 1), COSTS, buckets_by("powersgd-2", [bucket], COSTS, min_numel=0), bucket.numel
    )
    assert found.traffic.nbytes == transports[0].sent_bytes + rest


def recorded_rest(bucket: ModelBucket, taken, policy):
    transports = [Recorded(t) for t in Loopback(4).transports()]
    cut = messages([s for s in bucket.spans if s.name not in taken], RowsOnly(policy), 4)
    simulate(
        [
            reduce_bucket(
                torch.ones(bucket.numel),
                [None] * len(cut),
                messages=cut,
                transport=t,
                workspace=Workspace(),
                sequence=0,
            )
            for t in transports
        ]
    )
    return transports[0].sent_bytes


# ---------------------------------------------------------------- one rank for many
# Note: posts on a line. Ranks that share a link are served one after the other if each is
# simulated, so the first may go on while the others wait; as one class they all end together, as
# with connections that share a link fairly.


@pytest.mark.parametrize("way", ["plain", "sign", "int8"])
@pytest.mark.parametrize(
    "shape",
    [
        of(4, 1),
        of(3, 2),
        of(2, 4, oversubscription=2.0, rack=1),
        cluster((Node(2, 1e8, 1e9), 3), (Node(2, 5e7, 1e9), 1)),
        cluster((Node(2, 1e8, 1e9, slowdown=3.0), 1), (Node(2, 1e8, 1e9), 2)),
    ],
    ids=["flat", "nodes", "racks", "slow NIC", "straggler"],
)
def test_one_rank_of_a_class_stands_for_all(shape, way):
    if (way == "plain" and len(set(shape.kinds)) > 1) or (
        way == "plain" and shape.topology.layered
    ):
        pytest.skip("a ring counts the mean of a node's ranks, and the ends of a kind")
    build = buffer_by(way, NUMEL, COSTS)
    one, every = (
        simulate_calls(shape, COSTS, build, NUMEL, alike=alike) for alike in (True, False)
    )
    assert one.classes < every.classes == shape.size
    assert one.traffic == every.traffic
    assert 0.98 * every.seconds < one.seconds < 1.15 * every.seconds  # Note: posts on a line


def test_one_rank_of_a_class_stands_for_all_in_two_levels():
    build = buffer_by("int8", NUMEL, COSTS, layered=True)
    for shape in (of(3, 2), cluster((Node(4, 1e8, 1e9), 2), (Node(2, 1e8, 1e9), 1))):
        one, every = (
            simulate_calls(shape, COSTS, build, NUMEL, alike=alike) for alike in (True, False)
        )
        assert one.traffic.between == every.traffic.between
        assert 0.98 * every.seconds < one.seconds < 1.2 * every.seconds


# ---------------------------------------------------------------- seconds: closed forms


@settings(max_examples=20, deadline=None)
@given(size=st.integers(2, 9), numel=st.integers(10_000, 50_000))
def test_two_exchanges_take_two_latencies_and_their_bytes(size, numel):
    found = simulate_calls(of(size, 1, nic=1e7), FREE, buffer_by("int8", numel, FREE), numel)
    assert found.seconds == pytest.approx(2e-3 + found.traffic.nbytes / 1e7, rel=1e-6)


def test_a_ring_takes_its_bytes_and_hides_latencies_behind_them():
    """Two parts are under way: while one waits, the other passes the line; only the last of each
    half waits in vain."""
    found = simulate_calls(of(4, 1, nic=1e7), FREE, buffer_by("plain", 10**6, FREE), 10**6)
    assert found.seconds == pytest.approx(2e-3 + 6 * 10**6 / 1e7, rel=1e-6)
    assert found.traffic.nbytes == 6 * 10**6
    assert found.traffic.messages == 2 * 3 * 2
    short = simulate_calls(of(4, 1, nic=1e15), FREE, buffer_by("plain", 64, FREE), 64)
    assert short.seconds == pytest.approx(6e-3, rel=1e-6)


def test_a_long_ring_of_few_turns_takes_as_long_as_one_of_all_its_parts(monkeypatch):
    for nic in (1e7, 1e15):
        shape = of(16, 1, nic=nic, message_seconds=1e-4)
        exact = simulate_calls(shape, FREE, buffer_by("plain", 10**6, FREE), 10**6)
        monkeypatch.setattr(ring, "POSTS", 8)
        coarse = simulate_calls(shape, FREE, buffer_by("plain", 10**6, FREE), 10**6)
        monkeypatch.undo()
        assert coarse.traffic == exact.traffic
        assert coarse.seconds == pytest.approx(exact.seconds, rel=0.06)


def test_ranks_of_a_node_share_its_link():
    lone, shared = (
        simulate_calls(of(4 // r, r, nic=1e7), FREE, buffer_by("int8", NUMEL, FREE), NUMEL)
        for r in (1, 2)
    )
    # two of three peers are outside
    assert shared.traffic.between == pytest.approx(lone.traffic.between * 2 / 3, rel=1e-3)
    assert shared.seconds - 2e-3 == pytest.approx(2 * (lone.seconds - 2e-3) * 2 / 3, rel=1e-2)


def test_an_oversubscribed_uplink_slows_what_crosses_it():
    build = buffer_by("int8", NUMEL, FREE)
    full, half = (
        simulate_calls(of(4, 1, nic=1e7, rack=2, oversubscription=f), FREE, build, NUMEL).seconds
        for f in (1.0, 3.0)
    )
    # of three peers two are beyond the switch: their bytes pass at a third of the rate
    assert (half - 2e-3) / (full - 2e-3) == pytest.approx(2, rel=0.01)


def test_nodes_of_another_kind_are_reached_at_the_slower_rate():
    build = buffer_by("int8", NUMEL, FREE)
    kinds = [(Node(1, 1e8), 2), (Node(1, 1e8), 2)]
    same = simulate_calls(cluster(*kinds), FREE, build, NUMEL).seconds
    foreign = [(replace(node, foreign=1e7), count) for node, count in kinds]
    assert simulate_calls(cluster(*foreign), FREE, build, NUMEL).seconds > 5 * (same - 2e-3)


def test_cores_of_one_machine_are_shared():
    slow = Costs({0: Cost(1e-6, 0.0, 0.0)}, 0.0, 0.0, 0.0)
    build = buffer_by("sign", NUMEL, slow)
    alone = simulate_calls(of(4, 1, nic=1e15, latency=0.0), slow, build, NUMEL).seconds
    shared = simulate_calls(
        of(4, 1, nic=1e15, latency=0.0, machine_cores=2), slow, build, NUMEL
    ).seconds
    assert shared == pytest.approx(2 * alone, rel=1e-6)


def test_a_straggler_holds_up_everybody():
    model, training = (
        transformer(300_000),
        Training(0.1, 0.2, 0.01, transformer(300_000).shares(0.5)),
    )
    build = step_by("sign", model, FREE, bucket_mb=0.5)
    most = widest(model.buckets(0.5))
    usual = simulate_step(of(4, 1), FREE, build, most, training)
    slow = cluster((Node(1, 1e8, slowdown=2.0), 1), (Node(1, 1e8), 3))
    held = simulate_step(slow, FREE, build, most, training)
    assert held.seconds == pytest.approx(usual.seconds + 0.3 + 0.01, abs=0.01)
    assert held.compute_seconds == pytest.approx(0.62)


def test_backward_hides_what_it_can():
    model = transformer(300_000)
    training = Training(0.1, 0.2, 0.0, model.shares(0.5))
    build, most = step_by("plain", model, FREE, bucket_mb=0.5), widest(model.buckets(0.5))
    fast, slow = (
        simulate_step(of(4, 1, nic=nic), FREE, build, most, training) for nic in (1e9, 1e6)
    )
    assert fast.compute_seconds == slow.compute_seconds == pytest.approx(0.3)
    assert fast.exposed_seconds < 0.02
    # part of it lies below the backward
    assert slow.seconds > slow.traffic.nbytes / 1e6 > slow.exposed_seconds > 1


def test_thousands_of_ranks_take_seconds():
    shape = cluster((Node(8, 1e10, 1e11), 512), latency=5e-6)
    found = simulate_calls(shape, COSTS, buffer_by("sign", 1 << 20, COSTS), 1 << 20)
    assert found.ranks == 4096
    assert found.traffic.messages == 2 * 4095  # rows are short: header and payload in one message


# ---------------------------------------------------------------- parts


def test_a_line_carries_in_order_and_cores_are_shared_fairly():
    clock = Clock()
    line, cores, ended = TokenBucket(clock, 10.0), Cores(clock, 2.0), []
    assert [line.carry(5), line.carry(10)] == [0.5, 1.5]
    for seconds, threads in ((1.0, 1.0), (2.0, 3.0)):
        cores.work(seconds, threads).then(
            lambda seconds=seconds: ended.append((seconds, clock.now))
        )
    clock.run()
    # at half speed until the first has had its second, then three threads on two cores
    assert ended == [(1.0, pytest.approx(2.0)), (2.0, pytest.approx(3.5))]


def test_links_and_nodes_as_a_person_types_them():
    assert parse_link("12GB/s,5us") == pytest.approx((12e9, 5e-6))
    assert parse_link("1gbit")[0] == pytest.approx(1e9 / 8 * 1448 / 1538)
    assert parse_nodes("8x4, 2x1") == [(8, 4), (2, 1)]


def test_a_model_of_a_count_has_about_that_many_parameters():
    for count in (10**6, 11 * 10**7, 34 * 10**7, 13 * 10**9):
        model = transformer(count)
        assert 0.95 * count < model.numel <= count
        assert sum(b.numel for b in model.buckets()) == model.numel
        assert sum(model.shares()) == pytest.approx(1)


def test_what_was_probed_comes_out_again():
    """The shortest exchange and the library's shortest all-reduce take what they took when they
    were measured."""
    wire = Link(1e-3, 1e8, 1e8)
    for ranks, cores in ((2, 0), (4, 2)):
        stack = Stack(
            exchange=2e-3, message=1e-4, byte=1e-10, ring=1.2e-3, cores=cores, reduce=6e-3
        )
        machines = measured_cluster(Links(Topology.of(*[1] * ranks), None, wire, stack))
        assert machines.machine_cores == cores

        def exchange(transport, workspace, buffer):
            rows = torch.zeros(2, transport.size, HEADER + 8, dtype=torch.uint8)
            return [iter([transport.all_to_all(rows[0], rows[1], 0)])]

        bare = replace(machines, post_seconds=0.0)  # no collective around it
        assert simulate_calls(bare, COSTS, exchange, 64).seconds == pytest.approx(2e-3, rel=0.01)
        for way, seconds in (("plain", 1.2e-3), ("none", 6e-3)):
            least = simulate_calls(machines, COSTS, buffer_by(way, 64, COSTS), 64).seconds
            assert least == pytest.approx(seconds, rel=0.02)
    # the third leaves no core idle
    for ranks, cores, message in ((2, 2, 2e-4), (4, 2, 1e-4), (4, 2, 3e-4), (8, 2, 1e-4)):
        seconds = 1.05 * 4 * (ranks - 1) * message * max(ranks / cores, 1)
        stack = Stack(
            2e-3, 1e-4, 1e-10, seconds, cores, reduce=6e-3, ring_message=message, reduce_core=3e-3
        )
        machines = measured_cluster(Links(Topology.of(*[1] * ranks), None, wire, stack))
        assert simulate_calls(
            machines, FREE, buffer_by("plain", 64, FREE), 64
        ).seconds == pytest.approx(seconds, rel=0.01)
        least = simulate_calls(machines, COSTS, buffer_by("none", 64, COSTS), 64).seconds
        assert least == pytest.approx(2 * machines.latency + 3e-3 * max(ranks / cores, 1), rel=0.02)
    old = measured_cluster(Links(Topology.of(2, 2), wire, wire))
    assert (old.latency, old.machine_cores, old.message_seconds) == (5e-4, 0, 0)


def test_the_librarys_ring_costs_the_processor_time_that_was_probed():
    """Of one core for two ranks: every byte that either sends, both ends and the sum."""
    wire, numel = Link(1e-9, 1e15, 1e15), 1 << 20
    stack = Stack(
        exchange=0.0, message=0.0, byte=1e-7, ring=0.0, cores=1, ring_byte=2e-9, half_byte=3e-9
    )
    machines = measured_cluster(Links(Topology.of(1, 1), None, wire, stack))
    for way, byte, size in (("plain", 2e-9, 4), ("bf16-ring", 3e-9, 2)):
        found = simulate_calls(machines, FREE, buffer_by(way, numel, FREE), numel)
        assert found.seconds == pytest.approx(2 * size * numel * byte, rel=0.01)


def test_the_first_bytes_of_a_message_cost_what_was_probed():
    """Of one core for two ranks that send each other a row: twice, both ends."""
    wire, numel = Link(1e-9, 1e15, 1e15), 1 << 20
    stack = Stack(exchange=0.0, message=0.0, byte=1e-9, ring=0.0, cores=1, first=1e-2)
    machines = replace(
        measured_cluster(Links(Topology.of(1, 1), None, wire, stack)), post_seconds=0.0
    )
    for row, seconds in (
        (FIRST // 2, 5e-3),
        (FIRST, 1e-2),
        (1 << 20, 1e-2 + ((1 << 20) - FIRST) * 1e-9),
    ):

        def exchange(transport, workspace, buffer, row=row):
            rows = torch.zeros(2, transport.size, row, dtype=torch.uint8)
            return [iter([transport.all_to_all(rows[0], rows[1], 0)])]

        assert simulate_calls(machines, FREE, exchange, numel).seconds == pytest.approx(
            2 * 2 * seconds, rel=0.01
        )


def test_cores_that_all_share_are_not_taken_for_a_slow_link():
    """All at once are slower than a pair: on one machine because of cores, which count apart."""
    wire, stack = Link(1e-4, 9e8, 4e8), Stack(1e-4, 0.0, 1e-9, 1e-4, 0)
    for cores, rate in ((2, 9e8), (0, 4e8)):
        links = Links(Topology.of(1, 1), None, wire, replace(stack, cores=cores))
        assert measured_cluster(links).kinds[0][0].nic == rate


def test_a_rank_that_wakes_up_among_busy_ones_does_so_late():
    slow, numel = Costs({0: Cost(1e-6, 0.0, 0.0)}, 0.0, 0.0, 0.0), 10_000
    build = buffer_by("sign", numel, slow)
    alike = of(3, 1, nic=1e15, latency=1e-3, machine_cores=2)
    straggler = cluster(
        (Node(1, 1e15, slowdown=3.0), 2), (Node(1, 1e15), 1), latency=1e-3, machine_cores=2
    )
    # two that still encode leave no core to the third
    for shape, late in ((alike, False), (straggler, True)):
        usual = simulate_calls(shape, slow, build, numel).seconds
        busy = simulate_calls(replace(shape, busy_latency=0.5), slow, build, numel).seconds
        assert (busy > usual + 0.4) == late


@settings(deadline=None)
@given(
    burst=st.integers(0, 500),
    sends=st.lists(st.tuples(st.integers(0, 10), st.integers(1, 400)), min_size=1, max_size=30),
)
def test_a_line_lets_a_burst_pass_at_once_after_a_rest(burst, sends):
    """A bucket of tokens: in any stretch no more bytes have passed than its length allows and one
    burst."""
    clock, rate = Clock(), 100.0
    line, ended, start = TokenBucket(clock, rate, burst), [], []
    for pause, nbytes in sends:
        clock.now += pause
        start.append(clock.now)
        ended.append(line.carry(nbytes))
    assert ended == sorted(ended)
    assert all(e >= s for s, e in zip(start, ended, strict=True))
    for first in range(len(sends)):
        sent = 0
        for last in range(first, len(sends)):
            sent += sends[last][1]
            assert ended[last] - start[first] >= (sent - burst) / rate - 1e-9
    assert line.carried == sum(nbytes for _, nbytes in sends)
    if len(sends) == 1:
        assert ended[0] == pytest.approx(start[0] + max(sends[0][1] - burst, 0) / rate)


def test_what_a_shaper_lets_pass_at_once_shortens_short_calls():
    numel, nic = 1 << 18, 1e7
    shape = of(4, 1, nic=nic, latency=1e-4)
    rested = replace(shape, kinds=((replace(shape.kinds[0][0], burst=14_000), 4),))
    for way, saved in (("sign", 2 * 14_000), ("none", 2 * 14_000)):
        usual, soon = (
            simulate_calls(c, FREE, buffer_by(way, numel, FREE), numel).seconds
            for c in (shape, rested)
        )
        assert 0 < usual - soon <= saved / nic + 1e-9


def test_kernels_wait_for_the_last_rank_where_cores_are_shared_unevenly():
    """Half as long again until the last is done; not while every core has something else to do as
    well."""
    slow, numel = Costs({0: Cost(1e-6, 0.0, 0.0)}, 0.0, 0.0, 0.0), 10_000
    wire, stack = Link(1e-4, 1e15, 1e15), Stack(0.0, 0.0, 0.0, 0.0, 2, uneven=1.5)
    build = buffer_by("sign", numel, slow)
    for ranks in (2, 4):
        links = Links(Topology.of(*[1] * ranks), None, wire, stack)
        fair, uneven = (
            simulate_calls(measured_cluster(replace(links, stack=s)), slow, build, numel).seconds
            for s in (replace(stack, uneven=0.0), stack)
        )
        assert uneven == pytest.approx(1.5 * fair, rel=0.01)
    # the first bucket is full at once, the second when backward ends
    training = Training(0.0, 1.0, 0.0, (0.0, 1.0))
    shape = measured_cluster(links)
    every = [ModelBucket((Span(str(i), 0, n),), ((n,),)) for i, n in enumerate((numel, 8))]
    buckets = buckets_by("sign", every, slow, min_numel=0)
    while_computing, fair = (
        simulate_step(replace(shape, uneven=u), slow, buckets, numel + 8, training).seconds
        for u in (1.5, 1.0)
    )
    assert while_computing == pytest.approx(fair, rel=0.01)


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        *((row_codec, name) for name in ("encode", "serve", "decode", "decode_mean", "settle")),
        *(
            (low_rank, name)
            for name in ("project", "fold", "expand", "orthonormalize_left", "orthonormalize_right")
        ),
    ],
)
def test_simulated_kernels_take_the_arguments_of_real_ones(kernels, name):
    real, simulated = (
        inspect.signature(getattr(kernels, name)),
        inspect.signature(getattr(SizedKernels, name)),
    )
    named = [p.name for p in real.parameters.values() if p.kind is p.KEYWORD_ONLY]
    simulated.bind(None, *[None] * (len(real.parameters) - len(named)), **dict.fromkeys(named))
