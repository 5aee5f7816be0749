"""Resuming: at the same number of ranks as if nothing had happened, at another without losing what
is owed."""

import os
import random
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commpress.codecs import ByName, SignCodec
from commpress.codecs.family import NAMES
from commpress.codecs.policy import Same
from commpress.errors import StateMismatch
from commpress.kernels.pieces import width_of
from ddp_twin import MIN_NUMEL, Net, Plan, Session, assert_equal, steps_of, train, twin
from ranks import SilentRank, meet
from variants import first

LAZY = SignCodec(block=0)
SMALL_BUCKETS = {"bucket_cap_mb": 0.004}
EVERYTHING = {"min_numel": 1}  # compress biases, too: some have fewer elements than ranks have rows


# ---------------------------------------------------------------- exact


def save(session, folder):
    """As a user would: everything that is state, each rank its own file."""
    state = {
        "model": session.model.state_dict(),
        "optimizer": session.optimizer.state_dict(),
        "scaler": session.scaler.state_dict() if session.scaler else {},
        "gradients": session.state.state_dict(),
        "losses": session.losses,
    }
    torch.save(state, os.path.join(folder, f"{session.rank}.pt"))


def load(session, folder):
    state = torch.load(os.path.join(folder, f"{session.rank}.pt"), weights_only=True)
    session.model.load_state_dict(state["model"])
    session.optimizer.load_state_dict(state["optimizer"])
    if session.scaler:
        session.scaler.load_state_dict(state["scaler"])
    session.state.load_state_dict(state["gradients"])
    session.losses = state["losses"]


def begin(plan, folder, end=None):
    """Train and save; ``end``: a signal that ends the process once every rank has saved."""
    session = Session(plan)
    for step in steps_of(plan):
        session.step(step)
    save(session, folder)
    if end is not None:
        meet("saved", dist.get_world_size())
        os.kill(os.getpid(), end)
    return session.trained()


def go_on(plan, folder, astray=0):
    """Load and train; ``astray``: steps of another training that the state went through before."""
    session = Session(plan)
    for step in range(astray):
        session.step(100 + step)
    load(session, folder)
    for step in steps_of(plan):
        session.step(step)
    return session.trained()


def resume(pool, folder, plan, at, size=2, **changed):
    """Steps 0 … at − 1, then the others by new objects."""
    pool.run(begin, replace(plan, steps=at), str(folder), size=size)
    return pool.run(
        go_on, replace(plan, first=at, steps=plan.steps - at, **changed), str(folder), size=size
    )


def test_killed_and_resumed_equals_uninterrupted(pool, mortal, tmp_path):
    """Other processes, DDP's buckets as at their first step again: not a bit differs."""
    codec = ByName(
        {"left": LAZY, "right": NAMES["ternary"], "norm": NAMES["int8"]}, Same(NAMES["sign"])
    )
    plan = Plan(codec, steps=9, ddp=SMALL_BUCKETS, state=EVERYTHING)
    with pytest.raises(SilentRank, match="exit code -9"):
        mortal.run(begin, replace(plan, steps=4), str(tmp_path), signal.SIGKILL, size=3)
    resumed = pool.run(go_on, replace(plan, first=4, steps=5), str(tmp_path), size=3)
    uninterrupted = pool.run(train, plan, size=3)
    assert_equal(resumed, uninterrupted)
    assert all(len(trained.losses) == 9 for trained in resumed)


@pytest.mark.parametrize(
    "codec", first(4, [name for name in NAMES if name not in ("sign", "ternary")])
)
def test_every_codec_resumes(pool, tmp_path, codec):
    plan = Plan(codec)
    assert_equal(resume(pool, tmp_path, plan, at=3), twin(plan, 2))


@pytest.mark.parametrize("at", [1, 2, 5])
def test_at_every_stage_of_ddps_buckets(pool, tmp_path, at):
    plan = Plan(LAZY, ddp=SMALL_BUCKETS)
    assert_equal(resume(pool, tmp_path, plan, at), twin(plan, 2))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(LAZY, accumulate=2, ddp={"gradient_as_bucket_view": True}),
        Plan(LAZY, dtype=torch.bfloat16),
        Plan(LAZY, ddp={"static_graph": True}),
        Plan("ternary", state={"exact_steps": 3, "seed": 4}),
        Plan("ternary", state={"exact_steps": 4}),
    ],
    ids=["accumulation", "bfloat16", "static graph", "after exact steps", "within exact steps"],
)
def test_resuming_in_every_mode(pool, tmp_path, plan):
    assert_equal(resume(pool, tmp_path, plan, at=3), twin(plan, 2))


def test_resuming_under_a_scaler(pool, tmp_path):
    plan = Plan(LAZY, scale=2.0**10, bad=(4,))
    expected = twin(replace(plan, scale=0.0, bad=(), left_out=(4,)), 2)
    assert_equal(resume(pool, tmp_path, plan, at=3), expected, losses=False)


def test_a_state_that_trained_astray_takes_the_loaded_one_over(pool, tmp_path):
    plan = Plan(LAZY)
    pool.run(begin, replace(plan, steps=3), str(tmp_path))
    assert_equal(pool.run(go_on, replace(plan, first=3, steps=3), str(tmp_path), 4), twin(plan, 2))


