"""The choice of a codec per layer against every other choice there is."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.cli.gpt import GPT, batch, standard_library
from commpress.codecs.planned import Planned, load_plan
from commpress.errors import InvalidArgument
from commpress.plan.assignment import assign, bytes_of, cheapest, errors_of


def brute_force(costs, errors, bound):
    best = None
    for options in product(*(range(len(row)) for row in costs)):
        error = cost = 0.0
        for layer, option in enumerate(options):
            error, cost = error + errors[layer][option], cost + costs[layer][option]
        if error <= bound and (best is None or cost < best):
            best = cost
    return best


@pytest.mark.parametrize("unit", [1, 0.1], ids=["whole", "rounded"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_nothing_is_cheaper(unit, data):
    layers, options = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 30), min_size=options, max_size=options)
    costs, errors = (
        [[unit * n for n in data.draw(numbers)] for _ in range(layers)] for _ in range(2)
    )
    bound = unit * data.draw(st.integers(0, 30 * layers))
    # sums of tenths may miss the bound by a rounding
    strict, loose = (brute_force(costs, errors, bound * (1 + by)) for by in (-1e-12, 1e-12))
    if loose is None:
        with pytest.raises(InvalidArgument, match="finer"):
            cheapest(costs, errors, bound)
        return
    found = cheapest(costs, errors, bound)
    assert loose - 1e-9 <= found.cost
    assert strict is None or found.cost <= strict + 1e-9
    assert found.error <= bound + 1e-9
    assert found.cost == pytest.approx(sum(costs[i][o] for i, o in enumerate(found.options)))
    assert found.error == pytest.approx(sum(errors[i][o] for i, o in enumerate(found.options)))


def test_tens_of_layers_are_solved():
    rng = np.random.default_rng(1)
    numels = rng.choice([768, 3072, 768 * 768, 768 * 3072], 60)
    costs = np.outer(numels, [1, 2, 3, 4, 8]).astype(float)
    errors = np.outer(numels * rng.lognormal(0, 2, 60), [1, 0.5, 0.2, 0.05, 0.001])
    found = cheapest(costs, errors, float(errors[:, 3].sum()))
    assert found.cost < costs[:, 3].sum()
    assert found.error <= errors[:, 3].sum()


@pytest.mark.parametrize(
    ("costs", "errors"),
    [([[1.0]], [[float("nan")]]), ([[1.0, 2.0]], [[1.0]]), ([[]], [[]]), ([[1.0]], [[-1.0]])],
)
def test_what_makes_no_sense_is_refused(costs, errors):
    with pytest.raises(InvalidArgument):
        cheapest(costs, errors, 1.0)


def test_errors_are_what_the_codec_loses(compiled):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    exact, coarse, fine = errors_of(x, ["none", "sign", "int8"])
    assert exact == 0
    # the rms scale: Σ(|x| − s)² with s² = mean x²
    scale = x.square().mean().sqrt()
    assert coarse == pytest.approx(float((x.abs() - scale).square().sum()), rel=1e-3)
    assert 0 < fine < 0.001 * coarse


def gpt_gradients(steps=8):
    """Gradients of the last of some steps of a small GPT on text."""
    torch.manual_seed(0)
    model, library = GPT(width=96, layers=3, length=32), standard_library()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*batch(library, 8, 32, draws)).backward()
        optimizer.step()
    return {name: p.grad for name, p in model.named_parameters()}


def test_a_file_of_assigned_rules_gives_a_loud_layer_more_bytes(compiled, tmp_path):
    draws = torch.Generator().manual_seed(0)
    gradients = {
        name: torch.randn(256, 512, generator=draws) * scale
        for name, scale in (("loud", 100.0), ("quiet", 0.01))
    }
    Planned("int4", assign(gradients, ranks=2).rules, why="").save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert set(plan.rules) == set(gradients)
    loud, quiet = (plan.choose(name, 10**6) for name in gradients)
    assert loud.row_bytes(4096) > quiet.row_bytes(4096)


def test_a_gpt_needs_fewer_bytes_at_the_error_of_four_bits(compiled):
    gradients = gpt_gradients()
    found = assign(gradients, ranks=4)
    assert found.error <= found.uniform_error
    assert found.gain >= 1.3
    assert found.nbytes == sum(
        bytes_of(g.numel(), found.rules[name], 4) for name, g in gradients.items()
    )
