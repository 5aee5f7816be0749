"""Lines about a step of a streamed model, which may take minutes, while it runs."""

import sys
import threading
from collections.abc import Callable
from time import monotonic


def to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


class StreamProgress:
    """Shows at most one line in ``every`` seconds; with None nothing.

    A line names the step, counted from this object's first one, its part (first values, forward,
    backward, update), the block and how many blocks that part has reached, and the step's seconds.
    """

    def __init__(
        self,
        every: float | None,
        blocks: int,
        *,
        show: Callable[[str], None] = to_stderr,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.every, self.blocks, self._show, self._clock = every, blocks, show, clock
        self._step, self._began, self._shown = 0, clock(), clock()
        self._reached: dict[str, set[str]] = {}
        self._lock = threading.Lock()  # updates run in another thread

    def reach(self, part: str, block: str) -> None:
        """Record that a part of the step has come to a block."""
        if self.every is None:
            return
        with self._lock:
            reached, now = self._reached.setdefault(part, set()), self._clock()
            reached.add(block)
            if now - self._shown < self.every:
                return
            self._shown = now
            line = (
                f"step {self._step}: {part}, {block} ({len(reached)} of {self.blocks} blocks), "
                f"{now - self._began:.0f} s"
            )
        self._show(line)

    def end_step(self) -> None:
        if self.every is not None:
            with self._lock:
                self._step, self._began = self._step + 1, self._clock()
                self._reached.clear()
