"""Codecs: a meaning of bytes, named by a kernel kind and a block size."""

import difflib
import re
from typing import Protocol

from commpress.errors import InvalidArgument


class Codec(Protocol):
    """Frozen and comparable. All arithmetic is in ``commpress.kernels``; two equal ``spec`` mean equal bytes."""

    @property
    def kind(self) -> int: ...

    @property
    def block(self) -> int: ...

    @property
    def spec(self) -> str:
        """Every option in at most 24 ASCII bytes: it travels in the header of each message."""

    @property
    def lossless(self) -> bool: ...

    @property
    def feedback(self) -> bool:
        """True if what it leaves behind is to be kept and sent later: not where it is noise of zero mean."""

    @property
    def back(self) -> "Codec":
        """Codec in which the mean comes back to the ranks: itself, unless what it does to a mean would be waste."""

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of ``width`` elements (a multiple of 8)."""


def codec_named(codec: "str | Codec") -> Codec:
    """The codec a string stands for; a codec stays itself."""
    from commpress.codecs.family import NAMES
    from commpress.codecs.user import REGISTERED

    if not isinstance(codec, str):
        if not hasattr(codec, "row_bytes"):
            raise InvalidArgument(f"codec is {codec!r}, expected a name or a codec such as SignCodec(scale='rms')")
        return codec
    if codec in NAMES:
        return NAMES[codec]
    if codec in REGISTERED:
        return REGISTERED[codec]
    if (numbered := _numbered(codec)) is not None:
        return numbered
    every = [*NAMES, *REGISTERED, *EXAMPLES]
    close = difflib.get_close_matches(codec, every, n=1)
    raise InvalidArgument(
        f"codec is {codec!r}, expected one of {', '.join(map(repr, every))} (the numbers may differ)"
        + (f": did you mean {close[0]!r}?" if close else "")
    )


EXAMPLES = ("terngrad", "bits3", "shift8", "topk-64", "randk-32", "sketch-64", "powersgd-4")  # of names that are patterns


def _numbered(name: str) -> "Codec | None":
    """terngrad, bits2 … bits8, shift2 … shift8, topk-64 (one of 64), randk-32 and sketch-64 likewise, powersgd-4 (rank 4)."""
    from commpress.codecs.family import TernaryCodec
    from commpress.codecs.sparse import BitsCodec, RandomKCodec, TopKCodec
    from commpress.codecs.whole_tensors import LowRankCodec, SketchCodec

    if name == "terngrad":
        return TernaryCodec(clip=2.5)
    match = re.fullmatch(r"(bits|shift|topk-|randk-|sketch-|powersgd-)([1-9]\d{0,3})", name)
    if not match:
        return None
    number = int(match[2])
    if match[1] == "bits":
        return BitsCodec(number)
    if match[1] == "shift":
        return BitsCodec(number, shifted=True)
    if match[1] in ("topk-", "sketch-"):
        return TopKCodec(1 / number) if match[1] == "topk-" else SketchCodec(1 / number)
    return RandomKCodec(number) if match[1] == "randk-" else LowRankCodec(number)
