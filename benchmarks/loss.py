"""seconds to a target loss over a network, several ways of communicating side by side

What a step does to the loss does not depend on the network, and what it costs does not depend on the loss. So both are
measured where each is measured best, and multiplied:
  losses   each variant trains one GPT from equal weights on equal batches until the mean loss of its last 160 windows
           reaches --target, at most --train steps, once with each learning rate of --lr, which falls in a line to a tenth;
           the rate that needs the fewest steps counts, for each variant its own.
           --seeds N: as often, with other weights and batches; means count.
           --losses FILE keeps the curves: those that are in it are not trained again, whatever network is there
  times    steps of every kind that the curves have take turns over the network that is there; medians of the slowest
           rank's. A compressed step here sends as many bytes as in the run of the curve, or the bench stops.
           --times FILE: those of an earlier --json file instead, for another target or other curves
Seconds to the target are the sum of the times of the steps up to it, whatever their kinds.
  plain, bf16, powersgdN   torch's hooks with AdamW; PowerSGD's first two steps are plain ones
  onebit, zero-one         commpress, overlapped with backward. onebit-int8-12: twelve exact rounds, and these in int8 with
                           error feedback; or bf16, int4, log3; if not named, float32 and --warmup rounds. 0/1 Adam has more
                           exact rounds later, and local steps once the rate falls; zero-one-int8-12-every has none of these
  deepspeed-onebit-12, deepspeed-zero-one   of DeepSpeed 0.19.6 under DDP; on CPU with NumPy in place of CuPy

  python benchmarks loss --losses curves.json --lr 5e-4,1e-3 --no-times
  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 benchmarks loss --losses curves.json
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import curves as of
from commpress.cli import outputs, ranks, table, training
from commpress.errors import InvalidArgument, StateMismatch
from curves import Curve, Settings, Variant, variant_of

VARIANTS = "plain,bf16,powersgd1,powersgd2,powersgd4,onebit-log3-20,zero-one-log3-8"
WARM = 3  # untimed steps: DDP rebuilds its buckets after the first, PowerSGD and compressed rounds begin after two
RATE = 5e-4
FASTER, THAN_HOOKS = 8.0, 1.15
HEAD = ["variant", "rate", "seconds", "steps", "exact", "compressed", "local", "loss", "against plain"]


@dataclass
class Measured:
    variant: str
    lr: float
    seconds: float | None  # to the target, mean over the seeds; None where one of them does not reach it
    every: list[float | None]  # of each seed
    steps: list[int]
    kinds: dict[str, int]  # of the first seed's
    loss: float


@dataclass
class Results:
    curves: list[Sequence[Curve]]  # the best of each variant, one for each seed
    seconds: dict[str, float]  # of a step of each kind
    sent: dict[str, float | None]  # bytes per step of each kind, mean over the ranks


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", default=VARIANTS, metavar="A,B", help=f"default {VARIANTS}")
    parser.add_argument("--target", type=float, default=2.8, metavar="LOSS", help="nats per byte (default 2.8)")
    parser.add_argument("--losses", metavar="FILE", help="curves: read if it exists, written with those that were missing")
    parser.add_argument("--no-times", action="store_true", help="train missing curves and measure no steps")
    parser.add_argument("--times", metavar="FILE", help="step times of an earlier --json file instead of new ones")
    parser.add_argument("--train", type=int, default=150, metavar="N", help="steps of each curve at most (default 150)")
    parser.add_argument("--lr", metavar="R,R", help="peaks to try (default: those that a variant's curves have, else 5e-4)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="of each curve (default 1)")
    parser.add_argument("--beta2", type=float, default=0.999, metavar="B", help="of Adam's variance (default 0.999)")
    parser.add_argument("--warmup", type=int, default=20, metavar="N", help="exact steps of ours (default 20)")
    parser.add_argument("--codec", default="sign", metavar="NAME", help="of momentum (default sign)")
    parser.add_argument("--spiky", default="log3", metavar="NAME", help="of tensors with few large elements (default log3)")
    parser.add_argument("--bucket-mb", type=float, default=8, metavar="MB", help="DDP's buckets (default 8)")
    training.options(parser, rounds=3, steps=2, batch=2)
    ranks.add_options(parser)
    outputs.options(
        parser, check=f"ours reaches the target {FASTER:g} times sooner than plain, {THAN_HOOKS} times sooner than hooks"
    )


def run(options: argparse.Namespace) -> int:
    if min(options.train, options.warmup, options.seeds) < 1:
        raise InvalidArgument("--train, --warmup and --seeds must be at least 1")
    variants = tuple(variant_of(name, options.warmup) for name in dict.fromkeys(options.variants.split(",")))
    settings = Settings(
        variants, rates_of(options.lr), options.losses, options.target, not (options.no_times or options.times), options.train,
        options.codec, options.bucket_mb, options.beta2, options.spiky, training.load_of(options), options.seeds,
    )  # fmt: skip
    results = ranks.on_ranks(bench, settings, print, ranks=options.ranks, threads=options.threads)
    if results is None or options.no_times:  # None: not rank 0 of a launcher
        return 0
    if options.times:
        earlier = json.loads(Path(options.times).read_text())
        results.seconds, results.sent = earlier["step_seconds"], earlier["step_bytes"]
    measured = [reached(curve, results.seconds, options.target) for curve in results.curves]
    print(step_table(results), summary(measured), sep="\n\n")
    return outputs.deliver(
        options, measured, judge=lambda: judge(measured), draw=lambda path: draw(path, measured, options.target),
        step_seconds=results.seconds, step_bytes=results.sent,
    )  # fmt: skip


def rates_of(words: str | None) -> tuple[float, ...]:
    """Empty if not named."""
    if words is None:
        return ()
    try:
        rates = tuple(dict.fromkeys(float(word) for word in words.split(",")))
    except ValueError:
        rates = ()
    if not rates or min(rates) <= 0:
        raise InvalidArgument(f"--lr is {words!r}, expected rates above zero such as 5e-4,1e-3")
    return rates


# ---------------------------------------------------------------- on every rank


def bench(rank: int, size: int, settings: Settings, report: ranks.Report | None) -> Results:
    curves = {(curve.variant, curve.lr, curve.seed): curve for curve in of.load(settings)}
    chosen, seeds = [], range(settings.seeds)
    for variant in settings.variants:
        rates = settings.rates or tuple(dict.fromkeys(lr for name, lr, _ in curves if name == variant.name)) or (RATE,)
        for at in ((variant.name, lr, seed) for lr in rates for seed in seeds):
            curve = curves.get(at)
            if curve is None or (len(curve.losses) < settings.steps and curve.steps_to(settings.target) is None):
                curve = curves[at] = of.train(variant, *at[1:], settings)
                if report is not None:
                    report(f"{at[0]}, rate {at[1]:g}, seed {at[2]}: loss {curve.last():.3f} after {len(curve.losses)} steps")
                if rank == 0:
                    of.save(settings, list(curves.values()))
        chosen.append(of.best([[curves[variant.name, lr, seed] for seed in seeds] for lr in rates], settings.target))
    return times(chosen, settings) if settings.times else Results(chosen, {}, {})


def times(chosen: list[Sequence[Curve]], settings: Settings) -> Results:
    """Each kind of step, as the first variant and the first seed that have it do it."""
    trainees: dict[str, training.Trainee] = {}
    expected: dict[str, int] = {}
    for variant, curve in ((v, curve) for v, every in zip(settings.variants, chosen, strict=True) for curve in every):
        for kind in dict.fromkeys(curve.kinds[: curve.steps_to(settings.target)]):
            if kind not in trainees:
                whose = Variant("plain", "plain") if kind == "plain" else variant
                trainees[kind] = of.repeater(kind, whose, curve, settings)
                expected |= {kind: curve.bytes[kind]} if kind in curve.bytes else {}
    for one in trainees.values():
        one.turn(WARM)
    for kind, count in expected.items():
        counters = trainees[kind].optimizer.counters  # type: ignore[attr-defined]
        before = counters.wire_bytes
        trainees[kind].turn(1)
        if (sent := counters.wire_bytes - before) != count:
            raise StateMismatch(
                f"a step {kind!r} sends {sent} bytes here, but sent {count} when its curve was trained: remove that curve from "
                "the file of --losses"
            )
    seconds, sent_bytes = training.race(trainees, settings.load)
    return Results(chosen, {kind: float(took.median()) for kind, took in seconds.items()}, sent_bytes)


# ---------------------------------------------------------------- on paper


def reached(curves: Sequence[Curve], seconds: dict[str, float], target: float) -> Measured:
    first, every, taken, losses = curves[0], [], [], []
    for curve in curves:
        steps = curve.steps_to(target)
        kinds = curve.kinds[:steps]
        if unknown := [kind for kind in kinds if kind not in seconds]:
            raise InvalidArgument(f"no step {unknown[0]!r} was timed: measure this variant, without --times")
        every.append(None if steps is None else sum(seconds[kind] for kind in kinds))
        taken.append(len(kinds))
        losses.append(curve.last() if steps is None else curve.smooth()[steps - curve.window])
    total = sum(took for took in every if took is not None)
    kinds = first.kinds[: taken[0]]
    return Measured(
        first.variant, first.lr, None if None in every else total / len(every), every, taken,
        {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}, sum(losses) / len(losses),
    )  # fmt: skip


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
        counts = [sum(n for kind, n in m.kinds.items() if word in kind) for word in ("exact", "compressed", "local")]
        rows.append(
            [
                m.variant, f"{m.lr:g}", "not reached" if m.seconds is None else f"{m.seconds:.1f}", " ".join(map(str, m.steps)),
                *map(str, counts), f"{m.loss:.3f}", f"{plain / m.seconds:.2f}x" if plain and m.seconds else "-",
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
    for name, bar, others in (("plain", FASTER, [plain] if plain else []), ("torch's hooks", THAN_HOOKS, hooks)):
        other = min(others, key=lambda m: m.seconds or 0, default=None)
        if other is None or other.seconds is None:
            bars.append((f"nothing to compare with: {name} did not reach the target, or was not run", False))
        else:
            ratio = other.seconds / best.seconds
            bars.append((f"{best.variant} {ratio:.2f} times sooner than {other.variant}, at least {bar:g}", ratio >= bar))
    return bars


def draw(path: str, measured: list[Measured], target: float) -> None:
    from commpress.cli import charts

    names = [m.variant for m in measured]
    with charts.chart(path, f"To a training loss of {target:g} nats per byte", size=(8, 4)) as (panel,):
        charts.bars(panel, names, {"": [m.seconds for m in measured]}, "seconds (–: not reached)")
