"""the pace of local updates while their link changes, against fresh starts

Hosts (network namespaces) train a GPT by ``LocalUpdates`` as it is. Their links go from --rates'
first to the second and back, after --steps steps each; then each rate has a run of its own from the
start. A model of 10.8 M parameters by default.
  steps a round      at the end of the phase
  settles            steps of the phase until a round has the length that it has at the end
  step ms            mean of the steps after the first --after of the phase, waiting included, on
                     the slowest rank
  against fresh      that of the same rate in a run of its own

  python benchmarks changing_link --check --json link.json       3 minutes on 2 cores
  python benchmarks changing_link --rates 1gbit,10mbit --ranks 4
"""

import argparse
from dataclasses import dataclass
from functools import partial
from statistics import mean
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import commpress
from commpress.cli import harness, ranks, terminal, training
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.cli.hosts import Hosts
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from commpress.units import parse_rate, parse_time
from shared_options import add_output

WORSE = 1.2  # of a fresh start's step, that a step may take


@dataclass(frozen=True)
class Walk:
    """A run: so many steps at each of these rates."""

    rates: tuple[str, ...]
    steps: int
    width: int
    layers: int


@dataclass
class Phase:
    run: str
    number: int
    rate: str
    length: int  # of the last round
    settled: int
    seconds: float
    fresh: float = 0.0


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--rates A,B", str, "1gbit,25mbit", "of the links")
    option(parser, "--delay T", str, "0ms", "of each link, one way; needs netem")
    option(parser, "--ranks N", int, 2, "hosts")
    option(parser, "--steps N", int, 60, "of each phase")
    option(parser, "--after N", int, 20, "steps of a phase that are not timed")
    option(parser, "--width N", int, 384, "of the model")
    option(parser, "--layers N", int, 6, "of the model")
    check = f"after so many steps a step takes at most {WORSE} times as long as in a fresh run"
    add_output(parser, check=check)


def run(options: argparse.Namespace) -> int:
    rates = options.rates.split(",")
    if len(rates) != 2 or not 0 < options.after < options.steps:
        raise InvalidArgument(
            f"--rates is {options.rates!r} and --after {options.after}, expected two rates and "
            "fewer than --steps"
        )
    speeds, delay = {rate: parse_rate(rate) for rate in rates}, parse_time(options.delay)
    phases: list[Phase] = []
    with (
        Hosts(options.ranks, delay=delay) as hosts,
        ranks.LocalRanks(options.ranks, hosts=hosts) as pool,
    ):

        def shape(rate: str) -> None:
            for host in range(len(hosts)):
                hosts.shape(host, speeds[rate], delay)

        for name, walked in (
            ("changes", (rates[0], rates[1], rates[0])),
            *((f"fresh {rate}", (rate,)) for rate in rates),
        ):
            walk = Walk(walked, options.steps, options.width, options.layers)
            shape(walked[0])
            seen = pool.call(train, walk, lambda *_: None, answer=partial(_change, walk, shape))
            phases += [
                _phase(name, walk, number, seen, options.after) for number in range(len(walked))
            ]
            lengths = ", ".join(str(phase.length) for phase in phases if phase.run == name)
            print(f"{name}: rounds of {lengths} steps", flush=True)
    for phase in phases:
        phase.fresh = next(one.seconds for one in phases if one.run == f"fresh {phase.rate}")
    table = [cells(phase) for phase in phases]
    print(terminal.table(table))
    return harness.deliver(options, phases, judge=judge)


def _change(walk: Walk, shape: Any, rank: int, step: int) -> None:
    """Give the links the next phase's rate before its first step; all ranks wait for it."""
    if rank == 0 and step and step % walk.steps == 0:
        shape(walk.rates[step // walk.steps])


def train(rank: int, size: int, walk: Walk, ask: Any) -> list[tuple[float, int]]:
    """Seconds of each step on the slowest rank, and the length of its round."""
    torch.manual_seed(0)
    model = GPT(width=walk.width, layers=walk.layers)
    local = commpress.LocalUpdates(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    draws, text, seen = (
        torch.Generator().manual_seed(rank),
        standard_library()[: -training.HELD_OUT],
        [],
    )
    for step in range(walk.steps * len(walk.rates)):
        if step % walk.steps == 0:
            dist.barrier()
            ask(step)
            dist.barrier()
        start = perf_counter()
        model(*batch(text, 4, 64, draws)).backward()
        local.step()
        local.zero_grad()
        seen.append((perf_counter() - start, local.rounds.length))
    local.drain()
    local.close()
    took = torch.tensor([seconds for seconds, _ in seen])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return [(float(seconds), length) for seconds, (_, length) in zip(took, seen, strict=True)]


def _phase(name: str, walk: Walk, number: int, seen: list[tuple[float, int]], after: int) -> Phase:
    mine = seen[number * walk.steps : (number + 1) * walk.steps]
    last = mine[-1][1]
    settled = next(
        (at for at in range(len(mine)) if all(abs(length - last) <= 1 for _, length in mine[at:])),
        len(mine),
    )
    return Phase(
        name,
        number,
        walk.rates[number],
        last,
        settled,
        mean(seconds for seconds, _ in mine[after:]),
    )


def cells(phase: Phase) -> dict[str, str]:
    return {
        "run": phase.run,
        "phase": str(phase.number + 1),
        "rate": phase.rate,
        "steps a round": str(phase.length),
        "settles": str(phase.settled),
        "step ms": f"{1e3 * phase.seconds:.0f}",
        "against fresh": f"{phase.seconds / phase.fresh:.2f}",
    }


def judge(phases: list[Phase]) -> list[tuple[str, bool]]:
    return [
        (
            (
                f"phase {p.number + 1} at {p.rate}: {p.seconds / p.fresh:.2f} of a fresh start's "
                f"step (bar {WORSE})"
            ),
            p.seconds <= WORSE * p.fresh,
        )
        for p in phases
        if p.run == "changes" and p.number
    ]
