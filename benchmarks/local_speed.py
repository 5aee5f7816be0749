"""speed of local updates against DDP's ways over a real link, and bytes counted on the interface

A GPT of 10.8 M parameters, one rank a host, rounds of H steps. Two devices:
  cpu       each host computes the model, forward and backward
  60ms      a faster device stood in: so much time a step, slept block by block inside backward, so
            that DDP may overlap; gradients are recorded, the optimizer is real
Ways:
  local:CODEC        LocalUpdates, all stand still for the exchange; local:CODEC:overlap computes on
                     meanwhile; bits2/1024 is BitsCodec(2, block=1024), of fewer bytes than bits2,
                     whose blocks are of 512
  plain, CODEC       DistributedDataParallel, by itself or with compress(ddp, CODEC)
  zero-one           ZeroOneAdam late in a run: one bit, one synchronisation in 16 steps
Columns: milliseconds of a step of the slowest rank; speed relative to computing alone right before
and after; bytes that left the interface and came in (of all but loopback, headers included, mean
over the ranks) per rank and round of H steps; those that a formula allows: of two phases 2(K-1)/K
times 2.25 bits for bits2/1024, of sparse messages (K-1) times 0.25 bits, of each parameter.

Every host runs the same command, as for any benchmark. --link names the link in the table: shape it
with tc, or run hosts as network namespaces. The --json file takes the rows of all links and
devices, is written after each way, and a way that it has is not measured again: the command can be
stopped at any time and goes on.

  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks local_speed \\
      --link 100mbit --json speed.json
  python benchmarks local_speed --ranks 2 --width 32 --layers 2 --device 5ms \\
      --ways local:bits2/1024,sign
"""

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
import kept
from commpress.cli import harness, training
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.cli.option_groups import option
from commpress.codecs import BitsCodec, Codec, codec_named
from commpress.errors import InvalidArgument
from commpress.schedules import Every
from commpress.units import parse_time
from shared_options import add_measuring

VARIANTS = (
    "local:bits2/1024,local:bits2/1024:overlap,local:topk-64+bits2:overlap,sign,int8,zero-one,plain"
)
ALONE = 10  # steps of computing alone before each way, and after it
SYNCHRONISED = 16  # steps of zero-one between two synchronisations
ALLOWED = {"bits2/1024": 2.25, "topk-64+bits2": 0.25}  # bits of a parameter, at most, with headers


@dataclass(frozen=True)
class Row:
    device: str
    variant: str
    link: str
    every: int
    parameters: int
    ranks: int
    step_seconds: float
    alone_seconds: float  # of a step of computing alone, before this way and after it
    steps: int  # that were timed
    # by the interface, mean over the ranks, of a round; None where ranks share it
    sent_bytes: float | None
    received_bytes: float | None
    allowed_bytes: float | None


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--ways A,B", None, VARIANTS, f"default {VARIANTS}")
    says = "cpu, or the time of a step stood in, such as 60ms (default cpu)"
    option(parser, "--device D", None, "cpu", says)
    option(parser, "--link NAME", None, "-", "of the link, for the table")
    option(parser, "--every H", int, 30, "steps of a round")
    option(parser, "--overlap N", int, None, "steps under way of :overlap (default H - 1)")
    option(parser, "--seconds S", float, 8.0, "of each way, after warming up")
    add_measuring(
        parser,
        rounds=1,
        steps=1,
        batch=4,
        check="bits2 overlapped runs at 0.95 of computing alone (0.9 of a device stood in, 0.45 "
        "at 10 Mbit/s, where "
        "sparse messages reach 0.9), bytes stay within what is allowed, and are 400 times fewer "
        "than DDP's in float32",
    )


def run(options: argparse.Namespace) -> int:
    seconds_of(options.device)
    for variant in options.ways.split(","):
        _check_variant(variant)
    return harness.run(options, bench, cells, judge=judge)


def seconds_of(device: str) -> float:
    """Of a step stood in; 0 for real computing."""
    return 0.0 if device == "cpu" else parse_time(device)


def codec_of(name: str) -> Codec:
    """A codec by its name; bits2/1024 and the like have blocks of so many elements."""
    blocks = re.fullmatch(r"bits(\d)/(\d+)", name)
    return BitsCodec(int(blocks[1]), block=int(blocks[2])) if blocks else codec_named(name)


def _check_variant(variant: str) -> None:
    name, _, rest = variant.partition(":")
    if name == "local" and rest:
        codec_of(rest.removesuffix(":overlap"))
    elif name not in ("plain", "zero-one"):
        codec_named(variant)


# ---------------------------------------------------------------- a device stood in


