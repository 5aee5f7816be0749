"""The sign codec's encoder in Triton, to compare with: blocks of 2048, one scale each, eight signs
to a byte."""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _encode(x, residual, packed, scales, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    c = tl.load(x + block * BLOCK + at) + tl.load(residual + block * BLOCK + at)
    scale = tl.sqrt(tl.sum(tl.sum(c * c, 1), 0) / BLOCK)
    positive = c >= 0
    codes = tl.sum(positive.to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    tl.store(packed + block * (BLOCK // 8) + tl.arange(0, BLOCK // 8), codes.to(tl.uint8))
    tl.store(residual + block * BLOCK + at, c - tl.where(positive, scale, -scale))
    tl.store(scales + block, scale)


def encode(
    x: torch.Tensor, residual: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor
) -> None:
    """Signs of x + residual and a scale for each block; the residual becomes what they leave
    behind."""
    _encode[(x.numel() // BLOCK,)](x, residual, packed, scales, BLOCK=BLOCK)
