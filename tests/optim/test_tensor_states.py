"""Tensors, rows and elements whose first gradient comes after the freeze, against exact Adam; what
all ranks agree on then; what ``state`` holds, and what torch's own tools and AdamW make of it."""

import copy
import logging

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.optim import (
    OneBitAdam,
    OneBitLamb,
    ShardedOneBitAdam,
    ZeroOneAdam,
    tensor_states,
    zero_one_adam,
)
from optim_twin import Replicas, equal, flat, mean, noise, owed, start

LR, WARMUP, LATE = 1e-3, 20, 40
SHAPES = ((32, 64), (24, 64), (600,), (48, 48))
MAKERS = {
    "adam": lambda p, t, **o: OneBitAdam(p, lr=LR, exact_steps=WARMUP, transport=t, **o),
    "int8": lambda p, t, **o: OneBitAdam(
        p, lr=LR, exact_steps=WARMUP, transport=t, codec="int8", **o
    ),
    "pure": lambda p, t, **o: OneBitAdam(
        p, lr=LR, exact_steps=WARMUP, transport=t, spiky_codec=None, **o
    ),
    "lamb": lambda p, t, **o: OneBitLamb(p, lr=LR, exact_steps=WARMUP, transport=t, **o),
    "lamb, frozen rates": lambda p, t, **o: OneBitLamb(
        p, lr=LR, exact_steps=WARMUP, rates="frozen", transport=t, **o
    ),
    "sharded": lambda p, t: ShardedOneBitAdam(p, lr=LR, exact_steps=WARMUP, transport=t),
    "zero-one": lambda p, t, **o: ZeroOneAdam(
        p, lr=LR, exact_steps=WARMUP, sync="every", transport=t, **o
    ),
}


def sleeping(step, size=2, shapes=SHAPES):
    """Before LATE nothing for the second and third tensor, for half of the first one's rows and for
    a few elements of the last; for some more of those the noise of float32."""
    gradients = noise(size, step, shapes)
    for mine in gradients if step < LATE else []:
        mine[0][16:], mine[1], mine[2] = 0.0, None, torch.zeros(600)
        mine[3][:, 5] = 0.0
        mine[3][:, 7] *= 1e-9
    return gradients


class Exact:
    """AdamW, or LAMB on one rank, with the mean gradients: the largest move of each tensor so
    far."""

    def __init__(self, lamb):
        self.parameters = [torch.nn.Parameter(p) for p in start(SHAPES)]
        alone = Loopback(1).transport(0)
        kind = (
            (lambda p: OneBitLamb(p, lr=LR, transport=alone))
            if lamb
            else (lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0))
        )
        self.optimizer, self.largest = kind(self.parameters), [0.0] * len(SHAPES)

    def step(self, gradients):
        filled = [
            [torch.zeros(s) if g is None else g for g, s in zip(mine, SHAPES, strict=True)]
            for mine in gradients
        ]
        before = [p.detach().clone() for p in self.parameters]
        for p, g in zip(self.parameters, mean(filled), strict=True):
            p.grad = g
        self.optimizer.step()
        moves = [
            float((p.detach() - b).abs().max())
            for p, b in zip(self.parameters, before, strict=True)
        ]
        self.largest = [max(pair) for pair in zip(self.largest, moves, strict=True)]


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "sharded"])
def test_what_wakes_up_after_the_freeze_moves_as_under_the_exact_optimizer(name):
    group, exact = Replicas(MAKERS[name], 2, SHAPES), Exact("lamb" in name)
    for step in range(LATE + 20):
        before = [p.detach().clone() for p in group.parameters[0]]
        if step == LATE:
            asleep, theirs = before, [p.detach().clone() for p in exact.parameters]
        assert group.step(sleeping(step)) == [True] * 2
        exact.step(sleeping(step))
        for p, b, most in zip(group.parameters[0], before, exact.largest, strict=True):
            bound = 8 * max(most, LR / (1 - 0.9 ** (step + 1)))
            assert float((p.detach() - b).abs().max()) <= bound, f"step {step}"
    assert group.agree()
    parts = [
        (0, slice(16, None)),
        (1, slice(None)),
        (2, slice(None)),
        (3, (slice(None), 5)),
        (3, (slice(None), 7)),
    ]
    for i, part in parts:
        mine = group.parameters[0][i].detach()[part] - asleep[i][part]
        wanted = exact.parameters[i].detach()[part] - theirs[i][part]
        ratio = float(mine.norm() / wanted.norm())
        assert 1 / 8 < ratio < 8, f"tensor {i}, {part}: {ratio:.3g} of the distance"
        assert float((mine * wanted).sum() / (mine.norm() * wanted.norm())) > 0.5, (
            f"tensor {i}, {part}: another direction"
        )


