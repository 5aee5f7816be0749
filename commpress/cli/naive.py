"""The sign codec as one would first write it: a sequence of torch operations, each a pass over memory."""

import torch

_WEIGHTS = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)


def naive_encode(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed signs and the scale of x + residual; the residual becomes what they leave out."""
    c = x + residual
    scale = c.abs().mean()
    positive = c >= 0
    packed = (positive.view(-1, 8).to(torch.uint8) * _WEIGHTS).sum(1, dtype=torch.uint8)
    residual.copy_(c - torch.where(positive, scale, -scale))
    return packed, scale


def naive_mean(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The mean of the rows uint8[ranks, bytes] with one scale each."""
    positive = (packed.unsqueeze(2) & _WEIGHTS) != 0
    rows = torch.where(positive, scales[:, None, None], -scales[:, None, None])
    return rows.mean(0).view(-1)
