"""The built-in codecs of rows: sign, ternary, integers and fp8 in blocks, casts, grids with exact
outliers, and sparse rows."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from commpress.codecs.codec import Codec
from commpress.errors import InvalidArgument
from commpress.kernels import reference


def _check_block(block: int, *, row: bool) -> None:
    allowed = [2**k for k in range(3, 12)]
    if block not in allowed and not (row and block == 0):
        raise InvalidArgument(
            f"block is {block!r}, expected a power of two from 8 to "
            f"2048{' or 0 for one scale per row' if row else ''}"
        )


class _Kernel:
    """Common part of the codecs of this family: sizes follow from kind and block."""

    lossless: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    @property
    def back(self) -> Codec:
        return self  # type: ignore[return-value]

    def row_bytes(self, width: int) -> int:
        return reference.row_bytes(self.kind, width, self.block)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SignCodec(_Kernel):
    """Send one bit per element: its sign, times the scale of its block.

    ``scale``: how a block's scale is computed. ``l1`` is mean |c|, the least-squares choice and
    always a contraction; ``rms`` preserves the norm: its error in one step is larger, but residuals
    of spiky input shrink faster, and it trained better in every comparison so far. ``block`` = 0
    gives one scale per row: the fewest bytes, but large and small gradients share it.
    """

    scale: Literal["l1", "rms"] = "rms"
    block: int = 2048

    def __post_init__(self) -> None:
        if self.scale not in ("l1", "rms"):
            raise InvalidArgument(f"scale is {self.scale!r}, expected 'l1' or 'rms'")
        _check_block(self.block, row=True)

    @property
    def kind(self) -> int:
        return reference.SIGN_L1 if self.scale == "l1" else reference.SIGN_RMS

    @property
    def spec(self) -> str:
        return f"sign/{self.scale}/{self.block}"


@dataclass(frozen=True)
class TernaryCodec(_Kernel):
    """Send −1, 0 or +1 times the block's largest magnitude, drawn at random so that the expectation
    is the input (2 bits).

    ``clip`` > 0 is TernGrad: the block is first clipped to ± ``clip`` root mean squares, which
    removes much noise for a small bias, and no residual is kept. The usual value is 2.5.

    ``mean``: name of the codec in which the ranks receive the mean. Three values would not do:
    drawn once more from them, the mean of any number of ranks would have the noise of one rank. The
    default is unbiased, too.
    """

    block: int = 2048
    clip: float = 0.0
    mean: str = "shift5"

    def __post_init__(self) -> None:
        _check_block(self.block, row=False)
        if self.clip and not 0.1 <= self.clip <= 100:
            raise InvalidArgument(
                f"clip is {self.clip!r}, expected 0 for none or a number from 0.1 to 100, such as "
                "2.5"
            )
        if self.mean not in MEANS:
            raise InvalidArgument(
                f"mean is {self.mean!r}, expected one of {', '.join(map(repr, MEANS))}"
            )

    @property
    def back(self) -> Codec:
        return MEANS[self.mean]

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        return not self.clip

    @property
    def kind(self) -> int:
        return reference.kind_of(reference.TERNARY, round(10 * self.clip))

    @property
    def spec(self) -> str:
        return f"ternary/{self.block}/{round(10 * self.clip)}/{self.mean}"


KINDS = {
    "int8": reference.INT8,
    "int4": reference.INT4,
    "fp8": reference.FP8,
    "log3": reference.LOG,
}


@dataclass(frozen=True)
class BlockCodec(_Kernel):
    """int8, int4, fp8 (e4m3) or log3 codes under one scale per block, set by its largest magnitude.

    ``number``: the format of a code. log3: ± 1, 1/4 or 1/16 of the scale, in 3 bits, and 0 only for
    0. It serves gradients that become a variance, which must not round to zero because it is
    divided by, while a factor of two does not matter. It is a contraction in blocks of up to 256:
    the largest element has no error, every other one at most |c| or 1/16 of the largest, and
    255/16² < 1.
    """

    number: Literal["int8", "int4", "fp8", "log3"] = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        if self.number not in KINDS:
            raise InvalidArgument(
                f"number is {self.number!r}, expected one of {', '.join(map(repr, KINDS))}"
            )
        _check_block(self.block, row=False)

    @property
    def kind(self) -> int:
        return KINDS[self.number]

    @property
    def spec(self) -> str:
        return f"{self.number}/{self.block}"


@dataclass(frozen=True)
class CastCodec(_Kernel):
    """Send bf16, fp16 (saturating) or, as ``number`` "none", float32 itself: an exact mean, summed
    in rank order."""

    number: Literal["bf16", "fp16", "none"] = "bf16"
    block: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.number not in ("bf16", "fp16", "none"):
            raise InvalidArgument(f"number is {self.number!r}, expected 'bf16', 'fp16' or 'none'")

    @property
    def kind(self) -> int:
        return {"bf16": reference.BF16, "fp16": reference.FP16, "none": reference.FP32}[self.number]

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.number == "none"

    @property
    def spec(self) -> str:
        return self.number


@dataclass(frozen=True)
class BitsCodec(_Kernel):
    """Send the smallest and the largest element of each block exactly, and the others on an even
    grid of ``bits`` bits (2 to 8) over their range and zero.

    One outlier would otherwise stretch the grid of all its neighbours; gradients of embeddings and
    output layers have many. ``shifted`` moves each block's grid by a random part of its step at
    every call: an unbiased codec, for weights, which have no error feedback.
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
    """Send the elements of largest magnitude of each block exactly: a share ``density`` of them,
    with error feedback.

    ‖c − Q(c)‖² ≤ (1 − density)·‖c‖² in each block. An element that is sent takes 48 bits.
    """

    density: float = 1 / 64
    block: int = 2048

    def __post_init__(self) -> None:
        _check_block(self.block, row=False)
        if not 1 / self.block <= self.density <= 1:
            raise InvalidArgument(
                f"density is {self.density!r}, expected a share from 1/{self.block} (one element "
                "per block) to 1"
            )

    @property
    def kind(self) -> int:
        return reference.kind_of(reference.TOP, round(self.density * self.block))

    @property
    def spec(self) -> str:
        return f"topk/{round(self.density * self.block)}/{self.block}"


