"""Saving and loading 1-bit Adam: bit for bit on as many ranks, nothing owed lost on others, from
torch's Adam."""

import copy
import io

import numpy as np
import pytest
import torch

import commpress
import test_onebit_lamb
import test_sharded_adam
import test_sharded_zero_one
import test_zero_one_adam
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import StateMismatch
from optim_twin import boundless, equal, fill, flat, mean, noise, owed, start, state_of
from test_onebit_adam import BETA1, BETA2, LR, replicas

KINDS = {
    "1-bit Adam": replicas,
    "1-bit LAMB": test_onebit_lamb.replicas,
    "0/1 Adam": test_zero_one_adam.replicas,
    "sharded 1-bit Adam": test_sharded_adam.replicas,
    "sharded 0/1 Adam": test_sharded_zero_one.replicas,
}


def stored(state):
    """Plain numbers and tensors, or it does not load."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def carried(kind, at, size, how):
    """A group of three, and one of ``size`` that knows its state: each rank's own file, or elastic
    ones, or that of rank 0, as trainers save it, and then every rank's part."""
    group, other = KINDS[kind](3), KINDS[kind](size, lr=0.5)
    for step in range(at):
        group.step(noise(3, step))
    states = group.elastic() if how == "elastic" else [o.state_dict() for o in group.optimizers]
    states = [stored(state) for state in states]
    for rank, (mine, o) in enumerate(zip(other.parameters, other.optimizers, strict=True)):
        fill(mine, group.parameters[rank if how == "own" else 0])
        if how == "parts":
            o.load_state_dict(states[0])
            o.load_rank_state(*[state["commpress"] for state in states])
        else:
            o.load_state_dict(*(states[rank : rank + 1] if how == "own" else states))
    return group, other


@pytest.mark.parametrize("how", ["parts", "elastic"])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_all_ranks_fit_any_number_of_ranks(kind, size, how):
    group, other = carried(kind, 8, size, how)
    before = owed(group.optimizers)
    assert np.abs(before).max() > 1e-3
    # rows of owners owe nothing: the gap to their master weights is said in the next step
    if "sharded" in kind:
        before = np.mean([owed([o]) for o in group.optimizers], axis=0)
        now = np.mean([owed([o]) for o in other.optimizers], axis=0)
        np.testing.assert_allclose(now, before, atol=1e-6)
        for name in ("master", "momentum", "variance"):
            whole = test_sharded_adam.together
            np.testing.assert_array_equal(whole(other, name), whole(group, name))
    else:
        np.testing.assert_allclose(other.owed(), before, atol=1e-6)
        assert torch.equal(other.optimizers[0].momentum, group.optimizers[0].momentum)
    for step in range(8, 12):
        assert all(other.step(noise(size, step)))
    assert all(
        torch.equal(p, q)
        for mine in other.parameters
        for p, q in zip(mine, other.parameters[0], strict=True)
    )


@pytest.mark.parametrize("how", ["own", "parts"])
@pytest.mark.parametrize("at", [3, 5, 8, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_ranks_go_on_in_every_bit(kind, at, how):
    group, other = carried(kind, at, 3, how)
    for step in range(at, at + 6):
        group.step(noise(3, step))
        other.step(noise(3, step))
    assert equal(state_of(group), state_of(other))


@pytest.mark.parametrize("kind", ["0/1 Adam", "sharded 0/1 Adam"])
def test_another_number_of_ranks_refuses_what_was_saved_inside_a_window(kind):
    with pytest.raises(
        StateMismatch,
        match=r"saved 2 steps into a window.*and 2 go on: call optimizer.synchronize\(\)",
    ):
        carried(kind, 10, 2, "parts")


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


def test_states_that_do_not_fit_say_so():
    group = replicas(2)
    group.step(noise(2, 0))
    state = group.optimizers[0].state_dict()
    with pytest.raises(StateMismatch, match="groups of"):
        replicas(2, ((5,),)).optimizers[0].load_state_dict(state)
    with pytest.raises(StateMismatch, match="shape"):
        replicas(2, ((40, 50), (700,), (8,))).optimizers[0].load_state_dict(state)


def damages(kind, state):
    """Ways in which a state may not fit, each with what the error says."""
    part = state["commpress"]
    for key in part["schedule"]:
        yield (
            (lambda bad, key=key: bad["commpress"]["schedule"].pop(key)),
            f"schedule of the state has no '{key}'",
        )
    for key in ("facts", "full", "quantized", "schedule"):
        yield (lambda bad, key=key: bad["commpress"].pop(key)), f"state of a rank has no '{key}'"

    def residual(bad):
        first = next(iter(bad["commpress"]["quantized"]["residuals"].values()))
        first["sent"] = torch.ones(2001)

    yield residual, "2001 residuals of '#00000'"
    if "trips" in part["schedule"]:
        yield (
            (lambda bad: bad["commpress"]["schedule"]["trips"].pop()),
            "2 counts of large gradients, expected 3",
        )
    if "sharded" in kind:
        shape = r"'#00000' with shape \(50, 40\), expected \(40, 50\)"
        yield (lambda bad: bad["commpress"]["shapes"].__setitem__(0, [50, 40])), shape
        yield (
            (lambda bad: bad["commpress"]["shards"].pop(1)),
            r"0 of the \d+ elements of parameter '#00001' \(700,\) that",
        )
        yield (
            (lambda bad: bad["commpress"]["tensors"]["frozen_at"].pop()),
            "2 'frozen_at' of parameters, expected 3",
        )
    else:
        shape = r"'exp_avg' of parameter '#00001' with shape \(3,\), expected \(700,\)"
        yield (lambda bad: bad["state"][1].update(exp_avg=torch.ones(3))), shape
        yield (
            (lambda bad: bad["state"][2].pop("exp_avg_sq")),
            r"parameter '#00002' \(7,\) has no 'exp_avg_sq'",
        )
        yield (lambda bad: bad.pop("param_groups")), "has no 'param_groups'"


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_does_not_fit_changes_nothing(kind):
    group = KINDS[kind](2)
    for step in range(8):
        group.step(noise(2, step))
    first = group.optimizers[0]
    state = copy.deepcopy(first.state_dict())
    for step in range(8, 11):
        group.step(noise(2, step))
    before, said = state_of(group), repr(first.state_dict())
    for damage, what in damages(kind, state):
        bad = copy.deepcopy(state)
        damage(bad)
        with pytest.raises(StateMismatch, match=what):
            first.load_state_dict(bad)
        assert equal(state_of(group), before), what
        assert repr(first.state_dict()) == said, what
    first.load_state_dict(state)
    assert first.steps_done == 8