def test_what_is_left_out_makes_a_difference(pool, tmp_path):
    """Without the residuals the resumed run differs: the tests above can fail."""
    plan = Plan(LAZY)
    pool.run(begin, replace(plan, steps=3), str(tmp_path))
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for residual in state["gradients"]["residuals"].values():
            residual["sent"].zero_()
        torch.save(state, tmp_path / f"{rank}.pt")
    resumed = pool.run(go_on, replace(plan, first=3, steps=3), str(tmp_path))
    assert not torch.equal(
        resumed[0].parameters["head.weight"], twin(plan, 2)[0].parameters["head.weight"]
    )


# ---------------------------------------------------------------- elastic


def add(total, gradient):
    total += gradient.flatten()


def phase(plan, folder, files):
    """Load all parts if there are any, train, save this rank's part; what went in, what came out,
    what is left."""
    session = Session(plan)
    if files:
        session.model.load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))
        parts = [torch.load(f"{folder}/{file}", weights_only=True) for file in files]
        random.Random(session.rank).shuffle(parts)
        session.state.load_state_dict(*parts)
    loaded = session.trained().residuals
    given, taken = {}, {}
    for name, parameter in session.model.named_parameters():
        given[name], taken[name] = (
            torch.zeros(parameter.numel()).double(),
            torch.zeros(parameter.numel()).double(),
        )
        parameter.register_hook(partial(add, given[name]))
    for step in steps_of(plan):
        session.backward(step)
        for name, parameter in session.model.named_parameters():
            taken[name] += parameter.grad.flatten()
        session.optimizer.step()
        session.optimizer.zero_grad()
    elastic = session.state.elastic_state_dict()
    torch.save(elastic, f"{folder}/{dist.get_world_size()}-{session.rank}.pt")
    if session.rank == 0:
        torch.save(session.model.state_dict(), f"{folder}/model.pt")
    return (
        given,
        taken,
        loaded,
        session.trained(),
        sum(s["values"].numel() for s in elastic["shards"].values()),
    )


def total_residual(residuals, name, numel):
    """R = mean(sent) + the reduced residuals side by side, of one parameter; float64."""
    size = len(residuals)
    width = width_of(numel, size)
    sent = np.mean([r[name, 0][0].double().numpy() for r in residuals], axis=0)
    rows = [
        r[name, 0][1].double().numpy()[: max(min(width, numel - i * width), 0)]
        for i, r in enumerate(residuals)
    ]
    return sent + np.concatenate(rows)


@pytest.mark.parametrize("codec", first(2, [LAZY, "int4", "sign"]), ids=["lazy", "int4", "sign"])
def test_elastic_resume_owes_what_was_owed(pool, tmp_path, codec):
    """4 → 2 → 3 ranks: R is unchanged to rounding each time, and Σ outputs + R = Σ mean inputs over
    all three runs."""
    numels = {name: p.numel() for name, p in Net().named_parameters()}
    inputs, outputs = ({name: np.zeros(numel) for name, numel in numels.items()} for _ in range(2))
    before, files, first, steps = None, [], 0, 5
    eps = np.finfo(np.float32).eps
    for size in (4, 2, 3):
        plan = Plan(codec, first=first, steps=steps, state=EVERYTHING, ddp=SMALL_BUCKETS)
        results = pool.run(phase, plan, str(tmp_path), files, size=size)
        loaded, trained = [r[2] for r in results], [r[3].residuals for r in results]
        peak = {
            name: max(1.0, *(t[name, 0][0].abs().max().item() for t in trained)) for name in numels
        }
        for name, numel in numels.items():
            if before is not None:
                assert all(torch.equal(part[name, 0][0], loaded[0][name, 0][0]) for part in loaded)
                error = np.abs(total_residual(loaded, name, numel) - before[name]).max()
                # one sum over the ranks and one division in float32
                assert error <= 8 * eps * peak[name], name
            inputs[name] += np.mean([given[name].numpy() for given, *_ in results], axis=0)
            outputs[name] += results[0][1][name].numpy()
            assert all(torch.equal(taken[name], results[0][1][name]) for _, taken, *_ in results)
        assert sum(r[4] for r in results) == sum(numels.values()), "the parts together hold R once"
        before = {name: total_residual(trained, name, numel) for name, numel in numels.items()}
        files, first = [f"{size}-{rank}.pt" for rank in range(size)], first + steps
        for name in numels:
            # every step rounds a sum of a gradient and a residual on both sides
            error = np.abs(outputs[name] + before[name] - inputs[name]).max()
            assert error <= 8 * first * eps * peak[name], name
            assert np.abs(before[name]).max() > 1e-4, "there was something to owe"


