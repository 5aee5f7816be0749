"""speed of the exact code of weights on one thread: compare, encode, decode

A block of 2²⁰ numbers in bfloat16, of which some moved by one or two units in the last place; GB of
the block per second, median of --times. The last row is all numbers by themselves, with their
exponents coded.
  compare  old with new, into gaps and differences
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

SHARES = (0.003, 0.01, 0.03, 0.1, 0.3)
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
    old = (floats.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return [_line(share, old, rng, times) for share in (*SHARES, None)]


def _line(share: float | None, old: np.ndarray, rng: np.random.Generator, times: int) -> Line:
    new, compare = old.copy(), None
    if share is not None:
        at = np.flatnonzero(rng.random(law.BLOCK) < share)
        moves = rng.choice([1, -1, 2, -2], len(at), p=[0.44, 0.44, 0.06, 0.06])
        new[at] += moves.astype(np.uint16)
        table, masks = np.empty((6, law.KEYS), np.int64), np.empty((5, law.GROUPS), np.int64)
        compare = _rate(partial(exact.loops.scan, old, new, table, masks), old, times)
    before, after = (old, new) if share is not None else (None, None)
    code, back = (exact.encode(*pair, law.BFLOAT16) for pair in ((before, new), (after, old)))
    encode = _rate(partial(exact.encode, before, new, law.BFLOAT16), old, times)
    target = old.copy()

    def to_and_fro() -> None:
        exact.decode(code, target, law.BFLOAT16)
        exact.decode(back, target, law.BFLOAT16)

    decode = 2 * _rate(to_and_fro, old, times)
    return Line(share, 8 * len(code) / law.BLOCK, compare, encode, decode)


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
