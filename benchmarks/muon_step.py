"""a training step of Muon on several ranks: time and bytes beside torch's under DDP

Trains a GPT whose matrices of blocks go to Muon and the rest to AdamW, once per variant, in rounds
of a few steps each, so that moods of machine and network hit all alike.
  torch    DistributedDataParallel, torch.optim.Muon and AdamW on every rank
  compute  the same without a network: every rank keeps its own gradients
  none     commpress.Muon without codecs: each matrix is orthogonalised on one rank alone
  coded    commpress.Muon as it is by default: int8 gradients, int4 updates
"MB sent" is what the kernel counted, mean over the ranks.

  python benchmarks muon_step                                             4 local processes
  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks muon_step --check
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import harness, training
from shared_options import add_measuring

VARIANTS: dict[str, dict[str, Any]] = {
    "torch": {},
    "compute": {},
    "none": {"codec": None, "update_codec": None},
    "coded": {},
}
FASTER, RATE, ADAMW_RATE, WARM = 2.5, 2e-2, 1e-3, 2


@dataclass
class Measured:
    variant: str
    step_seconds: float  # median of the slowest rank's
    sent_bytes: float | None  # per step, mean over the ranks; None where the kernel does not tell
    loss: float
    against: float  # times as fast as torch


class Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def options(parser: argparse.ArgumentParser) -> None:
    check = f"the default is at least {FASTER} times as fast as torch's under DDP"
    add_measuring(parser, rounds=3, steps=3, batch=1, check=check)


def run(options: argparse.Namespace) -> int:
    training.load_of(options)
    return harness.run(options, bench, cells, judge=judge)


def trainee(name: str, load: training.Load) -> training.Trainee:
    model = load.model()
    named = dict(model.named_parameters())
    hidden = [p for key, p in named.items() if p.ndim == 2 and key.startswith("blocks.")]
    rest = [p for p in named.values() if all(p is not other for other in hidden)]
    optimizer: Any
    if name in ("torch", "compute"):
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        training.attach(wrapped, "plain" if name == "torch" else "compute")
        optimizer = Both(
            torch.optim.Muon(hidden, RATE), torch.optim.AdamW(rest, lr=ADAMW_RATE, fused=True)
        )
        return training.Trainee(name, wrapped, optimizer, load)
    groups = [{"params": hidden}, {"params": rest, "use_muon": False, "lr": ADAMW_RATE}]
    return training.Trainee(name, model, commpress.Muon(groups, RATE, **VARIANTS[name]), load)


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[Measured | str]:
    load = training.load_of(options)
    every = {name: trainee(name, load) for name in VARIANTS}
    millions = sum(p.numel() for p in every["torch"].wrapped.parameters()) / 1e6
    yield f"{size} ranks, {millions:.1f} M parameters, {load.rounds} rounds of {load.steps}"
    for one in every.values():
        one.train(WARM)
    seconds, sent = training.timed(every, load)
    base = float(seconds["torch"].median())
    for name, one in every.items():
        loss = torch.tensor(one.loss)
        dist.all_reduce(loss)
        step = float(seconds[name].median())
        yield Measured(name, step, sent[name], float(loss) / size, base / step)


def cells(m: Measured) -> dict[str, str]:
    return {
        "variant": m.variant,
        "step ms": f"{1e3 * m.step_seconds:.1f}",
        "against torch": f"{m.against:.2f}x",
        "MB sent/rank": "-" if m.sent_bytes is None else f"{m.sent_bytes / 1e6:.3f}",
        "loss": f"{m.loss:.3f}",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    coded = measured[-1].against
    return [(f"coded is {coded:.2f} times as fast as torch, at least {FASTER}", coded >= FASTER)]
