"""seconds to a target loss over a network, several ways of communicating side by side

What a step does to the loss does not depend on the network, and what it costs does not depend on the loss. So both are
measured where each is measured best, and multiplied:
  losses   each variant trains one GPT from equal weights on equal batches for --steps steps; which kind each step was is
           noted. --losses FILE keeps the curves: those that are in it are not trained again, whatever network is there
  times    steps of every kind take turns over the network that is there; medians of the slowest rank's
Seconds to the target are the sum of the times of the steps up to it, whatever their kinds.
  plain, bf16, powersgdN   torch's hooks with AdamW; PowerSGD's first two steps are plain ones
  onebit, zero-one         commpress, overlapped with backward; exact rounds in float32, or with onebit-int8, onebit-bf16,
                           zero-one-int8 through that codec, error feedback included

  commpress bench loss --losses curves.json --no-times
  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commpress bench loss --losses curves.json
"""

import argparse
import json
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import outputs, ranks, table, training
from commpress.cli.bench_train import ONE_BUCKET, attach
from commpress.errors import InvalidArgument
from commpress.schedules import DoublingIntervals, Facts

VARIANTS = "plain,bf16,powersgd1,powersgd2,powersgd4,onebit,onebit-bf16,onebit-int8,zero-one-int8"
SMOOTH = 10  # steps whose mean loss is compared with the target
WARM = 3  # untimed steps: DDP rebuilds its buckets after the first, PowerSGD and compressed rounds begin after two
PLAIN_FIRST = 2  # steps before PowerSGD compresses
FASTER, THAN_HOOKS = 8.0, 1.15
HEAD = ["variant", "seconds", "steps", "exact", "compressed", "local", "loss", "against plain"]


@dataclass
class Curve:
    """A training run: the mean loss over the ranks and the kind of each step."""

    variant: str
    losses: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def smooth(self) -> list[float]:
        sums = [0.0, *accumulate(self.losses)]
        return [(b - a) / SMOOTH for a, b in zip(sums, sums[SMOOTH:], strict=False)]

    def steps_to(self, target: float) -> int | None:
        reached = next((i for i, loss in enumerate(self.smooth()) if loss <= target), None)
        return None if reached is None else reached + SMOOTH


@dataclass(frozen=True)
class Settings:
    variants: tuple[str, ...]
    curves: tuple[Curve, ...]  # measured before
    times: bool
    steps: int
    lr: float
    warmup: int
    codec: str
    bucket_mb: float
    load: training.Load


@dataclass
class Measured:
    variant: str
    seconds: float | None  # to the target; None where it is not reached
    steps: int
    kinds: dict[str, int]
    loss: float


@dataclass
class Results:
    curves: list[Curve]
    seconds: dict[str, float]  # of a step of each kind
    sent: dict[str, float | None]  # bytes per step of each kind, mean over the ranks


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", default=VARIANTS, metavar="A,B", help=f"default {VARIANTS}")
    parser.add_argument("--target", type=float, default=2.6, metavar="LOSS", help="nats per byte (default 2.6)")
    parser.add_argument("--losses", metavar="FILE", help="curves: read if it exists, written with those that were missing")
    parser.add_argument("--no-times", action="store_true", help="train missing curves and measure no steps")
    parser.add_argument("--train", type=int, default=150, metavar="N", help="steps of each curve (default 150)")
    parser.add_argument("--lr", type=float, default=5e-4, metavar="R", help="default 5e-4, after 10 steps of warm-up")
    parser.add_argument("--warmup", type=int, default=16, metavar="N", help="exact steps of ours (default 16)")
    parser.add_argument("--codec", default="sign", metavar="NAME", help="of momentum (default sign)")
    parser.add_argument("--bucket-mb", type=float, default=8, metavar="MB", help="DDP's buckets (default 8)")
    training.options(parser, rounds=3, steps=2, batch=4)
    ranks.add_options(parser)
    outputs.options(
        parser, check=f"ours reaches the target {FASTER:g} times sooner than plain, {THAN_HOOKS} times sooner than hooks"
    )


