"""Rounds of every="auto": the smallest whose exchange hides behind computing, the same on all
ranks."""

import copy
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import commpress
from commpress.collectives.transports.loopback import simulate
from commpress.errors import InvalidArgument, StateMismatch
from commpress.optim import local_updates, rounds
from commpress.optim.outer import Average, Nesterov
from commpress.optim.rounds import PaceMeter, slowest
from commpress.schedules import CODECS, UNKNOWN, Facts, Hidden, Pace, Rung
from local_twin import RATE, HiddenOf, Ranks, drawn, dyadic, equal, flat, noise
from test_local_ranks import Slow

STEP = 0.25  # seconds of computing of the modelled rank


class Clock:
    """A clock that computing and exchanges advance."""

    def __init__(self, monkeypatch, exchange):
        self.now, self.exchange = 0.0, exchange
        monkeypatch.setattr(rounds, "monotonic", lambda: self.now)
        monkeypatch.setattr(local_updates, "monotonic", lambda: self.now)

    def slow(self, ranks):
        """Let each exchange of these ranks take ``exchange`` seconds."""
        for local in ranks.local:
            local.outer = (
                Slowed(local.outer, self) if not isinstance(local.outer, Slowed) else local.outer
            )

    def train(self, ranks, steps, first=0, step=STEP, make=dyadic):
        lengths = []
        for number in range(first, first + steps):
            gradients = noise(len(ranks.local), number, make)
            ranks.inner_step(gradients)
            self.now += step
            simulate([local.steps() for local in ranks.local])
            lengths.append(ranks.local[0].rounds.length)
        return lengths


class Slowed:
    """An outer rule whose exchanges take the clock's time."""

    def __init__(self, inner, clock):
        self._inner, self._clock = inner, clock

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def exchange(self, exchange, channel, *arguments, **options):
        if channel.rank == 0:
            self._clock.now += self._clock.exchange
        return (yield from self._inner.exchange(exchange, channel, *arguments, **options))


@pytest.mark.parametrize(
    ("seconds", "length"),
    [(0.01, 1), (0.2, 1), (0.3, 2), (0.9, 4), (2.3, 11)],
    ids=lambda value: str(value),
)
def test_a_round_is_the_smallest_that_hides_its_exchange(monkeypatch, seconds, length):
    clock, ranks = Clock(monkeypatch, seconds), Ranks(3, every="auto", outer=None)
    clock.slow(ranks)
    clock.train(ranks, 4 * length + 8)
    local = ranks.local[0]
    assert {each.rounds.length for each in ranks.local} == {length} == {local.rounds.overlap}
    assert 1.1 * seconds <= length * STEP < 1.1 * seconds + STEP
    assert (local.counters.every, local.counters.overlap) == (length, length)
    assert f"now of {length} steps, {length} of them beside an exchange" in local.report()
    assert ranks.agree()


EARLY = {"every": HiddenOf(early=8), "outer": None}  # all is kept after step 8


