"""Partitioned optimizers on real ranks equal DistributedDataParallel with the plain optimizer, bit
for bit."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commpress
from commpress.collectives.frame import HEADER
from commpress.errors import InvalidArgument, Mismatch, NonFiniteGradient
from small_store import open_store
from zero_twin import (
    Masters,
    Net,
    Plan,
    equal,
    equal_states,
    loss_of,
    made,
    partitioned,
    tensor_bytes,
    values,
    with_ddp,
    with_partitioned,
    without_older_objects,
)

# ---------------------------------------------------------------- equality


def compare(plan, stage):
    parameters, state, losses = with_ddp(plan)
    model, optimizer, own = with_partitioned(plan, stage=stage)
    assert own == losses
    assert equal(values(model), parameters)
    whole = optimizer.state_dict()["state"]
    # Adagrad has a state for these, never used
    frozen = {number for number in state["state"] if number not in whole}
    assert len(frozen) == (2 if plan.optimizer is torch.optim.Adagrad else 0)
    equal_states(whole, {n: one for n, one in state["state"].items() if n not in frozen})
    optimizer.close()
    return len(optimizer.buckets)


@pytest.mark.parametrize(
    ("plan", "stage", "size"),
    [
        (Plan(steps=20, accumulate=2, max_norm=0.5), 1, 2),
        (Plan(steps=20, accumulate=2, max_norm=0.5), 2, 3),
        (Plan(steps=4, optimizer=torch.optim.Adagrad, options={"lr": 1e-2}), 2, 2),
    ],
    ids=["stage 1", "stage 2", "Adagrad"],
)
def test_equals_ddp_with_clipping_and_accumulation(pool, plan, stage, size):
    assert min(pool.run(compare, plan, stage, size=size)) > 3


def reduced_every_time(stage):
    """Without no_sync stage 1 reduces the sum again, stage 2 adds the means up: equal to the sum up
    to rounding."""
    plan = Plan(steps=3, accumulate=3, options={"lr": 1e-2, "eps": 1e-3})
    model, optimizer, _ = with_partitioned(replace(plan, sync_every=True), stage=stage)
    other, second, _ = with_partitioned(plan, stage=stage)
    optimizer.close()
    second.close()
    same = equal(values(model), values(other))
    return same, max(
        float((a - b).abs().max()) for a, b in zip(values(model), values(other), strict=True)
    )


def test_accumulation_without_no_sync(pool):
    assert all(same for same, _ in pool.run(reduced_every_time, 1))
    assert all(error < 1e-4 for _, error in pool.run(reduced_every_time, 2))


def used_twice(remember):
    """Weights after a step through one block twice; with ``remember`` each use has a backward of
    its own inside the backward."""
    torch.manual_seed(0)
    block, head = torch.nn.Linear(12, 12), torch.nn.Linear(12, 3)
    parameters = [*block.parameters(), *head.parameters()]
    optimizer = commpress.Partitioned(parameters, torch.optim.SGD, lr=0.1, bucket_mb=1e-5)
    x = torch.randn(4, 12).mul_(1 + dist.get_rank()).requires_grad_()
    for _ in range(2):
        x = checkpoint(block, x, use_reentrant=True).tanh() if remember else block(x).tanh()
    head(x).square().sum().backward()
    optimizer.step()
    return [p.detach().clone() for p in parameters]


def test_a_gradient_that_comes_after_its_bucket_counts(pool):
    for one, other in zip(pool.run(used_twice, True), pool.run(used_twice, False), strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)


def with_errors(stage, options, at):
    """``at``: steps before which a backward ends with an error in its middle, and counts for
    nothing."""
    plan = Plan(partitioned={"bucket_mb": 0.004, **options})
    model = made(plan)
    optimizer = partitioned(plan, model, stage=stage)

    def fail(gradient):
        raise ValueError("an error in the middle of backward")

    for step in range(4):
        if step in at:
            handle = model.middle[0].weight.register_hook(fail)
            with pytest.raises(ValueError, match="middle"):
                loss_of(model, model, dist.get_rank(), step, 7).backward()
            handle.remove()
            optimizer.zero_grad()
        loss_of(model, model, dist.get_rank(), step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return values(model)


@pytest.mark.parametrize(
    ("options", "stage"),
    [({}, 1), ({"codec": "int8"}, 2), ({"codec": "powersgd-2"}, 2)],
    ids=str,
)
def test_a_backward_that_ended_with_an_error_leaves_nothing_behind(pool, stage, options):
    wanted = pool.run(with_errors, stage, options, ())
    for own, other in zip(pool.run(with_errors, stage, options, (1, 2)), wanted, strict=True):
        assert equal(own, other)


# ---------------------------------------------------------- half precision, AMP, what is not finite


def masters(dtype):
    """bfloat16 weights equal a float32 master trained on the float32 mean of bfloat16 gradients,
    rounded."""
    plan = Plan(steps=5, dtype=dtype, options={"lr": 1e-2, "weight_decay": 0.0}, decay=1.0)
    model, optimizer, _ = with_partitioned(plan, stage=2)
    optimizer.close()
    rank, size, other = dist.get_rank(), dist.get_world_size(), made(plan)
    twin = Masters(other.parameters(), **plan.options)
    for step in range(plan.steps):
        loss_of(other, other, rank, step, 0).backward()
        means = []
        for p in twin.parameters:
            parts = [torch.empty_like(p.grad) for _ in range(size)]
            dist.all_gather(parts, p.grad)
            means.append(sum((part.float() for part in parts[1:]), parts[0].float()) / size)
        twin.step(means)
    return equal(values(model), values(other))


def test_half_precision_has_a_float32_master(pool):
    assert all(pool.run(masters, torch.bfloat16))


def scaled(stage, codec):
    """Weights without a loss scale, under one that is a power of two, and where one rank makes a
    step infinite."""
    options = {"bucket_mb": 0.004, "codec": codec, "stage": stage}
    sgd = {"optimizer": torch.optim.SGD, "options": {"lr": 0.1}, "decay": 1.0}
    plan = Plan(accumulate=2, sync_every=True, partitioned=options, **sgd)
    found = [
        with_partitioned(replace(plan, scale=scale, bad=bad))
        for scale, bad in ((0.0, ()), (1024.0, ()), (1024.0, (2,)))
    ]
    for _, optimizer, _ in found:
        optimizer.close()
    skipped = [optimizer.skipped_steps for _, optimizer, _ in found]
    return [values(model) for model, _, _ in found], found[-1][2], skipped


@pytest.mark.parametrize(("stage", "codec"), [(1, "none"), (2, "int8"), (2, "powersgd-2")])
def test_a_grad_scaler_changes_no_bit_and_skips_on_all_ranks(pool, stage, codec):
    (first, scales, skipped), (second, others, _) = pool.run(scaled, stage, codec)
    plain, under_scale, after_infinity = first
    assert scales == others == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
    assert skipped == [0, 0, 1]
    assert equal(plain, under_scale)
    assert all(bool(torch.isfinite(one).all()) for one in after_infinity)
    assert all(equal(*both) for both in zip(first, second, strict=True))


def not_finite(gradients):
    """A skipped step leaves weights, moments and residuals as they were."""
    plan = Plan(steps=3)
    model, optimizer, _ = with_partitioned(plan, codec=gradients, min_numel=0)

    def step(factor):
        (loss_of(model, model, dist.get_rank(), 9, 0) * factor).backward()
        optimizer.step()

    def everything():
        moments = [t.clone() for s in optimizer.inner.state.values() for t in s.values()]
        residuals = [sent.clone() for _, sent, _ in optimizer.residuals.places()]
        return [*values(model), *moments, *residuals]

    before = everything()
    step(float("nan") if dist.get_rank() == 1 else 1.0)
    after = everything()
    optimizer.on_nonfinite = "raise"
    step(1.0)
    with pytest.raises(NonFiniteGradient):
        step(float("inf"))
    optimizer.close()
    return equal(before, after) and optimizer.skipped_steps == 2


def test_a_skipped_step_changes_nothing(pool):
    assert all(pool.run(not_finite, "sign"))


# ---------------------------------------------------------------- compressed


def telescopes():
    """SGD with lr 1 and weights that travel exactly: start − end + mean residual = sum of the mean
    gradients."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = commpress.Partitioned([weight], torch.optim.SGD, lr=1.0, codec="sign", min_numel=0)
    total = torch.zeros(1000, dtype=torch.float64)
    for step in range(12):
        generator = torch.Generator().manual_seed(step * 7 + dist.get_rank())
        gradient = torch.randn(1000, generator=generator)
        total += gradient.double()
        (weight * gradient).sum().backward()
        optimizer.step()
    owed = torch.zeros(1000, dtype=torch.float64)
    for (_, first), sent, _ in optimizer.residuals.places():
        owed[first : first + min(sent.numel(), 1000 - first)] += sent.double()[: 1000 - first]
    both = torch.stack([total, owed])
    dist.all_reduce(both)
    both /= dist.get_world_size()
    error = (both[0] - both[1] + weight.detach().double()).abs().max().item()
    optimizer.close()
    return error, both[1].abs().max().item()


