"""LAMB on CPU: two passes per layer, the second while a layer that fits is still in the cache.

The first pass updates the states and sums squares, the second updates x. Bytes per parameter to and
from memory, if a layer fits into a cache: ``exact`` 28, ``live`` 28, ``frozen`` 32. The second pass
also reads 8 bytes from the cache, which are not free. One thread processes a layer, so that sums
have a fixed order. The loops are in ``sources.lamb_loops``.
"""

import numpy as np
import torch

from commpress.kernels.adam import Segments
from commpress.kernels.cpu.adam import PAST
from commpress.kernels.cpu.calls import Kernels, split
from commpress.kernels.lamb import LayerRule

loops = Kernels("lamb_loops")


def exact(
    segments: Segments,
    m: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    coefficient: torch.Tensor,
    rule: LayerRule,
) -> None:
    (beta1, beta2), table = rule.betas, segments.table
    split(
        loops.exact,
        len(table),
        segments.numel,
        table,
        m.numpy(),
        v.numpy(),
        w.numpy(),
        coefficient.numpy(),
        *map(np.float32, (beta1, 1 - beta1, beta2, 1 - beta2, rule.eps)),
        rule.lr,
        np.float32(rule.decay),
        *rule.coefficients,
        rule.coefficient_beta,
    )


def live(
    segments: Segments,
    p: torch.Tensor,
    v: torch.Tensor,
    m: torch.Tensor,
    course: torch.Tensor,
    divisors: np.ndarray,
    rule: LayerRule,
    *,
    most: float,
) -> None:
    slow, table = rule.coefficient_beta, segments.table
    split(
        loops.live,
        len(table),
        segments.numel,
        table,
        divisors,
        p.numpy(),
        v.numpy(),
        m.numpy(),
        course.numpy(),
        np.float32(slow),
        np.float32(1 - slow),
        rule.lr,
        np.float32(rule.decay),
        *rule.coefficients,
        np.float32(most),
        segments.numel >= PAST,
    )


def frozen(
    segments: Segments,
    p: torch.Tensor,
    v: torch.Tensor,
    m: torch.Tensor,
    fresh: torch.Tensor,
    divisors: np.ndarray,
    coefficient: torch.Tensor,
    factor: torch.Tensor,
    rule: LayerRule,
    *,
    most: float,
) -> None:
    (beta1, beta2), table = rule.betas, segments.table
    split(
        loops.frozen,
        len(table),
        segments.numel,
        table,
        divisors,
        p.numpy(),
        v.numpy(),
        m.numpy(),
        fresh.numpy(),
        coefficient.numpy(),
        factor.numpy(),
        *map(np.float32, (beta1, 1 / (1 - beta1), beta2, 1 - beta2)),
        rule.lr,
        np.float32(rule.decay),
        *rule.factors,
        rule.factor_change,
        np.float32(most),
        segments.numel >= PAST,
    )
