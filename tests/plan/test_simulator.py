"""The simulator against the real collectives (bytes) and closed forms (seconds)."""

import inspect
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import policy_of
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.frame import HEADER
from commpress.collectives.levels import Levels
from commpress.collectives.measured_links import FIRST, Link, Links, Stack
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.two_level import hierarchy_of
from commpress.kernels.cpu import low_rank, row_codec
from commpress.plan import ring
from commpress.plan.clock import Clock, Cores, TokenBucket
from commpress.plan.cluster import Cluster, Node, measured_cluster
from commpress.plan.costs import Cost, Costs, SizedKernels, device_costs
from commpress.plan.model import Model, Shape, bucket_of, transformer
from commpress.plan.simulator import Job, Training, simulate_calls
from commpress.plan.ways import Scenario, simulate_buckets, simulate_buffer
from commpress.units import parse_link, parse_nodes

FREE = Costs({0: Cost(0.0, 0.0, 0.0)}, 0.0, 0.0, 0.0)  # arithmetic that takes no time
SLOW = Costs({0: Cost(1e-6, 0.0, 0.0)}, 0.0, 0.0, 0.0)  # a microsecond for each element encoded
COSTS = device_costs(1e11)
NUMEL = 100_003
MATRICES = [Shape("a", (64, 48)), Shape("b", (96, 64)), Shape("c", (100,))]


def of(nodes, ranks, nic=1e8, **options):
    late = {"latency": 1e-3, "inside_latency": 1e-4} | options
    return Cluster(Node(ranks, nic, inside=1e9), nodes, **late)


def seconds(shape, way="int8", numel=NUMEL, costs=FREE):
    return simulate_buffer(shape, costs, way, numel).seconds


# ------------------------------------------------ bytes: those of the real collective, on real data


@pytest.mark.parametrize(
    ("nodes", "ranks", "codec", "layered"),
    [
        (2, 1, "none", False),
        (3, 1, "sign", False),
        (8, 1, "int4", False),
        (3, 1, "topk-64", False),
        (2, 1, "bits3", False),
        (4, 1, "powersgd-2", False),
        (4, 1, "powersgd-2+fp8", False),
        (2, 2, "int8", True),
        (3, 2, "int8", True),
        (2, 4, "powersgd-2", True),
    ],
)
def test_bytes_are_those_of_the_real_collectives(compiled, nodes, ranks, codec, layered):
    shape, shapes = of(nodes, ranks), MATRICES if "power" in codec else [Shape("x", (NUMEL,))]
    bucket, channels, steps = bucket_of(shapes), [], []
    for transport in Loopback(shape.size).transports():
        channel = Channel(transport)
        if layered:
            channel.levels = Levels(hierarchy_of(shape.topology, transport))
        exchange = Exchanges(
            policy_of(codec, min_numel=256),
            shape.size,
            channel.workspace,
            levels=channel.levels,
        ).of((bucket,), bucket.tensors, torch.device("cpu"))
        channels.append(channel)
        steps.append(exchange.steps(channel, torch.randn(bucket.numel), channel.call(0)))
    simulate(steps)
    model, training = Model(tuple(reversed(shapes))), Training(0.0, 1.0, 0.0, (1.0,))
    assert [each.spans for each in model.buckets()] == [bucket.spans]
    found = simulate_buckets(shape, COSTS, codec, [bucket], training, layered=layered)
    sent, levels = channels[0].transport.sent_bytes, channels[0].levels
    assert found.traffic.nbytes == sent + (levels.sent_bytes if layered else 0)
    assert found.traffic.between == (levels.between_bytes if layered else sent)


# ---------------------------------------------------------------- seconds: closed forms


@settings(max_examples=20, deadline=None)
@given(size=st.integers(2, 9), numel=st.integers(10_000, 50_000))
def test_two_exchanges_take_two_latencies_and_their_bytes(size, numel):
    found = simulate_buffer(of(size, 1, nic=1e7), FREE, "int8", numel)
    assert found.seconds == pytest.approx(2e-3 + found.traffic.nbytes / 1e7, rel=1e-6)


