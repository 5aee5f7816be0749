"""Costs of the arithmetic, and kernels that cost it without computing.

``SizedKernels`` has the names and arguments of ``kernels.cpu``. It looks at tables and shapes,
never at numbers, and charges what the real ones took per element when they were measured. So the
generators of ``collectives`` run unchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import thread_time
from typing import Any

import numpy as np
import torch

from commpress.codecs import Codec, codec_named
from commpress.collectives.buckets import one_message
from commpress.feedback import ErrorFeedback
from commpress.kernels.devices import arithmetic, low_rank_arithmetic
from commpress.kernels.matrices import RANK, TALL, WIDE, Matrices, Matrix, stack
from commpress.kernels.pieces import KIND, NUMEL, WIDTH, Pieces
from commpress.plan.cluster import CALL

CODECS = (
    "none", "bf16", "fp16", "int8", "int4", "fp8", "sign", "sign-l1", "ternary", "terngrad",
    "bits4",
)  # fmt: skip
ROWS = 4  # of a message
_ENOUGH, _LEAST, _MOST = 0.05, 6, 60  # seconds of calls, and calls
BEYOND, _RANK = 1 << 23, 4  # longer than caches: gradients and residuals come from memory


@dataclass(frozen=True)
class Cost:
    """Seconds per element of one codec, one thread."""

    encode: float  # with the residual, where the codec has one
    add: float  # decode one row and add it to a sum
    decode: float


@dataclass(frozen=True)
class Costs:
    """Costs on one rank's processor."""

    # by kernel kind; kinds not listed cost as much as the dearest that is
    codecs: Mapping[int, Cost]
    memory: float  # seconds per byte that is read or written
    product: float  # seconds per multiply-add of a low-rank product
    call: float = CALL

    def of(self, kind: int) -> Cost:
        if kind in self.codecs:
            return self.codecs[kind]
        same = [cost for other, cost in self.codecs.items() if other & 255 == kind & 255]
        return same[0] if same else max(self.codecs.values(), key=lambda cost: cost.encode)


def device_costs(memory_bandwidth: float) -> Costs:
    """Costs on an accelerator: every kernel is one pass over memory at ``memory_bandwidth`` bytes
    per second."""
    byte = 1 / memory_bandwidth
    codecs = {}
    for name in CODECS:
        codec = codec_named(name)
        sent = codec.row_bytes(4096) / 4096
        kept = 8 if codec.feedback and not codec.lossless else 0
        codecs[codec.kind] = Cost((4 + kept + sent) * byte, sent * byte, (4 + sent) * byte)
    return Costs(codecs, byte, byte / 10)


