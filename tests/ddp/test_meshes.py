"""Parameters that are DTensors of tensor parallelism: optimizers take their shards and keep columns
together.

Gradients come from a generator, the same for every mesh, so a run on 2 × 2 ranks has a twin on 2 ×
1 with whole parameters.
"""

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import commpress
from column_twin import SHAPES, apart, columns, parameters, placed, values, whole
from commpress.errors import NonFiniteGradient, StateMismatch
from commpress.integrations.ddp.replicas import OF_MODEL
from commpress.schedules import DoublingIntervals
from ranks import refused
from variants import first, seldom

STEPS, NAN = 9, float("nan")


def onebit(params, **options):
    return commpress.OneBitAdam(params, lr=1e-2, betas=(0.9, 0.99), exact_steps=3, **options)


def lamb(params, **options):
    return commpress.OneBitLamb(params, lr=1e-2, betas=(0.9, 0.99), exact_steps=3, **options)


def zero_one(params, **options):
    sync = DoublingIntervals(start=3, period=100)
    return commpress.ZeroOneAdam(
        params, lr=1e-2, betas=(0.9, 0.99), sync=sync, variance_updates=1, **options
    )


def sharded(params, **options):
    return commpress.ShardedOneBitAdam(params, lr=1e-2, betas=(0.9, 0.99), exact_steps=3, **options)


def sharded_zero_one(params, **options):
    sync = DoublingIntervals(start=3, period=100)
    return commpress.ShardedZeroOneAdam(
        params, lr=1e-2, betas=(0.9, 0.99), sync=sync, variance_updates=1, **options
    )


MAKERS = {
    "1-bit": onebit,
    "LAMB": lamb,
    "0/1": zero_one,
    "sharded": sharded,
    "sharded 0/1": sharded_zero_one,
}


def optimizer_on(make, params, mesh, options):
    if mesh is None:
        return make(params.items(), **options)
    return make(params.items(), mesh=mesh, **options)


def move(optimizer, params, mesh, steps, bad=None):
    """Steps with drawn gradients; in step ``bad`` the first rank's shard of the first parameter has
    NaN."""
    rank = dist.get_rank() if mesh is None else mesh["dp"].get_local_rank()
    for step in steps:
        for name, p in params.items():
            p.grad = placed(name, values(name, 100 * (step + 1) + rank), mesh)
        if step == bad and dist.get_rank() == 0:
            p = next(iter(params.values()))
            (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)[0, 0] = float("nan")
        optimizer.step()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()


def ran(make, shape, names, options, steps=tuple(range(STEPS)), bad=None):
    """Whole weights, the number of steps and of skipped ones."""
    mesh = None if shape is None else columns(shape)
    params = parameters(mesh, names)
    optimizer = optimizer_on(MAKERS[make], params, mesh, options)
    move(optimizer, params, mesh, steps, bad)
    return (
        {name: whole(p) for name, p in params.items()},
        optimizer.steps_done,
        optimizer.counters.skipped_steps,
    )


@pytest.mark.parametrize("make", ["1-bit", "0/1", "sharded", "sharded 0/1"])
def test_shards_take_the_steps_of_the_whole_in_every_bit(pool, make):
    """Without a floor nothing is asked of a tensor as a whole; rows of shards and of the whole have
    the same blocks."""
    names, options = ("tall", "norm"), {"variance_floor": 0.0, "spiky_codec": None}
    (expected, *_), _ = pool.run(ran, make, None, names, options, size=2)
    for weights, *_ in pool.run(ran, make, (2, 2), names, options, size=4):
        assert apart(weights, expected) == 0.0


@pytest.mark.parametrize(
    ("make", "options", "bound"),
    [
        ("1-bit", {"max_grad_norm": 1.0}, 1e-6),
        ("LAMB", {}, 1e-6),
        ("LAMB", {"max_grad_norm": 1.0}, 1e-6),
    ],
    ids=["clipped", "LAMB", "LAMB, clipped"],
)
def test_norms_are_those_of_whole_tensors(pool, make, options, bound):
    """Exact steps; norms are summed in another order, which the last bit of a factor may tell."""
    (expected, *_), _ = pool.run(ran, make, None, tuple(SHAPES), options, range(3), size=2)
    for weights, *_ in pool.run(ran, make, (2, 2), tuple(SHAPES), options, range(3), size=4):
        assert apart(weights, expected) < bound


