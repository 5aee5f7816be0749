"""The baseline: the ring all-reduce of libraries, float32 or bfloat16, as a generator like the
others.

Every rank passes a chunk of 1/P of the buffer to the next, P − 1 times while it is summed and P − 1
times more. As in Gloo, a chunk goes in two parts at least, and two parts are under way at once:
while one waits, the other passes the line. Ranks of a node follow each other, so one rank of a node
sends abroad and one receives; a rank counts as the mean of its node.
"""

from collections import deque

from commpress.plan.network import INSIDE, OUTSIDE, Flow, Network
from commpress.work import Steps, Work

PART = 1 << 20  # bytes of the longest part
AHEAD = 2  # parts under way at once
# parts of half a ring; where there are more, several are taken as one: the same bytes, the same
# latencies
POSTS = 64


def ring_allreduce(
    nbytes: float,
    network: Network,
    *,
    arithmetic: float = 0.0,
    byte: float | None = None,
) -> Steps[None]:
    """``arithmetic``: seconds that a rank computes in all; ``byte``: of a core for each byte at
    each end, if known."""
    cluster = network.cluster
    ranks, chunks = cluster.node.ranks, cluster.size - 1
    if chunks == 0:
        return
    chunk = nbytes / cluster.size
    parts = chunks * max(-(-chunk // PART), AHEAD)
    posts = int(min(parts, POSTS))
    each = parts / posts
    usual = cluster.inside_latency if cluster.count == 1 else cluster.latency
    message = cluster.ring_message if cluster.ring_latency else cluster.message_seconds
    abroad = 1 / ranks if cluster.count > 1 else 0.0  # of its chunks, of a node's ranks on average
    sent = chunks * chunk / posts
    places = ((INSIDE, (1 - abroad) * sent), (OUTSIDE, abroad * sent))
    flows = [
        Flow(
            place,
            nbytes,
            each,
            each * (cluster.ring_latency or usual),
            each * cluster.ring_busy_latency,
            each * message,
            each * cluster.row_seconds(nbytes / each) if byte is None else byte * nbytes,
            library=True,
        )
        for place, nbytes in places
        if nbytes
    ]
    for summed in (arithmetic / posts, 0.0):
        under_way: deque[Work] = deque()
        for begun in range(posts + AHEAD):
            if len(under_way) == AHEAD or (begun >= posts and under_way):
                yield under_way.popleft()
                network.kernels.seconds += summed
            if begun < posts:
                under_way.append(network.post(flows))
