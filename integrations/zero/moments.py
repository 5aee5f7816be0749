"""The moments of chunks: float32 for who computes with them, in the store float32 or in 8 or 4 bits.

Quantised: codes and a float32 scale for every block of 128 elements, side by side in one tensor of bytes.

    signed     m  = s · c,       c in −127 … 127 (4 bits: −7 … 7),   s = max|m| / 127      rounded to nearest
    squares    √v = s · c,       c in 0 … 255    (4 bits: 0 … 15),   s = max√v / 255       rounded at random, E √v̂ = √v

so |m̂ − m| ≤ s/2 and |√v̂ − √v| ≤ s. Note: squares. An average that moves by a thousandth of its value in a step would never
leave its code if that were the nearest; rounded at random it does, in the mean as it should. A code of 0 is for v = 0 alone,
others are 1 at least: no step is divided by a root smaller than s.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from commpress.errors import InvalidArgument
from commpress.integrations.zero.update_chunk import WEIGHT, UpdateChunk
from commpress.tiered_mem import TieredStore

BLOCK = 128
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")  # of torch's optimizers: never negative
BITS = {"int8": 8, "int4": 4}


class Moments:
    """Reads and writes moments in the store.

    ``bits`` 0 is float32. ``step`` is the step: noise of the rounding follows from it alone.
    """

    def __init__(self, store: TieredStore, bits: int) -> None:
        self._store, self.bits, self.step = store, bits, 0
        self._scratch: dict[str, torch.Tensor] = {}

    def nbytes(self, numel: int) -> int:
        return size(numel, self.bits) if self.bits else 4 * numel

    def put(self, chunk: UpdateChunk, key: str, values: torch.Tensor) -> None:
        if self.bits:
            coded = torch.zeros(self.nbytes(chunk.numel), dtype=torch.uint8)
            self._encode(chunk, key, values, coded)
            values = coded
        self._store.put(chunk.name(key), values)

    @contextmanager
    def opened(self, chunk: UpdateChunk, *, write: bool = True) -> Iterator[dict[str, torch.Tensor]]:
        """The master weights and moments of a chunk; changes are kept if ``write``, errors apart."""
        with chunk.borrowed(self._store, write=write) as held:
            if not self.bits:
                yield held
                return
            values = {key: held[key] if key == WEIGHT else self._decode(chunk, key, held[key]) for key in held}
            yield values
            if write:
                for key in chunk.keys:
                    self._encode(chunk, key, values[key], held[key])

    def _decode(self, chunk: UpdateChunk, key: str, coded: torch.Tensor) -> torch.Tensor:
        if key not in self._scratch or self._scratch[key].numel() < chunk.numel:
            self._scratch[key] = torch.zeros(chunk.numel)
        values = self._scratch[key][: chunk.numel]
        decode(coded, values, self.bits, squares=key in SQUARES)
        return values

    def _encode(self, chunk: UpdateChunk, key: str, values: torch.Tensor, coded: torch.Tensor) -> None:
        seed = zlib.crc32(f"{self.step}.{chunk.number}.{key}".encode())
        encode(values, coded, self.bits, squares=key in SQUARES, seed=seed)


def bits_of(moments: str | None) -> int:
    """0: float32."""
    if moments is not None and moments not in BITS:
        raise InvalidArgument(f"moments is {moments!r}, expected 'int8', 'int4' or None for float32")
    return BITS[moments] if moments else 0


def size(numel: int, bits: int) -> int:
    """Bytes of a moment of ``numel`` elements."""
    blocks = -(-numel // BLOCK)
    return blocks * (BLOCK * bits // 8 + 4)


def encode(values: torch.Tensor, out: torch.Tensor, bits: int, *, squares: bool, seed: int) -> None:
    """float32[n] → uint8[size(n)]."""
    blocks = -(-values.numel() // BLOCK)
    rows = torch.zeros(blocks * BLOCK)
    rows[: values.numel()] = values
    rows = rows.view(blocks, BLOCK)
    codes, scales = _squares(rows, bits, seed) if squares else _signed(rows, bits)
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    at = codes.numel()
    out[:at].view_as(codes).copy_(codes)
    out[at:].copy_(scales.view(torch.uint8))


def decode(coded: torch.Tensor, out: torch.Tensor, bits: int, *, squares: bool) -> None:
    """uint8[size(n)] → float32[n]."""
    blocks = -(-out.numel() // BLOCK)
    at = blocks * BLOCK * bits // 8
    codes, scales = coded[:at].view(blocks, -1), coded[at:].clone().view(torch.float32)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).view(blocks, BLOCK)
    rows = codes.float()
    if not squares:
        rows.sub_(2 ** (bits - 1))
    rows.mul_(scales.unsqueeze(1))
    if squares:
        rows.square_()
    out.copy_(rows.view(-1)[: out.numel()])


def _signed(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    most = 2 ** (bits - 1) - 1
    scales = rows.abs().amax(1).div_(most)
    codes = rows.div_(scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).round_().clamp_(-most, most)
    return codes.add_(2 ** (bits - 1)).to(torch.uint8), scales


def _squares(rows: torch.Tensor, bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    most = 2**bits - 1
    rows = rows.sqrt_()
    scales = rows.amax(1).div_(most)
    positive = rows > 0
    rows.div_(scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1))
    rows.add_(torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed))).floor_()
    codes = rows.clamp_(max=most)
    return torch.where(positive, codes.clamp(min=1), 0.0).to(torch.uint8), scales
