"""Time of all-reduces and training steps on a cluster that is described, up to thousands of
ranks."""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from commpress.cli import cluster_options, harness
from commpress.cli.refusals import as_many, simulated_ways
from commpress.errors import InvalidArgument
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs
from commpress.plan.grid import grid_of
from commpress.plan.local_ways import simulate_local
from commpress.plan.mesh_simulator import simulate_mesh
from commpress.plan.model import Model
from commpress.plan.network import Traffic
from commpress.plan.simulator import Simulated
from commpress.plan.way_names import PREFIX, RINGS, local_way
from commpress.plan.ways import simulate_buffer, simulate_training
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


@dataclass
class Row:
    nodes: int
    ranks: int
    way: str
    seconds: float
    exposed_seconds: float
    sent_bytes: float
    between_bytes: float
    plain_seconds: float


def run(options: argparse.Namespace) -> int:
    given = options.parameters or options.model or options.config
    model = cluster_options.model_of(options, simulated_ways) if given else None
    cluster = cluster_options.cluster_of(options)
    (first, count), *others = cluster.kinds
    clusters = [
        replace(cluster, kinds=((first, nodes), *others)) for nodes in options.scaling or [count]
    ]
    costs, start = cluster_options.costs_of(options), perf_counter()
    rows = [row for one in clusters if one.size > 1 for row in table(one, costs, options, model)]
    print(harness.render(HEAD, [cells(row) for row in rows]))
    print(f"simulated in {perf_counter() - start:.1f} s")
    return harness.deliver(options, rows, draw=partial(draw, title=title(options, model)))


def table(
    cluster: Cluster, costs: Costs, options: argparse.Namespace, model: Model | None
) -> list[Row]:
    """Each way, then in two levels those that can be."""
    ways = list(dict.fromkeys(["plain", *options.ways.split(",")]))
    wanted = [(way, False) for way in ways]
    if options.layered and cluster.topology.layered:
        wanted += [(way, True) for way in ways if not (way in RINGS or way.startswith(PREFIX))]
    rows: list[Row] = []
    for way, layered in wanted:
        found = simulated(cluster, costs, way, layered, options, model)
        rows.append(
            Row(
                len(cluster.topology.nodes),
                cluster.size,
                way + (LEVELS if layered else ""),
                found.seconds,
                found.exposed_seconds,
                found.traffic.nbytes,
                found.traffic.between,
                rows[0].seconds if rows else found.seconds,
            )
        )
    return rows


def simulated(
    cluster: Cluster,
    costs: Costs,
    way: str,
    layered: bool,
    options: argparse.Namespace,
    model: Model | None,
) -> Simulated:
    """One call, or a step of the model in one way; on a grid what is exposed is averaging."""
    if model is None:
        numel = parse_bytes(options.bytes) // 4
        return simulate_buffer(cluster, costs, way, numel, layered=layered, calls=3)
    seconds = 1e-3 * options.compute_ms
    if way.startswith(PREFIX):
        return simulate_local(cluster, costs, model, seconds, local_way(way))
    if not options.grid:
        return simulate_training(
            cluster, costs, way, model, seconds, bucket_mb=options.bucket_mb, layered=layered
        )
    grid, work = grid_of(options.grid), cluster_options.work_of(options, model, cluster.size)
    as_many(grid, cluster.size)
    if unfit := work.fits(grid):
        raise InvalidArgument(f"--grid {grid} does not divide this model and batch: {unfit}")
    step = simulate_mesh(cluster, costs, work, grid, way, bucket_mb=options.bucket_mb)
    traffic = Traffic(nbytes=step.sent["dp"], between=step.between)
    return Simulated(step.seconds, step.seconds - step.parts["dp"], traffic, cluster.size, 1)


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
    what = f"all-reduce of {options.bytes}"
    if model is not None:
        on = f" on {options.grid}" if options.grid else ""
        what = f"step of a model of {model.numel / 1e6:.4g} M parameters{on}"
    return (
        f"Simulated {what}, links {options.links or ' and '.join(options.link or ['1gbit,100us'])}"
    )


def draw(path: str, rows: list[Row], *, title: str) -> None:
    """Time, and what is gained, against ranks."""
    from commpress.cli import charts

    sizes = sorted({row.ranks for row in rows})
    ways = list(dict.fromkeys(row.way for row in rows))
    flat = [way for way in ways if LEVELS not in way]
    with charts.chart(path, title, panels=2) as (times, gains):
        for way in ways:
            mine = [row for row in rows if row.way == way]
            look = charts.curve(flat.index(way.removesuffix(LEVELS)))
            look["linestyle"] = "--" if LEVELS in way else "-"
            look["label"] = way.replace(LEVELS, ", two levels")
            at = [row.ranks for row in mine]
            times.plot(at, [1e3 * row.seconds for row in mine], **look)
            gains.plot(at, [row.plain_seconds / row.seconds for row in mine], **look)
        for panel in (times, gains):
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(n) for n in sizes])
            panel.minorticks_off()
            panel.set_xlabel("ranks")
        charts.logarithmic(times)
        times.set_ylabel("time, ms")
        gains.set_ylabel("times faster than plain")
        gains.set_ylim(bottom=0)
