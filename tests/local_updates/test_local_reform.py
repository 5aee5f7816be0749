"""Local updates among other ranks: Θ stays equal, nothing that survivors have trained is lost,
newcomers begin at Θ."""

import copy

import pytest
import torch

from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.feedback import ResidualStore
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.onebit_adam import OneBitAdam
from commpress.optim.outer import Average, Gossip, Nesterov, SparseLoCo
from commpress.tiered_mem import TieredStore
from new_ranks import Dying, changes, until_stuck

SHAPES = [(24, 16), (5,), (300,)]
MOMENTUM = {"outer": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)}
KINDS = {
    "exact mean": {"codec": None, "outer": Average()},
    "int4": {"codec": "int4", "min_numel": 1, "outer": Nesterov(), "fragments": 2},
    "torch's outer step": {"codec": "powersgd-2", "min_numel": 1, **MOMENTUM},
    "sparse": {"codec": "topk-16+bits2", "outer": SparseLoCo()},
}


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def made(rank, transport, *, every=4, **options):
    parameters = [torch.nn.Parameter(p) for p in drawn(rank)]
    return LocalUpdates(
        torch.optim.SGD(parameters, lr=0.1), transport=transport, every=every, **options
    )


class Trainers:
    def __init__(self, size, **options):
        self.options = options
        self.local = [made(0, transport, **options) for transport in Loopback(size).transports()]
        self.stepped = 0

    def inner(self):
        self.stepped += 1
        for rank, local in enumerate(self.local):
            for p, g in zip(local.inner.parameters, drawn(1000 * self.stepped + rank), strict=True):
                p.grad = g
            for optimizer in local.inner:
                optimizer.step()

    def step(self):
        self.inner()
        return [local.steps(tokens=1 + rank) for rank, local in enumerate(self.local)]

    def train(self, steps):
        for _ in range(steps):
            simulate(self.step())

    def reform(self, stay, new=0):
        every = changes(stay, new, len(self.local))
        self.local = [self.local[rank] for rank in sorted(stay)]
        self.local += [made(7, Loopback(1).transport(0), **self.options) for _ in range(new)]
        for local, transport in zip(self.local, Loopback(len(every)).transports(), strict=True):
            local.channel.reform(transport)
        for commit in simulate(
            [local.reforming(change) for local, change in zip(self.local, every, strict=True)]
        ):
            commit()

    def weights(self, rank):
        return [p.detach().clone() for p in self.local[rank].inner.parameters]

    def agree(self):
        return len({local.digest() for local in self.local}) == 1

    def finish(self):
        self.train(9)
        simulate([local.draining() for local in self.local])
        assert self.agree()
        for rank in range(len(self.local)):
            assert all(
                torch.equal(p, q) for p, q in zip(self.weights(rank), self.weights(0), strict=True)
            )


