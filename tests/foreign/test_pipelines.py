"""torch's own pipeline schedules over data parallelism with compressed traffic, on a mesh of two
ranks of stages and two replicas."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress import torch_private
from commpress.errors import NonFiniteGradient
from commpress.integrations.pipeline import compress_pipeline
from ddp_twin import Log
from ranks import caught, refused
from variants import few, first, seldom

SINGLE = ("GPipe", "1F1B")  # one stage on a rank, others have two
LOOPED = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
# gradients of weights come apart from those of activations
SPLIT = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
FOLDED = ["ZBVZeroBubble", "DualPipeV"]  # V-shaped: the first and the last stage are on one rank
OFTEN = ("InterleavedZeroBubble", "DualPipeV")  # the others are slow tests
OTHERS = [schedule for schedule in (*LOOPED, *FOLDED) if schedule not in OFTEN]
KINDS = ["plain", "fsdp", "partitioned"]
WIDTH, ROWS, STEPS = 32, 128, 3


class Spoilt(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Part(nn.Module):
    """A stage one of whose parameters can get a gradient of which no other stage hears."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.shift, self.factor = nn.Parameter(torch.zeros(WIDTH)), 1.0

    def forward(self, x):
        return x + self.down(self.up(x).tanh()) + Spoilt.apply(self.shift, self.factor)


def error_of(y, target):
    return (y - target).square().mean()


class Pipeline:
    """This rank's stages on a mesh of stages and replicas, and their schedule."""

    def __init__(self, schedule, kind="fsdp", *, shape=(2, 2), loss_fn=error_of, **sharding):
        self.mesh = mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
        self.rank, self.replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        count = shape[0] if schedule in SINGLE else 4
        self.homes = [0, 1, 1, 0] if schedule in FOLDED else [i % shape[0] for i in range(count)]
        self.parts = {i: Part(i) for i in range(count) if self.homes[i] == self.rank}
        modules = dict(self.parts)
        for i, part in self.parts.items():
            if kind == "fsdp":
                for module in (part.up, part.down, part):
                    fully_shard(module, mesh=mesh["dp"], **sharding)
            if kind == "ddp":
                modules[i] = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
        device, group = torch.device("cpu"), mesh["pp"].get_group()
        stages = [PipelineStage(m, i, count, device, group=group) for i, m in modules.items()]
        make = schedules.get_schedule_class(schedule)
        self.schedule = make(
            stages[0] if schedule in SINGLE else stages,
            8 if schedule == "DualPipeV" else 4,
            loss_fn=loss_fn,
        )
        self.named = [
            (f"{i}.{n}", p) for i, m in self.parts.items() for n, p in m.named_parameters()
        ]
        self.held = [p for _, p in self.named]

    def step(self, step, *, poison=1.0):
        """The losses of a batch that step and replica have drawn."""
        generator = torch.Generator().manual_seed(100 * step + self.replica)
        x, target = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
        losses = []
        ends = {"target": target, "losses": losses} if self.homes[-1] == self.rank else {}
        self.schedule.step(*([x * poison] if self.homes[0] == self.rank else []), **ends)
        return [float(loss.detach()) for loss in losses]

    def weights(self):
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in self.named
        }


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


# ---------------------------------------------------------------- FSDP2 in a pipeline


