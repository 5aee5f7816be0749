"""The way of one call through the package: files entered and lines of the functions run, printed
(``-s``) and kept short."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import PeerFailure
from commpress.tiered_mem import FileLayer, engines
from group_calls import as_world
from ranks import caught
from small_store import open_store
from walks import table, walking


@pytest.mark.parametrize(
    ("engine", "files", "lines"), [("threads", 11, 460), ("io_uring", 10, 600)]
)
def test_a_borrow_that_misses(tmp_path, engine, files, lines):
    """From the call to the bytes in memory and back, on all threads of the store."""
    if missing := engines.available(FileLayer())[engine]:
        pytest.skip(missing)
    with walking() as walk, open_store(tmp_path, engine=engine) as store:
        store.put("x", torch.arange(50_000))
        store.evict("x").wait()

        def borrow():
            with store.borrow("x") as tensor:
                assert torch.equal(tensor, torch.arange(50_000))

        found = walk.of(borrow)
    print("\n" + table(found))
    assert store.counters.misses == 1
    assert {
        "tiered_mem/store.py",
        "tiered_mem/disk.py",
        "tiered_mem/engines/transfer.py",
    } <= found.keys(), "on all threads"
    assert len(found) <= files
    assert sum(map(len, found.values())) <= lines


def bucket():
    """The bucket of a third backward: by then it is known, and its connections are there."""
    with walking() as walk:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(256, 256, bias=False))
        state = commpress.compress(model, "sign", min_numel=0)
        state.measure_every = 0
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(3):
            loss = model(x).square().mean()
            found = walk.of(loss.backward)
    assert type(state.channel.inner).__name__ == "SocketTransport"
    return found


def test_a_bucket_under_ddp(pool):
    found, _ = pool.run(bucket)
    print("\n" + table(found))
    assert {
        "integrations/ddp/hook.py",
        "collectives/allreduce.py",
        "collectives/transports/sockets.py",
    } <= found.keys()
    assert len(found) <= 11
    assert sum(map(len, found.values())) <= 1345


def compressed_step(kind, options):
    with walking() as walk:
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 256, bias=False)
        optimizer = kind(model.parameters(), lr=1e-3, min_numel=0, **options)
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
        kinds = {}
        for _ in range(40):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            before = optimizer.counters.compressed_rounds
            found = walk.of(optimizer.step)
            kinds[optimizer.counters.compressed_rounds - before] = found
    return kinds[1]


@pytest.mark.slow  # its parts are those of a bucket
@pytest.mark.parametrize(
    ("kind", "options", "files", "lines"),
    [
        (commpress.OneBitAdam, {"exact_steps": 5}, 20, 1670),
        (commpress.ZeroOneAdam, {}, 28, 2085),
    ],
)
def test_a_compressed_step(pool, kind, options, files, lines):
    found, _ = pool.run(compressed_step, kind, options)
    print("\n" + table(found))
    assert {"commpress/optim/replicated.py", "collectives/allreduce.py"} <= found.keys()
    assert len(found) <= files
    assert sum(map(len, found.values())) <= lines


def lose_one(file):
    """The call that fails because the last rank has died, and the reform after it."""

    def run():
        with walking() as walk:
            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            commpress.compress(model, "sign", min_numel=1)
            model(torch.ones(1, 64)).sum().backward()
            if dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)

            def go_on():
                assert isinstance(caught(dist.all_reduce, torch.ones(1)), PeerFailure)
                dist.group.WORLD.reform()

            return walk.of(go_on)

    return as_world("commpress", file, run, seconds=20.0)


@pytest.mark.slow  # test_reform.py has the same
def test_death_and_reform(mortal, tmp_path):
    found, _, _ = mortal.outcomes(lose_one, str(tmp_path / "file"), size=3, lost=[2])
    assert isinstance(found, dict), found
    print("\n" + table(found))
    assert {
        "collectives/handover.py",
        "integrations/process_group/guard.py",
        "collectives/transports/epochs.py",
    } <= found.keys()
    assert len(found) <= 34
    assert sum(map(len, found.values())) <= 3740
