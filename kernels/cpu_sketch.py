"""A sketch that can be summed: every element is added to three cells, and comes back by peeling.

A cell that only one unknown element hits *is* that element; taking it out of its other two cells frees others. Where non-zero
elements are fewer than cells / 1.23 this reaches all of them but with a chance that falls with their number. The three cells
lie in three thirds of the table, so they differ.
"""

import numpy as np

from commpress.kernels.cpu_blocks import jit


@jit
def _cell(element, which, third, seed):
    h = np.uint32(np.uint32(element) * np.uint32(0x9E3779B1)) + np.uint32(seed) + np.uint32(which * 0x632BE5AB)
    h = np.uint32(h)
    h ^= h >> np.uint32(16)
    h = np.uint32(h * np.uint32(0x7FEB352D))
    h ^= h >> np.uint32(15)
    h = np.uint32(h * np.uint32(0x846CA68B))
    h ^= h >> np.uint32(16)
    return which * third + np.int64((np.uint64(h) * np.uint64(third)) >> np.uint64(32))


@jit
def _add(values, table, bitmap, seed):
    third = table.size // 3
    for i in range(values.size):
        if values[i] != 0:
            bitmap[i >> 3] |= np.uint8(1 << (i & 7))
            for which in range(3):
                table[_cell(i, which, third, seed)] += values[i]


@jit
def _peel(table, bitmap, out, seed):
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


@jit
def _round(values, left, starts, quanta, most):
    for part in range(quanta.size):
        q = np.float32(quanta[part])
        for i in range(starts[part], starts[part + 1]):
            v = values[i]
            n = min(max(np.rint(v / q), -most), most)
            values[i] = n
            left[i] += v - n * q


@jit
def _scale(values, starts, factors, out):
    for part in range(factors.size):
        for i in range(starts[part], starts[part + 1]):
            out[i] = values[i] * factors[part]


@jit
def _peaks(values, starts, out):
    for part in range(out.size):
        peak = np.float32(0)
        for i in range(starts[part], starts[part + 1]):
            peak = max(peak, abs(values[i]))
        out[part] = peak


# ---------------------------------------------------------------- torch in, torch out


def to_quanta(values, left, starts, quanta, most):
    """values := whole multiples, at most ``most``, of their part's quantum; left += what that leaves out.

    Part p is the elements from starts[p] to starts[p + 1].
    """
    _round(values.numpy(), left.numpy(), starts, quanta, np.float32(most))


def scaled(values, starts, factors, out):
    """out := values · the factor of their part."""
    _scale(values.numpy(), starts, factors, out.numpy())


def peaks(values, starts):
    """The largest magnitude of each part."""
    out = np.empty(len(starts) - 1, np.float32)
    _peaks(values.numpy(), starts, out)
    return out


def add(values, table, bitmap, *, seed=0):
    """table += the sketch of ``values``; bitmap (one bit per element, lowest first) marks those that are not zero."""
    _add(values.numpy(), table.numpy(), bitmap.numpy(), np.uint32(seed))


def peel(table, bitmap, out, *, seed=0):
    """out := the elements that ``bitmap`` marks; returns how many could not be told apart. The table is used up."""
    return int(_peel(table.numpy(), bitmap.numpy(), out.numpy(), np.uint32(seed)))
