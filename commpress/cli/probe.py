"""Measurement of how fast ranks reach each other inside a node and between nodes, and of what
processors pay for it."""

import argparse
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from functools import partial
from hashlib import sha256
from itertools import combinations, count, cycle
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
Report = Callable[[float, str], None]
Call = Callable[[], object]
WARM = 2  # calls before those that count
STRETCHES = 7  # of calls in a row, of which one may meet other work
RESTED = 1 << 17  # bytes of a row that finds a link rested
REST, REPEATS = 4e-3, 3  # seconds of such a rest; such rows for each round


def run(options: argparse.Namespace) -> int:
    options.pairs = bool(options.pairs or options.json)
    with terminal.ProgressBar("probe", lines=4) as progress:
        found = ranks.on_ranks(measure, options, progress)
    if found is None:  # not rank 0 of a launcher
        return 0
    links, pairs = found
    links.save(options.out)
    print(f"nodes {links.topology}")
    each = {"inside a node": links.inside, "between nodes": links.between}
    print(terminal.table([_cells(name, link) for name, link in each.items() if link is not None]))
    if options.pairs:
        print("\nevery pair: MB/s each way above the diagonal, latency in us below it")
        print(matrix_text(grid(pairs, links.topology.size)))
    print(f"saved: {options.out}")
    if options.json:
        rows = [asdict(pair) for pair in pairs]
        content = {**harness.machine(), "nodes": links.topology.nodes, "rows": rows}
        terminal.write_json(options.json, content)
    return 0


def _cells(name: str, link: Link) -> dict[str, str]:
    return {
        "pairs": name,
        "latency us": f"{1e6 * link.latency:.0f}",
        "one pair MB/s": f"{link.bandwidth / 1e6:.1f}",
        "a node, all at once MB/s": f"{link.together / 1e6:.1f}",
    }


Grid = list[list["Pair | None"]]


def grid(pairs: Sequence["Pair"], size: int) -> Grid:
    found: Grid = [[None] * size for _ in range(size)]
    for pair in pairs:
        found[pair.first][pair.second] = found[pair.second][pair.first] = pair
    return found


def matrix_text(values: Grid) -> str:
    rows = []
    for i, row in enumerate(values):
        rows.append({"rank": str(i)} | dict.fromkeys(map(str, range(len(row))), "-"))
        for j, pair in enumerate(row):
            if pair is not None:
                above, below = f"{pair.bandwidth / 1e6:.1f}", f"{1e6 * pair.latency:.0f}"
                rows[-1][str(j)] = above if j > i else below
    return terminal.table(rows)


# ---------------------------------------------------------------- on every rank


def on_nodes(topology: str) -> tuple[Channel, Hierarchy]:
    """A channel among all ranks, and the hierarchy on its transport."""
    channel = Channel.among(timeout=TIMEOUT)
    given = None if topology == "auto" else Topology.parse(topology)
    return channel, hierarchy_of(drive(agree(channel.inner, given)), channel.inner)


def measure(
    rank: int, size: int, options: argparse.Namespace, report: Report
) -> tuple[Links, list["Pair"]]:
    """Links, and the pairs that were measured alone: a few of each class, or all."""
    channel, hierarchy = on_nodes(options.topology)
    topology, rounds, payload = hierarchy.topology, options.rounds, options.bytes
    of_class = pairs_of(topology, None if options.pairs else PAIRS)
    codecs, numbers = TRIED if topology.layered else (), count(1)
    total = sum(map(len, of_class.values())) + len(of_class) + 1 + len(codecs)

    def done(what: str) -> None:
        number = next(numbers)
        report(number / total, f"{number}/{total}: {what}")

    pairs, links, tried = list[Pair](), dict[str, Link](), dict[str, list[BufferTrial]]()
    for name, both in of_class.items():
        for a, b in both:
            pairs.append(pair_alone(channel, topology, a, b, payload, rounds))
            done(f"{name}: ranks {a} and {b}")
    for name in of_class:
        links[name] = link_of(name, pairs, hierarchy, payload, rounds)
        done(f"{name}: all at once")
    # several passes: a machine may be slow for as long as one takes
    passes = [astuple(stack(channel, payload, max(rounds, 2))) for _ in range(PASSES)]
    done("what it costs processors")
    for codec in codecs:
        tried[codec] = trials(codec, channel, hierarchy, rounds)
        done(f"all-reduces with codec {codec}")
    usual = Stack(*map(median, zip(*passes, strict=True)))
    return Links(topology, links.get("inside"), links.get("between"), usual, tried), pairs


