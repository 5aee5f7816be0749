"""The machines of a simulation: nodes, and what joins them.

Rates are bytes per second of payload, times seconds. A link is full duplex.
"""

from dataclasses import dataclass
from functools import cached_property

from commpress.collectives.measured_links import FIRST, Link, Links, Stack
from commpress.collectives.nodes import Topology
from commpress.errors import InvalidArgument
from commpress.units import UNLIMITED

CALL = 2e-5  # seconds of one kernel call, whatever its size
RINGS = {"plain": 4, "bf16-ring": 2}  # ways to average that are no codec → bytes of an element
LEAST = 1e-5  # seconds of a latency, where measured processor time leaves less


@dataclass(frozen=True)
class Node:
    """Every node."""

    ranks: int
    nic: float  # to other nodes, each direction
    inside: float = UNLIMITED  # all ranks of the node together, among themselves
    cores: float = UNLIMITED  # for all ranks of the node
    # bytes that pass ``nic`` at once after a rest: shapers of virtual machines and containers allow
    # some
    burst: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """``count`` equal nodes; ranks are numbered node by node."""

    node: Node
    count: int
    latency: float = 50e-6  # between nodes, one way, with the waking of the receiver
    inside_latency: float = 20e-6
    busy_latency: float = 0.0  # of either, at least, where the receiver finds no core idle
    message_seconds: float = 0.0  # of the sending thread for each message
    # of the same for each exchange of ours besides: steps of generators, headers, checks
    post_seconds: float = 0.0
    ring_latency: float = 0.0  # of a message of the library's ring (0: as of ours)
    ring_busy_latency: float = 0.0  # the same, at least, where the receiver computes
    # of a core for a message of the library's ring, both ends, where it has a latency of its own
    ring_message: float = 0.0
    # of a core for each byte sent and for each received: the network stack
    byte_seconds: float = 0.0
    # the same for the first ``FIRST`` bytes of a message together (0: as for all others)
    first_seconds: float = 0.0
    # of a core for a byte that the library's ring sends in float32, both ends and the sum (0:
    # derived)
    ring_byte: float = 0.0
    half_byte: float = 0.0  # the same in bfloat16
    # what kernels take, of their fair share of ``machine_cores``, until the last rank is done
    uneven: float = 1.0
    # > 0: all nodes lie on one machine and share its cores (network namespaces)
    machine_cores: float = 0.0

    def row_seconds(self, nbytes: float) -> float:
        """Seconds of a core at each end of a message of so many bytes, besides
        ``message_seconds``."""
        first = self.first_seconds or FIRST * self.byte_seconds
        return first * min(nbytes / FIRST, 1.0) + max(nbytes - FIRST, 0) * self.byte_seconds

    @cached_property
    def topology(self) -> Topology:
        return Topology.of(*[self.node.ranks] * self.count)

    @property
    def size(self) -> int:
        return self.node.ranks * self.count


def measured_cluster(links: Links, *, cores: float = UNLIMITED) -> Cluster:
    """Make a cluster from what ``commpress probe`` measured.

    The shortest exchange of all ranks is P − 1 messages of processor time, stretched where ranks
    share cores, and a latency. The shortest all-reduce is two of them and three kernels; what it
    takes besides is the work of whoever posts them. Files without a stack have only the latency of
    an exchange both ways, from a barrier on.
    """
    sizes = {len(node) for node in links.topology.nodes}
    if len(sizes) > 1:
        raise InvalidArgument(
            f"links were measured on nodes of {' and '.join(map(str, sorted(sizes)))} ranks, "
            "expected nodes of one size: measure them with as many ranks on each"
        )
    nic, inside = (_line(link, links.stack) for link in (links.between, links.inside))
    burst = links.between.burst if links.between else 0.0
    node, count = Node(sizes.pop(), nic, inside, cores, burst), len(links.topology.nodes)
    between, within = (link.latency / 2 if link else 0.0 for link in (links.between, links.inside))
    stack, peers = links.stack, node.ranks * count - 1
    if stack is None:
        return Cluster(node, count, latency=between, inside_latency=within)
    per_core = max((peers + 1) / stack.cores, 1.0) if stack.cores else 1.0
    waits = max(stack.exchange - peers * stack.message * per_core, LEAST)
    # every rank has two threads then
    twice = max(2 * (peers + 1) / stack.cores, 1.0) if stack.cores else 1.0
    busy = max(stack.busy - peers * stack.message * twice, 0.0)
    if links.between:
        between, within = waits, min(within, waits)
    else:
        within = waits
    return Cluster(
        node,
        count,
        latency=between,
        inside_latency=within,
        message_seconds=stack.message,
        byte_seconds=stack.byte,
        ring_latency=_ring_latency(stack.ring, stack.ring_message * per_core, peers),
        machine_cores=stack.cores,
        ring_busy_latency=_ring_latency(stack.ring_busy, stack.ring_message * twice, peers),
        ring_message=stack.ring_message,
        first_seconds=stack.first,
        ring_byte=stack.ring_byte,
        half_byte=stack.half_byte,
        busy_latency=busy,
        post_seconds=_post(stack, peers, per_core),
        uneven=max(stack.uneven, 1.0) if stack.cores else 1.0,
    )


def _line(link: Link | None, stack: Stack | None) -> float:
    """On one machine that all ranks share, all at once may be slower than a pair because cores are,
    and these count apart."""
    if link is None:
        return UNLIMITED
    return max(link.together, link.bandwidth) if stack and stack.cores else link.together


def _post(stack: Stack, peers: int, per_core: float) -> float:
    if stack.reduce_core:
        return max(stack.reduce_core / 2 - peers * stack.message - 1.5 * CALL, 0.0)
    return max(stack.reduce / 2 - stack.exchange - 1.5 * CALL * per_core, 0.0) / per_core


def _ring_latency(seconds: float, message: float, peers: int) -> float:
    """Latency of the shortest ring: 2 · peers messages twice, two at once (``ring``), each so much
    work."""
    half = seconds / 2
    latency = (half - message) / peers - message
    return max(latency if latency > message else half - 2 * peers * message, LEAST)