def train(schedule, options):
    """Losses of the last stage, this rank's weights, and what was said; ``options`` None: as torch
    sends."""
    said, run, losses = Log(), Pipeline(schedule), []
    for part in run.parts.values() if options is not None else ():
        commpress.compress_fsdp(part, min_numel=1, **options)
    optimizer = sgd(run.held)
    for step in range(4):
        losses += run.step(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, run.weights(), said.lines


@pytest.mark.parametrize("schedule", first(1, ["1F1B", "Interleaved1F1B", "GPipe"]))
def test_schedules_train_alike_with_and_without_overlap(pool, schedule):
    """Behind which backward a gradient is reduced changes no bit, and eight bits hardly the
    loss."""
    plain = pool.run(train, schedule, None, size=4)
    overlapped = pool.run(train, schedule, {"overlap": True}, size=4)
    at_once = pool.run(train, schedule, {"overlap": False}, size=4)
    for (exact, *_), (losses, weights, _), (theirs, expected, _) in zip(
        plain, overlapped, at_once, strict=True
    ):
        assert losses == theirs
        assert equal(weights, expected)
        assert losses == pytest.approx(exact, rel=0.02)
    said = sum("outside of backward" in line for _, _, lines in overlapped for line in lines)
    models = 2 if schedule in SINGLE else 4
    assert said == models, "once for each model of both ranks of the pipeline"
    assert len(plain[2][0]) == 16


def poisoned(on_nonfinite):
    """NaN in the input of one replica in the first step; whether the error came, and whether
    weights stayed finite."""
    run = Pipeline("GPipe")
    (part,) = run.parts.values()
    state = commpress.compress_fsdp(part, min_numel=1, on_nonfinite=on_nonfinite)
    error = caught(run.step, 0, poison=float("nan") if run.replica == 1 else 1.0)
    assert error is None or isinstance(error, NonFiniteGradient)
    gradients = [p.grad.to_local() for p in run.held if p.grad is not None]
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    return error is not None, finite, state.gradients.skipped_buckets > 0


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_what_is_not_finite_is_noticed_between_backwards_too(pool, on_nonfinite):
    expected = (on_nonfinite == "raise", True, True)
    assert pool.run(poisoned, on_nonfinite, size=4) == [expected] * 4


# ---------------------------------------------------------------- one call for both dimensions


def one_call(schedule, codec, bad=None, clip=False, scaled=False, on_nonfinite="skip"):
    """Whole weights of this rank's stages after each step, norms, scales and states; ``bad``: the
    factor of one gradient of one replica's last stage in step 1."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    scaler.scale(torch.ones(()))  # or it does not begin where there is no loss
    run = Pipeline(schedule, loss_fn=lambda y, target: scaler.scale(error_of(y, target)))
    options = {"min_numel": 1, "on_nonfinite": on_nonfinite}
    options |= {"grad_scaler": scaler} if scaled else {}
    states = commpress.compress(run.schedule, mesh=run.mesh, dims=both(codec), **options)
    optimizer, seen, norms, scales, raised = sgd(run.held), [], [], [], []
    for step in range(3):
        if (run.rank, run.replica) == (1, 0):
            run.parts[max(run.parts)].factor = bad if step == 1 else 1.0
        run.step(step)
        owed, error = residuals(states), caught(states.synchronize)
        assert error is None or isinstance(error, NonFiniteGradient)
        raised.append(error is not None)
        if clip:
            squares = sum(float(p.grad.full_tensor().double().square().sum()) for p in run.held)
            norms.append((squares, float(states.clip_grad_norm_(0.05))))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        same = all(torch.equal(*pair) for pair in zip(owed, residuals(states), strict=True))
        seen.append((run.weights(), not same))
    sent = [states["dp"].gradients, states["dp"].weights, states["pp"].counters]
    return seen, norms, scales, raised, sent


def both(codec):
    return {"dp": codec, "pp": codec}


def residuals(states):
    dp = states["dp"]
    every = dp.values() if isinstance(dp, dict) else [dp]
    return [sent.clone() for state in every for _, sent, _ in state.residuals.places()]


def skipped(seen):
    """True if weights stood still in step 1 alone."""
    (first, _), (second, _), (third, _) = seen
    moved = not any(torch.equal(second[name], third[name]) for name in second)
    return equal(first, second) and moved


@pytest.mark.parametrize(
    ("schedule", "on_nonfinite"), [("1F1B", "skip"), ("Interleaved1F1B", "raise")]
)
def test_one_gradient_that_is_not_finite_leaves_the_step_out_in_all_stages(
    pool, schedule, on_nonfinite
):
    """Weights and residuals, also of stages whose gradients were finite; and bytes fall by what
    four bits are."""
    results = pool.run(one_call, schedule, "int4", float("nan"), False, False, on_nonfinite, size=4)
    for rank, (seen, _, _, raised, (gradients, weights, edges)) in enumerate(results):
        assert raised == [False, on_nonfinite == "raise", False]
        assert skipped(seen)
        assert [changed for _, changed in seen] == [True, False, True]
        twin = results[rank ^ 1][0]
        assert all(equal(mine, theirs) for (mine, _), (theirs, _) in zip(seen, twin, strict=True))
        assert gradients.skipped_steps == 1
        assert gradients.ratio > 3
        assert weights.ratio > 3
        assert edges.exact_bytes > 3 * edges.sent_bytes > 0


def test_an_overflow_in_one_stage_lowers_the_scale_of_all(pool):
    call = one_call, "1F1B", "int8", float("inf"), False, True
    for seen, _, scales, *_ in pool.run(*call, size=4):
        assert scales == [64.0, 32.0, 32.0]
        assert skipped(seen)


def test_stages_are_clipped_by_the_norm_of_all(pool):
    results = pool.run(one_call, "Interleaved1F1B", "int8", 1e4, True, size=4)
    for step in range(3):
        norm = sum(results[rank][1][step][0] for rank in (0, 2)) ** 0.5
        assert [each[1][step][1] for each in results] == pytest.approx([norm] * 4, rel=1e-6)
        assert norm > 0.05


def unsettled():
    run = Pipeline("GPipe", shape=(1, 2))
    commpress.compress(run.schedule, mesh=run.mesh, dims={"dp": "int4"}, min_numel=1)
    return str(caught(lambda: [run.step(step) for step in range(2)]))


def mixed():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    device, group = torch.device("cpu"), mesh["pp"].get_group()
    modules = [fully_shard(Part(0), mesh=mesh["dp"]), Part(1)]
    stages = [PipelineStage(m, i, 2, device, group=group) for i, m in enumerate(modules)]
    return refused({"mixed": lambda: commpress.compress(stages, mesh=mesh, dims={"dp": "int4"})})


def test_what_one_call_needs_is_said(pool):
    for said in pool.run(unsettled):
        assert "call states.synchronize() on every rank" in said
    assert all("Shard all of them" in said["mixed"] for said in pool.run(mixed))


# --------------------------------------------------------------- states of several stages on a rank


class Interleaved(Pipeline):
    """Four stages under fully_shard on a mesh of this shape, trained by one call."""

    def __init__(self, shape):
        super().__init__("Interleaved1F1B", shape=shape)
        dims = {"dp": "int4", "pp": "none"}
        self.states = commpress.compress(self.schedule, mesh=self.mesh, dims=dims, min_numel=1)
        self.optimizer = sgd(self.held)

    def train(self, steps):
        for step in steps:
            self.step(step)
            self.states.synchronize()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def saved(self):
        """Weights and elastic states, by stage, as torch's distributed checkpoints take them."""
        model = {
            str(i): {n: p.detach() for n, p in m.named_parameters()} for i, m in self.parts.items()
        }
        return {"model": model, "owed": self.states["dp"].elastic_state_dict()}

    def seen(self):
        """Whole weights of this rank's stages, and R of each."""
        owed = {
            f"{i}.{n}": r.full_tensor()
            for i, state in self.saved()["owed"].items()
            for n, r in state["residuals"].items()
        }
        return self.weights(), owed


def broken_run(folder):
    """A run that was saved and loaded after two of its four steps, against one that was not; and
    saved for other meshes."""
    ends = []
    for breaks in (False, True):
        run = Interleaved((2, 2))
        run.train(range(2))
        if breaks:
            dcp.save(run.saved(), checkpoint_id=folder)
            weights = {n: m.state_dict() for n, m in run.parts.items()}
            state, saved = run.states.state_dict(), run.seen()
            run = Interleaved((2, 2))
            for number, module in run.parts.items():
                module.load_state_dict(weights[number])
            run.states.load_state_dict(state)
        run.train(range(2, 4))
        ends.append(run.seen())
    return ends, saved


def moved(shape, folder):
    """Weights and R that came from another mesh, and weights after more steps."""
    run = Interleaved(shape)
    held = run.saved()
    dcp.load(held, checkpoint_id=folder)
    run.states["dp"].load_state_dict(held["owed"])
    came = run.seen()
    run.train(range(2, 4))
    return came, run.weights()


def test_states_of_several_stages_resume_in_every_bit_and_go_to_another_mesh(pool, tmp_path):
    """Each stage's weights and all that is owed of them arrive where two ranks hold all stages."""
    whole = {}
    for (straight, broken), (weights, owed) in pool.run(broken_run, str(tmp_path), size=4):
        assert all(equal(*pair) for pair in zip(straight, broken, strict=True))
        assert {name.split(".")[0] for name in owed} in ({"0", "2"}, {"1", "3"})
        whole |= {name: (weights[name], owed[name]) for name in owed}
    assert max(float(r.abs().max()) for _, r in whole.values()) > 0
    results = pool.run(moved, (1, 2), str(tmp_path), size=2)
    for (weights, owed), after in results:
        assert owed.keys() == whole.keys() == weights.keys()
        assert all(torch.equal(weights[name], whole[name][0]) for name in whole)
        assert max(float((owed[name] - whole[name][1]).abs().max()) for name in whole) < 1e-7
        assert equal(after, results[0][1])
        assert not any(torch.equal(after[name], weights[name]) for name in after)


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
    assert equal(run.seen()[1], before)
    return [f"{type(error).__name__}: {error}" for error in said]


def test_states_of_other_stages_and_other_shards_are_refused_by_name(pool):
    for rank, (stages, shards) in enumerate(pool.run(other_stages, size=4)):
        mine, theirs = ("[0, 2]", "'1', '3'") if rank < 2 else ("[1, 3]", "'0', '2'")
        assert stages.startswith(
            f"StateMismatch: the state is of {theirs}, and this rank runs stages {mine}: load one"
        )
        assert shards.startswith("StateMismatch: the state was saved by rank and world size")


# ---------------------------------------------------------------- every schedule of torch


def trained(schedule, kind, codec, **sharding):
    """Whole weights of this rank's stages by their numbers, and bytes that left and that torch
    would send."""
    if kind == "fsdp" and schedule in SPLIT:
        sharding = {"reshard_after_forward": False} | sharding
    run = Pipeline(schedule, kind, **sharding)
    group = run.mesh["dp"].get_group()
    dims = {"pp": codec} if kind == "partitioned" else both(codec)
    states = None
    if codec:
        states = commpress.compress(run.schedule, mesh=run.mesh, dims=dims, min_numel=1)
    ours = kind == "partitioned" and codec is not None
    optimizer = sgd(run.held)
    if ours:
        among = {"process_group": group, "agree_over": run.mesh, "codec": codec, "min_numel": 1}
        optimizer = commpress.Partitioned(
            run.named, torch.optim.SGD, lr=0.1, foreach=False, **among
        )
    for step in range(STEPS):
        with optimizer.no_sync() if ours else nullcontext():
            run.step(step)
        if states is not None and not ours:
            states.synchronize()
        elif kind != "fsdp" and not ours:
            for p in run.held:
                dist.all_reduce(p.grad.div_(2), group=group)
        optimizer.step()
        optimizer.zero_grad()
    if states is None:
        return run.weights(), None
    edges, data = states["pp"].counters, None if ours else states["dp"]
    if ours:  # of the weights nobody spares any
        exact = 4 * sum(p.numel() for p in run.held) * STEPS // 2
        sent = optimizer.transport.sent_bytes - exact, exact
    else:
        counted = data.gradients if kind == "fsdp" else data.counters
        sent = counted.wire_bytes, counted.logical_bytes
    return run.weights(), (edges.sent_bytes, edges.exact_bytes, *sent)


@cache
def as_torch_trains(pool, schedule):
    return pool.run(trained, schedule, "plain", None, size=4)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [*few(OFTEN, KINDS), *(seldom(s, kind) for s in OTHERS for kind in KINDS)],
)
def test_without_a_codec_every_schedule_trains_as_torch_does_in_every_bit(pool, schedule, kind):
    """As torch with the same, and as torch with whole weights on each replica: two are summed alike
    in any order."""
    twins = [as_torch_trains(pool, schedule)]
    twins += [pool.run(trained, schedule, kind, None, size=4)] if kind == "fsdp" else []
    found = pool.run(trained, schedule, kind, "none", size=4)
    for expected in twins:
        assert all(equal(mine[0], torchs[0]) for mine, torchs in zip(found, expected, strict=True))
    begun = {f"{i}.{name}": p for i in range(4) for name, p in Part(i).named_parameters()}
    for weights, _ in found:
        assert not any(torch.equal(p, begun[name]) for name, p in weights.items())


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [*few(OFTEN, KINDS), *(seldom(s, kind) for s in OTHERS for kind in KINDS)],
)
def test_with_four_bits_replicas_stay_equal_and_bytes_fall_on_edges_and_between_replicas(
    pool, schedule, kind
):
    results = pool.run(trained, schedule, kind, "int4", size=4)
    for rank, (weights, (edges, exact_edges, sent, plain)) in enumerate(results):
        assert equal(weights, results[rank ^ 1][0])
        assert exact_edges > 4 * edges > 0
        assert plain > 3 * sent > 0


