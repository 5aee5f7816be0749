"""the cost of agreement: an exact all-reduce over "commpress" against the same over Gloo

Both run alternately, a few calls back to back each, so that a network's moods hit both; times are
medians over rounds of the slowest rank's. Calls that repeat themselves begin on promises: the
difference is a record of 64 bytes beside the data.

  python benchmarks guard                                          4 local processes
  torchrun ... benchmarks guard                 the ranks of a launcher
  python benchmarks guard --ranks 2 --max-bytes 64MiB              more sizes
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist

from commpress.cli import harness
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from shared_options import add_output, add_ranks, add_sizes, sizes_of

CALLS = 8  # calls back to back
DEAREST = 0.10  # overhead of the largest size that --check allows, from 4 MiB on


@dataclass
class Measured:
    size: int
    gloo_seconds: float
    seconds: float
    wrong: int  # elements that are not those of Gloo, over all ranks

    @property
    def overhead(self) -> float:
        return self.seconds / self.gloo_seconds - 1


def options(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, "64KiB", "16MiB", factor=4)
    option(parser, "--rounds N", int, 12, f"of {CALLS} calls, for each size (default 12)")
    add_ranks(parser)
    check = (
        "results are Gloo's bit for bit and, from 4 MiB on, the largest size costs at most "
        f"{DEAREST:.0%} more"
    )
    add_output(parser, check=check)


def run(options: argparse.Namespace) -> int:
    if options.rounds < 1:
        raise InvalidArgument("--rounds must be at least 1")
    sizes_of(options)
    return harness.run(options, bench, cells, judge=judge)


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[Measured | str]:
    import_module("commpress.backend")
    groups = {
        name: dist.new_group(timeout=timedelta(minutes=5), backend=name)
        for name in ("gloo", "commpress")
    }
    yield f"# {size} ranks"
    for nbytes in sizes_of(options):
        yield measure(nbytes // 4, groups, options.rounds)


def measure(numel: int, groups: dict[str, dist.ProcessGroup], rounds: int) -> Measured:
    tensor = torch.zeros(numel)
    calls = {name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
    took = harness.medians(
        {name: partial(harness.together, call, CALLS) for name, call in calls.items()},
        rounds,
        warm=1,
    )
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    both = [drawn.clone() for _ in groups]
    for one, group in zip(both, groups.values(), strict=True):
        dist.all_reduce(one, group=group)
    wrong = (both[0].view(torch.int32) != both[1].view(torch.int32)).sum()
    dist.all_reduce(wrong)
    return Measured(4 * numel, took["gloo"], took["commpress"], int(wrong))


def cells(m: Measured) -> dict[str, str]:
    return {
        "size B": str(m.size),
        "Gloo us": f"{1e6 * m.gloo_seconds:.0f}",
        "commpress us": f"{1e6 * m.seconds:.0f}",
        "difference us": f"{1e6 * (m.seconds - m.gloo_seconds):.0f}",
        "overhead": f"{100 * m.overhead:.1f} %",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    bars = [("every element has the bits of Gloo's", all(m.wrong == 0 for m in measured))]
    last = measured[-1]
    if last.size >= 4 << 20:
        cost = (
            f"agreement costs {100 * last.overhead:.1f} % at {last.size >> 20} MiB, at most "
            f"{100 * DEAREST:.0f} %"
        )
        bars.append((cost, last.overhead <= DEAREST))
    return bars
