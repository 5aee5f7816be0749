"""A group over MPI goes on without ranks that were killed or stopped, in a job that ULFM keeps
alive, which then ends well."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import commpress
import commpress.backend
from commpress.errors import InvalidArgument, PeerFailure
from mpi_ranks import MpiRanks, mpirun

pytestmark = pytest.mark.skipif(mpirun() is None, reason="mpirun is not installed")
PATIENT = timedelta(seconds=60)


@pytest.fixture(params=[4])
def job(request, compiled):
    """Ranks of a job that survives; it ends with status 0 although ranks of it are gone."""
    ranks = MpiRanks(request.param, options=("--with-ft", "ulfm"))
    yield ranks
    begin = time.monotonic()
    assert ranks.close() == 0
    assert time.monotonic() - begin < 40


def joined(comm, file, timeout=PATIENT, **options):
    assert "COMMPRESS_MPI" in dir(dist.Backend), commpress.backend
    dist.init_process_group(
        "commpress_mpi",
        init_method=f"file://{file}",
        rank=comm.rank,
        world_size=comm.size,
        timeout=timeout,
        **options,
    )
    return dist.group.WORLD


def lost(number, *, after=signal.SIGKILL):
    if dist.get_rank() == number:
        os.kill(os.getpid(), after)


def weights_of(model):
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def trained(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()


def killed(comm, file):
    """Two ranks die, one after the other; a group that compresses, a hook and an optimizer go on
    each time."""
    group = joined(comm, file, pg_options=commpress.GroupOptions("int8", 100))
    torch.manual_seed(0)
    plain, hooked, own = (torch.nn.Linear(64, 64) for _ in range(3))
    models = [DistributedDataParallel(plain), DistributedDataParallel(hooked), own]
    commpress.compress(models[1], "sign")
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in models[:2]]
    optimizers.append(commpress.OneBitAdam(own.parameters(), exact_steps=2))
    found = []
    for victim in (3, 1):
        for each in zip(models, optimizers, strict=True):
            trained(*each, 3)
        lost(victim)
        with pytest.raises(PeerFailure) as failure:
            dist.all_reduce(torch.ones(1000))
        change = group.reform(PATIENT)
        found.append((failure.value.ranks, change.size, change.sources))
        models[0] = DistributedDataParallel(plain)
        for each in zip(models, optimizers, strict=True):
            trained(*each, 3)
    total = torch.ones(5)
    dist.all_reduce(total)
    compressed = group.counters.compressed_calls
    with pytest.raises(InvalidArgument, match="mpirun has started all its processes"):
        group.reform(PATIENT, join="127.0.0.1:1")
    weights = [weights_of(model) for model in models]
    dist.destroy_process_group()
    return found, total.tolist(), compressed, weights


@pytest.mark.slow
def test_ranks_that_are_killed_are_gone_on_without(job, tmp_path):
    first, _, second, _ = job.run(killed, f"{tmp_path}/file", size=4, lost=[1, 3])
    for found, total, compressed, weights in (first, second):
        assert found == [((3,), 3, (0, 1, 2)), ((1,), 2, (0, 2))]
        assert total == [2.0] * 5
        assert compressed == 12
        assert all(map(torch.equal, weights, first[3]))


def stopped(comm, file):
    group = joined(comm, file, timedelta(seconds=4))
    lost(1, after=signal.SIGSTOP)
    with pytest.raises(PeerFailure) as failure:
        dist.all_reduce(torch.ones(1000))
    change = group.reform(PATIENT)
    x = torch.full((3,), float(change.rank))
    dist.all_reduce(x)
    dist.destroy_process_group()
    return failure.value.ranks, change.size, x.tolist()


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_left_behind(job, tmp_path):
    """MPI does not know that it is gone: communicators are made without it, and it ends with the
    job."""
    said = job.run(stopped, f"{tmp_path}/file", size=4, lost=[1])
    assert [said[rank] for rank in (0, 2, 3)] == [((1,), 3, [3.0] * 3)] * 3


def surviving(comm, file):
    joined(comm, file)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    commpress.compress(model, "int8")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 8))
    loader = DataLoader(data, 4, sampler=commpress.ElasticSampler(data, 4))

    def step(batch):
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        if run.step == 3:
            lost(2)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    run = commpress.elastic(step, {"model": model, "optimizer": optimizer}, data=loader, epochs=1)
    losses = list(run)
    size = run.size
    run.close()
    dist.destroy_process_group()
    return len(losses), size, weights_of(model)


@pytest.mark.parametrize("job", [3], indirect=True)
def test_an_elastic_loop_goes_on_over_mpi(job, tmp_path):
    """Three ranks take four steps of 12 samples, two six steps of 8."""
    said = job.run(surviving, f"{tmp_path}/file", size=3, lost=[2])
    for steps, size, weights in said[:2]:
        assert (steps, size) == (10, 2)
        assert torch.equal(weights, said[0][2])
