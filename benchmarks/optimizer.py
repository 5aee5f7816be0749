"""an optimizer's arithmetic on one rank, against torch.optim.AdamW(fused=True), without any
communication

Steps of all variants alternate, so that the machine's moods hit all alike, in an order drawn each
round, so that it makes no difference which comes after which; medians. "arithmetic" is what one
step of an optimizer computes apart from encoding, sending and decoding:
  exact        a step with mean gradients
  compressed   adding gradient and momentum before the round, parameters and momentum after it
  local        a step of 0/1 Adam that sends nothing
against torch's fused AdamW for the same parameters. What a rank of two computes to encode its
message, to average the row that it owns and to decode the answer is communication, not arithmetic;
it has a row of its own, which comes on top of every step that is "compressed" or "synchronising".
"B/parameter" is what the passes of a step move to and from memory if a layer fits into a cache and
no more, lines fetched only to be overwritten included; "at copy speed" is how long that takes at
the speed of copying a buffer, which moves 12 bytes per float. With --tokens a step is a whole
training step of that many tokens, forward and backward with it.

  python benchmarks optimizer
  python benchmarks optimizer --width 512 --layers 8 --threads 2 --check
  python benchmarks optimizer --tokens 512 --steps 20 --threads 2 --check
"""

import argparse
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from commpress.cli import harness, terminal
from commpress.cli.gpt import GPT
from commpress.cli.option_groups import option
from commpress.collectives.allreduce import settle
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from commpress.optim.optimizer import RoundKind
from commpress.optim.replicated import ReplicatedOptimizer
from commpress.schedules import DoublingIntervals
from commpress.work import run as run_steps
from shared_options import add_output

BAR = 2.0
BAR_WHOLE = 1.03
LENGTH = 64  # tokens of a sequence
CODEC, COPY = "codec of one rank of two", "copy of a buffer"
MOVES = {
    "AdamW(fused=True)": 28,
    "1-bit Adam, exact": 28,
    "1-bit Adam, compressed": 40,
    "0/1 Adam, synchronising": 40,
    "0/1 Adam, local": 36,
    "0/1 Adam, local, first of a window": 32,
    "1-bit LAMB, exact": 28,
    "1-bit LAMB, compressed": 44,
    "1-bit LAMB, frozen rates": 48,
    CODEC: 20,
    COPY: 12,
}


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: float
    parameters: int


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--width N", int, 384, "of the model")
    option(parser, "--layers N", int, 6, "of the model")
    option(parser, "--steps N", int, 30, "of each variant")
    option(parser, "--threads N", int, 1)
    option(parser, "--tokens N", int, 0, "of whole training steps (default 0: the optimizer)")
    add_output(parser, check=f"all steps take at most {BAR} of AdamW's, {BAR_WHOLE} with --tokens")


def run(options: argparse.Namespace) -> int:
    if min(options.width, options.layers, options.steps, options.threads) < 1:
        raise InvalidArgument("--width, --layers, --steps and --threads must be at least 1")
    if options.tokens < 0 or options.tokens % LENGTH:
        raise InvalidArgument(
            f"--tokens is {options.tokens}, expected a multiple of {LENGTH}, or 0"
        )
    torch.set_num_threads(options.threads)
    if options.tokens:
        return run_whole(options)
    measured = measure(options.width, options.layers, options.steps)
    copied = measured[-1].seconds / MOVES[COPY]  # of a byte
    cells = partial(cells_of, base=measured[0].seconds, copied=copied)
    return show(options, measured, cells, "the optimizer", BAR)


def run_whole(options: argparse.Namespace) -> int:
    measured = measure_whole(options.width, options.layers, options.steps, options.tokens)
    cells = partial(cells_of, base=measured[0].seconds)
    return show(options, measured, cells, f"whole steps of {options.tokens} tokens", BAR_WHOLE)