def test_few_elements_without_gradients_keep_no_tensor_from_freezing_and_stay_near_where_they_are():
    """Units that are always off. One bit cannot say zero, but takes back what it said too much."""
    group = Replicas(MAKERS["adam"], 3, SHAPES)
    dead = torch.zeros(48, 48, dtype=torch.bool)
    dead[:, 3] = True
    before = group.parameters[0][3].detach().clone()
    for step in range(WARMUP + 60):
        gradients = noise(3, step, SHAPES)
        for mine in gradients:
            mine[3][dead] = 0.0
        group.step(gradients)
        moved = (group.parameters[0][3].detach() - before).abs()
        assert float(moved[dead].max()) < 2 * LR
    assert group.optimizers[0].tensors.frozen[3]
    assert not group.optimizers[0]._momenta[3][dead].any()
    assert float(moved[~dead].mean()) > 5 * LR


# ---------------------------------------------------------------- waking up


def grown(step, size=2, by=1.0, only=None):
    """Gradients that are ``by`` times as large from LATE on, on all ranks or on one."""
    gradients = noise(size, step, SHAPES)
    for rank, mine in enumerate(gradients):
        mine[1] *= by if step >= LATE and only in (None, rank) else 1e-3
    return gradients


@pytest.mark.parametrize(
    ("name", "only"),
    [("adam", None), ("adam", 1), ("lamb", 1), ("zero-one", 1), ("sharded", 1), ("sharded", None)],
)
def test_a_tensor_that_outgrows_its_variance_thaws_on_all_ranks(name, only, caplog):
    def make(p, t):
        return MAKERS[name](zip(("embed", "gate", "bias", "out"), p, strict=True), t)

    group = Replicas(make, 2, SHAPES)
    operations = []
    with caplog.at_level(logging.WARNING, "commpress"):
        for step in range(LATE + 12):
            before, moved = (
                len(group.optimizers[0].channel.inner.operations),
                group.parameters[0][1].detach().clone(),
            )
            assert group.step(grown(step, only=only)) == [True] * 2
            operations.append(len(group.optimizers[0].channel.inner.operations) - before)
            bound = 20 * LR / (1 - 0.9 ** (step + 1)) if name != "lamb" else 1.0
            assert float((group.parameters[0][1].detach() - moved).abs().max()) < bound
            assert group.agree()
    talks = [step for step in range(WARMUP, LATE + 12) if operations[step] > 2 and step % 1000]
    assert len(talks) == 1, "one talk, in one step"
    # 0/1 Adam has exact steps in between
    assert LATE + tensor_states.PATIENCE <= talks[0] < LATE + tensor_states.PATIENCE + 5
    assert "'gate" in caplog.text or " gate (24, 64)" in caplog.text
    assert "embed" not in caplog.text
    assert "out" not in caplog.text.replace("without", "")
    assert [o.counters.woken_tensors for o in group.optimizers] == [1, 1]
    for o in group.optimizers:
        if name == "zero-one":
            assert o.windows.exact_until == talks[0] + 1 + zero_one_adam.WAKING
        else:
            assert o.tensors.frozen.tolist() == [True, False, True, True]
            assert int(o.tensors.thawed_at[1]) == talks[0] + 1


def test_what_was_owed_is_in_the_momentum_of_a_tensor_that_thaws():
    group = Replicas(MAKERS["adam"], 3, SHAPES)
    for step in range(WARMUP + 15):
        group.step(noise(3, step, SHAPES))
    first, places = group.optimizers[0], group.optimizers[0].flat.places
    before, m, s = group.owed(), first._momenta[1].clone(), first.tensors.divisor(1)
    at = slice(32 * 64, 32 * 64 + 24 * 64)
    with torch.no_grad():
        simulate([o.wake([1]) for o in group.optimizers])
    bound = np.asarray(s.view(-1).double()) * first.tensors.bound(1)
    wanted = (m.double().view(-1).numpy() + s.double().view(-1).numpy() * before[at]).clip(
        -bound, bound
    )
    np.testing.assert_allclose(first._momenta[1].view(-1).numpy(), wanted, rtol=1e-4, atol=1e-6)
    assert np.abs(before[at]).max() > 0.1
    after = owed(group.optimizers)
    assert not after[at].any()
    np.testing.assert_array_equal(np.delete(after, np.r_[at]), np.delete(before, np.r_[at]))
    assert places[1][1] == 24 * 64
    for step in range(WARMUP + 15, WARMUP + 20):
        group.step(noise(3, step, SHAPES))
    assert group.agree()


