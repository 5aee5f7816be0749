"""Rows that travel between ranks, and the header before every row: it describes the message, so
that ranks that disagree raise an error instead of mixing bytes.

Bytes  0  magic "cp"                          Bytes 32  elements of the buffer, u64
       2  version, u8                               40  sequence number of the collective, u32
       3  operation, u8                             44  label: CRC of what is being reduced, u32
       4  flags, u8                              48  length of the message the other way, u64
       5  1 if the payload bears a checksum, u8  56  checksum of bytes 0–55 with flags as 0, u32
       6  world size, u16                        60  checksum of flags and payload (xxh3), u32
       8  codec, 24 ASCII bytes

All but the flags and the payload's checksum must be what the receiver expects: the same on every
rank, or, in an exchange of rows of any length, the same two lengths on both sides. Lengths are
elements there, bytes here. Little endian throughout.

``verify`` notices any bit of a row that changes on the way: the receiver knows what the header must
be, and the checksum covers the rest. ``Transport.checks`` says whether payloads bear a checksum by
default.
"""

import ctypes
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.errors import CommunicationError, Corrupted, InvalidArgument, Mismatch
from commpress.kernels.cuda import headers as on_card
from commpress.work import stream_of

HEADER = 64  # bytes
# bytes: a length from a peer that is more is none
LONGEST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
AGREED = (slice(0, 4), slice(5, 60))  # the bytes in which two ranks must not differ
FLAGS = 4
# the sender's numbers are not finite; it asks all others for a vote after this step
NOT_FINITE, ASKS = 1, 2
_CHECKED, SUM = 5, 60
_LAYOUT = struct.Struct("<2sBBBBH24sQIIQ")
_U32 = struct.Struct("<I")
_VERSION = 2
ALL_TO_ALL, ALL_GATHER, FLAT, LENGTHS, INSIDE, BETWEEN = range(1, 7)
_OPERATIONS = {
    ALL_TO_ALL: "all_to_all",
    ALL_GATHER: "all_gather",
    FLAT: "flat all_to_all",
    LENGTHS: "lengths of an all_to_all",
    INSIDE: "all_to_all inside a node",
    BETWEEN: "all_to_all between nodes",
}


class Rows(NamedTuple):
    """A header and a payload of any length for each rank in ``payloads``; a payload may be
    empty."""

    headers: torch.Tensor  # uint8[size, HEADER]
    payloads: Mapping[int, torch.Tensor]  # uint8[n], contiguous, by rank


def rows_of(message: torch.Tensor) -> Rows:
    """Take the rows of uint8[size, row] apart."""
    return Rows(message[:, :HEADER], dict(enumerate(message[:, HEADER:])))


def rows_in(message: torch.Tensor) -> list[memoryview]:
    """Return the memory of the rows of uint8[n, row], whose elements are contiguous.

    Note: not by way of NumPy, after which torch refuses to resize a tensor's memory, as FSDP does.
    """
    if message.device.type != "cpu":
        raise InvalidArgument(
            f"rows are on {message.device}: expected tensors on the CPU, or on CUDA, which go by "
            "way of it"
        )
    (count, width), step = message.shape, message.stride(0)
    if not count:
        return []
    memory = _memory(message.data_ptr(), (count - 1) * step + width)
    return [memory[r * step : r * step + width] for r in range(count)]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of the host, which must outlive them."""
    return _memory(tensor.data_ptr(), tensor.nbytes)


def _memory(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


class Receiver(Protocol):
    """The part of a transport that checking needs."""

    rank: int

    def abandon(self, reason: str) -> None:
        """Stop using this transport and tell the peers, if possible."""


@runtime_checkable
class OnDevice(Protocol):
    """A transport that moves rows where they lie, and takes the host's own messages another way:
    who uses it need not wait for a device."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """True for a tensor of a device, False for the host's."""

    def announce(self, header: torch.Tensor, length: int) -> None:
        """Compare the header of the next all-to-all of a device, and the bytes of its rows, with
        those of the peers: it would hang where they differ."""

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for a device. A peer that is gone, and time that is over, end what is under way
        there, with an error."""


def on_device(transport: Any) -> OnDevice | None:
    """Return ``transport``, or the one that it counts, if that moves rows where they lie."""
    transport = getattr(transport, "counted", transport)
    kind: type = type(transport)
    return transport if _moves_rows(kind) else None


@cache  # asking a protocol costs as much as a launch
def _moves_rows(kind: type) -> bool:
    return issubclass(kind, OnDevice)


class Frame(NamedTuple):
    """Description of one message, on which every rank must agree."""

    operation: int
    size: int
    codec: str
    numel: int
    sequence: int
    label: int = 0
    back: int = 0  # bytes in the other direction, in an exchange of rows of any length
    checked: bool = False  # payloads bear a checksum

    def pack(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.bytes()), dtype=torch.uint8)

    def bytes(self) -> bytes:
        operation, size, name, numel, sequence, label, back, checked = self
        codec = name.encode("ascii")
        if len(codec) > 24:
            raise ValueError(f"codec description {name!r} is longer than 24 bytes")
        what = operation, 0, checked, size, codec
        body = _LAYOUT.pack(b"cp", _VERSION, *what, numel, sequence & 0xFFFFFFFF, label, back)
        return body + struct.pack("<II", zlib.crc32(body), 0)

    def describe(self) -> str:
        what = _OPERATIONS.get(self.operation, f"operation {self.operation}")
        each_way = self.operation not in (ALL_TO_ALL, ALL_GATHER)
        length = (
            f"{self.numel} bytes for {self.back} bytes" if each_way else f"{self.numel} elements"
        )
        return (
            f"{what} number {self.sequence} of {length} with codec {self.codec!r} among "
            f"{self.size} ranks (label "
            f"{self.label:08x}{'' if self.checked else ', without checksum'})"
        )


def unpack(header: np.ndarray) -> Frame | None:
    """Return the frame that a peer sent, or None if ``header`` is no header of this version."""
    body = _body(header)
    _, version, operation, _, checked, size, codec, numel, sequence, label, back = _LAYOUT.unpack(
        body or bytes(56)
    )
    if version != _VERSION:
        return None
    return Frame(
        operation,
        size,
        codec.rstrip(b"\0").decode("ascii", "replace"),
        numel,
        sequence,
        label,
        back,
        bool(checked),
    )


def _body(header: np.ndarray) -> bytearray | None:
    """Return the bytes under the header's own checksum, or None if it does not match."""
    body = bytearray(header[:56].tobytes())
    body[FLAGS] = 0
    return (
        body
        if body[:2] == b"cp" and header[56:60].tobytes() == _U32.pack(zlib.crc32(body))
        else None
    )


