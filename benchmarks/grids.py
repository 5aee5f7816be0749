"""six grids of eight processes on four shaped hosts: steps and memory as commpress plan --mesh
predicts them, and as they are

Makes four hosts on this machine (needs root or namespaces of users), two of them with a slower
link, two ranks on each, numbered across the hosts. Measures every pair of ranks as commpress probe
--pairs does, predicts a step on every grid with the order of ranks that the plan finds, then takes
steps on each: blocks whose computing is slept, with rings of tensor parallelism, torch's 1F1B, and
commpress.compress(model, mesh=..., dims=...) on the mesh that the plan prints. Nothing is fitted to
the steps. Starting eight processes for each grid takes most of the ten minutes.
  step ms      predicted, measured (the slowest rank's, median), and how far off
  MB           by which the rank with most grows at its peak, predicted and measured; without what a
               process loads once, and with tensors in pages of their own, so that the allocator
               keeps none that are free
  as numbered  a step on the same grid with ranks in their own order, predicted

  python benchmarks grids --check
  python benchmarks grids --rates 1gbit,200mbit --dims dp=int4,pp=int8
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import commpress
import machines
from commpress.cli import harness, probe, ranks, terminal
from commpress.cli.hosts import Hosts
from commpress.plan.costs import measure_costs
from commpress.plan.grid import dims_of
from commpress.plan.grids import Grid, MeshDims, MeshWork, Numel, chosen, predicted
from commpress.plan.pair_links import load_pairs
from commpress.plan.placement import place
from commpress.units import parse_rate
from shared_options import add_output

HOSTS, RANKS = 4, 8
GRIDS = (
    Grid(dp=8),
    Grid(dp=4, tp=2),
    Grid(dp=2, tp=4),
    Grid(pp=2, dp=4),
    Grid(pp=4, dp=2),
    Grid(pp=2, dp=2, tp=2),
)
BLOCKS, WIDTH, LENGTH, BATCH, MICRO = 8, 128, 64, 16, 2
FORWARD, BACKWARD = 0.12, 0.24  # seconds of a rank's share
WARM = 1
PORT = 29543


@dataclass
class GridRow(machines.Forecast):
    grid: str
    predicted_bytes: float
    peak_bytes: float
    numbered_seconds: float

    @property
    def memory_off(self) -> float:
        return self.predicted_bytes / self.peak_bytes - 1


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates",
        default="400mbit,100mbit",
        metavar="A,B",
        help="of two hosts each (default 400mbit,100mbit)",
    )
    parser.add_argument(
        "--dims", default="dp=int8", metavar="D=C,…", help="codecs (default dp=int8)"
    )
    parser.add_argument(
        "--parameters",
        type=int,
        default=4_000_000,
        metavar="N",
        help="of the model (default 4000000)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="steps timed on each grid (default 3)"
    )
    # a rank: the file of its grid, or where pairs go
    parser.add_argument("--on", help=argparse.SUPPRESS)
    parser.set_defaults(threads=1)
    add_output(
        parser,
        check="Kendall's rank correlation of predicted and measured steps is at least 0.8, the "
        "chosen grid is at most "
        "10 % slower than the fastest, memory is within 10 %",
    )


def run(options: argparse.Namespace) -> int:
    if options.on is not None:
        found = ranks.on_ranks(
            pairs_of if Path(options.on).name == "pairs.json" else steps_of, options, print
        )
        if found is not None:
            terminal.write_json(options.on, found)
        return 0
    dims, work, costs = (
        MeshDims(**dims_of(options.dims)),
        work_of(options.parameters),
        measure_costs(),
    )
    rows = []
    with Hosts(HOSTS) as hosts, tempfile.TemporaryDirectory() as folder:
        for host, rate in zip(
            range(HOSTS),
            [r for r in options.rates.split(",") for _ in range(HOSTS // 2)],
            strict=True,
        ):
            hosts.shape(host, parse_rate(rate))
        pairs = Path(folder, "pairs.json")
        on_hosts(hosts, options, pairs)
        links = load_pairs(pairs)
        steps = []
        for number, grid in enumerate(GRIDS):
            exact = MeshDims(dims.dp, dims.pp if grid.pp > 1 else "none")
            step = place(grid, work, links, costs, exact)
            path = Path(folder, f"grid{number}.json")
            step.save(path)
            on_hosts(hosts, options, path)
            took = json.loads(path.read_text())
            numbered = predicted(grid, work, links, costs, exact).seconds
            steps.append(step)
            rows.append(
                GridRow(
                    str(grid),
                    float(step.memory),
                    took["bytes"],
                    float(numbered),
                    seconds=took["seconds"],
                    predicted_seconds=float(step.seconds),
                )
            )
            print(
                (
                    f"{grid}: {1e3 * step.seconds:.0f} ms predicted, {1e3 * took['seconds']:.0f} "
                    "measured"
                ),
                file=sys.stderr,
            )
    rows[steps.index(chosen(steps))].chosen = True
    print(terminal.table(list(map(cells, rows))))
    print(f"Kendall's rank correlation {kendall(rows):.2f}")
    return harness.deliver(options, rows, judge=judge)


def work_of(parameters: int) -> MeshWork:
    """Blocks of one matrix each, which keep nothing for backward but their output."""
    blocks = (Numel(parameters // BLOCKS),) * BLOCKS
    kept, largest = (1.0, 0.0), parameters // BLOCKS
    return MeshWork(
        Numel(),
        blocks,
        Numel(),
        WIDTH,
        BATCH,
        LENGTH,
        FORWARD,
        BACKWARD,
        micro=MICRO,
        kept=kept,
        largest=largest,
    )


def on_hosts(hosts: Hosts, options: argparse.Namespace, path: Path) -> None:
    """Ranks round the hosts, until all are done."""
    command = [
        sys.executable,
        str(Path(__file__).parent),
        "grids",
        "--on",
        str(path),
        "--dims",
        options.dims,
        "--parameters",
        str(options.parameters),
        "--rounds",
        str(options.rounds),
    ]
    started = []
    for rank in range(RANKS):
        there = {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": str(rank // HOSTS),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": str(PORT),
            "OMP_WAIT_POLICY": "passive",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        started.append(hosts.start(rank % HOSTS, command, {**os.environ, **there}))
    for process in started:
        if process.wait():
            sys.exit(f"a rank ended with exit code {process.returncode}")


# ---------------------------------------------------------------- on every rank


def pairs_of(
    rank: int, size: int, options: argparse.Namespace, report: ranks.Report
) -> dict[str, Any]:
    topology = "|".join(
        " ".join(str(r) for r in range(host, RANKS, HOSTS)) for host in range(HOSTS)
    )
    channel, hierarchy = probe.on_nodes(topology)
    found = [
        probe.pair_alone(channel, hierarchy.topology, a, b, 1 << 19, 3)
        for a, b in combinations(range(RANKS), 2)
    ]
    nodes = [list(range(host, RANKS, HOSTS)) for host in range(HOSTS)]
    return {"nodes": nodes, "rows": [vars(pair) for pair in found]}


class Slept(torch.autograd.Function):
    """A block that sleeps where others compute; its rings of tensor parallelism are real."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: tuple[float, float], group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seconds, ctx.group = seconds[1], group
        return slept(x, seconds[0], group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, weight = ctx.saved_tensors
        return slept(gradient, ctx.seconds, ctx.group), torch.full_like(weight, 1e-6), None, None


def slept(x: torch.Tensor, seconds: float, group: Any) -> torch.Tensor:
    y = x.clone()
    for _ in range(2):
        sleep(seconds / 2)
        if group is not None:
            dist.all_reduce(y, group=group)
    return y


class SleptBlock(nn.Module):
    def __init__(self, numel: int, seconds: tuple[float, float], group: Any) -> None:
        super().__init__()
        self.weight, self.seconds, self.group = nn.Parameter(torch.zeros(numel)), seconds, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slept.apply(x, self.weight, self.seconds, self.group)


def steps_of(
    rank: int, size: int, options: argparse.Namespace, report: ranks.Report
) -> dict[str, float]:
    """Median seconds of a step, and bytes of the rank that holds most."""
    plan = json.loads(Path(options.on).read_text())
    grid, dims = (
        Grid(**plan["grid"]),
        {name: codec for name, codec in plan["dims"].items() if plan["mesh"].get(name, 1) > 1},
    )
    mesh = DeviceMesh(
        "cpu",
        torch.tensor(plan["order"]).view(*plan["mesh"].values()),
        mesh_dim_names=tuple(plan["mesh"]),
    )
    # loads what a process loads once
    first = stepping(grid, mesh, dims, plan["layers"], BLOCKS << 12)
    first()
    del first
    before = resident()
    step = stepping(grid, mesh, dims, plan["layers"], options.parameters)
    took = harness.medians({"step": partial(harness.together, step)}, options.rounds, warm=WARM)[
        "step"
    ]
    held = torch.tensor([float(peak() - before)], dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return {"seconds": took, "bytes": float(held)}


def stepping(
    grid: Grid, mesh: DeviceMesh, dims: dict[str, str], layers: Sequence[int], parameters: int
) -> Callable[[], None]:
    """A step of this rank's share of a model."""
    stage = mesh["pp"].get_local_rank() if grid.pp > 1 else 0
    tp = mesh["tp"].get_group() if grid.tp > 1 else None
    count = BATCH // MICRO // grid.dp
    seconds = (FORWARD * grid.pp / BLOCKS / count, BACKWARD * grid.pp / BLOCKS / count)
    model = nn.Sequential(
        *(SleptBlock(parameters // BLOCKS // grid.tp, seconds, tp) for _ in range(layers[stage]))
    )
    x, optimizer = (
        torch.randn(count * MICRO, LENGTH, WIDTH),
        torch.optim.Adam(model.parameters(), 1e-3, foreach=False),
    )
    if grid.pp > 1:
        place = PipelineStage(
            model, stage, grid.pp, torch.device("cpu"), group=mesh["pp"].get_group()
        )
        schedule = Schedule1F1B(place, count, loss_fn=lambda y, _: y.mean())
    target: Any = schedule if grid.pp > 1 else model
    states = commpress.compress(target, mesh=mesh, dims=dims)

    def step() -> None:
        if grid.pp > 1:
            last: dict[str, Any] = {"target": x} if stage == grid.pp - 1 else {}
            schedule.step(*([x] if stage == 0 else []), **last)
            states.synchronize()
        else:
            for i, part in enumerate(x.split(MICRO)):
                with states.no_sync() if i < count - 1 else nullcontext():
                    model(part).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def resident() -> int:
    """Bytes of this process now; its peak begins anew here."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


# ---------------------------------------------------------------- on paper


def kendall(rows: list[GridRow]) -> float:
    signs = [
        (a.seconds - b.seconds) * (a.predicted_seconds - b.predicted_seconds)
        for a, b in combinations(rows, 2)
    ]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(signs)


def cells(row: GridRow) -> dict[str, str]:
    return {
        "grid": row.grid,
        "predicted ms": f"{1e3 * row.predicted_seconds:.0f}",
        "measured ms": f"{1e3 * row.seconds:.0f}",
        "off": f"{row.off:+.0%}",
        "MB predicted": f"{row.predicted_bytes / 1e6:.1f}",
        "MB measured": f"{row.peak_bytes / 1e6:.1f}",
        "memory off": f"{row.memory_off:+.0%}",
        "as numbered": f"{1e3 * row.numbered_seconds:.0f}",
        "": "chosen" if row.chosen else "",
    }


def judge(rows: list[GridRow]) -> list[tuple[str, bool]]:
    taken, fastest = next(row for row in rows if row.chosen), min(rows, key=lambda row: row.seconds)
    apart, worst = taken.seconds / fastest.seconds, max(rows, key=lambda row: abs(row.memory_off))
    return [
        (f"Kendall's rank correlation is {kendall(rows):.2f} (at least 0.8)", kendall(rows) >= 0.8),
        (
            f"{taken.grid}, chosen, takes {apart:.2f} of {fastest.grid}, the fastest (at most 1.1)",
            apart <= 1.1,
        ),
        (
            f"memory of {worst.grid} is {worst.memory_off:+.0%} off (at most 10 %)",
            abs(worst.memory_off) <= 0.1,
        ),
    ]
