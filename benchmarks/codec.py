"""speed of codecs on this processor, and a check of their bytes

Every codec at every number of threads:
  encode     x + residual to bytes and a new residual: into a second buffer as the DDP hook
             does, and in place
  decode     bytes to float32
  mean       the mean of 4 ranks' rows
  serve      the same mean, plus residual, encoded again: what an owner does with the rows it
             received
in GB/s of float32. A copy of the same floats is timed between the repetitions; "of copy"
compares bytes moved per second: encode moves 12 + bits/8 bytes per element, a copy 8.

  python benchmarks codec                          all codecs on 1 and 2 threads, about a minute
  python benchmarks codec --codec sign --check       exit status 1 if the sign codec misses a bar
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from commpress.cli import harness, terminal
from commpress.cli.kernel_check import ROWS, check_bytes
from commpress.cli.option_groups import counts, declare, option, some_of
from commpress.codecs import Codec, SignCodec
from commpress.codecs.family import NAMES
from commpress.collectives.frame import HEADER
from commpress.errors import InvalidArgument
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import WIDTH, Piece, Pieces, cut
from shared_options import add_output
from turns import alternately

CODECS: dict[str, Codec] = {"sign": SignCodec(), "sign/row": SignCodec(block=0)} | NAMES
OPERATIONS = ("encode", "encode in place", "decode", "mean", "serve")


@dataclass
class Figure:
    codec: str
    threads: int
    operation: str
    seconds: float
    fp32_gb_per_second: float
    moved_gb_per_second: float
    of_copy: float  # bytes moved per second relative to a copy timed in between


Figures = list[Figure]


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--codec A,B", some_of(CODECS), ",".join(CODECS), "default all")
    declare(parser, "--numel N | 64.. | 33554432 | floats in the buffer")
    option(parser, "--threads A,B", counts, [1, 2], "numbers of threads (default 1,2)")
    add_output(parser, check="the sign codec holds its bars")


def run(options: argparse.Namespace) -> int:
    names = options.codec.split(",")
    if options.check and not ("sign" in names and {1, 2} <= set(options.threads)):
        raise InvalidArgument("--check needs the codec sign on 1 and 2 threads")
    for name in names:
        check_bytes(CODECS[name])
    print(f"bytes equal the reference for {', '.join(names)}\n")
    figures = measured(names, options.numel, options.threads, terminal.Table(cells))
    return harness.deliver(options, figures, judge=judge)


# ---------------------------------------------------------------- time


class Buffers:
    """Buffers that are allocated and touched once: fresh pages cost ten times a copy."""

    def __init__(self, numel: int, device: torch.device | str = "cpu") -> None:
        self.numel, self.device = numel, torch.device(device)
        self.x, self.residual = (torch.randn(numel, device=device) for _ in range(2))
        self.left, self.out = (torch.zeros(numel, device=device) for _ in range(2))
        self.flag = torch.zeros(1, dtype=torch.uint8, device=device)

    def copy(self) -> None:
        self.out.copy_(self.x)

    def operations(self, codec: Codec) -> dict[str, tuple[Callable[[], object], int, float]]:
        """Name → (call, elements of float32 it handles, bytes moved per element)."""
        pieces = cut([Piece(0, self.numel, codec.kind, codec.block)], ROWS)
        kernels, device = arithmetic(self.device, pieces), self.device
        whole = torch.zeros(ROWS, HEADER + pieces.row_bytes, dtype=torch.uint8, device=device)
        message = whole[:, HEADER:]
        reply, mean, owed = message[:1].clone(), *torch.zeros(2, pieces.shard, device=device)
        lazy, lazy_row = _lazy(pieces, ROWS, device), _lazy(pieces, 1, device)
        code = message.shape[1] / int(pieces.table[0, WIDTH])  # headers and scales included
        x, old, new, flag = self.x, self.residual, self.left, self.flag

        def encode(into: torch.Tensor) -> Callable[[], object]:
            return lambda: kernels.encode(
                x, message, flag, pieces, residual=old, new_residual=into, **lazy
            )

        def serve() -> None:
            kernels.serve(
                message, reply, flag, pieces, 0, residual=owed, new_residual=owed, **lazy_row
            )

        return {
            "encode": (encode(new), self.numel, 12 + code),
            "encode in place": (encode(old), self.numel, 12 + code),
            "decode": (lambda: kernels.decode(message, self.out, pieces), self.numel, 4 + code),
            "mean": (
                lambda: kernels.decode_mean(message, mean, pieces, 0),
                pieces.shard,
                4 + ROWS * code,
            ),
            "serve": (serve, pieces.shard, 8 + (ROWS + 1) * code),
        }


def _lazy(pieces: Pieces, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    names = ("residual_scale", "new_scale") if pieces.row_scales else ()
    return {name: torch.zeros(rows, device=device) for name in names}


def measured(
    names: list[str], numel: int, threads: list[int], report: Callable[[Figures], None]
) -> list[Figure]:
    """All figures, told as they come."""
    buffers, found, before = Buffers(numel), list[Figure](), torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            for name in names:
                operations = buffers.operations(CODECS[name]).items()
                new = [timed(buffers, name, count, *operation) for operation in operations]
                report(new)
                found += new
    finally:
        torch.set_num_threads(before)
    return found


def timed(
    buffers: Buffers,
    codec: str,
    threads: int,
    name: str,
    operation: tuple[Callable[[], object], int, float],
) -> Figure:
    call, numel, moved = operation
    took = alternately({"ours": call, "copy": buffers.copy})
    rate, copied = moved * numel / took["ours"], 8 * buffers.numel / took["copy"]
    gigabytes = 4e-9 * numel / took["ours"]
    return Figure(codec, threads, name, took["ours"], gigabytes, rate / 1e9, rate / copied)


# ---------------------------------------------------------------- on paper


def cells(of: Figures) -> dict[str, str]:
    """A line for a codec and a number of threads."""
    copied = of[0].moved_gb_per_second / of[0].of_copy / 2  # of float32, as all figures here
    return {
        "codec": of[0].codec,
        "threads": str(of[0].threads),
        **{figure.operation: f"{figure.fp32_gb_per_second:.1f}" for figure in of},
        "copy": f"{copied:.1f}",
        "encode of copy": f"{100 * of[0].of_copy:.0f}%",
        "in place of copy": f"{100 * of[1].of_copy:.0f}%",
    }


def judge(figures: Figures) -> list[tuple[str, bool]]:
    """Promises of the sign codec."""
    of = {(f.operation, f.threads): f for f in figures if f.codec == "sign"}
    one, two = (of["encode in place", threads] for threads in (1, 2))
    share, mean = two.of_copy / one.of_copy, of["mean", 1].seconds / of["decode", 1].seconds
    said = f"{100 * one.of_copy:.0f} % of a copy's bytes per second, 65 % expected"
    threads = f"two threads are {one.seconds / two.seconds:.2f}x one and reach {100 * share:.0f} %"
    return [
        (f"sign encode in place moves {said}", one.of_copy >= 0.65),
        (f"{threads} of the share of a copy that one reaches, 80 % expected", share >= 0.8),
        (
            f"the mean of {ROWS} rows takes {mean:.2f} of decoding them, at most 1 expected",
            mean <= 1,
        ),
    ]
