"""steps of DDP in several ways, held against bars: what is exposed of sign and of torch's PowerSGD,
and auto beside the fastest

Ways and columns are those of commpress bench train, whose --help explains them. A ratio of two
exposed times says how well backward hides communication, whatever the machine computes with.

  python benchmarks exposed --check
  torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      benchmarks exposed --ways plain,sign,auto --check
"""

import argparse

from commpress.choice import AUTO
from commpress.cli import bench_train, harness, refusals
from commpress.cli.bench_train import TrainedVariant
from commpress.cli.option_groups import declare
from commpress.errors import InvalidArgument
from shared_options import add_output

COMPARED = ({"powersgd1", "sign"}, {"plain", AUTO})


def options(parser: argparse.ArgumentParser) -> None:
    declare(parser, "@train")
    check = (
        "sign exposes at most half of what powersgd1 does and its step is at most 1.3 of compute, "
        "if both run; auto is as fast as plain within 2 % and as the fastest within 5 %"
    )
    add_output(parser, check=check)


def run(options: argparse.Namespace) -> int:
    variants = set(refusals.variants_of(options.ways))
    if options.check and not any(compared <= variants for compared in COMPARED):
        raise InvalidArgument(
            "--check compares sign and powersgd1, or auto and plain: name both in --ways"
        )
    return harness.run(options, bench_train.bench, bench_train.cells, judge=judge)


def judge(measured: list[TrainedVariant]) -> list[tuple[str, bool]]:
    of, bars = {m.variant: m for m in measured}, []
    if {"powersgd1", "sign"} <= of.keys():
        ours, theirs = (1e3 * of[name].exposed_seconds for name in ("sign", "powersgd1"))
        said = f"sign exposes {ours:.1f} ms, powersgd1 {theirs:.1f}: at most half"
        bars.append((said, ours <= 0.5 * theirs))
        share = of["sign"].step_seconds / of["compute"].step_seconds
        bars.append((f"a sign step takes {share:.2f} of compute, at most 1.3", share <= 1.3))
    if {"plain", AUTO} <= of.keys():
        others = [m for m in measured if m.variant not in ("compute", AUTO)]
        best = min(others, key=lambda m: m.step_seconds)
        for other, least in ((of["plain"], 0.98), (best, 0.95)):
            speed = other.step_seconds / of[AUTO].step_seconds
            said = f"auto runs at {speed:.3f} of the speed of {other.variant}, at least {least}"
            bars.append((said, speed >= least))
    return bars
