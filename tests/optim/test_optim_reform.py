"""0/1 Adam among other ranks while a window is open; the laws of ``tests/state`` say the rest."""

import torch

from commpress.collectives.transports.loopback import simulate
from state_worlds import SHAPES, optimizer


def begun(steps, **options):
    world = optimizer("ZeroOneAdam", variance_updates=1, **options).world(3)
    world.run(range(steps))
    assert world.ranks[0].owner.held
    return world


def test_an_open_window_ends_with_the_exact_mean():
    """As ``synchronize`` without compression would end it."""
    one, two = (begun(5, sync=4, codec="none", spiky_codec=None) for _ in range(2))
    assert not torch.equal(one.ranks[0].weights[0], one.ranks[1].weights[0])
    one.reform({0, 1, 2})
    two.end()
    for world in (one, two):
        assert world.agree()
    for p, q in zip(one.ranks[0].weights, two.ranks[0].weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_who_took_fewer_steps_of_a_window_is_behind():
    """Rank 2 asks for a change while the others go on to their next exchange."""
    world = begun(3, sync=5)
    world.begin(3)
    with torch.no_grad():
        simulate([rank.owner.steps() for rank in world.ranks[:2]])
    first, expected = world.ranks[0].owner, []
    for i in range(len(SHAPES)):
        every = (first._flat.view(rank.owner.accumulated, i) for rank in world.ranks[:2])
        moved = sum(every) / 2 / first.tensors.divisor(i)
        expected.append(first.windows.decays[0] * first._flat.view(first.anchor, i) - moved)
    world.reform({0, 1, 2})
    world.heal(0, (2,))
    assert [rank.count() for rank in world.ranks] == [4] * 3
    assert world.agree()
    for p, x in zip(world.ranks[2].weights, expected, strict=True):
        torch.testing.assert_close(p.detach(), x, rtol=1e-6, atol=1e-6)
    world.run(range(4, 8))
