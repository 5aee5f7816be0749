"""a step of experts in a tiered store, against the store alone with as many bytes

Trains one layer whose experts are in a store, a few of them in memory, under AdamW on one thread;
every expert has tokens. In turns with it, the store alone reads and writes as many bytes as the
step did, in tensors of the size of an expert's weights, eight under way: the floor.
  forward, backward, update    milliseconds, medians; step is all three
  read, written                GB of a step
  floor                        milliseconds, median of the store alone
  of floor                     step over floor, median of the rounds

  python benchmarks expert_tiers --check   exit status 1 if a step is longer than 1.3 floors
  python benchmarks expert_tiers --experts 16 --resident 4 --width 256
"""

import argparse
import tempfile
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

import commpress
from commpress.cli import harness, terminal
from commpress.cli.option_groups import option
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import InvalidArgument
from commpress.tiered_mem import Pending
from shared_options import add_output

MOST = 1.3
UNDER_WAY = 8  # reads, and as many writes
WARM = 2
PHASES = ("forward", "backward", "update")


@dataclass
class TierTimes:
    forward: float
    backward: float
    update: float
    read_bytes: int
    written_bytes: int
    floor: float

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.update


def options(parser: argparse.ArgumentParser) -> None:
    for name, value, says in (
        ("experts", 64, "of the layer"),
        ("resident", 8, "experts in memory"),
        ("width", 512, "of a token"),
        ("tokens", 8, "of an expert"),
        ("rounds", 7, "steps that count"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=value, metavar="N", help=f"{says} (default {value})"
        )
    option(
        parser, "--directory DIR", Path, None, "on the disk to use (default: the temporary folder)"
    )
    add_output(parser, check=f"a step takes at most {MOST} floors")


def run(options: argparse.Namespace) -> int:
    if (
        min(
            options.resident,
            options.width // 256,
            options.tokens,
            options.rounds,
            options.experts // 2,
        )
        < 1
    ):
        raise InvalidArgument(
            "expected --experts of at least 2, --width of at least 256, and all else at least 1"
        )
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="expert-tiers-", dir=options.directory) as folder:
        bench = Bench(Path(folder), options)
        for _ in range(WARM + options.rounds):
            rows.append(bench.round())
        bench.close()
    rows = rows[WARM:]
    print(terminal.table([cells(rows)]))
    return harness.deliver(options, rows, judge=judge)


def cells(rows: list[TierTimes]) -> dict[str, str]:
    def middle(name: str) -> str:
        return f"{median(1e3 * getattr(row, name) for row in rows):.0f}"

    return {
        **{f"{name} ms": middle(name) for name in (*PHASES, "step")},
        "read GB": f"{rows[-1].read_bytes / 1e9:.2f}",
        "written GB": f"{rows[-1].written_bytes / 1e9:.2f}",
        "floor ms": middle("floor"),
        "of floor": f"{ratio(rows):.2f}",
    }


def ratio(rows: list[TierTimes]) -> float:
    return median(row.step / row.floor for row in rows)


def judge(rows: list[TierTimes]) -> list[tuple[str, bool]]:
    return [(f"a step takes {ratio(rows):.2f} floors, at most {MOST}", ratio(rows) <= MOST)]


class Bench:
    """The layer with its optimizer, in a store; and a second store that only reads and writes."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        count, width = options.experts, options.width
        self.nbytes = 2 * width * 2 * width * 4  # of an expert's weights
        host = (options.resident * 4 * self.nbytes) + (1 << 20)
        self.store, self.bare = (
            commpress.TieredStore.open(folder / name, host=host) for name in ("experts", "bare")
        )
        exchange = commpress.ExpertExchange(count, process_group=Loopback(1).transport(0))
        made = (_expert(width) for _ in range(count))
        self.layer = commpress.moe.Experts(
            made, exchange, store=self.store, resident=options.resident
        )
        self.optimizer = commpress.moe.ExpertOptimizer(
            self.layer.parameters(), torch.optim.AdamW, lr=1e-3, fused=True
        )
        choices = torch.arange(2 * (count * options.tokens // 2)) % count
        self.chosen = choices.view(-1, 2)
        self.rows, self.gates = (
            torch.randn(len(self.chosen), width),
            torch.ones(len(self.chosen), 2),
        )
        self.stored = 0  # tensors of the second store

    def round(self) -> TierTimes:
        before, at = self.store.traffic(), [perf_counter()]
        loss = self.layer(self.rows, self.chosen, self.gates).square().mean()
        at.append(perf_counter())
        loss.backward()
        at.append(perf_counter())
        self.optimizer.step()
        at.append(perf_counter())
        read, written = (
            after - first for after, first in zip(self.store.traffic(), before, strict=True)
        )
        forward, backward, update = (b - a for a, b in pairwise(at))
        return TierTimes(forward, backward, update, read, written, self._floor(read, written))

    def _floor(self, read: int, written: int) -> float:
        """Seconds in which the store alone reads and writes so much, both at once."""
        reads = read // self.nbytes
        # what is written is read later, but for the first steps
        writes = min(written // self.nbytes, reads)
        for i in range(self.stored, reads):
            self.bare.put(str(i), torch.randn(self.nbytes // 4))
            self.bare.evict(str(i)).wait()
        self.stored = max(self.stored, reads)
        start, coming, leaving, due = (
            perf_counter(),
            deque[tuple[str, Pending[int]]](),
            deque[Pending[None]](),
            0,
        )
        for i in range(reads + UNDER_WAY):
            if i < reads:
                coming.append((str(i), self.bare.prefetch(str(i))))
            if i >= UNDER_WAY or i >= reads:
                if not coming:
                    break
                name, pending = coming.popleft()
                pending.wait()
                due += writes
                while due >= reads:
                    due -= reads
                    with self.bare.borrow(name):  # now newer than on disk
                        pass
                leaving.append(self.bare.evict(name))
                if len(leaving) > UNDER_WAY:
                    leaving.popleft().wait()
        for left in leaving:
            left.wait()
        return perf_counter() - start

    def close(self) -> None:
        self.store.close()
        self.bare.close()


def _expert(width: int) -> torch.nn.Module:
    up, down = (
        torch.nn.Linear(width, 2 * width, bias=False),
        torch.nn.Linear(2 * width, width, bias=False),
    )
    return torch.nn.Sequential(up, torch.nn.SiLU(), down)
