"""held-out losses of local updates against synchronous training, equal tokens, by steps of a round
and codec

A GPT of 1.1 M parameters on the source of Python's standard library, its ranks simulated in one
process, production code without a network, 2,000 steps of AdamW, the first tenth of them
synchronous and shared by all methods (their tokens and bytes count; --start 0: none). First the
learning rate of synchronous training is searched, then, from the same rates, the inner rate of
local updates at each number of steps a round, and their outer rate at 30; then comes the table. The
--json file is written after each run, and a run that it has is not done again: the command can be
stopped at any time and continued.
  --hidden K K    also rounds of so many steps that are overlapped as a whole by their exchange, as
           every="auto" makes them: means of weights, at first with half and later with all of what
           a rank has trained meanwhile; with --alpha that share of its own weights when one
           arrives; --outer and --momentum of Nesterov in place of the plain mean. The inner rate is
           searched for each; with --by-spread it is multiplied by √(1 + spread²), and the weight
           decay divided by it: what a step of mean gradients gains in length by less noise
  --hooks CODEC   also synchronous gradients in this codec, as commpress.compress sends them;
           per-layer-CODEC: in codecs or ranks that PerLayer chooses every 100 steps
  --optimizers NAME  also OneBitAdam or ZeroOneAdam, whose first tenth is exact; OneBitAdam-CODEC
           and OneBitAdam-per-layer-CODEC, as for hooks; Muon, whose matrices travel in int8 and
           int4, with AdamW's sizes of steps; Muon-none, in no codec, which has the bits of torch's
           Muon on the mean gradient
Columns of the table:
  gap      held-out loss against synchronous training at its best rate, mean over the seeds that
           both have
  bytes    of one rank against float32 all-reduces at every step

  python benchmarks local_loss --json local.json --processes 2 --check  about 45 runs of minutes
  python benchmarks local_loss --json local.json --every 30 --codecs int4 --seeds 1
"""

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import cos, pi
from statistics import mean
from typing import Any, Literal

import torch

import commpress
from commpress.alarm import Peers
from commpress.choice import Seen, choice_of
from commpress.cli import harness, terminal
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.cli.option_groups import option
from commpress.codecs import policy_of
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.transports.transport import Transport
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.outer import Average, Nesterov, Outer
from commpress.schedules import Facts, Hidden
from kept import Runs
from shared_options import add_output

# windows of all ranks in a step
WINDOWS, LENGTH, WIDTH, LAYERS = 32, 64, 128, 5
RATES, OUTER_RATES = (1e-3, 2e-3, 4e-3, 8e-3), (0.5, 0.7, 0.9)
WEIGHT_DECAY = 0.1
STEPS, EVERY, CODECS = 2000, (10, 30, 100), ("none", "int4", "bits2", "sign")
PER_LAYER, LAYERED = "per-layer-", 100  # begins a hook's name; steps between two choices
# cells of several seeds
SEEDED = [(every, codec) for every in (10, 30) for codec in ("int4", "bits2")]
# per cent above synchronous training
BARS = {(30, "int4"): 1.0, (30, "bits2"): 1.5, (10, "int4"): 0.0, (10, "bits2"): 0.0}


@dataclass(frozen=True)
class Whole(Hidden):
    """Hidden rounds of so many steps, whatever the seconds."""

    steps: int = 1

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        return self.steps


@dataclass(frozen=True)
class Run:
    every: int  # steps of a round; 0: synchronous
    codec: str = "none"
    rate: float = 2e-3
    outer_rate: float = 0.7
    decay: float = 0.95
    seed: int = 1
    steps: int = STEPS
    ranks: int = 4
    hidden: bool = False  # a whole round of overlap, and means of weights
    # of hidden rounds: what is kept of a rank's own weights, or "keep"
    alpha: float | Literal["keep"] | None = None
    momentum: float = 0.0  # of their outer step
    by_spread: bool = False  # LocalUpdates(lengthen=True)
    start: float = 0.1  # share of the steps that are synchronous at first
    windows: int = WINDOWS
    optimizer: str = ""  # of commpress, in place of AdamW

    @property
    def exact(self) -> bool:
        """Synchronous, in float32: what everything is compared with."""
        return not self.every and self.codec == "none" and not self.optimizer


