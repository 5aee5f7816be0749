"""Laws of state, for every object that communicates: what is saved comes back, on as many ranks and
on others; what is owed stays owed; a death is one before the step or after it; what does not fit
changes nothing."""

from functools import cache

import pytest
import torch

from commpress.collectives.transports.loopback import Loopback
from commpress.errors import InvalidArgument, Mismatch, StateMismatch
from new_ranks import changes
from ranks import caught
from real_worlds import REAL
from state_worlds import KINDS, Averaged, Held, Local, Mean, Sharded, apart, copied, leaves
from variants import seldom

STEPS = 5  # after which two runs are compared


def trained(kind, at, size=None):
    world = kind.world(size or kind.size)
    world.run(range(at))
    return world


CASES = [(name, at) for name, kind in KINDS.items() for at in kind.ats]
REFORM = [(name, at) for name, at in CASES if KINDS[name].of.reforms]
JOIN = [case for case in REFORM if KINDS[case[0]].of.joins]
DIES = [
    (name, at)
    for name, kind in KINDS.items()
    for at in (kind.ats if kind.dies is None else kind.dies)
]
DIES = [case for case in DIES if KINDS[case[0]].of.reforms]
each = pytest.mark.parametrize(("name", "at"), CASES)
EVERY = KINDS | REAL


OWED = {"residuals", "between", "scattered"}


def lossless(states):
    """States without what compression left behind, and whether there was something."""
    found = (at(states, path) for path in leaves(states) if {*path} & OWED)
    owed = [each for each in found if isinstance(each, torch.Tensor)]
    owes = any(bool(each.any()) for each in owed)
    for each in owed:
        each.zero_()
    return owes


def at(state, path):
    for key in path:
        state = state[key]
    return state


@each
def test_resumes_in_every_bit(name, at):
    """The object that loads went astray before. Without what is owed the run is another: so the law
    can fail."""
    kind = EVERY[name]
    one, twins = trained(kind, at), {}
    saved = one.saved()
    for how in kind.of.exactly or kind.of.loads:
        twins[how] = two = kind.world(kind.size, at)
        two.run([at + 20])
        two.load(saved, how)
        assert not apart(one.numbers(), two.numbers(), absent=True), how
    twins["nothing owed"] = kind.world(kind.size, at)
    owes = lossless(saved[0])
    twins["nothing owed"].load(saved, "own")
    for world in (one, *twins.values()):
        world.run(range(at, at + STEPS))
    for how, two in twins.items():
        differs = bool(apart(one.numbers(), two.numbers(), absent=True))
        assert differs == (owes and how == "nothing owed"), how


