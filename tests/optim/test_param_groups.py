"""Groups that come late: what others have stays theirs, and the new ones begin as those of AdamW
do."""

import copy

import pytest
import torch

from commpress.collectives.transports.loopback import simulate
from commpress.errors import InvalidArgument, Mismatch
from commpress.optim import (
    OneBitAdam,
    OneBitLamb,
    ShardedOneBitAdam,
    ShardedZeroOneAdam,
    ZeroOneAdam,
)
from commpress.schedules import Every
from optim_twin import Replicas, adam_step, equal, fill, mean, noise, start, state_of

SHAPES = ((20, 30), (200,), (30, 10), (100,), (5,))  # the last three come late
COMMON = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "min_numel": 0}
FREEZES = {"onebit": OneBitAdam, "lamb": OneBitLamb, "sharded-onebit": ShardedOneBitAdam}
WINDOWED = {"zero-one": ZeroOneAdam, "sharded-zero-one": ShardedZeroOneAdam}
KINDS = FREEZES | WINDOWED
BETAS = (0.9, 0.9)  # such that what is live may freeze soon
OTHERS = {"lr": 5e-3, "weight_decay": 0.0}


def options_of(kind):
    return COMMON | (
        {"exact_steps": 4} if kind in FREEZES else {"variance_updates": 2, "sync": Every(3)}
    )


def replicas(kind, size, *, late=True, **options):
    """Ranks whose last parameters are still to come, or are there from the beginning."""

    def make(p, t):
        groups = [{"params": p[:2]}] + ([] if late else [{"params": p[2:], **OTHERS}])
        return KINDS[kind](groups, transport=t, **(options_of(kind) | options))

    return Replicas(make, size, SHAPES)


def join(group, **options):
    for o, p in zip(group.optimizers, group.parameters, strict=True):
        o.add_param_group({"params": p[2:], **(OTHERS | options)})


def run(group, steps):
    for step in steps:
        assert group.step(noise(group.size, step, SHAPES)) == [True] * group.size


def same(group, other, of=slice(None)):
    return equal(*([p[of] for p in each.parameters] for each in (group, other)))


def synchronize(group):
    with torch.no_grad():
        simulate([o.synchronizing() for o in group.optimizers])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_to_come_before_the_first_step_is_to_have_been_there(kind, size):
    group, whole = replicas(kind, size), replicas(kind, size, late=False)
    join(group)
    run(group, range(12))
    run(whole, range(12))
    assert equal(state_of(group), state_of(whole))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["onebit", "zero-one", "sharded-onebit", "sharded-zero-one"])
