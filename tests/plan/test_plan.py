"""Plans: what they recommend in plain cases, what they count, and the commands that make them."""

import argparse
import json
from dataclasses import asdict, replace

import pytest
import torch

from commpress.cli import cluster_options, main, option_groups
from commpress.codecs.planned import load_plan
from commpress.collectives.measured_links import Link, Links, Stack
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.integrations.process_group.group_options import group_options_from
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.outer import SparseLoCo
from commpress.plan.candidates import WAYS, advised, candidates, plan_of, recommended
from commpress.plan.cluster import Cluster, Node, measured_cluster
from commpress.plan.costs import device_costs
from commpress.plan.local_ways import LocalWay, considered, simulate_local
from commpress.plan.model import Model, Shape, transformer
from commpress.plan.ways import Scenario
from commpress.schedules import Hidden
from commpress.units import parse_link

MODEL, COSTS = transformer(2_000_000), device_costs(2e10)
DEVICE = ["--device", "20GB/s"]
PLAN = ["plan", *DEVICE, "--compute-ms", "5"]
SIMULATE = ["simulate", *DEVICE, "--nodes", "2x2"]
SMALL = ["--parameters", "1M"]


def cluster(link, nodes=4, ranks=1):
    rate, latency = parse_link(link)
    return Cluster(Node(ranks, rate, inside=1e11), nodes, latency=latency)


def scenario(link, model=MODEL, seconds=0.1, **options):
    return Scenario(cluster(link), COSTS, model, seconds, **options)


def found(link, **options):
    return candidates(scenario(link, **options))


def test_a_slow_link_wants_compression_and_a_fast_one_none():
    slow, fast = found("100mbit"), found("none,1us")
    assert recommended(slow).codec == "int4"
    assert recommended(slow, WAYS).codec in ("sign", "powersgd-4")
    assert recommended(fast).codec == "plain"
    plan = plan_of(recommended(fast), fast, scenario("none,1us"))
    assert not plan.compresses
    assert plan.why.startswith("do not compress")
    names = {c.name: c for c in slow}
    assert names["ZeRO-1 none"].sent_bytes == pytest.approx(names["plain"].sent_bytes, rel=0.01)
    assert names["ZeRO-1 fp8"].sent_bytes == pytest.approx(names["fp8"].sent_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "ways", "chosen"),
    [
        ((1.0, 0.5, 0.49, 0.495), (), "fp8"),
        ((1.0, 0.5, 0.49, 0.4), (WAYS,), "sign"),
        ((1.0, 0.95, 0.95, 0.95), (), "plain"),
        ((1.0, 0.93, 0.93, 0.93), (), "fp8"),
    ],
)
def test_a_coarser_way_must_be_worth_it(seconds, ways, chosen):
    every = {c.codec: c for c in found("100mbit") if c.codec}
    names = ("plain", "fp8", "int4", "sign")
    told = [replace(every[way], seconds=s) for way, s in zip(names, seconds, strict=True)]
    assert recommended(told, *ways).codec == chosen


def test_local_updates_are_advised_where_they_save_much_and_nowhere_else():
    """Advice is never slower than the best that keeps ranks alike, and says what it does to the
    loss."""
    took = []
    for link in ("none,1us", "1gbit,20ms", "10mbit,20ms"):
        every = found(link)
        chosen = recommended(every)
        best, why = advised(every, chosen)
        took.append(best.local)
        assert advised(every, chosen, local_updates=False)[0] is chosen
        local = [c for c in every if c.local]
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
    assert took == [False, True, True]
    crowded = [replace(c, fits=not c.local) for c in every]
    best, why = advised(crowded, recommended(crowded))
    assert not best.local
    assert "do not fit" in why


@pytest.mark.parametrize("codec", ["int4", "topk-64+bits2"])
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
            LocalUpdates(
                inner, every=2, codec=codec, outer=outer, process_group=switch.transport(rank)
            )
        )
    for _ in range(4):
        simulate([local.steps() for local in every])
    model = Model(tuple(Shape(*shape) for shape in shapes))
    planned = simulate_local(scenario("1gbit", model), LocalWay(codec, every=2))
    assert 2 * planned.traffic.nbytes == pytest.approx(every[0].counters.sent_bytes / 2, rel=1e-3)


def test_an_overlapped_exchange_is_exposed_where_it_is_longer():
    model = transformer(11_000_000)
    slow, fast = (scenario(link, model, 0.06) for link in ("10mbit,20ms", "1gbit,20ms"))
    still, late = (simulate_local(slow, LocalWay("bits2", overlap=n)) for n in (0, 29))
    exchange = 30 * (still.seconds - still.compute_seconds)
    assert 3.2 < exchange < 4.2, "2(K-1)/K times 2.3 bits"
    assert 30 * late.seconds == pytest.approx(max(exchange, 29 * 0.06) + 0.06, rel=0.02)
    quick = simulate_local(fast, LocalWay("bits2", overlap=5))
    assert quick.seconds < 1.03 * quick.compute_seconds