def close(one, two, atol=2e-6):
    """Totals are the same; what one lacks is zero."""
    for name in one.keys() | two.keys():
        every = [each.get(name, torch.zeros(0).double()) for each in (one, two)]
        numel = max(map(len, every))
        padded = [torch.nn.functional.pad(each, (0, numel - len(each))) for each in every]
        torch.testing.assert_close(*padded, rtol=1e-6, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def inside(kind, at, saved):
    """Ranks differ as of now: a window or a round is open."""
    counts = (steps for state in saved[0] for steps, _ in state.get("counts", ()))
    shared = [state.get("weights") for state in saved[0]]
    apart_ = kind.of is Local and any(apart(each, shared[0]) for each in shared)
    return at in kind.window or any(counts) or apart_


def refuse(kind, at, size):
    """Part of it lies on one rank alone."""
    one, two = trained(kind, at), kind.world(size)
    with pytest.raises(InvalidArgument, match="elastic_state_dict fits any number of ranks"):
        one.ranks[0].owner.elastic_state_dict()
    before = two.numbers()
    with pytest.raises(StateMismatch, match=r"on as many ranks|into a window|expected 3"):
        two.load((one.saved()[0], []), "all")
    assert not apart(two.numbers(), before)


def carries(kind):
    """Ways to other ranks."""
    exact = [(how, False) for how in ("all", "parts") if {"all", how} <= {*kind.of.loads}]
    return [("all", True)] * kind.of.elastic + exact


@pytest.mark.parametrize(
    ("name", "at", "size"),
    [
        pytest.param(*case, size) if i % 3 == j else seldom(*case, size)
        for i, case in enumerate(CASES)
        for j, size in enumerate((1, 2, 5))
    ],
)
def test_another_number_of_ranks_goes_on_with_all_that_is_owed(name, at, size):
    kind = EVERY[name]
    if not kind.of.joins:
        return refuse(kind, at, size)
    assert carries(kind)
    one, ended = trained(kind, at), False
    for how, elastic in carries(kind):
        two = kind.world(size, at)
        two.run([at + 20])
        saved = one.saved(elastic=elastic)
        if not elastic and not ended and inside(kind, at, saved):
            with pytest.raises(StateMismatch, match=r"(synchronize|drain)\(\)"):
                two.load(saved, how)
            one.end()
            saved, ended = one.saved(), True
        two.load(saved, how)
        close(two.total(), one.total())
        found, wanted = two.alike(), one.alike()
        assert not apart(found, wanted), (how, elastic)
        two.run(range(at, at + 3))
        assert two.agree()


@pytest.mark.parametrize("name", ["mean, matrices", "toy, matrices"])
def test_a_state_from_before_anything_was_learnt_makes_it_begin_anew(name):
    one, two = KINDS[name].world(3), trained(KINDS[name], 3)
    two.load(one.saved(), "own")
    for world in (one, two):
        world.run(range(2))
    assert not apart(one.numbers(), two.numbers(), absent=True)


@pytest.mark.parametrize("name", ["toy", "toy, matrices", "codecs of layers", "Muon"])
def test_what_is_not_finite_on_one_rank_is_left_out_on_all(name):
    world = trained(KINDS[name], KINDS[name].ats[-1])
    before = world.numbers()
    for number, value in ((0, "nan"), (1, "inf")):
        world.begin(9)
        world.ranks[1].weights[number].grad.view(-1)[5] = float(value)
        assert world.at_once(rank.step(9, r) for r, rank in enumerate(world.ranks)) == [False] * 3
        after = world.numbers()
        for states in (before, after):
            for path in [path for path in leaves(states) if path[-1] == "step"]:
                del at(states, path[:-1])["step"]
        assert not apart(before, after)


# ---------------------------------------------------------------- other ranks in a running group


def survived(kind, at, *, stepped, after=None):
    """A world that loses rank 2 between two steps, before the one in doubt or after it; or which
    dies ``after`` so many messages."""
    world = trained(kind, at + stepped)
    if after is not None:
        world.die(at, 2, after, ())
    world.reform({0, 1})
    return world


def survivors(kind, at):
    """Worlds that have not taken the step, and that have."""
    begun = 0 if kind.of is Local else None  # inner steps count
    asleep = [survived(kind, at, stepped=False, after=2)] if kind.wakes else []
    return [survived(kind, at, stepped=False, after=begun)], [
        survived(kind, at, stepped=True),
        *asleep,
    ]


# of these a rank is ahead of another always, of the rest with the slow tests
AHEAD = [
    ("mean, lazy signs", 3),
    ("toy, matrices", 5),
    ("clipped", 2),
    ("matrices, 0/1", 8),
    ("loud 1-bit Adam", 9),
    ("loud LAMB", 9),
    ("grown 0/1 Adam", 8),
    ("held, 1-bit Adam", 6),
    ("local, overlap", 7),
    ("local, sparse", 7),
    ("local, warm-up", 7),
]


@pytest.mark.parametrize(
    ("name", "at", "reached"),
    [(*case, ()) for case in DIES]
    + [(*case, (0,)) if case in AHEAD else seldom(*case, (0,)) for case in DIES],
)
def test_a_death_in_a_step_is_one_before_it_or_after_it(name, at, reached):
    """Rank 2 of three dies in each of its messages; ``reached``: who has the last of them."""
    kind, after, more, ahead, seen = EVERY[name], 0, True, 0, set()
    twins = survivors(kind, at)
    while more:
        world = trained(kind, at)
        results, more = world.die(at, 2, after, reached)
        after += 1
        failed = [r for r in (0, 1) if results[r] is None]
        kept = world.kept()
        assert not any(apart(kept[r], world.before[r], absent=True) for r in failed)
        ahead += len(failed) == 1
        world.reform({0, 1})
        if len(failed) == 1 and kind.of.heals:
            world.heal(1 - failed[0], failed)
        frozen = world.alike().get("frozen")
        twin = next(t for t in twins[len(failed) < 2] if t.alike().get("frozen") == frozen)
        seen.add(id(twin))
        assert world.counts() == twin.counts()
        assert world.lost() == [1, 1]
        close(world.total(), twin.total())
        assert not apart(world.alike(), twin.alike(), absent=True)
        world.run(range(at + 1, at + 3))
        assert world.agree()
    assert bool(ahead) == bool(reached), "a rank was ahead of another"
    assert len(seen) == sum(map(len, twins))


def joined(world):
    world.reform(world.stay, new=2)
    world.heal(0, (2, 3))


@pytest.mark.parametrize(("name", "at"), REFORM)
def test_who_is_new_trains_with_the_others(name, at):
    world = trained(EVERY[name], at)
    if not EVERY[name].of.joins:
        assert isinstance(caught(joined, world), Mismatch | StateMismatch)
        return
    joined(world)
    world.run(range(at, at + 4))
    assert world.agree()
    assert world.counts() == [at + 4] * 4
    assert world.lost() == [1, 1, 0, 0]


@pytest.mark.parametrize(("name", "at"), JOIN)
def test_who_says_so_before_it_leaves_takes_nothing_along(name, at):
    """All that is left is what a checkpoint carries to as many ranks."""
    kind = EVERY[name]
    one, wanted = trained(kind, at, 4), kind.world(3, at)
    one.end()
    wanted.load(one.saved(elastic=True), "all")
    one.leave([1])
    assert not any(
        part.any() for name, part in one.parts()[1].items() if name not in one.ranks[1].means()
    )
    one.reform({0, 2, 3})
    close(one.total(), wanted.total(), 1e-5)
    assert one.lost() == [0] * 3
    one.run(range(at, at + 3))
    assert one.agree()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.of.reforms])
