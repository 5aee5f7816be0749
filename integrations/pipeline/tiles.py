"""Tiles of activations in 3 or 4 bits: a rotation spreads each tile's outlier, and tokens of many
values get the fourth bit.

    x of a tile: its largest element changes places with the first, then y = H x
    y ≈ lo + code · step      lo, step in bf16      (TAH-Quant, 2506.01352)

The first row and column of H are constant, so an outlier in the first place moves all of y by the
same amount, which ``lo`` takes up: what is left for the codes to span is what the tile is without
it.
"""

from dataclasses import dataclass

import torch

from commpress.errors import InvalidArgument
from commpress.kernels.rotation import BLOCK, hadamard

HEAD = 5  # bytes of a tile before its codes: lo, step, and the place of its largest element
NAMES = {"tah3": 0.0, "tah": 0.5, "tah4": 1.0}


@dataclass(frozen=True)
class TileCodec:
    """Tiles of 64 elements in 4 bits for a ``share`` of the tokens, those of highest entropy, and 3
    bits for the others.

    A token is the last dimension of a tensor. 3.625 to 4.625 bits for an element and one for a
    token.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InvalidArgument(
                f"share is {self.share!r}, expected a part of the tokens from 0 to 1"
            )

    @property
    def spec(self) -> str:
        return f"tah/{self.share:g}"

    def size(self, numel: int, width: int) -> int:
        tokens, tiles = _shape(numel, width)
        return sum(_sizes(tokens, tiles, self._fine(tokens)))

    def encode(self, values: torch.Tensor, message: torch.Tensor, width: int) -> None:
        """message := codes of float32[numel], tokens of ``width`` side by side. A tile with a NaN
        or infinity becomes NaN."""
        tokens, count = _shape(values.numel(), width)
        fine = self._fine(tokens)
        padded = torch.nn.functional.pad(values.view(tokens, width), (0, count * BLOCK - width))
        tiles = padded.view(tokens, count, BLOCK)
        place = tiles.abs().argmax(2, keepdim=True)
        turned = _swap(tiles, place) @ hadamard(values.device)
        most, least = turned.amax(2, keepdim=True), turned.amin(2, keepdim=True)
        few = torch.zeros(tokens, dtype=torch.bool, device=values.device)  # tokens of 3 bits
        few[_entropies(padded).argsort(stable=True)[: tokens - fine]] = True
        steps = torch.where(few, 7.0, 15.0).view(-1, 1, 1)
        lo = _rounded(least, down=True)
        step = _rounded((most - lo.float()) / steps, down=False)
        codes = (
            ((turned - lo.float()) / step.float().clamp(min=1e-38))
            .nan_to_num(0.0)
            .round()
            .clamp(min=0)
        )
        codes = torch.minimum(codes, steps).to(torch.uint8)
        flags, heads, three, four = _parts(message, _sizes(tokens, count, fine))
        flags.copy_(_pack_bits(few))
        head = torch.cat([lo.view(torch.uint8), step.view(torch.uint8), place.to(torch.uint8)], 2)
        heads.copy_(head.view(-1))
        three.copy_(_pack_three(codes[few].view(8 * (tokens - fine) * count, 8)).view(-1))
        pairs = codes[~few].view(32 * fine * count, 2)
        four.copy_(pairs[:, 0] | pairs[:, 1] << 4)

    def decode(self, message: torch.Tensor, values: torch.Tensor, width: int) -> None:
        tokens, count = _shape(values.numel(), width)
        fine = self._fine(tokens)
        flags, heads, three, four = _parts(message, _sizes(tokens, count, fine))
        few = _unpack_bits(flags)[:tokens]
        head = heads.view(tokens, count, HEAD)
        words = (
            head[:, :, :4].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        )
        lo, step = words.split(1, 2)
        codes = message.new_empty(tokens, count, BLOCK)
        codes[few] = _unpack_three(three.view(-1, 3)).view(tokens - fine, count, BLOCK)
        codes[~few] = torch.stack([four & 15, four >> 4], 1).view(fine, count, BLOCK)
        tiles = (lo + codes * step) @ hadamard(values.device)
        tiles = _swap(tiles, head[:, :, 4:].long())
        values.view(tokens, width).copy_(tiles.view(tokens, -1)[:, :width])

    def _fine(self, tokens: int) -> int:
        return round(self.share * tokens)


def _shape(numel: int, width: int) -> tuple[int, int]:
    """Tokens, and tiles of each."""
    return numel // max(width, 1), -(-width // BLOCK)


def _sizes(tokens: int, tiles: int, fine: int) -> tuple[int, int, int, int]:
    return -(-tokens // 8), HEAD * tokens * tiles, 24 * (tokens - fine) * tiles, 32 * fine * tiles


def _parts(message: torch.Tensor, sizes: tuple[int, int, int, int]) -> tuple[torch.Tensor, ...]:
    return message[: sum(sizes)].split(sizes)


def _swap(tiles: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The element at ``place`` and the first in each other's places."""
    swapped = tiles.clone()
    swapped[:, :, :1] = tiles.gather(2, place)
    return swapped.scatter_(2, place, torch.where(place == 0, swapped[:, :, :1], tiles[:, :, :1]))


def _rounded(values: torch.Tensor, *, down: bool) -> torch.Tensor:
    """The nearest bf16 that is not above, or not below."""
    near = values.to(torch.bfloat16)
    beyond = near.float() > values if down else near.float() < values
    toward = torch.full_like(near, -torch.inf if down else torch.inf)
    return torch.where(beyond, torch.nextafter(near, toward), near)


def _entropies(tokens: torch.Tensor) -> torch.Tensor:
    """Of each token's squared elements as a distribution: high where many count, low where few
    do."""
    shares = tokens.square()
    shares = shares / shares.sum(1, keepdim=True).clamp(min=1e-38)
    return -torch.special.xlogy(shares, shares).sum(1).nan_to_num(0.0)


def _pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """bool[n] to uint8[⌈n / 8⌉]."""
    bits = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8)).view(
        -(-len(flags) // 8), 8
    )
    return (bits << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(
        1, dtype=torch.uint8
    )


def _unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    return (
        (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1)
        .flatten()
        .bool()
    )


def _pack_three(codes: torch.Tensor) -> torch.Tensor:
    """uint8[n, 8] of 0 … 7 to uint8[n, 3]: the eight side by side, the first in the lowest bits."""
    a, b, c, d, e, f, g, h = codes.unbind(1)
    return torch.stack(
        [a | b << 3 | c << 6, c >> 2 | d << 1 | e << 4 | f << 7, f >> 1 | g << 2 | h << 5], 1
    )


def _unpack_three(packed: torch.Tensor) -> torch.Tensor:
    x, y, z = packed.unbind(1)
    return (
        torch.stack(
            [x, x >> 3, x >> 6 | y << 2, y >> 1, y >> 4, y >> 7 | z << 1, z >> 2, z >> 5], 1
        )
        & 7
    )
