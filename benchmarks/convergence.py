"""final losses of the compressed optimizers against Adam and LAMB, several seeds, equal samples

Three tasks, four ranks simulated in one process, production code without a network:
  gpt      a character-level GPT on the source of Python's standard library
  bert     a masked language model on the same text
  digits   a convolutional network on scikit-learn's handwritten digits
  adam, lamb              exact means at every step
  onebit, onebit-lamb     exact for 15 % of the steps, then momentum in one bit
  zero-one                the same, then variance and synchronisations on schedules
  sharded-onebit, sharded-zero-one     those with their state divided over the ranks
The bar: the mean final loss of a compressed optimizer lies at most as high as the worst seed of its reference. With
--no-feedback it must not hold. The --json file is written after each run, and a run that it has is not done again: a long
comparison can be stopped at any time and continued.

  python benchmarks convergence --plot convergence.png --check
  python benchmarks convergence --tasks gpt --seeds 1 2 --json runs.json
  python benchmarks convergence --merge runs.json without.json
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

from commpress.cli import outputs, table
from commpress.errors import InvalidArgument
from converge import OPTIMIZERS, TASKS, Finished, Run, train

STEPS = 500
HEAD = ["task", "optimizer", "final loss", "seeds", "against reference", "bytes", "rounds"]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="NAME", help=f"default {' '.join(TASKS)}")
    parser.add_argument(
        "--optimizers", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help=f"default {' '.join(OPTIMIZERS)}"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="N", help="default 1 to 5")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"default {STEPS}")
    parser.add_argument("--codec", default="sign", metavar="NAME", help="of momentum (default sign)")
    parser.add_argument("--exact-codec", default="none", metavar="NAME", help="of gradients in exact steps (default none)")
    parser.add_argument(
        "--sync", default="qsr", choices=("qsr", "rate", "every"), help="when zero-one synchronises (default qsr)"
    )
    parser.add_argument("--no-feedback", action="store_true", help="forget what compression leaves behind")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="show runs of earlier --json files instead of new ones")
    outputs.options(parser, check="every compressed optimizer ends as low as the worst seed of its reference")


def run(options: argparse.Namespace) -> int:
    for name in options.tasks:
        if name not in TASKS:
            raise InvalidArgument(f"task is {name!r}, expected one of {', '.join(TASKS)}")
    for name in options.optimizers:
        if name not in OPTIMIZERS:
            raise InvalidArgument(f"optimizer is {name!r}, expected one of {', '.join(OPTIMIZERS)}")
    if options.steps < 20:
        raise InvalidArgument(f"--steps is {options.steps}, expected at least 20")
    if options.merge:
        finished = [run for file in options.merge for run in load(file)]
    else:
        runs = [
            Run(task, name, seed, options.steps, not options.no_feedback, options.codec, options.sync, options.exact_codec)
            for task in options.tasks
            for seed in options.seeds
            for name in options.optimizers
        ]
        finished = train_all(runs, options.processes, options.json)
    groups = grouped(finished)
    print(summary(groups))
    return outputs.deliver(options, None, judge=lambda: judge(groups), draw=lambda path: draw(path, groups))


def draw(path: str, groups: "Groups") -> None:
    import convergence_plot

    convergence_plot.draw(groups, path)


def train_all(runs: list[Run], processes: int, file: str | None) -> list[Finished]:
    """The runs, in order; those that ``file`` has are taken from there, and each other one is added to it at its end."""
    have = {finished.run: finished for finished in load(file)} if file and Path(file).exists() else {}
    missing = [run for run in runs if run not in have]
    for finished in _trained(missing, processes):
        have[finished.run] = finished
        if file:
            save(list(have.values()), file)
    return [have[run] for run in runs]


def _trained(runs: list[Run], processes: int) -> Iterator[Finished]:
    if processes <= 1:
        yield from map(train, runs)
    else:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            yield from pool.map(train, runs)


def load(file: str) -> list[Finished]:
    return [Finished(**entry | {"run": Run(**entry["run"])}) for entry in json.loads(Path(file).read_text())["runs"]]


def save(finished: list[Finished], file: str) -> None:
    """Whole or not at all: whoever stops this loses one run."""
    table.write_json(f"{file}.part", {"runs": [asdict(f) for f in finished]})
    Path(f"{file}.part").replace(file)


Groups = dict[tuple[str, str], list[Finished]]


def grouped(finished: list[Finished]) -> Groups:
    groups: Groups = defaultdict(list)
    for each in finished:
        groups[each.run.task, each.run.label].append(each)
    return groups


def summary(groups: Groups) -> str:
    rows = []
    for (task, name), runs in groups.items():
        finals, reference = [r.final for r in runs], groups.get((task, runs[0].run.reference), [])
        against = mean(finals) - mean(r.final for r in reference) if reference else float("nan")
        rows.append(
            [
                task, name, f"{mean(finals):.3f} ({min(finals):.3f} to {max(finals):.3f})", str(len(runs)),
                f"{against:+.3f}", f"1/{mean(r.ratio for r in runs):.1f}",
                f"{100 * mean(r.rounds / r.run.steps for r in runs):.0f} %",
            ]
        )  # fmt: skip
    return table.render(HEAD, rows)


def judge(groups: Groups) -> list[tuple[str, bool]]:
    bars = []
    for (task, name), runs in groups.items():
        standard = runs[0].run.reference
        reference = groups.get((task, standard), [])
        if name == standard or not reference:
            continue
        worst, ours = max(r.final for r in reference), mean(r.final for r in runs)
        bars.append((f"{task}: {name} ends at {ours:.3f}, the worst seed of {standard} at {worst:.3f}", ours <= worst))
    return bars

