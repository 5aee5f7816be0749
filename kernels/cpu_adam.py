"""The optimizers' arithmetic on CPU: one pass over memory per call, no loop over tensors in Python.

Note: what a pass costs. AdamW reads x, g, m, v and writes x, m, v: 28 bytes per parameter. A line that is written without
having been read is fetched all the same, 8 bytes instead of 4, unless it is stored past the caches, which calls for many
elements do (``_put``): ``blend`` then moves 12, ``aim`` 16, ``descend`` 12, ``accumulate`` 20, ``wander`` 32, ``gather`` 20,
``square_sum`` 4.

Numba walks a table of addresses, because gradients live wherever autograd put them. Every function is that of ``adam``
with the same name; results do not depend on the number of threads.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from commpress.kernels.adam import Segments
from commpress.kernels.cpu_arrays import SHORT, bare, floats, short
from commpress.kernels.cpu_signs import stream_64
from commpress.kernels.cpu_threads import split

_NONE = np.empty(0, np.float32)
_LINE = 16  # floats of a cache line
_PAST = 1 << 22  # a call that handles so many elements leaves none of them in a cache


@bare
def part(line, done, start, stop):
    """The elements of a segment between ``start`` and ``stop``, cut where cache lines begin: the first one and how many."""
    low = min(max(start - done, 0) // _LINE * _LINE, line[3])
    high = line[3] if stop - done >= line[3] else max((stop - done) // _LINE * _LINE, low)
    return low, high - low


@bare
def gradient(line, m, alpha):
    """Address of g, and ``alpha``. No gradient is m times zero: a branch would keep loops from being vectorised."""
    return (m.ctypes.data + 4 * line[2], np.float32(0)) if line[1] == 0 else (line[1], alpha)


@bare
def _begins_line(array, first):
    return (array.ctypes.data + 4 * first) % 64 == 0


@bare
def _put(work, n, out, at, past):
    """out[at : at + n] := work, ``past`` the caches if so asked; then it begins with a line."""
    wide = n // 64 * 64 if past else 0
    for i in range(0, wide, 64):
        stream_64(work, i, out, at + i)
    rest = out[at + wide : at + n]
    for i in range(rest.size):
        rest[i] = work[wide + i]


@bare
def _blend(table, m, out, beta, alpha, past, start, stop):
    done, work = 0, short(np.float32)
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        address, share = gradient(table[s], m, alpha)
        g, first = floats(address + 4 * skip, n), table[s, 2] + skip
        stream = past and _begins_line(out, first)
        for at in range(0, g.size, SHORT):
            g_ = g[at : at + SHORT]
            low, high = first + at, first + at + g_.size
            m_ = m[low:high]
            for i in range(m_.size):
                work[i] = beta * m_[i] + share * g_[i]
            _put(work, g_.size, out, low, stream)
        done += table[s, 3]


@bare
def _aim(table, p, r, out, beta, alpha, past, start, stop):
    done, work = 0, short(np.float32)
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        address, share = gradient(table[s], p, alpha)
        g, first = floats(address + 4 * skip, n), table[s, 2] + skip
        stream = past and _begins_line(out, first)
        for at in range(0, g.size, SHORT):
            g_ = g[at : at + SHORT]
            low, high = first + at, first + at + g_.size
            p_, r_ = p[low:high], r[low:high]
            for i in range(p_.size):
                work[i] = beta * p_[i] + (share * g_[i]) * r_[i]
            _put(work, g_.size, out, low, stream)
        done += table[s, 3]


@bare
def _descend(table, p, step, keep, start, stop):
    done = 0
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        x, first = floats(table[s, 0] + 4 * skip, n), table[s, 2] + skip
        p_ = p[first : first + x.size]
        for i in range(x.size):
            x[i] = keep * x[i] - step * p_[i]
        done += table[s, 3]


@bare
def _accumulate(table, m, u, r, out, beta, alpha, lr, keep, past, start, stop):
    done, work = 0, short(np.float32)
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        address, share = gradient(table[s], m, alpha)
        g, first = floats(address + 4 * skip, n), table[s, 2] + skip
        stream = past and _begins_line(out, first)
        for at in range(0, g.size, SHORT):
            g_ = g[at : at + SHORT]
            low, high = first + at, first + at + g_.size
            m_ = m[low:high]
            for i in range(m_.size):
                work[i] = beta * m_[i] + share * g_[i]
            if u.size:
                u_ = u[low:high]
                for i in range(u_.size):
                    work[i] = lr * work[i] + keep * u_[i]
            else:
                for i in range(g_.size):
                    work[i] = lr * work[i]
            if r.size:
                r_ = r[low:high]
                for i in range(r_.size):
                    work[i] = work[i] * r_[i]
            _put(work, g_.size, out, low, stream)
        done += table[s, 3]


@bare
def _go_on(m, g, beta, share):
    """m := β·m + share·g where g is finite; returns how often it is not."""
    bad = 0
    for i in range(g.size):
        bad += not np.abs(g[i]) < np.inf
    if bad == 0:
        for i in range(g.size):
            m[i] = beta * m[i] + share * g[i]
        return 0
    for i in range(g.size):
        if np.abs(g[i]) < np.inf:
            m[i] = beta * m[i] + share * g[i]
    return bad


@bare
def _set_out(table, m, u, a, r, beta, alpha, lr, keep, kept, past, start, stop):
    """``_wander`` where a window begins."""
    done, bad, work = 0, 0, short(np.float32)
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        x, first = floats(table[s, 0] + 4 * skip, n), table[s, 2] + skip
        address, share = gradient(table[s], m, alpha)
        g = floats(address + 4 * skip, n)
        stream = past and _begins_line(u, first) and _begins_line(a, first)
        for at in range(0, x.size, SHORT):
            x_, g_ = x[at : at + SHORT], g[at : at + SHORT]
            low, high = first + at, first + at + x_.size
            m_, r_ = m[low:high], r[low:high]
            bad += _go_on(m_, g_, beta, share)
            _put(x_, x_.size, a, low, stream)
            for i in range(m_.size):
                work[i] = lr * m_[i]
            _put(work, x_.size, u, low, stream)
            for i in range(x_.size):
                x_[i] = kept * x_[i] - work[i] * r_[i]
        done += table[s, 3]
    return bad


@bare
def _wander(table, m, u, a, r, beta, alpha, lr, keep, kept, past, start, stop):
    done, bad, work = 0, 0, short(np.float32)
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        x, first = floats(table[s, 0] + 4 * skip, n), table[s, 2] + skip
        address, share = gradient(table[s], m, alpha)
        g = floats(address + 4 * skip, n)
        stream = past and _begins_line(x, 0)
        for at in range(0, x.size, SHORT):
            g_ = g[at : at + SHORT]
            low, high = first + at, first + at + g_.size
            m_, u_, a_, r_ = m[low:high], u[low:high], a[low:high], r[low:high]
            bad += _go_on(m_, g_, beta, share)
            for i in range(u_.size):
                u_[i] = keep * u_[i] + lr * m_[i]
            for i in range(a_.size):
                work[i] = kept * a_[i] - u_[i] * r_[i]
            _put(work, a_.size, x, at, stream)
        done += table[s, 3]
    return bad


@bare
def _gather(table, mean, a, r, kept, share, past, start, stop):
    done, work = 0, short(np.float32)
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        x, first = floats(table[s, 0] + 4 * skip, n), table[s, 2] + skip
        anchor = a[first : first + x.size] if a.size else x
        stream = past and _begins_line(x, 0) and a.size > 0
        for at in range(0, x.size, SHORT):
            a_ = anchor[at : at + SHORT]
            low, high = first + at, first + at + a_.size
            mean_, r_ = mean[low:high], r[low:high]
            for i in range(a_.size):
                work[i] = kept * a_[i] - mean_[i]
            for i in range(a_.size):
                mean_[i] = share * mean_[i] / r_[i]
            _put(work, a_.size, x, at, stream)
        done += table[s, 3]


@bare
def _square_sums(table, totals, start, stop):
    lanes = short(np.float64)
    for s in range(start, stop):
        lanes[:] = 0.0
        if table[s, 1] != 0:
            g = floats(table[s, 1], table[s, 3])
            for at in range(0, g.size, SHORT):
                g_ = g[at : at + SHORT]
                for i in range(g_.size):
                    lanes[i] += np.float64(g_[i]) * np.float64(g_[i])
        totals[s] = lanes.sum()


def _run(kernel: Callable[..., Any], segments: Segments, *args: Any) -> None:
    split(kernel, segments.numel, segments.numel, segments.table, *args)


def _array(buffer: torch.Tensor) -> np.ndarray:
    return buffer.numpy() if buffer.numel() else _NONE


def blend(segments, m, out, *, beta, gain):
    scalars = map(np.float32, (beta, (1 - beta) * gain))
    _run(_blend, segments, _array(m), _array(out), *scalars, segments.numel >= _PAST)


def aim(segments, p, r, out, *, beta, gain):
    scalars = map(np.float32, (beta, (1 - beta) * gain))
    _run(_aim, segments, _array(p), _array(r), _array(out), *scalars, segments.numel >= _PAST)


def descend(segments, p, *, step, keep):
    _run(_descend, segments, _array(p), np.float32(step), np.float32(keep))


def accumulate(segments, m, u, r, out, *, beta, gain, lr, keep):
    scalars = map(np.float32, (beta, (1 - beta) * gain, lr, keep))
    _run(_accumulate, segments, *map(_array, (m, u, r, out)), *scalars, segments.numel >= _PAST)


def wander(segments, m, u, a, r, *, beta, gain, lr, keep, kept, begins):
    scalars = map(np.float32, (beta, (1 - beta) * gain, lr, keep, kept))
    buffers, past = map(_array, (m, u, a, r)), segments.numel >= _PAST
    return not any(
        split(_set_out if begins else _wander, segments.numel, segments.numel, segments.table, *buffers, *scalars, past)
    )


def gather(segments, mean, a, r, *, kept, share):
    scalars = map(np.float32, (kept, share))
    _run(_gather, segments, _array(mean), _array(a), _array(r), *scalars, segments.numel >= _PAST)


def square_sum(segments):
    totals = np.empty(len(segments.table))
    split(_square_sums, len(totals), segments.numel, segments.table, totals)
    return float(totals.sum())
