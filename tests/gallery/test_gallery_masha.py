"""MASHA on bilinear games: closed-form solutions, the extragradient method, bytes, resume, and what
is not finite."""

import random

import pytest
import torch
import torch.distributed as dist

import commpress
from gallery import alike, gallery

pytestmark = pytest.mark.slow
ONE, TWO = commpress.RandomKCodec(2, unbiased=True), commpress.TopKCodec(1 / 4, 64)


def played(steps, options):
    errors, masha = gallery("masha").play(steps, **options)
    return errors, alike(masha.point()), masha.exact_bytes, [h.counters for h in masha.hooks]


@pytest.mark.parametrize(
    ("codec", "lr", "tau", "below"),
    [
        (TWO, 0.3, 0.75, 0.08),
        (ONE, 0.2, 0.5, 0.15),
        ("int4", 0.3, 0.75, 0.08),
        ("powersgd-2", 0.2, 0.75, 0.06),
    ],
    ids=["MASHA2", "MASHA1", "int4", "powersgd-2"],
)
def test_it_approaches_the_saddle_point_linearly(pool, codec, lr, tau, below):
    options = {"codec": codec, "lr": lr, "tau": tau}
    for errors, same, exact, counters in pool.run(played, 200, options, size=3):
        assert same
        assert errors[199] < below
        assert errors[199] < 0.4 * errors[99]
        moves = 1 + sum(random.Random(f"0 {step}").random() >= tau for step in range(200))
        assert exact == moves * (2 * 2 * 4 * 128 // 3)
        assert all(each.steps == 200 for each in counters)


def test_descent_and_ascent_at_once_diverge(pool):
    assert pool.run(turning, size=2)[0] > 10


def turning():
    return gallery("masha").descent_and_ascent(200, 0.3)


def without_compression(tau):
    """Points of the method, and those of its equations in float64 on the mean game."""
    names = gallery("masha")
    a, b, c = (part.double().mean(0) for part in names.game(dist.get_world_size())[:3])

    def operator(z):
        x, y = z.split(names.SIZE)
        return torch.cat([a @ y + b, c - a.T @ x])

    z = w = torch.zeros(2 * names.SIZE, dtype=torch.float64)
    for step in range(40):
        half = tau * z + (1 - tau) * w - 0.3 * operator(w)
        after = half - 0.3 * (operator(half) - operator(w))
        if tau == 0:
            torch.testing.assert_close(after, z - 0.3 * operator(z - 0.3 * operator(z)))
        z = after
        if random.Random(f"5 {step}").random() >= tau:
            w = z
    _, masha = names.play(40, codec="none", lr=0.3, tau=tau, seed=5)
    return masha.point().double(), z


@pytest.mark.parametrize("tau", [0.0, 0.6])
def test_without_compression_it_is_extragradient_with_an_anchor(pool, tau):
    for found, due in pool.run(without_compression, tau, size=2):
        torch.testing.assert_close(found, due, atol=2e-6, rtol=2e-5)


def losing(at):
    """One of two runs has two steps whose loss is not finite on rank 1; and one is resumed."""
    names = gallery("masha")
    *parts, _ = names.game(dist.get_world_size())
    a, b, c = (part[dist.get_rank()] for part in parts)
    factor = 1.0

    def loss(first, second):
        x, y = first(), second()
        return factor * (x @ a @ y + b @ x - c @ y)

    def made():
        return names.Masha(names.Player(), names.Player(), codec=TWO, lr=0.3, min_numel=1)

    spoilt, whole, resumed = made(), made(), made()
    for _ in range(at):
        assert spoilt.step(loss)
        assert whole.step(loss)
    before, factor = spoilt.point(), float("nan") if dist.get_rank() == 1 else 1.0
    assert not spoilt.step(loss)
    assert not spoilt.step(loss)
    assert torch.equal(before, spoilt.point())
    factor = 1.0
    resumed.go(whole.point())
    resumed.load_state_dict(whole.state_dict())
    for _ in range(10):
        for each in (spoilt, whole, resumed):
            assert each.step(loss)
    return spoilt.point(), whole.point(), resumed.point(), spoilt.skipped


@pytest.mark.parametrize("at", [0, 6])
def test_a_rank_that_is_not_finite_makes_all_skip_and_a_resumed_run_goes_on(pool, at):
    for spoilt, whole, resumed, skipped in pool.run(losing, at, size=2):
        assert skipped == 2
        assert torch.equal(whole, resumed)
        assert torch.equal(spoilt, whole)
