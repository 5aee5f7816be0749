"""torch's own pipeline schedules over FSDP2 with compressed traffic, on a mesh of two stages (or
four) and two replicas."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import commpress
from commpress.errors import NonFiniteGradient
from ddp_twin import Log
from ranks import caught, refused
from variants import first

SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}


def part(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def error_of(y, target):
    return (y - target).square().mean()


def train(schedule, options):
    """Losses of the last stage, this rank's weights, and what was said; ``options`` None: as torch
    sends."""
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
        stages.append(
            PipelineStage(
                module, number, 2 * chunks, torch.device("cpu"), group=mesh["pp"].get_group()
            )
        )
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


@pytest.mark.parametrize("schedule", first(2, [*SCHEDULES]))
def test_schedules_train_alike_with_and_without_overlap(pool, schedule):
    """Behind which backward a gradient is reduced changes no bit, and eight bits hardly the
    loss."""
    plain = pool.run(train, schedule, None, size=4)
    overlapped = pool.run(train, schedule, {"overlap": True}, size=4)
    at_once = pool.run(train, schedule, {"overlap": False}, size=4)
    for (exact, _, _), (losses, weights, _), (theirs, expected, _) in zip(
        plain, overlapped, at_once, strict=True
    ):
        assert losses == theirs
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
        assert losses == pytest.approx(exact, rel=0.02)
    said = sum("outside of backward" in line for _, _, lines in overlapped for line in lines)
    assert said == 2 * SCHEDULES[schedule][1], "once for each model of both ranks of the pipeline"
    assert len(plain[2][0]) == 16


def poisoned(schedule, on_nonfinite):
    """NaN in the input of one replica in the first step; whether the error came, and whether
    weights stayed finite."""
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
    finite = all(
        p.grad is None or torch.isfinite(p.grad.to_local()).all() for p in module.parameters()
    )
    return raised, bool(finite), state.gradients.skipped_buckets


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_what_is_not_finite_is_noticed_between_backwards_too(pool, on_nonfinite):
    assert (
        pool.run(poisoned, "gpipe", on_nonfinite, size=4)
        == [(on_nonfinite == "raise", True, 1)] * 4
    )


# ---------------------------------------------------------------- one call for both dimensions


class Spoilt(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Shifted(nn.Module):
    """A stage one of whose parameters can get a gradient of which no other stage hears."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down, self.shift = (
            nn.Linear(16, 256),
            nn.Linear(256, 16),
            nn.Parameter(torch.zeros(16)),
        )
        self.factor = 1.0

    def forward(self, x):
        return self.down(self.up(x).tanh()) + Spoilt.apply(self.shift, self.factor)