def run(options: argparse.Namespace) -> int:
    variants = tuple(dict.fromkeys(options.variants.split(",")))
    for name in variants:
        check_variant(name)
    if min(options.train, options.warmup) < 1:
        raise InvalidArgument("--train and --warmup must be at least 1")
    settings = Settings(
        variants, tuple(load(options.losses)), not options.no_times, options.train, options.lr, options.warmup,
        options.codec, options.bucket_mb, training.load_of(options),
    )  # fmt: skip
    results = ranks.on_ranks(bench, settings, print, ranks=options.ranks, threads=options.threads)
    if results is None:  # not rank 0 of a launcher
        return 0
    if options.losses:
        table.write_json(options.losses, {"curves": [asdict(curve) for curve in results.curves]})
    if options.no_times:
        return 0
    measured = [reached(curve, results.seconds, options.target) for curve in results.curves if curve.variant in variants]
    print(step_table(results), summary(measured), sep="\n\n")
    return outputs.deliver(
        options, measured, judge=lambda: judge(measured), draw=lambda path: draw(path, measured, options.target),
        step_seconds=results.seconds, step_bytes=results.sent,
    )  # fmt: skip


def check_variant(name: str) -> None:
    hook = name in ("plain", "bf16") or (name.startswith("powersgd") and name[8:].isdigit())
    if not hook and name.removesuffix("-bf16").removesuffix("-int8") not in ("onebit", "zero-one"):
        raise InvalidArgument(f"variant is {name!r}, expected one of {VARIANTS}")


def load(file: str | None) -> list[Curve]:
    if file is None or not Path(file).exists():
        return []
    return [Curve(**entry) for entry in json.loads(Path(file).read_text())["curves"]]


# ---------------------------------------------------------------- on every rank


def bench(rank: int, size: int, settings: Settings, report: ranks.Report | None) -> Results:
    curves = {curve.variant: curve for curve in settings.curves}
    for name in settings.variants:
        if name not in curves:
            curves[name] = train(name, settings)
            if report is not None:
                report(f"{name}: loss {curves[name].smooth()[-1]:.3f} after {settings.steps} steps")
    if not settings.times:
        return Results(list(curves.values()), {}, {})
    kinds = dict.fromkeys(kind for name in settings.variants for kind in curves[name].kinds)
    trainees = {kind: trainee(kind, settings) for kind in kinds}
    for one in trainees.values():
        one.turn(WARM)
    seconds, sent = training.race(trainees, settings.load)
    return Results(list(curves.values()), {kind: float(took.median()) for kind, took in seconds.items()}, sent)


def train(name: str, settings: Settings) -> Curve:
    one, curve = learner(name, settings), Curve(name)
    for step in range(settings.steps):
        for group in one.optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / 10)
        before = counts(one.optimizer)
        one.step()
        mean = torch.tensor(one.loss)
        dist.all_reduce(mean)
        curve.losses.append(round(float(mean) / dist.get_world_size(), 5))
        curve.kinds.append(kind_of(name, step, before, counts(one.optimizer)))
    return curve


