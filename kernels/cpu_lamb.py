"""LAMB on CPU: two passes per layer, the second while a layer that fits is still in the cache.

The first pass updates what the step updates and leaves w in place, the second is x := x − rate·w: 40 bytes per parameter
from memory where a layer does not fit, 28 where it does. One thread walks a layer, so sums have one order.
"""

import numpy as np
import torch

from commpress.kernels.adam import Segments
from commpress.kernels.cpu import split
from commpress.kernels.cpu_adam import _part, _push
from commpress.kernels.cpu_blocks import jit, tree_sum
from commpress.kernels.lamb import LayerRule
from commpress.kernels.reference import CHUNK


@jit
def _squares(x, work, tree):
    """Σ x² of at most CHUNK elements."""
    for i in range(x.size):
        work[i] = x[i]
    for i in range(x.size, CHUNK):
        work[i] = np.float32(0)
    return np.float64(tree_sum(work, tree, CHUNK, True))


@jit
def _take(x, w, rate):
    for i in range(x.size):
        x[i] = x[i] - rate * w[i]


@jit
def _within(value, low, high):
    return min(max(value, low), high)


@jit
def _exact(table, m, v, w, coefficient, beta1, alpha1, beta2, alpha2, eps, lr, decay, low, high, slow, start, stop):
    work, tree = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    for s in range(start, stop):
        x, first = _part(table, s, 0, 0, 0, table[s, 3])
        g, _ = _part(table, s, 1, 0, 0, table[s, 3])
        absent = table[s, 1] == 0
        w_of_layer = w[first : first + x.size]
        of_x, of_w = 0.0, 0.0
        for at in range(0, x.size, CHUNK):
            x_, g_, w_ = x[at : at + CHUNK], g[at : at + CHUNK], w_of_layer[at : at + CHUNK]
            m_, v_ = m[first + at : first + at + x_.size], v[first + at : first + at + x_.size]
            _push(g_, absent, m_, m_, beta1, alpha1)
            if absent:
                for i in range(x_.size):
                    v_[i] = beta2 * v_[i]
            else:
                for i in range(x_.size):
                    v_[i] = beta2 * v_[i] + alpha2 * (g_[i] * g_[i])
            for i in range(x_.size):
                w_[i] = m_[i] / (np.sqrt(v_[i]) + eps) + decay * x_[i]
            of_x += _squares(x_, work, tree)
            of_w += _squares(w_, work, tree)
        rate = _within(np.sqrt(of_x) / np.sqrt(of_w), low, high) if of_x > 0 and of_w > 0 else 1.0
        before = np.float64(coefficient[s])
        coefficient[s] = rate if before == 0 else rate + slow * (before - rate)
        _take(x, w_of_layer, np.float32(lr * rate))


@jit
def _frozen(
    table, m, w, r, fresh, floor, coefficient, factor, beta1, scale, beta2, alpha2, eps, lr, decay, low, high, change,
    start, stop,
):  # fmt: skip
    work, tree, least = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    for s in range(start, stop):
        x, first = _part(table, s, 0, 0, 0, table[s, 3])
        if x.size == 0:
            continue
        w_of_layer, smallest = w[first : first + x.size], floor[s]
        of_direction, of_w = 0.0, 0.0
        least[:] = np.inf
        for at in range(0, x.size, CHUNK):
            x_, w_ = x[at : at + CHUNK], w_of_layer[at : at + CHUNK]
            a, b = first + at, first + at + x_.size
            m_, r_, fresh_ = m[a:b], r[a:b], fresh[a:b]
            for i in range(x_.size):
                g = (m_[i] - beta1 * w_[i]) * scale
                fresh_[i] = beta2 * fresh_[i] + alpha2 * (g * g)
                w_[i] = m_[i] * r_[i]
            for i in range(x_.size):
                known = fresh_[i] if fresh_[i] > smallest else smallest
                ratio = (np.sqrt(known) + eps) * r_[i]
                least[i] = ratio if ratio < least[i] else least[i]
            if decay != 0:
                of_direction += _squares(w_, work, tree)
                for i in range(x_.size):
                    w_[i] = w_[i] + decay * x_[i]
                of_w += _squares(w_, work, tree)
        f = 1.0 / np.float64(least.min())
        if decay != 0 and of_w > 0:
            share = min(np.sqrt(of_direction / of_w), 1.0)
            f = f * share + 1.0 - share
        last = np.float64(factor[s])
        f = _within(_within(_within(f, low, high), last * (1 - change), last * (1 + change)), low, high)
        factor[s] = f
        _take(x, w_of_layer, np.float32(lr * np.float64(coefficient[s]) * f))


def exact(
    segments: Segments, m: torch.Tensor, v: torch.Tensor, w: torch.Tensor, coefficient: torch.Tensor, rule: LayerRule
) -> None:
    (beta1, beta2), table = rule.betas, segments.table
    split(
        _exact, len(table), segments.numel, table, m.numpy(), v.numpy(), w.numpy(), coefficient.numpy(),
        *map(np.float32, (beta1, 1 - beta1, beta2, 1 - beta2, rule.eps)), rule.lr, np.float32(rule.decay),
        *rule.coefficients, rule.coefficient_beta,
    )  # fmt: skip


def frozen(
    segments: Segments, m: torch.Tensor, w: torch.Tensor, r: torch.Tensor, fresh: torch.Tensor, floor: torch.Tensor,
    coefficient: torch.Tensor, factor: torch.Tensor, rule: LayerRule,
) -> None:  # fmt: skip
    (beta1, beta2), table = rule.betas, segments.table
    split(
        _frozen, len(table), segments.numel, table, m.numpy(), w.numpy(), r.numpy(), fresh.numpy(), floor.numpy(),
        coefficient.numpy(), factor.numpy(), *map(np.float32, (beta1, 1 / (1 - beta1), beta2, 1 - beta2, rule.eps)),
        rule.lr, np.float32(rule.decay), *rule.factors, rule.factor_change,
    )  # fmt: skip