def test_a_ring_takes_its_bytes_and_hides_latencies_behind_them(monkeypatch):
    """Two parts are under way: while one waits, the other passes the line; only the last of each
    half waits in vain. Few turns that stand for all take as long."""
    found = simulate_buffer(of(4, 1, nic=1e7), FREE, "plain", 10**6)
    assert found.seconds == pytest.approx(2e-3 + 6 * 10**6 / 1e7, rel=1e-6)
    assert found.traffic.nbytes == 6 * 10**6
    assert found.traffic.messages == 2 * 3 * 2
    assert seconds(of(4, 1, nic=1e15), "plain", 64) == pytest.approx(6e-3, rel=1e-6)
    nodes = simulate_buffer(of(3, 2), FREE, "plain", 10**6).traffic
    assert nodes.nbytes == pytest.approx(2 * 5 / 6 * 4 * 10**6)
    assert nodes.between == pytest.approx(nodes.nbytes / 2), "one rank of a node sends abroad"
    for nic in (1e7, 1e15):
        shape = of(16, 1, nic=nic, message_seconds=1e-4)
        exact = simulate_buffer(shape, FREE, "plain", 10**6)
        with monkeypatch.context() as few:
            few.setattr(ring, "POSTS", 8)
            coarse = simulate_buffer(shape, FREE, "plain", 10**6)
        assert coarse.traffic == exact.traffic
        assert coarse.seconds == pytest.approx(exact.seconds, rel=0.06)


