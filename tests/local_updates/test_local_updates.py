"""Local updates against their equations in float64, against torch's own arithmetic, and against
their invariants."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from commpress.collectives.transports.loopback import simulate
from commpress.errors import InvalidArgument, Mismatch, StateMismatch
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.outer import Average, Nesterov, SlowMo
from commpress.schedules import QSR, Seconds
from local_twin import RATE, SHAPES, Ranks, drawn, dyadic, equal, flat, noise
from ranks import nonsense


def test_each_step_with_sgd_is_synchronous_sgd_in_every_bit():
    """Averages of K = 4 and rates that are powers of two: every sum is exact, so nothing may
    differ."""
    ranks = Ranks(4, start=dyadic(0), every=1)
    twin = [p.clone() for p in dyadic(0)]
    for step in range(3):
        gradients = noise(4, step, dyadic)
        ranks.step(gradients)
        for i, p in enumerate(twin):
            p -= RATE * sum(g[i] for g in gradients) / 4
        for mine in ranks.parameters:
            assert equal(mine, twin)


class Twin:
    """The equations in float64: fragments and delays as in Streaming DiLoCo, with its mixing, or
    with "keep" what was trained meanwhile (DaSGD)."""

    def __init__(self, size, *, every, outer, fragments=1, overlap=0, alpha=0.0):
        self.theta = [flat(drawn(0)) for _ in range(size)]
        self.every, self.outer, self.overlap, self.alpha = every, outer, overlap, alpha
        sizes = (
            [[p.numel for p in part] for part in fragments]
            if fragments != 1
            else [[p.numel() for p in drawn(0)]]
        )
        edges = np.cumsum([0] + [sum(each) for each in sizes])
        self.ranges = [slice(a, b) for a, b in pairwise(edges)]
        self.shared, self.m, self.step_, self.flights = flat(drawn(0)), np.zeros(edges[-1]), 0, []

    def step(self, gradients):
        for theta, g in zip(self.theta, gradients, strict=True):
            theta -= RATE * flat(g)
        self.step_ += 1
        for _, at, mean, left in [f for f in self.flights if f[0] == self.step_]:
            self.arrive(at, mean, left)
        self.flights = [f for f in self.flights if f[0] > self.step_]
        inside = (self.step_ - 1) % self.every + 1
        for number, at in enumerate(self.ranges):
            if inside == -(-self.every * (number + 1) // len(self.ranges)):
                mean = np.mean([self.shared[at] - theta[at] for theta in self.theta], axis=0)
                left = [theta[at].copy() for theta in self.theta]
                if self.overlap:
                    self.flights.append((self.step_ + self.overlap, at, mean, left))
                else:
                    self.arrive(at, mean, left)

    def arrive(self, at, mean, left):
        kind, lr, mu = self.outer
        if kind == "average":
            self.shared[at] -= mean
        elif kind == "nesterov":
            self.m[at] = mu * self.m[at] + mean
            self.shared[at] -= lr * (mean + mu * self.m[at])
        else:
            self.m[at] = mu * self.m[at] + mean / RATE
            self.shared[at] -= lr * RATE * self.m[at]
        for theta, before in zip(self.theta, left, strict=True):
            if self.alpha == "keep":
                theta[at] += self.shared[at] - before
            else:
                theta[at] = self.alpha * theta[at] + (1 - self.alpha) * self.shared[at]


OUTER = {
    "average": (Average(), ("average", 1, 0)),
    "nesterov": (Nesterov(0.7, 0.9), ("nesterov", 0.7, 0.9)),
    "slowmo": (SlowMo(1.0, 0.6), ("slowmo", 1.0, 0.6)),
    "torch": (
        lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
        ("nesterov", 0.7, 0.9),
    ),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("fragments", "overlap", "alpha"),
    [
        (1, 0, 0.0),
        (1, 2, 0.0),
        (1, 2, "keep"),
        (1, 3, 0.5),
        (1, 6, 0.5),
        (1, 6, "keep"),
        (2, 0, 0.0),
        (2, 1, 0.25),
        (2, 3, 0.5),
        (2, 3, "keep"),
    ],
)
def test_it_is_what_the_equations_say(outer, size, fragments, overlap, alpha):
    rule, plain = OUTER[outer]
    ranks = Ranks(size, outer=rule, every=6, fragments=fragments, overlap=overlap, alpha=alpha)
    parts = [f.locals for f in ranks.local[0].fragments]
    twin = Twin(size, every=6, outer=plain, fragments=parts, overlap=overlap, alpha=alpha)
    for step in range(20):
        ranks.step(noise(size, step))
        twin.step(noise(size, step))
        np.testing.assert_allclose(ranks.shared(), twin.shared, rtol=1e-4, atol=2e-4)
        for mine, theirs in zip(ranks.parameters, twin.theta, strict=True):
            np.testing.assert_allclose(flat(mine), theirs, rtol=1e-4, atol=2e-4)
        assert ranks.agree()
    late = overlap >= 3  # the last has not arrived
    assert ranks.local[0].counters.rounds == 3 - late
    assert ranks.local[0].counters.exchanges == 3 * fragments - late


@pytest.mark.parametrize("every", [1, 2])
def test_every_step_counts_where_a_round_overlaps_with_a_whole_one(every):
    """Averaged rounds with "keep" move the shared weights by the ranks' mean step, one round late:
    under SGD, with gradients that do not depend on the weights, they are those of one step after
    the other."""
    options = {"every": every, "overlap": every, "alpha": "keep", "codec": None}
    ranks = Ranks(3, outer=Average(), **options)
    synchronous = [flat(drawn(0))]
    for step in range(12):
        gradients = noise(3, step)
        ranks.step(gradients)
        mean = np.mean([flat(g) for g in gradients], axis=0)
        synchronous.append(synchronous[-1] - RATE * mean)
        # the last round has left, and has not arrived
        arrived = max((step + 1) // every * every - every, 0)
        np.testing.assert_allclose(ranks.shared(), synchronous[arrived], rtol=1e-4, atol=1e-5)
        for mine in ranks.parameters:
            own = np.abs(flat(mine) - ranks.shared()).max()
            assert own < 2 * every * RATE * 6, "no rank drifts by more than two rounds"


@pytest.mark.parametrize("codec", ["int4", "bits2", "sign", "powersgd-2", "topk-4"])
@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_lost_only_late(codec, size):
    """Θ and what is owed together are what float32 would have given: Σ Δ̄ + R = Σ mean(Δ)."""
    ranks = Ranks(size, codec=codec, feedback_decay=1.0, min_numel=0)
    total, start = np.zeros_like(ranks.shared()), ranks.shared()
    for step in range(12):
        before = ranks.shared()
        ranks.inner_step(noise(size, step))
        if (step + 1) % 4 == 0:
            total += before - np.mean([flat(mine) for mine in ranks.parameters], axis=0)
        simulate([local.steps() for local in ranks.local])
        assert ranks.agree()
    states = simulate([local.elastic_steps() for local in ranks.local])
    shards = [shard for state in states for shard in state["shards"].values()]
    owed = np.concatenate([shard["values"].double().numpy() for shard in shards])
    np.testing.assert_allclose(start - ranks.shared() + owed, total, rtol=1e-4, atol=1e-4)
    assert np.abs(owed).max() > 0


def both(store, like):
    """Residuals of one rank, sent and reduced together."""
    parts = [
        sent.double().numpy() + reduced.double().numpy()[: sent.numel()]
        for _, sent, reduced in store.places()
    ]
    return np.concatenate(parts) if parts else 0 * like


def test_a_residual_that_decays():
    """One rank, two rounds, one bit: e ← ρ·e is in what leaves."""
    ranks = Ranks(1, codec="sign", feedback_decay=0.5, min_numel=0, every=1)
    sent = []
    store = ranks.local[0].exchanges.residuals
    for step in range(3):
        before, owed = ranks.shared(), both(store, ranks.shared())
        ranks.inner_step(noise(1, step))
        change = before - flat(ranks.parameters[0])
        simulate([ranks.local[0].steps()])
        sent.append(
            np.abs(change + 0.5 * owed - (before - ranks.shared()) - both(store, before)).max()
        )
    assert max(sent) < 1e-5


def test_ranks_that_start_from_different_weights_are_named():
    ranks = Ranks(3)
    ranks.local[1].fragments[0].weights[7] += 1e-3
    for step in range(3):
        ranks.step(noise(3, step))
    with pytest.raises(Mismatch, match=r"ranks \[1\] differ from those of rank 0") as caught:
        ranks.step(noise(3, 3))
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", [None, "int4"])
def test_what_is_not_finite_is_left_out(bad, codec, caplog):
    ranks = Ranks(3, codec=codec, feedback_decay=1.0, min_numel=0)
    before = ranks.shared()
    for step in range(3):
        ranks.step(noise(3, step))
    ranks.inner_step(noise(3, 3))
    with torch.no_grad():
        ranks.parameters[2][0][0, 0] = bad
    expected = before - np.mean([flat(mine) for mine in ranks.parameters[:2]], axis=0)
    simulate([local.steps() for local in ranks.local])
    assert ranks.agree()
    assert "ranks [2]" in caplog.text
    assert all(torch.isfinite(p).all() for mine in ranks.parameters for p in mine)
    assert [local.counters.dropped for local in ranks.local] == [1, 1, 1]
    if codec is None:
        np.testing.assert_allclose(before - ranks.shared(), expected, atol=1e-5)


INNERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    # its state is there from the start
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (1, (3, "keep")), (3, 0), (3, 1)])
def test_a_rank_comes_back_after_one_gradient_that_is_not_finite(inner, fragments, overlap, caplog):
    """Its moments start anew: soon its change counts again, and a step is as long as a first
    one."""
    ranks = Ranks(3, inner=INNERS[inner], every=6, fragments=fragments, overlap=overlap)
    for step in range(30):
        gradients = noise(3, step)
        # as a backward through them
        if step == 7 or any(not torch.isfinite(p).all() for p in ranks.parameters[1]):
            gradients[1] = [torch.full_like(g, float("nan")) for g in gradients[1]]
        before = flat(ranks.parameters[1])
        ranks.step(gradients)
        # lr is 0.01, gradients are normal
        assert step < 24 or np.abs(flat(ranks.parameters[1]) - before).max() < 1
    for local in ranks.local:
        assert local.counters.participants == 3
        assert local.counters.dropped == 1
    assert [local.counters.restarts for local in ranks.local] == [0, len(SHAPES), 0]
    assert "4 inner states started anew" in ranks.local[1].report()
    assert caplog.text.count("start anew") == 1
    assert all(torch.isfinite(p).all() for p in ranks.parameters[1])
    fresh = Ranks(1, inner=INNERS[inner])
    fresh.step(noise(1, 0))
    new, old = (next(iter(each.local[0].state.values())) for each in (fresh, ranks))
    assert new.keys() == old.keys()


def test_an_exchange_that_does_not_count_moves_nothing():
    """Each change is finite and their sum is not: Θ and the outer momentum stay, and ranks go back
    to Θ."""
    ranks = Ranks(2, outer=Nesterov(0.7, 0.9), every=1)
    ranks.step(noise(2, 0))
    shared, momentum = ranks.shared(), ranks.local[0].fragments[0].state["momentum"].clone()
    for mine in ranks.parameters:
        mine[0].data.fill_(3e38)
    ranks.step([[torch.zeros_like(p) for p in mine] for mine in ranks.parameters])
    np.testing.assert_array_equal(ranks.shared(), shared)
    assert torch.equal(ranks.local[0].fragments[0].state["momentum"], momentum)
    for mine in ranks.parameters:
        np.testing.assert_array_equal(flat(mine), shared)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("codec", ["int4", "int8", "sign"])
def test_an_exchange_that_does_not_count_leaves_residuals_as_they_were(codec, fragments):
    """Each change is finite and their sum is not."""
    ranks = Ranks(2, codec=codec, feedback_decay=1.0, every=2, fragments=fragments, min_numel=0)
    for step in range(4):
        ranks.step(noise(2, step))

    def residuals():
        return [
            [t.clone() for t in every]
            for local in ranks.local
            for every in local.exchanges.residuals.every().values()
        ]

    before = residuals()
    assert any(t.any() for every in before for t in every)
    for mine in ranks.parameters:
        for p in mine:
            p.data.fill_(3e38)
    zeros = [[torch.zeros_like(p) for p in mine] for mine in ranks.parameters]
    for _ in range(2):
        ranks.step(zeros)
    assert [local.taken for local in ranks.local] == [False, False]
    assert equal(residuals(), before)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"every": 10, "overlap": 11},
        {"every": 10, "overlap": 5, "fragments": 4},
        {"every": 1, "fragments": 2},
        {"every": QSR(0.1, 3), "overlap": 4},
    ],
)
def test_a_round_that_is_too_short_is_refused(options, size):
    with pytest.raises(
        InvalidArgument, match=r"every is \d+ with overlap=\d+ and fragments=\d+, expected at least"
    ):
        Ranks(size, **options)


def test_a_schedule_is_held_to_what_overlap_and_fragments_need():
    class Two:
        def interval(self, step, lr, facts):
            return 2

    ranks = Ranks(2, every=Two(), overlap=3)
    left, arrived = [], []
    for step in range(10):
        ranks.step(noise(2, step))
        left.append(ranks.local[0].exchanged)
        arrived.append(ranks.local[0].counters.exchanges)
    assert left == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert arrived == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("codec", [None, "int8", "int4", "bits2", "sign", "topk-4"])
def test_the_spread_is_that_of_the_changes_or_left_out(codec):
    ranks = Ranks(5, codec=codec, every=2, min_numel=0)
    for step in range(3):
        ranks.step(noise(5, step))
    ranks.inner_step(noise(5, 3))
    changes = ranks.shared() - np.stack([flat(mine) for mine in ranks.parameters])
    simulate([local.steps() for local in ranks.local])
    mean = changes.mean(0)
    spread = np.sqrt(((changes - mean) ** 2).sum(1).mean() / (mean**2).sum())
    if codec in (None, "int8", "int4"):
        assert ranks.local[0].counters.spread == pytest.approx(spread, rel=0.1)
        assert "spread" in ranks.local[0].report()
    else:
        assert ranks.local[0].counters.spread is None
        assert "spread" not in ranks.local[0].report()


def test_a_drain_with_nothing_left_is_no_round():
    ranks = Ranks(2, every=2)
    for step in range(2):
        ranks.step(noise(2, step))
    for _ in range(2):
        simulate([local.draining() for local in ranks.local])
        assert [local.counters.rounds for local in ranks.local] == [1, 1]


def test_ranks_count_as_much_as_they_have_trained_on():
    ranks = Ranks(3, weight="tokens")
    tokens, before = [5, 1, 2], ranks.shared()
    for step in range(3):
        ranks.step(noise(3, step), tokens)
    ranks.inner_step(noise(3, 3))
    expected = np.average([flat(mine) for mine in ranks.parameters], axis=0, weights=tokens)
    simulate([local.steps(tokens=n) for local, n in zip(ranks.local, tokens, strict=True)])
    np.testing.assert_allclose(ranks.shared(), expected, atol=1e-5)
    assert not np.allclose(before, expected)
    with pytest.raises(InvalidArgument, match="tokens is 0"):
        next(ranks.local[0].steps(), None)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("codec", [None, "int4"])
def test_a_rank_that_runs_out_of_data_goes_on_taking_part(overlap, codec):
    """Rank 0 has 5 steps, rank 1 has 14: it answers in all rounds, with weight 0, and in the end
    all hold the same."""
    ranks = Ranks(2, codec=codec, overlap=overlap, fragments=2, min_numel=0)
    steps = [5, 14]

    def trains(r):
        for step in range(steps[r]):
            for p, g in zip(ranks.parameters[r], noise(2, step)[r], strict=True):
                p.grad = g.clone()
            ranks.local[r].inner[0].step()
            yield from ranks.local[r].steps()
        yield from ranks.local[r].draining()

    simulate([trains(0), trains(1)])
    assert ranks.agree()
    for mine in ranks.parameters:
        np.testing.assert_array_equal(flat(mine), ranks.shared().astype(np.float32))
    for step in range(6):  # and on
        ranks.step(noise(2, step))
    assert ranks.agree()


@pytest.mark.parametrize(
    ("steps", "overlap", "crossed"), [(8, 0, [2]), (11, 0, [3]), (8, 1, [3, 2]), (11, 1, [4, 3])]
)
def test_a_report_is_of_exchanges_that_had_something_to_say(steps, overlap, crossed):
    """The warm-up is synchronous and the end of a drain is empty: neither is in the bits of a
    round, nor the last spread."""
    ranks = Ranks(
        2,
        codec="int8",
        every=4,
        fragments=len(crossed),
        overlap=overlap,
        exact_steps=2,
        min_numel=0,
    )
    for step in range(2 + steps):
        for mine, given_ in zip(ranks.parameters, noise(2, step), strict=True):
            for p, g in zip(mine, given_, strict=True):
                p.grad = g.clone()
        simulate([local.stepping() for local in ranks.local])
        if step == 2 + 4 + overlap - 1:
            once = ranks.local[0].counters.bits  # of one round of all fragments
    ranks.drain()
    spread = [local.counters.spread for local in ranks.local]
    ranks.drain()
    for local, last in zip(ranks.local, spread, strict=True):
        counters = local.counters
        assert 0 < counters.spread == last
        assert counters.participants == 2
        assert 8 < counters.bits < 16
        assert counters.bits == pytest.approx(once, rel=0.02 * overlap)  # fragments differ in size
        assert counters.changed == sum(
            n * f.numel for n, f in zip(crossed, local.fragments, strict=True)
        )
        assert f"({counters.bits:.2f} bits per parameter and round)" in local.report()
        assert "over 2 ranks" in local.report()
        assert (
            counters.sent_bytes
            == local.channel.sent_bytes + local.control.sent_bytes
            > counters.change_bytes
        )


def test_in_the_place_of_an_optimizer():
    """Schedulers and scalers take it for one; a step whose gradients overflowed counts and moves
    nothing."""
    ranks, twin = Ranks(1, every=5), Ranks(1, every=5)
    local, scaler = ranks.local[0], torch.amp.GradScaler("cpu", init_scale=4.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(local, lambda step: 0.5**step)
    scaler.scale(torch.zeros(()))
    for step in range(4):
        gradients = noise(1, step)
        for p, g in zip(ranks.parameters[0], gradients[0], strict=True):
            p.grad = 4 * g if step != 2 else torch.full_like(g, float("inf"))
        before = [p.detach().clone() for p in ranks.parameters[0]]
        scaler.step(local)
        scaler.update(4.0)
        twin.local[0].inner[0].param_groups[0]["lr"] = RATE * 0.5**step
        if step == 2:
            assert equal(before, ranks.parameters[0])
        else:
            twin.step(gradients)
        schedule.step()
    assert local.counters.steps == 4
    assert equal(ranks.parameters[0], twin.parameters[0])


def test_a_state_of_another_model_is_refused():
    ranks, other = Ranks(2), Ranks(2, fragments=2)
    states = simulate([local.saving() for local in ranks.local])
    with pytest.raises(StateMismatch, match="other parameters or fragments"):
        other.local[0].load_state_dict(states[0])
    with pytest.raises(StateMismatch, match="format"):
        other.local[0].load_state_dict({"format": 7})


@nonsense(
    {"every": 0},
    {"every": True},
    {"overlap": -1},
    {"alpha": 0.5},
    {"alpha": 1.0, "overlap": 1},
    {"weight": "loss"},
    {"store": "disk"},
    {"fragments": 9},
    {"feedback_decay": 1.5},
    {"outer": 3},
    {"fragments": [[]]},
    {"codec": "int5"},
)
def test_what_makes_no_sense_is_refused(options, size):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Ranks(size, **options)


def test_bf16_weights_keep_what_their_type_cannot_hold():
    """Θ is float32: many rounds of changes below half a unit of bfloat16 are not lost, and rounding
    does not drag it back."""
    ranks = Ranks(2, dtype=torch.bfloat16, every=1, outer=Nesterov(lr=0.125, momentum=0.0))
    before, moved = ranks.shared(), 0.0
    for _ in range(8):
        gradients = [[p.detach().abs() / 32 for p in mine] for mine in ranks.parameters]
        held = flat(ranks.parameters[0])
        ranks.inner_step(gradients)
        moved += 0.125 * (held - np.mean([flat(mine) for mine in ranks.parameters], axis=0))
        simulate([local.steps() for local in ranks.local])
    np.testing.assert_allclose(before - ranks.shared(), moved, rtol=1e-3, atol=1e-6)


def test_seconds_give_each_rank_as_many_steps_as_it_manages(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("commpress.optim.rounds.monotonic", lambda: clock[0])
    ranks = Ranks(2, every=Seconds(1.0), weight="steps")
    counts = [0, 0]

    def trains(r, wait):
        while ranks.local[r].counters.rounds < 2:
            for p, g in zip(ranks.parameters[r], noise(2, counts[r])[r], strict=True):
                p.grad = g.clone()
            ranks.local[r].inner[0].step()
            counts[r] += 1
            clock[0] += wait
            yield from ranks.local[r].steps()

    simulate([trains(0, 0.1), trains(1, 0.3)])
    assert ranks.agree()
    assert min(counts) > 0


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (1, 1), (2, 1)])
def test_a_rank_that_was_late_is_late_once(monkeypatch, fragments, overlap):
    """Rank 1 pauses; from then on a round in seconds ends at one time on both ranks."""
    clock = [0.0]
    monkeypatch.setattr("commpress.optim.rounds.monotonic", lambda: clock[0])
    monkeypatch.setattr("commpress.optim.local_updates.monotonic", lambda: clock[0])
    ranks = Ranks(2, every=Seconds(1.0), fragments=fragments, overlap=overlap)
    begin = 0.0

    def late(steps):
        clock[0] += 0.25
        yield from steps

    for fragment in range(fragments):
        clock[0] = begin + (fragment + 1) / fragments  # the next fragment leaves
        ranks.inner_step(noise(2, fragment))
        first, second = (local.steps() for local in ranks.local)
        simulate([first, late(second)])
        for _ in range(overlap):
            ranks.inner_step(noise(2, 9))
            simulate([local.steps() for local in ranks.local])
        begin += 1.25 if fragment + 1 == fragments else 0.25
        assert [local.rounds.clock for local in ranks.local] == [begin, begin]
    assert all(local.counters.exchanges == fragments for local in ranks.local)


@pytest.mark.parametrize("inner", [torch.nn.Linear(2, 2), None, [], [torch.nn.Linear(2, 2)]])
def test_what_is_no_optimizer_is_named(inner):
    with pytest.raises(
        InvalidArgument, match=r"inner is .*, expected a torch optimizer or a list of them"
    ):
        LocalUpdates(inner)
