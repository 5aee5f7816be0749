"""The optimizers among other ranks: a step that fails changes nothing, replicas stay equal, what is
owed stays owed."""

import numpy as np
import pytest
import torch

from commpress import OneBitAdam, OneBitLamb, ZeroOneAdam
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument, Mismatch
from commpress.optim import ShardedOneBitAdam
from new_ranks import Dying, changes, until_stuck
from optim_twin import Replicas, equal, fill, noise, start
from variants import few

SHAPES = ((40, 13), (300,), (7,))
KINDS = {
    "OneBitAdam": lambda p, t: OneBitAdam(p, exact_steps=3, transport=t),
    "int8 and clipping": lambda p, t: OneBitAdam(
        p, exact_steps=3, exact_codec="int8", max_grad_norm=1.0, transport=t
    ),
    "matrices": lambda p, t: OneBitAdam(p, exact_steps=3, codec="powersgd-2", transport=t),
    "OneBitLamb": lambda p, t: OneBitLamb(p, exact_steps=3, transport=t),
    "ZeroOneAdam": lambda p, t: ZeroOneAdam(p, sync=3, variance_updates=2, transport=t),
}


def held(o):
    """Copies of all that a step may change."""
    names = ("momentum", "variance", "accumulated", "anchor", "course")
    buffers = {name: getattr(o, name).clone() for name in names if hasattr(o, name)}
    residuals = {
        (name, key, i): part.clone()
        for name in ("full", "quantized")
        for key, every in getattr(o, name).residuals.every().items()
        for i, part in enumerate(every)
    }
    weights = {i: p.detach().clone() for i, p in enumerate(o._flat.parameters)}
    bases = {("basis", name): basis.clone() for name, basis in o.quantized.bases.items()}
    counts = {
        "steps": torch.tensor([o.steps_done, getattr(o, "held", 0)]),
        "frozen": o.tensors.frozen_at.clone(),
    }
    return buffers | residuals | weights | bases | counts


def same(one, two):
    """Of residuals that one of both does not know the other has none. A basis may have been
    drawn."""
    return all(
        torch.equal(one[key], two[key])
        if key in one and key in two
        else "basis" in key or not (one | two)[key].any()
        for key in one.keys() | two.keys()
    )


def give(group, gradients):
    for parameters, mine in zip(group.parameters, gradients, strict=True):
        for p, g in zip(parameters, mine, strict=True):
            p.grad = g


def reform(group, stay, make=None, new=0):
    """Go on with these, and so many newcomers."""
    every, before = changes(stay, new, group.size), sorted(stay)
    others = Replicas(lambda p, t: make(p, None), new, group.shapes) if new else None
    group.parameters = [group.parameters[r] for r in before] + (others.parameters if others else [])
    group.optimizers = [group.optimizers[r] for r in before] + (others.optimizers if others else [])
    group.size = len(every)
    for o, transport in zip(group.optimizers, Loopback(group.size).transports(), strict=True):
        o.channel.reform(transport)
    for commit in simulate([o.reforming(c) for o, c in zip(group.optimizers, every, strict=True)]):
        commit()


def heal(group, source, ranks):
    for rank in ranks:
        with torch.no_grad():
            for mine, theirs in zip(group.parameters[rank], group.parameters[source], strict=True):
                mine.copy_(theirs)
        group.optimizers[rank].load_shared_state(group.optimizers[source].shared_state())


def finished(kind, at):
    """Three that took the step in which nobody died."""
    twin = Replicas(KINDS[kind], 3, SHAPES)
    for step in range(at + 1):
        twin.step(noise(3, step, SHAPES))
    return twin


def check_owed(mine, twin):
    """Residuals sent in the step that others finished count as if it had been finished here; of two
    ranks now, not three."""
    for name in ("full", "quantized"):
        theirs = getattr(twin, name).residuals.every()
        for key, (sent, *_) in getattr(mine, name).residuals.every().items():
            torch.testing.assert_close(
                sent, theirs[key][0] * 2 / 3 if key in theirs else torch.zeros_like(sent)
            )