def test_a_thawed_tensor_freezes_again_once_its_variance_is_new():
    group = Replicas(lambda p, t: MAKERS["adam"](p, t, betas=(0.9, 0.9)), 2, SHAPES)
    patience = group.optimizers[0].patience
    assert patience == 20
    for step in range(WARMUP + 10):
        group.step(noise(2, step, SHAPES))
    with torch.no_grad():
        simulate([o.wake([1, 3]) for o in group.optimizers])
    seen = []
    for step in range(WARMUP + 10, WARMUP + 10 + 2 * patience):
        group.step(noise(2, step, SHAPES))
        seen.append(bool(group.optimizers[0].tensors.frozen[1]))
        assert group.agree()
    assert not any(seen[: patience - 1])
    assert seen[-1]
    assert seen == sorted(seen)


def test_a_step_that_is_skipped_counts_no_trip():
    group = Replicas(MAKERS["adam"], 2, SHAPES)
    for step in range(LATE):
        group.step(grown(step))
    for _ in range(2 * tensor_states.PATIENCE):
        gradients = grown(LATE)
        gradients[0][0][0, 0] = torch.inf
        assert group.step(gradients) == [False] * 2
    assert not group.optimizers[0].tensors.trips.any()
    assert group.optimizers[0].tensors.frozen.all()


# ---------------------------------------------------------------- what the state holds


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "sharded"])
def test_the_state_is_that_of_adam_whatever_round_came_last(name):
    """m from what was sent, v as AdamW corrects it, in tensors that stay the same ones."""
    group = Replicas(MAKERS[name], 2, SHAPES)
    first = group.optimizers[0]
    shown = [dict(first.state[p]) for p in group.parameters[0]]
    m = v = 0.0
    for step in range(60):
        gradients = noise(2, step, SHAPES)
        group.step(gradients)
        g = flat(mean(gradients))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        if "lamb" in name:
            v_hat = flat([s["exp_avg_sq"] for s in shown]) / (1 - 0.999 ** min(step + 1, WARMUP))
        else:
            v_hat = flat([s["exp_avg_sq"] for s in shown]) / (1 - 0.999 ** (step + 1))
        ratio = np.median(v_hat / (v / (1 - 0.999 ** (step + 1))))
        assert 0.85 < ratio < 1.15, f"step {step}: {ratio}"
        mine = flat([s["exp_avg"] for s in shown])
        if step > 2:
            assert mine @ m / (np.linalg.norm(mine) * np.linalg.norm(m)) > 0.5
            assert 0.5 < np.linalg.norm(mine) / np.linalg.norm(m) < 2
    for p, before in zip(group.parameters[0], shown, strict=True):
        assert all(first.state[p][key] is value for key, value in before.items())
        assert type(first.state).__name__ == "defaultdict"


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(40, 40), torch.nn.Linear(40, 10)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def trained(steps, make=None):
    """Two replicas, their optimizers, and the loss of the last steps."""
    models = [Two(), Two()]
    make = make or (
        lambda p, t: OneBitAdam(
            p, lr=3e-3, exact_steps=30, min_numel=0, spiky_codec=None, transport=t
        )
    )
    optimizers = [
        make(m.named_parameters(), t) for m, t in zip(models, Loopback(2).transports(), strict=True)
    ]
    return models, optimizers, run(models, optimizers, range(steps))


