"""The loops of ``cpu.low_rank``. Factors lie transposed, one row of memory per column."""

import numpy as np

from commpress.kernels.cpu.kinds import F32, FLAG, FLOATS, I64, TABLE, U32
from commpress.kernels.cpu.sources.block_codes import uniform
from commpress.kernels.cpu.sources.decorators import jit, loose
from commpress.kernels.cpu.sources.kernel import kernel
from commpress.kernels.matrices import LEFT, MARK, PLACE, RANK, RIGHT, SOURCE, TALL, WIDE


@loose
def _dot(a, b):
    total = np.float32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@loose
def _dots(a, b, c, d, e):
    """a against four others: one pass over a."""
    w = x = y = z = np.float32(0)
    for i in range(a.size):
        w += a[i] * b[i]
        x += a[i] * c[i]
        y += a[i] * d[i]
        z += a[i] * e[i]
    return w, x, y, z


@kernel(
    x=FLOATS,
    gain=F32,
    residual=FLOATS,
    m=FLOATS,
    p=FLOATS,
    q=FLOATS,
    table=TABLE,
    units=TABLE,
    start=I64,
    stop=I64,
)
@jit
def project(x, gain, residual, m, p, q, table, units, start, stop):
    for u in range(start, stop):
        line = table[units[u, 0]]
        tall, wide, rank, source, at = line[TALL], line[WIDE], line[RANK], line[SOURCE], line[PLACE]
        basis = q[line[RIGHT] : line[RIGHT] + rank * wide]
        for i in range(units[u, 1], units[u, 2]):
            row, new = (
                x[source + i * wide : source + (i + 1) * wide],
                m[at + i * wide : at + (i + 1) * wide],
            )
            if residual.size:
                old = residual[at + i * wide : at + (i + 1) * wide]
                for j in range(wide):
                    new[j] = row[j] * gain + old[j]
            else:
                for j in range(wide):
                    new[j] = row[j] * gain
            to = line[LEFT] + i
            k = 0
            while k + 4 <= rank:
                b = basis[k * wide :]
                four = _dots(
                    new,
                    b[:wide],
                    b[wide : 2 * wide],
                    b[2 * wide : 3 * wide],
                    b[3 * wide : 4 * wide],
                )
                for z in range(4):
                    p[to + (k + z) * tall] = four[z]
                k += 4
            while k < rank:
                p[to + k * tall] = _dot(new, basis[k * wide : (k + 1) * wide])
                k += 1


@kernel(m=FLOATS, p=FLOATS, q=FLOATS, subtract=FLAG, table=TABLE, units=TABLE, start=I64, stop=I64)
@jit
def fold(m, p, q, subtract, table, units, start, stop):
    for u in range(start, stop):
        line = table[units[u, 0]]
        first, last = units[u, 1], units[u, 2]
        tall, wide, rank, at = line[TALL], line[WIDE], line[RANK], line[PLACE]
        for k in range(rank):
            total = q[line[RIGHT] + k * wide + first : line[RIGHT] + k * wide + last]
            for j in range(total.size):
                total[j] = np.float32(0)
        for i in range(0, tall - tall % 4, 4):
            a = m[at + i * wide + first : at + i * wide + last]
            b = m[at + (i + 1) * wide + first : at + (i + 1) * wide + last]
            c = m[at + (i + 2) * wide + first : at + (i + 2) * wide + last]
            d = m[at + (i + 3) * wide + first : at + (i + 3) * wide + last]
            for k in range(rank):
                total = q[line[RIGHT] + k * wide + first : line[RIGHT] + k * wide + last]
                left = p[line[LEFT] + k * tall + i : line[LEFT] + k * tall + i + 4]
                e, f, g, h = left[0], left[1], left[2], left[3]
                for j in range(total.size):
                    total[j] = (((total[j] + a[j] * e) + b[j] * f) + c[j] * g) + d[j] * h
        for i in range(tall - tall % 4, tall):
            a = m[at + i * wide + first : at + i * wide + last]
            for k in range(rank):
                total = q[line[RIGHT] + k * wide + first : line[RIGHT] + k * wide + last]
                e = p[line[LEFT] + k * tall + i]
                for j in range(total.size):
                    total[j] = total[j] + a[j] * e
        if subtract:
            for i in range(tall):
                a = m[at + i * wide + first : at + i * wide + last]
                _product(
                    a,
                    p[line[LEFT] + i :],
                    tall,
                    q[line[RIGHT] + first :],
                    wide,
                    rank,
                    np.float32(-1),
                    True,
                )