# ---------------------------------------------------------------- where torch loses gradients


def refusal(kind, schedule):
    run = Pipeline(schedule, kind)
    calls = {
        "call": lambda: commpress.compress(run.schedule, mesh=run.mesh, dims={"dp": "int4"}),
        "edges": lambda: compress_pipeline(run.schedule),
    }
    return refused(calls)


@pytest.mark.parametrize(
    ("kind", "cure", "schedule"),
    [
        ("fsdp", "reshard_after_forward=False to every", "InterleavedZeroBubble"),
        ("fsdp", "reshard_after_forward=False to every", "ZBVZeroBubble"),
        ("ddp", "Leave DDP out", "DualPipeV"),
    ],
)
def test_wrappers_whose_gradients_torch_loses_are_refused_with_the_cure(pool, kind, cure, schedule):
    for said in pool.run(refusal, kind, schedule, size=4):
        assert cure in said["call"]
        assert said["edges"] == said["call"]
        assert f"{schedule} computes gradients of weights apart" in said["call"]


def lost(schedule):
    """True if torch alone trains stages under fully_shard as it does without."""
    weights, _ = trained(schedule, "fsdp", None, reshard_after_forward=True)
    return equal(weights, trained(schedule, "plain", None)[0])


@pytest.mark.skipif(
    torch_private.RELEASE[:2] != (2, 13),
    reason="what torch 2.13 does; another release may find these weights",
)
def test_torch_alone_leaves_gradients_out_where_weights_are_let_go(pool):
    """The reason for the refusal."""
    assert not all(pool.run(lost, "InterleavedZeroBubble", size=4))


def taken():
    for schedule in LOOPED[:2]:
        for kind in ("fsdp", "ddp"):
            run = Pipeline(schedule, kind)
            compress_pipeline(run.schedule)
    return torch_private.reshards_after_forward(fully_shard(Part(0), mesh=run.mesh["dp"]))


def test_others_are_taken_and_a_stage_that_is_one_group_keeps_its_weights(pool):
    assert pool.run(taken, size=4) == [False] * 4
