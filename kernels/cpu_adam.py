"""The optimizers' arithmetic on CPU: one pass over memory per call, no loop over tensors in Python.

Note: what a pass costs. AdamW reads x, g, m, v and writes x, m, v: 28 bytes per parameter. A line that is written without
having been read is fetched all the same, 8 bytes instead of 4, unless it is stored past the caches, which calls for many
elements do (``put``): ``blend`` then moves 12, ``aim`` 16, or 12 if messages say p, ``descend`` 12, ``accumulate`` 20, or 12
if messages say m and there is no u, ``wander`` 32, or 28 if messages say m, ``square_sum`` 4, and ``land`` 8 more than
decoding, or 4 if p is not stored.

Numba walks a table of addresses, because gradients live wherever autograd put them. Every function is that of ``adam``
with the same name; results do not depend on the number of threads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from commpress.kernels import cpu
from commpress.kernels.adam import Segments
from commpress.kernels.cpu_arrays import bare, begins_line, floats
from commpress.kernels.cpu_land import BLOCKS, Runs, block_in, land_signs
from commpress.kernels.cpu_land import runs as runs
from commpress.kernels.cpu_lanes import (
    WIDE,
    add_squares,
    all_finite,
    bits,
    load,
    no_sums,
    put,
    signed,
    total,
    where_finite,
)
from commpress.kernels.cpu_threads import split
from commpress.kernels.pieces import KIND, NUMEL, SOURCE
from commpress.kernels.reference import SIGN_RMS

_LINE = 16  # floats of a cache line
PAST = 1 << 22  # a call that handles so many elements leaves none of them in a cache


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
def _blend(table, m, out, beta, alpha, past, start, stop):
    done = 0
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        address, share = gradient(table[s], m, alpha)
        g, first = floats(address + 4 * skip, n), table[s, 2] + skip
        stream = past and begins_line(out, first)
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            put(beta * load(m, at, left) + share * load(g, i, left), out, at, left, stream)
        done += table[s, 3]


@bare
def _aim(table, p, r, out, beta, alpha, past, start, stop):
    done = 0
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        address, share = gradient(table[s], p, alpha)
        g, first = floats(address + 4 * skip, n), table[s, 2] + skip
        stream = past and begins_line(out, first)
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            new = beta * load(p, at, left) + (share * load(g, i, left)) * load(r, at, left)
            put(new, out, at, left, stream)
        done += table[s, 3]


@bare
def _block(line, b, address, r):
    """Block ``b`` of a run and its gradient; where there is none, r, times zero, stands for it."""
    skip, n, said, wire, codes, scale = block_in(line, b)
    first = line[SOURCE] + skip
    g = floats(r.ctypes.data + 4 * first if address == 0 else address + 4 * skip, n)
    return skip, first, n, said, wire, codes, scale, g


@bare
def _aim_from(lines, gradients, p, r, out, beta, alpha, past, start, stop):
    """Blocks ``start`` to ``stop``, with p as the messages in ``lines`` say it; a gradient's address for every line."""
    done = 0
    for q in range(lines.shape[0]):
        share = np.float32(0) if gradients[q] == 0 else alpha
        for b in range(max(start - done, 0), min(stop - done, lines[q, BLOCKS])):
            _, first, n, said, wire, codes, scale, g = _block(lines[q], b, gradients[q], r)
            stream = past and begins_line(out, first)
            for i in range(0, n, WIDE):
                at, left = first + i, n - i
                before = signed(bits(wire, codes + i // 8, left), beta * scale) if said else beta * load(p, at, left)
                put(before + (share * load(g, i, left)) * load(r, at, left), out, at, left, stream)
        done += lines[q, BLOCKS]


@bare
def _descend(table, p, a, step, keep, past, start, stop):
    done = 0
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        x, first = floats(table[s, 0] + 4 * skip, n), table[s, 2] + skip
        stream = past and begins_line(x, 0)
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            if a is None:
                put(keep * load(x, i, left) - step * load(p, at, left), x, i, left, False)
            else:
                put(keep * load(a, at, left) - step * load(p, at, left), x, i, left, stream)
        done += table[s, 3]


@bare
def _momentum(m, r, at, left, share):
    if share is None:
        return load(m, at, left)
    return share * load(m, at, left) / load(r, at, left)


@bare
def _accumulate(table, m, u, r, out, beta, alpha, lr, keep, lazy, past, start, stop):
    """What is not there is None: Numba then compiles a loop without it, where a test would cost a fifteenth."""
    done = 0
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        address, share = gradient(table[s], m, alpha)
        g, first = floats(address + 4 * skip, n), table[s, 2] + skip
        stream = past and begins_line(out, first)
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            new = lr * (beta * _momentum(m, r, at, left, lazy) + share * load(g, i, left))
            if u is not None:
                new = new + keep * load(u, at, left)
            if r is not None:
                new = new * load(r, at, left)
            put(new, out, at, left, stream)
        done += table[s, 3]


@bare
def _wander(table, m, u, a, r, beta, alpha, lr, keep, kept, lazy, begins, past, start, stop):
    """Returns how many vectors of g were not finite."""
    done, bad = 0, 0
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        x, first = floats(table[s, 0] + 4 * skip, n), table[s, 2] + skip
        address, share = gradient(table[s], m, alpha)
        g = floats(address + 4 * skip, n)
        stream = past and begins_line(x, 0)
        beyond = past and begins_line(u, first) and begins_line(a, first)
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            new, before = load(g, i, left), _momentum(m, r, at, left, lazy)
            bad += not all_finite(new)
            momentum = where_finite(new, beta * before + share * new, before)
            put(momentum, m, at, left, False)
            if begins:
                anchor, moved = load(x, i, left), lr * momentum
                put(anchor, a, at, left, beyond)
            else:
                anchor, moved = load(a, at, left), keep * load(u, at, left) + lr * momentum
            put(moved, u, at, left, begins and beyond)
            put(kept * anchor - moved * load(r, at, left), x, i, left, stream and not begins)
        done += table[s, 3]
    return bad


@bare
def _accumulate_from(lines, gradients, m, r, out, beta, alpha, lr, lazy, past, start, stop):
    """Without u, and with m as the messages in ``lines`` say it."""
    done = 0
    for q in range(lines.shape[0]):
        share = np.float32(0) if gradients[q] == 0 else alpha
        for b in range(max(start - done, 0), min(stop - done, lines[q, BLOCKS])):
            _, first, n, said, wire, codes, scale, g = _block(lines[q], b, gradients[q], r)
            scale *= lazy
            stream = past and begins_line(out, first)
            for i in range(0, n, WIDE):
                at, left = first + i, n - i
                d, r_ = signed(bits(wire, codes + i // 8, left), scale) if said else lazy * load(m, at, left), load(r, at, left)
                put(lr * (beta * (d / r_) + share * load(g, i, left)) * r_, out, at, left, stream)
        done += lines[q, BLOCKS]


@bare
def _wander_from(lines, places, gradients, m, u, a, r, beta, alpha, lr, kept, lazy, past, start, stop):
    """The first step of a window, with m as the messages in ``lines`` say it; an address of x for every line."""
    done, bad = 0, 0
    for q in range(lines.shape[0]):
        share = np.float32(0) if gradients[q] == 0 else alpha
        for b in range(max(start - done, 0), min(stop - done, lines[q, BLOCKS])):
            skip, first, n, said, wire, codes, scale, g = _block(lines[q], b, gradients[q], r)
            scale, x = lazy * scale, floats(places[q] + 4 * skip, n)
            beyond = past and begins_line(u, first) and begins_line(a, first)
            stream = beyond and said and begins_line(m, first)
            for i in range(0, n, WIDE):
                at, left = first + i, n - i
                d, r_ = signed(bits(wire, codes + i // 8, left), scale) if said else lazy * load(m, at, left), load(r, at, left)
                new, before, anchor = load(g, i, left), d / r_, load(x, i, left)
                bad += not all_finite(new)
                momentum = where_finite(new, beta * before + share * new, before)
                moved = lr * momentum
                put(momentum, m, at, left, stream)
                put(anchor, a, at, left, beyond)
                put(moved, u, at, left, beyond)
                put(kept * anchor - moved * r_, x, i, left, False)
        done += lines[q, BLOCKS]
    return bad


@bare
def _square_sums(table, totals, start, stop):
    for s in range(start, stop):
        squares = no_sums()
        if table[s, 1] != 0:
            g = floats(table[s, 1], table[s, 3])
            for i in range(0, g.size, WIDE):
                squares = add_squares(squares, load(g, i, g.size - i))
        totals[s] = total(squares)


def _run(kernel: Callable[..., Any], segments: Segments, *args: Any) -> None:
    split(kernel, segments.numel, segments.numel, segments.table, *args)


def _said_at(segments: Segments, said: Runs) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of x and of g, or 0, for each line of what messages say."""
    layers = segments.table[said.owners]
    skip = 4 * (said.lines[:, SOURCE] - layers[:, 2])
    return layers[:, 0] + skip, np.where(layers[:, 1] == 0, 0, layers[:, 1] + skip)


def _run_said(kernel: Callable[..., Any], segments: Segments, said: Runs, *args: Any) -> list[Any]:
    return split(kernel, int(said.lines[:, BLOCKS].sum()), segments.numel, said.lines, *args, segments.numel >= PAST)


def _array(buffer: torch.Tensor) -> np.ndarray | None:
    return buffer.numpy() if buffer.numel() else None


def _share(share: float | None) -> np.float32 | None:
    return None if share is None else np.float32(share)


def blend(segments, m, out, *, beta, gain):
    scalars = map(np.float32, (beta, (1 - beta) * gain))
    _run(_blend, segments, m.numpy(), out.numpy(), *scalars, segments.numel >= PAST)


def aim(segments, p, r, out, *, beta, gain, said=None):
    buffers, scalars = (b.numpy() for b in (p, r, out)), map(np.float32, (beta, (1 - beta) * gain))
    if said is None:
        _run(_aim, segments, *buffers, *scalars, segments.numel >= PAST)
        return
    _, gradients = _said_at(segments, said)
    _run_said(_aim_from, segments, said, gradients, *buffers, *scalars)


def descend(segments, p, a, *, step, keep):
    if p.numel():
        _run(_descend, segments, p.numpy(), _array(a), np.float32(step), np.float32(keep), segments.numel >= PAST)


def land(rows, pieces, segments, p, a, *, steps, keeps, stored=True):
    signs = pieces.table[:, KIND] <= SIGN_RMS
    past, lines, anchor = pieces.numel >= PAST, segments.table, _array(a)
    if signs.any():
        land_signs(rows, pieces.table[signs], lines[signs], p if stored else None, anchor, steps[signs], keeps[signs], past)
    if signs.all():
        return
    others = replace(pieces, table=pieces.table[~signs], numel=int(pieces.table[~signs, NUMEL].sum()))
    cpu.decode(rows, p, others)
    for step, keep in {*zip(steps[~signs].tolist(), keeps[~signs].tolist(), strict=True)}:
        alike = lines[~signs & (steps == step) & (keeps == keep)]
        numel = int(alike[:, 3].sum())
        split(_descend, numel, numel, alike, p.numpy(), anchor, np.float32(step), np.float32(keep), past)


def accumulate(segments, m, u, r, out, *, beta, gain, lr, keep, share=None, said=None):
    if said is not None and not u.numel():
        buffers, scalars = (b.numpy() for b in (m, r, out)), map(np.float32, (beta, (1 - beta) * gain, lr, share))
        _, gradients = _said_at(segments, said)
        _run_said(_accumulate_from, segments, said, gradients, *buffers, *scalars)
        return
    buffers, scalars = map(_array, (m, u, r, out)), map(np.float32, (beta, (1 - beta) * gain, lr, keep))
    if m.numel():
        _run(_accumulate, segments, *buffers, *scalars, _share(share), segments.numel >= PAST)


def wander(segments, m, u, a, r, *, beta, gain, lr, keep, kept, begins, share=None, said=None):
    buffers = [b.numpy() for b in (m, u, a, r)]
    if said is not None and begins:
        scalars = map(np.float32, (beta, (1 - beta) * gain, lr, kept, share))
        return not any(_run_said(_wander_from, segments, said, *_said_at(segments, said), *buffers, *scalars))
    scalars = map(np.float32, (beta, (1 - beta) * gain, lr, keep, kept))
    how = _share(share), begins, segments.numel >= PAST
    return not any(split(_wander, segments.numel, segments.numel, segments.table, *buffers, *scalars, *how))


def square_sum(segments):
    totals = np.empty(len(segments.table))
    split(_square_sums, len(totals), segments.numel, segments.table, totals)
    return float(totals.sum())
