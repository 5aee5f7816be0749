"""FSDP2: states that do not fit are refused, and nothing of a gradient is lost.
tests/state/test_real_ranks.py saves and loads those that do."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commpress
from commpress.collectives.topology import Topology
from fsdp_twin import Plan, Session
from ranks import caught

WHOLE = commpress.ByName({"up.weight": "powersgd-1", "norm": "none"}, "powersgd-2")
PAIRS = {"topology": Topology(((0, 1), (2, 3)))}


def misfits() -> dict[str, str]:
    """Errors of states that are not those of all ranks, in codes, or of two hops."""
    calls = {}
    for kept, given in ((True, 3), ("shift8", 4)):
        session = Session(Plan(codec="int4", steps=1, options={"error_feedback": kept})).run()
        states: list[Any] = [None] * 4
        dist.all_gather_object(states, session.state.state_dict())
        calls[str(kept)] = partial(session.state.load_state_dict, *states[:given])
    one, two = (Session(Plan(codec=WHOLE, options=options)) for options in ({}, PAIRS))
    calls["save"] = two.state.elastic_state_dict
    calls["load"] = partial(two.state.load_state_dict, one.state.elastic_state_dict())
    return {name: str(caught(call)) for name, call in calls.items()}


def test_states_that_do_not_fit_say_so(pool):
    for said in pool.run(misfits, size=4):
        assert "ranks [0, 1, 2] of a run on 4" in said["True"]
        assert "residuals were kept in 'shift" in said["shift8"]
        assert "resume on 4 ranks" in said["shift8"]
        assert "no elastic form: save with state_dict()" in said["save"]
        assert "leave topology= out" in said["load"]


def telescoped(codec: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sum of compressed gradients + R against the sum of exact ones, with weights that do not
    move."""
    torch.set_num_threads(1)
    sums = []
    for compressed in (False, True):
        session = Session(Plan(codec=codec, weights=None, lr=0.0, compressed=compressed))
        total: dict[str, torch.Tensor] = {}
        for step in range(4):
            session.step(step)
            for name, gradient in session.gradients.items():
                total[name] = total.get(name, 0) + gradient
        sums.append(total)
    for name, shard_ in session.state.elastic_state_dict()["residuals"].items():
        sums[1][name] = sums[1][name] + shard_.full_tensor()
    return sums[0], sums[1]


@pytest.mark.parametrize("codec", ["int4", WHOLE], ids=["rows", "whole tensors"])
def test_nothing_of_a_gradient_is_lost(pool, codec):
    for exact, ours in pool.run(telescoped, codec, size=4):
        for name in exact:
            torch.testing.assert_close(ours[name], exact[name], atol=2e-6, rtol=1e-5)
