"""Experts on other ranks: dispatch and combine against a walk over tokens in plain Python,
simulated and on real ranks."""

import time
from datetime import timedelta
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
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument, Mismatch
from commpress.integrations.experts.codec_measurement import fastest
from commpress.kernels import reference
from commpress.kernels.pieces import aligned
from expert_batch import Batch, applied, through
from ranks import caught
from recorded import Recorded
from ways import WAYS, transport_by

PATIENT = timedelta(seconds=60)
LAYOUTS = ["flat", "expert_major"]


def made(experts, transports, **options):
    """An exchange over each of these transports."""
    return [commpress.ExpertExchange(experts, process_group=t, **options) for t in transports]


def simulated(batch, scales, *, layout="expert_major", transports=None, **options):
    exchanges = made(batch.experts, transports or Loopback(batch.size).transports(), **options)
    return simulate([through(e, batch, scales, layout) for e in exchanges]), exchanges


def exactly(rows):
    return rows


def walked(batch, scales, nodes, owner, out=exactly, back=exactly):
    """The law: nodes in their order, in each its ranks, in each the choices in their order; float32
    from the left. Tokens are rounded on their way ``out``, and on their way ``back`` each rank's
    row and the sum of another node."""
    results = []
    for rank, (topk, gates) in enumerate(zip(batch.topk, batch.gates, strict=True)):
        tokens = out(batch.tokens[rank].float())
        total = torch.zeros(tokens.shape)
        for t, (token, chosen) in enumerate(zip(tokens, topk.tolist(), strict=True)):
            for node in nodes:
                of_node = torch.zeros(batch.width)
                for member in node:
                    of_rank = torch.zeros(batch.width)
                    for slot, expert in enumerate(chosen):
                        if expert >= 0 and owner[expert] == member:
                            of_rank = of_rank + scales[expert] * gates[t, slot] * token
                    of_node = of_node + back(of_rank[None])[0]
                total[t] = total[t] + (of_node if rank in node else back(of_node[None])[0])
        results.append(total)
    return results


