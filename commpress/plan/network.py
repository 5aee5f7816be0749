"""The timed loopback: a transport that moves sizes. One rank stands for all: nodes have equally
many ranks, so all send as much, and what a rank sends is also what it receives.

What a rank sends is read from the tensors that the production generators pass: how many bytes to
which ranks. What would arrive is what is wanted, header by header, so agreement is assumed and not
simulated. Payloads are never touched.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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


class Flow(NamedTuple):
    """Bytes from a rank to all its peers in one place; as many come from there."""

    place: int
    nbytes: float
    messages: float
    latency: float
    busy: float  # the same, at least, where the receivers find no core idle
    post: float  # seconds of the sending thread
    cost: float  # of a core at each end, for the bytes
    library: bool = False  # whose messages are late where the receivers compute


@dataclass(eq=False)
class Posted:
    """One operation, as its generator posted it; also the ``Work`` that the generator yields."""

    flows: list[Flow]
    waits: list["Posted"]  # where ``wait`` notes that the generator waits for this
    done: Signal = field(default_factory=Signal)

    def wait(self) -> None:
        self.waits.append(self)


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
        out[:, :HEADER] = inp[0, :HEADER]
        peers = sorted(Counter(self._places[1:]).items())
        return self._post((place, inp.shape[1], count) for place, count in peers)

    all_gather = all_to_all

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        for r in out.payloads:
            out.headers[r] = wanted[r]
        return self._post(
            (self._places[r], HEADER + payload.numel(), 1)
            for r, payload in inp.payloads.items()
            if r != self.rank
        )

    def _post(self, rows: Iterable[tuple[int, int, int]]) -> Work:
        """Rows of so many bytes to so many peers in a place."""
        cluster = self.network.cluster
        self.network.kernels.seconds += cluster.post_seconds
        late = cluster.inside_latency, cluster.latency
        return self.network.post(
            [
                Flow(
                    place,
                    count * nbytes,
                    count,
                    late[place],
                    cluster.busy_latency,
                    count * cluster.message_seconds,
                    count * cluster.row_seconds(nbytes),
                )
                for place, nbytes, count in rows
            ]
        )

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
        inside = TokenBucket(self.clock, node.inside)
        out, into = (TokenBucket(self.clock, node.nic, node.burst) for _ in range(2))
        self.lines = {INSIDE: (inside,), OUTSIDE: (out, into)}
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
        traffic = self.traffic
        traffic.messages += flow.messages
        traffic.nbytes += flow.nbytes
        traffic.between += flow.nbytes * flow.place
        whole = flow.nbytes * self.cluster.node.ranks  # of the node's ranks, over its line
        last = max(line.carry(whole) for line in self.lines[flow.place])
        gone, arrived = Signal(), Signal()

        def arrive() -> None:
            busy = self.computing if flow.library else self.cores.taken
            waits = max(flow.latency, flow.busy * busy)
            self.clock.at(self.clock.now + waits, arrived.fire)

        ends = [self.compute(flow.cost) for _ in range(2)]  # at either end
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
            yield self.compute(seconds * slower + sum(flow.post for flow in posted.flows))
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
