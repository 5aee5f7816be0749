"""Grids of parallelism: what a step is predicted to cost, which one is chosen, and in which order
ranks stand on it."""

import gc
import json
import re
from itertools import combinations, permutations

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
from commpress.plan.mesh_simulator import simulate_mesh
from commpress.plan.model import Model, Shape, transformer
from commpress.plan.pair_links import PairLinks, load_pairs
from commpress.plan.placement import place
from variants import first

COSTS, LATE = device_costs(2e10), 1e-4
BLOCK = Numel(1_000_000, 0)
ARGUMENTS = ["plan", "--mesh", "--parameters", "2M", "--compute-ms", "50", "--device", "20GB/s"]


def work(blocks=4, width=64, batch=16, length=32, **more):
    more = {"forward": 0.1, "backward": 0.2} | more
    return MeshWork(Numel(), (BLOCK,) * blocks, Numel(), width, batch, length, **more)


def nodes(count, ranks, nic=1e8, inside=1e10):
    return PairLinks.of_cluster(
        Cluster(((Node(ranks, nic, inside), count),), latency=LATE, inside_latency=1e-5)
    )


def islands(*sizes, fast=1e9, slow=1e7, mixed=None):
    """Each rank on a host of its own; links inside an island are fast."""
    home = np.repeat(np.arange(len(sizes)), sizes)
    if mixed is not None:
        home = np.random.default_rng(mixed).permutation(home)
    rows = [
        {
            "first": a,
            "second": b,
            "latency": 2 * LATE,
            "bandwidth": fast if home[a] == home[b] else slow,
        }
        for a, b in combinations(range(len(home)), 2)
    ]
    return home, PairLinks.of_pairs([[rank] for rank in range(len(home))], rows)


# ---------------------------------------------------------------- time


@pytest.mark.parametrize(("size", "count"), [(1, 3), (2, 1), (4, 8), (3, 2)])
def test_a_pipeline_without_links_takes_its_micro_batches_and_the_other_stages_once(size, count):
    assert pipeline_seconds([1.0] * size, [2.0] * size, [0.0] * (size - 1), count) == pytest.approx(
        3.0 * (count + size - 1)
    )


def test_a_pipeline_waits_for_its_slowest_stage_and_for_its_edges_twice():
    assert pipeline_seconds([1.0, 3.0], [2.0, 5.0], [0.0], 10) == pytest.approx(10 * 8 + 1 + 2)
    assert pipeline_seconds([1.0] * 3, [2.0] * 3, [0.5, 0.25], 1) == pytest.approx(9 + 2 * 0.75)
    slow = pipeline_seconds([0.1, 0.1], [0.1, 0.1], [5.0], 6)
    assert slow == pytest.approx(6 * 5.0 + 5.0, rel=0.2), (
        "a link carries one message after the other"
    )


def test_averaging_takes_what_the_line_of_a_node_carries():
    step = predicted(Grid(dp=8), work(), nodes(8, 1), COSTS)
    gradients = 4 * 4e6
    assert step.sent["dp"] == pytest.approx(2 * 7 / 8 * gradients)
    assert step.between == pytest.approx(2 * 7 / 8 * gradients)
    alone = 2 * (LATE + 7 / 8 * gradients / 1e8)
    assert step.parts["dp"] == pytest.approx(alone), "a single bucket is full when backward is done"
    large = predicted(Grid(dp=8), work(64), nodes(8, 1), COSTS).parts["dp"]
    assert large == pytest.approx(16 * (alone - 2 * LATE) + 2 * LATE - 0.2 / 2), (
        "the last of two backwards hides the others"
    )
    shared = predicted(Grid(dp=8), work(), nodes(4, 2), COSTS)
    assert shared.between == pytest.approx(2 * 2 * 6 / 8 * gradients), (
        "two ranks of a node send to six outside"
    )