def test_what_is_trained_during_an_exchange_counts_half_at_first_and_then_whole():
    """Against the equations in float64: the share grows with the steps of the run."""
    ranks, shares = Ranks(3, **EARLY), []
    theta, shared, under_way = [flat(drawn(0)) for _ in range(3)], flat(drawn(0)), None
    for step in range(1, 17):
        gradients = noise(3, step)
        ranks.step(gradients)
        theta = [t - RATE * flat(g) for t, g in zip(theta, gradients, strict=True)]
        if step % 2 == 0:
            if under_way is not None:
                left, share = under_way
                shared = np.mean(left, axis=0)
                theta = [shared + share * (t - b) for t, b in zip(theta, left, strict=True)]
                shares.append(share)
            under_way = theta, min(0.5 + step / 16, 1.0)
        np.testing.assert_allclose(ranks.shared(), shared, rtol=1e-4, atol=2e-4)
        for mine, theirs in zip(ranks.parameters, theta, strict=True):
            np.testing.assert_allclose(flat(mine), theirs, rtol=1e-4, atol=2e-4)
        assert ranks.agree()
    assert shares == [0.625, 0.75, 0.875, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("saved", [3, 6, 7, 9])
def test_a_run_resumes_in_every_bit_while_more_is_kept(saved):
    one, two = Ranks(3, **EARLY), Ranks(3, **EARLY)
    for step in range(saved):
        one.step(noise(3, step))
    two.go_on(*one.saved())
    for step in range(saved, 14):
        one.step(noise(3, step))
        two.step(noise(3, step))
        assert equal(one.parameters, two.parameters)
        assert np.array_equal(one.shared(), two.shared())


@pytest.mark.parametrize(
    ("options", "alpha"),
    [
        ({"outer": None}, None),
        ({"outer": Nesterov()}, 0.5),
        ({"outer": None, "every": "auto", "alpha": 0.5}, 0.5),
        ({"outer": None, "every": HiddenOf(steps=21)}, 0.5),
    ],
)
def test_only_means_of_weights_carry_training_over_by_default(options, alpha):
    ranks = Ranks(2, **{"every": HiddenOf()} | options)
    for step in range(ranks.local[0].rounds.length):
        ranks.step(noise(2, step))
    assert [local.flight.alpha for local in ranks.local] == [alpha] * 2


def test_a_round_follows_the_link(monkeypatch):
    """It grows when two exchanges were slow, shrinks when two were fast, and heeds no single
    one."""
    clock, ranks = Clock(monkeypatch, 0.1), Ranks(2, every="auto", outer=None)
    clock.slow(ranks)
    assert clock.train(ranks, 12)[-1] == 1
    clock.exchange = 1.5
    lengths = clock.train(ranks, 20, first=12)
    assert 7 in lengths[:8], lengths
    clock.exchange = 0.1
    lengths = clock.train(ranks, 40, first=32)
    assert lengths[-1] == 1
    assert lengths.index(1) > 7, lengths
    clock.exchange = 1.5
    clock.train(ranks, 1, first=72)
    clock.exchange = 0.1
    assert set(clock.train(ranks, 20, first=73)) == {1}


def test_the_slowest_rank_and_the_slowest_exchange_count():
    assert slowest([Pace(1, 2, 3), Pace(3, 1, 4)]) == Pace(3, 2, 4)
    assert slowest([Pace(1, 2, 3), UNKNOWN]) == Pace(1, 2, 3)  # who has just come
    assert slowest([Pace(1, 0, 3), UNKNOWN]) is None


@given(st.lists(st.tuples(*[st.floats(0.001, 100)] * 3), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_the_length_is_a_function_of_what_a_checkpoint_holds(paces):
    facts, schedule = Facts(), Hidden()
    for pace in paces:
        facts.keep(Pace(*pace))
    again = Facts.of(copy.deepcopy(facts.as_dict()))
    length = schedule.interval(0, 0.1, facts)
    assert length == schedule.interval(999, 0.5, again)
    assert 1 <= length <= schedule.longest
    slow = min(schedule.room * pace[1] / pace[0] for pace in paces[-3:])
    assert length >= min(slow, schedule.longest)


def test_beginning_and_ending_an_exchange_take_a_tenth_at_most():
    assert Hidden().needed(Pace(step=1.0, exchange=0.5, standing=0.35)) == 4


def test_the_meter_leaves_out_what_is_no_computing(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rounds, "monotonic", lambda: now[0])
    meter = PaceMeter()
    for seconds in (0.5, 1.5, 0.5, 1.5, 9.0):  # a device that is behind in every second one
        with meter.between_steps():
            now[0] += 0.25
            meter.waited(0.125)
        now[0] += seconds
    meter.exchanged(5.0)  # the first makes connections
    assert meter.tell() == Pace(1.0, 0.0, 5 * 0.125)
    with meter.between_steps():
        now[0] += 0.5
    meter.exchanged(2.0)
    assert meter.tell() == Pace(9.0, 2.0, 0.5)
    assert meter.tell() == UNKNOWN
    meter.begin_anew()
    assert meter.tell() == UNKNOWN


def test_an_evaluation_between_two_steps_changes_nothing(monkeypatch):
    clock, ranks = Clock(monkeypatch, 0.6), Ranks(2, every="auto", outer=None)
    clock.slow(ranks)
    assert clock.train(ranks, 30)[-1] == 3
    lengths = clock.train(ranks, 1, first=30, step=60.0) + clock.train(ranks, 20, first=31)
    assert set(lengths) == {3}


@pytest.mark.parametrize("at", [3, 5, 7])
def test_it_resumes_in_every_bit_from_recorded_seconds(monkeypatch, at):
    def begun():
        ranks = Ranks(3, every="auto", outer=None, codec="int4", min_numel=0)
        clock.slow(ranks)
        return ranks

    clock = Clock(monkeypatch, 0.6)
    one = begun()
    clock.train(one, at)
    two = begun()
    two.go_on(*one.saved())
    assert two.local[0].facts == one.local[0].facts
    assert two.local[0].rounds.state() == one.local[0].rounds.state()
    first, second = clock.train(one, 9, first=at), clock.train(two, 9, first=at)
    assert first == second
    assert equal(one.parameters, two.parameters)


SLOW = {"int4": 0.9, "powersgd-8+fp8": 0.2}


class ByCodec(Clock):
    """A link on which codecs differ: ``seconds`` of an exchange by codec."""

    seconds = SLOW

    def train(self, ranks, steps, **more):
        codecs = []
        for number in range(steps):
            self.exchange = self.seconds[CODECS[ranks.local[0].facts.codec.number]]
            super().train(ranks, 1, first=more.get("first", 0) + number)
            codecs.append(CODECS[ranks.local[0].facts.codec.number])
        assert len({each.facts.codec.number for each in ranks.local}) == 1
        return codecs


def of_codecs(clock, size=2):
    start = [torch.randn(64, 48), torch.randn(5)]
    ranks = Ranks(size, every="auto", outer=None, codec="auto", start=start)
    clock.slow(ranks)
    return ranks


def small(size, step, make=None):
    return [
        [torch.randn(shape, generator=draw) for shape in ((64, 48), (5,))]
        for draw in (torch.Generator().manual_seed(99 * step + r) for r in range(size))
    ]


def test_a_coarser_codec_comes_before_long_rounds_and_goes_with_the_slow_link(monkeypatch):
    monkeypatch.setattr("test_hidden_rounds.noise", small)
    clock = ByCodec(monkeypatch, 0.0)
    ranks = of_codecs(clock)
    codecs = clock.train(ranks, 60)
    assert (codecs[0], codecs[-1]) == ("int4", "powersgd-8+fp8")
    assert list(dict.fromkeys(codecs)) == ["int4", "powersgd-8+fp8"], "one after the other"
    assert ranks.local[0].rounds.length == 1
    assert ranks.agree()
    clock.seconds = {name: 5 * seconds for name, seconds in SLOW.items()}
    codecs = clock.train(ranks, 90, first=60)
    assert (codecs[-1], ranks.local[0].rounds.length) == ("powersgd-8+fp8", 5)
    clock.seconds = {name: seconds / 20 for name, seconds in SLOW.items()}
    codecs = clock.train(ranks, 90, first=150)
    assert list(dict.fromkeys(codecs)) == ["powersgd-8+fp8", "int4"]
    assert "in int4" in ranks.local[0].report()
    assert ranks.agree()


def test_a_codec_that_gains_nothing_is_left_for_good(monkeypatch):
    monkeypatch.setattr("test_hidden_rounds.noise", small)
    clock = ByCodec(monkeypatch, 0.0)
    ranks = of_codecs(clock)
    clock.seconds = dict.fromkeys(SLOW, 0.9)
    codecs = clock.train(ranks, 200)
    assert codecs.count("powersgd-8+fp8") == 20, "five rounds of four steps"
    assert set(codecs[60:]) == {"int4"}
    assert ranks.local[0].rounds.length == 4


@pytest.mark.parametrize("at", [10, 14, 22])
def test_the_codec_resumes_in_every_bit(monkeypatch, at):
    monkeypatch.setattr("test_hidden_rounds.noise", small)
    clock = ByCodec(monkeypatch, 0.0)
    one = of_codecs(clock, 3)
    clock.train(one, at)
    two = of_codecs(clock, 3)
    two.go_on(*one.saved())
    assert two.local[0].facts == one.local[0].facts
    assert clock.train(one, 20, first=at) == clock.train(two, 20, first=at)
    assert equal(one.parameters, two.parameters)


def test_a_codec_that_is_named_stays(monkeypatch):
    clock, ranks = Clock(monkeypatch, 0.9), Ranks(2, every="auto", outer=None, codec="int4")
    clock.slow(ranks)
    clock.train(ranks, 30)
    assert (ranks.local[0].rounds.length, ranks.local[0].counters.codec) == (4, "")
    fixed = Ranks(2, every=4, codec="auto")
    fixed.step(noise(2, 0))
    assert fixed.local[0].exchanges.policy == fixed.local[0].codecs[0]


def test_what_a_state_says_of_codecs_is_checked():
    known = Rung(1, 1, 0, 2, 0.0, [4.0])
    assert Rung.of(known.as_list()) == known
    for wrong in (
        [1, 0, 0, 0, 1.0],
        [1, 1, 0, 0, 0.0],
        [2, 2, 0, 0, 0.0, 2.0, 2.0],
        [0, 9, 0, 0, 0.0],
    ):
        with pytest.raises(StateMismatch, match=r"codec .* of rounds, expected the number"):
            Rung.of(wrong)


def test_long_rounds_move_with_momentum_and_short_ones_do_not(monkeypatch):
    clock, ranks = Clock(monkeypatch, 0.1), Ranks(2, every="auto", outer=None)
    clock.slow(ranks)
    for local in ranks.local:
        local._outer_of_long_rounds = Slowed(Nesterov(), clock)
    clock.train(ranks, 8)
    assert "momentum" not in ranks.local[0].fragments[0].state
    clock.exchange = 10.0
    clock.train(ranks, 140, first=8)
    assert (ranks.local[0].rounds.long, ranks.local[0].rounds.length) == (True, 44)
    assert float(ranks.local[0].fragments[0].state["momentum"].norm()) > 0
    clock.exchange = 0.1
    clock.train(ranks, 180, first=148)
    assert not ranks.local[0].rounds.long
    assert float(ranks.local[0].fragments[0].state["momentum"].norm()) == 0
    assert ranks.agree()


def test_the_rule_given_stays_in_long_rounds(monkeypatch):
    clock, ranks = Clock(monkeypatch, 10.0), Ranks(2, every="auto", outer=Average())
    clock.slow(ranks)
    clock.train(ranks, 120)
    assert ranks.local[0].rounds.long
    assert not ranks.local[0].fragments[0].state


def test_fragments_take_turns_and_each_hides(monkeypatch):
    clock, ranks = Clock(monkeypatch, 0.6), Ranks(2, every="auto", outer=None, fragments=3)
    clock.slow(ranks)
    clock.train(ranks, 40)
    assert (ranks.local[0].rounds.length, ranks.local[0].rounds.overlap) == (9, 3)
    assert ranks.agree()


def test_a_rank_alone_has_nothing_to_hide():
    ranks = Ranks(1, every="auto", outer=None)
    twin = [p.detach().clone() for p in ranks.parameters[0]]
    for step in range(45):
        gradients = noise(1, step, dyadic)
        ranks.step(gradients)
        twin = [p - 0.25 * g for p, g in zip(twin, gradients[0], strict=True)]
    assert ranks.local[0].counters.exchanges == 2
    for p, q in zip(ranks.parameters[0], twin, strict=True):
        np.testing.assert_allclose(p.detach(), q, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_what_makes_no_sense_with_it_is_refused(size):
    with pytest.raises(
        InvalidArgument, match=r"overlap is 3 with every='auto'.*give every= as a number"
    ):
        Ranks(size, every="auto", overlap=3)
    with pytest.raises(InvalidArgument, match="alpha is 0 and with every='auto'"):
        Ranks(size, every="auto", alpha=0)
    with pytest.raises(InvalidArgument, match="expected 'auto', a number"):
        Ranks(size, every="often")


def hidden(seconds):
    """Real ranks whose channel is slow: lengths of rounds, hashes, and the share of the time spent
    waiting."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    local = commpress.LocalUpdates(torch.optim.AdamW(model.parameters(), lr=1e-3))
    local.channel.transport.inner = Slow(local.channel.transport.inner, 1, seconds)
    lengths, waited = [], []
    for _ in range(60):
        model(torch.randn(8, 64)).square().mean().backward()
        time.sleep(0.01)
        local.step()
        local.zero_grad()
        lengths.append(local.rounds.length)
        waited.append(local.counters.waited)
    local.drain()
    digest = local.digest()
    local.close()
    return lengths, waited[-1] - waited[30], digest


def test_real_ranks_agree_and_do_not_wait(pool):
    results = pool.run(hidden, 0.05, size=2)
    (lengths, waited, digest), (others, _, other) = results
    assert (lengths, digest) == (others, other)
    assert max(lengths) > 1
    assert waited < 0.3, waited  # of 30 steps, with exchanges of up to 0.1 s
