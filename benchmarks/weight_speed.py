"""speed of the exact code of weights on one thread: compare, encode, decode

A block of 2²⁰ weights in bfloat16, rounded from float32 before and after a step of 6e-8 to 2e-5; GB
of the block per second, median of --times. The last row is all numbers by themselves, with their
exponents coded.
  compare  old with new: which have changed, and how many units by key
  encode   compare, and write the code
  decode   read the code, and apply it to the block before
  bits     of the code, per number

  python benchmarks weight_speed --check
  python benchmarks weight_speed --times 20 --json speed.json
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from commpress.cli import harness, terminal
from commpress.cli.option_groups import at_least, option
from commpress.kernels import exact_format as law
from commpress.kernels.cpu import exact
from shared_options import add_output

RATES = (6e-8, 3e-7, 8e-7, 4e-6, 2e-5)
LEAST, BELOW = 4.0, 0.03  # GB/s of --check, at shares of at most so much


@dataclass
class Line:
    changed: float | None  # None for all numbers by themselves
    bits: float
    compare: float | None
    encode: float
    decode: float


def cells(line: Line) -> dict[str, str]:
    return {
        "changed": "exponents" if line.changed is None else f"{100 * line.changed:.1f} %",
        "bits": f"{line.bits:.3f}",
        "compare GB/s": "" if line.compare is None else f"{line.compare:.1f}",
        "encode GB/s": f"{line.encode:.1f}",
        "decode GB/s": f"{line.decode:.1f}",
    }


def measure(times: int) -> list[Line]:
    rng = np.random.default_rng(0)
    floats = (0.02 * rng.standard_normal(law.BLOCK)).astype(np.float32)
    return [_line(rate, floats, rng, times) for rate in (*RATES, None)]


def _line(rate: float | None, floats: np.ndarray, rng: np.random.Generator, times: int) -> Line:
    old, share, compare = _rounded(floats), None, None
    new = _rounded(floats + (rate or 0) * rng.standard_normal(law.BLOCK).astype(np.float32))
    if rate is not None:
        share = float((old != new).mean())
        compare = _rate(partial(exact.compare, old, new), old, times)
    before, after = (None, None) if rate is None else (old, new)
    code, back = (exact.encode(*pair, law.BFLOAT16) for pair in ((before, new), (after, old)))
    encode = _rate(partial(exact.encode, before, new, law.BFLOAT16), old, times)
    target = old.copy()

    def to_and_fro() -> None:
        exact.decode(code, target, law.BFLOAT16)
        exact.decode(back, target, law.BFLOAT16)

    decode = 2 * _rate(to_and_fro, old, times)
    return Line(share, 8 * len(code) / law.BLOCK, compare, encode, decode)


def _rounded(floats: np.ndarray) -> np.ndarray:
    """Round to bfloat16, seen as integers."""
    return (floats.view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


def _rate(call: Callable[[], object], block: np.ndarray, times: int) -> float:
    return block.nbytes / 1e9 / median(harness.seconds(call) for _ in range(times))


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--times N", at_least(1), 100, "of each call")
    add_output(
        parser, check=f"compare and decode reach {LEAST:g} GB/s at up to {100 * BELOW:g} % changed"
    )


def run(options: argparse.Namespace) -> int:
    lines = measure(options.times)
    print(terminal.table(list(map(cells, lines))))
    return harness.deliver(options, lines, judge=judge)


def judge(lines: list[Line]) -> list[tuple[str, bool]]:
    return [
        (f"{name} at {100 * each.changed:g} %: {rate:.1f} GB/s, at least {LEAST:g}", rate >= LEAST)
        for each in lines
        if each.changed is not None and each.compare is not None and each.changed <= BELOW
        for name, rate in (("compare", each.compare), ("decode", each.decode))
    ]