def test_tensor_parallelism_rings_four_times_a_block_and_stays_inside_a_node():
    model = work(batch=16)
    inside, outside = (
        predicted(Grid(dp=4, tp=2), model, nodes(4, 2), COSTS, order=order)
        for order in (None, [0, 2, 1, 3, 4, 6, 5, 7])
    )
    activations = 4 * 64 * 32
    assert inside.sent["tp"] == pytest.approx(4 * 4 * 4 * activations * 2 * 1 / 2), (
        "four micro-batches, blocks and rings"
    )
    assert inside.parts["tp"] == pytest.approx(
        4 * 4 * 4 * 2 * (1e-5 + activations / 2 / 1e10), rel=0.01
    )
    assert outside.parts["tp"] > 10 * inside.parts["tp"]
    assert inside.sent["dp"] == pytest.approx(2 * 3 / 4 * 4 * 4e6 / 2), "matrices are divided by tp"


def test_compressed_gradients_are_fewer_bytes_and_cost_arithmetic():
    exact, four = (
        predicted(Grid(dp=8), work(), nodes(8, 1), COSTS, MeshDims(dp=codec))
        for codec in ("none", "int4")
    )
    assert 7.5 < exact.sent["dp"] / four.sent["dp"] < 8
    quick = nodes(8, 1, nic=1e13)
    assert (
        predicted(Grid(pp=2, dp=4), work(), quick, COSTS, MeshDims(dp="int4")).parts["dp"]
        > predicted(Grid(pp=2, dp=4), work(), quick, COSTS).parts["dp"]
    )
    piped = [
        predicted(Grid(pp=2, dp=4), work(), nodes(8, 1), COSTS, MeshDims(pp=way)).sent["pp"]
        for way in ("none", "int8")
    ]
    assert piped[0] == pytest.approx(4 * 4 * 64 * 32)
    assert 3.8 < piped[0] / piped[1] < 4
    with pytest.raises(InvalidArgument, match=r"powersgd-4.*whole tensors"):
        MeshDims(dp="powersgd-4")


def test_sequences_and_experts_count_what_their_exchanges_send():
    keys = 2 * 4 * 64 * 32 / 4
    assert predicted(Grid(dp=2, sp=4), work(), nodes(8, 1), COSTS).sent["sp"] == pytest.approx(
        3 * 3 * 8 * 4 * keys
    )
    blocks = (BLOCK, Numel(500_000, 0, 4_000_000)) * 2
    sparse = MeshWork(Numel(), blocks, Numel(), 64, 16, 32, 0.1, 0.2, experts_per_token=2)
    step = predicted(Grid(dp=2, ep=4), sparse, nodes(8, 1), COSTS)
    way = ExpertWay((0, 1, 2, 3), (0, 1, 2, 3), 32, 64, 2)
    once = sum(float(hop.nbytes[hop.source == 0].sum()) for hop in [*way.forward, *way.backward])
    assert step.sent["ep"] == pytest.approx(2 * 2 * once), "micro-batches, blocks with experts"
    assert step.between == pytest.approx(step.sent["ep"] + step.sent["dp"]), "a rank on each node"
    assert step.memory < predicted(Grid(dp=8), sparse, nodes(8, 1), COSTS).memory
    assert not [grid for grid in every_grid(8, work()) if grid.ep > 1], (
        "without experts there is nothing to divide"
    )


def test_slow_ranks_get_fewer_layers_and_sequences():
    speeds = [1.0, 1.0, 0.5, 0.5]
    even = predicted(Grid(pp=2, dp=2), work(6), nodes(4, 1, nic=1e12), COSTS)
    piped = predicted(Grid(pp=2, dp=2), work(6), nodes(4, 1, nic=1e12), COSTS, speeds=speeds)
    assert (even.layers, piped.layers) == ((3, 3), (4, 2))
    replicas = predicted(Grid(dp=4), work(batch=24), nodes(4, 1, nic=1e12), COSTS, speeds=speeds)
    assert replicas.batches == (8, 8, 4, 4)
    assert replicas.parts["compute"] == pytest.approx(0.3 * 8 / 6)


