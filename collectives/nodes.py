"""Topology of a group as data: the ranks on each node. Loads no torch."""

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise

from commpress.errors import InvalidArgument

MOST = 1 << 20  # ranks


@dataclass(frozen=True)
class Topology:
    """``nodes``: the ranks of each node, every rank of the group once. Nodes may differ in size."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        nodes = tuple(sorted(tuple(sorted(node)) for node in self.nodes))
        if sorted(r for node in nodes for r in node) != list(range(sum(map(len, nodes)))) or () in (
            nodes or ((),)
        ):
            raise InvalidArgument(
                f"nodes are {self.nodes!r}, expected every rank from 0 on exactly once and no "
                "empty node, as in ((0, 1), (2, 3))"
            )
        object.__setattr__(self, "nodes", nodes)

    @classmethod
    def of(cls, *sizes: int) -> "Topology":
        """Number ranks node by node: ``Topology.of(2, 3)`` is ((0, 1), (2, 3, 4))."""
        if not sizes or min(sizes) < 1:
            raise InvalidArgument(
                f"sizes of nodes are {sizes!r}, expected one or more positive numbers"
            )
        if sum(sizes) > MOST:
            raise InvalidArgument(
                f"the nodes of a topology have more ranks than {MOST}, expected at most so many"
            )
        return cls(tuple(tuple(range(a, b)) for a, b in pairwise([0, *accumulate(sizes)])))

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Parse '2x4' (two nodes of four ranks), '4,4,3' (their sizes) or '0 2|1 3' (their
        ranks)."""
        if match := re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text):
            return cls.of(*[int(match[2])] * min(int(match[1]), MOST + 1))
        if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
            return cls.of(*map(int, text.split(",")))
        if re.fullmatch(r"[\d\s|]+", text):
            return cls(tuple(tuple(map(int, node.split())) for node in text.split("|")))
        raise InvalidArgument(
            f"topology is {text!r}, expected nodes x ranks ('2x4'), sizes ('4,4,3') or ranks ('0 "
            "2|1 3')"
        )

    @property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def widest(self) -> int:
        """Ranks of the largest node."""
        return max(map(len, self.nodes))

    @property
    def layered(self) -> bool:
        """True if two levels can help: several nodes, and several ranks on some node."""
        return 1 < len(self.nodes) < self.size

    def node(self, rank: int) -> int:
        """The index of the node of ``rank``."""
        for index, node in enumerate(self.nodes):
            if rank in node:
                return index
        raise InvalidArgument(f"rank is {rank}, expected 0 to {self.size - 1}")

    def local_rank(self, rank: int) -> int:
        return self.nodes[self.node(rank)].index(rank)

    def __str__(self) -> str:
        return "|".join(" ".join(map(str, node)) for node in self.nodes)