def one_call(schedule, codec, bad=None, clip=False, scaled=False, on_nonfinite="skip"):
    """Whole weights of this rank's stages after each step, norms, scales and states."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    make, chunks = SCHEDULES[schedule]
    rank, replica, stages = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), []
    for number in range(rank, 2 * chunks, 2):
        module = Shifted(number)
        for layer in (module.up, module.down, module):
            fully_shard(layer, mesh=mesh["dp"])
        stages.append(
            PipelineStage(
                module, number, 2 * chunks, torch.device("cpu"), group=mesh["pp"].get_group()
            )
        )
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    options = {"min_numel": 1, "on_nonfinite": on_nonfinite} | (
        {"grad_scaler": scaler} if scaled else {}
    )
    scaler.scale(torch.ones(()))  # or it does not begin where there is no loss
    pipeline = make(
        stages if chunks > 1 else stages[0],
        4,
        loss_fn=lambda y, target: scaler.scale(error_of(y, target)),
    )
    states = (
        commpress.compress(pipeline, mesh=mesh, dims={"dp": codec, "pp": codec}, **options)
        if codec
        else None
    )
    held = [p for stage in stages for p in stage.submod.parameters()]
    optimizer, seen, norms, scales, raised = torch.optim.SGD(held, lr=0.1), [], [], [], []
    generator = torch.Generator().manual_seed(replica)
    for step in range(3):
        x, target = (torch.randn(256, 16, generator=generator) for _ in range(2))
        if (rank, replica) == (1, 0):  # the last stage of one replica
            stages[-1].submod.factor = bad if bad is not None and step == 1 else 1.0
        pipeline.step(
            *([x] if rank == 0 else []), **({} if rank == 0 else {"target": target, "losses": []})
        )
        owed = None if states is None else residuals(states)
        with (
            pytest.raises(NonFiniteGradient)
            if (on_nonfinite, step) == ("raise", 1)
            else nullcontext() as error
        ):
            if states is not None:
                states.synchronize()
        raised.append(error is not None)
        if clip:
            squares = sum(float(p.grad.full_tensor().double().square().sum()) for p in held)
            norms.append((squares, float(states.clip_grad_norm_(0.05))))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        changed = (
            None
            if states is None
            else any(not torch.equal(a, b) for a, b in zip(owed, residuals(states), strict=True))
        )
        seen.append(([p.full_tensor().detach().clone() for p in held], changed))
    sent = (
        None
        if states is None
        else [states["dp"].gradients, states["dp"].weights, states["pp"].counters]
    )
    return seen, norms, scales, raised, sent


def residuals(states):
    every = states["dp"].by_stage.values() if hasattr(states["dp"], "by_stage") else [states["dp"]]
    return [sent.clone() for state in every for _, sent, _ in state.residuals.places()]


@pytest.mark.parametrize("schedule", first(2, [*SCHEDULES]))
def test_one_call_without_a_codec_trains_as_torch_does_in_every_bit(pool, schedule):
    expected = pool.run(one_call, schedule, None, size=4)
    for (seen, *_), (torchs, *_) in zip(
        pool.run(one_call, schedule, "none", size=4), expected, strict=True
    ):
        assert all(
            torch.equal(*both)
            for (mine, _), (their, _) in zip(seen, torchs, strict=True)
            for both in zip(mine, their, strict=True)
        )


@pytest.mark.parametrize(("schedule", "on_nonfinite"), [("1f1b", "skip"), ("interleaved", "raise")])
def test_one_gradient_that_is_not_finite_leaves_the_step_out_in_all_stages(
    pool, schedule, on_nonfinite
):
    """Weights and residuals, also of stages whose gradients were finite; and bytes fall by what
    four bits are."""
    results = pool.run(one_call, schedule, "int4", float("nan"), False, False, on_nonfinite, size=4)
    for rank, (seen, _, _, raised, (gradients, weights, edges)) in enumerate(results):
        twin = results[rank ^ 1][0]
        assert raised == [False, on_nonfinite == "raise", False]
        assert all(torch.equal(*both) for both in zip(seen[0][0], seen[1][0], strict=True))
        assert not any(torch.equal(*both) for both in zip(seen[1][0], seen[2][0], strict=True))
        assert [changed for _, changed in seen] == [True, False, True]
        assert all(
            torch.equal(*both)
            for (mine, _), (their, _) in zip(seen, twin, strict=True)
            for both in zip(mine, their, strict=True)
        )
        assert gradients.skipped_steps == 1
        assert gradients.ratio > 3
        assert weights.ratio > 3
        assert edges.exact_bytes > 3 * edges.sent_bytes > 0


def test_an_overflow_in_one_stage_lowers_the_scale_of_all(pool):
    for seen, _, scales, _, _ in pool.run(
        one_call, "1f1b", "int8", float("inf"), False, True, size=4
    ):
        assert scales == [64.0, 32.0, 32.0]
        assert all(torch.equal(*both) for both in zip(seen[0][0], seen[1][0], strict=True))
        assert not any(torch.equal(*both) for both in zip(seen[1][0], seen[2][0], strict=True))


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_stages_are_clipped_by_the_norm_of_all(pool, schedule):
    results = pool.run(one_call, schedule, "int8", 1e4, True, size=4)
    for step in range(3):
        norm = sum(results[rank][1][step][0] for rank in (0, 2)) ** 0.5
        assert [each[1][step][1] for each in results] == pytest.approx([norm] * 4, rel=1e-6)
        assert norm > 0.05


def forgotten():
    with pytest.raises(Exception) as caught:  # noqa: PT011
        unsettled()
    return str(caught.value)


def unsettled():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    module = fully_shard(Shifted(0), mesh=mesh["dp"])
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    commpress.compress([stage], mesh=mesh, dims={"dp": "int4"}, min_numel=1)
    pipeline = ScheduleGPipe(stage, 2, loss_fn=error_of)
    for _ in range(2):
        pipeline.step(torch.ones(4, 16), target=torch.ones(4, 16))


def mixed():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    modules = [fully_shard(Shifted(0), mesh=mesh["dp"]), Shifted(1)]
    stages = [
        PipelineStage(m, i, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        for i, m in enumerate(modules)
    ]
    return refused({"mixed": lambda: commpress.compress(stages, mesh=mesh, dims={"dp": "int4"})})


def test_what_one_call_needs_is_said(pool):
    assert all(
        "call states.synchronize() on every rank" in said for said in pool.run(forgotten, size=2)
    )
    assert all("Shard all of them" in said["mixed"] for said in pool.run(mixed, size=2))


# --------------------------------------------------------------- states of several stages on a rank


class Interleaved:
    """Four stages under fully_shard on a mesh of this shape, trained by one call."""

    def __init__(self, shape):
        self.mesh = mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
        self.rank, self.last = mesh["pp"].get_local_rank(), 3 % shape[0]
        self.modules = {number: Shifted(number) for number in range(self.rank, 4, shape[0])}
        for module in self.modules.values():
            for layer in (module.up, module.down, module):
                fully_shard(layer, mesh=mesh["dp"])
        device = torch.device("cpu")
        stages = [
            PipelineStage(m, i, 4, device, group=mesh["pp"].get_group())
            for i, m in self.modules.items()
        ]
        self.pipeline = ScheduleInterleaved1F1B(stages, 4, loss_fn=error_of)
        self.states = commpress.compress(
            self.pipeline, mesh=mesh, dims={"dp": "int4", "pp": "none"}, min_numel=1
        )
        self.optimizer = torch.optim.SGD(
            [p for m in self.modules.values() for p in m.parameters()], lr=0.1
        )

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + self.mesh["dp"].get_local_rank())
            x, target = (
                torch.randn(16, 16, generator=generator),
                torch.randn(16, 16, generator=generator),
            )
            ends = {"target": target, "losses": []} if self.rank == self.last else {}
            self.pipeline.step(*([x] if self.rank == 0 else []), **ends)
            self.states.synchronize()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def held(self):
        """Weights and elastic states, by stage, as torch's distributed checkpoints take them."""
        model = {
            str(i): {n: p.detach() for n, p in m.named_parameters()}
            for i, m in self.modules.items()
        }
        return {"model": model, "owed": self.states["dp"].elastic_state_dict()}

    def seen(self):
        """Whole weights of this rank's stages, and R of each."""
        held = self.held()
        weights = {
            f"{i}.{n}": p.full_tensor().clone()
            for i, part in held["model"].items()
            for n, p in part.items()
        }
        owed = {
            f"{i}.{n}": r.full_tensor()
            for i, state in held["owed"].items()
            for n, r in state["residuals"].items()
        }
        return weights, owed


