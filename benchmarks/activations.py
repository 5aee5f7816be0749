"""saved tensors of a long sequence in a store: memory, seconds and bits of whole training steps

Each variant is a process of its own that trains the same GPT by AdamW on the same text; their steps
alternate, medians after a first step that does not count. "resident" is the most memory that the
process had (VmHWM), all of it: torch, parameters, gradients, moments, and the store's host memory.
  in memory  without a tier
  disk       a store with --host of memory, under --folder: the rest is on its disk
  exact      the same with codec="exact": exponents in fewer bits, every bit as it was
  int8       the same with codec="int8", which changes what the backward computes with
  RAM        a store that has room for everything in memory, so each saved tensor is copied out and
             back; on a machine without a GPU "host" would leave tensors where they are
Codecs run if named by --codecs. "bits" compares losses and parameters after the last step with
those of the first variant.

  python benchmarks activations
  python benchmarks activations --length 8192 --check
  python benchmarks activations --codecs exact int8
"""

import argparse
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

import commpress
from commpress.checksum import checksum_of
from commpress.cli import harness, terminal
from commpress.cli.gpt import GPT, standard_library
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from commpress.units import show_bytes
from shared_options import add_output
from turns import Steps, in_turns, resident

MEMORY, SLOWER = 0.55, 1.1
VARIANTS = ("in memory", "disk", "RAM")
CODECS = ("exact", "int8")


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: float
    resident: int
    saved: int  # bytes a step
    waited: float  # seconds a step
    bits: str
    parameters: int


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--width N", int, 768, "of the model")
    option(parser, "--layers N", int, 12, "of the model")
    option(parser, "--length N", int, 5120, "tokens of the one sequence")
    option(parser, "--steps N", int, 2, "of each variant")
    option(parser, "--threads N", int, 2)
    option(parser, "--host SIZE", str, "128MiB", "memory of the store on disk, and the budget")
    option(parser, "--folder DIR", str, None, "on the disk (default: a temporary one)")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=[], help="also in these")
    add_output(
        parser,
        check=f"resident memory is at most {MEMORY} with the disk, a step at most {SLOWER} with "
        "RAM, and bits are equal",
    )


def run(options: argparse.Namespace) -> int:
    if min(options.width, options.layers, options.length, options.steps, options.threads) < 1:
        raise InvalidArgument(
            "--width, --layers, --length, --steps and --threads must be at least 1"
        )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        variants = (*VARIANTS, *options.codecs)
        measured = in_turns(variants, train, options.steps + 1, options, folder)
    title = (
        f"GPT of {measured[0].parameters / 1e6:.0f} M parameters, one sequence of "
        f"{options.length} tokens, {options.threads} thread(s)"
    )

    def cells(m: Measured) -> dict[str, str]:
        return cells_of(m, measured[0])

    print(title, terminal.table(list(map(cells, measured))), sep="\n")
    return harness.deliver(options, measured, judge=judge)


def cells_of(m: Measured, base: Measured) -> dict[str, str]:
    return {
        "saved tensors": m.name,
        "resident, GiB": f"{m.resident / 2**30:.2f}",
        "share": f"{m.resident / base.resident:.2f}",
        "step, s": f"{m.seconds:.2f}",
        "against": f"{m.seconds / base.seconds:.3f}x",
        "to the tier": show_bytes(m.saved),
        "waited, s": f"{m.waited:.2f}",
        "bits": "equal" if m.bits == base.bits else "differ",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    by_name = {m.name: m for m in measured}
    base, disk, ram = (by_name[name] for name in VARIANTS)
    return [
        (
            f"resident {disk.resident / base.resident:.2f} with the disk, at most {MEMORY}",
            disk.resident <= MEMORY * base.resident,
        ),
        (
            f"a step {ram.seconds / base.seconds:.3f} with RAM, at most {SLOWER}",
            ram.seconds <= SLOWER * base.seconds,
        ),
        ("bits are equal", all(m.bits == base.bits for m in measured if m.name != "int8")),
    ]


def train(name: str, options: argparse.Namespace, folder: str) -> Steps:
    """One variant of ``in_turns``."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    net = GPT(
        width=options.width,
        layers=options.layers,
        heads=max(1, options.width // 64),
        length=options.length,
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    text = standard_library()[: options.length + 1].long()[None]
    tier: Any = nullcontext()
    if name != "in memory":
        # 17 rows a token and block are saved, and some at both ends
        whole = 4 * options.length * options.width * (18 * options.layers + 8)
        host = options.host if name != "RAM" else whole + (64 << 20)
        store = commpress.TieredStore.open(f"{folder}/{name}", host=host)
        codec = name if name in CODECS else None
        tier = commpress.activations(store, budget=options.host, codec=codec)
    took, losses = [], []
    while (yield):
        begin = perf_counter()
        with tier:
            loss = net(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(perf_counter() - begin)
        losses.append(loss.item())
        del loss
    values = torch.cat([p.detach().flatten() for p in net.parameters()])
    counters = getattr(tier, "counters", None)
    return Measured(
        name,
        median(took[1:]),
        resident(),
        counters.written // len(took) if counters else 0,
        counters.wait_seconds / len(took) if counters else 0.0,
        f"{losses} {checksum_of(values.numpy().data)}",
        values.numel(),
    )
