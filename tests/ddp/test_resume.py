"""Resuming in other processes, under a loss scale, and states that do not belong; the laws of
``tests/state`` say the rest."""

import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from commpress.codecs import ByName, SignCodec
from commpress.codecs.family import NAMES
from commpress.codecs.policy import Same
from commpress.errors import StateMismatch
from ddp_twin import MIN_NUMEL, Net, Plan, Session, assert_equal, steps_of, train, twin
from ranks import SilentRank, meet

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


def go_on(plan, folder):
    """Load and train."""
    session = Session(plan)
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


def test_resuming_under_a_scaler(pool, tmp_path):
    plan = Plan(LAZY, scale=2.0**10, bad=(4,))
    expected = twin(replace(plan, scale=0.0, bad=(), left_out=(4,)), 2)
    assert_equal(resume(pool, tmp_path, plan, at=3), expected, losses=False)


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
