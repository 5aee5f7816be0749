"""seconds to a target loss over a network, several ways of communicating side by side

Trains one GPT per variant from equal weights on equal batches, one after the other, until the loss, averaged over the ranks
and the last steps, is at most the target. Step times of all variants of one run share a machine and a network.
  plain, bf16, powersgdN   torch's hooks with AdamW
  onebit, zero-one         commpress, overlapped with backward; exact rounds travel as --exact-codec

  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commpress bench loss --target 2.8
  commpress bench loss --width 64 --layers 2 --variants plain,onebit --target 3.0 --steps 200
"""

import argparse
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import outputs, ranks, table, text
from commpress.cli.bench_train import ONE_BUCKET, attach
from commpress.cli.gpt import GPT
from commpress.cli.wire import sent_bytes
from commpress.errors import InvalidArgument

VARIANTS = "plain,bf16,powersgd1,powersgd2,powersgd4,onebit,zero-one"
SMOOTH = 10  # steps whose mean loss is compared with the target
HEAD = ["variant", "seconds", "steps", "s/step", "loss", "MB sent/rank", "against plain"]


@dataclass(frozen=True)
class Settings:
    variants: tuple[str, ...]
    target: float
    steps: int
    width: int
    layers: int
    length: int
    batch: int
    lr: float
    warmup: int
    codec: str
    exact_codec: str
    bucket_mb: float
    seed: int = 0


@dataclass
class Measured:
    variant: str
    reached: bool
    seconds: float
    steps: int
    loss: float
    sent_bytes: float | None


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", default=VARIANTS, metavar="A,B", help=f"default {VARIANTS}")
    parser.add_argument("--target", type=float, default=2.6, metavar="LOSS", help="nats per byte (default 2.6)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="give up after so many (default 400)")
    parser.add_argument("--width", type=int, default=384, metavar="N", help="of the model (default 384: 10.8 M parameters)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="of the model (default 6)")
    parser.add_argument("--length", type=int, default=64, metavar="N", help="bytes of text in a window (default 64)")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="windows per rank and step (default 4)")
    parser.add_argument("--lr", type=float, default=5e-4, metavar="R", help="default 5e-4, after 10 steps of warm-up")
    parser.add_argument("--warmup", type=int, default=16, metavar="N", help="exact steps of onebit (default 16)")
    parser.add_argument("--codec", default="sign", metavar="NAME", help="of momentum (default sign)")
    parser.add_argument("--exact-codec", default="int8", metavar="NAME", help="of exact rounds (default int8, with feedback)")
    parser.add_argument("--bucket-mb", type=float, default=8, metavar="MB", help="DDP's buckets (default 8)")
    ranks.add_options(parser)
    outputs.options(parser, check="every variant reaches the target, and ours no later than plain")


def run(options: argparse.Namespace) -> int:
    variants = tuple(dict.fromkeys(options.variants.split(",")))
    for name in variants:
        if name not in ("plain", "bf16", "onebit", "zero-one") and not (name[:8] == "powersgd" and name[8:].isdigit()):
            raise InvalidArgument(f"variant is {name!r}, expected one of {VARIANTS}")
    if min(options.steps, options.width, options.layers, options.length, options.batch, options.warmup) < 1:
        raise InvalidArgument("--steps, --width, --layers, --length, --batch and --warmup must be at least 1")
    settings = Settings(
        variants, options.target, options.steps, options.width, options.layers, options.length, options.batch, options.lr,
        options.warmup, options.codec, options.exact_codec, options.bucket_mb,
    )  # fmt: skip
    measured = ranks.on_ranks(bench, settings, print, ranks=options.ranks, threads=options.threads)
    if measured is None:  # not rank 0 of a launcher
        return 0
    print(summary(measured))
    return outputs.deliver(options, measured, judge=lambda: judge(measured), draw=lambda path: draw(path, measured, settings))


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    of = {m.variant: m for m in measured}
    bars = [(f"{m.variant} ends at {m.loss:.3f} after {m.steps} steps: the target or less", m.reached) for m in measured]
    for name in ("onebit", "zero-one"):
        if name in of and "plain" in of:
            ours, plain = of[name].seconds, of["plain"].seconds
            bars.append((f"{name} takes {ours:.1f} s, plain {plain:.1f} s", of[name].reached and ours <= plain))
    return bars


def draw(path: str, measured: list[Measured], settings: Settings) -> None:
    from commpress.cli import charts

    names = [m.variant for m in measured]
    with charts.chart(path, f"To a training loss of {settings.target:g} nats per byte", panels=2, share=True) as (time, sent):
        reached = [m.seconds if m.reached else None for m in measured]
        charts.bars(time, names, {"": reached}, "seconds (–: not reached)", show="{:.1f}")
        megabytes = [m.sent_bytes / 1e6 if m.sent_bytes is not None else None for m in measured]
        charts.bars(sent, names, {"": megabytes}, "MB sent per rank", show="{:.1f}")


def bench(rank: int, size: int, settings: Settings, report: ranks.Report | None) -> list[Measured]:
    measured = []
    for name in settings.variants:
        measured.append(race(name, settings, rank))
        if report is not None:
            m = measured[-1]
            report(f"{m.variant}: {m.seconds:.1f} s, {m.steps} steps, loss {m.loss:.3f}")
    return measured


def race(name: str, settings: Settings, rank: int) -> Measured:
    torch.manual_seed(settings.seed)
    model = GPT(width=settings.width, layers=settings.layers, length=settings.length)
    bucket_mb = ONE_BUCKET if name.startswith("powersgd") else settings.bucket_mb
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    optimizer = optimizer_of(name, ddp, settings)
    library, draws = text.standard_library(), torch.Generator().manual_seed(settings.seed * 4096 + rank)
    losses: list[float] = []
    dist.barrier()
    before, start = sent_bytes(), perf_counter()
    while len(losses) < settings.steps:
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (len(losses) + 1) / 10)
        loss = ddp(*text.batch(library, settings.batch, settings.length, draws))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # one number, for all variants alike
        losses.append(float(mean) / dist.get_world_size())
        if len(losses) >= SMOOTH and sum(losses[-SMOOTH:]) / SMOOTH <= settings.target:
            break
    seconds = perf_counter() - start
    sent = (sent_bytes() or before) - before if before is not None else None
    last = losses[-SMOOTH:]
    final = sum(last) / len(last)
    return Measured(name, final <= settings.target, seconds, len(losses), final, sent)


