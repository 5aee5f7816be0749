"""A small GPT on bytes, plain PyTorch, and real text for it that every machine with Python has: its
standard library."""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """width 128, 4 layers: 0.85 M parameters; width 384, 6 layers: 10.8 M."""

    def __init__(
        self,
        *,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        length: int = 64,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(
                    p,
                    std=0.02 / (2 * layers) ** 0.5
                    if name.endswith(("out.weight", "down.weight"))
                    else 0.02,
                )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy in nats per byte."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------- text


@cache
def standard_library(megabytes: float = 4.0) -> torch.Tensor:
    """The first ``megabytes`` of the library's modules in alphabetical order, as bytes (uint8)."""
    folder, parts, size = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= megabytes * 1e6:
            break
    return torch.frombuffer(bytearray(b"\n".join(parts)[: int(megabytes * 1e6)]), dtype=torch.uint8)


def batch(
    text: torch.Tensor, rows: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows and the same windows one byte later."""
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
    windows = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
