"""torch's own pipeline schedules over FSDP2 with compressed traffic, on a mesh of two stages (or four) and two replicas."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import commpress
from commpress.errors import NonFiniteGradient
from ddp_twin import Log

SCHEDULES = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}


def part(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def error_of(y, target):
    return (y - target).square().mean()


def train(schedule, options):
    """Losses of the last stage, this rank's weights, and what was said; ``options`` None: as torch sends."""
    said = Log()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    make, chunks = SCHEDULES[schedule]
    rank, stages = mesh["pp"].get_local_rank(), []
    for number in range(rank, 2 * chunks, 2):
        module = part(number)
        for layer in (module[0], module[2], module):
            fully_shard(layer, mesh=mesh["dp"])
        if options is not None:
            commpress.compress_fsdp(module, min_numel=1, **options)
        stages.append(PipelineStage(module, number, 2 * chunks, torch.device("cpu"), group=mesh["pp"].get_group()))
    pipeline = make(stages if chunks > 1 else stages[0], 4, loss_fn=error_of)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(16, 16, generator=generator)
        found = []
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=torch.tanh(x.flip(1)), losses=found)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(loss) for loss in found]
    return losses, [p.to_local().detach().clone() for p in parameters], said.lines


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_train_alike_with_and_without_overlap(pool, schedule):
    """Behind which backward a gradient is reduced changes no bit, and eight bits hardly the loss."""
    plain = pool.run(train, schedule, None, size=4)
    overlapped = pool.run(train, schedule, {"overlap": True}, size=4)
    at_once = pool.run(train, schedule, {"overlap": False}, size=4)
    for (exact, _, _), (losses, weights, said), (theirs, expected, _) in zip(plain, overlapped, at_once, strict=True):
        assert losses == theirs
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
        assert losses == pytest.approx(exact, rel=0.02)
        assert sum("outside of backward" in line for line in said) == SCHEDULES[schedule][1]  # once for each model
    assert len(plain[2][0]) == 16


def poisoned(schedule, on_nonfinite):
    """NaN in the input of one replica in the first step; whether the error came, and whether weights stayed finite."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    make, _ = SCHEDULES[schedule]
    rank, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module = part(rank)
    fully_shard(module, mesh=mesh["dp"])
    state = commpress.compress_fsdp(module, min_numel=1, on_nonfinite=on_nonfinite)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    pipeline, raised = make(stage, 4, loss_fn=error_of), False
    x = torch.full((16, 16), float("nan") if replica == 1 else 1.0)
    try:
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=torch.ones(16, 16), losses=[])
    except NonFiniteGradient:
        raised = True
    finite = all(p.grad is None or torch.isfinite(p.grad.to_local()).all() for p in module.parameters())
    return raised, bool(finite), state.gradients.skipped_buckets


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_what_is_not_finite_is_noticed_between_backwards_too(pool, on_nonfinite):
    assert pool.run(poisoned, "gpipe", on_nonfinite, size=4) == [(on_nonfinite == "raise", True, 1)] * 4
