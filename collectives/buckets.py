"""Cutting a list of tensors into messages.

Note: nothing that decides a number depends on the bucket. A parameter is cut at fixed multiples of ``PIECE`` elements,
each piece is dealt to the ranks by itself, and its key is (parameter name, offset). A bucket only decides which pieces
travel together, so DDP may rebuild its buckets, and a resumed run may start with other buckets, without changing a bit.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commpress.codecs.codec import Codec
from commpress.codecs.policy import Policy
from commpress.kernels.pieces import Piece, Pieces, cut

PIECE = 1 << 22  # elements of the longest piece
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


def messages(
    spans: Iterable[Span], policy: Policy, ranks: int, *, feedback: bool = True, piece: int = 0, message: int = 0
) -> list[Message]:
    """Cut ``spans`` into messages of about ``message`` elements and these into pieces of ``piece`` (0: the usual sizes)."""
    piece, message = piece or PIECE, message or MESSAGE
    result: list[Message] = []
    keys: list[tuple[str, int]] = []
    pieces: list[Piece] = []
    codecs: list[Codec] = []
    held = 0

    def close() -> None:
        nonlocal keys, pieces, codecs, held
        if pieces:
            lengths = zip(keys, pieces, strict=True)
            label = zlib.crc32("\n".join(f"{name}@{offset}+{p.numel}" for (name, offset), p in lengths).encode())
            result.append(Message(tuple(keys), cut(pieces, ranks), describe(codecs), label))
        keys, pieces, codecs, held = [], [], [], 0

    for span in spans:
        codec = policy.choose(span.name, span.numel)
        keep = feedback and codec.feedback and not codec.lossless
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


def one_message(numel: int, codec: Codec, ranks: int, *, name: str = "", feedback: bool = True) -> Message:
    """A whole buffer as one piece of one message, however long."""
    mark = zlib.crc32(name.encode())
    piece = Piece(0, numel, codec.kind, codec.block, mark, feedback and codec.feedback and not codec.lossless)
    return Message(((name, 0),), cut([piece], ranks), codec.spec, mark)


def describe(codecs: Sequence[Codec]) -> str:
    """The spec if there is one codec, else the first and a digest of which piece has which."""
    specs = [codec.spec for codec in codecs]
    if len(set(specs)) == 1:
        return specs[0]
    lossy = next((codec.spec for codec in codecs if not codec.lossless), specs[0])
    return f"{lossy[:15]}+{zlib.crc32(','.join(specs).encode()):08x}"
