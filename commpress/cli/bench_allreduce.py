"""One compressed all-reduce of one buffer, against torch's float32 all-reduce."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from commpress.cli import harness
from commpress.cli.option_groups import sizes_of
from commpress.cli.reduced import CALLS, Reduced
from commpress.collectives.channel import Channel


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
    channel, sizes = Channel.among(timeout=timedelta(minutes=5)), sizes_of(options)
    yield f"# {size} ranks"
    for nbytes in sizes:
        reduced = Reduced(nbytes // 4, options.codec, channel)
        yield _measured(reduced, options.iterations, options.warmup)


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
    reduced = Reduced(len(reduced.input), reduced.codec, reduced.channel)  # without residuals
    exact, before = reduced.input.double(), reduced.channel.sent_bytes
    dist.all_reduce(exact)
    exact /= reduced.channel.size
    reduced.fill()
    reduced.reduce()
    return ReducedSize(
        ranks=reduced.channel.size,
        size=4 * len(exact),
        codec=reduced.codec,
        seconds=took["ours"],
        fp32_seconds=took["torch"],
        wrong=reduced.wrong(),
        wire_bytes=reduced.channel.sent_bytes - before,
        error=float((reduced.buffer - exact).norm() / exact.norm()),
    )


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
        "fp32 us": f"{1e6 * m.fp32_seconds:.0f}",
        "faster": f"{m.speed_up:.2f}",
    }


def judge(measured: list[ReducedSize]) -> list[tuple[str, bool]]:
    return [("every element has the same bits on every rank", all(m.wrong == 0 for m in measured))]
