"""One compressed all-reduce of one buffer, against torch's float32 all-reduce."""

import argparse
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from commpress.cli import harness, ranks
from commpress.cli.reduced import CALLS, Reduced
from commpress.collectives.channel import Channel
from commpress.kernels.pieces import NUMEL, SHARD, SOURCE, WIDTH

ORDER = ("none", "bf16", "int8", "int4", "sign")  # from the smallest error to the largest
HEAD = [
    "size B",
    "codec",
    "us",
    "algbw",
    "busbw",
    "#wrong",
    "wire B",
    "ratio",
    "error",
    "kept",
    "fp32 us",
    "faster",
]
WIDTHS = [9, 5, 6, 6, 6, 6, 8, 5, 7, 7, 7, 6]

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
    return harness.run(
        options, bench, judge=judge, draw=draw, report=harness.Table(HEAD, WIDTHS, cells)
    )


# ---------------------------------------------------------------- on every rank


def bench(
    rank: int, size: int, options: argparse.Namespace, report: ranks.Report
) -> list[ReducedSize]:
    channel, sizes, measured = (
        Channel.among(timeout=timedelta(minutes=5)),
        harness.sizes_of(options),
        [],
    )
    report(f"# {size} ranks")
    plan = [(nbytes, options.codec) for nbytes in sizes]
    if options.check:
        plan += [(sizes[0], codec) for codec in ORDER if codec != options.codec]
    for nbytes, codec in plan:
        measured.append(
            Checked(nbytes // 4, codec, channel).measure(options.iterations, options.warmup)
        )
        report(measured[-1])
    return measured


class Checked(Reduced):
    """ReducedSize beside torch's all-reduce, then reduced again and held against the exact mean."""

    def measure(self, iterations: int, warmup: int) -> ReducedSize:
        ways = {"torch": lambda: dist.all_reduce(self.buffer), "ours": self.reduce}
        for way in ways.values():
            self.timed(way, warmup)
        rounds = -(-iterations // CALLS)
        calls = {
            name: partial(self.timed, way, -(-iterations // rounds)) for name, way in ways.items()
        }
        took = harness.medians(calls, rounds)
        self.forget()
        exact, total = (
            self._mean_of(self.input.double()),
            torch.zeros(len(self.input), dtype=torch.float64),
        )
        before = self.channel.sent_bytes
        for _ in range(CHECKED):
            self.fill()
            self.reduce()
            if self.rounds == 1:
                error = float((self.buffer - exact).norm() / exact.norm())
            total += self.buffer
        wire_bytes, owed = (self.channel.sent_bytes - before) // CHECKED, self._owed()
        return ReducedSize(
            ranks=self.channel.size,
            size=4 * self.input.numel(),
            codec=self.codec,
            seconds=took["ours"],
            fp32_seconds=took["torch"],
            wrong=self.wrong(),
            wire_bytes=wire_bytes,
            error=error,
            kept=float(owed.norm() / exact.norm()),
            lost=float((total + owed - self.rounds * exact).norm() / (self.rounds * exact).norm()),
        )

    def _owed(self) -> torch.Tensor:
        """R = mean of the sent residuals + the reduced ones side by side: the same tensor on every
        rank."""
        rank, size, owed = (
            self.channel.rank,
            self.channel.size,
            torch.zeros(len(self.input), dtype=torch.float64),
        )
        for message, feedback in zip(self.messages, self.feedbacks, strict=True):
            if feedback is None:
                continue
            feedback.settle(message.pieces)
            for start, numel, kept in message.pieces.residual_runs:
                owed[start : start + numel] += feedback.sent[kept : kept + numel]
            for line in message.pieces.table:
                first = min(rank * line[WIDTH], line[NUMEL])
                last = min(first + line[WIDTH], line[NUMEL])
                shard = feedback.reduced[line[SHARD] : line[SHARD] + last - first]
                owed[line[SOURCE] + first : line[SOURCE] + last] += size * shard
        return self._mean_of(owed)

    def _mean_of(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor / self.channel.size


# ---------------------------------------------------------------- on paper


def cells(m: ReducedSize) -> list[str]:
    return [
        str(m.size),
        m.codec,
        f"{1e6 * m.seconds:.0f}",
        f"{m.algorithm_bandwidth / 1e9:.3f}",
        f"{m.bus_bandwidth / 1e9:.3f}",
        str(m.wrong),
        str(m.wire_bytes),
        f"{m.ratio:.1f}",
        f"{m.error:.1e}",
        f"{m.kept:.1e}",
        f"{1e6 * m.fp32_seconds:.0f}",
        f"{m.speed_up:.2f}",
    ]


def draw(path: str, measured: list[ReducedSize]) -> None:
    from commpress.cli import charts

    first = measured[0]
    plan = [m for m in measured if m.codec == first.codec]
    ratio = plan[-1].ratio
    title = (
        f"One all-reduce among {first.ranks} ranks: {first.codec} ({ratio:.0f} times fewer bytes) "
        "and torch's float32"
    )
    with charts.chart(path, title, panels=2) as (time, gain):
        curves = {"torch, float32": [(m.size, m.fp32_seconds) for m in plan]}
        charts.over_sizes(
            time, curves | {f"commpress, {first.codec}": [(m.size, m.seconds) for m in plan]}
        )
        charts.over_sizes(
            gain, {"": [(m.size, m.speed_up) for m in plan]}, "times faster than torch", scale=1
        )
        gain.lines[0].set_color(charts.COLOURS[1])  # ours, as on the left
        gain.set(yscale="linear", ylim=(0, 1.1 * max(1.0, *(m.speed_up for m in plan))))
        gain.axhline(1, color="#333333", linewidth=1, linestyle="--")


def judge(measured: list[ReducedSize]) -> list[tuple[str, bool]]:
    error = {m.codec: m.error for m in measured if m.size == measured[0].size}
    order = [error[codec] for codec in ORDER]
    return [
        ("every element has the same bits on every rank", all(m.wrong == 0 for m in measured)),
        (
            (
                f"outputs + residuals = inputs: {max(m.lost for m in measured):.0e} lost, 1e-6 "
                "allowed for rounding"
            ),
            all(m.lost <= 1e-6 for m in measured),
        ),
        (
            "errors in the right order: "
            + " < ".join(f"{codec} {error[codec]:.0e}" for codec in ORDER),
            all(a < b for a, b in pairwise(order)) and order[0] < 1e-6,
        ),
    ]
