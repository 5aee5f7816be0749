"""one all-to-all of one buffer, flat and by way of nodes, against torch's all_to_all_single (or MPI's Alltoall)

All run interleaved, so that a network's moods hit them alike; times are medians over rounds of the slowest rank's.
  size, block          bytes that one rank sends in all, and to each rank
  flat, inside-first,
  between-first        time of each route; the last two need --nodes. With --codec, encoding and decoding included
  rival                time of torch's all_to_all_single on float32; with --mpi of MPI's blocking Alltoall on the same bytes
  flat x               how many times longer the rival takes than flat
  nodes x              how many times longer flat takes than the faster route by way of nodes: above 1 they pay
  messages             that leave rank 0 for other nodes, flat and by the first way of nodes
Every result is compared with the rival's, bit for bit if nothing is compressed.

  commpress bench alltoall                                              4 local processes
  commpress bench alltoall --ranks 8 --nodes 2x4 --min-bytes 8KiB --max-bytes 8MiB
  mpirun -n 4 commpress bench alltoall --mpi --check                    over MPI
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commpress.cli import harness, ranks
from commpress.codecs import codec_named
from commpress.collectives.all_to_all.all_to_all import Way, compressed_all_to_all
from commpress.collectives.topology import Topology
from commpress.collectives.transports.factory import own_transport
from commpress.collectives.transports.loopback import Recorded
from commpress.collectives.transports.mpi import MpiTransport
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument
from commpress.work import run as drive

PATIENT = timedelta(minutes=5)
HEAD = ["size B", "block B", "codec", "flat us", "inside us", "between us", "rival us", "flat x", "nodes x", "messages"]
WIDTHS = [10, 9, 6, 9, 9, 10, 9, 7, 7, 9]
CALLS = 3  # calls back to back
MPI_BAR = 0.9  # of the speed of a raw Alltoall
ERRS = {"bf16": 1 / 256, "fp8": 1 / 8, "int8": 1 / 64, "int4": 1 / 4}  # relative, of normal numbers: what --check allows


@dataclass
class DispatchedSize:
    """Seconds; ``inside`` and ``between`` None without nodes."""

    ranks: int
    size: int
    codec: str
    flat: float
    inside: float | None
    between: float | None
    rival: float
    messages: list[int]
    wrong: int  # elements that differ from the rival's, over all routes and ranks
    error: float  # norm of the differences over the norm of the rival's result, the worst of routes and ranks

    @property
    def nodes_gain(self) -> float | None:
        routes = [t for t in (self.inside, self.between) if t is not None]
        return self.flat / min(routes) if routes else None


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codec", default="none", metavar="NAME", help="none, bf16, fp8, int8, int4 (default none)")
    parser.add_argument("--nodes", metavar="NxM", help="which ranks share a node: 2x4, 4,4,3 or '0 2|1 3'")
    harness.add_sizes(parser, "256KiB", "16MiB", factor=4)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help=f"of {CALLS} calls of each (default 5)")
    parser.add_argument("--mpi", action="store_true", help="over MPI instead of Gloo; needs mpirun")
    ranks.add_options(parser)
    check = "all routes deliver what the rival delivers: in every bit, or within the codec's error; over MPI at 9/10 its speed"
    harness.add_options(parser, check=check)


def run(options: argparse.Namespace) -> int:
    codec_named(options.codec)
    if options.rounds < 1:
        raise InvalidArgument("expected --rounds >= 1")
    if options.mpi and not ranks.launched():
        raise InvalidArgument("--mpi needs ranks of an MPI job: mpirun -n 4 commpress bench alltoall --mpi")
    nodes_of(options), harness.sizes_of(options)
    return harness.run(
        options, bench, judge=partial(judge, mpi=options.mpi), draw=partial(draw, mpi=options.mpi),
        report=harness.Table(HEAD, WIDTHS, cells),
    )  # fmt: skip


def nodes_of(options: argparse.Namespace) -> tuple[tuple[int, ...], ...] | None:
    return Topology.parse(options.nodes).nodes if options.nodes else None


# ---------------------------------------------------------------- on every rank


def bench(rank: int, size: int, options: argparse.Namespace, report: ranks.Report) -> list[DispatchedSize]:
    inner: Any = MpiTransport(timeout=PATIENT) if options.mpi else own_transport(timeout=PATIENT)
    report(f"# {size} ranks")
    measured = []
    for nbytes in harness.sizes_of(options):
        measured.append(_measure(nbytes, options, inner))
        report(measured[-1])
    return measured


def _measure(numel_bytes: int, options: argparse.Namespace, inner: Any) -> DispatchedSize:
    size, rank, nodes = inner.size, inner.rank, nodes_of(options)
    rows = max(numel_bytes // 4 // size, 1) * size
    inp = torch.randn(rows, generator=torch.Generator().manual_seed(rank))
    results = {"rival": torch.empty_like(inp)}
    calls: dict[str, Callable[[], object]] = {"rival": _rival(results["rival"], inp, inner if options.mpi else None)}
    routes: dict[str, Way] = {"flat": Way()}
    if nodes:
        routes |= {"inside": Way(nodes, "inside-first"), "between": Way(nodes, "between-first")}
    transports = {name: Recorded(inner) for name in routes}
    for name, way in routes.items():
        results[name] = torch.empty_like(inp)
        calls[name] = _ours(results[name], inp, options.codec, transports[name], way)
    for call in calls.values():
        call()
    median = harness.medians({name: partial(harness.together, call, CALLS) for name, call in calls.items()}, options.rounds)
    rival = results["rival"]
    wrong = torch.tensor([sum(int((results[name] != rival).sum()) for name in routes)])
    error = torch.tensor([max(float((results[name] - rival).norm() / rival.norm()) for name in routes)])
    dist.all_reduce(wrong)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    done = 1 + CALLS * options.rounds
    away = [r for r in range(size) if not nodes or all(not {r, rank} <= set(n) for n in nodes)]
    messages = [sum(transports[name].messages_to[r] for r in away) // done for name in list(routes)[:2]]
    return DispatchedSize(
        ranks=size, size=4 * rows, codec=options.codec, flat=median["flat"], inside=median.get("inside"),
        between=median.get("between"), rival=median["rival"], messages=messages, wrong=int(wrong),
        error=float(error),
    )  # fmt: skip


def _rival(out: torch.Tensor, inp: torch.Tensor, mpi: Any) -> Callable[[], object]:
    if mpi is None:
        return lambda: dist.all_to_all_single(out, inp)
    sent, received = inp.view(torch.uint8), out.view(torch.uint8)
    return lambda: mpi.comm.Alltoall(mpi.buffer(sent), mpi.buffer(received))


def _ours(out: torch.Tensor, inp: torch.Tensor, codec: str, transport: Transport, way: Way) -> Callable[[], object]:
    return lambda: drive(compressed_all_to_all(out, inp, codec=codec, transport=transport, way=way))


# ---------------------------------------------------------------- on paper


def cells(m: DispatchedSize) -> list[str]:
    def time(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e6 * seconds:.0f}"

    return [
        str(m.size), str(m.size // m.ranks), m.codec, time(m.flat), time(m.inside), time(m.between), time(m.rival),
        f"{m.rival / m.flat:.2f}", "-" if m.nodes_gain is None else f"{m.nodes_gain:.2f}", "/".join(map(str, m.messages)),
    ]  # fmt: skip


def judge(measured: list[DispatchedSize], *, mpi: bool = False) -> list[tuple[str, bool]]:
    return delivery(measured) + (speeds(measured) if mpi else [])


def speeds(measured: list[DispatchedSize]) -> list[tuple[str, bool]]:
    shares = {m.size: m.rival / m.flat for m in measured}
    return [
        (f"{size} bytes: {share:.2f} of the speed of a raw Alltoall, expected {MPI_BAR:g}", share >= MPI_BAR)
        for size, share in shares.items()
    ]


def delivery(measured: list[DispatchedSize]) -> list[tuple[str, bool]]:
    codec, wrong, error = measured[0].codec, sum(m.wrong for m in measured), max(m.error for m in measured)
    if codec_named(codec).lossless:
        return [("every route delivers what the rival delivers" + (f": {wrong} elements differ" if wrong else ""), wrong == 0)]
    allowed = ERRS.get(codec, 1.0)
    return [(f"{codec} is {error:.1e} off what the rival delivers, at most {allowed:.1e}", 0 < error <= allowed)]


def draw(path: str, measured: list[DispatchedSize], *, mpi: bool = False) -> None:
    from commpress.cli import charts

    first = measured[0]
    rival = "MPI's Alltoall" if mpi else "torch, float32"
    curves = {rival: [(m.size, m.rival) for m in measured], "flat": [(m.size, m.flat) for m in measured]}
    for name, label in (("inside", "nodes, inside first"), ("between", "nodes, between first")):
        if getattr(first, name) is not None:
            curves[label] = [(m.size, getattr(m, name)) for m in measured]
    title = f"One all-to-all among {first.ranks} ranks" + ("" if first.codec == "none" else f", {first.codec} on the way")
    with charts.chart(path, title) as (panel,):
        charts.over_sizes(panel, curves)
