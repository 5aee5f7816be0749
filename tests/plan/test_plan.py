"""Plans: what they recommend in plain cases, what they count, and the commands that make them."""

import argparse
import json
from dataclasses import asdict, replace

import pytest
import torch

from commpress.cli import cluster_options, main, option_groups
from commpress.codecs.planned import load_plan
from commpress.collectives.links import Link, Links, Stack
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.integrations.process_group.group_options import group_options_from
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.outer import SparseLoCo
from commpress.plan.candidates import WAYS, Settings, advised, candidates, plan_of, recommended
from commpress.plan.cluster import Cluster, Node, measured_cluster
from commpress.plan.costs import device_costs
from commpress.plan.local_ways import considered, simulate_local
from commpress.plan.model import Model, Shape, transformer
from commpress.plan.way_names import LocalWay, local_way
from commpress.schedules import Hidden
from commpress.units import parse_link

MODEL, COSTS = transformer(2_000_000), device_costs(2e10)
DEVICE = ["--device", "20GB/s"]


def cluster(link, nodes=4, ranks=1):
    rate, latency = parse_link(link)
    return Cluster(((Node(ranks, rate, inside=1e11), nodes),), latency=latency)


def found(link, **options):
    return candidates(cluster(link), COSTS, MODEL, Settings(0.1, **options))


def test_a_slow_link_wants_compression_and_a_fast_one_none():
    slow, fast = found("100mbit"), found("none,1us")
    assert recommended(slow).codec == "int4"
    assert recommended(slow, WAYS).codec in ("sign", "powersgd-4")
    assert recommended(fast).codec == "plain"
    plan = plan_of(recommended(fast), fast, cluster("none,1us"), 25.0)
    assert not plan.compresses
    assert plan.why.startswith("do not compress")


def test_a_coarser_way_must_be_worth_it():
    every = {c.codec: c for c in found("100mbit") if c.codec}
    even = [
        replace(every[way], seconds=s)
        for way, s in (("plain", 1.0), ("int8", 0.5), ("int4", 0.49), ("sign", 0.495))
    ]
    assert recommended(even).codec == "int8"
    assert (
        recommended([replace(c, seconds=0.4) if c.codec == "sign" else c for c in even], WAYS).codec
        == "sign"
    )
    assert (
        recommended([replace(c, seconds=0.99) if c.codec != "plain" else c for c in even]).codec
        == "plain"
    )
    assert (
        recommended([replace(c, seconds=0.95) if c.codec != "plain" else c for c in even]).codec
        == "plain"
    )
    assert (
        recommended([replace(c, seconds=0.93) if c.codec != "plain" else c for c in even]).codec
        == "int8"
    )


def test_local_updates_are_advised_where_they_save_much_and_nowhere_else():
    """Advice is never slower than the best that keeps ranks alike, and says what it does to the
    loss."""
    for link in ("none,1us", "10gbit,10us", "1gbit,20ms", "100mbit,20ms", "10mbit,20ms"):
        every = found(link)
        chosen = recommended(every)
        best, why = advised(every, chosen)
        assert advised(every, chosen, local_updates=False)[0] is chosen
        local = [c for c in every if c.local]
        assert best.seconds <= chosen.seconds
        assert {c.call for c in local} >= {
            'LocalUpdates(inner, every=30, codec="int4")',
            "LocalUpdates(inner)",
        }
        if best.local:
            assert best.seconds < 0.75 * chosen.seconds
            assert "another loss" in why
            assert min(c.seconds for c in local) >= 0.9 * best.seconds
        else:
            assert best is chosen
            assert min(c.seconds for c in local) >= 0.75 * chosen.seconds
            assert "not worth it" in why
    assert best.local
    assert not advised(found("none,1us"), recommended(found("none,1us")))[0].local
    crowded = [replace(c, fits=not c.local) for c in every]
    assert not advised(crowded, recommended(crowded))[0].local


@pytest.mark.parametrize("codec", ["int4", "bits2", "topk-64+bits2"])
def test_bytes_of_a_round_are_those_of_local_updates(compiled, codec):
    """On four ranks over the loopback, the votes on the control connection included."""
    shapes = [("a", (200, 100)), ("b", (100,)), ("c", (70_000,))]
    switch, every = Loopback(4), []
    for rank in range(4):
        torch.manual_seed(0)
        model = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.randn(sizes)) for name, sizes in shapes}
        )
        outer = SparseLoCo() if "topk" in codec else None
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        every.append(
            LocalUpdates(inner, every=2, codec=codec, outer=outer, transport=switch.transport(rank))
        )
    for _ in range(4):
        simulate([local.steps() for local in every])
    planned = simulate_local(
        cluster("1gbit"),
        COSTS,
        Model(tuple(Shape(*shape) for shape in shapes)),
        0.1,
        LocalWay(codec, every=2),
    )
    assert 2 * planned.traffic.nbytes == pytest.approx(every[0].counters.sent_bytes / 2, rel=1e-3)


