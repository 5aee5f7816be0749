"""Steps of local updates that are as many times longer as noise makes them shorter: a factor of the
ranks' spread, the same on all ranks, within steps only."""

from math import sqrt

import pytest
import torch

from commpress.collectives.transports.loopback import simulate
from commpress.errors import InvalidArgument
from commpress.optim.outer import Average, Nesterov
from commpress.schedules import Facts
from local_twin import HiddenOf, Ranks, drawn, equal, noise

LR, DECAY = 0.02, 0.1
HIDDEN = {"every": HiddenOf(steps=2), "codec": "int4", "min_numel": 0}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)


def alike(size, step):
    """Gradients of which a part is the same on all ranks."""
    shared = drawn(7_000_000 + step)
    return [[g + s for g, s in zip(own, shared, strict=True)] for own in noise(size, step)]


def groups_of(ranks):
    return [group for local in ranks.local for group in local.inner.param_groups]


def by_hand(ranks, steps, *, length, longest):
    """Train ``ranks`` with groups that are set anew before each step; return the factors."""
    mean, factors, seen = 0.0, [], 0
    for step in range(steps):
        for group in groups_of(ranks):
            group["lr"], group["weight_decay"] = LR * sqrt(1 + mean), DECAY / sqrt(1 + mean)
        factors.append(sqrt(1 + mean))
        ranks.step(alike(len(ranks.local), step))
        counters = ranks.local[0].counters
        if counters.exchanges > seen:
            seen, square = counters.exchanges, counters.spread**2
            mean += (min(square, longest) - mean) * length / 100
    return factors


@pytest.mark.parametrize("size", [2, 4])
def test_steps_are_those_of_rates_set_by_hand(size):
    ranks = Ranks(size, inner=adamw, **HIDDEN)
    twin = Ranks(size, inner=adamw, lengthen=False, **HIDDEN)
    factors, gains = [], []
    for step in range(41):
        ranks.step(alike(size, step))
        gains.append(ranks.local[0].counters.gain)
        assert {group["lr"] for group in groups_of(ranks)} == {LR}
        assert {group["weight_decay"] for group in groups_of(ranks)} == {DECAY}
    factors = by_hand(twin, 41, length=2, longest=size - 1)
    assert gains == pytest.approx(factors, rel=1e-6)
    assert 1.02 < gains[-1] < sqrt(size)
    for mine, other in zip(ranks.parameters, twin.parameters, strict=True):
        for p, q in zip(mine, other, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert ranks.agree()


def test_a_run_resumed_in_an_exchange_is_the_same_in_every_bit():
    ranks = Ranks(3, inner=adamw, **HIDDEN)
    for step in range(31):
        ranks.step(alike(3, step))
    assert ranks.local[0].flight is not None
    states, weights = ranks.saved()
    again = Ranks(3, inner=adamw, **HIDDEN)
    again.go_on(states, weights)
    for step in range(31, 40):
        ranks.step(alike(3, step))
        again.step(alike(3, step))
        assert ranks.local[0].counters.gain == again.local[0].counters.gain > 1
    for mine, other in zip(ranks.parameters, again.parameters, strict=True):
        assert equal(mine, other)


def test_a_state_for_other_ranks_keeps_the_factor():
    ranks = Ranks(4, inner=adamw, **HIDDEN)
    for step in range(30):
        ranks.step(alike(4, step))
    states, _ = ranks.saved()
    assert states[0]["facts"]["spread"] == ranks.local[3].facts.spread > 0
    ranks.drain()
    shared = ranks.local[1].shared_state()
    new = Ranks(2, inner=adamw, **HIDDEN)
    for local in new.local:
        local.load_shared_state(shared)
    assert {local.facts.spread for local in new.local} == {ranks.local[1].facts.spread}


def test_the_factor_is_that_of_independent_changes_at_most():
    """The mean of P independent changes is √P times shorter than they are; these cancel."""
    ranks = Ranks(2, inner=adamw, **HIDDEN)
    for step in range(120):
        one = drawn(step)
        ranks.step([one, [0.01 - g for g in one]])
    assert ranks.local[0].counters.spread > 3
    assert 1.2 < ranks.local[0].counters.gain <= sqrt(2)


@pytest.mark.parametrize(
    ("inner", "options"),
    [
        (adamw, {"every": 4, "codec": "int4"}),
        (adamw, {"lengthen": False}),
        (adamw, {"outer": Nesterov()}),
        (adamw, {"codec": "sign"}),
        (lambda p: torch.optim.SGD(p, lr=LR), {}),
        (lambda p: [adamw(p[:2]), torch.optim.SGD(p[2:], lr=LR)], {}),
    ],
    ids=["a number of steps", "told", "momentum", "a coarse codec", "SGD", "and SGD"],
)
def test_other_steps_stay_as_long_as_they_are_given(inner, options):
    ranks = Ranks(2, inner=inner, **HIDDEN | options)
    for step in range(20):
        ranks.step(alike(2, step))
    assert ranks.local[0].counters.gain == 1
    if options.get("lengthen") is None:
        with pytest.raises(InvalidArgument, match="lengthen is True, expected it with"):
            Ranks(2, inner=inner, **HIDDEN | options | {"lengthen": True})


def test_steps_of_one_rank_alone_stay_as_long_as_they_are_given():
    ranks = Ranks(1, inner=adamw, every="auto", codec="int4")
    twin = Ranks(1, inner=adamw, every="auto", codec="int4", lengthen=False)
    for step in range(45):
        ranks.step(alike(1, step))
        twin.step(alike(1, step))
    assert ranks.local[0].counters.exchanges > 0
    assert ranks.local[0].counters.gain == 1
    assert equal(ranks.parameters[0], twin.parameters[0])


def test_exact_steps_at_first_are_as_long_as_given():
    ranks = Ranks(2, inner=adamw, exact_steps=3, **HIDDEN)
    for local in ranks.local:
        local.facts.spread = 1.0
    gains = []
    for step in range(5):
        for mine, grads in zip(ranks.parameters, alike(2, step), strict=True):
            for p, g in zip(mine, grads, strict=True):
                p.grad = g
        simulate([local.stepping() for local in ranks.local])
        gains.append(ranks.local[0].counters.gain)
    assert gains == pytest.approx([1, 1, 1, sqrt(2), sqrt(2)])


def test_schedulers_see_the_rates_that_they_set():
    ranks = Ranks(2, inner=adamw, **HIDDEN)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(local.inner[0], 0.9) for local in ranks.local
    ]
    for step in range(12):
        ranks.step(alike(2, step))
        for each in schedulers:
            each.step()
    assert ranks.local[0].counters.gain > 1
    for group in groups_of(ranks):
        assert group["lr"] == pytest.approx(LR * 0.9**12)


