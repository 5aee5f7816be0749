"""Measurement of how fast ranks reach each other inside a node and between nodes, and of what
processors pay for it."""

import argparse
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from itertools import combinations, cycle
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time, sleep, thread_time
from typing import Any

import torch
import torch.distributed as dist

from commpress.cli import harness, ranks, terminal
from commpress.cli.reduced import TRIED, Reduced, trials
from commpress.codecs import codec_named
from commpress.collectives.buckets import one_message
from commpress.collectives.channel import Channel
from commpress.collectives.frame import ALL_TO_ALL, HEADER, Frame
from commpress.collectives.measured_links import FIRST, BufferTrial, Link, Links, Stack
from commpress.collectives.topology import Topology, agree
from commpress.collectives.transports.transport import Transport, part_of
from commpress.collectives.two_level import Hierarchy, hierarchy_of
from commpress.kernels.devices import arithmetic, instead
from commpress.plan.costs import ROWS, encoding
from commpress.work import Steps, overlapped
from commpress.work import run as drive

TIMEOUT = timedelta(minutes=5)
PAIRS = 4  # of each class that are measured alone
SHORT = 50  # shortest exchanges in a row
PASSES = 3  # over all that concerns processors
WORK = 1 << 20  # bytes copied between two of them
Among = Mapping[int, Transport]
WARM = 2  # calls before those that count
STRETCHES = 7  # of calls in a row, of which one may meet other work
RESTED = 1 << 17  # bytes of a row that finds a link rested
REST, REPEATS = 4e-3, 3  # seconds of such a rest; such rows for each round


def run(options: argparse.Namespace) -> int:
    with harness.ProgressBar("probe", lines=4) as progress:
        found = ranks.on_ranks(measure_both, options, progress)
    if found is None:  # not rank 0 of a launcher
        return 0
    links, pairs = found
    links.save(options.out)
    print(f"nodes {links.topology}")
    each = {"inside a node": links.inside, "between nodes": links.between}
    print(terminal.table([_cells(name, link) for name, link in each.items() if link is not None]))
    if links.stack is not None:
        print("\n".join(_said(links.stack)))
    values = grid(pairs, links.topology.size)
    if pairs:
        print("\nevery pair: MB/s each way above the diagonal, latency in us below it")
        print(matrix_text(values))
    print(f"saved: {options.out}")
    if options.plot:
        draw(options.plot, values)
        print(f"picture: {options.plot}")
    if options.json:
        nodes, rows = links.topology.nodes, list(map(asdict, pairs))
        harness.write_json(options.json, {**harness.machine(), "nodes": nodes, "rows": rows})
    return 0


def _cells(name: str, link: Link) -> dict[str, str]:
    return {
        "pairs": name,
        "latency us": f"{1e6 * link.latency:.0f}",
        "one pair MB/s": f"{link.bandwidth / 1e6:.1f}",
        "a node, all at once MB/s": f"{link.together / 1e6:.1f}",
    }


def _said(stack: Stack) -> Iterator[str]:
    yield (
        f"shortest calls of all: exchange {1e6 * stack.exchange:.0f} us, compressed all-reduce "
        f"{1e6 * stack.reduce:.0f}, torch's {1e6 * stack.ring:.0f}"
    )
    yield (
        f"of a core: {1e6 * stack.message:.0f} us for a message, {1e9 * stack.byte:.2f} ns for "
        f"a byte at each end, {1e6 * stack.reduce_core:.0f} us for a rank's compressed "
        "all-reduce"
    )
    yield (
        f"in torch's ring: {1e6 * stack.ring_message:.0f} us for a message, "
        f"{1e9 * stack.ring_byte:.2f} ns for a byte"
    )


Grid = list[list["Pair | None"]]


def grid(pairs: Sequence["Pair"], size: int) -> Grid:
    found: Grid = [[None] * size for _ in range(size)]
    for pair in pairs:
        found[pair.first][pair.second] = found[pair.second][pair.first] = pair
    return found


