"""Codecs: a meaning of bytes, named by a kernel kind and a block size."""

from typing import Protocol


class Codec(Protocol):
    """Frozen and comparable. All arithmetic is in ``commpress.kernels``; two equal ``spec`` mean
    equal bytes."""

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
        """True if what it leaves behind is to be kept and sent later: not where it is noise of zero
        mean."""

    @property
    def back(self) -> "Codec":
        """Codec in which the mean comes back to the ranks: itself, unless what it does to a mean
        would be waste."""

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of ``width`` elements (a multiple of 8)."""
