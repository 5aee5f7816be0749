"""The optimizers' arithmetic on CPU: one pass over memory per call, without loops over tensors in
Python.

Note: cost of a pass. AdamW reads x, g, m, v and writes x, m, v: 28 bytes per parameter. A cache
line that is only written is fetched, too, 8 bytes instead of 4, unless it is stored past the
caches, as calls with many elements do (``put``): ``scaled`` then moves 8 bytes, ``apply_mean`` 20,
``accumulate`` 20, or 16 without u, ``local_step`` 36, or 32 at the beginning of a window, and
``square_sum`` 4. Each pass computes the root of the variance again: storing the divisor would take
four more bytes per parameter, and it could be out of date.

The loops are in ``sources.adam_loops``. Functions have the names and results of ``kernels.adam``;
results do not depend on the number of threads.
"""

from typing import Any

import numpy as np
import torch

from commpress.kernels.adam import Segments
from commpress.kernels.adam import apply_step as apply_step
from commpress.kernels.adam import update_variance as update_variance
from commpress.kernels.cpu.calls import Kernel, Kernels, split

loops = Kernels("adam_loops")

PAST = 1 << 22  # elements of a call from which caches would keep none of them


def _run(kernel: Kernel, segments: Segments, *args: Any) -> list[int]:
    return split(
        kernel, segments.numel, segments.numel, segments.table, *args, segments.numel >= PAST
    )


def _array(buffer: torch.Tensor) -> np.ndarray | None:
    return buffer.numpy() if buffer.numel() else None


def _none(segments: Segments) -> np.ndarray:
    return np.zeros(len(segments.table), np.int64)


def scaled(segments, out, *, gain):
    _run(loops.scaled, segments, out.numpy(), np.float32(gain))


def apply_mean(segments, p, v, m, a, divisors, *, step, decay, momentum_scale, most):
    buffers, scalars = (
        (b.numpy() for b in (p, v, m)),
        map(np.float32, (step, decay, momentum_scale, most)),
    )
    _run(loops.apply_mean, segments, divisors, *buffers, _array(a), *scalars)


def accumulate(segments, m, u, v, out, divisors, *, beta, gain, lr=1.0, decay=1.0):
    counts, scalars = _none(segments), map(np.float32, (lr * beta, lr * (1 - beta), gain, decay))
    _run(
        loops.accumulate,
        segments,
        divisors,
        m.numpy(),
        _array(u),
        v.numpy(),
        out.numpy(),
        counts,
        *scalars,
    )
    return torch.from_numpy(counts)


def local_step(segments, m, u, a, v, divisors, *, beta, gain, lr, decay, anchor_decay, begins):
    counts, buffers = _none(segments), [b.numpy() for b in (m, u, a, v)]
    scalars = map(np.float32, (beta, 1 - beta, gain, lr, decay, anchor_decay))
    return not any(
        _run(loops.local_step, segments, divisors, *buffers, counts, *scalars, begins)
    ), torch.from_numpy(counts)


def square_sum(segments):
    totals = np.empty(len(segments.table))
    split(loops.square_sums, len(totals), segments.numel, segments.table, totals)
    return float(totals.sum())