@pytest.mark.parametrize("make", first(2, [*MAKERS]))
def test_a_bad_shard_is_left_out_by_all_columns(pool, make):
    """NaN in one shard on one rank, in a step that is exact (0/1 Adam: in a window) and in one that
    is compressed."""
    options = {"max_grad_norm": 1.0} if make in ("1-bit", "LAMB") else {}
    for bad in (1, 6):
        results = pool.run(ran, make, (2, 2), tuple(SHAPES), options, range(STEPS), bad, size=4)
        for weights, done, skipped in results:
            assert apart(weights, results[0][0]) == 0.0
            assert all(torch.isfinite(w).all() for w in weights.values())
            assert (done, skipped) == (STEPS - 1, 1)


# ---------------------------------------------------------------- checkpoints


def owed(optimizer, params, mesh):
    """R of every parameter, whole, summed over the ranks that have the same shard."""
    found = {}
    for name, p in params.items():
        part = torch.zeros(p.to_local().shape if isinstance(p, DTensor) else p.shape)
        optimizer.quantized.residuals.add_to(
            name, part.view(-1), optimizer.channel.rank, optimizer.channel.size
        )
        if optimizer.channel.size > 1:
            dist.all_reduce(part, group=mesh["dp"].get_group())
        part /= optimizer.channel.size
        found[name] = whole(
            DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            if isinstance(p, DTensor)
            else part
        )
    return found


def went_on(make, shape, states, steps):
    """Load what other ranks saved, say what was loaded, go on and save."""
    mesh = columns(shape)
    params = parameters(mesh, tuple(SHAPES))
    optimizer = optimizer_on(MAKERS[make], params, mesh, {})
    if states:
        optimizer.load_state_dict(*states)
    loaded = {name: whole(optimizer.state[p]["exp_avg"]) for name, p in params.items()}
    before = owed(optimizer, params, mesh)
    move(optimizer, params, mesh, steps)
    after = {name: whole(optimizer.state[p]["exp_avg"]) for name, p in params.items()}
    frozen = [int(optimizer.state[p]["frozen_at"]) for p in params.values()]
    return (
        optimizer.elastic_state_dict(),
        loaded,
        before,
        after,
        owed(optimizer, params, mesh),
        frozen,
    )


@pytest.mark.parametrize("make", first(1, ["0/1", "1-bit", "LAMB"]))
def test_states_go_from_mesh_to_mesh(pool, make):
    """2 × 2 → 4 × 1 → 1 × 2: moments in every bit, what is owed up to the rounding of its sums."""
    first = pool.run(went_on, make, (2, 2), [], range(6), size=4)
    second = pool.run(went_on, make, (4, 1), [each[0] for each in first], (), size=4)
    third = pool.run(went_on, make, (1, 2), [each[0] for each in second], (), size=2)
    assert max(float(each.abs().max()) for each in first[0][4].values()) > 0
    for before, after in ((first, second), (second, third)):
        for each in after:
            assert apart(each[1], before[0][3]) == 0.0
            assert apart(each[2], before[0][4]) < 1e-6
            assert each[5] == before[0][5]


def resumed(make, shape):
    """A run that was saved and loaded in its middle, and one that was not."""
    mesh, ends = columns(shape), []
    for breaks in (False, True):
        params = parameters(mesh, tuple(SHAPES))
        optimizer = optimizer_on(MAKERS[make], params, mesh, {})
        move(optimizer, params, mesh, range(5))
        if breaks:
            state = optimizer.state_dict()
            optimizer = optimizer_on(MAKERS[make], params, mesh, {})
            optimizer.load_state_dict(state)
        move(optimizer, params, mesh, range(5, STEPS))
        ends.append({name: whole(p) for name, p in params.items()})
    return apart(*ends)


@pytest.mark.parametrize("make", first(3, [*MAKERS]))
def test_a_run_resumes_in_every_bit(pool, make):
    assert pool.run(resumed, make, (2, 2), size=4) == [0.0] * 4