def test_ranks_of_a_node_share_its_link():
    lone, shared = (simulate_buffer(of(4 // r, r, nic=1e7), FREE, "int8", NUMEL) for r in (1, 2))
    # two of three peers are outside
    assert shared.traffic.between == pytest.approx(lone.traffic.between * 2 / 3, rel=1e-3)
    assert shared.seconds - 2e-3 == pytest.approx(2 * (lone.seconds - 2e-3) * 2 / 3, rel=1e-2)


def test_cores_of_one_machine_are_shared():
    alone, shared = (
        seconds(of(4, 1, nic=1e15, latency=0.0, machine_cores=cores), "sign", costs=SLOW)
        for cores in (0, 2)
    )
    assert shared == pytest.approx(2 * alone, rel=1e-6)


def test_backward_hides_what_it_can():
    model = transformer(300_000)
    fast, slow = (
        Scenario(of(4, 1, nic=nic), FREE, model, 0.3, bucket_mb=0.5).step("plain")
        for nic in (1e9, 1e6)
    )
    assert fast.compute_seconds == slow.compute_seconds == pytest.approx(0.3)
    assert fast.exposed_seconds < 0.02
    # part of it lies below the backward
    assert slow.seconds > slow.traffic.nbytes / 1e6 > slow.exposed_seconds > 1


def test_thousands_of_ranks_take_seconds():
    shape = Cluster(Node(8, 1e10, 1e11), 512, latency=5e-6)
    found = simulate_buffer(shape, COSTS, "sign", 1 << 20)
    assert found.ranks == 4096
    assert found.traffic.messages == 2 * 4095  # rows are short: header and payload in one message


# ---------------------------------------------------------------- what was probed


WIRE = Link(1e-9, 1e15, 1e15)  # takes no time


def probed(ranks, stack, wire=WIRE):
    return measured_cluster(Links(Topology.of(*[1] * ranks), None, wire, stack))


def one_exchange(shape, row, costs=FREE):
    """Seconds of an exchange of rows of so many bytes, with no collective around it."""

    def build(transport, workspace, buffer):
        rows = torch.zeros(2, transport.size, row, dtype=torch.uint8)
        return [Job(iter([transport.all_to_all(rows[0], rows[1], 0)]))]

    return simulate_calls(replace(shape, post_seconds=0.0), costs, build, 64).seconds


@pytest.mark.parametrize(("ranks", "cores"), [(2, 0), (4, 2)])
def test_what_was_probed_comes_out_again(ranks, cores):
    """The shortest exchange and the shortest all-reduces take what they took when they were
    measured."""
    stack = Stack(exchange=2e-3, message=1e-4, byte=1e-10, ring=1.2e-3, cores=cores, reduce=6e-3)
    machines = probed(ranks, stack, Link(1e-3, 1e8, 1e8))
    assert machines.machine_cores == cores
    assert one_exchange(machines, HEADER + 8, COSTS) == pytest.approx(2e-3, rel=0.01)
    for way, took in (("plain", 1.2e-3), ("none", 6e-3)):
        assert seconds(machines, way, 64, COSTS) == pytest.approx(took, rel=0.02)


# the third leaves no core idle
@pytest.mark.parametrize(
    ("ranks", "cores", "message"), [(2, 2, 2e-4), (4, 2, 1e-4), (4, 2, 3e-4), (8, 2, 1e-4)]
)
def test_rings_and_all_reduces_that_were_probed_with_their_cores_come_out_again(
    ranks, cores, message
):
    shared = max(ranks / cores, 1)
    took = 1.05 * 4 * (ranks - 1) * message * shared
    stack = Stack(
        2e-3, 1e-4, 1e-10, took, cores, reduce=6e-3, ring_message=message, reduce_core=3e-3
    )
    machines = probed(ranks, stack, Link(1e-3, 1e8, 1e8))
    assert seconds(machines, "plain", 64) == pytest.approx(took, rel=0.01)
    least = 2 * machines.latency + 3e-3 * shared
    assert seconds(machines, "none", 64, COSTS) == pytest.approx(least, rel=0.02)


def test_links_without_a_stack_have_their_latency_and_no_cores():
    wire = Link(1e-3, 1e8, 1e8)
    old = measured_cluster(Links(Topology.of(2, 2), wire, wire))
    assert (old.latency, old.machine_cores, old.message_seconds) == (5e-4, 0, 0)


def test_bytes_cost_the_processor_time_that_was_probed():
    """Two ranks share one core: every byte of a ring, both ends and the sum; of rows the first
    bytes, and the others."""
    stack = Stack(0.0, 0.0, 1e-7, 0.0, 1, ring_byte=2e-9, half_byte=3e-9)
    for way, byte, size in (("plain", 2e-9, 4), ("bf16-ring", 3e-9, 2)):
        took = seconds(probed(2, stack), way, 1 << 20)
        assert took == pytest.approx(2 * size * (1 << 20) * byte, rel=0.01)
    machines = probed(2, Stack(0.0, 0.0, 1e-9, 0.0, 1, first=1e-2))
    for row in (FIRST // 2, FIRST, 1 << 20):
        least = 1e-2 * min(row / FIRST, 1) + max(row - FIRST, 0) * 1e-9
        assert one_exchange(machines, row) == pytest.approx(2 * 2 * least, rel=0.01)


def test_cores_that_all_share_are_not_taken_for_a_slow_link():
    """All at once are slower than a pair: on one machine because of cores, which count apart."""
    for cores, rate in ((2, 9e8), (0, 4e8)):
        machines = probed(2, Stack(1e-4, 0.0, 1e-9, 1e-4, cores), Link(1e-4, 9e8, 4e8))
        assert machines.node.nic == rate


def test_a_rank_that_wakes_up_among_busy_ones_does_so_late():
    training, bucket = Training(0.0, 1.0, 0.0, (0.1, 0.9)), bucket_of([Shape("x", (10_000,))])
    for cores, late in ((8, False), (3, True)):  # a core for each that computes, and one more
        usual, busy = (
            simulate_buckets(
                of(3, 1, nic=1e15, machine_cores=cores, busy_latency=wait),
                FREE, "sign", [bucket, bucket], training,
            ).seconds
            for wait in (0.0, 5.0)
        )  # fmt: skip
        assert (busy > usual + 4) == late


def test_what_a_shaper_lets_pass_at_once_shortens_short_calls():
    nic = 1e7
    shapes = [Cluster(Node(1, nic, burst=burst), 4, latency=1e-4) for burst in (0, 14_000)]
    for way in ("sign", "none"):
        usual, soon = (seconds(shape, way, 1 << 18) for shape in shapes)
        assert 0 < usual - soon <= 2 * 14_000 / nic + 1e-9


def test_kernels_wait_for_the_last_rank_where_cores_are_shared_unevenly():
    """Half as long again until the last is done; not while every core has something else to do as
    well."""
    wire, stack = Link(1e-4, 1e15, 1e15), Stack(0.0, 0.0, 0.0, 0.0, 2, uneven=1.5)
    for ranks in (2, 4):
        fair, uneven = (
            seconds(probed(ranks, replace(stack, uneven=u), wire), "sign", 10_000, SLOW)
            for u in (0.0, 1.5)
        )
        assert uneven == pytest.approx(1.5 * fair, rel=0.01)
    # the first bucket is full at once, the second when backward ends
    training = Training(0.0, 1.0, 0.0, (0.0, 1.0))
    buckets = [bucket_of([Shape(str(n), (n,))]) for n in (10_000, 8)]
    while_computing, fair = (
        simulate_buckets(
            replace(probed(4, stack, wire), uneven=u), SLOW, "sign", buckets, training, min_numel=0
        ).seconds
        for u in (1.5, 1.0)
    )
    assert while_computing == pytest.approx(fair, rel=0.01)


# ---------------------------------------------------------------- parts


def test_a_line_carries_in_order_and_cores_are_shared_fairly():
    clock = Clock()
    line, cores, ended = TokenBucket(clock, 10.0), Cores(clock, 2.0), []
    assert [line.carry(5), line.carry(10)] == [0.5, 1.5]
    for took, threads in ((1.0, 1.0), (2.0, 3.0)):
        cores.work(took, threads).then(lambda took=took: ended.append((took, clock.now)))
    clock.run()
    # at half speed until the first has had its second, then three threads on two cores
    assert ended == [(1.0, pytest.approx(2.0)), (2.0, pytest.approx(3.5))]


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
    for first in range(len(sends)):
        for last in range(first, len(sends)):
            sent = sum(nbytes for _, nbytes in sends[first : last + 1])
            assert ended[last] - start[first] >= max((sent - burst) / rate - 1e-9, 0)
    if len(sends) == 1:
        assert ended[0] == pytest.approx(start[0] + max(sends[0][1] - burst, 0) / rate)


def test_links_and_nodes_as_a_person_types_them():
    assert parse_link("12GB/s,5us") == pytest.approx((12e9, 5e-6))
    assert parse_link("1gbit")[0] == pytest.approx(1e9 / 8 * 1448 / 1538)
    assert parse_nodes(" 8x4") == (8, 4)


def test_a_model_of_a_count_has_about_that_many_parameters():
    for count in (10**6, 11 * 10**7, 34 * 10**7, 13 * 10**9):
        model = transformer(count)
        assert 0.95 * count < model.numel <= count
        assert sum(b.numel for b in model.buckets()) == model.numel
        assert sum(model.shares()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("kernels", "names"),
    [
        (row_codec, "encode serve decode decode_mean settle"),
        (low_rank, "project fold expand orthonormalize_left orthonormalize_right"),
    ],
)
def test_simulated_kernels_take_the_arguments_of_real_ones(kernels, names):
    for name in names.split():
        real = inspect.signature(getattr(kernels, name)).parameters.values()
        named = [p.name for p in real if p.kind is p.KEYWORD_ONLY]
        simulated = inspect.signature(getattr(SizedKernels, name))
        simulated.bind(None, *[None] * (len(real) - len(named)), **dict.fromkeys(named))
