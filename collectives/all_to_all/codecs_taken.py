"""Codecs that an all-to-all takes. Loads no torch."""

from commpress.codecs.codec import Codec
from commpress.errors import InvalidArgument
from commpress.kernels.reference import CASTS, FP8, INT4, INT8
from commpress.kernels.registered import known


def check_codec(codec: Codec, name: str = "codec") -> None:
    if codec.kind in (INT8, INT4, FP8, *CASTS) or known(codec.kind):
        return
    raise InvalidArgument(
        f"{name} is {codec.spec!r}, expected int8, int4, fp8, bf16, fp16, none or a registered "
        "one: with one or two bits nothing of a row is left, because no error feedback makes up "
        "for it"
    )
