"""PowerSGD: a matrix as the product of two thin ones. Not a codec of rows: ``collectives.low_rank`` says how it travels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from commpress.codecs.codec import NotOfRows
from commpress.errors import InvalidArgument


@dataclass(frozen=True)
class LowRankCodec(NotOfRows):
    """Rank ``rank`` for tensors of two and more dimensions, seen as matrices of shape[0] rows.

    A tensor of one dimension, and one whose factors would have more than 1 / ``min_rate`` of its elements, travels exactly.
    For gradients, by itself or inside a policy; calls that know no shapes refuse it.
    """

    rank: int = 4
    min_rate: float = 2.0
    lossless: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or not 1 <= self.rank <= 1024:
            raise InvalidArgument(f"rank is {self.rank!r}, expected a whole number from 1 to 1024")
        if not self.min_rate > 0:
            raise InvalidArgument(f"min_rate is {self.min_rate!r}, expected a number above 0, such as 2")

    def matrix(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Rows, columns and rank of a tensor of this shape, or None if it travels exactly."""
        if len(shape) < 2 or 0 in shape:
            return None
        tall, wide = shape[0], math.prod(shape[1:])
        rank = min(self.rank, tall, wide)
        return (tall, wide, rank) if (tall + wide) * rank * self.min_rate < tall * wide else None

    def takes(self, shape: Sequence[int]) -> bool:
        return self.matrix(shape) is not None

    @property
    def spec(self) -> str:
        return f"powersgd/{self.rank}/{self.min_rate:g}"
