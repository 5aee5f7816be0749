"""kill -9 at a random byte of what a rank sends, again and again: when survivors go on, and whether
all stay equal

Four local processes train under commpress.elastic. One of them ends itself by SIGKILL after a
random number of bytes, in the middle of a send; the others commit the next step, a new process
takes its place and is healed. Sometimes two die at once, or the new process dies while it joins, or
one that gives it the state. Over the hook of DDP, the compressed backend, a compressed optimizer,
local updates, and FSDP2, which is built anew from a snapshot.

  python benchmarks kills                                      10 faults of each, some ten minutes
  python benchmarks kills --kills 60 --account all.json        goes on from what the file has; may
                                                               be interrupted
  python benchmarks kills --only hook fsdp2 --kinds donor      some of them
  python benchmarks kills --loss 600                           losses of disturbed runs beside those
                                                               of undisturbed ones
  python benchmarks kills --cost                               processor time of the loop itself in
                                                               a step without faults

survive: seconds from the kill to the next step that the slowest survivor has committed; back:
seconds from the start of the new process to its first committed step. Processes are forked, so that
importing torch is not in these figures.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commpress
import kept
from campaign import FAULTS, WORKLOADS, Campaign, Kill
from commpress.cli import harness, terminal
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from shared_options import add_output

BATCH = 10  # faults of one campaign; the next one begins with new processes
LIMITS = {"fsdp2": 15.0}  # seconds until survivors go on, where that is not 5
SURVIVE, BACK = 5.0, 20.0
COST_ROUNDS, COST_STEPS = 5, 1000
# runs of each kind whose losses are compared; faults in each that is disturbed
SEEDS, LOSS_FAULTS = 3, 5
# seconds between their steps, so that a run of 300 is not over before its faults are
LOSS_PAUSE = 0.05
DIVIDED = ("fsdp2",)  # other weights on each rank, and back to a snapshot


@dataclass
class Account:
    """All that is known of one campaign."""

    workload: str
    seed: int
    kills: list[Kill] = field(default_factory=list)
    wrong: str = ""
    compared: int = 0  # steps after which ranks compared their weights
    unequal: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)

    def take(self, campaign: Campaign) -> None:
        verdict = campaign.verdict()
        self.kills = campaign.kills
        if self.workload in DIVIDED:
            return
        if self.workload == "local":  # between two exchanges ranks differ
            hashes = defaultdict(set)
            for *_, digest in campaign.told():
                if digest is not None:
                    hashes[digest[0]].add(digest[1])
            self.compared, self.unequal = (
                len(hashes),
                [number for number, seen in hashes.items() if len(seen) > 1],
            )
            return
        self.compared, self.unequal = verdict.hashed_steps, verdict.unequal
        self.skipped, self.repeated = verdict.skipped, verdict.repeated


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    option(parser, "--kills N", int, 10, "faults of each workload")
    add(
        "--only",
        nargs="+",
        choices=WORKLOADS,
        metavar="NAME",
        help=f"some of {', '.join(WORKLOADS)}",
    )
    add(
        "--kinds",
        nargs="+",
        choices=FAULTS,
        metavar="KIND",
        help=f"some of {', '.join(FAULTS)} (default all)",
    )
    option(parser, "--seed N", int, 0, "of victims and bytes")
    option(
        parser,
        "--account FILE",
        says="what came of each fault: kept, and gone on from",
    )
    option(parser, "--loss STEPS", int, None, "instead: losses of so many steps, disturbed and not")
    option(
        parser,
        "--cost",
        says="instead: processor time that the loop itself takes in a step without faults",
    )
    option(parser, "--logs FOLDER", says="keep output and events of the processes here")
    add_output(
        parser,
        check="survivors go on within 5 s (fsdp2: 15 s), victims are back within 20 s, all "
        "ranks are equal, nothing is "
        "lost; with --cost: the loop takes 0.1 ms at most, 1 % of a step of 10 ms; with --loss: "
        "losses of disturbed runs are "
        "within the spread of undisturbed ones",
    )


def run(options: argparse.Namespace) -> int:
    if options.kills < 1:
        raise InvalidArgument(f"--kills is {options.kills}, expected at least 1")
    if options.loss is not None and options.loss < 100:
        raise InvalidArgument(f"--loss is {options.loss}, expected at least 100 steps")
    import_module("commpress.backend")
    if options.cost:
        return measure_cost()
    with tempfile.TemporaryDirectory(prefix="commpress-") as made:
        folder = Path(options.logs or made)
        if options.loss is not None:
            return compare_losses(options, folder)
        accounts = campaigns(options, folder)
    rows = [kill for account in accounts for kill in account.kills]
    bars = [bar for workload in options.only or WORKLOADS for bar in judge(workload, accounts)]
    options.check = True  # always
    return harness.deliver(options, rows, judge=lambda _: bars)


# ---------------------------------------------------------------- faults


def campaigns(options: argparse.Namespace, folder: Path) -> list[Account]:
    """Those that the file knows, and as many more as are wanted, of each workload in turn."""
    accounts = read(options.account)
    table = terminal.Table(cells)
    while True:
        done = {
            name: sum(len(a.kills) for a in accounts if a.workload == name)
            for name in options.only or WORKLOADS
        }
        ended = {
            name
            for name in done
            if any(a.wrong for a in accounts if a.workload == name and a.seed >= options.seed)
        }
        due = [
            name
            for name in done
            if done[name] < options.kills and (name not in ended or options.account)
        ]
        if not due:
            return accounts
        workload = min(due, key=lambda name: done[name])
        seed = max((a.seed + 1 for a in accounts if a.workload == workload), default=options.seed)
        accounts.append(account := Account(workload, seed))
        campaign = Campaign(workload, seed, folder / f"{workload}-{seed}")

        def report(kill: Kill, account: Account = account, campaign: Campaign = campaign) -> None:
            table(kill)
            account.take(campaign)
            write(options.account, accounts)

        account.wrong = campaign.run(
            min(BATCH, options.kills - done[workload]), report, options.kinds or tuple(FAULTS)
        )
        account.take(campaign)
        write(options.account, accounts)


def cells(k: Kill) -> dict[str, str]:
    return {
        "workload": f"{k.workload:<9}",
        "kind": f"{k.kind:<8}",
        "bytes": f"{k.bytes if k.bytes > 0 else '-':>8}",
        "victims": " ".join(map(str, k.victims)),
        "survive s": f"{k.survive:.2f}",
        "back s": f"{k.back:.2f}",
    }


def read(path: str | None) -> list[Account]:
    found = kept.read(path, "campaigns")
    for each in found:
        each["kills"] = [
            Kill(**kill | {"victims": tuple(kill["victims"])}) for kill in each["kills"]
        ]
    return [Account(**each) for each in found]


def write(path: str | None, accounts: Sequence[Account]) -> None:
    kept.write(path, {"campaigns": list(map(asdict, accounts))})


def judge(workload: str, accounts: Sequence[Account]) -> Iterator[tuple[str, bool]]:
    mine = [account for account in accounts if account.workload == workload]
    kills = [kill for account in mine for kill in account.kills]
    ended = [f"with seed {account.seed}: {account.wrong}" for account in mine if account.wrong]
    died = sum(len(kill.victims) + (kill.kind == "newcomer") for kill in kills)
    yield (
        f"{workload}: {len(kills)} faults, {died} kills" + "; ".join(["", *ended]),
        not ended and bool(kills),
    )
    limit = LIMITS.get(workload, SURVIVE)
    for what, name, most in (
        ("survivors go on", "survive", limit),
        ("victims are back", "back", BACK),
    ):
        seconds = [getattr(kill, name) for kill in kills]
        if seconds:
            says = (
                f"{what} after {median(seconds):.2f} s, {max(seconds):.2f} s at most (≤ {most:g})"
            )
            yield f"{workload}: {says}", max(seconds) <= most
    if workload not in DIVIDED:
        unequal = [(account.seed, account.unequal) for account in mine if account.unequal]
        compared = sum(account.compared for account in mine)
        what = "exchanges" if workload == "local" else "steps"
        yield (
            f"{workload}: weights equal on all ranks after {compared} {what}" + _some(unequal),
            compared > 0 and not unequal,
        )
        lost = [(a.seed, a.skipped, a.repeated) for a in mine if a.skipped or a.repeated]
        yield f"{workload}: no step lost or committed twice" + _some(lost), not lost


def _some(found: Sequence[Any]) -> str:
    return f", but not {found[:4]}" if found else ""


# ---------------------------------------------------------------- without faults


def measure_cost() -> int:
    """Of a model with 24 buffers, whose own step does nothing, on one rank: what is repeated is
    remembered on each alike."""
    dist.init_process_group("commpress", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*(nn.BatchNorm1d(256) for _ in range(8)))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    took = []
    for _ in range(COST_ROUNDS):
        run = commpress.elastic(lambda: None, state, steps=COST_STEPS)
        begin = thread_time()
        for _ in run:
            pass
        took.append((thread_time() - begin) / COST_STEPS)
        run.close()
    dist.destroy_process_group()
    says = f"the loop takes {1e6 * median(took):.0f} µs of processor time a step (≤ 100)"
    return harness.verdict([(says, median(took) <= 1e-4)])


# ---------------------------------------------------------------- losses


def compare_losses(options: argparse.Namespace, folder: Path) -> int:
    """Mean losses of the last tenth of so many steps, in three runs with faults and three without.

    Faults come after a third of them: those in the warmup of a compressed Adam leave a larger
    variance behind, and so smaller steps, which end at a lower loss than undisturbed ones.
    """
    names = ("workload", "seed", "faults", "loss")
    table = terminal.Table(lambda row: dict(zip(names, map(str, row), strict=True)))
    rows, bars = [], []
    for workload in options.only or [name for name in WORKLOADS if name not in DIVIDED]:
        ends: dict[int, list[float]] = {0: [], LOSS_FAULTS: []}
        for seed in range(options.seed, options.seed + SEEDS):
            for faults in ends:
                place = folder / f"{workload}-{seed}-{faults}"
                campaign = Campaign(workload, seed, place, steps=options.loss, pause=LOSS_PAUSE)
                wrong = campaign.run(faults, lambda kill: None, ("one",), after=options.loss // 3)
                losses = [loss for step, loss, _ in campaign.told() if step > 0.9 * options.loss]
                if wrong:
                    bars.append(
                        (f"{workload}: run of seed {seed} with {faults} faults: {wrong}", False)
                    )
                    continue
                ends[faults].append(mean(losses))
                rows.append((workload, seed, faults, round(ends[faults][-1], 5)))
                table(rows[-1])
        calm, disturbed = ends.values()
        if calm and disturbed:
            spread, apart = max(calm) - min(calm), abs(mean(disturbed) - mean(calm))
            says = (
                f"mean losses {mean(calm):.5f} and with faults {mean(disturbed):.5f} differ by "
                f"{apart:.5f}, and"
            )
            bars.append(
                (
                    f"{workload}: {says} undisturbed ones among each other by {spread:.5f}",
                    apart <= spread,
                )
            )
    options.check = True  # always
    return harness.deliver(options, rows, judge=lambda _: bars)