def rank_2_dies(group, after, reached):
    """One step in which rank 2 of three ends after so many messages: who of the others failed, and
    whether it came to that."""
    victim = group.optimizers[2].channel
    victim.transport.stand_for(Dying(victim.inner, after, reached))
    with torch.no_grad():
        results = until_stuck([o.steps() for o in group.optimizers])
    return [r for r in (0, 1) if results[r] is None], victim.inner.left < 0


@pytest.mark.parametrize(("kind", "reached"), few(KINDS, [(), (0,)]), ids=str)
def test_a_step_that_failed_has_changed_nothing(kind, reached):
    """Rank 2 of three dies in each message of each kind of step. Then two go on, equal in every
    bit."""
    ahead = 0
    for at in (2, 3, 4, 8):
        after, more = 0, True
        while more:
            group = Replicas(KINDS[kind], 3, SHAPES)
            for step in range(at):
                group.step(noise(3, step, SHAPES))
            before = [held(o) for o in group.optimizers]
            give(group, noise(3, at, SHAPES))
            failed, more = rank_2_dies(group, after, reached)
            after += 1
            assert all(same(held(group.optimizers[r]), before[r]) for r in failed)
            ahead += len(failed) == 1
            reform(group, {0, 1})
            if len(failed) == 1:
                heal(group, 1 - failed[0], failed)
                check_owed(group.optimizers[failed[0]], finished(kind, at).optimizers[failed[0]])
            assert (
                group.optimizers[0].steps_done
                == group.optimizers[1].steps_done
                == at + (len(failed) < 2)
            )
            assert group.agree()
            for step in range(at, at + 4):
                assert group.step(noise(2, step, SHAPES)) == [True, True]
            simulate([o.synchronizing() for o in group.optimizers] if kind == "ZeroOneAdam" else [])
            assert group.agree()
    assert bool(ahead) == bool(reached)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_new_trains_with_the_others(kind):
    group = Replicas(KINDS[kind], 3, SHAPES)
    for step in range(6):
        group.step(noise(3, step, SHAPES))
    reform(group, {0, 2}, lambda p, t: KINDS[kind](p, Loopback(1).transport(0)), new=2)
    with pytest.raises(Mismatch, match="parameters of ranks"):
        group.step(noise(4, 6, SHAPES))
    for o, transport in zip(group.optimizers, Loopback(4).transports(), strict=True):
        o.channel.reform(transport)
    heal(group, 0, (2, 3))
    for step in range(6, 12):
        assert group.step(noise(4, step, SHAPES)) == [True] * 4
    simulate([o.synchronizing() for o in group.optimizers] if kind == "ZeroOneAdam" else [])
    assert group.agree()
    assert all(o.steps_done == 12 for o in group.optimizers)


@pytest.mark.parametrize(
    ("kind", "at"),
    [("OneBitAdam", 2), ("OneBitAdam", 6), ("int8 and clipping", 2), ("matrices", 6)],
)
def test_who_shrinks_goes_on_like_an_elastic_checkpoint(kind, at):
    """Steps that compress nothing are equal in every bit; what is owed is the same."""
    group, twin = Replicas(KINDS[kind], 4, SHAPES), Replicas(KINDS[kind], 3, SHAPES)
    for step in range(at):
        group.step(noise(4, step, SHAPES))
    for parameters in twin.parameters:
        fill(parameters, group.parameters[0])
    elastic = group.elastic()
    for o in twin.optimizers:
        o.load_state_dict(*elastic)
    stores = [
        {"full": o.full.residuals, "quantized": o.quantized.residuals} for o in group.optimizers
    ]
    simulate(
        [o.handover.leaving([1], store) for o, store in zip(group.optimizers, stores, strict=True)]
    )
    reform(group, {0, 2, 3})
    assert [o.counters.lost_ranks for o in group.optimizers] == [0] * 3
    np.testing.assert_allclose(group.owed(), twin.owed(), atol=1e-5)
    for one in (group, twin):
        one.step(noise(3, at, SHAPES))
    assert group.agree()
    if kind == "OneBitAdam" and at == 2:
        assert equal(group.parameters[0], twin.parameters[0])


