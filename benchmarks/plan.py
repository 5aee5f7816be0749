"""a plan against the fastest way here: a training step in every way, measured and as commpress plan
predicts it

Measures links, network stack and kernels as commpress probe does, then a step of a GPT of 10.9 M
parameters under DistributedDataParallel in every way, in rounds of a few steps, and without
communication. Then plans with the figures of before and the step without communication, as
commpress plan --links does, and compares the choice with the fastest way measured.
  plain       torch's all-reduce of float32
  bf16        torch's bf16_compress_hook; no plan can name it, but it counts as the fastest if it is
  sign, ...   commpress with that codec

  python benchmarks plan --ranks 2                                          local processes
  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks plan --check
"""

import argparse
from dataclasses import dataclass

import machines
from commpress.cli import bench_train, harness, ranks, terminal, training
from commpress.cli.refusals import check_variant
from commpress.codecs import codec_named
from commpress.codecs.planned import PLAIN
from commpress.plan import candidates
from commpress.plan.model import Model
from commpress.plan.ways import Scenario
from shared_options import add_measuring

WAYS = "plain,bf16,int8,int4,sign"
PREDICTED = {"bf16": "bf16-ring"}
COMPUTE = "compute"
BUCKET_MB, WARM = 25.0, 3
CLOSE = 0.10  # slower than the fastest way that was measured, at most


@dataclass
class Row(machines.Forecast):
    way: str


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ways", default=WAYS, metavar="A,B", help=f"plain, bf16 and codecs (default {WAYS})"
    )
    check = f"the choice is at most {CLOSE:.0%} slower than the fastest way"
    add_measuring(parser, rounds=5, steps=3, batch=4, check=check)


def run(options: argparse.Namespace) -> int:
    load, _ = training.load_of(options), ways_of(options)
    found = ranks.on_ranks(bench, options, print)
    if found is None:  # not rank 0 of a launcher
        return 0
    measured, seconds = found
    rows, why = planned(measured, seconds, load)
    print(f"computing alone takes {1e3 * seconds[COMPUTE]:.1f} ms")
    print(terminal.table(list(map(cells, rows))))
    print(f"the plan: {why}")
    chosen, best = choice(rows)
    print(
        f"chosen: {chosen.way}, fastest: {best.way}; the choice takes "
        f"{chosen.seconds / best.seconds:.2f} of the fastest"
    )
    return harness.deliver(
        options, rows, judge=judge, machines=measured.as_dict(), why=why, seconds=seconds
    )


def ways_of(options: argparse.Namespace) -> tuple[str, ...]:
    ways = tuple(dict.fromkeys([PLAIN, *options.ways.split(",")]))
    for way in ways:
        if way not in (PLAIN, *PREDICTED):
            codec_named(way)
            check_variant(way)
    return ways


# ---------------------------------------------------------------- on every rank


def bench(
    rank: int, size: int, options: argparse.Namespace, report: ranks.Report
) -> tuple[machines.Machines, dict[str, float]]:
    """The machines, and the seconds of a step in every way: medians of the slowest rank's."""
    load, ways = training.load_of(options), ways_of(options)
    codecs = [way for way in ways if way not in (PLAIN, *PREDICTED)]
    measured = machines.Machines(machines.links(rank, size), machines.kernels(["none", *codecs]))
    report(measured.summary())
    trainees = {way: bench_train.trainee(way, BUCKET_MB, load) for way in (COMPUTE, *ways)}
    for one in trainees.values():
        one.train(WARM)
    took, _ = training.timed(trainees, load)
    return measured, {way: float(seconds.median()) for way, seconds in took.items()}


# ---------------------------------------------------------------- on paper


def planned(
    measured: machines.Machines, seconds: dict[str, float], load: training.Load
) -> tuple[list[Row], str]:
    """Measured beside predicted, and what the plan says.

    ``compute`` was measured on all ranks at once. Where they share cores, that is longer than a
    rank would take alone.
    """
    cluster, model = measured.cluster(), Model.of(load.model())
    share = min(cluster.machine_cores / cluster.size, 1.0) if cluster.machine_cores else 1.0
    ways = [PREDICTED.get(way, way) for way in seconds if way != COMPUTE]
    scenario = Scenario(cluster, measured.costs, model, seconds[COMPUTE] * share, BUCKET_MB)
    found = candidates.candidates(scenario, ways)
    chosen = candidates.recommended(found, ways)
    predicted = {c.name: c.seconds for c in found}
    rows = [
        Row(
            way,
            seconds=took,
            predicted_seconds=predicted[PREDICTED.get(way, way)],
            chosen=way == chosen.codec,
        )
        for way, took in seconds.items()
        if way != COMPUTE
    ]
    return rows, candidates.plan_of(chosen, found, scenario).why


def choice(rows: list[Row]) -> tuple[Row, Row]:
    """The chosen way and the fastest."""
    return next(row for row in rows if row.chosen), min(rows, key=lambda row: row.seconds)


def cells(row: Row) -> dict[str, str]:
    return {
        "way": row.way,
        "measured ms": f"{1e3 * row.seconds:.1f}",
        "predicted ms": f"{1e3 * row.predicted_seconds:.1f}",
        "off by": f"{100 * row.off:+.0f} %",
        "": "chosen" if row.chosen else "",
    }


def judge(rows: list[Row]) -> list[tuple[str, bool]]:
    chosen, best = choice(rows)
    ratio = chosen.seconds / best.seconds
    says = f"{chosen.way} takes {ratio:.2f} of the fastest, {best.way}; at most {1 + CLOSE:.2f}"
    return [(says, ratio <= 1 + CLOSE)]
