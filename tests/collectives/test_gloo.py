"""Real ranks over Gloo give, bit for bit, what the simulation gives: every codec, world size and
transport."""

import contextlib
import os
import random
import time
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commpress.codecs import SignCodec, codec_named
from commpress.codecs.family import EXACT, NAMES
from commpress.codecs.policy import ByName, Same
from commpress.collectives import buckets
from commpress.collectives.agreement import gathered
from commpress.collectives.allreduce import Call, Workspace, compressed_allreduce, reduce_bucket
from commpress.collectives.buckets import Span, messages
from commpress.collectives.transports import factory
from commpress.collectives.transports import torch as gloo
from commpress.collectives.transports.factory import own_transport
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.transports.transport import InFront
from commpress.feedback import ErrorFeedback
from commpress.work import Worker, run
from recorded import Recorded
from variants import few
from ways import WAYS, transport_by

TIMEOUT = timedelta(seconds=60)
NUMELS = {"head.weight": 3001, "norm": 64, "fc.weight": 4096, "fc.bias": 37, "one": 1}
STEPS = 4


def plan_of(codec, ranks, monkeypatch):
    """A bucket of five tensors in several messages, one tensor exact and one with another codec."""
    monkeypatch.setattr(buckets, "MESSAGE", 4000)
    monkeypatch.setattr(buckets, "PIECE", 2500)
    spans, at = [], 0
    for name, numel in NUMELS.items():
        spans.append(Span(name, at, numel))
        at += numel
    plan = messages(spans, ByName({"norm": EXACT, "bias": NAMES["int8"]}, Same(codec)), ranks)
    assert len(plan) == (3 if codec.back == codec else 6), (
        "means that come back otherwise travel apart"
    )
    return plan


class Rank:
    """One rank's buffers, residuals and numbers over the steps of a test."""

    numel = sum(NUMELS.values())

    def __init__(self, rank, transport, plan, checksum=True):
        self.rank, self.transport, self.plan = rank, Recorded(transport), plan
        self.workspace = Workspace(checksum=checksum)
        self.feedbacks = [
            ErrorFeedback.zeros(m.pieces) if m.pieces.residual_numel else None for m in plan
        ]
        self.outputs = []

    def steps(self, step):
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        buffer = torch.randn(self.numel, generator=generator)
        outcomes = yield from self.reduce(
            buffer, workspace=self.workspace, sequence=len(self.plan) * step, key=step
        )
        for outcome in outcomes:
            assert outcome.finite
            outcome.commit()
        self.outputs.append(buffer)

    def reduce(self, buffer, **options):
        call = Call(transport=self.transport, **options)
        return reduce_bucket(buffer, self.feedbacks, self.plan, call)

    def result(self):
        """Every bit that a step left: outputs, residuals, and what was sent."""
        for feedback, message in zip(self.feedbacks, self.plan, strict=True):
            if feedback is not None:
                feedback.settle(message.pieces)
        residuals = [
            t.numpy() for f in self.feedbacks if f is not None for t in (f.sent, f.reduced)
        ]
        return (
            [o.numpy() for o in self.outputs] + residuals,
            self.transport.sent_bytes,
            self.transport.messages,
        )


def real(plan, way):
    transport = transport_by(way, TIMEOUT)
    rank = Rank(dist.get_rank(), transport, plan)
    for step in range(STEPS):
        run(rank.steps(step))
    return rank.result()


def simulated(plan, size):
    ranks = [Rank(r, t, plan) for r, t in enumerate(Loopback(size).transports())]
    for step in range(STEPS):
        simulate([rank.steps(step) for rank in ranks])
    return [rank.result() for rank in ranks]


def assert_equal(results, twins):
    for (arrays, sent_bytes, sent_messages), (twin, twin_bytes, twin_messages) in zip(
        results, twins, strict=True
    ):
        for array, expected in zip(arrays, twin, strict=True):
            np.testing.assert_array_equal(array.view(np.uint32), expected.view(np.uint32))
        assert (sent_bytes, sent_messages) == (twin_bytes, twin_messages)


@pytest.mark.parametrize(
    ("codec", "way", "size"),
    few([*NAMES.values(), SignCodec(block=0), SignCodec("l1", 0)], WAYS, [2, 3, 4]),
    ids=lambda each: getattr(each, "spec", None),
)
def test_real_ranks_equal_the_simulation(pool, monkeypatch, codec, way, size):
    plan = plan_of(codec, size, monkeypatch)
    assert_equal(pool.run(real, plan, way, size=size), simulated(plan, size))


# ---------------------------------------------------------------- several at once


def hurried(plans, way):
    """All steps given to one worker at once; each rank dawdles at other places, so they resume in
    other orders."""
    transport = transport_by(way, TIMEOUT)
    dawdle = random.Random(dist.get_rank())
    ranks = [
        Rank(dist.get_rank(), Shifted(transport, 1000 * i), plan) for i, plan in enumerate(plans)
    ]
    worker = Worker("hurried", limit=4)

    def late(steps):
        with suppress(StopIteration):
            while True:
                time.sleep(dawdle.random() * 0.01)
                yield next(steps)

    futures = [worker.submit(late(rank.steps(0))) for rank in ranks]
    for future in futures:
        future.wait()
    worker.close()
    return [rank.result() for rank in ranks]


class Shifted(InFront):
    """The same transport under other numbers, so that buckets under way at once share none."""

    def __init__(self, inner, by):
        self.stand_for(inner)
        self.by = by

    def all_to_all(self, out, inp, tag):
        return self.inner.all_to_all(out, inp, tag + self.by)

    def all_gather(self, out, inp, tag):
        return self.inner.all_gather(out, inp, tag + self.by)