@jit
def _product(out, p, tall, q, wide, rank, sign, add):
    """out := or += sign · Σ p[k·tall] · q[k·wide : …], k in steps of four."""
    n = out.size
    k = 0
    while k + 4 <= rank:
        a, b = p[k * tall] * sign, p[(k + 1) * tall] * sign
        c, d = p[(k + 2) * tall] * sign, p[(k + 3) * tall] * sign
        e, f = q[k * wide : k * wide + n], q[(k + 1) * wide : (k + 1) * wide + n]
        g, h = q[(k + 2) * wide : (k + 2) * wide + n], q[(k + 3) * wide : (k + 3) * wide + n]
        if add or k:
            for j in range(n):
                out[j] = (((out[j] + a * e[j]) + b * f[j]) + c * g[j]) + d * h[j]
        else:
            for j in range(n):
                out[j] = ((a * e[j] + b * f[j]) + c * g[j]) + d * h[j]
        k += 4
    while k < rank:
        a = p[k * tall] * sign
        e = q[k * wide : k * wide + n]
        if add or k:
            for j in range(n):
                out[j] = out[j] + a * e[j]
        else:
            for j in range(n):
                out[j] = a * e[j]
        k += 1


@kernel(p=FLOATS, q=FLOATS, x=FLOATS, gain=F32, table=TABLE, units=TABLE, start=I64, stop=I64)
@jit
def expand(p, q, x, gain, table, units, start, stop):
    for u in range(start, stop):
        line = table[units[u, 0]]
        tall, wide, source = line[TALL], line[WIDE], line[SOURCE]
        for i in range(units[u, 1], units[u, 2]):
            row = x[source + i * wide : source + (i + 1) * wide]
            _product(
                row, p[line[LEFT] + i :], tall, q[line[RIGHT] :], wide, line[RANK], gain, False
            )


@jit
def _dot64(a, b):
    """Four partial sums, so that additions need not wait for each other."""
    s0 = s1 = s2 = s3 = 0.0
    n = a.size - a.size % 4
    for i in range(0, n, 4):
        s0 += a[i] * b[i]
        s1 += a[i + 1] * b[i + 1]
        s2 += a[i + 2] * b[i + 2]
        s3 += a[i + 3] * b[i + 3]
    for i in range(n, a.size):
        s0 += a[i] * b[i]
    return (s0 + s1) + (s2 + s3)


@kernel(factor=FLOATS, table=TABLE, side=I64, length=I64, revive=FLAG, key=U32, start=I64, stop=I64)
@jit
def orthonormalize(factor, table, side, length, revive, key, start, stop):
    for u in range(start, stop):
        line = table[u]
        n, rank, at = line[length], line[RANK], line[side]
        work = np.empty((rank, n), np.float64)
        for k in range(rank):
            column = work[k]
            for attempt in range(2):
                for i in range(n):
                    if attempt == 0:
                        column[i] = factor[at + k * n + i]
                    else:
                        column[i] = uniform(
                            i + k * n, np.uint32(key) ^ np.uint32(line[MARK])
                        ) - np.float32(0.5)
                before = np.sqrt(_dot64(column, column))
                for _ in range(2):  # twice is enough
                    for j in range(k):
                        other = work[j]
                        d = _dot64(column, other)
                        for i in range(n):
                            column[i] = column[i] - d * other[i]
                norm = np.sqrt(_dot64(column, column))
                alive = norm > 1e-7 * before
                if alive or not revive:
                    break
            for i in range(n):
                column[i] = column[i] / norm if alive else 0.0
                factor[at + k * n + i] = np.float32(column[i])
