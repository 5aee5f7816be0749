"""the simulator against measurements: all-reduces as measured here, and as simulated with what was
measured before them

Measures links, network stack and kernels as commpress probe does, then all-reduces, then simulates
these all-reduces with the figures of before: nothing is fitted to what it is compared with. Ranks
that lie on one machine (network namespaces, containers, local processes) share its cores in the
simulation as well.

  python benchmarks simulate --ranks 2
  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks simulate --check
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

import machines
from commpress.cli import harness, ranks, terminal
from commpress.cli.reduced import Reduced
from commpress.codecs import codec_named
from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument
from commpress.plan.ways import simulate_buffer
from commpress.tiered_mem import parse_bytes, show_bytes
from shared_options import add_output, add_ranks

WAYS, SIZES = "plain,int8,sign", "1MiB,8MiB"
TIMEOUT = timedelta(minutes=5)
MEDIAN, WORST = 0.10, 0.25


@dataclass
class Row:
    ranks: int
    way: str
    size: int
    # median over rounds of the slowest rank's, of one call among several back to back
    seconds: float
    calls: int  # of them
    simulated_seconds: float = 0.0

    @property
    def off(self) -> float:
        return self.simulated_seconds / self.seconds - 1


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ways", default=WAYS, metavar="A,B", help=f"plain, and codecs (default {WAYS})"
    )
    parser.add_argument(
        "--sizes", default=SIZES, metavar="A,B", help=f"of the buffer (default {SIZES})"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="of all, the median counts (default 5)"
    )
    parser.add_argument(
        "--calls",
        type=int,
        default=3,
        metavar="N",
        help="back to back in a round, at least (default 3)",
    )
    add_ranks(parser)
    add_output(parser, check=f"half are within {MEDIAN:.0%} and all within {WORST:.0%}")


def run(options: argparse.Namespace) -> int:
    for way in options.ways.split(","):
        if way != "plain":
            codec_named(way)
    if min(*sizes_of(options), 4 * options.rounds, 4 * options.calls) < 4:
        raise InvalidArgument(
            "expected --rounds and --calls of at least 1 and --sizes of at least 4 bytes"
        )
    found = ranks.on_ranks(bench, options, print)
    if found is None:  # not rank 0 of a launcher
        return 0
    measured, rows = found  # machines as a buffer of each size finds them
    simulate(measured, rows)
    print(terminal.table(list(map(cells, rows))))
    offs = sorted(abs(row.off) for row in rows)
    print(f"off by {100 * median(offs):.0f} % (median), {100 * offs[-1]:.0f} % (worst)")
    every = {show_bytes(size): one.as_dict() for size, one in measured.items()}
    return harness.deliver(options, rows, judge=judge, machines=every)


def sizes_of(options: argparse.Namespace) -> list[int]:
    return [parse_bytes(size) for size in options.sizes.split(",")]


# ---------------------------------------------------------------- on every rank


def bench(
    rank: int, size: int, options: argparse.Namespace, report: ranks.Report
) -> tuple[dict[int, machines.Machines], list[Row]]:
    ways, sizes = tuple(options.ways.split(",")), sizes_of(options)
    codecs, links = [way for way in ways if way != "plain"] or ["none"], machines.links(rank, size)
    measured = {
        nbytes: machines.Machines(links, machines.kernels(codecs, nbytes // 4)) for nbytes in sizes
    }
    report(measured[sizes[0]].summary())
    channel, rows = Channel.among(timeout=TIMEOUT), []
    for nbytes in sizes:
        calls: dict[str, int] = {}
        timings = {}
        for way in ways:
            if way == "plain":
                call: Callable[[], object] = partial(dist.all_reduce, torch.zeros(nbytes // 4))
            else:
                reduced = Reduced(nbytes // 4, way, channel)
                reduced.fill()
                call = reduced.reduce
            calls[way] = repeats(call, options.calls)
            timings[way] = partial(timed, call, calls[way])
        took = harness.medians(timings, options.rounds, warm=1)
        rows += [Row(size, way, nbytes, took[way], calls[way]) for way in ways]
    return measured, rows


# seconds of calls back to back, and their number: short calls need more to say something
LEAST, MOST = 0.1, 60


def repeats(call: Callable[[], object], least: int) -> int:
    """Calls back to back, equal on all ranks."""
    timed(call, least)
    took = torch.tensor([timed(call, least)], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(min(round(LEAST / float(took)), MOST), least)


def timed(call: Callable[[], object], calls: int) -> float:
    """Seconds of a call among several, from the end of one that goes before them.

    A connection that has rested begins slowly, and ranks leave a barrier milliseconds apart where
    they share cores. Neither is simulated.
    """
    call()
    return harness.seconds(call, calls)


# ---------------------------------------------------------------- on paper

FEW = 10  # calls after which one more tells nothing new


def simulate(measured: dict[int, machines.Machines], rows: list[Row]) -> None:
    for row in rows:
        one, calls = measured[row.size], min(row.calls, FEW)
        found = simulate_buffer(one.cluster(), one.costs, row.way, row.size // 4, calls=calls)
        row.simulated_seconds = found.seconds


def cells(row: Row) -> dict[str, str]:
    return {
        "way": row.way,
        "size": show_bytes(row.size),
        "measured ms": f"{1e3 * row.seconds:.2f}",
        "simulated ms": f"{1e3 * row.simulated_seconds:.2f}",
        "off by": f"{100 * row.off:+.0f} %",
    }


def judge(rows: list[Row]) -> list[tuple[str, bool]]:
    offs = sorted(abs(row.off) for row in rows)
    return [
        (
            f"half are within {100 * median(offs):.0f} %, at most {100 * MEDIAN:.0f}",
            median(offs) <= MEDIAN,
        ),
        (f"all are within {100 * offs[-1]:.0f} %, at most {100 * WORST:.0f}", offs[-1] <= WORST),
    ]
