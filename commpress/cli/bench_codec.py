"""Speed of codecs on this processor, and a check of their bytes."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from commpress.cli import harness
from commpress.cli.refusals import CODECS as CODECS
from commpress.codecs import Codec
from commpress.collectives.frame import HEADER
from commpress.kernels import reference
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import WIDTH, Piece, Pieces, cut

ROWS = 4  # ranks
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


def run(options: argparse.Namespace) -> int:
    names = options.codec.split(",") if options.codec else list(CODECS)
    for name in names:
        check_bytes(CODECS[name])
    print(f"bytes equal the reference for {', '.join(names)}\n")
    return harness.deliver(
        options, measure(names, options.numel, options.threads), judge=judge, draw=draw
    )


# ---------------------------------------------------------------- bytes


def check_bytes(codec: Codec, numel: int = 10_007) -> None:
    """Encode, residual and decode of the fast path equal the reference bit for bit, or an
    AssertionError says where."""
    draw = np.random.default_rng(0)
    x, residual = (draw.standard_normal(numel).astype(np.float32) for _ in range(2))
    pieces = cut([Piece(0, numel, codec.kind, codec.block)], ROWS)
    width, size = int(pieces.table[0, 2]), codec.row_bytes(int(pieces.table[0, 2]))
    rows, left = reference.encode_with_residual(x, residual, codec.kind, width, codec.block)
    message, flag = (
        torch.zeros(ROWS, pieces.row_bytes, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.uint8),
    )
    kept, out = torch.empty(numel), torch.empty(numel)
    cpu.encode(
        torch.from_numpy(x),
        message,
        flag,
        pieces,
        residual=torch.from_numpy(residual),
        new_residual=kept,
    )
    cpu.decode(message, out, pieces)
    decoded = [
        reference.decode_row(row, codec.kind, min(width, numel - r * width), width, codec.block)
        for r, row in enumerate(rows)
    ]
    np.testing.assert_array_equal(message[:, :size].numpy(), rows, f"bytes of {codec.spec}")
    np.testing.assert_array_equal(kept.numpy(), left, f"residual of {codec.spec}")
    np.testing.assert_array_equal(
        out.numpy(), np.concatenate(decoded), f"decoded floats of {codec.spec}"
    )


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
        message = torch.zeros(ROWS, HEADER + pieces.row_bytes, dtype=torch.uint8, device=device)[
            :, HEADER:
        ]
        reply, mean, owed = (
            message[:1].clone(),
            *(torch.zeros(pieces.shard, device=device) for _ in range(2)),
        )
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


def measure(names: list[str], numel: int, threads: list[int]) -> list[Figure]:
    """All figures, printed as they come."""
    buffers, figures, before = Buffers(numel), [], torch.get_num_threads()
    head = ["codec", "threads", *OPERATIONS, "encode of copy", "in place of copy"]
    widths = [max(len(name) for name in [*names, "codec"]), *map(len, head[1:])]
    print(harness.line(head, widths))
    try:
        for count in threads:
            torch.set_num_threads(count)
            copy = harness.alternately({"copy": buffers.copy})["copy"]
            print(
                harness.line(
                    ["copy", str(count), f"{4 * numel / copy / 1e9:.1f}", *[""] * 6], widths
                ),
                flush=True,
            )
            for name in names:
                new = [
                    timed(buffers, name, count, operation)
                    for operation in buffers.operations(CODECS[name]).items()
                ]
                rates = [f"{f.fp32_gb_per_second:.1f}" for f in new]
                shares = [f"{100 * f.of_copy:.0f}%" for f in new[:2]]
                print(harness.line([name, str(count), *rates, *shares], widths), flush=True)
                figures += new
    finally:
        torch.set_num_threads(before)
    return figures


def timed(
    buffers: Buffers,
    codec: str,
    threads: int,
    operation: tuple[str, tuple[Callable[[], object], int, float]],
) -> Figure:
    name, (call, numel, moved) = operation
    took = harness.alternately({"ours": call, "copy": buffers.copy})
    ours, rate = took["ours"], moved * numel / took["ours"]
    return Figure(
        codec,
        threads,
        name,
        ours,
        4 * numel / ours / 1e9,
        rate / 1e9,
        rate / (8 * buffers.numel / took["copy"]),
    )


# ---------------------------------------------------------------- on paper


def judge(figures: list[Figure]) -> list[tuple[str, bool]]:
    """Promises of the sign codec."""
    of = {(f.operation, f.threads): f for f in figures if f.codec == "sign"}
    one, two, mean, decode = (
        of["encode in place", 1],
        of["encode in place", 2],
        of["mean", 1],
        of["decode", 1],
    )
    return [
        (
            (
                f"sign encode in place moves {100 * one.of_copy:.0f} % of a copy's bytes per "
                "second, 65 % expected"
            ),
            one.of_copy >= 0.65,
        ),
        (
            f"two threads are {one.seconds / two.seconds:.2f}x one and reach "
            f"{100 * two.of_copy / one.of_copy:.0f} % of the share of a copy that one reaches, 80 "
            "% expected",
            two.of_copy >= 0.8 * one.of_copy,
        ),
        (
            (
                f"the mean of {ROWS} rows takes {mean.seconds / decode.seconds:.2f} of decoding "
                "them, at most 1 expected"
            ),
            mean.seconds <= decode.seconds,
        ),
    ]


def draw(path: str, figures: list[Figure]) -> None:
    from commpress.cli import charts

    threads = list(dict.fromkeys(f.threads for f in figures))
    names = list(dict.fromkeys(f.codec for f in figures))
    of = {(f.codec, f.threads, f.operation): f.fp32_gb_per_second for f in figures}
    title, size = "Codecs on this processor", (6.4, 1.2 + 0.55 * len(names))
    with charts.chart(path, title, panels=len(threads), size=size, share=True) as panels:
        for count, panel in zip(threads, panels, strict=True):
            series = {
                operation: [of[name, count, operation] for name in names]
                for operation in ("encode", "decode", "mean", "serve")
            }
            charts.bars(panel, names, series, "GB of float32 per second", show="{:.2g}")
            panel.set_title("one thread" if count == 1 else f"{count} threads")
        charts.same_scale(panels)
