"""The header before every row: what this message is, so that ranks that disagree say so instead of mixing bytes.

Bytes  0  magic "cp"          Bytes 32  elements of the buffer, u64
       2  version, u8               40  sequence number of the collective, u32
       3  operation, u8             44  label: CRC of what is being reduced, u32
       4  flags, u8                 48  checksum of bytes 0–47 with flags as 0, u32
       5  zero                      52  checksum of the payload, u32 (0: not checked)
       6  world size, u16           56  zeros
       8  codec, 24 ASCII bytes

All but the flags and the payload's checksum must be equal on every rank. Little endian throughout.
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from commpress.errors import CommunicationError, Mismatch

HEADER = 64
AGREED = (slice(0, 4), slice(5, 52))  # the bytes in which two ranks must not differ
FLAGS = 4
NOT_FINITE = 1
_PAYLOAD = slice(52, 56)
_LAYOUT = struct.Struct("<2sBBBBH24sQII")
_VERSION = 1
_OPERATIONS = {1: "all_to_all", 2: "all_gather"}
ALL_TO_ALL, ALL_GATHER = 1, 2


@dataclass(frozen=True)
class Frame:
    """What every rank must agree on about one message."""

    operation: int
    size: int
    codec: str
    numel: int
    sequence: int
    label: int = 0

    def pack(self) -> torch.Tensor:
        codec = self.codec.encode("ascii")
        if len(codec) > 24:
            raise ValueError(f"codec description {self.codec!r} is longer than 24 bytes")
        body = _LAYOUT.pack(
            b"cp", _VERSION, self.operation, 0, 0, self.size, codec, self.numel, self.sequence & 0xFFFFFFFF, self.label
        )
        return torch.frombuffer(
            bytearray(body + struct.pack("<I", zlib.crc32(body)) + bytes(HEADER - 52)), dtype=torch.uint8
        )

    def describe(self) -> str:
        what = _OPERATIONS.get(self.operation, f"operation {self.operation}")
        return (
            f"{what} number {self.sequence} of {self.numel} elements with codec {self.codec!r} "
            f"among {self.size} ranks (label {self.label:08x})"
        )


def unpack(header: np.ndarray) -> Frame | None:
    """The frame that a peer sent, or None if these are not the bytes of a header."""
    body = bytearray(header[:48].tobytes())
    body[FLAGS] = 0
    magic, version, operation, _, _, size, codec, numel, sequence, label = _LAYOUT.unpack(body)
    if magic != b"cp" or version != _VERSION or header[48:52].tobytes() != struct.pack("<I", zlib.crc32(body)):
        return None
    return Frame(operation, size, codec.rstrip(b"\0").decode("ascii", "replace"), numel, sequence, label)


def stamp(wire: torch.Tensor, frame: torch.Tensor, flag: torch.Tensor, *, checksum: bool = False) -> None:
    """Write the header before every row; ``flag`` (uint8[1]) is 1 where this rank's numbers are not finite."""
    wire[:, :HEADER] = frame.to(wire.device, non_blocking=True)
    wire[:, FLAGS : FLAGS + 1] = flag
    if checksum:
        sums = np.array([[zlib.crc32(row[HEADER:]) or 1] for row in wire.cpu().numpy()], "<u4")
        wire[:, _PAYLOAD] = torch.from_numpy(sums.view(np.uint8)).to(wire.device)


def same(mine: np.ndarray, theirs: np.ndarray) -> bool:
    return all(np.array_equal(mine[part], theirs[part]) for part in AGREED)


def verify(wire: torch.Tensor, frame: Frame, packed: torch.Tensor, rank: int) -> None:
    """Raise ``Mismatch`` naming every rank whose message is not the expected one, or whose payload is damaged."""
    headers, mine = wire[:, :HEADER].cpu().numpy(), packed.numpy()
    wrong = [(r, row) for r, row in enumerate(headers) if not same(mine, row)]
    if wrong:
        got = [(r, unpack(row)) for r, row in wrong]
        peers = "; ".join(f"rank {r} sent {f.describe() if f else 'bytes that are no header'}" for r, f in got)
        raise Mismatch(
            f"rank {rank} expected {frame.describe()}, but {peers}. Every rank must use the same codec, options and "
            "model, and call collectives in the same order.",
            ranks=tuple(r for r, _ in wrong),
        )
    for r, row in enumerate(headers):
        (want,) = struct.unpack("<I", row[_PAYLOAD].tobytes())
        if want and want != (zlib.crc32(wire[r, HEADER:].cpu().numpy().data) or 1):
            raise CommunicationError(
                f"the payload of rank {r} in {frame.describe()} is damaged: its checksum does not match. "
                "Memory or network corrupt data; check both before going on.",
                ranks=(r,),
            )
