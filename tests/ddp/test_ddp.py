"""The hook under DistributedDataParallel equals its twin in one process bit for bit, whatever DDP
is asked to do."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import ByName, SignCodec
from commpress.codecs.family import NAMES
from commpress.codecs.policy import Same
from commpress.collectives.frame import HEADER
from commpress.kernels.pieces import aligned, width_of
from ddp_twin import (
    MIN_NUMEL,
    WIDTH,
    Net,
    Plan,
    Session,
    assert_equal,
    loss_of,
    made,
    none_at_times,
    one_each,
    train,
    twin,
)
from variants import few

LAZY = SignCodec(block=0)
SMALL_BUCKETS = {"bucket_cap_mb": 0.004}  # one parameter or two in each


def check(pool, plan, size=2, **twin_plan):
    results = pool.run(train, plan, size=size)
    assert_equal(results, twin(replace(plan, **twin_plan), size))
    return results


@pytest.mark.parametrize(("codec", "size"), few(["sign", LAZY], [2, 3, 4]), ids=str)
def test_training_equals_its_twin(pool, codec, size):
    check(pool, Plan(codec), size)


@pytest.mark.parametrize("codec", [name for name in NAMES if name != "sign"])
def test_every_codec(pool, codec):
    check(pool, Plan(codec))


OPTIONS = {
    "small buckets": SMALL_BUCKETS,
    "one bucket": {"bucket_cap_mb": 100},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, small buckets, bucket view": {
        "static_graph": True,
        "gradient_as_bucket_view": True,
    }
    | SMALL_BUCKETS,
    "find unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize(("codec", "options"), few(["ternary", LAZY], OPTIONS), ids=str)
def test_no_option_of_ddp_changes_a_bit(pool, options, codec):
    """Nor the size of its buckets: the twin has none. Ternary draws its noise per parameter, lazy
    has a scale per row."""
    check(pool, Plan(codec, ddp=OPTIONS[options]))


@pytest.mark.parametrize("options", [SMALL_BUCKETS, {"static_graph": True}], ids=str)
def test_gradient_accumulation(pool, options):
    check(pool, Plan(accumulate=3, ddp=options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True} | SMALL_BUCKETS], ids=str
)
def test_gradients_of_sixteen_bits(pool, dtype, options):
    check(pool, Plan(dtype=dtype, ddp=options))


@pytest.mark.parametrize("wrapped", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, SMALL_BUCKETS], ids=str)
def test_torchs_own_wrappers(pool, wrapped, options):
    check(pool, Plan(wrapped=wrapped, ddp=options))


@pytest.mark.parametrize("branches", [one_each, none_at_times])
@pytest.mark.parametrize("size", [2, 3])
def test_unused_parameters(pool, branches, size):
    check(
        pool,
        Plan(branches=branches, ddp={"find_unused_parameters": True} | SMALL_BUCKETS, steps=9),
        size,
    )


@pytest.mark.parametrize("ends", [(6, 3), (2, 6, 4), (0, 5)], ids=str)
def test_join_with_uneven_inputs(pool, ends):
    """A rank without data sends zeros, and its residuals go on draining."""
    check(pool, Plan(LAZY, steps=max(ends), ends=ends, ddp=SMALL_BUCKETS), len(ends))


def test_names_are_excluded(pool):
    plan = Plan(exclude=("^left", "head"), ddp=SMALL_BUCKETS)
    for trained in check(pool, plan):
        assert {name for name, _ in trained.residuals} == {"embed.weight", "right.weight"}
        assert trained.counters["compressed_elements"] == plan.steps * (24 * WIDTH + WIDTH * WIDTH)


def test_a_policy_may_decide_instead(pool):
    policy = ByName({"left": NAMES["int4"], "head": NAMES["none"]}, Same(LAZY))
    check(pool, Plan(policy, ddp=SMALL_BUCKETS))


@pytest.mark.parametrize(
    "options",
    [
        {"exact_steps": 3},
        {"error_feedback": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("codec", ["ternary", LAZY], ids=["ternary", "lazy"])
def test_options_of_the_state(pool, options, codec):
    """Each changes what the twin changes."""
    check(pool, Plan(codec, state=options, ddp=SMALL_BUCKETS))


def test_options_matter(pool):
    """The twins above differ from each other, or they would prove nothing."""
    plans = [Plan("ternary", state=s) for s in ({}, {"exact_steps": 3}, {"error_feedback": False})]
    ends = [
        twin(plan, 2)[0].parameters["head.weight"] for plan in [*plans, Plan("none"), Plan(LAZY)]
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_the_measured_error_is_that_of_the_first_step(pool):
    plan = Plan(steps=1)
    for rank, trained in enumerate(pool.run(train, plan)):
        model, _ = made(plan)
        loss_of(model, plan, rank, 0, 0).backward()
        assert trained.counters["errors"].keys() == {name for name, _ in trained.residuals}
        for (name, _), (sent, _) in trained.residuals.items():
            expected = sent.norm() / model.get_parameter(name).grad.norm()
            # sums of squares in other orders
            assert trained.counters["errors"][name] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_counters_count_what_the_formulas_say(pool, size):
    plan = Plan("sign", steps=3)
    numels = {name: p.numel() for name, p in Net().named_parameters()}
    codecs = {
        name: NAMES["sign" if numel >= MIN_NUMEL else "none"] for name, numel in numels.items()
    }
    row = (
        sum(aligned(codecs[n].row_bytes(width_of(numel, size))) for n, numel in numels.items())
        + HEADER
    )
    for trained in pool.run(train, plan, size=size):
        counters = trained.counters
        assert (counters["steps"], counters["messages"]) == (3, 3)
        assert counters["wire_bytes"] == 3 * 2 * (size - 1) * row
        assert counters["logical_bytes"] == 3 * (8 * (size - 1) * sum(numels.values()) // size)
        assert counters["exact_elements"] == 3 * sum(n for n in numels.values() if n < MIN_NUMEL)
        assert counters["ratio"] == counters["logical_bytes"] / counters["wire_bytes"] > 5


# ------------------------------------------------------------- several models, groups and wrappings


def two_models(one, two):
    """One backward through both, their buckets under way at the same time."""
    sessions = [Session(one), Session(two)]
    for step in range(one.steps):
        losses = [loss_of(s.ddp, s.plan, s.rank, step, 0) for s in sessions]
        (losses[0] + losses[1]).backward()
        for session, loss in zip(sessions, losses, strict=True):
            session.losses.append(loss.item())
            session.optimizer.step()
            session.optimizer.zero_grad()
    return [session.trained() for session in sessions]


def test_several_models_at_once(pool):
    one, two = Plan("sign", ddp=SMALL_BUCKETS), Plan("int8", seed=3, ddp=SMALL_BUCKETS)
    results = pool.run(two_models, one, two, size=3)
    assert_equal([first for first, _ in results], twin(one, 3))
    assert_equal([second for _, second in results], twin(two, 3))


def in_a_subgroup(plan, members):
    group = dist.new_group(members)
    return (
        train(replace(plan, ddp={"process_group": group})) if dist.get_rank() in members else None
    )


def test_a_subgroup_of_the_ranks(pool):
    results = pool.run(in_a_subgroup, Plan(), [1, 3], size=4)
    assert results[0] is results[2] is None
    assert_equal(results[1::2], twin(Plan(), 2))


def wrapped_again(plan):
    """One state under DDP after DDP, whose buckets come and go: residuals must follow each time."""
    session = Session(plan)
    for step in range(plan.steps):
        if step and step % 3 == 0:
            del session.ddp
            gc.collect()  # DDP's hooks on the parameters end with it
            session.ddp = DistributedDataParallel(
                session.model, **(SMALL_BUCKETS if step % 2 else {})
            )
            session.ddp.register_comm_hook(session.state, commpress.compressed_allreduce_hook)
        session.step(step)
    return session.trained()


def test_residuals_follow_through_one_ddp_after_another(pool):
    plan = Plan(LAZY, steps=12)
    results = pool.run(wrapped_again, plan)
    assert_equal(results, twin(plan, 2))