def measure_costs(names: Sequence[str] = CODECS, *, numel: int = BEYOND) -> Costs:
    """Measure one thread of this processor by running the kernels; about half a second for each
    codec."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        codecs = {codec.kind: _cost(codec, numel) for codec in map(codec_named, names)}
        return Costs(codecs, _memory(numel), _product())
    finally:
        torch.set_num_threads(threads)


def encoding(x: torch.Tensor, message: torch.Tensor, pieces: Pieces) -> Callable[[], None]:
    """A kernel call on the CPU, always the same."""
    kernels, flag = arithmetic(x.device, pieces), torch.zeros(1, dtype=torch.uint8)
    old, new = (
        ErrorFeedback.zeros(pieces, x.device) if pieces.residual_numel else None for _ in range(2)
    )
    return lambda: kernels.encode(
        x,
        message,
        flag,
        pieces,
        residual=old and old.sent,
        residual_scale=old and old.sent_scale,
        new_residual=new and new.sent,
        new_scale=new and new.sent_scale,
    )


def _cost(codec: Codec, numel: int) -> Cost:
    pieces = one_message(numel, codec, ROWS).pieces
    kernels = arithmetic(torch.device("cpu"), pieces)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    message = torch.zeros(ROWS, pieces.row_bytes, dtype=torch.uint8)
    encode = encoding(x, message, pieces)
    out = torch.zeros(int(pieces.table[0, WIDTH]))
    add = _usual(lambda: kernels.decode_mean(message, out, pieces, 0))
    decode = _usual(lambda: kernels.decode(message, x, pieces))
    return Cost(_usual(encode) / numel, add / numel, decode / numel)


def _memory(numel: int) -> float:
    a, b = torch.ones(numel), torch.ones(numel)
    return _usual(lambda: a.copy_(b)) / (8 * numel)


def _product() -> float:
    kernels = low_rank_arithmetic(torch.device("cpu"))
    side = 1024
    matrices = stack([Matrix(0, side, side, _RANK)])
    x, m, p, q = (torch.ones(side * width) for width in (side, side, _RANK, _RANK))
    took = _usual(lambda: kernels.project(x, None, m, p, q, matrices))
    took += _usual(lambda: kernels.fold(m, p, q, matrices))
    return took / (3 * _RANK * side * side)


def _usual(call: Any) -> float:
    """Take the median seconds of a call on this thread alone, so that others who use the processor
    count little. Short calls repeat more."""
    took: list[float] = []
    while len(took) < _LEAST or (sum(took) < _ENOUGH and len(took) < _MOST):
        start = thread_time()
        call()
        took.append(thread_time() - start)
    return median(took[1:])


# ---------------------------------------------------------------- instead of computing


@dataclass
class SizedKernels:
    """Kernels of one rank, which charge seconds to it."""

    costs: Costs
    seconds: float = 0.0  # that its arithmetic has cost so far

    def encode(self, x: Any, message: Any, flag: Any, pieces: Pieces, **_: Any) -> None:
        self._charge(sum(n * cost.encode for n, cost in self._each(pieces, NUMEL)))

    def serve(
        self, received: Any, message: Any, flag: Any, pieces: Pieces, rank: int, **_: Any
    ) -> None:
        rows, each = received.shape[0], self._each(pieces, WIDTH)
        self._charge(sum(n * (rows * cost.add + cost.encode) for n, cost in each))

    def decode(self, message: Any, out: Any, pieces: Pieces, **_: Any) -> None:
        self._charge(sum(n * cost.decode for n, cost in self._each(pieces, NUMEL)))

    def decode_mean(self, received: Any, out: Any, pieces: Pieces, rank: int, **_: Any) -> None:
        self._charge(sum(n * received.shape[0] * cost.add for n, cost in self._each(pieces, WIDTH)))

    def settle(self, value: Any, scale: Any, pieces: Pieces, **_: Any) -> None:
        self.moved(8 * value.numel())

    def project(
        self, x: Any, residual: Any, m: Any, p: Any, q: Any, matrices: Matrices, **_: Any
    ) -> None:
        moved = (8 if residual is None else 12) * matrices.numel * self.costs.memory
        self._products(matrices, plus=moved)

    def fold(self, m: Any, p: Any, q: Any, matrices: Matrices, *, subtract: bool = True) -> None:
        self._products(matrices, times=2 if subtract else 1)

    def expand(self, p: Any, q: Any, x: Any, matrices: Matrices, **_: Any) -> None:
        self._products(matrices)

    def orthonormalize_left(self, p: Any, matrices: Matrices) -> None:
        self._squares(matrices, TALL)

    def orthonormalize_right(self, q: Any, matrices: Matrices, key: int) -> None:
        self._squares(matrices, WIDE)

    def moved(self, nbytes: float) -> None:
        """Charge bytes that are read and written."""
        self._charge(nbytes * self.costs.memory)

    def _products(self, matrices: Matrices, *, times: int = 1, plus: float = 0.0) -> None:
        products = float(matrices.table[:, [TALL, WIDE, RANK]].prod(axis=1).sum())
        self._charge(products * times * self.costs.product + plus)

    def _squares(self, matrices: Matrices, side: int) -> None:
        products = float((matrices.table[:, side] * matrices.table[:, RANK] ** 2).sum())
        self._charge(products * self.costs.product)

    def _charge(self, seconds: float) -> None:
        self.seconds += seconds + self.costs.call

    def _each(self, pieces: Pieces, column: int) -> list[tuple[int, Cost]]:
        """Elements of each kind of codec, and what one costs."""
        kinds = pieces.table[:, KIND]
        return [
            (int(pieces.table[kinds == kind, column].sum()), self.costs.of(int(kind)))
            for kind in np.unique(kinds)
        ]
