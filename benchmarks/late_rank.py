"""steps while one rank pauses at random: how long those of the others take, and the loss

Trains the same GPT twice from equal weights on equal batches, compressed: first every rank waits
for every other, then only as long as --wait says. Computing is played: the thread that trains
sleeps --compute in each step, as if it waited for an accelerator. The last rank also sleeps --pause
at the beginning of a share of the steps, as for data that does not come. "p50" and "p99" are of the
slowest other rank's steps, "late" the steps for which the last rank was late. "loss" is that of the
trained model on text that it has not seen. A pause longer than a step, or before the last one is
made up for, holds the others up for longer.

With --local the ranks take local updates, in rounds whose exchange overlaps with the first half of
the next: first rounds of as many steps as fit into so many seconds, at whose end every rank waits
for every other, then rounds of these seconds, in which a rank that pauses takes fewer steps.

  python benchmarks late_rank                                             4 local processes
  python benchmarks late_rank --wait 0.05 --share 0.1 --check
  python benchmarks late_rank --local 4 --codec int4 --compute 150 --check
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import harness
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from shared_options import add_output, add_ranks, natural

TAIL, GAP = 1.3, 0.01  # p99 in p50, and how much worse the loss may be
WARM = 10  # steps without a pause, which do not count
UNSEEN = 1 << 17  # bytes
RATE = 2e-3


@dataclass
class Measured:
    wait: str
    p50: float
    p99: float
    longest: float
    pauses: int
    late_steps: int
    loss: float

    @property
    def tail(self) -> float:
        return self.p99 / self.p50


class Computing(torch.autograd.Function):
    """A third of the seconds of a block in forward, the rest in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return grad, None


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--steps N", natural, 200, "that count, of each run")
    option(parser, "--compute MS", float, 400.0, "of a step")
    option(parser, "--pause MS", float, 300.0, "of the last rank")
    option(parser, "--share PART", float, 0.05, "of the steps in which it pauses")
    option(parser, "--wait SECONDS", waits, "auto", "for a late rank")
    option(parser, "--local SECONDS", float, 0.0, "of a round of local updates, in place of DDP")
    option(parser, "--codec NAME", str, "int8")
    option(parser, "--width N", natural, 64, "of the model")
    option(parser, "--layers N", natural, 4, "of the model")
    option(parser, "--batch N", natural, 8, "windows of 64 bytes per rank and step")
    add_ranks(parser)
    add_output(
        parser,
        check=f"with --wait p99 is at most {TAIL} of p50, and the loss at most {GAP:.0%} worse",
    )


def waits(text: str) -> float | str:
    return text if text == "auto" else float(text)


def run(options: argparse.Namespace) -> int:
    if not (0 <= options.share <= 1 and min(options.compute, options.pause) >= 0):
        raise InvalidArgument("--share must lie in 0 to 1, --compute and --pause not below zero")
    return harness.run(options, bench, cells, judge=judge)


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[Measured | str]:
    yield (
        f"{size} ranks, steps of {options.compute:g} ms of computing; the last rank pauses "
        f"{options.pause:g} ms in {options.share:.0%} of {options.steps}"
    )
    for wait in (None, options.wait):
        yield train(rank, size, wait, options)


def train(rank: int, size: int, wait: Any, options: argparse.Namespace) -> Measured:
    text = standard_library()
    torch.manual_seed(0)
    model = GPT(width=options.width, layers=options.layers)
    for block in model.blocks:
        block.register_forward_hook(
            lambda block, given, x: Computing.apply(x, options.compute / 1e3 / options.layers)
        )
    adamw = torch.optim.AdamW(model.parameters(), RATE)
    ends = torch.optim.lr_scheduler.LinearLR(adamw, 1.0, 0.0, WARM + options.steps)
    optimizer: torch.optim.Optimizer = adamw
    trained: nn.Module = model
    state = None
    if options.local:
        optimizer = local_updates(adamw, wait, options)
    else:
        megabytes = sum(p.numel() for p in model.parameters()) * 4 / (1 << 20)
        trained = ddp = DistributedDataParallel(model, bucket_cap_mb=megabytes / 4)
        state = commpress.compress(ddp, options.codec, topology=None, wait=wait)
    draws, luck = torch.Generator().manual_seed(rank), random.Random(7)
    took, pauses = [], 0
    for step in range(WARM + options.steps):
        start = time.perf_counter()
        pause = step >= WARM and luck.random() < options.share
        pauses += pause
        if pause and rank == size - 1:
            time.sleep(options.pause / 1e3)
        optimizer.zero_grad()
        trained(*batch(text[:-UNSEEN], options.batch, 64, draws)).backward()
        optimizer.step()
        ends.step()
        took.append(time.perf_counter() - start)
    if isinstance(optimizer, commpress.LocalUpdates):
        optimizer.drain()
    dist.barrier()
    steps = torch.tensor(took[WARM:]) * (rank < size - 1)
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    late = torch.tensor(0 if state is None else state.counters.late_steps)
    dist.all_reduce(late)
    p50, p99 = torch.quantile(steps, torch.tensor([0.5, 0.99])).tolist()
    loss = unseen_loss(model, text[-UNSEEN:])
    said = "for all" if wait is None else f"{options.local:g} s" if options.local else f"{wait}"
    return Measured(said, p50, p99, float(steps.max()), pauses, int(late), loss)


def local_updates(
    adamw: torch.optim.Optimizer, wait: Any, options: argparse.Namespace
) -> commpress.LocalUpdates:
    steps = max(round(1e3 * options.local / options.compute), 2)
    every: Any = steps if wait is None else commpress.Seconds(options.local)
    return commpress.LocalUpdates(
        adamw,
        every=every,
        overlap=(steps // 2, "keep"),
        outer=commpress.Average(),
        codec=options.codec,
        weight="steps",
    )


@torch.no_grad()
def unseen_loss(model: nn.Module, text: torch.Tensor) -> float:
    for block in model.blocks:  # type: ignore[union-attr]
        block._forward_hooks.clear()
    return float(model(*batch(text, 512, 64, torch.Generator().manual_seed(1))))


def cells(m: Measured) -> dict[str, str]:
    return {
        "waits": m.wait,
        "p50 ms": f"{1e3 * m.p50:.1f}",
        "p99 ms": f"{1e3 * m.p99:.1f}",
        "p99/p50": f"{m.tail:.2f}",
        "longest ms": f"{1e3 * m.longest:.1f}",
        "pauses": f"{m.pauses}",
        "late": f"{m.late_steps}",
        "loss": f"{m.loss:.4f}",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    every, bounded = measured
    gap = bounded.loss / every.loss - 1
    return [
        (f"p99 is {bounded.tail:.2f} of p50, at most {TAIL}", bounded.tail <= TAIL),
        (f"the loss is {gap:+.2%} of that in which all wait, at most {GAP:.0%}", gap <= GAP),
    ]
