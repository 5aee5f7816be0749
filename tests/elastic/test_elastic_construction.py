"""Divided models are built anew by the same random numbers, and what an older build has made over
the group goes no further."""

import gc

import pytest
import torch

from commpress.collectives.channel import Channel
from commpress.collectives.transports.loopback import Loopback
from commpress.integrations.elastic.repeat import Build
from commpress.integrations.process_group.reform import Registry


class Owner:
    def reform(self, change):
        raise AssertionError("an owner of ranks that there were follows the group")


class Maker:
    """A ``build`` whose objects somebody holds for ever, as an error under way and a hook on a
    parameter do."""

    def __init__(self, registry):
        self.registry, self.held = registry, []

    def __call__(self):
        channel, owner = Channel(Loopback(1).transport(0), name="commpress-gradients"), Owner()
        self.registry.enroll(channel)
        self.registry.on_reform(owner)
        self.held.append((channel, owner))
        return torch.rand, {"model": torch.rand(3)}


def started():
    """A process before its first build, and what it has over its group by then."""
    registry, mine = Registry(), Channel(Loopback(1).transport(0), name="commpress-elastic")
    registry.enroll(mine)
    return registry, mine


def test_members_with_objects_of_older_builds_meet_newcomers_alike(monkeypatch):
    """Their labels are compared when they agree: a newcomer with others is not let in."""
    stopped = []
    monkeypatch.setattr(Channel, "stop", lambda channel, reason: stopped.append(channel))
    registry, mine = started()
    maker = Maker(registry)
    build = Build(maker, registry)
    newcomer, other = started()
    labels = []
    for _ in range(3):
        _, state = build()
        labels.append(registry.labels())
        build.let_go(state)
        assert registry.labels() == newcomer.labels() == ("commpress-elastic",)
        assert registry.owners == []
    assert set(labels) == {("commpress-elastic", "commpress-gradients", "Owner")}
    assert registry.channels == [mine]
    assert newcomer.channels == [other]
    assert stopped == [channel for channel, _ in maker.held]


def test_who_has_built_nothing_lets_nothing_go(monkeypatch):
    """A newcomer is awaited by the others: collecting garbage takes it a second."""
    registry, _ = started()
    build = Build(Maker(registry), registry)
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("it looks for garbage"))
    build.let_go({})
    build()
    with pytest.raises(pytest.fail.Exception):
        build.let_go({})


def test_each_build_begins_with_the_same_random_numbers():
    registry, _ = started()
    build = Build(Maker(registry), registry)
    first = build()[1]["model"]
    drawn = torch.rand(3)
    assert torch.equal(build()[1]["model"], first)
    assert not torch.equal(torch.rand(3), drawn)