def rounded(name):
    """Round each row as a codec does, 128 elements to a scale."""
    if name == "bf16":
        return lambda rows: rows.bfloat16().float()
    kind = commpress.BlockCodec(name, 128).kind

    def through(rows):
        width = -(-rows.shape[1] // 8) * 8
        encoded = [reference.encode_row(row.numpy(), kind, width, 128) for row in rows]
        decoded = [reference.decode_row(r, kind, rows.shape[1], width, 128) for r in encoded]
        return torch.from_numpy(np.stack([*decoded, np.zeros(rows.shape[1], np.float32)]))[:-1]

    return through


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


@pytest.mark.parametrize("codec", [("int8", "bf16"), ("fp8", "int8"), ("bf16", "int4")])
@pytest.mark.parametrize("topology", [None, "0 3|1 2 4|5"])
def test_codecs_round_what_travels_and_nothing_else(codec, topology):
    batch, scales = Batch(6, 12, 5, 7, width=136), torch.rand(12)
    found, exchanges = simulated(batch, scales, codec=codec, topology=topology)
    nodes, owner = exchanges[0].carrier.nodes.members, exchanges[0].placement.owner.tolist()
    assert same(found, walked(batch, scales, nodes, owner, *map(rounded, codec)))


def test_tokens_of_half_precision_are_rounded_where_they_travel():
    batch = Batch(6, 12, 5, 7, dtype=torch.bfloat16)
    exact = Batch(6, 12, 5, 7)
    exact.tokens = [tokens.float() for tokens in batch.tokens]
    options = {"scales": torch.rand(12), "topology": "0 3|1 2 4|5"}
    half, whole = (torch.cat(simulated(each, **options)[0]) for each in (batch, exact))
    assert half.dtype == torch.bfloat16
    assert 0 < float((half.float() - whole).norm() / whole.norm()) < 0.01


# ---------------------------------------------------------------- gradients, real ranks


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
    (exchange,) = made(batch.experts, [transport], **options)
    rank = exchange.channel.rank
    for layout in LAYOUTS:
        tokens, gates = leaves(batch, rank)
        own = scales.clone().requires_grad_()
        routing = exchange.create_routing(batch.topk[rank], layout=layout)
        rows, weights, numbers = exchange.dispatch(routing, tokens, gates)
        out = exchange.combine(routing, applied(exchange, routing, rows, weights, numbers, own))
        out.backward(upstream[rank])
        found.append([t.detach().numpy() for t in (out, tokens.grad, gates.grad, own.grad)])
    return found


def leaves(batch, rank):
    """Tokens and gates of a rank, as autograd takes them."""
    return (each[rank].clone().requires_grad_() for each in (batch.tokens, batch.gates))


def in_one_process(batch, scales, upstream):
    """The model where all experts are here."""
    own = scales.clone().requires_grad_()
    results = []
    for rank, (topk, gradient) in enumerate(zip(batch.topk, upstream, strict=True)):
        tokens, gates = leaves(batch, rank)
        factors = torch.where(topk >= 0, own[topk] * gates, 0)
        out = factors.sum(1, keepdim=True) * tokens
        out.backward(gradient)
        results.append([out, tokens.grad, gates.grad])
    return results, own.grad


def equal(found, twins):
    for ours, twin in zip(found, twins, strict=True):
        np.testing.assert_array_equal(ours, torch.as_tensor(twin).detach().numpy())


def check_trained(every, batch, scales, upstream):
    results, of_experts = in_one_process(batch, scales, upstream)
    for layout in range(len(LAYOUTS)):
        for found, result in zip(every, results, strict=True):
            equal(found[layout][:3], result)
        equal([sum(found[layout][3] for found in every)], [of_experts])


@pytest.mark.parametrize("options", [{}, {"topology": "2,1"}], ids=str)
def test_gradients_are_those_of_one_process(pool, options):
    given_ = whole_numbers(3)
    check_trained(pool.run(trained, *given_, options, size=3), *given_)


def sums_of_gates(batch, upstream):
    """Identity experts by rows of tokens, that use the gates of all choices, also of those that are
    other ranks'."""
    exchange, rank = commpress.ExpertExchange(batch.experts), dist.get_rank()
    tokens, gates = leaves(batch, rank)
    routing = exchange.create_routing(batch.topk[rank], layout="flat")
    rows, weights, _ = exchange.dispatch(routing, tokens, gates)
    out = exchange.combine(routing, rows * weights.sum(1, keepdim=True))
    out.backward(upstream[rank])
    return [t.detach().numpy() for t in (out, tokens.grad, gates.grad)]


def test_gates_of_other_ranks_are_zero_and_get_no_gradient(pool):
    batch, _, upstream = whole_numbers(3)
    results, _ = in_one_process(batch, torch.ones(batch.experts), upstream)
    for found, twins in zip(pool.run(sums_of_gates, batch, upstream, size=3), results, strict=True):
        equal(found, twins)


def real(batch, scales, options, by):
    (exchange,) = made(batch.experts, [transport_by(by, PATIENT)], **options)
    return [
        exchange.channel.run(through(exchange, batch, scales, layout)).numpy() for layout in LAYOUTS
    ]


@pytest.mark.parametrize("by", WAYS)
def test_real_ranks_equal_the_simulation(pool, by):
    batch, scales = Batch(3, 7, 4, 1, width=130, most=40), torch.rand(7)
    options = {"codec": ("int8", "bf16"), "topology": "0 2|1"}
    every = pool.run(real, batch, scales, options, by, size=3)
    for i, layout in enumerate(LAYOUTS):
        equal([found[i] for found in every], simulated(batch, scales, layout=layout, **options)[0])


@pytest.mark.parametrize(("codec", "layout"), [("none", "flat"), ("int8", "expert_major")])
def test_gradients_of_plain_sums(codec, layout):
    """They come as one number with strides of zero."""
    batch = Batch(1, 4, 2, 1, width=16)
    exchange, routing = alone(batch, layout, codec=codec)
    tokens = batch.tokens[0].clone().requires_grad_()
    exchange.dispatch(routing, tokens)[0].sum().backward()
    here = (batch.topk[0] >= 0).sum(1, keepdim=True).float()
    here = here.clamp(max=1) if layout == "flat" else here
    assert torch.equal(tokens.grad, here.expand(-1, 16))
    rows = torch.ones(routing.handle.rows.count, 16, requires_grad=True)
    exchange.combine(routing, rows).sum().backward()
    assert torch.equal(rows.grad, torch.ones_like(rows))


def test_each_direction_has_its_codec():
    """Out and back, and gradients of both: as the reference rounds each token, 128 elements to a
    scale."""
    codecs = {"codec": ("int8", "int4"), "gradient_codec": ("fp8", "bf16")}
    (exchange,) = made(3, Loopback(1).transports(), **codecs)
    values = [torch.randn(9, 200, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    routing = exchange.create_routing(torch.arange(9).remainder(3)[:, None], layout="flat")
    tokens, made_ = values[0].clone().requires_grad_(), values[1].clone().requires_grad_()
    rows, *_ = exchange.dispatch(routing, tokens)
    out = exchange.combine(routing, made_)
    rows.backward(values[2])
    out.backward(values[3])
    assert torch.equal(rows, rounded("int8")(values[0]))
    assert torch.equal(out, rounded("int4")(values[1]))
    assert torch.equal(tokens.grad, rounded("bf16")(values[2]))
    assert torch.equal(made_.grad, rounded("fp8")(values[3]))


def on_nodes_of_the_launcher():
    batch, rank = Batch(2, 4, 2, 1), dist.get_rank()
    exchange = commpress.ExpertExchange(4, topology="auto")
    with torch.no_grad():
        out = exchange(batch.tokens[rank], batch.topk[rank], batch.gates[rank], identity, chunks=2)
    gates = (batch.gates[rank] * (batch.topk[rank] >= 0)).sum(1, True)
    return exchange.carrier.nodes.members, float((out - gates * batch.tokens[rank]).abs().sum())


def identity(rows, counts):
    return rows


def test_nodes_as_the_launcher_says(pool):
    for members, error in pool.run(on_nodes_of_the_launcher):
        assert members == ((0, 1),)
        assert error < 1e-4


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("codec", "token", "k"), [("none", 4 * 256, 2), ("int8", 256 + 8, 8), ("bf16", 512, 2)]
)
def test_bytes_between_nodes(codec, token, k):
    """A token crosses once for each other node that has one of its experts, and comes back once."""
    batch, nodes = Batch(8, 16, k, 3, width=256, most=30), Topology.of(4, 2, 2)
    home = {r: i for i, node in enumerate(nodes.nodes) for r in node}
    transports = [Recorded(t) for t in Loopback(8).transports()]
    options = {"topology": nodes, "codec": (codec, codec), "transports": transports}
    _, exchanges = simulated(batch, torch.ones(16), **options)
    lines = [(rank, line) for rank, idx in enumerate(batch.topk) for line in idx.tolist()]
    crossing = sum(
        len({home[e // 2] for e in line if e >= 0} - {home[rank]}) for rank, line in lines
    )
    # a message each, also where nothing crosses
    pairs = 2 * sum(home[a] != i for a in home for i in range(3))
    told = sum((HEADER + 16) for a in home for b in home if home[a] != home[b])
    expected = told + crossing * (8 + 4 * k) + pairs // 2 * HEADER  # which experts
    expected += crossing * aligned(token + 4 * k) + pairs // 2 * HEADER  # out, with gates
    expected += crossing * aligned(token) + pairs // 2 * HEADER  # back
    sent = sum(t.bytes_to[r] for t in transports for r in home if home[t.rank] != home[r])
    assert sent == expected
    assert sum(e.counters.between_bytes for e in exchanges) == sent
    everything = sum(t.sent_bytes for t in transports)
    assert sum(e.counters.inside_bytes for e in exchanges) == everything - sent
    assert sum(e.counters.crossing_tokens for e in exchanges) == crossing


# ---------------------------------------------------------------- capacity, layouts, counters


def alone(batch, layout="expert_major", **options):
    (exchange,) = made(batch.experts, Loopback(1).transports(), **options)
    return exchange, exchange.create_routing(batch.topk[0], layout=layout)


def test_a_capacity_drops_late_choices_and_counts_them():
    topk = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 0]])
    # ⌈4 · 2 / 3 · 0.75⌉ = 2 for each
    (exchange,) = made(3, Loopback(1).transports(), capacity=0.75)
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
    (exchange,) = made(5, Loopback(1).transports(), pad=4)
    routing = exchange.create_routing(batch.topk[0], counts, layout="expert_major")
    rows, weights, numbers = exchange.dispatch(routing, batch.tokens[0] + 100, batch.gates[0] + 1)
    real_rows = [int((batch.topk[0] == e).sum()) for e in range(5)]
    assert numbers is None
    assert counts.tolist() == [-(-n // 4) * 4 for n in real_rows]
    assert exchange.counters.padded == sum(counts.tolist()) - sum(real_rows) > 0
    assert exchange.counters.expert_tokens == real_rows
    each = zip(rows.split(counts.tolist()), weights.split(counts.tolist()), real_rows, strict=True)
    for part, gate, n in each:
        assert (part[:n] > 50).all()
        assert (gate[:n] >= 1).all()
        assert not part[n:].any()
        assert not gate[n:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_many_rows_as_asked_for(layout):
    batch = Batch(1, 5, 3, 1)
    exchange, routing = alone(batch, layout)
    given_ = routing, batch.tokens[0], batch.gates[0]
    exact, many = (exchange.dispatch(*given_, n) for n in (None, 64))
    count, flat = len(exact[0]), layout == "flat"
    assert [t is None or len(t) for t in many] == [64, 64, 64 if flat else True]
    assert torch.equal(many[0][:count], exact[0])
    assert not many[0][count:].any()
    out = tuple(None if t is None else torch.full_like(t, 7) for t in many)
    for written, found in zip(exchange.dispatch(*given_, out=out), many, strict=True):
        assert written is None if found is None else torch.equal(written, found)
    back = torch.empty(batch.tokens[0].shape)
    assert exchange.combine(routing, many[0], out=back) is back
    assert torch.equal(back, exchange.combine(routing, exact[0]))
    with pytest.raises(InvalidArgument, match=f"rank 0 receives {count} rows"):
        exchange.dispatch(*given_, count - 1)


def test_counters_say_how_uneven_the_ranks_are():
    batch = Batch(4, 4, 1, 1, most=10)
    batch.topk = [torch.zeros_like(idx) for idx in batch.topk]  # one expert gets everything

    def twice(exchange):
        for _ in range(2):
            yield from through(exchange, batch, torch.ones(4))

    exchanges = made(4, Loopback(4).transports())
    simulate([twice(e) for e in exchanges])
    tokens = sum(map(len, batch.topk))
    assert all(e.counters.loads == [tokens, 0, 0, 0] for e in exchanges)
    assert all(e.counters.imbalance == 4 for e in exchanges)
    assert [e.counters.received for e in exchanges] == [2 * tokens, 0, 0, 0]


# ------------------------------------------------------ the whole layer: chunks, tensor parallelism


def layer(batch, scales, upstream, chunks, options):
    """One rank's layer in one call, with experts that work row by row: results and gradients."""
    exchange = commpress.ExpertExchange(batch.experts, **options)
    rank = exchange.channel.rank
    mine, own = torch.from_numpy(exchange.placement.on(rank)), scales.clone().requires_grad_()

    def experts(rows, counts):
        return torch.repeat_interleave(own[mine], counts)[:, None] * rows

    (tokens, gates), found = leaves(batch, rank), []
    for _ in range(2):  # the second call goes by way of the worker, where there is one
        out = exchange(tokens, batch.topk[rank], gates, experts, chunks=chunks)
        out.backward(upstream[rank])
        found += [t.detach().numpy().copy() for t in (out, tokens.grad, gates.grad)]
    return found, own.grad.numpy()


@pytest.mark.parametrize("codec", ["none", ("int8", "bf16")])
def test_chunks_change_no_bit(pool, codec):
    batch, scales = Batch(3, 7, 4, 5, width=130, most=40), torch.rand(7)
    upstream = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(3)) for t in batch.tokens
    ]
    options = {"topology": "2,1", "codec": codec}
    whole, *parts = (
        pool.run(layer, batch, scales, upstream, n, options, size=3) for n in (1, 2, 5)
    )
    for part in parts:
        for (a, scale_a), (b, scale_b) in zip(whole, part, strict=True):
            equal(a, b)
            # a sum over rows, in another order
            np.testing.assert_allclose(scale_a, scale_b, rtol=1e-5)


def other_numbers_of_chunks():
    batch, rank = Batch(2, 4, 2, 1), dist.get_rank()
    exchange = commpress.ExpertExchange(
        4, process_group=dist.new_group(timeout=timedelta(seconds=20))
    )
    given_ = batch.tokens[rank], batch.topk[rank], batch.gates[rank], identity
    error = caught(exchange, *given_, chunks=2 + rank)
    return type(error), error.ranks


def test_another_number_of_chunks_is_named(pool):
    assert pool.run(other_numbers_of_chunks) == [(Mismatch, (1,)), (Mismatch, (0,))]


def alike(batch, size):
    """Ranks 2i and 2i + 1 have the same tokens."""
    for name in ("tokens", "gates", "topk"):
        setattr(batch, name, [getattr(batch, name)[r - r % 2] for r in range(size)])
    return batch


@pytest.mark.parametrize(
    "options", [{}, {"topology": "2x2"}, {"codec": ("int8", "int8")}, {"capacity": 0.5}]
)
def test_shares_of_a_tensor_group_change_no_bit(options):
    batch, scales = alike(Batch(4, 8, 3, 2, width=40, most=17), 4), torch.rand(8)
    alone_, alone_exchanges = simulated(batch, scales, **options)
    switch = Loopback(4)
    pairs = [t.subset([t.rank - t.rank % 2, t.rank - t.rank % 2 + 1]) for t in switch.transports()]
    exchanges = [
        commpress.ExpertExchange(8, process_group=t, tensor_group=pairs[t.rank], **options)
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
        equal(ours[:3], twin)
    once = Batch(2, 6, 3, 8, width=5)
    for name in ("tokens", "gates", "topk"):
        setattr(once, name, [getattr(batch, name)[r] for r in (0, 2)])
    expected = in_one_process(once, scales, [upstream[0], upstream[2]])[1]
    equal([sum(scale for _, scale in found)], [2 * expected])  # of two calls


def test_ranks_of_a_tensor_group_with_other_choices_are_named():
    batch = alike(Batch(2, 4, 2, 2), 2)
    batch.topk[1] = batch.topk[1].flip(1)
    switch = Loopback(2)
    exchanges = [
        commpress.ExpertExchange(4, process_group=t, tensor_group=t.subset([0, 1]))
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


def measured(batch, slow):
    """Rank 1 is slow in the codecs ``slow``: what all took, and whether bits are those of an
    exchange with int8."""
    rank, found = dist.get_rank(), commpress.ExpertExchange(batch.experts, codec=("auto", "auto"))
    own = found.out_steps

    def out_steps(plan, tokens, gates, count, codec, sequence):
        measuring = found.measurement.chosen == "" and rank == 1
        if measuring and codec.spec.partition("/")[0] in slow:
            time.sleep(0.1)
        return own(plan, tokens, gates, count, codec, sequence)

    found.out_steps = out_steps
    none = torch.zeros(0, 130), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), identity
    found(*none, chunks=2)  # nothing to measure with
    assert found.measurement.chosen == ""
    results = []
    for exchange in (found, commpress.ExpertExchange(batch.experts, codec=("int8", "int8"))):
        for _ in range(2):
            tokens, gates = leaves(batch, rank)
            out = exchange(tokens, batch.topk[rank], gates, identity, chunks=2)
            out.square().sum().backward()
        results.append((out.detach(), tokens.grad))
    codecs = [found.codec, found.combine_codec, found.gradient_codec, found.combine_gradient_codec]
    return (
        found.measurement.chosen,
        {c.spec.partition("/")[0] for c in codecs},
        all(map(torch.equal, *results)),
        dict(found.measurement.seconds),
    )


@pytest.mark.parametrize(("slow", "best"), [(("int8", "bf16"), "none"), (("none", "bf16"), "int8")])
def test_all_ranks_take_the_codec_in_which_the_slowest_was_fastest(pool, slow, best):
    found = pool.run(measured, Batch(2, 4, 2, 1, width=130, most=40), slow)
    for chosen, codecs, as_int8, seconds in found:
        assert (chosen, codecs, as_int8) == (best, {best}, best == "int8")
        assert seconds == found[0][-1]
        assert list(seconds) == ["none", "bf16", "int8"]


def test_auto_on_one_rank_is_exact_and_gradients_follow():
    batch = Batch(1, 4, 2, 1, width=16)
    exchange, routing = alone(batch, codec="auto", gradient_codec="fp8")
    rows = exchange.dispatch(routing, torch.ones(9, 16))[0]
    assert torch.equal(rows, torch.ones(routing.handle.rows.count, 16))
    assert exchange.measurement.chosen == "none"
    assert exchange.gradient_codec.spec.startswith("fp8")
    with pytest.raises(InvalidArgument, match="codec is 'auto', expected one of"):
        alone(batch, gradient_codec="auto")


# ------------------------------------------------- mistakes and faults, named by all ranks alike


@pytest.mark.parametrize("topology", [None, "2x2"])
def test_all_to_one_expert_and_no_tokens_at_all(topology):
    batch = Batch(4, 8, 2, 1)
    batch.topk = [torch.tensor([[5, -1]]).expand(len(idx), 2) for idx in batch.topk]
    found, _ = simulated(batch, torch.full((8,), 3.0), topology=topology)
    assert same(found, [3 * g[:, :1] * t for g, t in zip(batch.gates, batch.tokens, strict=True)])
    empty = Batch(4, 8, 2, 1)
    empty.topk, empty.gates = (
        [torch.zeros(0, 2, dtype=d)] * 4 for d in (torch.int64, torch.float32)
    )
    empty.tokens = [torch.zeros(0, 24)] * 4
    for layout in LAYOUTS:
        found = simulated(empty, torch.ones(8), topology=topology, layout=layout)[0]
        assert [tuple(t.shape) for t in found] == [(0, 24)] * 4


@pytest.mark.parametrize("codec", ["none", "int8", "bf16"])
def test_a_nan_spoils_its_token_and_no_other(codec):
    batch = Batch(4, 8, 3, 2, width=128)
    options = {"topology": "2x2", "codec": (codec, codec)}
    clean, _ = simulated(batch, torch.ones(8), **options)
    batch.topk[2][4] = torch.tensor([0, 3, 7])
    batch.tokens[2][4, 7] = float("nan")
    spoilt, _ = simulated(batch, torch.ones(8), **options)
    for rank, (a, b) in enumerate(zip(clean, spoilt, strict=True)):
        for t in range(len(a)):
            assert torch.isnan(b[t]).any() if (rank, t) == (2, 4) else torch.equal(a[t], b[t])


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "int8"},
        {"topology": "2,1"},
        {"placement": [0, 0, 0, 1, 1, 2]},
    ],
    ids=["codec", "topology", "placement"],
)
def test_a_rank_with_other_options_is_named_before_anything_is_sent(change):
    batch = Batch(3, 6, 2, 1)
    *transports, odd = Loopback(3).transports()
    exchanges = made(6, transports) + made(6, [odd], **change)
    with pytest.raises(Mismatch) as error:
        simulate([through(e, batch, torch.ones(6)) for e in exchanges])
    assert error.value.ranks == (2,)
    assert exchanges[0].carrier.inside_bytes <= 2 * (HEADER + 16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((slice(2, 4), 5), r"of rank 1 for experts \[5, 5\], none of"),
        ((slice(0, 1), 2), "of rank 2 for experts"),
    ],
    ids=["experts of another rank", "tokens of another rank"],
)
def test_a_rank_that_sends_tokens_to_the_wrong_experts_is_named(change, says):
    """Rank 1's list of experts is damaged after it was counted."""
    batch = Batch(3, 6, 2, 1)
    transports = Loopback(3).transports()
    calls = []

    class Lying(Recorded):
        def exchange(self, out, inp, wanted, tag):
            calls.append(tag)
            if len(calls) == 2:
                inp.payloads[0].view(torch.int32)[change[0]] = change[1]
            return self.inner.exchange(out, inp, wanted, tag)

    exchanges = made(6, [Lying(t) if t.rank == 1 else t for t in transports])
    exchanges[1].carrier.transport.inner.checks = False
    for e in exchanges:
        e.carrier.transport.checks = False
    with pytest.raises(Mismatch, match=r"rank 1 sent rank 0 token \d+ " + says) as error:
        simulate([through(e, batch, torch.ones(6)) for e in exchanges])
    assert error.value.ranks == (1,)


