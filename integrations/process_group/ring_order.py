"""The order of summation in a ring: with it sums over MPI have Gloo's bits, although all parts are
received at once.

Gloo divides a buffer into one chunk per rank. Chunk c starts at rank c − 1 and passes down the
ring, and each rank adds its own numbers to it: x_c + (x_{c+1} + (… (x_{c−2} + x_{c−1}))). Rounding
depends only on that order.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from commpress.errors import InvalidArgument

SEGMENT = 1 << 20  # bytes that Gloo sends at a time
BLOCK = 1 << 16  # elements reduced at a time, which fit into the cache
_FOLDS: tuple[Callable[..., torch.Tensor] | None, ...] = (  # by number of torch's reduction
    torch.add,
    torch.add,
    torch.mul,
    torch.minimum,
    torch.maximum,
    torch.bitwise_and,
    torch.bitwise_or,
    torch.bitwise_xor,
)
_AVERAGE = 1


def chunk(numel: int, itemsize: int, size: int, *, even: bool = True) -> int:
    """Return the elements of one rank's chunk; the last ranks may have fewer, or none.

    A chunk consists of segments. Gloo's all-reduce makes all segments equally long, its reduce (not
    ``even``) all but the last as long as possible.
    """
    total, longest = numel * itemsize, SEGMENT - SEGMENT % itemsize
    count = _round_up(max(-(-total // longest), 2 * size), size)
    segment = _round_up(-(-total // count), itemsize)
    if not even:
        segment = _round_up(min(-(-total // (2 * size)), longest), itemsize)
        count = _round_up(max(-(-total // max(segment, 1)), 2 * size), size)
    return max(count // size * segment // itemsize, 1)


def bounds(rank: int, numel: int, per_rank: int) -> tuple[int, int]:
    return min(rank * per_rank, numel), min((rank + 1) * per_rank, numel)


class Fold:
    """A reduction among ``size`` ranks."""

    def __init__(self, number: int, dtype: torch.dtype, size: int) -> None:
        call = _FOLDS[number] if number < len(_FOLDS) else None
        if call is None or (number == _AVERAGE and not dtype.is_floating_point):
            raise InvalidArgument(
                f"reduction number {number} of {dtype} is not offered over MPI: expected sum, avg "
                "(of floats), product, min, max, band, bor or bxor"
            )
        self.call, self.size, self.average = call, size, number == _AVERAGE

    def __call__(
        self, parts: Sequence[torch.Tensor], out: torch.Tensor, start: int, per_rank: int
    ) -> None:
        """Set ``out`` to the reduction of ``parts`` (one per rank), which begin at element
        ``start`` of the buffer.

        ``out`` may be one of them.
        """
        if self.size == 1:
            out.copy_(parts[0])
            return
        scratch = torch.empty(min(BLOCK, out.numel()), dtype=out.dtype)
        for low, high, owner in _blocks(start, start + out.numel(), per_rank):
            span = slice(low - start, high - start)
            order = [parts[(owner - i) % self.size][span] for i in range(1, self.size + 1)]
            total = order[0]
            for i, part in enumerate(order[1:], 2):
                total = self.call(
                    part, total, out=out[span] if i == self.size else scratch[: high - low]
                )
            if self.average:
                total.div_(self.size)


def _blocks(low: int, high: int, per_rank: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, chunk) of ranges of elements inside one chunk, of limited length."""
    while low < high:
        owner = low // per_rank
        end = min(high, (owner + 1) * per_rank, low + BLOCK)
        yield low, end, owner
        low = end


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
