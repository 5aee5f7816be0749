"""Collectives of a group beside all-reduce, two levels, saved residuals, and NCCL's way on a twin:
bits, bytes, refusals."""

import time
from datetime import timedelta
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import commpress.collectives.allreduce as allreduce
import commpress.integrations.process_group.call as call
import commpress.integrations.process_group.group as group_module
import commpress.integrations.process_group.inner as inner
import commpress.integrations.process_group.reducer as reducer
from commpress.codecs import policy_of
from commpress.collectives.all_to_all.all_to_all import Way, compressed_all_to_all
from commpress.collectives.allreduce import Call, Workspace, settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.frame import HEADER, LateHeaders
from commpress.collectives.levels import Levels
from commpress.collectives.reduce_scatter import Part, deals, gather_rows, reduce_rows
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.two_level import hierarchy_of
from commpress.errors import InvalidArgument, Mismatch
from commpress.feedback import ResidualStore
from commpress.integrations.process_group.group_options import GroupOptions, group_options_from
from commpress.torch_private import all_gather_single, reduce_scatter_single
from group_calls import as_world, net, train
from ranks import caught
from recorded import Recorded
from state_worlds import stored

ROW, STEPS, BAD = 301, 4, 2


def numbers(seed, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_options(file, options, function, *args):
    return as_world("commpress", file, function, *args, pg_options=options)


def counters():
    return dist.group.WORLD.counters.as_dict()


class InBackward(torch.autograd.Function):
    """Calls ``reduce`` on the gradient that comes back."""

    @staticmethod
    def forward(ctx, x, reduce, results):
        ctx.reduce, ctx.results = reduce, results
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.results.append(ctx.reduce(gradient.contiguous()))
        return gradient, None, None


def reduced(gradients, reduce):
    """Results of ``reduce`` for these gradients in one backward, the last one first."""
    results = []
    inputs = [torch.zeros(g.numel(), requires_grad=True, dtype=g.dtype) for g in gradients]
    sum(
        (InBackward.apply(x, reduce, results) * g).sum()
        for x, g in zip(inputs, gradients, strict=True)
    ).backward()
    return results


def scattered(gradient, op=dist.ReduceOp.AVG):
    out = torch.empty(gradient.numel() // dist.get_world_size(), dtype=gradient.dtype)
    reduce_scatter_single(out, gradient, op)
    return out


def summed(gradient, op=dist.ReduceOp.SUM):
    gradient = gradient.clone()
    dist.all_reduce(gradient, op)
    return gradient


# ---------------------------------------------------------------- what options say


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"reduce_scatter": "powersgd-4"},
            "reduce_scatter is 'powersgd-4', which needs whole tensors",
        ),
        ({"all_gather": "sign"}, "all_gather is 'sign"),
        ({"all_to_all": "topk-64"}, "all_to_all is 'topk"),
        ({"topology": "2y4"}, "topology is '2y4'"),
        ({"topology": 4}, "topology is a int"),
        ({"codec": None, "topology": "2x2"}, "codec is None"),
        ({"codec": "sing"}, "did you mean 'sign'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, complaint):
    with pytest.raises(InvalidArgument, match=complaint):
        GroupOptions(**given)


def test_each_collective_has_its_codec_in_the_text():
    text = "codec=exact,reduce_scatter=int8,all_gather=fp8,all_to_all=bf16"
    assert group_options_from(text) == GroupOptions(
        None, reduce_scatter="int8", all_gather="fp8", all_to_all="bf16"
    )
    assert group_options_from("sign,topology=2x4").topology == "2x4"
    assert GroupOptions().codecs().keys() == {"all_reduce"}


# ---------------------------------------------------------------- reduce-scatter


def reduce_scatters(op, dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    results = [
        reduced([gradient(rank, step, size, dtype)], lambda g: scattered(g, op))[0]
        for step in range(STEPS)
    ]
    metric = numbers(rank, size * ROW)
    exact = scattered(metric, dist.ReduceOp.SUM)  # not in a backward
    return results, exact, counters()


def gradient(rank, step, size, dtype=torch.float32):
    values = numbers(100 * step + rank, size * ROW, dtype)
    if (rank, step) == (1, BAD):
        values[7] = float("nan")
    return values


def scatter_twin(size, codec, op, dtype):
    plans = [
        deals(
            [Part("reduce-scatter 0 of 903", 0, ROW, size * ROW)],
            policy_of(codec),
            rank=r,
            ranks=size,
        )
        for r in range(size)
    ]
    owed = [
        [ResidualStore().attach(d.every.keys, d.every.pieces, torch.device("cpu")) for d in plan]
        for plan in plans
    ]
    ends, results = [Recorded(t) for t in Loopback(size).transports()], [[] for _ in range(size)]
    for step in range(STEPS):
        outs = [torch.empty(ROW) for _ in range(size)]
        outcomes = simulate(
            [
                reduce_rows(
                    gradient(r, step, size, dtype),
                    outs[r],
                    owed[r],
                    plans[r],
                    Call(ends[r], Workspace(), step, step),
                )
                for r in range(size)
            ]
        )
        for r in range(size):
            settle(outcomes[r], taken=step != BAD)
            mean = (
                torch.full((ROW,), float("nan"))
                if step == BAD
                else outs[r] * (size if op == dist.ReduceOp.SUM else 1)
            )
            results[r].append(mean.to(dtype))
    return results, HEADER + plans[0][0].own.row_bytes


@pytest.mark.parametrize(
    ("codec", "op", "dtype"),
    [
        ("int8", dist.ReduceOp.SUM, torch.float32),
        ("sign", dist.ReduceOp.AVG, torch.float32),
        ("int4", dist.ReduceOp.AVG, torch.bfloat16),
    ],
)
def test_reduce_scatters_equal_the_simulation_in_bits_and_bytes(pool, tmp_path, codec, op, dtype):
    options = GroupOptions(None, min_numel=100, reduce_scatter=codec)
    seen = pool.run(with_options, f"{tmp_path}/file", options, reduce_scatters, op, dtype, size=3)
    wanted, row = scatter_twin(3, codec, op, dtype)
    whole = sum(numbers(r, 3 * ROW) for r in range(3)).view(3, ROW)
    for rank, (results, exact, counted) in enumerate(seen):
        for step, (got, want) in enumerate(zip(results, wanted[rank], strict=True)):
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), (rank, step)
        torch.testing.assert_close(exact, whole[rank], rtol=1e-5, atol=1e-5)
        assert counted["calls"] == {"reduce_scatter": STEPS}
        assert counted["exact_calls"] == {"not in a backward": 1}
        assert counted["skipped_calls"] == 1
        assert counted["wire_bytes"] == STEPS * 2 * row, "one way, to two peers"
        assert counted["logical_bytes"] == STEPS * 4 * 2 * ROW


# ---------------------------------------------------------------- all-gather and all-to-all


def gathers(dtype):
    rank, size, results = dist.get_rank(), dist.get_world_size(), []
    for step in range(2):
        out = torch.empty(size * ROW, dtype=dtype)
        work = all_gather_single(out, numbers(10 * step + rank, ROW, dtype), async_op=bool(step))
        if step:
            work.wait()
        results.append(out)
    rows = [torch.empty(ROW) for _ in range(size)]
    dist.all_gather(rows, numbers(rank, ROW))
    bad = torch.empty(size * ROW)
    all_gather_single(bad, torch.full((ROW,), float("inf") if rank == 0 else 1.0))
    return results, rows, bad.isnan().all().item(), counters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_gathers_equal_the_simulation_in_bits_and_bytes(pool, tmp_path, dtype):
    size, options = 3, GroupOptions(None, min_numel=100, all_gather="int8")
    seen = pool.run(with_options, f"{tmp_path}/file", options, gathers, dtype, size=size)
    plans = [
        deals(
            [Part("all", 0, ROW, size * ROW)], policy_of("int8"), rank=r, ranks=size, feedback=False
        )
        for r in range(size)
    ]
    row = HEADER + plans[0][0].own.row_bytes
    for step in range(2):
        outs = [torch.empty(size * ROW, dtype=dtype) for _ in range(size)]
        simulate(
            [
                gather_rows(
                    numbers(10 * step + r, ROW, dtype),
                    outs[r],
                    plans[r],
                    Call(t, Workspace()),
                )
                for r, t in enumerate(Loopback(size).transports())
            ]
        )
        assert all(torch.equal(results[step], outs[0]) for results, *_ in seen)
    for _, rows, bad, counted in seen:
        assert all(torch.equal(x, numbers(r, ROW)) for r, x in enumerate(rows)), (
            "a list is left alone"
        )
        assert bad, "infinity on one rank"
        assert counted["calls"] == {"all_gather": 3}
        assert counted["exact_calls"] == {"several tensors or unequal rows": 1}
        assert counted["wire_bytes"] == 3 * 2 * row


SPLITS = ((5, 0, 3), (2, 4, 1), (0, 6, 2))  # rows that each rank gives to each


def exchanges():
    rank, size = dist.get_rank(), dist.get_world_size()
    gives, takes = list(SPLITS[rank]), [row[rank] for row in SPLITS]
    tokens = numbers(rank, 16 * sum(gives)).view(-1, 16)
    out, even, integers = (
        torch.empty(sum(takes), 16),
        torch.empty(2 * size, 16),
        torch.empty(size, dtype=torch.int64),
    )
    dist.all_to_all_single(out, tokens, takes, gives)
    dist.all_to_all_single(even, numbers(9 + rank, 32 * size).view(-1, 16))
    dist.all_to_all_single(integers, torch.arange(size) + 10 * rank)
    return out, even, integers, counters()


def test_all_to_alls_equal_the_simulation_in_bits_and_bytes(pool, tmp_path):
    size, options = 3, GroupOptions(None, all_to_all="int8")
    seen = pool.run(with_options, f"{tmp_path}/file", options, exchanges, size=size)
    outs = [torch.empty(sum(row[r] for row in SPLITS), 16) for r in range(size)]
    evens, ends = (
        [torch.empty(2 * size, 16) for _ in range(size)],
        [Recorded(t) for t in Loopback(size).transports()],
    )
    simulate(
        [
            compressed_all_to_all(
                outs[r],
                numbers(r, 16 * sum(SPLITS[r])).view(-1, 16),
                codec="int8",
                transport=ends[r],
                way=Way(),
                out_splits=[row[r] for row in SPLITS],
                in_splits=SPLITS[r],
            )
            for r in range(size)
        ]
    )
    simulate(
        [
            compressed_all_to_all(
                evens[r],
                numbers(9 + r, 32 * size).view(-1, 16),
                codec="int8",
                transport=ends[r],
                sequence=1,
            )
            for r in range(size)
        ]
    )
    for rank, (out, even, integers, counted) in enumerate(seen):
        assert torch.equal(out, outs[rank])
        assert torch.equal(even, evens[rank])
        assert integers.tolist() == [rank, 10 + rank, 20 + rank]
        assert counted["calls"] == {"all_to_all": 2}
        assert counted["exact_calls"] == {"dtype": 1}
        others = sum(n for r, n in enumerate(SPLITS[rank]) if r != rank)
        assert counted["logical_bytes"] == 4 * 16 * (others + 2 * (size - 1))
        assert 0 < counted["wire_bytes"] < counted["logical_bytes"] / 2 + 4 * (size - 1) * HEADER


def losslessly(dtype):
    """All-gather, all-to-all and broadcast of every pattern of bits, and what was sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    spread = numbers(rank, 1 << 17, torch.float32).to(dtype)
    patterns = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(rank))
    wild = patterns.to(torch.int16 if dtype == torch.bfloat16 else torch.int32).view(dtype)
    wild = wild[: (1 << 16) - 5]
    results = []
    for mine in (spread, wild):
        gathered = torch.empty(size * mine.numel(), dtype=dtype)
        all_gather_single(gathered, mine)
        rows = mine[: 16 * sum(SPLITS[rank])].view(-1, 16)
        out = rows.new_empty(sum(row[rank] for row in SPLITS), 16)
        dist.all_to_all_single(out, rows, [row[rank] for row in SPLITS], list(SPLITS[rank]))
        came = mine.clone()
        dist.broadcast(came, 1)
        results.append([each.view(torch.uint8) for each in (mine, gathered, out, came)])
    halves = torch.ones(3000, dtype=torch.float16)
    dist.broadcast(halves, 0)
    return results, counters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lossless_calls_give_every_bit_and_send_fewer(pool, tmp_path, dtype):
    size, exact = 3, "exact"
    options = GroupOptions(None, 100, all_gather=exact, all_to_all=exact, broadcast=exact)
    seen = pool.run(with_options, f"{tmp_path}/file", options, losslessly, dtype, size=size)
    for which in range(2):
        mine = [results[which][0] for results, _ in seen]
        width = 16 * dtype.itemsize
        for rank, (results, _) in enumerate(seen):
            _, gathered, out, came = results[which]
            assert torch.equal(gathered, torch.cat(mine))
            assert torch.equal(came, mine[1])
            starts = [sum(SPLITS[r][:rank]) for r in range(size)]
            due = [
                mine[r][start * width : (start + SPLITS[r][rank]) * width]
                for r, start in enumerate(starts)
            ]
            assert torch.equal(out.view(-1), torch.cat(due))
    for _, counted in seen:
        assert counted["calls"] == {"all_gather": 2, "all_to_all": 2, "broadcast": 2}
        assert counted["exact_calls"] == {"dtype": 1}
    # all-gathers: (P − 1) rows from each; broadcasts: (P − 1)/P from the root, and as many from all
    spread, wild, item = 1 << 17, (1 << 16) - 5, dtype.itemsize
    raw = item * (size * (size - 1) + 2 * (size - 1)) * (spread + wild)
    sent = sum(counted["wire_bytes"] for _, counted in seen)
    share = {torch.bfloat16: (0.74, 1.1), torch.float32: (0.88, 1.1)}[dtype]
    mixed_share = (share[0] * spread + share[1] * wild) / (spread + wild)
    assert sent < mixed_share * raw


@pytest.mark.parametrize(
    "given", [{"codec": "exact"}, {"reduce_scatter": "exact"}, {"broadcast": "int8"}], ids=str
)
def test_lossless_codecs_are_for_what_is_handed_on(given):
    with pytest.raises(InvalidArgument, match="exact"):
        GroupOptions(**given)
    text = "codec=exact,all_gather=exact,all_to_all=exact,broadcast=exact"
    codecs = group_options_from(text).codecs()
    assert codecs.keys() == {"all_gather", "all_to_all", "broadcast"}


def mixed():
    """Everything at once, some of it later; the second call of rank 1 is another one at last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, row = numbers(rank, 4000), numbers(rank, 2000)
    out, all_rows, own = torch.empty(4000), torch.empty(size * 2000), torch.empty(4000 // size)
    works = [
        dist.all_reduce(x, async_op=True),
        all_gather_single(all_rows, row, async_op=True),
        dist.all_to_all_single(out, numbers(5 + rank, 4000), async_op=True),
        reduce_scatter_single(own, numbers(7 + rank, 4000), async_op=True),
        dist.all_reduce(torch.ones(3), async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    wrong = torch.float32 if rank else torch.bfloat16
    error = caught(
        all_gather_single, torch.empty(size * 2000, dtype=wrong), torch.ones(2000, dtype=wrong)
    )
    return x, all_rows, own, error, counters()


def test_all_of_them_under_way_at_once_and_a_disagreement_named(pool, tmp_path):
    options = GroupOptions(
        "int8", 100, only="everything", reduce_scatter="int8", all_gather="int8", all_to_all="int8"
    )
    one, two = pool.run(with_options, f"{tmp_path}/file", options, mixed, size=2)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    torch.testing.assert_close(one[0], numbers(0, 4000) + numbers(1, 4000), rtol=0, atol=0.1)
    whole = numbers(7, 4000) + numbers(8, 4000)
    torch.testing.assert_close(torch.cat([one[2], two[2]]), whole, rtol=0, atol=0.1)
    for _, _, _, error, counted in (one, two):
        assert isinstance(error, Mismatch)
        assert "2000 bfloat16, codec 'int8/256'" in str(error)
        assert counted["calls"] == {
            "all_reduce": 1,
            "all_gather": 1,
            "all_to_all": 1,
            "reduce_scatter": 1,
        }


def shards(steps):
    model = net()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    seen = train(model, steps)
    return seen, [p.full_tensor().detach() for p in model.parameters()], counters()


def test_fsdp2_goes_through_the_codecs_of_its_two_collectives(pool, tmp_path):
    options = GroupOptions(None, 64, reduce_scatter="int8", all_gather="bf16")
    plain = pool.run(with_options, f"{tmp_path}/plain", None, shards, 6, size=2)
    for (losses, weights, counted), (expected, *_) in zip(
        pool.run(with_options, f"{tmp_path}/file", options, shards, 6, size=2), plain, strict=True
    ):
        assert counted["calls"].keys() == {"all_gather", "reduce_scatter"}
        assert counted["calls"]["reduce_scatter"] == 18
        assert "not in a backward" not in counted["exact_calls"]
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=0.05, atol=0.01)
        assert all(w.isfinite().all() for w in weights)


# ---------------------------------------------------------------- two levels


def in_levels():
    rank = dist.get_rank()
    return [reduced([numbers(10 * s + rank, 4000)], summed)[0] for s in range(STEPS)], counters()


def levels_twin(topology, codec):
    channels, exchanges = [], []
    for transport in Loopback(topology.size).transports():
        channel = Channel(transport)
        channel.levels = Levels(hierarchy_of(topology, transport))
        known = Exchanges(policy_of(codec), topology.size, channel.workspace, levels=channel.levels)
        channels.append(channel)
        where = [Span("call 0 of 4000", 0, 4000)], [(4000,)]
        exchanges.append(known.of(("x",), lambda where=where: where, torch.device("cpu")))
    results = []
    for step in range(STEPS):
        buffers = [numbers(10 * step + r, 4000) for r in range(topology.size)]
        for outcomes in simulate(
            [
                e.steps(c, b, c.call(e.sequences, step))
                for e, c, b in zip(exchanges, channels, buffers, strict=True)
            ]
        ):
            settle(outcomes, taken=True)
        results.append(buffers[0] * topology.size)
    return results, [(channel.sent_bytes, channel.between_bytes) for channel in channels]


@pytest.mark.parametrize(("codec", "nodes"), [("int8", "2x2"), ("sign", "2,1")])
def test_two_levels_equal_the_simulation_in_bits_and_bytes(pool, tmp_path, codec, nodes):
    topology = Topology.parse(nodes)
    options = GroupOptions(codec, 100, topology=nodes)
    seen = pool.run(with_options, f"{tmp_path}/file", options, in_levels, size=topology.size)
    wanted, sent = levels_twin(topology, codec)
    for (results, counted), (total, between) in zip(seen, sent, strict=True):
        assert all(map(torch.equal, results, wanted))
        assert (counted["wire_bytes"], counted["between_bytes"]) == (total, between)


def sub_group():
    half = dist.group.WORLD.split_group([0, 1])
    return None if half is None else half.pg_options


def test_a_topology_is_of_all_ranks(pool, tmp_path):
    options = GroupOptions("int8", topology="2x2")
    (seen, *_) = pool.run(with_options, f"{tmp_path}/file", options, sub_group, size=4)
    assert seen == GroupOptions("int8")
    for error in pool.run(caught_making, f"{tmp_path}/other", options, size=2):
        assert "InvalidArgument: topology '0 1|2 3' has 4 ranks, the group has 2" in error


def caught_making(file, options):
    error = caught(with_options, file, options, counters)
    return f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------- checkpoints


def trained(first, last, state):
    """Steps of two all-reduces and a reduce-scatter in a backward, and an all-gather; the state
    after them."""
    group, rank, size, results = dist.group.WORLD, dist.get_rank(), dist.get_world_size(), []
    if state is not None:
        group.load_state_dict(*state)
    for step in range(first, last):
        draw = [numbers(1000 * step + 10 * i + rank, 906) for i in range(3)]
        results += reduced(draw[:2], summed) + reduced(draw[2:], scattered)
        out = torch.empty(size * 301)
        all_gather_single(out, draw[0][:301].clone())
        results.append(out)
    return results, stored(group.state_dict())


EVERYTHING = GroupOptions("int4", 100, reduce_scatter="sign", all_gather="int8")
NOISE = GroupOptions("terngrad", 100, reduce_scatter="randk-32")
NODES = GroupOptions("sign", 100, reduce_scatter="sign", topology="2,1")
SEVERAL = pytest.mark.parametrize(
    "options", [EVERYTHING, NOISE, NODES], ids=["everything", "noise", "nodes"]
)


@SEVERAL
def test_a_run_that_was_saved_goes_on_bit_for_bit(pool, tmp_path, options):
    whole = pool.run(with_options, f"{tmp_path}/whole", options, trained, 0, 6, None, size=3)
    begun = pool.run(with_options, f"{tmp_path}/begun", options, trained, 0, 3, None, size=3)
    states = [state for _, state in begun]
    ended = pool.run(resumed, f"{tmp_path}/ended", options, states, size=3)
    for (expected, last), (before, _), (after, state) in zip(whole, begun, ended, strict=True):
        assert all(map(torch.equal, expected, before + after))
        assert last["calls"] == state["calls"]
        for kind in ("residuals", "scattered"):
            assert last[kind].keys() == state[kind].keys()
            assert last[kind] or (kind, options) == ("residuals", NOISE)
            for key, kept in last[kind].items():
                assert all(torch.equal(kept[name], state[kind][key][name]) for name in kept)


def resumed(file, options, states):
    return with_options(file, options, trained, 3, 6, [states[dist.get_rank()]])


def refusals(states):
    group, rank = dist.group.WORLD, dist.get_rank()
    own, other = states[rank], states[1 - rank]
    wrong = [
        own | {"codecs": {"all_reduce": "int8/256"}},
        other,
        own | {"size": 5},
        {"format": 1},
        own | {"format": 2},
        own | {"nodes": "0|1"},
    ]
    return [str(caught(group.load_state_dict, state)) for state in wrong], group.state_dict()[
        "calls"
    ]


def test_a_state_of_something_else_is_refused_by_name(pool, tmp_path):
    states = [
        state
        for _, state in pool.run(
            with_options, f"{tmp_path}/one", EVERYTHING, trained, 0, 1, None, size=2
        )
    ]
    for errors, calls in pool.run(
        with_options, f"{tmp_path}/two", EVERYTHING, refusals, states, size=2
    ):
        wanted = (
            "with the codecs",
            "load each rank's own",
            "of 5, this is rank",
            "expected what state_dict()",
            "of another version",
            "topology",
        )
        assert all(text in error for text, error in zip(wanted, errors, strict=True)), errors
        assert calls == {}, "nothing was loaded"


# ---------------------------------------------------------------- NCCL's way


class GlooAsNccl(inner.CardTransport):
    """Torch's collectives in an order of their own, without checksums, in a group that torch does
    not know."""

    given_up: ClassVar[list[str]] = []

    def takes(self, tensor):
        """Tensors of the processor are the card's here."""
        return True

    def abandon(self, reason):
        self.given_up.append(reason)
        super().abandon(reason)


def gloo_group(store, rank, size, timeout):
    # nothing ends a wait of Gloo's earlier, as NCCL's abort does
    timeout = min(timeout, timedelta(seconds=10))
    kinds, group = dist.ProcessGroup.BackendType, dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(
        torch.device("cpu"), kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout)
    )
    return group


def on_a_twin(file, options, function, *args):
    """As ``with_options``; tensors of the processor go as those on a card do: early, over NCCL,
    headers of rows read late."""
    waits, read, private = [], LateHeaders.read, inner.private_transports
    GlooAsNccl.given_up.clear()

    def with_card(given, store, rank, size, timeout, check):
        card = partial(GlooAsNccl, dist.PrefixStore("card", store), rank, size, timeout)
        return {**private(given, store, rank, size, timeout, check), "card": card}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inner, "card_group", gloo_group)
        patched.setattr(group_module, "private_transports", with_card)
        patched.setattr(reducer.GroupReducer, "_kind", lambda self, device: "card")
        patched.setattr(group_module, "at_once", lambda inner, tensors: bool(tensors))
        patched.setattr(allreduce, "reads_late", lambda *_: True)
        patched.setattr(LateHeaders, "read", lambda self: (waits.append(1), read(self))[1])
        done = with_options(file, options, function, *args)
        return done, len(waits), list(GlooAsNccl.given_up)


@SEVERAL
def test_over_nccl_come_the_bits_of_the_processor(pool, tmp_path, options):
    plain = pool.run(with_options, f"{tmp_path}/plain", options, trained, 0, 4, None, size=3)
    twins = pool.run(on_a_twin, f"{tmp_path}/twin", options, trained, 0, 4, None, size=3)
    for (expected, last), ((results, state), waits, given_up) in zip(plain, twins, strict=True):
        assert all(map(torch.equal, results, expected))
        assert state["calls"] == last["calls"]
        for key, kept in last["residuals"].items():
            assert all(torch.equal(kept[name], state["residuals"][key][name]) for name in kept)
        assert waits == 8 or options.topology is not None, "one wait for an all-reduce"
        assert not given_up


def test_all_to_alls_over_nccl(pool, tmp_path):
    plain, twins = (
        pool.run(
            how,
            f"{tmp_path}/{how.__name__}",
            GroupOptions(None, all_to_all="int8"),
            exchanges,
            size=3,
        )
        for how in (with_options, on_a_twin)
    )
    for (*expected, _), ((*got, counted), *_) in zip(plain, twins, strict=True):
        assert all(map(torch.equal, got, expected))
        assert counted["calls"] == {"all_to_all": 2}


def bad_then_different():
    """NaN on one rank, then another shape on one rank."""
    rank = dist.get_rank()
    x = torch.full((903,), float("nan") if rank == 1 else 1.0)
    dist.all_reduce(x)
    error = caught(dist.all_reduce, torch.ones(903 + rank))
    deadline = time.monotonic() + 30
    while not GlooAsNccl.given_up and time.monotonic() < deadline:  # by the guard's thread
        time.sleep(0.01)
    return x.isnan().all().item(), error, counters()


def test_over_nccl_a_disagreement_is_named_and_ends_what_is_under_way(pool, tmp_path):
    options = GroupOptions("int8", 100, only="everything")
    for (bad, error, counted), _, given_up in pool.run(
        on_a_twin, f"{tmp_path}/file", options, bad_then_different, size=2
    ):
        assert bad
        assert isinstance(error, Mismatch)
        assert "another shape" in str(error) or "903 float32" in str(error)
        assert (counted["skipped_calls"], counted["compressed_calls"]) == (1, 1)
        assert given_up


def by_future():
    """As DDP waits: for the future, not the work."""
    x = torch.full((4000,), 127.0)
    work = dist.all_reduce(x, async_op=True)
    (out,) = work.get_future().wait()
    return out.data_ptr() == x.data_ptr(), x.unique().tolist()


def test_futures_hold_the_tensor_itself(pool, tmp_path):
    options = GroupOptions("int8", 100, only="everything")
    assert (
        pool.run(with_options, f"{tmp_path}/file", options, by_future, size=2)
        == [(True, [254.0])] * 2
    )
    assert [
        seen for seen, *_ in pool.run(on_a_twin, f"{tmp_path}/twin", options, by_future, size=2)
    ] == [(True, [254.0])] * 2


def test_futures_of_calls_on_a_card_are_those_of_its_streams(monkeypatch):
    """Whoever waits for one of them, C++ among them, has its stream wait for the job's."""
    asked = []
    monkeypatch.setattr("commpress.work.torch.futures.Future", lambda **given: asked.append(given))
    work = call.GroupWork(None, lambda work: None, [OnCard()])
    work.get_future()
    assert asked == [{"devices": [torch.device("cuda", 0)]}]


def test_a_call_for_which_a_backend_returns_no_work_is_done():
    """NCCL has none for a synchronous call, which the caller's stream runs."""
    x = torch.ones(3)
    work = call.GroupWork(None, lambda work: None, [x])
    early = work.get_future()
    work.start()
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    assert early.wait()[0] is work.get_future().wait()[0] is x


class OnCard:
    """Stand-in for a tensor."""

    device = torch.device("cuda", 0)
    is_cuda = True


def test_tensors_on_cuda_go_over_nccl_where_it_is_and_by_the_host_where_not(monkeypatch):
    here, store = dist.ProcessGroup(dist.HashStore(), 0, 1), dist.HashStore()
    for available, kinds in ((True, {"cpu", "cuda"}), (False, {"cpu"})):
        monkeypatch.setattr(inner, "has_nccl", lambda available=available: available)
        assert inner.private_transports(here, store, 0, 1, timedelta(seconds=1)).keys() == kinds
        assert inner.at_once(here, [OnCard()]) == available
    monkeypatch.setattr(inner, "has_nccl", lambda: True)
    assert inner.private_transports(object(), store, 0, 1, timedelta(seconds=1)).keys() == {
        "cpu"
    }, "over MPI"
