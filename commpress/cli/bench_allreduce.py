"""one compressed all-reduce of one buffer, against torch's float32 all-reduce

The columns of nccl-tests, then what compression adds. Both all-reduces run alternately, so that a network's moods hit both.
  time, algbw, busbw   of the compressed one, as if it were an all-reduce of float32: algbw = size / time,
                       busbw = algbw * 2(n-1)/n
  #wrong               elements whose bits differ between ranks
  wire                 bytes one rank sent, headers included; ratio: against a float32 ring
  error                of one all-reduce against the exact mean, relative; kept: what error feedback owes after all of them
  fp32 time, speed-up  of torch's all_reduce, and how many times longer it takes
It runs what the DDP hook runs: the same messages, kernels, transport and error feedback.

  commpress bench allreduce                                      4 local processes
  commpress bench allreduce --codec int8 --min-bytes 64KiB
  torchrun --nproc-per-node 2 --no-python commpress bench allreduce --check
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from commpress.cli import ranks, table
from commpress.codecs import codec_named, policy_of
from commpress.collectives.allreduce import Workspace, reduce_bucket
from commpress.collectives.buckets import Message, Span, messages
from commpress.collectives.loopback import Recorded
from commpress.collectives.transport import TorchTransport
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.kernels.pieces import NUMEL, SHARD, SOURCE, WIDTH
from commpress.work import run as drive

ORDER = ("none", "bf16", "int8", "int4", "sign")  # from the smallest error to the largest
HEAD = [
    "size B", "count", "type", "redop", "codec", "time us", "algbw GB/s", "busbw GB/s", "#wrong", "wire B", "ratio", "error",
    "kept", "fp32 time us", "speed-up",
]  # fmt: skip
WIDTHS = [10, 9, 5, 5, 8, 9, 10, 10, 6, 10, 6, 7, 7, 12, 8]

TURN = 7  # calls back to back of one side before the other has its turn
CHECKED = 3  # further calls whose results are checked


@dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...]
    codec: str
    iterations: int
    warmup: int
    check: bool


@dataclass
class Measured:
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


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codec", default="sign", metavar="NAME", help="default sign")
    parser.add_argument("--min-bytes", type=table.parse_bytes, default="1MiB", metavar="SIZE", help="default 1MiB")
    parser.add_argument("--max-bytes", type=table.parse_bytes, default="32MiB", metavar="SIZE", help="default 32MiB")
    parser.add_argument("--factor", type=int, default=2, metavar="N", help="from one size to the next (default 2)")
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help="timed, of each size (default 10)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="not timed, of each size (default 2)")
    ranks.add_options(parser)
    parser.add_argument(
        "--check", action="store_true",
        help="exit status 1 unless ranks agree bit for bit, error feedback loses nothing and codecs err in the right order",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="everything measured")


def run(options: argparse.Namespace) -> int:
    codec_named(options.codec)
    if (
        not 4 <= options.min_bytes <= options.max_bytes
        or options.factor < 2
        or options.iterations < 1
        or options.warmup < 0
    ):
        raise InvalidArgument(
            "expected 4 <= --min-bytes <= --max-bytes, --factor >= 2, --iterations >= 1, --warmup >= 0"
        )
    sizes = [options.min_bytes]
    while sizes[-1] * options.factor <= options.max_bytes:
        sizes.append(sizes[-1] * options.factor)
    settings = Settings(tuple(sizes), options.codec, options.iterations, options.warmup, options.check)
    measured = ranks.on_ranks(bench, settings, print_line, ranks=options.ranks, threads=options.threads)
    if measured is None:  # not rank 0 of a launcher
        return 0
    bars = judge(measured) if options.check else []
    if options.json:
        table.write_json(options.json, {"rows": [as_dict(m) for m in measured], "bars": bars})
    return table.verdict(bars)


# ---------------------------------------------------------------- on every rank


def bench(rank: int, size: int, settings: Settings, report: ranks.Report | None) -> list[Measured]:
    group = dist.new_group(timeout=timedelta(minutes=5))
    transport = Recorded(TorchTransport(group, timeout=timedelta(minutes=5)))
    measured = []
    if report is not None:
        report(None, size)
    plan = [(numel_bytes, settings.codec) for numel_bytes in settings.sizes]
    if settings.check:
        plan += [(settings.sizes[0], codec) for codec in ORDER if codec != settings.codec]
    sequence = 0
    for numel_bytes, codec in plan:
        buffer = Reduced(numel_bytes // 4, codec, transport, sequence)
        measured.append(buffer.measure(settings.iterations, settings.warmup))
        sequence = buffer.sequence
        if report is not None:
            report(measured[-1], size)
    return measured


class Reduced:
    """One buffer, all-reduced again and again from the same input, with what feedback keeps in between."""

    def __init__(self, numel: int, codec: str, transport: Recorded, sequence: int) -> None:
        self.transport, self.codec, self.sequence = transport, codec, sequence
        self.messages: list[Message] = messages([Span("buffer", 0, numel)], policy_of(codec), transport.size)
        self.feedbacks = [ErrorFeedback.zeros(m.pieces) if m.pieces.kept else None for m in self.messages]
        self.workspace = Workspace()
        self.input = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))
        self.buffer, self.floats = torch.empty(numel), torch.empty(numel)
        self.total = torch.zeros(numel, dtype=torch.float64)
        self.rounds = 0

    def measure(self, iterations: int, warmup: int) -> Measured:
        self._both(warmup)
        took = [self._both(min(TURN, iterations - done)) for done in range(0, iterations, TURN)]
        self.feedbacks = [ErrorFeedback.zeros(m.pieces) if m.pieces.kept else None for m in self.messages]
        self.rounds = 0
        exact = self._mean_of(self.input.double())
        before = self.transport.sent_bytes
        for _ in range(CHECKED):
            self.buffer.copy_(self.input)
            self._reduce()
            if self.rounds == 1:
                error = float((self.buffer - exact).norm() / exact.norm())
            self.total += self.buffer
        wire_bytes = (self.transport.sent_bytes - before) // CHECKED
        slowest = torch.tensor(took, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        owed = self._owed()
        seconds, fp32_seconds = slowest.median(0).values.tolist()
        return Measured(
            ranks=self.transport.size, size=4 * self.input.numel(), codec=self.codec, seconds=seconds,
            fp32_seconds=fp32_seconds, wrong=self._wrong(), wire_bytes=wire_bytes, error=error,
            kept=float(owed.norm() / exact.norm()),
            lost=float((self.total + owed - self.rounds * exact).norm() / (self.rounds * exact).norm()),
        )  # fmt: skip

    def _both(self, calls: int) -> tuple[float, float]:
        """Seconds per call of the compressed all-reduce and of torch's: calls back to back, ranks started together."""
        self.buffer.copy_(self.input)
        ours = _timed(self._reduce, calls)
        self.floats.copy_(self.input)
        return ours, _timed(lambda: dist.all_reduce(self.floats), calls)

    def _reduce(self) -> None:
        steps = reduce_bucket(
            self.buffer, self.feedbacks, messages=self.messages, transport=self.transport, workspace=self.workspace,
            sequence=self.sequence, key=self.rounds,
        )  # fmt: skip
        for outcome in drive(steps):
            outcome.commit()
        self.sequence += len(self.messages)
        self.rounds += 1

    def _owed(self) -> torch.Tensor:
        """R = mean of the sent residuals + the reduced ones side by side: the same tensor on every rank."""
        rank, size, owed = self.transport.rank, self.transport.size, torch.zeros(len(self.input), dtype=torch.float64)
        for message, feedback in zip(self.messages, self.feedbacks, strict=True):
            if feedback is None:
                continue
            feedback.settle(message.pieces)
            for start, numel, kept in message.pieces.kept_runs():
                owed[start : start + numel] += feedback.sent[kept : kept + numel]
            for line in message.pieces.table:
                first = min(rank * line[WIDTH], line[NUMEL])
                last = min(first + line[WIDTH], line[NUMEL])
                shard = feedback.reduced[line[SHARD] : line[SHARD] + last - first]
                owed[line[SOURCE] + first : line[SOURCE] + last] += size * shard
        return self._mean_of(owed)

    def _wrong(self) -> int:
        """Elements whose bits are not those of rank 0, over all ranks."""
        first = self.buffer.clone()
        dist.broadcast(first, 0)
        count = (first.view(torch.int32) != self.buffer.view(torch.int32)).sum()
        dist.all_reduce(count)
        return int(count)

    def _mean_of(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor / self.transport.size


def _timed(call: Callable[[], object], calls: int) -> float:
    dist.barrier()
    start = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - start) / max(calls, 1)


