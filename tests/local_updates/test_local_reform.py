"""Local updates among other ranks, beyond the laws of ``tests/state``: what is under way arrives,
and what is owed decays once."""

import copy

import pytest
import torch

from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.feedback import ResidualStore
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.onebit_adam import OneBitAdam
from commpress.optim.outer import Average
from commpress.tiered_mem import TieredStore
from local_twin import HiddenOf
from new_ranks import changes, until_stuck
from state_worlds import apart, drawn, local

OVERLAP = {"codec": "int4", "overlap": 2}
DECAY = {"codec": "int4", "outer": Average(), "feedback_decay": 0.5}


def trained(size, steps, **options):
    world = local(**options).world(size)
    world.run(range(steps))
    return world


def owners(world):
    return [rank.owner for rank in world.ranks]


def weights(world):
    return [[p.detach().clone() for p in rank.weights] for rank in world.ranks]


def owed(owner):
    return [sent.clone() for _, sent, _ in owner.exchanges.residuals.places()]


def agree(world):
    return len({owner.digest() for owner in owners(world)}) == 1


@pytest.mark.parametrize("alpha", [0.5, "keep"])
@pytest.mark.parametrize("reached", [None, (0,)], ids=["all", "one of two"])
def test_a_mean_that_has_come_arrives_with_the_change(reached, alpha):
    """Training goes on during the exchange; then a rank is lost."""
    # the exchange that began after step 4 is due after step 6
    one, twin = (trained(3, 5, alpha=alpha, **OVERLAP) for _ in range(2))
    if reached is None:
        simulate([owner.saving() for owner in owners(one)])
    else:
        one.mortal(one.ranks[2], 2, reached)
        until_stuck([owner.saving() for owner in owners(one)])
        assert [owner.finished for owner in owners(one)[:2]] == [1, 0]
    assert [owner.exchanged for owner in owners(one)] == [1] * 3
    one.reform({0, 1})
    twin.step(5)
    assert agree(one)
    assert owners(one)[0].digest() == owners(twin)[0].digest()
    assert all(owner.flight is None for owner in owners(one))
    one.run(range(5, 14))
    assert one.agree()


def test_what_is_kept_early_follows_the_steps_of_the_run():
    """Also after a change of ranks, and alike on those that came."""
    world = trained(3, 5, every=HiddenOf(steps=1, early=12), outer=None, dies=())
    assert {owner.flight.kept for owner in owners(world)} == {0.5 + 5 / 24}
    world.reform({0, 1})
    world.run(range(5, 9))
    assert {owner.flight.kept for owner in owners(world)} == {0.5 + 9 / 24}
    assert world.agree()


def test_an_exchange_that_nobody_has_finished_is_made_again():
    """It decays no residual a second time, and loses nothing that was trained."""
    world = trained(3, 9, **OVERLAP)
    before, were = [owed(owner) for owner in owners(world)], weights(world)
    world.reform({0, 1, 2})
    assert [[f.steps for f in owner.fragments] for owner in owners(world)] == [[5]] * 3
    assert not apart(weights(world), were)
    assert not apart([owed(owner) for owner in owners(world)], before)
    world.run(range(9, 18))
    assert world.agree()


@pytest.mark.parametrize("after", range(3))
def test_what_is_owed_decays_once_for_an_exchange_however_often_it_is_made(after, monkeypatch):
    """Rank 2 dies in the ranks' words about the exchange (0), or later in it: then the others have
    let it decay already."""
    decayed, decay = [], ResidualStore.decay

    def counted(self, names, factor):
        every = enumerate(owners(world))
        rank = next(rank for rank, owner in every if owner.exchanges.residuals is self)
        decayed.append((rank, owners(world)[rank].exchanged))
        decay(self, names, factor)

    world = trained(3, 7, **DECAY)
    monkeypatch.setattr(ResidualStore, "decay", counted)
    before, number = [owed(owner) for owner in owners(world)], owners(world)[0].exchanged
    assert any(p.any() for p in before[0])
    world.die(7, 2, after, ())
    factor = 0.5 if after else 1.0
    for owner, was in zip(owners(world)[:2], before, strict=False):
        for mine, theirs in zip(owed(owner), was, strict=True):
            assert torch.equal(mine, factor * theirs)
    world.reform({0, 1})
    for owner, was in zip(owners(world), before, strict=False):
        assert owner.exchanged == number
        for mine, theirs in zip(owed(owner), was, strict=True):
            torch.testing.assert_close(mine, factor * 2 / 3 * theirs)
    world.run(range(8, 17))
    for rank, owner in enumerate(owners(world)):
        assert [begun for each, begun in decayed if each == rank] == list(
            range(number + 1, owner.exchanged + 1)
        )


def test_who_goes_back_to_a_checkpoint_lets_decay_again():
    world = trained(1, 5, **DECAY)
    saved = copy.deepcopy(world.saved())
    world.run(range(5, 9))
    first = owed(owners(world)[0])
    world.load(saved, "own")
    world.run(range(5, 9))
    assert not apart(first, owed(owners(world)[0]))


def test_residuals_in_a_store_are_handed_over_too(tmp_path):
    stores = [TieredStore.open(tmp_path / str(r), host="4 MB") for r in range(3)]
    options, kept = {"codec": "int4", "fragments": 2}, iter(stores)
    twin = local(**options).world(3)
    world = local(**options, store=lambda: next(kept)).world(3)
    for each in (world, twin):
        each.run(range(8))
        each.reform({0, 2})
        each.run(range(8, 16))
    assert agree(world)
    assert owners(world)[0].digest() == owners(twin)[0].digest()
    for store in stores:
        store.close()


def test_ranks_that_train_together_are_refused():
    parameters = [torch.nn.Parameter(p) for p in drawn(0)]
    inner = OneBitAdam(parameters, exact_steps=2, transport=Loopback(1).transport(0))
    local = LocalUpdates(inner, every=2, process_group=Loopback(1).transport(0))
    with pytest.raises(InvalidArgument, match="inner has ranks that train together"):
        local.reform(changes({0}, 0, 2)[0])


@pytest.mark.parametrize("new", [0, 1])
def test_steps_are_as_long_on_all_ranks_that_go_on(new):
    """The mean spread is that of the ranks that were, at most that of the ranks that are."""
    world = trained(4, 9, every=HiddenOf(steps=2), outer=None, dies=())
    for owner in owners(world):
        owner.facts.spread = 2.5
    world.reform({0, 1}, new)
    for owner in owners(world)[2:]:
        owner.load_shared_state(owners(world)[0].shared_state())
    assert [owner.facts.spread for owner in owners(world)] == [1.0 + new] * (2 + new)
    world.run(range(9, 14))
    assert len({owner.counters.gain for owner in owners(world)}) == 1
    assert world.agree()