def test_memory_is_divided_by_tensor_and_pipeline_parallelism():
    links, model = nodes(8, 1), work(8, kept=(0, 0))
    alone = MeshWork(
        Numel(), (BLOCK,) * 8, Numel(), 64, 16, 32, 0.1, 0.2, kept=(0, 0), largest=1_000_000
    )
    assert predicted(Grid(tp=8), alone, links, COSTS).memory == pytest.approx(
        (16 * 8 + 3 * 4) * 1e6 / 8
    )
    exact = 16 + 4 + (2 + 1 / 8) * 4  # state, buckets, messages of the one or two buckets
    assert predicted(Grid(dp=8), model, links, COSTS).memory == pytest.approx(exact * 8e6)
    assert predicted(Grid(dp=2, tp=2, pp=2), model, links, COSTS).memory == pytest.approx(
        (20 + 2.5 * 4) * 2e6
    )
    coded = 16 + 4 + 9 + (2 + 1 / 8) / 8
    assert predicted(Grid(dp=8), model, links, COSTS, MeshDims(dp="sign")).memory == pytest.approx(
        coded * 8e6, rel=1e-3
    )
    large = MeshWork(
        Numel(),
        (Numel(50_000_000),) * 2,
        Numel(),
        64,
        16,
        32,
        0.1,
        0.2,
        kept=(0, 0),
        largest=10_000_000,
    )
    four = (2 + 1 / 8) * 4 * 4 * 10e6  # buckets of one parameter each, of which four are under way
    assert predicted(Grid(dp=8), large, links, COSTS).memory == pytest.approx(
        20 * 100e6 + four + 3 * 4 * 10e6
    )
    waiting = (
        predicted(Grid(dp=2, pp=4), work(8, kept=(1, 0)), links, COSTS).memory
        - predicted(Grid(dp=2, pp=4), model, links, COSTS).memory
    )
    assert waiting == pytest.approx(4 * 2 * 4 * 64 * 32), (
        "four micro-batches of two blocks on the first stage"
    )


@pytest.mark.parametrize("codec", first(1, ["int8", "none", "sign"]))
def test_memory_of_data_parallelism_is_that_of_real_tensors(pool, codec):
    numel, sizes = 5 * 500_000, [500_000] * 5
    blocks = tuple(Numel(size) for size in sizes)
    # nothing is held for a while only
    model = MeshWork(Numel(), blocks, Numel(), 64, 16, 32, 0.1, 0.2, kept=(0, 0))
    step = predicted(Grid(dp=2), model, nodes(2, 1), COSTS, MeshDims(dp=codec))
    for held in pool.run(held_by_a_model, sizes, codec, size=2):
        assert held == pytest.approx(step.memory, rel=0.02), (held - step.memory) / numel


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
    assert len(every_grid(8, work(8, batch=32))) == 20
    assert {grid.pp for grid in every_grid(8, work(2))} == {1, 2}
    assert "multiple of tp" in work(width=30).fits(Grid(tp=4))
    with pytest.raises(InvalidArgument, match="make no 8"):
        predicted(Grid(pp=8), work(4), nodes(8, 1), COSTS)
    with pytest.raises(InvalidArgument, match="numbered blocks"):
        MeshWork.of(Model((Shape("weight", (4, 4)),)), 0.1, batch=4, length=8)


def test_a_slow_network_wants_a_pipeline_and_a_fast_one_data_parallelism():
    model = MeshWork.of(transformer(20_000_000), 0.3, batch=32, length=128)
    assert (model.width, len(model.blocks)) == (480, 7)

    def best(nic):
        return chosen(
            [predicted(grid, model, nodes(8, 1, nic), COSTS) for grid in every_grid(8, model)]
        )

    assert best(1e7).grid.pp > 1
    assert best(1e12).grid == Grid(dp=8)
    with pytest.raises(InvalidArgument, match="no grid fits"):
        chosen(
            [predicted(grid, model, nodes(8, 1), COSTS, limit=1e6) for grid in every_grid(8, model)]
        )


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
    return min(predicted(grid, model, links, COSTS, order=order).seconds for order in orders)


