"""The interface of a codec: a format of bytes, identified by a kernel kind and a block size."""

from abc import ABC, abstractmethod
from typing import NoReturn, Protocol


class Codec(Protocol):
    """A codec is frozen and comparable; all arithmetic is in ``commpress.kernels``. Codecs with
    equal ``spec`` produce equal bytes."""

    @property
    def kind(self) -> int: ...

    @property
    def block(self) -> int: ...

    @property
    def spec(self) -> str:
        """Every option in at most 24 ASCII bytes, for the header of each message."""

    @property
    def lossless(self) -> bool: ...

    @property
    def feedback(self) -> bool:
        """True if the compression error is kept and sent later (error feedback); False if it is
        noise of zero mean."""

    @property
    def back(self) -> "Codec":
        """The codec in which ranks receive the mean: usually this codec, or a finer one where this
        one would add too much error to a mean."""

    def row_bytes(self, width: int) -> int:
        """Return the bytes of one row of ``width`` elements (a multiple of 8)."""


class NoRows(ABC):
    """A codec without rows of a size known in advance. Properties of rows raise an error that names
    the calls which take it (``refuse``)."""

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
        """Raise ``InvalidArgument`` that names the calls which take this codec."""