# ---------------------------------------------------------------- on paper


def print_line(m: Measured | None, size: int) -> None:
    if m is None:
        print(f"# {size} ranks\n{table.line(HEAD, WIDTHS)}", flush=True)
        return
    cells = [
        str(m.size), str(m.size // 4), "float", "avg", m.codec, f"{1e6 * m.seconds:.0f}", f"{m.algorithm_bandwidth / 1e9:.3f}",
        f"{m.bus_bandwidth / 1e9:.3f}", str(m.wrong), str(m.wire_bytes), f"{m.ratio:.1f}", f"{m.error:.1e}", f"{m.kept:.1e}",
        f"{1e6 * m.fp32_seconds:.0f}", f"{m.speed_up:.2f}",
    ]  # fmt: skip
    print(table.line(cells, WIDTHS), flush=True)


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    error = {m.codec: m.error for m in measured if m.size == measured[0].size}
    order = [error[codec] for codec in ORDER]
    print()
    return [
        ("every element has the same bits on every rank", all(m.wrong == 0 for m in measured)),
        (
            f"outputs + residuals = inputs: {max(m.lost for m in measured):.0e} lost, 1e-6 allowed for rounding",
            all(m.lost <= 1e-6 for m in measured),
        ),
        (
            "errors in the right order: " + " < ".join(f"{codec} {error[codec]:.0e}" for codec in ORDER),
            all(a < b for a, b in pairwise(order)) and order[0] < 1e-6,
        ),
    ]


def as_dict(m: Measured) -> dict[str, Any]:
    derived = ("algorithm_bandwidth", "bus_bandwidth", "ratio", "speed_up")
    return asdict(m) | {name: getattr(m, name) for name in derived}
