"""Local updates on real ranks: bit for bit what the simulation gives, with shards inside, and what
happens when a rank dies."""

import gc
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import policy_of
from commpress.collectives.transports.transport import InFront
from commpress.errors import InvalidArgument
from local_twin import Ranks, drawn, equal, noise, options_of
from variants import few

PLANS = {
    "blocking": {"codec": "int4", "outer": commpress.Nesterov()},
    "overlapped": {
        "codec": "bits2",
        "outer": commpress.Nesterov(),
        "overlap": 2,
        "alpha": 0.5,
        "fragments": 2,
        "every": 6,
    },
    "sparse": {
        "codec": "topk-64+bits2",
        "outer": commpress.SparseLoCo(),
        "overlap": 1,
        "fragments": 2,
    },
    "gossip": {
        "codec": None,
        "outer": commpress.Gossip(),
        "overlap": 1,
        "alpha": "keep",
        "fragments": 2,
        "every": 6,
    },
    "exact": {"codec": None, "outer": commpress.SlowMo(), "overlap": 1},
}


def trained(options, size):
    parameters = [torch.nn.Parameter(p) for p in drawn(0)]
    local = commpress.LocalUpdates(
        torch.optim.SGD(parameters, lr=0.25),
        **options_of(**{"every": 4, "min_numel": 0} | options),
    )
    for step in range(15):
        for p, g in zip(parameters, noise(size, step)[dist.get_rank()], strict=True):
            p.grad = g
        local.step(tokens=1)
    local.drain()
    local.close()
    return (
        [p.detach() for p in parameters],
        local.digest(),
        local.counters.exchanges,
        local.counters.sent_bytes,
    )


@pytest.mark.parametrize(("plan", "size"), few(PLANS, [2, 3]))
def test_processes_equal_the_simulation(pool, plan, size):
    twin = Ranks(size, **{"every": 4, "min_numel": 0} | PLANS[plan])
    for step in range(15):
        twin.step(noise(size, step))
    twin.drain()
    for (parameters, digest, exchanges, sent), mine, local in zip(
        pool.run(trained, PLANS[plan], size, size=size), twin.parameters, twin.local, strict=True
    ):
        assert equal(parameters, mine)
        assert (digest, exchanges, sent) == (
            local.digest(),
            local.counters.exchanges,
            local.counters.sent_bytes,
        )


class Slow(InFront):
    """Transport whose messages take a random time, on every rank another."""

    def __init__(self, inner, seed, seconds):
        self.stand_for(inner)
        self.draw, self.seconds = random.Random(f"{seed} {inner.rank}"), seconds

    def _late(self, call, *arguments):
        return Late(call(*arguments), self.draw.random() * self.seconds)

    def all_to_all(self, *arguments):
        return self._late(self.inner.all_to_all, *arguments)

    def all_gather(self, *arguments):
        return self._late(self.inner.all_gather, *arguments)


class Late:
    def __init__(self, work, seconds):
        self.work, self.seconds = work, seconds

    def wait(self):
        time.sleep(self.seconds)
        self.work.wait()


def delayed(seconds):
    """The weights after each arrival, and how many messages were late."""
    parameters = [torch.nn.Parameter(p) for p in drawn(0)]
    local = commpress.LocalUpdates(
        torch.optim.SGD(parameters, lr=0.25),
        every=6,
        overlap=(2, 0.5),
        fragments=2,
        codec=policy_of("int4", min_numel=0),
    )
    for seed, channel in enumerate((local.channel, local.control)):
        channel.transport.inner = Slow(channel.transport.inner, seed, seconds)
    digests = []
    for step in range(15):
        for p, g in zip(parameters, noise(2, step)[dist.get_rank()], strict=True):
            p.grad = g
        local.step()
        digests.append((local.digest(), [float(p.double().sum()) for p in parameters]))
    local.close()
    return digests


def test_the_links_delay_changes_no_bit(pool):
    first, *others = [pool.run(delayed, seconds, size=2) for seconds in (0.0, 0.004, 0.03)]
    assert first[0][0][0] != first[0][-1][0]
    assert all(other == first for other in others)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16))


def wrapped():
    ddp = DistributedDataParallel(model())
    local = commpress.LocalUpdates(torch.optim.SGD(ddp.parameters(), lr=0.1))
    ddp(torch.ones(2, 32)).sum().backward()
    try:
        local.step()
    except InvalidArgument as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("size", [1, 2])
def test_ddp_around_the_model_is_refused(pool, size):
    assert all("DistributedDataParallel" in words for words in pool.run(wrapped, size=size))


def test_alone_nothing_is_searched_for_a_wrapper(monkeypatch):
    """A walk over all that Python knows takes tens of milliseconds, and without a process group
    there is none to find."""
    parameters = [torch.nn.Parameter(torch.ones(3))]
    local = commpress.LocalUpdates(torch.optim.SGD(parameters, lr=0.1))
    monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("searched"))
    local.step()
    local.close()


def left_alone():
    parameters = [torch.nn.Parameter(p) for p in drawn(0)]
    group = dist.new_group(timeout=timedelta(seconds=3))
    options = {"process_group": group, "every": 2, "codec": "int4"}
    local = commpress.LocalUpdates(torch.optim.SGD(parameters, lr=0.25), **options)
    for step in range(4):
        for p, g in zip(parameters, noise(3, step)[dist.get_rank()], strict=True):
            p.grad = g
        if dist.get_rank() == 1 and step == 3:
            return "left"
        try:
            local.step()
        except commpress.CommpressError as error:
            return str(error)
    return "nothing happened"


def test_a_rank_that_stays_away_is_named(pool):
    first, left, last = pool.run(left_alone, size=3)
    assert left == "left"
    assert all("1" in words and words != "nothing happened" for words in (first, last))
