"""The header before every row: what this message is, so that ranks that disagree say so instead of mixing bytes.

Bytes  0  magic "cp"          Bytes 32  elements of the buffer, u64
       2  version, u8               40  sequence number of the collective, u32
       3  operation, u8             44  label: CRC of what is being reduced, u32
       4  flags, u8                 48  checksum of bytes 0–47 with flags as 0, u32
       5  zero                      52  checksum of the payload, u32 (0: not checked)
       6  world size, u16           56  length of the message that goes the other way, u64
       8  codec, 24 ASCII bytes

All but the flags and the payload's checksum must be what the receiver expects: the same on every rank, or, in an exchange
of rows of any length, the same two lengths on both sides. Lengths are elements there, bytes here. Little endian throughout.
"""

import struct
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from commpress.errors import CommunicationError, Mismatch

HEADER = 64
AGREED = (slice(0, 4), slice(5, 52), slice(56, 64))  # the bytes in which two ranks must not differ
FLAGS = 4
NOT_FINITE, ASKS = 1, 2  # the sender's numbers are not; it asks all others for a word after this step
_PAYLOAD = slice(52, 56)
_LAYOUT = struct.Struct("<2sBBBBH24sQII")
_VERSION = 1
ALL_TO_ALL, ALL_GATHER, FLAT, LENGTHS, INSIDE, BETWEEN = range(1, 7)
_OPERATIONS = {
    ALL_TO_ALL: "all_to_all",
    ALL_GATHER: "all_gather",
    FLAT: "flat all_to_all",
    LENGTHS: "lengths of an all_to_all",
    INSIDE: "all_to_all inside a node",
    BETWEEN: "all_to_all between nodes",
}


class Frame(NamedTuple):
    """What every rank must agree on about one message."""

    operation: int
    size: int
    codec: str
    numel: int
    sequence: int
    label: int = 0
    back: int = 0  # bytes that go the other way, in an exchange of rows of any length

    def pack(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.bytes()), dtype=torch.uint8)

    def bytes(self) -> bytes:
        codec = self.codec.encode("ascii")
        if len(codec) > 24:
            raise ValueError(f"codec description {self.codec!r} is longer than 24 bytes")
        body = _LAYOUT.pack(
            b"cp", _VERSION, self.operation, 0, 0, self.size, codec, self.numel, self.sequence & 0xFFFFFFFF, self.label
        )
        return body + struct.pack("<IIQ", zlib.crc32(body), 0, self.back)

    def describe(self) -> str:
        what = _OPERATIONS.get(self.operation, f"operation {self.operation}")
        each_way = self.operation not in (ALL_TO_ALL, ALL_GATHER)
        length = f"{self.numel} bytes for {self.back} bytes" if each_way else f"{self.numel} elements"
        return (
            f"{what} number {self.sequence} of {length} with codec {self.codec!r} "
            f"among {self.size} ranks (label {self.label:08x})"
        )


def unpack(header: np.ndarray) -> Frame | None:
    """The frame that a peer sent, or None if these are not the bytes of a header."""
    body = bytearray(header[:48].tobytes())
    body[FLAGS] = 0
    magic, version, operation, _, _, size, codec, numel, sequence, label = _LAYOUT.unpack(body)
    if magic != b"cp" or version != _VERSION or header[48:52].tobytes() != struct.pack("<I", zlib.crc32(body)):
        return None
    (back,) = struct.unpack("<Q", header[56:64].tobytes())
    return Frame(operation, size, codec.rstrip(b"\0").decode("ascii", "replace"), numel, sequence, label, back)


def pack_rows(frames: Mapping[int, Frame], size: int) -> torch.Tensor:
    """uint8[size, HEADER]: the frame of each rank in its row, zeros where there is none."""
    packed = {id(frame): frame.bytes() for frame in {id(f): f for f in frames.values()}.values()}  # often it is one for all
    none = bytes(HEADER)
    rows = b"".join(packed[id(frames[r])] if r in frames else none for r in range(size))
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(size, HEADER)


def stamp(wire: torch.Tensor, frame: torch.Tensor, flag: torch.Tensor, *, checksum: bool = False) -> None:
    """Write the header before every row; ``flag`` (uint8[1]) holds the flags: what this rank says of itself."""
    wire[:, :HEADER] = frame.to(wire.device, non_blocking=True)
    wire[:, FLAGS : FLAGS + 1] = flag
    if checksum:
        sums = np.array([[zlib.crc32(row[HEADER:]) or 1] for row in wire.cpu().numpy()], "<u4")
        wire[:, _PAYLOAD] = torch.from_numpy(sums.view(np.uint8)).to(wire.device)


def same(mine: np.ndarray, theirs: np.ndarray) -> bool:
    one, two = mine.tobytes(), theirs.tobytes()
    return all(one[part] == two[part] for part in AGREED)


def alike(mine: np.ndarray, theirs: np.ndarray) -> bool:
    """``same``, row by row. Most headers have neither flags nor checksum, and are the same in every byte."""
    return mine.tobytes() == theirs.tobytes() or all(same(one, two) for one, two in zip(mine, theirs, strict=True))


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
        _check_payload(row, wire[r, HEADER:], frame, r)


def verify_rows(
    headers: torch.Tensor, payloads: Mapping[int, torch.Tensor], wanted: Mapping[int, Frame], packed: torch.Tensor, rank: int
) -> None:
    """As ``verify`` where every peer has a frame of its own."""
    got, expected = headers.cpu().numpy(), packed.numpy()
    if got.tobytes() == expected.tobytes():  # no flags, no checksums: what nearly all are
        return
    ranks = list(wanted)
    if not alike(expected[ranks], got[ranks]):
        wrong = [r for r in wanted if not same(expected[r], got[r])]
        found = {r: unpack(got[r]) for r in wrong}
        peers = "; ".join(
            f"rank {r} to send {wanted[r].describe()}, but it sent {f.describe() if f else 'bytes that are no header'}"
            for r, f in found.items()
        )
        raise Mismatch(
            f"rank {rank} expected {peers}. Two ranks must agree on the bytes they send each other (splits, row shape, "
            "dtype), on codec and nodes, and call collectives in the same order.",
            ranks=tuple(wrong),
        )
    if got[:, _PAYLOAD].any():
        for r, frame in wanted.items():
            _check_payload(got[r], payloads[r], frame, r)


def checksums(headers: torch.Tensor, payloads: Mapping[int, torch.Tensor]) -> None:
    """Write the checksum of each rank's payload into its header."""
    for r, payload in payloads.items():
        sums = np.array([zlib.crc32(payload.cpu().numpy().data) or 1], "<u4")
        headers[r, _PAYLOAD] = torch.from_numpy(sums.view(np.uint8)).to(headers.device)


def _check_payload(header: np.ndarray, payload: torch.Tensor, frame: Frame, rank: int) -> None:
    (want,) = struct.unpack("<I", header[_PAYLOAD].tobytes())
    if want and want != (zlib.crc32(payload.cpu().numpy().data) or 1):
        raise CommunicationError(
            f"the payload of rank {rank} in {frame.describe()} is damaged: its checksum does not match. "
            "Memory or network corrupt data; check both before going on.",
            ranks=(rank,),
        )