def too_little_room():
    """Leave too little room on rank 1 alone; afterwards both go on."""
    exchange = commpress.ExpertExchange(4)
    # an expert of rank 1
    idx, gates, tokens = torch.full((6, 1), 2), torch.ones(6, 1), torch.randn(6, 8)
    routing = exchange.create_routing(idx)
    error = caught(exchange.dispatch, routing, tokens, gates, 10)
    rows, weights, _ = exchange.dispatch(routing, tokens, gates, 12)
    same_tokens = torch.equal(exchange.combine(routing, weights[:, :1] * rows), tokens)
    return str(error), len(rows), same_tokens


def test_ranks_raise_together_where_one_has_too_little_room(pool):
    for said, rows, same_tokens in pool.run(too_little_room):
        assert "max_recv_tokens is 10, but rank 1 receives 12 rows" in said
        assert (rows, same_tokens) == (12, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"capacity": 0}, "capacity is 0"),
        ({"codec": "sign"}, "codec is 'sign"),
        ({"pad": 0}, "pad is 0"),
        ({"codec": ("int8",) * 3}, "codec is .*, expected one codec or a pair"),
        ({"gradient_codec": ("int8", "topk-64")}, "gradient_codec is 'topk"),
        ({"placement": [0, 1]}, "placement has 2 ranks"),
        ({"placement": [0] * 3 + [9]}, "expected for each expert the rank"),
        ({"topology": "3x2"}, "expected every rank from 0 to 0"),
    ],
)
def test_mistakes_are_refused_at_construction(options, says):
    with pytest.raises(InvalidArgument, match=says):
        commpress.ExpertExchange(
            **{"num_experts": 4, "process_group": Loopback(1).transport(0)} | options
        )


def test_mistakes_are_refused_before_anything_is_sent():
    exchange, routing = alone(Batch(1, 4, 2, 1))
    idx, ones = torch.zeros(9, 2, dtype=torch.int64), torch.ones(9, 24)
    for call, says in [
        (lambda: exchange.create_routing(idx + 4), "numbers from 4 to 4, expected experts 0 to 3"),
        (lambda: exchange.create_routing(idx, layout="rows"), "layout is 'rows'"),
        (lambda: exchange.create_routing(idx.float()), "expected integers"),
        (lambda: exchange.dispatch(routing, ones[:3]), "expected \\[9, width\\]"),
        (lambda: exchange.dispatch(routing, ones, ones), "topk_weights are"),
        (lambda: exchange.dispatch(routing, ones.to(torch.int32)), "tokens are torch.int32"),
        (lambda: exchange.combine(routing, ones[:1]), "expert_tokens are"),
    ]:
        with pytest.raises(InvalidArgument, match=says):
            call()
