"""LAMB on CPU: two passes per layer, the second while a layer that fits is still in the cache.

The first pass updates what the step updates and sums squares, the second moves x. Bytes per parameter to and from memory, if a
layer fits into a cache: ``exact`` 28, ``live`` 20, ``frozen`` 28. What the second pass finds in a cache, 8 bytes, is not free
either. One thread walks a layer, so sums have one order.
"""

import numpy as np
import torch

from commpress.kernels.adam import Segments
from commpress.kernels.cpu_adam import gradient
from commpress.kernels.cpu_arrays import bare, floats
from commpress.kernels.cpu_lanes import (
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
)
from commpress.kernels.cpu_threads import split
from commpress.kernels.lamb import LayerRule


@bare
def _within(value, low, high):
    return min(max(value, low), high)


@bare
def _rate(x, w, low, high):
    """‖x‖ / ‖w‖ within its bounds, from sums of squares; 1 where either is zero."""
    return _within(np.sqrt(x) / np.sqrt(w), low, high) if x > 0 and w > 0 else 1.0


@bare
def _exact(table, m, v, w, coefficient, beta1, alpha1, beta2, alpha2, eps, lr, decay, low, high, slow, start, stop):
    """The directions of all layers lie in the same place of w, which stays in a cache. It is the first layer's, so a gradient
    that lies in w has been read before."""
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
def _move(x, p, first, rate, decay):
    """x := x − rate·(p + λx)."""
    for i in range(0, x.size, WIDE):
        left = x.size - i
        x_ = load(x, i, left)
        put(x_ - rate * (load(p, first + i, left) + decay * x_), x, i, left, False)


@bare
def _live(table, p, course, slow, quick, lr, decay, low, high, start, stop):
    for s in range(start, stop):
        n, first = table[s, 3], table[s, 2]
        x, of_x, of_w = floats(table[s, 0], n), no_sums(), no_sums()
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            x_ = load(x, i, left)
            course_ = slow * load(course, at, left) + quick * load(p, at, left)
            put(course_, course, at, left, False)
            of_x, of_w = add_squares(of_x, x_), add_squares(of_w, course_ + decay * x_)
        _move(x, p, first, np.float32(lr * _rate(total(of_x), total(of_w), low, high)), decay)


@bare
def _frozen(
    table, p, w, r, fresh, floor, coefficient, factor, beta1, scale, beta2, alpha2, eps, lr, decay, low, high, change,
    start, stop,
):  # fmt: skip
    infinite = same(np.float32(np.inf))
    for s in range(start, stop):
        n, first, smallest = table[s, 3], table[s, 2], same(floor[s])
        if n == 0:
            continue
        x, of_p, of_w, ratio = floats(table[s, 0], n), no_sums(), no_sums(), infinite
        for i in range(0, n, WIDE):
            at, left = first + i, n - i
            p_, r_ = load(p, at, left), load(r, at, left)
            g = (p_ - beta1 * load(w, at, left)) * scale / r_
            fresh_ = beta2 * load(fresh, at, left) + alpha2 * (g * g)
            put(fresh_, fresh, at, left, False)
            known = more(fresh_, smallest)
            ratio = less(the_first((root(known) + eps) * r_, left, infinite), ratio)
            if decay != 0:
                of_p, of_w = add_squares(of_p, p_), add_squares(of_w, p_ + decay * load(x, i, left))
        f, p_squared, w_squared = 1.0 / np.float64(least(ratio)), total(of_p), total(of_w)
        if w_squared > 0:
            share = min(np.sqrt(p_squared / w_squared), 1.0)
            f = f * share + 1.0 - share
        last = np.float64(factor[s])
        f = _within(_within(_within(f, low, high), last * (1 - change), last * (1 + change)), low, high)
        factor[s] = f
        _move(x, p, first, np.float32(lr * np.float64(coefficient[s]) * f), decay)


def exact(
    segments: Segments, m: torch.Tensor, v: torch.Tensor, w: torch.Tensor, coefficient: torch.Tensor, rule: LayerRule
) -> None:
    (beta1, beta2), table = rule.betas, segments.table
    split(
        _exact, len(table), segments.numel, table, m.numpy(), v.numpy(), w.numpy(), coefficient.numpy(),
        *map(np.float32, (beta1, 1 - beta1, beta2, 1 - beta2, rule.eps)), rule.lr, np.float32(rule.decay),
        *rule.coefficients, rule.coefficient_beta,
    )  # fmt: skip


def live(segments: Segments, p: torch.Tensor, course: torch.Tensor, rule: LayerRule) -> None:
    slow, table = rule.coefficient_beta, segments.table
    split(
        _live, len(table), segments.numel, table, p.numpy(), course.numpy(), np.float32(slow), np.float32(1 - slow),
        rule.lr, np.float32(rule.decay), *rule.coefficients,
    )  # fmt: skip


def frozen(
    segments: Segments, p: torch.Tensor, w: torch.Tensor, r: torch.Tensor, fresh: torch.Tensor, floor: torch.Tensor,
    coefficient: torch.Tensor, factor: torch.Tensor, rule: LayerRule,
) -> None:  # fmt: skip
    (beta1, beta2), table = rule.betas, segments.table
    split(
        _frozen, len(table), segments.numel, table, p.numpy(), w.numpy(), r.numpy(), fresh.numpy(), floor.numpy(),
        coefficient.numpy(), factor.numpy(), *map(np.float32, (beta1, 1 / (1 - beta1), beta2, 1 - beta2, rule.eps)),
        rule.lr, np.float32(rule.decay), *rule.factors, rule.factor_change,
    )  # fmt: skip