# ---------------------------------------------------------------- one call for a mesh


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down, self.norm = (
            nn.Linear(16, 32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.LayerNorm(32),
        )

    def forward(self, x):
        h = self.embed(x)
        return self.norm(h + self.down(self.up(h).relu()))


def one_call(kind, codec, bad=None, steps=(0, 1, 2), shape=(2, 2), scale=0.0, **options):
    """Weights as this rank knows them; bytes sent, bytes that torch would send, and how often
    gradients were refused; the steps that raised, and the loss scale. In step 1 one shard of the
    first rank has gradients times ``bad``."""
    mesh = columns(shape)
    # replicas are made alike, as DDP makes them; torch's twin starts from what the first one has
    own = kind == "plain" and codec is not None
    torch.manual_seed(mesh["dp"].get_local_rank() if own else 0)
    model = net = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "ddp":
        _pre_dp_module_transform(model)
        group = mesh["dp"].get_group()
        net = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.006)
    if kind == "fsdp":
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh["dp"])
    accumulates = options.pop("accumulates", False)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
    options |= {"grad_scaler": scaler} if scale else {}
    states = commpress.compress(net, mesh=mesh, dims={"dp": codec}, **options) if codec else None
    held, now, raised = list(net.named_parameters()), {"step": 0}, []
    optimizer = torch.optim.SGD([p for _, p in held], lr=0.05, foreach=False)
    spoils = bad and dist.get_rank() == 0
    if spoils and kind != "fsdp":
        held[2][1].register_hook(lambda g: g * bad if now["step"] == 1 else g)  # of up
    for now["step"] in steps:
        draws = torch.Generator().manual_seed(10 * now["step"] + mesh["dp"].get_local_rank())
        loss = scaler.scale(net(torch.randn(6, 16, generator=draws)).square().mean())
        if spoils and kind == "fsdp" and now["step"] == 1:
            loss = loss * bad
        try:
            with states.no_sync() if accumulates else nullcontext():
                loss.backward()
                if accumulates:
                    states.synchronize()
            if states is None and kind == "plain":
                for _, p in held:
                    gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                    dist.all_reduce(gradient.div_(2), group=mesh["dp"].get_group())
            if bad == bad and bad is not None:  # torch clips FSDP2's
                states.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
        except NonFiniteGradient:
            raised.append(now["step"])
        optimizer.zero_grad()
    weights = {name: whole(p) for name, p in held}
    if states is None:
        return weights, None, raised, 1.0
    counters = getattr(states["dp"], "gradients", None) or states["dp"].counters
    sent = counters.wire_bytes, counters.logical_bytes, counters.skipped_buckets
    return weights, sent, raised, scaler.get_scale()


@pytest.mark.parametrize("kind", first(2, ["ddp", "fsdp", "plain"]))
def test_without_a_codec_a_mesh_trains_as_torch_does(pool, kind):
    runs = [pool.run(one_call, kind, codec, size=4) for codec in (None, "none")]
    if kind == "plain":
        runs.append(pool.run(accumulated, size=4))
    for each in runs[1:]:
        for (weights, *_), (expected, *_) in zip(each, runs[0], strict=True):
            assert apart(weights, expected) == 0.0


def accumulated():
    return one_call("plain", "none", accumulates=True)


def let_go(codec):
    """Gradients on two replicas, of which nobody keeps what compress returned, twice."""
    gc.collect()
    mesh, model, before = columns((2, 1)), Net(), len(OF_MODEL)
    for _ in range(2):
        commpress.compress(model, mesh=mesh, dims={"dp": codec})
    gc.collect()
    draws = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(6, 16, generator=draws)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}, len(OF_MODEL) - before


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_a_model_is_averaged_though_nobody_keeps_the_states(pool, codec):
    (first, count), (second, _) = pool.run(let_go, codec, size=2)
    assert apart(first, second) == 0.0
    assert count == 1, "the second call takes the first one's place"


