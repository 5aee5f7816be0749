"""The timed loopback: a transport that moves sizes. One rank of each class stands for all of its
class.

What a rank sends is read from the tensors that the production generators pass: how many bytes to
which rank. What would arrive is what is wanted, header by header, so agreement is assumed and not
simulated. Payloads are never touched.

When a class of n ranks sends b bytes each to ranks of another class of m, each of those receives
n·b/m.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from commpress.collectives.frame import HEADER
from commpress.collectives.transports.rows import Rows
from commpress.plan.clock import Clock, Cores, Process, Signal, TokenBucket
from commpress.plan.cluster import Class, Classes, Cluster
from commpress.plan.costs import KernelSeconds
from commpress.work import Work

# where a peer is: in the node, below the switch, beyond it, of another kind
INSIDE, RACK, ABROAD, FOREIGN = range(4)


class Flow(NamedTuple):
    """From one rank of a class to all its peers of one class in one place."""

    to: int  # class
    place: int
    nbytes: float
    messages: float
    each: float = -1.0  # bytes that one rank of the other class receives, where not nbytes · n / m
    latency: float = 0.0  # where it is not the cluster's
    busy: float = 0.0  # the same while every rank of the receivers computes
    # seconds of a core for each byte at each end, where they are not the cluster's
    byte: float = -1.0
    # seconds of the sending thread for each message, where they are not the cluster's
    message: float = -1.0


@dataclass(eq=False)
class Posted:
    """One operation of the rank of one class, as its generator posted it; also the ``Work`` that
    the generator yields."""

    cls: int
    tag: int
    flows: list[Flow]
    froms: set[tuple[int, int]]  # (class, place) that something is to come from
    waits: list["Posted"]  # where ``wait`` notes that the generator waits for this
    done: Signal = field(default_factory=Signal)

    def wait(self) -> None:
        self.waits.append(self)

    def seconds(self, message: float) -> float:
        """That a thread pays for its messages, ``message`` for each of the usual ones."""
        return sum(
            flow.messages * (message if flow.message < 0 else flow.message) for flow in self.flows
        )


@dataclass
class Traffic:
    """Messages and bytes that one rank of a class has sent; own rows not."""

    messages: float = 0
    nbytes: float = 0
    between: float = 0  # of them to other nodes


class Script(list[tuple[float, Posted]]):
    """Messages that a rank posted since it last waited, each with the seconds of kernels before
    it."""


@dataclass(eq=False)
class SizedTransport:
    """One rank's end, among ``members`` (global ranks, ascending) of the network."""

    network: "Network"
    cls: int
    members: np.ndarray
    rank: int
    ordered, checks = False, False  # nobody touches payloads

    def __post_init__(self) -> None:
        self.size = len(self.members)
        me = self.network.classes.every[self.cls].rank
        peers = np.flatnonzero(self.members != me)
        self._groups = self.network.grouped(me, self.members[peers])

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        out[:, :HEADER] = inp[self.rank, :HEADER]
        return self._uniform(inp.shape[1], tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        out[:, :HEADER] = inp[0, :HEADER]
        return self._uniform(inp.shape[1], tag)

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        for r in out.payloads:
            out.headers[r] = wanted[r]
        me = self.network.classes.every[self.cls].rank
        held: dict[tuple[int, int], list[int]] = {}
        for r, payload in inp.payloads.items():
            if r != self.rank:
                both = held.setdefault(self.network.where(me, int(self.members[r])), [0, 0])
                both[0] += HEADER + payload.numel()
                both[1] += 1
        flows = [Flow(*where, *both) for where, both in held.items()]
        self._prepare()
        froms = {
            self.network.where(me, int(self.members[r])) for r in out.payloads if r != self.rank
        }
        return self.network.post(self.cls, tag, flows, froms)

    def abandon(self, reason: str) -> None:
        """Nothing can be damaged here."""

    def subset(self, ranks: Sequence[int]) -> "SizedTransport | None":
        if self.rank not in ranks:
            return None
        members = self.members[sorted(ranks)]
        me = self.network.classes.every[self.cls].rank
        return SizedTransport(self.network, self.cls, members, int(np.searchsorted(members, me)))

    def _uniform(self, row: int, tag: int) -> Work:
        flows = [Flow(*where, count * row, count) for where, count in self._groups.items()]
        self._prepare()
        return self.network.post(self.cls, tag, flows, set(self._groups))

    def _prepare(self) -> None:
        self.network.kernel_seconds[self.cls].seconds += self.network.cluster.post_seconds


class Network:
    """The lines and cores of a cluster, and what is under way on them."""

    def __init__(self, cluster: Cluster, clock: Clock, *, alike: bool = True) -> None:
        self.cluster, self.clock = cluster, clock
        self.classes: Classes = cluster.classes(alike=alike)
        self.kernel_seconds = [KernelSeconds() for _ in self.classes.every]
        self.traffic = [Traffic() for _ in self.classes.every]
        self.scripts: list[Script] = [Script() for _ in self.classes.every]
        self.waits: list[Posted] = []
        # forward, backward or optimizer, of each class
        self.computing = [False] * len(self.kernel_seconds)
        self._kinds = np.repeat(
            np.arange(len(cluster.kinds)), [node.ranks * count for node, count in cluster.kinds]
        )
        self._lines: dict[tuple[str, int], TokenBucket] = {}
        self._cores: dict[int, Cores] = {}
        self._arriving: dict[tuple[int, int, int, int], deque[Signal]] = defaultdict(deque)
        self._expected: dict[tuple[int, int, int, int], deque[Signal]] = defaultdict(deque)

    def transport(self, cls: int) -> SizedTransport:
        rank = self.classes.every[cls].rank
        return SizedTransport(self, cls, np.arange(self.cluster.size), rank)

    # ------------------------------------------------------------ who is where

    def where(self, me: int, peer: int) -> tuple[int, int]:
        """(class, place) of a peer as this rank sees it."""
        nodes, rack = self.cluster.node_of, self.cluster.rack
        a, b = int(nodes[me]), int(nodes[peer])
        if a == b:
            place = INSIDE
        elif self._kinds[me] != self._kinds[peer]:
            place = FOREIGN
        else:
            place = ABROAD if rack and a // rack != b // rack else RACK
        return int(self.classes.of[peer]), place

    def grouped(self, me: int, peers: np.ndarray) -> dict[tuple[int, int], int]:
        """(class, place) → peers."""
        nodes, rack = self.cluster.node_of, self.cluster.rack
        place = np.full(len(peers), RACK)
        if rack:
            place[nodes[peers] // rack != nodes[me] // rack] = ABROAD
        place[self._kinds[peers] != self._kinds[me]] = FOREIGN
        place[nodes[peers] == nodes[me]] = INSIDE
        pairs, counts = np.unique(
            np.stack([self.classes.of[peers], place]), axis=1, return_counts=True
        )
        return {(int(c), int(p)): int(n) for (c, p), n in zip(pairs.T, counts, strict=True)}

    def cores(self, cls: Class) -> tuple[Cores, float]:
        """The cores that a class computes on, and how many of its ranks share them."""
        if self.cluster.machine_cores:
            return self._cores.setdefault(
                -1, Cores(self.clock, self.cluster.machine_cores)
            ), cls.ranks
        place = int(self.cluster.node_of[cls.rank])
        return self._cores.setdefault(
            place, Cores(self.clock, self.cluster.kinds[cls.kind][0].cores)
        ), cls.in_node

    def compute(self, cls: int, seconds: float) -> Signal:
        """One thread of each rank of the class."""
        one = self.classes.every[cls]
        cores, threads = self.cores(one)
        return cores.work(seconds * self.cluster.kinds[one.kind][0].slowdown, threads)

    # ------------------------------------------------------------ what is posted

    def post(self, cls: int, tag: int, flows: list[Flow], froms: set[tuple[int, int]]) -> Posted:
        """Note an operation; it starts when the arithmetic before it has been paid for
        (``start``)."""
        posted = Posted(cls, tag, flows, froms, self.waits)
        charged = self.kernel_seconds[cls]
        self.scripts[cls].append((charged.seconds, posted))
        charged.seconds = 0.0
        return posted

    def start(self, posted: Posted) -> None:
        """From now on its bytes are on their way."""
        ends = [self._send(posted, flow) for flow in posted.flows]
        ends += [
            self._meet(self._expected, self._arriving, (c, posted.cls, posted.tag, p))
            for c, p in posted.froms
        ]
        when_all(ends, posted.done.fire)

    def _send(self, posted: Posted, flow: Flow) -> Signal:
        """The signal says that the sender is rid of it; the receiver hears of it a latency
        later."""
        cluster, source, sink = (
            self.cluster,
            self.classes.every[posted.cls],
            self.classes.every[flow.to],
        )
        traffic = self.traffic[posted.cls]
        traffic.messages, traffic.nbytes = (
            traffic.messages + flow.messages,
            traffic.nbytes + flow.nbytes,
        )
        back = (posted.cls, flow.to, posted.tag, flow.place)
        arrived = self._meet(self._arriving, self._expected, back)
        each = flow.each if flow.each >= 0 else flow.nbytes * source.ranks / sink.ranks
        gone = Signal()
        if flow.place == INSIDE:
            node = cluster.kinds[source.kind][0]
            last = self._line("inside", source, node.inside).carry(flow.nbytes * source.in_node)
            latency = cluster.inside_latency
        else:
            traffic.between += flow.nbytes
            last, latency = self._between(source, sink, flow, each), cluster.latency
        ends = [gone]
        known = flow.byte >= 0
        if (
            cost := flow.nbytes * flow.byte
            if known
            else flow.messages * cluster.row_seconds(flow.nbytes / flow.messages)
        ):
            ends.append(self.compute(posted.cls, cost))
            ends.append(self.compute(flow.to, cost * each / flow.nbytes))
        cores, _ = self.cores(sink)

        def arrive() -> None:
            if flow.latency:
                waits = max(flow.latency, flow.busy if self.computing[flow.to] else 0.0)
            else:
                waits = max(latency, cluster.busy_latency if cores.taken else 0.0)
            self.clock.at(self.clock.now + waits, arrived.fire)

        self.clock.at(last, gone.fire)
        when_all(ends, arrive)
        return gone

    def _between(self, source: Class, sink: Class, flow: Flow, each: float) -> float:
        cluster, out, into = self.cluster, flow.nbytes * source.in_node, each * sink.in_node
        a, b = cluster.kinds[source.kind][0], cluster.kinds[sink.kind][0]
        ends = [
            self._line("out", source, a.nic, a.burst).carry(out),
            self._line("in", sink, b.nic, b.burst).carry(into),
        ]
        if flow.place == FOREIGN and a.foreign:
            ends.append(self._line("foreign out", source, a.foreign).carry(out))
        if flow.place == FOREIGN and b.foreign:
            ends.append(self._line("foreign in", sink, b.foreign).carry(into))
        if flow.place != RACK and cluster.oversubscription > 1:
            ends.append(self._line("up", source, a.nic / cluster.oversubscription).carry(out))
            ends.append(self._line("down", sink, b.nic / cluster.oversubscription).carry(into))
        return max(ends)

    def _line(self, name: str, cls: Class, rate: float, burst: float = 0.0) -> TokenBucket:
        return self._lines.setdefault(
            (name, int(self.cluster.node_of[cls.rank])), TokenBucket(self.clock, rate, burst)
        )

    def _meet(
        self,
        mine: dict[tuple[int, int, int, int], deque[Signal]],
        theirs: dict[tuple[int, int, int, int], deque[Signal]],
        key: tuple[int, int, int, int],
    ) -> Signal:
        """One signal for both sides, whoever comes first; messages of one key in order."""
        if theirs[key]:
            return theirs[key].popleft()
        signal = Signal()
        mine[key].append(signal)
        return signal

    # ------------------------------------------------------------ one step of a generator

    def pay(self, cls: int) -> Process:
        """Let time pass for what a generator has just done, and start what it posted."""
        script, charged = self.scripts[cls], self.kernel_seconds[cls]
        posts, rest = [*script], charged.seconds
        script.clear()
        charged.seconds = 0.0
        # who computes fills what would stay idle
        slower = 1.0 if any(self.computing) else self.cluster.uneven
        for seconds, posted in posts:
            yield self.compute(cls, seconds * slower + posted.seconds(self.cluster.message_seconds))
            self.start(posted)
        yield self.compute(cls, rest * slower)

    def waited_for(self, work: Work) -> list[Signal]:
        """Works that a generator waits for when it yields this one, which may be several in one."""
        self.waits.clear()
        work.wait()
        return [posted.done for posted in self.waits]


def when_all(signals: Sequence[Signal], call: Callable[[], None]) -> None:
    left = sum(not signal.done for signal in signals)
    if left == 0:
        call()
        return

    def one() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            call()

    for signal in signals:
        if not signal.done:
            signal.then(one)
