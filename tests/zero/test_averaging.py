"""Optimizers that do not communicate warn once where several ranks train replicas and nobody
averages; else they are silent."""

import logging
import tempfile
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.integrations.zero import averaging
from small_store import open_store
from tier_layers import WIDTH, tiered
from variants import every_second

OPTIONS = {"lr": 1e-2, "fused": True}


@contextmanager
def warned():
    """Warnings of our logger meanwhile."""
    logger, lines = logging.getLogger("commpress"), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def made(seed=0, width=24):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 4)
    )


def store():
    return open_store(tempfile.mkdtemp())


def offloaded(net, **more):
    return commpress.Offloaded(
        net.named_parameters(), torch.optim.AdamW, store=store(), chunk_mb=0.001, **OPTIONS | more
    )


def average(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def average_in_own_order(net):
    """In half precision, each rank's own summand first: ranks differ in the last bits."""
    for p in net.parameters():
        own, every = (
            p.grad.bfloat16(),
            [torch.empty_like(p.grad, dtype=torch.bfloat16) for _ in range(dist.get_world_size())],
        )
        dist.all_gather(every, own)
        others = [one for rank, one in enumerate(every) if rank != dist.get_rank()]
        p.grad.copy_(sum(others, own * 1.004) / len(every))


def streamed(**options):
    net, own = made(), store()
    commpress.stream(net, store=own, **options)
    return net, commpress.Offloaded(net.parameters(), torch.optim.AdamW, store=own, **OPTIONS)


def on_the_way(kind):
    """(model, optimizer, what the user does with gradients)."""
    net, average_by = made(), None
    if kind == "ddp":
        return DistributedDataParallel(net), offloaded(net), None
    if kind == "partitioned":
        own = {"store": store(), **OPTIONS}
        return net, commpress.Partitioned(net.parameters(), torch.optim.AdamW, **own), None
    if kind == "streamed":
        return *streamed(), None
    if kind == "fsdp":
        for part in (net[0], net):
            fully_shard(part)
    if kind == "stages":
        net = made(seed=dist.get_rank())
    if kind == "other widths":
        net = made(width=24 + dist.get_rank())
    if kind == "ones":  # of two stages whose weights happen to be alike
        for p in net.parameters():
            torch.nn.init.ones_(p)
    if kind.startswith("manual"):
        average_by = average_in_own_order if kind == "manual in own order" else average
    optimizer = offloaded(net, **({"gradients": "delayed"} if "delayed" in kind else {}))
    if kind == "local":
        optimizer = commpress.LocalUpdates(optimizer, every=2)
    return net, optimizer, average_by


def warnings_of(build, *args, seeds=(0,), rows=16):
    torch.set_num_threads(1)
    with warned() as lines:
        for seed in seeds:
            train(*build(*args), seed=seed, rows=rows)
        dist.barrier()
    return lines


def train(net, optimizer, average=None, *, steps=4, seed=0, rows=16):
    for step in range(steps):
        draw = torch.Generator().manual_seed(100 * seed + 10 * step + dist.get_rank())
        net(torch.randn(8, rows, generator=draw)).square().mean().backward()
        if average is not None:
            average(net)
        optimizer.step()
        optimizer.zero_grad()


def bare(**more):
    net = made()
    return net, offloaded(net, **more)


@pytest.mark.parametrize(
    ("more", "size"),
    [({}, 3), ({"gradients": "store"}, 2), ({"gradients": "delayed"}, 2)],
)
def test_a_bare_model_on_several_ranks_is_warned_of_once_by_one_of_them(pool, more, size):
    found = pool.run(warnings_of, partial(bare, **more), size=size)
    (line,) = (line for lines in found for line in lines)
    assert "these are not averaged, and the replicas diverge" in line
    assert (
        "Offloaded does not communicate. Use commpress.Partitioned(params, ..., store=store)"
        in line
    )


def streamed_alone():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return streamed(process_group=groups[dist.get_rank()])


def test_so_is_what_every_rank_streams_by_itself(pool):
    (line,) = (line for lines in pool.run(warnings_of, streamed_alone) for line in lines)
    assert "Partitioned" in line


def beside_experts(averaged):
    net, optimizer, _ = tiered(tempfile.mkdtemp())
    return net, optimizer, (lambda net: average(net.gates)) if averaged else None


def dense(averaged):
    return warnings_of(beside_experts, averaged, rows=WIDTH)


def test_and_dense_parameters_beside_experts_in_a_store(pool):
    (line,) = (line for lines in pool.run(dense, False) for line in lines)
    assert "ExpertOptimizer does not communicate" in line
    assert pool.run(dense, True) == [[], []]


QUIET = (
    "ddp",
    "fsdp",
    "manual",
    "manual in own order",
    "manual, delayed",
    "partitioned",
    "local",
    "streamed",
    "stages",
    "other widths",
    "ones",
)


def twice(kind):
    return warnings_of(on_the_way, kind, seeds=(0, 1))


@pytest.mark.parametrize("kind", every_second(QUIET))
def test_nothing_is_said_where_somebody_averages_or_ranks_have_other_models(pool, kind):
    assert pool.run(twice, kind) == [[], []]


def test_nothing_is_said_on_one_rank(pool):
    assert pool.run(warnings_of, bare, size=1) == [[]]


def steps_alone():
    """Only the first rank trains; another waits for it."""
    torch.set_num_threads(1)
    with warned() as lines:
        if dist.get_rank() == 0:
            train(*bare())
        dist.barrier()
    return lines


def test_ranks_that_do_not_step_are_not_waited_for(pool):
    assert pool.run(steps_alone) == [[], []]


class Leaves:
    """A store whose host leaves after some calls."""

    def __init__(self, inner, calls):
        self.inner, self.calls = inner, calls

    def __getattr__(self, name):
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("Connection reset by peer")
        return getattr(self.inner, name)


def without_a_store(calls):
    torch.set_num_threads(1)
    found = averaging.AveragingCheck("Offloaded", ["w"], averaging.default_store())
    found._store = Leaves(found._store, calls)
    for _ in range(2):
        found.note(torch.arange(3.0), torch.ones(3) * dist.get_rank())
        found.compare()
    return found.over


@pytest.mark.parametrize("calls", [0, 1])
def test_a_store_whose_host_has_left_ends_the_look_and_not_the_run(pool, calls):
    assert pool.run(without_a_store, calls) == [True, True]
