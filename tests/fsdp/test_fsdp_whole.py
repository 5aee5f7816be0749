"""FSDP2 with codecs of whole tensors: PowerSGD gives the bits that it gives under DDP."""

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
from fsdp_twin import Net, Plan, Session
from variants import seldom

LOW_RANK = commpress.ByName({"norm|bias": "none"}, "powersgd-2")
MIXED = commpress.ByName(
    {"up.weight": "powersgd-1+fp8", "head": "none", "norm": "none"}, "powersgd-2"
)
CODECS = {"powersgd": LOW_RANK, "mixed": MIXED}
PLAN = Plan(weights=None, steps=3)
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
        ("powersgd", PLAN, 3),
        ("mixed", HALF, 3),
        ("mixed", replace(PLAN, columns=True), 4),
        ("powersgd", replace(PLAN, steps=1, divide=8.0), 2),
        seldom("mixed", replace(PLAN, options={"error_feedback": False}), 2),
        (
            "mixed",
            replace(
                PLAN,
                options={"topology": Topology(((0, 2), (1, 3))), "overlap": False},
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


# ---------------------------------------------------------------- what goes wrong


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
