"""Codecs of whole tensors: PowerSGD, as sent by ``collectives.powersgd``."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from commpress.codecs.codec import Codec, NoRows
from commpress.codecs.family import EXACT, BlockCodec
from commpress.errors import InvalidArgument


class WholeTensorCodec(NoRows):
    """A codec of tensors with their shapes. Exchanges of whole tensors take it; calls that see flat
    rows refuse it."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """Every option in ASCII bytes, as for any codec."""

    @abstractmethod
    def takes(self, shape: Sequence[int]) -> bool:
        """Return whether it compresses a tensor of this shape; others travel in ``rows``."""

    @property
    def rows(self) -> Codec:
        """The codec of tensors that it does not take."""
        return EXACT

    @abstractmethod
    def bits(self, shape: Sequence[int], ranks: int) -> float:
        """Return the bits per element of a tensor that it takes, averaged over sending and
        receiving."""

    def refuse(self) -> NoReturn:
        raise InvalidArgument(
            f"codec {self.spec!r} compresses whole tensors, and this call sees rows of a flat "
            "buffer: use it with "
            "commpress.compress(ddp, codec=...), compress_fsdp(model, codec=...), "
            "Partitioned(codec=...) or OneBitAdam("
            "codec=...), or choose a codec of rows such as 'int4' here"
        )


def travels_whole(codec: object, shape: Sequence[int]) -> bool:
    """Return whether this codec compresses a tensor of this shape as a whole. False also if a codec
    of whole tensors leaves it alone; it then travels in rows."""
    return isinstance(codec, WholeTensorCodec) and codec.takes(shape)


@dataclass(frozen=True)
class LowRankCodec(WholeTensorCodec):
    """PowerSGD: send tensors of two or more dimensions, as matrices of shape[0] rows, by two
    factors of ``rank`` columns.

    A tensor travels in rows if it has one dimension or if its factors would have more than 1 /
    ``min_rate`` of its elements. ``factors``: the codec in which both factors travel, and rows, but
    these in eight bits at least; what it loses stays in the residual. The codec serves gradients,
    by itself or inside a policy; calls that do not know shapes refuse it.
    """

    rank: int = 4
    min_rate: float = 2.0
    factors: Codec = EXACT
    lossless: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or not 1 <= self.rank <= 1024:
            raise InvalidArgument(f"rank is {self.rank!r}, expected a whole number from 1 to 1024")
        if isinstance(self.factors, NoRows) or not hasattr(self.factors, "kind"):
            raise InvalidArgument(
                f"factors is {self.factors!r}, expected a codec of rows such as BlockCodec('fp8')"
            )
        if not self.min_rate > 0:
            raise InvalidArgument(
                f"min_rate is {self.min_rate!r}, expected a number above 0, such as 2"
            )

    def matrix(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Return rows, columns and rank of a tensor of this shape, or None if it travels in
        rows."""
        if len(shape) < 2 or 0 in shape:
            return None
        tall, wide = shape[0], math.prod(shape[1:])
        rank = min(self.rank, tall, wide)
        return (tall, wide, rank) if (tall + wide) * rank * self.min_rate < tall * wide else None

    def takes(self, shape: Sequence[int]) -> bool:
        return self.matrix(shape) is not None

    @property
    def rows(self) -> Codec:
        """``factors``; below eight bits, fp8: vectors are few, and int4 leaves elements asleep."""
        return self.factors if self.factors.row_bytes(1 << 12) >= 1 << 12 else BlockCodec("fp8")

    def bits(self, shape: Sequence[int], ranks: int) -> float:
        tall, wide, rank = self.matrix(shape) or (0, 0, 0)
        every = rank * tall, rank * wide
        sent = sum(self.factors.row_bytes(n) + self.factors.back.row_bytes(n) for n in every)
        return 4.0 * sent / math.prod(shape)

    @property
    def spec(self) -> str:
        coded = "" if self.factors == EXACT else f"/{self.factors.spec}"
        return f"powersgd/{self.rank}/{self.min_rate:g}{coded}"
