"""Grids of parallelism: what a step is predicted to cost, which one is chosen, and in which order
ranks stand on it."""

import gc
import json
import re
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commpress
from commpress.cli import main
from commpress.errors import InvalidArgument
from commpress.plan.cluster import Cluster, Node
from commpress.plan.costs import device_costs
from commpress.plan.expert_way import ExpertWay
from commpress.plan.grids import (
    Grid,
    MeshDims,
    MeshWork,
    Numel,
    chosen,
    every_grid,
    pipeline_seconds,
    predicted,
)
from commpress.plan.model import Model, Shape, transformer
from commpress.plan.pair_links import PairLinks, load_pairs
from commpress.plan.placement import place
from variants import first

COSTS, LATE = device_costs(2e10), 1e-4
BLOCK = Numel(1_000_000, 0)
ARGUMENTS = ["plan", "--mesh", "--parameters", "2M", "--compute-ms", "50", "--device", "20GB/s"]
DP = Grid(dp=8)


def work(blocks=4, width=64, batch=16, length=32, block=BLOCK, **more):
    more = {"forward": 0.1, "backward": 0.2} | more
    return MeshWork(Numel(), (block,) * blocks, Numel(), width, batch, length, **more)


def nodes(count, ranks, nic=1e8, inside=1e10):
    return PairLinks.of_cluster(
        Cluster(Node(ranks, nic, inside), count, latency=LATE, inside_latency=1e-5)
    )


EIGHT = nodes(8, 1)


def step_of(grid, model=None, links=EIGHT, dims=None, **more):
    return predicted(grid, model or work(), links, COSTS, dims and MeshDims(**dims), **more)


def pairs_of(size, rate):
    """Rows of a probe; ``rate``: of two ranks."""
    return [
        {"first": a, "second": b, "latency": 2 * LATE, "bandwidth": rate(a, b)}
        for a, b in combinations(range(size), 2)
    ]


def islands(*sizes, fast=1e9, slow=1e7, seed):
    """Each rank on a host of its own, numbered at random; links inside an island are fast."""
    home = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = pairs_of(len(home), lambda a, b: fast if home[a] == home[b] else slow)
    return home, PairLinks.of_pairs([[rank] for rank in range(len(home))], rows)


# ---------------------------------------------------------------- time


@pytest.mark.parametrize(
    ("forward", "backward", "edges", "count", "expected"),
    [
        ([1.0], [2.0], [], 3, 3.0 * 3),
        ([1.0] * 2, [2.0] * 2, [0.0], 1, 3.0 * 2),
        ([1.0] * 4, [2.0] * 4, [0.0] * 3, 8, 3.0 * (8 + 3)),
        # the slowest stage, and the others once
        ([1.0, 3.0], [2.0, 5.0], [0.0], 10, 10 * 8 + 1 + 2),
        # edges there and back
        ([1.0] * 3, [2.0] * 3, [0.5, 0.25], 1, 9 + 2 * 0.75),
        # a link carries one message after the other, two a round trip
        ([0.1] * 2, [0.1] * 2, [5.0], 6, 6 * 5.0 + 5.0 + 12 * 0.1),
    ],
)
def test_a_pipeline_takes_its_micro_batches_and_the_other_stages_once(
    forward, backward, edges, count, expected
):
    assert pipeline_seconds(forward, backward, edges, count) == pytest.approx(expected)


def test_averaging_takes_what_the_line_of_a_node_carries():
    step = step_of(DP)
    gradients = 4 * 4e6
    assert step.sent["dp"] == step.between == pytest.approx(2 * 7 / 8 * gradients)
    alone = 2 * (LATE + 7 / 8 * gradients / 1e8)
    assert step.parts["dp"] == pytest.approx(alone), "a single bucket is full when backward is done"
    large = step_of(DP, work(64)).parts["dp"]
    assert large == pytest.approx(16 * (alone - 2 * LATE) + 2 * LATE - 0.2 / 2), (
        "the last of two backwards hides the others"
    )
    shared = step_of(DP, links=nodes(4, 2))
    assert shared.between == pytest.approx(2 * 2 * 6 / 8 * gradients), (
        "two ranks of a node send to six outside"
    )


