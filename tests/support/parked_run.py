"""Small models to park, and runs that are killed; ``python parked_run.py FOLDER`` says how much
memory parking takes."""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import commpress


class LM(nn.Module):
    """Words, a few layers, and an output layer that is the embedding, too, if ``tied``."""

    def __init__(self, width: int = 64, words: int = 512, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, width)
        self.body = nn.Sequential(
            nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("scale", torch.full((width,), 0.5))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.words(x)) * self.scale)
        return out


def made(parts: Iterable[int]) -> tuple[LM, torch.optim.Optimizer]:
    """A model and AdamW; ``parts``: numbers that are added to the weights."""
    model = LM()
    with torch.no_grad():
        for part in parts:
            for p in model.parameters():
                p.add_(part)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def advance(model: nn.Module, optimizer: Any, step: int, between: Any = None) -> None:
    """A step of two micro-batches; ``between``: a context between them."""

    def closure() -> torch.Tensor:
        draw = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for part in range(2):
            loss = model(torch.randint(512, (2, 8), generator=draw)).square().mean()
            loss.backward()
            if part == 0:
                with between or nullcontext():
                    pass
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        between = None
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


class Halves:
    """A model in bfloat16 whose optimizer has float32 masters."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.half = nn.Sequential()
        self.half.up, self.half.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.half.bfloat16()
        self.masters = [
            nn.Parameter(p.detach().float() + 1e-4 * torch.randn(p.shape))
            for p in self.half.parameters()
        ]
        self.optimizer = torch.optim.AdamW(self.masters, 1e-3)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for p, master in zip(self.half.parameters(), self.masters, strict=True):
            p.copy_(master)

    def step(self, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(4, 64, generator=draw).bfloat16()
        self.half(x).float().square().mean().backward()
        for p, master in zip(self.half.parameters(), self.masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._round()


def memory_of(field: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) << 10


def memory(folder: str) -> None:
    """Bytes: of the state, and resident before, while parked, at most, and afterwards."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    state = sum(p.nbytes for p in model.parameters()) * 3
    park = commpress.parked(model, optimizer, store=folder)
    before = memory_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest
    with park:
        parked = memory_of("VmRSS")
    park.settle()
    print(state, before, parked, memory_of("VmHWM"), memory_of("VmRSS"))


def train(folder: str, last: int, told: Callable[[int], object]) -> None:
    """Tell of each step that is parked; the last stays so."""
    torch.set_num_threads(1)
    model, optimizer = made([0])
    park = commpress.parked(model, optimizer, store=folder)
    for step in range(last):
        advance(model, optimizer, step)
        with park:
            told(step)
            if step == last - 1:
                time.sleep(600)


def numbers(folder: str, told: Callable[[int], object]) -> None:
    """The n-th time all tensors contain n."""
    torch.set_num_threads(1)
    model, optimizer = made([0])
    advance(model, optimizer, 0)
    park = commpress.parked(model, optimizer, store=folder)
    for number in range(1, 1000):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(number)
                optimizer.state[p]["exp_avg"].fill_(number)
        with park:
            told(number)


if __name__ == "__main__":
    memory(sys.argv[1])
