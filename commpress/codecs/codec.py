"""Codecs: a meaning of bytes, named by a kernel kind and a block size."""

from abc import ABC, abstractmethod
from typing import NoReturn, Protocol


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


class NoRows(ABC):
    """A codec without rows of a size known in advance: whoever asks for them is told where it goes
    (``refuse``)."""

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

    @abstractmethod
    def refuse(self) -> NoReturn:
        """Raise ``InvalidArgument`` with the calls that take it."""