def test_what_one_rank_owes_waits_for_a_second(pool, tmp_path):
    """2 → 1 → 2 ranks: a single rank passes gradients through and hands the residuals on, bit for
    bit."""
    first = pool.run(phase, Plan(LAZY, steps=4), str(tmp_path), [], size=2)
    alone = pool.run(
        phase, Plan(LAZY, first=4, steps=2), str(tmp_path), ["2-0.pt", "2-1.pt"], size=1
    )
    again = pool.run(phase, Plan(LAZY, first=6, steps=0), str(tmp_path), ["1-0.pt"], size=2)
    assert first[0][3].residuals.keys() == alone[0][3].residuals.keys() == again[0][2].keys()
    for key, (sent, _) in alone[0][2].items():
        assert sent.any()
        assert torch.equal(alone[0][3].residuals[key][0], sent)
        assert torch.equal(again[0][2][key][0], sent)
        assert torch.equal(again[1][2][key][0], sent)


def both_kinds(plan):
    """State that each rank saved exactly, and elastically."""
    session = Session(plan)
    for step in steps_of(plan):
        session.step(step)
    return session.state.state_dict(), session.state.elastic_state_dict()


def loaded_from(plan, states):
    session = Session(plan)
    session.state.load_state_dict(*states)
    return session.trained().residuals, session.state.step


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 2), (2, 1)])
def test_the_exact_states_of_all_ranks_go_on_at_any_size(pool, before, after):
    """At another size as the elastic ones, of which they hold all; at the same size each rank takes
    its own."""
    plan = Plan("sign", steps=4, state=EVERYTHING)
    exact, elastic = zip(*pool.run(both_kinds, plan, size=before), strict=True)
    wanted = pool.run(loaded_from, plan, list(elastic), size=after)
    found = pool.run(loaded_from, plan, list(reversed(exact)), size=after)
    for rank, ((residuals, step), (expected, _)) in enumerate(zip(found, wanted, strict=True)):
        assert step == 4
        assert residuals.keys() == expected.keys()
        for key, tensors in residuals.items():
            if before == after:
                name, offset = key
                kept = exact[rank]["residuals"][f"{name}@{offset}"]
                assert torch.equal(tensors[0], kept["sent"])
                assert torch.equal(tensors[1], kept["reduced"])
            else:
                for one, other in zip(tensors, expected[key], strict=True):
                    # float32 rounding of values below 1
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- states that do not belong


HEAD = "head.weight@0"


def changed(state, kind, key, value):
    """``state`` with another value of the residual of the head, or without it."""
    every = dict(state[kind])
    kept = every.pop(HEAD)
    return state | {kind: every | ({key: value(kept)} if key else {})}


# (own, parts) → states that do not belong, and what is said
WRONG = [
    (
        lambda own, parts: [changed(own, "residuals", "nobody.weight@0", lambda kept: kept)],
        "the state has a residual of 'nobody.weight', but the model has no such parameter",
    ),
    (
        lambda own, parts: [
            changed(own, "residuals", HEAD, lambda kept: kept | {"sent": torch.zeros(7)})
        ],
        "the state has 7 residuals of 'head.weight' from element 0 on, but that parameter has 384 "
        "elements",
    ),
    (
        lambda own, parts: [
            changed(own, "residuals", HEAD, lambda kept: kept | {"reduced": torch.zeros(7)})
        ],
        "the reduced residual of parameter 'head.weight' at offset 0 has 7 elements, expected 192",
    ),
    (lambda own, parts: [own | {"rank": 1 - own["rank"]}], "of 2, this is rank "),
    (
        lambda own, parts: [own | {"size": 3}],
        "load each rank's own file, or to change the world size those of all ranks on every rank",
    ),
    (lambda own, parts: [own, own], "needs all 2 parts of one step, got those of ranks ["),
    (lambda own, parts: parts[:1], "needs all 2 parts of one step, got those of ranks [0]"),
    (
        lambda own, parts: [parts[0], parts[0]],
        "needs all 2 parts of one step, got those of ranks [0, 0]",
    ),
    (
        lambda own, parts: [parts[0], parts[1] | {"step": 99}],
        "needs all 2 parts of one step",
    ),
    (
        lambda own, parts: [parts[0], changed(parts[1], "shards", "", None)],
        "not all with the same parameters",
    ),
    (lambda own, parts: [parts[0], own], "different kinds or world sizes"),
    (
        lambda own, parts: [{"model": {}}],
        "expected what state_dict() or elastic_state_dict() gave",
    ),
    (lambda own, parts: [], "expected what state_dict() or elastic_state_dict() gave"),
]


def load_wrong_states(plan):
    session = Session(plan)
    for step in steps_of(plan):
        session.step(step)
    before, messages = session.trained(), []
    for spoil, _ in WRONG:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, session.state.elastic_state_dict())
        try:
            session.state.load_state_dict(*spoil(session.state.state_dict(), parts))
        except StateMismatch as error:
            messages.append(str(error))
        assert session.state.step == plan.steps
        assert_equal([session.trained()], [before], losses=False)
    return messages, before


def test_a_state_that_does_not_belong_is_refused_and_changes_nothing(pool):
    for messages, before in pool.run(load_wrong_states, Plan(LAZY, steps=3)):
        for message, (_, says) in zip(messages, WRONG, strict=True):
            assert says in message
        assert {name for name, _ in before.residuals} == {
            n for n, p in Net().named_parameters() if p.numel() >= MIN_NUMEL
        }
