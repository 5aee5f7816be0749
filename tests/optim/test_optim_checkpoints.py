"""Saving and loading 1-bit Adam: bit for bit on as many ranks, nothing owed lost on others, from
torch's Adam."""

import copy

import numpy as np
import pytest
import torch

import commpress
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import StateMismatch
from optim_twin import boundless, equal, fill, flat, mean, noise, start
from test_onebit_adam import BETA1, BETA2, LR, replicas


@boundless
def test_one_rank_goes_on_as_adam_with_what_was_owed_in_its_momentum():
    """As far as Adam's own can be."""
    group, other = (replicas(size, variance_floor=0.0) for size in (3, 1))
    for step in range(9):
        group.step(noise(3, step))
    (o,), parts = other.optimizers, group.elastic()
    o.load_state_dict(*parts)
    s = group.divisor()
    bound = s * o.tensors.bound(0)
    before = (group.momentum() + s * group.owed()).clip(-bound, bound)
    other.step(noise(1, 9))
    wanted = BETA1 * before + (1 - BETA1) * flat(noise(1, 9)[0])
    np.testing.assert_allclose(other.momentum(), wanted, rtol=1e-4, atol=1e-5)
    assert not o.frozen


def test_a_run_begun_with_torch_goes_on():
    twin = [torch.nn.Parameter(p) for p in start()]
    adam = torch.optim.AdamW(twin, lr=LR, betas=(BETA1, BETA2), weight_decay=0.0, fused=True)
    for step in range(4):
        for p, g in zip(twin, mean(noise(2, step)), strict=True):
            p.grad = g
        adam.step()
    group = replicas(2, exact_steps=6)
    for mine, o in zip(group.parameters, group.optimizers, strict=True):
        fill(mine, twin)
        o.load_state_dict(adam.state_dict())
    for step in range(4, 6):
        for p, g in zip(twin, mean(noise(2, step)), strict=True):
            p.grad = g
        adam.step()
        group.step(noise(2, step))
    assert equal(group.parameters[0], twin)
    assert group.optimizers[0].frozen_at == 6


def test_a_state_of_another_rank_gives_what_all_share(caplog):
    group, other = replicas(2), replicas(2)
    for step in range(8):
        group.step(noise(2, step))
    state = group.optimizers[0].state_dict()
    other.optimizers[1].load_state_dict(state)
    assert "of rank 0 of 2, this is rank 1 of 2" in caplog.text
    assert torch.equal(other.optimizers[1].momentum, group.optimizers[1].momentum)
    assert not other.optimizers[1].quantized.residuals.places()
    other.optimizers[1].load_rank_state(group.optimizers[1].state_dict()["commpress"])
    mine, theirs = (r.optimizers[1].quantized.residuals.places() for r in (other, group))
    assert all(
        torch.equal(a, b)
        for x, y in zip(mine, theirs, strict=True)
        for a, b in zip(x[1:], y[1:], strict=True)
    )


def test_gradients_that_somebody_averaged_already_are_noticed(caplog):
    replicas(2).step(noise(1, 0) * 2)
    assert "commpress.overlap(ddp, optimizer)" in caplog.text
    caplog.clear()
    replicas(2).step(noise(2, 0))
    assert caplog.text == ""


MADE = {
    "OneBitAdam": lambda p: commpress.OneBitAdam(p, transport=Loopback(1).transport(0)),
    "ZeroOneAdam": lambda p: commpress.ZeroOneAdam(p, transport=Loopback(1).transport(0)),
    "OneBitLamb": lambda p: commpress.OneBitLamb(p, transport=Loopback(1).transport(0)),
}


@pytest.mark.parametrize("name", MADE)
def test_a_state_of_another_dtype_is_refused_with_both_dtypes_by_name(name):
    """As of bfloat16 adapters, which peft makes float32 where they are loaded."""
    saved, now = (
        MADE[name]([("adapter", torch.nn.Parameter(torch.ones(8, 4, dtype=dtype)))])
        for dtype in (torch.bfloat16, torch.float32)
    )
    says = (
        "^parameter 'adapter' is torch.float32, and was in half precision when "
        ".*autocast_adapter_dtype=False"
    )
    with pytest.raises(StateMismatch, match=says):
        now.load_state_dict(saved.state_dict())


def test_rows_that_are_missing_are_not_taken_for_zeros():
    p = torch.nn.Parameter(torch.ones(40))
    o = commpress.ShardedOneBitAdam([p], transport=Loopback(1).transport(0))
    state = o.state_dict()
    for damage, says in (
        (lambda part: part["shards"].clear(), "0 of the 40 elements of parameter '#00000'"),
        (lambda part: part["shards"][0].update(begin=1), "elements 1 to 41 of parameter 0, which"),
    ):
        bad = copy.deepcopy(state)
        damage(bad["commpress"])
        with pytest.raises(StateMismatch, match=says):
            o.load_state_dict(bad)
