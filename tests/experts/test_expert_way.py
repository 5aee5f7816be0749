"""Experts in plans: bytes of every link as ExpertExchange counts them, and seconds that follow from
them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import commpress
from commpress.cli import main
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.plan.cluster import Cluster, Node
from commpress.plan.costs import device_costs
from commpress.plan.expert_way import ExpertWay, hop_seconds
from commpress.plan.grids import Grid, MeshDims, MeshWork, Numel, predicted
from commpress.plan.pair_links import PairLinks
from recorded import Recorded
from test_experts import made
from test_moe import Net, assert_as_one_process, of_this_rank, trained

TOKENS, WIDTH, EXPERTS = 1500, 40, 16
COSTS = device_costs(1e10)


def layer(exchange, k):
    """Forward and backward of one rank, whose gate likes all experts alike."""
    rank, take = exchange.channel.rank, exchange.channel.take
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS, WIDTH, generator=draw)
    chosen, gates = (
        torch.rand(TOKENS, EXPERTS, generator=draw).topk(k).indices,
        torch.rand(TOKENS, k, generator=draw),
    )
    plan = (yield from exchange.routing_steps(chosen, layout="expert_major")).handle
    rows, weights = yield from exchange.out_steps(
        plan, tokens, gates, plan.rows.count, exchange.codec, take()
    )
    yield from exchange.back_steps(plan, rows, None, exchange.combine_codec, take())
    forward = exchange.carrier.inside_bytes, exchange.carrier.between_bytes
    rows, _ = yield from exchange.out_steps(
        plan, tokens, None, plan.rows.count, exchange.gradient_codec, take()
    )
    yield from exchange.back_steps(plan, rows, weights, exchange.combine_gradient_codec, take())
    return forward


@pytest.mark.parametrize(
    ("topology", "node"), [("2x4", "00001111"), ("4x2", "00112233"), (None, "00000000")]
)
@pytest.mark.parametrize(("k", "codec"), [(2, "none"), (8, "int8"), (4, "bf16")])
def test_bytes_are_those_that_are_counted(topology, node, k, codec):
    """Within 1 % inside nodes and between them, forward and backward."""
    transports = [Recorded(t) for t in Loopback(8).transports()]
    exchanges = made(EXPERTS, transports, topology=topology, codec=(codec, codec))
    forward = np.array(simulate([layer(e, k) for e in exchanges])).sum(0)
    total = np.array([(e.carrier.inside_bytes, e.carrier.between_bytes) for e in exchanges]).sum(0)
    home = np.array([int(c) for c in node])
    way = ExpertWay(tuple(range(8)), tuple(home.tolist()), TOKENS, WIDTH, k, EXPERTS, codec)
    for hops, counted in ((way.forward, forward), (way.backward, total - forward)):
        leaves = [home[hop.source] != home[hop.sink] for hop in hops]
        sent = [
            sum(float(hop.nbytes[at == apart].sum()) for hop, at in zip(hops, leaves, strict=True))
            for apart in (0, 1)
        ]
        np.testing.assert_allclose(sent, counted, rtol=0.01)
    assert way.coded(COSTS) == 0 if codec == "none" else way.coded(COSTS) > 0


def test_a_line_between_nodes_decides_how_long_it_takes():
    cluster = Cluster(Node(2, 1e8, inside=1e10), 2, latency=1e-5)
    links = PairLinks.of_cluster(cluster)
    way = ExpertWay((0, 1, 2, 3), (0, 0, 1, 1), 1000, 256, 8, 16)
    met = 1 - 1 / 12870 * 1  # C(8, 8) / C(16, 8)
    assert way.met(2) == pytest.approx(met)
    crossing = 2 * 1000 * met * (40 + 1024 + 32 + 1024)  # of two ranks, on a node's line
    assert hop_seconds([way.forward], links) == pytest.approx(crossing / 1e8, rel=0.02)
    alone = hop_seconds([replace(way, codec="int8").forward], links)
    assert alone == pytest.approx(crossing / 1e8 * (40 + 2 * 272 + 32) / (40 + 2048 + 32), rel=0.03)


def sparse(**more):
    blocks = (Numel(500_000, 0, 4_000_000),) * 2
    return MeshWork(
        Numel(), blocks, Numel(), 64, 16, 512, 0.01, 0.02, experts_per_token=4, experts=16, **more
    )


def test_a_plan_knows_what_experts_cost():
    """Codecs make experts cheaper between nodes; ranks of a node share what they deduplicate."""
    cluster = Cluster(Node(4, 1e8, inside=1e10), 2)
    links = PairLinks.of_cluster(cluster)
    codecs = ("none", "bf16", "int8")
    found = {
        each: predicted(Grid(ep=8), sparse(), links, COSTS, MeshDims(ep=each)).parts["ep"]
        for each in codecs
    }
    assert found["none"] > 1.6 * found["bf16"]
    assert found["bf16"] > 1.2 * found["int8"]
    orders = list(range(8)), [0, 4, 1, 5, 2, 6, 3, 7]
    inside, apart = (
        predicted(Grid(dp=2, ep=4), sparse(), links, COSTS, order=order) for order in orders
    )
    assert inside.parts["ep"] < apart.parts["ep"] / 5
    step = predicted(Grid(dp=2, ep=4), sparse(), links, COSTS, MeshDims(ep="int8"))
    assert (
        'parallelise(model, process_group=parts["ep"].get_group(), '
        'replicas=parts["dp"].get_group(),'
    ) in step.call
    assert 'codec=("int8", "int8")' in step.call


def test_experts_that_cannot_be_divided_are_refused():
    with pytest.raises(InvalidArgument, match="16 experts are no multiple of ep 3"):
        predicted(
            Grid(ep=3),
            replace(sparse(), batch=3),
            PairLinks.of_cluster(Cluster(Node(3, 1e8), 1)),
            COSTS,
        )
    with pytest.raises(InvalidArgument, match="experts is 5, expected a multiple of the 2 ranks"):
        ExpertWay((0, 1), (0, 1), 8, 8, 2, 5)


def test_a_plan_refuses_experts_of_a_model_without_any(capsys):
    dense = ["plan", "--mesh", "--nodes", "2x2", "--device", "1TB/s", "--compute-ms", "300"]
    assert main([*dense, "--parameters", "20M", "--experts", "8"]) == 2
    assert "no parameter of the model is named after experts" in capsys.readouterr().err


def through_lines(call):
    """Training with the lines that a plan prints."""
    names = {"torch": torch, "DeviceMesh": DeviceMesh, "commpress": commpress, "model": Net()}
    exec(call, names)
    trained(names["model"], [dist.get_rank()])
    return of_this_rank(names["model"])


def test_the_lines_of_a_plan_train_as_one_process(pool):
    links = PairLinks.of_cluster(Cluster(Node(2, 1e8), 2))
    call = predicted(Grid(dp=2, ep=2), replace(sparse(), experts=0), links, COSTS).call
    assert_as_one_process(pool.run(through_lines, call, size=4))
