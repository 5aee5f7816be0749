"""``Partitioned`` on DTensors of tensor parallelism: each rank its shard, in every bit what whole
parameters would do.

Gradients come by way of backward, drawn alike for every mesh, so a run on 2 × 2 ranks has a twin of
two with whole parameters.
"""

from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import commpress
from column_twin import ONE, SHAPES, apart, columns, own, parameters, placed, values, whole
from commpress.errors import StateMismatch
from commpress.integrations.zero.stored_state import boxes_of_range
from ranks import refused
from small_store import open_store
from variants import first, seldom

NAMES = (*SHAPES, *ONE)
STEPS = 6


def partitioned(params, mesh, **options):
    among = {} if mesh is None else {"mesh": mesh}
    named = list(params.items())
    groups = [{"params": named[::2]}, {"params": named[1::2], "weight_decay": 0.1}]
    return commpress.Partitioned(
        groups, torch.optim.AdamW, **{"lr": 1e-2, "bucket_mb": 0.02} | among | options
    )


def drawn(params, mesh, seed):
    """Gradients of this replica."""
    replica = dist.get_rank() if mesh is None else mesh["dp"].get_local_rank()
    return {name: placed(name, values(name, 10 * (seed + 1) + replica), mesh) for name in params}


def train(optimizer, params, mesh, steps, *, accumulate=1, scaler=None, poison=None):
    """Steps whose gradients are the drawn ones; in step 2 ``poison`` is in the first shard of rank
    0. Scales are returned."""
    scales = []
    for step in steps:
        for part in range(accumulate):
            gradients = drawn(params, mesh, 5 * step + part)
            if poison is not None and step == 2 and dist.get_rank() == 0:
                own(gradients["tall"])[0, 0] = poison
            each = [summand(p, gradients[name]) for name, p in params.items()]
            loss = sum(one.full_tensor() if hasattr(one, "full_tensor") else one for one in each)
            with nullcontext() if part == accumulate - 1 else optimizer.no_sync():
                (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return scales


def summand(p, gradient):
    """A term with this gradient; of what a column has alike, a summand of it on each rank, as under
    sequence parallelism."""
    if not isinstance(p, DTensor) or not p.placements[0].is_replicate():
        return (p * gradient).sum()

    def by_rows(tensor):
        return distribute_tensor(tensor, p.device_mesh, [Shard(0)], src_data_rank=None)

    return (by_rows(torch.eye(16, dtype=p.dtype)) @ p * by_rows(whole(gradient).to(p.dtype))).sum()


def trained(shape, names, options, folder=None):
    """Weights after some steps, whole, and the state."""
    mesh = None if shape is None else columns(shape)
    params = parameters(mesh, names)
    with ExitStack() as stack:
        if folder:
            store = stack.enter_context(
                open_store(f"{folder}/{dist.get_world_size()}-{dist.get_rank()}")
            )
            options = options | {"store": store, "chunk_mb": 0.004, "fused": True}
        optimizer = partitioned(params, mesh, **options)
        train(optimizer, params, mesh, range(STEPS), accumulate=2)
        state = optimizer.state_dict()["state"]
        optimizer.close()
    every = sorted(params, key=lambda name: list(params).index(name) % 2)  # by group
    moments = {
        f"{name} {key}": whole(state[i][key])
        for i, name in enumerate(every)
        if i in state
        for key in MOMENTS
    }
    return {name: whole(p) for name, p in params.items()}, moments, optimizer.skipped_steps


MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("options", [{"stage": 1}, {"max_grad_norm": 1.0}], ids=str)
def test_shards_take_the_steps_of_the_whole_in_every_bit(pool, options):
    expected, moments, _ = pool.run(trained, None, tuple(SHAPES), options, size=2)[0]
    for weights, found, skipped in pool.run(trained, (2, 2), tuple(SHAPES), options, size=4):
        assert apart(weights, expected) == apart(found, moments) == skipped == 0
    assert apart(expected, {name: values(name, 0) for name in SHAPES}) > 0


def test_shards_in_stores_take_the_steps_of_the_whole_in_every_bit(pool, tmp_path):
    expected, moments, _ = pool.run(trained, None, tuple(SHAPES), {"fused": True}, size=2)[0]
    for weights, found, _ in pool.run(trained, (2, 2), tuple(SHAPES), {}, str(tmp_path), size=4):
        assert apart(weights, expected) == apart(found, moments) == 0


# ---------------------------------------------------------------- compressed


def coded(options, cut):
    """Shards after steps with codecs: as DTensors, or as plain tensors of the same values, each in
    a bucket of its own."""
    mesh = columns((2, 2))
    params = parameters(mesh, ("tall", "wide", "same", "norm"))
    if not cut:
        params = {name: nn.Parameter(own(p).clone()) for name, p in params.items()}
    group = {"process_group": mesh["dp"].get_group()} | ({"agree_over": mesh} if cut else {})
    options = {"lr": 1e-2, "bucket_mb": 1e-6, "min_numel": 0} | group | options
    optimizer = commpress.Partitioned(params.items(), torch.optim.AdamW, **options)
    for step in range(STEPS):
        gradients = drawn(params, mesh, step)
        for name, p in params.items():
            p.grad = gradients[name] if cut else own(gradients[name]).clone()
        optimizer.step()
    sent = optimizer.transport.sent_bytes / 4 / sum(own(p).numel() for p in params.values()) / STEPS
    optimizer.close()
    return {name: own(p).clone() for name, p in params.items()}, sent


@pytest.mark.parametrize(
    ("options", "share"),
    [({"codec": "sign", "weights": "int8"}, 0.3), ({"codec": "powersgd-2"}, 0.75)],
    ids=str,
)
def test_codecs_treat_dtensors_as_their_shards(pool, options, share):
    found = pool.run(coded, options, True, size=4)
    for rank, ((mine, sent), (plain, _)) in enumerate(
        zip(found, pool.run(coded, options, False, size=4), strict=True)
    ):
        assert apart(mine, plain) == 0
        assert apart(mine, found[(rank + 2) % 4][0]) == 0  # the other replica
        assert sent < share


# ---------------------------------------------------------------- one verdict for the mesh


def poisoned(poison, options, scaled):
    mesh = columns((2, 2))
    params = parameters(mesh, NAMES)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    optimizer = partitioned(
        params, mesh, grad_scaler=scaler, codec="sign", weights="int8", min_numel=0, **options
    )
    scales = train(optimizer, params, mesh, range(STEPS), scaler=scaler, poison=poison)
    optimizer.close()
    return (
        {name: whole(p) for name, p in params.items()},
        own(params["same"]),
        optimizer.skipped_steps,
        scales,
    )


@pytest.mark.parametrize(
    ("poison", "scaled", "stage"),
    [(float("nan"), False, 1), (float("inf"), True, 2), seldom(1e5, False, 2)],
)
def test_replicas_and_columns_stay_equal_whatever_one_shard_sees(pool, poison, scaled, stage):
    """NaN, an infinity under a GradScaler, a norm to be clipped. Codecs mix the elements of a
    block, and shards differ."""
    results = pool.run(poisoned, poison, {"stage": stage, "max_grad_norm": 1.0}, scaled, size=4)
    for weights, same, skipped, scales in results:
        assert apart(weights, results[0][0]) == 0
        assert torch.equal(same, results[0][1])
        assert all(torch.isfinite(w).all() for w in weights.values())
        assert skipped == (poison != 1e5)
        assert scales == ([64.0, 64.0, 32.0, 32.0, 32.0, 32.0] if scaled else [])


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_of_a_range_are_its_elements_in_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel()):
        for stop in range(start, whole.numel() + 1):
            boxes = list(boxes_of_range(start, stop, shape))
            parts = [
                whole[tuple(slice(b, b + s) for b, s in zip(*box, strict=True))].reshape(-1)
                for box in boxes
            ]
            assert torch.equal(torch.cat([whole.new_empty(0), *parts]), torch.arange(start, stop))
            assert len(boxes) <= max(2 * len(shape) - 1, 1)


