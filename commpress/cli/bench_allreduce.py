"""One compressed all-reduce of one buffer, against torch's float32 all-reduce."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from commpress.cli import harness
from commpress.cli.reduced import CALLS, Reduced
from commpress.collectives.channel import Channel
from commpress.kernels.pieces import NUMEL, SHARD, SOURCE, WIDTH

ORDER = ("none", "bf16", "int8", "int4", "sign")  # from the smallest error to the largest
CHECKED = 3  # further calls whose results are checked


@dataclass
class ReducedSize:
    """One size and codec; times are medians over iterations of the slowest rank's."""

    ranks: int
    size: int
    codec: str
    seconds: float
    fp32_seconds: float
    wrong: int
    wire_bytes: int
    error: float
    kept: float
    lost: float  # of what error feedback must account for: rounding, if all is well

    @property
    def algorithm_bandwidth(self) -> float:
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        return self.algorithm_bandwidth * 2 * (self.ranks - 1) / self.ranks

    @property
    def ratio(self) -> float:
        return 2 * (self.ranks - 1) * self.size / self.ranks / self.wire_bytes

    @property
    def speed_up(self) -> float:
        return self.fp32_seconds / self.seconds


def run(options: argparse.Namespace) -> int:
    return harness.run(options, bench, cells, judge=judge)


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[ReducedSize | str]:
    channel, sizes = Channel.among(timeout=timedelta(minutes=5)), harness.sizes_of(options)
    yield f"# {size} ranks"
    plan = [(nbytes, options.codec) for nbytes in sizes]
    if options.check:
        plan += [(sizes[0], codec) for codec in ORDER if codec != options.codec]
    for nbytes, codec in plan:
        yield _measured(Reduced(nbytes // 4, codec, channel), options.iterations, options.warmup)


def _measured(reduced: Reduced, iterations: int, warmup: int) -> ReducedSize:
    """Timed beside torch's all-reduce, then reduced again and held against the exact mean."""
    ways = {"torch": lambda: dist.all_reduce(reduced.buffer), "ours": reduced.reduce}
    rounds = -(-iterations // CALLS)
    calls = {
        name: partial(reduced.timed, way, -(-iterations // rounds)) for name, way in ways.items()
    }
    for way in ways.values():
        reduced.timed(way, warmup)
    took = harness.medians(calls, rounds)
    reduced.forget()
    exact = _mean(reduced.input.double(), reduced.channel)
    total, error, before = torch.zeros_like(exact), 0.0, reduced.channel.sent_bytes
    for _ in range(CHECKED):
        reduced.fill()
        reduced.reduce()
        error = error or float((reduced.buffer - exact).norm() / exact.norm())  # of the first
        total += reduced.buffer
    sent, residual = reduced.channel.sent_bytes - before, _residual(reduced)
    return ReducedSize(
        ranks=reduced.channel.size,
        size=4 * len(exact),
        codec=reduced.codec,
        seconds=took["ours"],
        fp32_seconds=took["torch"],
        wrong=reduced.wrong(),
        wire_bytes=sent // CHECKED,
        error=error,
        kept=float(residual.norm() / exact.norm()),
        lost=float((total + residual - CHECKED * exact).norm() / (CHECKED * exact).norm()),
    )


def _residual(reduced: Reduced) -> torch.Tensor:
    """Mean of the sent residuals + the reduced ones side by side: the same tensor on every rank."""
    rank, size = reduced.channel.rank, reduced.channel.size
    found = torch.zeros(len(reduced.input), dtype=torch.float64)
    for message, feedback in zip(reduced.messages, reduced.feedbacks, strict=True):
        if feedback is None:
            continue
        feedback.settle(message.pieces)
        for start, numel, kept in message.pieces.residual_runs:
            found[start : start + numel] += feedback.sent[kept : kept + numel]
        for row in message.pieces.table:
            first = min(rank * row[WIDTH], row[NUMEL])
            last = min(first + row[WIDTH], row[NUMEL])
            shard = feedback.reduced[row[SHARD] : row[SHARD] + last - first]
            found[row[SOURCE] + first : row[SOURCE] + last] += size * shard
    return _mean(found, reduced.channel)


def _mean(tensor: torch.Tensor, channel: Channel) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor / channel.size


def cells(m: ReducedSize) -> dict[str, str]:
    return {
        "size B": str(m.size),
        "codec": m.codec,
        "us": f"{1e6 * m.seconds:.0f}",
        "algbw": f"{m.algorithm_bandwidth / 1e9:.3f}",
        "busbw": f"{m.bus_bandwidth / 1e9:.3f}",
        "#wrong": str(m.wrong),
        "wire B": str(m.wire_bytes),
        "ratio": f"{m.ratio:.1f}",
        "error": f"{m.error:.1e}",
        "kept": f"{m.kept:.1e}",
        "fp32 us": f"{1e6 * m.fp32_seconds:.0f}",
        "faster": f"{m.speed_up:.2f}",
    }


def judge(measured: list[ReducedSize]) -> list[tuple[str, bool]]:
    error = {m.codec: m.error for m in measured if m.size == measured[0].size}
    order, lost = [error[codec] for codec in ORDER], max(m.lost for m in measured)
    said = " < ".join(f"{codec} {error[codec]:.0e}" for codec in ORDER)
    return [
        ("every element has the same bits on every rank", all(m.wrong == 0 for m in measured)),
        (f"outputs + residuals = inputs: {lost:.0e} lost, 1e-6 allowed for rounding", lost <= 1e-6),
        (
            f"errors in the right order: {said}",
            all(a < b for a, b in pairwise(order)) and order[0] < 1e-6,
        ),
    ]