def link_of(
    name: str, pairs: Sequence["Pair"], hierarchy: Hierarchy, payload: int, rounds: int
) -> Link:
    """Link of a class: its pairs alone, and all of them at once."""
    topology, mine = hierarchy.topology, [p for p in pairs if p.inside == (name == "inside")]
    if name == "inside":
        transports: Mapping[int, Transport] = {0: hierarchy.inside}
        rows = max(len(node) * (len(node) - 1) for node in topology.nodes)
    else:
        transports, rows = hierarchy.between, topology.widest * (len(topology.nodes) - 1)
    took = seconds_of([exchange(t, payload, i) for i, t in transports.items()], rounds)
    latency, bandwidth, rested = (
        median(getattr(pair, figure) for pair in mine)
        for figure in ("latency", "bandwidth", "rested")
    )
    burst = max(RESTED - bandwidth * rested, 0.0) if rested else 0.0
    return Link(latency, bandwidth, rows * payload / max(took - latency, latency / 10), burst)


def pairs_of(topology: Topology, most: int | None = None) -> dict[str, list[tuple[int, int]]]:
    """Up to ``most`` pairs of each class that there is, evenly chosen among all."""
    every: dict[str, list[tuple[int, int]]] = {}
    for a, b in combinations(range(topology.size), 2):
        name = "inside" if topology.node(a) == topology.node(b) else "between"
        every.setdefault(name, []).append((a, b))
    return {
        name: pairs[:: max(len(pairs) // (most or len(pairs)), 1)][:most]
        for name, pairs in sorted(every.items(), reverse=True)
    }


@dataclass(frozen=True)
class Pair:
    """Two ranks that exchange rows while all others wait: seconds of the shortest exchange, bytes
    per second each way, and what ``RESTED`` bytes take longer than the shortest after a rest."""

    first: int
    second: int
    inside: bool  # one node
    latency: float
    bandwidth: float
    rested: float = 0.0  # between nodes only


def pair_alone(
    channel: Channel, topology: Topology, a: int, b: int, payload: int, rounds: int
) -> Pair:
    part = part_of(channel.inner, (a, b))
    parts = [] if part is None else [part]
    short, long_one, longer = (
        [exchange(part, row) for part in parts] for row in (8, payload, RESTED)
    )
    latency, took = (seconds_of(calls, rounds) for calls in (short, long_one))
    inside = topology.node(a) == topology.node(b)

    def after_a_rest() -> float:
        if parts:
            sleep(REST)
        # the first wakes both ends
        _, empty, full = (harness.seconds(partial(_all, calls)) for calls in (short, short, longer))
        return full - empty

    rested = 0.0 if inside else harness.medians({"": after_a_rest}, REPEATS * rounds)[""]
    # an exchange may be too fast to tell from an empty one
    return Pair(a, b, inside, latency, payload / max(took - latency, latency / 10), rested)


def exchange(transport: Transport, row: int, index: int = 0) -> Callable[[], Steps[None]]:
    """A call that makes the steps of an exchange of rows of so many bytes."""
    # not zeros: nobody has touched such memory
    rows, numbers = torch.ones(2, transport.size, HEADER + row, dtype=torch.uint8), count(1)

    def steps() -> Steps[None]:
        number = next(numbers)
        frame = Frame(ALL_TO_ALL, transport.size, "probe", rows.shape[2], number, index)
        rows[1, :, :HEADER] = frame.pack()
        yield transport.all_to_all(rows[0], rows[1], 64 * number + index % 64)

    return steps


def _all(calls: Sequence[Callable[[], Steps[None]]]) -> None:
    drive(overlapped([call() for call in calls], limit=max(len(calls), 1)))


def seconds_of(calls: Sequence[Callable[[], Steps[None]]], rounds: int) -> float:
    """Median seconds of these at once, on the slowest rank; collective. The first opens connections
    and touches memory."""
    once = partial(harness.together, partial(_all, calls))
    return harness.medians({"": once}, rounds, warm=1)[""]


# ---------------------------------------------------------------- what processors pay


def stack(channel: Channel, payload: int, few: int) -> Stack:
    """All ranks with all others: short rows for messages, ``payload`` bytes of a rank in all for
    bytes; ``few``: calls in a row that take longer than the shortest.

    Short calls alternate with work, as they do with encoding: a thread that sleeps is woken late on
    a busy processor, and what it needs has left the caches.
    """
    peers, size = channel.size - 1, channel.size
    fresh = cycle(torch.ones(16, 2, WORK, dtype=torch.uint8))

    def work() -> None:
        into, source = next(fresh)
        into.copy_(source)

    alone = in_a_row(work, SHORT)

    def beside(call: Call, calls: int = SHORT) -> tuple[float, float]:
        """Cost of a call, the work not counted."""

        def both_of_them() -> None:
            work()
            call()

        both = in_a_row(both_of_them, calls)
        return max(both[0] - alone[0], 0.0), max(both[1] - alone[1], 0.0)

    large = max(payload // peers, 2 * FIRST)
    short, long_one, longer = (
        partial(_all, [exchange(channel.inner, row)]) for row in (8, FIRST, large)
    )
    shortest, cost = beside(short)
    more = in_a_row(longer, few)[1] - in_a_row(long_one, few)[1]
    little = torch.zeros(64 * size)  # Gloo halves what a rank passes on, and sends no empty halves
    ring, ring_cost = in_a_row(lambda: dist.all_reduce(little), SHORT)

    def ring_byte(kind: torch.dtype) -> float:
        """Seconds of cores for a byte of torch's own all-reduce, of gradients that no cache holds;
        as many messages without bytes are taken off."""
        gradients = cycle(torch.ones(8, payload // kind.itemsize, dtype=kind))
        cost = in_a_row(lambda: dist.all_reduce(next(gradients)), few)[1]
        return max(cost - ring_cost, 0.0) / (2 * peers * payload)

    reduced = Reduced(64 * size, "sign", channel)
    reduce, reduce_core = beside(reduced.reduce)
    besides = []  # the kernels, of an all-reduce of short and one of longer rows
    for row in (64, FIRST):
        reduced, kernels = Reduced(row // 4 * size, "none", channel), Watched()
        with instead(kernels):
            cost_of_row = beside(reduced.reduce, 4 * few)[1]
        besides.append(cost_of_row - _sum(kernels.seconds) / (4 * few + WARM))
    cores = host_cores()
    share = max(size / cores, 1.0) if cores else 0.0
    with computing():
        # here being late is not others' work but what is asked for
        busy, ring_busy = (
            in_a_row(call, SHORT, fmean)[0] for call in (short, lambda: dist.all_reduce(little))
        )
    return Stack(
        exchange=shortest,
        message=cost / size / peers,
        byte=max(more, 0.0) / size / peers / (2 * (large - FIRST)),
        ring=ring,
        cores=cores,
        ring_byte=ring_byte(torch.float32),
        half_byte=ring_byte(torch.bfloat16),
        reduce=reduce,
        busy=busy,
        ring_message=ring_cost / (4 * peers * size),  # all but one of 2 · size halves, twice
        reduce_core=reduce_core / size,
        ring_busy=ring_busy,
        # each end of each row, twice
        first=max(besides[1] - besides[0], 0.0) / size / (4 * peers),
        uneven=uneven(short, payload // 4, share) if cores else 0.0,
    )


def uneven(short: Call, numel: int, share: float) -> float:
    """The scheduler moves threads to idle cores late, and an exchange waits for the last of
    them."""
    pieces = one_message(numel, codec_named("int8"), ROWS).pieces
    rows, alone = torch.zeros(ROWS, pieces.row_bytes, dtype=torch.uint8), [0.0]
    encode = encoding(torch.ones(numel), rows, pieces)

    def both() -> None:
        start = thread_time()
        encode()
        alone.append(thread_time() - start)
        short()

    waits = in_a_row(short, SHORT)[0]
    encode()
    took = in_a_row(both, SHORT)[0]
    fair = _sum(sum(alone)) / dist.get_world_size() / (SHORT + WARM) * share
    return max(took - waits, 0.0) / fair


def in_a_row(
    call: Call, calls: int, usual: Callable[[list[float]], float] = median
) -> tuple[float, float]:
    """Cost of one call: seconds of the slowest rank, and seconds of cores of all ranks together;
    the usual stretch counts."""
    for _ in range(WARM):
        call()
    dist.barrier()
    parts = min(calls, STRETCHES)
    took, cost = torch.zeros(2, parts, dtype=torch.float64)
    for i in range(parts):
        count = (i + 1) * calls // parts - i * calls // parts
        start, busy = perf_counter(), process_time()
        for _ in range(count):
            call()
        took[i], cost[i] = (perf_counter() - start) / count, (process_time() - busy) / count
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(cost)
    return usual(took.tolist()), usual(cost.tolist())


def _sum(figure: float) -> float:
    """Sum over all ranks."""
    every = torch.tensor([figure], dtype=torch.float64)
    dist.all_reduce(every)
    return float(every)


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
