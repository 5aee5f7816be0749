"""The lossless codec: exponents of bfloat16 and float32 in fewer bits, in the format of
``kernels.exact_format``."""

from dataclasses import dataclass
from typing import ClassVar, NoReturn

from commpress.codecs.codec import NoRows
from commpress.errors import InvalidArgument


@dataclass(frozen=True)
class ExponentCodec(NoRows):
    """Reproduce every bit. The size of its rows is not known in advance, so only exchanges that
    pass tensors on without summing them take it."""

    spec: ClassVar[str] = "exact"
    lossless: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def refuse(self) -> NoReturn:
        raise InvalidArgument(
            "codec 'exact' codes exponents without loss, for tensors that are passed on without a "
            "sum: pass compress_fsdp(weights='exact'), or GroupOptions with all_gather='exact' or "
            "all_to_all='exact'. For sums choose a codec such as 'int8', or 'none', which is "
            "lossless, too"
        )
