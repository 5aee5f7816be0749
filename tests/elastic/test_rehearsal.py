"""Ranks that wait for others do their first steps beforehand, and undo them, whoever dies
meanwhile."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress.backend
import elastic_script
from commpress.errors import NoQuorum
from ranks import Ranks
from test_elastic_ranks import commits, lines, wait_for
from variants import few

WITHIN = timedelta(seconds=30)


def joined(folder: str, rank: int, size: int) -> None:
    dist.destroy_process_group()
    assert commpress.backend
    torch.manual_seed(rank)
    dist.init_process_group(
        "commpress",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=WITHIN,
    )


# ---------------------------------------------------------------- as if nothing had been


def owed_of(owner) -> float:
    """Sum of |residual|, whatever keeps them."""
    stores = (
        [owner.residuals]
        if hasattr(owner, "residuals")
        else [owner.full.residuals, owner.quantized.residuals]
    )
    return sum(
        float(kept.abs().sum())
        for store in stores
        for every in store.every().values()
        for kept in every
    )


KINDS = {
    "sign": {"codec": "sign"},
    "low-rank": {"codec": "powersgd-2"},
    "topk": {"codec": "topk-4"},
}


def wait_in_vain(folder: str, kind: str, loaded: bool) -> list[tuple]:
    """State of a rank before and after the steps that it does while it waits, and what it owed
    meanwhile."""
    rank = dist.get_rank()
    joined(folder, rank, 2)
    if kind == "onebit":
        ddp = DistributedDataParallel(elastic_script.net(norm=True))
        owner = optimizer = commpress.OneBitAdam(
            ddp.module.named_parameters(), lr=1e-3, exact_steps=1
        )
        commpress.overlap(ddp, optimizer)
    else:
        ddp = DistributedDataParallel(elastic_script.net(norm=True), static_graph=True)
        owner = commpress.compress(ddp, **KINDS[kind], exact_steps=0)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    owed = []

    def train_step() -> None:
        (ddp(torch.randn(8, 16)).square().mean() + torch.rand(()) * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        owed.append(owed_of(owner))

    if loaded:  # residuals of a checkpoint, which are to stay
        train_step()
        owed.clear()
    run = commpress.elastic(
        train_step, {"model": ddp, "optimizer": optimizer}, steps=5, minimum=3, patience=0.2
    )

    def now() -> tuple:
        steps = owner.steps_done if kind == "onebit" else owner.step
        return (
            owed_of(owner),
            steps,
            run.state_hash(),
            torch.get_rng_state().sum().item(),
            len(optimizer.state),
        )

    before = now()
    with pytest.raises(NoQuorum):
        list(run)
    after = now()
    run.close()
    dist.destroy_process_group()
    return [before, after, owed]


@pytest.mark.parametrize(("kind", "loaded"), few([*KINDS, "onebit"], [False, True]), ids=str)
def test_steps_before_others_come_leave_nothing_behind(pool, tmp_path, kind, loaded):
    for before, after, owed in pool.run(wait_in_vain, str(tmp_path), kind, loaded, size=2):
        assert after == before
        assert len(owed) >= 2
        assert max(owed) > 0, "nothing was left behind meanwhile, so this shows nothing"
        assert (before[0] > 0) is (loaded and kind != "onebit")


# ---------------------------------------------------------------- one dies meanwhile


def train(folder: str, early: bool) -> int:
    """Ranks 0 and 1 wait for a third, and 1 dies in its second step; 2 and 3 join then, or 2 is
    there a little earlier."""
    rank, file, ready = dist.get_rank(), Path(folder, "contact"), Path(folder, "ready")
    dist.barrier()
    calls = []

    def before(step: int) -> None:
        calls.append(step)
        if rank == 2 and len(calls) == 2:
            ready.touch()
        if rank == 1 and len(calls) == 2:
            if early:
                wait_for(ready.exists)
                time.sleep(1.0)  # until it has knocked
            os.kill(os.getpid(), signal.SIGKILL)

    if rank < 2:
        joined(folder, rank, 2)
    else:
        dist.destroy_process_group()
        torch.manual_seed(rank)
        wait_for(lambda: file.exists() and file.read_text())
        if rank == 3 or not early:
            wait_for(
                lambda: any(line["kind"] == "fault" for line in lines(Path(folder, "events-0")))
            )
        dist.init_process_group(
            "commpress", store=dist.HashStore(), rank=0, world_size=1, timeout=WITHIN
        )
    run = elastic_script.run_of(
        "hook",
        events=f"{folder}/events-{rank}",
        steps=10,
        hash_every=1,
        minimum=3,
        before=before,
        join=file.read_text() if rank > 1 else None,
    )
    if rank == 0:
        file.write_text(run.contact)
    list(run)
    digest = run.weights_hash()
    run.close()
    dist.destroy_process_group()
    return digest


@pytest.mark.parametrize("early", [False, True])
def test_who_is_left_of_them_does_these_steps_again(compiled, tmp_path, early):
    """Alone: who is at the door has done its own, and is let in afterwards."""
    ranks = Ranks(4)
    try:
        first, lost, *others = ranks.outcomes(train, str(tmp_path), early, size=4, lost=[1])
    finally:
        ranks.close()
    assert lost is None
    assert [first, first] == others
    for rank in (0, 2, 3):
        assert [line["step"] for line in commits(tmp_path / f"events-{rank}")] == list(range(1, 11))
