"""PowerSGD as codec of the optimizers: against DDP's hook, exact steps and what must
add up."""

import copy

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from commpress.codecs import LowRankCodec
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import StateMismatch
from commpress.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from commpress.schedules import DoublingIntervals
from optim_twin import Replicas, boundless, equal, noise, start, state_of, telescoped

BETA1, BETA2, LR, WARMUP, AT, STEPS = 0.9, 0.99, 1e-2, 4, 7, 14
SHAPES = ((40, 50), (24, 64), (40, 50), (600,), (7,))
CODEC = "powersgd-2+fp8"
COMMON = {"lr": LR, "betas": (BETA1, BETA2), "min_numel": 0, "weight_decay": 0.1}


def named(parameters):
    return [(f"p{i}", p) for i, p in enumerate(parameters)]


def onebit(parameters, transport, **options):
    return OneBitAdam(
        named(parameters), transport=transport, **COMMON | {"exact_steps": WARMUP} | options
    )


def lamb(parameters, transport, **options):
    return OneBitLamb(
        named(parameters), transport=transport, **COMMON | {"exact_steps": WARMUP} | options
    )


def zero_one(parameters, transport, **options):
    sync = DoublingIntervals(start=WARMUP, period=100)
    return ZeroOneAdam(
        named(parameters),
        transport=transport,
        **COMMON | {"variance_updates": 1, "sync": sync} | options,
    )


MAKERS = [onebit, zero_one, lamb]
every_kind = pytest.mark.parametrize("make", MAKERS)


def replicas(make, size, shapes=SHAPES, **options):
    return Replicas(lambda p, t: make(p, t, **options), size, shapes)


def numbers(group):
    """All that a step may change."""
    learnt = [o.quantized.choices() for o in group.optimizers]
    return [
        state + [*each["bases"].values()]
        for state, each in zip(state_of(group), learnt, strict=True)
    ]


class Sum(torch.nn.Module):
    """Gradients are what it is called with."""

    def __init__(self):
        super().__init__()
        for i, p in enumerate(start(SHAPES)):
            self.register_parameter(f"p{i}", torch.nn.Parameter(p))

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True))


@every_kind
def test_at_full_rank_steps_are_exact(make):
    moves = []
    for codec in ("none", LowRankCodec(64, min_rate=0.01)):
        group = replicas(make, 3, codec=codec, spiky_codec="none")
        for step in range(STEPS):
            assert group.step(noise(3, step, SHAPES)) == [True] * 3
        moves.append(
            torch.cat(
                [
                    (p - q).detach().view(-1)
                    for p, q in zip(group.parameters[0], start(SHAPES), strict=True)
                ]
            )
        )
        assert "none" in str(codec) or set(group.optimizers[0].quantized.bases) == {
            "p0",
            "p1",
            "p2",
        }
    assert not torch.equal(*moves), "nothing travelled as a product"
    assert float((moves[0] - moves[1]).norm()) < 1e-4 * float(moves[0].norm())


@every_kind
def test_what_all_ranks_know_of_momentum_is_not_sent_again(make):
    """Without gradients it decays as Adam's, however little of a matrix the codec can say."""
    group = replicas(
        make,
        2,
        codec="powersgd-1",
        **({"sync": "every", "exact_steps": WARMUP} if make is zero_one else {}),
    )
    for step in range(WARMUP):
        group.step(noise(2, step, SHAPES))
    before = group.momentum()
    for step in range(WARMUP, WARMUP + 6):
        group.step([[torch.zeros_like(g) for g in mine] for mine in noise(2, step, SHAPES)])
    assert group.optimizers[0].counters.compressed_rounds >= 2
    np.testing.assert_allclose(group.momentum(), BETA1**6 * before, rtol=1e-4, atol=1e-7)


@boundless
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("exact_codec", ["none", "int8"])
def test_the_trajectory_telescopes(exact_codec, size):
    """(1 − β1)·Σ d_t + β1·d_T = R_0 − R_T, where R_0 is what the exact steps before the freeze left
    behind, in rows."""
    group = replicas(
        onebit, size, codec=CODEC, exact_codec=exact_codec, variance_floor=0.0, weight_decay=0.0
    )
    for step in range(WARMUP):
        group.step(noise(size, step, SHAPES))
    owed = group.owed()
    assert (np.abs(owed).max() > 0.01) == (exact_codec != "none")
    for total in telescoped(group, range(WARMUP, WARMUP + 20), BETA1):
        np.testing.assert_allclose(total, owed - group.owed(), rtol=1e-5, atol=5e-5)
    assert np.abs(group.owed()).max() > 1e-2, "nothing was compressed"


def test_a_state_of_another_rank_of_matrices_is_refused():
    group, other = replicas(onebit, 2, codec="powersgd-2"), replicas(onebit, 2, codec="powersgd-4")
    for step in range(AT):
        group.step(noise(2, step, SHAPES))
        other.step(noise(2, step, SHAPES))
    before = numbers(other)
    with pytest.raises(StateMismatch, match=r"the basis of parameter .* has shape"):
        other.optimizers[0].load_state_dict(group.optimizers[0].state_dict())
    assert equal(numbers(other), before)


def test_torchs_tools_carry_all_but_what_is_owed_and_learnt():
    """Quanta that one rank knew and another did not would make them send different messages."""
    models = [Sum(), Sum(), Sum()]
    optimizers = [
        onebit(m.parameters(), t, codec=CODEC)
        for m, t in zip(models, Loopback(3).transports(), strict=True)
    ]
    group = replicas(onebit, 3, codec=CODEC)
    group.optimizers, group.parameters = optimizers, [list(m.parameters()) for m in models]
    for step in range(AT):
        group.step(noise(3, step, SHAPES))
    assert optimizers[0].frozen
    carried = copy.deepcopy(get_optimizer_state_dict(models[0], optimizers[0]))
    models[2] = Sum()  # a rank that begins anew, among ranks that go on
    models[2].load_state_dict(models[0].state_dict())
    optimizers[2] = onebit(models[2].parameters(), optimizers[2].channel.inner, codec=CODEC)
    group.parameters[2] = list(models[2].parameters())
    for model, o in zip(models, optimizers, strict=True):
        set_optimizer_state_dict(model, o, copy.deepcopy(carried))
        o.channel.take(100 - o.channel.take())  # who goes on and who begins number alike
    for step in range(AT, STEPS):
        assert group.step(noise(3, step, SHAPES)) == [True] * 3
        assert group.agree()


def test_one_rank_can_ask_all_for_a_thaw():
    """In the headers of factors: nothing else travels here."""
    shapes = ((40, 50),)
    group = replicas(onebit, 3, shapes, codec=CODEC, spiky_codec="none")
    for step in range(WARMUP + 12):
        gradients = noise(3, step, shapes)
        if step >= WARMUP + 4:
            gradients[2][0] *= 1e4
        assert group.step(gradients) == [True] * 3
        assert group.agree()
    for o in group.optimizers:
        assert o.counters.woken_tensors == 1
        assert not o.tensors.frozen.any()
    assert not group.owed().any()
