"""The timed loopback: a transport that moves sizes. One rank of each class stands for all of its
class.

What a rank sends is read from the tensors that the production generators pass: how many bytes to
which rank. What would arrive is what is wanted, header by header, so agreement is assumed and not
simulated. Payloads are never touched.

When a class of n ranks sends b bytes each to ranks of another class of m, each of those receives
n·b/m.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from commpress.collectives.frame import HEADER, Rows
from commpress.plan.clock import Clock, Cores, Process, Signal, TokenBucket
from commpress.plan.cluster import Class, Classes, Cluster
from commpress.plan.costs import Costs, SizedKernels
from commpress.work import Work

INSIDE, OUTSIDE = 0, 1  # places of a peer: in the node or not
Where = tuple[int, int]  # class, place


class Wire(NamedTuple):
    """Figures of a library's messages, in place of the cluster's."""

    latency: float  # 0: the cluster's
    busy: float  # the same while every rank of the receivers computes
    byte: float | None  # seconds of a core for each byte at each end; None: the cluster's
    message: float | None  # seconds of the sending thread for each message; None: the cluster's


class Flow(NamedTuple):
    """Bytes from one rank of a class to all its peers of one class in one place."""

    to: int  # class
    place: int
    nbytes: float
    messages: float
    each: float | None = None  # bytes that one of the receivers gets, where not nbytes · n / m
    wire: Wire | None = None


@dataclass(eq=False)
class Posted:
    """One operation of the rank of one class, as its generator posted it; also the ``Work`` that
    the generator yields."""

    cls: int
    tag: int
    flows: list[Flow]
    froms: set[Where]  # from where something is to come
    waits: list["Posted"]  # where ``wait`` notes that the generator waits for this
    done: Signal = field(default_factory=Signal)

    def wait(self) -> None:
        self.waits.append(self)

    def seconds(self, usual: float) -> float:
        """Seconds that a thread pays for its messages, ``usual`` for each that has no figure of its
        own."""
        return sum(
            flow.messages
            * (usual if flow.wire is None or flow.wire.message is None else flow.wire.message)
            for flow in self.flows
        )


@dataclass
class Traffic:
    """Messages and bytes that one rank of a class has sent; own rows not."""

    messages: float = 0
    nbytes: float = 0
    between: float = 0  # of them to other nodes

    def over(self, count: float) -> "Traffic":
        return Traffic(self.messages / count, self.nbytes / count, self.between / count)


@dataclass(eq=False)
class SizedTransport:
    """One rank's end, among ``members`` (global ranks, ascending) of the network."""

    network: "Network"
    cls: int
    members: np.ndarray
    ordered, checks = False, False  # nobody touches payloads

    def __post_init__(self) -> None:
        me = self.network.classes.every[self.cls].rank
        self.size, self.rank = len(self.members), int(np.searchsorted(self.members, me))
        self._where = self.network.where(me, self.members)
        others = (where for rank, where in enumerate(self._where) if rank != self.rank)
        self._peers = sorted(Counter(others).items())

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return self._uniform(out, inp[self.rank], tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return self._uniform(out, inp[0], tag)

    def _uniform(self, out: torch.Tensor, row: torch.Tensor, tag: int) -> Work:
        out[:, :HEADER] = row[:HEADER]
        flows = [Flow(*where, count * len(row), count) for where, count in self._peers]
        return self._post(tag, flows, {where for where, _ in self._peers})

    def _post(self, tag: int, flows: list[Flow], froms: set[Where]) -> Work:
        self.network.kernels[self.cls].seconds += self.network.cluster.post_seconds
        return self.network.post(self.cls, tag, flows, froms)

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        for r in out.payloads:
            out.headers[r] = wanted[r]
        sizes: dict[Where, list[int]] = {}
        for r, payload in inp.payloads.items():
            if r != self.rank:
                sizes.setdefault(self._where[r], []).append(HEADER + payload.numel())
        flows = [Flow(*where, sum(each), len(each)) for where, each in sizes.items()]
        froms = {self._where[r] for r in out.payloads if r != self.rank}
        return self._post(tag, flows, froms)

    def abandon(self, reason: str) -> None:
        """Nothing can be damaged here."""

    def subset(self, ranks: Sequence[int]) -> "SizedTransport | None":
        if self.rank not in ranks:
            return None
        return SizedTransport(self.network, self.cls, self.members[sorted(ranks)])


class Network:
    """The lines and cores of a cluster, and what is under way on them."""

    def __init__(self, cluster: Cluster, costs: Costs, *, alike: bool = True) -> None:
        self.cluster, self.clock = cluster, Clock()
        self.classes: Classes = cluster.classes(alike=alike)
        self.kernels = [SizedKernels(costs) for _ in self.classes.every]
        self.traffic = [Traffic() for _ in self.classes.every]
        # messages that a rank posted since it last waited, and the seconds of kernels before each
        self.scripts: list[list[tuple[float, Posted]]] = [[] for _ in self.classes.every]
        self.waits: list[Posted] = []
        self.computing = [False] * len(self.kernels)  # forward or backward, of each class
        self._lines: dict[tuple[str, int], TokenBucket] = {}
        self._cores: dict[int, Cores] = {}
        # by sender, receiver, tag and place: signals that only one side has asked for
        self._arriving: dict[tuple[int, int, int, int], deque[Signal]] = defaultdict(deque)
        self._expected: dict[tuple[int, int, int, int], deque[Signal]] = defaultdict(deque)

    def transport(self, cls: int) -> SizedTransport:
        return SizedTransport(self, cls, np.arange(self.cluster.size))

    def where(self, me: int, peers: np.ndarray) -> list[Where]:
        """Class and place of each peer as rank ``me`` sees it."""
        nodes = self.cluster.node_of
        place = np.where(nodes[peers] == nodes[me], INSIDE, OUTSIDE)
        return list(zip(self.classes.of[peers].tolist(), place.tolist(), strict=True))

    def cores(self, cls: Class) -> tuple[Cores, float]:
        """The cores that a class computes on, and how many of its ranks share them."""
        node, machine = self.cluster.kinds[cls.kind][0], self.cluster.machine_cores
        home = -1 if machine else int(self.cluster.node_of[cls.rank])
        if home not in self._cores:
            self._cores[home] = Cores(self.clock, machine or node.cores)
        return self._cores[home], cls.ranks if machine else cls.in_node

    def compute(self, cls: int, seconds: float) -> Signal:
        """One thread of each rank of the class."""
        cores, threads = self.cores(self.classes.every[cls])
        return cores.work(seconds, threads)

    # ------------------------------------------------------------ what is posted

    def post(
        self,
        cls: int,
        tag: int,
        flows: list[Flow],
        froms: set[Where],
    ) -> Posted:
        """Note an operation; it starts when the arithmetic before it has been paid for
        (``start``)."""
        posted, kernels = Posted(cls, tag, flows, froms, self.waits), self.kernels[cls]
        self.scripts[cls].append((kernels.seconds, posted))
        kernels.seconds = 0.0
        return posted

    def start(self, posted: Posted) -> None:
        """Put its bytes on their way."""
        ends = [self._send(posted, flow) for flow in posted.flows]
        ends += [
            self._meet(self._expected, self._arriving, (cls, posted.cls, posted.tag, place))
            for cls, place in posted.froms
        ]
        when_all(ends, posted.done.fire)

    def _send(self, posted: Posted, flow: Flow) -> Signal:
        """The signal says that the sender is rid of it; the receiver hears of it a latency
        later."""
        cluster, traffic, wire = self.cluster, self.traffic[posted.cls], flow.wire
        source, sink = self.classes.every[posted.cls], self.classes.every[flow.to]
        traffic.messages += flow.messages
        traffic.nbytes += flow.nbytes
        arrived = self._meet(
            self._arriving, self._expected, (posted.cls, flow.to, posted.tag, flow.place)
        )
        each = flow.nbytes * source.ranks / sink.ranks if flow.each is None else flow.each
        if flow.place == INSIDE:
            rate, latency = cluster.kinds[source.kind][0].inside, cluster.inside_latency
            last = self._carry("inside", source, flow.nbytes, rate)
        else:
            traffic.between += flow.nbytes
            a, b = (cluster.kinds[cls.kind][0] for cls in (source, sink))
            out = self._carry("out", source, flow.nbytes, a.nic, a.burst)
            last = max(out, self._carry("in", sink, each, b.nic, b.burst))
            latency = cluster.latency
        gone = Signal()
        ends = [gone]
        if wire is not None and wire.byte is not None:
            cost = flow.nbytes * wire.byte
        else:
            cost = flow.messages * cluster.row_seconds(flow.nbytes / flow.messages)
        if cost:
            ends.append(self.compute(posted.cls, cost))
            ends.append(self.compute(flow.to, cost * each / flow.nbytes))
        cores, _ = self.cores(sink)

        def arrive() -> None:
            if wire is not None and wire.latency:
                waits = max(wire.latency, wire.busy if self.computing[flow.to] else 0.0)
            else:
                waits = max(latency, cluster.busy_latency if cores.taken else 0.0)
            self.clock.at(self.clock.now + waits, arrived.fire)

        self.clock.at(last, gone.fire)
        when_all(ends, arrive)
        return gone

    def _carry(
        self, name: str, cls: Class, nbytes: float, rate: float, burst: float = 0.0
    ) -> float:
        """Bytes of each rank that the class has in a node, over that node's line."""
        key = name, int(self.cluster.node_of[cls.rank])
        if key not in self._lines:
            self._lines[key] = TokenBucket(self.clock, rate, burst)
        return self._lines[key].carry(nbytes * cls.in_node)

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
        posts, rest = self.scripts[cls], self.kernels[cls].seconds
        self.scripts[cls], self.kernels[cls].seconds = [], 0.0
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
    """Call when the last of these has fired."""
    left = sum(not signal.done for signal in signals)

    def one() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            call()

    for signal in [signal for signal in signals if not signal.done]:
        signal.then(one)
    if not left:
        call()