def matrix_text(values: Grid) -> str:
    rows = []
    for i, row in enumerate(values):
        rows.append([str(i), *["-"] * len(row)])
        for j, pair in enumerate(row):
            if pair is not None:
                above, below = f"{pair.bandwidth / 1e6:.1f}", f"{1e6 * pair.latency:.0f}"
                rows[-1][1 + j] = above if j > i else below
    return terminal.render(["rank", *map(str, range(len(values)))], rows)


def draw(path: str, values: Grid) -> None:
    from commpress.cli import charts

    rates = [[None if p is None else p.bandwidth / 1e6 for p in row] for row in values]
    side = max(4.0, 0.6 * len(values))
    with charts.chart(
        path, "MB/s each way, one pair of ranks at a time", size=(side, side)
    ) as drawn:
        charts.matrix(drawn[0], rates)


# ---------------------------------------------------------------- processors


class Watched:
    """The kernels of this processor, and the seconds of it that they have taken in this thread."""

    def __init__(self) -> None:
        self.seconds, self._kernels = 0.0, arithmetic(torch.device("cpu"))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._kernels, name)

        def watched(*args: Any, **options: Any) -> Any:
            start = thread_time()
            result = kernel(*args, **options)
            self.seconds += thread_time() - start
            return result

        return watched