def broken_run(folder):
    """A run that was saved and loaded after two of its four steps, against one that was not; and
    saved for other meshes."""
    ends = []
    for breaks in (False, True):
        run = Interleaved((2, 2))
        run.train(range(2))
        if breaks:
            dcp.save(run.held(), checkpoint_id=folder)
            weights, state, saved = (
                {n: m.state_dict() for n, m in run.modules.items()},
                run.states.state_dict(),
                run.seen(),
            )
            run = Interleaved((2, 2))
            for number, module in run.modules.items():
                module.load_state_dict(weights[number])
            run.states.load_state_dict(state)
        run.train(range(2, 4))
        ends.append((*run.seen(), run.states["dp"].gradients.steps))
    return ends, saved


def moved(shape, folder):
    """Weights and R that came from another mesh, and weights after more steps."""
    run = Interleaved(shape)
    held = run.held()
    dcp.load(held, checkpoint_id=folder)
    run.states["dp"].load_state_dict(held["owed"])
    came = run.seen()
    run.train(range(2, 4))
    return came, run.seen()[0]


def test_states_of_several_stages_resume_in_every_bit_and_go_to_another_mesh(pool, tmp_path):
    """Each stage's weights and all that is owed of them arrive where four ranks hold all stages,
    and then two."""
    whole = {}
    for (straight, broken), (weights, owed) in pool.run(broken_run, str(tmp_path), size=4):
        for mine, other in zip(straight[:2], broken[:2], strict=True):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)
        assert {name.split(".")[0] for name in owed} in ({"0", "2"}, {"1", "3"})
        whole |= {name: (weights[name], owed[name]) for name in owed}
    assert max(float(r.abs().max()) for _, r in whole.values()) > 0
    ends = []
    for shape, size in (((1, 4), 4), ((1, 2), 2)):
        results = pool.run(moved, shape, str(tmp_path), size=size)
        for (weights, owed), after in results:
            assert owed.keys() == whole.keys() == weights.keys()
            assert all(torch.equal(weights[name], whole[name][0]) for name in whole)
            assert max(float((owed[name] - whole[name][1]).abs().max()) for name in whole) < 1e-7
            assert all(torch.equal(after[name], results[0][1][name]) for name in after)
        ends.append(results[0][1])
    assert all(not torch.equal(ends[0][name], whole[name][0]) for name in whole)


def other_stages():
    """A rank's answers to states of stages that it does not run, and of another place on the same
    mesh."""
    run = Interleaved((2, 2))
    run.train(range(1))
    before = run.seen()[1]
    every = [None] * 4
    dist.all_gather_object(every, run.states["dp"].state_dict())
    said = [
        caught(run.states["dp"].load_state_dict, every[dist.get_rank() ^ change])
        for change in (2, 1)
    ]
    assert all(torch.equal(r, before[name]) for name, r in run.seen()[1].items())
    return [f"{type(error).__name__}: {error}" for error in said]


def test_states_of_other_stages_and_other_shards_are_refused_by_name(pool):
    for rank, (stages, shards) in enumerate(pool.run(other_stages, size=4)):
        mine, theirs = ("[0, 2]", "'1', '3'") if rank < 2 else ("[1, 3]", "'0', '2'")
        assert stages.startswith(
            f"StateMismatch: the state is of {theirs}, and this rank runs stages {mine}: load one"
        )
        assert shards.startswith("StateMismatch: the state was saved by rank and world size")
