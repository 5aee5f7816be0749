"""Codecs of whole tensors: PowerSGD and summable sketches. ``collectives.powersgd`` and
``collectives.sketch`` send them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from commpress.codecs.codec import Codec
from commpress.codecs.family import TopKCodec
from commpress.errors import InvalidArgument


class WholeTensorCodec(ABC):
    """A codec of tensors, with their shapes: exchanges of whole tensors take it, calls that see
    flat rows refuse it."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """As a codec's."""

    @abstractmethod
    def takes(self, shape: Sequence[int]) -> bool:
        """True if it compresses a tensor of this shape, which travels exactly otherwise."""

    @abstractmethod
    def bits(self, shape: Sequence[int], ranks: int) -> float:
        """Bits of each element of a tensor that it takes, the mean of the way there and the way
        back."""

    @property
    def back(self) -> Codec:
        self.refuse()

    @property
    def kind(self) -> int:
        self.refuse()

    @property
    def block(self) -> int:
        self.refuse()

    def row_bytes(self, width: int) -> int:
        self.refuse()

    def refuse(self) -> NoReturn:
        raise InvalidArgument(
            f"codec {self.spec!r} compresses whole tensors, and this call sees rows of a flat "
            "buffer: use it with "
            "commpress.compress(ddp, codec=...), compress_fsdp(model, codec=...), "
            "Partitioned(codec=...) or OneBitAdam("
            "codec=...), or choose a codec of rows such as 'int4' here"
        )


def travels_whole(codec: object, shape: Sequence[int]) -> bool:
    """False also where such a codec leaves a tensor of this shape alone, which then travels
    exactly, in rows."""
    return isinstance(codec, WholeTensorCodec) and codec.takes(shape)


@dataclass(frozen=True)
class LowRankCodec(WholeTensorCodec):
    """PowerSGD: tensors of two and more dimensions, seen as matrices of shape[0] rows, as products
    of two thin ones.

    A tensor of one dimension, and one whose factors would have more than 1 / ``min_rate`` of its
    elements, travels exactly. For gradients, by itself or inside a policy; calls that know no
    shapes refuse it.
    """

    rank: int = 4
    min_rate: float = 2.0
    lossless: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or not 1 <= self.rank <= 1024:
            raise InvalidArgument(f"rank is {self.rank!r}, expected a whole number from 1 to 1024")
        if not self.min_rate > 0:
            raise InvalidArgument(
                f"min_rate is {self.min_rate!r}, expected a number above 0, such as 2"
            )

    def matrix(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Rows, columns and rank of a tensor of this shape, or None if it travels exactly."""
        if len(shape) < 2 or 0 in shape:
            return None
        tall, wide = shape[0], math.prod(shape[1:])
        rank = min(self.rank, tall, wide)
        return (tall, wide, rank) if (tall + wide) * rank * self.min_rate < tall * wide else None

    def takes(self, shape: Sequence[int]) -> bool:
        return self.matrix(shape) is not None

    def bits(self, shape: Sequence[int], ranks: int) -> float:
        tall, wide, rank = self.matrix(shape) or (0, 0, 0)
        return 32.0 * rank * (tall + wide) / math.prod(shape)

    @property
    def spec(self) -> str:
        return f"powersgd/{self.rank}/{self.min_rate:g}"


@dataclass(frozen=True)
class SketchCodec(WholeTensorCodec):
    """Every rank keeps a share ``density`` of each block's elements, the largest; what all kept
    together is added up exactly.

    ``cells``: of the table, per element that all ranks together keep if they keep different ones.
    ``TopKCodec`` leaves something out twice, on the way to the owner of a row and on the way back;
    this one does so once.
    """

    density: float = 1 / 64
    cells: float = 1.5
    lossless: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.cells >= 1.25:
            raise InvalidArgument(
                f"cells is {self.cells!r}, expected at least 1.25 per kept element: with fewer "
                "they cannot be told apart"
            )
        TopKCodec(self.density)

    @property
    def kept(self) -> TopKCodec:
        """Codec of the elements that one rank keeps."""
        return TopKCodec(self.density)

    def takes(self, shape: Sequence[int]) -> bool:
        return 0 not in shape

    def table(self, numel: int, ranks: int) -> int:
        """Cells for the sum of ``numel`` elements."""
        union = numel * (1 - (1 - self.density) ** ranks)  # if ranks keep different elements
        return 3 * math.ceil((self.cells * union + 48) / 3)

    def bits(self, shape: Sequence[int], ranks: int) -> float:
        return 1.0 + 32.0 * self.table(math.prod(shape), ranks) / math.prod(shape)

    @property
    def spec(self) -> str:
        return f"sketch/{1 / self.density:g}/{self.cells:g}"