def test_an_overlapped_exchange_is_exposed_where_it_is_longer():
    model, slow = transformer(11_000_000), cluster("10mbit,20ms")
    still, late = (
        simulate_local(slow, COSTS, model, 0.06, LocalWay("bits2", overlap=n)) for n in (0, 29)
    )
    exchange = 30 * (still.seconds - still.compute_seconds)
    assert 3.2 < exchange < 4.2, "2(K-1)/K times 2.3 bits"
    assert 30 * late.seconds == pytest.approx(max(exchange, 29 * 0.06) + 0.06, rel=0.02)
    quick = simulate_local(cluster("1gbit,20ms"), COSTS, model, 0.06, LocalWay("bits2", overlap=5))
    assert quick.seconds < 1.03 * quick.compute_seconds
    with pytest.raises(InvalidArgument, match="local:int4:30:5"):
        local_way("local:bits2:x")
    with pytest.raises(InvalidArgument, match="overlap"):
        local_way("local:bits2:4:5")


def test_the_smallest_round_that_hides_its_exchange_is_planned():
    model, links = (
        transformer(11_000_000),
        ("1gbit,20ms", "100mbit,20ms", "25mbit,20ms", "10mbit,20ms"),
    )
    planned = []
    for link in links:
        ((hidden, simulated),) = (
            (way, one) for way, one in considered(cluster(link), COSTS, model, 0.06) if way.hidden
        )
        assert simulated.seconds < 1.12 * simulated.compute_seconds, link
        shorter = LocalWay(hidden.codec, hidden.every // 2, hidden.every // 2)
        assert (
            simulate_local(cluster(link), COSTS, model, 0.06, shorter).seconds
            > 1.12 * simulated.compute_seconds
        )
        assert hidden.every <= Hidden().long
        planned.append(hidden.call)
    assert planned[0] == planned[1] == "LocalUpdates(inner)", (
        "the finest codec that needs no long round"
    )
    assert planned[-1] == 'LocalUpdates(inner, outer=SparseLoCo(), codec="topk-64+bits2")'


def test_the_fastest_come_first_and_what_does_not_fit_last():
    n = 4 * MODEL.numel
    every = found("1gbit", memory={"device": 4.0 * n})
    fit = [c.fits for c in every]
    assert fit == sorted(fit, reverse=True)
    of = {c.name: c for c in every}
    assert of["plain"].fits
    assert not of["sign"].fits  # residuals of every parameter
    # and what a step proposes
    assert of["sign"].memory["device"] == pytest.approx(4 * n + 2 * 1.25 * n)
    assert of["ZeRO-1 none"].memory["device"] == pytest.approx(2.75 * n + 250e6)
    assert of["offload to disk none"].memory["disk"] == pytest.approx(0.75 * n)
    with pytest.raises(InvalidArgument, match="sharded"):
        recommended([c for c in every if not c.fits])


def test_sharded_candidates_send_what_a_ring_sends():
    of = {c.name: c for c in found("1gbit")}
    assert of["ZeRO-1 none"].sent_bytes == pytest.approx(of["plain"].sent_bytes, rel=0.01)
    assert of["ZeRO-1 int8"].sent_bytes == pytest.approx(of["int8"].sent_bytes, rel=0.05)


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))


def test_the_command_writes_what_hook_and_backend_read(tmp_path, capsys):
    out = tmp_path / "plan.json"
    command = [
        "plan",
        "--model",
        f"{__name__}:make_model",
        "--nodes",
        "2x1",
        "--compute-ms",
        "5",
        *DEVICE,
        "--out",
        str(out),
    ]
    assert main([*command, "--link", "10mbit,100us", "--json", str(tmp_path / "all.json")]) == 0
    said = capsys.readouterr().out
    plan = load_plan(out)
    assert plan.compresses
    assert plan.why in said
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert {"plain", "sign", "0/1 Adam, every 16", "ZeRO-2 int8", "offload to disk int8"} <= {
        row["name"] for row in rows
    }
    if plan.codec != "powersgd-4":
        assert group_options_from(str(out)).codec == plan.codec
    assert main([*command, "--link", "none,1us"]) == 0
    said = capsys.readouterr().out
    assert "do not compress" in said
    assert "advice: DistributedDataParallel" in said
    assert group_options_from(str(out)) is None


