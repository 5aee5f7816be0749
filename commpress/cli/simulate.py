"""time of all-reduces and training steps on a cluster that you describe, up to thousands of ranks

Runs the same generators that production runs, on simulated time: links with a rate and a latency, kernels with the seconds
per element that this processor takes (or a device of a memory bandwidth), cores that ranks share. Messages and bytes are
counted, not computed from a formula. docs/simulator.md says what is modelled, what is not, and how far off it was.

One all-reduce, or with --parameters, --model or --config a training step under DDP. Ways to reduce:
  plain, bf16-ring   the ring of a library, float32 and bfloat16
  sign, int8, ...    commpress with that codec; powersgd-4 in a training step
  local:CODEC:H:N    local updates in rounds of H steps (default 30), N of them under way (default 0): means of a step
With --layered every codec is also run in two levels: exact sums inside a node, compressed between nodes ("sign/2").

  commpress simulate --nodes 4x1 --link 1gbit,100us --bytes 32MiB
  commpress simulate --nodes 8x8 --link 25gbit,10us --device 900GB/s --parameters 340M --compute-ms 250 --layered
  commpress simulate --nodes 512x8 --link 100gbit,5us --device 2TB/s --scaling 1,8,64,512 --plot scaling.png
  commpress simulate --nodes 4x8,4x8 --link 200gbit,3us --link 25gbit,10us --foreign 25gbit --device 2TB/s
  commpress simulate --nodes 4x1 --link 100mbit,20ms --parameters 11M --compute-ms 60 --ways plain,sign,local:bits2:30:10
  commpress simulate --nodes 8x1 --straggler 1.5 --rack 4 --oversubscription 4 --parameters 110M --compute-ms 300

A row: seconds of the call or step; exposed is what a step takes longer than computing alone; MB that one rank sends, and of
them those that leave its node (of the rank that sends most); against plain.
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from commpress.cli import cluster_options, harness
from commpress.codecs import codec_named
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.errors import InvalidArgument
from commpress.plan.candidates import training
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs
from commpress.plan.local_ways import PREFIX, local_way, simulate_local
from commpress.plan.model import Model
from commpress.plan.simulator import Simulated, simulate_calls, simulate_step
from commpress.plan.ways import RINGS, buffer_by, step_by, widest
from commpress.tiered_mem import parse_bytes

HEAD = ["nodes", "ranks", "way", "ms", "exposed ms", "MB sent/rank", "MB out of node", "against plain"]
WAYS = "plain,bf16-ring,int8,int4,sign"
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
    messages: float
    plain_seconds: float


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ways", default=WAYS, metavar="A,B", help=f"default {WAYS}")
    parser.add_argument("--layered", action="store_true", help="also every codec in two levels")
    parser.add_argument("--bytes", default="32MiB", metavar="SIZE", help="of float32 in one all-reduce (default 32MiB)")
    parser.add_argument("--scaling", metavar="A,B", help="numbers of nodes of the first kind, one after the other")
    cluster_options.add_cluster(parser)
    cluster_options.add_model(parser)
    harness.add_options(parser)


def run(options: argparse.Namespace) -> int:
    ways = options.ways.split(",")
    model = None
    if options.parameters or options.model or options.config:
        model = cluster_options.model_of(options)
        if not options.compute_ms or options.compute_ms < 0:
            raise InvalidArgument("a training step needs --compute-ms: what one rank takes for it without communication")
    for way in ways:
        if way.startswith(PREFIX):
            local_way(way)
            if model is None:
                raise InvalidArgument(f"{way} needs a model: give --parameters, --model or --config, and --compute-ms")
        elif way not in RINGS and isinstance(codec_named(way), LowRankCodec) and model is None:
            raise InvalidArgument(f"{way} needs shapes: give --parameters, --model or --config")
    cluster = cluster_options.cluster_of(options)
    if cluster.size < 2:
        raise InvalidArgument("a cluster of one rank sends nothing: give --nodes with at least two")
    numel = parse_bytes(options.bytes) // 4
    clusters = [cluster] if not options.scaling else [scaled(cluster, n) for n in cluster_options.sizes(options.scaling)]
    costs, start = cluster_options.costs_of(options), perf_counter()
    rows = [row for one in clusters if one.size > 1 for row in simulated(one, costs, ways, options, model, numel)]
    print(harness.render(HEAD, [cells(row) for row in rows]))
    print(f"simulated in {perf_counter() - start:.1f} s")
    return harness.deliver(options, rows, draw=partial(draw, title=title(options, model)))


def scaled(cluster: Cluster, nodes: int) -> Cluster:
    (first, _), *rest = cluster.kinds
    return replace(cluster, kinds=((first, nodes), *rest))


def simulated(
    cluster: Cluster, costs: Costs, ways: list[str], options: argparse.Namespace, model: Model | None, numel: int
) -> list[Row]:
    rows, plain = [], 0.0
    wanted = [(way, False) for way in dict.fromkeys(["plain", *ways])]
    if options.layered and cluster.topology.layered:
        flat = [way for way in ways if way in RINGS or way.startswith(PREFIX) or isinstance(codec_named(way), LowRankCodec)]
        wanted += [(way, True) for way in ways if way not in flat]
    for way, layered in wanted:
        found = one(cluster, costs, way, layered, options, model, numel)
        plain = plain or found.seconds
        rows.append(
            Row(
                len(cluster.topology.nodes), cluster.size, way + (LEVELS if layered else ""), found.seconds,
                found.exposed_seconds, found.traffic.nbytes, found.traffic.between, found.traffic.messages, plain,
            )
        )  # fmt: skip
    return rows


def one(
    cluster: Cluster, costs: Costs, way: str, layered: bool, options: argparse.Namespace, model: Model | None, numel: int
) -> Simulated:
    if model is None:
        return simulate_calls(cluster, costs, buffer_by(way, numel, costs, layered=layered), numel, calls=3)
    if way.startswith(PREFIX):
        return simulate_local(cluster, costs, model, 1e-3 * options.compute_ms, local_way(way))
    build = step_by(way, model, costs, bucket_mb=options.bucket_mb, layered=layered)
    return simulate_step(
        cluster, costs, build, widest(model.buckets(options.bucket_mb)),
        training(model, 1e-3 * options.compute_ms, options.bucket_mb), limit=1 if layered else 4,
    )  # fmt: skip


def cells(row: Row) -> list[str]:
    return [
        str(row.nodes), str(row.ranks), row.way, f"{1e3 * row.seconds:.1f}", f"{1e3 * row.exposed_seconds:.1f}",
        f"{row.sent_bytes / 1e6:.3f}", f"{row.between_bytes / 1e6:.3f}", f"{row.plain_seconds / row.seconds:.2f}x",
    ]  # fmt: skip


def title(options: argparse.Namespace, model: Model | None) -> str:
    what = f"all-reduce of {options.bytes}" if model is None else f"step of a model of {model.numel / 1e6:.4g} M parameters"
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
        style = charts.curve(flat.index(way.partition("/")[0])) | ({"linestyle": "--"} if "/" in way else {})
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
    parts = {"computing alone": alone, "exposed communication": exposed} if any(alone) else {"": exposed}
    charts.stacked(times, names, parts, "time, ms", show="{:.3g}")
    out = [row.between_bytes / 1e6 for row in rows]
    inside = [(row.sent_bytes - row.between_bytes) / 1e6 for row in rows]
    if any(inside):
        charts.stacked(other, names, {"out of the node": out, "inside the node": inside}, "MB sent by one rank", show="{:.3g}",
                       first=2)  # fmt: skip
    else:
        charts.stacked(other, names, {"": out}, "MB sent by one rank", show="{:.3g}", first=2)
