"""how far off the simulator is: all-reduces as measured here, and as simulated with what was measured before them

Measures links, network stack and kernels as commpress probe does, then all-reduces, then simulates these all-reduces with the
figures of before: nothing is fitted to what it is compared with. Ranks that lie on one machine (network namespaces,
containers, local processes) share its cores in the simulation as well.

  python benchmarks simulate --ranks 2
  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 benchmarks simulate --check
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

import modelled
from commpress.cli import outputs, ranks, rounds, table
from commpress.cli.reduced import Reduced
from commpress.codecs import codec_named
from commpress.collectives.transports.factory import own_transport
from commpress.errors import InvalidArgument
from commpress.plan.simulator import simulate_calls
from commpress.plan.ways import buffer_by

WAYS, SIZES = "plain,int8,sign", "1MiB,8MiB"
TIMEOUT = timedelta(minutes=5)
MEDIAN, WORST = 0.10, 0.25
HEAD = ["way", "size", "measured ms", "simulated ms", "off by"]


@dataclass(frozen=True)
class Settings:
    ways: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    calls: int


@dataclass
class Row:
    ranks: int
    way: str
    size: int
    seconds: float  # median over rounds of the slowest rank's, of one call among several back to back
    calls: int  # of them
    simulated_seconds: float = 0.0

    @property
    def off(self) -> float:
        return self.simulated_seconds / self.seconds - 1


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ways", default=WAYS, metavar="A,B", help=f"plain, and codecs (default {WAYS})")
    parser.add_argument("--sizes", default=SIZES, metavar="A,B", help=f"of the buffer (default {SIZES})")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each, the median counts (default 5)")
    parser.add_argument("--calls", type=int, default=3, metavar="N", help="back to back in a turn, at least (default 3)")
    ranks.add_options(parser)
    outputs.options(parser, check=f"half are within {MEDIAN:.0%} and all within {WORST:.0%}".replace("%", "%%"))


def run(options: argparse.Namespace) -> int:
    ways = tuple(options.ways.split(","))
    for way in ways:
        if way != "plain":
            codec_named(way)
    settings = Settings(ways, tuple(map(table.parse_bytes, options.sizes.split(","))), options.rounds, options.calls)
    if min(*settings.sizes, 4 * settings.rounds, 4 * settings.calls) < 4:
        raise InvalidArgument("expected --rounds and --calls of at least 1 and --sizes of at least 4 bytes")
    found = ranks.on_ranks(bench, settings, print, ranks=options.ranks, threads=options.threads)
    if found is None:  # not rank 0 of a launcher
        return 0
    machines, rows = found  # machines as a buffer of each size finds them
    simulate(machines, rows)
    print(table.render(HEAD, list(map(cells, rows))))
    offs = sorted(abs(row.off) for row in rows)
    print(f"off by {100 * median(offs):.0f} % (median), {100 * offs[-1]:.0f} % (worst)")
    return outputs.deliver(
        options, rows, judge=lambda: judge(rows), draw=lambda path: draw(path, rows),
        machines={table.show_bytes(size): machine.as_dict() for size, machine in machines.items()},
    )  # fmt: skip


# ---------------------------------------------------------------- on every rank


def bench(
    rank: int, size: int, settings: Settings, report: ranks.Report | None
) -> tuple[dict[int, modelled.Machines], list[Row]]:
    codecs, links = [way for way in settings.ways if way != "plain"] or ["none"], modelled.links(rank, size)
    machines = {nbytes: modelled.Machines(links, modelled.kernels(codecs, nbytes // 4)) for nbytes in settings.sizes}
    if report is not None:
        report(machines[settings.sizes[0]].summary())
    transport, sequence = own_transport(timeout=TIMEOUT), 0
    rows = []
    for nbytes in settings.sizes:
        calls: dict[str, int] = {}
        turns = {}
        for i, way in enumerate(settings.ways):
            if way == "plain":
                call: Callable[[], object] = partial(dist.all_reduce, torch.zeros(nbytes // 4))
            else:
                reduced = Reduced(nbytes // 4, way, transport, sequence + i * SPAN)
                reduced.fill()
                call = reduced.reduce
            calls[way] = repeats(call, settings.calls)
            turns[way] = partial(turn, call, calls[way])
        sequence += len(settings.ways) * SPAN
        took = rounds.medians(rounds.slowest(rounds.in_turns(turns, settings.rounds, warm=1)))
        rows += [Row(size, way, nbytes, took[way], calls[way]) for way in settings.ways]
    return machines, rows


SPAN = 100_000  # sequence numbers of one buffer
LEAST, MOST = 0.1, 60  # seconds of a turn, and calls in it: short calls need more to say something


def repeats(call: Callable[[], object], least: int) -> int:
    """Calls in a turn, equal on all ranks."""
    turn(call, least)
    took = torch.tensor([turn(call, least)], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(min(round(LEAST / float(took)), MOST), least)


def turn(call: Callable[[], object], calls: int) -> float:
    """Seconds of a call among several, from the end of one that goes before them.

    A connection that has rested begins slowly, and ranks leave a barrier milliseconds apart where they share cores. Neither is
    simulated.
    """
    call()
    start = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - start) / calls


# ---------------------------------------------------------------- on paper

FEW = 10  # calls after which one more tells nothing new


def simulate(machines: dict[int, modelled.Machines], rows: list[Row]) -> None:
    for row in rows:
        one, numel = machines[row.size], row.size // 4
        build = buffer_by(row.way, numel, one.costs)
        found = simulate_calls(one.cluster(), one.costs, build, numel, calls=min(row.calls, FEW))
        row.simulated_seconds = found.seconds


def cells(row: Row) -> list[str]:
    return [
        row.way, table.show_bytes(row.size), f"{1e3 * row.seconds:.2f}", f"{1e3 * row.simulated_seconds:.2f}",
        f"{100 * row.off:+.0f} %",
    ]  # fmt: skip


def judge(rows: list[Row]) -> list[tuple[str, bool]]:
    offs = sorted(abs(row.off) for row in rows)
    return [
        (f"half are within {100 * median(offs):.0f} %, at most {100 * MEDIAN:.0f}", median(offs) <= MEDIAN),
        (f"all are within {100 * offs[-1]:.0f} %, at most {100 * WORST:.0f}", offs[-1] <= WORST),
    ]


def draw(path: str, rows: list[Row]) -> None:
    from commpress.cli import charts

    ways = list(dict.fromkeys(row.way for row in rows))
    with charts.chart(path, f"All-reduces among {rows[0].ranks} ranks, measured and simulated", panels=len(ways), share=True,
                      size=(4.6, 4.2)) as panels:  # fmt: skip
        for panel, way in zip(panels, ways, strict=True):
            mine = [row for row in rows if row.way == way]
            charts.over_sizes(panel, {"measured": [(r.size, r.seconds) for r in mine],
                                      "simulated": [(r.size, r.simulated_seconds) for r in mine]})  # fmt: skip
            panel.set_title(way, fontsize=10)
