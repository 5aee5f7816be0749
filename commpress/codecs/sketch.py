"""Top-k as a summable sketch. Not a codec of rows: ``collectives.sketch`` says how it travels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from commpress.codecs.codec import NotOfRows
from commpress.codecs.sparse import TopKCodec
from commpress.errors import InvalidArgument


@dataclass(frozen=True)
class SketchCodec(NotOfRows):
    """Every rank keeps a share ``density`` of each block's elements, the largest; what all kept together is added up exactly.

    ``cells``: of the table, per element that all ranks together keep if they keep different ones. ``TopKCodec`` leaves
    something out twice, on the way to the owner of a row and on the way back; this one does so once.
    """

    density: float = 1 / 64
    cells: float = 1.5
    lossless: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.cells >= 1.25:
            raise InvalidArgument(
                f"cells is {self.cells!r}, expected at least 1.25 per kept element: with fewer they cannot be told apart"
            )
        TopKCodec(self.density)

    @property
    def kept(self) -> TopKCodec:
        """Codec of the elements that one rank keeps."""
        return TopKCodec(self.density)

    def takes(self, shape: Sequence[int]) -> bool:
        return 0 not in shape

    @property
    def spec(self) -> str:
        return f"sketch/{1 / self.density:g}/{self.cells:g}"
