"""A training command run with one method of communication after the other: losses, seconds and
bytes beside each other."""

import argparse
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import mean, stdev
from time import perf_counter

from commpress.cli import on_hosts, terminal
from commpress.cli.hosts import Hosts
from commpress.errors import CommpressError

METHOD, SEED = "{method}", "{seed}"  # in the command
SHOWN = 15  # last lines of a command that failed
# gaps of less than these shares count as none: of one seed, of several
CLOSE, CLOSEST = 0.005, 0.001
# names of losses: 'loss': 2.31   "eval_loss": "2.31"   loss=2.31   val loss 2.31
_LOSS = re.compile(
    r"""(?<![\w.])(?P<name>(?:\w+[ _/-]){0,2}loss)["']?\s*[:= ]\s*["']?"""
    r"""(?P<loss>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))(?![\w.])""",
    re.IGNORECASE,
)
_HELD_OUT = re.compile(r"(?<![a-z])(eval|val|test|held)", re.IGNORECASE)


@dataclass
class TrainedRun:
    """One run of the command."""

    method: str
    seed: int
    losses: list[float] = field(default_factory=list)  # of training, as they were printed
    times: list[float] = field(default_factory=list)  # seconds after the start at which they came
    held_out: list[float] = field(default_factory=list)
    sent_bytes: int = 0

    def read(self, text: str, seconds: float, pattern: str = "") -> None:
        """Take in what the command has printed after so many seconds."""
        for name, loss in losses_in(text, pattern):
            if _HELD_OUT.search(name):
                self.held_out.append(loss)
            else:
                self.losses.append(loss)
                self.times.append(seconds)

    @property
    def final(self) -> float:
        """The last held-out loss, or the mean of the last tenth of the training losses."""
        last = self.losses[-max(len(self.losses) // 10, 1) :]
        return self.held_out[-1] if self.held_out else mean(last)

    @property
    def seconds(self) -> float:
        """Time from the first loss to the last: imports and connections are not in it."""
        return self.times[-1] - self.times[0]


def run(options: argparse.Namespace) -> int:
    groups: Groups = {name: [] for name in options.methods.split(",")}
    runs: list[TrainedRun] = []
    link = {"rate": options.rate, "delay": options.delay}
    with Hosts(options.hosts, **link) if options.hosts else nullcontext() as hosts:
        print(terminal.wrapped(headline(options, list(groups))), flush=True)
        for seed in range(options.seed, options.seed + options.seeds):
            for method in groups if seed % 2 == 0 else reversed(groups):
                asked = (options.command, method, seed, options.pattern, hosts)
                try:
                    one = trained(*asked)
                except CommpressError:  # torch's own threads abort some processes as they end
                    print(f"{method}, seed {seed}: failed, runs once more", flush=True)
                    one = trained(*asked)
                runs.append(one)
                groups[method].append(one)
                said = f"{method}, seed {seed}: {len(one.losses)} losses, final {one.final:.4g}"
                print(f"{said}, {one.seconds:.1f} s", flush=True)
    print("\n" + terminal.table(rows(groups)))
    print("\n".join(["", *map(terminal.wrapped, verdicts(groups))]))
    terminal.picture(options.out, partial(draw, groups))
    if options.json:
        found = [asdict(each) | {"final": each.final, "seconds": each.seconds} for each in runs]
        terminal.write_json(options.json, {"command": options.command, "runs": found})
    return 1 if unused(groups) else 0


Groups = dict[str, list[TrainedRun]]  # by method, the first is what others are compared with


def headline(options: argparse.Namespace, methods: Sequence[str]) -> str:
    where = (
        f"this machine, {on_hosts.headline(options.hosts, options)}"
        if options.hosts
        else "this machine"
    )
    return (
        f"{len(methods)} methods, {options.seeds} seed{'s' * (options.seeds > 1)}, in turns on "
        f"{where}: {' '.join(options.command)}"
    )


# ---------------------------------------------------------------- one run


def trained(
    command: Sequence[str], method: str, seed: int, pattern: str, hosts: Hosts | None
) -> TrainedRun:
    """Run the command once; raise with its last lines if it fails or prints no loss."""
    found, last = TrainedRun(method, seed), deque[str](maxlen=SHOWN)
    start = perf_counter()
    words = [word.replace(METHOD, method).replace(SEED, str(seed)) for word in command]

    def line(host: int, text: str) -> None:
        last.append(text)
        if host == 0:
            found.read(text, perf_counter() - start, pattern)

    ended = on_hosts.together(hosts, words, line, {"PYTHONUNBUFFERED": "1"})
    status, found.sent_bytes = on_hosts.status(ended), max(each.sent_bytes for each in ended)
    if status or len(found.losses) < 2:
        why = f"ended with status {status}" if status else "printed fewer than two losses"
        shown = "\n".join(f"  {text}" for text in last)
        cure = "" if status else "; --pattern says how its lines look"
        raise CommpressError(f"{method}, seed {seed}: the command {why}{cure}. It said:\n{shown}")
    return found


def losses_in(text: str, pattern: str = "") -> Iterator[tuple[str, float]]:
    """Losses in what a command prints, with their names: Trainer's dictionaries, JSON lines,
    ``loss 2.31``, or a pattern with the group ``loss``."""
    if pattern:
        yield from (("loss", float(match["loss"])) for match in re.finditer(pattern, text))
        return
    for part in text.split("\r"):
        found = _LOSS.search(part)
        if found is not None and "train_runtime" not in part:
            yield found["name"], float(found["loss"])


# ---------------------------------------------------------------- all runs


def gaps(runs: Sequence[TrainedRun], baseline: Sequence[TrainedRun]) -> list[float]:
    """Final losses against the baseline's of the same seed, as shares of these."""
    floor = {each.seed: each.final for each in baseline}
    return [each.final / floor[each.seed] - 1 for each in runs]


def rows(groups: Groups) -> list[dict[str, str]]:
    base, table = next(iter(groups.values())), []
    for name, group in groups.items():
        seconds = _seconds(group)
        table.append(
            {
                "method": name,
                "runs": str(len(group)),
                "final loss": _spread([each.final for each in group]),
                "gap": "" if group is base else _percent(gaps(group, base)),
                "seconds": f"{seconds:.1f}",
                "speed": f"{_seconds(base) / seconds:.2f}",
                "MB sent": f"{mean(each.sent_bytes for each in group) / 1e6:.1f}",
            }
        )
    return table


def _seconds(group: Sequence[TrainedRun]) -> float:
    return mean(each.seconds for each in group)


def _percent(shares: Sequence[float]) -> str:
    spread = f" ± {100 * stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * mean(shares):+.2f}{spread} %"


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def unused(groups: Groups) -> list[str]:
    """Methods whose losses are the baseline's in every digit: the command does not use them."""
    first, *others = groups
    same = {name: {each.seed: each.losses for each in group} for name, group in groups.items()}
    return [name for name in others if same[name] == same[first]]


def verdicts(groups: Groups) -> list[str]:
    """A sentence for each method beside the baseline, and how far to trust them."""
    (first, base), *others = groups.items()
    said, same = [], unused(groups)
    for name, group in others:
        if name in same:
            said.append(
                f"{name}: its losses are those of {first} in every digit. Does the command "
                f"use {METHOD}?"
            )
            continue
        found = gaps(group, base)
        noise = 2 * stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
        worse = mean(found) > max(noise, CLOSE if len(found) == 1 else CLOSEST)
        speed = _seconds(base) / _seconds(group)
        pace = f"{speed:.2f} times as fast" if speed >= 1 else f"{1 / speed:.2f} times slower"
        than = f"{'worse' if worse else 'no worse'} than {first}"
        said.append(f"{name}: {than} ({_percent(found)} of the loss), {pace}.")
    if len(base) > 1:
        said.append(
            "Gaps: of runs with the same seed, mean and standard deviation. One counts as worse if "
            f"it is more than two standard errors and {100 * CLOSEST:g} % above."
        )
    else:
        said.append(
            f"One seed does not show how much runs differ: write {SEED} into the command and give "
            f"--seeds 3. Gaps under {100 * CLOSE:g} % count as none here."
        )
    return [
        *said,
        "Loss: the last held-out one, else the mean of the last tenth. Seconds: from the first "
        "loss to the last. Bytes: as the kernel counts them, of the busiest host, or of all "
        "interfaces of this machine.",
    ]


def draw(groups: Groups, path: str) -> None:
    """Training loss against seconds, a line for each method, of its first seed."""
    from commpress.cli import charts

    with charts.chart(path, "Loss of each method", size=(8, 5.6)) as (panel,):
        for i, (name, group) in enumerate(groups.items()):
            times = [at - group[0].times[0] for at in group[0].times]
            label = f"{name} {mean(each.final for each in group):.4g}"
            panel.plot(
                times, charts.smooth(group[0].losses), label=label, color=charts.COLOURS[i % 8]
            )
        panel.set(xlabel="seconds after the first loss", ylabel="training loss")
