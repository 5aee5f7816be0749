"""The fused passes of the optimizers against the same in torch operations, cached or stored past
the caches, on two threads."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import commpress
from commpress import torch_private
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.kernels import adam
from commpress.kernels.cpu import adam as cpu_adam
from commpress.kernels.cpu import calls as cpu_calls
from commpress.kernels.cuda import adam as cuda_adam
from commpress.kernels.cuda.modules import ADAM
from commpress.optim import flat
from commpress.optim.flat import Flat
from cuda_shim import Shim, compiler
from gpu.card_twin import CARD, card_twin
from optim_twin import equal, start

SHAPES = ((40, 50), (7,), (0,), (300, 11), (130,), (1000,))
BETA = {"beta": 0.9, "gain": 0.5}
# some below the floor, some cut
DIVISORS = np.array([(0.5 + 0.1 * i, 0.2, 1e-3, 1.5) for i in range(len(SHAPES))], np.float32)


def buffers(numel):
    draws = torch.Generator().manual_seed(1)
    m, u, a, p = (torch.randn(numel, generator=draws) for _ in range(4))
    return [m, torch.rand(numel, generator=draws).square(), u, a, p]


@pytest.fixture(scope="module")
def shim(run_folder):
    """CUDA's source of the passes, which runs on the processor."""
    if compiler() is None:
        pytest.skip("g++ is missing")
    return Shim(run_folder, [ADAM])


def scaled(k, segments, lines, m, v, u, a, p):
    k.scaled(segments, u, gain=0.5)


def apply_mean(k, segments, lines, m, v, u, a, p):
    k.apply_mean(segments, p, v, m, a, lines, step=0.1, decay=0.99, momentum_scale=3.0, most=1.5)
    k.apply_mean(
        segments, p, v, u, a[:0], lines, step=0.1, decay=0.99, momentum_scale=1.0, most=1.5
    )


def accumulate(k, segments, lines, m, v, u, a, p):
    k.accumulate(segments, m, u[:0], v, p, lines, **BETA)
    k.accumulate(segments, m, u[:0], v, a, lines, **BETA, lr=0.1, decay=0.99)
    return k.accumulate(segments, m, u, v, m, lines, **BETA, lr=0.1, decay=0.99)


def local_step(k, segments, lines, m, v, u, a, p):
    counts = []
    for begins in (True, False):
        finite, beyond = k.local_step(
            segments,
            m,
            u,
            a,
            v,
            lines,
            **BETA,
            lr=0.1,
            decay=0.99,
            anchor_decay=0.98,
            begins=begins,
        )
        assert finite
        counts.append(beyond)
    return torch.stack(counts)


def update_variance(k, segments, lines, m, v, u, a, p):
    v[3:9] = 0.0
    k.update_variance(segments, m, v, beta=0.9, weight=0.3, unit=0.25)
    k.update_variance(segments, u, a.square_(), beta=0.9, weight=0.7, unit=1.0)


def apply_step(k, segments, lines, m, v, u, a, p):
    k.apply_step(segments, m, v, lines, step=0.1, decay=0.99)


def computed(passes, k):
    flat = Flat(
        [torch.nn.Parameter(p) for p in start(SHAPES)], [str(i) for i in range(len(SHAPES))]
    )
    gradients = dict(enumerate(start(SHAPES, 10)))
    flat.parameters[3].grad = None
    segments = flat.segments([0, 1, 2, 4, 5], gradients)
    missing = flat.segments([3])
    left = [flat.new() for _ in range(5)]
    for buffer, values in zip(left, buffers(flat.numel), strict=True):
        buffer.copy_(values)
    counts = [
        passes(k, part, DIVISORS[at], *left)
        for part, at in ((segments, [0, 1, 2, 4, 5]), (missing, [3]))
    ]
    if counts[0] is not None:
        assert counts[0].any()
        assert not counts[1].any(), "where there is no gradient, none is out of reach"
    inside = torch.cat([torch.arange(first, first + numel) for first, numel in flat.places])
    results = [
        *flat.weights,
        *(buffer[inside] for buffer in left),
        *(count for count in counts if count is not None),
    ]
    return results, k.square_sum(segments)