def test_what_the_codec_leaves_out_is_kept(pool):
    for error, owed in pool.run(telescopes, size=3):
        assert error < 1e-4
        assert owed > 0.1


def compressed(options):
    plan = Plan(steps=8, options={"lr": 1e-2, "eps": 1e-3})
    exact, first, _ = with_partitioned(plan)
    model, optimizer, _ = with_partitioned(plan, min_numel=0, **options)
    error = max(
        float((a - b).abs().max()) for a, b in zip(values(exact), values(model), strict=True)
    )
    wanted = optimizer.bytes_per_pass()
    sent, plain = optimizer.transport.sent_bytes, first.transport.sent_bytes
    first.close()
    optimizer.close()
    return values(model), error, sent, plain, plan.steps * sum(wanted.values())


@pytest.mark.parametrize(
    "options",
    [{"codec": "int8"}, {"weights": "int8"}, {"codec": "bf16", "weights": "bf16"}],
)
def test_compressed_both_ways(pool, options):
    one, two = pool.run(compressed, options)
    assert equal(one[0], two[0])
    for _, error, sent, plain, wanted in (one, two):
        assert 0 < error < 0.05
        assert sent - wanted == HEADER + 2 * 8  # the comparison of replicas at the start
        assert sent < 0.8 * plain