def test_buckets_under_way_at_once_do_not_mix(pool, monkeypatch):
    plans = [
        plan_of(codec_named(name), 3, monkeypatch)
        for name in ("sign", "int8", "none", "int8", "ternary", "sign", "sign")
    ]
    results = pool.run(hurried, plans, "sockets", size=3)
    for i, plan in enumerate(plans):
        ranks = [Rank(r, t, plan) for r, t in enumerate(Loopback(3).transports())]
        simulate([rank.steps(0) for rank in ranks])
        assert_equal([result[i] for result in results], [rank.result() for rank in ranks])


# ---------------------------------------------------------------- sizes, groups, backends


def means_of(way, numel, codec, inputs, sequences=(0,)):
    """The mean of constant buffers, one operation after another; every input and mean is exact in
    every codec."""
    transport = transport_by(way, TIMEOUT)
    results = []
    for i, sequence in enumerate(sequences):
        buffer = torch.full((numel,), float(inputs[dist.get_rank()] + i))
        assert run(
            compressed_allreduce(buffer, codec=codec, transport=transport, sequence=sequence)
        )
        results += buffer.unique().tolist()
    return results


@pytest.mark.parametrize("way", WAYS)
def test_sizes_and_numbers_of_all_kinds(pool, way):
    """16 MB in each direction at once, where sends that waited for their receives would never end;
    fewer elements than ranks can share; tags that repeat after 8192 operations, and numbers that
    need 32 bits."""
    assert pool.run(means_of, way, 1 << 22, "none", [1, 3], size=2) == [[2.0]] * 2
    for numel in (1, 7, 9):
        assert pool.run(means_of, way, numel, "sign", [2, 4, 6, 8], size=4) == [[5.0]] * 4
    sequences = (0, 1, 8191, 8192, 8193, 0, 2**32 - 1, 2**32, 1)
    found = pool.run(means_of, way, 8, "none", [0, 2], sequences, size=2)
    assert found == [[float(i + 1) for i in range(9)]] * 2


def in_a_subgroup(way, members):
    """Everything but the members only helps to make the group."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    transport = transport_by(way, TIMEOUT, group)
    buffer = torch.full((100,), float(10 + dist.get_rank()))
    run(compressed_allreduce(buffer, codec="sign", transport=transport))
    return (
        transport.rank,
        buffer.unique().tolist(),
        [transport.peer(r) for r in range(transport.size)],
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_subgroup_counts_its_own_ranks_and_names_the_global_ones(pool, way):
    names = ["rank 0 (global rank 1)", "rank 1 (global rank 3)"]
    assert pool.run(in_a_subgroup, way, [1, 3], size=4) == [
        None,
        (0, [12.0], names),
        None,
        (1, [12.0], names),
    ]
    names = ["rank 0", "rank 1", "rank 2 (global rank 3)"]
    assert pool.run(in_a_subgroup, way, [0, 1, 3], size=4)[3][2] == names


def own(backend):
    import commpress.backend  # noqa: F401

    return type(own_transport(dist.new_group(backend=backend), timeout=TIMEOUT)).__name__


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None, "commpress"])
def test_groups_of_gloo_get_sockets_however_they_were_asked_for(pool, backend):
    """init_process_group() without a name calls its backend "undefined"."""
    assert pool.run(own, backend) == ["SocketTransport"] * 2


# ---------------------------------------------------------------- Gloo's threads


def policies():
    """By thread of Gloo; those of an older group may end meanwhile."""
    found = {}
    for thread in gloo._threads():
        with contextlib.suppress(ProcessLookupError):
            found[thread] = os.sched_getscheduler(thread)
    return found


def scheduling_of(make):
    """Scheduling of the threads that Gloo starts for what ``make`` makes, and whether the others
    are as before."""
    before = policies()
    made = make()
    after = policies()
    del made
    new = [after[thread] for thread in after.keys() - before.keys()]
    return new, all(after.get(thread, policy) == policy for thread, policy in before.items())


def scheduled():
    import commpress.backend  # noqa: F401

    found = (
        scheduling_of(lambda: dist.new_group(backend="commpress")),
        scheduling_of(lambda: dist.new_group(backend="gloo")),
    )
    dist.barrier()  # the other rank may still be connecting what is closed after the test
    return found


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no SCHED_BATCH")
def test_threads_of_gloo_groups_of_ours_push_nobody_off_a_core(pool):
    for (new, others_as_before), torchs in pool.run(scheduled):
        assert new
        assert set(new) == {os.SCHED_BATCH}
        assert others_as_before
        assert torchs == ([os.SCHED_OTHER], True)


def made_as_for_nccl():
    """Transports of a group that claims to have NCCL too, one after the other under one name."""
    votes = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(factory, "plainly_gloo", lambda group: False)
        patched.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
        for only_votes in (False, False, True):
            transport = own_transport(timeout=TIMEOUT, votes=only_votes)
            told = run(gathered([dist.get_rank() + 1.0], transport=transport, sequence=1))
            votes.append((type(transport).__name__, told[:, 0].tolist()))
    return votes


def test_numbers_of_a_group_with_nccl_travel_over_connections_of_the_hosts(pool):
    told = [1.0, 2.0, 3.0]
    expected = [("TorchTransport", told)] * 2 + [("SocketTransport", told)]
    assert pool.run(made_as_for_nccl, size=3) == [expected] * 3
