"""The timeout that a group was made with holds for all that works for its ranks, unless another is
given."""

import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.collectives.transports.factory import own_transport, timeout_of
from commpress.errors import PeerFailure
from group_calls import as_world
from ranks import Ranks
from variants import first

SECONDS = 6  # for a machine on which two ranks that run may not meet sooner
WIDTH = 32


@pytest.fixture
def two(compiled):
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def backward(model):
    model(torch.full((2, WIDTH), 1.0 + dist.get_rank())).sum().backward()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def hook():
    ddp = DistributedDataParallel(net())
    commpress.compress(ddp, "int8", min_numel=8)
    return partial(backward, ddp)


def sharded():
    model = net()
    for part in [*model, model]:
        fully_shard(part)
    commpress.compress_fsdp(model, "int8", "int8", min_numel=0)
    return partial(backward, model)


def optimized(kind, **options):
    model = net()
    optimizer = kind(model.parameters(), **options)

    def step():
        backward(model)
        optimizer.step()

    return step


def exchanged():
    exchange = commpress.AllToAll("int8")
    return lambda: exchange(torch.ones(4, WIDTH))


def offloaded():
    """Gradients stay from here on: what FSDP2 sends in a backward is torch's own."""
    model, store = fully_shard(net()), commpress.TieredStore.open(tempfile.mkdtemp(), host="64MiB")
    optimizer = commpress.Offloaded(
        model.parameters(), torch.optim.AdamW, store=store, max_grad_norm=1.0, lr=1e-3
    )
    backward(model)
    return optimizer.step


ADAM = {"lr": 1e-3, "exact_steps": 1}
PATHS = {
    "gloo": {
        "hook": hook,
        "FSDP2": sharded,
        "1-bit Adam": partial(optimized, commpress.OneBitAdam, **ADAM),
        "0/1 Adam": partial(optimized, commpress.ZeroOneAdam, lr=1e-3),
        "1-bit LAMB": partial(optimized, commpress.OneBitLamb, **ADAM),
        "sharded 1-bit Adam": partial(optimized, commpress.ShardedOneBitAdam, **ADAM),
        "sharded 0/1 Adam": partial(optimized, commpress.ShardedZeroOneAdam, lr=1e-3),
        "ZeRO": partial(optimized, commpress.Partitioned, optimizer=torch.optim.AdamW, lr=1e-3),
        "Offloaded under FSDP2": offloaded,
        "all-to-all": exchanged,
    },
    "commpress": {"backend": lambda: partial(backward, DistributedDataParallel(net()))},
}


def ended(step):
    start = time.monotonic()
    try:
        step()
    except PeerFailure as error:
        return error.ranks, str(error), time.monotonic() - start
    except Exception as error:
        return error
    raise AssertionError("a step without its peer went well")


def lose_the_peer(backend):
    """Each path takes its steps, then rank 1 stops and all of them wait for it, side by side."""
    steps = {name: make() for name, make in PATHS[backend].items()}
    for step in steps.values():
        for _ in range(2):
            step()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with ThreadPoolExecutor(len(steps)) as pool:
        outcomes = dict(zip(steps, pool.map(ended, steps.values()), strict=True))
    return outcomes


def in_groups_of(seconds, file, backend, function, *args):
    options = (
        commpress.GroupOptions("int8", min_numel=8, only="everything")
        if backend == "commpress"
        else None
    )
    return as_world(backend, file, function, *args, pg_options=options, seconds=seconds)


@pytest.mark.parametrize("backend", first(1, [*PATHS][::-1]))
def test_a_stopped_peer_is_named_within_the_groups_timeout(two, tmp_path, backend):
    call = SECONDS, f"{tmp_path}/file", backend, lose_the_peer, backend
    outcomes, _ = two.outcomes(in_groups_of, *call, lost=[1])
    assert outcomes.keys() == PATHS[backend].keys(), outcomes
    for path, outcome in outcomes.items():
        assert type(outcome) is tuple, (path, outcome)
        ranks, told, seconds = outcome
        assert ranks == (1,), (path, told)
        assert "rank 1" in told, (path, told)
        assert seconds < 2 * SECONDS, (path, seconds)


def timeouts():
    """Of groups made with a timeout, by a mesh without one, and of what works for them."""
    given = dist.new_group(timeout=timedelta(seconds=77))
    mesh = init_device_mesh("cpu", (2, 1)).get_group(0)
    transports = [
        own_transport(group, timeout=timeout)
        for group, timeout in (
            (None, None),
            (given, None),
            (mesh, None),
            (given, timedelta(seconds=5)),
        )
    ]
    return [t.timeout.total_seconds() for t in transports] + [timeout_of(given).total_seconds()]


@pytest.mark.parametrize("backend", ["gloo", "commpress", "cpu:gloo"])
def test_a_group_without_a_timeout_has_that_of_the_default_group(pool, tmp_path, backend):
    for found in pool.run(in_groups_of, 55, f"{tmp_path}/file", backend, timeouts):
        assert found == [55, 77, 55, 5, 77]