@pytest.mark.parametrize(("grid", "seed"), [(Grid(dp=3, tp=2), 0), (Grid(pp=3, dp=2), 1)])
def test_the_search_finds_an_order_as_good_as_the_best_of_all(grid, seed):
    """Random links between six hosts; islands of two and three as well."""
    model = work(3, batch=6, length=512, forward=0.01, backward=0.02)
    rng = np.random.default_rng(seed)
    rows = [
        {"first": a, "second": b, "latency": 2e-4, "bandwidth": 10 ** rng.uniform(7, 9)}
        for a, b in combinations(range(6), 2)
    ]
    random = PairLinks.of_pairs([[rank] for rank in range(6)], rows)
    assert place(grid, model, random, COSTS).seconds <= 1.05 * exhaustive(grid, model, random)
    _, found = islands(*((2, 2, 2) if grid.tp == 2 else (3, 3)), mixed=seed)
    assert place(grid, model, found, COSTS).seconds <= (1 + 1e-9) * exhaustive(grid, model, found)


def test_the_heaviest_traffic_stays_on_the_fastest_links():
    """Two islands of four hosts each, numbered at random: tensor-parallel groups never leave
    one."""
    home, links = islands(4, 4, mixed=1)
    model = MeshWork.of(transformer(2_000_000), 0.05, batch=32, length=512)
    for grid in (Grid(dp=4, tp=2), Grid(dp=2, tp=4), Grid(pp=2, dp=2, tp=2)):
        numbered, placed = predicted(grid, model, links, COSTS), place(grid, model, links, COSTS)
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
    path = tmp_path / "pairs.json"
    rows = [{"first": 0, "second": 1, "inside": False, "latency": 2e-4, "bandwidth": 1e8}]
    path.write_text(json.dumps({"nodes": [[0], [1]], "rows": rows}))
    assert load_pairs(path).lines.tolist() == [1e8, 1e8]
    for content, error in (
        ({"nodes": [[0], [1]], "rows": []}, "no nodes and rows"),
        ({"nodes": [[0], [2]], "rows": rows}, "each once"),
        ({"nodes": [[0], [1], [2]], "rows": rows}, "measure every pair"),
        ({"nodes": [[0], [1]], "rows": [rows[0] | {"bandwidth": -1}]}, "above 0"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(InvalidArgument, match=error):
            load_pairs(path)


# ---------------------------------------------------------------- the command


@pytest.fixture
def planned(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def plan(*more):
        assert main([*ARGUMENTS, "--out", "mesh.json", *more]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 100
        return text, json.loads((tmp_path / "mesh.json").read_text())

    return plan


def status(arguments):
    try:
        return main(arguments)
    except SystemExit as left:  # what the parser refuses
        return left.code


def test_the_command_lists_every_grid_within_100_columns_and_says_which_to_take(planned, capsys):
    text, document = planned("--nodes", "4x2", "--link", "100mbit,100us", "--memory", "device=1GiB")
    grids = re.findall(r"^((?:(?:pp|dp|sp|tp)\d+ ?)+) ", text, re.MULTILINE)
    assert len(grids) == 16  # two blocks make no four stages
    best = " ".join(f"{name}{n}" for name, n in document["grid"].items() if n > 1)
    assert f"take {best}: " in " ".join(text.split())
    assert "states = commpress.compress(model, mesh=mesh, dims=" in text
    for wrong, error in (
        (["--dims", "tp=int8"], "codecs of dp, pp and ep"),
        (["--speeds", "1,2"], "8 positive numbers"),
        (["--memory", "host=1GiB"], "on the device"),
    ):
        assert status([*ARGUMENTS, "--nodes", "8x1", *wrong]) == 2
        assert error in capsys.readouterr().err
    for option in ("--batch", "--length"):
        with pytest.raises(SystemExit, match="2"):
            main([*ARGUMENTS, "--nodes", "8x1", option, "0"])
        assert (
            f"argument {option}: got '0', expected a whole number of at least 1"
            in capsys.readouterr().err
        )
    assert status([a for a in ARGUMENTS if a != "--mesh"] + ["--pairs", __file__]) == 2
    assert "--pairs is for --mesh" in capsys.readouterr().err


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
    pool, planned, tmp_path
):
    """Islands {0, 2} and {1, 3} on four ranks: the groups of tp are these."""
    rows = [
        {"first": a, "second": b, "latency": 2e-4, "bandwidth": 1e9 if (a - b) % 2 == 0 else 1e6}
        for a, b in combinations(range(4), 2)
    ]
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps({"nodes": [[0], [1], [2], [3]], "rows": rows}))
    _, document = planned(
        "--pairs", "pairs.json", "--dims", "dp=int8", "--length", "64", "--batch", "4"
    )
    model = MeshWork.of(transformer(2_000_000), 0.05, batch=4, length=64)
    step = place(Grid(dp=2, tp=2), model, load_pairs(pairs), COSTS, MeshDims(dp="int8"))
    assert sorted(document["order"]) == [0, 1, 2, 3]
    found = pool.run(train_on, step.call.splitlines(), size=4)
    columns = {
        tuple(rank for rank, (place, _) in enumerate(found) if place["dp"] == d) for d in (0, 1)
    }
    assert columns == {(0, 2), (1, 3)}
    for tp in (0, 1):
        one, other = (own for place, own in found if place["tp"] == tp)
        assert torch.equal(one, other)


def test_a_simulated_mesh_runs_the_collectives_of_one_group_on_its_share_of_the_line():
    """Four ranks of a node average in four groups at once: each has a quarter of the line."""
    cluster = Cluster(((Node(4, 4e8, 1e10), 4),), latency=LATE, inside_latency=1e-5)
    found = {
        way: simulate_mesh(cluster, COSTS, work(8), Grid(dp=4, tp=4), way)
        for way in ("plain", "int8")
    }
    alone = 2 * 3 / 4 * 4 * 8e6 / 4 / 1e8
    assert found["plain"].parts["dp"] == pytest.approx(alone, rel=0.35), "less what backward hides"
    assert 3.5 < found["plain"].sent["dp"] / found["int8"].sent["dp"] < 4.2
    assert found["int8"].seconds < found["plain"].seconds
    assert (
        found["plain"].parts["tp"]
        == predicted(Grid(dp=4, tp=4), work(8), PairLinks.of_cluster(cluster), COSTS).parts["tp"]
    )
    with pytest.raises(InvalidArgument, match="kinds of nodes"):
        simulate_mesh(
            Cluster(((Node(4, 1e8), 2), (Node(4, 2e8), 2))),
            COSTS,
            work(8),
            Grid(dp=4, tp=4),
            "plain",
        )


def test_the_command_simulates_a_grid_as_the_function_does(tmp_path, capsys):
    file = tmp_path / "rows.json"
    words = ["simulate", "--nodes", "2x4", "--link", "1gbit,50us", "--device", "1TB/s"]
    words += ["--parameters", "11M", "--compute-ms", "100", "--ways", "plain,int8"]
    assert main([*words, "--grid", "pp2,dp2,tp2", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    rows = {row["way"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["plain"]["grid"] == [2, 2, 1, 1, 2]
    assert 1.9 < rows["plain"]["sent"]["dp"] / rows["int8"]["sent"]["dp"] < 4
    assert all(f"{1e3 * row['seconds']:.4g}" in said for row in rows.values())
    for wrong in ("dp4", "dp8,dp1", "dp8,xp1", "dp0", ""):
        assert status([*words, "--grid", wrong]) == (0 if wrong == "" else 2)
