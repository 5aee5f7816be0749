"""Cutting a list of tensors into messages.

Note: nothing that decides a number depends on the bucket. A parameter is cut at fixed multiples of
``PIECE`` elements, each piece is dealt to the ranks by itself, and its key is (parameter name,
offset). A bucket only decides which pieces travel together, so DDP may rebuild its buckets, and a
resumed run may start with other buckets, without changing a bit.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from commpress.codecs.codec import Codec
from commpress.codecs.family import EXACT, CastCodec
from commpress.codecs.policy import Policy
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.kernels.pieces import KIND, NUMEL, Piece, Pieces, aligned, cut, width_of
from commpress.kernels.reference import FP32
from commpress.kernels.registered import known

PIECE = 1 << 22  # elements of the longest piece
# codecs in which tensors of each dtype travel bit for bit
WIDTHS = {torch.float32: EXACT, torch.bfloat16: CastCodec("bf16"), torch.float16: CastCodec("fp16")}
FLOATS = tuple(WIDTHS)  # that codecs take
MESSAGE = 1 << 23  # a message is closed when it would hold more


class Span(NamedTuple):
    """One tensor inside a flat buffer."""

    name: str
    source: int
    numel: int


@dataclass(frozen=True, eq=False)
class Message:
    """Pieces that travel together: two collectives, one header each way. Compared by identity."""

    keys: tuple[tuple[str, int], ...]  # parameter name and offset of each piece
    pieces: Pieces
    codec: str  # the codecs in use, for the header
    label: int  # CRC of keys and lengths: with ranks and codecs it decides the bytes of a row
    # layout of the mean's rows: the same elements, in the codecs that bring them back
    mean: Pieces

    @cached_property
    def exact(self) -> int:
        """Number of elements that travel as float32."""
        return int(self.pieces.table[self.pieces.table[:, KIND] == FP32, NUMEL].sum())


def messages(
    spans: Iterable[Span],
    policy: Policy,
    ranks: int,
    *,
    feedback: bool = True,
    piece: int = 0,
    message: int = 0,
) -> list[Message]:
    """Cut ``spans`` into messages of about ``message`` elements and these into pieces of ``piece``
    (0: the usual sizes)."""
    piece, message = piece or PIECE, message or MESSAGE
    result: list[Message] = []
    keys: list[tuple[str, int]] = []
    pieces: list[Piece] = []
    codecs: list[Codec] = []
    held, kind = 0, (False, False)

    def close() -> None:
        nonlocal keys, pieces, codecs, held
        if pieces:
            lengths = zip(keys, pieces, strict=True)
            label = zlib.crc32(
                "\n".join(f"{name}@{offset}+{p.numel}" for (name, offset), p in lengths).encode()
            )
            there = cut(pieces, ranks)
            back = _back(pieces, codecs, ranks) if kind[0] else there
            result.append(Message(tuple(keys), there, describe(codecs), label, back))
        keys, pieces, codecs, held = [], [], [], 0

    for span in spans:
        codec = policy.choose(span.name, span.numel)
        keep = feedback and codec.feedback and not codec.lossless
        # the mean of a piece must not depend on the pieces beside it
        if kind != (codec.back != codec, known(codec.kind)):
            close()
            kind = codec.back != codec, known(codec.kind)
        for offset in range(0, span.numel, piece):
            numel = min(piece, span.numel - offset)
            if held and held + numel > message:
                close()
            keys.append((span.name, offset))
            mark = zlib.crc32(f"{span.name}@{offset}".encode())
            pieces.append(Piece(span.source + offset, numel, codec.kind, codec.block, mark, keep))
            codecs.append(codec)
            held += numel
    close()
    return result


def one_message(
    numel: int, codec: Codec, ranks: int, *, name: str = "", feedback: bool = True
) -> Message:
    """Make one message of one piece from a whole buffer of any length."""
    mark = zlib.crc32(name.encode())
    piece = Piece(
        0, numel, codec.kind, codec.block, mark, feedback and codec.feedback and not codec.lossless
    )
    there = cut([piece], ranks)
    back = _back([piece], [codec], ranks) if codec.back != codec else there
    return Message(((name, 0),), there, codec.spec, mark, back)


def _back(pieces: Sequence[Piece], codecs: Sequence[Codec], ranks: int) -> Pieces:
    there = [
        piece._replace(kind=c.back.kind, block=c.back.block)
        for piece, c in zip(pieces, codecs, strict=True)
    ]
    return cut(there, ranks)


class Share(NamedTuple):
    """Cost of one tensor in every round: its codec and bits."""

    numel: int
    codec: str
    bits: float  # per element, averaged over both directions, without headers


def share(shape: torch.Size, codec: Codec, ranks: int) -> Share:
    numel = shape.numel()
    if isinstance(codec, WholeTensorCodec):
        if codec.takes(shape):
            return Share(numel, codec.spec, codec.bits(shape, ranks))
        codec = codec.rows
    widths = [width_of(min(PIECE, numel - offset), ranks) for offset in range(0, numel, PIECE)]
    row = sum(aligned(c.row_bytes(width)) for width in widths for c in (codec, codec.back))
    return Share(numel, codec.spec, 4.0 * ranks * row / max(numel, 1))


def describe(codecs: Sequence[Codec]) -> str:
    """Return the spec of a single codec, else the first spec and a digest of the list."""
    specs = [codec.spec for codec in codecs]
    if len(set(specs)) == 1:
        return specs[0]
    lossy = next((codec.spec for codec in codecs if not codec.lossless), specs[0])
    return f"{lossy[:15]}+{zlib.crc32(','.join(specs).encode()):08x}"