@dataclass(frozen=True)
class RandomKCodec(_Kernel):
    """Send one of every ``run`` elements, drawn uniformly; its position follows from a seed in the
    row, so that an element takes 32 bits.

    By default it is a contraction by 1 − 1/run in expectation, with error feedback. ``unbiased``
    multiplies by ``run``, so that the expectation is the input and the variance is (run − 1)·‖c‖²;
    it has no error feedback, in which such noise would accumulate.
    """

    run: int = 32
    unbiased: bool = False
    block: int = 2048

    def __post_init__(self) -> None:
        _check_block(self.block, row=False)
        if (
            not isinstance(self.run, int)
            or not 1 <= self.run <= self.block
            or self.block % self.run
        ):
            raise InvalidArgument(
                f"run is {self.run!r}, expected a divisor of the block {self.block}, such as 32"
            )

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        return not self.unbiased

    @property
    def kind(self) -> int:
        return reference.kind_of(
            reference.UNBIASED if self.unbiased else reference.RANDOM, self.run
        )

    @property
    def spec(self) -> str:
        return f"randk{'-unbiased' * self.unbiased}/{self.run}/{self.block}"


EXACT = CastCodec("none")
MEANS: dict[str, Codec] = {
    **{f"shift{bits}": BitsCodec(bits, shifted=True) for bits in (4, 5, 6, 8)},
    "int8": BlockCodec("int8"),
    "bf16": CastCodec("bf16"),
    "none": EXACT,
}
NAMES: dict[str, Codec] = {
    "sign": SignCodec(),
    "sign-l1": SignCodec(scale="l1"),
    "ternary": TernaryCodec(),
    "int8": BlockCodec("int8"),
    "int4": BlockCodec("int4"),
    "fp8": BlockCodec("fp8"),
    "log3": BlockCodec("log3"),
    "bf16": CastCodec("bf16"),
    "fp16": CastCodec("fp16"),
    "none": EXACT,
}
