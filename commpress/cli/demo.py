"""The demo: ways of training one model race over a slow network, and what each has learned when the
time is up is shown."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, stdev
from typing import Any

from commpress.cli import contenders, harness, race, terminal
from commpress.cli.contenders import FLOOR, contender
from commpress.cli.hosts import Hosts, HostsUnavailable
from commpress.cli.race import Finish, Lane
from commpress.cli.ranks import LocalRanks
from commpress.cli.training import Load
from commpress.errors import InvalidArgument, MissingPackage

QUICK = 10.0  # seconds of each way with --quick
FEWEST = 20  # steps of a way, below which losses say nothing
PEERS = ("#000000", "#8a8a8a", "#1f77b4", "#9467bd", "#17becf")  # of others; ours are warm
OURS = ("#2ca02c", "#ff7f0e", "#d62728", "#b8860b", "#e377c2")
Groups = dict[str, list[Finish]]  # by the name of the way


def run(options: argparse.Namespace) -> int:
    with _ended_by_signals():
        return _race(options, _plan(options))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C end what runs inside, also where who started this process ignores it, and SIGTERM
    and SIGHUP as it does."""
    handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            handlers[getattr(signal, name)] = lambda number, _: sys.exit(128 + number)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _plan(options: argparse.Namespace) -> list[Lane]:
    """A lane for each way and seed."""
    seconds = options.seconds or (QUICK if options.quick else Lane.seconds)
    size = options.width, options.layers, options.length, options.batch
    return [
        Lane(
            Load(1, options.steps, *size, options.seed + i),
            name,
            options.lr or contender(name).lr,
            seconds,
            error_feedback=options.error_feedback == "kept",
        )
        for i in range(options.seeds)
        for name in contenders.names(options.ways)
    ]


# ---------------------------------------------------------------- the network


@dataclass
class SlowNetwork:
    """Place of the ranks, and the words of the demo for it."""

    says: str
    hosts: Hosts | None = None
    paced: float = 0.0
    rate: float | None = None

    @contextlib.contextmanager
    def limits(self, lane: Lane) -> Iterator[Lane]:
        """The lane as it is to run; links have no limit meanwhile if it asks for that."""
        if lane.name != FLOOR:
            yield lane
            return
        self.shape(None)
        try:
            yield replace(lane, paced=0.0)
        finally:
            self.shape(self.rate)

    def shape(self, rate: float | None) -> None:
        for host in range(len(self.hosts or ())):
            self.hosts.shape(host, rate)  # type: ignore[union-attr]


@contextlib.contextmanager
def slow_network(count: int, kind: str, rate: float) -> Iterator[SlowNetwork]:
    """Hosts with links of ``rate``; or, where they cannot be had, connections that the kernel holds
    to it."""
    if kind == "loopback":
        said = "processes over loopback, faster than any network: this shows what compression costs"
        yield SlowNetwork(f"{count} {said}")
        return
    linux, speed, why = sys.platform.startswith("linux"), f"{rate / 1e6:g} Mbit/s", ""
    if kind in ("auto", "hosts"):
        try:
            with contextlib.ExitStack() as stack:
                hosts = stack.enter_context(Hosts(count, rate=rate))
                said = f"{count} hosts (network namespaces) whose links carry {speed} each way"
                yield SlowNetwork(said, hosts, rate=rate)
                return
        except (HostsUnavailable, MissingPackage) as error:
            if kind == "hosts" or not linux:
                raise
            why = f", since hosts of their own cannot be had here ({error})"
    elif not linux:
        raise InvalidArgument(
            f"connections can be paced on Linux only, this is {sys.platform}: use --network "
            "loopback"
        )
    said = f"{count} processes on one machine whose connections the kernel PACES to {speed}{why}"
    yield SlowNetwork(said, paced=rate)


# ---------------------------------------------------------------- the race


