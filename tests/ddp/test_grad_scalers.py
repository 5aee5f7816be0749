"""GradScalers of all ranks keep one scale, whatever overflows where, with the hook and with every
optimizer."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import InvalidArgument, NonFiniteGradient
from commpress.optim import ShardedOneBitAdam, ShardedZeroOneAdam
from commpress.schedules import DoublingIntervals
from small_store import open_store
from variants import few

# step: the rank whose gradients overflow
STEPS, FIRST, BAD = 14, 1024.0, {2: 0, 5: -1, 6: -1, 10: 0}
OPTIONS = {"lr": 1e-2, "min_numel": 64}


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8))


def hooked(codec, **options):
    def make(model, scaler, folder):
        ddp = DistributedDataParallel(model)
        commpress.compress(ddp, codec, min_numel=64, grad_scaler=scaler, **options)
        return ddp, torch.optim.SGD(model.parameters(), lr=1e-2)

    return make


def alone(make):
    return lambda model, scaler, folder: (model, make(model.parameters(), grad_scaler=scaler))


def overlapped(make):
    def prepare(model, scaler, folder):
        ddp, optimizer = (
            DistributedDataParallel(model, bucket_cap_mb=1e-3),
            make(model.parameters()),
        )
        commpress.overlap(ddp, optimizer, grad_scaler=scaler)
        return ddp, optimizer

    return prepare


def offloaded(model, scaler, folder):
    store = open_store(folder / f"rank-{dist.get_rank()}")
    return model, commpress.Partitioned(
        model.parameters(), torch.optim.AdamW, store=store, chunk_mb=0.1, grad_scaler=scaler
    )


ONE_BIT = {
    "OneBitAdam": lambda p, **options: commpress.OneBitAdam(p, exact_steps=4, **OPTIONS, **options),
    "OneBitLamb": lambda p, **options: commpress.OneBitLamb(p, exact_steps=4, **OPTIONS, **options),
    "ZeroOneAdam": lambda p, **options: commpress.ZeroOneAdam(
        p, sync="every", variance_updates=2, **OPTIONS, **options
    ),
    "ShardedOneBitAdam": lambda p, **options: ShardedOneBitAdam(
        p, exact_steps=4, **OPTIONS, **options
    ),
    "ShardedZeroOneAdam": lambda p, **options: ShardedZeroOneAdam(
        p, sync="every", variance_updates=2, **OPTIONS, **options
    ),
}
WAYS = {
    "hook sign": hooked("sign"),
    "hook topk": hooked("topk-64"),
    "Partitioned": alone(
        lambda p, **options: commpress.Partitioned(p, torch.optim.AdamW, codec="sign", **options)
    ),
    "Partitioned with a store": offloaded,
    **{name: alone(make) for name, make in ONE_BIT.items()},
    **{
        f"{name} overlapped": overlapped(ONE_BIT[name])
        for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
    },
}


def expected(overflows):
    """Loss scales of a scaler that halves after an overflow and doubles after three steps
    without."""
    scale, good, scales = FIRST, 0, []
    for overflow in overflows:
        good = 0 if overflow else good + 1
        scale *= 0.5 if overflow else 2.0 if good == 3 else 1.0
        good %= 3
        scales.append(scale)
    return scales


def train(way, folder, make=None, after=lambda: None):
    rank, model = dist.get_rank(), model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=3)
    run, optimizer = (make or WAYS[way])(model, scaler, folder)
    scales = []
    for step in range(STEPS):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = run(x).square().mean()
        if step in BAD and rank == BAD[step] % dist.get_world_size():
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after()
    return scales, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("way", "size"), few(WAYS, [2, 1, 3]))
def test_scales_fall_and_grow_together(pool, tmp_path, way, size):
    first, *others = pool.run(train, way, tmp_path, size=size)
    assert first[0] == expected([step in BAD for step in range(STEPS)])
    assert all(bool(p.isfinite().all()) for p in first[1])
    assert any(
        not torch.equal(p, q) for p, q in zip(first[1], model_of().parameters(), strict=True)
    )
    for scales, weights in others:
        assert scales == first[0]
        assert all(torch.equal(p, q) for p, q in zip(first[1], weights, strict=True))


def train_locally(name, folder):
    made = []

    def make(parameters, **options):
        made.append(
            {"ZeroOneAdam": commpress.ZeroOneAdam, "ShardedZeroOneAdam": ShardedZeroOneAdam}[name](
                parameters,
                sync=DoublingIntervals(start=3, period=100, longest=2),
                variance_updates=2,
                **OPTIONS,
                **options,
            )
        )
        return made[0]

    counts = []
    scales, _ = train(
        name, folder, alone(make), after=lambda: counts.append(made[0].counters.local_steps)
    )
    return scales, [
        step for step in range(STEPS) if counts[step] > (counts[step - 1] if step else 0)
    ]


@pytest.mark.parametrize("name", ["ZeroOneAdam", "ShardedZeroOneAdam"])
def test_a_step_without_communication_changes_no_scale(pool, tmp_path, name):
    """There what overflows on one rank is left out there, and nobody else knows."""
    first, *others = pool.run(train_locally, name, tmp_path, size=3)
    scales, local = first
    assert any(step in BAD for step in local), local
    assert any(step not in local for step in BAD)
    assert scales == expected([step in BAD and step not in local for step in range(STEPS)])
    assert all(other == first for other in others)


def refused(name):
    model, scaler = model_of(), torch.amp.GradScaler("cpu")
    optimizer = ONE_BIT[name](model.parameters())
    scaler.scale(model(torch.ones(1, 16)).sum()).backward()
    with pytest.raises(InvalidArgument, match="pass it as grad_scaler="):
        scaler.step(optimizer)
    return True


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ONE_BIT)
def test_a_scaler_that_the_optimizer_does_not_know_is_refused(pool, name, size):
    assert all(pool.run(refused, name, size=size))


def raising():
    model, scaler = model_of(), torch.amp.GradScaler("cpu", init_scale=FIRST)
    optimizer = ONE_BIT["OneBitAdam"](model.parameters(), grad_scaler=scaler, on_nonfinite="raise")
    loss = model(torch.ones(1, 16)).sum() * (float("nan") if dist.get_rank() else 1.0)
    scaler.scale(loss).backward()
    with pytest.raises(NonFiniteGradient):
        scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_scales_agree_after_an_error_too(pool):
    assert pool.run(raising) == [FIRST / 2] * 2
