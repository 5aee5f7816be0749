"""a pipeline of two stages on two hosts: the time of an edge, a step and the loss, exact and in
four bits, by rate of the link

Makes two hosts on this machine (needs root or namespaces of users), and for every rate runs both
stages of a GPT under torch's Schedule1F1B with each codec for activations and gradients. One line
per rate and codec:
  edge ms     from an activation of a micro-batch here to the same there: encoding, the link,
              decoding, an answer of 8 bytes
  x exact     how many times longer float32 takes
  step ms     of the pipeline; medians of the slower rank's
  of fast     that step against the same codec's on an unshaped link
  MB          that both stages sent in a step, and how many times less than torch
Then the loss of each codec over three seeds after the same tokens, less torch's of the same seed.

  python benchmarks pipeline --check
  python benchmarks pipeline --rates 50mbit,10gbit --width 256 --loss-steps 0
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import commpress
from commpress.cli import gpt, harness, ranks, terminal
from commpress.cli.hosts import Hosts
from commpress.cli.option_groups import option
from commpress.integrations.pipeline import decode_into, edge_codec, encoded
from commpress.units import parse_rate
from shared_options import add_output, add_ranks

CODECS = ("none", "bf16", "int4", "tah4")
FAST = "unshaped"
PORT = 29517
SEEDS = 3


@dataclass
class EdgeTimes:
    link: str
    codec: str
    edge_seconds: float
    step_seconds: float
    sent_bytes: float
    ratio: float
    gain: float = 1.0  # of the edge, against exact on the same link
    of_fast: float = 1.0


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--rates A,B", None, "100mbit,1gbit", "of the link")
    option(parser, "--width D", int, 512, "of the model")
    option(parser, "--rows N", int, 4, "of a micro-batch, 128 bytes each")
    option(parser, "--rounds N", int, 3, "steps timed")
    option(parser, "--loss-steps N", int, 60, "of each loss; 0: none")
    parser.add_argument("--on", help=argparse.SUPPRESS)  # a rank, on one link
    add_ranks(parser, ranks=2)
    add_output(
        parser,
        check=(
            "at 100mbit int4's edge is 5 times shorter than exact, its steps at most 1.1 of "
            "unshaped"
        ),
    )


def run(options: argparse.Namespace) -> int:
    if options.on is not None:
        found = ranks.on_ranks(bench, options, print)
        if found is not None:
            terminal.write_json(options.on, found)
        return 0
    links = [FAST, *options.rates.split(",")]
    rows: list[EdgeTimes] = []
    losses: dict[str, list[float]] = {}
    with Hosts(2) as hosts:
        for link in links:
            for host in range(2):
                hosts.shape(host, None if link == FAST else parse_rate(link))
            steps = options.loss_steps if link == FAST else 0
            measured, found = _on_hosts(hosts, options, steps)
            rows += [EdgeTimes(link, **row) for row in measured]
            losses |= found
    for row in rows:
        exact = next(r for r in rows if (r.link, r.codec) == (row.link, "none"))
        fast = next(r for r in rows if (r.link, r.codec) == (FAST, row.codec))
        row.gain, row.of_fast = (
            exact.edge_seconds / row.edge_seconds,
            row.step_seconds / fast.step_seconds,
        )
    print(terminal.table(list(map(cells, rows))))
    for codec, each in losses.items():
        apart = [a - b for a, b in zip(each, losses["none"], strict=True)]
        said = ", ".join(f"{loss:.3f}" for loss in each)
        print(f"loss {codec}: {said}; less exact {min(apart):+.3f} to {max(apart):+.3f}")
    return harness.deliver(options, rows, judge=judge, losses=losses)


def _on_hosts(
    hosts: Hosts, options: argparse.Namespace, loss_steps: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of one link, and losses, from a process on each host."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "rows.json")
        command = [
            sys.executable,
            str(Path(__file__).parent),
            "pipeline",
            "--on",
            str(result),
            "--width",
            str(options.width),
            "--rows",
            str(options.rows),
            "--rounds",
            str(options.rounds),
            "--loss-steps",
            str(loss_steps),
            "--threads",
            str(options.threads),
        ]
        started = []
        for rank in range(2):
            there = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": hosts.addresses[0],
                "MASTER_PORT": str(PORT),
                "OMP_WAIT_POLICY": "passive",
            }
            started.append(hosts.start(rank, command, {**os.environ, **there}))
        for process in started:
            if process.wait():
                sys.exit(f"a stage ended with exit code {process.returncode}")
        found = json.loads(result.read_text())
    return found["rows"], found["losses"]


# ---------------------------------------------------------------- on every rank


class Half(nn.Module):
    """Layers of one stage of a GPT."""

    def __init__(self, rank: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        whole = gpt.GPT(width=width, layers=2 * layers, heads=8, length=length)
        self.blocks = whole.blocks[rank * layers : (rank + 1) * layers]
        if rank == 0:
            self.tokens, self.positions = whole.tokens, whole.positions
        else:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def error_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainee:
    """One stage of a pipeline with its edges in a codec."""

    def __init__(
        self, rank: int, codec: str, width: int, layers: int, length: int, rows: int, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.rank, self.length, self.rows = rank, length, rows
        self.half = Half(rank, width, layers, length)
        self.schedule = Schedule1F1B(
            PipelineStage(self.half, rank, 2, torch.device("cpu")), 4, loss_fn=error_of
        )
        self.edges = commpress.compress_pipeline(self.schedule, codec)
        self.optimizer = torch.optim.Adam(self.half.parameters(), 1e-3)
        self.generator = torch.Generator().manual_seed(seed)

    def step(self) -> float:
        """Its loss on the last rank."""
        x, y = gpt.batch(gpt.standard_library(1.0), 4 * self.rows, self.length, self.generator)
        found: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=y, losses=found)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(float(loss.detach()) for loss in found) / 4


def bench(
    rank: int, size: int, options: argparse.Namespace, report: ranks.Report
) -> dict[str, Any]:
    trainees = {
        codec: Trainee(rank, codec, options.width, 2, 128, options.rows) for codec in CODECS
    }
    for one in trainees.values():
        one.step()
    edges = harness.medians(
        {codec: partial(_edge, rank, codec, options) for codec in CODECS}, 5, warm=1
    )
    calls = {codec: partial(harness.together, one.step) for codec, one in trainees.items()}
    steps = harness.medians(calls, options.rounds)
    rows = []
    for codec in CODECS:
        totals = torch.tensor(
            [trainees[codec].edges.counters.sent_bytes, trainees[codec].edges.counters.exact_bytes]
        )
        dist.all_reduce(totals)
        sent, exact = (totals / (options.rounds + 1)).tolist()
        rows.append(
            {
                "codec": codec,
                "edge_seconds": edges[codec],
                "step_seconds": steps[codec],
                "sent_bytes": sent,
                "ratio": exact / sent,
            }
        )
    losses = {}
    if options.loss_steps:
        for codec in CODECS:
            losses[codec] = [_loss(rank, codec, seed, options.loss_steps) for seed in range(SEEDS)]
    return {"rows": rows, "losses": losses}


def _edge(rank: int, codec: str, options: argparse.Namespace) -> float:
    """Seconds until the other stage has an activation and says so; of the sender."""
    x, answer, how = (
        torch.randn(options.rows, 128, options.width),
        torch.zeros(1, dtype=torch.float64),
        edge_codec(codec),
    )
    dist.barrier()
    start = perf_counter()
    if rank == 0:
        dist.send(x if how is None else encoded(x, how), 1)
        dist.recv(answer, 1)
        return perf_counter() - start
    message = (
        x if how is None else torch.empty(how.size(x.numel(), options.width), dtype=torch.uint8)
    )
    dist.recv(message, 0)
    if how is not None:
        decode_into(x, message, how)
    dist.send(answer, 0)
    return 0.0


def _loss(rank: int, codec: str, seed: int, steps: int) -> float:
    """The mean of the last tenth."""
    one = Trainee(rank, codec, 128, 2, 64, 4, seed)
    found = torch.tensor([one.step() for _ in range(steps)])[-max(steps // 10, 1) :].mean()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


# ---------------------------------------------------------------- on paper


def cells(row: EdgeTimes) -> dict[str, str]:
    return {
        "link": row.link,
        "codec": row.codec,
        "edge ms": f"{1e3 * row.edge_seconds:.1f}",
        "x exact": f"{row.gain:.1f}",
        "step ms": f"{1e3 * row.step_seconds:.0f}",
        "of fast": f"{row.of_fast:.2f}",
        "MB": f"{row.sent_bytes / 1e6:.2f}",
        "x fewer": f"{row.ratio:.1f}",
    }


def judge(rows: list[EdgeTimes]) -> list[tuple[str, bool]]:
    bars = []
    for row in rows:
        if row.codec != "int4" or row.link == FAST:
            continue
        if parse_rate(row.link) <= 1e8:
            said = f"{row.link}: the edge is {row.gain:.1f} times shorter in int4 (at least 5)"
            bars.append((said, row.gain >= 5))
        said = f"{row.link}: the step takes {row.of_fast:.2f} of unshaped (at most 1.1)"
        bars.append((said, row.of_fast <= 1.1))
    return bars
