"""The optimizers on real ranks over Gloo: bit for bit what the simulation gives."""

import pytest
import torch

import commpress
from commpress.errors import Mismatch, StateMismatch
from commpress.optim import (
    OneBitAdam,
    OneBitLamb,
    ShardedOneBitAdam,
    ShardedZeroOneAdam,
    ZeroOneAdam,
)
from commpress.schedules import DoublingIntervals
from optim_twin import Replicas, noise, start
from variants import few, first

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "exact_steps": 4, "min_numel": 0, "weight_decay": 0.1}
STEPS = 10


def train(make, size):
    """On a real rank; every rank's own gradients of the same sequence."""
    rank = torch.distributed.get_rank()
    parameters = [torch.nn.Parameter(p) for p in start()]
    optimizer = make(parameters, None)
    for step in range(STEPS):
        for p, g in zip(parameters, noise(size, step)[rank], strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in parameters], optimizer.counters.as_dict()


def onebit(parameters, transport):
    return OneBitAdam(parameters, transport=transport, **OPTIONS)


def zero_one(parameters, transport):
    options = {k: v for k, v in OPTIONS.items() if k != "exact_steps"}
    sync = DoublingIntervals(start=4, period=100)
    return ZeroOneAdam(parameters, transport=transport, sync=sync, variance_updates=1, **options)


def lamb(parameters, transport):
    return OneBitLamb(parameters, transport=transport, **OPTIONS)


def powersgd(parameters, transport):
    return OneBitAdam(parameters, transport=transport, codec="powersgd-2", **OPTIONS)


@pytest.mark.parametrize(("make", "size"), few([onebit, zero_one, lamb, powersgd], [2, 3]))
def test_gloo_equals_the_simulation(pool, make, size):
    twin = Replicas(make, size)
    for step in range(STEPS):
        twin.step(noise(size, step))
    results = pool.run(train, make, size, size=size)
    for (parameters, counters), o, theirs in zip(
        results, twin.optimizers, twin.parameters, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(parameters, theirs, strict=True))
        assert counters == o.counters.as_dict()


def sharded(parameters, transport):
    options = {k: v for k, v in OPTIONS.items() if k != "process_group"}
    return ShardedOneBitAdam(parameters, transport=transport, **options)


def sharded_zero_one(parameters, transport):
    options = {k: v for k, v in OPTIONS.items() if k != "exact_steps"}
    sync = DoublingIntervals(start=4, period=100)
    return ShardedZeroOneAdam(
        parameters, transport=transport, sync=sync, variance_updates=1, **options
    )


def grow(make, size, missing):
    """On a real rank; the last parameters come after 5 steps, on one rank not at all if
    ``missing``."""
    rank = torch.distributed.get_rank()
    parameters = [torch.nn.Parameter(p) for p in start()]
    optimizer = make(parameters[:1], None)
    for step in range(STEPS):
        for p, g in zip(parameters, noise(size, step)[rank], strict=True):
            p.grad = g
        if step == 5 and not (missing and rank == 1):
            optimizer.add_param_group({"params": parameters[1:]})
        try:
            optimizer.step()
        except Mismatch as mismatch:
            return str(mismatch)
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("make", [sharded, sharded_zero_one])
def test_groups_that_come_late_are_those_of_the_simulation(pool, make):
    twin = Replicas(lambda p, t: make(p[:1], t), 2)
    for step in range(STEPS):
        if step == 5:
            for o, mine in zip(twin.optimizers, twin.parameters, strict=True):
                o.add_param_group({"params": mine[1:]})
        twin.step(noise(2, step))
    for mine, theirs in zip(pool.run(grow, make, 2, False), twin.parameters, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    said = pool.run(grow, make, 2, True)
    assert "but rank 1 sent" in said[0]
    assert "but rank 0 sent" in said[1]


def go_on(make, folder, elastic, begin, end):
    """Take steps ``begin`` to ``end``, having loaded what is in ``folder`` if there is something,
    and save there."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    parameters = [torch.nn.Parameter(p) for p in start()]
    optimizer = make(parameters, None)
    if begin:
        for p, saved in zip(
            parameters, torch.load(f"{folder}/model.pt", weights_only=True), strict=True
        ):
            p.data.copy_(saved)
        commpress.load_distributed(optimizer, f"{folder}/optimizer")
    for step in range(begin, end):
        for p, g in zip(parameters, noise(size, step)[rank], strict=True):
            p.grad = g
        optimizer.step()
    if folder and not begin:
        commpress.save_distributed(optimizer, f"{folder}/optimizer", elastic=elastic)
        if rank == 0:
            torch.save([p.detach() for p in parameters], f"{folder}/model.pt")
    return [p.detach() for p in parameters]


@pytest.mark.parametrize(
    "make", first(4, [onebit, zero_one, powersgd, sharded_zero_one, lamb, sharded])
)
def test_distributed_checkpoints_continue_in_every_bit(pool, tmp_path, make):
    at = 7  # in the middle of a window of 0/1 Adam
    pool.run(go_on, make, str(tmp_path), False, 0, at)
    resumed = pool.run(go_on, make, str(tmp_path), False, at, STEPS)
    for mine, theirs in zip(resumed, pool.run(go_on, make, "", False, 0, STEPS), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    with pytest.raises(StateMismatch, match="elastic=True"):
        pool.run(go_on, make, str(tmp_path), False, at, STEPS, size=3)


@pytest.mark.parametrize("make", first(4, [onebit, zero_one, sharded, powersgd, sharded_zero_one]))
def test_elastic_distributed_checkpoints_fit_other_world_sizes(pool, tmp_path, make):
    pool.run(go_on, make, str(tmp_path), True, 0, 7)
    results = pool.run(go_on, make, str(tmp_path), True, 7, 8, size=3)
    for mine in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], mine, strict=True))
