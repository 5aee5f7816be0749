"""Time of all-reduces and training steps on a cluster that is described, up to thousands of
ranks."""

import argparse
from dataclasses import dataclass, replace
from time import perf_counter

from commpress.cli import cluster_options, harness, terminal
from commpress.cli.refusals import simulated_ways, trains
from commpress.plan.cluster import RINGS, Cluster
from commpress.plan.costs import Costs
from commpress.plan.model import Model
from commpress.plan.ways import Scenario, simulate_buffer
from commpress.tiered_mem import parse_bytes

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
    model = cluster_options.model_of(options, simulated_ways) if trains(options) else None
    cluster = cluster_options.cluster_of(options)
    sizes = options.scaling or [cluster.count]
    clusters = [replace(cluster, count=nodes) for nodes in sizes]
    costs, start = cluster_options.costs_of(options), perf_counter()
    rows = [row for one in clusters if one.size > 1 for row in table(one, costs, options, model)]
    print(terminal.table(list(map(cells, rows))))
    print(f"simulated in {perf_counter() - start:.1f} s")
    return harness.deliver(options, rows)


def table(
    cluster: Cluster, costs: Costs, options: argparse.Namespace, model: Model | None
) -> list[Row]:
    """Each way, then in two levels those that can be."""
    ways = list(dict.fromkeys(["plain", *options.ways.split(",")]))
    wanted = [(way, False) for way in ways]
    if options.layered and cluster.topology.layered:
        wanted += [(way, True) for way in ways if way not in RINGS]
    rows: list[Row] = []
    for way, layered in wanted:
        if model is None:
            numel = parse_bytes(options.bytes) // 4
            found = simulate_buffer(cluster, costs, way, numel, layered=layered, calls=3)
        else:
            seconds = 1e-3 * options.compute_ms
            found = Scenario(cluster, costs, model, seconds).step(way, layered=layered)
        rows.append(
            Row(
                len(cluster.topology.nodes),
                cluster.size,
                way + LEVELS * layered,
                found.seconds,
                found.exposed_seconds,
                found.traffic.nbytes,
                found.traffic.between,
                rows[0].seconds if rows else found.seconds,
            )
        )
    return rows


def cells(row: Row) -> dict[str, str]:
    return {
        "nodes": str(row.nodes),
        "ranks": str(row.ranks),
        "way": row.way,
        "ms": f"{1e3 * row.seconds:.1f}",
        "exposed ms": f"{1e3 * row.exposed_seconds:.1f}",
        "MB sent/rank": f"{row.sent_bytes / 1e6:.3f}",
        "MB out of node": f"{row.between_bytes / 1e6:.3f}",
        "against plain": f"{row.plain_seconds / row.seconds:.2f}x",
    }
