"""``torch.save`` of a hook's state, as torch documents it for hooks that have one, and of a DDP
model with its hook."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import InvalidArgument
from ddp_twin import Net

FIRST, ALL = range(4), range(8)


def through_a_file(thing):
    """The value after torch.save and torch.load; code is loaded, as of torch's PowerSGDState."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train(ddp, steps):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in steps:
        generator = torch.Generator().manual_seed(7 * step + dist.get_rank())
        x, y = torch.randn(6, 24, generator=generator), torch.randn(6, 8, generator=generator)
        (ddp(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(seed=0):
    torch.manual_seed(seed)
    return DistributedDataParallel(Net(), bucket_cap_mb=0.01)


def made(ddp, how, options):
    if how == "compress":
        return commpress.compress(ddp, **options)
    state = commpress.CompressedState(**options)
    ddp.register_comm_hook(state, commpress.compressed_allreduce_hook)
    return state


def what_is_left(state):
    residuals = state.state_dict()["residuals"]
    return {name: kept["sent"] for name, kept in residuals.items()}


def resumed(how, options, way):
    """Weights, residuals and counters of a run that was saved and loaded in the middle, and of one
    that was not."""
    ddp = wrapped()
    state = made(ddp, how, options)
    train(ddp, FIRST)
    if way == "state":
        saved = through_a_file(
            {"model": ddp.state_dict(), "hook": commpress.compressed_allreduce_hook, "state": state}
        )
        other = wrapped(seed=1)
        other.load_state_dict(saved["model"])
        hook, loaded = saved["hook"], saved["state"]
    elif way == "model":
        other = through_a_file(ddp)
        ((hook, loaded),) = other._comm_hooks
    else:
        other, hook, loaded = (
            wrapped(seed=1),
            commpress.compressed_allreduce_hook,
            copy.deepcopy(state),
        )
        other.load_state_dict(ddp.state_dict())
    # before a word to anybody
    assert loaded.state_dict()["residuals"].keys() == state.state_dict()["residuals"].keys()
    other.register_comm_hook(loaded, hook)
    train(other, ALL[4:])
    train(ddp, ALL[4:])
    one, two = (
        torch.cat([p.detach().view(-1) for p in each.parameters()]) for each in (ddp, other)
    )
    return (
        one,
        two,
        what_is_left(state),
        what_is_left(loaded),
        state.counters.steps,
        loaded.counters.steps,
    )


@pytest.mark.parametrize(
    ("how", "options", "way", "size"),
    [
        ("compress", {"codec": "sign", "exclude": ("head",)}, "state", 2),
        ("compress", {"codec": "int8"}, "state", 3),
        ("compress", {"codec": "powersgd-2"}, "state", 2),
        ("state", {"codec": "sign"}, "state", 2),
        ("compress", {"codec": "sign"}, "model", 2),
        ("compress", {"codec": "sign"}, "copy", 2),
        ("compress", {"codec": "sign", "topology": "2x1"}, "state", 2),
    ],
    ids=["named", "int8", "low rank", "numbered", "the DDP model", "deepcopy", "between nodes"],
)
def test_a_saved_state_goes_on_bit_for_bit(pool, how, options, way, size):
    for one, two, left, loaded, steps, more in pool.run(resumed, how, options, way, size=size):
        assert torch.equal(one, two)
        assert left.keys() == loaded.keys()
        assert all(torch.equal(left[name], loaded[name]) for name in left)
        assert any(kept.any() for kept in left.values())
        assert steps == more == len(ALL)


def with_a_scaler():
    ddp = wrapped()
    scaler = torch.amp.GradScaler("cpu")
    state = commpress.compress(ddp, grad_scaler=scaler)
    train(ddp, FIRST)
    loaded = through_a_file(state)
    other = wrapped()
    other.register_comm_hook(loaded, commpress.compressed_allreduce_hook)
    with pytest.raises(InvalidArgument) as refused:
        train(other, FIRST)
    loaded.reconnect(grad_scaler=scaler, named_parameters=other.module.named_parameters())
    return (
        str(refused.value),
        loaded.grad_scaler is scaler,
        what_is_left(loaded).keys() == what_is_left(state).keys(),
    )


def test_what_cannot_be_saved_must_be_given_again(pool):
    for said, taken, same in pool.run(with_a_scaler):
        assert "call state.reconnect(grad_scaler=...) on every rank" in said
        assert taken
        assert same


def another_model():
    ddp = wrapped()
    state = commpress.compress(ddp)
    train(ddp, range(1))
    other = DistributedDataParallel(nn.Linear(24, 8))
    other.register_comm_hook(through_a_file(state), commpress.compressed_allreduce_hook)
    with pytest.raises(commpress.CommpressError) as refused:
        train(other, range(1))
    return str(refused.value)


def test_another_model_is_refused(pool):
    for said in pool.run(another_model):
        assert "where the saved state expects" in said


def early():
    ddp = wrapped()
    loaded = through_a_file(commpress.compress(ddp))
    other = wrapped()
    other.register_comm_hook(loaded, commpress.compressed_allreduce_hook)
    with pytest.raises(InvalidArgument) as refused:
        train(other, range(1))
    other = wrapped()
    loaded.reconnect(named_parameters=other.module.named_parameters())
    other.register_comm_hook(loaded, commpress.compressed_allreduce_hook)
    train(other, range(1))
    return str(refused.value), sorted(what_is_left(loaded))


def test_a_state_saved_before_its_first_backward(pool):
    for said, names in pool.run(early):
        assert "named_parameters=ddp.module.named_parameters()" in said
        assert "left.weight@0" in names


def of_an_optimizer():
    """Overlap again, with the optimizer of the loaded model."""
    ddp = wrapped()
    optimizer = commpress.overlap(
        ddp, commpress.OneBitAdam(ddp.parameters(), lr=1e-3, exact_steps=2)
    )
    for _ in range(3):
        ddp(torch.ones(2, 24)).square().mean().backward()
        optimizer.step()
    other = through_a_file(ddp)
    again = commpress.overlap(
        other, commpress.OneBitAdam(other.parameters(), lr=1e-3, exact_steps=2)
    )
    other(torch.ones(2, 24)).square().mean().backward()
    again.step()
    return again.steps_done


def test_a_model_under_an_optimizer_of_ours(pool):
    assert pool.run(of_an_optimizer) == [1, 1]
