"""AllToAll under autograd: gradients are the exchange with splits exchanged, exact and
compressed."""

import threading

import pytest
import torch
import torch.distributed as dist

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


@pytest.mark.parametrize(
    ("topology", "codec", "gradient_codec", "tell"),
    [
        (None, "none", None, True),
        (NODES, "none", None, False),
        (None, "fp8", None, False),
        (NODES, "bf16", "int8", True),
    ],
    ids=str,
)
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
        # 4 of scale, 12 up to a multiple of 16
        assert sent == 6 * (64 + (6 * 16 * 2 if most == 0 else 6 * 16 + 16))


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


def refused():
    exchange = commpress.AllToAll("int8")
    return [
        caught(exchange, torch.ones(3, 2)),
        caught(exchange, torch.ones(4, 2, dtype=torch.float64)),
        caught(exchange, torch.ones(4, 2), [2, 2], [3, 3]),
        *(caught(commpress.AllToAll, codec) for codec in ("int9", "sign", "powersgd-2")),
        caught(commpress.AllToAll, gradient_codec="topk-64"),
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_mistakes_are_refused_before_anything_is_sent(pool, size):
    """Codecs that leave nothing of a row at construction."""
    says = [
        "cannot share evenly",
        "inp has dtype torch.float64",
        r"splits of inp are \[3, 3\]",
        "did you mean 'int8'",
        "codec is 'sign",
        "codec 'powersgd",
        "gradient_codec is 'topk",
    ]
    for errors in pool.run(refused, size=size):
        for i, (error, text) in enumerate(zip(errors, says, strict=True)):
            if size == 1 and i in (0, 2):  # one rank shares evenly, and takes other splits
                continue
            with pytest.raises(InvalidArgument, match=text):
                raise error


def test_without_a_process_group():
    for make in (commpress.AllToAll, lambda: commpress.ExpertExchange(4)):
        with pytest.raises(InvalidArgument, match="call init_process_group before"):
            make()
