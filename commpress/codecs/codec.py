"""What a codec is: a meaning of bytes, named by a kernel kind and a block size."""

import difflib
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

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of ``width`` elements (a multiple of 8)."""


def codec_named(codec: "str | Codec") -> Codec:
    """The codec a string stands for; a codec stays itself."""
    from commpress.codecs.family import NAMES

    if not isinstance(codec, str):
        if not hasattr(codec, "row_bytes"):
            raise InvalidArgument(f"codec is {codec!r}, expected a name or a codec such as SignCodec(scale='rms')")
        return codec
    if codec not in NAMES:
        close = difflib.get_close_matches(codec, NAMES, n=1)
        raise InvalidArgument(
            f"codec is {codec!r}, expected one of {', '.join(map(repr, NAMES))}"
            + (f": did you mean {close[0]!r}?" if close else "")
        )
    return NAMES[codec]
