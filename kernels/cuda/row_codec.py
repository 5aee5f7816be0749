"""The CUDA path of codecs: names, arguments and bytes of ``cpu.row_codec``, on torch's current
stream.

Each function is a *plan*, a generator of launches as data. ``execute`` passes a launch to CuPy,
with the module of the kind's family (``modules``); tests execute the same plans on the CPU. Tensors
are passed as addresses: nothing is copied, the host never waits, and any length, alignment and row
stride is allowed.

Pieces of one family share a launch. Their table is on the device, uploaded once per table. One
scale per row needs a second launch; the two exchange partial sums in a workspace of one word per
2048 elements from torch's caching allocator: only the first call of its size calls the driver, and
because the allocator reuses memory in stream order, calls on several streams never share it.
"""

from collections.abc import Callable, Iterator
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import torch

from commpress.errors import InvalidArgument, MissingPackage
from commpress.kernels.cuda import modules
from commpress.kernels.pieces import (
    BLOCK,
    COLUMN,
    HASH,
    KIND,
    NUMEL,
    RESIDUAL,
    SHARD,
    SOURCE,
    WIDTH,
    Pieces,
)
from commpress.kernels.reference import BITS, CHUNK, SIGN_RMS, row_header_bytes
from commpress.torch_private import current_stream_address

THREADS, FINISH_THREADS = 256, 1024
STREAMS = 256  # of torch, for which CuPy's objects are kept
# elements per thread block; always TILE for blocks with a header
TILE, DECODE_TILE = CHUNK, 2 * CHUNK
ROW_SCALE = 62  # log2 of a block for one scale per row: element >> 62 is always 0
EVERY_ROW = -1  # rank: the rows of the grid are the rows of the pieces
Arguments = ParamSpec("Arguments")
Scalars = tuple[np.generic, ...]


class Launch(NamedTuple):
    """Launch of a kernel of the module of ``family`` on a one-dimensional grid; arguments are
    scalars of the exact C width."""

    kernel: str
    family: int
    grid: int
    threads: int
    args: Scalars
    device: torch.device


class Addressed(NamedTuple):
    """The address of a stream, with the protocol by which CuPy gets it."""

    stream: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream


# ---------------------------------------------------------------- compiling and launching


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise MissingPackage(
            "compressing tensors on a GPU needs CuPy: pip install 'commpress[cuda12]' for CUDA 12 "
            "or 'commpress[cuda13]' for CUDA 13"
        ) from error
    return cupy


@lru_cache(STREAMS)
def _stream(address: int, device: int) -> Any:
    """Return CuPy's object for a stream of torch."""
    cuda = _cupy().cuda
    if hasattr(cuda.Stream, "from_external"):  # since CuPy 14, where ExternalStream warns
        return cuda.Stream.from_external(Addressed(address))
    return cuda.ExternalStream(address, device)


@cache
def _module(family: int, device: int) -> Any:
    return modules.load(_cupy(), family)


@cache
def _kernel(family: int, name: str, device: int) -> Any:
    return _module(family, device).get_function(name)


def execute(launch: Launch) -> None:
    """Enqueue a launch on torch's current stream of the device of the tensors."""
    if launch.device.type != "cuda":
        raise InvalidArgument(
            f"tensors are on {launch.device}, expected a CUDA device: use "
            "commpress.kernels.cpu.row_codec for them"
        )
    device = launch.device.index
    with _cupy().cuda.Device(device), _stream(current_stream_address(device), device):
        _kernel(launch.family, launch.kernel, device)(
            (launch.grid,), (launch.threads,), launch.args
        )


def _executed(plan: Callable[Arguments, Iterator[Launch]]) -> Callable[Arguments, None]:
    """Return the function that executes a plan. Memory allocated by the plan is kept until its last
    launch is enqueued."""

    @wraps(plan)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        for launch in plan(*args, **kwargs):
            if launch.grid:
                execute(launch)

    return call


