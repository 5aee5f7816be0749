"""Under DistributedDataParallel, rounds started by the gradient hook give the bits of rounds in
``step``."""

import io
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import InvalidArgument
from commpress.schedules import DoublingIntervals
from ddp_twin import Net, Plan, batch

STEPS = 10


def optimizer_of(name, model, **options):
    common = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "min_numel": 64} | options
    if name == "zero-one":
        return commpress.ZeroOneAdam(
            model.named_parameters(),
            sync=DoublingIntervals(start=5, period=100),
            variance_updates=2,
            **common,
        )
    cls = commpress.OneBitLamb if name == "lamb" else commpress.OneBitAdam
    return cls(model.named_parameters(), exact_steps=4, **common)


def train(name, overlapped, accumulate=1, poisoned=(), options=None, bucket_mb=0.01, scale=0.0):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    optimizer = optimizer_of(name, model, **(options or {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2) if scale else None
    run = model
    if overlapped:
        run = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        commpress.overlap(run, optimizer, grad_scaler=scaler)
    started = []
    for step in range(STEPS):
        for part in range(accumulate):
            last = part == accumulate - 1
            with nullcontext() if last or not overlapped else run.no_sync():
                x, y = batch(Plan(), rank, step, part)
                loss = (run(x, "left right") - y).square().mean()
                if step in poisoned and rank == 1:
                    loss = loss * float("inf")
                (scaler.scale(loss) if scaler else loss).backward()
        if overlapped:
            started.append(len(optimizer.bucket_rounds._futures))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], started, optimizer.counters.as_dict()


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("onebit", "sign"),
        ("zero-one", "sign"),
        ("lamb", "sign"),
        ("onebit", "powersgd-2"),
        ("zero-one", "powersgd-2"),
    ],
)
def test_overlapped_rounds_give_the_same_bits(pool, name, codec):
    options = {"codec": codec}
    plain, overlapped = (pool.run(train, name, each, 1, (), options) for each in (False, True))
    for (a, _, _), (b, started, counters) in zip(plain, overlapped, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert max(started) > 1, "no bucket was under way before step()"
        # more messages, more headers
        assert counters["compressed_bytes"] >= plain[0][2]["compressed_bytes"] > 0
        assert counters["exact_bytes"] >= plain[0][2]["exact_bytes"] > 0
        if name == "zero-one":
            assert counters["local_steps"] > 0
            assert started.count(0) == counters["local_steps"]
            assert counters["local_bytes"] == 0
    if name != "zero-one":  # whose last window is open
        assert all(
            torch.equal(x, y) for x, y in zip(overlapped[0][0], overlapped[1][0], strict=True)
        )


def test_accumulation_sends_once(pool):
    plain, overlapped = pool.run(train, "onebit", False, 3), pool.run(train, "onebit", True, 3)
    for (a, _, _), (b, _, counters) in zip(plain, overlapped, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert counters["compressed_rounds"] == STEPS - 4


@pytest.mark.parametrize("scale", [0.0, 1024.0])
def test_a_bad_gradient_skips_the_step_on_all_ranks(pool, scale):
    results = pool.run(train, "onebit", True, 1, (2, 7), None, 0.01, scale)
    assert all(torch.equal(x, y) for x, y in zip(results[0][0], results[1][0], strict=True))
    assert all(torch.isfinite(p).all() for p in results[0][0])
    assert [counters["skipped_steps"] for _, _, counters in results] == [2, 2]


def test_clipping_waits_for_step(pool):
    options = {"max_grad_norm": 0.1}
    plain, overlapped = (pool.run(train, "onebit", o, 1, (), options) for o in (False, True))
    for (a, _, _), (b, started, _) in zip(plain, overlapped, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert max(started) == 0


def two_backwards(twice):
    """Two backward passes before a step, without no_sync: as one on the sum."""
    torch.manual_seed(0)
    model = Net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = commpress.overlap(ddp, optimizer_of("onebit", model))
    for step in range(STEPS):
        x, y = batch(Plan(), dist.get_rank(), step, 0)
        if twice:
            for _ in range(2):
                (0.5 * (ddp(x, "left right") - y).square().mean()).backward()
        else:
            with ddp.no_sync():
                (0.5 * (ddp(x, "left right") - y).square().mean()).backward()
            (0.5 * (ddp(x, "left right") - y).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_a_second_backward_replaces_what_was_started(pool):
    for a, b in zip(pool.run(two_backwards, True), pool.run(two_backwards, False), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def unfrozen_late(name, overlapped):
    """Parameters come between a backward and its step, when rounds are under way or a window is
    open."""
    torch.manual_seed(0)
    model = Net()
    late = list(dict(model.named_parameters()).items())[-2:]
    for _, p in late:
        p.requires_grad = False
    rest = torch.nn.ParameterDict(
        {n.replace(".", "/"): p for n, p in model.named_parameters() if p.requires_grad}
    )
    optimizer = optimizer_of(name, rest)
    run = DistributedDataParallel(model, bucket_cap_mb=0.01) if overlapped else model
    if overlapped:
        commpress.overlap(run, optimizer)
    for step in range(14):
        x, y = batch(Plan(), dist.get_rank(), step, 0)
        (run(x, "left right") - y).square().mean().backward()
        if step == 8:
            optimizer.add_param_group({"params": late, "lr": 3e-3})
            for _, p in late:
                p.requires_grad = True
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], optimizer.counters.exact_rounds


@pytest.mark.parametrize("name", ["onebit", "zero-one"])
def test_parameters_that_come_late_give_the_same_bits(pool, name):
    plain, overlapped = (pool.run(unfrozen_late, name, each) for each in (False, True))
    for (a, rounds), (b, same) in zip(plain, overlapped, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert rounds == same


def wrong():
    model = Net()
    ddp = DistributedDataParallel(model)
    with pytest.raises(InvalidArgument, match="expected OneBitAdam"):
        commpress.overlap(ddp, torch.optim.Adam(model.parameters()))
    with pytest.raises(InvalidArgument, match="does not have 2 parameters of ddp, such as 'embed"):
        commpress.overlap(
            ddp, commpress.OneBitAdam([p for n, p in model.named_parameters() if "embed" not in n])
        )
    with pytest.raises(InvalidArgument, match="expected a DistributedDataParallel"):
        commpress.overlap(model, commpress.OneBitAdam(model.parameters()))


def test_wrong_arguments_are_named(pool):
    pool.run(wrong)


def through_a_file():
    """A DDP model that was saved and loaded: overlap again, with an optimizer of the loaded one."""
    ddp = DistributedDataParallel(torch.nn.Linear(24, 8))
    for step in range(2):
        optimizer = commpress.overlap(
            ddp, commpress.OneBitAdam(ddp.parameters(), lr=1e-3, exact_steps=2)
        )
        ddp(torch.ones(2, 24)).square().mean().backward()
        optimizer.step()
        if step == 0:
            torch.save(ddp, file := io.BytesIO())
            file.seek(0)
            ddp = torch.load(file, weights_only=False)
    return optimizer.steps_done


def test_a_model_that_was_saved_under_an_optimizer_goes_on(pool):
    assert pool.run(through_a_file) == [1, 1]
