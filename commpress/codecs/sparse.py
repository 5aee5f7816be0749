"""Sparse rows and outliers: what a block sends beyond a scale."""

from dataclasses import dataclass

from commpress.codecs.family import _check_block, _Kernel
from commpress.errors import InvalidArgument
from commpress.kernels import reference


@dataclass(frozen=True)
class BitsCodec(_Kernel):
    """2 to 8 bits: of each block the least and the greatest element exactly, the others on an even grid over theirs and zero.

    One outlier would stretch the grid of all its neighbours; gradients of embeddings and output layers are full of them.
    ``shifted`` moves each block's grid by a part of its step that is drawn anew at every call: right on average, for weights,
    which have no error feedback.
    """

    bits: int = 4
    block: int = 512
    shifted: bool = False

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise InvalidArgument(f"bits is {self.bits!r}, expected a whole number from 2 to 8")
        _check_block(self.block, row=False)

    @property
    def kind(self) -> int:
        return reference.kind_of(reference.BITS, self.bits | reference.SHIFTED * self.shifted)

    @property
    def spec(self) -> str:
        return f"{'shift' if self.shifted else 'bits'}/{self.bits}/{self.block}"


@dataclass(frozen=True)
class TopKCodec(_Kernel):
    """Of each block the elements of largest magnitude, exactly: a share ``density`` of them, with error feedback.

    ‖c − Q(c)‖² ≤ (1 − density)·‖c‖², block by block. Needs 48 bits per element sent.
    """

    density: float = 1 / 64
    block: int = 2048

    def __post_init__(self) -> None:
        _check_block(self.block, row=False)
        if not 1 / self.block <= self.density <= 1:
            raise InvalidArgument(
                f"density is {self.density!r}, expected a share from 1/{self.block} (one element per block) to 1"
            )

    @property
    def kind(self) -> int:
        return reference.kind_of(reference.TOP, round(self.density * self.block))

    @property
    def spec(self) -> str:
        return f"topk/{round(self.density * self.block)}/{self.block}"


@dataclass(frozen=True)
class RandomKCodec(_Kernel):
    """Of every ``run`` elements one, drawn evenly; its place follows from a seed in the row, so 32 bits per element sent.

    As it is: a contraction by 1 − 1/run in the mean, for error feedback. ``unbiased``: times ``run``, so that the mean over
    the draws is the input and the variance (run − 1)·‖c‖²; no feedback, which such noise would fill.
    """

    run: int = 32
    unbiased: bool = False
    block: int = 2048

    def __post_init__(self) -> None:
        _check_block(self.block, row=False)
        if not isinstance(self.run, int) or not 1 <= self.run <= self.block or self.block % self.run:
            raise InvalidArgument(f"run is {self.run!r}, expected a divisor of the block {self.block}, such as 32")

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        return not self.unbiased

    @property
    def kind(self) -> int:
        return reference.kind_of(reference.UNBIASED if self.unbiased else reference.RANDOM, self.run)

    @property
    def spec(self) -> str:
        return f"randk{'-unbiased' * self.unbiased}/{self.run}/{self.block}"
