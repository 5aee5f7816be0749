"""Moments of chunks: float32 for computing, float32 or 8 bits in the store.

Quantized: codes, and a float32 scale for every block of 128 elements, in one tensor of bytes.

    signed     m  = s · c,       c in −127 … 127,   s = max|m| / 127      rounded to nearest
    squares    √v = s · c,     c in 0 … 255,      s = max√v / 255      rounded at random, E √v̂ = √v

so |m̂ − m| ≤ s/2 and |√v̂ − √v| ≤ s. Note: squares. An average that changes by a thousandth of its
value per step would never leave its code with rounding to nearest; with random rounding it does,
correctly in expectation. The code 0 means exactly v = 0, all others are at least 1, so that no
update is divided by a root smaller than s.

Note: at least 8 bits. The rounding is unbiased in √v, but the recursion of Adam is linear in v:
each step adds the variance of the rounding to v. With a log-normal spread of 0.7 in a block √v̂ is
0.5 % too large with 8 bits, and 17 % with 4.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from commpress.errors import InvalidArgument
from commpress.integrations.zero.update_chunk import WEIGHT, UpdateChunk
from commpress.tiered_mem import TieredStore

BLOCK = 128
# names of torch's moments that are never negative
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
SIGNED, UNSIGNED = 127, 255  # largest codes


class Moments:
    """Read and write moments in the store.

    ``quantised``: 8 bits instead of float32. ``step``: number of the step, which seeds the random
    rounding.
    """

    def __init__(self, store: TieredStore, *, quantised: bool) -> None:
        self._store, self.quantised, self.step = store, quantised, 0
        self._scratch: dict[str, torch.Tensor] = {}

    def nbytes(self, numel: int) -> int:
        return size(numel) if self.quantised else 4 * numel

    def put(self, chunk: UpdateChunk, key: str, values: torch.Tensor) -> None:
        if self.quantised:
            coded = torch.zeros(self.nbytes(chunk.numel), dtype=torch.uint8)
            self._encode(chunk, key, values, coded)
            values = coded
        self._store.put(chunk.name(key), values)

    @contextmanager
    def opened(
        self, chunk: UpdateChunk, *, write: bool = True
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the master weights and moments of a chunk; changes are stored if ``write`` and no
        error occurs."""
        with chunk.borrowed(self._store, write=write) as held:
            if not self.quantised:
                yield held
                return
            values = {
                key: held[key] if key == WEIGHT else self._decode(chunk, key, held[key])
                for key in held
            }
            yield values
            if write:
                for key in chunk.keys:
                    self._encode(chunk, key, values[key], held[key])

    def _decode(self, chunk: UpdateChunk, key: str, coded: torch.Tensor) -> torch.Tensor:
        if key not in self._scratch or self._scratch[key].numel() < chunk.numel:
            self._scratch[key] = torch.zeros(chunk.numel)
        values = self._scratch[key][: chunk.numel]
        decode(coded, values, squares=key in SQUARES)
        return values

    def _encode(
        self, chunk: UpdateChunk, key: str, values: torch.Tensor, coded: torch.Tensor
    ) -> None:
        seed = zlib.crc32(f"{self.step}.{chunk.number}.{key}".encode())
        encode(values, coded, squares=key in SQUARES, seed=seed)


def check_moments(moments: str | None) -> None:
    """Raise ``InvalidArgument`` unless it is "int8", or None for float32."""
    if moments == "int4":
        raise InvalidArgument(
            "moments is 'int4', expected 'int8' or None for float32: rounding to 4 bits adds its "
            "variance to the second moment in every step, so steps shrink as the values in a block "
            "of 128 spread (to 0.79 of exact ones at a log-normal spread of 0.7, to 0.36 at 1.2)"
        )
    if moments not in ("int8", None):
        raise InvalidArgument(f"moments is {moments!r}, expected 'int8' or None for float32")


def size(numel: int) -> int:
    """Return the bytes of a quantized moment of ``numel`` elements."""
    return -(-numel // BLOCK) * (BLOCK + 4)


def encode(values: torch.Tensor, out: torch.Tensor, *, squares: bool, seed: int) -> None:
    """Quantize float32[n] into uint8[size(n)]."""
    blocks = -(-values.numel() // BLOCK)
    rows = torch.zeros(blocks * BLOCK)
    rows[: values.numel()] = values
    rows = rows.view(blocks, BLOCK)
    codes, scales = _squares(rows, seed) if squares else _signed(rows)
    at = codes.numel()
    out[:at].view_as(codes).copy_(codes)
    out[at:].copy_(scales.view(torch.uint8))


def decode(coded: torch.Tensor, out: torch.Tensor, *, squares: bool) -> None:
    """Restore float32[n] from uint8[size(n)]."""
    blocks = -(-out.numel() // BLOCK)
    at = blocks * BLOCK
    codes, scales = coded[:at].view(blocks, BLOCK), coded[at:].clone().view(torch.float32)
    rows = codes.float()
    if not squares:
        rows.sub_(SIGNED + 1)
    rows.mul_(scales.unsqueeze(1))
    if squares:
        rows.square_()
    out.copy_(rows.view(-1)[: out.numel()])


def _signed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = rows.abs().amax(1).div_(SIGNED)
    codes = (
        rows.div_(scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1))
        .round_()
        .clamp_(-SIGNED, SIGNED)
    )
    return codes.add_(SIGNED + 1).to(torch.uint8), scales


def _squares(rows: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows.sqrt_()
    scales = rows.amax(1).div_(UNSIGNED)
    positive = rows > 0
    rows.div_(scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1))
    rows.add_(torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed))).floor_()
    codes = rows.clamp_(max=UNSIGNED)
    return torch.where(positive, codes.clamp(min=1), 0.0).to(torch.uint8), scales
