"""Records: 64 bytes per call and peer, which a rank sends before its data moves.

Two ranks agree on a call if each receives from the other exactly the record it expects. In a
collective whose parts have one size that is the record it sent itself; in an all-to-all, what one
gives must be what the other takes.

Bytes  0  magic "ca"             Bytes 12  root or tag, i32
       2  kind, u8                     16  elements that the sender gives to the receiver, i64
       3  operation, u8                24  elements that the sender takes from the receiver, i64
       4  reduction, u8                32  hash of the shapes, u32
       5  dtype, u8                    36  codec, 24 ASCII bytes
       6  zeros
       8  sequence number, u32         60  zeros
                                       little endian throughout
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

RECORD = 64
# kinds; ANY_SOURCE: waits to receive so, or no longer
CALL, LEAVE, GAVE_UP, ANY_SOURCE, REFORM = 1, 2, 3, 6, 9
_LAYOUT = struct.Struct("<2sBBBBxxIiqqI24s4x")
_MAGIC = b"ca"

OPERATIONS = (
    "nothing",
    "send",
    "recv",
    "barrier",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_to_all",
    "all_to_all_single",
)
_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
SEND, RECV = _NUMBERS["send"], _NUMBERS["recv"]
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
NO_REDUCTION = 255
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_DTYPES = {dtype: number for number, dtype in enumerate(DTYPES)}
OTHER_DTYPE = 254
NO_DTYPE = 255


class Record(NamedTuple):
    """The fields of one record, as the sender means them."""

    kind: int = CALL
    operation: int = 0
    reduction: int = NO_REDUCTION
    dtype: int = NO_DTYPE
    sequence: int = 0
    root: int = 0
    give: int = 0
    take: int = 0
    shape: int = 0
    codec: bytes = b""

    def pack(self) -> bytes:
        return _LAYOUT.pack(_MAGIC, *self)

    def mirrored(self) -> "Record":
        """The record that the peer must send for the two to agree."""
        operation = {SEND: RECV, RECV: SEND}.get(self.operation, self.operation)
        return self._replace(operation=operation, give=self.take, take=self.give)

    def describe(self) -> str:
        name = (
            OPERATIONS[self.operation]
            if self.operation < len(OPERATIONS)
            else f"operation {self.operation}"
        )
        if self.operation in (SEND, RECV):
            count = self.give if self.operation == SEND else self.take
            return f"{name} of {count} {_dtype_name(self.dtype)} with tag {self.root}"
        words = [f"{name} number {self.sequence}"]
        if self.dtype != NO_DTYPE:
            both = (
                f"{self.give}"
                if self.give == self.take
                else f"{self.give} to and {self.take} from its peer"
            )
            words.append(f"of {both} {_dtype_name(self.dtype)}")
        if self.reduction < len(REDUCTIONS):
            words.append(REDUCTIONS[self.reduction])
        if name in ROOTED:
            words.append(f"root {self.root}")
        if codec := self.codec.rstrip(bytes(1)):
            words.append(f"codec {codec.decode('ascii', 'replace')!r}")
        return ", ".join([" ".join(words[:2]), *words[2:]])


def unpack(data: bytes) -> Record | None:
    """None if these are not the bytes of a record."""
    magic, *fields = _LAYOUT.unpack_from(data)
    return Record(*fields) if magic == _MAGIC else None


def numbered(record: bytes, number: int) -> bytes:
    """The record with a sequence number."""
    return record[:8] + (number & 0xFFFFFFFF).to_bytes(4, "little") + record[12:]


def call(
    name: str,
    tensors: Sequence[torch.Tensor],
    *,
    reduction: int = NO_REDUCTION,
    root: int = 0,
    codec: bytes = b"",
) -> bytes:
    """The record of a collective in which every rank gives and takes the same."""
    dtype = tensors[0].dtype if tensors else None
    return _packed(name, tuple(t.shape for t in tensors), dtype, reduction, root, codec)


@lru_cache(maxsize=1024)
def _packed(
    name: str,
    shapes: tuple[torch.Size, ...],
    dtype: torch.dtype | None,
    reduction: int,
    root: int,
    codec: bytes,
) -> bytes:
    numel = sum(shape.numel() for shape in shapes)
    shape = hash(shapes[0] if len(shapes) == 1 else shapes) & 0xFFFFFFFF
    if name == "broadcast":  # a number of elements is all that torch asks ranks to agree on here
        shape = 0
    code = NO_DTYPE if dtype is None else _DTYPES.get(dtype, OTHER_DTYPE)
    return Record(CALL, _NUMBERS[name], reduction, code, 0, root, numel, numel, shape, codec).pack()


def all_to_all(
    name: str,
    dtype: torch.dtype,
    gives: Sequence[int],
    takes: Sequence[int],
    sequence: int,
    codec: bytes = b"",
) -> list[Record]:
    """The records of an all-to-all, one for each peer."""
    number, code = _NUMBERS[name], _DTYPES.get(dtype, OTHER_DTYPE)
    return [
        Record(operation=number, dtype=code, sequence=sequence, give=give, take=take, codec=codec)
        for give, take in zip(gives, takes, strict=True)
    ]


def counts(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Elements for or from each rank."""
    if not len(splits):
        return [tensor.numel() // size] * size
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return [row * split for split in splits]


def sending(tensor: torch.Tensor, tag: int) -> Record:
    return Record(
        operation=SEND, dtype=_DTYPES.get(tensor.dtype, OTHER_DTYPE), root=tag, give=tensor.numel()
    )


def receiving(tensor: torch.Tensor, tag: int) -> Record:
    return Record(
        operation=RECV, dtype=_DTYPES.get(tensor.dtype, OTHER_DTYPE), root=tag, take=tensor.numel()
    )


def _dtype_name(code: int) -> str:
    return (
        str(DTYPES[code]).removeprefix("torch.")
        if code < len(DTYPES)
        else "elements of another dtype"
    )
