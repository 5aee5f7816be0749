"""The summable sketch: exact on integers, linear, and dense where it cannot tell elements apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.collectives.loopback import Loopback, Recorded, simulate
from commpress.collectives.sketch import MESSAGES, Sketch, sketch_allreduce
from commpress.errors import InvalidArgument
from commpress.kernels import cpu_sketch


def sparse(numel, count, seed):
    """Integers, so that sums and differences are exact."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.zeros(numel)
    places = torch.randperm(numel, generator=draw)[:count]
    x[places] = torch.randint(1, 1000, (count,), generator=draw).float() * (1 - 2 * (places % 2)).float()
    return x


def sketched(x, cells, seed=0):
    table, bitmap = torch.zeros(cells), torch.zeros(-(-x.numel() // 8), dtype=torch.uint8)
    cpu_sketch.add(x, table, bitmap, seed=seed)
    return table, bitmap


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 3000), seed=st.integers(0, 2**20))
def test_enough_cells_give_every_integer_back(count, seed):
    x, out = sparse(20_000, count, seed), torch.full((20_000,), 9.0)
    table, bitmap = sketched(x, 3 * ((int(1.5 * count) + 48) // 3), seed)
    left = cpu_sketch.peel(table, bitmap, out, seed=seed)
    if left == 0:  # else a few share all their cells: likely with few elements only
        assert torch.equal(out, x)
        assert not table.any()
    assert left <= 12


def test_too_few_cells_are_seen():
    x = sparse(20_000, 3000, 0)
    table, bitmap = sketched(x, 3300)
    assert cpu_sketch.peel(table, bitmap, torch.empty(20_000)) > 1000


def test_sketches_add():
    a, b = sparse(5000, 300, 1), sparse(5000, 300, 2)
    assert torch.equal(sketched(a, 999)[0] + sketched(b, 999)[0], sketched(a + b, 999)[0])


def test_nothing_gives_nothing():
    table, bitmap = sketched(torch.zeros(100), 48)
    out = torch.full((100,), 9.0)
    assert cpu_sketch.peel(table, bitmap, out) == 0
    assert not out.any()


# ---------------------------------------------------------------- over ranks


def reduce(sketches, inputs, step):
    ranks = len(inputs)
    transports, buffers = [Recorded(t) for t in Loopback(ranks).transports()], [x.clone() for x in inputs]
    finite = simulate(
        [
            sketch_allreduce(buffers[r], sketches[r], transport=transports[r], sequence=MESSAGES * step)
            for r in range(ranks)
        ]
    )
    return buffers, finite, transports[0].sent_bytes


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nothing_is_lost(ranks):
    numel = 20_011
    sketches = [Sketch.zeros(numel, density=1 / 64, transport=t) for t in Loopback(ranks).transports()]
    sent, wanted = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(10):
        inputs = list(torch.randn(ranks, numel, generator=torch.Generator().manual_seed(step)))
        before = sketches[0].fallbacks
        outputs, finite, count = reduce(sketches, inputs, step)
        dense = step == 0 or sketches[0].fallbacks > before
        assert all(finite)
        assert all(torch.equal(outputs[0], other) for other in outputs)
        sent += outputs[0]
        wanted += torch.stack(inputs).double().mean(0)
        assert ranks == 1 or dense or count < 0.3 * 8 * numel * (ranks - 1) / ranks
    owed = torch.stack([s.residual for s in sketches]).double().mean(0)
    assert float((sent + owed - wanted).abs().max()) < 1e-4
    assert {s.fallbacks for s in sketches} <= {0, 1, 2}
    assert all(s.quantum == sketches[0].quantum for s in sketches)


def test_a_union_that_does_not_fit_is_sent_densely():
    """Same elements kept everywhere need few cells; ranks that keep more than foreseen need the dense way."""
    numel, ranks = 4096, 2
    sketches = [Sketch.zeros(numel, density=1 / 8, transport=t) for t in Loopback(ranks).transports()]
    for one in sketches:
        one.cells = Sketch.zeros(numel, density=1 / 64, transport=Loopback(ranks).transport(0)).cells
    inputs = list(torch.randn(ranks, numel, generator=torch.Generator().manual_seed(0)))
    first, _, _ = reduce(sketches, inputs, 0)
    outputs, _, _ = reduce(sketches, inputs, 1)
    assert [s.fallbacks for s in sketches] == [1, 1]
    owed = torch.stack([s.residual for s in sketches]).mean(0)
    torch.testing.assert_close(first[0] + outputs[0] + owed, 2 * torch.stack(inputs).mean(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_changes_nothing(bad):
    sketches = [Sketch.zeros(1000, density=1 / 16, transport=t) for t in Loopback(2).transports()]
    inputs = list(torch.randn(2, 1000))
    reduce(sketches, inputs, 0)
    before = [s.residual.clone() for s in sketches]
    inputs[1][3] = bad
    outputs, finite, _ = reduce(sketches, inputs, 1)
    assert finite == [False, False]
    assert all(torch.equal(s.residual, kept) for s, kept in zip(sketches, before, strict=True))
    assert torch.equal(outputs[0], inputs[0])


def test_too_few_cells_are_refused():
    with pytest.raises(InvalidArgument, match=r"cells is 1\.1, expected at least 1\.25"):
        Sketch.zeros(100, density=0.1, transport=Loopback(1).transport(0), cells=1.1)
