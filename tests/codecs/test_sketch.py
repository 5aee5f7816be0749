"""The summable sketch: exact on integers, linear, and dense where it cannot tell elements apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import ByName, SketchCodec, policy_of
from commpress.collectives.allreduce import Workspace
from commpress.collectives.buckets import Span
from commpress.collectives.sketch import SketchPlan, load_quanta, plan_sketches, reduce_sketch
from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.errors import InvalidArgument, StateMismatch
from commpress.feedback import ErrorFeedback
from commpress.kernels.cpu import cells as cpu_cells


def sparse(numel, count, seed):
    """Integers, so that sums and differences are exact."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.zeros(numel)
    places = torch.randperm(numel, generator=draw)[:count]
    x[places] = (
        torch.randint(1, 1000, (count,), generator=draw).float() * (1 - 2 * (places % 2)).float()
    )
    return x


def sketched(x, cells, seed=0):
    table, bitmap = torch.zeros(cells), torch.zeros(-(-x.numel() // 8), dtype=torch.uint8)
    cpu_cells.add(x, table, bitmap, seed=seed)
    return table, bitmap


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 3000), seed=st.integers(0, 2**20))
def test_enough_cells_give_every_integer_back(count, seed):
    x, out = sparse(20_000, count, seed), torch.full((20_000,), 9.0)
    table, bitmap = sketched(x, 3 * ((int(1.5 * count) + 48) // 3), seed)
    left = cpu_cells.peel(table, bitmap, out, seed=seed)
    if left == 0:  # else a few share all their cells: likely with few elements only
        assert torch.equal(out, x)
        assert not table.any()
    assert left <= 12


def test_too_few_cells_are_seen():
    x = sparse(20_000, 3000, 0)
    table, bitmap = sketched(x, 3300)
    assert cpu_cells.peel(table, bitmap, torch.empty(20_000)) > 1000


def test_sketches_add():
    a, b = sparse(5000, 300, 1), sparse(5000, 300, 2)
    assert torch.equal(sketched(a, 999)[0] + sketched(b, 999)[0], sketched(a + b, 999)[0])


def test_nothing_gives_nothing():
    table, bitmap = sketched(torch.zeros(100), 48)
    out = torch.full((100,), 9.0)
    assert cpu_cells.peel(table, bitmap, out) == 0
    assert not out.any()


# ---------------------------------------------------------------- over ranks


class Ranks:
    """Several ranks in one process that sketch the same two tensors, of unlike magnitude."""

    def __init__(self, ranks, numel, codec):
        spans = [
            Span("a", 0, numel // 3),
            Span("exact", numel // 3, 0),
            Span("b", numel // 3, numel - numel // 3),
        ]
        self.quanta = [{} for _ in range(ranks)]
        self.plans = [
            plan_sketches(spans, policy_of(codec), ranks, quanta)[0] for quanta in self.quanta
        ]
        self.feedbacks = [ErrorFeedback.zeros(plan.message.pieces) for plan in self.plans]
        self.workspaces = [Workspace() for _ in range(ranks)]

    def reduce(self, inputs, step, gain=1.0):
        transports, buffers = (
            [Recorded(t) for t in Loopback(len(inputs)).transports()],
            [x.clone() for x in inputs],
        )
        outcomes = simulate(
            [
                reduce_sketch(
                    buffer,
                    feedback,
                    plan=plan,
                    transport=transport,
                    workspace=workspace,
                    gain=gain,
                    key=step,
                    sequence=SketchPlan.MESSAGES * step,
                )
                for buffer, feedback, plan, transport, workspace in zip(
                    buffers, self.feedbacks, self.plans, transports, self.workspaces, strict=True
                )
            ]
        )
        for outcome in outcomes:
            outcome.commit() if outcome.finite else outcome.discard()
        return buffers, [outcome.finite for outcome in outcomes], transports[0].sent_bytes

    @property
    def dense(self):
        return [workspace.dense_sketches for workspace in self.workspaces]


def inputs_of(ranks, numel, step):
    x = torch.randn(ranks, numel, generator=torch.Generator().manual_seed(step))
    x[:, : numel // 3] *= 1e-3
    return list(x)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nothing_is_lost(ranks):
    numel = 20_011
    group = Ranks(ranks, numel, "sketch-64")
    sent, wanted = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(10):
        inputs, before = inputs_of(ranks, numel, step), group.dense[0]
        outputs, finite, count = group.reduce(inputs, step)
        assert all(finite)
        assert all(torch.equal(outputs[0], other) for other in outputs)
        sent += outputs[0]
        wanted += torch.stack(inputs).double().mean(0)
        assert (
            ranks == 1 or group.dense[0] > before or count < 0.3 * 8 * numel * (ranks - 1) / ranks
        )
    owed = torch.stack([f.sent for f in group.feedbacks]).double().mean(0)
    assert float((sent + owed - wanted).abs().max()) < 1e-4
    assert group.dense[0] in (1, 2, 3)
    assert len(set(group.dense)) == 1
    assert all(quanta == group.quanta[0] for quanta in group.quanta)
    assert group.quanta[0]["a"] < group.quanta[0]["b"] / 100  # each its own


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_cells_say_what_a_dense_exchange_says(ranks):
    """Whole multiples of quanta: both ways give the same bits, so it is of no matter who shares
    cells with whom."""
    numel = 5000
    cells, dense = Ranks(ranks, numel, "sketch-32"), Ranks(ranks, numel, "sketch-32")
    for plan in dense.plans:
        # far too few
        plan.cells = plan_sketches([Span("a", 0, 300)], policy_of("sketch-32"), ranks, {})[0].cells
    for step in range(5):
        one, two = (
            cells.reduce(inputs_of(ranks, numel, step), step)[0],
            dense.reduce(inputs_of(ranks, numel, step), step)[0],
        )
        assert torch.equal(one[0], two[0])
    assert cells.dense[0] < dense.dense[0] == 5


def test_what_one_rank_has_alone_arrives_whole():
    """A mean of 16 ranks is a sixteenth of it: values cut off near the last mean would give ever
    smaller means."""
    ranks, numel = 16, 2048
    group, inputs = Ranks(ranks, numel, "sketch-16"), list(torch.zeros(ranks, numel))
    for rank, x in enumerate(inputs):
        x[rank::ranks] = torch.randn(numel // ranks, generator=torch.Generator().manual_seed(rank))
    mean, sent = torch.stack(inputs).mean(0), torch.zeros(numel)
    for step in range(6):
        outputs, finite, _ = group.reduce(inputs, step)
        assert all(finite)
        sent += outputs[0]
    assert float((sent / 6 - mean).norm() / mean.norm()) < 0.1


def test_values_that_outgrow_their_quantum_go_densely_and_whole():
    """Opposite values, of which the mean tells nothing, and a leap: both ranks learn of it in the
    same bits."""
    group = Ranks(2, 3000, "sketch-4")
    quiet = [torch.full((3000,), 1e-6), torch.full((3000,), 1e-6)]
    group.reduce(quiet, 0)
    sent, wanted = torch.zeros(3000, dtype=torch.float64), torch.zeros(3000, dtype=torch.float64)
    for step, leap in enumerate((1.0, 1e4, 1e20), 1):
        inputs, dense = [x.clone() for x in quiet], group.dense[0]
        inputs[0][7], inputs[1][7] = leap, -leap
        owed = torch.stack([f.sent for f in group.feedbacks]).double().mean(0)
        outputs, finite, _ = group.reduce(inputs, step)
        assert finite == [True, True]
        assert torch.equal(outputs[0], outputs[1])
        assert group.dense == [dense + 1, dense + 1]
        wanted = torch.stack(inputs).double().mean(0) + owed
        sent = outputs[0].double() + torch.stack([f.sent for f in group.feedbacks]).double().mean(0)
        torch.testing.assert_close(sent, wanted, atol=1e-7, rtol=1e-5)
        assert float(group.feedbacks[0].sent.abs().max()) < 1e-4


def test_a_loss_scale_changes_nothing():
    plain, scaled = Ranks(2, 3000, "sketch-16"), Ranks(2, 3000, "sketch-16")
    for step in range(4):
        inputs = inputs_of(2, 3000, step)
        one, other = (
            plain.reduce(inputs, step)[0],
            scaled.reduce([64 * x for x in inputs], step, gain=1 / 64)[0],
        )
        assert torch.equal(one[0], other[0] / 64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("step", [0, 1])
def test_a_bad_gradient_changes_nothing(bad, step):
    group = Ranks(2, 1000, "sketch-16")
    for before in range(step):
        group.reduce(inputs_of(2, 1000, before), before)
    kept, quanta = [f.sent.clone() for f in group.feedbacks], dict(group.quanta[0])
    inputs = inputs_of(2, 1000, step)
    inputs[1][3] = bad
    outputs, finite, _ = group.reduce(inputs, step)
    assert finite == [False, False]
    assert all(torch.equal(f.sent, was) for f, was in zip(group.feedbacks, kept, strict=True))
    assert torch.equal(outputs[0], inputs[0])
    assert group.quanta[0] == group.quanta[1] == quanta


def test_tensors_of_other_codecs_are_left_alone():
    policy = ByName({"head": "int8"}, policy_of("sketch-64"))
    spans = [Span("body", 0, 500), Span("head", 500, 100), Span("tail", 600, 200)]
    (plan,) = plan_sketches(spans, policy, 2, {})
    assert plan.names == ("body", "tail")
    assert [tuple(run) for run in plan.message.pieces.residual_runs] == [
        (0, 500, 0),
        (600, 200, 500),
    ]


def test_too_few_cells_and_other_mistakes_are_refused():
    with pytest.raises(InvalidArgument, match=r"cells is 1\.1, expected at least 1\.25"):
        SketchCodec(cells=1.1)
    with pytest.raises(InvalidArgument, match="compresses whole tensors"):
        _ = SketchCodec().kind
    with pytest.raises(StateMismatch, match="expected a number above 0"):
        load_quanta({}, {"a": float("nan")})
