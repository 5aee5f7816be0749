"""Properties of all five optimizers, whole and sharded, on one rank as on several."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument, Mismatch, NonFiniteGradient, StateMismatch
from commpress.optim import (
    OneBitAdam,
    OneBitLamb,
    ShardedOneBitAdam,
    ShardedZeroOneAdam,
    ZeroOneAdam,
)
from commpress.optim.optimizer import RoundKind
from commpress.schedules import DoublingIntervals
from optim_twin import (
    Replicas,
    boundless,
    equal,
    flat,
    mean,
    noise,
    start,
    state_of,
)
from ranks import caught
from test_sharded_adam import together

WINDOWS = {"variance_updates": 2, "sync": DoublingIntervals(3, 100, 4)}
KINDS = {
    OneBitAdam: {"exact_steps": 4},
    OneBitLamb: {"exact_steps": 4},
    ZeroOneAdam: WINDOWS,
    ShardedOneBitAdam: {"exact_steps": 4},
    ShardedZeroOneAdam: WINDOWS,
}
CURE = (
    r"torch.distributed.checkpoint.state_dict leaves .*: "
    r"save .*commpress\.save_distributed\(optimizer, folder\)"
)
SHARDED = (ShardedOneBitAdam, ShardedZeroOneAdam)
every_kind = pytest.mark.parametrize("cls", KINDS)
some_sizes = pytest.mark.parametrize("size", [1, 2])


def replicas(cls, size, **options):
    options = {"lr": 1e-3, "min_numel": 0} | KINDS[cls] | options
    return Replicas(lambda p, t: cls(p, transport=t, **options), size)


@every_kind
@some_sizes
def test_a_bad_gradient_skips_the_step_on_all_ranks_and_leaves_no_trace(cls, size):
    """In exact and in compressed steps, in rows and in whole tensors."""
    for codec in ["sign"] if cls in SHARDED else ["sign", "powersgd-2"]:
        group, other = (replicas(cls, size, weight_decay=0.1, codec=codec) for _ in range(2))
        skipped = 0
        for step in range(10):
            if step in (1, 7) and group.optimizers[0].round() is not RoundKind.LOCAL:
                before, bad = state_of(group), noise(size, 99)
                bad[-1][step % 3][3] = float("nan" if step == 1 else "inf")
                assert group.step(bad) == [False] * size
                assert equal(state_of(group), before)
                skipped += 1
            assert group.step(noise(size, step)) == other.step(noise(size, step)) == [True] * size
        assert equal(state_of(group), state_of(other)), codec
        assert [o.counters.skipped_steps for o in group.optimizers] == [skipped] * size
        assert skipped


@pytest.mark.parametrize("cls", [ZeroOneAdam, ShardedZeroOneAdam])
def test_inside_a_window_a_bad_gradient_is_ignored_on_its_rank(cls):
    """The sharded one takes all of it for zero."""
    group, other = replicas(cls, 3), replicas(cls, 3)
    for step in range(24):
        local = group.optimizers[0].round() is RoundKind.LOCAL
        bad, zeros = noise(3, step), noise(3, step)
        if local:
            bad[1][0][3, 7] = float("nan")
            zeros[1] = [torch.zeros_like(g) for g in zeros[1]]
        before = [o.counters.ignored_gradients for o in group.optimizers]
        assert group.step(bad) == other.step(zeros) == [True] * 3
        after = [o.counters.ignored_gradients for o in group.optimizers]
        assert after == [before[0], before[1] + local, before[2]]
        assert all(torch.isfinite(p).all() for p in group.parameters[1])
        assert cls is ZeroOneAdam or equal(state_of(group), state_of(other))
    assert after[1] > 3
    with torch.no_grad():
        simulate([o.synchronizing() for o in group.optimizers])
    assert group.agree()


@every_kind
def test_on_request_a_bad_gradient_raises(cls):
    bad = noise(2, 0)
    bad[0][1][5] = float("nan")
    with pytest.raises(NonFiniteGradient, match="step 0"):
        replicas(cls, 2, on_nonfinite="raise").step(bad)


@every_kind
def test_a_loss_scale_is_taken_off_before_anything_is_kept(cls):
    """Each rank has a scale of its own."""
    group, other = replicas(cls, 2, max_grad_norm=1.0), replicas(cls, 2, max_grad_norm=1.0)
    for step in range(9):
        other.step(noise(2, step))
        scales = [2.0 ** (8 + step + rank) for rank in range(2)]
        for o, scale in zip(group.optimizers, scales, strict=True):
            o.grad_scale = torch.tensor(scale)
        group.step([[g * s for g in mine] for mine, s in zip(noise(2, step), scales, strict=True)])
    assert equal(state_of(group), state_of(other))


@boundless
@pytest.mark.parametrize("cls", [OneBitAdam, ShardedOneBitAdam])
def test_one_clip_factor_for_all_ranks(cls):
    """Ranks whose gradients differ in size share one factor, and the momentum is that of the
    clipped gradients."""
    group = replicas(cls, 3, codec="none", variance_floor=0.0, max_grad_norm=1.0)
    momentum = partial(together, group, "momentum") if cls in SHARDED else group.momentum
    for step in range(10):
        gradients = noise(3, step)
        gradients[2] = [10 * g for g in gradients[2]]
        before = momentum()
        group.step(gradients)
        if step == 3:
            ratio = group.optimizers[0].facts.norm_ratio
    g, pushed = flat(mean(gradients)), (momentum() - 0.9 * before) / 0.1
    factor = pushed @ g / (g @ g)
    norms = np.mean([np.sum(flat(mine) ** 2) for mine in gradients]) ** 0.5
    assert factor == pytest.approx(1 / (ratio * norms), rel=1e-2)
    # after the freeze the threshold means what it meant before
    assert 0.5 < np.linalg.norm(pushed) < 2.0


def made(cls, options, parameters, transport):
    return cls(parameters, transport=transport, **options)


@every_kind
@some_sizes
def test_a_norm_that_no_gradient_reaches_changes_no_bit(cls, size):
    runs, shapes = [], ((7,), (700,), (40, 50))  # the largest last, as embeddings may be
    for most in (None, 1.0):
        options = {"lr": 1e-3, "max_grad_norm": most} | KINDS[cls]
        group = Replicas(partial(made, cls, options), size, shapes)
        for step in range(10):
            group.step([[1e-3 * g for g in mine] for mine in noise(size, step, shapes)])
        runs.append(group.parameters[0])
    assert equal(*runs)


@every_kind
@some_sizes
def test_what_needs_no_gradient_stays_as_it_is(cls, size):
    group = replicas(cls, size, weight_decay=0.1)
    for mine in group.parameters:
        mine[1].requires_grad_(False)
    before = [p.detach().clone() for p in group.parameters[0]]
    for step in range(10):
        group.step(
            [[g if i != 1 else None for i, g in enumerate(mine)] for mine in noise(size, step)]
        )
    for mine in group.parameters:
        assert [torch.equal(p, q) for p, q in zip(mine, before, strict=True)] == [
            False,
            True,
            False,
        ]


@every_kind
@some_sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_the_user_writes_between_steps_are_the_ones_that_train(cls, size, dtype):
    """Write as ``model.load_state_dict`` does: a step at rate zero then leaves every bit as
    written. Half precision, and columns before rows as in channels_last, have float32 weights
    beside them."""
    options = {"lr": 1e-3} | KINDS[cls]
    group = Replicas(lambda p, t: cls(p, transport=t, **options), size, dtype=dtype)
    for mine in group.parameters:
        mine[0].data = mine[0].data.t().contiguous().t()
    group.optimizers = [
        cls(p, transport=t, **options)
        for p, t in zip(group.parameters, Loopback(size).transports(), strict=True)
    ]
    for step in range(1 if KINDS[cls] is WINDOWS else 6):
        group.step(noise(size, step))
    written = start(seed=9)
    for mine, optimizer in zip(group.parameters, group.optimizers, strict=True):
        for p, value in zip(mine, written, strict=True):
            with torch.no_grad():
                p.copy_(value)
        optimizer.param_groups[0]["lr"] = 0.0
    assert group.step(noise(size, 9)) == [True] * size
    for mine in group.parameters:
        assert equal(mine, [value.to(dtype) for value in written])


@pytest.mark.parametrize("cls", [OneBitAdam, ZeroOneAdam, OneBitLamb])
def test_writing_the_same_weights_once_more_changes_no_bit_of_a_run(cls):
    """Load a model after its optimizer: what rounding to half precision cut off stays."""

    def run(*, again):
        options = {"lr": 1e-4} | KINDS[cls]
        group = Replicas(lambda p, t: cls(p, transport=t, **options), 2, dtype=torch.bfloat16)
        for step in range(8):
            group.step(noise(2, step))
            for p in group.parameters[0] if again else ():
                with torch.no_grad():
                    p.copy_(p.clone())
        return group.parameters[0], group.optimizers[0].flat.weights

    for mine, other in zip(run(again=True), run(again=False), strict=True):
        assert equal(mine, other)


@every_kind
def test_what_is_left_alone_from_some_step_on_is_left_alone_by_all_ranks(cls):
    """In each round of a window, the first one of it too: at its end all ranks hold the same."""
    for at in range(3, 9):
        group = replicas(cls, 2, weight_decay=0.1)
        for step in range(24):
            gradients = noise(2, step)
            for mine, its in zip(group.parameters, gradients, strict=True):
                if step >= at:
                    mine[0].requires_grad_(False)
                    its[0] = None
            group.step(gradients)
        with torch.no_grad():
            if hasattr(group.optimizers[0], "synchronizing"):
                simulate([o.synchronizing() for o in group.optimizers])
        assert group.agree(), at
        before = group.parameters[1][0].detach().clone()
        group.step([[None, *mine[1:]] for mine in noise(2, 24)])
        assert torch.equal(group.parameters[1][0], before)


@every_kind
def test_what_is_owed_is_told_in_units_of_steps(cls):
    """So it does not depend on how large gradients are."""
    owed = []
    for scale in (1.0, 1000.0):
        group = replicas(cls, 2, eps=1e-12)
        for step in range(12):
            group.step([[scale * g for g in mine] for mine in noise(2, step)])
        owed.append(group.optimizers[0].relative_residual())
    assert owed[0] > 0.01
    assert owed[1] == pytest.approx(owed[0], rel=0.05)


@pytest.mark.parametrize(
    "pair", [(OneBitAdam, ShardedOneBitAdam), (ZeroOneAdam, ShardedZeroOneAdam)]
)
@pytest.mark.parametrize("correct", [True, False])
def test_whole_and_sharded_take_the_same_steps_where_nothing_is_lost(pair, correct):
    """Synchronised at every step, for inside a window the sharded one stands still."""
    moves = []
    for cls in pair:
        more = {"sync": "every"} if "sync" in KINDS[cls] else {}
        group = replicas(
            cls,
            2,
            codec="none",
            spiky_codec="none",
            bias_correction=correct,
            weight_decay=0.1,
            **more,
        )
        for step in range(12):
            group.step(noise(2, step))
        moves.append(
            torch.cat(
                [
                    (p - q).detach().view(-1)
                    for p, q in zip(group.parameters[0], start(), strict=True)
                ]
            )
        )
    assert float((moves[0] - moves[1]).norm()) < 1e-4 * float(moves[0].norm())


@every_kind
@some_sizes
@pytest.mark.parametrize("option", ["exact_codec", "spiky_codec", "codec"])
def test_codecs_of_whole_tensors_are_refused_for_gradients_and_rows(cls, size, option):
    if option == "codec" and cls not in SHARDED:
        return
    what = rf"{option} is 'powersgd/4/2'.*which compresses whole tensors.*'int[48]'"
    with pytest.raises(InvalidArgument, match=what):
        replicas(cls, size, **{option: "powersgd-4"})


@every_kind
def test_replicas_that_differ_are_named(cls):
    group = replicas(cls, 3)
    group.parameters[2][1].data[5] += 1e-3
    with pytest.raises(Mismatch, match=r"ranks \[2\] differ"):
        group.step(noise(3, 0))


def test_a_state_of_torchs_adam_begins_the_schedule_anew():
    o = ZeroOneAdam(
        [torch.nn.Parameter(torch.ones(8))], transport=Loopback(2).transport(0), **WINDOWS
    )
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.ones(8))])
    for _ in range(30):
        plain.param_groups[0]["params"][0].grad = torch.ones(8)
        plain.step()
    o.load_state_dict(plain.state_dict())
    assert (o.windows.updates, o.windows.updated_at) == (30, 29)


@pytest.mark.parametrize("make", [partial(ShardedOneBitAdam, exact_steps=4), ShardedZeroOneAdam])
@some_sizes
def test_a_state_that_torchs_distributed_checkpoints_took_apart_is_refused_with_the_cure(
    pool, make, size
):
    for said in pool.run(carried_by_torch, make, size=size):
        assert re.search(CURE, said)


def carried_by_torch(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    state = get_optimizer_state_dict(model, optimizer)
    error = caught(set_optimizer_state_dict, model, optimizer, state)
    assert type(error) is StateMismatch
    return str(error)
