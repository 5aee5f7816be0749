"""The loops of ``cpu.adam``. They walk a table of addresses, because gradients live wherever
autograd put them."""

import numpy as np

from commpress.kernels.cpu.kinds import (
    DIVISORS,
    DOUBLES,
    F32,
    FLAG,
    FLOATS,
    I64,
    INTEGERS,
    MAYBE_FLOATS,
    TABLE,
)
from commpress.kernels.cpu.sources.arrays import begins_line, floats
from commpress.kernels.cpu.sources.decorators import bare
from commpress.kernels.cpu.sources.kernel import kernel
from commpress.kernels.cpu.sources.vector import (
    WIDE,
    add_count,
    add_squares,
    all_finite,
    beyond,
    load,
    more,
    no_sums,
    put,
    root,
    same,
    total,
    where_finite,
    where_less,
    within,
)

_LINE = 16  # floats of a cache line


@bare
def part(line, done, start, stop):
    """The elements of a segment between ``start`` and ``stop``, cut where cache lines begin: the
    first one and how many."""
    low = min(max(start - done, 0) // _LINE * _LINE, line[3])
    high = line[3] if stop - done >= line[3] else max((stop - done) // _LINE * _LINE, low)
    return low, high - low


@bare
def gradient(line, m, alpha):
    """Address of g, and ``alpha``. No gradient is m times zero: a branch would keep loops from
    being vectorised."""
    return (m.ctypes.data + 4 * line[2], np.float32(0)) if line[1] == 0 else (line[1], alpha)


@kernel(table=TABLE, out=FLOATS, gain=F32, past=FLAG, start=I64, stop=I64)
@bare
def scaled(table, out, gain, past, start, stop):
    done, nothing = 0, same(np.float32(0))
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        first = table[s, 2] + skip
        stream = past and begins_line(out, first)
        if table[s, 1] == 0:
            for i in range(0, n, WIDE):
                put(nothing, out, first + i, n - i, stream)
        else:
            g = floats(table[s, 1] + 4 * skip, n)
            for i in range(0, n, WIDE):
                put(gain * load(g, i, n - i), out, first + i, n - i, stream)
        done += table[s, 3]


@kernel(
    table=TABLE,
    divisors=DIVISORS,
    p=FLOATS,
    v=FLOATS,
    m=FLOATS,
    a=MAYBE_FLOATS,
    step=F32,
    decay=F32,
    momentum_scale=F32,
    most=F32,
    past=FLAG,
    start=I64,
    stop=I64,
)
@bare
def apply_mean(table, divisors, p, v, m, a, step, decay, momentum_scale, most, past, start, stop):
    """Loop without what is None: Numba leaves it out, where a test would cost a fifteenth."""
    done = 0
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        x, first = floats(table[s, 0] + 4 * skip, n), table[s, 2] + skip
        k, low, eps = divisors[s, 0], same(divisors[s, 1]), divisors[s, 2]
        beyond_caches = past and begins_line(m, first)
        stream = past and begins_line(x, 0)
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            mean, own = load(p, at, left), root(k * load(v, at, left))
            momentum = (momentum_scale * mean) * (more(own, low) + eps)
            put(
                where_less(own, low, within(momentum, most * own), momentum),
                m,
                at,
                left,
                beyond_caches,
            )
            if a is None:
                put(decay * load(x, i, left) - step * mean, x, i, left, False)
            else:
                put(decay * load(a, at, left) - step * mean, x, i, left, stream)
        done += table[s, 3]


@kernel(
    table=TABLE,
    divisors=DIVISORS,
    m=FLOATS,
    u=MAYBE_FLOATS,
    v=FLOATS,
    out=FLOATS,
    counts=INTEGERS,
    beta=F32,
    alpha=F32,
    gain=F32,
    decay=F32,
    past=FLAG,
    start=I64,
    stop=I64,
)
@bare
def accumulate(table, divisors, m, u, v, out, counts, beta, alpha, gain, decay, past, start, stop):
    done = 0
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        address, scale = gradient(table[s], m, gain)
        g, first, far = floats(address + 4 * skip, n), table[s, 2] + skip, 0
        k, low, eps, reach = divisors[s, 0], same(divisors[s, 1]), divisors[s, 2], divisors[s, 3]
        stream = past and begins_line(out, first)
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            new, own = scale * load(g, i, left), root(k * load(v, at, left))
            divisor = more(own, low) + eps
            far += beyond(new, reach * (own + eps))
            new = where_finite(new, within(new, reach * divisor), new)
            new = beta * load(m, at, left) + alpha * new
            if u is not None:
                new = new + decay * load(u, at, left)
            put(new / divisor, out, at, left, stream)
        if far:
            add_count(counts, s, far)
        done += table[s, 3]


@kernel(
    table=TABLE,
    divisors=DIVISORS,
    m=FLOATS,
    u=FLOATS,
    a=FLOATS,
    v=FLOATS,
    counts=INTEGERS,
    beta=F32,
    alpha=F32,
    gain=F32,
    lr=F32,
    decay=F32,
    anchor_decay=F32,
    begins=FLAG,
    past=FLAG,
    start=I64,
    stop=I64,
)
@bare
def local_step(
    table,
    divisors,
    m,
    u,
    a,
    v,
    counts,
    beta,
    alpha,
    gain,
    lr,
    decay,
    anchor_decay,
    begins,
    past,
    start,
    stop,
):
    """Returns how many vectors of g were not finite."""
    done, bad = 0, 0
    for s in range(table.shape[0]):
        skip, n = part(table[s], done, start, stop)
        x, first = floats(table[s, 0] + 4 * skip, n), table[s, 2] + skip
        address, scale = gradient(table[s], m, gain)
        k, low, eps, reach = divisors[s, 0], same(divisors[s, 1]), divisors[s, 2], divisors[s, 3]
        g, far = floats(address + 4 * skip, n), 0
        stream = past and begins_line(x, 0)
        beyond_caches = past and begins_line(u, first) and begins_line(a, first)
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            new, before, own = (
                scale * load(g, i, left),
                load(m, at, left),
                root(k * load(v, at, left)),
            )
            divisor = more(own, low) + eps
            bad += not all_finite(new)
            far += beyond(new, reach * (own + eps))
            momentum = where_finite(
                new, beta * before + alpha * within(new, reach * divisor), before
            )
            put(momentum, m, at, left, False)
            if begins:
                anchor, moved = load(x, i, left), lr * momentum
                put(anchor, a, at, left, beyond_caches)
            else:
                anchor, moved = load(a, at, left), decay * load(u, at, left) + lr * momentum
            put(moved, u, at, left, begins and beyond_caches)
            put(anchor_decay * anchor - moved / divisor, x, i, left, stream and not begins)
        if far:
            add_count(counts, s, far)
        done += table[s, 3]
    return bad


@kernel(table=TABLE, totals=DOUBLES, start=I64, stop=I64)
@bare
def square_sums(table, totals, start, stop):
    for s in range(start, stop):
        squares = no_sums()
        if table[s, 1] != 0:
            g = floats(table[s, 1], table[s, 3])
            for i in range(0, g.size, WIDE):
                squares = add_squares(squares, load(g, i, g.size - i))
        totals[s] = total(squares)
