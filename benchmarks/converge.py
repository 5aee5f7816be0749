"""One training run of ``python benchmarks convergence``: a task, an optimizer, a seed; ranks simulated in one process.

The ranks run the production generators in lockstep, so what is compared is what training does, without a network.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from commpress.cli.gpt import GPT, TransformerBlock
from commpress.cli.text import batch, standard_library
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.optim import OneBitAdam, OneBitLamb, ShardedOneBitAdam, ShardedZeroOneAdam, ZeroOneAdam
from commpress.optim.optimizer import CompressedOptimizer

RANKS = 4
TASKS = ("gpt", "bert", "digits")
REFERENCE = {
    "adam": "adam", "onebit": "adam", "zero-one": "adam", "sharded-onebit": "adam", "sharded-zero-one": "adam", "lamb": "lamb",
    "onebit-lamb": "lamb",
}  # fmt: skip
OPTIMIZERS = tuple(REFERENCE)
RATES = {"adam": 2e-3, "lamb": 1e-2}
MASK = 256

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Run:
    task: str
    optimizer: str
    seed: int
    steps: int
    feedback: bool = True
    codec: str = "sign"
    sync: str = "qsr"
    exact_codec: str = "none"

    @property
    def reference(self) -> str:
        return REFERENCE[self.optimizer]

    @property
    def label(self) -> str:
        name = self.optimizer if self.sync == "qsr" else f"{self.optimizer}, {self.sync}"
        name += "" if self.exact_codec == "none" or self.optimizer == self.reference else f", {self.exact_codec}"
        return name if self.feedback else f"{name}, no feedback"


@dataclass
class Finished:
    run: Run
    losses: list[float]  # of each step, mean over the ranks
    final: float  # over the last tenth of the steps
    ratio: float  # times fewer bytes than float32 all-reduces
    rounds: int  # steps that communicated


class Bert(nn.Module):
    """A masked language model on bytes: the blocks of the GPT, looking both ways."""

    def __init__(self, *, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(257, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, 4, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), ignore_index=-100)


class Digits(nn.Module):
    """A small convolutional network on 8 by 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(32 * 4), nn.Linear(32 * 4, 10)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return F.cross_entropy(self.head(self.norm(x.flatten(1))), targets)


def text_batch(draws: torch.Generator) -> Batch:
    return batch(standard_library(2.0), 4, 32, draws)


def masked_batch(draws: torch.Generator) -> Batch:
    _, words = batch(standard_library(2.0), 4, 32, draws)
    hidden = torch.rand(words.shape, generator=draws) < 0.25
    return words.masked_fill(hidden, MASK), words.masked_fill(~hidden, -100)


def digits_batches() -> Callable[[torch.Generator], Batch]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        from commpress.errors import MissingPackage

        raise MissingPackage("the digits come with scikit-learn: pip install scikit-learn") from error
    images, targets = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(targets)

    def draw(draws: torch.Generator) -> Batch:
        rows = torch.randint(len(x), (8,), generator=draws)
        noise = 0.3 * torch.randn(8, 1, 8, 8, generator=draws)  # no two batches alike, so that losses do not reach zero
        return x[rows] + noise, y[rows]

    return draw


def task_of(name: str) -> tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]:
    if name == "gpt":
        return lambda: GPT(width=32, layers=2, length=32), text_batch
    if name == "bert":
        return lambda: Bert(width=32, layers=2, length=32), masked_batch
    return Digits, digits_batches()


def optimizer_of(run: Run, model: nn.Module, transport: object) -> CompressedOptimizer:
    """``adam`` and ``lamb`` are ours with exact steps only, which are torch's Adam and LAMB."""
    lr = RATES[run.reference]
    options = {
        "lr": lr, "weight_decay": 0.01, "codec": run.codec, "transport": transport, "error_feedback": run.feedback,
        "betas": (0.9, 0.99), "max_grad_norm": 1.0, "exact_codec": run.exact_codec,
    }  # fmt: skip
    named = list(model.named_parameters())
    if run.optimizer == "zero-one":
        return ZeroOneAdam(named, warmup_steps=run.steps * 15 // 100, sync=run.sync, **options)  # type: ignore[arg-type]
    if run.optimizer == "sharded-zero-one":
        return ShardedZeroOneAdam(named, warmup_steps=run.steps * 15 // 100, sync=run.sync, **options)  # type: ignore[arg-type]
    if run.optimizer == "sharded-onebit":
        return ShardedOneBitAdam(named, warmup_steps=run.steps * 15 // 100, **options)  # type: ignore[arg-type]
    exact = run.optimizer in ("adam", "lamb")
    cls = OneBitLamb if run.reference == "lamb" else OneBitAdam
    return cls(named, warmup_steps=run.steps + 1 if exact else run.steps * 15 // 100, **options)  # type: ignore[arg-type]


def train(run: Run) -> Finished:
    torch.set_num_threads(1)
    make, draw = task_of(run.task)
    exact = run.optimizer in ("adam", "lamb")
    ranks = 1 if exact else RANKS  # the mean gradient of all ranks is that of one large batch
    draws = [torch.Generator().manual_seed(1000 * run.seed + r) for r in range(RANKS)]
    models, optimizers = [], []
    for transport in Loopback(ranks).transports():
        torch.manual_seed(run.seed)
        models.append(make())
        optimizers.append(optimizer_of(run, models[-1], transport))
    losses = []
    for step in range(run.steps):
        batches = [draw(d) for d in draws]
        if exact:
            x, y = (torch.cat(part) for part in zip(*batches, strict=True))
            batches = [(x, y)]
        mean = 0.0
        for model, optimizer, (x, y) in zip(models, optimizers, batches, strict=True):
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            mean += loss.item() / ranks
            for group in optimizer.param_groups:
                group["lr"] = RATES[run.reference] * warm_and_decay(step, run.steps)
        with torch.no_grad():
            simulate([o.steps() for o in optimizers])
        losses.append(round(mean, 5))
    counters, last = optimizers[0].counters, losses[-max(run.steps // 10, 1) :]
    rounds = counters.exact_rounds + counters.compressed_rounds
    return Finished(run, losses, sum(last) / len(last), counters.ratio if not exact else 1.0, rounds)


def warm_and_decay(step: int, steps: int) -> float:
    """Factor of the learning rate: up over the first twentieth of the steps, linearly down to zero over the rest."""
    warm = max(steps // 20, 1)
    return (step + 1) / warm if step < warm else (steps - step) / (steps - warm)
