"""The loops of ``cpu.lamb``: two passes per layer. One thread walks a layer, so sums have one
order.

Note: nothing inside a loop may be a function of its own, but an intrinsic: Numba does not always
put a ``bare`` one in its place, and a call saves and restores every vector there is.
"""

import numpy as np

from commpress.kernels.cpu.kinds import DIVISORS, F32, F64, FLAG, FLOATS, I64, TABLE
from commpress.kernels.cpu.sources.adam_loops import gradient
from commpress.kernels.cpu.sources.arrays import begins_line, floats
from commpress.kernels.cpu.sources.decorators import bare
from commpress.kernels.cpu.sources.kernel import kernel
from commpress.kernels.cpu.sources.vector import (
    WIDE,
    add_squares,
    least,
    less,
    load,
    more,
    no_sums,
    put,
    root,
    same,
    the_first,
    total,
    where_less,
    within,
)


@bare
def _within(value, low, high):
    return min(max(value, low), high)


@bare
def _rate(x, w, low, high):
    """‖x‖ / ‖w‖ within its bounds, from sums of squares; 1 where either is zero."""
    return _within(np.sqrt(x) / np.sqrt(w), low, high) if x > 0 and w > 0 else 1.0


@kernel(
    table=TABLE,
    m=FLOATS,
    v=FLOATS,
    w=FLOATS,
    coefficient=FLOATS,
    beta1=F32,
    alpha1=F32,
    beta2=F32,
    alpha2=F32,
    eps=F32,
    lr=F64,
    decay=F32,
    low=F64,
    high=F64,
    slow=F64,
    start=I64,
    stop=I64,
)
@bare
def exact(
    table,
    m,
    v,
    w,
    coefficient,
    beta1,
    alpha1,
    beta2,
    alpha2,
    eps,
    lr,
    decay,
    low,
    high,
    slow,
    start,
    stop,
):
    """The directions of all layers lie in the same place of w, which stays in a cache. It is the
    first layer's, so a gradient that lies in w has been read before."""
    room = table[start, 2] if start < stop else 0
    for s in range(start, stop):
        n, first = table[s, 3], table[s, 2]
        x, (address, share) = floats(table[s, 0], n), gradient(table[s], m, alpha1)
        g, power = floats(address, n), alpha2 if share else np.float32(0)
        of_x, of_w = no_sums(), no_sums()
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            x_, g_ = load(x, i, left), load(g, i, left)
            v_ = beta2 * load(v, at, left) + power * (g_ * g_)
            m_ = beta1 * load(m, at, left) + share * g_
            w_ = m_ / (root(v_) + eps) + decay * x_
            put(v_, v, at, left, False)
            put(m_, m, at, left, False)
            put(w_, w, room + i, left, False)
            of_x, of_w = add_squares(of_x, x_), add_squares(of_w, the_first(w_, left, x_))
        rate = _rate(total(of_x), total(of_w), low, high)
        before = np.float64(coefficient[s])
        coefficient[s] = rate if before == 0 else rate + slow * (before - rate)
        step = np.float32(lr * rate)
        for i in range(0, n, WIDE):
            put(load(x, i, n - i) - step * load(w, room + i, n - i), x, i, n - i, False)


@bare
def _move(x, p, begin, n, rate, decay):
    """x := x − rate·(p + λx)."""
    for i in range(0, n, WIDE):
        x_ = load(x, i, n - i)
        put(x_ - rate * (load(p, begin + i, n - i) + decay * x_), x, i, n - i, False)


@kernel(
    table=TABLE,
    divisors=DIVISORS,
    p=FLOATS,
    v=FLOATS,
    m=FLOATS,
    course=FLOATS,
    slow=F32,
    quick=F32,
    lr=F64,
    decay=F32,
    least_rate=F64,
    most_rate=F64,
    most=F32,
    past=FLAG,
    start=I64,
    stop=I64,
)
@bare
def live(
    table,
    divisors,
    p,
    v,
    m,
    course,
    slow,
    quick,
    lr,
    decay,
    least_rate,
    most_rate,
    most,
    past,
    start,
    stop,
):
    for s in range(start, stop):
        n, begin = table[s, 3], table[s, 2]
        x, of_x, of_w = floats(table[s, 0], n), no_sums(), no_sums()
        k, low, eps = divisors[s, 0], same(divisors[s, 1]), divisors[s, 2]
        stream = past and begins_line(m, begin)
        for i in range(0, n, WIDE):
            at, left = begin + i, n - i
            x_, mean, own = load(x, i, left), load(p, at, left), root(k * load(v, at, left))
            momentum = mean * (more(own, low) + eps)
            put(where_less(own, low, within(momentum, most * own), momentum), m, at, left, stream)
            course_ = slow * load(course, at, left) + quick * mean
            put(course_, course, at, left, False)
            of_x, of_w = (
                add_squares(of_x, x_),
                add_squares(of_w, the_first(course_ + decay * x_, left, x_)),
            )
        rate = np.float32(lr * _rate(total(of_x), total(of_w), least_rate, most_rate))
        _move(x, p, begin, n, rate, decay)


@kernel(
    table=TABLE,
    divisors=DIVISORS,
    p=FLOATS,
    v=FLOATS,
    m=FLOATS,
    fresh=FLOATS,
    coefficient=FLOATS,
    factor=FLOATS,
    beta1=F32,
    scale=F32,
    beta2=F32,
    alpha2=F32,
    lr=F64,
    decay=F32,
    least_factor=F64,
    most_factor=F64,
    change=F64,
    most=F32,
    past=FLAG,
    start=I64,
    stop=I64,
)
@bare
def frozen(
    table,
    divisors,
    p,
    v,
    m,
    fresh,
    coefficient,
    factor,
    beta1,
    scale,
    beta2,
    alpha2,
    lr,
    decay,
    least_factor,
    most_factor,
    change,
    most,
    past,
    start,
    stop,
):
    infinite = same(np.float32(np.inf))
    for s in range(start, stop):
        n, begin = table[s, 3], table[s, 2]
        if n == 0:
            continue
        x, of_p, of_w, ratio = floats(table[s, 0], n), no_sums(), no_sums(), infinite
        k, low, eps = divisors[s, 0], same(divisors[s, 1]), divisors[s, 2]
        for i in range(0, n, WIDE):
            at, left = begin + i, n - i
            p_, own = load(p, at, left), root(k * load(v, at, left))
            divisor = more(own, low) + eps
            momentum = p_ * divisor
            g = (momentum - beta1 * load(m, at, left)) * scale
            put(where_less(own, low, within(momentum, most * own), momentum), m, at, left, False)
            fresh_ = beta2 * load(fresh, at, left) + alpha2 * (g * g)
            put(fresh_, fresh, at, left, False)
            ratio = less(
                the_first((more(root(k * fresh_), low) + eps) / divisor, left, infinite), ratio
            )
            if decay != 0:
                x_ = load(x, i, left)
                p_ = the_first(p_, left, x_)
                of_p, of_w = add_squares(of_p, p_), add_squares(of_w, p_ + decay * x_)
        f, p_squared, w_squared = 1.0 / np.float64(least(ratio)), total(of_p), total(of_w)
        if w_squared > 0:
            share = min(np.sqrt(p_squared / w_squared), 1.0)
            f = f * share + 1.0 - share
        last = np.float64(factor[s])
        f = _within(
            _within(
                _within(f, least_factor, most_factor), last * (1 - change), last * (1 + change)
            ),
            least_factor,
            most_factor,
        )
        factor[s] = f
        _move(x, p, begin, n, np.float32(lr * np.float64(coefficient[s]) * f), decay)