def test_a_step_that_raises_leaves_no_rate_behind():
    ranks = Ranks(2, inner=adamw, **HIDDEN)
    for step in range(12):
        ranks.step(alike(2, step))
    inner = ranks.local[0].inner[0]

    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        inner.step(fails)
    ranks.step(alike(2, 12))
    assert inner.param_groups[0]["lr"] == LR
    assert inner.param_groups[0]["weight_decay"] == DECAY
    with pytest.raises(ZeroDivisionError):
        inner.step(fails)
    inner.param_groups[0]["lr"] = LR / 2  # a scheduler's
    ranks.step(alike(2, 13))
    assert inner.param_groups[0]["lr"] == LR / 2


def test_one_of_two_local_updates_lengthens_steps():
    ranks = Ranks(2, inner=adamw, **HIDDEN)
    for step in range(20):
        ranks.step(alike(2, step))
    inner = ranks.local[0].inner[0]
    before = ranks.local[0].counters.gain
    (later,) = Ranks(1, start=drawn(0), inner=lambda p: inner, outer=Average(), **HIDDEN).local
    ranks.step(alike(2, 20))
    assert ranks.local[0].counters.gain == before
    assert later.counters.gain == 1
    rates = []
    inner.register_step_pre_hook(lambda *_: rates.append(inner.param_groups[0]["lr"]))
    inner.step()
    later.close()
    inner.step()
    assert rates == [LR, LR]


def test_no_step_of_adam_becomes_longer_than_twenty_learning_rates():
    """The first gradient of an element whose others were zero moves it furthest."""
    facts = Facts()
    for _ in range(400):
        facts.scatter(63.0, 64, 1)
    beta1, beta2 = 0.9, 0.999
    longest = (1 - beta1) / sqrt((1 - beta2) * (1 - beta1**2 / beta2))
    assert facts.gain > 2.5
    assert facts.gain * longest <= 20


def test_steps_are_longer_also_with_low_rank_means():
    ranks = Ranks(3, inner=adamw, lengthen=True, **HIDDEN | {"codec": "powersgd-2"})
    for step in range(30):
        ranks.step(alike(3, step))
    assert 1.01 < ranks.local[0].counters.gain < sqrt(3)
    assert ranks.local[0].counters.spread is None
    assert ranks.agree()
