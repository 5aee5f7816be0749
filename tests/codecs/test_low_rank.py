"""PowerSGD: its arithmetic and the identities it keeps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import commpress
from commpress.codecs import LowRankCodec, codec_named, policy_of
from commpress.collectives.allreduce import Call, Workspace, settle
from commpress.collectives.buckets import Span, share
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.levels import Levels
from commpress.collectives.powersgd import matrices_of, plan_matrices, reduce_matrices
from commpress.collectives.residual_state import flat_parts
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.two_level import hierarchy_of
from commpress.errors import InvalidArgument, StateMismatch
from commpress.feedback import ErrorFeedback
from commpress.kernels import low_rank as torch_low_rank
from commpress.kernels.cpu import low_rank as cpu_low_rank
from commpress.kernels.matrices import Matrix, stack
from commpress.kernels.pieces import aligned
from recorded import Recorded

CPU = torch.device("cpu")


# ---------------------------------------------------------------- arithmetic


def factors(matrices, seed=0):
    """x, residual, and a first basis."""
    draw = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(matrices.numel, generator=draw) for _ in range(2))
    q = torch.zeros(matrices.right)
    cpu_low_rank.orthonormalize_right(q, matrices, seed)
    return x, residual, q


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 300)), min_size=1, max_size=4),
    rank=st.integers(1, 9),
    seed=st.integers(0, 2**20),
)
def test_every_product_is_what_float64_says(shapes, rank, seed):
    lines, at = [], 0
    for i, (tall, wide) in enumerate(shapes):
        lines.append(Matrix(at, tall, wide, min(rank, tall, wide), i))
        at += tall * wide + 3  # something else lies in between
    matrices = stack(lines)
    x, residual = torch.randn(2, at, generator=torch.Generator().manual_seed(seed))
    old, m = residual[: matrices.numel].clone(), torch.zeros(matrices.numel)
    p, q, out = torch.zeros(matrices.left), torch.zeros(matrices.right), torch.full((at,), 9.0)
    cpu_low_rank.orthonormalize_right(q, matrices, seed)
    first = q.clone()
    cpu_low_rank.project(x, old, m, p, q, matrices, gain=0.5)
    before, projected = m.clone(), p.clone()
    cpu_low_rank.orthonormalize_left(p, matrices)
    cpu_low_rank.fold(m, p, q, matrices)
    cpu_low_rank.expand(p, q, out, matrices, gain=2.0)
    for line in matrices.table.tolist():
        source, tall, wide, r, left, right, place, _ = line
        whole = (x[source : source + tall * wide] * 0.5 + old[place : place + tall * wide]).view(
            tall, wide
        )
        assert torch.equal(before[place : place + tall * wide].view(tall, wide), whole)
        basis = first[right : right + r * wide].view(r, wide).double()
        torch.testing.assert_close(basis @ basis.T, torch.eye(r).double(), atol=1e-6, rtol=0)
        size = whole.double().norm()
        product = whole.double() @ basis.T
        assert (projected[left : left + r * tall].view(r, tall).T - product).norm() <= 1e-5 * size
        hat, back = (
            p[left : left + r * tall].view(r, tall).double(),
            q[right : right + r * wide].view(r, wide).double(),
        )
        gram = hat @ hat.T
        # columns are orthonormal or zero
        assert (gram - torch.diag(gram.diagonal().round())).norm() <= 1e-5
        assert (back - hat @ whole.double()).norm() <= 1e-5 * size
        kept = m[place : place + tall * wide].view(tall, wide)
        assert (kept - (whole - hat.T @ back)).norm() <= 1e-5 * size
        assert (
            out[source : source + tall * wide].view(tall, wide) - 2 * hat.T @ back
        ).norm() <= 1e-5 * size
    between = torch.ones(at, dtype=torch.bool)
    for line in matrices.table.tolist():
        between[line[0] : line[0] + line[1] * line[2]] = False
    assert (out[between] == 9.0).all()


def passes(kernels, matrices):
    """Factors, residual, what is expanded, and the basis after a step."""
    x, residual, basis = factors(matrices)
    p, m, out = torch.zeros(matrices.left), torch.zeros(matrices.numel), torch.zeros_like(x)
    kernels.project(x, residual, m, p, basis, matrices, gain=0.5)
    kernels.orthonormalize_left(p, matrices)
    kernels.fold(m, p, basis, matrices)
    kernels.expand(p, basis, out, matrices, gain=2.0)
    kernels.orthonormalize_right(basis, matrices, 5)
    return p, m, out, basis


def test_the_torch_path_is_the_same_arithmetic():
    """The arithmetic of CUDA, here on the CPU."""
    matrices = stack(
        [Matrix(i * 2000, 40, 50, 3, i) for i in range(3)] + [Matrix(6000, 30, 20, 3, 7)]
    )
    both = (passes(kernels, matrices) for kernels in (cpu_low_rank, torch_low_rank))
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    dead = torch.zeros(matrices.right)
    torch_low_rank.orthonormalize_right(dead, matrices, 5)
    basis = dead[:150].view(3, 50)
    torch.testing.assert_close(basis @ basis.T, torch.eye(3), atol=1e-5, rtol=0)


def test_threads_do_not_change_a_bit():
    matrices = stack([Matrix(0, 700, 900, 4), Matrix(630_000, 700, 900, 4, 1)])
    before, got = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got.append(passes(cpu_low_rank, matrices))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


# ---------------------------------------------------------------- ranks in one process


class Run:
    """Matrices of ``shapes``, side by side with a gap, on simulated ranks."""

    def __init__(self, shapes, rank, ranks, *, feedback=True, min_rate=1.0, factors="none"):
        self.ranks = ranks
        spans, at = [], 0
        for i, shape in enumerate(shapes):
            spans.append(Span(f"w{i}", at, int(np.prod(shape))))
            at += int(np.prod(shape))
        self.numel = at
        codec = LowRankCodec(rank, min_rate=min_rate, factors=codec_named(factors))
        ((coded, found),) = matrices_of(spans, shapes, policy_of(codec))
        self.bases = [{} for _ in range(ranks)]
        self.plans = [
            plan_matrices(found, ranks, bases, device=CPU, factors=coded) for bases in self.bases
        ]
        self.feedbacks = [
            ErrorFeedback.zeros(plan.message.pieces) if feedback else None for plan in self.plans
        ]
        self.spaces = [Workspace() for _ in range(ranks)]
        self.transports = [Recorded(t) for t in Loopback(ranks).transports()]
        self.step = 0

    def reduce(self, inputs, *, gain=1.0, commit=True):
        buffers = [x.clone() for x in inputs]
        outcomes = simulate(
            [
                reduce_matrices(
                    buffers[r],
                    self.feedbacks[r],
                    plan=self.plans[r],
                    call=Call(
                        transport=self.transports[r],
                        workspace=self.spaces[r],
                        sequence=2 * self.step,
                        key=self.step,
                        gain=gain,
                    ),
                )
                for r in range(self.ranks)
            ]
        )
        self.step += 1
        for outcome in outcomes:
            outcome.commit() if outcome.finite and commit else outcome.discard()
        return buffers, [outcome.finite for outcome in outcomes]

    def owed(self):
        """The mean of the ranks' residuals, in the places of the inputs."""
        owed = torch.zeros(self.numel, dtype=torch.float64)
        mean = torch.stack([f.sent for f in self.feedbacks]).double().mean(0)
        for start, numel, kept in self.plans[0].message.pieces.residual_runs:
            owed[start : start + numel] = mean[kept : kept + numel]
        return owed


