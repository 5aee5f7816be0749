"""Arithmetic of messages in a registered codec: row by row, in plain torch, on the device of the
tensors."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from commpress.kernels.pieces import COLUMN, KIND, NUMEL, RESIDUAL, SHARD, SOURCE, WIDTH, Pieces
from commpress.kernels.registered import PlainCodec, of_kind


def encode(
    x: torch.Tensor,
    message: torch.Tensor,
    flag: torch.Tensor,
    pieces: Pieces,
    *,
    gain: float = 1.0,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """Encode like the kernels of a device. Their other arguments, for random codecs and for one
    scale per row, are ignored."""
    for line in pieces.table:
        for row, (start, stop) in enumerate(_rows(line, pieces.rows)):
            values = x[line[SOURCE] + start : line[SOURCE] + stop].float() * gain
            place = (
                slice(line[RESIDUAL] + start, line[RESIDUAL] + stop)
                if line[RESIDUAL] >= 0
                else None
            )
            _encode(values, message[row], flag, line, place, residual, new_residual)


def serve(
    received: torch.Tensor,
    message: torch.Tensor,
    flag: torch.Tensor,
    pieces: Pieces,
    rank: int,
    *,
    divisor: float = 0.0,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    **_: Any,
) -> None:
    for line in pieces.table:
        mean = _mean(received, line, rank, divisor)
        place = slice(line[SHARD], line[SHARD] + len(mean)) if line[RESIDUAL] >= 0 else None
        _encode(mean, message[0], flag, line, place, residual, new_residual)


def decode(
    message: torch.Tensor,
    out: torch.Tensor,
    pieces: Pieces,
    *,
    gain: float = 1.0,
    add: bool = False,
) -> None:
    for line in pieces.table:
        for row, (start, stop) in enumerate(_rows(line, message.shape[0])):
            target = out[line[SOURCE] + start : line[SOURCE] + stop]
            values = (_decode(message[row], line, stop - start) * gain).to(target.dtype)
            target.copy_(target + values if add else values)


def decode_mean(received: torch.Tensor, out: torch.Tensor, pieces: Pieces, rank: int) -> None:
    for line in pieces.table:
        mean, row = _mean(received, line, rank, 0.0), out[line[SHARD] : line[SHARD] + line[WIDTH]]
        row[: len(mean)] = mean
        row[len(mean) :] = 0


def settle(
    value: torch.Tensor, scale: torch.Tensor, pieces: Pieces, *, shard: bool = False
) -> None:
    """Do nothing: residuals of such codecs are never lazy."""


def _rows(line: np.ndarray, rows: int) -> list[tuple[int, int]]:
    """Return the first element and the end of every row of a piece."""
    edges = [min(row * int(line[WIDTH]), int(line[NUMEL])) for row in range(rows + 1)]
    return list(pairwise(edges))


def _codec(line: np.ndarray) -> tuple[PlainCodec, slice]:
    """Return a piece's codec, and the place of its bytes in a row of the message, after a byte that
    is 1 if something was not finite."""
    codec, start = of_kind(int(line[KIND])), int(line[COLUMN]) + 1
    return codec, slice(start, start + codec.row_bytes(int(line[WIDTH])))


def _encode(
    values: torch.Tensor,
    row: torch.Tensor,
    flag: torch.Tensor,
    line: np.ndarray,
    place: slice | None,
    residual: torch.Tensor | None,
    new_residual: torch.Tensor | None,
) -> None:
    codec, columns = _codec(line)
    row[columns.start - 1 : columns.stop] = 0
    if not len(values):
        return
    if place is not None and residual is not None:
        values = values + residual[place]
    if not torch.isfinite(values).all():
        flag.fill_(1)
        row[columns.start - 1] = 1
        return
    codes = codec.encode(values)
    row[columns][: codes.numel()] = codes
    if place is not None and new_residual is not None:
        torch.sub(values, codec.decode(row[columns], len(values)), out=new_residual[place])


def _decode(row: torch.Tensor, line: np.ndarray, numel: int) -> torch.Tensor:
    codec, columns = _codec(line)
    if not numel or row[columns.start - 1]:
        return torch.full((numel,), torch.nan, device=row.device)
    return codec.decode(row[columns], numel)


def _mean(received: torch.Tensor, line: np.ndarray, rank: int, divisor: float) -> torch.Tensor:
    """Return the mean of the received versions of this rank's row, summed in the order of ranks."""
    numel = min(max(int(line[NUMEL]) - rank * int(line[WIDTH]), 0), int(line[WIDTH]))
    total = torch.zeros(numel, device=received.device)
    for row in received:
        total += _decode(row, line, numel)
    return total / (divisor or len(received))