def test_what_is_divided_cannot_follow(name):
    rank = EVERY[name].world(2).ranks[0]
    with pytest.raises(InvalidArgument, match=r"cannot go on: .* commpress\.elastic\(build"):
        rank.owner.reform(changes({0}, 0, 2)[0])


# ---------------------------------------------------------------- what does not fit


def damages(state):
    """States of which something is missing, or a tensor of another shape, with its path."""
    for path in leaves(state):
        if set(path) & FREE or path[-2:-1] == ("residuals",) or path in TWICE:
            continue
        value = at(state, path)
        if isinstance(path[-1], str):
            bad = copied(state)
            del at(bad, path[:-1])[path[-1]]
            yield path, "missing", bad
        if isinstance(value, torch.Tensor):
            bad = copied(state)
            at(bad, path[:-1])[path[-1]] = torch.ones(2001)
            yield path, "longer", bad


# torch's own, and what older versions did not save
NAMED = r"0000[012]|groups of|of other parameters|in a window"
FREE = {"param_groups", "inner", "momentum_buffer", "pace", "paces", "bases", "nodes", "lacking"}
FREE |= {"finite", "alpha", "kept", "long", "object", "rules", "compressed", "spread"}
TWICE = {
    ("commpress",),
    ("rank",),
    ("size",),
}  # without: a state of torch's Adam; ranks of residuals


@pytest.mark.parametrize(("name", "at"), [(name, kind.ats[-1]) for name, kind in KINDS.items()])
def test_what_does_not_fit_is_named_and_changes_nothing(name, at):
    world = trained(EVERY[name], at, 2)
    states, _ = world.saved()
    world.run(range(at, at + 2))
    before, wrong = world.numbers(), []
    if unused(EVERY[name]):
        states[0].pop("state", None)
    for path, fault, bad in damages(states[0]):
        error = world.refused(bad)
        if not isinstance(error, StateMismatch):
            wrong.append(f"{path} {fault}: {error!r:.90}")
        elif found := apart(world.numbers(), before, absent=True):
            wrong.append(f"{path} {fault} changed {found}")
        if wrong:
            before = world.numbers()
    assert not wrong, "\n".join(wrong)


@cache
def others():
    """Classes, and for each the states of two ranks after a step."""
    kinds = {type(kind.world(1).ranks[0].owner): kind for kind in KINDS.values()}
    return {cls: trained(kind, 1, 2).saved()[0] for cls, kind in kinds.items()}


@pytest.mark.parametrize("name", KINDS)
def test_the_state_of_another_object_or_model_is_refused(name):
    kind = EVERY[name]
    world = trained(kind, kind.ats[0], 2)
    before = world.numbers()
    for cls, states in others().items():
        if cls is not type(world.ranks[0].owner):
            with pytest.raises(StateMismatch):
                world.load((states, []), "own")
    for shapes in (((41, 13), (300,), (7,)), ((40, 13), (300,))) if kind.of is not Mean else ():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind.of, "shapes", shapes)
            states, _ = trained(kind, kind.ats[0], 2).saved()
        with pytest.raises(
            StateMismatch, match=r"0000[012]|groups of|of other parameters|in a window"
        ):
            world.load((states, []), "own")
    assert not apart(world.numbers(), before, absent=True)


def test_the_state_of_another_class_that_holds_the_same_is_refused():
    class Other(Averaged):
        pass

    other = Other()
    other.connect(codec="int4", min_numel=1, transport=Loopback(1).transport(0))
    with pytest.raises(StateMismatch, match="the state is of Averaged, this is Other"):
        other.load_state_dict(KINDS["mean, int4"].world(1).ranks[0].owner.state_dict())


def unused(kind):
    """torch's part of a state is not read where all is in ours."""
    return issubclass(kind.of, (Sharded, Held))