def gradients(ranks, numel, seed):
    return list(torch.randn(ranks, numel, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("factors", ["none", "fp8", "int4", "sign", "topk-4"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_nothing_is_lost(ranks, factors):
    """Σ outputs + mean residual = Σ mean inputs, and every rank has the same bits."""
    run = Run([(30, 40), (17, 90), (30, 40)], 2, ranks, factors=factors)
    sent, wanted = (
        torch.zeros(run.numel, dtype=torch.float64),
        torch.zeros(run.numel, dtype=torch.float64),
    )
    for step in range(20):
        inputs = gradients(ranks, run.numel, step)
        outputs, _ = run.reduce(inputs)
        assert all(torch.equal(outputs[0], other) for other in outputs)
        sent += outputs[0]
        wanted += torch.stack(inputs).double().mean(0)
    assert (sent + run.owed() - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("factors", ["none", "fp8", "int4"])
@pytest.mark.parametrize("nodes", ["2,1", "2x2", "1,3,2"])
def test_nothing_is_lost_in_levels(nodes, factors):
    """Nodes of different size, slices of several of a rank: factors are coded between nodes."""
    topology, shapes = Topology.parse(nodes), [(30, 40), (17, 90), (64, 64)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    spans = [Span(f"w{i}", sum(sizes[:i]), numel) for i, numel in enumerate(sizes)]
    codec = LowRankCodec(2, factors=codec_named(factors))
    channels = [Channel(transport) for transport in Loopback(topology.size).transports()]
    for channel in channels:
        channel.levels = Levels(hierarchy_of(topology, channel.transport))
    sets = [
        Exchanges(policy_of(codec), topology.size, c.workspace, levels=c.levels) for c in channels
    ]
    total = torch.zeros(sum(sizes), dtype=torch.float64)
    for step in range(10):
        buffers, jobs = gradients(topology.size, len(total), step), []
        total += torch.stack(buffers).double().mean(0)
        for channel, exchanges, buffer in zip(channels, sets, buffers, strict=True):
            exchange = exchanges.of((), lambda: (spans, shapes), CPU)
            call = channel.call(exchange.sequences, step)
            jobs.append(exchange.steps(channel, buffer, call))
        for outcomes in simulate(jobs):
            settle(outcomes, taken=True)
        assert all(torch.equal(buffers[0], other) for other in buffers)
        total -= buffers[0]
    for exchanges in sets:
        ((plan, feedback),) = exchanges.of((), lambda: (spans, shapes), CPU).matrices
        for start, numel, kept in plan.message.pieces.residual_runs:
            total[start : start + numel] -= feedback.sent[kept : kept + numel] / topology.size
    assert total.abs().max() < 1e-4


@pytest.mark.parametrize("factors", ["none", "bf16", "fp8"])
@pytest.mark.parametrize("nodes", ["2,1", ""])
def test_vectors_travel_as_in_the_codec_of_factors_alone(nodes, factors):
    """Bit for bit, residuals included: over three steps, beside matrices and without them."""
    topology, shapes = Topology.parse(nodes or "1,1,1"), [(30, 40), (700,), (3, 3), (64, 64), (5,)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    spans = [Span(f"w{i}", sum(sizes[:i]), numel) for i, numel in enumerate(sizes)]
    every = [gradients(3, sum(sizes), step) for step in range(3)]

    def results(codec):
        channels = [Channel(transport) for transport in Loopback(3).transports()]
        for channel in channels if nodes else []:
            channel.levels = Levels(hierarchy_of(topology, channel.transport))
        sets = [Exchanges(policy_of(codec), 3, c.workspace, levels=c.levels) for c in channels]
        found = []
        for step, inputs in enumerate(every):
            jobs, buffers = [], [each.clone() for each in inputs]
            for channel, exchanges, buffer in zip(channels, sets, buffers, strict=True):
                exchange = exchanges.of((), lambda: (spans, shapes), CPU)
                jobs.append(exchange.steps(channel, buffer, channel.call(exchange.sequences, step)))
            for outcomes in simulate(jobs):
                settle(outcomes, taken=True)
            assert all(torch.equal(buffers[0], other) for other in buffers)
            found.append([buffers[0][s.source : s.source + s.numel] for s in spans])
        return found

    codec = LowRankCodec(2, factors=codec_named(factors))
    assert codec.rows == codec_named(factors)
    for mine, alone in zip(results(codec), results(factors), strict=True):
        assert [torch.equal(a, b) for a, b in zip(mine, alone, strict=True)] == [
            codec.matrix(shape) is None for shape in shapes
        ]


def test_no_vector_is_sent_in_less_than_eight_bits():
    spec = {name: codec_named(f"powersgd-4+{name}").rows for name in ("int8", "int4", "sign")}
    assert spec == {
        "int8": codec_named("int8"),
        "int4": codec_named("fp8"),
        "sign": codec_named("fp8"),
    }
    cost = share(torch.Size([4096]), codec_named("powersgd-4+int4"), 4)
    assert cost == share(torch.Size([4096]), codec_named("fp8"), 4)


@pytest.mark.parametrize("factors", ["none", "fp8"])
def test_factors_are_counted_in_the_bytes_of_their_codec(factors):
    run = Run([(64, 128), (64, 128)], 4, 2, factors=factors)
    run.reduce(gradients(2, run.numel, 0))
    numels = 2 * (4 * 64, 4 * 128)  # of P and of Q, half of each to the other rank
    rows = [aligned(codec_named(factors).row_bytes(n // 2)) for n in numels]
    assert run.transports[0].sent_bytes == 2 * sum(rows) + 4 * 64
    assert run.plans[0].sent_bytes(2) == run.transports[0].sent_bytes
    assert run.transports[0].messages == 4  # P and Q, there and back


def test_what_factors_may_be():
    codec = codec_named("powersgd-4+fp8")
    assert codec == LowRankCodec(4, factors=codec_named("fp8"))
    assert codec.bits((64, 128), 2) == pytest.approx(
        0.25 * LowRankCodec(4).bits((64, 128), 2), rel=0.1
    )
    with pytest.raises(InvalidArgument, match=r"factors is .*, expected a codec of rows"):
        LowRankCodec(4, factors=LowRankCodec(2))


HARD = {
    "zeros": lambda n: torch.zeros(n),
    "minus zeros": lambda n: -torch.zeros(n),
    "denormals": lambda n: torch.linspace(-1e-40, 1e-40, n),
    "one-hot": lambda n: torch.eye(n)[n // 3],
    "constant": lambda n: torch.full((n,), -3.25),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", HARD)
def test_hard_inputs(name, ranks):
    """Finite out, nothing lost, zeros stay zeros: matrices with prime sides."""
    run = Run([(31, 37), (101, 7), (3, 5)], 1, ranks)
    x, total = HARD[name](run.numel), torch.zeros(run.numel, dtype=torch.float64)
    for _ in range(3):
        outputs, finite = run.reduce([x] * ranks)
        assert all(finite)
        assert all(torch.equal(outputs[0], other) for other in outputs)
        assert torch.isfinite(outputs[0]).all()
        total += outputs[0]
    off = (total + run.owed() - 3 * x.double()).abs()
    assert off.max() <= 1e-5 * float(x.abs().max())
    if not x.any():
        assert not total.any()


def test_a_mean_of_low_rank_is_found_exactly():
    """rank(mean) ≤ r: after two power steps the output is the mean, without feedback."""
    run = Run([(40, 60)], 3, 2, feedback=False)
    draw = torch.Generator().manual_seed(0)
    mean = (torch.randn(40, 3, generator=draw) @ torch.randn(3, 60, generator=draw)).flatten()
    noise = torch.randn(mean.shape, generator=draw)
    for _ in range(2):
        outputs, _ = run.reduce([mean + noise, mean - noise])
    assert (outputs[0] - mean).norm() <= 1e-5 * mean.norm()


def test_full_rank_is_the_plain_mean():
    run = Run([(6, 500)], 6, 3, min_rate=0.1)
    assert len(run.plans[0].names) == 1
    inputs = gradients(3, run.numel, 0)
    outputs, _ = run.reduce(inputs)
    torch.testing.assert_close(outputs[0], torch.stack(inputs).mean(0), atol=1e-5, rtol=1e-5)


def test_the_local_residual_gives_the_global_ones_outputs_and_stays_bounded():
    """400 steps of noise, against the textbook in float64 with the residual that torch's hook
    keeps."""
    ranks, shape, rank, steps = 2, (24, 32), 2, 400
    run = Run([shape], rank, ranks)
    errors = [torch.zeros(shape, dtype=torch.float64) for _ in range(ranks)]
    basis = run.plans[0].basis.view(rank, shape[1]).double().T
    for step in range(steps):
        inputs = gradients(ranks, run.numel, step)
        outputs, _ = run.reduce(inputs)
        whole = [e + x.view(shape).double() for e, x in zip(errors, inputs, strict=True)]
        mean = sum(whole) / ranks
        hat = torch.linalg.qr(mean @ basis)[0]
        back = mean.T @ hat
        errors = [m - hat @ back.T for m in whole]
        basis = torch.linalg.qr(back)[0]
        if step < 20:
            torch.testing.assert_close(
                outputs[0].view(shape).double(), hat @ back.T, atol=2e-3, rtol=1e-3
            )
    kept = max(float(f.sent.norm()) for f in run.feedbacks)
    mean_kept = float(sum(f.sent for f in run.feedbacks).norm() / ranks)
    walked = max(float(e.norm()) for e in errors)
    assert walked > 2 * kept
    assert abs(mean_kept / float((sum(errors) / ranks).norm()) - 1) < 0.2


def test_dead_directions_come_back():
    """A zero gradient leaves a zero Q; the basis is renewed, so that the next gradient is seen."""
    run = Run([(20, 30)], 2, 2)
    outputs, _ = run.reduce([torch.zeros(run.numel)] * 2)
    assert not outputs[0].any()
    basis = run.plans[0].basis.view(2, 30)
    torch.testing.assert_close(basis @ basis.T, torch.eye(2), atol=1e-5, rtol=0)
    assert torch.equal(run.plans[0].basis, run.plans[1].basis)
    outputs, _ = run.reduce([torch.outer(torch.arange(20.0), torch.arange(30.0)).flatten()] * 2)
    assert (
        outputs[0].view(20, 30) - torch.outer(torch.arange(20.0), torch.arange(30.0))
    ).norm() < 1e-2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_gradient_changes_nothing(bad):
    run = Run([(20, 30)], 2, 2)
    run.reduce(gradients(2, 600, 0))
    residuals, basis = [f.sent.clone() for f in run.feedbacks], run.plans[0].basis.clone()
    inputs = gradients(2, 600, 1)
    inputs[1][7] = bad
    outputs, finite = run.reduce(inputs)
    assert finite == [False, False]
    assert all(
        torch.equal(f.sent, before) for f, before in zip(run.feedbacks, residuals, strict=True)
    )
    assert torch.equal(run.plans[0].basis, basis)
    assert torch.equal(outputs[0], inputs[0])


@pytest.mark.parametrize("scales", [[2.0**-60] * 3, [2.0**40] * 3, [1024.0, 256.0, 4096.0]])
def test_scale_does_not_matter_and_gain_keeps_residuals_in_unscaled_units(scales):
    """A gain where scales differ."""
    a, b = (Run([(20, 30)], 2, 2) for _ in range(2))
    unscaled = len(set(scales)) > 1
    for step, scale in enumerate(scales):
        inputs = gradients(2, 600, step)
        mine, _ = a.reduce(inputs)
        scaled, _ = b.reduce([x * scale for x in inputs], gain=1 / scale if unscaled else 1.0)
        assert torch.equal(mine[0] * scale, scaled[0])
    kept = a.feedbacks[0].sent * (1.0 if unscaled else scale)
    assert torch.equal(kept, b.feedbacks[0].sent)


# ---------------------------------------------------------------- what is a matrix, and errors


def test_what_travels_as_a_matrix():
    codec = LowRankCodec(4)
    assert codec.matrix((128, 64)) == (128, 64, 4)
    assert codec.matrix((32, 16, 3, 3)) == (32, 144, 4)
    assert codec.matrix((128,)) is None
    assert codec.matrix((8, 8)) is None  # the factors would be as long
    assert codec.matrix((2, 4096)) is None
    assert LowRankCodec(4, min_rate=1).matrix((3, 4096)) is None
    assert LowRankCodec(1, min_rate=1).matrix((3, 4096)) == (3, 4096, 1)


def test_rows_of_a_flat_buffer_are_refused():
    steps = commpress.compressed_allreduce(
        torch.ones(64), codec="powersgd-4", transport=Loopback(1).transport(0)
    )
    with pytest.raises(InvalidArgument, match="this call sees rows of a flat buffer"):
        next(steps)


@pytest.mark.parametrize("loaded", [False, True])
def test_what_rows_left_behind_is_sent_when_tensors_travel_whole(loaded):
    """Owners of rows owe too: Σ outputs + R_T = Σ mean inputs, across a change of codec, in a run
    or by way of a checkpoint."""
    ranks, shape = 3, torch.Size([40, 48])
    channels = [Channel(t) for t in Loopback(ranks).transports()]

    def exchanges(name):
        return [Exchanges(policy_of(name), ranks, channel.workspace) for channel in channels]

    def average(of, step):
        """The mean of what the ranks gave, less what came of it."""
        buffers = [torch.randn(shape.numel(), generator=draw) for _ in range(ranks)]
        mean, jobs = torch.stack(buffers).double().mean(0), []
        for each, channel, buffer in zip(of, channels, buffers, strict=True):
            exchange = each.of(("w",), lambda: ([Span("w", 0, shape.numel())], [shape]), CPU)
            jobs.append(exchange.steps(channel, buffer, channel.call(exchange.sequences, step)))
        for outcomes in simulate(jobs):
            settle(outcomes, taken=True)
        return mean - buffers[0].double()

    of, draw, total = (
        exchanges("int4"),
        torch.Generator().manual_seed(0),
        torch.zeros(shape.numel(), dtype=torch.float64),
    )
    for step in range(12):
        if step == 5:
            assert any(reduced.any() for _, _, reduced in of[0].residuals.places())
            before, of = of, exchanges("powersgd-2") if loaded else of
            if loaded:
                average(of, 0)  # a run of its own, which the state replaces
            for old, new in zip(before, of, strict=True):
                new.use(policy_of("powersgd-2"))
                new.residuals.load(
                    {
                        key: tuple(r.clone() for r in kept)
                        for key, kept in old.residuals.every().items()
                    }
                )
        total += average(of, step)
    owed = [
        flat_parts(each.residuals, channel.transport)["w", 0]
        for each, channel in zip(of, channels, strict=True)
    ]
    torch.testing.assert_close(torch.stack(owed).double().mean(0), total, atol=2e-5, rtol=0)
    assert float(total.norm()) > 1


def test_matrices_of_other_ranks_go_on_from_the_basis_they_have():
    spans, shapes = [Span("w", 0, 40 * 64)], [(40, 64)]
    found = {
        rank: matrices_of(spans, shapes, policy_of(LowRankCodec(rank)))[0][1] for rank in (2, 5)
    }
    bases = {}
    two = plan_matrices(found[2], 2, bases, device=CPU)
    two.basis.copy_(torch.randn(two.basis.numel(), generator=torch.Generator().manual_seed(1)))
    had = bases["w"].clone()
    with pytest.raises(StateMismatch, match=r"shape \(2, 64\), expected \(5, 64\)"):
        plan_matrices(found[5], 2, dict(bases), device=CPU)
    plan_matrices(found[5], 2, bases, device=CPU, any_rank=True)
    assert torch.equal(bases["w"][:2], had)
    assert (bases["w"][2:].norm(dim=1) > 0.5).all(), "new rows are random ones"
    plan_matrices(found[2], 2, bases, device=CPU, any_rank=True)
    assert torch.equal(bases["w"], had)