class RecordedBlock(torch.autograd.Function):
    """Forward: nothing. Backward: sleeps its part of the step and gives recorded gradients of its
    parameters."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, block: "SleptBlock", *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        sleep(ctx.block.seconds)
        return grads[0], None, *ctx.block.recorded


class SleptBlock:
    def __init__(self, parameters: list[torch.nn.Parameter], seconds: float) -> None:
        self.parameters, self.seconds = parameters, seconds
        self.recorded: list[torch.Tensor] = []


class SleptGPT(torch.nn.Module):
    """A GPT whose backward takes so many seconds and gives the gradients of its first step."""

    def __init__(self, net: GPT, load: training.Load, seconds: float) -> None:
        super().__init__()
        self.net = net
        units = [net.tokens, net.positions, *net.blocks, torch.nn.ModuleList([net.norm, net.head])]
        numel = sum(p.numel() for p in net.parameters())
        self.blocks = []
        for unit in units:
            parameters = list(unit.parameters())
            self.blocks.append(
                SleptBlock(parameters, seconds * sum(p.numel() for p in parameters) / numel)
            )
        # all ranks alike
        net(
            *batch(standard_library(), load.batch, load.length, torch.Generator().manual_seed(0))
        ).backward()
        for block in self.blocks:
            block.recorded = [p.grad for p in block.parameters if p.grad is not None]
        net.zero_grad()
        self.start = torch.ones((), requires_grad=True)

    def forward(self, *windows: torch.Tensor) -> torch.Tensor:
        x = self.start
        for block in self.blocks:
            x = RecordedBlock.apply(x, block, *block.parameters)
        return x


# ---------------------------------------------------------------- ways


@dataclass(frozen=True)
class OneUpdate:
    """Variance schedule of a run whose updates have become rare: one, in the first step."""

    def count(self, step: int) -> int:
        return min(step, 1)


class Training:
    """One way to train: ``step`` takes one, ``period`` says how many belong together, ``warm`` how
    many come first."""

    def __init__(self, variant: str, options: argparse.Namespace, load: training.Load) -> None:
        net: torch.nn.Module = load.model()
        seconds = seconds_of(options.device)
        if seconds:
            net = SleptGPT(net, load, seconds)  # type: ignore[arg-type]
        self.net, self.load, self.period, self.warm = net, load, 1, 1
        self.parameters = sum(p.numel() for p in net.parameters())
        self.end: Callable[[], None] = lambda: None
        name, _, rest = variant.partition(":")
        if name == "compute":
            self.optimizer: torch.optim.Optimizer = self._adamw()
        elif name == "local":
            self._local(
                rest.removesuffix(":overlap"), options, overlapped=rest.endswith(":overlap")
            )
        else:
            self.net = ddp = DistributedDataParallel(
                net, gradient_as_bucket_view=True, init_sync=False
            )
            if name == "zero-one":
                self.optimizer = commpress.ZeroOneAdam(
                    net.parameters(),
                    lr=1e-4,
                    sync=Every(SYNCHRONISED),
                    variance_updates=OneUpdate(),
                )
                commpress.overlap(ddp, self.optimizer)
                self.period = SYNCHRONISED
            else:
                self.optimizer = self._adamw()
                if name != "plain":
                    commpress.compress(ddp, name).measure_every = 0
        self.corpus, self.draws = standard_library(), torch.Generator().manual_seed(dist.get_rank())

    def _adamw(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True)

    def _local(self, codec: str, options: argparse.Namespace, *, overlapped: bool) -> None:
        steps = options.every - 1 if options.overlap is None else options.overlap
        more: dict[str, Any] = {"overlap": (steps, 0.5)} if overlapped else {}
        if "topk" in codec and "bits" in codec:
            more["outer"] = commpress.SparseLoCo()
        local = commpress.LocalUpdates(
            self._adamw(), every=options.every, codec=codec_of(codec), **more
        )
        self.optimizer, self.end, self.period, self.warm = (
            local,
            local.close,
            options.every,
            options.every,
        )

    def step(self) -> None:
        windows = batch(self.corpus, self.load.batch, self.load.length, self.draws)
        self.net(*windows).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def timed(self, steps: int) -> tuple[float, tuple[int, int]]:
        """Seconds of all these steps on the slowest rank, and what left the interface and came in;
        collective."""
        dist.barrier()
        start, before = perf_counter(), interface_bytes()
        for _ in range(steps):
            self.step()
        took = torch.tensor([perf_counter() - start], dtype=torch.float64)
        dist.barrier()
        out, came = (after - b for after, b in zip(interface_bytes(), before, strict=True))
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took), (out, came)


def interface_bytes() -> tuple[int, int]:
    """(sent, received) by all interfaces of this network namespace but loopback."""
    sent = received = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        if name.strip() != "lo":
            columns = figures.split()
            received, sent = received + int(columns[0]), sent + int(columns[8])
    return sent, received


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[Row]:
    load = training.load_of(options)
    rows = [[Row(**row) for row in kept.read(options.json, "rows")] if rank == 0 else []]
    dist.broadcast_object_list(rows)
    found: list[Row] = rows[0]
    yield from found
    alone = Training("compute", options, load)
    alone.timed(1)
    for variant in options.ways.split(","):
        place = (options.device, variant, options.link, options.every, size)
        if any((r.device, r.variant, r.link, r.every, r.ranks) == place for r in found):
            continue
        found.append(_measured(variant, size, options, load, alone))
        yield found[-1]
        if rank == 0:
            kept.write(options.json, {"rows": [asdict(row) for row in found]})


def _measured(
    variant: str, size: int, options: argparse.Namespace, load: training.Load, alone: Training
) -> Row:
    one, before = Training(variant, options, load), alone.timed(ALONE)[0]
    took, crossed = one.timed(one.warm)
    steps, each = one.warm, took / one.warm
    # a step that takes longer is a measurement already
    if one.period > 1 or took < options.seconds:
        if one.period == 1:
            each, _ = one.timed(1)
        steps = min(max(ceil(options.seconds / each / one.period), 1), 60) * one.period
        took, crossed = one.timed(steps)
    one.end()
    compute = (before + alone.timed(ALONE)[0]) / (2 * ALONE)
    counted = torch.tensor([*crossed, 1.0], dtype=torch.float64)
    dist.all_reduce(counted)
    out, came, _ = (counted / size * options.every / steps).tolist()
    name, _, rest = variant.partition(":")
    bits = ALLOWED.get(rest.removesuffix(":overlap")) if name == "local" else None
    factor = size - 1 if rest.startswith("topk") else 2 * (size - 1) / size
    return Row(
        options.device,
        variant,
        options.link,
        options.every,
        one.parameters,
        size,
        took / steps,
        compute,
        steps,
        out or None,
        came or None,
        None if bits is None else factor * bits * one.parameters / 8,
    )


# ---------------------------------------------------------------- on paper


def _speed(row: Row) -> float:
    """Relative to computing alone at about the same time: the machine may be busier at one time
    than at another."""
    return row.alone_seconds / row.step_seconds


def _allowed(row: Row) -> float | None:
    """Bytes sent, of those that are allowed."""
    if row.sent_bytes is None or row.allowed_bytes is None:
        return None
    return row.sent_bytes / row.allowed_bytes


def cells(row: Row) -> dict[str, str]:
    counted = {"MB out, round": row.sent_bytes, "MB in, round": row.received_bytes}
    share = _allowed(row)
    return {
        "device": row.device,
        "variant": row.variant,
        "link": row.link,
        "ms": f"{1e3 * row.step_seconds:.1f}",
        "of compute": f"{_speed(row):.3f}",
        **{name: "-" if b is None else f"{b / 1e6:.3f}" for name, b in counted.items()},
        "of what is allowed": "-" if share is None else f"{share:.3f}",
    }


def bits_per_second(link: str) -> float:
    match = re.fullmatch(r"([\d.]+)([kmg])bit", link)
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else float("inf")


def judge(rows: list[Row]) -> list[tuple[str, bool]]:
    bars: list[tuple[str, bool]] = []
    if not any(row.variant.endswith(":overlap") for row in rows):
        raise InvalidArgument(
            "--check judges ways that overlap: name one in --ways, such as local:bits2/1024:overlap"
        )
    for row in rows:
        speed = _speed(row)
        if row.variant.endswith(":overlap"):
            slow = bits_per_second(row.link) < 50e6 and "topk" not in row.variant
            bar = 0.95 if row.device == "cpu" else 0.45 if slow else 0.9
            bars.append(
                (
                    (
                        f"{row.device} {row.link} {row.variant}: {speed:.3f} of computing alone "
                        f"(bar {bar})"
                    ),
                    speed >= bar,
                )
            )
        if (share := _allowed(row)) is not None:
            bars.append(
                (
                    f"{row.device} {row.link} {row.variant}: {share:.3f} of the bytes allowed",
                    share <= 1,
                )
            )
        if row.variant.startswith("local:bits2") and row.sent_bytes is not None:
            fewer = 8 * (row.ranks - 1) / row.ranks * row.parameters * row.every / row.sent_bytes
            bars.append(
                (
                    (
                        f"{row.device} {row.link} {row.variant}: {fewer:.0f} times fewer bytes "
                        "than float32"
                    ),
                    fewer >= 400,
                )
            )
    return bars