def run(models, optimizers, steps):
    losses, target = [], Two()
    for step in steps:
        total = 0.0
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + rank))
            loss = (model(x) - 3 * torch.cos(target(x).detach()) * x[:, :10]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            total += float(loss.detach()) / len(models)
        with torch.no_grad():
            if hasattr(optimizers[0], "steps"):
                simulate([o.steps() for o in optimizers])
        if not hasattr(optimizers[0], "steps"):
            for o in optimizers:
                o.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("carried", ["state_dict", "dcp"])
@pytest.mark.parametrize("name", ["adam", "zero-one"])
def test_adamw_goes_on_from_the_state_without_a_jump(name, carried):
    """The parameters move on as far in each step as they did before, and the loss does not rise."""
    makers = {
        "adam": None,
        "zero-one": lambda p, t: ZeroOneAdam(
            p, lr=3e-3, exact_steps=30, sync="every", min_numel=0, transport=t
        ),
    }
    models, optimizers, losses = trained(80, makers[name])
    model = copy.deepcopy(models[0])
    adam = torch.optim.AdamW(model.named_parameters(), lr=3e-3, weight_decay=0.0)
    if carried == "dcp":
        set_optimizer_state_dict(model, adam, get_optimizer_state_dict(models[0], optimizers[0]))
    else:
        state = optimizers[0].state_dict()
        state.pop("commpress")
        adam.load_state_dict(state)
    before = [p.detach().clone() for p in model.parameters()]
    after = run([model], [adam], range(80, 100))
    for p, b in zip(model.parameters(), before, strict=True):
        assert float((p.detach() - b).abs().max()) < 20 * 3 * 3e-3
    assert max(after) < 1.3 * max(losses[-20:])
    assert float(adam.state[next(model.parameters())]["step"]) == 100


@pytest.mark.parametrize("name", ["adam", "lamb", "zero-one"])
def test_what_torchs_tools_carry_tells_a_resumed_run_what_is_frozen(name):
    """All but residuals: the next exact-codec step has the same bits."""

    def make(p, t):
        return MAKERS[name](p, t, codec="none", min_numel=0)

    models, optimizers, _ = trained(60, make)
    frozen = optimizers[0].tensors.frozen.tolist()
    assert any(frozen)
    others, resumed, _ = trained(0, make)
    for model, o, theirs, twin in zip(others, resumed, optimizers, models, strict=True):
        model.load_state_dict(twin.state_dict())
        set_optimizer_state_dict(model, o, get_optimizer_state_dict(twin, theirs))
    assert resumed[0].tensors.frozen.tolist() == frozen
    assert torch.equal(resumed[0].tensors.variance_steps, optimizers[0].tensors.variance_steps)
    if name == "zero-one":
        assert resumed[0].windows.state() == optimizers[0].windows.state()
    else:
        assert resumed[0].frozen_at == optimizers[0].frozen_at == WARMUP
    run(models, optimizers, range(60, 64))
    run(others, resumed, range(60, 64))
    assert equal(*(list(each[0].parameters()) for each in (models, others)))


def test_a_state_that_adamw_moved_on_is_taken_as_adams():
    models, optimizers, _ = trained(60)
    model = copy.deepcopy(models[0])
    adam = torch.optim.AdamW(model.named_parameters(), lr=3e-3)
    set_optimizer_state_dict(model, adam, get_optimizer_state_dict(models[0], optimizers[0]))
    run([model], [adam], range(60, 160))
    back = OneBitAdam(
        model.named_parameters(), exact_steps=300, min_numel=0, transport=Loopback(2).transport(0)
    )
    back.load_state_dict(adam.state_dict())
    assert not back.tensors.frozen.any()
    assert back.tensors.variance_steps.tolist() == [160] * 4
    assert back.frozen_at is None


def loud(step):
    """Gradients of the first tensor are a hundred times as large at first."""
    return [
        [g * (100.0 if step < 4 and i == 0 else 1.0) for i, g in enumerate(mine)]
        for mine in noise(2, step)
    ]


@pytest.mark.parametrize("make", [OneBitAdam, OneBitLamb, ShardedOneBitAdam])
def test_a_warm_up_in_which_gradients_change_in_size_is_warned_of(make, caplog):
    for gradients, warns in ((loud, True), (lambda step: noise(2, step), False)):
        caplog.clear()
        group = Replicas(
            lambda p, t: make(p, transport=t, exact_steps=12, min_numel=64, betas=(0.9, 0.99)), 2
        )
        for step in range(16):
            group.step(gradients(step))
        assert group.optimizers[0].tensors.frozen.tolist() == [True, True, False]
        said = [
            r.getMessage() for r in caplog.records if "the variance freezes, but" in r.getMessage()
        ]
        assert len(said) == (2 if warns else 0), "once on each rank"
        assert all("(40, 50)" in line and "(700,)" not in line for line in said)


def test_momentum_below_the_floor_keeps_within_adams_own_bound():
    """One bit gives elements of a tiny variance the momentum of their neighbours."""
    shapes = ((600, 2),)
    group = Replicas(MAKERS["zero-one"], 2, shapes)
    size = torch.tensor([1.0, 1e-6])
    for step in range(WARMUP + 30):
        group.step([[size * g for g in mine] for mine in noise(2, step, shapes)])
        state = group.optimizers[0].state[group.parameters[0][0]]
        steps = int(state["variance_steps"])
        root = (state["exp_avg_sq"] / (1 - 0.999**steps)).sqrt()
        assert float((state["exp_avg"].abs() / root)[:, 1].max()) < 7.4
    assert group.agree()
