"""Compression through a process group: what options say, what is left alone, and the same bits as
the simulation."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commpress
from commpress.codecs import SignCodec, policy_of
from commpress.collectives.allreduce import Call, Workspace, reduce_bucket
from commpress.collectives.buckets import Span, messages
from commpress.collectives.frame import HEADER
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.transports.sockets import SocketTransport
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.integrations.process_group.group_options import GroupOptions, group_options_from
from commpress.integrations.process_group.reducer import KEPT_BACKWARDS
from commpress.torch_private import reduce_scatter_single
from group_calls import as_world

# ---------------------------------------------------------------- what options say


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", None),
        ("exact", None),
        ("int8", GroupOptions("int8")),
        ("codec=sign", GroupOptions("sign")),
        (
            "codec=int8, min_numel=10, ops=avg, only=everything",
            GroupOptions("int8", 10, ["avg"], "everything"),
        ),
        ("bf16,ops=sum+avg", GroupOptions("bf16", ops=(dist.ReduceOp.SUM, dist.ReduceOp.AVG))),
    ],
)
def test_options_as_text(text, options):
    assert group_options_from(text) == options


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sing", "did you mean 'sign'"),
        ("codec=sign,codec=int8", "once"),
        ("codec=sign,min=3", "min_numel="),
        ("sign,min_numel=-3", "min_numel should be"),
        ("sign,min_numel=0", "min_numel is 0"),
        ("sign,ops=max", "'max'"),
        ("sign,only=weights", "only is 'weights'"),
        ("__import__('os')", "codec is"),
        ("powersgd-4", "needs matrices"),
    ],
)
def test_a_wrong_text_says_what_is_wrong(text, complaint):
    with pytest.raises(InvalidArgument, match=complaint):
        group_options_from(text)


def test_the_environment_counts_only_without_an_argument(monkeypatch):
    monkeypatch.setenv("COMMPRESS_GROUP_OPTIONS", "int8,min_numel=5")
    assert group_options_from(None) == GroupOptions("int8", 5)
    assert group_options_from("exact") is None
    assert group_options_from(commpress.GroupOptions("sign")) == GroupOptions("sign")
    monkeypatch.setenv("COMMPRESS_GROUP_OPTIONS", "int9")
    with pytest.raises(InvalidArgument, match="int9"):
        group_options_from(None)


def test_something_that_is_no_options():
    with pytest.raises(InvalidArgument, match="dict"):
        group_options_from({"codec": "sign"})


# ---------------------------------------------------------------- call sites


class Reduce(torch.autograd.Function):
    """All-reduces the gradient that comes back, as DDP does with a bucket."""

    @staticmethod
    def forward(ctx, x, op):
        ctx.op = op
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, ctx.op)
        return gradient, None


NUMELS = (300, 41, 300)  # two sites of one length in one backward; the one between is too small
STEPS, BAD = 5, 2


def gradient_of(rank, step, site):
    values = torch.randn(
        NUMELS[site], generator=torch.Generator().manual_seed(100 * step + 10 * site + rank)
    )
    if (rank, step, site) == (1, BAD, 2):
        values[7] = float("inf")
    return values


def backwards(op):
    """All that each site got at each step, a norm reduced in between, and the counters."""
    rank, results = dist.get_rank(), []
    for step in range(STEPS):
        inputs = [torch.zeros(numel, requires_grad=True) for numel in NUMELS]
        reduced = [Reduce.apply(x, op) for x in inputs]
        sum((y * gradient_of(rank, step, i)).sum() for i, y in enumerate(reduced)).backward()
        results.append([x.grad for x in inputs])
        metric = gradient_of(rank, step, 0)
        dist.all_reduce(metric)
        results[-1].append(metric)
    return results, dist.group.WORLD.counters.as_dict()


def twin(size, codec, average):
    """The same over the simulation: sites in the order in which backward meets them, last first."""
    plans = {i: messages([Span("tensor", 0, NUMELS[i])], policy_of(codec), size) for i in (2, 0)}
    owed = {
        i: [[ErrorFeedback.zeros(m.pieces) for m in plan] for _ in range(size)]
        for i, plan in plans.items()
    }
    results = [[] for _ in range(size)]
    for step in range(STEPS):
        outputs = {}
        for i, plan in plans.items():
            buffers = [gradient_of(rank, step, i) for rank in range(size)]
            if (step, i) == (BAD, 2):
                outputs[i] = [torch.full_like(b, float("nan")) for b in buffers]
                continue
            outcomes = simulate(
                [
                    reduce_bucket(
                        b,
                        f,
                        messages=plan,
                        call=Call(transport=t, workspace=Workspace(), sequence=0, key=step),
                    )
                    for b, f, t in zip(buffers, owed[i], Loopback(size).transports(), strict=True)
                ]
            )
            for outcome in (o for rank in outcomes for o in rank):
                outcome.commit()
            outputs[i] = [b if average else b * size for b in buffers]
        exact = sum(gradient_of(rank, step, 1) for rank in range(size))
        metric = sum(gradient_of(rank, step, 0) for rank in range(size))
        for rank in range(size):
            results[rank].append([outputs[0][rank], exact, outputs[2][rank], metric])
    return results


@pytest.mark.parametrize("codec", ["sign", "int8", SignCodec(block=0)], ids=str)
@pytest.mark.parametrize("average", [False, True], ids=["sum", "avg"])
def test_every_call_site_equals_the_simulation(pool, tmp_path, codec, average):
    options = GroupOptions(codec, min_numel=100)
    seen = pool.run(run_backwards, f"{tmp_path}/file", average, options, size=3)
    for (results, counters), expected in zip(seen, twin(3, codec, average), strict=True):
        for step, (got, want) in enumerate(zip(results, expected, strict=True)):
            for i in (0, 2):
                assert torch.equal(got[i].nan_to_num(7.0), want[i].nan_to_num(7.0)), (step, i)
            small = want[1] / 3 if average else want[1]
            # another order of adding
            torch.testing.assert_close(got[1], small, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[3], want[3], rtol=1e-5, atol=1e-5)
        assert counters["compressed_calls"] == 2 * STEPS
        assert counters["skipped_calls"] == 1
        assert counters["compressed_elements"] == 600 * STEPS
        assert counters["exact_calls"] == {"small": STEPS, "not in a backward": STEPS}
        plans = [messages([Span("tensor", 0, 300)], policy_of(codec), 3) for _ in range(2 * STEPS)]
        rows = [HEADER + m.pieces.row_bytes for plan in plans for m in plan]
        assert counters["wire_bytes"] == 2 * 2 * sum(rows), "both ways, to two peers"


def run_backwards(file, average, options):
    return as_world(
        "commpress",
        file,
        backwards,
        dist.ReduceOp.AVG if average else dist.ReduceOp.SUM,
        pg_options=options,
    )


def changing_sites():
    for step in range(KEPT_BACKWARDS + 4):
        x = torch.zeros(300 if step < 2 else 301, requires_grad=True)
        Reduce.apply(x, dist.ReduceOp.SUM).sum().backward()
    return dist.group.WORLD.counters.dropped_sites, len(dist.group.WORLD.reducer._sites)


def test_a_site_that_does_not_come_again_is_let_go_and_counted(pool, tmp_path):
    assert (
        pool.run(with_options, f"{tmp_path}/file", changing_sites, GroupOptions("sign", 1), size=2)
        == [(1, 1)] * 2
    )


def with_options(file, function, options, *args):
    return as_world("commpress", file, function, *args, pg_options=options)


def reentrant_backwards():
    """Gradients that two checkpoints with blocks of one length got."""
    rank, results = dist.get_rank(), []

    def block(x, i):
        return Reduce.apply(x, dist.ReduceOp.SUM) * gradient_of(rank, 0, i)

    for _ in range(3):
        inputs = [torch.zeros(300, requires_grad=True) for _ in range(2)]
        made = [checkpoint(block, x, 2 * i, use_reentrant=True) for i, x in enumerate(inputs)]
        (made[0] + made[1]).sum().backward()
        results.append([x.grad for x in inputs])
    return results, dist.group.WORLD.counters.as_dict()


def test_backwards_of_reentrant_checkpoints_are_exact_and_counted(pool, tmp_path):
    """Each is a backward of its own to torch, so the first call of one block and that of another
    would share a residual."""
    for results, counters in pool.run(
        with_options, f"{tmp_path}/file", reentrant_backwards, GroupOptions("sign", 1), size=2
    ):
        for got in results:
            for i in range(2):
                assert torch.equal(got[i], gradient_of(0, 0, 2 * i) + gradient_of(1, 0, 2 * i))
        assert counters["exact_calls"] == {"in a backward within another": 6}
        assert counters["compressed_calls"] == 0


# ---------------------------------------------------------------- everything


def overlapping_calls():
    """Two asynchronous calls of each kind with equal numbers, which bfloat16 has exactly."""
    found = []
    numel = (1 << 23) + 16  # more than a message, so that calls interleave
    ones = torch.ones(numel, dtype=torch.bfloat16)
    works, tensors = [], [ones.clone(), 4 * ones]
    works += [dist.all_reduce(x, async_op=True) for x in tensors]
    rows = [torch.empty(numel // 2, dtype=torch.bfloat16) for _ in range(2)]
    for row, given in zip(rows, (ones, 4 * ones), strict=True):
        works.append(reduce_scatter_single(row, given, async_op=True))
    for work in works:
        work.wait()
    for tensor in (*tensors, *rows):
        found.append(tensor.unique().tolist())
    return found, dist.group.WORLD.counters.compressed_calls


def test_overlapping_calls_of_one_length_stay_apart(pool, tmp_path):
    options = GroupOptions("bf16", reduce_scatter="bf16", only="everything")
    assert (
        pool.run(with_options, f"{tmp_path}/file", overlapping_calls, options, size=2)
        == [([[2.0], [8.0], [2.0], [8.0]], 4)] * 2
    )


def outside_of_backward():
    """int8 of small whole numbers whose largest is 127 is exact: what differs from it was not
    compressed by int8."""
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32):
        tensor = torch.full((200,), 127.0).to(dtype)
        dist.all_reduce(tensor)
        results.append((tensor.unique().tolist(), tensor.dtype))
    dist.all_reduce(torch.ones(200), dist.ReduceOp.MAX)
    for tensor in (torch.ones(20, 20).t()[:10], torch.ones(100)):
        dist.all_reduce(tensor.contiguous())
    return results, dist.group.WORLD.counters.as_dict()


def test_everything_takes_what_it_can_and_counts_the_rest(pool, tmp_path):
    options = GroupOptions("int8", min_numel=150, only="everything")
    for results, counters in pool.run(
        with_options, f"{tmp_path}/file", outside_of_backward, options, size=2
    ):
        assert results == [
            ([254.0], torch.float32),
            ([254.0], torch.bfloat16),
            ([254.0], torch.float64),
            ([254], torch.int32),
        ]
        assert counters["compressed_calls"] == 3
        assert counters["exact_calls"] == {"dtype": 2, "reduction": 1, "small": 1}
        assert counters["ratio"] > 2


COARSE = ["sign", "sign-l1", "ternary", "int4", "log3", "bits4", "topk-16", "randk-32"]


@pytest.mark.parametrize(
    ("option", "codec"),
    [(o, c) for o in ("codec", "reduce_scatter") for c in COARSE],
)
def test_everything_refuses_codecs_that_need_the_residuals_of_a_backward(option, codec):
    given = {"codec": None} | {option: codec}
    assert GroupOptions(**given, only="gradients").codecs()
    with pytest.raises(
        InvalidArgument,
        match=rf"^{option} is '{codec}', which needs residuals.*Use only='gradients'; or",
    ):
        GroupOptions(**given, only="everything")


def averaged_by_hand(steps):
    """Error of the sum of a gradient that a loop averages after each backward, and of the same by a
    reduce-scatter."""
    rank, size, errors = dist.get_rank(), dist.get_world_size(), []
    gradients = [torch.randn(4096, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    exact = sum(gradients) / size
    part = exact.chunk(size)[rank]
    sums = torch.zeros(4096), torch.zeros_like(part)
    for step in range(1, steps + 1):
        p = torch.nn.Parameter(torch.zeros(4096))
        (p * gradients[rank]).sum().backward()
        row = torch.empty_like(part)
        reduce_scatter_single(row, p.grad, dist.ReduceOp.AVG)
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        sums[0].add_(p.grad)
        sums[1].add_(row)
        pairs = zip(sums, (exact, part), strict=True)
        errors.append([float((total / step - want).norm() / want.norm()) for total, want in pairs])
    return errors, dist.group.WORLD.counters.as_dict()["calls"]


@pytest.mark.parametrize(("codec", "limit"), [("int8", 0.02), ("bf16", 0.003), ("terngrad", 0.2)])
def test_gradients_averaged_after_backward_add_up_to_the_exact_sum(pool, tmp_path, codec, limit):
    options = GroupOptions(codec, min_numel=1024, only="everything", reduce_scatter=codec)
    for errors, calls in pool.run(
        with_options, f"{tmp_path}/file", averaged_by_hand, options, 40, size=2
    ):
        assert calls == {"all_reduce": 40, "reduce_scatter": 40}
        assert max(errors[-1]) < limit


# ---------------------------------------------------------------- training


def hooked(codec):
    """The hook over a group of this backend: its messages go over connections of their own."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(32, 256))
    state = commpress.compress(model, codec)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        model(x).square().mean().backward()
    assert type(state.channel.inner) is SocketTransport
    return [p.grad.clone() for p in model.parameters()]


