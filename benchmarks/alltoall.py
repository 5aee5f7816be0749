"""one all-to-all, flat and by way of nodes, against torch's or MPI's

All run interleaved, so that a network's moods hit them alike; times are medians over rounds of
the slowest rank's.
  size, block          bytes that one rank sends in all, and to each rank
  flat, nodes          time of each route; the second needs --nodes. With --codec, encoding and
                       decoding included
  rival                time of torch's all_to_all_single on float32; with --mpi of MPI's
                       blocking Alltoall on the same bytes
  flat x               how many times longer the rival takes than flat
  nodes x              how many times longer flat takes than the route by way of nodes: above 1
                       it pays
  over n               time of flat over n connections a peer, with --connections, and Mbit/s of
                       what a rank sends to others; the rival only says what is right then
  messages             that leave rank 0 for other nodes, flat and by way of nodes
Every result is compared with the rival's, bit for bit if nothing is compressed.

  python benchmarks alltoall                                              4 local processes
  python benchmarks alltoall --ranks 8 --nodes 2x4 --min-bytes 8KiB --max-bytes 8MiB
  torchrun … benchmarks alltoall --connections 1,2,4,8 --min-bytes 64MiB --max-bytes 64MiB
  mpirun -n 4 python benchmarks alltoall --mpi --check                  over MPI
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commpress.cli import harness, option_groups, refusals
from commpress.codecs import codec_named
from commpress.collectives.all_to_all.all_to_all import Way, compressed_all_to_all
from commpress.collectives.all_to_all.codecs_taken import check_codec
from commpress.collectives.topology import Topology
from commpress.collectives.transports.factory import own_transport
from commpress.collectives.transports.lanes import CONNECTIONS
from commpress.collectives.transports.mpi import MpiTransport
from commpress.errors import InvalidArgument
from commpress.work import run as drive
from recorded import Recorded
from shared_options import add_output, add_ranks, add_sizes, natural, sizes_of

PATIENT = timedelta(minutes=5)
CALLS = 3  # calls back to back
MPI_BAR = 0.9  # of the speed of a raw Alltoall
# relative, of normal numbers: what --check allows
ERRS = {"bf16": 1 / 256, "fp8": 1 / 8, "int8": 1 / 64, "int4": 1 / 4}


@dataclass
class DispatchedSize:
    """Seconds; ``nodes`` None without nodes."""

    ranks: int
    size: int
    codec: str
    flat: float
    nodes: float | None
    rival: float | None  # None with several numbers of connections: it waits long far away
    over: dict[int, float]  # by connections
    messages: list[int]
    wrong: int  # elements that differ from the rival's, over all routes and ranks
    # norm of the differences over the norm of the rival's result, the worst of routes and ranks
    error: float

    @property
    def nodes_gain(self) -> float | None:
        return None if self.nodes is None else self.flat / self.nodes


def exchanged(text: str) -> None:
    check_codec(codec_named(text))


def counts(text: str) -> list[int]:
    found = [int(each) for each in text.split(",")]
    if min(found) < 1 or len(set(found)) < len(found):
        raise ValueError("expected different numbers from 1, such as 1,2,4,8")
    return found


def options(parser: argparse.ArgumentParser) -> None:
    add = partial(option_groups.option, parser)
    add("--codec NAME", option_groups.checked(exchanged), "none", "none, bf16, fp8, int8, int4")
    says = "which ranks share a node: 2x4, 4,4,3 or '0 2|1 3'"
    add("--nodes NxM", option_groups.checked(Topology.parse), None, says)
    says = "connections a peer to compare, such as 1,2,4,8"
    add("--connections N,…", option_groups.checked(counts), None, says)
    add_sizes(parser, "256KiB", "16MiB", factor=4)
    add("--rounds N", natural, 5, "of 3 calls of each")
    add("--mpi", says="over MPI instead of Gloo; needs mpirun")
    add_ranks(parser)
    check = (
        "all routes deliver what the rival delivers: in every bit, or within the codec's error; "
        "over MPI at 9/10 its speed"
    )
    add_output(parser, check=check)


def run(options: argparse.Namespace) -> int:
    if options.mpi and not refusals.launched():
        raise InvalidArgument("--mpi needs ranks of an MPI job: mpirun -n 4 python benchmarks …")
    refusals.on_nodes(options, "nodes")
    sizes_of(options)
    bars = partial(judge, mpi=options.mpi)
    return harness.run(options, bench, cells, judge=bars)


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[DispatchedSize | str]:
    inner: Any = MpiTransport(timeout=PATIENT) if options.mpi else own_transport(timeout=PATIENT)
    several = {n: _over(n) for n in counts(options.connections)} if options.connections else {}
    yield f"# {size} ranks"
    for nbytes in sizes_of(options):
        yield _measured(nbytes, options, inner, several)


def _over(connections: int) -> Any:
    before = os.environ.get(CONNECTIONS, "")
    os.environ[CONNECTIONS] = str(connections)
    try:
        return own_transport(timeout=PATIENT)
    finally:
        os.environ[CONNECTIONS] = before


def _measured(
    nbytes: int, options: argparse.Namespace, inner: Any, several: dict[int, Any]
) -> DispatchedSize:
    size, rank = inner.size, inner.rank
    nodes = Topology.parse(options.nodes).nodes if options.nodes else None
    rows = max(nbytes // 4 // size, 1) * size
    inp = torch.randn(rows, generator=torch.Generator().manual_seed(rank))
    routes: dict[str, Way] = {"flat": Way()}
    if nodes:
        routes["nodes"] = Way(nodes)
    over = {f"over {n}": transport for n, transport in several.items()}
    routes |= dict.fromkeys(over, Way())
    results = {name: torch.empty_like(inp) for name in ("rival", *routes)}
    transports = {name: Recorded(over.get(name, inner)) for name in routes}
    calls = {"rival": _rival(results["rival"], inp, inner if options.mpi else None)}
    for name, way in routes.items():
        calls[name] = partial(_ours, results[name], inp, options.codec, transports[name], way)
    for call in calls.values():
        call()
    if several:
        del calls["rival"]
    together = {name: partial(harness.together, call, CALLS) for name, call in calls.items()}
    median = harness.medians(together, options.rounds)
    rival = results["rival"]
    wrong = torch.tensor([sum(int((results[name] != rival).sum()) for name in routes)])
    error = max(float((results[name] - rival).norm() / rival.norm()) for name in routes)
    worst = torch.tensor([error])
    dist.all_reduce(wrong)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    away = [r for r in range(size) if not nodes or all(not {r, rank} <= set(n) for n in nodes)]
    done = 1 + CALLS * options.rounds
    return DispatchedSize(
        ranks=size,
        size=4 * rows,
        codec=options.codec,
        flat=median["flat"],
        nodes=median.get("nodes"),
        rival=median.get("rival"),
        over={n: median[f"over {n}"] for n in several},
        messages=[
            sum(transports[name].messages_to[r] for r in away) // done
            for name in routes
            if name not in over
        ],
        wrong=int(wrong),
        error=float(worst),
    )


def _rival(out: torch.Tensor, inp: torch.Tensor, mpi: Any) -> Callable[[], object]:
    if mpi is None:
        return lambda: dist.all_to_all_single(out, inp)
    sent, received = inp.view(torch.uint8), out.view(torch.uint8)
    return lambda: mpi.comm.Alltoall(mpi.buffer(sent), mpi.buffer(received))


def _ours(out: torch.Tensor, inp: torch.Tensor, codec: str, transport: Any, way: Way) -> None:
    drive(compressed_all_to_all(out, inp, codec=codec, transport=transport, way=way))


def cells(m: DispatchedSize) -> dict[str, str]:
    times = {"flat": m.flat, "nodes": m.nodes, "rival": m.rival}
    return {
        "size B": str(m.size),
        "block B": str(m.size // m.ranks),
        "codec": m.codec,
        **{f"{name} us": "-" if t is None else f"{1e6 * t:.0f}" for name, t in times.items()},
        "flat x": "-" if m.rival is None else f"{m.rival / m.flat:.2f}",
        "nodes x": "-" if m.nodes_gain is None else f"{m.nodes_gain:.2f}",
        **{
            f"over {n}": f"{1e6 * t:.0f} us, {8e-6 * m.size * (1 - 1 / m.ranks) / t:.0f} Mbit/s"
            for n, t in m.over.items()
        },
        "messages": "/".join(map(str, m.messages)),
    }


def judge(measured: list[DispatchedSize], *, mpi: bool = False) -> list[tuple[str, bool]]:
    codec, error = measured[0].codec, max(m.error for m in measured)
    if codec_named(codec).lossless:
        wrong = sum(m.wrong for m in measured)
        said = f": {wrong} elements differ" if wrong else ""
        bars = [("every route delivers what the rival delivers" + said, wrong == 0)]
    else:
        allowed = ERRS.get(codec, 1.0)
        said = f"{codec} is {error:.1e} off what the rival delivers, at most {allowed:.1e}"
        bars = [(said, 0 < error <= allowed)]
    for m in measured if mpi else ():
        share = (m.rival or 0.0) / m.flat
        said = f"{m.size} bytes: {share:.2f} of the speed of a raw Alltoall, expected {MPI_BAR:g}"
        bars.append((said, share >= MPI_BAR))
    return bars
