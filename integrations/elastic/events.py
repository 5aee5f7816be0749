"""Events of an elastic run, and totals of them.

Each event is a JSON line in the file named by COMMPRESS_EVENTS, written in one call, so that a
killed process leaves no partial line. The benchmark ``chaos`` reads them.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commpress.totals import Totals


@dataclass
class ElasticCounters(Totals):
    """Totals of one rank since its loop began."""

    derived = ("participation", "goodput")
    steps: int = 0  # committed here
    samples: int = 0  # read by this rank in these steps
    ranks: int = 0  # sum of the ranks in these steps
    faults: int = 0  # times that ranks were lost
    reforms: int = 0
    lost: int = 0  # ranks
    joined: int = 0  # ranks
    left: int = 0  # ranks that left on purpose, after handing over residuals
    healed: int = 0  # times that this rank was healed
    healed_bytes: int = 0  # received for that
    given_bytes: int = 0  # sent to heal others
    snapshots: int = 0
    failed_snapshots: int = 0
    # committed but undone, because a sharded model returned to a snapshot
    undone_steps: int = 0
    seconds: float = 0.0  # since the loop began
    step_seconds: float = 0.0  # in committed steps
    pause_seconds: float = 0.0  # from faults until the loop continued
    snapshot_seconds: float = 0.0
    most_ranks: int = 0

    @property
    def participation(self) -> float:
        """Ranks in committed steps, relative to the most ranks so far."""
        return self.ranks / (self.steps * self.most_ranks) if self.steps else 1.0

    @property
    def goodput(self) -> float:
        """Share of the time outside of pauses and failed steps."""
        return 1 - self.pause_seconds / self.seconds if self.seconds else 1.0

    def summary(self) -> str:
        return (
            f"{self.steps} steps committed here, by {100 * self.participation:.1f} % of all ranks; "
            f"{100 * self.goodput:.1f} % of the time went into steps; {self.faults} faults, "
            f"{self.lost} ranks lost, {self.joined} joined, paused for {self.pause_seconds:.1f} s"
        )


class Events:
    """Write JSON lines to a file, or nowhere if no file is given."""

    def __init__(self, path: str | Path | None = None) -> None:
        path = path or os.environ.get("COMMPRESS_EVENTS") or None
        self._file = (
            None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        )

    @property
    def wanted(self) -> bool:
        return self._file is not None

    def write(
        self,
        kind: str,
        step: int,
        place: tuple[int, int, int],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Write an event. ``place``: rank, size and epoch."""
        if self._file is not None:
            head = {
                "time": time.time(),
                "clock": time.monotonic(),
                "pid": os.getpid(),
                "kind": kind,
                "step": step,
            }
            named = dict(zip(("rank", "size", "epoch"), place, strict=True))
            os.write(self._file, (json.dumps(head | named | dict(more or {})) + "\n").encode())

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
