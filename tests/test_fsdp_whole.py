"""FSDP2 with codecs of whole tensors: PowerSGD and sketches give the bits that they give under DDP, and resume."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.collectives.topology import Topology
from commpress.errors import InvalidArgument
from fsdp_twin import Net, Plan, Session, carried

LOW_RANK = commpress.ByName({"norm|bias": "none"}, "powersgd-2")
SKETCH = commpress.ByName({"norm|bias": "none"}, "sketch-4")
MIXED = commpress.ByName({"up.weight": "sketch-4", "head": "none", "norm": "none"}, "powersgd-2")
CODECS = {"powersgd": LOW_RANK, "sketch": SKETCH, "mixed": MIXED}
PLAN = Plan(weights=None, steps=4)
HALF = replace(PLAN, model_dtype=torch.bfloat16, lr=0.125, momentum=0.0)  # others are rounded twice at the end of a vector


def under_ddp(plan: Plan) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and last gradients of the same training with DDP's hook."""
    session = Session(replace(plan, compressed=False, steps=0, columns=False, divide=0.0))
    torch.manual_seed(0)
    session.model = DistributedDataParallel(Net().to(plan.model_dtype))
    feedback = plan.options.get("error_feedback", True)
    commpress.compress(session.model, plan.gradients, min_numel=0, error_feedback=feedback)
    session.optimizer = torch.optim.SGD(session.model.parameters(), lr=plan.lr, momentum=plan.momentum)
    for step in range(plan.steps):
        session.optimizer.zero_grad()
        session.backward(step)
        session.optimizer.step()
    named = dict(session.model.module.named_parameters())
    return {n: p.detach().clone() for n, p in named.items()}, {n: p.grad.clone() for n, p in named.items()}


def against_ddp(plan: Plan) -> dict[str, Any]:
    torch.set_num_threads(1)
    parameters, gradients = under_ddp(replace(plan, scale=0.0))
    session = Session(plan).run()
    ours = session.trained()
    share = plan.divide and dist.get_world_size() / plan.divide
    different = [n for n in parameters if not torch.equal(ours.parameters[n], parameters[n]) and not share]
    wrong = [n for n in gradients if not torch.equal(ours.gradients[n], gradients[n] * (share or 1.0))]
    return {"different": different, "wrong": wrong, "compressed": ours.compressed[0], "sent": ours.sent[:2]}


@pytest.mark.parametrize(
    ("codec", "plan", "size"),
    [
        ("powersgd", PLAN, 2),
        ("powersgd", PLAN, 3),
        ("sketch", PLAN, 3),
        ("mixed", PLAN, 3),
        ("mixed", replace(PLAN, options={"overlap": False}), 2),
        ("mixed", HALF, 3),
        ("mixed", replace(PLAN, scale=1024.0), 2),
        ("mixed", replace(PLAN, columns=True), 4),
        ("powersgd", replace(PLAN, steps=1, divide=8.0), 2),
        ("mixed", replace(PLAN, options={"error_feedback": False}), 2),
    ],
)
def test_equals_ddp_bit_for_bit(pool, codec, plan, size):
    """A mean of whole tensors is the same however they are cut, and a sum over three ranks is in the same order."""
    for found in pool.run(against_ddp, replace(plan, gradients=CODECS[codec]), size=size):
        assert found["different"] == []
        assert found["wrong"] == []
        assert found["compressed"] > 0
        assert found["sent"][0] > 0


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("columns", [False, True])
def test_what_is_owed_and_learnt_survives_another_world_size(pool, tmp_path, columns):
    rules = {"up.weight": "sketch-4", "down.weight": "int4", "head": "none", "norm|bias": "none"}
    plan = replace(PLAN, gradients=commpress.ByName(rules, "powersgd-2"), columns=columns)
    saved, *_ = pool.run(carried, plan, str(tmp_path), False, size=4)
    for loaded in pool.run(carried, plan, str(tmp_path), True, size=2):
        for kind in ("residuals", "bases", "quanta"):
            assert loaded[kind].keys() == saved[kind].keys()
            for name, values in saved[kind].items():
                torch.testing.assert_close(loaded[kind][name], values, atol=1e-7, rtol=1e-6)
    for name in ("tokens.weight", "blocks.1.up.weight", "blocks.0.down.weight"):
        assert saved["residuals"][name].abs().sum() > 0, name
    assert all(saved["quanta"].values())
    assert saved["bases"]


# ---------------------------------------------------------------- what goes wrong


def poisoned() -> list[bool]:
    """True if gradients are zeros, and residuals, bases and quanta unchanged, after a backward with infinity on a rank."""
    torch.set_num_threads(1)
    session = Session(replace(PLAN, gradients=MIXED)).run()
    before = session.state.state_dict()
    x = torch.zeros(2, dtype=torch.long)
    (session.model(x).square().mean() * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    after = session.state.state_dict()
    zeros = [bool((p.grad.to_local() == 0).all()) for p in session.model.parameters()]
    same = [torch.equal(after[kind][k], v) for kind in ("residuals", "bases") for k, v in before[kind].items()]
    return [*zeros, *same, after["quanta"] == before["quanta"], len(before["bases"]) > 0, len(before["quanta"]) > 0]


def test_a_rank_that_is_not_finite_changes_no_residual_basis_or_quantum(pool):
    for found in pool.run(poisoned, size=2):
        assert all(found)


def refused() -> None:
    nodes = Topology(((0,), (1,)) if dist.get_world_size() == 2 else ((0,),))
    for options, message in (
        ({"weights": "sketch-64"}, r"weights is 'sketch/64/1\.5' .* compresses whole tensors"),
        ({"weights": commpress.Difference("powersgd-2")}, "weights is 'powersgd/2/2' .* compresses whole tensors"),
        ({"weights": LOW_RANK}, "weights is 'powersgd/2/2' .* rows of weights only"),
        ({"gradients": "powersgd-2", "inside": "int8", "topology": nodes}, "gradients is .* leave inside= and topology= out"),
        ({"gradients": "int4", "inside": "sketch-8", "topology": nodes}, "inside is 'sketch/8/1.5' .* choose a codec of rows"),
    ):
        model = Net()
        fully_shard(model)
        with pytest.raises(InvalidArgument, match=message):
            commpress.compress_fsdp(model, **options)
    model = Net()
    fully_shard(model)
    commpress.compress_fsdp(model, "powersgd-2", None)


@pytest.mark.parametrize("size", [1, 2])
def test_what_whole_tensors_cannot_do_is_refused_at_once_on_any_number_of_ranks(pool, size):
    pool.run(refused, size=size)