def counts(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    own = getattr(optimizer, "counters", None)
    return () if own is None else (own.exact_rounds, own.compressed_rounds, own.local_steps)


def kind_of(name: str, step: int, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Steps of one kind take equally long, whichever variant they belong to."""
    if not after:
        return "plain" if name.startswith("powersgd") and step < PLAIN_FIRST else name
    exact, compressed, _ = (b - a for a, b in zip(before, after, strict=True))
    if exact:
        return "exact" + codec_suffix(name)
    return f"{name.removesuffix(codec_suffix(name))}, {'compressed' if compressed else 'local'}"


def codec_suffix(name: str) -> str:
    return next((suffix for suffix in ("-bf16", "-int8") if name.endswith(suffix)), "")


def learner(name: str, settings: Settings) -> training.Trainee:
    """As users would set it up."""
    ddp = wrapped(name, settings)
    if not name.startswith(("onebit", "zero-one")):
        attach(ddp, name)
        return training.Trainee(name, ddp, torch.optim.AdamW(ddp.parameters(), lr=settings.lr, fused=True), settings.load)
    more: dict[str, object] = {}
    if name.startswith("zero-one"):
        sync = DoublingIntervals(start=2 * settings.warmup, period=4 * settings.warmup, longest=4)
        more = {"variance_updates": 8, "sync": sync}
    return ours(name, ddp, settings, warmup=settings.warmup, **more)


@dataclass(frozen=True)
class Always:
    """Windows of equal length, and a variance that is updated once."""

    steps: int

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        return self.steps

    def count(self, step: int) -> int:
        return 1


def trainee(kind: str, settings: Settings) -> training.Trainee:
    """One that does steps of one kind only, after its first."""
    ddp = wrapped(kind, settings)
    if kind.startswith("exact"):
        return ours("onebit" + codec_suffix(kind), ddp, settings, warmup=1 << 30)
    if kind.startswith("onebit"):
        return ours("onebit", ddp, settings, warmup=1)
    if kind.startswith("zero-one"):
        windows = Always(1 << 30 if kind.endswith("local") else 1)
        return ours("zero-one", ddp, settings, warmup=1, variance_updates=windows, sync=windows)
    attach(ddp, kind)
    return training.Trainee(kind, ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True), settings.load)


def wrapped(name: str, settings: Settings) -> DistributedDataParallel:
    size = ONE_BUCKET if name.startswith("powersgd") else settings.bucket_mb
    return DistributedDataParallel(settings.load.model(), gradient_as_bucket_view=True, bucket_cap_mb=size)


def ours(
    name: str, ddp: DistributedDataParallel, settings: Settings, *, warmup: int, **more: object
) -> training.Trainee:
    cls = commpress.OneBitAdam if name.startswith("onebit") else commpress.ZeroOneAdam
    optimizer = cls(
        list(ddp.module.named_parameters()), lr=settings.lr, weight_decay=0.01, codec=settings.codec, warmup_steps=warmup,
        exact_codec=codec_suffix(name)[1:] or "none", **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return training.Trainee(name, ddp, commpress.overlap(ddp, optimizer), settings.load)


# ---------------------------------------------------------------- on paper


def reached(curve: Curve, seconds: dict[str, float], target: float) -> Measured:
    steps = curve.steps_to(target)
    kinds = curve.kinds[:steps]
    of = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    total = None if steps is None else sum(seconds[kind] * count for kind, count in of.items())
    return Measured(curve.variant, total, len(kinds), of, curve.smooth()[len(kinds) - SMOOTH])


def step_table(results: Results) -> str:
    rows = [
        [kind, f"{took:.3f}", "-" if results.sent[kind] is None else f"{(results.sent[kind] or 0) / 1e6:.2f}"]
        for kind, took in results.seconds.items()
    ]
    return table.render(["kind of step", "s", "MB sent/rank"], rows)


def summary(measured: list[Measured]) -> str:
    plain = next((m.seconds for m in measured if m.variant == "plain"), None)
    rows = []
    for m in measured:
        of = [sum(n for kind, n in m.kinds.items() if word in kind) for word in ("exact", "compressed", "local")]
        rows.append(
            [
                m.variant, "not reached" if m.seconds is None else f"{m.seconds:.1f}", str(m.steps), *map(str, of),
                f"{m.loss:.3f}", f"{plain / m.seconds:.2f}x" if plain and m.seconds else "-",
            ]
        )  # fmt: skip
    return table.render(HEAD, rows)


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    ours = [m for m in measured if m.variant.startswith(("onebit", "zero-one")) and m.seconds]
    hooks = [m for m in measured if m.variant.startswith(("bf16", "powersgd")) and m.seconds]
    plain = next((m for m in measured if m.variant == "plain" and m.seconds), None)
    best = min(ours, key=lambda m: m.seconds or 0, default=None)
    if best is None or best.seconds is None:
        return [("one of ours reaches the target", False)]
    bars = []
    for bar, others in ((FASTER, [plain] if plain else []), (THAN_HOOKS, hooks)):
        other = min(others, key=lambda m: m.seconds or 0, default=None)
        if other is not None and other.seconds is not None:
            ratio = other.seconds / best.seconds
            bars.append((f"{best.variant} {ratio:.2f} times sooner than {other.variant}, at least {bar:g}", ratio >= bar))
    return bars


def draw(path: str, measured: list[Measured], target: float) -> None:
    from commpress.cli import charts

    names = [m.variant for m in measured]
    with charts.chart(path, f"To a training loss of {target:g} nats per byte", size=(8, 4)) as (panel,):
        charts.bars(panel, names, {"": [m.seconds for m in measured]}, "seconds (–: not reached)")
