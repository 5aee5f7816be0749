"""The fused passes of the optimizers against the same in torch operations, cached or stored past the caches, on two threads."""

import pytest
import torch

from commpress.kernels import adam, cpu_adam, cpu_threads
from commpress.optim.flat import Flat
from optim_twin import start

SHAPES = ((40, 50), (7,), (0,), (300, 11), (130,), (1000,))
BETA = {"beta": 0.9, "gain": 0.5}


def buffers(numel):
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=draws) for _ in range(4)]


def blend(k, segments, m, r, u, a):
    k.blend(segments, m, u, **BETA)


def aim(k, segments, m, r, u, a):
    k.aim(segments, m, r, u, **BETA)


def descend(k, segments, m, r, u, a):
    k.descend(segments, m, a, step=0.1, keep=0.99)
    k.descend(segments, m, a[:0], step=0.1, keep=0.99)


def accumulate(k, segments, m, r, u, a):
    k.accumulate(segments, m, u, r, a, **BETA, lr=0.1, keep=0.99)
    k.accumulate(segments, m, u[:0], r, a, **BETA, lr=0.1, keep=0.99, share=3.0)
    k.accumulate(segments, m, u[:0], r[:0], r, **BETA, lr=0.1, keep=0.99)


def wander(k, segments, m, r, u, a):
    for begins, share in ((True, 3.0), (False, None)):
        assert k.wander(segments, m, u, a, r, **BETA, lr=0.1, keep=0.99, kept=0.98, begins=begins, share=share)


def computed(passes, k):
    flat = Flat([torch.nn.Parameter(p) for p in start(SHAPES)], [str(i) for i in range(len(SHAPES))])
    gradients = dict(enumerate(start(SHAPES, 10)))
    flat.parameters[3].grad = None
    segments = flat.segments([0, 1, 2, 4, 5], gradients)
    missing = flat.segments([3])
    left = flat.new(), flat.new(), flat.new(), flat.new()
    for buffer, values in zip(left, buffers(flat.numel), strict=True):
        buffer.copy_(values)
    for part in (segments, missing):
        passes(k, part, *left)
    return [*flat.weights, *left], k.square_sum(segments)


@pytest.mark.parametrize("passes", [blend, aim, descend, accumulate, wander])
@pytest.mark.parametrize("past", [True, False])
def test_the_fused_passes_are_the_torch_operations(compiled, monkeypatch, passes, past):
    monkeypatch.setattr(cpu_adam, "PAST", 0 if past else 1 << 60)
    expected, squares = computed(passes, adam)
    alone, sum_alone = computed(passes, cpu_adam)
    for mine, theirs in zip(alone, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert sum_alone == pytest.approx(squares, rel=1e-12)
    monkeypatch.setattr(cpu_threads, "_PARALLEL_NUMEL", 500)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared, sum_shared = computed(passes, cpu_adam)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    assert sum_alone == sum_shared


@pytest.mark.parametrize("begins", [True, False])
def test_a_local_step_leaves_momentum_alone_where_gradients_are_not_finite(compiled, begins):
    results = []
    for k in (adam, cpu_adam):
        flat = Flat([torch.nn.Parameter(p) for p in start(SHAPES)], [str(i) for i in range(len(SHAPES))])
        gradients = start(SHAPES, 10)
        gradients[0].view(-1)[[3, 500]] = torch.tensor([float("nan"), float("-inf")])
        gradients[4][:] = float("inf")
        m, u, a, r = buffers(flat.numel)
        before = m.clone()
        finite = k.wander(
            flat.segments(range(len(SHAPES)), dict(enumerate(gradients))), m, u, a, r, **BETA, lr=0.1, keep=0.99, kept=0.98,
            begins=begins,
        )  # fmt: skip
        assert not finite
        for i, g in enumerate(gradients):
            assert torch.equal(flat.view(m, i)[~g.isfinite()], flat.view(before, i)[~g.isfinite()])
            assert (flat.view(m, i) != flat.view(before, i))[g.isfinite()].all()
        results.append([*flat.weights, m, u, a])
    for mine, theirs in zip(*results, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
