"""The timed loopback: a transport that moves sizes. One rank stands for all: nodes have equally
many ranks, so all send as much, and what a rank sends is also what it receives.

What a rank sends is read from the tensors that the production generators pass: how many bytes to
which ranks. What would arrive is what is wanted, header by header, so agreement is assumed and not
simulated. Payloads are never touched.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from commpress.collectives.frame import HEADER, Rows
from commpress.plan.clock import Clock, Cores, Process, Signal, TokenBucket
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs, SizedKernels
from commpress.work import Work

INSIDE, OUTSIDE = 0, 1  # places of a peer: in the node or not


class Wire(NamedTuple):
    """Figures of a library's messages, in place of the cluster's."""

    latency: float
    busy: float  # the same while the receivers compute
    byte: float | None  # seconds of a core for each byte at each end; None: the cluster's
    message: float | None  # seconds of the sending thread for each message; None: the cluster's


class Flow(NamedTuple):
    """Bytes from a rank to all its peers in one place; as many come from there."""

    place: int
    nbytes: float
    messages: float
    wire: Wire | None = None


@dataclass(eq=False)
class Posted:
    """One operation, as its generator posted it; also the ``Work`` that the generator yields."""

    flows: list[Flow]
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
    """Messages and bytes that one rank has sent; own rows not."""

    messages: float = 0
    nbytes: float = 0
    between: float = 0  # of them to other nodes

    def over(self, count: float) -> "Traffic":
        return Traffic(self.messages / count, self.nbytes / count, self.between / count)


class SizedTransport:
    """The end of the first rank among ``members`` (global ranks, ascending) of the network."""

    ordered, checks = False, False  # nobody touches payloads
    rank = 0

    def __init__(self, network: "Network", members: np.ndarray) -> None:
        self.network, self.members, self.size = network, members, len(members)
        places = members // network.cluster.node.ranks != members[0] // network.cluster.node.ranks
        self._places: list[int] = places.astype(int).tolist()

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return self._uniform(out, inp[0])

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return self._uniform(out, inp[0])

    def _uniform(self, out: torch.Tensor, row: torch.Tensor) -> Work:
        out[:, :HEADER] = row[:HEADER]
        peers = sorted(Counter(self._places[1:]).items())
        return self._post([Flow(place, count * len(row), count) for place, count in peers])

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        for r in out.payloads:
            out.headers[r] = wanted[r]
        return self._post(
            [
                Flow(self._places[r], HEADER + payload.numel(), 1)
                for r, payload in inp.payloads.items()
                if r != self.rank
            ]
        )

    def _post(self, flows: list[Flow]) -> Work:
        self.network.kernels.seconds += self.network.cluster.post_seconds
        return self.network.post(flows)

    def abandon(self, reason: str) -> None:
        """Nothing can be damaged here."""

    def subset(self, ranks: Sequence[int]) -> "SizedTransport | None":
        return SizedTransport(self.network, self.members[sorted(ranks)]) if 0 in ranks else None


class Network:
    """The lines and cores of a rank's node, and what is under way on them."""

    def __init__(self, cluster: Cluster, costs: Costs) -> None:
        self.cluster, self.clock, node = cluster, Clock(), cluster.node
        self.kernels, self.traffic = SizedKernels(costs), Traffic()
        self.transport = SizedTransport(self, np.arange(cluster.size))
        # messages that the rank posted since it last waited, and the seconds of kernels before each
        self.script: list[tuple[float, Posted]] = []
        self.waits: list[Posted] = []
        self.computing = False  # forward or backward
        self.inside = TokenBucket(self.clock, node.inside)
        self.out, self.into = (TokenBucket(self.clock, node.nic, node.burst) for _ in range(2))
        self.cores = Cores(self.clock, cluster.machine_cores or node.cores)
        self.sharing = cluster.size if cluster.machine_cores else node.ranks  # ranks, of the cores

    def compute(self, seconds: float) -> Signal:
        """One thread of each rank."""
        return self.cores.work(seconds, self.sharing)

    # ------------------------------------------------------------ what is posted

    def post(self, flows: list[Flow]) -> Posted:
        """Note an operation; it starts when ``pay`` has paid for the arithmetic before it."""
        posted = Posted(flows, self.waits)
        self.script.append((self.kernels.seconds, posted))
        self.kernels.seconds = 0.0
        return posted

    def _send(self, flow: Flow) -> list[Signal]:
        """Put the bytes on their way; the signals say that the sender is rid of them and that as
        many have come, a latency later."""
        cluster, traffic, wire = self.cluster, self.traffic, flow.wire
        traffic.messages += flow.messages
        traffic.nbytes += flow.nbytes
        whole = flow.nbytes * cluster.node.ranks  # of the node's ranks, over its line
        if flow.place == INSIDE:
            latency, last = cluster.inside_latency, self.inside.carry(whole)
        else:
            traffic.between += flow.nbytes
            latency, last = cluster.latency, max(self.out.carry(whole), self.into.carry(whole))
        if wire is not None and wire.byte is not None:
            cost = flow.nbytes * wire.byte
        else:
            cost = flow.messages * cluster.row_seconds(flow.nbytes / flow.messages)
        gone, arrived = Signal(), Signal()

        def arrive() -> None:
            if wire is not None:
                waits = max(wire.latency, wire.busy if self.computing else 0.0)
            else:
                waits = max(latency, cluster.busy_latency if self.cores.taken else 0.0)
            self.clock.at(self.clock.now + waits, arrived.fire)

        ends = [self.compute(cost) for _ in range(2)]  # at either end
        self.clock.at(last, gone.fire)
        when_all([gone, *ends], arrive)
        return [gone, arrived]

    # ------------------------------------------------------------ one step of a generator

    def pay(self) -> Process:
        """Let time pass for what a generator has just done, and start what it posted."""
        posts, rest = self.script, self.kernels.seconds
        self.script, self.kernels.seconds = [], 0.0
        # who computes fills what would stay idle
        slower = 1.0 if self.computing else self.cluster.uneven
        for seconds, posted in posts:
            yield self.compute(seconds * slower + posted.seconds(self.cluster.message_seconds))
            sent = [signal for flow in posted.flows for signal in self._send(flow)]
            when_all(sent, posted.done.fire)
        yield self.compute(rest * slower)

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
