"""The fast CPU path of codecs: one pass over memory, block by block in the first-level cache.

Each call processes the blocks of a message; a block is loaded (input + residual, or the mean of P
decoded rows), scaled, packed and stored before the next one, so that a float is read once and a
residual written once. Results equal ``reference`` bit for bit. ``docs/kernels.md`` explains the
choice of Numba.
"""

import numpy as np
import torch

from commpress.kernels.cpu.calls import Kernels, split
from commpress.kernels.pieces import Pieces

loops = Kernels("row_loops")

_LARGE = 1 << 20  # elements from which caches do not keep a buffer until it is read
_NONE = np.empty(0, np.float32)
_NO_BYTES = np.empty(0, np.uint8)


def _floats(tensor: torch.Tensor | None) -> np.ndarray:
    """Return an array of a tensor: float32 unchanged, bfloat16 as uint16."""
    if tensor is None:
        return _NONE
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _bytes(message: torch.Tensor) -> np.ndarray:
    """Return all rows as one flat byte array, including gaps between rows."""
    rows, width = message.shape
    return message.as_strided(((rows - 1) * message.stride(0) + width,), (1,)).numpy()


def _mixed(pieces: Pieces) -> bool | None:
    """Return True, or None for signs and casts alone, which selects a smaller kernel."""
    if pieces.registered:
        raise TypeError(
            "the codec is a registered one, which these kernels do not have: call "
            "kernels.arithmetic(device, pieces)"
        )
    return None if pieces.plain else True


def _encode_any(x, gain, received, message, flag, pieces, rank, key, owed):
    residual, new_residual, residual_scale, new_scale = owed
    rows, stride, flat = message.shape[0], message.stride(0), _bytes(message)
    blocks = rows * pieces.blocks
    partial = np.empty(blocks, np.float32) if pieces.row_scales else _NONE
    inbox, in_stride, senders = _NO_BYTES, 0, 0
    if received is not None:
        inbox, in_stride, senders = _bytes(received), received.stride(0), received.shape[0]
    given = _floats(x), np.float32(gain), inbox, in_stride, senders, rank
    kept = _floats(residual), _floats(residual_scale), _floats(new_residual)
    sent = flat, stride, partial, pieces.table, rows, np.uint32(key), _mixed(pieces)
    numel = pieces.numel // (senders or 1)
    finite = all(split(loops.encode, blocks, numel, *given, *kept, *sent))
    if pieces.row_scales:
        table = pieces.table
        scales = new_scale
        if scales is None:
            scales = torch.empty(len(table) * rows, dtype=torch.float32)
        row = flat, stride, scales.numpy()
        finite = loops.finish_rows(partial, table, rows, senders, rank, *row) and finite
        if new_residual is not None and new_scale is None:
            settle(new_residual, scales, pieces, shard=senders > 0)
    if not finite:
        flag.fill_(1)


def encode(
    x,
    message,
    flag,
    pieces,
    *,
    gain=1.0,
    key=0,
    residual=None,
    new_residual=None,
    residual_scale=None,
    new_scale=None,
):
    """Encode c = gain · x + residual into the rows of ``message``; set new_residual := c − decoded,
    and flag := 1 if something is not finite.

    x float32[n] or bfloat16[n]; message uint8[rows, row_bytes], gaps between rows allowed;
    residual, new_residual float32[pieces.residual_numel], which may be the same tensor. With
    ``new_scale`` float32[pieces · rows] the residual of pieces with one scale per row is lazy:
    new_residual := c there, and c − scale · sgn(c) is computed when it is passed again with
    ``residual_scale``.
    """
    owed = residual, new_residual, residual_scale, new_scale
    _encode_any(x, gain, None, message, flag, pieces, 0, key, owed)


def serve(
    received,
    message,
    flag,
    pieces,
    rank,
    *,
    divisor=0.0,
    key=0,
    residual=None,
    new_residual=None,
    residual_scale=None,
    new_scale=None,
):
    """Average the P rows, add the residual and encode the row to send back, without writing the
    mean to memory.

    The sum is divided by ``divisor`` (0: by P), because a row may stand for several ranks.
    Residuals are float32[pieces.shard], lazy scales float32[pieces].
    """
    owed, divisor = (residual, new_residual, residual_scale, new_scale), divisor or len(received)
    _encode_any(None, divisor, received, message, flag, pieces, rank, key, owed)


def decode(message, out, pieces, *, gain=1.0, add=False):
    """Decode all rows into out[n], or add them to it; each scale is multiplied by ``gain`` before
    its codes. ``out`` is float32 or bfloat16."""
    rows = message.shape[0]
    past = not add and pieces.numel >= _LARGE
    given = _bytes(message), message.stride(0), _floats(out), np.float32(gain), add, past, 0, 0
    of = pieces.table, rows, _mixed(pieces)
    split(loops.decode, rows * pieces.blocks, pieces.numel, *given, *of)


def decode_mean(received, out, pieces, rank):
    """Set out[pieces.shard] to the mean of the P received versions of row ``rank``, summed in rank
    order, then divided by P."""
    given = _bytes(received), received.stride(0), _floats(out), np.float32(1), False, False
    of = len(received), rank, pieces.table, 1, _mixed(pieces)
    split(loops.decode, pieces.blocks, pieces.numel, *given, *of)


def settle(value, scale, pieces, *, shard=False):
    """Turn a lazy residual into a plain one, in place: v −= scale · sgn(v)."""
    loops.settle(value.numpy(), scale.numpy(), pieces.table, 1 if shard else pieces.rows, shard)
