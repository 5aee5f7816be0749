"""Optimizers with a codec, or a rank of PowerSGD, for every layer: all ranks choose as a single
process with all messages would, and nothing is lost."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.choice import PerLayer
from commpress.codecs import codec_named
from commpress.collectives.frame import HEADER
from commpress.collectives.transports.loopback import simulate
from commpress.errors import InvalidArgument
from commpress.plan.assignment import (
    OPTIONS,
    assign_by,
    assign_ranks,
    errors_of,
    errors_of_ranks,
    rank_options,
)
from optim_twin import Replicas, beside_adam, boundless, equal, flat

BETA1, WARMUP, EVERY, STEPS = 0.9, 4, 2, 14
SHAPES = ((40, 50), (24, 64), (40, 50), (600,), (30, 20), (7,))
NAMES = [f"p{i}" for i in range(len(SHAPES))]
CODECS = {"rows": "int4", "ranks": "powersgd-3+fp8"}
MATRICES, FROZEN = NAMES[:3], sum(map(math.prod, SHAPES[:4]))  # the last two stay live
COMMON = {"lr": 1e-2, "betas": (BETA1, 0.99), "min_numel": 16}
KINDS = {
    "OneBitAdam": {"exact_steps": WARMUP},
    "OneBitLamb": {"exact_steps": WARMUP},
    "ZeroOneAdam": {"variance_updates": WARMUP, "sync": 2},
}


def replicas(kind, codec, size, **options):
    given = COMMON | KINDS[kind] | {"codec": codec} | options

    def make(parameters, transport):
        named = list(zip(NAMES, parameters, strict=True))
        return getattr(commpress, kind)(named, transport=transport, **given)

    return Replicas(make, size, SHAPES)


def drawn(size, step):
    """Gradients of every rank. Those of a matrix have few directions, more in another matrix and at
    another time."""
    every, era = [], step // 4
    for rank in range(size):
        draws, own = torch.Generator().manual_seed(1000 * rank + step), []
        for i, shape in enumerate(SHAPES):
            g = torch.randn(shape, generator=draws) * 10.0 ** ((i + era) % 3)
            if len(shape) == 2:
                left = torch.randn(shape[0], 1 + (5 * i + 7 * era) % 12, generator=draws)
                right = torch.randn(left.shape[1], shape[1], generator=draws)
                g = 0.1 * g + left @ right
            if i == 4:  # rows of an embedding that are never seen
                g[15:] = 0.0
            own.append(g)
        every.append(own)
    return every


def messages(group, gradients, kind):
    """Messages of each rank, by name of a frozen tensor, in units of p; of a matrix that travels as
    factors, what is new in it."""
    first, every = group.optimizers[0], []
    for mine in gradients:
        said = {}
        for i in first.tensors.part(first.numbers)[1]:
            known = 0.0 if kind == "ranks" else BETA1 * first._momenta[i]
            said[NAMES[i]] = (known + (1 - BETA1) * mine[i]) / first.tensors.divisor(i)
        every.append(said)
    return every


def expected(kind, said):
    """Return the choice of a single process that has the messages of all ranks."""
    uniform, size, first = CODECS[kind], len(said), said[0]
    if kind == "ranks":
        codec = codec_named(uniform)
        options = rank_options(codec)
        own = [{n: errors_of_ranks(each[n], options) for n in MATRICES} for each in said]
        errors = {n: np.sum([each[n] for each in own], axis=0).tolist() for n in MATRICES}
        shapes = {n: tuple(first[n].shape) for n in MATRICES}
        chosen = assign_ranks(errors, shapes, codec, ranks=size).ranks
        return {n: f"powersgd-{rank}+fp8" for n, rank in chosen.items()}
    options = tuple(dict.fromkeys([*OPTIONS, uniform]))
    own = [{n: errors_of(each[n], options) for n in first} for each in said]
    errors = {n: np.sum([each[n] for each in own], axis=0).tolist() for n in first}
    numels = {n: each.numel() for n, each in first.items()}
    return dict(assign_by(errors, numels, options, ranks=size, uniform=uniform).rules)


@boundless
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", CODECS)
def test_ranks_choose_as_one_process_with_all_messages_and_lose_nothing(kind, size):
    group = replicas("OneBitAdam", PerLayer(CODECS[kind], EVERY), size, variance_floor=0.0)
    first, rules, oracle, sent = group.optimizers[0], [], [], []
    owed, largest = 0.0, 0.0
    for step in range(STEPS):
        gradients = drawn(size, step)
        said, before, s = (
            messages(group, gradients, kind),
            group.momentum(),
            group.divisor()[:FROZEN],
        )
        looks, at = first.frozen and first.choice.looks(first.compressed), first.compressed
        nbytes = first.channel.sent_bytes
        assert group.step(gradients) == [True] * size
        sent.append(first.channel.sent_bytes - nbytes)
        assert group.agree()
        for each in group.optimizers:
            assert each.choice.state() == first.choice.state()
        if looks:
            oracle.append(expected(kind, said))
            rules.append(first.choice.state()["rules"])
            assert first.counters.choice.startswith(f"of step {at}: ")
        assert first.choice.state()["rules"] == (rules[-1] if rules else {})
        if step >= WARMUP:
            mean = (1 - BETA1) * sum(map(flat, gradients))[:FROZEN] / size / s
            owed = owed + mean - (group.momentum() - BETA1 * before)[:FROZEN] / s
            largest = max(largest, float(np.abs(mean).max()))
    assert rules == oracle
    assert len({str(each) for each in rules}) > 1, "the choice changes in the run"
    left = group.owed()[:FROZEN]
    assert np.abs(owed - left).max() < 2e-6 * largest
    assert np.abs(left).max() > 1e-2 * largest
    if kind == "ranks":
        bases = {n: f"powersgd-{len(b)}+fp8" for n, b in first.quantized.bases.items()}
        assert bases.keys() == set(MATRICES)
        assert bases in rules, "the ranks of the factors that were sent"
        table = (size - 1) * (
            HEADER + 8 * len(MATRICES) * len(rank_options(codec_named(CODECS[kind])))
        )
        assert sent[WARMUP + 1] == sent[WARMUP] + table, "bytes of the choice count"
        assert sent[WARMUP + 2] < 1.03 * sent[WARMUP], "bytes of one rank for all, and padding"


@pytest.mark.parametrize("uniform", CODECS.values())
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_are_equal_in_every_bit_on_any_number_of_ranks(kind, uniform):
    for size in (2, 3):
        group, rules = replicas(kind, PerLayer(uniform, EVERY), size), set()
        for step in range(30 if kind == "ZeroOneAdam" else STEPS):
            assert group.step(drawn(size, step)) == [True] * size
            first, *others = group.optimizers
            assert all(o.choice.state() == first.choice.state() for o in others)
            rules.add(str(first.choice.state()))
        if kind == "ZeroOneAdam":
            with torch.no_grad():
                simulate([o.synchronizing() for o in group.optimizers])
        assert group.agree()
        assert len(rules) > 1
        assert first.counters.as_dict()["choice"]


def test_on_one_rank_nothing_is_chosen_and_it_is_adam():
    group = replicas("OneBitAdam", PerLayer("int4", 1), 1)
    twin = beside_adam(group, STEPS, lr=1e-2, betas=(BETA1, 0.99), weight_decay=0.0)
    assert all(map(torch.equal, group.parameters[0], twin))
    assert group.optimizers[0].choice.state() == {"rules": {}}


@pytest.mark.parametrize("uniform", CODECS.values())
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(uniform, value):
    group = replicas("OneBitAdam", PerLayer(uniform, EVERY), 2)
    first = group.optimizers[0]
    for step in range(STEPS):
        group.step(drawn(2, step))
        if first.choice.rules and first.choice.looks(first.compressed):
            break
    before, bad = first.choice.state() | {"why": first.choice.why}, drawn(2, step + 1)
    bad[1][0][3, 3] = value
    assert group.step(bad) == [False] * 2
    assert first.choice.state() | {"why": first.choice.why} == before
    assert group.step(drawn(2, step + 1)) == [True] * 2
    assert first.choice.why != before["why"], "a choice of the step that was taken"
    assert group.agree()


def trained(overlapped):
    """Weights and rules of a run, whose messages start in backward or in ``step``."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 40)),
        bucket_cap_mb=0.005,
    )
    optimizer = commpress.OneBitAdam(
        ddp.named_parameters(), codec=PerLayer("powersgd-2+fp8", EVERY), exact_steps=3
    )
    if overlapped:
        commpress.overlap(ddp, optimizer)
    else:
        commpress.keep_local(ddp)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(9):
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=draws)
        (ddp(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()], optimizer.choice.state()["rules"]


def both_ways():
    return trained(overlapped=False), trained(overlapped=True)


def test_messages_that_start_in_backward_are_chosen_alike(pool):
    results = pool.run(both_ways, size=2)
    weights, rules = results[0][0]
    assert len(rules) == 2
    for found, chosen in (each for result in results for each in result):
        assert chosen == rules
        assert equal(found, weights)


def refusals():
    wanted, group = PerLayer("int4", 2), dist.new_group([dist.get_rank()])

    def weights():
        return torch.nn.Linear(40, 40).parameters()

    calls = {
        "ShardedOneBitAdam": "divided state, whose weights come back in the same codec",
        "ShardedZeroOneAdam": "divided state, whose weights come back in the same codec",
        "OneBitAdam": "agree_over, and it adds up errors over the ranks that average",
        "Muon": "expected a name or a codec",
        "Partitioned": "expected a name or a codec",
    }
    for name, said in calls.items():
        options = {"optimizer": torch.optim.AdamW} if name == "Partitioned" else {}
        if name == "OneBitAdam":
            options = {"process_group": group, "agree_over": dist.group.WORLD, "exact_steps": 1}
        with pytest.raises(InvalidArgument, match=rf"codec is PerLayer\(uniform='int4'.*{said}"):
            getattr(commpress, name)(weights(), codec=wanted, **options)
    with pytest.raises(InvalidArgument, match="expected a name or a codec"):
        commpress.LocalUpdates(torch.optim.SGD(weights(), lr=0.1), codec=wanted)


def test_what_cannot_choose_together_is_refused(pool):
    pool.run(refusals, size=2)