def _race(options: argparse.Namespace, plan: list[Lane]) -> int:
    with slow_network(options.ranks, options.network, options.rate) as network:
        plan = [replace(lane, paced=network.paced) for lane in plan]
        print(headline(plan, network), flush=True)
        with LocalRanks(options.ranks, hosts=network.hosts) as pool:
            network.shape(None)
            title = "kernels are compiled, connections made:"
            with terminal.ProgressBar(title, lines=1) as progress:
                pool.call(race.warm, plan[: len(plan) // options.seeds], progress)
            network.shape(options.rate)
            finishes = _lanes(pool, plan, options.ranks, network)
    print()
    summary(finishes)
    terminal.picture(options.out or "demo.svg", partial(draw, finishes, network))
    return harness.deliver(options, finishes, network=network.says)


def headline(plan: list[Lane], network: SlowNetwork) -> str:
    load, names = plan[0].load, list(dict.fromkeys(lane.name for lane in plan))
    how_long = f"{load.steps} steps" if load.steps else f"{plan[0].seconds:g} seconds"
    parameters = sum(p.numel() for p in load.model().parameters())
    width = max(map(len, names))
    first = (
        f"{len(names)} ways to train the same GPT ({parameters / 1e6:.2g} M parameters, text: "
        f"Python's own source) take turns, {how_long} each: which has the lowest loss at the end? "
        f"Network: {network.says}."
    )
    ways = "".join(f"\n  {name:<{width}} {contender(name).what}" for name in names)
    return f"{terminal.wrapped(first)}\n{ways}\n"


def _lanes(pool: LocalRanks, plan: list[Lane], ranks: int, network: SlowNetwork) -> list[Finish]:
    """Run all lanes, one after the other."""
    finishes: list[Finish] = []
    widest = max(len(lane.name) for lane in plan)
    for lane in plan:
        name = f"{lane.name:<{widest}}"
        with terminal.ProgressBar(name, lines=4) as bar, network.limits(lane) as limited:

            def show(
                share: float, losses: list[float], sent: int, bar: terminal.ProgressBar = bar
            ) -> None:
                if losses:
                    loss = f"loss {_last(losses):.3f}"
                    bar(share, f"{len(losses)} steps, {loss}, {sent / 1e6:.1f} MB sent")

            finish = race.time_it(pool, limited, ranks, show)
        finishes.append(finish)
        print(
            f"{name}  held-out loss {finish.held_out_loss:.3f} after {finish.seconds:.1f} s and "
            f"{finish.steps} steps",
            flush=True,
        )
    return finishes


def _last(losses: list[float]) -> float:
    """Mean over the last twentieth, of five steps at least."""
    return mean(losses[-max(len(losses) // 20, 5) :])


# ---------------------------------------------------------------- on paper


def grouped(finishes: list[Finish]) -> Groups:
    """Group runs by method, the lowest loss first."""
    groups: Groups = {}
    for finish in finishes:
        groups.setdefault(finish.name, []).append(finish)
    return dict(sorted(groups.items(), key=lambda item: loss_of(item[1])))


def loss_of(group: list[Finish]) -> float:
    return mean(finish.held_out_loss for finish in group)


def summary(finishes: list[Finish]) -> None:
    """The table and how to read it."""
    groups = grouped(finishes)
    rows = [_cells(name, group, groups.get("plain")) for name, group in groups.items()]
    print(terminal.table(rows, best=0))
    print("\n".join(["", *map(terminal.wrapped, _notes(groups))]))


def _cells(name: str, group: list[Finish], plain: list[Finish] | None) -> dict[str, str]:
    losses, steps = [f.held_out_loss for f in group], mean(f.steps for f in group)
    sent = mean(f.sent_bytes or 0 for f in group) / 1e6
    counted = group[0].sent_bytes is not None
    apart = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
    return {
        "way": name,
        "held-out loss": f"{mean(losses):.3f}{apart}",
        "against plain": "-" if plain is None else f"{mean(losses) - loss_of(plain):+.3f}",
        "training loss": f"{mean(_last(f.losses) for f in group):.3f}",
        "steps": f"{steps:.0f}",
        "seconds": f"{mean(f.seconds for f in group):.1f}",
        "MB sent/rank": f"{sent:.1f}" if counted else "-",
        "MB a step": f"{sent / max(steps, 1):.2f}" if counted else "-",
    }


def _notes(groups: Groups) -> Iterator[str]:
    """Sentences on groups that come with the lowest loss first."""
    yield (
        "Losses in nats per byte, on held-out text, and their standard deviation over seeds: one "
        "run of a way differs from the next in the last digits, also because ranks share this "
        "machine's cores. Bytes as the kernel counts them, headers included."
    )
    if short := [name for name, group in groups.items() if min(f.steps for f in group) < FEWEST]:
        yield (
            f"Nothing can be compared: {', '.join(short)} did fewer than {FEWEST} steps. Give more "
            "--seconds or --steps, or a faster --rate."
        )
        return
    best = {True: "", False: ""}  # of ours, and of the others
    for name in reversed(groups):
        if name != FLOOR:
            best[contender(name).ours] = name
    ours, peer = best[True], best[False]
    if FLOOR in groups and ours:
        floor = loss_of(groups[FLOOR])
        distance = f"{ours}, the best of commpress, {loss_of(groups[ours]) - floor:+.3f} nats"
        if peer:
            distance += f"; {peer}, the best of the others, {loss_of(groups[peer]) - floor:+.3f}"
        yield f"Distance to {FLOOR}: {distance}."


def draw(finishes: list[Finish], network: SlowNetwork, path: str) -> None:
    """Loss against seconds, a line for each way, of its first seed; smoothed over five steps or a
    fiftieth of them."""
    from commpress.cli import charts

    place = network.says.split(" (")[0]
    title = f"A GPT of {finishes[0].parameters / 1e6:.2g} M parameters, {place}"
    if network.rate:
        title += f", links of {network.rate / 1e6:g} Mbit/s"
    colours, top = {True: iter(OURS * 9), False: iter(PEERS * 9)}, 0.0
    with charts.chart(path, title, size=(8, 5.6)) as (panel,):
        for name, group in grouped(finishes).items():
            if losses := charts.smooth(group[0].losses, 5):
                ours = contender(name).ours
                look = {"color": next(colours[ours]), "linestyle": "-" if ours else "--"}
                label = f"{name} {loss_of(group):.2f}"
                panel.plot(group[0].times, losses, label=label, **look)
                top = max(top, losses[len(losses) // 3])
        panel.set_ylim(top=1.05 * top)  # where lines part; first losses are far above
        panel.set(xlabel="seconds of training", ylabel="training loss, nats per byte")