def test_the_hook_gives_the_same_over_this_backend_and_over_gloo(pool, tmp_path):
    results, expected = (
        pool.run(as_world, backend, f"{tmp_path}/file", hooked, "sign", size=2)
        for backend in ("commpress", "gloo")
    )
    for one, two in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def train(text):
    """DDP with a codec by environment; a metric and the norm of the gradients are reduced outside
    of backward."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1, bias=False))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    made = torch.Generator().manual_seed(dist.get_rank())
    target, losses, exact = torch.linspace(-1, 1, 32), [], True
    for _ in range(60):
        x = torch.randn(64, 32, generator=made)
        loss = (model(x).squeeze(1) - x @ target).square().mean()
        loss.backward()
        metric = torch.randn(5000, generator=made)
        parts = [torch.empty(5000) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, metric)
        dist.all_reduce(metric)
        exact &= torch.equal(metric, sum(parts))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    same = torch.cat([p.detach().flatten() for p in model.parameters()])
    other = same.clone()
    dist.broadcast(other, 0)
    return losses, exact, torch.equal(same, other), dist.group.WORLD.counters.as_dict()


def train_under(file, text):
    os.environ["COMMPRESS_GROUP_OPTIONS"] = text
    try:
        return as_world("commpress", file, train, text)
    finally:
        del os.environ["COMMPRESS_GROUP_OPTIONS"]


def test_ddp_under_the_environment_variable(pool, tmp_path):
    (plain, *_), _ = pool.run(train_under, f"{tmp_path}/plain", "exact", size=2)
    for losses, exact, same, counters in pool.run(
        train_under, f"{tmp_path}/file", "sign,min_numel=1000", size=2
    ):
        assert exact, "a metric was touched"
        assert same, "ranks have different parameters"
        assert losses != plain, "nothing was compressed"
        assert sum(losses[-10:]) < 0.1 * sum(losses[:3]) / 3 * 10
        assert counters["compressed_calls"] >= 59
        assert counters["ratio"] > 15
        assert "not in a backward" in counters["exact_calls"]
