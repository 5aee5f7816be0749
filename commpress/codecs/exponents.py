"""The lossless codec: exponents of bfloat16 and float32 in fewer bits, as ``kernels.exact_format``
has them."""

from dataclasses import dataclass
from typing import ClassVar, NoReturn

from commpress.codecs.codec import NoRows
from commpress.errors import InvalidArgument


@dataclass(frozen=True)
class ExponentCodec(NoRows):
    """Gives every bit back. Its rows have no size known in advance: only exchanges that hand
    tensors on, and add nothing up, take it."""

    spec: ClassVar[str] = "exact"
    lossless: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def refuse(self) -> NoReturn:
        raise InvalidArgument(
            "codec 'exact' codes exponents without loss, for tensors that are handed on as they "
            "are: pass compress_fsdp(weights='exact'), or GroupOptions with all_gather='exact' or "
            "all_to_all='exact'. For sums choose a codec such as 'int8', or 'none', which loses "
            "nothing either"
        )
