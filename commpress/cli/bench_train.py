"""a training step under several gradient hooks: which share of it waits for the network

Trains a GPT of 10.9 M parameters under DistributedDataParallel, once per variant, in turns of a few steps, so that moods of
machine and network hit all alike.
  compute     no communication: what the others would take on an infinitely fast network
  plain       torch's all-reduce of float32
  bf16        torch's bf16_compress_hook
  powersgdN   torch's PowerSGD hook of rank N
  sign, ...   commpress with that codec
"exposed" is what a step takes longer than compute: communication and compression that backward does not hide.

  commpress bench train                                                  4 local processes: loopback, faster than networks
  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commpress bench train --check
  commpress bench train --variants compute,plain,int8,sign --bucket-mb 25 sign=4
"""

import argparse
from dataclasses import asdict, dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import ranks, table, text
from commpress.cli.gpt import GPT
from commpress.cli.train import bf16_hook
from commpress.cli.wire import sent_bytes
from commpress.codecs.family import NAMES
from commpress.errors import InvalidArgument

VARIANTS = "compute,plain,bf16,powersgd1,sign"
# MB. PowerSGD chains collectives in callbacks: with several buckets ranks may issue them in different orders.
ONE_BUCKET = 1 << 20
WARM = 4  # untimed steps: DDP rebuilds its buckets after the first, PowerSGD begins with the third
HEAD = ["variant", "step ms", "of compute", "exposed ms", "MB sent/rank", "against plain", "loss"]


@dataclass(frozen=True)
class Settings:
    variants: tuple[str, ...]
    buckets: tuple[float, ...]  # MB, one per variant
    rounds: int
    steps: int
    width: int
    layers: int
    length: int
    batch: int
    seed: int = 0


