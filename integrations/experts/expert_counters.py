"""Counters of an ``ExpertExchange``."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from commpress.collectives.all_to_all.tokens import Carrier, Placement, TokenRoutes
from commpress.integrations.experts.expert_rows import ExpertRows


@dataclass
class ExpertCounters:
    """Totals of one rank since the exchange was made. A choice is a pair of a token and one of its
    experts; bytes include headers."""

    experts: np.ndarray  # numbers of this rank's experts, then of its copies
    routings: int = 0
    tokens: int = 0  # of this rank
    choices: int = 0  # of this rank's tokens, without dropped ones
    dropped: int = 0  # choices beyond the capacity
    masked: int = 0  # choices of experts that died with their rank
    padded: int = 0  # rows of zeros
    received: int = 0  # choices of all ranks for this rank's experts
    crossing_choices: int = 0  # choices whose expert is on another node
    # tokens that crossed for them: once to a node if rows are sent in two levels
    crossing_tokens: int = 0
    inside_bytes: int = 0  # sent to ranks of the same node
    between_bytes: int = 0  # sent to other nodes
    load: int = 0  # part of ``received`` in the last routing
    loads: list[int] = field(default_factory=list)  # of all ranks, in the last routing but one
    # ``received`` by expert of this rank
    expert_tokens: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)  # ``expert_tokens`` when copies were last made

    @property
    def tokens_here(self) -> list[int]:
        """Values of ``expert_tokens``, zeros before the first routing."""
        return self.expert_tokens or [0] * len(self.experts)

    @property
    def since(self) -> np.ndarray:
        """Increase of ``expert_tokens`` since copies were last made."""
        found: np.ndarray = np.array(self.tokens_here, np.int64) - np.array(self.before or 0)
        return found

    def copied(self, experts: np.ndarray) -> None:
        """Count for new copies from now on."""
        known = dict(zip(self.experts.tolist(), self.tokens_here, strict=True))
        tokens = [known.get(e, 0) for e in experts.tolist()]
        self.experts, self.expert_tokens, self.before = experts, tokens, list(tokens)

    @property
    def imbalance(self) -> float:
        """Choices of the rank with the most, relative to the mean, in the last routing but one; 1
        is even."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    @property
    def duplicated(self) -> int:
        """Number of tokens' copies that did not have to cross."""
        return self.crossing_choices - self.crossing_tokens

    def routed(
        self,
        asked: np.ndarray,
        wanted: np.ndarray,
        routes: TokenRoutes,
        rows: ExpertRows,
        placement: Placement,
        carrier: Carrier,
    ) -> None:
        """Count a routing of ``asked``, reduced to ``wanted`` by a capacity."""
        self.routings += 1
        self.tokens += len(wanted)
        self.choices += int((wanted >= 0).sum())
        self.dropped += int(((asked >= 0) & (wanted < 0)).sum())
        self.load = int(rows.counts.sum())
        self.received += self.load
        self.padded += int(rows.starts[-1]) - self.load
        home = np.array([carrier.nodes.home[r] for r in range(placement.size)] + [-1])
        nodes = home[placement.owner[wanted]]
        self.crossing_choices += int(((nodes >= 0) & (nodes != home[carrier.transport.rank])).sum())
        self.crossing_tokens += routes.crossing
        self.loads = routes.said[:, 0].tolist()
        self.expert_tokens = (np.array(self.tokens_here) + rows.counts).tolist()
        self.bytes_of(carrier)

    def bytes_of(self, carrier: Carrier) -> None:
        self.inside_bytes, self.between_bytes = carrier.inside_bytes, carrier.between_bytes

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "experts": self.experts.tolist(),
            "imbalance": self.imbalance,
            "duplicated": self.duplicated,
        }