# ---------------------------------------------------------------- bytes and memory


class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(256, 256, bias=False) for _ in range(24))
        )

    def forward(self, x):
        return self.layers(x)


@without_older_objects()
def held(stage):
    """Tensor bytes per parameter after a step, scratch apart; then by the optimizer's own count;
    then bytes sent."""
    model = Large()
    for p in model.parameters():
        torch.nn.init.eye_(p)
    optimizer = commpress.Partitioned(
        model.parameters(), torch.optim.AdamW, stage=stage, bucket_mb=0.6
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
    counted = optimizer.memory()
    numel = sum(p.numel() for p in model.parameters())
    sent = (optimizer.transport.sent_bytes - (dist.get_world_size() - 1) * (HEADER + 2 * 8)) / 2
    result = tensor_bytes() / numel, counted, numel, sent, len(optimizer.buckets)
    optimizer.close()
    return result


@pytest.mark.parametrize(("stage", "size"), [(1, 2), (2, 4)])
def test_memory_and_bytes_equal_the_formulas(pool, stage, size):
    for measured, counted, numel, sent, buckets in pool.run(held, stage, size=size):
        formula = (4 + 4 if stage == 1 else 4) + 12 / size  # shards of gradient and two moments
        scratch = (counted["scratch"] + counted["messages"]) / numel
        assert measured - scratch == pytest.approx(formula, rel=0.05)
        assert sum(counted.values()) / numel == pytest.approx(measured, rel=0.05)
        bucket = 4 * numel / buckets
        assert counted["scratch"] <= 10 * bucket
        exact = 2 * 4 * numel * (size - 1) / size
        assert sent == exact + 2 * buckets * (size - 1) * HEADER


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("NAdam", {}), ("Rprop", {}), ("Adagrad", {"initial_accumulator_value": 0.5})],
)
@pytest.mark.parametrize("stored", [False, True], ids=["memory", "store"])
def test_a_sharded_checkpoint_of_no_step_leaves_the_first_step_to_the_optimizer(
    tmp_path, optimizer, options, stored
):
    """States do not begin with zeros in all optimizers. Loaded before a step, and after some."""
    kind = getattr(torch.optim, optimizer)

    def train(model, one, steps):
        for step in range(steps):
            model(torch.full((2, 8), step + 1.0)).square().sum().backward()
            one.step()
            one.zero_grad()

    torch.manual_seed(3)
    plain, net = torch.nn.Linear(8, 5), torch.nn.Linear(8, 5)
    start = copy.deepcopy(plain.state_dict())
    train(plain, kind(plain.parameters(), **options), 3)
    with open_store(tmp_path / "store") as store:
        where = {"store": store} if stored else {}
        net.load_state_dict(start)
        one = commpress.Partitioned(net.parameters(), kind, **options, **where)
        dcp.save(one.sharded_state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
        for steps in (0, 2):
            train(net, one, steps)
            net.load_state_dict(start)
            template = one.sharded_state_dict()
            dcp.load(template, checkpoint_id=tmp_path / "saved", no_dist=True)
            one.load_sharded_state_dict(template)
            train(net, one, 3)
            assert equal(values(net), values(plain)), steps
        one.close()


# ---------------------------------------------------------------- each rank's shard in a store


def in_stores(plan, folder):
    """Trained, committed, and taken up again by a model with other weights."""
    folder = f"{folder}/{dist.get_rank()}"
    with open_store(folder) as store:
        model, optimizer, losses = with_partitioned(plan, store=store, chunk_mb=0.002)
        state = optimizer.state_dict()
        optimizer.commit()
        optimizer.close()
    with open_store(folder) as store:
        other = made(plan)
        again = partitioned(plan, other, store=store, chunk_mb=0.002)
        same = equal(values(model), values(other)) and again.steps_done == plan.steps
        again.close()
    return values(model), state, losses, same


def test_shards_in_stores_equal_ddp(pool, tmp_path):
    plan = Plan(max_norm=0.5, accumulate=2)
    wanted, theirs, losses = pool.run(with_ddp, plan, size=3)[0]
    for weights, state, mine, same in pool.run(in_stores, plan, str(tmp_path), size=3):
        assert same
        assert len(mine) == len(losses)
        assert equal(weights, wanted)
        equal_states(state["state"], theirs["state"])


# ---------------------------------------------------------------- what cannot work


def refusals():
    torch.manual_seed(0)
    net = Net()
    for error, parameters, kind, options in (
        ("expected a class", net.parameters(), "adamw", {}),
        ("LBFGS", net.parameters(), torch.optim.LBFGS, {}),
        ("stage is 3", net.parameters(), torch.optim.SGD, {"stage": 3}),
        ("float64", Net().double().parameters(), torch.optim.SGD, {}),
    ):
        with pytest.raises(InvalidArgument, match=error):
            commpress.Partitioned(parameters, kind, **options)
    optimizer = commpress.Partitioned(net.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(InvalidArgument, match="add_param_group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    net.frozen.weight.requires_grad_(True)
    with pytest.raises(InvalidArgument, match="frozen"):
        optimizer.step()
    net.frozen.weight.requires_grad_(False)
    net.head.bias.data = torch.zeros(19)
    with pytest.raises(InvalidArgument, match="no longer in the buffer"):
        optimizer.step()
    optimizer.close()
    torch.manual_seed(dist.get_rank())
    with pytest.raises(Mismatch, match="values of the parameters"):
        commpress.Partitioned(Net().parameters(), torch.optim.SGD, lr=0.1)
    return True


def test_what_cannot_work_is_refused(pool):
    assert all(pool.run(refusals))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_in_a_store_follow_weights_that_are_loaded(tmp_path, dtype):
    torch.manual_seed(3)
    net = torch.nn.Linear(8, 5, dtype=dtype)
    start = copy.deepcopy(net.state_dict())
    with open_store(tmp_path) as store:
        optimizer = commpress.Partitioned(net.parameters(), torch.optim.SGD, lr=1e-2, store=store)
        after = []
        for _ in range(2):
            net.load_state_dict(start)
            net(torch.ones(2, 8, dtype=dtype)).square().sum().backward()
            optimizer.step()
            after.append(values(net))
            optimizer.zero_grad()
        assert equal(*after)
        assert not equal(after[0], list(start.values()))
        optimizer.close()


def like_the_hook_of_ddp(codec, options):
    """True if both stages have the parameters of DDP after some steps; bytes sent are counted."""
    results = []
    for stage in (0, 1, 2):
        model = made(Plan())
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if stage:
            wrapped: torch.nn.Module = model
            optimizer = commpress.Partitioned(
                named, torch.optim.SGD, lr=0.1, codec=codec, stage=stage, **options
            )
        else:
            wrapped = DistributedDataParallel(model)
            commpress.compress(wrapped, codec, min_numel=256)
            optimizer = torch.optim.SGD(named, lr=0.1)
        for step in range(5):
            before = optimizer.transport.sent_bytes if stage else 0
            loss = loss_of(wrapped, model, dist.get_rank(), step, 0)
            if stage == 1:  # keeps this rank's gradient, not the mean
                own = torch.autograd.grad(loss, [p for _, p in named], retain_graph=True)
            loss.backward()
            assert stage != 1 or equal(own, [p.grad for _, p in named])
            if stage:
                sent = optimizer.transport.sent_bytes - before
                assert sent == optimizer.bytes_per_pass()["gradients"]
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(model))
        if stage:
            optimizer.close()
    return equal(results[0], results[1]) and equal(results[0], results[2])


@pytest.mark.parametrize(
    ("size", "codec", "options"),
    [(2, "powersgd-2+int8", {}), (3, "powersgd-2", {"bucket_mb": 0.004})],
)
def test_codecs_of_whole_tensors_do_what_they_do_under_ddp(pool, size, codec, options):
    assert pool.run(like_the_hook_of_ddp, codec, options, size=size) == [True] * size


def test_weights_do_not_travel_in_codecs_of_whole_tensors():
    """Refused on one rank too."""
    with pytest.raises(
        InvalidArgument,
        match=r"weights is 'powersgd.*choose a codec of rows such as 'int8'",
    ):
        partitioned(Plan(), made(Plan()), weights="powersgd-2")
