"""The loops of ``cells``."""

import numpy as np

from commpress.kernels.cpu.kinds import DOUBLES, F32, FLOATS, INTEGERS, OCTETS, U32
from commpress.kernels.cpu.sources.decorators import jit
from commpress.kernels.cpu.sources.kernel import kernel


@jit
def _cell(element, which, third, seed):
    h = (
        np.uint32(np.uint32(element) * np.uint32(0x9E3779B1))
        + np.uint32(seed)
        + np.uint32(which * 0x632BE5AB)
    )
    h = np.uint32(h)
    h ^= h >> np.uint32(16)
    h = np.uint32(h * np.uint32(0x7FEB352D))
    h ^= h >> np.uint32(15)
    h = np.uint32(h * np.uint32(0x846CA68B))
    h ^= h >> np.uint32(16)
    return which * third + np.int64((np.uint64(h) * np.uint64(third)) >> np.uint64(32))


@kernel(values=FLOATS, table=FLOATS, bitmap=OCTETS, seed=U32)
@jit
def add(values, table, bitmap, seed):
    third = table.size // 3
    for i in range(values.size):
        if values[i] != 0:
            bitmap[i >> 3] |= np.uint8(1 << (i & 7))
            for which in range(3):
                table[_cell(i, which, third, seed)] += values[i]


@kernel(table=(FLOATS, DOUBLES), bitmap=OCTETS, out=(FLOATS, DOUBLES), seed=U32)
@jit
def peel(table, bitmap, out, seed):
    third = table.size // 3
    count, mixed = np.zeros(3 * third, np.int32), np.zeros(3 * third, np.int64)
    left = 0
    for i in range(out.size):
        out[i] = 0
        if bitmap[i >> 3] >> (i & 7) & 1:
            left += 1
            for which in range(3):
                c = _cell(i, which, third, seed)
                count[c] += 1
                mixed[c] ^= i
    waiting = np.empty(6 * third + 3, np.int64)
    last = 0
    for c in range(3 * third):
        if count[c] == 1:
            waiting[last] = c
            last += 1
    while last:
        last -= 1
        c = waiting[last]
        if count[c] != 1:
            continue
        i, value = mixed[c], table[c]
        out[i] = value
        left -= 1
        for which in range(3):
            other = _cell(i, which, third, seed)
            table[other] -= value
            count[other] -= 1
            mixed[other] ^= i
            if count[other] == 1:
                waiting[last] = other
                last += 1
    return left


@kernel(values=FLOATS, left=FLOATS, starts=INTEGERS, quanta=DOUBLES, most=F32)
@jit
def round(values, left, starts, quanta, most):
    for part in range(quanta.size):
        q = np.float32(quanta[part])
        for i in range(starts[part], starts[part + 1]):
            v = values[i]
            n = min(max(np.rint(v / q), -most), most)
            values[i] = n
            left[i] += v - n * q


@kernel(values=(FLOATS, DOUBLES), starts=INTEGERS, factors=DOUBLES, out=FLOATS)
@jit
def scale(values, starts, factors, out):
    for part in range(factors.size):
        for i in range(starts[part], starts[part + 1]):
            out[i] = values[i] * factors[part]


@kernel(values=FLOATS, starts=INTEGERS, out=FLOATS)
@jit
def peaks(values, starts, out):
    for part in range(out.size):
        peak = np.float32(0)
        for i in range(starts[part], starts[part + 1]):
            peak = max(peak, abs(values[i]))
        out[part] = peak
