"""The lossless codec: exponents of bfloat16 and float32 in fewer bits, as ``kernels.exact_format``
has them."""

from dataclasses import dataclass
from typing import ClassVar, NoReturn

from commpress.errors import InvalidArgument


@dataclass(frozen=True)
class ExponentCodec:
    """Gives every bit back. Its rows have no size known in advance: only exchanges that hand
    tensors on, and add nothing up, take it."""

    spec: ClassVar[str] = "exact"
    lossless: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    @property
    def back(self) -> NoReturn:
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
            "codec 'exact' codes exponents without loss, for tensors that are handed on as they "
            "are: pass compress_fsdp(weights='exact'), or GroupOptions with all_gather='exact' or "
            "all_to_all='exact'. For sums choose a codec such as 'int8', or 'none', which loses "
            "nothing either"
        )
