"""Way of tokens to their experts and back, as a plan knows it: bytes of every hop, and what coding
them costs.

Of k choices among E experts that gates like alike, a node with e of them is met with p = 1 − C(E −
e, k) / C(E, k). So of T tokens on a rank p·T cross to that node, once each, to the member that
deals them out to its mates:

    routing   8 + 4k bytes a token  forward
    dispatch  token + 4k of gates   forward; in backward the gradient of what is combined goes that
                                    way, without gates
    combine   token                 forward; in backward the gradients of tokens and gates come that
                                    way

with ``PacketForm``'s sizes and a header for each message, between nodes and then inside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, zip_longest
from math import comb
from typing import NamedTuple

import numpy as np
import torch

from commpress.codecs import BlockCodec, Codec, codec_named
from commpress.collectives.all_to_all.routes import Nodes
from commpress.collectives.all_to_all.tokens import PacketForm
from commpress.collectives.frame import HEADER
from commpress.errors import InvalidArgument
from commpress.plan.costs import Costs
from commpress.plan.pair_links import PairLinks

BLOCK = 128  # elements of a token that share a scale
DTYPES = {2: torch.bfloat16, 4: torch.float32}


class ExpertHop(NamedTuple):
    """Transfers that begin at once."""

    source: np.ndarray
    sink: np.ndarray
    nbytes: np.ndarray

    @property
    def back(self) -> "ExpertHop":
        return self._replace(source=self.sink, sink=self.source)


@dataclass(frozen=True)
class ExpertWay:
    """Tokens of one layer among ``ranks``, which share nodes as ``node`` says; every rank has as
    many experts and tokens.

    ``experts`` of all ranks together (0: so many that choices hardly meet); ``codec`` both ways, as
    ``ExpertExchange`` has it.
    """

    ranks: tuple[int, ...]
    node: tuple[int, ...]
    tokens: float  # of a rank
    width: int
    k: int
    experts: int = 0
    codec: str = "none"
    element: int = 4  # bytes of an activation

    def __post_init__(self) -> None:
        ranks = len(self.ranks)
        if self.experts and (self.experts % ranks or self.experts < self.k):
            raise InvalidArgument(
                f"experts is {self.experts}, expected a multiple of the {ranks} ranks they are "
                f"divided among, and at least the {self.k} that a token has"
            )

    @property
    def nodes(self) -> Nodes:
        numbers = sorted(set(self.node))
        members = tuple(
            tuple(i for i, at in enumerate(self.node) if at == number) for number in numbers
        )
        return Nodes.of(members, len(self.ranks))

    def met(self, ranks: int) -> float:
        """Part of all tokens that have an expert on one of so many ranks."""
        if not self.experts:
            return 1 - (1 - ranks / len(self.ranks)) ** self.k
        here = self.experts // len(self.ranks) * ranks
        return 1 - comb(self.experts - here, self.k) / comb(self.experts, self.k)

    def hops(self, row: float) -> list[ExpertHop]:
        """Rows of so many bytes on their way out, between nodes and inside them."""
        nodes, size = self.nodes, len(self.ranks)
        between: list[tuple[int, int, float]] = []
        # ranks whose tokens a rank deals out to its mates, itself among them
        forwarded = [1] * size
        for source in range(size):
            for node in nodes.abroad(nodes.home[source]):
                speaker, met = nodes.speaker(node, source), self.met(len(nodes.members[node]))
                forwarded[speaker] += 1
                between.append((source, speaker, HEADER + row * self.tokens * met))
        one = self.met(1) * self.tokens * row
        inside = [(a, b, HEADER + forwarded[a] * one) for a, b in self._pairs(mates=True)]
        return [self._hop(each) for each in (between, inside) if each]

    def told(self) -> list[ExpertHop]:
        """Messages that say how many tokens come: to every rank, and to mates once more."""
        several = len(self.nodes.members) > 1
        every = [(a, b, HEADER + 16.0) for a, b in self._pairs()]
        mates = [(a, b, HEADER + 8.0) for a, b in self._pairs(mates=True) if several]
        return [self._hop(each) for each in (every, mates) if each]

    def _pairs(self, *, mates: bool = False) -> list[tuple[int, int]]:
        every, home = permutations(range(len(self.ranks)), 2), self.nodes.home
        return [(a, b) for a, b in every if not mates or home[a] == home[b]]

    def _hop(self, lines: Sequence[tuple[int, int, float]]) -> ExpertHop:
        source, sink, nbytes = (np.array(column) for column in zip(*lines, strict=True))
        ranks = np.array(self.ranks)
        return ExpertHop(ranks[source], ranks[sink], nbytes)

    # ------------------------------------------------------------ a layer

    @property
    def _codec(self) -> Codec:
        if self.codec in ("int8", "int4", "fp8"):
            return BlockCodec(self.codec, BLOCK)  # type: ignore[arg-type]
        return codec_named(self.codec)

    def _row(self, *, gates: bool) -> int:
        return PacketForm(self._codec, self.width, DTYPES[self.element], self.k * gates).row_bytes

    @property
    def forward(self) -> list[ExpertHop]:
        """Routing, dispatch and combine."""
        back = [hop.back for hop in reversed(self.hops(self._row(gates=False)))]
        return [*self.told(), *self.hops(8 + 4 * self.k), *self.hops(self._row(gates=True)), *back]

    @property
    def backward(self) -> list[ExpertHop]:
        back = [hop.back for hop in reversed(self.hops(self._row(gates=True)))]
        return [*self.hops(self._row(gates=False)), *back]

    def coded(self, costs: Costs) -> float:
        """Seconds of coding, there and back: own tokens, those that come, sums that cross, and what
        comes back."""
        if self._codec.lossless:
            return 0.0
        cost, size = costs.of(self._codec.kind), len(self.ranks)
        arrive = size * self.met(1)  # tokens of all that this rank gets, of T
        abroad = [len(self.nodes.members[node]) for node in self.nodes.abroad(0)]
        cross = sum(map(self.met, abroad))
        encoded, decoded = 1 + arrive + cross, arrive + size * self.met(1) + cross
        return self.tokens * self.width * (encoded * cost.encode + decoded * cost.decode)


def hop_seconds(hops: Sequence[Sequence[ExpertHop]], links: PairLinks) -> float:
    """Hops of several groups, the first of all at once, then the second of those that have one, and
    so on."""
    rounds = ([hop for hop in each if hop is not None] for each in zip_longest(*hops))
    return sum(
        links.seconds(*(np.concatenate(column) for column in zip(*each, strict=True)))
        for each in rounds
    )