def show(
    options: argparse.Namespace,
    measured: list[Measured],
    cells: Callable[[Measured], dict[str, str]],
    what: str,
    bar: float,
) -> int:
    parameters = f"{measured[0].parameters / 1e6:.1f} M parameters"
    title = f"{parameters}, {options.threads} thread(s), {what}, nothing sent"
    print(title, terminal.table(list(map(cells, measured))), sep="\n")
    return harness.deliver(options, measured, judge=partial(judge, bar=bar))


def cells_of(m: Measured, *, base: float, copied: float | None = None) -> dict[str, str]:
    found = {
        "step": m.name,
        "ms": f"{1e3 * m.seconds:.2f}",
        "against AdamW(fused)": f"{m.seconds / base:.3f}x",
    }
    if copied is not None:
        found["B/parameter"] = str(MOVES[m.name])
        found["at copy speed, ms"] = f"{1e3 * MOVES[m.name] * copied:.2f}"
    return found


def judge(measured: list[Measured], bar: float = BAR) -> list[tuple[str, bool]]:
    base = measured[0].seconds
    return [
        (f"{m.name}: {m.seconds / base:.3f} of AdamW, at most {bar}", m.seconds <= bar * base)
        for m in measured[1:]
        if m.name not in (CODEC, COPY)
    ]


def measure(width: int, layers: int, steps: int) -> list[Measured]:
    def new() -> GPT:
        return model(width, layers)

    variants = {
        "AdamW(fused=True)": adamw(new()),
        "1-bit Adam, exact": arithmetic(OneBitAdam, new(), RoundKind.EXACT),
        "1-bit Adam, compressed": arithmetic(OneBitAdam, new(), RoundKind.COMPRESSED),
        "0/1 Adam, synchronising": arithmetic(ZeroOneAdam, new(), RoundKind.COMPRESSED),
        "0/1 Adam, local": arithmetic(ZeroOneAdam, new(), RoundKind.LOCAL),
        "0/1 Adam, local, first of a window": arithmetic(
            ZeroOneAdam, new(), RoundKind.LOCAL, begins=True
        ),
        "1-bit LAMB, exact": arithmetic(OneBitLamb, new(), RoundKind.EXACT),
        "1-bit LAMB, compressed": arithmetic(OneBitLamb, new(), RoundKind.COMPRESSED),
        "1-bit LAMB, frozen rates": arithmetic(
            OneBitLamb, new(), RoundKind.COMPRESSED, rates="frozen"
        ),
        CODEC: codec(width, layers),
        COPY: copying(width, layers),
    }
    return interleaved(variants, steps, numel_of(new()))