def test_tensor_parallelism_rings_four_times_a_block_and_stays_inside_a_node():
    inside, outside = (
        step_of(Grid(dp=4, tp=2), links=nodes(4, 2), order=order)
        for order in (None, [0, 2, 1, 3, 4, 6, 5, 7])
    )
    times, ring = 4 * 4 * 4, 4 * 64 * 32 / 2  # micro-batches, blocks and rings; half an activation
    assert inside.sent["tp"] == pytest.approx(times * 2 * ring)
    assert inside.parts["tp"] == pytest.approx(times * 2 * (1e-5 + ring / 1e10), rel=0.01)
    assert outside.parts["tp"] > 10 * inside.parts["tp"]
    assert inside.sent["dp"] == pytest.approx(2 * 3 / 4 * 4 * 4e6 / 2), "matrices are divided by tp"


def test_compressed_gradients_are_fewer_bytes_and_cost_arithmetic():
    exact, four = (step_of(DP, dims={"dp": codec}) for codec in ("none", "int4"))
    assert 7.5 < exact.sent["dp"] / four.sent["dp"] < 8
    exact, four = (
        step_of(Grid(pp=2, dp=4), links=nodes(8, 1, nic=1e13), dims={"dp": codec})
        for codec in ("none", "int4")
    )
    assert four.parts["dp"] > exact.parts["dp"]
    exact, eight = (
        step_of(Grid(pp=2, dp=4), dims={"pp": way}).sent["pp"] for way in ("none", "int8")
    )
    assert exact == pytest.approx(4 * 4 * 64 * 32)
    assert 3.8 < exact / eight < 4
    with pytest.raises(InvalidArgument, match=r"powersgd-4.*whole tensors"):
        MeshDims(dp="powersgd-4")


def test_sequences_and_experts_count_what_their_exchanges_send():
    keys = 2 * 4 * 64 * 32 / 4
    assert step_of(Grid(dp=2, sp=4)).sent["sp"] == pytest.approx(3 * 3 * 8 * 4 * keys)
    blocks = (BLOCK, Numel(500_000, 0, 4_000_000)) * 2
    sparse = replace(work(experts_per_token=2), blocks=blocks)
    step = step_of(Grid(dp=2, ep=4), sparse)
    way = ExpertWay((0, 1, 2, 3), (0, 1, 2, 3), 32, 64, 2)
    once = sum(float(hop.nbytes[hop.source == 0].sum()) for hop in [*way.forward, *way.backward])
    assert step.sent["ep"] == pytest.approx(2 * 2 * once), "micro-batches, blocks with experts"
    assert step.between == pytest.approx(step.sent["ep"] + step.sent["dp"]), "a rank on each node"
    assert step.memory < step_of(DP, sparse).memory


def test_slow_ranks_get_fewer_layers_and_sequences():
    speeds, links = [1.0, 1.0, 0.5, 0.5], nodes(4, 1, nic=1e12)
    even, piped = (step_of(Grid(pp=2, dp=2), work(6), links, speeds=s) for s in (None, speeds))
    assert (even.layers, piped.layers) == ((3, 3), (4, 2))
    replicas = step_of(Grid(dp=4), work(batch=24), links, speeds=speeds)
    assert replicas.batches == (8, 8, 4, 4)
    assert replicas.parts["compute"] == pytest.approx(0.3 * 8 / 6)


EXACT = 16 + 4 + (2 + 1 / 8) * 4  # state, buckets, messages of the one or two buckets


@pytest.mark.parametrize(
    ("grid", "model", "codec", "nbytes"),
    [
        (Grid(tp=8), {"largest": 1_000_000}, "none", (16 * 8 + 3 * 4) * 1e6 / 8),
        (DP, {}, "none", EXACT * 8e6),
        (Grid(dp=2, tp=2, pp=2), {}, "none", (20 + 2.5 * 4) * 2e6),
        (DP, {}, "sign", (16 + 4 + 9 + (2 + 1 / 8) / 8) * 8e6),
        (
            DP,  # buckets of one parameter each, of which four are under way
            {"blocks": 2, "block": Numel(50_000_000), "largest": 10_000_000},
            "none",
            20 * 100e6 + (2 + 1 / 8) * 4 * 4 * 10e6 + 3 * 4 * 10e6,
        ),
        (
            Grid(dp=2, pp=4),  # four micro-batches of two blocks on the first stage
            {"kept": (1, 0)},
            "none",
            (20 + 2.5 * 4) * 2e6 + 4 * 2 * 4 * 64 * 32,
        ),
    ],
)
def test_memory_is_divided_by_tensor_and_pipeline_parallelism(grid, model, codec, nbytes):
    model = work(**({"blocks": 8, "kept": (0, 0)} | model))
    assert step_of(grid, model, dims={"dp": codec}).memory == pytest.approx(nbytes, rel=1e-3)