def moved(shape, dtype, folder, load, steps):
    """Load what another mesh has saved, say what came, go on and save."""
    mesh = None if shape is None else columns(shape)
    params = {
        name: nn.Parameter(p.detach().to(dtype)) for name, p in parameters(mesh, NAMES).items()
    }
    # some have a bucket of their own
    options = {"bucket_mb": 0.02 if dtype is torch.float32 else 1e-6, "lr": 1.0 if load else 1e-2}
    optimizer = partitioned(params, mesh, **options)
    if load:
        model = {name: p.detach() for name, p in params.items()}
        held = {"model": model, "optimizer": optimizer.sharded_state_dict()}
        dcp.load(held, checkpoint_id=f"{folder}/{load}")
        optimizer.load_sharded_state_dict(held["optimizer"])
    before = seen(optimizer, params)
    train(optimizer, params, mesh, steps)
    held = {
        "model": {name: p.detach() for name, p in params.items()},
        "optimizer": optimizer.sharded_state_dict(),
    }
    dcp.save(held, checkpoint_id=f"{folder}/{shape}")
    after = seen(optimizer, params)
    optimizer.close()
    return before, after


def seen(optimizer, params):
    """Weights and state, whole, as every rank knows them."""
    state, found = optimizer.state_dict(), {name: whole(p).float() for name, p in params.items()}
    found["lr"] = torch.tensor([group["lr"] for group in state["param_groups"]])
    for group in state["param_groups"]:
        for name, number in zip(group["param_names"], group["params"], strict=True):
            found |= {
                f"{name} {key}": whole(value)
                for key, value in state["state"].get(number, {}).items()
            }
    return found