def optimizer_of(name: str, ddp: DistributedDataParallel, settings: Settings) -> torch.optim.Optimizer:
    if name not in ("onebit", "zero-one"):
        attach(ddp, name)
        return torch.optim.AdamW(ddp.parameters(), lr=settings.lr, fused=True)
    named = list(ddp.module.named_parameters())
    common = {"lr": settings.lr, "weight_decay": 0.01, "codec": settings.codec, "exact_codec": settings.exact_codec}
    if name == "onebit":
        optimizer = commpress.OneBitAdam(named, warmup_steps=settings.warmup, **common)  # type: ignore[arg-type]
        return commpress.overlap(ddp, optimizer)
    from commpress.schedules import DoublingIntervals

    sync = DoublingIntervals(start=2 * settings.warmup, period=4 * settings.warmup, longest=4)
    zero_one = commpress.ZeroOneAdam(named, variance_updates=8, sync=sync, **common)  # type: ignore[arg-type]
    return commpress.overlap(ddp, zero_one)


def summary(measured: list[Measured]) -> str:
    plain = next((m for m in measured if m.variant == "plain"), None)
    rows = []
    for m in measured:
        both = plain is not None and plain.reached and m.reached
        rows.append(
            [
                m.variant, f"{m.seconds:.1f}" if m.reached else f"not in {m.seconds:.1f}", str(m.steps),
                f"{m.seconds / m.steps:.3f}", f"{m.loss:.3f}",
                "-" if m.sent_bytes is None else f"{m.sent_bytes / 1e6:.1f}",
                f"{plain.seconds / m.seconds:.2f}x" if both and plain is not None else "-",
            ]
        )  # fmt: skip
    return table.render(HEAD, rows)
