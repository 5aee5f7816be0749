"""Experts on other ranks: dispatch and combine against a walk over tokens in plain Python,
simulated and on real ranks."""

import time
from datetime import timedelta
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import commpress
from commpress.collectives.frame import HEADER
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.collectives.transports.mpi import MpiTransport
from commpress.errors import InvalidArgument, Mismatch
from commpress.integrations.experts.codec_measurement import fastest
from commpress.kernels import reference
from expert_batch import Batch, applied, through
from ranks import caught
from ways import WAYS, transport_by

PATIENT = timedelta(seconds=60)
LAYOUTS = ["flat", "expert_major"]


def simulated(batch, scales, *, topology=None, layout="expert_major", transports=None, **options):
    exchanges = [
        commpress.ExpertExchange(batch.experts, topology=topology, transport=t, **options)
        for t in transports or Loopback(batch.size).transports()
    ]
    return simulate([through(e, batch, scales, layout) for e in exchanges]), exchanges


def walked(batch, scales, nodes, owner):
    """The law: nodes in their order, in each its ranks, in each the choices in their order; float32
    from the left."""
    results = []
    for rank in range(batch.size):
        out = torch.zeros(batch.tokens[rank].shape)
        for t, token in enumerate(batch.tokens[rank].float()):
            total = torch.zeros(batch.width)
            for node in nodes:
                of_node = torch.zeros(batch.width)
                for member in node:
                    of_rank, some = torch.zeros(batch.width), False
                    for slot, expert in enumerate(batch.topk[rank][t].tolist()):
                        if expert >= 0 and owner[expert] == member:
                            of_rank, some = (
                                of_rank + scales[expert] * batch.gates[rank][t, slot] * token,
                                True,
                            )
                    if some:
                        of_node = of_node + of_rank
                total = total + of_node
            out[t] = total
        results.append(out)
    return results


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@st.composite
def nodes_of(draw, most=7):
    size = draw(st.integers(1, most))
    order = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=3)) | {0, size})
    return tuple(tuple(sorted(order[a:b])) for a, b in pairwise(cuts))


# ---------------------------------------------------------------- exact


@settings(max_examples=15, deadline=None)
@given(
    nodes=nodes_of(),
    seed=st.integers(0, 999),
    k=st.integers(1, 8),
    layout=st.sampled_from(LAYOUTS),
    pad=st.sampled_from([1, 4]),
)
def test_dispatch_and_combine_are_the_sum_in_the_order_of_nodes(nodes, seed, k, layout, pad):
    topology, size = Topology(nodes), sum(map(len, nodes))
    batch = Batch(size, 8 + seed % 5, k, seed)
    draw = np.random.default_rng(seed)
    placement = draw.integers(0, size, batch.experts).tolist()
    scales = torch.from_numpy(draw.standard_normal(batch.experts)).float()
    options = {"topology": topology, "layout": layout, "pad": pad, "placement": placement}
    found, _ = simulated(batch, scales, **options)
    assert same(found, walked(batch, scales, topology.nodes, placement))
    assert same(found, simulated(batch, scales, deduplicate=False, **options)[0])


