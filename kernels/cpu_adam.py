"""The optimizers' arithmetic on CPU: one pass over memory per call, no loop over tensors in Python.

Note: what a pass costs. AdamW reads x, g, m, v and writes x, m, v: 28 bytes per parameter. A line that is written without
having been read is fetched all the same, 8 bytes instead of 4, unless it is stored past the caches, which calls for many
elements do (``put``): ``blend`` then moves 12, ``aim`` 16, or 12 if messages say p, ``descend`` 12, ``accumulate`` 20, or 12
if messages say m and there is no u, ``wander`` 32, or 28 if messages say m, ``square_sum`` 4, and ``land`` 8 more than
decoding, or 4 if p is not stored.

Numba walks a table of addresses, because gradients live wherever autograd put them. Every function is that of ``adam``
with the same name; results do not depend on the number of threads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from commpress.kernels import cpu
from commpress.kernels.adam import Segments
from commpress.kernels.cpu_land import Runs, land_signs
from commpress.kernels.cpu_land import runs as runs
from commpress.kernels.cpu_threads import split
from commpress.kernels.pieces import BLOCKS, KIND, NUMEL, SOURCE
from commpress.kernels.reference import SIGN_RMS
from commpress.kernels.sources import adam as loops

PAST = 1 << 22  # a call that handles so many elements leaves none of them in a cache


def _run(kernel: Callable[..., Any], segments: Segments, *args: Any) -> None:
    split(kernel, segments.numel, segments.numel, segments.table, *args)


def _said_at(segments: Segments, said: Runs) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of x and of g, or 0, for each line of what messages say."""
    layers = segments.table[said.owners]
    skip = 4 * (said.lines[:, SOURCE] - layers[:, 2])
    return layers[:, 0] + skip, np.where(layers[:, 1] == 0, 0, layers[:, 1] + skip)


def _run_said(kernel: Callable[..., Any], segments: Segments, said: Runs, *args: Any) -> list[Any]:
    return split(kernel, int(said.lines[:, BLOCKS].sum()), segments.numel, said.lines, *args, segments.numel >= PAST)


def _array(buffer: torch.Tensor) -> np.ndarray | None:
    return buffer.numpy() if buffer.numel() else None


def _share(share: float | None) -> np.float32 | None:
    return None if share is None else np.float32(share)


def blend(segments, m, out, *, beta, gain):
    scalars = map(np.float32, (beta, (1 - beta) * gain))
    _run(loops.blend, segments, m.numpy(), out.numpy(), *scalars, segments.numel >= PAST)


def aim(segments, p, r, out, *, beta, gain, said=None):
    buffers, scalars = (b.numpy() for b in (p, r, out)), map(np.float32, (beta, (1 - beta) * gain))
    if said is None:
        _run(loops.aim, segments, *buffers, *scalars, segments.numel >= PAST)
        return
    _, gradients = _said_at(segments, said)
    _run_said(loops.aim_from, segments, said, gradients, *buffers, *scalars)


def descend(segments, p, a, *, step, keep):
    if p.numel():
        _run(loops.descend, segments, p.numpy(), _array(a), np.float32(step), np.float32(keep), segments.numel >= PAST)


def land(rows, pieces, segments, p, a, *, steps, keeps, stored=True):
    signs = pieces.table[:, KIND] <= SIGN_RMS
    past, lines, anchor = pieces.numel >= PAST, segments.table, _array(a)
    if signs.any():
        land_signs(rows, pieces.table[signs], lines[signs], p if stored else None, anchor, steps[signs], keeps[signs], past)
    if signs.all():
        return
    others = replace(pieces, table=pieces.table[~signs], numel=int(pieces.table[~signs, NUMEL].sum()))
    cpu.decode(rows, p, others)
    for step, keep in {*zip(steps[~signs].tolist(), keeps[~signs].tolist(), strict=True)}:
        alike = lines[~signs & (steps == step) & (keeps == keep)]
        numel = int(alike[:, 3].sum())
        split(loops.descend, numel, numel, alike, p.numpy(), anchor, np.float32(step), np.float32(keep), past)


def accumulate(segments, m, u, r, out, *, beta, gain, lr, keep, share=None, said=None):
    if said is not None and not u.numel():
        buffers, scalars = (b.numpy() for b in (m, r, out)), map(np.float32, (beta, (1 - beta) * gain, lr, share))
        _, gradients = _said_at(segments, said)
        _run_said(loops.accumulate_from, segments, said, gradients, *buffers, *scalars)
        return
    buffers, scalars = map(_array, (m, u, r, out)), map(np.float32, (beta, (1 - beta) * gain, lr, keep))
    if m.numel():
        _run(loops.accumulate, segments, *buffers, *scalars, _share(share), segments.numel >= PAST)


def wander(segments, m, u, a, r, *, beta, gain, lr, keep, kept, begins, share=None, said=None):
    buffers = [b.numpy() for b in (m, u, a, r)]
    if said is not None and begins:
        scalars = map(np.float32, (beta, (1 - beta) * gain, lr, kept, share))
        return not any(_run_said(loops.wander_from, segments, said, *_said_at(segments, said), *buffers, *scalars))
    scalars = map(np.float32, (beta, (1 - beta) * gain, lr, keep, kept))
    how = _share(share), begins, segments.numel >= PAST
    return not any(split(loops.wander, segments.numel, segments.numel, segments.table, *buffers, *scalars, *how))


def square_sum(segments):
    totals = np.empty(len(segments.table))
    split(loops.square_sums, len(totals), segments.numel, segments.table, totals)
    return float(totals.sum())