# ---------------------------------------------------------------- pieces


class Group(NamedTuple):
    """Pieces of one launch: those of one family, separate for one scale per row."""

    family: int
    row_scale: bool
    columns: torch.Tensor  # int64[13, lines] on the device, rows as named in tiles.cu
    tiles: int  # tiles of one row of all lines
    decode_tiles: int

    def table(self, rows: int, rank: int, *, decode: bool = False) -> Scalars:
        """Return the arguments that become a ``Table`` in tiles.cu."""
        tiles = self.decode_tiles if decode else self.tiles
        return (
            address(self.columns),
            np.int32(self.columns.shape[1]),
            np.int32(tiles),
            np.int32(rows),
            np.int32(rank),
        )


def _groups(pieces: Pieces, device: torch.device) -> list[Group]:
    return _upload(pieces.table.tobytes(), device)


@cache
def _upload(table_bytes: bytes, device: torch.device) -> list[Group]:
    """Return the table in the order of tiles.cu. It is cached by content and never freed, because a
    launch on any stream may still read it."""
    table = np.frombuffer(table_bytes, np.int64).reshape(-1, 10)
    row_scale = (table[:, BLOCK] == 0) & (table[:, KIND] <= SIGN_RMS)
    families, groups = table[:, KIND] & 255, []
    for family, whole in sorted(
        {(int(f), bool(w)) for f, w in zip(families, row_scale, strict=True)}
    ):
        numbers = np.flatnonzero((families == family) & (row_scale == whole))
        lines = table[numbers]
        tiles = -(-lines[:, WIDTH] // TILE)
        decode_tiles = tiles if family >= BITS else -(-lines[:, WIDTH] // DECODE_TILE)
        shifts = [int(block).bit_length() - 1 if block else ROW_SCALE for block in lines[:, BLOCK]]
        headers = [
            row_header_bytes(int(line[KIND]), int(line[WIDTH]), int(line[BLOCK])) for line in lines
        ]
        columns = [
            np.cumsum(tiles) - tiles,
            np.cumsum(decode_tiles) - decode_tiles,
            numbers,
            lines[:, SOURCE],
            lines[:, NUMEL],
            lines[:, WIDTH],
            shifts,
            lines[:, KIND] >> 8,
            headers,
            lines[:, COLUMN],
            lines[:, RESIDUAL],
            lines[:, SHARD],
            lines[:, HASH],
        ]
        on_device = torch.from_numpy(np.array(columns, np.int64)).to(device)
        groups.append(Group(family, whole, on_device, int(tiles.sum()), int(decode_tiles.sum())))
    return groups


# ---------------------------------------------------------------- arguments


def address(tensor: torch.Tensor | None) -> np.uint64:
    return np.uint64(0 if tensor is None else tensor.data_ptr())


def _floats(tensor: torch.Tensor | None) -> Scalars:
    """Return the address of a tensor of the caller, and 1 if its elements are bfloat16."""
    return address(tensor), np.int32(tensor is not None and tensor.dtype == torch.bfloat16)


def _check_message(message: torch.Tensor, pieces: Pieces) -> None:
    if (
        message.dtype != torch.uint8
        or message.dim() != 2
        or message.shape[1] < pieces.row_bytes
        or message.stride(1) != 1
    ):
        raise InvalidArgument(
            f"the message is {message.dtype} {tuple(message.shape)} with strides "
            f"{message.stride()}, expected rows of {pieces.row_bytes} consecutive uint8: allocate "
            "it with pieces.row_bytes columns"
        )


def _check_floats(device: torch.device, **floats: tuple[torch.Tensor | None, int]) -> None:
    """Check that each tensor is absent or has enough contiguous float32 elements on ``device``;
    ``x`` and ``out`` may be bfloat16."""
    for name, (tensor, numel) in floats.items():
        if tensor is None:
            continue
        known = (torch.float32, torch.bfloat16) if name in ("x", "out") else (torch.float32,)
        if tensor.dtype not in known or tensor.numel() < numel or not tensor.is_contiguous():
            raise InvalidArgument(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, "
                f"expected {numel} consecutive {' or '.join(str(d)[6:] for d in known)}"
            )
        if tensor.device != device:
            raise InvalidArgument(
                f"{name} is on {tensor.device}, but the message is on {device}: move it there"
            )


def _buffer_numel(pieces: Pieces) -> int:
    return int((pieces.table[:, SOURCE] + pieces.table[:, NUMEL]).max(initial=0))


# ---------------------------------------------------------------- plans


def _encode_any(
    verb: str,
    x: torch.Tensor | None,
    gain: float,
    received: torch.Tensor | None,
    message: torch.Tensor,
    flag: torch.Tensor,
    pieces: Pieces,
    rank: int,
    key: int,
    residual: torch.Tensor | None,
    new_residual: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    new_scale: torch.Tensor | None,
) -> Iterator[Launch]:
    """Yield the launches of ``encode`` or ``serve``, which differ in the names of kernels and in
    the rows."""
    rows, device = message.shape[0], message.device
    if flag.device != device or flag.dtype != torch.uint8:
        raise InvalidArgument(
            f"flag is {flag.dtype} on {flag.device}, expected torch.uint8 on {device}"
        )
    groups = _groups(pieces, device)
    scales = new_scale
    if scales is None and pieces.row_scales:
        scales = torch.empty(len(pieces.table) * rows, dtype=torch.float32, device=device)
    before: Scalars = (
        *_floats(x),
        np.float32(gain),
        address(received),
        np.int64(0 if received is None else received.stride(0)),
        np.int32(0 if received is None else received.shape[0]),
        address(residual),
        address(residual_scale),
        address(message),
        np.int64(message.stride(0)),
        address(flag),
        address(new_residual),
    )
    noise = np.uint32(key & 0xFFFFFFFF)
    for group in groups:
        grid, table = rows * group.tiles, group.table(rows, rank)
        if not group.row_scale:
            args: Scalars = (*before, address(new_scale), noise, *table, address(None))
            yield Launch(f"{verb}_blocks", group.family, grid, THREADS, args, device)
            continue
        totals = torch.empty(grid, dtype=torch.float32, device=device)
        args = (*before, address(scales), noise, *table, address(totals))
        yield Launch(f"{verb}_measure", group.family, grid, THREADS, args, device)
        yield Launch(
            "finish_rows", group.family, rows * group.columns.shape[1], FINISH_THREADS, args, device
        )
        if new_residual is not None and scales is not None and new_scale is None:
            yield _settle(group, new_residual, scales, rows, rank, whole=False)


def _settle(
    group: Group, value: torch.Tensor, scale: torch.Tensor, rows: int, rank: int, *, whole: bool
) -> Launch:
    """Make the launch of ``settle``. ``whole``: include the padding of rows, because the number of
    their elements is not known without the rank."""
    args = (address(value), address(scale), *group.table(rows, rank), np.int32(whole))
    return Launch("settle", group.family, rows * group.tiles, THREADS, args, value.device)


@_executed
def encode(
    x: torch.Tensor,
    message: torch.Tensor,
    flag: torch.Tensor,
    pieces: Pieces,
    *,
    gain: float = 1.0,
    key: int = 0,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    new_scale: torch.Tensor | None = None,
) -> Iterator[Launch]:
    """Encode c = gain · x + residual into the rows of ``message``; set new_residual := c − decoded,
    and flag := 1 if something is not finite.

    ``x`` is float32 or bfloat16. With ``new_scale`` float32[pieces · rows] the residual of pieces
    with one scale per row is lazy: new_residual := c there, and c − scale · sgn(c) is computed when
    it is passed again with ``residual_scale``.
    """
    scales = len(pieces.table) * message.shape[0]
    _check_message(message, pieces)
    _check_floats(
        message.device,
        x=(x, _buffer_numel(pieces)),
        residual=(residual, pieces.residual_numel),
        new_residual=(new_residual, pieces.residual_numel),
        residual_scale=(residual_scale, scales),
        new_scale=(new_scale, scales),
    )
    yield from _encode_any(
        "encode",
        x,
        gain,
        None,
        message,
        flag,
        pieces,
        EVERY_ROW,
        key,
        residual,
        new_residual,
        residual_scale,
        new_scale,
    )


@_executed
def serve(
    received: torch.Tensor,
    message: torch.Tensor,
    flag: torch.Tensor,
    pieces: Pieces,
    rank: int,
    *,
    divisor: float = 0.0,
    key: int = 0,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    new_scale: torch.Tensor | None = None,
) -> Iterator[Launch]:
    """Average the P rows, add the residual and encode the row to send back, without writing the
    mean to memory.

    The sum is divided by ``divisor`` (0: by P), because a row may stand for several ranks.
    Residuals are float32[pieces.shard], lazy scales float32[pieces].
    """
    scales = len(pieces.table)
    _check_message(received, pieces)
    _check_message(message, pieces)
    _check_floats(
        received.device,
        residual=(residual, pieces.shard),
        new_residual=(new_residual, pieces.shard),
        residual_scale=(residual_scale, scales),
        new_scale=(new_scale, scales),
    )
    yield from _encode_any(
        "serve",
        None,
        divisor or received.shape[0],
        received,
        message,
        flag,
        pieces,
        rank,
        key,
        residual,
        new_residual,
        residual_scale,
        new_scale,
    )


@_executed
def decode(
    message: torch.Tensor,
    out: torch.Tensor,
    pieces: Pieces,
    *,
    gain: float = 1.0,
    add: bool = False,
) -> Iterator[Launch]:
    """Decode all rows into ``out``, or add them to it; each scale is multiplied by ``gain`` before
    its codes. ``out`` is float32 or bfloat16."""
    rows = message.shape[0]
    _check_message(message, pieces)
    _check_floats(message.device, out=(out, _buffer_numel(pieces)))
    for group in _groups(pieces, message.device):
        args: Scalars = (
            address(message),
            np.int64(message.stride(0)),
            np.float32(gain),
            np.int32(add),
            *_floats(out),
        )
        table = group.table(rows, EVERY_ROW, decode=True)
        yield Launch(
            "decode_rows",
            group.family,
            rows * group.decode_tiles,
            THREADS,
            (*args, *table),
            message.device,
        )


@_executed
def decode_mean(
    received: torch.Tensor, out: torch.Tensor, pieces: Pieces, rank: int
) -> Iterator[Launch]:
    """Set out[pieces.shard], float32 or bfloat16, to the mean of the P received versions of row
    ``rank``, summed in rank order, then divided by P."""
    _check_message(received, pieces)
    _check_floats(received.device, out=(out, pieces.shard))
    for group in _groups(pieces, received.device):
        args: Scalars = (
            address(received),
            np.int64(received.stride(0)),
            np.int32(received.shape[0]),
            *_floats(out),
        )
        yield Launch(
            "decode_mean",
            group.family,
            group.tiles,
            THREADS,
            (*args, *group.table(1, rank)),
            received.device,
        )


@_executed
def settle(
    value: torch.Tensor, scale: torch.Tensor, pieces: Pieces, *, shard: bool = False
) -> Iterator[Launch]:
    """Turn a lazy residual into a plain one, in place: v −= scale · sgn(v)."""
    rows, rank = (1, 0) if shard else (pieces.rows, EVERY_ROW)
    numel = pieces.shard if shard else pieces.residual_numel
    _check_floats(value.device, value=(value, numel), scale=(scale, len(pieces.table) * rows))
    for group in _groups(pieces, value.device):
        if group.row_scale:
            yield _settle(group, value, scale, rows, rank, whole=shard)
