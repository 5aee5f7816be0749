"""One all-to-all of one buffer, flat and by way of nodes, against torch's or MPI's."""

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
from commpress.work import run as drive

PATIENT = timedelta(minutes=5)
HEAD = [
    "size B",
    "block B",
    "codec",
    "flat us",
    "inside us",
    "between us",
    "rival us",
    "flat x",
    "nodes x",
    "messages",
]
WIDTHS = [10, 9, 6, 9, 9, 10, 9, 7, 7, 9]
CALLS = 3  # calls back to back
MPI_BAR = 0.9  # of the speed of a raw Alltoall
# relative, of normal numbers: what --check allows
ERRS = {"bf16": 1 / 256, "fp8": 1 / 8, "int8": 1 / 64, "int4": 1 / 4}


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
    # norm of the differences over the norm of the rival's result, the worst of routes and ranks
    error: float

    @property
    def nodes_gain(self) -> float | None:
        routes = [t for t in (self.inside, self.between) if t is not None]
        return self.flat / min(routes) if routes else None


def run(options: argparse.Namespace) -> int:
    return harness.run(
        options,
        bench,
        judge=partial(judge, mpi=options.mpi),
        draw=partial(draw, mpi=options.mpi),
        report=harness.Table(HEAD, WIDTHS, cells),
    )


def nodes_of(options: argparse.Namespace) -> tuple[tuple[int, ...], ...] | None:
    return Topology.parse(options.nodes).nodes if options.nodes else None


# ---------------------------------------------------------------- on every rank


def bench(
    rank: int, size: int, options: argparse.Namespace, report: ranks.Report
) -> list[DispatchedSize]:
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
    calls: dict[str, Callable[[], object]] = {
        "rival": _rival(results["rival"], inp, inner if options.mpi else None)
    }
    routes: dict[str, Way] = {"flat": Way()}
    if nodes:
        routes |= {"inside": Way(nodes)}
    transports = {name: Recorded(inner) for name in routes}
    for name, way in routes.items():
        results[name] = torch.empty_like(inp)
        calls[name] = _ours(results[name], inp, options.codec, transports[name], way)
    for call in calls.values():
        call()
    median = harness.medians(
        {name: partial(harness.together, call, CALLS) for name, call in calls.items()},
        options.rounds,
    )
    rival = results["rival"]
    wrong = torch.tensor([sum(int((results[name] != rival).sum()) for name in routes)])
    error = torch.tensor(
        [max(float((results[name] - rival).norm() / rival.norm()) for name in routes)]
    )
    dist.all_reduce(wrong)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    done = 1 + CALLS * options.rounds
    away = [r for r in range(size) if not nodes or all(not {r, rank} <= set(n) for n in nodes)]
    messages = [
        sum(transports[name].messages_to[r] for r in away) // done for name in list(routes)[:2]
    ]
    return DispatchedSize(
        ranks=size,
        size=4 * rows,
        codec=options.codec,
        flat=median["flat"],
        inside=median.get("inside"),
        between=median.get("between"),
        rival=median["rival"],
        messages=messages,
        wrong=int(wrong),
        error=float(error),
    )


def _rival(out: torch.Tensor, inp: torch.Tensor, mpi: Any) -> Callable[[], object]:
    if mpi is None:
        return lambda: dist.all_to_all_single(out, inp)
    sent, received = inp.view(torch.uint8), out.view(torch.uint8)
    return lambda: mpi.comm.Alltoall(mpi.buffer(sent), mpi.buffer(received))


def _ours(
    out: torch.Tensor, inp: torch.Tensor, codec: str, transport: Transport, way: Way
) -> Callable[[], object]:
    return lambda: drive(compressed_all_to_all(out, inp, codec=codec, transport=transport, way=way))


# ---------------------------------------------------------------- on paper


def cells(m: DispatchedSize) -> list[str]:
    def time(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e6 * seconds:.0f}"

    return [
        str(m.size),
        str(m.size // m.ranks),
        m.codec,
        time(m.flat),
        time(m.inside),
        time(m.between),
        time(m.rival),
        f"{m.rival / m.flat:.2f}",
        "-" if m.nodes_gain is None else f"{m.nodes_gain:.2f}",
        "/".join(map(str, m.messages)),
    ]


def judge(measured: list[DispatchedSize], *, mpi: bool = False) -> list[tuple[str, bool]]:
    return delivery(measured) + (speeds(measured) if mpi else [])


def speeds(measured: list[DispatchedSize]) -> list[tuple[str, bool]]:
    shares = {m.size: m.rival / m.flat for m in measured}
    return [
        (
            f"{size} bytes: {share:.2f} of the speed of a raw Alltoall, expected {MPI_BAR:g}",
            share >= MPI_BAR,
        )
        for size, share in shares.items()
    ]


def delivery(measured: list[DispatchedSize]) -> list[tuple[str, bool]]:
    codec, wrong, error = (
        measured[0].codec,
        sum(m.wrong for m in measured),
        max(m.error for m in measured),
    )
    if codec_named(codec).lossless:
        return [
            (
                "every route delivers what the rival delivers"
                + (f": {wrong} elements differ" if wrong else ""),
                wrong == 0,
            )
        ]
    allowed = ERRS.get(codec, 1.0)
    return [
        (
            f"{codec} is {error:.1e} off what the rival delivers, at most {allowed:.1e}",
            0 < error <= allowed,
        )
    ]


def draw(path: str, measured: list[DispatchedSize], *, mpi: bool = False) -> None:
    from commpress.cli import charts

    first = measured[0]
    rival = "MPI's Alltoall" if mpi else "torch, float32"
    curves = {
        rival: [(m.size, m.rival) for m in measured],
        "flat": [(m.size, m.flat) for m in measured],
    }
    for name, label in (("inside", "nodes, inside first"), ("between", "nodes, between first")):
        if getattr(first, name) is not None:
            curves[label] = [(m.size, getattr(m, name)) for m in measured]
    title = f"One all-to-all among {first.ranks} ranks" + (
        "" if first.codec == "none" else f", {first.codec} on the way"
    )
    with charts.chart(path, title) as (panel,):
        charts.over_sizes(panel, curves)