@pytest.mark.parametrize("passes", [scaled, apply_mean, accumulate, local_step])
@pytest.mark.parametrize("past", [True, False])
def test_the_fused_passes_are_the_torch_operations(compiled, monkeypatch, passes, past):
    monkeypatch.setattr(cpu_adam, "PAST", 0 if past else 1 << 60)
    expected, squares = computed(passes, adam)
    alone, sum_alone = computed(passes, cpu_adam)
    for mine, theirs in zip(alone, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert sum_alone == pytest.approx(squares, rel=1e-12)
    monkeypatch.setattr(cpu_calls, "_PARALLEL_NUMEL", 500)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared, sum_shared = computed(passes, cpu_adam)
    finally:
        torch.set_num_threads(threads)
    assert equal(alone, shared)
    assert sum_alone == sum_shared


@pytest.mark.parametrize(
    "passes", [scaled, apply_mean, accumulate, local_step, update_variance, apply_step]
)
@pytest.mark.parametrize("reverse", [True, False])
def test_the_passes_of_cuda_are_those_of_the_processor(
    compiled, monkeypatch, shim, passes, reverse
):
    """Every bit is equal, but where the processor's are torch's operations; each is one launch."""
    launches = []

    def execute(launch):
        launches.append(launch.kernel)
        shim.execute(launch)

    monkeypatch.setattr(shim, "reverse", reverse)
    monkeypatch.setattr(cuda_adam, "execute", execute)
    expected, squares = computed(passes, cpu_adam)
    results, sum_of_squares = computed(passes, cuda_adam)
    calls = {apply_mean: 2, accumulate: 3, local_step: 2, update_variance: 2}.get(passes, 1)
    assert launches == [passes.__name__] * 2 * calls + ["square_sums"]
    assert sum_of_squares == pytest.approx(squares, rel=1e-12)
    if passes in (update_variance, apply_step):
        for mine, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    else:
        assert equal(results, expected)


@pytest.mark.parametrize("begins", [True, False])
def test_a_local_step_leaves_momentum_alone_where_gradients_are_not_finite(
    compiled, monkeypatch, shim, begins
):
    monkeypatch.setattr(cuda_adam, "execute", shim.execute)
    results = []
    for k in (adam, cpu_adam, cuda_adam):
        flat = Flat(
            [torch.nn.Parameter(p) for p in start(SHAPES)], [str(i) for i in range(len(SHAPES))]
        )
        gradients = start(SHAPES, 10)
        gradients[0].view(-1)[[3, 500]] = torch.tensor([float("nan"), float("-inf")])
        gradients[4][:] = float("inf")
        m, v, u, a, _ = buffers(flat.numel)
        before = m.clone()
        finite, _ = k.local_step(
            flat.segments(range(len(SHAPES)), dict(enumerate(gradients))),
            m,
            u,
            a,
            v,
            DIVISORS,
            **BETA,
            lr=0.1,
            decay=0.99,
            anchor_decay=0.98,
            begins=begins,
        )
        assert not finite
        for i, g in enumerate(gradients):
            assert torch.equal(flat.view(m, i)[~g.isfinite()], flat.view(before, i)[~g.isfinite()])
            assert (flat.view(m, i) != flat.view(before, i))[g.isfinite()].all()
        results.append([*flat.weights, m, u, a])
    for mine, theirs, cuda in zip(*results, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(cuda, theirs)


@pytest.mark.parametrize("k", [adam, cpu_adam, cuda_adam])
def test_what_is_sent_is_cut_at_its_reach_and_infinity_is_not(compiled, monkeypatch, shim, k):
    """So that one gradient cannot move its weight by thousands of steps, and one that is no number
    is still found."""
    monkeypatch.setattr(cuda_adam, "execute", shim.execute)
    flat = Flat([torch.nn.Parameter(torch.zeros(200))], ["0"])
    m, v, out = flat.new(), flat.new(), flat.new()
    v.fill_(1e-4)
    v[0] = 0.0
    g = torch.zeros(200)
    g[:5] = torch.tensor([1.0, 100.0, -100.0, float("inf"), float("nan")])
    lines = np.array([(4.0, 0.001, 0.0, 20.0)], np.float32)  # s = 0.02, and 0.001 where v is zero
    beyond = k.accumulate(flat.segments([0], {0: g}), m, m[:0], v, out, lines, beta=0.9, gain=0.5)
    assert beyond.tolist() == [4]
    torch.testing.assert_close(
        out[:5], torch.tensor([2.0, 2.0, -2.0, float("inf"), float("nan")]), equal_nan=True
    )


def test_counts_are_where_the_weights_are_and_advance_on_the_host(monkeypatch):
    """Torch's kernel for a card takes no counts of the host."""
    seen = []

    def adam(weights, gradients, momenta, variances, _, steps, **options):
        seen.append({each.device for each in steps})
        taken.append([float(each) + 1 for each in steps])
        torch_private.adam(
            *([each.cpu() for each in every] for every in (weights, gradients, momenta)),
            [each.cpu() for each in variances],
            [],
            [each.cpu() for each in steps],
            **options,
        )

    taken = []
    monkeypatch.setattr(flat, "adam", adam)
    group = {"betas": (0.9, 0.999), "lr": 0.1, "weight_decay": 0.0, "eps": 1e-8}
    counts = [torch.tensor(3.0), torch.tensor(torch_private.ENDLESS)]
    with card_twin():
        lists = [[torch.ones(5).to(CARD), torch.ones(7).to(CARD)] for _ in range(4)]
        flat.adam_step(group, *lists, counts)
        flat.adam_step(group, *lists, counts)
    assert seen == [{CARD}] * 2
    assert [each[0] for each in taken] == [4.0, 5.0]
    assert float(counts[0]) == 5.0


def test_what_begins_late_begins_with_its_whole_square():
    flat = Flat([torch.nn.Parameter(torch.zeros(3))], ["0"])
    m, v = flat.new(), flat.new()
    v[:3] = torch.tensor([0.0, 4.0, 0.0])
    adam.update_variance(
        flat.segments([0], {0: torch.tensor([3.0, 1.0, 0.0])}),
        m,
        v,
        beta=0.9,
        weight=0.25,
        unit=0.5,
    )
    torch.testing.assert_close(v[:3], torch.tensor([4.5, 0.75 * 4 + 0.25 * 0.5, 0.0]))
    torch.testing.assert_close(m[:3], torch.tensor([0.3, 0.1, 0.0]))


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "steps"), [(commpress.OneBitAdam, 35), (commpress.ZeroOneAdam, 75)]
)
def test_a_compressed_step_takes_as_many_operations_for_many_tensors_as_for_few(
    compiled, kind, steps
):
    """Each would be a launch on a device: a loop over tensors shows here."""
    counts = []
    for tensors in (4, 40):
        ranks = []
        for transport in Loopback(2).transports():
            parameters = [torch.nn.Parameter(p) for p in start([(16, 8)] * tensors)]
            options = {"exact_steps": 3} if kind is commpress.OneBitAdam else {}
            ranks.append(kind(parameters, lr=1e-3, min_numel=0, transport=transport, **options))
        for step in range(steps):  # in the last no variance is corrected anew
            for rank, optimizer in enumerate(ranks):
                gradients = start([(16, 8)] * tensors, 100 * step + rank)
                for parameter, gradient in zip(optimizer.flat.parameters, gradients, strict=True):
                    parameter.grad = gradient
            before = ranks[0].counters.compressed_rounds
            with Operations() if step == steps - 1 else nullcontext() as seen:
                simulate([optimizer.steps() for optimizer in ranks])
        assert ranks[0].counters.compressed_rounds == before + 1
        counts.append(seen.count)
    assert counts[0] == counts[1] < 310
