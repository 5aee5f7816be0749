"""Sharded optimizers on DTensors of tensor parallelism: elastic states go to other meshes, moments
in every bit.

Each rank owns a part of its shard; those of all ranks are joined to whole parameters and cut as
other meshes cut them.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import commpress
from column_twin import SHAPES, apart, columns, parameters, placed, values, whole
from commpress.errors import StateMismatch
from commpress.schedules import DoublingIntervals
from ranks import caught
from variants import first, seldom

SHARDED = ("master", "momentum", "variance")
# rows of the latter have the same blocks however they are cut
NAMES, ALIKE = (*SHAPES, "one"), ("tall", "norm")
BLOCKS = {"variance_floor": 0.0, "spiky_codec": None}  # and nothing is asked of them as a whole
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def onebit(params, **options):
    return commpress.ShardedOneBitAdam(params, exact_steps=3, **OPTIONS, **options)


def zero_one(params, **options):
    sync = DoublingIntervals(start=3, period=100)
    return commpress.ShardedZeroOneAdam(params, sync=sync, variance_updates=1, **OPTIONS, **options)


MAKERS = {"1-bit": onebit, "0/1": zero_one}


def made(make, mesh, names, options, weights=None):
    params = parameters(mesh, names)
    for name, tensor in (weights or {}).items():
        with torch.no_grad():
            params[name].copy_(placed(name, tensor, mesh))
    among = {} if mesh is None else {"process_group": mesh["dp"].get_group(), "agree_over": mesh}
    return params, MAKERS[make](params.items(), **among, **options)


def move(optimizer, params, mesh, steps, *, ends=True):
    replica = dist.get_rank() if mesh is None else mesh["dp"].get_local_rank()
    for step in steps:
        for name, p in params.items():
            p.grad = placed(name, values(name, 100 * (step + 1) + replica), mesh)
        optimizer.step()
    if ends and hasattr(optimizer, "synchronize"):
        optimizer.synchronize()


def joined(optimizer, parts, params, mesh):
    """Whole tensors from the summands that the ranks with the same shard have of it."""
    found = {}
    for (name, p), part in zip(params.items(), parts, strict=True):
        dist.all_reduce(part, group=None if mesh is None else mesh["dp"].get_group())
        if isinstance(p, DTensor):
            part = DTensor.from_local(
                part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
        found[name] = whole(part)
    return found


def seen(optimizer, params, mesh):
    """All that the ranks own, whole, and R, the mean of what they owe."""
    flat, ranks = optimizer._flat, optimizer.channel.size
    found = {}
    for name in SHARDED:
        parts = [torch.zeros(shape) for shape in flat.shapes]
        for i in optimizer.owned(range(len(parts))):
            optimizer.own(parts[i], i).copy_(optimizer.part_of(getattr(optimizer, name), i))
        found |= {f"{name} {key}": t for key, t in joined(optimizer, parts, params, mesh).items()}
    parts = [torch.zeros(shape) for shape in flat.shapes]
    for name, part in zip(flat.names, parts, strict=True):
        optimizer.quantized.residuals.add_to(name, part.view(-1), optimizer.channel.rank, ranks)
        part /= ranks
    owed = joined(optimizer, parts, params, mesh)
    return found, owed, optimizer.tensors.frozen_at.tolist()


def went_on(make, shape, names, options, states, weights, steps):
    """Load what other ranks saved, say what was loaded, take these steps and save."""
    mesh = None if shape is None else columns(shape)
    params, optimizer = made(make, mesh, names, options, weights)
    if states:
        optimizer.load_state_dict(*states)
    before = seen(optimizer, params, mesh)
    move(optimizer, params, mesh, steps)
    ends = {name: whole(p) for name, p in params.items()}
    return (
        optimizer.elastic_state_dict(),
        before,
        seen(optimizer, params, mesh),
        ends,
        optimizer.steps_done,
    )


def chain(pool, make, names, options, steps):
    """Saved on 2 × 2 after these steps, carried to 4 × 1 and 1 × 2: what each of the three has
    seen."""
    ways, states, weights = [], [], None
    for shape, some in (((2, 2), steps), ((4, 1), ()), ((1, 2), ())):
        every = pool.run(
            went_on, make, shape, names, options, states, weights, some, size=shape[0] * shape[1]
        )
        states, weights = [each[0] for each in every], every[0][3]
        ways.append(every)
    return ways, states, weights


@pytest.mark.parametrize("steps", [seldom(2), 6])
@pytest.mark.parametrize("make", first(1, ["0/1", "1-bit"]))
def test_states_go_from_mesh_to_mesh(pool, make, steps):
    """2 × 2 → 4 × 1 → 1 × 2 → two ranks with whole parameters: masters and moments in every bit, R
    up to rounding its sum."""
    ways, states, weights = chain(pool, make, NAMES, {}, range(steps))
    ways.append(pool.run(went_on, make, None, NAMES, {}, states, weights, (), size=2))
    _, _, (moments, owed, frozen), ends, done = ways[0][0]
    # all of 2 steps are exact
    assert (max(float(each.abs().max()) for each in owed.values()) > 0) == (steps == 6)
    assert make == "0/1" or max(frozen) == (3 if steps == 6 else 0)
    for every in ways[1:]:
        for _, (found, left, at), _, arrived, count in every:
            assert apart(found, moments) == apart(arrived, ends) == 0.0
            assert apart(left, owed) < 1e-6
            assert (at, count) == (frozen, done)
    assert {tuple(t.shape) for t in moments.values()} == {
        (64, 128),
        (48, 64),
        (5, 64),
        (16, 16),
        (64,),
        (1, 64),
    }


@pytest.mark.parametrize("make", ["1-bit", seldom("0/1")])
def test_meshes_and_whole_parameters_go_on_alike_in_every_bit(pool, make):
    """Steps in one bit after the same state, where blocks are the same: on whole parameters from
    the first mesh's state and from the third's, and on 2 × 2."""
    ways, states, weights = chain(pool, make, ALIKE, BLOCKS, range(6))
    first = [each[0] for each in ways[0]]
    ends = [
        pool.run(went_on, make, shape, ALIKE, BLOCKS, found, weights, range(6, 9), size=size)[0]
        for shape, size, found in ((None, 2, first), (None, 2, states), ((2, 2), 4, states))
    ]
    for _, _, (moments, owed, _), found, _ in ends[1:]:
        assert (
            apart(found, ends[0][3])
            == apart(moments, ends[0][2][0])
            == apart(owed, ends[0][2][1])
            == 0.0
        )
    assert apart(ends[0][3], weights) > 1e-3


# ---------------------------------------------------------------- what does not fit


def inside_a_window():
    mesh = columns((2, 2))
    params, optimizer = made("0/1", mesh, NAMES, {})
    move(optimizer, params, mesh, range(5), ends=False)
    return optimizer.elastic_state_dict()


def refused_state(make, states):
    params, optimizer = made(make, columns((4, 1)), NAMES, {})
    before = {name: whole(p) for name, p in params.items()}
    error = caught(optimizer.load_state_dict, *states)
    assert isinstance(error, StateMismatch)
    assert (
        optimizer.steps_done == apart(before, {name: whole(p) for name, p in params.items()}) == 0
    )
    assert not optimizer.momentum.any()
    return str(error)


def test_states_that_do_not_fit_are_refused_with_the_cure(pool):
    states = [
        each[0]
        for each in pool.run(went_on, "1-bit", (2, 2), NAMES, {}, [], None, range(4), size=4)
    ]
    window = pool.run(inside_a_window, size=4)
    for given, make, said in (
        (
            states[::2],
            "1-bit",
            "4096 of the 8192 elements of parameter 'tall': pass those of all ranks",
        ),
        (
            states[:3],
            "1-bit",
            "of 2 ranks with the same shards 1 states were given: pass those of all ranks",
        ),
        (states, "0/1", "the state is of ShardedOneBitAdam, this is ShardedZeroOneAdam"),
        (
            window,
            "0/1",
            "steps into a window: call optimizer.synchronize() before elastic_state_dict()",
        ),
    ):
        for found in pool.run(refused_state, make, given, size=4):
            assert said in found