@pytest.mark.parametrize("codec", first(1, ["int8", "none", "sign"]))
def test_memory_of_data_parallelism_is_that_of_real_tensors(pool, codec):
    sizes = [500_000] * 5
    model = work(5, block=Numel(500_000), kept=(0, 0))  # nothing is held for a while only
    step = step_of(Grid(dp=2), model, nodes(2, 1), {"dp": codec})
    for held in pool.run(held_by_a_model, sizes, codec, size=2):
        assert held == pytest.approx(step.memory, rel=0.02)


def tensors():
    """Every block of memory that tensors have, by its address."""
    gc.collect()
    # others have none
    found = [
        thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)
    ]
    stores = [t.untyped_storage() for t in found if t.device.type == "cpu"]
    return {store.data_ptr(): store.nbytes() for store in stores}


def held_by_a_model(sizes, codec):
    before = tensors()
    model = torch.nn.ParameterList(torch.zeros(size) for size in sizes)
    states = commpress.compress(
        model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dims={"dp": codec}
    )
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(2):
        sum(p.sum() for p in model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert states["dp"].step == 2
    return sum(nbytes for at, nbytes in tensors().items() if at not in before)


# ---------------------------------------------------------------- the choice


def test_all_grids_of_eight_ranks_and_why_others_are_not():
    assert len(every_grid(8, work(8, batch=32))) == 20, "without experts there is nothing to divide"
    assert {grid.pp for grid in every_grid(8, work(2))} == {1, 2}
    assert "multiple of tp" in work(width=30).fits(Grid(tp=4))
    with pytest.raises(InvalidArgument, match="make no 8"):
        step_of(Grid(pp=8))
    with pytest.raises(InvalidArgument, match="numbered blocks"):
        MeshWork.of(Model((Shape("weight", (4, 4)),)), 0.1, batch=4, length=8)


def test_a_slow_network_wants_a_pipeline_and_a_fast_one_data_parallelism():
    model = MeshWork.of(transformer(20_000_000), 0.3, batch=32, length=128)
    assert (model.width, len(model.blocks)) == (480, 7)

    def best(nic, **more):
        links = nodes(8, 1, nic)
        return chosen([step_of(grid, model, links, **more) for grid in every_grid(8, model)])

    assert best(1e7).grid.pp > 1
    assert best(1e12).grid == DP
    with pytest.raises(InvalidArgument, match="no grid fits"):
        best(1e8, limit=1e6)


# ---------------------------------------------------------------- which rank stands where


def ascends(order, grid):
    places = np.array(order).reshape(grid)
    return all(
        (np.diff(places, axis=axis) > 0).all()
        for axis, name in enumerate(grid._fields)
        if name != "dp"
    )


def exhaustive(grid, model, links):
    """The least of all orders in which ranks ascend along all axes but dp, rank 0 in the first
    replica."""
    first = np.arange(grid.size).reshape(grid)[:, 0].ravel().tolist()
    orders = (
        order
        for order in permutations(range(grid.size))
        if order.index(0) in first and ascends(order, grid)
    )
    return min(step_of(grid, model, links, order=order).seconds for order in orders)


@pytest.mark.parametrize(("grid", "seed"), [(Grid(dp=3, tp=2), 0), (Grid(pp=3, dp=2), 1)])
def test_the_search_finds_an_order_as_good_as_the_best_of_all(grid, seed):
    """Random links between six hosts; islands of two and three as well."""
    model = work(3, batch=6, length=512, forward=0.01, backward=0.02)
    rng = np.random.default_rng(seed)
    rows = pairs_of(6, lambda a, b: 10 ** rng.uniform(7, 9))
    random = PairLinks.of_pairs([[rank] for rank in range(6)], rows)
    assert place(grid, model, random, COSTS).seconds <= 1.05 * exhaustive(grid, model, random)
    _, found = islands(*((2, 2, 2) if grid.tp == 2 else (3, 3)), seed=seed)
    assert place(grid, model, found, COSTS).seconds <= (1 + 1e-9) * exhaustive(grid, model, found)


def test_the_heaviest_traffic_stays_on_the_fastest_links():
    """Two islands of four hosts each, numbered at random: tensor-parallel groups never leave
    one."""
    home, links = islands(4, 4, seed=1)
    model = MeshWork.of(transformer(2_000_000), 0.05, batch=32, length=512)
    for grid in (Grid(dp=4, tp=2), Grid(dp=2, tp=4), Grid(pp=2, dp=2, tp=2)):
        numbered, placed = step_of(grid, model, links), place(grid, model, links, COSTS)
        assert all(
            len(set(home[group])) == 1 for group in grid.groups(np.array(placed.order), "tp")
        )
        assert any(len(set(home[group])) == 2 for group in grid.groups(np.arange(8), "tp"))
        assert placed.seconds < 0.5 * numbered.seconds
        assert sorted(placed.order) == list(range(8))
        assert ascends(placed.order, grid), (
            "torch sorts the ranks of a group: a stage is a rank's place among them"
        )


def test_measured_pairs_must_be_whole(tmp_path):
    path, rows = tmp_path / "pairs.json", pairs_of(2, lambda a, b: 1e8)
    path.write_text(json.dumps({"nodes": [[0], [1]], "rows": rows}))
    assert load_pairs(path).lines.tolist() == [1e8, 1e8]
    for content, error in (
        ({"nodes": [[0], [1]], "rows": []}, "no nodes and rows"),
        ({"nodes": [[0], [2]], "rows": rows}, "exactly once"),
        ({"nodes": [[0]], "rows": rows}, "at least 2"),
        ({"nodes": [[0], [1], [2]], "rows": rows}, "measure every pair"),
        ({"nodes": [[0], [1]], "rows": [rows[0] | {"bandwidth": -1}]}, "above 0"),
        ({"nodes": [[0], [1]], "rows": [rows[0] | {"second": 2}]}, "ranks below 2"),
        ({"nodes": [[0], [1]], "rows": [{"first": 0}]}, "above 0"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(InvalidArgument, match=error):
            load_pairs(path)


# ---------------------------------------------------------------- the command


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def planned(*more):
    assert main([*ARGUMENTS, "--out", "mesh.json", *more]) == 0
    return json.loads(Path("mesh.json").read_text())


def test_the_command_lists_every_grid_within_100_columns_and_says_which_to_take(
    in_tmp_path, capsys
):
    document = planned("--nodes", "4x2", "--link", "100mbit,100us", "--memory", "device=1GiB")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    grids = re.findall(r"^((?:(?:pp|dp|sp|tp)\d+ ?)+) +\d", text, re.MULTILINE)
    assert len(grids) == 16  # two blocks make no four stages
    best = " ".join(f"{name}{n}" for name, n in document["grid"].items() if n > 1)
    assert f"take {best}: " in " ".join(text.split())
    assert "states = commpress.compress(model, mesh=mesh, dims=" in text


def train_on(lines):
    """Two steps of a model on the mesh that a plan printed; weights of all ranks."""
    names = {"DeviceMesh": DeviceMesh, "torch": torch, "commpress": commpress}
    torch.manual_seed(0)
    names["model"] = model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)
    )
    exec("\n".join(lines[:-1]), names)
    parallelize_module(model, names["mesh"]["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    exec(lines[-1], names)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    place = dict(zip(names["mesh"].mesh_dim_names, names["mesh"].get_coordinate(), strict=True))
    for step in range(2):
        torch.manual_seed(10 * step + place["dp"])
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    own = [
        (p.to_local() if hasattr(p, "to_local") else p).detach().flatten()
        for p in model.parameters()
    ]
    return place, torch.cat(own)


def test_what_the_command_prints_runs_with_the_fast_links_under_tensor_parallelism(
    pool, in_tmp_path
):
    """Islands {0, 2} and {1, 3} on four ranks: the groups of tp are these."""
    rows = pairs_of(4, lambda a, b: 1e9 if (a - b) % 2 == 0 else 1e6)
    Path("pairs.json").write_text(json.dumps({"nodes": [[0], [1], [2], [3]], "rows": rows}))
    document = planned(
        "--pairs", "pairs.json", "--dims", "dp=int8", "--length", "64", "--batch", "4"
    )
    model = MeshWork.of(transformer(2_000_000), 0.05, batch=4, length=64)
    step = place(Grid(dp=2, tp=2), model, load_pairs("pairs.json"), COSTS, MeshDims(dp="int8"))
    assert sorted(document["order"]) == [0, 1, 2, 3]
    found = pool.run(train_on, step.call.splitlines(), size=4)
    columns = {
        tuple(rank for rank, (place, _) in enumerate(found) if place["dp"] == d) for d in (0, 1)
    }
    assert columns == {(0, 2), (1, 3)}
    for tp in (0, 1):
        one, other = (own for place, own in found if place["tp"] == tp)
        assert torch.equal(one, other)
