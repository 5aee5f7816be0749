"""A small transformer, streamed from a store on one or more ranks, and the plain one beside it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import commpress
from state_worlds import apart
from zero_twin import clip

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
WORDS, WIDTH = 61, 48


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Words(nn.Module):
    """A tied embedding, a parameter of its own, a frozen one, one without a gradient."""

    def __init__(
        self,
        layers: int = 3,
        width: int = WIDTH,
        words: int = WORDS,
        remember: str = "",
    ) -> None:
        super().__init__()
        self.remember = remember
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.ones(width))
        self.unused = nn.Linear(3, 3)
        self.layers[1].up.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) * self.scale
        for layer in self.layers:
            x = (
                checkpoint(layer, x, use_reentrant=self.remember == "reentrant")
                if self.remember
                else layer(x)
            )
        return self.head(self.norm(x))


def made(seed: int = 5, **more: Any) -> Words:
    torch.manual_seed(seed)
    return Words(**more)


def untied(**more: Any) -> Words:
    net = made(**more)
    net.head.weight = nn.Parameter(torch.randn(WORDS, WIDTH) / 7)
    return net


def loss_of(net: nn.Module, step: int, part: int, rank: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed((step * 31 + part) * 31 + rank)
    ids = torch.randint(0, WORDS, (2, 9), generator=generator)
    return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def groups(net: nn.Module) -> list[dict[str, Any]]:
    plain = [p for p in net.parameters() if p.dim() < 2]
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": plain, "weight_decay": 0.0},
    ]


def offloaded(net: nn.Module, store: commpress.TieredStore, **more: Any) -> commpress.Offloaded:
    options = {"chunk_mb": 0.04, "max_grad_norm": 0.5, **OPTIONS, **more}
    return commpress.Offloaded(groups(net), torch.optim.AdamW, store=store, **options)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    last: int,
    rank: int = 0,
) -> list[float]:
    losses = []
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] * 0.95**step
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(net, step, part, rank)
            loss.backward()
        losses.append(loss.item())
        if not isinstance(optimizer, commpress.Offloaded):
            clip(net.parameters(), 0.5)
        optimizer.step()
    return losses


class Twins:
    """A streamed model beside its plain twin, each with its optimizer."""

    def __init__(
        self,
        store: commpress.TieredStore,
        net: nn.Module,
        other: nn.Module,
        blocks: Sequence[type[nn.Module]] = (),
        **options: Any,
    ) -> None:
        self.net, self.other = net, other
        self.streamed = commpress.stream(net, store=store, chunk_mb=0.04, blocks=blocks)
        self.optimizer = offloaded(net, store, **options)
        self.twin = torch.optim.AdamW(groups(other), **OPTIONS)

    def backward(self, step: int, part: int = 0) -> None:
        for model in (self.net, self.other):
            loss_of(model, step, part).backward()

    def step(self, limit: float = 0.5) -> None:
        """Take a step of both; the twin has zeros where there is no gradient."""
        clip(self.other.parameters(), limit)
        for one in (self.optimizer, self.twin):
            one.step()
            one.zero_grad()

    def check(self) -> None:
        """Assert that both have the same weights, and that nothing stays in memory."""
        assert not apart(self.streamed.state_dict(), dict(self.other.state_dict()))
        assert not any(group.present or group.holders for group in self.streamed.groups)