def test_in_exact_steps_it_is_adamw_that_grows(kind, size):
    """In every bit where the mean is exact: each rank's fused kernel sees what one alone would."""
    group = replicas(kind, size, exact_steps=100)
    twin = [torch.nn.Parameter(p) for p in start(SHAPES)]
    adam = torch.optim.AdamW(twin[:2], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    for step in range(12):
        if step == 5:
            join(group)
            adam.add_param_group({"params": twin[2:], **OTHERS})
        gradients = noise(size, step, SHAPES)
        group.step(gradients)
        adam_step(adam, twin, gradients)
    assert equal(group.parameters[0], twin)
    counts = [int(state["step"]) for state in adam.state_dict()["state"].values()]
    assert counts == [12, 12, 7, 7, 7]
    if "sharded" not in kind:
        assert [
            int(s["step"]) for s in group.optimizers[0].state_dict()["state"].values()
        ] == counts


@pytest.mark.parametrize("kind", FREEZES)
def test_after_the_freeze_the_others_do_not_notice(kind):
    """And the new ones, exact as long as they are live, take AdamW's steps."""
    group, alone = (
        replicas(kind, 2, spiky_codec=None, exact_steps=6, betas=BETAS) for _ in range(2)
    )
    twin = [torch.nn.Parameter(p) for p in start(SHAPES)[2:]]
    adam = torch.optim.AdamW(twin, betas=BETAS, fused=True, **OTHERS)
    for step in range(15):
        if step == 9:
            before = group.owed()
            join(group)
            assert (group.owed()[: before.size] == before).all()
            assert before.any()
        gradients = noise(2, step, SHAPES)
        group.step(gradients)
        alone.step(gradients)
        if step >= 9:
            for p, g in zip(twin, mean(gradients)[2:], strict=True):
                p.grad = g
            adam.step()
    assert same(group, alone, slice(2))
    first = group.optimizers[0]
    assert first.tensors.frozen.tolist() == [True, True, False, False, False]
    if kind != "lamb":
        assert equal(group.parameters[0][2:], twin)
    run(group, range(15, 17))
    assert first.tensors.frozen.tolist() == [True] * 5, "live for as long as the warm-up took"
    run(group, range(17, 24))
    assert group.agree()


@pytest.mark.parametrize("kind", FREEZES)
def test_frozen_late_they_go_as_in_an_optimizer_of_their_own(kind):
    """An optimizer whose warm-up takes as long, and an exact codec: nothing is lost."""
    common = {"codec": "none", "betas": BETAS}
    group = replicas(kind, 2, exact_steps=6, **common)
    run(group, range(9))
    join(group)
    run(group, range(9, 15))
    late = group.optimizers[0].tensors
    assert not late.frozen[2:].any()
    run(group, [15])
    assert late.frozen.all()
    run(group, range(16, 24))

    def alone(p, t):
        return KINDS[kind](p[2:], transport=t, **(COMMON | OTHERS | common), exact_steps=7)

    own = Replicas(alone, 2, SHAPES)
    for step in range(9, 24):
        own.step(noise(2, step, SHAPES))
    for p, q in zip(group.parameters[0][2:], own.parameters[0][2:], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", WINDOWED)
def test_an_open_window_ends_and_all_begin_with_exact_steps(kind, size):
    """The others go as if somebody had synchronised and asked for exact steps."""
    group, alone = replicas(kind, size), replicas(kind, size)
    first, begin = group.optimizers[0], 0
    while begin < 9 or (first.windows.held != 2 and (kind, size) != ("zero-one", 1)):
        run(group, [begin])
        run(alone, [begin])
        begin += 1
    held = first.windows.held
    join(group)
    assert first.windows.held == held, "nothing is sent before the next step"
    synchronize(alone)
    for o in alone.optimizers:
        o.windows.exact_until = begin + first.windows.opening
    kinds = []
    for step in range(begin, begin + 14):
        before = first.counters.exact_rounds
        run(group, [step])
        run(alone, [step])
        kinds.append(first.counters.exact_rounds - before)
        if step == begin:  # as under Adam, the first step is one of lr, whatever the gradient is
            late = torch.cat(
                [
                    (p.detach() - q).view(-1)
                    for p, q in zip(group.parameters[0], start(SHAPES), strict=True)
                ][2:]
            )
            assert float(late.abs().median()) == pytest.approx(OTHERS["lr"], rel=1e-3)
    assert kinds[: first.windows.opening] == [1] * first.windows.opening
    assert 0 in kinds or (kind, size) == ("zero-one", 1)
    assert same(group, alone, slice(2))
    synchronize(group)
    assert group.agree()
    moved = [
        float((p.detach() - q).abs().mean())
        for p, q in zip(group.parameters[0][2:], start(SHAPES)[2:], strict=True)
    ]
    assert all(1e-3 < m < 14 * 1e-2 for m in moved), moved


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_add_other_groups_are_named(kind):
    for order in ((2, 3), (3, 2, 4)):
        group = replicas(kind, 3)
        run(group, range(2))
        for rank, (o, p) in enumerate(zip(group.optimizers, group.parameters, strict=True)):
            o.add_param_group({"params": [p[i] for i in (order if rank == 1 else (2, 3, 4))]})
        with pytest.raises(
            Mismatch,
            match=r"ranks \[1\] have other parameter groups than rank 0.*the same two steps",
        ) as e:
            run(group, [2])
        assert e.value.ranks == (1,)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_adds_none_is_named(kind):
    group = replicas(kind, 3, exact_steps=5)
    run(group, range(2))
    for rank in (0, 2):
        group.optimizers[rank].add_param_group({"params": group.parameters[rank][2:]})
    with pytest.raises(Mismatch, match=r"but rank [01] sent"):
        run(group, [2])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_changes_nothing(kind):
    group, alone = replicas(kind, 2), replicas(kind, 2)
    run(group, range(5))
    run(alone, range(5))
    for o, p in zip(group.optimizers, group.parameters, strict=True):
        for bad, match in (
            ({"params": p[1:]}, "more than one parameter group"),
            ({"params": [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]}, "float64"),
            ({"params": p[2:], "lr": -1.0}, "lr is -1"),
            ({"params": p[2:], "betas": (0.9, 0.5)}, "square of the first"),
            ({"params": [torch.nn.Parameter(torch.zeros(3, device="meta"))]}, "meta"),
        ):
            with pytest.raises((InvalidArgument, ValueError), match=match):
                o.add_param_group(bad)
        assert len(o.param_groups) == 1
    run(group, range(5, 9))
    run(alone, range(5, 9))
    assert same(group, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_weights_of_half_precision_stay(kind):
    def make(p, t):
        return KINDS[kind]([{"params": p[:2]}], transport=t, **options_of(kind))

    group, alone = (Replicas(make, 2, SHAPES, dtype=torch.bfloat16) for _ in range(2))
    run(group, range(3))
    run(alone, range(3))
    join(group)
    masters = [
        o.master[: alone.optimizers[0].master.numel()] if "sharded" in kind else o.flat.weights[0]
        for o in (group.optimizers[0], alone.optimizers[0])
    ]
    assert torch.equal(*masters)
    assert not torch.equal(masters[0], masters[0].bfloat16().float())


def test_a_grown_adamw_goes_on_as_one_of_ours():
    twin = [torch.nn.Parameter(p) for p in start(SHAPES)]
    adam = torch.optim.AdamW(twin[:2], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    group = replicas("onebit", 2, late=False, exact_steps=100)
    for step in range(12):
        if step == 5:
            adam.add_param_group({"params": twin[2:], **OTHERS})
        if step == 8:
            for o, mine in zip(group.optimizers, group.parameters, strict=True):
                fill(mine, twin)
                o.load_state_dict(copy.deepcopy(adam.state_dict()))
            assert [g["added_at"] for g in group.optimizers[0].param_groups] == [0, 5]
        gradients = noise(2, step, SHAPES)
        if step >= 8:
            group.step(gradients)
        adam_step(adam, twin, gradients)
    assert equal(group.parameters[0], twin)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_were_assigned_count_as_added(kind):
    """Lightning's ``BaseFinetuning`` does so when it resumes, before it loads the optimizer's
    state."""
    group, other = replicas(kind, 2), replicas(kind, 2)
    run(group, range(5))
    join(group)
    run(group, range(5, 8))
    for mine, theirs, o, q in zip(
        other.parameters, group.parameters, other.optimizers, group.optimizers, strict=True
    ):
        fill(mine, theirs)
        o.param_groups = [
            {key: value for key, value in g.items() if key != "params"} | {"params": p}
            for g, p in zip(q.param_groups, (mine[:2], mine[2:]), strict=True)
        ]
        o.load_state_dict(copy.deepcopy(q.state_dict()))
    run(group, range(8, 14))
    run(other, range(8, 14))
    assert same(group, other)
    o = other.optimizers[0]
    o.param_groups = [{**g, "params": g["params"][::-1]} for g in o.param_groups]
    with pytest.raises(InvalidArgument, match="construct another optimizer"):
        o.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_says_what_it_lacks(kind):
    group = replicas(kind, 1)
    run(group, range(2))
    again = copy.deepcopy(group.optimizers[0])
    with pytest.raises(InvalidArgument, match=r"was copied or unpickled.*load_state_dict"):
        again.step()
    run(group, [2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_converted_afterwards_is_named_whatever_it_was(kind):
    """A model of two dtypes, of which one is no longer what it was."""
    for i in (0, 1):
        group = replicas(kind, 1)
        p = [
            torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16)),
            torch.nn.Parameter(torch.ones(300)),
        ]
        group.optimizers[0].add_param_group({"params": p})
        p[i].data = p[i].data.half()
        with pytest.raises(
            InvalidArgument, match=f"'#0000{2 + i}' is now torch.float16 on cpu, it was"
        ):
            run(group, [0])
