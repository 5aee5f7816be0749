"""The loops of ``cpu_adam``. They walk a table of addresses, because gradients live wherever autograd put them."""

import numpy as np

from commpress.kernels.pieces import BLOCKS, SOURCE
from commpress.kernels.sources.arrays import begins_line, floats
from commpress.kernels.sources.decorators import bare
from commpress.kernels.sources.land import block_in
from commpress.kernels.sources.lanes import (
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

_LINE = 16  # floats of a cache line


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
def blend(table, m, out, beta, alpha, past, start, stop):
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
def aim(table, p, r, out, beta, alpha, past, start, stop):
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
def aim_from(lines, gradients, p, r, out, beta, alpha, past, start, stop):
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
def descend(table, p, a, step, keep, past, start, stop):
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
def accumulate(table, m, u, r, out, beta, alpha, lr, keep, lazy, past, start, stop):
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
def wander(table, m, u, a, r, beta, alpha, lr, keep, kept, lazy, begins, past, start, stop):
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
def accumulate_from(lines, gradients, m, r, out, beta, alpha, lr, lazy, past, start, stop):
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
def wander_from(lines, places, gradients, m, u, a, r, beta, alpha, lr, kept, lazy, past, start, stop):
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
def square_sums(table, totals, start, stop):
    for s in range(start, stop):
        squares = no_sums()
        if table[s, 1] != 0:
            g = floats(table[s, 1], table[s, 3])
            for i in range(0, g.size, WIDE):
                squares = add_squares(squares, load(g, i, g.size - i))
        totals[s] = total(squares)
