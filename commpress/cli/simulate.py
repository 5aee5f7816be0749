"""how long all-reduces and training steps take on a cluster that you describe, up to thousands of ranks

Runs the same generators that production runs, on simulated time: links with a rate and a latency, kernels with the seconds
per element that this processor takes (or a device of a memory bandwidth), cores that ranks share. Messages and bytes are
counted, not computed from a formula. docs/simulator.md says what is modelled, what is not, and how far off it was.

One all-reduce, or with --parameters, --model or --config a training step under DDP. Ways to reduce:
  plain, bf16-ring   the ring of a library, float32 and bfloat16
  sign, int8, ...    commpress with that codec; powersgd-4 in a training step
With --layered every codec is also run in two levels: exact sums inside a node, compressed between nodes ("sign/2").

  commpress simulate --nodes 4x1 --link 1gbit,100us --bytes 32MiB
  commpress simulate --nodes 8x8 --link 25gbit,10us --device 900GB/s --parameters 340M --compute-ms 250 --layered
  commpress simulate --nodes 512x8 --link 100gbit,5us --device 2TB/s --scaling 1,8,64,512 --plot scaling.png
  commpress simulate --nodes 4x8,4x8 --link 200gbit,3us --link 25gbit,10us --foreign 25gbit --device 2TB/s
  commpress simulate --nodes 8x1 --straggler 1.5 --rack 4 --oversubscription 4 --parameters 110M --compute-ms 300

A row: seconds of the call or step; exposed is what a step takes longer than computing alone; MB that one rank sends, and of
them those that leave its node (of the rank that sends most); against plain.
"""

import argparse
from dataclasses import asdict, dataclass, replace
from time import perf_counter

from commpress.cli import cluster_options, table
from commpress.codecs import codec_named
from commpress.codecs.low_rank import LowRankCodec
from commpress.errors import InvalidArgument
from commpress.plan.candidates import training
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs
from commpress.plan.model import Model
from commpress.plan.simulator import Simulated, simulate_calls, simulate_step
from commpress.plan.ways import RINGS, buffer_by, step_by, widest

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
    parser.add_argument("--json", metavar="FILE", help="everything simulated")
    parser.add_argument("--plot", metavar="FILE", help="time against ranks, or one bar for each way")


def run(options: argparse.Namespace) -> int:
    ways = options.ways.split(",")
    model = None
    if options.parameters or options.model or options.config:
        model = cluster_options.model_of(options)
        if not options.compute_ms or options.compute_ms < 0:
            raise InvalidArgument("a training step needs --compute-ms: what one rank takes for it without communication")
    for way in ways:
        if way not in RINGS and isinstance(codec_named(way), LowRankCodec) and model is None:
            raise InvalidArgument(f"{way} needs shapes: give --parameters, --model or --config")
    cluster = cluster_options.cluster_of(options)
    if cluster.size < 2:
        raise InvalidArgument("a cluster of one rank sends nothing: give --nodes with at least two")
    numel = table.parse_bytes(options.bytes) // 4
    clusters = [cluster] if not options.scaling else [scaled(cluster, n) for n in cluster_options.sizes(options.scaling)]
    costs, start = cluster_options.costs_of(options), perf_counter()
    rows = [row for one in clusters if one.size > 1 for row in simulated(one, costs, ways, options, model, numel)]
    print(table.render(HEAD, [cells(row) for row in rows]))
    print(f"simulated in {perf_counter() - start:.1f} s")
    if options.json:
        table.write_json(options.json, {"options": vars(options) | {"run": None}, "rows": [asdict(row) for row in rows]})
    if options.plot:
        from commpress.cli import simulate_plot

        simulate_plot.draw(rows, options.plot, title(options, model))
        print(f"saved: {options.plot}")
    return 0


def scaled(cluster: Cluster, nodes: int) -> Cluster:
    (first, _), *rest = cluster.kinds
    return replace(cluster, kinds=((first, nodes), *rest))


def simulated(
    cluster: Cluster, costs: Costs, ways: list[str], options: argparse.Namespace, model: Model | None, numel: int
) -> list[Row]:
    rows, plain = [], 0.0
    wanted = [(way, False) for way in dict.fromkeys(["plain", *ways])]
    if options.layered and cluster.topology.layered:
        wanted += [(way, True) for way in ways if way not in RINGS and not isinstance(codec_named(way), LowRankCodec)]
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
