"""LAMB on CPU: two passes per layer, the second while a layer that fits is still in the cache.

The first pass updates what the step updates and sums squares, the second moves x. Bytes per parameter to and from memory, if a
layer fits into a cache: ``exact`` 28, ``live`` 16, ``frozen`` 20, or 24 if only the buffer has the mean before; 4 more if signs
are stored. What the second pass finds in a cache, 8 bytes or 4, is not free either. One thread walks a layer, so sums
have one order.

Note: signs are decoded twice, in either pass, rather than read again: they are in registers, and 32 times shorter. If they are
to be stored, the first pass does, past the caches. Nothing inside a loop may be a function of its own, but an intrinsic:
Numba does not always put a ``bare`` one in its place, and a call saves and restores every vector there is.
"""

from dataclasses import replace

import numpy as np
import torch

from commpress.kernels import cpu
from commpress.kernels.adam import Segments
from commpress.kernels.cpu_adam import PAST
from commpress.kernels.cpu_land import Runs
from commpress.kernels.cpu_threads import split
from commpress.kernels.lamb import LayerRule
from commpress.kernels.pieces import KIND, NUMEL, Pieces
from commpress.kernels.reference import SIGN_RMS
from commpress.kernels.sources import lamb as loops


def decode(rows: torch.Tensor, pieces: Pieces, p: torch.Tensor) -> None:
    """All but signs."""
    others = pieces.table[pieces.table[:, KIND] > SIGN_RMS]
    if len(others):
        cpu.decode(rows, p, replace(pieces, table=others, numel=int(others[:, NUMEL].sum())))


def exact(
    segments: Segments, m: torch.Tensor, v: torch.Tensor, w: torch.Tensor, coefficient: torch.Tensor, rule: LayerRule
) -> None:
    (beta1, beta2), table = rule.betas, segments.table
    split(
        loops.exact, len(table), segments.numel, table, m.numpy(), v.numpy(), w.numpy(), coefficient.numpy(),
        *map(np.float32, (beta1, 1 - beta1, beta2, 1 - beta2, rule.eps)), rule.lr, np.float32(rule.decay),
        *rule.coefficients, rule.coefficient_beta,
    )  # fmt: skip


def live(
    segments: Segments, runs: Runs, p: torch.Tensor, course: torch.Tensor, rule: LayerRule, *, stored: bool = True
) -> None:
    slow, table, mean = rule.coefficient_beta, segments.table, p.numpy()
    split(
        loops.live, len(table), segments.numel, table, runs.edges, runs.lines, mean, mean if stored else None, course.numpy(),
        np.float32(slow), np.float32(1 - slow), rule.lr, np.float32(rule.decay), *rule.coefficients, segments.numel >= PAST,
    )  # fmt: skip


def frozen(
    segments: Segments, runs: Runs, before: Runs | None, p: torch.Tensor, w: torch.Tensor, r: torch.Tensor,
    fresh: torch.Tensor, floor: torch.Tensor, coefficient: torch.Tensor, factor: torch.Tensor, rule: LayerRule, *,
    stored: bool = True,
) -> None:  # fmt: skip
    (beta1, beta2), table, mean = rule.betas, segments.table, p.numpy()
    known = before.lines if before is not None and runs.alike(before) else runs.unsaid()
    split(
        loops.frozen, len(table), segments.numel, table, runs.edges, runs.lines, known, mean, mean if stored else None,
        w.numpy(), r.numpy(), fresh.numpy(), floor.numpy(), coefficient.numpy(), factor.numpy(),
        *map(np.float32, (beta1, 1 / (1 - beta1), beta2, 1 - beta2, rule.eps)), rule.lr, np.float32(rule.decay), *rule.factors,
        rule.factor_change, segments.numel >= PAST,
    )  # fmt: skip
