"""FSDP2 with codecs of whole tensors: PowerSGD gives the bits that it gives under DDP, and
resumes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.collectives.topology import Topology
from commpress.errors import InvalidArgument, StateMismatch
from fsdp_twin import Net, Plan, Session, carried
from variants import seldom

LOW_RANK = commpress.ByName({"norm|bias": "none"}, "powersgd-2")
MIXED = commpress.ByName(
    {"up.weight": "powersgd-1+fp8", "head": "none", "norm": "none"}, "powersgd-2"
)
CODECS = {"powersgd": LOW_RANK, "mixed": MIXED}
PLAN = Plan(weights=None, steps=3)
PAIRS = {"topology": Topology(((0, 1), (2, 3)))}
# others are rounded twice at the end of a vector
HALF = replace(PLAN, model_dtype=torch.bfloat16, lr=0.125, momentum=0.0)


def under_ddp(plan: Plan) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and last gradients of the same training with DDP's hook."""
    session = Session(replace(plan, compressed=False, steps=0, columns=False, divide=0.0))
    torch.manual_seed(0)
    session.model = DistributedDataParallel(Net().to(plan.model_dtype))
    feedback = plan.options.get("error_feedback", True)
    topology = plan.options.get("topology")
    commpress.compress(
        session.model, plan.codec, min_numel=0, error_feedback=feedback, topology=topology
    )
    session.optimizer = torch.optim.SGD(
        session.model.parameters(), lr=plan.lr, momentum=plan.momentum
    )
    for step in range(plan.steps):
        session.optimizer.zero_grad()
        session.backward(step)
        session.optimizer.step()
    named = dict(session.model.module.named_parameters())
    return {n: p.detach().clone() for n, p in named.items()}, {
        n: p.grad.clone() for n, p in named.items()
    }


def against_ddp(plan: Plan) -> dict[str, Any]:
    torch.set_num_threads(1)
    parameters, gradients = under_ddp(replace(plan, scale=0.0))
    session = Session(plan).run()
    ours = session.trained()
    share = plan.divide and dist.get_world_size() / plan.divide
    different = [
        n for n in parameters if not torch.equal(ours.parameters[n], parameters[n]) and not share
    ]
    wrong = [
        n for n in gradients if not torch.equal(ours.gradients[n], gradients[n] * (share or 1.0))
    ]
    return {
        "different": different,
        "wrong": wrong,
        "compressed": ours.compressed[0],
        "sent": ours.sent[:2],
    }


@pytest.mark.parametrize(
    ("codec", "plan", "size"),
    [
        seldom("powersgd", PLAN, 2),
        ("powersgd", PLAN, 3),
        seldom("mixed", PLAN, 3),
        seldom("mixed", replace(PLAN, options={"overlap": False}), 2),
        ("mixed", HALF, 3),
        seldom("mixed", replace(PLAN, scale=1024.0), 2),
        ("mixed", replace(PLAN, columns=True), 4),
        ("powersgd", replace(PLAN, steps=1, divide=8.0), 2),
        seldom("mixed", replace(PLAN, options={"error_feedback": False}), 2),
        seldom("mixed", replace(PLAN, options=PAIRS), 4),
        (
            "mixed",
            replace(
                PLAN,
                options={**PAIRS, "topology": Topology(((0, 2), (1, 3))), "overlap": False},
                scale=64.0,
            ),
            4,
        ),
    ],
)
def test_equals_ddp_bit_for_bit(pool, codec, plan, size):
    """A mean of whole tensors is the same however they are cut, and a sum over three ranks is in
    the same order."""
    for found in pool.run(against_ddp, replace(plan, codec=CODECS[codec]), size=size):
        assert found["different"] == []
        assert found["wrong"] == []
        assert found["compressed"] > 0
        assert found["sent"][0] > 0


# ---------------------------------------------------------------- two levels