def _said(header: np.ndarray) -> str:
    """Describe a received header in words; empty if it is damaged."""
    if frame := unpack(header):
        return frame.describe()
    return (
        f"a header of version {header[2]}, which is not {_VERSION}"
        if _body(header) is not None
        else ""
    )


def pack_rows(frames: Mapping[int, Frame], size: int) -> torch.Tensor:
    """Pack the frame of each rank into its row of uint8[size, HEADER]; rows without a frame are
    zero."""
    # often all ranks share one frame
    packed = {id(frame): frame.bytes() for frame in {id(f): f for f in frames.values()}.values()}
    none = bytes(HEADER)
    rows = b"".join(packed[id(frames[r])] if r in frames else none for r in range(size))
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(size, HEADER)


# ---------------------------------------------------------------- before it leaves


def stamp(rows: torch.Tensor, packed: torch.Tensor, flags: torch.Tensor) -> None:
    """Write the header before every row, with the flags of any element of ``flags`` (uint8)."""
    if rows.device.type == "cuda":
        on_card.stamp(rows, packed, flags)
    else:
        rows[:, :HEADER] = packed
        rows[:, FLAGS] = reduce(or_, flags.tolist())
    if not packed[_CHECKED]:
        return
    host = rows.cpu()
    for row in rows_in(host):
        _U32.pack_into(row, SUM, _sum(row[FLAGS], row[HEADER:]))
    if rows.device.type != "cpu":
        rows[:, SUM:HEADER] = host[:, SUM:HEADER].to(rows.device)


def stamp_rows(headers: torch.Tensor, payloads: Mapping[int, torch.Tensor]) -> None:
    """Write the checksum of each rank's payload into its header, if the header asks for one."""
    host = headers.cpu()
    rows = rows_in(host)
    for r, payload in payloads.items():
        if rows[r][_CHECKED]:
            _U32.pack_into(rows[r], SUM, _sum(rows[r][FLAGS], memory_of(payload.cpu())))
    headers.copy_(host)


# ---------------------------------------------------------------- when it has come


def same(mine: bytes, theirs: bytes) -> bool:
    return all(mine[part] == theirs[part] for part in AGREED)


def alike(mine: np.ndarray, theirs: np.ndarray) -> Any:
    """Compare headers as ``same`` does, row by row."""
    differ = mine != theirs
    differ[:, FLAGS] = differ[:, SUM:] = False
    return ~differ.any()


