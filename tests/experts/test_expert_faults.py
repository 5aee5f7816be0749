"""Mistakes and faults of who calls a dispatch, of what travels, of ranks: named, and by all ranks
alike."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import commpress
from commpress.collectives.frame import HEADER
from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.errors import InvalidArgument, Mismatch, PeerFailure
from ranks import caught
from test_experts import LAYOUTS, Batch, alone, same, simulated, through


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
        assert [
            tuple(t.shape)
            for t in simulated(empty, torch.ones(8), topology=topology, layout=layout)[0]
        ] == [(0, 24)] * 4


@pytest.mark.parametrize("codec", ["none", "int8", "fp8", "int4", "bf16"])
def test_a_nan_spoils_its_token_and_no_other(codec):
    batch = Batch(4, 8, 3, 2, width=128)
    clean, _ = simulated(batch, torch.ones(8), topology="2x2", codec=codec, combine_codec=codec)
    batch.topk[2][4] = torch.tensor([0, 3, 7])
    batch.tokens[2][4, 7] = float("nan")
    spoilt, _ = simulated(batch, torch.ones(8), topology="2x2", codec=codec, combine_codec=codec)
    for rank, (a, b) in enumerate(zip(clean, spoilt, strict=True)):
        for t in range(len(a)):
            assert torch.isnan(b[t]).any() if (rank, t) == (2, 4) else torch.equal(a[t], b[t])


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "int8"},
        {"topology": "2,1"},
        {"placement": [0, 0, 0, 1, 1, 2]},
        {"deduplicate": False, "topology": "0 1|2"},
    ],
    ids=["codec", "topology", "placement", "deduplicate"],
)
def test_a_rank_with_other_options_is_named_before_anything_is_sent(change):
    batch = Batch(3, 6, 2, 1)
    base = {"topology": "0 1|2"} if "deduplicate" in change else {}
    exchanges = [
        commpress.ExpertExchange(6, transport=t, **(base | (change if t.rank == 2 else {})))
        for t in Loopback(3).transports()
    ]
    with pytest.raises(Mismatch) as error:
        simulate([through(e, batch, torch.ones(6)) for e in exchanges])
    assert error.value.ranks == (2,)
    assert exchanges[0].carrier.inside_bytes <= 2 * (HEADER + 16)


def test_a_rank_that_sends_other_than_it_said_is_named():
    """Rank 1 forgets a token on its way out."""
    batch = Batch(3, 6, 2, 1)
    exchanges = [commpress.ExpertExchange(6, transport=t) for t in Loopback(3).transports()]

    def steps(exchange):
        rank = exchange.channel.rank
        routing = yield from exchange.routing_steps(batch.topk[rank], layout="flat")
        plan = routing.handle
        if rank == 1:
            hop = plan.routes.inside
            sent = (hop.sent[0] - 1, *hop.sent[1:])
            object.__setattr__(plan.routes, "inside", hop._replace(pick=hop.pick[1:], sent=sent))
        yield from exchange.out_steps(
            plan, batch.tokens[rank], None, plan.rows.count, exchange.codec, exchange.channel.take()
        )

    with pytest.raises(Mismatch, match=r"rank 0 expected rank 1 to send") as error:
        simulate([steps(e) for e in exchanges])
    assert error.value.ranks == (1,)


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

    exchanges = [
        commpress.ExpertExchange(6, transport=Lying(t) if t.rank == 1 else t) for t in transports
    ]
    exchanges[1].carrier.transport.inner.checks = False
    for e in exchanges:
        e.carrier.transport.checks = False
    with pytest.raises(Mismatch, match=r"rank 1 sent rank 0 token \d+ " + says) as error:
        simulate([through(e, batch, torch.ones(6)) for e in exchanges])
    assert error.value.ranks == (1,)


def too_little_room():
    """For rank 1 alone; afterwards both go on."""
    exchange = commpress.ExpertExchange(4)
    rank = dist.get_rank()
    # an expert of rank 1
    idx, gates, tokens = torch.full((6, 1), 2), torch.ones(6, 1), torch.randn(6, 8)
    routing = exchange.create_routing(idx)
    error = caught(exchange.dispatch, routing, tokens, gates, 10)
    rows, weights, _ = exchange.dispatch(routing, tokens, gates, 12)
    return (
        str(error),
        rows.shape[0],
        bool(torch.equal(exchange.combine(routing, weights[:, :1] * rows), tokens)),
        rank,
    )


def test_ranks_raise_together_where_one_has_too_little_room(pool):
    for said, rows, same_tokens, _ in pool.run(too_little_room):
        assert "max_recv_tokens is 10, but 12 rows come to rank 1" in said
        assert rows == 12
        assert same_tokens


def dies_in_dispatch():
    exchange = commpress.ExpertExchange(6, timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    batch = Batch(3, 6, 2, 1)
    routing = exchange.create_routing(batch.topk[rank])
    if rank == 1:
        os._exit(3)
    return caught(exchange.dispatch, routing, batch.tokens[rank], batch.gates[rank])


def test_a_rank_that_dies_in_dispatch_is_named(mortal):
    first, _, third = mortal.outcomes(dies_in_dispatch, size=3, lost=[1])
    for error in (first, third):
        assert isinstance(error, PeerFailure)
        assert error.ranks == (1,)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"capacity": 0}, "capacity is 0"),
        ({"codec": "sign"}, "codec is 'sign"),
        ({"combine_gradient_codec": "topk-64"}, "combine_gradient_codec is 'topk"),
        ({"pad": 0}, "pad 0"),
        ({"placement": [0, 1]}, "placement names 2 experts"),
        ({"placement": [0] * 3 + [9]}, "expected for each expert the rank"),
        ({"topology": "3x2"}, "expected every rank from 0 to 0"),
    ],
)
def test_mistakes_are_refused_at_construction(options, says):
    with pytest.raises(InvalidArgument, match=says):
        commpress.ExpertExchange(
            **{"num_experts": 4, "transport": Loopback(1).transport(0)} | options
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


def test_without_a_process_group():
    with pytest.raises(InvalidArgument, match="call init_process_group before ExpertExchange"):
        commpress.ExpertExchange(4)