@contextmanager
def computing() -> Iterator[None]:
    """One more thread of this process that computes, as backward does while gradients travel."""
    ended, factor = threading.Event(), torch.ones(384, 384)

    def multiply() -> None:
        while not ended.is_set():
            factor @ factor

    thread = threading.Thread(target=multiply, name="commpress-computing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def host_cores() -> int:
    """Cores of the host that all ranks run on, 0 if they run on several; collective."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    mine = int.from_bytes(sha256(boot.encode()).digest()[:7])
    ends = torch.tensor([mine, -mine])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return (os.cpu_count() or 1) if ends[0] == -ends[1] else 0


# ---------------------------------------------------------------- on every rank


def on_nodes(topology: str) -> tuple[Channel, Hierarchy]:
    """A channel among all ranks, and the hierarchy on its transport."""
    channel = Channel.among(timeout=TIMEOUT)
    given = None if topology == "auto" else Topology.parse(topology)
    return channel, hierarchy_of(drive(agree(channel.inner, given)), channel.inner)


def measure(
    rank: int, size: int, options: argparse.Namespace, report: Callable[[float, str], None]
) -> Links:
    """Needs ``topology``, ``bytes`` and ``rounds`` of the options."""
    channel, hierarchy = on_nodes(options.topology)
    topology, probe = hierarchy.topology, Probe(options.rounds)
    tasks: list[tuple[str, Callable[[], object]]] = []
    for name, pairs in pairs_of(topology).items():
        for pair in pairs:
            alone, what = _alone(channel, pair), f"{name}: ranks {pair[0]} and {pair[1]}"
            tasks.append((what, partial(probe.keep, f"{name} latency", alone, 8)))
            tasks.append((what, partial(probe.keep, f"{name} alone", alone, options.bytes)))
            if name == "between":
                tasks.append((what, partial(probe.keep_rested, alone)))
    every: dict[str, Among] = {"inside": {0: hierarchy.inside}, "between": hierarchy.between}
    for name, all_of in every.items():
        if pairs_of(topology)[name]:
            call = partial(probe.keep, f"{name} together", all_of, options.bytes)
            tasks.append((f"{name}: all at once", call))
    stacks, tried = list[Stack](), dict[str, list[BufferTrial]]()
    passes = partial(probe.stack, channel, options.bytes)
    tasks.append(("what it costs processors", lambda: stacks.append(passes())))

    def try_codec(codec: str) -> None:
        tried[codec] = trials(codec, channel, hierarchy, options.rounds)

    for codec in TRIED if topology.layered else ():
        tasks.append((f"all-reduces with codec {codec}", partial(try_codec, codec)))
    for i, (what, task) in enumerate(tasks, 1):
        task()
        report(i / len(tasks), f"{i}/{len(tasks)}: {what}")
    return replace(probe.links(topology, options.bytes), stack=stacks[0], trials=tried)


def _alone(channel: Channel, pair: tuple[int, int]) -> Among:
    """The transport of two ranks; nothing on others."""
    part = part_of(channel.inner, pair)
    return {} if part is None else {0: part}


@dataclass(frozen=True)
class Pair:
    """Two ranks that exchange rows while all others wait: seconds of the shortest exchange, bytes
    per second each way."""

    first: int
    second: int
    inside: bool  # one node
    latency: float
    bandwidth: float


def measure_both(
    rank: int, size: int, options: argparse.Namespace, report: Callable[[float, str], None]
) -> tuple[Links, list[Pair]]:
    """Links, and every pair where that is asked for."""
    wanted = options.pairs or bool(options.plot) or bool(options.json)
    if not wanted:
        return measure(rank, size, options, report), []
    links = measure(rank, size, options, lambda done, what: report(0.5 * done, what))
    return links, every_pair(options, lambda done, what: report(0.5 + 0.5 * done, what))


def every_pair(options: argparse.Namespace, report: Callable[[float, str], None]) -> list[Pair]:
    channel, hierarchy = on_nodes(options.topology)
    topology, probe, found = hierarchy.topology, Probe(options.rounds), []
    every = list(combinations(range(topology.size), 2))
    for i, (a, b) in enumerate(every):
        among = _alone(channel, (a, b))
        latency, took = probe.time(among, 8), probe.time(among, options.bytes)
        inside = topology.node(a) == topology.node(b)
        found.append(Pair(a, b, inside, latency, options.bytes / max(took - latency, latency / 10)))
        report((i + 1) / len(every), f"pair {i + 1}/{len(every)}: ranks {a} and {b}")
    return found


def pairs_of(topology: Topology) -> dict[str, list[tuple[int, int]]]:
    """Up to ``PAIRS`` pairs of each class, evenly chosen among all."""
    every: dict[str, list[tuple[int, int]]] = {"inside": [], "between": []}
    for a, b in combinations(range(topology.size), 2):
        every["inside" if topology.node(a) == topology.node(b) else "between"].append((a, b))
    return {name: pairs[:: max(len(pairs) // PAIRS, 1)][:PAIRS] for name, pairs in every.items()}


def _median(took: list[float]) -> float:
    """Of the slowest rank's seconds."""
    return float(harness.slowest({"": took})[""].quantile(0.5))


class Probe:
    """Runs exchanges and keeps the median seconds of each: the slowest rank's, equal on all
    ranks."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.sequence = rounds, 1
        self.seconds: dict[str, list[float]] = {}

    def keep(self, name: str, among: Among, payload: int) -> None:
        self.seconds.setdefault(name, []).append(self.time(among, payload))

    def keep_rested(self, among: Among) -> None:
        self.seconds.setdefault("between rested", []).append(self._rested(among))

    def time(self, among: Among, payload: int) -> float:
        rows = {
            i: torch.zeros(2, t.size, HEADER + payload, dtype=torch.uint8) for i, t in among.items()
        }
        took = []
        for _ in range(self.rounds + 1):
            dist.barrier()
            start = perf_counter()
            jobs = [self._exchange(t, rows[i][0], rows[i][1], i) for i, t in among.items()]
            drive(overlapped(jobs, limit=max(len(jobs), 1)))
            took.append(perf_counter() - start if among else 0.0)
            self.sequence += 1
        return _median(took[1:])  # the first opens connections and touches memory

    def _rested(self, among: Among) -> float:
        """Seconds that ``RESTED`` bytes take longer than the shortest exchange, each time after a
        rest."""
        short, long_one = ([self._rows(t, row) for t in among.values()] for row in (8, RESTED))
        took = []
        for _ in range(REPEATS * self.rounds):
            if among:
                sleep(REST)
            # the first wakes both ends
            _, empty, full = (self._timed(calls) for calls in (short, short, long_one))
            took.append(full - empty)
        return _median(took)

    def _timed(self, calls: list[Callable[[], None]]) -> float:
        start = perf_counter()
        for call in calls:
            call()
        self.sequence += 1
        return perf_counter() - start

    def stack(self, channel: Channel, payload: int) -> Stack:
        """Several passes: a machine may be slow for as long as one takes."""
        passes = [astuple(self._stack(channel, payload)) for _ in range(PASSES)]
        return Stack(*map(median, zip(*passes, strict=True)))

    def _stack(self, channel: Channel, payload: int) -> Stack:
        """All ranks with all others: short rows for messages, ``payload`` bytes of a rank in all
        for bytes.

        Short calls alternate with work, as they do with encoding: a thread that sleeps is woken
        late on a busy processor, and what it needs has left the caches.
        """
        transport, peers, size = channel.inner, channel.size - 1, channel.size
        fresh = cycle(torch.ones(16, 2, WORK, dtype=torch.uint8))

        def work() -> None:
            into, source = next(fresh)
            into.copy_(source)

        def beside(call: Callable[[], object], calls: int = SHORT) -> tuple[float, float]:
            """Cost of a call, the work not counted."""

            def both_of_them() -> None:
                work()
                call()

            both = self._in_a_row(both_of_them, calls)
            return max(both[0] - alone[0], 0.0), max(both[1] - alone[1], 0.0)

        alone = self._in_a_row(work, SHORT)
        short = self._rows(transport, 8)
        exchange, cost = beside(short)
        message = cost / size / peers
        large = max(payload // peers, 2 * FIRST)
        long_one, longer = (self._rows(transport, row) for row in (FIRST, large))
        more = self._in_a_row(longer, self.few)[1] - self._in_a_row(long_one, self.few)[1]
        byte = max(more, 0.0) / size / peers / (2 * (large - FIRST))
        few = torch.zeros(64 * size)  # Gloo halves what a rank passes on, and sends no empty halves
        ring, ring_cost = self._in_a_row(lambda: dist.all_reduce(few), SHORT)
        ring_message = ring_cost / (4 * peers * size)  # all but one of 2 · size halves, twice
        reduced = Reduced(64 * size, "sign", channel)
        reduce, reduce_core = beside(reduced.reduce)
        besides = []  # the kernels, of an all-reduce of short and one of longer rows
        for row in (64, FIRST):
            reduced, kernels = Reduced(row // 4 * size, "none", channel), Watched()
            with instead(kernels):
                cost = beside(reduced.reduce, 4 * self.few)[1]
            besides.append(cost - self._sum(kernels.seconds) / (4 * self.few + WARM))
        # each end of each row, twice
        first = max(besides[1] - besides[0], 0.0) / size / (4 * peers)
        cores = host_cores()
        uneven = (
            self._uneven(short, torch.ones(payload // 4), max(size / cores, 1.0)) if cores else 0.0
        )
        with computing():
            # here being late is not others' work but what is asked for
            busy = self._in_a_row(short, SHORT, fmean)[0]
            ring_busy = self._in_a_row(lambda: dist.all_reduce(few), SHORT, fmean)[0]
        whole, half = (
            self._ring_byte(size, payload, kind, ring_cost)
            for kind in (torch.float32, torch.bfloat16)
        )
        return Stack(
            exchange,
            message,
            byte,
            ring,
            cores,
            whole,
            half,
            reduce,
            busy,
            ring_message,
            reduce_core / size,
            ring_busy,
            first,
            uneven,
        )

    def _uneven(self, short: Callable[[], None], x: torch.Tensor, share: float) -> float:
        """The scheduler moves threads to idle cores late, and an exchange waits for the last of
        them."""
        pieces = one_message(x.numel(), codec_named("int8"), ROWS).pieces
        rows, alone = torch.zeros(ROWS, pieces.row_bytes, dtype=torch.uint8), [0.0]
        encode = encoding(x, rows, pieces)

        def both() -> None:
            start = thread_time()
            encode()
            alone.append(thread_time() - start)
            short()

        waits = self._in_a_row(short, SHORT)[0]
        encode()
        took = self._in_a_row(both, SHORT)[0]
        fair = self._sum(sum(alone)) / dist.get_world_size() / (SHORT + WARM) * share
        return max(took - waits, 0.0) / fair

    @property
    def few(self) -> int:
        """Calls in a row that take longer than the shortest."""
        return max(self.rounds, 2)

    def _rows(self, transport: Transport, row: int) -> Callable[[], None]:
        # not zeros: nobody has touched such memory
        rows = torch.ones(2, transport.size, HEADER + row, dtype=torch.uint8)
        return lambda: drive(self._exchange(transport, rows[0], rows[1], 0))

    def _ring_byte(self, size: int, payload: int, kind: torch.dtype, short: float) -> float:
        """Of cores for a byte sent by torch's own all-reduce, of gradients that no cache holds any
        more.

        ``short``: what as many messages cost without bytes.
        """
        gradients = cycle(torch.ones(8, payload // kind.itemsize, dtype=kind))
        cost = self._in_a_row(lambda: dist.all_reduce(next(gradients)), self.few)[1]
        return max(cost - short, 0.0) / (2 * (size - 1) * payload)

    def _in_a_row(
        self, call: Callable[[], object], calls: int, usual: Callable[[list[float]], float] = median
    ) -> tuple[float, float]:
        """Of one call: seconds of the slowest rank, and seconds of cores of all ranks together; the
        usual stretch counts."""

        def repeat(count: int) -> None:
            for _ in range(count):
                call()
                self.sequence += 1

        repeat(WARM)
        dist.barrier()
        parts = min(calls, STRETCHES)
        took, cost = torch.zeros(2, parts, dtype=torch.float64)
        for i in range(parts):
            count = (i + 1) * calls // parts - i * calls // parts
            start, busy = perf_counter(), process_time()
            repeat(count)
            took[i], cost[i] = (perf_counter() - start) / count, (process_time() - busy) / count
        dist.all_reduce(took, dist.ReduceOp.MAX)
        dist.all_reduce(cost)
        return usual(took.tolist()), usual(cost.tolist())

    def _sum(self, figure: float) -> float:
        """Over all ranks."""
        every = torch.tensor([figure], dtype=torch.float64)
        dist.all_reduce(every)
        return float(every)

    def _exchange(
        self, transport: Transport, out: torch.Tensor, inp: torch.Tensor, index: int
    ) -> Steps[None]:
        frame = Frame(ALL_TO_ALL, transport.size, "probe", inp.shape[1], self.sequence, index)
        inp[:, :HEADER] = frame.pack()
        yield transport.all_to_all(out, inp, 64 * self.sequence + index % 64)

    def links(self, topology: Topology, payload: int) -> Links:
        nodes, slices = topology.nodes, topology.widest
        sent = {
            "inside": max(len(node) * (len(node) - 1) for node in nodes) * payload,
            "between": slices * (len(nodes) - 1) * payload,
        }
        found: dict[str, Link | None] = {"inside": None, "between": None}
        for name in found:
            if f"{name} together" in self.seconds:
                latency, alone = (
                    median(self.seconds[f"{name} {what}"]) for what in ("latency", "alone")
                )
                least = latency / 10  # an exchange too fast to tell from an empty one
                bandwidth = payload / max(alone - latency, least)
                together = max(self.seconds[f"{name} together"][0] - latency, least)
                rested = self.seconds.get(f"{name} rested")
                burst = max(RESTED - bandwidth * median(rested), 0.0) if rested else 0.0
                found[name] = Link(latency, bandwidth, sent[name] / together, burst)
        return Links(topology, found["inside"], found["between"])