def equal(one, two):
    return all(torch.equal(p, q) for p, q in zip(one, two, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reached", [(), (0,)], ids=str)
def test_an_exchange_counts_for_all_or_for_nobody(kind, reached):
    """Rank 2 of three dies in each of its messages. Who had not finished it has what was trained,
    or Θ as it has become."""
    after, more, ahead = 0, True, 0
    while more:
        group = Trainers(3, **KINDS[kind])
        group.train(7)
        group.inner()
        before, trained = (
            [group.weights(r) for r in (0, 1)],
            [[f.steps + 1 for f in local.fragments] for local in group.local],
        )
        victim = group.local[2]
        victim.channel.transport.stand_for(Dying(victim.channel.inner, after, reached))
        victim.control.transport.stand_for(victim.channel.transport.inner)
        until_stuck([local.steps(tokens=1) for local in group.local])
        more, after = victim.channel.inner.left < 0, after + 1
        finished = [local.finished for local in group.local[:2]]
        begun = group.local[0].exchanged
        ahead += finished[0] != finished[1]
        group.reform({0, 1})
        assert group.agree()
        assert [local.exchanged for local in group.local] == [max(finished)] * 2
        assert [local.steps_done for local in group.local] == [8, 8]
        if max(finished) < begun:
            assert all(equal(group.weights(r), before[r]) for r in (0, 1))
            assert [[f.steps for f in local.fragments] for local in group.local] == trained[:2]
        if finished[0] != finished[1]:
            fragments = [local.fragments[local.moved] for local in group.local]
            assert [f.number for f in fragments] == [fragments[0].number] * 2
            assert not any(f.steps for f in fragments)
        group.finish()
        assert group.local[0].counters.lost_ranks == 1
    assert bool(ahead) == bool(reached)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_new_begins_at_the_shared_weights(kind):
    group = Trainers(3, **KINDS[kind])
    group.train(6)
    mine = group.weights(0)
    group.reform({0, 2}, new=2)
    state = group.local[1].shared_state()
    for local in group.local[2:]:
        local.load_shared_state(state)
    assert group.agree()
    assert equal(group.weights(2), group.weights(3))
    assert equal(group.weights(0), mine)
    assert [local.steps_done for local in group.local] == [6] * 4
    group.finish()


@pytest.mark.parametrize("reached", [None, (0,)], ids=["all", "one of two"])
def test_a_mean_that_has_come_arrives_with_the_change(reached):
    """Training goes on during the exchange; then a rank is lost."""
    group, twin = (Trainers(3, codec="int4", min_numel=1, overlap=2, alpha=0.5) for _ in range(2))
    for each in (group, twin):
        each.train(5)  # the exchange that began after step 4 is due after step 6
    if reached is None:
        simulate([local.saving() for local in group.local])
    else:
        victim = group.local[2]
        victim.channel.transport.stand_for(Dying(victim.channel.inner, 2, reached))
        victim.control.transport.stand_for(victim.channel.transport.inner)
        until_stuck([local.saving() for local in group.local])
        assert [local.finished for local in group.local[:2]] == [1, 0]
    assert [local.exchanged for local in group.local] == [1] * 3
    group.reform({0, 1})
    twin.train(1)
    assert group.local[0].digest() == group.local[1].digest() == twin.local[0].digest()
    assert all(local.flight is None for local in group.local)
    group.finish()


def test_an_exchange_that_nobody_has_finished_is_made_again():
    """It decays no residual a second time, and loses nothing that was trained."""
    group = Trainers(3, codec="int4", min_numel=1, overlap=2)
    group.train(9)
    owed = [
        [sent.clone() for _, sent, _ in local.exchanges.residuals.places()] for local in group.local
    ]
    before = [group.weights(r) for r in range(3)]
    group.reform({0, 1, 2})
    assert [[f.steps for f in local.fragments] for local in group.local] == [[5]] * 3
    assert all(equal(group.weights(r), before[r]) for r in range(3))
    for mine, local in zip(owed, group.local, strict=True):
        assert all(
            torch.equal(a, b[1])
            for a, b in zip(mine, local.exchanges.residuals.places(), strict=True)
        )
    group.finish()


DECAY = {"codec": "int4", "min_numel": 1, "outer": Average(), "feedback_decay": 0.5}


def owed(local):
    return [sent.clone() for _, sent, _ in local.exchanges.residuals.places()]


@pytest.mark.parametrize("after", range(3))
def test_what_is_owed_decays_once_for_an_exchange_however_often_it_is_made(after, monkeypatch):
    """Rank 2 dies in the ranks' words about the exchange (0), or later in it: then the others have
    let it decay already."""
    decayed, decay = [], ResidualStore.decay

    def counted(self, names, factor):
        rank = next(
            rank for rank, local in enumerate(group.local) if local.exchanges.residuals is self
        )
        decayed.append((rank, group.local[rank].exchanged))
        decay(self, names, factor)

    monkeypatch.setattr(ResidualStore, "decay", counted)
    group = Trainers(3, **DECAY)
    group.train(7)
    group.inner()
    before, number, victim = (
        [owed(local) for local in group.local],
        group.local[0].exchanged,
        group.local[2],
    )
    assert any(p.any() for p in before[0])
    control, dies = victim.control.transport, Dying(victim.channel.inner, after, ())
    victim.channel.transport.stand_for(dies)
    control.stand_for(dies)
    del decayed[:]
    until_stuck([local.steps(tokens=1) for local in group.local])
    factor = 0.5 if after else 1.0
    for local, was in zip(group.local[:2], before, strict=False):
        for mine, theirs in zip(owed(local), was, strict=True):
            assert torch.equal(mine, factor * theirs)
    group.reform({0, 1})
    for local, was in zip(group.local, before, strict=False):
        assert local.exchanged == number
        for mine, theirs in zip(owed(local), was, strict=True):
            torch.testing.assert_close(mine, factor * 2 / 3 * theirs)
    group.train(9)
    for rank, local in enumerate(group.local):
        assert [begun for each, begun in decayed if each == rank] == list(
            range(number + 1, local.exchanged + 1)
        )


def test_who_goes_back_to_a_checkpoint_lets_decay_again():
    group = Trainers(1, **DECAY)
    group.train(5)
    ((local,), model) = group.local, group.weights(0)
    state = copy.deepcopy(local.state_dict())
    group.train(4)
    first = owed(local)
    with torch.no_grad():
        for p, was in zip(local.inner.parameters, model, strict=True):
            p.copy_(was)
    local.load_state_dict(state)
    group.stepped = 5
    group.train(4)
    assert equal(first, owed(local))


def test_residuals_in_a_store_are_handed_over_too(tmp_path):
    stores = [TieredStore.open(tmp_path / str(r), host="4 MB") for r in range(3)]
    group, twin = (Trainers(3, codec="int4", min_numel=1, fragments=2) for _ in range(2))
    ends = zip(Loopback(3).transports(), stores, strict=True)
    group.local = [
        made(0, t, codec="int4", min_numel=1, fragments=2, store=store) for t, store in ends
    ]
    for each in (group, twin):
        each.train(8)
        each.reform({0, 2})
        each.train(8)
    assert group.agree()
    assert group.local[0].digest() == twin.local[0].digest()
    for store in stores:
        store.close()


def test_partners_that_gossip_go_on():
    group = Trainers(4, codec=None, outer=Gossip())
    group.train(6)
    group.reform({0, 1, 3}, new=1)
    group.local[3].load_shared_state(group.local[0].shared_state())
    group.finish()


def test_ranks_that_train_together_are_refused():
    parameters = [torch.nn.Parameter(p) for p in drawn(0)]
    inner = OneBitAdam(parameters, exact_steps=2, transport=Loopback(1).transport(0))
    local = LocalUpdates(inner, every=2, transport=Loopback(1).transport(0))
    with pytest.raises(InvalidArgument, match="inner has ranks that train together"):
        local.reform(changes({0}, 0, 2)[0])
