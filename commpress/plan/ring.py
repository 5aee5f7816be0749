"""The baseline: the ring all-reduce of libraries, float32 or bfloat16, as a generator like the
others.

Every rank passes a chunk of 1/P of the buffer to the next, P − 1 times while it is summed and P − 1
times more. As in Gloo, a chunk goes in two parts at least, and two parts are under way at once:
while one waits, the other passes the line. Ranks of a node follow each other, so one rank of a node
sends abroad and one receives. A class of several ranks of a node counts as their mean.
"""

from collections import deque

from commpress.plan.network import INSIDE, OUTSIDE, Flow, SizedTransport, Where, Wire
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
    byte: float | None = None,
) -> Steps[None]:
    """``arithmetic``: seconds that a rank computes in all; ``byte``: of a core for each byte at
    each end, if known."""
    chunks = transport.size - 1
    if chunks == 0:
        return
    network = transport.network
    cluster, chunk = network.cluster, nbytes / transport.size
    parts = chunks * max(-(-chunk // PART), AHEAD)
    posts = int(min(parts, POSTS))
    each = parts / posts
    inside = len(cluster.topology.nodes) == 1
    latency = cluster.ring_latency or (cluster.inside_latency if inside else cluster.latency)
    wire = Wire(
        each * latency,
        each * cluster.ring_busy_latency,
        byte,
        cluster.ring_message if cluster.ring_latency else None,
    )
    flows, froms = neighbours(transport, chunks * chunk / posts, each, wire)
    for summed in (arithmetic / posts, 0.0):
        under_way: deque[Work] = deque()
        for begun in range(posts + AHEAD):
            if len(under_way) == AHEAD or (begun >= posts and under_way):
                yield under_way.popleft()
                network.kernels[transport.cls].seconds += summed
            if begun < posts:
                under_way.append(network.post(transport.cls, tag, flows, froms))


def neighbours(
    transport: SizedTransport, chunk: float, messages: float, wire: Wire
) -> tuple[list[Flow], set[Where]]:
    """Bytes that a rank of this class sends, on average over the ranks of a node, and from where it
    hears."""
    cluster, every, cls = transport.network.cluster, transport.network.classes.every, transport.cls
    own = every[cls]
    (node, count), kinds = cluster.kinds[own.kind], len(cluster.kinds)

    def classes(kind: int) -> list[int]:
        return [i for i, one in enumerate(every) if one.kind == kind % kinds]

    (first, *_), (*_, last) = classes(own.kind), classes(own.kind)
    flows, froms = list[Flow](), set[Where]()

    def send(to: int, place: int, nbytes: float, each: float | None = None) -> None:
        flows.append(Flow(to, place, nbytes, messages, each, wire))

    if first == last and node.ranks > 1:
        send(cls, INSIDE, chunk * (node.ranks - 1) / node.ranks)
        froms.add((cls, INSIDE))
    if cls < last:
        send(cls + 1, INSIDE, chunk)
    if cls > first:
        froms.add((cls - 1, INSIDE))
    if count > 1 and cls == last:
        send(first, OUTSIDE, chunk / own.in_node)
    if count > 1 and cls == first:
        froms.add((last, OUTSIDE))
    # one node of each kind passes on to the next kind
    if kinds > 1 and cls == last:
        after = classes(own.kind + 1)[0]
        send(after, OUTSIDE, chunk / own.in_node, chunk / every[after].in_node)
    if kinds > 1 and cls == first:
        froms.add((classes(own.kind - 1)[-1], OUTSIDE))
    return flows, froms