@pytest.mark.parametrize(
    ("link", "call"),
    [
        ("1gbit,20ms", "LocalUpdates(inner)"),  # the finest codec that needs no long round
        ("10mbit,20ms", 'LocalUpdates(inner, outer=SparseLoCo(), codec="topk-64+bits2")'),
    ],
)
def test_the_smallest_round_that_hides_its_exchange_is_planned(link, call):
    links = scenario(link, transformer(11_000_000), 0.06)
    *_, (hidden, simulated) = considered(links)
    assert hidden.hidden
    assert hidden.call == call
    assert hidden.every <= Hidden().long
    hides = 1.12 * simulated.compute_seconds
    shorter = LocalWay(hidden.codec, hidden.every // 2, hidden.every // 2)
    assert simulated.seconds < hides < simulate_local(links, shorter).seconds


def test_the_effect_of_rounds_is_the_gap_that_was_measured_of_these():
    """Rounds that overlap as a whole have one of their own, for one step."""
    assert "+3.4 %" in LocalWay("int4").effect
    assert "+0.8 %" in LocalWay("int4", every=1, overlap=1).effect
    for other in (LocalWay("int4", 4, 4), LocalWay("int4", 30, 1), LocalWay("bits2", 1, 1)):
        assert "not measured" in other.effect


def test_the_fastest_come_first_and_what_does_not_fit_last():
    n = 4 * MODEL.numel
    every = found("1gbit", memory={"device": 4.0 * n})
    assert every == sorted(every, key=lambda c: (not c.fits, c.seconds))
    names = {c.name: c for c in every}
    assert names["plain"].fits
    assert not names["sign"].fits  # residuals of every parameter
    # and what a step proposes
    assert names["sign"].memory["device"] == pytest.approx(4 * n + 2 * 1.25 * n)
    assert names["ZeRO-1 none"].memory["device"] == pytest.approx(2.75 * n + 250e6)
    assert names["offload to disk none"].memory["disk"] == pytest.approx(0.75 * n)
    with pytest.raises(InvalidArgument, match="sharded"):
        recommended([c for c in every if not c.fits])


# ---------------------------------------------------------------- the commands


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Runs a command in a folder of its own: its status, what it says and its errors."""
    monkeypatch.chdir(tmp_path)

    return lambda *words: (main([*words]), *capsys.readouterr())


def test_the_command_writes_what_hook_and_backend_read(command):
    line = [*PLAN, "--model", f"{__name__}:make_model", "--nodes", "2x1"]
    status, said, _ = command(*line, "--link", "10mbit,100us", "--json", "all.json")
    plan = load_plan("plan.json")
    assert status == 0
    assert plan.compresses
    assert plan.why in said
    assert group_options_from("plan.json").codec == plan.codec
    with open("all.json") as file:
        rows = json.load(file)["rows"]
    names = {"plain", "sign", "0/1 Adam, every 16", "ZeRO-2 fp8", "offload to disk fp8"}
    assert names <= {row["name"] for row in rows}
    assert "commpress.compress(ddp, " in said
    status, said, _ = command(*line, "--link", "none,1us")
    assert status == 0
    assert "do not compress" in said
    assert "advice: DistributedDataParallel" in said
    assert group_options_from("plan.json") is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ([*PLAN, *SMALL, "--links", __file__, "--nodes", "2x2"], "--nodes changes nothing"),
        ([*SIMULATE, "--compute-ms", "5"], "--compute-ms changes nothing in an all-reduce"),
        ([*SIMULATE[:3], "--layered"], "--layered changes nothing in nodes of one rank"),
        ([*SIMULATE, *SMALL, "--compute-ms", "5", "--bytes", "1KiB"], "--bytes changes nothing"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(line, says, command):
    status, _, errors = command(*line)
    assert status == 2
    assert says in " ".join(errors.split())


def test_simulate_scales(command):
    line = [*SIMULATE, "--ways", "int8,sign", "--layered", "--bytes", "1MiB", "--scaling", "1,2,4"]
    assert command(*line, "--json", "s.json")[0] == 0
    with open("s.json") as file:
        rows = json.load(file)["rows"]
    assert [row["ranks"] for row in rows if row["way"] == "sign"] == [2, 4, 8]
    assert {row["way"] for row in rows} == {"plain", "int8", "sign", "int8/2", "sign/2"}


def test_simulate_knows_models(command):
    trained = [*SIMULATE, "--parameters", "5M", "--compute-ms", "10"]
    status, said, _ = command(*trained, "--ways", "int8,powersgd-4", "--layered")
    assert status == 0
    rows = {line.split()[2]: line.split() for line in said.splitlines() if line.endswith("x")}
    assert list(rows) == ["plain", "int8", "powersgd-4", "int8/2", "powersgd-4/2"]
    assert float(rows["plain"][5]) > 3 * float(rows["int8"][5]) > float(rows["powersgd-4"][5])


def test_what_a_probe_measured_reaches_the_model_whole(tmp_path):
    """Every figure: one that the command forgot would be simulated as if it were nothing."""
    wire = Link(1e-3, 1e8, 9e7, 14e3)
    stack = Stack(2e-3, 1e-4, 1e-10, 9e-3, 2, 2e-9, 3e-9, 6e-3, 8e-3, 2e-4, 3e-3, 12e-3, 1e-4, 1.25)
    links = Links(Topology.of(1, 1, 1, 1), None, wire, stack)
    links.save(tmp_path / "links.json")
    parser = argparse.ArgumentParser()
    option_groups.declare(parser, "@cluster")
    given = ["--links", str(tmp_path / "links.json")]
    found, measured = cluster_options.cluster_of(parser.parse_args(given)), measured_cluster(links)
    assert asdict(found) == asdict(measured)
    assert found.uneven == 1.25
    assert found.node.burst == 14e3
    unset = asdict(Cluster(measured.node, measured.count))
    left = {name for name, value in asdict(measured).items() if value == unset[name]}
    assert left <= {"node", "count", "inside_latency"}, "the probe's file sets every other figure"
