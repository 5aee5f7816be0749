"""an optimizer's arithmetic on one rank, against torch.optim.AdamW(fused=True), without any communication

Steps of all variants alternate, so that the machine's moods hit all alike, in an order drawn for each turn, so that it makes no
difference which comes after which; medians. "arithmetic" is what one step of an optimizer computes apart from encoding,
sending and decoding:
  exact        a step with mean gradients
  compressed   blending gradient and momentum before the round, the parameters after it
  local        a step of 0/1 Adam that sends nothing
against torch's fused AdamW for the same parameters. What a rank of two computes to encode its message, to average the row that
it owns and to decode the answer is communication, not arithmetic; it has a row of its own, which comes on top of every
step that is "compressed" or "synchronising". Where one pass decodes and moves parameters, what decoding alone takes in the same
turn is taken off. "B/parameter" is what the passes of a step move to and from memory if a layer
fits into a cache and no more, lines fetched only to be overwritten included; "at copy speed" is how long that takes at
the speed of copying a buffer, which moves 12 bytes per float.

  commpress bench optimizer
  commpress bench optimizer --width 512 --layers 8 --threads 2 --check
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from commpress.cli import outputs, table
from commpress.cli.gpt import GPT
from commpress.collectives.allreduce import Outcome
from commpress.collectives.frame import HEADER
from commpress.collectives.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.kernels import arithmetic as arithmetic_of
from commpress.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from commpress.optim.channel import Channel
from commpress.optim.optimizer import CompressedOptimizer, Round
from commpress.schedules import DoublingIntervals

BAR = 1.15
HEAD = ["step", "ms", "against AdamW(fused)", "B/parameter", "at copy speed, ms"]
CODEC, COPY = "codec of one rank of two", "copy of a buffer"
MOVES = {
    "AdamW(fused=True)": 28, "1-bit Adam, exact": 28, "1-bit Adam, compressed": 16, "0/1 Adam, synchronising": 24,
    "0/1 Adam, local": 32, "0/1 Adam, local, first of a window": 28, "1-bit LAMB, exact": 28, "1-bit LAMB, compressed": 24,
    "1-bit LAMB, frozen rates": 28, CODEC: 20, COPY: 12,
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: float
    parameters: int


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=384, metavar="N", help="of the model (default 384)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="of the model (default 6)")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="of each variant (default 30)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default 1")
    outputs.options(parser, check=f"all steps take at most {BAR} of AdamW's")


def run(options: argparse.Namespace) -> int:
    if min(options.width, options.layers, options.steps, options.threads) < 1:
        raise InvalidArgument("--width, --layers, --steps and --threads must be at least 1")
    torch.set_num_threads(options.threads)
    measured = measure(options.width, options.layers, options.steps)
    base = measured[0].seconds
    per_byte = measured[-1].seconds / MOVES[COPY]
    rows = [
        [
            m.name, f"{1e3 * m.seconds:.2f}", f"{m.seconds / base:.2f}x", str(MOVES[m.name]),
            f"{1e3 * MOVES[m.name] * per_byte:.2f}",
        ]
        for m in measured
    ]  # fmt: skip
    print(f"{measured[0].parameters / 1e6:.1f} M parameters, {options.threads} thread(s)")
    print(table.render(HEAD, rows))
    return outputs.deliver(options, measured, judge=lambda: judge(measured), draw=lambda path: draw(path, measured))


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    base = measured[0].seconds
    return [
        (f"{m.name}: {m.seconds / base:.2f} of AdamW, at most {BAR}", m.seconds <= BAR * base)
        for m in measured[1:]
        if m.name not in (CODEC, COPY)
    ]


def draw(path: str, measured: list[Measured]) -> None:
    from commpress.cli import charts

    title = f"An optimizer's arithmetic, {measured[0].parameters / 1e6:.1f} M parameters, nothing sent"
    with charts.chart(path, title, size=(8, 4)) as (panel,):
        charts.bars(panel, [m.name for m in measured], {"": [1e3 * m.seconds for m in measured]}, "one step, ms")


def measure(width: int, layers: int, steps: int) -> list[Measured]:
    variants = {
        "AdamW(fused=True)": adamw(width, layers),
        "1-bit Adam, exact": arithmetic(OneBitAdam, width, layers, Round.EXACT),
        "1-bit Adam, compressed": arithmetic(OneBitAdam, width, layers, Round.COMPRESSED),
        "0/1 Adam, synchronising": arithmetic(ZeroOneAdam, width, layers, Round.COMPRESSED),
        "0/1 Adam, local": arithmetic(ZeroOneAdam, width, layers, Round.LOCAL),
        "0/1 Adam, local, first of a window": arithmetic(ZeroOneAdam, width, layers, Round.LOCAL, begins=True),
        "1-bit LAMB, exact": arithmetic(OneBitLamb, width, layers, Round.EXACT),
        "1-bit LAMB, compressed": arithmetic(OneBitLamb, width, layers, Round.COMPRESSED),
        "1-bit LAMB, frozen rates": arithmetic(OneBitLamb, width, layers, Round.COMPRESSED, rates="frozen"),
        CODEC: codec(width, layers),
        COPY: copying(width, layers),
    }
    took: dict[str, list[float]] = {name: [] for name in variants}
    draws, order = random.Random(0), list(variants.items())
    for turn in range(steps + 2):
        draws.shuffle(order)
        for name, step in order:
            start = perf_counter()
            seconds = step()
            if turn >= 2:
                took[name].append(seconds if isinstance(seconds, float) else perf_counter() - start)
    numel = sum(p.numel() for p in model(width, layers).parameters())
    return [Measured(name, sorted(times)[len(times) // 2], numel) for name, times in took.items()]


def model(width: int, layers: int) -> GPT:
    torch.manual_seed(0)
    net = GPT(width=width, layers=layers)
    for p in net.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    return net


def adamw(width: int, layers: int) -> Callable[[], object]:
    return torch.optim.AdamW(model(width, layers).parameters(), lr=1e-4, weight_decay=0.01, fused=True).step


def copying(width: int, layers: int) -> Callable[[], object]:
    numel = sum(p.numel() for p in model(width, layers).parameters())
    into, source = torch.zeros(numel), torch.ones(numel)
    return lambda: into.copy_(source)


def codec(width: int, layers: int) -> Callable[[], float]:
    """Seconds in kernels of rank 0 for a compressed all-reduce of what an optimizer sends."""
    optimizers = [ZeroOneAdam(model(width, layers).parameters(), transport=t) for t in Loopback(2).transports()]
    first = optimizers[0]
    for o in optimizers:
        o.work.normal_()

    @torch.no_grad()
    def step() -> float:
        before = first.workspace.encode_seconds + first.workspace.decode_seconds
        every = range(len(first._flat.parameters))
        for o, outcomes in zip(
            optimizers, simulate([o.reduce(Round.COMPRESSED, every, workspace=o.workspace) for o in optimizers]), strict=True
        ):
            o.quantized.settle(outcomes, finite=True)
        return first.workspace.encode_seconds + first.workspace.decode_seconds - before

    return step


def arithmetic(
    cls: Callable[..., CompressedOptimizer], width: int, layers: int, kind: Round, *, begins: bool = False, **options: object
) -> Callable[[], object]:
    """The part of one step of rank 0 of two that touches no codec and no wire."""
    more: dict[str, object] = options | {"warmup_steps": 1 << 30}
    if cls is ZeroOneAdam:
        more = {"sync": DoublingIntervals(1, 1 << 30)}
    optimizer = cls(
        model(width, layers).parameters(), lr=1e-4, weight_decay=0.01, transport=Loopback(2).transport(0), **more
    )
    optimizer.exact([p.grad for p in optimizer._flat.parameters if p.grad is not None])
    optimizer.steps_done = 1
    if isinstance(optimizer, OneBitAdam) and kind is Round.COMPRESSED:
        optimizer.frozen_at = 1
        optimizer.thaw_or_freeze()
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.windows.updated(0)
        optimizer.local(1.0)

    outcomes = answers(optimizer) if kind is Round.COMPRESSED or begins else []
    if begins:
        optimizer.apply(Round.COMPRESSED, arrived(outcomes))

    @torch.no_grad()
    def step() -> float | None:
        if kind is Round.LOCAL:
            if begins and isinstance(optimizer, ZeroOneAdam):  # a synchronisation left what momentum is to be computed from
                optimizer.windows.held, optimizer.shares = 0, [1.0]
                optimizer.kept.keep(arrived(outcomes), optimizer.momentum)
                start = perf_counter()
            optimizer.local(1.0)
            if begins:
                return perf_counter() - start
        elif kind is Round.EXACT:
            optimizer.exact([p.grad for p in optimizer._flat.parameters if p.grad is not None])
        else:
            start = perf_counter()
            for group, at in optimizer.groups():
                optimizer.begin(kind, group, at, 1.0)
            optimizer.apply(kind, arrived(outcomes))
            seconds = perf_counter() - start
            if isinstance(optimizer, ZeroOneAdam):  # a local step came before
                optimizer.windows.held, optimizer.shares = 0, None
                optimizer.kept.over()
                optimizer.windows.hold([(1e-4, 1.0)], 2)
            return seconds - decoding(optimizer.work, outcomes)
        return None

    return step


def answers(optimizer: CompressedOptimizer) -> list[tuple[Outcome, torch.Tensor]]:
    """What a compressed round brings to an optimizer that decodes while it moves parameters, and the rows of each message."""
    if not optimizer.lands:
        return []
    work, every = optimizer.work.clone().normal_(), range(len(optimizer._flat.parameters))
    channel = Channel(optimizer._flat, optimizer.quantized.policy, Loopback(1).transport(0), feedback=False)
    round_ = channel.reduce(work, every, workspace=optimizer.workspace, sequence=0, key=0, undecoded=True)
    return [(outcome, outcome.rows) for outcome in simulate([round_])[0] if outcome.rows is not None]


def arrived(outcomes: list[tuple[Outcome, torch.Tensor]]) -> list[Outcome]:
    for outcome, rows in outcomes:
        outcome.rows = rows
    return [outcome for outcome, _ in outcomes]


def decoding(into: torch.Tensor, outcomes: list[tuple[Outcome, torch.Tensor]]) -> float:
    """Seconds for decoding alone."""
    start = perf_counter()
    for outcome, rows in outcomes:
        arithmetic_of(into.device).decode(rows[:, HEADER:], into, outcome.message.pieces)
    return perf_counter() - start