@dataclass
class Finished:
    run: Run
    loss: float  # held out, at the end
    training: list[float]  # each fiftieth step, mean over the ranks
    sent: float  # MB of one rank


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--every", nargs="*", type=int, default=list(EVERY), metavar="H", help="default 10 30 100"
    )
    parser.add_argument(
        "--hidden",
        nargs="+",
        type=int,
        default=[],
        metavar="K",
        help="rounds that hide (default none)",
    )
    parser.add_argument(
        "--hooks", nargs="+", default=[], metavar="NAME", help="of gradients (default none)"
    )
    parser.add_argument(
        "--optimizers", nargs="+", default=[], metavar="NAME", help="of commpress (default none)"
    )
    parser.add_argument(
        "--alpha",
        nargs="+",
        type=lambda text: text if text == "keep" else float(text),
        default=[None],
        metavar="X",
        help="tried: share of a rank's own weights after hidden rounds, or keep (default as auto)",
    )
    parser.add_argument(
        "--by-spread", action="store_true", help="rates of hidden rounds follow the ranks' spread"
    )
    for name, default, says in (
        ("--momentum", [0.0], "of the outer step of hidden rounds (default 0)"),
        ("--outer", [1.0], "learning rate of the outer step of hidden rounds (default 1)"),
        ("--rates", list(RATES), f"inner learning rates (default {' '.join(map(str, RATES))})"),
    ):
        parser.add_argument(
            name, nargs="+", type=float, default=default, metavar="X", help=f"tried: {says}"
        )
    parser.add_argument(
        "--codecs",
        nargs="+",
        default=list(CODECS),
        metavar="NAME",
        help=f"default {' '.join(CODECS)}",
    )
    says = "of cells with a bar (default 1 2 3)"
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help=says)
    option(parser, "--ranks N", int, 4, "which share the windows of a step")
    option(parser, "--windows N", int, WINDOWS, f"of {LENGTH} bytes in a step (default {WINDOWS})")
    option(parser, "--steps N", int, STEPS, f"default {STEPS}")
    option(parser, "--start X", float, 0.1, "share of steps before the first round (default 0.1)")
    option(parser, "--decay X", float, 0.95, "of residuals")
    option(parser, "--processes N", int, 1, "runs at a time")
    add_output(
        parser, check="int4 loses at most 1 % and bits2 1.5 % at H = 30, neither anything at H = 10"
    )


def run(options: argparse.Namespace) -> int:
    kept = Runs(options.json, Run, Finished)

    def finished(runs: list[Run]) -> list[Finished]:
        def tell(one: Finished) -> None:
            print(f"{one.run}: {one.loss:.4f}", flush=True)

        return kept.of(runs, train, options.processes, tell)

    def best_of(run: Run, **tried: Sequence[float]) -> Run:
        """Return the run whose value of one setting ends lowest."""
        ((name, values),) = tried.items()
        settings: list[dict[str, Any]] = [{name: value} for value in values]
        ends = finished([replace(run, **setting) for setting in settings])
        return min(ends, key=lambda f: f.loss).run

    plain = Run(
        0,
        steps=options.steps,
        decay=options.decay,
        ranks=options.ranks,
        start=options.start,
        windows=options.windows,
    )
    rates = options.rates
    best = best_of(plain, rate=rates).rate
    tuned: dict[int, Run] = {}
    if options.every:
        outer = best_of(best_of(replace(plain, every=30), rate=rates), outer_rate=OUTER_RATES)
        tuned = {every: best_of(replace(outer, every=every), rate=rates) for every in options.every}
    cells = [(every, codec) for every in options.every for codec in options.codecs]
    runs = [replace(plain, rate=best, seed=seed) for seed in options.seeds]
    ways = [replace(plain, codec=codec) for codec in options.hooks]
    ways += [replace(plain, optimizer=name) for name in options.optimizers]
    for way in ways:
        found = best_of(way, rate=rates)
        runs += [replace(found, seed=seed) for seed in options.seeds]
    searched = product(options.hidden, options.alpha, options.momentum, options.outer)
    for steps, alpha, momentum, outer_rate in searched:
        hidden = replace(plain, every=steps, hidden=True, codec=options.codecs[0])
        hidden = replace(hidden, alpha=alpha, momentum=momentum, outer_rate=outer_rate)
        hidden = replace(hidden, by_spread=options.by_spread)
        hidden = best_of(hidden, rate=rates)
        runs += [
            replace(hidden, codec=codec, seed=seed)
            for codec in options.codecs
            for seed in options.seeds
        ]
    for every, codec in cells:
        seeds = options.seeds if (every, codec) in SEEDED else options.seeds[:1]
        runs += [replace(tuned[every], codec=codec, seed=seed) for seed in seeds]
    every_run = finished(runs)
    rows = cells_of(every_run)
    print(terminal.table(rows))
    options.json = None  # written already, after each run
    return harness.deliver(options, every_run, judge=judge)


