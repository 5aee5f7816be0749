"""NaN and infinity: seen by all ranks, before a residual is committed; with a GradScaler and
without."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import SignCodec
from commpress.errors import NonFiniteGradient
from ddp_twin import Plan, Session, assert_equal, steps_of, train, twin
from variants import few

LAZY = SignCodec(block=0)
SMALL_BUCKETS = {"bucket_cap_mb": 0.004}


def warnings(trained):
    """But the one that every run with one bit begins with."""
    return [
        line
        for line in trained.log
        if line.startswith("WARNING") and "a codec of one bit" not in line
    ]


# ---------------------------------------------------------------- with a GradScaler


@pytest.mark.parametrize(
    ("codec", "accumulate"), [("sign", 2), (LAZY, 1), ("int8", 1)], ids=["sign", "lazy", "int8"]
)
def test_residuals_are_in_unscaled_units(pool, codec, accumulate):
    """The loss scale doubles every second step and the training is, bit for bit, the one without
    any scale."""
    plan = Plan(codec, scale=2.0**10, steps=7, ddp=SMALL_BUCKETS, accumulate=accumulate)
    results = pool.run(train, plan)
    assert_equal(results, twin(replace(plan, scale=0.0), 2))
    assert results[0].scales == [2.0**k for k in (10, 11, 11, 12, 12, 13, 13)]


@pytest.mark.parametrize(
    ("poisoned", "codec"), few(["", "head.weight", "embed.bias"], ["sign", LAZY]), ids=str
)
def test_a_step_that_the_scaler_skips_leaves_no_trace(pool, codec, poisoned):
    """Also where one bucket of several is bad."""
    plan = Plan(codec, scale=2.0**10, bad=(2, 3), poisoned=poisoned, ddp=SMALL_BUCKETS)
    results = pool.run(train, plan, size=3)
    assert_equal(results, twin(replace(plan, scale=0.0, bad=(), left_out=(2, 3)), 3), losses=False)
    for trained in results:
        assert trained.scales == [2.0**k for k in (10, 11, 10, 9, 9, 10)]
        assert trained.counters["skipped_steps"] == 2
    said, *others = map(warnings, results)
    assert (
        "step 2: gradients held NaN or infinity on some rank and were passed on as infinity"
        in said[0]
    )
    assert "With AMP pass" not in said[0]
    assert not any(others), "all ranks know it, one says it"


# ---------------------------------------------------------------- without


@pytest.mark.parametrize(
    ("options", "size"), few([{}, SMALL_BUCKETS, {"static_graph": True}], [2, 3]), ids=str
)
def test_by_default_a_bad_step_has_zero_gradients_and_keeps_residuals(pool, options, size):
    plan = Plan(LAZY, bad=(0, 3), ddp=options)
    results = pool.run(train, plan, size=size)
    assert_equal(results, twin(plan, size), losses=False)
    for trained in results:
        buckets = trained.counters["skipped_buckets"]
        assert trained.counters["skipped_steps"] == 2
        assert (buckets > 2) == (options is SMALL_BUCKETS)
    said, *others = map(warnings, results)
    assert all("replaced by zeros on all ranks" in line for line in said)
    assert len(said) == 2
    assert "(1 so far)" in said[0]
    assert "pass grad_scaler=" in said[0]
    assert not any(others), "all ranks know it, one says it"


def bad_in_one_bucket(plan, disabled):
    """Residuals before and gradients after a step whose embedding bias alone is bad."""
    scaler = torch.amp.GradScaler("cpu", enabled=False) if disabled else None
    session = Session(replace(plan, state={**plan.state, "grad_scaler": scaler}))
    for step in range(3):
        session.step(step)
    before = session.trained().residuals
    session.backward(3)
    return before, [p.grad.clone() for p in session.model.parameters()], session.trained()


@pytest.mark.parametrize(
    ("policy", "disabled"), [("skip", False), ("skip", True), ("propagate", False)]
)
def test_a_bad_bucket_takes_its_whole_step_along(pool, policy, disabled):
    """All parameters get zeros, or NaN, and keep their residuals, also those of buckets that were
    finite. A disabled scaler is none: it would not skip a step that is passed on as infinity."""
    plan = Plan(bad=(3,), poisoned="embed.bias", ddp=SMALL_BUCKETS, state={"on_nonfinite": policy})
    results = pool.run(bad_in_one_bucket, plan, disabled)
    for before, gradients, after in results:
        assert len(before) > 2
        for gradient in gradients:
            assert not gradient.any() if policy == "skip" else gradient.isnan().all()
        for key, kept in before.items():
            assert all(map(torch.equal, kept, after.residuals[key])), key
        assert after.counters["skipped_buckets"] > 2
        assert after.counters["skipped_steps"] == 1
    said = "zeros" if policy == "skip" else "NaN"
    assert f"replaced by {said} on all ranks" in warnings(results[0][2])[0]


def aborted(plan):
    """A backward that ends in an error after some of its buckets; then the model is wrapped
    anew."""
    session = Session(plan)
    session.step(0)
    session.step(1)
    handle = session.model.embed.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.backward(2)
    handle.remove()
    session.losses.pop() if len(session.losses) > 2 else None
    session.optimizer.zero_grad()
    session.ddp = DistributedDataParallel(session.model, **plan.ddp)
    session.ddp.register_comm_hook(session.state, commpress.compressed_allreduce_hook)
    for step in range(2, plan.steps):
        session.step(step)
    return session.trained()


def test_an_aborted_backward_leaves_no_trace(pool):
    plan = Plan(ddp=SMALL_BUCKETS)
    assert_equal(pool.run(aborted, plan), twin(plan, 2))


def raising(plan):
    """A user who catches the error and leaves the step out."""
    session = Session(replace(plan, state={"on_nonfinite": "raise"}))
    errors = []
    for step in steps_of(plan):
        before = session.trained().residuals
        try:
            session.step(step)
        except NonFiniteGradient as error:
            errors.append((step, str(error)))
            session.optimizer.zero_grad()
            for key, (sent, reduced) in session.trained().residuals.items():
                assert key not in before or torch.equal(sent, before[key][0])
                assert key not in before or torch.equal(reduced, before[key][1])
    return errors, session.trained()


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 0.0),
        (SMALL_BUCKETS, 2.0**10),
        ({"static_graph": True}, 0.0),
        ({"find_unused_parameters": True}, 2.0**10),
    ],
    ids=str,
)
def test_the_policy_raise_raises_on_every_rank_and_training_can_go_on(pool, options, scale):
    plan = Plan(bad=(0, 3), ddp=options, scale=scale)
    results = pool.run(raising, plan, size=3)
    for errors, trained in results:
        assert [step for step, _ in errors] == [0, 3]
        assert (
            "gradients of step 3 hold NaN or infinity on some rank. No residual was changed"
            in errors[1][1]
        )
        assert trained.counters["skipped_steps"] == 2
        assert warnings(trained) == []
    assert_equal(
        [t for _, t in results],
        twin(replace(plan, scale=0.0, bad=(), left_out=(0, 3)), 3),
        losses=False,
    )


def overflow(dtype):
    """Gradient and residual fit float16, their sum does not."""
    session = Session(Plan(dtype=dtype, state={"on_nonfinite": "skip"}))
    for parameter in session.model.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, 60000.0))
    session.backward(0)
    state = session.state.state_dict()
    for residual in state["residuals"].values():
        residual["sent"].fill_(60000.0)
    session.state.load_state_dict(state)
    session.optimizer.zero_grad()
    session.backward(1)
    gradients = {name: p.grad.float() for name, p in session.model.named_parameters()}
    return gradients, session.trained()


def test_a_mean_that_overflows_float16_is_bad_too(pool):
    for gradients, trained in pool.run(overflow, torch.float16):
        assert not any(gradient.any() for gradient in gradients.values())
        assert all(
            torch.equal(sent, torch.full_like(sent, 60000.0))
            for sent, _ in trained.residuals.values()
        )
        assert trained.counters["skipped_steps"] == 1
    for gradients, trained in pool.run(overflow, torch.bfloat16):
        # 120000 in bfloat16
        assert torch.equal(gradients["head.weight"].unique(), torch.tensor([119808.0]))
        assert trained.counters["skipped_steps"] == 0


def raise_while_joined(plan):
    """Rank 0 has no more data when rank 1 brings a bad gradient."""
    session = Session(replace(plan, state={"on_nonfinite": "raise"}))
    try:
        with session.ddp.join():
            for step in range(1 + 2 * dist.get_rank()):
                session.step(step)
    except NonFiniteGradient as error:
        return str(error)
    return None


def test_a_rank_that_has_joined_raises_too(pool):
    for message in pool.run(raise_while_joined, Plan(bad=(2,))):
        assert "gradients of step 2" in message
