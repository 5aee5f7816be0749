"""What an optimizer sent, in numbers a user can read."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class OptimizerCounters:
    """Totals of one rank. Bytes are those this rank sent, headers included."""

    steps: int = 0
    exact_rounds: int = 0
    compressed_rounds: int = 0
    local_steps: int = 0
    skipped_steps: int = 0
    ignored_gradients: int = 0  # not finite, in a step without communication
    woken_tensors: int = 0  # whose variance was frozen too early (``optim.lanes``)
    exact_bytes: int = 0
    compressed_bytes: int = 0
    local_bytes: int = 0  # zero, or something is wrong
    logical_bytes: int = 0  # what float32 ring all-reduces of every step's gradients would have sent

    def step(self, kind: str, taken: bool, sent_bytes: int, numel: int, ranks: int) -> None:
        self.steps += taken
        self.skipped_steps += not taken
        self.exact_rounds += kind == "exact"
        self.compressed_rounds += kind == "compressed"
        self.local_steps += kind == "local"
        name = f"{kind}_bytes"
        setattr(self, name, getattr(self, name) + sent_bytes)
        self.logical_bytes += 8 * (ranks - 1) * numel // ranks

    @property
    def wire_bytes(self) -> int:
        return self.exact_bytes + self.compressed_bytes + self.local_bytes

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than float32 all-reduces."""
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "wire_bytes": self.wire_bytes, "ratio": self.ratio}

    def summary(self) -> str:
        return (
            f"{self.steps} steps: {self.exact_rounds} exact rounds, {self.compressed_rounds} compressed, "
            f"{self.local_steps} without communication; {self.wire_bytes / 1e6:.3f} MB sent instead of "
            f"{self.logical_bytes / 1e6:.3f} ({self.ratio:.1f} times fewer)"
        )
