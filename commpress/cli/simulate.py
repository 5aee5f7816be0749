"""Time of all-reduces and training steps on a cluster that is described, up to thousands of
ranks."""

import argparse
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from commpress.cli import cluster_options, harness
from commpress.cli.refusals import as_many, simulated_ways
from commpress.codecs import codec_named
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.errors import InvalidArgument
from commpress.plan.candidates import training
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs
from commpress.plan.expert_way import ExpertWay, hop_seconds
from commpress.plan.grid import grid_of
from commpress.plan.grids import MeshWork
from commpress.plan.local_ways import simulate_local
from commpress.plan.mesh_simulator import simulate_mesh
from commpress.plan.model import Model
from commpress.plan.pair_links import PairLinks
from commpress.plan.simulator import Simulated, simulate_calls, simulate_step
from commpress.plan.way_names import PREFIX, RINGS, local_way
from commpress.plan.ways import buffer_by, step_by, widest
from commpress.tiered_mem import parse_bytes

HEAD = [
    "nodes",
    "ranks",
    "way",
    "ms",
    "exposed ms",
    "MB sent/rank",
    "MB out of node",
    "against plain",
]
LEVELS = "/2"
EXPERT_CODECS = ("none", "bf16", "int8", "int4")


@dataclass
class Row:
    nodes: int
    ranks: int
    way: str
    seconds: float
    exposed_seconds: float
    sent_bytes: float
    between_bytes: float
    messages: float
    plain_seconds: float


def run(options: argparse.Namespace) -> int:
    ways = options.ways.split(",")
    if options.grid:
        return on_a_grid(options, ways)
    if options.experts_per_token:
        return experts(options)
    model = None
    if options.parameters or options.model or options.config:
        model = cluster_options.model_of(options)
    simulated_ways(options)
    cluster = cluster_options.cluster_of(options)
    numel = parse_bytes(options.bytes) // 4
    clusters = [cluster] if not options.scaling else [scaled(cluster, n) for n in options.scaling]
    costs, start = cluster_options.costs_of(options), perf_counter()
    rows = [
        row
        for one in clusters
        if one.size > 1
        for row in simulated(one, costs, ways, options, model, numel)
    ]
    print(harness.render(HEAD, [cells(row) for row in rows]))
    print(f"simulated in {perf_counter() - start:.1f} s")
    return harness.deliver(options, rows, draw=partial(draw, title=title(options, model)))


def experts(options: argparse.Namespace) -> int:
    """Dispatch to experts and back in each codec, with what every token and node saves."""
    cluster = cluster_options.cluster_of(options)
    links, costs = PairLinks.of_cluster(cluster), cluster_options.costs_of(options)
    rows: list[dict[str, Any]] = []
    for codec in EXPERT_CODECS:
        ranks, node = tuple(range(cluster.size)), tuple(int(n) for n in cluster.node_of)
        way = ExpertWay(
            ranks,
            node,
            options.tokens,
            options.width,
            options.experts_per_token,
            options.experts,
            codec,
        )
        took = [
            hop_seconds([hops], links) + way.coded(costs) for hops in (way.forward, way.backward)
        ]
        leaving = [
            sum(links.leaving_of(*hop) for hop in hops) for hops in (way.forward, way.backward)
        ]
        rows.append(
            {"codec": codec, "forward": took[0], "backward": took[1], "between": sum(leaving)}
        )
    table = [
        [
            str(r["codec"]),
            *(
                f"{r[of] * by:.4g}"
                for of, by in (("forward", 1e3), ("backward", 1e3), ("between", 1e-6))
            ),
        ]
        for r in rows
    ]
    what = (
        f"{options.tokens} tokens of width {options.width} a rank, {options.experts_per_token} "
        "experts each"
    )
    print(
        f"{what}, {cluster.size} ranks: a layer's routing, dispatch and combine, and their "
        "gradients"
    )
    print(harness.render(["codec", "forward ms", "backward ms", "MB/node"], table))
    return harness.deliver(options, rows)


def on_a_grid(options: argparse.Namespace, ways: list[str]) -> int:
    """A step on a grid of parallelism, its gradients averaged in each way."""
    cluster, model, grid = (
        cluster_options.cluster_of(options),
        cluster_options.model_of(options),
        grid_of(options.grid),
    )
    as_many(grid, cluster.size)
    simulated_ways(options)
    work = MeshWork.of(
        model,
        1e-3 * options.compute_ms,
        length=options.length,
        micro=options.micro,
        batch=4 * cluster.size if options.batch is None else options.batch,
        experts=options.experts,
        experts_per_token=options.experts_per_token or 2,
    )
    if unfit := work.fits(grid):
        raise InvalidArgument(f"--grid {grid} does not divide this model and batch: {unfit}")
    costs = cluster_options.costs_of(options)
    steps = {
        way: simulate_mesh(cluster, costs, work, grid, way, bucket_mb=options.bucket_mb)
        for way in dict.fromkeys(ways)
    }
    print(
        f"{grid} on {cluster.size} ranks, a step of {work.batch} sequences of {work.length} tokens"
    )
    table = [
        [
            way,
            f"{1e3 * step.seconds:.4g}",
            f"{1e3 * step.parts['dp']:.4g}",
            f"{step.sent['dp'] / 1e6:.4g}",
            f"{step.between / 1e6:.4g}",
        ]
        for way, step in steps.items()
    ]
    print(
        harness.render(
            ["way", "step ms", "of it averaging", "MB of gradients/rank", "MB out of node"], table
        )
    )
    others = {
        name: seconds
        for name, seconds in next(iter(steps.values())).parts.items()
        if name != "dp" and seconds > 5e-7
    }
    print(
        "the rest: "
        + ", ".join(f"{name} {1e3 * seconds:.4g} ms" for name, seconds in others.items())
    )
    return harness.deliver(options, [{"way": way, **asdict(step)} for way, step in steps.items()])


