"""Codecs of users, written in plain torch, under a name like any other."""

import re
from dataclasses import dataclass
from typing import ClassVar

import torch

from commpress.codecs.codec import Codec
from commpress.errors import InvalidArgument
from commpress.kernels import registered
from commpress.kernels.reference import CHUNK
from commpress.kernels.registered import PlainCodec

REGISTERED: dict[str, "UserCodec"] = {}


@dataclass(frozen=True)
class UserCodec:
    """A registered codec, as policies and messages know it."""

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
    """Make ``codec`` known as ``name`` wherever a codec is named; on every rank, before it is used.

    - ``codec.row_bytes(width)``: bytes of a row of ``width`` elements.
    - ``codec.encode(values)``: uint8[row_bytes(len)] for float32[len].
    - ``codec.decode(row, numel)``: float32[numel] from the first bytes of a row, the same on every rank.

    Rows are short ends and whole rows alike; tensors are on the device of the gradients. ``feedback``: what it leaves out is
    sent later; False for a codec whose error is noise of zero mean.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_.-]{0,23}", name):
        raise InvalidArgument(f"name is {name!r}, expected up to 24 small letters, digits and .-_, such as 'mine-3'")
    _refuse_known(name)
    _try(name, codec)
    REGISTERED[name] = UserCodec(name, registered.add(codec), feedback)
    return REGISTERED[name]


def _refuse_known(name: str) -> None:
    from commpress.codecs.codec import codec_named

    try:
        codec_named(name)
    except InvalidArgument:
        return
    raise InvalidArgument(f"name is {name!r}, which is the name of a codec already: choose another")


def _try(name: str, codec: PlainCodec) -> None:
    """See it code rows of several lengths, so that a mistake is found now and not in a thread of step 1."""
    for method in ("row_bytes", "encode", "decode"):
        if not callable(getattr(codec, method, None)):
            raise InvalidArgument(f"codec {name!r} is a {type(codec).__name__} without {method}(): see help(register_codec)")
    for numel in (1, 8, 77, 2048, 3000):
        values = torch.linspace(-1, 1, numel)
        width, size = -(-numel // 8) * 8, codec.row_bytes(-(-numel // 8) * 8)
        codes = codec.encode(values)
        if not isinstance(size, int) or codes.dtype != torch.uint8 or codes.dim() != 1 or codes.numel() > size:
            raise InvalidArgument(
                f"codec {name!r} made {tuple(codes.shape)} {codes.dtype} of {numel} values, expected up to row_bytes({width}), "
                f"{size}, of torch.uint8"
            )
        back = codec.decode(torch.nn.functional.pad(codes, (0, size - codes.numel())), numel)
        if back.shape != (numel,) or back.dtype != torch.float32 or not torch.isfinite(back).all():
            raise InvalidArgument(
                f"codec {name!r} made {tuple(back.shape)} {back.dtype} of the codes of {numel} values, expected finite "
                f"torch.float32 of shape ({numel},)"
            )