def _gap(cell: list[Finished], runs: list[Finished]) -> float:
    """Per cent above synchronous training, over the seeds of the cell."""
    plain = {f.run.seed: f.loss for f in runs if f.run.exact}
    return 100 * (mean(f.loss for f in cell) / mean(plain[f.run.seed] for f in cell) - 1)


def _cells(runs: list[Finished]) -> dict[Run, list[Finished]]:
    """Runs that differ in nothing but their seed."""
    cells: dict[Run, list[Finished]] = {}
    for each in runs:
        cells.setdefault(replace(each.run, seed=0), []).append(each)
    return cells


def cells_of(runs: list[Finished]) -> list[dict[str, str]]:
    """A row for each cell of the table."""
    rows = []
    plain = mean(f.sent for f in runs if f.run.exact)
    for one, cell in _cells(runs).items():
        every, hidden = one.every, one.hidden
        rows.append(
            {
                "method": one.optimizer
                or ("hidden" if hidden else "local" if every else "synchronous"),
                "H": str(every or 1),
                "codec": one.codec,
                "rate": f"{one.rate:g}",
                "outer rate": f"{one.outer_rate:g}" if every else "-",
                "alpha": "-" if one.alpha is None else str(one.alpha),
                "momentum": f"{one.momentum:g}" if hidden else "-",
                "rate by": "spread" if one.by_spread else "-",
                "held-out loss": f"{mean(f.loss for f in cell):.4f}",
                "seeds": str(len(cell)),
                "gap": f"{_gap(cell, runs):+.2f} %",
                "bytes": f"1/{plain / mean(f.sent for f in cell):.0f}",
            }
        )
    return rows


def judge(runs: list[Finished]) -> list[tuple[str, bool]]:
    bars = []
    for one, cell in _cells(runs).items():
        every, codec = one.every, one.codec
        if (every, codec) in BARS and not one.hidden:
            gap, bar = _gap(cell, runs), BARS[every, codec]
            says = (
                f"H = {every}, {codec}: {gap:+.2f} % above synchronous training (bar {bar:+.1f} %)"
            )
            bars.append((says, gap <= bar))
    return bars


# ---------------------------------------------------------------- runs


