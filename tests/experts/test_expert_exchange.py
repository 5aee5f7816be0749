"""AllToAll under autograd: gradients are the exchange with splits exchanged, exact and
compressed."""

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single

import commpress
from commpress.collectives.all_to_all.all_to_all import Way
from commpress.errors import InvalidArgument
from ranks import caught
from test_all_to_all import bits, expected, rows_of, simulated, splits_of

NODES = commpress.Topology(((0, 2), (1,)))


def forward_and_backward(counts, codec, gradient_codec, topology, tell):
    exchange = commpress.AllToAll(codec, gradient_codec=gradient_codec, topology=topology)
    rank = dist.get_rank()
    rows = rows_of(counts, rank, 24).requires_grad_()
    splits = (
        (counts[:, rank].tolist(), counts[rank].tolist()) if tell else (None, counts[rank].tolist())
    )
    out = exchange(rows, *splits)
    gradient = rows_of(counts.T, rank, 24) * 2
    out.backward(gradient)
    return out.detach(), rows.grad


@pytest.mark.parametrize("topology", [None, NODES], ids=["flat", "nodes"])
@pytest.mark.parametrize(
    ("codec", "gradient_codec"), [("none", None), ("fp8", None), ("bf16", "int8")]
)
@pytest.mark.parametrize("tell", [True, False], ids=["both splits", "own splits"])
def test_the_gradient_travels_back(pool, topology, codec, gradient_codec, tell):
    counts = splits_of(3, 4, top=40)
    way, back = (
        simulated(counts, 24, Way(), codec),
        simulated(counts.T, 24, Way(), gradient_codec or codec),
    )
    results = pool.run(forward_and_backward, counts, codec, gradient_codec, topology, tell, size=3)
    for rank, (out, gradient) in enumerate(results):
        assert torch.equal(bits(out), bits(way[rank]))
        # a power of two goes through every codec
        assert torch.equal(bits(gradient), bits(2 * back[rank]))
        if codec == "none":
            assert torch.equal(out, expected(counts, rank, 24))


def like_torchs_own(counts):
    """A layer of experts trained through AllToAll and through torch's functional all-to-all: the
    same gradients."""
    rank = dist.get_rank()
    ins, outs = counts[rank].tolist(), counts[:, rank].tolist()
    exchange = commpress.AllToAll()
    found = []
    for ours in (True, False):
        torch.manual_seed(rank)
        router, expert = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        tokens = router(rows_of(counts, rank, 8))
        if ours:
            back = exchange(expert(exchange(tokens, outs, ins)), ins, outs)
        else:
            there = all_to_all_single(
                torch.empty(sum(outs), 8), tokens.contiguous(), outs, ins, dist.group.WORLD
            )
            back = all_to_all_single(
                torch.empty(sum(ins), 8), expert(there), ins, outs, dist.group.WORLD
            )
        back.square().sum().backward()
        found.append(
            [p.grad.numpy() for p in [*router.parameters(), *expert.parameters()]]
            + [back.detach().numpy()]
        )
    return found


def test_exact_gradients_equal_those_of_torch(pool):
    counts = splits_of(3, 8, top=9) + 1
    for ours, torchs in pool.run(like_torchs_own, counts, size=3):
        for a, b in zip(ours, torchs, strict=True):
            # matrix products round by where their rows lie
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def identity_experts(codec):
    """dispatch ∘ combine with identity experts is the input, up to two roundings of the codec;
    several under way."""
    exchange = commpress.AllToAll(codec)
    rows = torch.randn(
        12, 16, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    errors = []
    for _ in range(3):
        back = exchange(exchange(rows))
        errors.append(float((back.float() - rows.float()).norm() / rows.float().norm()))
    return errors, exchange.transport.sent_bytes


@pytest.mark.parametrize(
    ("codec", "most"), [("none", 0), ("bf16", 0), ("int8", 0.02), ("fp8", 0.06)]
)
def test_there_and_back(pool, codec, most):
    for errors, sent in pool.run(identity_experts, codec):
        assert all(e <= most for e in errors)
        assert (max(errors) > 0) == (most > 0)
        # 4 of scale, 4 up to a multiple of 8
        assert sent == 6 * (64 + (6 * 16 * 2 if most == 0 else 6 * 16 + 8))


def backward_in_another_order():
    """Rank 1 takes the two backward passes the other way round: each has the number its forward
    reserved."""
    exchange = commpress.AllToAll("int8")
    inputs = [torch.full((4, 8), float(2**i)).requires_grad_() for i in range(2)]
    outs = [exchange(x) for x in inputs]
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    threads = [
        threading.Thread(target=lambda i=i: (outs[i] * (i + 1)).sum().backward()) for i in order
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [x.grad.unique().tolist() for x in inputs]


def test_backward_passes_do_not_meet_each_other(pool):
    assert pool.run(backward_in_another_order) == [[[1.0], [2.0]]] * 2


def refused_codecs():
    def said(**codecs):
        with pytest.raises(InvalidArgument) as caught:
            commpress.AllToAll(**codecs)
        return str(caught.value)

    return [said(codec="sign"), said(gradient_codec="topk-64"), said(codec="powersgd-2")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_codecs_that_leave_nothing_of_a_row_are_refused_at_construction(pool, ranks):
    for first, second, third in pool.run(refused_codecs, size=ranks):
        assert first.startswith("codec is 'sign")
        assert second.startswith("gradient_codec is 'topk")
        assert third.startswith("codec 'powersgd")


def refused():
    exchange = commpress.AllToAll("int8")
    return [
        caught(exchange, torch.ones(3, 2)),
        caught(exchange, torch.ones(4, 2, dtype=torch.float64)),
        caught(exchange, torch.ones(4, 2), [2, 2], [3, 3]),
        caught(commpress.AllToAll, "int9"),
    ]


def test_mistakes_are_refused_before_anything_is_sent(pool):
    says = [
        "cannot share evenly",
        "inp has dtype torch.float64",
        r"splits of inp are \[3, 3\]",
        "did you mean 'int8'",
    ]
    for errors in pool.run(refused):
        for error, text in zip(errors, says, strict=True):
            with pytest.raises(InvalidArgument, match=text):
                raise error


def test_without_a_process_group():
    with pytest.raises(InvalidArgument, match="call init_process_group before AllToAll"):
        commpress.AllToAll()
