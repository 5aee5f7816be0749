"""FSDP2: residuals are saved and loaded, exactly and on another world size, and nothing of a
gradient is lost."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commpress
from commpress.errors import StateMismatch
from fsdp_twin import Plan, Session, Trained

WHOLE = commpress.ByName({"up.weight": "powersgd-1", "norm": "none"}, "powersgd-2")


def resumed(plan: Plan, folder: str) -> tuple[Trained, Trained]:
    """Five steps in one go; three steps, saved by every rank and torch's distributed checkpoint,
    then two in a new session."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.set_num_threads(1)
    whole = Session(plan).run().trained()
    short = Session(Plan(**{**plan.__dict__, "steps": 3})).run()
    torch.save(short.state.state_dict(), f"{folder}/rank{dist.get_rank()}.pt")
    model, optimizer = get_state_dict(short.model, short.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    again = Session(Plan(**{**plan.__dict__, "steps": 2, "first": 3}))
    model, optimizer = get_state_dict(again.model, again.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(again.model, again.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    again.state.load_state_dict(torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=True))
    return whole, again.run().trained()


@pytest.mark.slow  # by torch's checkpoints; tests/state/test_real_ranks.py saves states as they are
@pytest.mark.parametrize(
    "plan",
    [
        Plan(codec="int4", steps=5),
        Plan(codec="int4", weights=commpress.Difference("int4"), dtype=torch.bfloat16, steps=5),
        Plan(codec=WHOLE, steps=5),
    ],
    ids=str,
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(pool, tmp_path, plan):
    for whole, again in pool.run(resumed, plan, str(tmp_path), size=2):
        assert again.losses == whole.losses[-2:]
        for name in whole.parameters:
            assert torch.equal(again.parameters[name], whole.parameters[name]), name


def too_few(folder: str) -> list[str]:
    """Errors of states that are not those of all ranks, and of residuals in codes."""
    said = []
    for kept, given in ((True, 3), ("shift8", 4)):
        session = Session(Plan(codec="int4", steps=1, options={"error_feedback": kept})).run()
        states: list[Any] = [None] * 4
        dist.all_gather_object(states, session.state.state_dict())
        with pytest.raises(StateMismatch) as caught:
            session.state.load_state_dict(*states[:given])
        said.append(str(caught.value))
    return said


def test_states_that_do_not_fit_another_world_size_say_so(pool, tmp_path):
    for missing, coded in pool.run(too_few, str(tmp_path), size=4):
        assert "ranks [0, 1, 2] of a run on 4" in missing
        assert "residuals were kept in 'shift" in coded
        assert "resume on 4 ranks" in coded


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