@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float32]), ids=str)
def test_states_go_from_mesh_to_mesh_in_every_bit(pool, tmp_path, dtype):
    """2 × 2 with replicas turned → 4 × 1 → 1 × 2 → two ranks with whole parameters, masters too;
    the last goes on as the first would."""
    folder = str(tmp_path)
    saved = pool.run(moved, "turned", dtype, folder, "", range(3), size=4)[0][1]
    assert {"tall exp_avg", "one exp_avg_sq", "odd step"} < saved.keys()
    assert ("wide master" in saved) == (dtype is torch.bfloat16)
    ends = []
    for shape, load, steps, size in (
        ((4, 1), "turned", (), 4),
        ((1, 2), "(4, 1)", (), 2),
        (None, "(1, 2)", range(3, 5), 2),
        ((2, 2), "turned", range(3, 5), 4),
    ):
        ends.append(pool.run(moved, shape, dtype, folder, load, steps, size=size)[0])
    for before, _ in ends:
        assert before.keys() == saved.keys()
        assert apart(before, saved) == 0
    assert apart(ends[2][1], ends[3][1]) == 0


def handed_over():
    """torch's AdamW takes the whole state, as DTensors."""
    mesh = columns((2, 2))
    params = parameters(mesh, NAMES)
    exact = partitioned(params, mesh)
    train(exact, params, mesh, range(5))
    twin = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    named = list(twin.items())
    plain = torch.optim.AdamW([{"params": named[::2]}, {"params": named[1::2]}], foreach=False)
    plain.load_state_dict(exact.state_dict())
    for name, p in twin.items():
        both = [placed(name, values(name, 10 * 26 + replica), mesh) for replica in range(2)]
        p.grad = (both[0] + both[1]) / 2
    plain.step()
    train(exact, params, mesh, range(5, 6))
    state = exact.state_dict()
    state["state"][0]["exp_avg"] = whole(state["state"][0]["exp_avg"])
    with pytest.raises(
        StateMismatch, match=r"expected \(64, 128\) and \(Shard\(dim=0\),\).*sharded_state_dict"
    ):
        exact.load_state_dict(state)
    exact.close()
    return apart(
        {n: own(p) for n, p in twin.items() if own(p).numel()},
        {n: own(p) for n, p in params.items()},
    )


def test_torchs_optimizer_goes_on_with_a_state(pool):
    assert pool.run(handed_over, size=4) == [0] * 4


# ---------------------------------------------------------------- local updates around it


def locally(divided):
    """Weights of replicas that train apart, each on a column of two: by ``Partitioned``, or torch's
    optimizer."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "dp", "tp"))
    params = parameters(mesh, tuple(SHAPES))
    options = {"lr": 1e-2, "foreach": False}
    if divided:
        among = {"process_group": mesh["dp"].get_group(), "agree_over": mesh["dp", "tp"]}
        inner = commpress.Partitioned(params.items(), torch.optim.AdamW, **among, **options)
    else:
        inner = torch.optim.AdamW(params.values(), **options)
    local = commpress.LocalUpdates(
        inner, every=3, process_group=mesh["replica"].get_group(), codec=None
    )
    for step in range(7):
        for name, p in params.items():
            p.grad = placed(
                name, values(name, 10 * (step + 1) + mesh["replica"].get_local_rank()), mesh
            )
        local.step()
    local.drain()
    return {name: whole(p) for name, p in params.items()}


def test_local_updates_around_it_are_those_around_torchs_optimizer(pool):
    for found, expected in zip(
        pool.run(locally, True, size=4), pool.run(locally, False, size=4), strict=True
    ):
        assert apart(found, expected) == 0


# ---------------------------------------------------------------- what cannot work


def refusals(shape):
    mesh = columns(shape)
    params = parameters(mesh, ("tall", "norm"))
    group = {"process_group": mesh["dp"].get_group()}
    both = group | {"agree_over": mesh}
    cut = fully_shard(nn.Linear(64, 64), mesh=mesh["dp"]).named_parameters()
    plain = {"norm": params["norm"]}

    def make(named, **options):
        return commpress.Partitioned(named, torch.optim.AdamW, lr=1e-2, **options)

    calls = {
        "group": lambda: make(params.items()),
        "agree": lambda: make(params.items(), **group),
        "fsdp": lambda: make(cut, **both),
        "scaler": lambda: make(
            params.items(), stage=1, grad_scaler=torch.amp.GradScaler("cpu"), **both
        ),
        "clip": lambda: make(plain.items(), max_grad_norm=1.0, **both),
        "later": lambda: make(plain.items(), **both).clip_grad_norm_(1.0),
    }
    if shape[0] == 1:  # a rank alone has all of it, whatever it is called
        del calls["fsdp"]
    return refused(calls)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_what_cannot_be_done_with_shards_is_refused_with_the_cure(pool, shape):
    for said in pool.run(refusals, shape, size=shape[0] * shape[1]):
        assert "by the whole mesh: mesh=mesh" in said["group"]
        assert "mesh=mesh" in said["agree"]
        assert "use stage=2" in said["scaler"].lower()
        assert said["clip"].startswith("max_grad_norm is 1.0 and agree_over is given")
        assert said["later"].startswith("max_norm is 1.0 and agree_over is given")
        assert shape[0] == 1 or "compress_fsdp" in said["fsdp"]