def test_the_command_gives_every_layer_a_codec_of_its_own(compiled, tmp_path, capsys):
    draws = torch.Generator().manual_seed(0)
    gradients = {
        name: torch.randn(p.shape, generator=draws) * (100 if name == "1.weight" else 0.01)
        for name, p in make_model().named_parameters()
    }
    torch.save(gradients, tmp_path / "gradients.pt")
    out = tmp_path / "plan.json"
    assert (
        main(
            [
                "plan",
                "--model",
                f"{__name__}:make_model",
                "--nodes",
                "2x1",
                "--compute-ms",
                "5",
                *DEVICE,
                "--out",
                str(out),
                "--link",
                "10mbit,100us",
                "--gradients",
                str(tmp_path / "gradients.pt"),
            ]
        )
        == 0
    )
    assert "times fewer bytes than int4" in capsys.readouterr().out
    plan = load_plan(out)
    assert set(plan.rules) == set(gradients)
    loud, quiet = plan.choose("1.weight", 10**6), plan.choose("0.weight", 10**6)
    assert loud.row_bytes(4096) > quiet.row_bytes(4096)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "what is to be trained"),
        (["--parameters", "1M"], "--compute-ms"),
        (["--compute-ms", "5"], "what is to be trained"),
        (["--compute-ms", "5", "--parameters", "ten"], "110M"),
        (["--compute-ms", "5", "--model", "nowhere"], "module:function"),
        (["--compute-ms", "5", "--parameters", "1M", "--memory", "ram=1"], "device"),
        (["--compute-ms", "5", "--parameters", "1M", "--ways", "sine"], "sine"),
        (["--compute-ms", "5", "--parameters", "1M", "--nodes", "1x1"], "at least two"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments, says, capsys):
    try:
        status = main(["plan", *DEVICE, *arguments])
    except SystemExit as left:  # what the parser refuses
        status = left.code
    assert status == 2
    assert says in capsys.readouterr().err


def test_simulate_scales_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plots = [tmp_path / "scaling.png", tmp_path / "bars.png"]
    common = ["simulate", *DEVICE, "--ways", "int8,sign", "--layered", "--bytes", "1MiB"]
    scaling = [
        "--nodes",
        "2x2",
        "--scaling",
        "1,2,4",
        "--plot",
        str(plots[0]),
        "--json",
        str(tmp_path / "s.json"),
    ]
    assert main([*common, *scaling]) == 0
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [row["ranks"] for row in rows if row["way"] == "sign"] == [2, 4, 8]
    assert {row["way"] for row in rows} == {"plain", "int8", "sign", "int8/2", "sign/2"}
    assert (
        main(
            [
                *common,
                "--nodes",
                "2x2",
                "--parameters",
                "1M",
                "--compute-ms",
                "10",
                "--plot",
                str(plots[1]),
            ]
        )
        == 0
    )
    assert "exposed" in capsys.readouterr().out
    ways = ["--ways", "local:bits2,local:bits2:20:4", "--layered", "--nodes", "2x2"]
    assert main(["simulate", *DEVICE, *ways, "--parameters", "5M", "--compute-ms", "10"]) == 0
    still, late = (
        line.split() for line in capsys.readouterr().out.splitlines() if "local:bits2" in line
    )
    assert float(late[3]) < float(still[3])
    assert float(late[5]) == pytest.approx(1.5 * float(still[5]), rel=2e-2), (
        "rounds of 20 steps, not 30"
    )
    assert main(["simulate", *DEVICE, *ways]) == 2
    assert "local:bits2 needs a model" in capsys.readouterr().err
    assert all(plot.stat().st_size > 10_000 for plot in plots)


def test_what_a_probe_measured_reaches_the_model_whole(tmp_path):
    """Every figure: one that the command forgot would be simulated as if it were nothing."""
    wire = Link(1e-3, 1e8, 9e7, 14e3)
    stack = Stack(2e-3, 1e-4, 1e-10, 9e-3, 2, 2e-9, 3e-9, 6e-3, 8e-3, 2e-4, 3e-3, 12e-3, 1e-4, 1.25)
    links = Links(Topology.of(1, 1, 1, 1), None, wire, stack)
    links.save(tmp_path / "links.json")
    parser = argparse.ArgumentParser()
    option_groups.add_cluster(parser)
    given = ["--links", str(tmp_path / "links.json")]
    found, measured = cluster_options.cluster_of(parser.parse_args(given)), measured_cluster(links)
    assert asdict(found) == asdict(measured)
    assert found.uneven == 1.25
    assert found.kinds[0][0].burst == 14e3
    unset = asdict(Cluster(measured.kinds)) | {"rack": None, "oversubscription": None}
    left = {name for name, value in asdict(measured).items() if value == unset[name]}
    assert left <= {"kinds", "inside_latency"}, "the probe's file sets every other figure"
    slow = cluster_options.cluster_of(parser.parse_args([*given, "--straggler", "2"]))
    assert [(node.slowdown, node.burst, count) for node, count in slow.kinds] == [
        (2.0, 14e3, 1),
        (1.0, 14e3, 3),
    ]
