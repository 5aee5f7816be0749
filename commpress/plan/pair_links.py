"""Links between every two ranks: what each carries alone, and what the line of a node carries for
all its ranks at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from commpress.collectives.nodes import Topology
from commpress.documents import read_json
from commpress.errors import InvalidArgument
from commpress.plan.cluster import Cluster

LIMIT = 1 << 24  # bytes of a file: some 300 ranks
WRITER = "what commpress probe --json wrote"


@dataclass(frozen=True, eq=False)
class PairLinks:
    """Ranks live at sites, and every two sites have a link; ``site`` of each rank, its ``node``.

    A transfer takes as long as its slowest link. Links out of a node share its line, which carries
    what the fastest of them does alone; the transfers of one rank inside its node share that rank's
    port.
    """

    site: np.ndarray
    node: np.ndarray
    latency: np.ndarray  # [sites, sites], seconds of a message
    # [sites, sites], bytes per second each way; the diagonal: ranks of one site among themselves
    bandwidth: np.ndarray

    def __post_init__(self) -> None:
        if not (self.latency > 0).all():
            raise InvalidArgument("not every two sites have a link: measure every pair")

    @property
    def size(self) -> int:
        return len(self.site)

    @cached_property
    def lines(self) -> np.ndarray:
        """Bytes per second of each node's line to others."""
        nodes = int(self.node.max()) + 1
        home = np.zeros(len(self.bandwidth), np.int64)
        home[self.site] = self.node
        apart = np.where(home[:, None] != home, self.bandwidth, 0.0)
        found = np.zeros(nodes)
        np.maximum.at(found, home, apart.max(axis=1))
        return np.where(found > 0, found, np.inf)

    def seconds(self, source: np.ndarray, sink: np.ndarray, nbytes: float | np.ndarray) -> float:
        """Seconds of transfers of ``nbytes`` each that begin at once, until the last has
        arrived."""
        if len(source) == 0:
            return 0.0
        nbytes = np.broadcast_to(nbytes, len(source))
        a, b = self.site[source], self.site[sink]
        rate, late = self.bandwidth[a, b], self.latency[a, b]
        out, into = self.node[source], self.node[sink]
        leaves = out != into
        took = [(late + nbytes / rate).max()]
        if leaves.any():
            for ends in (out[leaves], into[leaves]):
                busy = np.bincount(ends, nbytes[leaves], len(self.lines)) / self.lines
                took.append(late[leaves].min() + busy.max())
        if not leaves.all():
            for ends in (source[~leaves], sink[~leaves]):
                busy = np.bincount(ends, (nbytes / rate)[~leaves])
                took.append(late[~leaves].min() + busy.max())
        return float(max(took))

    def leaving(self, source: np.ndarray, sink: np.ndarray, nbytes: float | np.ndarray) -> float:
        """Bytes of transfers of ``nbytes`` each that leave the node which sends most to others."""
        apart = self.node[source] != self.node[sink]
        out = np.broadcast_to(nbytes, len(source))[apart]
        return float(np.bincount(self.node[source[apart]], out).max()) if apart.any() else 0.0

    def speeds_alike(self) -> bool:
        """Links of a node among themselves, and of every two nodes, do not differ: all that counts
        is who shares a node."""
        return (
            len(self.bandwidth) == len(self.lines)
            and _one(np.diagonal(self.bandwidth))
            and _one(self.bandwidth[~np.eye(len(self.bandwidth), dtype=bool)])
        )

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> "PairLinks":
        """Read a description: one rate for all nodes."""
        node, count = cluster.node, cluster.count
        rate, latency = np.full((count, count), node.nic), np.full((count, count), cluster.latency)
        np.fill_diagonal(rate, node.inside)
        np.fill_diagonal(latency, cluster.inside_latency)
        of = np.arange(cluster.size) // node.ranks
        return cls(of, of, latency, rate)

    @classmethod
    def of_pairs(cls, nodes: Sequence[Sequence[int]], rows: Sequence[Any]) -> "PairLinks":
        """Read measured pairs: ``first``, ``second``, ``latency`` and ``bandwidth`` of each, as a
        probe names them."""
        topology = Topology(tuple(map(tuple, nodes)))
        size = topology.size
        if size < 2:
            raise InvalidArgument(f"pairs are of {size} rank, expected at least 2")
        home = np.array([topology.node(rank) for rank in range(size)])
        latency, bandwidth = np.zeros((size, size)), np.zeros((size, size))
        for row in rows:
            found: Any = row if isinstance(row, dict) else {}
            a, b, late, rate = map(found.get, ("first", "second", "latency", "bandwidth"))
            known = all(type(rank) is int and 0 <= rank < size for rank in (a, b))
            if not known or not all(type(n) in (int, float) and 0 < n < inf for n in (late, rate)):
                raise InvalidArgument(
                    f"a measured pair is {row!r}, expected ranks below {size}, latency and "
                    "bandwidth above 0"
                )
            latency[a, b] = latency[b, a] = late / 2  # from a barrier on: there and back
            bandwidth[a, b] = bandwidth[b, a] = rate
        np.fill_diagonal(latency, 1e-9)
        np.fill_diagonal(bandwidth, 1e18)
        return cls(np.arange(size), home, latency, bandwidth)


def load_pairs(path: str | Path) -> PairLinks:
    content = read_json(path, LIMIT, WRITER)
    found: Any = content if isinstance(content, dict) else {}
    nodes, rows = found.get("nodes"), found.get("rows")
    whole = isinstance(nodes, list) and all(
        isinstance(node, list) and all(type(r) is int for r in node) for node in nodes
    )
    if not whole or not isinstance(rows, list) or not rows:
        raise InvalidArgument(f"{path} has no nodes and rows of pairs, expected {WRITER}")
    return PairLinks.of_pairs(nodes, rows)


def _one(values: np.ndarray) -> bool:
    return len(values) == 0 or float(values.max()) <= 1.001 * float(values.min())
