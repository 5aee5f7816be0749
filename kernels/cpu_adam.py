"""The optimizers' arithmetic on CPU: one pass over memory per call, no loop over tensors in Python.

Note: what a pass costs. AdamW reads x, g, m, v and writes x, m, v: 28 bytes per parameter. A line that is written without
having been read is fetched all the same, 8 bytes instead of 4: ``blend`` moves 16, ``descend`` 16, ``accumulate`` 20,
``wander`` 36 (40 where a window begins), ``gather`` 24. Stores that go round the cache brought nothing on the CPU tried.

Numba walks a table of addresses, because gradients live wherever autograd put them. Every function is that of ``adam``
with the same name; results do not depend on the number of threads.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic

from commpress.kernels.adam import Segments
from commpress.kernels.cpu import split
from commpress.kernels.cpu_blocks import jit

_NONE = np.empty(0, np.float32)
CHUNK = 1024  # elements that stay in the first-level cache from one loop to the next


@intrinsic
def _pointer(context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), generate


@jit
def _part(table, s, column, done, start, stop):
    """The elements of x (column 0) or g (column 1) of segment s that lie between ``start`` and ``stop``."""
    line = table[s]
    low = max(start - done, 0)
    high = max(min(stop - done, line[3]), low)
    return carray(_pointer(line[column] + 4 * low), (high - low,)), line[2] + low


@jit
def _blend(table, m, out, beta, alpha, start, stop):
    done = 0
    for s in range(table.shape[0]):
        g, first = _part(table, s, 1, done, start, stop)
        n = g.size
        m_, out_ = m[first : first + n], out[first : first + n]
        if table[s, 1] == 0:
            for i in range(n):
                out_[i] = beta * m_[i]
        else:
            for i in range(n):
                out_[i] = beta * m_[i] + alpha * g[i]
        done += table[s, 3]


@jit
def _descend(table, m, r, step, keep, start, stop):
    done = 0
    for s in range(table.shape[0]):
        x, first = _part(table, s, 0, done, start, stop)
        n = x.size
        m_, r_ = m[first : first + n], r[first : first + n]
        for i in range(n):
            x[i] = keep * x[i] - step * (m_[i] * r_[i])
        done += table[s, 3]


@jit
def _push(g, absent, m, out, beta, alpha):
    """out := β·m + α·g."""
    if absent:
        for i in range(m.size):
            out[i] = beta * m[i]
    else:
        for i in range(m.size):
            out[i] = beta * m[i] + alpha * g[i]


@jit
def _accumulate(table, m, u, out, beta, alpha, lr, keep, start, stop):
    done = 0
    for s in range(table.shape[0]):
        g, first = _part(table, s, 1, done, start, stop)
        for at in range(0, g.size, CHUNK):
            g_ = g[at : at + CHUNK]
            low, high = first + at, first + at + g_.size
            out_ = out[low:high]
            _push(g_, table[s, 1] == 0, m[low:high], out_, beta, alpha)
            if u.size:
                u_ = u[low:high]
                for i in range(u_.size):
                    out_[i] = lr * out_[i] + keep * u_[i]
            else:
                for i in range(out_.size):
                    out_[i] = lr * out_[i]
        done += table[s, 3]


@jit
def _wander(table, m, u, a, r, beta, alpha, lr, keep, kept, begins, start, stop):
    done = 0
    for s in range(table.shape[0]):
        x, first = _part(table, s, 0, done, start, stop)
        g, _ = _part(table, s, 1, done, start, stop)
        for at in range(0, x.size, CHUNK):
            x_, g_ = x[at : at + CHUNK], g[at : at + CHUNK]
            low, high = first + at, first + at + x_.size
            m_, u_, a_, r_ = m[low:high], u[low:high], a[low:high], r[low:high]
            _push(g_, table[s, 1] == 0, m_, m_, beta, alpha)
            if begins:
                for i in range(x_.size):
                    a_[i] = x_[i]
                    u_[i] = lr * m_[i]
                    x_[i] = kept * x_[i] - u_[i] * r_[i]
            else:
                for i in range(x_.size):
                    u_[i] = keep * u_[i] + lr * m_[i]
                    x_[i] = kept * a_[i] - u_[i] * r_[i]
        done += table[s, 3]


@jit
def _gather(table, mean, a, r, kept, share, start, stop):
    done = 0
    for s in range(table.shape[0]):
        x, first = _part(table, s, 0, done, start, stop)
        n = x.size
        mean_, r_ = mean[first : first + n], r[first : first + n]
        if a.size:
            a_ = a[first : first + n]
            for i in range(n):
                x[i] = kept * a_[i] - mean_[i] * r_[i]
                mean_[i] = share * mean_[i]
        else:
            for i in range(n):
                x[i] = kept * x[i] - mean_[i] * r_[i]
                mean_[i] = share * mean_[i]
        done += table[s, 3]


@jit
def _square_sum(table, s):
    """Of one segment: float64 over blocks, eight lanes within a block."""
    total = 0.0
    if table[s, 1] == 0:
        return total
    g, _ = _part(table, s, 1, 0, 0, table[s, 3])
    lanes = np.empty(8, np.float64)
    lanes[:] = 0.0
    for i in range(g.size // 8):
        for k in range(8):
            value = np.float64(g[8 * i + k])
            lanes[k] += value * value
    for i in range(g.size // 8 * 8, g.size):
        value = np.float64(g[i])
        lanes[0] += value * value
    for k in range(8):
        total += lanes[k]
    return total


@jit
def _square_sums(table, start, stop):
    total = 0.0
    for s in range(start, stop):
        total += _square_sum(table, s)
    return total


def _run(kernel: Callable[..., Any], segments: Segments, *args: Any) -> None:
    split(kernel, segments.numel, segments.numel, segments.table, *args)


def _array(buffer: torch.Tensor) -> np.ndarray:
    return buffer.numpy() if buffer.numel() else _NONE


def blend(segments, m, out, *, beta, gain):
    _run(_blend, segments, _array(m), _array(out), np.float32(beta), np.float32((1 - beta) * gain))


def descend(segments, m, r, *, step, keep):
    _run(_descend, segments, _array(m), _array(r), np.float32(step), np.float32(keep))


def accumulate(segments, m, u, out, *, beta, gain, lr, keep):
    scalars = map(np.float32, (beta, (1 - beta) * gain, lr, keep))
    _run(_accumulate, segments, _array(m), _array(u), _array(out), *scalars)


def wander(segments, m, u, a, r, *, beta, gain, lr, keep, kept, begins):
    scalars = map(np.float32, (beta, (1 - beta) * gain, lr, keep, kept))
    _run(_wander, segments, _array(m), _array(u), _array(a), _array(r), *scalars, begins)


def gather(segments, mean, a, r, *, kept, share):
    scalars = map(np.float32, (kept, share))
    _run(_gather, segments, _array(mean), _array(a), _array(r), *scalars)


def square_sum(segments):
    return float(_square_sums(segments.table, 0, len(segments.table)))
