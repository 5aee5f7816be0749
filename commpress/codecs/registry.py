"""Registry of codecs by name: the built-in ones, patterns such as ``topk-64``, and codecs of users
in plain torch.

It loads no torch until a user's codec is registered, for the sake of the command line.
"""

import difflib
import re
from dataclasses import dataclass
from typing import ClassVar

from commpress.codecs.codec import Codec
from commpress.codecs.exponents import ExponentCodec
from commpress.codecs.family import NAMES, BitsCodec, RandomKCodec, TernaryCodec, TopKCodec
from commpress.codecs.sparse import SparseCodec
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.errors import InvalidArgument
from commpress.kernels import registered
from commpress.kernels.reference import CHUNK
from commpress.kernels.registered import PlainCodec

EXAMPLES = (  # one name for each pattern
    "terngrad",
    "bits3",
    "shift8",
    "topk-64",
    "topk-64+bits2",
    "randk-32",
    "powersgd-4",
    "powersgd-4+fp8",
)
REGISTERED: dict[str, Codec] = {}
OWN = r"[a-z][a-z0-9_.-]{0,23}"


def codec_named(codec: str | Codec) -> Codec:
    """Return the codec of this name; a codec is returned unchanged."""
    if not isinstance(codec, str):
        if not hasattr(codec, "row_bytes"):
            raise InvalidArgument(
                f"codec is {codec!r}, expected a name or a codec such as SignCodec(scale='rms')"
            )
        return codec
    if codec in NAMES:
        return NAMES[codec]
    if codec in REGISTERED:
        return REGISTERED[codec]
    if codec == ExponentCodec.spec:
        return ExponentCodec()
    if (numbered := _numbered(codec)) is not None:
        return numbered
    every = [*NAMES, *REGISTERED, *EXAMPLES]
    close = difflib.get_close_matches(codec, every, n=1)
    raise InvalidArgument(
        (
            f"codec is {codec!r}, expected one of {', '.join(map(repr, every))} (the numbers may "
            "differ)"
        )
        + (f": did you mean {close[0]!r}?" if close else "")
    )


def _numbered(name: str) -> Codec | None:
    """Return the codec of a name with a number: terngrad, bits2 … bits8, shift2 … shift8, topk-64
    (one of 64), topk-64+bits2 (values in two bits), randk-32 (one of 32), powersgd-4 (rank 4),
    powersgd-4+fp8 (factors in fp8)."""
    if name == "terngrad":
        return TernaryCodec(clip=2.5)
    if low := re.fullmatch(r"powersgd-([1-9]\d{0,3})\+(.+)", name):
        return LowRankCodec(int(low[1]), factors=codec_named(low[2]))
    if sparse := re.fullmatch(r"topk-([1-9]\d{0,3})\+bits(\d)", name):
        return SparseCodec(1 / int(sparse[1]), int(sparse[2]))
    match = re.fullmatch(r"(bits|shift|topk-|randk-|powersgd-)([1-9]\d{0,3})", name)
    if not match:
        return None
    number = int(match[2])
    if match[1] == "bits":
        return BitsCodec(number)
    if match[1] == "shift":
        return BitsCodec(number, shifted=True)
    if match[1] == "topk-":
        return TopKCodec(1 / number)
    return RandomKCodec(number) if match[1] == "randk-" else LowRankCodec(number)


@dataclass(frozen=True)
class UserCodec:
    """A registered codec, as seen by policies and messages."""

    spec: str
    kind: int
    feedback: bool
    block: ClassVar[int] = CHUNK
    lossless: ClassVar[bool] = False

    @property
    def back(self) -> Codec:
        return self

    def row_bytes(self, width: int) -> int:
        return registered.size_of(self.kind, width)


def register_codec(name: str, codec: PlainCodec, *, feedback: bool = True) -> Codec:
    """Register ``codec`` as ``name``, on every rank, before the name is used anywhere.

    - ``codec.row_bytes(width)``: return the bytes of a row of ``width`` elements.
    - ``codec.encode(values)``: return uint8[row_bytes(len)] for float32[len].
    - ``codec.decode(row, numel)``: return float32[numel] from the first bytes of a row, equal on
      every rank.
    - ``feedback``: keep the compression error and send it later; False for a codec with an error of
      zero mean.

    Rows may be of any length; tensors are on the device of the gradients.
    """
    if not isinstance(name, str) or not re.fullmatch(OWN, name):
        raise InvalidArgument(
            f"name is {name!r}, expected up to 24 small letters, digits and .-_, such as 'mine-3'"
        )
    if not may_register(name):
        raise InvalidArgument(
            f"name is {name!r}, which is taken by a codec already: choose another"
        )
    _try(name, codec)
    REGISTERED[name] = UserCodec(name, registered.add(codec), feedback)
    return REGISTERED[name]


def may_register(name: str) -> bool:
    """Return whether a name is valid and not yet taken."""
    try:
        codec_named(name)
    except InvalidArgument:
        return re.fullmatch(OWN, name) is not None
    return False


def _try(name: str, codec: PlainCodec) -> None:
    """Let the codec code rows of several lengths, so that a mistake is found now and not in a
    thread during step 1."""
    import torch

    for method in ("row_bytes", "encode", "decode"):
        if not callable(getattr(codec, method, None)):
            raise InvalidArgument(
                f"codec {name!r} is a {type(codec).__name__} without {method}(): see "
                "help(register_codec)"
            )
    for numel in (1, 8, 77, 2048, 3000):
        values = torch.linspace(-1, 1, numel)
        width, size = -(-numel // 8) * 8, codec.row_bytes(-(-numel // 8) * 8)
        codes = codec.encode(values)
        if (
            not isinstance(size, int)
            or codes.dtype != torch.uint8
            or codes.dim() != 1
            or codes.numel() > size
        ):
            raise InvalidArgument(
                f"codec {name!r} made {tuple(codes.shape)} {codes.dtype} of {numel} values, "
                f"expected up to row_bytes({width}), {size}, of torch.uint8"
            )
        back = codec.decode(torch.nn.functional.pad(codes, (0, size - codes.numel())), numel)
        if back.shape != (numel,) or back.dtype != torch.float32 or not torch.isfinite(back).all():
            raise InvalidArgument(
                f"codec {name!r} made {tuple(back.shape)} {back.dtype} of the codes of {numel} "
                f"values, expected finite torch.float32 of shape ({numel},)"
            )
