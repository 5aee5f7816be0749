"""LAMB on CPU: two passes per layer, the second while a layer that fits is still in the cache.

The first pass updates what the step updates and sums squares, the second moves x: ``exact`` 32 + 12 bytes per parameter,
``live`` 16 + 12, ``frozen`` 24 + 12, of which a layer that fits into a cache takes the second part from there. One thread
walks a layer, so sums have one order.
"""

import numpy as np
import torch

from commpress.kernels.adam import Segments
from commpress.kernels.cpu_adam import gradient
from commpress.kernels.cpu_arrays import SHORT, bare, floats, short
from commpress.kernels.cpu_threads import split
from commpress.kernels.lamb import LayerRule


@bare
def _within(value, low, high):
    return min(max(value, low), high)


@bare
def _rate(of_x, of_w, low, high):
    """‖x‖ / ‖w‖ within its bounds, from sums of squares; 1 where either is zero."""
    x, w = of_x.sum(), of_w.sum()
    return _within(np.sqrt(x) / np.sqrt(w), low, high) if x > 0 and w > 0 else 1.0


@bare
def _exact(table, m, v, w, coefficient, beta1, alpha1, beta2, alpha2, eps, lr, decay, low, high, slow, start, stop):
    of_x, of_w = short(np.float64), short(np.float64)
    for s in range(start, stop):
        x, first = floats(table[s, 0], table[s, 3]), table[s, 2]
        address, share = gradient(table[s], m, alpha1)
        g = floats(address, x.size)
        power = alpha2 if share else np.float32(0)
        w_of_layer = w[first : first + x.size]
        of_x[:] = 0.0
        of_w[:] = 0.0
        for at in range(0, x.size, SHORT):
            x_, g_, w_ = x[at : at + SHORT], g[at : at + SHORT], w_of_layer[at : at + SHORT]
            m_, v_ = m[first + at : first + at + x_.size], v[first + at : first + at + x_.size]
            for i in range(x_.size):
                v_[i] = beta2 * v_[i] + power * (g_[i] * g_[i])
            for i in range(x_.size):
                m_[i] = beta1 * m_[i] + share * g_[i]
            for i in range(x_.size):
                w_[i] = m_[i] / (np.sqrt(v_[i]) + eps) + decay * x_[i]
            for i in range(x_.size):
                of_x[i] += np.float64(x_[i]) * np.float64(x_[i])
                of_w[i] += np.float64(w_[i]) * np.float64(w_[i])
        rate = _rate(of_x, of_w, low, high)
        before = np.float64(coefficient[s])
        coefficient[s] = rate if before == 0 else rate + slow * (before - rate)
        step = np.float32(lr * rate)
        for i in range(x.size):
            x[i] = x[i] - step * w_of_layer[i]


@bare
def _live(table, p, course, slow, quick, lr, decay, low, high, start, stop):
    of_x, of_w, w = short(np.float64), short(np.float64), short(np.float32)
    for s in range(start, stop):
        x, first = floats(table[s, 0], table[s, 3]), table[s, 2]
        p_of_layer = p[first : first + x.size]
        of_x[:] = 0.0
        of_w[:] = 0.0
        for at in range(0, x.size, SHORT):
            x_, p_, w_ = x[at : at + SHORT], p_of_layer[at : at + SHORT], w[: x.size - at]
            course_ = course[first + at : first + at + x_.size]
            for i in range(x_.size):
                course_[i] = slow * course_[i] + quick * p_[i]
            for i in range(x_.size):
                w_[i] = course_[i] + decay * x_[i]
            for i in range(x_.size):
                of_x[i] += np.float64(x_[i]) * np.float64(x_[i])
                of_w[i] += np.float64(w_[i]) * np.float64(w_[i])
        rate = np.float32(lr * _rate(of_x, of_w, low, high))
        for i in range(x.size):
            x[i] = x[i] - rate * (p_of_layer[i] + decay * x[i])


@bare
def _frozen(
    table, p, w, r, fresh, floor, coefficient, factor, beta1, scale, beta2, alpha2, eps, lr, decay, low, high, change,
    start, stop,
):  # fmt: skip
    of_direction, of_w = short(np.float64), short(np.float64)
    least, course = short(np.float32), short(np.float32)
    for s in range(start, stop):
        x, first = floats(table[s, 0], table[s, 3]), table[s, 2]
        if x.size == 0:
            continue
        before, smallest = w[first : first + x.size], floor[s]
        p_of_layer = p[first : first + x.size]
        of_direction[:] = 0.0
        of_w[:] = 0.0
        least[:] = np.inf
        for at in range(0, x.size, SHORT):
            x_, w_ = x[at : at + SHORT], before[at : at + SHORT]
            a, b = first + at, first + at + x_.size
            p_, r_, fresh_ = p[a:b], r[a:b], fresh[a:b]
            for i in range(x_.size):
                g = (p_[i] - beta1 * w_[i]) * scale / r_[i]
                fresh_[i] = beta2 * fresh_[i] + alpha2 * (g * g)
            for i in range(x_.size):
                known = fresh_[i] if fresh_[i] > smallest else smallest
                ratio = (np.sqrt(known) + eps) * r_[i]
                least[i] = ratio if ratio < least[i] else least[i]
            if decay != 0:
                for i in range(x_.size):
                    course[i] = p_[i] + decay * x_[i]
                for i in range(x_.size):
                    of_direction[i] += np.float64(p_[i]) * np.float64(p_[i])
                    of_w[i] += np.float64(course[i]) * np.float64(course[i])
        for i in range(SHORT):
            least[0] = min(least[0], least[i])
        f = 1.0 / np.float64(least[0])
        if of_w.sum() > 0:
            share = min(np.sqrt(of_direction.sum() / of_w.sum()), 1.0)
            f = f * share + 1.0 - share
        last = np.float64(factor[s])
        f = _within(_within(_within(f, low, high), last * (1 - change), last * (1 + change)), low, high)
        factor[s] = f
        step = np.float32(lr * np.float64(coefficient[s]) * f)
        for i in range(x.size):
            x[i] = x[i] - step * (p_of_layer[i] + decay * x[i])


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
