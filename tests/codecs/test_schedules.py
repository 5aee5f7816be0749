"""Schedules are pure functions: tables of integers against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commpress.errors import InvalidArgument
from commpress.schedules import (
    AfterSteps,
    DoublingIntervals,
    DoublingUpdates,
    Facts,
    FollowRate,
    Linear,
    Quadratic,
    WhenStable,
    pruned,
    sync_named,
)


@given(st.integers(1, 20), st.integers(0, 8))
def test_variance_updates_before_an_octave_number_kappa_each(kappa, octaves):
    schedule = DoublingUpdates(kappa)
    assert schedule.count(kappa * (2**octaves - 1)) == kappa * octaves


def test_variance_updates_of_the_definition():
    """k_{j+1} − k_j = 2^⌊j/κ⌋."""
    for kappa in (1, 4, 16):
        steps, at = [], 0
        for j in range(6 * kappa):
            steps.append(at)
            at += 2 ** (j // kappa)
        schedule = DoublingUpdates(kappa)
        assert [s for s in range(at) if schedule.count(s + 1) > schedule.count(s)] == steps


def test_intervals_double_every_period():
    schedule = DoublingIntervals(start=10, period=5, longest=16)
    assert [schedule.interval(s, 1.0, Facts()) for s in (0, 9, 10, 14, 15, 20, 25, 30, 1000)] == [
        1,
        1,
        2,
        2,
        4,
        8,
        16,
        16,
        16,
    ]


def test_quadratic_intervals_follow_the_inverse_square_of_the_rate():
    """H = max(H_base, ⌊(α/γ)²⌋) on a cosine schedule, windows laid end to end."""
    facts, schedule, total, peak = (
        Facts(),
        Quadratic(alpha=0.02, shortest=2, longest=1000),
        500,
        0.01,
    )
    facts.see(0, peak)
    step, windows = 2, []
    while step < total:
        rate = peak * 0.5 * (1 + math.cos(math.pi * step / total))
        interval = schedule.interval(step, rate, facts)
        assert interval == max(2, math.floor((0.02 / rate) ** 2 + 1e-9))
        windows.append(interval)
        step += interval
    assert windows == sorted(windows)
    assert Quadratic().interval(100, peak / 2, facts) == 4
    assert {schedule.interval(s, peak, facts) for s in range(2, 50)} == {4}


@pytest.mark.parametrize("rule", ["line", "cosine", "inverse root"])
def test_the_rates_of_a_linear_window_add_up_to_its_peak_at_most(rule):
    """And those of one more step at the rate that it began with would not; windows laid end to
    end."""
    facts, schedule, total, peak, step = Facts(peak_lr=0.01), Linear(), 500, 0.01, 2
    rates = (
        peak
        * {
            "line": 1 - np.arange(total) / total,
            "cosine": (1 + np.cos(np.pi * np.arange(total) / total)) / 2,
            "inverse root": (1 + np.arange(total)) ** -0.5,
        }[rule]
    )
    lengths = []
    while step < total:
        length = schedule.interval(step, rates[step], facts)
        assert rates[step : step + length].sum() <= peak * (1 + 1e-9)
        assert (length + 1) * rates[step] > peak or length == schedule.longest
        lengths.append(length)
        step += length
    assert lengths == sorted(lengths)
    assert {1, 2, 4, 16} <= set(lengths)


def test_following_the_rate():
    facts = Facts()
    facts.see(0, 1.0)
    schedule = FollowRate(longest=16)
    rates = (1.0, 0.9, 0.5, 0.3, 0.25, 0.1, 0.01, 0.0)
    assert [schedule.interval(50, lr, facts) for lr in rates] == [1, 2, 4, 4, 8, 16, 16, 16]


def test_while_the_rate_rises_every_step_synchronises():
    facts = Facts()
    for step in range(50):
        facts.see(step, 0.1 * step)
        for schedule in (FollowRate(), Linear(), Quadratic()):
            assert schedule.interval(step, 0.1 * step, facts) == 1


def test_stable_means_over_the_window():
    rule = WhenStable(threshold=0.96, window=100, earliest=16, every=8)
    rising = Facts(norms=[(s, float(s)) for s in range(8, 208, 8)])
    flat = Facts(norms=[(s, 1.0 + 0.01 * (s % 3)) for s in range(8, 208, 8)])
    assert not rule.freezes(200, rising)
    assert rule.freezes(200, flat)
    assert not rule.freezes(8, flat)
    warming_up = Facts(peak_lr=0.1, peak_step=199, norms=flat.norms)
    assert not rule.freezes(200, warming_up), "the learning rate still rises"
    assert rule.freezes(200, Facts(peak_lr=0.1, peak_step=198, norms=flat.norms))
    kept = Facts(norms=pruned(flat.norms, 100))
    assert len(kept.norms) < len(flat.norms)
    assert rule.freezes(200, kept)


def test_facts_survive_a_checkpoint():
    facts = Facts(0.1, 7, 0.5, [(8, 1.5)])
    assert Facts.of(facts.as_dict()) == facts


def test_bad_values_are_named():
    with pytest.raises(InvalidArgument, match="exact_steps is 0"):
        AfterSteps(0)
    for nonsense in (0, float("nan"), 2.5):
        with pytest.raises(InvalidArgument, match=f"variance_updates is {nonsense!r}"):
            DoublingUpdates(nonsense)
    for nonsense in (float("nan"), float("inf"), 150.0, True, None, "soon"):
        with pytest.raises(InvalidArgument, match=f"exact_steps is {nonsense!r}"):
            AfterSteps(nonsense)
    with pytest.raises(InvalidArgument, match="sync is 'sometimes'"):
        sync_named("sometimes")
    for none in (0, True, -3):
        with pytest.raises(InvalidArgument, match=f"sync is {none}"):
            sync_named(none)
    assert sync_named(4).interval(0, 1.0, Facts()) == 4
