"""The demo: ways of training one model race over a slow network, and what each has learned when the
time is up is shown."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import mean, stdev
from typing import Any

from commpress.cli import contenders, harness, race, terminal
from commpress.cli.contenders import FLOOR, Choices, contender
from commpress.cli.hosts import Hosts, HostsUnavailable
from commpress.cli.race import Course, Finish, Lane
from commpress.cli.ranks import LocalRanks
from commpress.cli.svg import Curve, curves
from commpress.cli.victims import Ended, none_left
from commpress.errors import InvalidArgument, MissingPackage
from commpress.units import parse_rates

QUICK = 10.0  # seconds of each way with --quick
FEWEST = 20  # steps of a way, below which losses say nothing
FEEDBACK = {"kept": True, "none": False}
SEARCHED = "2.5e-4,5e-4,1e-3,2e-3,4e-3"  # peaks of the learning rate
PEERS = ("#000000", "#8a8a8a", "#1f77b4", "#9467bd", "#17becf")  # of others; ours are warm
OURS = ("#2ca02c", "#ff7f0e", "#d62728", "#b8860b", "#e377c2")
HEAD = [
    "way",
    "held-out loss",
    "against plain",
    "training loss",
    "steps",
    "seconds",
    "MB sent/rank",
    "MB a step",
]
LIVE = ["way", "", "seconds", "steps", "training loss", "MB sent", ""]
FLUSH = (0, 1)  # columns of the live table that are flush left


def run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    try:
        with none_left() if sys.platform.startswith("linux") else contextlib.nullcontext():
            return _race(options, plan)
    except Ended as asked:
        print(f"commpress: demo ended by {signal.Signals(asked.number).name}", file=sys.stderr)
        return 128 + asked.number


def _plan(options: argparse.Namespace) -> list[Lane]:
    """A lane for each way and seed, of the shortest wait first."""
    choices = Choices(
        options.head_codec, FEEDBACK[options.error_feedback], options.exact_steps, options.min_numel
    )
    seconds = options.seconds or (QUICK if options.quick else Course.seconds)
    course = Course(
        options.width,
        options.layers,
        options.length,
        options.batch,
        seconds,
        options.steps,
        choices=choices,
    )
    rates = parse_rates(options.lr) if options.lr else []
    return [
        Lane(course, name, rates[0] if len(rates) == 1 else contender(name).lr, options.seed + i)
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
        if contender(lane.name).limited:
            yield lane
            return
        self.shape(None)
        try:
            yield replace(lane, course=replace(lane.course, paced=0.0))
        finally:
            self.shape(self.rate)

    def shape(self, rate: float | None) -> None:
        for host in range(len(self.hosts) if self.hosts is not None else 0):
            self.hosts.shape(host, rate)  # type: ignore[union-attr]


@contextlib.contextmanager
def slow_network(count: int, kind: str, rate: float | None) -> Iterator[SlowNetwork]:
    """Hosts with links of ``rate``; or, where they cannot be had, connections that the kernel holds
    to it."""
    if rate is None or kind == "loopback":
        yield SlowNetwork(
            f"{count} processes over loopback, faster than any network: this shows what "
            "compression costs"
        )
        return
    speed = f"{rate / 1e6:g} Mbit/s"
    why = ""
    if kind in ("auto", "hosts"):
        try:
            with contextlib.ExitStack() as stack:
                hosts = stack.enter_context(Hosts(count, rate=rate))
                yield SlowNetwork(
                    f"{count} hosts (network namespaces) whose links carry {speed} each way",
                    hosts,
                    rate=rate,
                )
                return
        except (HostsUnavailable, MissingPackage) as error:
            if kind == "hosts" or not sys.platform.startswith("linux"):
                raise
            why = f", since hosts of their own cannot be had here ({error})"
    elif not sys.platform.startswith("linux"):
        raise InvalidArgument(
            f"connections can be paced on Linux only, this is {sys.platform}: use --network "
            "loopback"
        )
    yield SlowNetwork(
        f"{count} processes on one machine whose connections the kernel PACES to {speed}{why}",
        paced=rate,
    )


# ---------------------------------------------------------------- the race


def _race(options: argparse.Namespace, plan: list[Lane]) -> int:
    with slow_network(options.ranks, options.network, options.rate) as network:
        interface = "" if network.hosts is None else "eth0"
        plan = [
            replace(lane, course=replace(lane.course, paced=network.paced, interface=interface))
            for lane in plan
        ]
        course = plan[0].course
        parameters = sum(p.numel() for p in course.model(0).parameters())
        print(headline(plan, parameters, network), flush=True)
        with LocalRanks(options.ranks, hosts=network.hosts) as pool:
            network.shape(None)
            with harness.ProgressBar(
                "kernels are compiled, connections made:", lines=1
            ) as progress:
                pool.call(race.warm, [lane for lane in plan if lane.seed == plan[0].seed], progress)
            network.shape(options.rate)
            if options.search:
                return _search(options, pool, network, plan)
            finishes = _lanes(pool, plan, options.ranks, network)
    print()
    summary(finishes)
    out = options.out or "demo.svg"
    draw(finishes, out, network)
    print(f"\npicture: {out}")
    return harness.deliver(options, finishes, network=network.says)


def headline(plan: list[Lane], parameters: int, network: SlowNetwork) -> str:
    course, names = plan[0].course, list(dict.fromkeys(lane.name for lane in plan))
    how_long = f"{course.steps} steps" if course.steps else f"{course.seconds:g} seconds"
    width = max(len(name) for name in names)
    first = (
        f"{len(names)} ways to train the same GPT ({parameters / 1e6:.2g} M parameters, text: "
        f"Python's own source) take turns, {how_long} each: which has the lowest loss at the end? "
        f"Network: {network.says}."
    )
    return (
        f"{terminal.wrapped(first)}\n"
        + "".join(f"\n  {name:<{width}} {contender(name).what}" for name in names)
        + "\n"
    )


def _lanes(pool: LocalRanks, plan: list[Lane], ranks: int, network: SlowNetwork) -> list[Finish]:
    """Run all lanes, one after the other, and show how they stand."""
    finishes: list[Finish] = []
    widest = max(len(lane.name) for lane in plan)
    with terminal.LiveTable(LIVE, left=FLUSH) as live:
        for lane in plan:
            said = [0]

            def show(
                share: float,
                losses: list[float],
                sent: int,
                lane: Lane = lane,
                said: list[int] = said,
            ) -> None:
                def rows() -> list[list[str]]:
                    waiting = plan[len(finishes) + 1 :]
                    seconds = "" if lane.course.steps else f"{share * lane.course.seconds:.0f}"
                    now = [
                        lane.name,
                        terminal.bar(share, 24),
                        seconds,
                        str(len(losses)),
                        f"{_last(losses):.3f}" if losses else "",
                        f"{sent / 1e6:.1f}",
                        "trains",
                    ]
                    return [
                        *map(_live, finishes),
                        now,
                        *([one.name, "", "", "", "", "", "waits"] for one in waiting),
                    ]

                live.show(rows)
                if losses and share * 4 >= said[0] + 1:
                    said[0] = int(share * 4)
                    live.said(
                        f"{lane.name:<{widest}}  {100 * share:3.0f} %  {len(losses)} steps, loss "
                        f"{_last(losses):.3f}, {sent / 1e6:.1f} MB sent"
                    )

            with network.limits(lane) as limited:
                finish = race.time_it(pool, limited, ranks, show)
            finishes.append(finish)
            live.said(
                f"{finish.name:<{widest}}  done   held-out loss {finish.held_out_loss:.3f} after "
                f"{finish.seconds:.1f} s and {finish.steps} steps"
            )
            live.show(lambda: list(map(_live, finishes)), now=True)
    return finishes


def _live(finish: Finish) -> list[str]:
    sent = "" if finish.sent_bytes is None else f"{finish.sent_bytes / 1e6:.1f}"
    return [
        finish.name,
        terminal.bar(1, 24),
        f"{finish.seconds:.0f}",
        str(finish.steps),
        f"{_last(finish.losses):.3f}",
        sent,
        f"held-out loss {finish.held_out_loss:.3f}",
    ]


def _last(losses: list[float]) -> float:
    """Mean over the last twentieth, of five steps at least."""
    last = losses[-max(len(losses) // 20, 5) :]
    return sum(last) / len(last)


# ---------------------------------------------------------------- the learning rates


def _search(
    options: argparse.Namespace, pool: LocalRanks, network: SlowNetwork, plan: list[Lane]
) -> int:
    """Each way at several rates, over the steps that it does in the time: these are counted first,
    unless --steps says them."""
    rates = parse_rates(options.lr or SEARCHED)
    steps = {lane.name: lane.course.steps for lane in plan}
    if not options.steps:
        steps = {finish.name: finish.steps for finish in _lanes(pool, plan, options.ranks, network)}
    network.shape(None)  # steps count from here on, not seconds
    found: list[Finish] = []
    for lane in plan:
        course = replace(lane.course, steps=steps[lane.name], paced=0.0)
        for rate in rates:
            found.append(
                race.time_it(
                    pool, replace(lane, course=course, lr=rate), options.ranks, lambda *_: None
                )
            )
            said = (
                f"{lane.name}, {steps[lane.name]} steps, rate {rate:g}: held-out loss "
                f"{found[-1].held_out_loss:.3f}"
            )
            print(said, flush=True)
    print()
    names, best = list(dict.fromkeys(lane.name for lane in plan)), []
    for name in names:
        of = [finish for finish in found if finish.name == name]
        by_rate = {
            rate: mean(finish.held_out_loss for finish in of if finish.lr == rate) for rate in rates
        }
        best.append(
            [
                name,
                str(steps[name]),
                *(f"{loss:.3f}" for loss in by_rate.values()),
                f"{min(by_rate, key=lambda rate: by_rate[rate]):g}",
            ]
        )
    terminal.show(["way", "steps", *(f"{rate:g}" for rate in rates), "best"], best)
    return harness.deliver(options, found, network=network.says)


# ---------------------------------------------------------------- on paper


def by_name(finishes: list[Finish]) -> dict[str, list[Finish]]:
    groups: dict[str, list[Finish]] = {}
    for finish in finishes:
        groups.setdefault(finish.name, []).append(finish)
    return groups


def loss_of(group: list[Finish]) -> float:
    return mean(finish.held_out_loss for finish in group)


def summary(finishes: list[Finish]) -> None:
    """The table, the lowest loss first, and how to read it."""
    groups = by_name(finishes)
    ranked = sorted(groups, key=lambda name: loss_of(groups[name]))
    plain = loss_of(groups["plain"]) if "plain" in groups else None
    rows = []
    for name in ranked:
        group = groups[name]
        steps, sent = (
            mean(f.steps for f in group),
            [f.sent_bytes for f in group if f.sent_bytes is not None],
        )
        rows.append(
            [
                name,
                spread([f.held_out_loss for f in group]),
                "-" if plain is None else f"{loss_of(group) - plain:+.3f}",
                f"{mean(_last(f.losses) for f in group):.3f}",
                f"{steps:.0f}",
                f"{mean(f.seconds for f in group):.1f}",
                f"{mean(sent) / 1e6:.1f}" if sent else "-",
                f"{mean(sent) / 1e6 / max(steps, 1):.2f}" if sent else "-",
            ]
        )
    terminal.show(HEAD, rows, best=[0])
    print("\n".join(["", *map(terminal.wrapped, _notes(groups, ranked))]))


def _notes(groups: dict[str, list[Finish]], ranked: list[str]) -> list[str]:
    first = groups[ranked[0]][0]
    notes = ["Losses in nats per byte, on held-out text."]
    if short := [name for name in ranked if min(finish.steps for finish in groups[name]) < FEWEST]:
        few = f"Nothing can be compared: {', '.join(short)} did fewer than {FEWEST} steps."
        return [*notes, f"{few} Give more --seconds or --steps, or a faster --rate."]
    known = contenders.CONTENDERS
    if all(name in known and groups[name][0].lr == known[name].lr for name in ranked):
        others = [name for name in ranked if not known[name].searched]
        each = "Each way" + (f" but {', '.join(others)}" if others else "")
        notes.append(
            f"{each} has the best of two to four learning rates that were tried for it (commpress "
            "demo --search)."
        )
    if len(groups[ranked[0]]) > 1:
        notes.append("Mean and standard deviation over seeds.")
    if "sign" in ranked:
        notes.append(
            "sign may end at another loss in a long run: see exact_steps= and finer codecs for "
            "the output layer."
        )
    ours = next((name for name in ranked if groups[name][0].ours), None)
    peer = next((name for name in ranked if not groups[name][0].ours and name != FLOOR), None)
    if ours is not None and peer is not None:
        gap = loss_of(groups[peer]) - loss_of(groups[ours])
        ahead, behind = (ours, peer) if gap > 0 else (peer, ours)
        whose = "commpress's best way" if gap > 0 else "the best of the others"
        notes.append(
            f"{whose}, {ahead}, ends {abs(gap):.3f} nats lower than {behind}, "
            f"{'the best of the others' if gap > 0 else 'the best of commpress'}."
        )
    notes.append(
        "Bytes: as the kernel counts them, headers and acknowledgements included."
        if first.sent_bytes is not None
        else "Bytes are not told by this system."
    )
    notes.append(
        f"{first.ranks} ranks of one thread share this machine's cores; one run of a way differs "
        "from the next in the last digits."
    )
    if FLOOR in ranked and ours is not None:
        above = loss_of(groups[ours]) - loss_of(groups[FLOOR])
        distance = f"Distance to {FLOOR}: {ours}, the best of commpress, {above:+.3f} nats"
        notes.append(
            distance
            + (
                (
                    f"; {peer}, the best of the others, "
                    f"{loss_of(groups[peer]) - loss_of(groups[FLOOR]):+.3f}."
                )
                if peer is not None
                else "."
            )
        )
    return notes


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def draw(finishes: list[Finish], path: str, network: SlowNetwork) -> None:
    """Loss against seconds, a line for each way, of its first seed; smoothed over five steps or a
    fiftieth of them."""
    groups = by_name(finishes)
    title = f"{finishes[0].parameters / 1e6:.2g} M parameters, {network.says.split(' (')[0]}"
    if network.hosts is not None:
        title = (
            f"A GPT of {finishes[0].parameters / 1e6:.2g} M parameters on {finishes[0].ranks} "
            "hosts, links of "
        ) + (f"{(network.hosts.rate or 0) / 1e6:g} Mbit/s")
    lines: dict[str, Curve] = {}
    colours = {True: iter(OURS * 9), False: iter(PEERS * 9)}
    for name, group in groups.items():
        first = group[0]
        if first.losses:
            note = f"{loss_of(group):.2f}"
            lines[name] = Curve(
                first.times,
                smooth(first.losses),
                next(colours[first.ours]),
                note,
                dashed=not first.ours,
            )
    if path.endswith(".svg"):
        starts = [line.ys[len(line.ys) // 20] for line in lines.values()]
        curves(
            path,
            title,
            lines,
            x="seconds of training",
            y="training loss, nats per byte",
            high=max(starts, default=None),
        )
        return
    from commpress.cli import charts

    with charts.chart(path, title) as (panel,):
        for name, line in lines.items():
            style: dict[str, Any] = {"linestyle": "--" if line.dashed else "-"}
            panel.plot(line.xs, line.ys, label=f"{name} {line.note}", color=line.colour, **style)
        panel.set(xlabel="seconds of training", ylabel="training loss, nats per byte")


def smooth(losses: list[float]) -> list[float]:
    window = max(len(losses) // 50, 5)
    sums = [0.0, *accumulate(losses)]
    return [(sums[i] - sums[max(i - window, 0)]) / min(i, window) for i in range(1, len(sums))]
