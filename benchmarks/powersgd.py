"""our PowerSGD against torch's powerSGD_hook: seconds, approximation error, size of the residuals

A bucket of equal matrices is handed to three hooks in turn on the same ranks: ours, torch's as it
stands, and torch's with batch_tensors_with_same_shape. Gradients are noise around a common mean of
slowly falling singular values. "error" is the norm of what all steps together still owe over the
norm of what they should have brought; "residual" is the largest norm of a rank's residual after the
first quarter of the steps and after all.

  python benchmarks powersgd                       100 matrices of 256x512 on 2 local processes,
                                                   about a minute
  python benchmarks powersgd --check               exit status 1 if a bar is missed
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import commpress
from commpress.cli import harness
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from shared_options import add_output, add_ranks

WALK = (32, 64)  # shape of the matrices of the long run
HOOKS = ("commpress", "torch", "torch batched")


@dataclass
class Measured:
    hook: str
    seconds: float
    error: float
    early: float  # norm of the residual after a quarter of the long run
    late: float
    walk_error: float
    walk: int  # steps of the long run


class Bucket:
    """DDP's bucket as a hook sees it: ``count`` matrices side by side."""

    def __init__(self, count: int, tall: int, wide: int) -> None:
        self.flat = torch.zeros(count * tall * wide)
        self._gradients = [part.view(tall, wide) for part in self.flat.split(tall * wide)]
        self._parameters = [torch.nn.Parameter(torch.zeros(tall, wide)) for _ in range(count)]

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--count N", int, 100, "matrices")
    option(parser, "--shape RxC", None, "256x512", "of each")
    option(parser, "--rank R", int, 4, "of the approximation")
    option(parser, "--steps N", int, 10, "timed calls of each hook")
    option(parser, "--walk N", int, 400, "steps of the long run")
    add_ranks(parser, ranks=2)
    add_output(
        parser,
        check=(
            "it is 1.5 times as fast as torch's hook, errs no more and its residuals stay bounded"
        ),
    )


def run(options: argparse.Namespace) -> int:
    sides_of(options)
    return harness.run(options, bench, cells, judge=judge)


def sides_of(options: argparse.Namespace) -> tuple[int, int]:
    sides = options.shape.split("x")
    if len(sides) != 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise InvalidArgument(
            f"--shape is {options.shape!r}, expected rows and columns such as 256x512"
        )
    return int(sides[0]), int(sides[1])


def cells(m: Measured) -> dict[str, str]:
    return {
        "hook": m.hook,
        "ms per call": f"{1e3 * m.seconds:.1f}",
        "error": f"{m.error:.4f}",
        f"residual at {m.walk // 4}": f"{m.early:.4f}",
        f"at {m.walk}": f"{m.late:.4f}",
        f"error at {m.walk}": f"{m.walk_error:.4f}",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    ours, plain, batched = measured
    speed, against = plain.seconds / ours.seconds, batched.seconds / ours.seconds
    error = max(ours.error / plain.error, ours.walk_error / plain.walk_error)
    grows, theirs = ours.late / ours.early, plain.late / plain.early
    return [
        (
            (
                f"{speed:.2f}x as fast as torch's hook, {against:.2f}x as fast as the batched one, "
                "1.5x expected"
            ),
            speed >= 1.5,
        ),
        (f"its error is {error:.3f} of torch's, at most 1.02 expected", error <= 1.02),
        (
            (
                f"residual norm x{grows:.2f} over the last three quarters, at most 1.2 expected "
                f"(torch: x{theirs:.2f})"
            ),
            grows <= 1.2,
        ),
    ]


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[Measured]:
    timed = _compare(rank, size, options.count, *sides_of(options), options.rank, options.steps + 2)
    walked = _compare(rank, size, 100, *WALK, min(options.rank, 4), options.walk)
    for name in HOOKS:
        yield Measured(
            name,
            median(timed[name]["seconds"][2:]),
            timed[name]["error"],
            walked[name]["norms"][options.walk // 4],
            walked[name]["norms"][-1],
            walked[name]["error"],
            options.walk,
        )


def _compare(
    rank: int, size: int, count: int, tall: int, wide: int, r: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Every hook on the same gradients, in turn."""
    bucket = Bucket(count, tall, wide)
    names = {f"w{i}": p for i, p in enumerate(bucket.parameters())}
    state = commpress.CompressedState(
        commpress.LowRankCodec(r, min_rate=1), named_parameters=names.items()
    )
    state.measure_every = 0
    theirs = [
        PowerSGDState(
            None,
            matrix_approximation_rank=r,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            batch_tensors_with_same_shape=batched,
        )
        for batched in (False, True)
    ]
    for one in theirs:
        one.iter = 2  # past the exact steps, which there are for the sake of DDP's first buckets
    hooks: dict[str, Callable[[], torch.Tensor]] = {
        "commpress": lambda: state.reduce(bucket).wait(),
        "torch": lambda: powerSGD_hook(theirs[0], bucket).wait(),  # type: ignore[arg-type]
        "torch batched": lambda: powerSGD_hook(theirs[1], bucket).wait(),  # type: ignore[arg-type]
    }
    residuals: dict[str, Callable[[], float]] = {
        "commpress": lambda: float(
            sum(sent.square().sum() for _, sent, _ in state.residuals.places()) ** 0.5
        ),
        "torch": lambda: float(theirs[0].error_dict[0].norm()),
        "torch batched": lambda: float(theirs[1].error_dict[0].norm()),
    }
    mean = _signal(count, tall, wide)
    draw = torch.Generator().manual_seed(1 + rank)
    out: dict[str, dict[str, Any]] = {name: {"seconds": [], "norms": []} for name in HOOKS}
    given, wanted = (
        {name: torch.zeros_like(bucket.flat) for name in HOOKS},
        torch.zeros_like(bucket.flat),
    )
    for _ in range(steps):
        gradient = mean + 0.1 * torch.randn(mean.shape, generator=draw)
        total = gradient.clone()
        dist.all_reduce(total)
        wanted += total / size
        for name, hook in hooks.items():
            bucket.flat.copy_(gradient)
            dist.barrier()
            start = time.perf_counter()
            hook()
            out[name]["seconds"].append(time.perf_counter() - start)
            given[name] += bucket.flat
            out[name]["norms"].append(residuals[name]())
    for name in HOOKS:
        out[name]["error"] = float((given[name] - wanted).norm() / wanted.norm())
    return out


def _signal(count: int, tall: int, wide: int) -> torch.Tensor:
    """Matrices with singular values 1, 1/2, 1/3 …, the same on every rank."""
    draw, few = torch.Generator().manual_seed(0), min(16, tall, wide)
    left, right = (
        torch.randn(count, tall, few, generator=draw),
        torch.randn(count, few, wide, generator=draw),
    )
    values = 1 / torch.arange(1, few + 1)
    return ((left * values) @ right / few**0.5).flatten()