def factor(step: int, steps: int) -> float:
    """Of the learning rate: up over the first twentieth, then a cosine down to a tenth."""
    warm = max(steps // 20, 1)
    return (
        (step + 1) / warm
        if step < warm
        else 0.1 + 0.45 * (1 + cos(pi * (step - warm) / (steps - warm)))
    )


def train(run: Run) -> Finished:
    torch.set_num_threads(1)
    text = standard_library(4.0)
    text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    draws = [torch.Generator().manual_seed(1000 * run.seed + r) for r in range(run.ranks)]
    torch.manual_seed(run.seed)
    model = GPT(width=WIDTH, layers=LAYERS, length=LENGTH)
    optimizer = _adamw(model, run)
    rows, numel = run.windows // run.ranks, sum(p.numel() for p in model.parameters())
    sent = 0.0
    training: list[float] = []
    if run.optimizer:
        sent, training = _optimized(model, run, text, draws)
        return Finished(run, round(_held_out_loss(model, held_out), 5), training, sent / 1e6)
    hook = Hook(model, run) if not run.every and not run.exact else None
    together = run.steps if not run.every else int(run.steps * run.start)
    for step in range(together):
        parts: list[tuple[torch.Tensor, ...]] = [batch(text, rows, LENGTH, d) for d in draws]
        if hook is None:
            parts = [tuple(torch.cat(each) for each in zip(*parts, strict=True))]
            sent += 8 * numel * (run.ranks - 1) / run.ranks
        loss = _step(model, optimizer, run, step, parts, hook)
        optimizer.step()
        training += [round(loss, 4)] if step % 50 == 0 else []
    if run.every:
        models = [copy.deepcopy(model) for _ in range(run.ranks)]
        optimizers = [_adamw(each, run) for each in models]
        for each in optimizers:
            each.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        outer: Outer = Nesterov(run.outer_rate, 0.9)
        if run.hidden:
            plain = run.momentum == 0 and run.outer_rate == 1
            outer = Average() if plain else Nesterov(run.outer_rate, run.momentum)
        local = [
            LocalUpdates(
                each,
                every=Whole(steps=run.every) if run.hidden and run.alpha is None else run.every,
                outer=outer,
                overlap=_overlap(run),
                codec=None if run.codec == "none" else run.codec,
                feedback_decay=run.decay,
                process_group=transport,
                lengthen=run.by_spread,
            )
            for each, transport in zip(optimizers, Loopback(run.ranks).transports(), strict=True)
        ]
        for updates in local:
            updates.begin_at(together, 0)
        for step in range(together, run.steps):
            losses = []
            for replica, inner, d in zip(models, optimizers, draws, strict=True):
                losses.append(_step(replica, inner, run, step, [batch(text, rows, LENGTH, d)]))
                inner.step()
            simulate([each.steps() for each in local])
            training += [round(mean(losses), 4)] if step % 50 == 0 else []
        simulate([each.draining() for each in local])
        model, sent = models[0], sent + local[0].counters.sent_bytes
    if hook is not None:
        sent = float(hook.sent_bytes())
    return Finished(run, round(_held_out_loss(model, held_out), 5), training, sent / 1e6)


def _overlap(run: Run) -> int | tuple[int, float | Literal["keep"]]:
    """The ``overlap`` of a run: of hidden rounds with the share of a rank's own weights."""
    return (run.every, run.alpha) if run.hidden and run.alpha is not None else 0


def _optimized(
    model: torch.nn.Module, run: Run, text: torch.Tensor, draws: Sequence[torch.Generator]
) -> tuple[float, list[float]]:
    """Train ``model`` as one of the ranks of a compressed optimizer; its bytes and losses."""
    models = [model, *(copy.deepcopy(model) for _ in draws[1:])]
    training: list[float] = []
    optimizers: list[Any] = [
        _optimizer(each, run, transport)
        for each, transport in zip(models, Loopback(run.ranks).transports(), strict=True)
    ]
    for step in range(run.steps):
        losses = []
        for replica, optimizer, d in zip(models, optimizers, draws, strict=True):
            optimizer.zero_grad()
            x, y = batch(text, run.windows // run.ranks, LENGTH, d)
            loss = replica(x, y)
            loss.backward()
            losses.append(float(loss.detach()))
            for group in optimizer.param_groups:
                group["lr"] = run.rate * factor(step, run.steps)
        simulate([each.steps() for each in optimizers])
        training += [round(mean(losses), 4)] if step % 50 == 0 else []
    simulate([each.synchronizing() for each in optimizers if hasattr(each, "synchronizing")])
    return float(optimizers[0].channel.sent_bytes), training


def _optimizer(model: torch.nn.Module, run: Run, transport: Transport) -> torch.optim.Optimizer:
    """The optimizer of a rank that averages by itself."""
    named = dict(model.named_parameters())
    name, _, codec = run.optimizer.partition("-")
    if name == "Muon":
        hidden = [p for key, p in named.items() if p.ndim == 2 and key.startswith("blocks.")]
        rest = [p for p in named.values() if all(p is not other for other in hidden)]
        codecs: dict[str, Any] = {"codec": None, "update_codec": None} if codec == "none" else {}
        return commpress.Muon(
            [{"params": hidden}, {"params": rest, "use_muon": False, "lr": run.rate}],
            run.rate,
            adjust_lr_fn="match_rms_adamw",
            adamw={"betas": (0.9, 0.99), "weight_decay": 0.1},
            transport=transport,
            **codecs,
        )
    kind: Any = getattr(commpress, name)
    return kind(
        list(named.items()),
        lr=run.rate,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        max_grad_norm=1.0,
        transport=transport,
        **({"exact_steps": run.steps // 10} if name == "OneBitAdam" else {}),
        **({"codec": _codec(codec)} if codec else {}),
    )


def _codec(name: str) -> str | commpress.PerLayer:
    if name.startswith(PER_LAYER):
        return commpress.PerLayer(name.removeprefix(PER_LAYER), LAYERED)
    return name


def _adamw(model: torch.nn.Module, run: Run) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=run.rate, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY, fused=True
    )


class Hook:
    """Gradients of all ranks on their way to their mean, in one bucket."""

    def __init__(self, model: torch.nn.Module, run: Run) -> None:
        self.parameters = list(model.parameters())
        self.spans, at = [], 0
        for name, parameter in model.named_parameters():
            self.spans.append(Span(name, at, parameter.numel()))
            at += parameter.numel()
        self.codec = _codec(run.codec)
        choices = [choice_of(self.codec, policy_of) for _ in range(run.ranks)]
        self.ranks = [
            (
                channel,
                Exchanges(
                    choice.usual or policy_of("none"),
                    run.ranks,
                    channel.workspace,
                    any_rank=True,
                ),
                torch.empty(at),
                choice,
            )
            for channel, choice in zip(
                map(Channel, Loopback(run.ranks).transports()), choices, strict=True
            )
        ]

    def keep(self, rank: int) -> None:
        """The gradients that lie in the parameters are this rank's."""
        buffer = self.ranks[rank][2]
        for span, parameter in zip(self.spans, self.parameters, strict=True):
            assert parameter.grad is not None
            buffer[span.source :][: span.numel] = parameter.grad.flatten()
            parameter.grad = None

    def choose(self, step: int) -> None:
        """Let all ranks choose their codecs at the same time, as they do in a run."""
        found = [choice.at(step, Peers(channel)) for channel, *_, choice in self.ranks]
        for (_, exchanges, *_), now in zip(self.ranks, simulate(found), strict=True):
            assert now.policy is not None
            exchanges.use(now.policy)

    def reduce(self, step: int) -> None:
        """Put the mean of all ranks' gradients into the parameters."""
        shapes = [parameter.shape for parameter in self.parameters]
        looks = self.ranks[0][3].looks(step)
        if looks or self.ranks[0][3].looks(step - 1):
            self.choose(step)
        jobs, seen = [], []
        for channel, exchanges, buffer, _ in self.ranks:
            exchange = exchanges.of((), lambda: (self.spans, shapes), buffer.device)
            call = channel.call(exchange.sequences, step)
            seen.append(
                Seen(self.spans, buffer.clone() if looks else buffer, None, (), exchange.plans)
            )
            jobs.append(exchange.steps(channel, buffer, call))
        for outcomes in simulate(jobs):
            settle(outcomes, taken=True)
        for (*_, choice), each in zip(self.ranks, seen, strict=True) if looks else ():
            choice.observe(step, each)
        for span, parameter in zip(self.spans, self.parameters, strict=True):
            mean_gradient = self.ranks[0][2][span.source :][: span.numel]
            parameter.grad = mean_gradient.view_as(parameter).clone()

    def sent_bytes(self) -> int:
        return self.ranks[0][0].sent_bytes


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Run,
    step: int,
    batches: Sequence[tuple[torch.Tensor, ...]],
    hook: Hook | None = None,
) -> float:
    """Gradients of one batch, or through ``hook`` of every rank's; clipped."""
    optimizer.zero_grad()
    losses = []
    for rank, (x, y) in enumerate(batches):
        loss = model(x, y)
        loss.backward()
        losses.append(float(loss.detach()))
        if hook is not None:
            hook.keep(rank)
    if hook is not None:
        hook.reduce(step)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = run.rate * factor(step, run.steps)
    return mean(losses)


@torch.no_grad()
def _held_out_loss(model: torch.nn.Module, text: torch.Tensor) -> float:
    draws = torch.Generator().manual_seed(0)
    return mean(float(model(*batch(text, 64, LENGTH, draws))) for _ in range(40))
