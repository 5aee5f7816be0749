"""Optimizers that do not communicate warn once where several ranks train replicas and nobody
averages; else they are silent."""

import logging
import tempfile
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.integrations.zero import averaging
from small_store import open_store
from tier_layers import WIDTH, tiered

OPTIONS = {"lr": 1e-2, "fused": True}


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextmanager
def warned():
    """Warnings of our logger meanwhile."""
    logger, handler = logging.getLogger("commpress"), Lines()
    logger.addHandler(handler)
    try:
        yield handler.lines
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
        p.grad.copy_(sum(others, own * 1.001) / len(every))


def nothing(net):
    pass


def bare(more=None):
    net = made()
    return net, offloaded(net, **more or {}), nothing


def on_the_way(kind):
    """(model, optimizer, what the user does with gradients)."""
    net = made()
    if kind == "ddp":
        return DistributedDataParallel(net), offloaded(net), nothing
    if kind == "fsdp":
        for part in (net[0], net):
            fully_shard(part)
        return net, offloaded(net), nothing
    if kind == "manual":
        return net, offloaded(net), average
    if kind == "manual in own order":
        return net, offloaded(net), average_in_own_order
    if kind == "manual, delayed":
        return net, offloaded(net, gradients="delayed"), average
    if kind == "partitioned":
        return (
            net,
            commpress.Partitioned(net.parameters(), torch.optim.AdamW, store=store(), **OPTIONS),
            nothing,
        )
    if kind == "local":
        return net, commpress.LocalUpdates(offloaded(net), every=2), nothing
    if kind == "streamed":
        own = store()
        commpress.stream(net, store=own)
        return (
            net,
            commpress.Offloaded(net.parameters(), torch.optim.AdamW, store=own, **OPTIONS),
            nothing,
        )
    if kind == "stages":
        net = made(seed=dist.get_rank())
        return net, offloaded(net), nothing
    if kind == "other widths":
        net = made(width=24 + dist.get_rank())
        return net, offloaded(net), nothing
    if kind == "ones":  # of two stages whose weights happen to be alike
        for p in net.parameters():
            torch.nn.init.ones_(p)
        return net, offloaded(net), nothing
    raise AssertionError(kind)


def train(net, optimizer, average, steps=4, seed=0, rows=16):
    for step in range(steps):
        x = torch.randn(
            8,
            rows,
            generator=torch.Generator().manual_seed(100 * seed + 10 * step + dist.get_rank()),
        )
        net(x).square().mean().backward()
        average(net)
        optimizer.step()
        optimizer.zero_grad()


def warnings_of(build, how=None, seeds=(0,)):
    torch.set_num_threads(1)
    with warned() as lines:
        for seed in seeds:
            train(*(build() if how is None else build(how)), seed=seed)
        dist.barrier()
    return lines


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "more", [{}, {"gradients": "store"}, {"gradients": "delayed"}, {"max_grad_norm": 0.1}]
)
def test_a_bare_model_on_several_ranks_is_warned_of_once_by_one_of_them(pool, more, size):
    every = [line for lines in pool.run(warnings_of, bare, more, size=size) for line in lines]
    assert len(every) == 1
    assert "nobody averages these, and the replicas train apart" in every[0]
    assert (
        "Offloaded does not communicate. Use commpress.Partitioned(params, ..., store=store)"
        in every[0]
    )


def streamed_alone():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    net, own = made(), store()
    commpress.stream(net, store=own, process_group=groups[dist.get_rank()])
    return (
        net,
        commpress.Offloaded(net.parameters(), torch.optim.AdamW, store=own, **OPTIONS),
        nothing,
    )


def dense_beside_experts():
    net, optimizer, _ = tiered(tempfile.mkdtemp())
    return net, optimizer, nothing


def average_gates(net):
    average(net.gates)


def averaged_beside_experts():
    return (*dense_beside_experts()[:2], average_gates)


def with_experts(build):
    torch.set_num_threads(1)
    with warned() as lines:
        train(*build(), rows=WIDTH)
        dist.barrier()
    return lines


def test_so_is_what_every_rank_streams_by_itself(pool):
    every = [line for lines in pool.run(warnings_of, streamed_alone) for line in lines]
    assert len(every) == 1
    assert "Partitioned" in every[0]


def test_and_dense_parameters_beside_experts_in_a_store(pool):
    every = [line for lines in pool.run(with_experts, dense_beside_experts) for line in lines]
    assert len(every) == 1
    assert "ExpertOptimizer does not communicate" in every[0]
    assert pool.run(with_experts, averaged_beside_experts) == [[], []]


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


@pytest.mark.parametrize("kind", QUIET)
def test_nothing_is_said_where_somebody_averages_or_ranks_have_other_models(pool, kind):
    assert pool.run(warnings_of, on_the_way, kind, (0, 1)) == [[], []]


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
