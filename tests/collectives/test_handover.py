"""Residuals when ranks come and go: what living ranks owe is conserved, whatever dies on the
way."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import SignCodec
from commpress.feedback import add_reduced
from new_ranks import until_stuck
from state_worlds import Averaged, mean

# of the first residuals are lazy
CODECS = [SignCodec(block=0), "sign", "int4", "topk-16", "powersgd-2"]


def owed(found):
    """Residuals of all tensors side by side."""
    whole = [torch.nn.functional.pad(found.get(n, torch.zeros(0)), (0, NUMELS[n])) for n in NUMELS]
    return torch.cat([each[: NUMELS[n]].double() for n, each in zip(NUMELS, whole, strict=True)])


NUMELS = Averaged().numels()


def close(one, two, scale=1.0):
    torch.testing.assert_close(one, two, rtol=0, atol=2e-5 * scale)


def wander(world, rounds, draw, scale=1.0):
    """Σ outputs + R = Σ mean inputs + R₀ − what dead ranks owed, each once. ``draw(size)``: whether
    all step, who stays, who of the others says so before, and how many are new."""
    balance = torch.zeros(827, dtype=torch.float64)  # inputs − outputs − what was lost
    for _ in range(rounds):
        steps, stay, says, new = draw(world.size)
        if world.size > 1 and steps:
            given, taken = zip(*world.step(world.number), strict=True)
            assert all(torch.equal(taken[0], each) for each in taken)
            balance += torch.stack(given).double().mean(0) - taken[0].double()
        gone = sorted(set(range(world.size)) - set(stay))
        leave = [rank for rank in gone if says(rank)]
        if leave:
            world.leave(leave)
            close(owed(world.total()), balance, scale)
            assert not any(owed(world.parts()[rank]).any() for rank in leave)
        for rank in gone:
            balance -= owed(world.parts()[rank])
        world.reform(stay, new)
        close(owed(world.total()), balance, scale)
        cuts = [(rank.owner.handover.rank, rank.owner.handover.size) for rank in world.ranks]
        assert cuts == [(rank, world.size) for rank in range(world.size)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_means_are_conserved_when_ranks_come_and_go(data):
    world = mean(data.draw(st.sampled_from(CODECS))).world(data.draw(st.integers(1, 6)))

    def draw(size):
        stay = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
        return True, stay, lambda rank: data.draw(st.booleans()), data.draw(st.integers(0, 3))

    wander(world, 4, draw)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_thousand_changes_at_up_to_32_ranks(seed):
    random = Random(seed)

    def draw(size):
        stay = random.sample(range(size), random.randint(max(1, size - 4), size))
        says, new = random.random() < 0.3, random.randint(0, min(4, 32 - len(stay)))
        return random.random() < 0.3, stay, lambda rank: says, new

    wander(mean(CODECS[seed % len(CODECS)]).world(random.randint(1, 32)), 25, draw, 4)


def share(rank):
    """One rank's share of the residuals, by the cut that it has."""
    found, cut = {}, rank.owner.handover
    for place, kept in rank.residuals(rank.owner.state_dict()).items():
        part = kept["sent"].double().clone()
        add_reduced(part, kept["reduced"].double(), cut.rank, cut.size)
        found[place.partition("@")[0]] = part / cut.size
    return owed(found)


def committed(steps):
    (yield from steps)()


@pytest.mark.parametrize("reached", [(), (0,)], ids=str)
def test_a_hand_over_that_somebody_dies_in_is_finished_by_the_next(reached):
    """Rank 2 dies in each message of the hand-over: the next one loses nothing twice, whoever had
    finished it."""
    after, more, finished = 0, True, set()
    while more:
        world = mean("int4").world(6)
        world.run(range(2))
        expected = owed(world.total()) - share(world.ranks[3]) - share(world.ranks[5])
        steps, victim = world.reforming({0, 1, 2, 4}, 1), world.ranks[2]
        dying = world.mortal(victim, after, reached)
        until_stuck([committed(each) for each in steps])
        more, after = dying.left < 0, after + 1
        done = [
            rank.owner.handover.size == 5 and rank.owner.handover.settled == 3
            for rank in world.ranks
        ]
        finished.add(sum(done[:2] + done[3:]))
        # the victim may be the only one that knows of it
        if any(done[:2] + done[3:]) and victim.owner.handover.settled < 3:
            victim.owner.handover._proposed[1]()
        expected -= share(victim)
        world.reform({0, 1, 3, 4}, 1)
        close(owed(world.total()), expected)
        world.step(2)
    assert after > 3
    assert {0, 4} <= finished
