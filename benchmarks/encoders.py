"""reasons for Numba: one encoder written with the tools at hand, timed in one run

The task is the sign encoder with residual in place, one mean |c| per 2048 elements: c = x + e, bits
of c >= 0, the scales, e := c - scale * sign(c). Every candidate fills buffers made beforehand as
far as its tool allows; all must agree.

  python benchmarks encoders
  python benchmarks encoders --numel 1048576 --threads 1
"""

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from commpress.cli import harness, terminal
from commpress.cli.kernel_check import ROWS
from commpress.cli.option_groups import option
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.pieces import Piece, cut
from commpress.kernels.reference import SIGN_L1
from shared_options import add_output
from turns import alternately

BLOCK = 2048
# elements that NumPy handles at a time: 256 KiB, in the second-level cache
SLICE = 1 << 16
Rows = list[dict[str, Any]]
# x, residual → bits, scales
Task = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def torch_operations(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    c = (x + residual).view(-1, BLOCK)
    scales = c.abs().mean(1, keepdim=True)
    positive = c >= 0
    eight = positive.view(-1, 8).to(torch.uint8)
    bits = eight[:, 0] << 7
    for i in range(1, 8):  # compiled, this is 50 times faster than a product with weights and a sum
        bits = bits | eight[:, i] << (7 - i)
    residual.copy_((c - torch.where(positive, scales, -scales)).view(-1))
    return bits, scales.view(-1)


def numpy_blocks(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits, scales = np.empty(len(x) // 8, np.uint8), np.empty(len(x) // BLOCK, np.float32)
    work, signs = np.empty(SLICE, np.float32), np.empty(SLICE, np.float32)
    new, kept = x.numpy(), residual.numpy()
    for at in range(0, len(new), SLICE):
        c = kept[at : at + SLICE]
        c += new[at : at + SLICE]
        n = len(c)
        np.abs(c, out=work[:n])
        scale = work[:n].reshape(-1, BLOCK).mean(1)
        scales[at // BLOCK : at // BLOCK + len(scale)] = scale
        bits[at // 8 : (at + n) // 8] = np.packbits(c >= 0)
        np.copysign(scale[:, None], c.reshape(-1, BLOCK), out=signs[:n].reshape(-1, BLOCK))
        c -= signs[:n]
    return torch.from_numpy(bits), torch.from_numpy(scales)


def ours(numel: int) -> Task:
    pieces = cut([Piece(0, numel, SIGN_L1, BLOCK)], ROWS)
    message, flag = (
        torch.zeros(ROWS, pieces.row_bytes, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.uint8),
    )
    scales = 4 * (numel // ROWS // BLOCK)

    def encode(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cpu.encode(x, message, flag, pieces, residual=residual, new_residual=residual)
        return message[:, scales:], message[:, :scales]

    return encode


def candidates(numel: int) -> dict[str, Task]:
    return {
        "torch operations": torch_operations,
        "NumPy, in slices": numpy_blocks,
        "torch.compile": torch.compile(torch_operations, dynamic=False),
        "Numba (commpress)": ours(numel),
    }


def compare(numel: int, threads: list[int]) -> Rows:
    """The rows of the table, printed as they are measured."""
    numel = max(numel // (ROWS * SLICE), 1) * ROWS * SLICE
    x, residual, spare = torch.randn(numel), torch.randn(numel), torch.zeros(numel)
    table = terminal.Table(_cells)
    rows, before = [], torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            for name, task in candidates(numel).items():
                row = {"candidate": name, "threads": count, **enter(task, x, residual, spare)}
                rows.append(row)
                table(row)
    finally:
        torch.set_num_threads(before)
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--numel N", int, 1 << 25, "floats in the buffer (default 33554432)")
    option(parser, "--threads A,B", None, "1,2", "numbers of threads")
    add_output(parser, check="ours takes at most 1.05 of the fastest candidate's time")


def run(options: argparse.Namespace) -> int:
    rows = compare(options.numel, [int(t) for t in options.threads.split(",")])
    return harness.deliver(options, rows, judge=judge)


def judge(rows: Rows) -> list[tuple[str, bool]]:
    one = {
        row["candidate"]: row["seconds"]
        for row in rows
        if row["threads"] == rows[0]["threads"] and "seconds" in row
    }
    ours, best = one["Numba (commpress)"], min(one.values())
    return [
        (
            f"ours takes {ours / best:.2f} of the fastest candidate's time, at most 1.05 expected",
            ours <= 1.05 * best,
        )
    ]


def enter(
    task: Task, x: torch.Tensor, residual: torch.Tensor, spare: torch.Tensor
) -> dict[str, Any]:
    spare.copy_(residual)
    start = perf_counter()
    try:
        bits, scales = task(x, spare)
    # torch.compile without a C++ compiler, or another that this machine cannot run
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    first = perf_counter() - start
    agree(x + residual, bits, scales, spare)
    took = alternately({"task": lambda: task(x, residual), "copy": lambda: spare.copy_(x)})
    moved = (12 + 1 / 8) * len(x) / took["task"]
    return {
        "numel": len(x),
        "first_call": first,
        "seconds": took["task"],
        "of_copy": moved / (8 * len(x) / took["copy"]),
    }


def agree(c: torch.Tensor, bits: torch.Tensor, scales: torch.Tensor, left: torch.Tensor) -> None:
    """Same bits as NumPy's, scales and residuals but for the order of sums."""
    if scales.dtype == torch.uint8:
        scales = torch.from_numpy(scales.numpy().reshape(-1).copy().view(np.float32))
    want = c.view(-1, BLOCK).abs().mean(1)
    np.testing.assert_array_equal(bits.numpy().reshape(-1), np.packbits(c.numpy() >= 0))
    torch.testing.assert_close(scales, want, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        left,
        (c.view(-1, BLOCK) - torch.where(c.view(-1, BLOCK) >= 0, 1, -1) * want[:, None]).view(-1),
    )


def _cells(row: dict[str, Any]) -> dict[str, str]:
    failed = row.get("failed")
    return {
        "candidate": f"{row['candidate']:<18}",
        "threads": str(row["threads"]),
        "first call s": "" if failed else f"{row['first_call']:.1f}",
        "ms": "" if failed else f"{1e3 * row['seconds']:.1f}",
        "GB/s float32": "" if failed else f"{row['numel'] * 4 / row['seconds'] / 1e9:.2f}",
        "of copy": f"failed: {failed}" if failed else f"{100 * row['of_copy']:.0f}%",
    }
