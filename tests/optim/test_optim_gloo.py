"""The optimizers on real ranks over Gloo: bit for bit what the simulation gives."""

import pytest
import torch

import commpress
from commpress.errors import StateMismatch
from commpress.optim import (
    OneBitAdam,
    OneBitLamb,
    ShardedOneBitAdam,
    ShardedZeroOneAdam,
    ZeroOneAdam,
)
from commpress.schedules import DoublingIntervals
from optim_twin import Replicas, equal, noise, start
from variants import few, first, seldom

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "exact_steps": 4, "min_numel": 0, "weight_decay": 0.1}
STEPS = 10


WINDOWS = {k: v for k, v in OPTIONS.items() if k != "exact_steps"}
WINDOWS |= {"variance_updates": 1, "sync": DoublingIntervals(start=4, period=100)}


def onebit(parameters, transport):
    return OneBitAdam(parameters, transport=transport, **OPTIONS)


def zero_one(parameters, transport):
    return ZeroOneAdam(parameters, transport=transport, **WINDOWS)


def lamb(parameters, transport):
    return OneBitLamb(parameters, transport=transport, **OPTIONS)


def powersgd(parameters, transport):
    return OneBitAdam(parameters, transport=transport, codec="powersgd-2", **OPTIONS)


def sharded(parameters, transport):
    return ShardedOneBitAdam(parameters, transport=transport, **OPTIONS)


def sharded_zero_one(parameters, transport):
    return ShardedZeroOneAdam(parameters, transport=transport, **WINDOWS)


def muon(parameters, transport):
    return commpress.Muon(parameters, lr=0.02, adamw={"lr": 3e-3}, transport=transport)


MAKERS = [onebit, zero_one, powersgd, sharded, sharded_zero_one, lamb]
MAKERS += [muon] * hasattr(torch.optim, "Muon")


@pytest.mark.parametrize(("make", "size"), few(MAKERS, [2, 3]))
def test_gloo_equals_the_simulation(pool, make, size):
    twin = Replicas(make, size)
    for step in range(STEPS):
        twin.step(noise(size, step))
    results = pool.run(go_on, make, "", False, 0, STEPS, size=size)
    for (parameters, counters), o, theirs in zip(
        results, twin.optimizers, twin.parameters, strict=True
    ):
        assert equal(parameters, theirs)
        assert counters == o.counters.as_dict()


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
    return [p.detach() for p in parameters], optimizer.counters.as_dict()


@pytest.mark.parametrize("make", first(6, MAKERS))
def test_distributed_checkpoints_continue_in_every_bit(pool, tmp_path, make):
    at = 7  # in the middle of a window of 0/1 Adam
    pool.run(go_on, make, str(tmp_path), False, 0, at)
    resumed = pool.run(go_on, make, str(tmp_path), False, at, STEPS)
    straight = pool.run(go_on, make, "", False, 0, STEPS)
    assert all(
        equal(mine, theirs) for (mine, _), (theirs, _) in zip(resumed, straight, strict=True)
    )
    with pytest.raises(StateMismatch, match="elastic=True"):
        pool.run(go_on, make, str(tmp_path), False, at, STEPS, size=3)


@pytest.mark.parametrize("make", [*MAKERS[:4], seldom(sharded_zero_one), *MAKERS[6:]])
def test_elastic_distributed_checkpoints_fit_other_world_sizes(pool, tmp_path, make):
    pool.run(go_on, make, str(tmp_path), True, 0, 7)
    (first, _), *others = pool.run(go_on, make, str(tmp_path), True, 7, 8, size=3)
    assert all(equal(first, mine) for mine, _ in others)
