"""Counters of what optimizers and local updates sent, for users to read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from commpress.collectives.buckets import Share
from commpress.totals import Totals


@dataclass
class OptimizerCounters(Totals):
    """Totals of one rank. Bytes are those this rank sent, headers included."""

    derived = ("wire_bytes", "ratio", "bits")
    steps: int = 0
    exact_rounds: int = 0
    compressed_rounds: int = 0
    local_steps: int = 0
    skipped_steps: int = 0
    ignored_gradients: int = 0  # not finite in a step without communication
    woken_tensors: int = 0  # whose variance was frozen too early (``optim.tensor_states``)
    # ranks that died with their residuals; ranks that handed them over are not counted
    lost_ranks: int = 0
    exact_bytes: int = 0
    compressed_bytes: int = 0
    local_bytes: int = 0  # always zero unless something is wrong
    # what float32 ring all-reduces of every step's gradients would have sent
    logical_bytes: int = 0
    round_bytes: int = 0  # bytes of one such all-reduce
    # cost of each parameter in a compressed round, by name
    shares: Mapping[str, Share] = field(default_factory=dict)

    def step(self, kind: str, taken: bool, sent_bytes: int, numel: int, ranks: int) -> None:
        self.steps += taken
        self.skipped_steps += not taken
        self.exact_rounds += kind == "exact"
        self.compressed_rounds += kind == "compressed"
        self.local_steps += kind == "local"
        name = f"{kind}_bytes"
        setattr(self, name, getattr(self, name) + sent_bytes)
        self.round_bytes = 8 * (ranks - 1) * numel // ranks
        self.logical_bytes += self.round_bytes

    @property
    def wire_bytes(self) -> int:
        return self.exact_bytes + self.compressed_bytes + self.local_bytes

    @property
    def ratio(self) -> float:
        """Bytes of float32 all-reduces over bytes sent."""
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def bits(self) -> float:
        """Per parameter in a compressed round, each way, headers included: float32 has 32. 0.0
        before the first one."""
        logical = self.round_bytes * self.compressed_rounds
        return 32 * self.compressed_bytes / logical if logical else 0.0

    def by_codec(self) -> dict[str, tuple[list[str], int, float]]:
        """Return, by codec, its parameters, their elements and bits per element; most bits
        first."""
        found: dict[str, tuple[list[str], int, float]] = {}
        for name, (numel, codec, bits) in self.shares.items():
            names, elements, sent = found.get(codec, ([], 0, 0.0))
            found[codec] = ([*names, name], elements + numel, sent + bits * numel)
        mean = {codec: (names, n, sent / max(n, 1)) for codec, (names, n, sent) in found.items()}
        return dict(sorted(mean.items(), key=lambda item: -item[1][1] * item[1][2]))

    def summary(self) -> str:
        return (
            f"{self.steps} steps: {self.exact_rounds} exact rounds, {self.compressed_rounds} "
            f"compressed, {self.local_steps} without communication; {self.wire_bytes / 1e6:.3f} MB "
            f"sent instead of {self.logical_bytes / 1e6:.3f} ({self.ratio:.1f} times "
            f"fewer){self._of_a_round()}"
        )

    def _of_a_round(self) -> str:
        if not self.bits:
            return ""
        every = max(sum(share.numel for share in self.shares.values()), 1)
        groups = [
            f"{bits:.2f} for {100 * numel / every:.0f} % of them ({codec}: {', '.join(names[:3])}"
            + (f" and {len(names) - 3} more)" if len(names) > 3 else ")")
            for codec, (names, numel, bits) in self.by_codec().items()
        ]
        return (
            f"; a compressed round sends {self.bits:.2f} bits per parameter"
            + ": " * bool(groups)
            + ", ".join(groups)
        )


@dataclass
class LocalCounters:
    """Totals of one rank. Bytes are those it sent, headers included.

    An exchange is empty if no rank had trained since the last one, as at the end of ``drain``:
    headers only. ``spread`` is None with a codec coarser than int4: its errors would be taken for
    spread.
    """

    steps: int = 0
    rounds: int = 0  # of all fragments; empty ones do not count
    exchanges: int = 0  # of one fragment each
    sent_bytes: int = 0  # total: warm-up, exchanges, and means for checkpoints or the end
    change_bytes: int = 0  # part of them sent in exchanges that were not empty
    changed: int = 0  # parameters exchanged: those of a fragment in each exchange
    waited: float = 0.0  # seconds in which training stood still for an exchange
    # exchanges, or steps of the warm-up, in which some rank was not finite and was left out
    dropped: int = 0
    # states of inner optimizers, a parameter's each, that were not finite and started anew
    restarts: int = 0
    # root mean square over the ranks of ‖Δᵢ − Δ̄‖, relative to ‖Δ̄‖, of the last exchange of moves
    spread: float | None = None
    # ranks that died with their residuals and their training since the last exchange
    lost_ranks: int = 0
    every: int = 0  # steps of the round under way; 0: it ends after so many seconds
    overlap: int = 0  # steps of the round that are computed during an exchange
    participants: int = 0  # ranks with a weight above zero in it

    @property
    def bits(self) -> float:
        """Bits sent per parameter and round, without warm-up and empty exchanges: float32 has 32.
        0.0 before the first exchange."""
        return 8 * self.change_bytes / self.changed if self.changed else 0.0

    def _length(self) -> str:
        if not self.every:
            return ""
        return f", now of {self.every} steps" + (
            f", {self.overlap} of them beside an exchange" if self.overlap else ""
        )

    def summary(self, *, spread_of: str) -> str:
        """``spread_of``: what the ranks' spread is relative to."""
        spread = (
            "" if self.spread is None else f"last spread {self.spread:.2g} of {spread_of} over "
        )
        restarts = f", {self.restarts} inner states started anew" if self.restarts else ""
        crossed = (
            f"{self.sent_bytes / 1e6:.1f} MB sent ({self.bits:.2f} bits per parameter and round)"
        )
        return (
            f"{self.steps} steps, {self.rounds} rounds{self._length()}, {crossed}, waited "
            f"{self.waited:.1f} s, {spread}"
            f"{self.participants} ranks, {self.dropped} exchanges with a change left out{restarts}"
        )