@dataclass
class Measured:
    variant: str
    step_seconds: float  # median of the slowest rank's
    exposed_seconds: float  # median over rounds of this variant's median step minus that of compute
    sent_bytes: float | None  # per step, mean over the ranks; None where the kernel does not tell
    loss: float
    parameters: int


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--variants", default=VARIANTS, metavar="A,B", help=f"default {VARIANTS}; compute is always measured"
    )
    parser.add_argument(
        "--bucket-mb",
        nargs="+",
        default=["25"],
        metavar="MB",
        help="DDP's buckets: MB for all, variant=MB for one (default 25)",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each variant (default 5)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of each turn (default 4)")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="windows per rank and step (default 4)")
    parser.add_argument("--length", type=int, default=64, metavar="N", help="bytes of text in a window (default 64)")
    parser.add_argument("--width", type=int, default=384, metavar="N", help="of the model (default 384)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="of the model (default 6)")
    ranks.add_options(parser)
    parser.add_argument(
        "--check", action="store_true",
        help="exit status 1 unless sign exposes at most half of what powersgd1 does and its step is at most 1.3 of compute",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="everything measured")


def run(options: argparse.Namespace) -> int:
    variants = tuple(dict.fromkeys(["compute", *options.variants.split(",")]))
    for name in variants:
        check_variant(name)
    if options.check and not {"powersgd1", "sign"} <= set(variants):
        raise InvalidArgument("--check compares sign and powersgd1: name both in --variants")
    if min(options.rounds, options.steps, options.batch, options.length) < 1:
        raise InvalidArgument("--rounds, --steps, --batch and --length must be at least 1")
    settings = Settings(
        variants, bucket_sizes(variants, options.bucket_mb), options.rounds, options.steps, options.width, options.layers,
        options.length, options.batch,
    )  # fmt: skip
    measured = ranks.on_ranks(bench, settings, print, ranks=options.ranks, threads=options.threads)
    if measured is None:  # not rank 0 of a launcher
        return 0
    print(summary(measured))
    bars = judge({m.variant: m for m in measured}) if options.check else []
    if options.json:
        table.write_json(
            options.json, {"settings": asdict(settings), "rows": [asdict(m) for m in measured], "bars": bars}
        )
    return table.verdict(bars)


def check_variant(name: str) -> None:
    known = ("compute", "plain", "bf16", *NAMES)
    if name not in known and not (name.startswith("powersgd") and name[8:].isdigit() and int(name[8:]) > 0):
        raise InvalidArgument(f"variant is {name!r}, expected powersgdN or one of {', '.join(dict.fromkeys(known))}")


def bucket_sizes(variants: tuple[str, ...], words: list[str]) -> tuple[float, ...]:
    """MB for each variant from words like '25' and 'sign=4'."""
    sizes = {"": 25.0}
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            sizes[name] = float(number)
        except ValueError:
            sizes[name] = 0.0
        if sizes[name] <= 0 or name not in ("", *variants):
            raise InvalidArgument(
                f"--bucket-mb has {word!r}, expected a number or variant=number with a variant that runs"
            )
        if name.startswith("powersgd"):
            raise InvalidArgument("torch's PowerSGD hook needs all gradients in one bucket, so it has no --bucket-mb")
    return tuple(ONE_BUCKET if name.startswith("powersgd") else sizes.get(name, sizes[""]) for name in variants)


# ---------------------------------------------------------------- on every rank


class Variant:
    """One model with its optimizer and hook; all start from equal weights and see equal batches."""

    def __init__(self, name: str, bucket_mb: float, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.name, self.settings = name, settings
        self.model = GPT(width=settings.width, layers=settings.layers, length=settings.length)
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.library = text.standard_library()
        self.draws = torch.Generator().manual_seed(settings.seed * 4096 + dist.get_rank())
        self.sent, self.loss = 0, float("nan")
        attach(self.ddp, name)

    def turn(self, steps: int) -> list[float]:
        """Seconds of each step, which all ranks begin together."""
        before, took = sent_bytes(), []
        for _ in range(steps):
            batch = text.batch(self.library, self.settings.batch, self.settings.length, self.draws)
            dist.barrier()
            start = perf_counter()
            loss = self.ddp(*batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            took.append(perf_counter() - start)
            self.loss = loss.item()
        if before is not None:
            self.sent += (sent_bytes() or before) - before
        return took


def attach(ddp: DistributedDataParallel, name: str) -> None:
    if name == "compute":
        ddp.register_comm_hook(None, no_communication_hook)
    elif name == "bf16":
        ddp.register_comm_hook(None, bf16_hook)
    elif name.startswith("powersgd"):
        state = powerSGD_hook.PowerSGDState(
            ddp.process_group, matrix_approximation_rank=int(name[8:]), start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name != "plain":
        commpress.compress(ddp, name, measure_every=0)


def no_communication_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def bench(rank: int, size: int, settings: Settings, report: ranks.Report | None) -> list[Measured]:
    variants = [Variant(name, mb, settings) for name, mb in zip(settings.variants, settings.buckets, strict=True)]
    for variant in variants:
        variant.turn(WARM)
        variant.sent = 0
    parameters = sum(p.numel() for p in variants[0].model.parameters())
    if report is not None:
        report(
            f"{size} ranks, {parameters / 1e6:.1f} M parameters, {settings.rounds} turns of {settings.steps} steps each"
        )
    seconds = torch.empty(settings.rounds, len(variants), settings.steps, dtype=torch.float64)
    for turn in range(settings.rounds):
        for i, variant in enumerate(variants):
            seconds[turn, i] = torch.tensor(variant.turn(settings.steps))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    turns = seconds.median(2).values  # [round, variant]
    sent = torch.tensor([variant.sent for variant in variants]) / (settings.rounds * settings.steps * size)
    dist.all_reduce(sent)
    return [
        Measured(
            variant.name, float(seconds[:, i].median()), float((turns[:, i] - turns[:, 0]).median()),
            float(sent[i]) if sent_bytes() is not None else None, variant.loss, parameters,
        )
        for i, variant in enumerate(variants)
    ]  # fmt: skip


# ---------------------------------------------------------------- on paper


def summary(measured: list[Measured]) -> str:
    of: dict[str, Measured] = {m.variant: m for m in measured}
    compute, plain = of["compute"], of.get("plain")
    rows = []
    for m in measured:
        against = f"{plain.step_seconds / m.step_seconds:.2f}x" if plain else "-"
        rows.append(
            [
                m.variant, f"{1e3 * m.step_seconds:.1f}", f"{m.step_seconds / compute.step_seconds:.2f}x",
                f"{1e3 * m.exposed_seconds:.1f}", "-" if m.sent_bytes is None else f"{m.sent_bytes / 1e6:.3f}", against,
                f"{m.loss:.2f}",
            ]
        )  # fmt: skip
    return table.render(HEAD, rows)


def judge(of: dict[str, Measured]) -> list[tuple[str, bool]]:
    sign, powersgd, compute = of["sign"], of["powersgd1"], of["compute"]
    print()
    return [
        (
            f"sign exposes {1e3 * sign.exposed_seconds:.1f} ms, powersgd1 {1e3 * powersgd.exposed_seconds:.1f}: at most half",
            sign.exposed_seconds <= 0.5 * powersgd.exposed_seconds,
        ),
        (
            f"a sign step takes {sign.step_seconds / compute.step_seconds:.2f} of compute, at most 1.3",
            sign.step_seconds <= 1.3 * compute.step_seconds,
        ),
    ]
