"""final losses of the compressed optimizers against Adam and LAMB, several seeds, equal samples

Three tasks, four ranks simulated in one process, production code without a network:
  gpt      a character-level GPT on the source of Python's standard library
  bert     a masked language model on the same text
  digits   a convolutional network on scikit-learn's handwritten digits
  adam, lamb              exact means at every step
  onebit, onebit-lamb     exact for 15 % of the steps, then momentum in one bit
  zero-one                the same, then variance and synchronisations on schedules
  sharded-onebit, sharded-zero-one     those with their state divided over the ranks
The bar: the mean final loss of a compressed optimizer lies at most as high as the worst seed of its
reference. With --no-feedback it must not hold. The --json file is written after each run, and a run
that it has is not done again: a long comparison can be stopped at any time and continued.

  python benchmarks convergence --plot convergence.png --check
  python benchmarks convergence --tasks gpt --seeds 1 2 --json runs.json
  python benchmarks convergence --merge runs.json without.json
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from commpress.cli import harness, terminal
from commpress.cli.gpt import GPT, TransformerBlock, batch, standard_library
from commpress.cli.option_groups import option
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument, MissingPackage
from commpress.optim import (
    OneBitAdam,
    OneBitLamb,
    ShardedOneBitAdam,
    ShardedZeroOneAdam,
    ZeroOneAdam,
)
from commpress.optim.optimizer import CompressedOptimizer
from kept import Runs
from shared_options import add_output

RANKS = 4
TASKS = ("gpt", "bert", "digits")
REFERENCE = {
    "adam": "adam",
    "onebit": "adam",
    "zero-one": "adam",
    "sharded-onebit": "adam",
    "sharded-zero-one": "adam",
    "lamb": "lamb",
    "onebit-lamb": "lamb",
}
OPTIMIZERS = tuple(REFERENCE)
RATES = {"adam": 2e-3, "lamb": 1e-2}
SYNC = defaultdict(lambda: "qsr", {"sharded-zero-one": "linear"})  # the default of each optimizer
MASK = 256
STEPS = 500
Batch = tuple[torch.Tensor, torch.Tensor]
STYLES: dict[str, dict[str, Any]] = {
    "adam": {"color": "#999999", "linewidth": 4.5},
    "onebit": {"color": "#d62728", "linewidth": 1.6},
    "onebit, no feedback": {"color": "#d62728", "linewidth": 1.0, "linestyle": ":"},
    "zero-one": {"color": "#1f77b4", "linewidth": 1.6},
    "sharded-onebit": {"color": "#ff9896", "linewidth": 1.4, "linestyle": "--"},
    "sharded-zero-one": {"color": "#9ecae1", "linewidth": 1.4, "linestyle": "--"},
    "lamb": {"color": "#cccc88", "linewidth": 4.5},
    "onebit-lamb": {"color": "#2ca02c", "linewidth": 1.6, "linestyle": "--"},
}
OTHERWISE = {"linewidth": 1.2, "linestyle": "-."}  # with another codec or schedule


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
        name = (
            self.optimizer
            if self.sync == SYNC[self.optimizer]
            else f"{self.optimizer}, {self.sync}"
        )
        name += (
            ""
            if self.exact_codec == "none" or self.optimizer == self.reference
            else f", {self.exact_codec}"
        )
        return name if self.feedback else f"{name}, no feedback"


@dataclass
class Finished:
    run: Run
    losses: list[float]  # of each step, mean over the ranks
    final: float  # over the last tenth of the steps
    ratio: float  # times fewer bytes than float32 all-reduces
    rounds: int  # steps that communicated


Groups = dict[tuple[str, str], list[Finished]]  # by task and label


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), metavar="NAME", help=f"default {' '.join(TASKS)}"
    )
    says = f"default {' '.join(OPTIMIZERS)}"
    parser.add_argument(
        "--optimizers", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help=says
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="N", help="default 1 to 5"
    )
    option(parser, "--steps N", int, STEPS, f"default {STEPS}")
    option(parser, "--codec NAME", None, "sign", "of momentum")
    option(parser, "--exact-codec NAME", None, "none", "of gradients in exact steps")
    says = "when zero-one and sharded-zero-one synchronise (default qsr and linear, their own)"
    parser.add_argument("--sync", choices=("qsr", "linear", "rate", "every"), help=says)
    option(parser, "--no-feedback", says="forget what compression leaves behind")
    option(parser, "--processes N", int, 1, "runs at a time")
    parser.add_argument(
        "--merge",
        nargs="+",
        metavar="FILE",
        help="show runs of earlier --json files instead of new ones",
    )
    add_output(
        parser, check="every compressed optimizer ends as low as the worst seed of its reference"
    )
    option(parser, "--plot FILE", says="a picture of it (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    for name in options.tasks:
        if name not in TASKS:
            raise InvalidArgument(f"task is {name!r}, expected one of {', '.join(TASKS)}")
    for name in options.optimizers:
        if name not in OPTIMIZERS:
            raise InvalidArgument(f"optimizer is {name!r}, expected one of {', '.join(OPTIMIZERS)}")
    if options.steps < 20:
        raise InvalidArgument(f"--steps is {options.steps}, expected at least 20")
    if options.merge:
        finished = [
            run for file in options.merge for run in Runs(file, Run, Finished).done.values()
        ]
    else:
        syncs = {name: options.sync or SYNC[name] for name in options.optimizers}
        runs = [
            Run(
                task,
                name,
                seed,
                options.steps,
                not options.no_feedback,
                options.codec,
                syncs[name],
                options.exact_codec,
            )
            for task in options.tasks
            for seed in options.seeds
            for name in options.optimizers
        ]
        finished = Runs(options.json, Run, Finished).of(runs, train, options.processes)
    groups = grouped(finished)
    print(terminal.table([cells(task, name, groups) for task, name in groups]))
    options.json = None  # written already, after each run
    if options.plot:
        draw(options.plot, groups)
    return harness.deliver(options, groups, judge=judge)


def grouped(finished: list[Finished]) -> Groups:
    groups: Groups = defaultdict(list)
    for each in finished:
        groups[each.run.task, each.run.label].append(each)
    return groups


def cells(task: str, name: str, groups: Groups) -> dict[str, str]:
    runs = groups[task, name]
    finals, reference = [r.final for r in runs], groups.get((task, runs[0].run.reference), [])
    against = mean(finals) - mean(r.final for r in reference) if reference else float("nan")
    return {
        "task": task,
        "optimizer": name,
        "final loss": f"{mean(finals):.3f} ({min(finals):.3f} to {max(finals):.3f})",
        "seeds": str(len(runs)),
        "against reference": f"{against:+.3f}",
        "bytes": f"1/{mean(r.ratio for r in runs):.1f}",
        "rounds": f"{100 * mean(r.rounds / r.run.steps for r in runs):.0f} %",
    }


def judge(groups: Groups) -> list[tuple[str, bool]]:
    bars = []
    for (task, name), runs in groups.items():
        standard = runs[0].run.reference
        reference = groups.get((task, standard), [])
        if name == standard or not reference:
            continue
        worst, ours = max(r.final for r in reference), mean(r.final for r in runs)
        bars.append(
            (
                f"{task}: {name} ends at {ours:.3f}, the worst seed of {standard} at {worst:.3f}",
                ours <= worst,
            )
        )
    return bars


def draw(path: str, groups: Groups) -> None:
    """One panel per task, one line per optimizer, seeds averaged."""
    from commpress.cli import charts

    tasks = list(dict.fromkeys(task for task, _ in groups))
    with charts.chart(
        path,
        "Losses, mean over seeds; final losses in the legends",
        panels=len(tasks),
        size=(5, 4.4),
    ) as panels:
        for task, panel in zip(tasks, panels, strict=True):
            names, curves = [name for of, name in groups if of == task], []
            for name in sorted(
                names, key=lambda name: list(STYLES).index(name) if name in STYLES else len(STYLES)
            ):
                runs = groups[task, name]
                curves.append(
                    charts.smooth(
                        [mean(step) for step in zip(*(r.losses for r in runs), strict=True)]
                    )
                )
                style = STYLES.get(name) or STYLES[runs[0].run.optimizer] | OTHERWISE
                label = f"{name}: {mean(r.final for r in runs):.3f}"
                panel.plot(range(1, len(curves[-1]) + 1), curves[-1], label=label, **style)
            # the first steps would flatten the rest
            start, lowest = max(c[len(c) // 20] for c in curves), min(map(min, curves))
            margin = 0.05 * (start - lowest) + 1e-3
            panel.set_ylim(lowest - margin, start + margin)
            panel.set(title=task, xlabel="step", ylabel="training loss, nats (smoothed)")
            panel.legend(frameon=False)


# ---------------------------------------------------------------- one training run
#
# The ranks run the production generators in lockstep, so what is compared is what training does,
# without a network.


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
        return F.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), targets.flatten(), ignore_index=-100
        )


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
        raise MissingPackage(
            "the digits come with scikit-learn: pip install scikit-learn"
        ) from error
    images, targets = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(targets)

    def draw(draws: torch.Generator) -> Batch:
        rows = torch.randint(len(x), (8,), generator=draws)
        # no two batches alike, so that losses do not reach zero
        noise = 0.3 * torch.randn(8, 1, 8, 8, generator=draws)
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
        "lr": lr,
        "weight_decay": 0.01,
        "codec": run.codec,
        "transport": transport,
        "error_feedback": run.feedback,
        "betas": (0.9, 0.99),
        "max_grad_norm": 1.0,
        "exact_codec": run.exact_codec,
    }
    named = list(model.named_parameters())
    if run.optimizer == "zero-one":
        return ZeroOneAdam(named, exact_steps=run.steps * 15 // 100, sync=run.sync, **options)  # type: ignore[arg-type]
    if run.optimizer == "sharded-zero-one":
        options |= {"sync": run.sync}
        return ShardedZeroOneAdam(named, exact_steps=run.steps * 15 // 100, **options)  # type: ignore[arg-type]
    if run.optimizer == "sharded-onebit":
        return ShardedOneBitAdam(named, exact_steps=run.steps * 15 // 100, **options)  # type: ignore[arg-type]
    exact = run.optimizer in ("adam", "lamb")
    cls = OneBitLamb if run.reference == "lamb" else OneBitAdam
    return cls(named, exact_steps=run.steps + 1 if exact else run.steps * 15 // 100, **options)  # type: ignore[arg-type]


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
    return Finished(
        run, losses, sum(last) / len(last), counters.ratio if not exact else 1.0, rounds
    )


def warm_and_decay(step: int, steps: int) -> float:
    """Factor of the learning rate: up over the first twentieth of the steps, linearly down to zero
    over the rest."""
    warm = max(steps // 20, 1)
    return (step + 1) / warm if step < warm else (steps - step) / (steps - warm)
