"""Tiles of activations in 4 bits, after a rotation that spreads each tile's outlier.

    tile x: swap its largest element with the first, then y = H x
    y ≈ lo + code · step      lo, step in bf16      (TAH-Quant, 2506.01352)

The first row and column of H are constant, so an outlier in the first place moves all of y by the
same amount, which is part of ``lo``: the codes span only the range that the tile has without it.
"""

from dataclasses import dataclass
from functools import cache

import torch

BLOCK = 64
HEAD = 5  # bytes of a tile before its codes: lo, step, and the index of its largest element
LEVELS = 15.0


@dataclass(frozen=True)
class TileCodec:
    """Encode tiles of 64 elements of a token, along the last dimension of a tensor, in 4.625 bits
    an element. ``spec``: always "tah4".
    """

    spec: str = "tah4"

    def size(self, numel: int, width: int) -> int:
        return _tiles(numel, width) * (HEAD + BLOCK // 2)

    def encode(self, values: torch.Tensor, message: torch.Tensor, width: int) -> None:
        """Encode float32[numel], consecutive tokens of ``width``, into ``message``. A tile with NaN
        or infinity becomes NaN."""
        padded = torch.nn.functional.pad(values.view(-1, width), (0, -width % BLOCK))
        tiles = padded.view(-1, BLOCK)
        place = tiles.abs().argmax(1, keepdim=True)
        turned = _swap(tiles, place) @ _hadamard(values.device)
        most, least = turned.amax(1, keepdim=True), turned.amin(1, keepdim=True)
        lo = _rounded(least, down=True)
        step = _rounded((most - lo.float()) / LEVELS, down=False)
        codes = ((turned - lo.float()) / step.float().clamp(min=1e-38)).nan_to_num(0.0)
        codes = codes.round().clamp(0, LEVELS).to(torch.uint8)
        pairs = codes.view(-1, BLOCK // 2, 2)
        rows = message.view(len(tiles), -1)
        rows[:, :HEAD] = torch.cat(
            [lo.view(torch.uint8), step.view(torch.uint8), place.to(torch.uint8)], 1
        )
        rows[:, HEAD:] = pairs[:, :, 0] | pairs[:, :, 1] << 4

    def decode(self, message: torch.Tensor, values: torch.Tensor, width: int) -> None:
        rows = message.view(_tiles(values.numel(), width), -1)
        lo, step = rows[:, :4].contiguous().view(torch.bfloat16).float().split(1, 1)
        four = rows[:, HEAD:]
        codes = torch.stack([four & 15, four >> 4], 2).view(-1, BLOCK)
        tiles = _swap((lo + codes * step) @ _hadamard(values.device), rows[:, 4:HEAD].long())
        tokens = values.view(-1, width)
        tokens.copy_(tiles.view(len(tokens), -1)[:, :width])


@cache
def _hadamard(device: torch.device) -> torch.Tensor:
    """Return the rotation, which is orthonormal and symmetric, and so its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / BLOCK**0.5


def _tiles(numel: int, width: int) -> int:
    return numel // max(width, 1) * -(-width // BLOCK)


def _swap(tiles: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Swap the element at ``place`` with the first."""
    swapped = tiles.clone()
    swapped[:, :1] = tiles.gather(1, place)
    return swapped.scatter_(1, place, torch.where(place == 0, swapped[:, :1], tiles[:, :1]))


def _rounded(values: torch.Tensor, *, down: bool) -> torch.Tensor:
    """Return the nearest bf16 that is not above, or not below."""
    near = values.to(torch.bfloat16)
    beyond = near.float() > values if down else near.float() < values
    toward = torch.full_like(near, -torch.inf if down else torch.inf)
    return torch.where(beyond, torch.nextafter(near, toward), near)