@pytest.mark.parametrize("k", [1, 2, 8])
def test_identity_experts_on_32_ranks_give_the_sum_of_gates(k):
    batch = Batch(32, 64, k, 5, most=20)
    owner = [e // 2 for e in range(64)]
    found, _ = simulated(batch, torch.ones(64), topology="4x8")
    assert same(found, walked(batch, torch.ones(64), Topology.of(8, 8, 8, 8).nodes, owner))


def test_experts_that_change_places_change_nothing():
    """Of two terms the order does not matter; nor does a number's among those of one rank, with any
    k."""
    batch, scales = Batch(6, 12, 2, 4), torch.rand(12)
    draw = np.random.default_rng(0)
    found = [
        simulated(
            batch,
            scales,
            topology="3x2",
            placement=draw.permutation(12).__mod__(6).tolist(),
            layout=layout,
        )[0]
        for layout in LAYOUTS
        for _ in range(2)
    ]
    assert all(same(found[0], other) for other in found[1:])
    many, turned = Batch(4, 8, 6, 4), Batch(4, 8, 6, 4)
    # experts 2r and 2r + 1 are of rank r
    turned.topk = [torch.where(idx >= 0, idx ^ 1, idx) for idx in many.topk]
    scales = torch.rand(8)
    swapped = scales.view(4, 2).flip(1).reshape(-1)
    assert same(
        simulated(many, scales, topology="2x2")[0], simulated(turned, swapped, topology="2x2")[0]
    )


@pytest.mark.parametrize(
    "codecs", [("int8", "none"), ("fp8", "bf16"), ("int4", "int8"), ("bf16", "fp16")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deduplication_changes_no_bit_of_what_codecs_make(codecs, dtype):
    batch, scales = Batch(6, 12, 5, 7, width=136, dtype=dtype), torch.rand(12)
    options = {"codec": codecs[0], "combine_codec": codecs[1], "topology": "0 3|1 2 4|5"}
    on, off = (simulated(batch, scales, deduplicate=d, **options)[0] for d in (True, False))
    assert same(on, off)
    exact = simulated(batch, scales, topology=options["topology"])[0]
    error = float(
        (torch.cat(on) - torch.cat(exact)).float().norm() / torch.cat(exact).float().norm()
    )
    assert 0 < error < {"int4": 0.15}.get(codecs[0], 0.05)


# ---------------------------------------------------------------- gradients, real ranks

TOPOLOGIES = [{}, {"topology": "2,1"}, {"topology": "2,1", "deduplicate": False}]


def whole_numbers(size, k=3, experts=6):
    """A batch whose sums are exact in any order, with an upstream gradient for each token."""
    batch, draw = Batch(size, experts, k, 8, width=5), np.random.default_rng(1)
    batch.tokens = [torch.from_numpy(draw.integers(-8, 8, t.shape)).float() for t in batch.tokens]
    batch.gates = [
        torch.from_numpy(2.0 ** draw.integers(-2, 2, g.shape)).float() for g in batch.gates
    ]
    upstream = [torch.from_numpy(draw.integers(-4, 4, t.shape)).float() for t in batch.tokens]
    return batch, torch.arange(1.0, experts + 1), upstream


def trained(batch, scales, upstream, options, transport=None):
    """Outputs and gradients of tokens, gates and experts on one rank, for both layouts."""
    found = []
    exchange = commpress.ExpertExchange(batch.experts, transport=transport, **options)
    rank = exchange.channel.rank
    for layout in LAYOUTS:
        tokens, gates = (
            batch.tokens[rank].clone().requires_grad_(),
            batch.gates[rank].clone().requires_grad_(),
        )
        own = scales.clone().requires_grad_()
        routing = exchange.create_routing(batch.topk[rank], layout=layout)
        rows, weights, numbers = exchange.dispatch(routing, tokens, gates)
        out = exchange.combine(routing, applied(exchange, routing, rows, weights, numbers, own))
        out.backward(upstream[rank])
        found.append([t.detach().numpy() for t in (out, tokens.grad, gates.grad, own.grad)])
    return found, exchange.counters.as_dict()


def in_one_process(batch, scales, upstream):
    """The model where all experts are here."""
    own = scales.clone().requires_grad_()
    results = []
    for tokens, gates, topk, gradient in zip(
        batch.tokens, batch.gates, batch.topk, upstream, strict=True
    ):
        tokens, gates = tokens.clone().requires_grad_(), gates.clone().requires_grad_()
        factors = torch.where(topk >= 0, own[topk] * gates, 0)
        out = factors.sum(1, keepdim=True) * tokens
        out.backward(gradient)
        results.append([out, tokens.grad, gates.grad])
    return results, own.grad


def check_trained(every, batch, scales, upstream):
    results, of_experts = in_one_process(batch, scales, upstream)
    for layout in range(len(LAYOUTS)):
        for rank, (found, _) in enumerate(every):
            for ours, twin in zip(found[layout], results[rank], strict=False):
                np.testing.assert_array_equal(ours, twin.detach().numpy())
        np.testing.assert_array_equal(
            sum(found[layout][3] for found, _ in every), of_experts.numpy()
        )


@pytest.mark.parametrize("options", TOPOLOGIES, ids=["flat", "nodes", "without deduplication"])
def test_gradients_are_those_of_one_process(pool, options):
    batch, scales, upstream = whole_numbers(3)
    check_trained(
        pool.run(trained, batch, scales, upstream, options, size=3), batch, scales, upstream
    )


def sums_of_gates(batch, upstream):
    """Identity experts by rows of tokens, that use the gates of all choices, also of those that are
    other ranks'."""
    exchange, rank = commpress.ExpertExchange(batch.experts), dist.get_rank()
    tokens, gates = (
        batch.tokens[rank].clone().requires_grad_(),
        batch.gates[rank].clone().requires_grad_(),
    )
    routing = exchange.create_routing(batch.topk[rank], layout="flat")
    rows, weights, _ = exchange.dispatch(routing, tokens, gates)
    out = exchange.combine(routing, rows * weights.sum(1, keepdim=True))
    out.backward(upstream[rank])
    return [t.detach().numpy() for t in (out, tokens.grad, gates.grad)]


def test_gates_of_other_ranks_are_zero_and_get_no_gradient(pool):
    batch, _, upstream = whole_numbers(3)
    results, _ = in_one_process(batch, torch.ones(batch.experts), upstream)
    for found, twins in zip(pool.run(sums_of_gates, batch, upstream, size=3), results, strict=True):
        for ours, twin in zip(found, twins, strict=True):
            np.testing.assert_array_equal(ours, twin.detach().numpy())


def test_gradients_over_mpi(job):
    batch, scales, upstream = whole_numbers(3)
    check_trained(
        job.run(trained_over_mpi, batch, scales, upstream, size=3), batch, scales, upstream
    )


def trained_over_mpi(comm, batch, scales, upstream):
    transport = MpiTransport(comm, timeout=PATIENT)
    try:
        return trained(batch, scales, upstream, {"topology": "2,1"}, transport)
    finally:
        transport.close()


def real(batch, scales, options, by):
    exchange = commpress.ExpertExchange(
        batch.experts, transport=transport_by(by, PATIENT), **options
    )
    return [
        exchange.channel.run(through(exchange, batch, scales, layout)).numpy() for layout in LAYOUTS
    ]


@pytest.mark.parametrize("by", WAYS)
def test_real_ranks_equal_the_simulation(pool, by):
    batch, scales = Batch(3, 7, 4, 1, width=130, most=40), torch.rand(7)
    options = {"codec": "int8", "combine_codec": "bf16", "topology": "0 2|1"}
    for i, layout in enumerate(LAYOUTS):
        twins = simulated(batch, scales, layout=layout, **options)[0]
        for rank, found in enumerate(pool.run(real, batch, scales, options, by, size=3)):
            np.testing.assert_array_equal(found[i], twins[rank].numpy())


@pytest.mark.parametrize("codec", ["none", "int8", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_plain_sums(codec, layout):
    """They come as one number with strides of zero."""
    batch = Batch(1, 4, 2, 1, width=16)
    exchange, routing = alone(batch, layout, codec=codec)
    tokens = batch.tokens[0].clone().requires_grad_()
    exchange.dispatch(routing, tokens)[0].sum().backward()
    here = (batch.topk[0] >= 0).sum(1, keepdim=True).float()
    assert torch.equal(
        tokens.grad, (here.clamp(max=1) if layout == "flat" else here).expand(-1, 16)
    )
    rows = torch.ones(routing.handle.rows.count, 16, requires_grad=True)
    exchange.combine(routing, rows).sum().backward()
    assert torch.equal(rows.grad, torch.ones_like(rows))


def test_each_direction_has_its_codec():
    """Out and back, and gradients of both: as the reference rounds each token, 128 elements to a
    scale."""
    codecs = {
        "codec": "int8",
        "combine_codec": "int4",
        "gradient_codec": "fp8",
        "combine_gradient_codec": "bf16",
    }
    exchange = commpress.ExpertExchange(3, transport=Loopback(1).transport(0), **codecs)
    values = [torch.randn(9, 200, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def rounded(name, rows):
        if codecs[name] == "bf16":
            return rows.bfloat16().float()
        codec = commpress.BlockCodec(codecs[name], 128)
        encoded = [reference.encode_row(row.numpy(), codec.kind, 200, 128) for row in rows]
        return torch.from_numpy(
            np.stack([reference.decode_row(row, codec.kind, 200, 200, 128) for row in encoded])
        )

    routing = exchange.create_routing(torch.arange(9).remainder(3)[:, None], layout="flat")
    tokens, made = values[0].clone().requires_grad_(), values[1].clone().requires_grad_()
    rows, *_ = exchange.dispatch(routing, tokens)
    out = exchange.combine(routing, made)
    rows.backward(values[2])
    out.backward(values[3])
    assert torch.equal(rows, rounded("codec", values[0]))
    assert torch.equal(out, rounded("combine_codec", values[1]))
    assert torch.equal(tokens.grad, rounded("combine_gradient_codec", values[2]))
    assert torch.equal(made.grad, rounded("gradient_codec", values[3]))


def on_nodes_of_the_launcher():
    batch, rank = Batch(2, 4, 2, 1), dist.get_rank()
    exchange = commpress.ExpertExchange(4, topology="auto")
    with torch.no_grad():
        out = exchange(
            batch.tokens[rank], batch.topk[rank], batch.gates[rank], lambda rows, _: rows, chunks=2
        )
    return exchange.carrier.nodes.members, float(
        (out - (batch.gates[rank] * (batch.topk[rank] >= 0)).sum(1, True) * batch.tokens[rank])
        .abs()
        .sum()
    )


def test_nodes_as_the_launcher_says(pool):
    for members, error in pool.run(on_nodes_of_the_launcher):
        assert members == ((0, 1),)
        assert error < 1e-4


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("codec", "token"), [("none", 4 * 256), ("int8", 256 + 8), ("int4", 128 + 8), ("bf16", 512)]
)
@pytest.mark.parametrize("k", [2, 8])
def test_bytes_between_nodes(codec, token, k):
    """A token crosses once for each other node that has one of its experts, and comes back once."""
    batch, nodes = Batch(8, 16, k, 3, width=256, most=30), Topology.of(4, 2, 2)
    home = {r: i for i, node in enumerate(nodes.nodes) for r in node}
    transports = [Recorded(t) for t in Loopback(8).transports()]
    _, exchanges = simulated(
        batch,
        torch.ones(16),
        topology=nodes,
        codec=codec,
        combine_codec=codec,
        transports=transports,
    )
    lines = [(rank, line) for rank, idx in enumerate(batch.topk) for line in idx.tolist()]
    crossing = sum(
        len({home[e // 2] for e in line if e >= 0} - {home[rank]}) for rank, line in lines
    )
    # a message each, also where nothing crosses
    pairs = 2 * sum(home[a] != i for a in home for i in range(3))
    told = sum((HEADER + 16) for a in home for b in home if home[a] != home[b])
    expected = told + crossing * (8 + 4 * k) + pairs // 2 * HEADER  # which experts
    expected += crossing * (token + 4 * k) + pairs // 2 * HEADER  # out, with gates
    expected += crossing * token + pairs // 2 * HEADER  # back
    sent = sum(t.bytes_to[r] for t in transports for r in home if home[t.rank] != home[r])
    assert sent == expected
    assert sum(e.counters.between_bytes for e in exchanges) == sent
    assert (
        sum(e.counters.inside_bytes for e in exchanges)
        == sum(t.sent_bytes for t in transports) - sent
    )
    assert sum(e.counters.crossing_tokens for e in exchanges) == crossing


def test_without_deduplication_more_crosses():
    batch = Batch(8, 16, 8, 3, width=256, most=30)
    found = [
        simulated(batch, torch.ones(16), topology="2x4", deduplicate=d)[1] for d in (True, False)
    ]
    once, often = (sum(e.counters.between_bytes for e in exchanges) for exchanges in found)
    assert often > 2.2 * once


# ---------------------------------------------------------------- capacity, layouts, counters


def alone(batch, layout="expert_major", **options):
    exchange = commpress.ExpertExchange(
        batch.experts, transport=Loopback(1).transport(0), **options
    )
    return exchange, exchange.create_routing(batch.topk[0], layout=layout)


def test_a_capacity_drops_late_choices_and_counts_them():
    topk = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 0]])
    # ⌈4 · 2 / 3 · 0.75⌉ = 2 for each
    exchange = commpress.ExpertExchange(3, capacity=0.75, transport=Loopback(1).transport(0))
    routing = exchange.create_routing(topk, layout="expert_major")
    tokens, gates = torch.eye(4), torch.tensor([[1.0, 10]] * 4)
    rows, weights, _ = exchange.dispatch(routing, tokens, gates)
    out = exchange.combine(routing, weights[:, None] * rows)
    # expert 0: tokens 0, 1; 1: first choice of 3, second of 0; 2: token 2
    assert out.diagonal().tolist() == [11, 1, 10, 1]
    assert exchange.counters.dropped == 3
    assert exchange.counters.choices == 5
    assert routing.handle.rows.counts.tolist() == [2, 2, 1]


def test_padding_is_zeros_and_counted():
    batch = Batch(1, 5, 3, 1)
    counts = torch.zeros(5, dtype=torch.int32)
    exchange = commpress.ExpertExchange(5, pad=4, transport=Loopback(1).transport(0))
    routing = exchange.create_routing(batch.topk[0], counts, layout="expert_major")
    rows, weights, numbers = exchange.dispatch(routing, batch.tokens[0] + 100, batch.gates[0] + 1)
    real_rows = [int((batch.topk[0] == e).sum()) for e in range(5)]
    assert numbers is None
    assert counts.tolist() == [-(-n // 4) * 4 for n in real_rows]
    assert exchange.counters.padded == sum(counts.tolist()) - sum(real_rows) > 0
    assert exchange.counters.expert_tokens == real_rows
    for part, gate, n in zip(
        rows.split(counts.tolist()), weights.split(counts.tolist()), real_rows, strict=True
    ):
        assert (part[:n] > 50).all()
        assert (gate[:n] >= 1).all()
        assert not part[n:].any()
        assert not gate[n:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_many_rows_as_asked_for(layout):
    batch = Batch(1, 5, 3, 1)
    exchange, routing = alone(batch, layout)
    exact, many = (
        exchange.dispatch(routing, batch.tokens[0], batch.gates[0], n) for n in (None, 64)
    )
    count = len(exact[0])
    assert [None if t is None else len(t) for t in many] == [
        64,
        64,
        64 if layout == "flat" else None,
    ]
    assert torch.equal(many[0][:count], exact[0])
    assert not many[0][count:].any()
    out = tuple(None if t is None else torch.full_like(t, 7) for t in many)
    for given_, found in zip(
        exchange.dispatch(routing, batch.tokens[0], batch.gates[0], out=out), many, strict=True
    ):
        assert given_ is None if found is None else torch.equal(given_, found)
    back = torch.empty(batch.tokens[0].shape)
    assert exchange.combine(routing, many[0], out=back) is back
    assert torch.equal(back, exchange.combine(routing, exact[0]))
    with pytest.raises(InvalidArgument, match=f"{count} rows come to rank 0"):
        exchange.dispatch(routing, batch.tokens[0], batch.gates[0], count - 1)


def test_counters_say_how_uneven_the_ranks_are():
    batch = Batch(4, 4, 1, 1, most=10)
    batch.topk = [torch.zeros_like(idx) for idx in batch.topk]  # one expert gets everything

    def twice(exchange):
        for _ in range(2):
            yield from through(exchange, batch, torch.ones(4))

    exchanges = [commpress.ExpertExchange(4, transport=t) for t in Loopback(4).transports()]
    simulate([twice(e) for e in exchanges])
    tokens = sum(map(len, batch.topk))
    assert all(e.counters.loads == [tokens, 0, 0, 0] for e in exchanges)
    assert all(e.counters.imbalance == 4 for e in exchanges)
    assert [e.counters.received for e in exchanges] == [2 * tokens, 0, 0, 0]


# ------------------------------------------------------ the whole layer: chunks, tensor parallelism


def layer(batch, scales, upstream, chunks, options, seen=None):
    """One rank's layer in one call, with experts that work row by row: results and gradients."""
    exchange = commpress.ExpertExchange(batch.experts, **options)
    rank = exchange.channel.rank
    mine, own = torch.from_numpy(exchange.placement.on(rank)), scales.clone().requires_grad_()

    def experts(rows, counts):
        if seen is not None:
            seen.append(len(rows))
        return torch.repeat_interleave(own[mine], counts)[:, None] * rows

    tokens, gates = (
        batch.tokens[rank].clone().requires_grad_(),
        batch.gates[rank].clone().requires_grad_(),
    )
    found = []
    for _ in range(2):  # the second call goes by way of the worker, where there is one
        out = exchange(tokens, batch.topk[rank], gates, experts, chunks=chunks)
        out.backward(upstream[rank])
        found += [
            out.detach().numpy().copy(),
            tokens.grad.numpy().copy(),
            gates.grad.numpy().copy(),
        ]
    return found, own.grad.numpy()


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_chunks_change_no_bit(pool, codec):
    batch, scales = Batch(3, 7, 4, 5, width=130, most=40), torch.rand(7)
    upstream = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(3)) for t in batch.tokens
    ]
    options = {
        "topology": "2,1",
        "codec": codec,
        "combine_codec": "bf16" if codec == "int8" else "none",
    }
    whole, *parts = (
        pool.run(layer, batch, scales, upstream, n, options, size=3) for n in (1, 2, 5)
    )
    for part in parts:
        for (a, scale_a), (b, scale_b) in zip(whole, part, strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)
            # a sum over rows, in another order
            np.testing.assert_allclose(scale_a, scale_b, rtol=1e-5)


def other_numbers_of_chunks():
    batch, rank = Batch(2, 4, 2, 1), dist.get_rank()
    exchange = commpress.ExpertExchange(4, timeout=timedelta(seconds=20))
    error = caught(
        exchange,
        batch.tokens[rank],
        batch.topk[rank],
        batch.gates[rank],
        lambda rows, _: rows,
        chunks=2 + rank,
    )
    return type(error), error.ranks


def test_another_number_of_chunks_is_named(pool):
    assert pool.run(other_numbers_of_chunks) == [(Mismatch, (1,)), (Mismatch, (0,))]


def alike(batch, size):
    """Ranks 2i and 2i + 1 have the same tokens."""
    for name in ("tokens", "gates", "topk"):
        setattr(batch, name, [getattr(batch, name)[r - r % 2] for r in range(size)])
    return batch


@pytest.mark.parametrize(
    "options",
    [{}, {"topology": "2x2"}, {"codec": "int8", "combine_codec": "int8"}, {"capacity": 0.5}],
)
def test_shares_of_a_tensor_group_change_no_bit(options):
    batch, scales = alike(Batch(4, 8, 3, 2, width=40, most=17), 4), torch.rand(8)
    alone_, alone_exchanges = simulated(batch, scales, **options)
    switch = Loopback(4)
    pairs = [t.subset([t.rank - t.rank % 2, t.rank - t.rank % 2 + 1]) for t in switch.transports()]
    exchanges = [
        commpress.ExpertExchange(8, transport=t, tensor_group=pairs[t.rank], **options)
        for t in switch.transports()
    ]
    shared = simulate([through(e, batch, scales) for e in exchanges])
    assert same(alone_, shared)
    choices, all_choices = (
        sum(e.counters.choices for e in of) for of in (exchanges, alone_exchanges)
    )
    assert 2 * choices == all_choices > 0


def under_tensor_parallelism(batch, scales, upstream):
    """Real groups: gradients of tokens and gates are those of the whole batch on both ranks, those
    of experts once."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    return layer(batch, scales, upstream, 2, {"tensor_group": groups[dist.get_rank() // 2]})


def test_gradients_under_tensor_parallelism(pool):
    batch, scales, upstream = whole_numbers(3)
    for parts in (batch.tokens, batch.gates, batch.topk, upstream):
        parts[1] = parts[0]
    results, _ = in_one_process(batch, scales, upstream)
    found = pool.run(under_tensor_parallelism, batch, scales, upstream, size=3)
    for (ours, _), twin in zip(found, results, strict=True):
        for a, b in zip(ours[:3], twin, strict=True):
            np.testing.assert_array_equal(a, b.detach().numpy())
    once = Batch(2, 6, 3, 8, width=5)
    for name in ("tokens", "gates", "topk"):
        setattr(once, name, [getattr(batch, name)[r] for r in (0, 2)])
    expected = in_one_process(once, scales, [upstream[0], upstream[2]])[1]
    np.testing.assert_array_equal(sum(scale for _, scale in found), 2 * expected)  # of two calls


def test_ranks_of_a_tensor_group_with_other_choices_are_named():
    batch = alike(Batch(2, 4, 2, 2), 2)
    batch.topk[1] = batch.topk[1].flip(1)
    switch = Loopback(2)
    exchanges = [
        commpress.ExpertExchange(4, transport=t, tensor_group=t.subset([0, 1]))
        for t in switch.transports()
    ]
    with pytest.raises(Mismatch) as error:
        simulate([through(e, batch, torch.ones(4)) for e in exchanges])
    assert error.value.ranks == (1,)


# ---------------------------------------------------------------- codec="auto"


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ((1.0, 0.96, 0.97), "none"),
        ((1.0, 0.9, 0.88), "bf16"),
        ((1.0, 0.9, 0.8), "int8"),
        ((1.0, 1.2, 0.94), "int8"),
    ],
)
def test_a_coarser_codec_must_save_enough(seconds, best):
    assert fastest(dict(zip(("none", "bf16", "int8"), seconds, strict=True))) == best


def measured_codecs(batch, slow):
    """Rank 1 is slow in the codecs ``slow``: what all took, and whether bits are those of an
    exchange with that codec."""
    rank, found = (
        dist.get_rank(),
        commpress.ExpertExchange(batch.experts, codec="auto", combine_codec="auto"),
    )
    own = found.out_steps

    def out_steps(plan, tokens, gates, count, codec, sequence):
        if found.measurement.chosen == "" and rank == 1 and codec.spec.partition("/")[0] in slow:
            time.sleep(0.1)
        return own(plan, tokens, gates, count, codec, sequence)

    found.out_steps = out_steps
    chunks, none = {"chunks": 2}, torch.zeros(0, 2, dtype=torch.int64)
    # nothing to measure with
    found(torch.zeros(0, 130), none, torch.zeros(0, 2), lambda rows, _: rows, **chunks)
    assert found.measurement.chosen == ""
    results = []
    for exchange in (
        found,
        commpress.ExpertExchange(batch.experts, codec="int8", combine_codec="int8"),
    ):
        for _ in range(2):
            tokens = batch.tokens[rank].clone().requires_grad_()
            out = exchange(
                tokens, batch.topk[rank], batch.gates[rank], lambda rows, _: rows, **chunks
            )
            out.square().sum().backward()
        results.append((out.detach(), tokens.grad))
    codecs = [found.codec, found.combine_codec, found.gradient_codec, found.combine_gradient_codec]
    return (
        found.measurement.chosen,
        [c.spec for c in codecs],
        all(map(torch.equal, *results)),
        dict(found.measurement.seconds),
    )


def test_all_ranks_take_the_codec_in_which_the_slowest_was_fastest(pool):
    batch = Batch(2, 4, 2, 1, width=130, most=40)
    exact, coarse = (
        pool.run(measured_codecs, batch, ("int8", "bf16")),
        pool.run(measured_codecs, batch, ("none", "bf16")),
    )
    for found, best in ((exact, "none"), (coarse, "int8")):
        for chosen, specs, as_int8, seconds in found:
            assert chosen == best
            assert len(set(specs)) == 1
            assert as_int8 == (best == "int8")
            assert seconds == found[0][3]
            assert len(seconds) == 3


def measured_ways(batch, slow):
    """Rank 1 is slow where tokens go by way of nodes, or straight: what all took, and whether bits
    are exact."""
    rank, make = dist.get_rank(), partial(commpress.ExpertExchange, batch.experts, topology="2x2")
    found = make(codec="auto", combine_codec="auto")
    own = found.out_steps

    def out_steps(plan, tokens, gates, count, codec, sequence):
        way = "straight" if plan.routes.between is None else "nodes"
        if found.measurement.chosen == "" and rank == 1 and (way == slow or codec.spec != "none"):
            time.sleep(0.1)
        return own(plan, tokens, gates, count, codec, sequence)

    found.out_steps = out_steps
    results = []
    for exchange in (found, make()):
        for _ in range(2):
            tokens = batch.tokens[rank].clone().requires_grad_()
            out = exchange(tokens, batch.topk[rank], batch.gates[rank], lambda rows, _: rows)
            out.square().sum().backward()
        results.append((out.detach(), tokens.grad))
    return (
        found.measurement.chosen,
        found.deduplicate,
        all(map(torch.equal, *results)),
        dict(found.measurement.seconds),
    )


def test_auto_goes_by_way_of_nodes_or_straight_as_the_slowest_is_faster(pool):
    batch = Batch(4, 8, 2, 1, width=130, most=40)
    for slow, by_nodes in (("nodes", False), ("straight", True)):
        for chosen, deduplicate, equal, seconds in pool.run(measured_ways, batch, slow, size=4):
            assert (chosen, deduplicate, equal) == ("none", by_nodes, True)
            assert list(seconds) == [
                codec + way for codec in ("none", "bf16", "int8") for way in ("", " straight")
            ]


def test_auto_on_one_rank_is_exact_and_gradients_follow():
    batch = Batch(1, 4, 2, 1, width=16)
    exchange, routing = alone(batch, codec="auto", gradient_codec="fp8")
    assert torch.equal(
        exchange.dispatch(routing, torch.ones(9, 16))[0], torch.ones(routing.handle.rows.count, 16)
    )
    assert exchange.measurement.chosen == "none"
    assert exchange.gradient_codec.spec.startswith("fp8")
    with pytest.raises(InvalidArgument, match="codec is 'auto', expected one of"):
        alone(batch, gradient_codec="auto")
