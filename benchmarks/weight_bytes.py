"""bytes of new versions of weights: differences as commpress.weights sends them, beside other codes

Trains a GPT (10.9 M parameters) on the source of Python's standard library for a while, then goes
on from there at rates of fine-tuning, weights in bfloat16 with masters in float32, and codes the
step from one version to the next:
  changed        share of the weights in which any bit differs
  bound          bits per weight of a code that knows, for each exponent of the earlier weights, the
                 shares of moves
  difference     commpress.weights: Golomb-Rice codes of gaps and moves by classes of exponents
  XOR + zstd     old ^ new, by zstd at level 1 (zlib at level 1 where no module of zstd is
                 installed)
  index + value  four bytes for a place, two for the new value
  gaps + zstd    gaps as 16 bits, new values, both by zstd
  dense          all weights with their exponents coded; bfloat16 itself has 16 bits
  fewer          times fewer bytes than bfloat16, and than XOR + zstd

  python benchmarks weight_bytes
  python benchmarks weight_bytes --check --json weight_bytes.json
"""

import argparse
import copy
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import numpy as np
import torch

from commpress.cli import harness
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.cli.option_groups import at_least, option
from commpress.kernels import exact_format as law
from commpress.kernels.cpu import exact
from shared_options import add_output

RATES, STEPS = (1e-6, 5e-6, 2e-5, 1e-4), (1, 4, 16)
LEAST = 1.8  # times fewer bytes than XOR at rates up to 5e-6
SETTLE = 10  # steps at a new rate before the first version: Adam's moments begin at zero


@dataclass
class Line:
    rate: float
    steps: int
    changed: float
    one_unit: float  # share of the changed that moved by one unit in the last place
    bound: float  # this and what follows: bits per weight
    difference: float
    xor: float
    index_value: float
    gaps: float
    dense: float


def cells(line: Line) -> dict[str, str]:
    name, _ = compressor()
    return {
        "rate": f"{line.rate:g}",
        "steps": str(line.steps),
        "changed": f"{100 * line.changed:.2f} %",
        "bound": f"{line.bound:.3f}",
        "difference": f"{line.difference:.3f}",
        f"XOR + {name}": f"{line.xor:.3f}",
        "index + value": f"{line.index_value:.3f}",
        f"gaps + {name}": f"{line.gaps:.3f}",
        "dense": f"{line.dense:.3f}",
        "fewer than bf16": f"{16 / line.difference:.1f}",
        f"than XOR + {name}": f"{line.xor / line.difference:.2f}",
    }


def compressor() -> tuple[str, Callable[[bytes], bytes]]:
    """A name, and a call at level 1."""
    for module in ("compression.zstd", "zstandard"):
        try:
            zstd = import_module(module)
        except ImportError:
            continue
        return "zstd", partial(zstd.compress, level=1)
    return "zlib", partial(zlib.compress, level=1)


def patterns(model: torch.nn.Module) -> np.ndarray:
    """All weights as bfloat16, one behind the other."""
    flat = torch.cat(
        [p.detach().bfloat16().view(torch.int16).flatten() for p in model.parameters()]
    )
    return flat.numpy().view(np.uint16)


def trained(steps: int, size: dict[str, int], tell: Callable[[str], None]) -> GPT:
    torch.manual_seed(0)
    model, text, draws = GPT(**size), standard_library(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                1e-3 * min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            )
        loss = _step(model, optimizer, text, draws)
        if step % 50 == 49:
            tell(f"step {step + 1} of {steps}: loss {loss:.3f}")
    return model


def _step(
    model: GPT, optimizer: torch.optim.Optimizer, text: torch.Tensor, draws: torch.Generator
) -> float:
    optimizer.zero_grad()
    loss = model(*batch(text, 8, model.positions.num_embeddings, draws))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def measure(
    steps: int, size: dict[str, int], tell: Callable[[str], None] = lambda _: None
) -> list[Line]:
    start, text, lines = trained(steps, size, tell), standard_library(), []
    for rate in RATES:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
        draws = torch.Generator().manual_seed(2)
        old = patterns(model)
        for step in range(1, SETTLE + max(STEPS) + 1):
            _step(model, optimizer, text, draws)
            if step == SETTLE:
                old = patterns(model)
            elif step - SETTLE in STEPS:
                lines.append(line(rate, step - SETTLE, old, patterns(model)))
                tell(" ".join(cells(lines[-1]).values()))
    return lines


def line(rate: float, steps: int, old: np.ndarray, new: np.ndarray) -> Line:
    _, compress = compressor()
    at = np.flatnonzero(old != new)
    gaps, moves, exponents = np.diff(at, prepend=-1) - 1, (new - old).view(np.int16), old >> 7 & 255
    blocks = [slice(i, i + law.BLOCK) for i in range(0, len(new), law.BLOCK)]

    def bits(nbytes: int) -> float:
        return 8 * nbytes / len(new)

    short = np.minimum(gaps, 65535).astype(np.uint16).tobytes()  # longer ones are rare: not counted
    share = len(at) / len(new)
    return Line(
        rate,
        steps,
        share,
        float((np.abs(moves[at]) == 1).mean()),
        sum(_bits(moves[exponents == each]) for each in np.unique(exponents)) / len(new),
        bits(sum(len(exact.encode(old[b], new[b], law.BFLOAT16)) for b in blocks)),
        bits(len(compress((old ^ new).tobytes()))),
        bits(6 * len(at)),
        bits(len(compress(short)) + len(compress(new[at].tobytes()))),
        bits(sum(len(exact.encode(None, new[b], law.BFLOAT16)) for b in blocks)),
    )


def _bits(values: np.ndarray) -> float:
    """Their entropy, of all of them together."""
    _, counts = np.unique(values, return_counts=True)
    return float((counts * np.log2(len(values) / counts)).sum())


def markdown(lines: list[Line]) -> str:
    table = list(map(cells, lines))
    rows = ["| " + " | ".join(table[0]) + " |", "|" + " --- |" * len(table[0])]
    return "\n".join(rows + ["| " + " | ".join(row.values()) + " |" for row in table])


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--steps N", at_least(1), 400, "of training before")
    option(parser, "--width N", at_least(1), 384, "of the model")
    option(parser, "--layers N", at_least(1), 6, "of the model")
    add_output(
        parser,
        check=(
            "differences take 1.8 times fewer bytes than XOR + zstd at 1e-6 and 5e-6, and never "
            "more than the best by 2 %"
        ),
    )


def run(options: argparse.Namespace) -> int:
    lines = measure(
        options.steps,
        {"width": options.width, "layers": options.layers},
        tell=lambda text: print(text, flush=True),
    )
    print(markdown(lines))
    return harness.deliver(options, lines, judge=judge, compressor=compressor()[0])


def judge(lines: list[Line]) -> list[tuple[str, bool]]:
    name, _ = compressor()
    bars = []
    for each in lines:
        where = f"at {each.rate:g}, {each.steps} steps"
        if each.rate <= 5e-6:
            found = each.xor / each.difference
            what = f"{found:.2f} times fewer bytes than XOR + {name} {where}"
            bars.append((f"{what}, at least {LEAST:g}", found >= LEAST))
        best = min(each.xor, each.index_value, each.gaps, each.dense, 16.0)
        bars.append(
            (
                f"{each.difference / best:.2f} of the best of the others {where}, at most 1.02",
                each.difference <= 1.02 * best,
            )
        )
    return bars