def resumed_between_nodes() -> list[bool]:
    """True for each tensor that a run which was saved and loaded after two steps ends with, as one
    without a break does."""
    torch.set_num_threads(1)
    plan = replace(PLAN, steps=4, codec=MIXED, momentum=0.0, options=PAIRS)
    whole = Session(plan).run()
    first = Session(replace(plan, steps=2)).run()
    second = Session(replace(plan, steps=2, first=2))
    second.model.load_state_dict(first.model.state_dict())
    second.state.load_state_dict(first.state.state_dict())
    second.run()
    with pytest.raises(StateMismatch, match=r"no elastic form: save with state_dict\(\)"):
        whole.state.elastic_state_dict()
    with pytest.raises(StateMismatch, match="leave topology= out"):
        second.state.load_state_dict(
            Session(replace(PLAN, codec=MIXED)).run().state.elastic_state_dict()
        )
    ended, going_on = whole.trained().parameters, second.trained().parameters
    return [torch.equal(ended[name], going_on[name]) for name in ended]


def test_a_run_between_nodes_resumes_in_every_bit(pool):
    assert all(all(found) for found in pool.run(resumed_between_nodes, size=4))


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("columns", [False, True])
def test_what_is_owed_and_learnt_survives_another_world_size(pool, tmp_path, columns):
    rules = {"up.weight": "powersgd-1", "down.weight": "int4", "head": "none", "norm|bias": "none"}
    plan = replace(PLAN, codec=commpress.ByName(rules, "powersgd-2"), columns=columns)
    saved, *_ = pool.run(carried, plan, str(tmp_path), False, size=4)
    for loaded in pool.run(carried, plan, str(tmp_path), True, size=2):
        for kind in ("residuals", "bases"):
            assert loaded[kind].keys() == saved[kind].keys()
            for name, values in saved[kind].items():
                torch.testing.assert_close(loaded[kind][name], values, atol=1e-7, rtol=1e-6)
    for name in ("tokens.weight", "blocks.1.up.weight", "blocks.0.down.weight"):
        assert saved["residuals"][name].abs().sum() > 0, name
    assert saved["bases"]


# ---------------------------------------------------------------- what goes wrong


def poisoned(options: dict[str, Any]) -> list[bool]:
    """True if gradients are zeros, and residuals and bases unchanged, after a backward with
    infinity on a rank."""
    torch.set_num_threads(1)
    session = Session(replace(PLAN, codec=MIXED, options=options)).run()
    before = session.state.state_dict()
    x = torch.zeros(2, dtype=torch.long)
    (session.model(x).square().mean() * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    after = session.state.state_dict()
    zeros = [bool((p.grad.to_local() == 0).all()) for p in session.model.parameters()]
    same = [
        torch.equal(after[kind][k], v)
        for kind in ("residuals", "bases")
        for k, v in before[kind].items()
    ]
    return [
        *zeros,
        *same,
        len(before["bases"]) > 0,
    ]


@pytest.mark.parametrize(("size", "options"), [(2, {}), (4, PAIRS)])
def test_a_rank_that_is_not_finite_changes_no_residual_or_basis(pool, size, options):
    for found in pool.run(poisoned, options, size=size):
        assert all(found)


def refused() -> None:
    nodes = Topology(((0,), (1,)) if dist.get_world_size() == 2 else ((0,),))
    for options, message in (
        (
            {"weights": "powersgd-4"},
            "weights has the codec 'powersgd/4/2' .* compresses whole tensors",
        ),
        (
            {"weights": commpress.Difference("powersgd-2")},
            "weights has the codec 'powersgd/2/2' .* compresses whole tensors",
        ),
        ({"weights": LOW_RANK}, "weights has the codec 'powersgd/2/2' .* rows of weights only"),
        (
            {"codec": "powersgd-2", "topology": (nodes, "int8")},
            "topology has the codec 'int8/256' for .* pass the nodes alone",
        ),
        (
            {"codec": "int4", "topology": (nodes, "powersgd-8")},
            "topology has the codec 'powersgd/8/2' .* choose a codec of rows",
        ),
    ):
        model = Net()
        fully_shard(model)
        with pytest.raises(InvalidArgument, match=message):
            commpress.compress_fsdp(model, **options)
    model = Net()
    fully_shard(model)
    commpress.compress_fsdp(model, "powersgd-2", None)
    model = Net()
    fully_shard(model)
    commpress.compress_fsdp(model, "powersgd-2", None, topology=(nodes, "none"))


@pytest.mark.parametrize("size", [1, 2])
def test_what_whole_tensors_cannot_do_is_refused_at_once_on_any_number_of_ranks(pool, size):
    pool.run(refused, size=size)
