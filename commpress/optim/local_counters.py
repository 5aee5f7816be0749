"""Counters of local updates: what a rank has exchanged, in numbers a user can read."""

from dataclasses import dataclass


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
    sent_bytes: int = 0  # all of them: warm-up, exchanges, means that a state or the end takes
    change_bytes: int = 0  # of these, in exchanges that were not empty
    changed: int = 0  # parameters that crossed in them: a fragment's at each
    waited: float = 0.0  # seconds in which training stood still for an exchange
    # exchanges, or steps of the warm-up, in which some rank was not finite and was left out
    dropped: int = 0
    # states of inner optimizers, a parameter's each, that were not finite and started anew
    restarts: int = 0
    # root mean square over the ranks of ‖Δᵢ − Δ̄‖, relative to ‖Δ̄‖, of the last exchange of moves
    spread: float | None = None
    # that died, and with each what it owed and had trained since its last exchange
    lost_ranks: int = 0
    every: int = 0  # steps of the round under way; 0: it ends after so many seconds
    overlap: int = 0  # of these, steps that are computed while an exchange is under way
    participants: int = 0  # ranks whose weight in it was above zero

    @property
    def bits(self) -> float:
        """Sent per parameter and round, warm-up and empty exchanges apart: float32 has 32. 0.0
        before the first exchange."""
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