def frozen_and_thawed():
    """Return whether a layer that was frozen after compress keeps its bits, and the error of one
    that was frozen before and thaws after."""
    mesh, model = columns((2, 1)), Net()
    model.norm.requires_grad_(False)
    commpress.compress(model, mesh=mesh, dims={"dp": "int4"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    def step():
        model(torch.randn(6, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    model.embed.requires_grad_(False)
    before = [p.detach().clone() for p in model.embed.parameters()]
    step()
    stays = all(map(torch.equal, model.embed.parameters(), before))
    model.norm.requires_grad_(True)
    return stays, refused({"thawed": step})["thawed"]


def test_frozen_layers_of_a_mesh_stay_and_thawed_ones_are_refused(pool):
    for stays, error in pool.run(frozen_and_thawed, size=2):
        assert stays
        assert "'norm.weight' was frozen when compress was called" in error


@pytest.mark.parametrize(
    ("kind", "codec", "ratio"),
    [("plain", "sign", 8), ("ddp", "int4", 4), seldom("fsdp", "int8", 1.5)],
)
def test_gradients_are_clipped_by_one_norm_and_replicas_stay_equal(pool, kind, codec, ratio):
    if kind == "fsdp":
        pytest.skip("torch clips there")
    results = pool.run(one_call, kind, codec, 1e5, size=4)
    for rank, (weights, (sent, plain, denied), *_) in enumerate(results):
        # DDP shows a rank its shards only
        assert apart(weights, results[rank % 2 if kind == "ddp" else 0][0]) == 0.0
        assert plain > ratio * sent
        assert denied == 0


def spoilt(kind, bad, steps, shape, options):
    return one_call(kind, "sign" if kind != "fsdp" else "int8", bad, steps, shape, **options)


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("plain", (2, 2), {}),
        ("fsdp", (2, 2), {}),
        ("ddp", (2, 2), {"scale": 64.0}),
        seldom("ddp", (2, 2), {}),
        seldom("ddp", (2, 2), {"on_nonfinite": "raise"}),
        # ranks that have nobody to exchange with vote too
        ("ddp", (1, 2), {"on_nonfinite": "raise"}),
        seldom("ddp", (1, 2), {"scale": 64.0}),
    ],
)
def test_columns_skip_a_step_together_as_if_it_had_not_been(pool, kind, shape, options):
    size = shape[0] * shape[1]
    results = pool.run(spoilt, kind, NAN, (0, 1, 2), shape, options, size=size)
    without = pool.run(spoilt, kind, None, (0, 2), shape, options, size=size)
    for rank, (weights, (*_, denied), raised, scale) in enumerate(results):
        assert apart(weights, results[rank % shape[1] if kind == "ddp" else 0][0]) == 0.0
        assert all(torch.isfinite(w).all() for w in weights.values())
        if kind != "fsdp":  # whose groups decide one by one
            assert apart(weights, without[rank][0]) == 0.0
        assert denied > (1 if kind == "ddp" else 0), "all buckets, not only the one with the shard"
        assert raised == ([1] if "on_nonfinite" in options else [])
        assert scale == options.get("scale", 2.0) / 2


# ---------------------------------------------------------------- FSDP2 with tensor parallelism


def sharded_states(codec, weights, shape):
    mesh = columns(shape)
    torch.manual_seed(0)
    model = parallelize_module(
        Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh["dp"])
    return (
        mesh,
        model,
        commpress.compress(model, mesh=mesh, dims={"dp": codec}, weights=weights, min_numel=0)[
            "dp"
        ],
    )


def train_sharded(mesh, model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        model(torch.randn(6, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def differences(shape, folder, load):
    """Weights, what is owed, and shares of the bytes: saved after three steps on one mesh, or
    loaded on another."""
    mesh, model, state = sharded_states("int8", commpress.Difference("int4"), shape)
    if not load:
        train_sharded(mesh, model, range(3))
    saved = {"model": model.state_dict(), "state": state.elastic_state_dict()}
    if load:
        dcp.load(saved, checkpoint_id=folder)
        model.load_state_dict(saved["model"])
        state.load_state_dict(saved["state"])
    else:
        dcp.save(saved, checkpoint_id=folder)
    weights = {name: whole(p) for name, p in model.named_parameters()}
    residuals = {name: whole(r) for name, r in state.elastic_state_dict()["residuals"].items()}
    shares = [c.wire_bytes / max(c.logical_bytes, 1) for c in (state.gradients, state.weights)]
    if load:
        train_sharded(mesh, model, range(3, 5))
    return (
        weights,
        residuals,
        shares,
        state.step,
        {name: whole(p) for name, p in model.named_parameters()},
    )


def test_weight_differences_under_tensor_parallelism_go_to_another_mesh(pool, tmp_path):
    first = pool.run(differences, (2, 2), str(tmp_path), False, size=4)
    assert max(float(r.abs().max()) for r in first[0][1].values()) > 0
    assert all(share < 0.5 for share in first[0][2])
    for weights, residuals, _, step, after in (
        again := pool.run(differences, (4, 1), str(tmp_path), True, size=4)
    ):
        assert (
            apart(weights, first[0][0])
            == apart(residuals, first[0][1])
            == apart(after, again[0][4])
            == 0.0
        )
        assert step == 5


def whole_tensors():
    codec = commpress.ByName({"norm|bias": "none"}, "powersgd-2")
    mesh, model, state = sharded_states(codec, None, (2, 2))
    train_sharded(mesh, model, range(2))
    with pytest.raises(StateMismatch) as caught:
        state.elastic_state_dict()
    counted = (
        state.gradients.compressed_elements,
        state.gradients.wire_bytes / state.gradients.logical_bytes,
    )
    return {name: whole(p) for name, p in model.named_parameters()}, counted, str(caught.value)


def test_powersgd_of_shards_keeps_ranks_equal_and_has_no_elastic_form(pool):
    results = pool.run(whole_tensors, size=4)
    for weights, (elements, share), said in results:
        assert apart(weights, results[0][0]) == 0.0
        assert elements > 0
        assert share < 0.6
        assert "save with state_dict()" in said


# ---------------------------------------------------------------- pipelines


def piped(shape, codec, forgets=False):
    """Weights of this rank's stage after three steps; bytes and what torch would send, of edges and
    of gradients."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    number, count = mesh["pp"].get_local_rank(), shape[0]
    torch.manual_seed(number)
    part = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    stage = PipelineStage(part, number, count, torch.device("cpu"), group=mesh["pp"].get_group())
    states = (
        commpress.compress([stage], mesh=mesh, dims={"dp": codec, "pp": codec}) if codec else None
    )
    schedule = ScheduleGPipe(
        stage, n_microbatches=2, loss_fn=lambda y, target: (y - target).square().mean()
    )
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        x, target = (
            torch.randn(32, 64, generator=generator),
            torch.randn(32, 64, generator=generator),
        )
        schedule.step(
            *([x] if number == 0 else []), **({"target": target} if number == count - 1 else {})
        )
        if states is None:
            for p in part.parameters():
                dist.all_reduce(p.grad.div_(shape[1]), group=mesh["dp"].get_group())
        elif not forgets:
            states.synchronize()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    edges, gradients = (
        (None, None) if states is None else (states["pp"].counters, states["dp"].counters)
    )
    sent = edges and (
        edges.sent_bytes,
        edges.exact_bytes,
        gradients.wire_bytes,
        gradients.logical_bytes,
    )
    return {name: whole(p) for name, p in part.named_parameters()}, sent


def test_one_call_compresses_edges_and_gradients(pool):
    expected, exact = pool.run(piped, (2, 2), None, size=4), pool.run(piped, (2, 2), "none", size=4)
    for (weights, _), (torchs, _) in zip(exact, expected, strict=True):
        assert apart(weights, torchs) == 0.0
    results = pool.run(piped, (2, 2), "int4", size=4)
    for rank, (weights, (edges, exact_edges, sent, plain)) in enumerate(results):
        assert apart(weights, results[2 * (rank // 2)][0]) == 0.0
        assert exact_edges > 4 * edges > 0
        assert plain > 4 * sent > 0


def forgotten():
    # torch's, around ours
    with pytest.raises(RuntimeError, match="failed to run forward") as caught:
        piped((1, 2), "int4", forgets=True)
    return repr(caught.value.__cause__)


def test_gradients_of_a_pipeline_that_nobody_averaged_are_noticed(pool):
    for said in pool.run(forgotten, size=2):
        assert "call states.synchronize() on every rank" in said


def whole_mesh_refusals():
    mesh = columns((2, 2))
    model = parallelize_module(
        Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    nameless = init_device_mesh("cpu", (4,))
    turned = DeviceMesh("cpu", torch.tensor([[2, 0], [1, 3]]), mesh_dim_names=("pp", "dp"))
    # distributed checkpoints would save the rows of one rank as those of another
    back = DeviceMesh("cpu", torch.tensor([3, 2, 1, 0]), mesh_dim_names=("dp",))
    cut = fully_shard(nn.Linear(16, 12), mesh=back)
    calls = {
        "mesh": lambda: commpress.compress(model, mesh=nameless, dims={"dp": "sign"}),
        "dims": lambda: commpress.compress(model, mesh=mesh),
        "name": lambda: commpress.compress(model, mesh=mesh, dims={"fp": "sign"}),
        "tp": lambda: commpress.compress(model, mesh=mesh, dims={"tp": "sign"}),
        "group": lambda: commpress.compress(ddp, mesh=mesh, dims={"dp": "sign"}),
        "auto": lambda: commpress.compress(model, mesh=mesh, dims={"dp": "auto"}),
        "pp": lambda: commpress.compress(model, mesh=columns_of_a_pipeline(), dims={"pp": "int4"}),
        "order": lambda: commpress.compress([], mesh=turned, dims={"pp": "int4"}),
        "shards": lambda: commpress.compress_fsdp(cut),
        "shards too": lambda: commpress.compress(cut, mesh=back, dims={"dp": "sign"}),
    }
    return refused(calls)


def columns_of_a_pipeline():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def test_what_one_call_cannot_do_is_refused_with_the_cure(pool):
    for said in pool.run(whole_mesh_refusals, size=4):
        assert "whose dimensions have names" in said["mesh"]
        assert "dims is None" in said["dims"]
        assert "expected dimensions of the mesh: ['dp', 'tp']" in said["name"]
        assert "dims names 'tp'" in said["tp"]
        assert "Leave it out" in said["tp"]
        assert "process_group=mesh['dp'].get_group()" in said["group"]
        assert "name a codec" in said["auto"]
        assert "pass the stages of this rank" in said["pp"]
        assert "do not ascend along 'pp': [[2, 0], [1, 3]]" in said["order"]
        for each in ("shards", "shards too"):
            assert "do not ascend along 'dp': [3, 2, 1, 0]" in said[each]
            assert "Start the ranks in the order of the mesh" in said[each]


# ---------------------------------------------------------------- refused


def refusals(shape):
    mesh = columns(shape)
    params = parameters(mesh, tuple(SHAPES)).items()
    group = {"process_group": mesh["dp"].get_group()}
    both = group | {"agree_over": mesh}
    cut = fully_shard(nn.Linear(64, 64), mesh=mesh["dp"]).named_parameters()
    calls = {
        "group": lambda: onebit(params),
        "agree": lambda: onebit(params, **group),
        "column": lambda: onebit(params, process_group=mesh["tp"].get_group(), agree_over=mesh),
        "fsdp": lambda: onebit(cut, **both),
        "twice": lambda: onebit(params, mesh=mesh, **group),
        "narrow": lambda: onebit(params, mesh=mesh["tp"]),
        "auto": lambda: commpress.OneBitAdam(params, mesh=mesh),
        "rates": lambda: lamb(params, rates="frozen", **both),
        "whole": lambda: lamb(params, codec="powersgd-2", **both),
        "clip": lambda: zero_one(params, max_grad_norm=1.0, **both),
    }
    if shape[0] == 1:  # a rank alone has all of it, whatever it is called
        del calls["column"], calls["fsdp"]
    return refused(calls)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_what_cannot_be_done_with_shards_is_refused_with_the_cure(pool, shape):
    for said in pool.run(refusals, shape, size=shape[0] * shape[1]):
        assert "process_group is None, which means all ranks" in said["group"]
        assert "agree_over is None" in said["agree"]
        assert "Pass the whole mesh" in said["agree"]
        for name in ("column", "fsdp") if shape[0] > 1 else ():
            assert "mesh=mesh" in said[name]
        assert "process_group or agree_over: pass the whole mesh alone" in said["twice"]
        assert "parameters are cut over all dimensions of mesh, ['tp']" in said["narrow"]
        assert "exact_steps is 'auto' and mesh or agree_over is given" in said["auto"]
        assert "leave rates= out" in said["rates"]
        assert "codec is 'powersgd" in said["whole"]
        assert "max_grad_norm is 1.0" in said["clip"]