def measure_whole(width: int, layers: int, steps: int, tokens: int) -> list[Measured]:
    def whole(make: Callable[[GPT], Callable[[], object]]) -> Callable[[], float]:
        net = model(width, layers)
        step, text = make(net), torch.randint(256, (tokens // LENGTH, LENGTH + 1))

        def run() -> float:
            start = perf_counter()
            net.zero_grad()
            net(text[:, :-1], text[:, 1:]).backward()
            before = perf_counter()
            alone = step()
            return before - start + (alone if isinstance(alone, float) else perf_counter() - before)

        return run

    variants = {
        "AdamW(fused=True)": whole(adamw),
        "1-bit Adam, one rank": whole(lambda net: alone(OneBitAdam, net)),
        "1-bit Adam, compressed": whole(
            lambda net: arithmetic(OneBitAdam, net, RoundKind.COMPRESSED)
        ),
        "0/1 Adam, synchronising": whole(
            lambda net: arithmetic(ZeroOneAdam, net, RoundKind.COMPRESSED)
        ),
        "0/1 Adam, local": whole(lambda net: arithmetic(ZeroOneAdam, net, RoundKind.LOCAL)),
        "1-bit LAMB, compressed": whole(
            lambda net: arithmetic(OneBitLamb, net, RoundKind.COMPRESSED)
        ),
    }
    return interleaved(variants, steps, numel_of(model(width, layers)))


def interleaved(
    variants: Mapping[str, Callable[[], object]], steps: int, numel: int
) -> list[Measured]:
    """Medians of so many rounds, in an order drawn for each, after two that do not count."""
    took: dict[str, list[float]] = {name: [] for name in variants}
    draws, order = random.Random(0), list(variants.items())
    for done in range(steps + 2):
        draws.shuffle(order)
        for name, step in order:
            start = perf_counter()
            seconds = step()
            if done >= 2:
                took[name].append(seconds if isinstance(seconds, float) else perf_counter() - start)
    return [Measured(name, sorted(times)[len(times) // 2], numel) for name, times in took.items()]


def numel_of(net: GPT) -> int:
    return sum(p.numel() for p in net.parameters())


def model(width: int, layers: int) -> GPT:
    torch.manual_seed(0)
    net = GPT(width=width, layers=layers, length=LENGTH)
    for p in net.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    return net


def adamw(net: GPT) -> Callable[[], object]:
    return torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.01, fused=True).step


def alone(cls: Callable[..., ReplicatedOptimizer], net: GPT) -> Callable[[], object]:
    """A whole ``step`` where there is one rank."""
    return cls(
        net.parameters(), lr=1e-4, weight_decay=0.01, transport=Loopback(1).transport(0)
    ).step


def copying(width: int, layers: int) -> Callable[[], object]:
    numel = numel_of(model(width, layers))
    into, source = torch.zeros(numel), torch.ones(numel)
    return lambda: into.copy_(source)


def codec(width: int, layers: int) -> Callable[[], float]:
    """Seconds in kernels of rank 0 for a compressed all-reduce of what an optimizer sends."""
    optimizers = [
        ZeroOneAdam(model(width, layers).parameters(), transport=t)
        for t in Loopback(2).transports()
    ]
    first = optimizers[0]
    for o in optimizers:
        o.work.normal_()

    @torch.no_grad()
    def step() -> float:
        before = first.channel.workspace.encode_seconds + first.channel.workspace.decode_seconds
        every = range(len(first._flat.parameters))
        for outcomes in simulate([o.reduce(RoundKind.COMPRESSED, every) for o in optimizers]):
            settle(outcomes, taken=True)
        return (
            first.channel.workspace.encode_seconds + first.channel.workspace.decode_seconds - before
        )

    return step


def arithmetic(
    cls: Callable[..., ReplicatedOptimizer],
    net: GPT,
    kind: RoundKind,
    *,
    begins: bool = False,
    **options: object,
) -> Callable[[], object]:
    """The part of one step of rank 0 of two that touches no codec and no wire."""
    more: dict[str, object] = options | {"exact_steps": 1, "spiky_codec": None, "min_numel": 0}
    if cls is ZeroOneAdam:
        more |= {"sync": DoublingIntervals(1, 1 << 30), "exact_steps": 0}
    optimizer = cls(
        net.parameters(), lr=1e-4, weight_decay=0.01, transport=Loopback(2).transport(0), **more
    )
    optimizer.exact([p.grad for p in optimizer._flat.parameters if p.grad is not None])
    optimizer.steps_done = 1
    if kind is not RoundKind.EXACT:
        run_steps(optimizer.after(RoundKind.EXACT))
    mean = optimizer.work.clone().normal_()
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.local(1.0)

    @torch.no_grad()
    def step() -> float | None:
        if kind is RoundKind.EXACT:
            optimizer.exact([p.grad for p in optimizer._flat.parameters if p.grad is not None])
            return None
        if isinstance(optimizer, ZeroOneAdam):
            optimizer.windows.held = 0 if begins or kind is RoundKind.COMPRESSED else 1
        if kind is RoundKind.LOCAL:
            optimizer.local(1.0)
            return None
        start = perf_counter()
        for group, at in optimizer.groups():
            optimizer.begin(kind, group, at, 1.0)
        seconds = perf_counter() - start
        optimizer.work.copy_(mean)
        start = perf_counter()
        optimizer.apply(kind)
        return seconds + perf_counter() - start

    return step
