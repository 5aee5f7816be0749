"""Plans: what they recommend in plain cases, what they count, and the commands that make them."""

import argparse
import json
from dataclasses import asdict, replace

import pytest
import torch

from commpress.cli import cluster_options, main
from commpress.codecs.planned import load_plan
from commpress.collectives.links import Link, Links, Stack
from commpress.collectives.topology import Topology
from commpress.errors import InvalidArgument
from commpress.integrations.process_group.group_options import group_options_from
from commpress.plan.candidates import Settings, candidates, plan_of, recommended
from commpress.plan.cluster import Cluster, Node, measured_cluster, parse_link
from commpress.plan.costs import device_costs
from commpress.plan.model import transformer

MODEL, COSTS = transformer(2_000_000), device_costs(2e10)
DEVICE = ["--device", "20GB/s"]


def cluster(link, nodes=4, ranks=1):
    rate, latency = parse_link(link)
    return Cluster(((Node(ranks, rate, inside=1e11), nodes),), latency=latency)


def found(link, **options):
    return candidates(cluster(link), COSTS, MODEL, Settings(0.1, **options))


def test_a_slow_link_wants_compression_and_a_fast_one_none():
    slow, fast = found("100mbit"), found("none,1us")
    assert recommended(slow).codec in ("sign", "powersgd-4", "int4")
    assert recommended(fast).codec == "plain"
    plan = plan_of(recommended(fast), fast, cluster("none,1us"), 25.0)
    assert not plan.compresses
    assert plan.why.startswith("do not compress")


def test_a_coarser_way_must_be_worth_it():
    every = {c.codec: c for c in found("100mbit") if c.codec}
    even = [replace(every[way], seconds=s) for way, s in (("plain", 1.0), ("int8", 0.5), ("int4", 0.49), ("sign", 0.495))]
    assert recommended(even).codec == "int8"
    assert recommended([replace(c, seconds=0.4) if c.codec == "sign" else c for c in even]).codec == "sign"
    assert recommended([replace(c, seconds=0.99) if c.codec != "plain" else c for c in even]).codec == "plain"
    assert recommended([replace(c, seconds=0.95) if c.codec != "plain" else c for c in even]).codec == "plain"
    assert recommended([replace(c, seconds=0.93) if c.codec != "plain" else c for c in even]).codec == "int8"


def test_the_fastest_come_first_and_what_does_not_fit_last():
    n = 4 * MODEL.numel
    every = found("1gbit", memory={"device": 4.0 * n})
    fit = [c.fits for c in every]
    assert fit == sorted(fit, reverse=True)
    of = {c.name: c for c in every}
    assert of["plain"].fits
    assert not of["sign"].fits  # residuals of every parameter
    assert of["sign"].memory["device"] == pytest.approx(4 * n + 2 * 1.25 * n)  # and what a step proposes
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
    command = ["plan", "--model", f"{__name__}:make_model", "--nodes", "2x1", "--compute-ms", "5", *DEVICE, "--out", str(out)]
    assert main([*command, "--link", "10mbit,100us", "--json", str(tmp_path / "all.json")]) == 0
    said = capsys.readouterr().out
    plan = load_plan(out)
    assert plan.compresses
    assert plan.why in said
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert {"plain", "sign", "0/1 Adam, every 16", "ZeRO-2 int8", "offload to disk int8"} <= {row["name"] for row in rows}
    if plan.codec != "powersgd-4":
        assert group_options_from(str(out)).codec == plan.codec
    assert main([*command, "--link", "none,1us"]) == 0
    assert "do not compress" in capsys.readouterr().out
    assert group_options_from(str(out)) is None


def test_the_command_gives_every_layer_a_codec_of_its_own(compiled, tmp_path, capsys):
    draws = torch.Generator().manual_seed(0)
    gradients = {
        name: torch.randn(p.shape, generator=draws) * (100 if name == "1.weight" else 0.01)
        for name, p in make_model().named_parameters()
    }
    torch.save(gradients, tmp_path / "gradients.pt")
    out = tmp_path / "plan.json"
    assert main([
        "plan", "--model", f"{__name__}:make_model", "--nodes", "2x1", "--compute-ms", "5", *DEVICE, "--out", str(out),
        "--link", "10mbit,100us", "--gradients", str(tmp_path / "gradients.pt"),
    ]) == 0  # fmt: skip
    assert "times fewer bytes than int4" in capsys.readouterr().out
    plan = load_plan(out)
    assert set(plan.rules) == set(gradients)
    loud, quiet = plan.choose("1.weight", 10**6), plan.choose("0.weight", 10**6)
    assert loud.row_bytes(4096) > quiet.row_bytes(4096)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--compute-ms"),
        (["--compute-ms", "5"], "what is to be trained"),
        (["--compute-ms", "5", "--parameters", "ten"], "110M"),
        (["--compute-ms", "5", "--model", "nowhere"], "module:function"),
        (["--compute-ms", "5", "--parameters", "1M", "--memory", "ram=1"], "device"),
        (["--compute-ms", "5", "--parameters", "1M", "--ways", "sine"], "sine"),
        (["--compute-ms", "5", "--parameters", "1M", "--nodes", "1x1"], "at least two"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments, says, capsys):
    assert main(["plan", *DEVICE, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_simulate_scales_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plots = [tmp_path / "scaling.png", tmp_path / "bars.png"]
    common = ["simulate", *DEVICE, "--ways", "int8,sign", "--layered", "--bytes", "1MiB"]
    scaling = ["--nodes", "2x2", "--scaling", "1,2,4", "--plot", str(plots[0]), "--json", str(tmp_path / "s.json")]
    assert main([*common, *scaling]) == 0
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [row["ranks"] for row in rows if row["way"] == "sign"] == [2, 4, 8]
    assert {row["way"] for row in rows} == {"plain", "int8", "sign", "int8/2", "sign/2"}
    assert main([*common, "--nodes", "2x2", "--parameters", "1M", "--compute-ms", "10", "--plot", str(plots[1])]) == 0
    assert "exposed" in capsys.readouterr().out
    assert all(plot.stat().st_size > 10_000 for plot in plots)


def test_what_a_probe_measured_reaches_the_model_whole(tmp_path):
    """Every figure: one that the command forgot would be simulated as if it were nothing."""
    wire = Link(1e-3, 1e8, 9e7, 14e3)
    stack = Stack(2e-3, 1e-4, 1e-10, 9e-3, 2, 2e-9, 3e-9, 6e-3, 8e-3, 2e-4, 3e-3, 12e-3, 1e-4, 1.25)
    links = Links(Topology.of(1, 1, 1, 1), None, wire, stack)
    links.save(tmp_path / "links.json")
    parser = argparse.ArgumentParser()
    cluster_options.add_cluster(parser)
    given = ["--links", str(tmp_path / "links.json")]
    found, measured = cluster_options.cluster_of(parser.parse_args(given)), measured_cluster(links)
    assert asdict(found) == asdict(measured)
    assert found.uneven == 1.25
    assert found.kinds[0][0].burst == 14e3
    unset = asdict(Cluster(measured.kinds)) | {"rack": None, "oversubscription": None}
    left = {name for name, value in asdict(measured).items() if value == unset[name]}
    assert left <= {"kinds", "inside_latency"}, "the probe's file sets every other figure"
    slow = cluster_options.cluster_of(parser.parse_args([*given, "--straggler", "2"]))
    assert [(node.slowdown, node.burst, count) for node, count in slow.kinds] == [(2.0, 14e3, 1), (1.0, 14e3, 3)]