def compared(rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return uint8[2]: ``NOT_FINITE`` if a row has that flag or another header, else 0; ``ASKS`` if
    a row has that flag, else 0."""
    right = alike(packed.numpy(), rows[:, :HEADER].numpy())
    flags = reduce(or_, rows[:, FLAGS].tolist()) | (0 if right else NOT_FINITE)
    return torch.tensor([flags & NOT_FINITE, flags & ASKS], dtype=torch.uint8)


class LateHeaders:
    """Headers on their way from a GPU: the host waits once for those of several exchanges, before
    anything is committed.

    Until then the device compares them: if one is not as expected, this rank counts as not finite.
    """

    def __init__(self, transport: Receiver) -> None:
        self._transport = transport
        self._device: torch.device | None = None
        self._coming: list[tuple[torch.Tensor, Frame, torch.Tensor]] = []

    def see(self, received: torch.Tensor, frame: Frame, packed: torch.Tensor) -> None:
        """Begin to bring the headers before these rows to the host."""
        on_gpu = received.device.type == "cuda"
        self._device = received.device
        host = torch.empty(len(received), HEADER, dtype=torch.uint8, pin_memory=on_gpu)
        self._coming.append((host.copy_(received[:, :HEADER], non_blocking=True), frame, packed))

    def flags(self, received: torch.Tensor) -> torch.Tensor:
        """Return uint8[2] on the device, the flags of the rows that were seen last: ``NOT_FINITE``
        or 0, ``ASKS`` or 0."""
        packed = self._coming[-1][2]
        if received.device.type == "cuda":
            return on_card.compare(received, packed)
        return compared(received, packed)

    def read(self) -> int:
        """Wait for all headers and ``verify`` them; return the flags of the rows seen last."""
        found = 0
        if self._device is not None:
            wait_for(self._device, self._transport)
        for host, frame, packed in self._coming:
            found = verify(host, frame, packed, self._transport)
        return found


def wait_for(device: torch.device, transport: Receiver) -> None:
    """Have the host wait for this thread's stream on ``device``, but not for peers that are
    gone."""
    stream = stream_of(device)
    if stream is None:
        return
    if (moves := on_device(transport)) is None:
        stream.synchronize()
    else:
        moves.until(stream.record_event().query)


def verify(received: torch.Tensor, frame: Frame, packed: torch.Tensor, transport: Receiver) -> int:
    """Return the flags that any rank has set. Raise ``Mismatch`` naming every rank whose message is
    not the expected one, ``Corrupted`` if one changed on the way."""
    wait_for(received.device, transport)
    host = (received if frame.checked else received[:, :HEADER]).cpu()
    rows, mine = rows_in(host), packed.numpy().tobytes()
    wrong = {r: frame for r, row in enumerate(rows) if not same(mine, bytes(row[:HEADER]))}
    if wrong:
        raise _complaint(
            transport,
            wrong,
            host[:, :HEADER].numpy(),
            f"{frame.describe()}, but ",
            (
                "Every rank must use the same codec, options and model, and call collectives in "
                "the same order."
            ),
        )
    if frame.checked:
        _raise_damaged(
            transport, {r: frame for r, row in enumerate(rows) if not _whole(row, row[HEADER:])}
        )
    return reduce(or_, (row[FLAGS] for row in rows))


def verify_rows(
    headers: torch.Tensor,
    payloads: Mapping[int, torch.Tensor],
    wanted: Mapping[int, Frame],
    packed: torch.Tensor,
    transport: Receiver,
) -> None:
    """Verify rows like ``verify``, with a frame for each peer."""
    host = headers.cpu()
    got, expected, ranks = host.numpy(), packed.numpy(), list(wanted)
    if not alike(expected[ranks], got[ranks]):
        raise _complaint(
            transport,
            {r: wanted[r] for r in wanted if not same(expected[r].tobytes(), got[r].tobytes())},
            got,
            "",
            "Two ranks must agree on the bytes they send each other (splits, row shape, dtype), on "
            "codec and nodes, and call collectives in the same order.",
        )
    rows = rows_in(host)
    damaged = {
        r: f
        for r, f in wanted.items()
        if f.checked and not _whole(rows[r], memory_of(payloads[r].cpu()))
    }
    _raise_damaged(transport, damaged)


def _sum(flags: int, payload: memoryview) -> int:
    return checksum_of(payload, flags) & 0xFFFFFFFF


def _whole(header: memoryview, payload: memoryview) -> bool:
    return _U32.unpack_from(header, SUM)[0] == _sum(header[FLAGS], payload)


def _complaint(
    transport: Receiver,
    wrong: Mapping[int, Frame],
    headers: np.ndarray,
    due_of_all: str,
    advice: str,
) -> CommunicationError:
    """Build the error: a readable header means that its rank does something else, others are
    damaged, which only this rank knows."""
    got = {r: _said(headers[r]) for r in wrong}
    due = {
        r: "" if due_of_all else f" to send {frame.describe()}, but it"
        for r, frame in wrong.items()
    }
    peers = "; ".join(f"rank {r}{due[r]} sent {said or _NOISE}" for r, said in got.items())
    text = f"rank {transport.rank} expected {due_of_all}{peers}."
    damaged = tuple(r for r, said in got.items() if not said)
    if not damaged:
        return Mismatch(f"{text} {advice}", ranks=tuple(wrong))
    error = Corrupted(f"{text} {_CHECK}", ranks=damaged)
    transport.abandon(str(error))
    return error


def _raise_damaged(transport: Receiver, damaged: Mapping[int, Frame]) -> None:
    if not damaged:
        return
    what = "; ".join(
        f"the payload of rank {r} in {frame.describe()} is damaged" for r, frame in damaged.items()
    )
    error = Corrupted(
        f"rank {transport.rank}: {what}: its checksum does not match. {_CHECK}",
        ranks=tuple(damaged),
    )
    transport.abandon(str(error))
    raise error


_NOISE = "bytes that are no header"
_CHECK = "Memory or network corrupt data; check both before going on."