def scaled(cluster: Cluster, nodes: int) -> Cluster:
    (first, _), *rest = cluster.kinds
    return replace(cluster, kinds=((first, nodes), *rest))


def simulated(
    cluster: Cluster,
    costs: Costs,
    ways: list[str],
    options: argparse.Namespace,
    model: Model | None,
    numel: int,
) -> list[Row]:
    rows, plain = [], 0.0
    wanted = [(way, False) for way in dict.fromkeys(["plain", *ways])]
    if options.layered and cluster.topology.layered:
        flat = [
            way
            for way in ways
            if way in RINGS or way.startswith(PREFIX) or isinstance(codec_named(way), LowRankCodec)
        ]
        wanted += [(way, True) for way in ways if way not in flat]
    for way, layered in wanted:
        found = one(cluster, costs, way, layered, options, model, numel)
        plain = plain or found.seconds
        rows.append(
            Row(
                len(cluster.topology.nodes),
                cluster.size,
                way + (LEVELS if layered else ""),
                found.seconds,
                found.exposed_seconds,
                found.traffic.nbytes,
                found.traffic.between,
                found.traffic.messages,
                plain,
            )
        )
    return rows


def one(
    cluster: Cluster,
    costs: Costs,
    way: str,
    layered: bool,
    options: argparse.Namespace,
    model: Model | None,
    numel: int,
) -> Simulated:
    if model is None:
        return simulate_calls(
            cluster, costs, buffer_by(way, numel, costs, layered=layered), numel, calls=3
        )
    if way.startswith(PREFIX):
        return simulate_local(cluster, costs, model, 1e-3 * options.compute_ms, local_way(way))
    build = step_by(way, model, costs, bucket_mb=options.bucket_mb, layered=layered)
    return simulate_step(
        cluster,
        costs,
        build,
        widest(model.buckets(options.bucket_mb)),
        training(model, 1e-3 * options.compute_ms, options.bucket_mb),
        limit=1 if layered else 4,
    )


def cells(row: Row) -> list[str]:
    return [
        str(row.nodes),
        str(row.ranks),
        row.way,
        f"{1e3 * row.seconds:.1f}",
        f"{1e3 * row.exposed_seconds:.1f}",
        f"{row.sent_bytes / 1e6:.3f}",
        f"{row.between_bytes / 1e6:.3f}",
        f"{row.plain_seconds / row.seconds:.2f}x",
    ]


def title(options: argparse.Namespace, model: Model | None) -> str:
    what = (
        f"all-reduce of {options.bytes}"
        if model is None
        else f"step of a model of {model.numel / 1e6:.4g} M parameters"
    )
    return f"Simulated {what}, links {' and '.join(options.link or ['1gbit,100us'])}"


def draw(path: str, rows: list[Row], *, title: str) -> None:
    """Time against ranks, or one bar for each way."""
    sizes = sorted({row.ranks for row in rows})
    if len(sizes) == 1:
        title += f", {sizes[0]} ranks"
    height = 4.6 if len(sizes) > 1 else 0.35 * len(rows) + 1.8
    from commpress.cli import charts

    with charts.chart(path, title, panels=2, size=(6.4, height)) as (times, other):
        if len(sizes) > 1:
            _scaling(times, other, rows, sizes)
        else:
            _bars(times, other, rows)


def named(way: str) -> str:
    return way.removesuffix("/2") + (", two levels" if way.endswith("/2") else "")


def _scaling(times: Any, other: Any, rows: list[Row], sizes: list[int]) -> None:
    from commpress.cli import charts

    ways = list(dict.fromkeys(row.way for row in rows))
    flat = [way for way in ways if "/" not in way]
    for way in ways:
        mine = [row for row in rows if row.way == way]
        style = charts.curve(flat.index(way.partition("/")[0])) | (
            {"linestyle": "--"} if "/" in way else {}
        )
        at = [row.ranks for row in mine]
        times.plot(at, [1e3 * row.seconds for row in mine], label=named(way), **style)
        other.plot(at, [row.plain_seconds / row.seconds for row in mine], label=named(way), **style)
    for panel in (times, other):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(n) for n in sizes])
        panel.minorticks_off()
        panel.set_xlabel("ranks")
    charts.logarithmic(times)
    times.set_ylabel("time, ms")
    other.set_ylabel("times faster than plain")
    other.set_ylim(0, 1.1 * max(row.plain_seconds / row.seconds for row in rows))


def _bars(times: Any, other: Any, rows: list[Row]) -> None:
    from commpress.cli import charts

    names = [named(row.way) for row in rows]
    alone = [1e3 * (row.seconds - row.exposed_seconds) for row in rows]
    exposed = [1e3 * row.exposed_seconds for row in rows]
    parts = (
        {"computing alone": alone, "exposed communication": exposed}
        if any(alone)
        else {"": exposed}
    )
    charts.stacked(times, names, parts, "time, ms", show="{:.3g}")
    out = [row.between_bytes / 1e6 for row in rows]
    inside = [(row.sent_bytes - row.between_bytes) / 1e6 for row in rows]
    if any(inside):
        charts.stacked(
            other,
            names,
            {"out of the node": out, "inside the node": inside},
            "MB sent by one rank",
            show="{:.3g}",
            first=2,
        )
    else:
        charts.stacked(other, names, {"": out}, "MB sent by one rank", show="{:.3g}", first=2)