def test_an_open_window_ends_with_the_exact_mean():
    """As ``synchronize`` without compression would end it."""

    def make(p, t):
        return ZeroOneAdam(
            p, sync=4, variance_updates=1, codec="none", spiky_codec=None, transport=t
        )

    groups = [Replicas(make, 3, SHAPES) for _ in range(2)]
    for group in groups:
        for step in range(5):
            group.step(noise(3, step, SHAPES))
    assert groups[0].optimizers[0].held
    assert not groups[0].agree()
    reform(groups[0], {0, 1, 2})
    simulate([o.synchronizing() for o in groups[1].optimizers])
    for group in groups:
        assert group.agree()
    for p, q in zip(groups[0].parameters[0], groups[1].parameters[0], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_who_took_fewer_steps_of_a_window_is_behind():
    """Rank 2 asks for a change while the others go on to their next exchange."""
    group = Replicas(
        lambda p, t: ZeroOneAdam(p, sync=5, variance_updates=1, transport=t), 3, SHAPES
    )
    for step in range(3):
        group.step(noise(3, step, SHAPES))
    assert group.optimizers[0].held
    give(group, noise(3, 3, SHAPES))
    with torch.no_grad():
        simulate([o.steps() for o in group.optimizers[:2]])
    first, expected = group.optimizers[0], []
    for i in range(len(SHAPES)):
        moved = (
            sum(o._flat.view(o.accumulated, i) for o in group.optimizers[:2])
            / 2
            / first.tensors.divisor(i)
        )
        expected.append(first.windows.decays[0] * first._flat.view(first.anchor, i) - moved)
    reform(group, {0, 1, 2})
    heal(group, 0, (2,))
    assert group.agree()
    for p, x in zip(group.parameters[2], expected, strict=True):
        torch.testing.assert_close(p.detach(), x, rtol=1e-6, atol=1e-6)
    assert [o.steps_done for o in group.optimizers] == [4] * 3
    for step in range(4, 8):
        group.step(noise(3, step, SHAPES))


def louder(step):
    """Gradients of the second tensor are far beyond what the variance knows."""
    gradients = noise(3, step, SHAPES)
    for mine in gradients:
        mine[1] *= 1e4
    return gradients


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
@pytest.mark.parametrize("reached", [(), (0,)], ids=str)
def test_tensors_wake_up_on_all_or_on_none(kind, reached):
    """A rank dies in each message of a step after which tensors wake up: ranks that have taken the
    step are equal."""
    makes = {
        **KINDS,
        "ZeroOneAdam": lambda p, t: ZeroOneAdam(p, sync="every", variance_updates=2, transport=t),
    }
    group, at = Replicas(makes[kind], 3, SHAPES), 0
    while not group.optimizers[0].counters.woken_tensors:
        group.step(noise(3, at, SHAPES) if at < 8 else louder(at))
        at += 1
    after, more, woken = 0, True, set()
    while more:
        group = Replicas(makes[kind], 3, SHAPES)
        for step in range(at - 1):
            group.step(noise(3, step, SHAPES) if step < 8 else louder(step))
        give(group, louder(at - 1))
        failed, more = rank_2_dies(group, after, reached)
        after += 1
        woken.add(tuple(o.counters.woken_tensors for o in group.optimizers[:2]))
        reform(group, {0, 1})
        if len(failed) == 1:
            heal(group, 1 - failed[0], failed)
        assert group.agree()
        states = [o.tensors for o in group.optimizers]
        assert torch.equal(states[0].frozen, states[1].frozen)
        for step in range(at, at + 3):
            group.step(noise(2, step, SHAPES))
        assert group.agree()
    assert {(0, 0), (1, 1)} <= woken, woken
    assert ((1, 0) in woken) == bool(reached), woken


def test_divided_state_is_refused():
    parameters = [torch.nn.Parameter(p) for p in start(SHAPES)]
    optimizer = ShardedOneBitAdam(parameters, exact_steps=3, transport=Loopback(1).transport(0))
    with pytest.raises(
        InvalidArgument, match=r"ShardedOneBitAdam cannot go on: .* commpress\.elastic\(build"
    ):
        optimizer.reform(changes({0}, 0, 2)[0])
