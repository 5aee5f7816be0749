"""The optimizers' arithmetic on CUDA: one launch per call for any number of tensors.

Functions have the names and results of ``kernels.adam``; the kernels are in ``adam.cu``. The table
of addresses is uploaded once for each set of gradients, through pinned memory: the host waits only
for numbers that it reads.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from commpress.kernels.adam import Segments
from commpress.kernels.cuda.modules import ADAM
from commpress.kernels.cuda.row_codec import THREADS, TILE, Launch, address, execute
from commpress.work import stream_of

TABLES = 64  # tables kept on the device, for the latest gradients and divisors


def _upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a copy on the device, which is kept until its stream has finished with it."""
    stream = stream_of(device)
    place = 0 if stream is None else stream.cuda_stream
    return _uploaded(values.tobytes(), values.dtype.str, device, place)


@lru_cache(TABLES)
def _uploaded(content: bytes, dtype: str, device: torch.device, stream: int) -> torch.Tensor:
    host = torch.from_numpy(np.frombuffer(content, dtype).copy())
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _run(
    kernel: str,
    segments: Segments,
    buffer: torch.Tensor,
    *args: Any,
    divisors: np.ndarray | None = None,
) -> None:
    """Launch a kernel. ``args``: tensors, empty for none, and numbers of the exact C width."""
    table, device = segments.table, buffer.device
    tiles = -(-table[:, 3] // TILE)
    if not tiles.sum():
        return
    columns = np.concatenate([np.cumsum(tiles) - tiles, table.T.reshape(-1)])
    lines = [] if divisors is None else [_upload(np.ascontiguousarray(divisors), device)]
    on_device = _upload(columns, device)
    scalars = tuple(
        address(arg if arg.numel() else None) if isinstance(arg, torch.Tensor) else arg
        for arg in (*lines, *args)
    )
    head = address(on_device), np.int32(len(table))
    execute(Launch(kernel, ADAM, int(tiles.sum()), THREADS, (*head, *scalars), device))


def _none(segments: Segments, device: torch.device) -> torch.Tensor:
    return torch.zeros(len(segments.places), dtype=torch.int64, device=device)


def scaled(segments: Segments, out: torch.Tensor, *, gain: float) -> None:
    _run("scaled", segments, out, out, np.float32(gain))


def apply_mean(
    segments: Segments,
    p: torch.Tensor,
    v: torch.Tensor,
    m: torch.Tensor,
    a: torch.Tensor,
    divisors: np.ndarray,
    *,
    step: float,
    decay: float,
    momentum_scale: float,
    most: float,
) -> None:
    scalars = map(np.float32, (step, decay, momentum_scale, most))
    _run("apply_mean", segments, m, p, v, m, a, *scalars, divisors=divisors)


def accumulate(
    segments: Segments,
    m: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    divisors: np.ndarray,
    *,
    beta: float,
    gain: float,
    lr: float = 1.0,
    decay: float = 1.0,
) -> torch.Tensor:
    counts, scalars = (
        _none(segments, m.device),
        map(np.float32, (lr * beta, lr * (1 - beta), gain, decay)),
    )
    _run("accumulate", segments, m, m, u, v, out, counts, *scalars, divisors=divisors)
    return counts


def local_step(
    segments: Segments,
    m: torch.Tensor,
    u: torch.Tensor,
    a: torch.Tensor,
    v: torch.Tensor,
    divisors: np.ndarray,
    *,
    beta: float,
    gain: float,
    lr: float,
    decay: float,
    anchor_decay: float,
    begins: bool,
) -> tuple[bool, torch.Tensor]:
    counts = _none(segments, m.device)
    bad = torch.zeros(1, dtype=torch.int32, device=m.device)
    scalars = map(np.float32, (beta, 1 - beta, gain, lr, decay, anchor_decay))
    flag = np.int32(begins)
    _run("local_step", segments, m, m, u, a, v, counts, bad, *scalars, flag, divisors=divisors)
    return not bool(bad), counts


def update_variance(
    segments: Segments, m: torch.Tensor, v: torch.Tensor, *, beta: float, weight: float, unit: float
) -> None:
    scalars = map(np.float32, (beta, 1 - beta, weight, 1 - weight, unit))
    _run("update_variance", segments, m, m, v, *scalars)


def apply_step(
    segments: Segments,
    m: torch.Tensor,
    v: torch.Tensor,
    divisors: np.ndarray,
    *,
    step: float,
    decay: float,
) -> None:
    scalars = map(np.float32, (step, decay))
    _run("apply_step", segments, m, m, v, *scalars, divisors=divisors)


def square_sum(segments: Segments) -> float:
    tensors = [g for g in segments.g if g is not None]
    if not tensors:
        return 0.0
    tiles = sum(-(-numel // TILE) for _, numel in segments.places)
    sums = torch.zeros(tiles, dtype=torch.float64, device=tensors[0].device)
    _run("square_sums", segments, sums, sums)
    return float(sums.sum())
