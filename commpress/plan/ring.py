"""The baseline: the ring all-reduce of libraries, float32 or bfloat16, as a generator like the
others.

Every rank passes a chunk of 1/P of the buffer to the next, P − 1 times while it is summed and P − 1
times more. As in Gloo, a chunk goes in two parts at least, and two parts are under way at once:
while one waits, the other passes the line. Ranks of a node follow each other, so one rank of a node
sends abroad and one receives. A class of several ranks of a node counts as their mean.
"""

from collections import deque

from commpress.plan.network import FOREIGN, INSIDE, RACK, Flow, SizedTransport
from commpress.work import Steps, Work

PART = 1 << 20  # bytes of the longest part
AHEAD = 2  # parts under way at once
# parts of half a ring; where there are more, several are taken as one: the same bytes, the same
# latencies
POSTS = 64


def ring_allreduce(
    nbytes: float,
    transport: SizedTransport,
    *,
    tag: int,
    arithmetic: float = 0.0,
    byte: float = -1.0,
) -> Steps[None]:
    """``arithmetic``: seconds that a rank computes in all; ``byte``: of a core for each byte at
    each end, if known."""
    chunks = transport.size - 1
    if chunks == 0:
        return
    cluster, chunk = transport.network.cluster, nbytes / transport.size
    parts = chunks * max(-(-chunk // PART), AHEAD)
    posts = int(min(parts, POSTS))
    each = parts / posts
    inside = len(cluster.topology.nodes) == 1
    latency = cluster.ring_latency or (cluster.inside_latency if inside else cluster.latency)
    message = cluster.ring_message if cluster.ring_latency else -1.0
    charged = transport.network.kernel_seconds[transport.cls]
    flows, froms = neighbours(transport, chunks * chunk / posts, each)
    busy = each * cluster.ring_busy_latency
    flows = [
        flow._replace(latency=each * latency, busy=busy, byte=byte, message=message)
        for flow in flows
    ]
    for summed in (arithmetic / posts, 0.0):
        under_way: deque[Work] = deque()
        for _ in range(posts):
            if len(under_way) == AHEAD:
                yield under_way.popleft()
                charged.seconds += summed
            under_way.append(transport.network.post(transport.cls, tag, flows, froms))
        while under_way:
            yield under_way.popleft()
            charged.seconds += summed


def neighbours(
    transport: SizedTransport, chunk: float, messages: float
) -> tuple[list[Flow], set[tuple[int, int]]]:
    """Bytes that a rank of this class sends, on average over the ranks of a node, and the ranks it
    hears from."""
    network, cls = transport.network, transport.network.classes.every[transport.cls]
    kinds, every = network.cluster.kinds, network.classes.every
    # every rank a class of its own
    if cls.ranks == 1 == cls.in_node and len(every) == network.cluster.size:
        after, before = (cls.rank + 1) % transport.size, (cls.rank - 1) % transport.size
        return [Flow(*network.where(cls.rank, after), chunk, messages)], {
            network.where(cls.rank, before)
        }
    node, count = kinds[cls.kind]
    if node.ranks == cls.in_node:
        first = last = transport.cls
        flows = (
            [Flow(first, INSIDE, chunk * (node.ranks - 1) / node.ranks, messages)]
            if node.ranks > 1
            else []
        )
        froms = {(first, INSIDE)} if node.ranks > 1 else set()
    else:
        first = next(i for i, one in enumerate(every) if one.kind == cls.kind)
        last = first + node.ranks - 1
        flows = [Flow(transport.cls + 1, INSIDE, chunk, messages)] if transport.cls < last else []
        froms = {(transport.cls - 1, INSIDE)} if transport.cls > first else set()
    if count > 1:
        if transport.cls == last:
            flows.append(Flow(first, RACK, chunk / cls.in_node, messages))
        if transport.cls == first:
            froms.add((last, RACK))
    if len(kinds) > 1:  # one node of each kind passes on to the next kind
        if transport.cls == last:
            after = next(
                i for i, one in enumerate(every) if one.kind == (cls.kind + 1) % len(kinds)
            )
            flows.append(
                Flow(after, FOREIGN, chunk / cls.in_node, messages, chunk / every[after].in_node)
            )
        if transport.cls == first:
            froms.add(
                (
                    max(
                        i for i, one in enumerate(every) if one.kind == (cls.kind - 1) % len(kinds)
                    ),
                    FOREIGN,
                )
            )
    return flows, froms
